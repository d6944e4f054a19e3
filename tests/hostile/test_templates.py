"""Chat templates of strangers: they end, take little memory, and reach nothing but their rows."""

from __future__ import annotations

import cProfile
import datetime
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import LONG, attack, tried
from tests.supervised.families import FAMILIES, write_family
from tests.supervised.shaping import Press, chat

import tokenmill
from tokenmill.errors import TokenizerError, TooManyRejectsError, UsageError
from tokenmill.supervised import sandbox
from tokenmill.supervised.rows import Conversation, RowError
from tokenmill.supervised.sandbox import ChatTemplate

if TYPE_CHECKING:
    from pathlib import Path

MESSAGES = [
    {"role": "user", "content": "hi there\nfriend"},
    {"role": "assistant", "content": "yes"},
]
_TWICE = "{{% set n=namespace(a={0}) %}}{{% for i in range(60) %}}{{% set n.a={1} %}}{{% endfor %}}"
_NESTED = (
    "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{0}{{% endfor %}}{{% endfor %}}"
)

LARGE = {
    "times": "{{ 'x' * 10**9 }}",
    "times, the other way": "{{ 1000000000 * 'x' }}",
    "power": "{{ 10**(10**8) }}",
    "squares": _TWICE.format("3", "n.a*n.a"),
    "list times": "{{ ([1]*10**9)|length }}",
    "tuple times": "{{ ((1,2)*10**9)|length }}",
    "percent": "{{ '%1000000000d' % 3 }}",
    "percent and star": "{{ '%*d' % (1000000000, 3) }}",
    "percent by name": "{{ ('%(a)s'*9999) % {'a': 'x'*99999} }}",
    "format": "{{ '{:>1000000000}'.format('x') }}",
    "format in format": "{{ '{:>{}}'.format('x', 1000000000) }}",
    "format often": "{{ ('{0}'*9999).format('x'*99999) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a':1}) }}",
    "filter format": "{{ '%1000000000d'|format(3) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "rjust by attr": "{{ ('x'|attr('rjust'))(1000000000) }}",
    "center by item": "{{ 'x'['center'](1000000000) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t\\t'.expandtabs(10**9) }}",
    "filter center": "{{ 'x'|center(1000000000) }}",
    "filter block": "{% filter center(1000000000) %}x{% endfilter %}",
    "filter by map": "{{ ['x']|map('center', 1000000000)|list }}",
    "filters by map": "{{ range(99999)|map('center', 100000)|join }}",
    "markup": "{{ ('x'|safe).ljust(1000000000) }}",
    "markup times": "{{ ('x'|safe) * 1000000000 }}",
    "markup percent": "{{ ('%1000000000d'|safe) % 3 }}",
    "indent": "{{ 'a\\nb'|indent(1000000000) }}",
    "indent by lines": "{{ ('\\n'*99999)|indent(99999) }}",
    "replace": "{{ ('x'*10000).replace('x', 'y'*10000) }}",
    "replace nothing": "{{ ('x'*99999).replace('', 'y'*99999) }}",
    "filter replace": "{{ ('x'*10000)|replace('x', 'y'*10000) }}",
    "join": "{{ ('x'*99999).join(range(99999)|map('string')) }}",
    "filter join": "{{ range(99999)|join('x'*99999) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "slice": "{{ [1]|slice(10**9, 'x')|list|length }}",
    "round": "{{ 2.5|round(10**9, 'ceil') }}",
    "tojson indent": "{{ [[1,[2]]]|tojson(indent=10**9) }}",
    "tojson separators": "{{ range(99999)|list|tojson(separators=('x'*99999, 'y')) }}",
    "sum of lists": "{{ [[1],[2]]|sum(start=[]) }}",
    "tildes": "{% set a='x'*1000000 %}{{ " + "~".join(["a"] * 2000) + " }}",
    "pluses": "{% set a='x'*1000000 %}{{ " + "+".join(["a"] * 99) + " }}",
    "twice by tilde": _TWICE.format("'x'", "n.a~n.a"),
    "twice by plus": _TWICE.format("'x'", "n.a+n.a"),
    "list twice": _TWICE.format("[1]", "n.a+n.a"),
    "list of itself": _TWICE.format("[1]", "[n.a,n.a]") + "{{ n.a }}",
    "object of itself": _TWICE.format("{}", "{'a':n.a,'b':n.a}") + "{{ n.a|tojson }}",
    "tuple of itself": _TWICE.format("(1,)", "(n.a,n.a)") + "{{ n.a == (n.a,) }}",
    "dict of itself": _TWICE.format("dict()", "dict(a=n.a,b=n.a)") + "{{ n.a }}",
    "list of characters": "{{ ('\u20ac'*15000000)|list|length }}",
    "split": "{{ ('\u20ac '*8000000).split()|length }}",
    "slices in macros": "{% macro f(s) %}{% set t=s[1:] %}{{ f(t) }}{% endmacro %}"
    "{{ f('x'*9999999) }}",
    "joiner": "{% set j=joiner('x'*1000000) %}{% for a in range(9999) %}{{ j() }}{% endfor %}",
    "cycler": "{% set c=cycler('x'*1000000) %}{% for a in range(9999) %}{{ c.next() }}{% endfor %}",
    "output": _NESTED.format("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"),
    "set block": "{% set x %}" + _NESTED.format("x" * 99) + "{% endset %}{{ x|length }}",
    "date": "{{ strftime_now('%999999999d') }}",
}
LONG_RUNNING = {
    "loops": _NESTED.format("{% for k in range(99999) %}{% endfor %}"),
    "a range": "{% for i in range(10**9) %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "endless macros": "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
    "endless loop": "{% for a in range(3) recursive %}{{ loop(range(3)) }}{% endfor %}",
    "endless block": "{% block b %}{{ self.b() }}{% endblock %}",
    "calls": "{% macro f() %}{{ caller() }}{% endmacro %}"
    + _NESTED.format("{% call f() %}x{% endcall %}"),
    "macro's loops": "{% macro f() %}"
    + _NESTED.format("{{ messages[0].content }}")
    + "{% endmacro %}{{ f() }}",
    "search": "{% set a='x'*4000000 %}" + _NESTED.format("{% if 'y' in a %}{% endif %}"),
    "comparison": "{% set a='x'*4000000 %}{% set b='x'~a[1:] %}"
    + _NESTED.format("{% if a == b %}{% endif %}"),
    "tests": _NESTED.format("{% if 1 is in([2]) %}{% endif %}"),
    "filters of filters": "{% set n=namespace(a=range(10)) %}{% for i in range(5000) %}"
    "{% set n.a=n.a|map('string') %}{% endfor %}{{ n.a|list }}",
    "a loop that costs nothing": "{{ [[1]]|map(' loop', -10**9)|list }}"
    + _NESTED.format("{{ messages[0].content }}"),
    "namespaces of namespaces": "{% set a=namespace(x=1) %}{% set b=namespace(x=a,y=a) %}{{ b }}",
}
# Ways out of a sandbox, as they are known.
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla'~'ss__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map(attribute='items.__self__.__class__')|list }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ messages|groupby('__class__') }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "{{ ['{0.__class__}']|map(attribute='format')|first }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ('{0.__class__}'|safe).format(1) }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.__mro__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__closure__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ environment.filters }}",
    "{{ tokenmill_tracker }}",
    "{{ range.__class__ }}",
    "{{ dict.__base__ }}",
    "{{ dict.mro() }}",
    "{{ (1).__class__ }}",
    "{{ (1).to_bytes(1, 'big') }}",
    "{{ 'x'.encode() }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m._func.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "{% for m in messages %}{{ loop.__class__ }}{{ loop._iterator }}{% endfor %}",
    "{{ (messages|map('upper')).gi_frame }}",
    "{{ (messages|map('upper'))._sandbox }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{{ messages.sort() }}",
    "{{ messages|attr('append') }}",
    "{{ messages|indent }}",
    "{% set messages[0].role = 'x' %}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
    "{{ [1,2]|random }}",
    "{{ ''|xmlattr }}",
    "{% debug %}",
    "{% do messages.append(1) %}",
]


def outcome(source: str, messages: Any = None) -> str:
    """The text that a template makes, or the reason why there is none."""
    try:
        template = ChatTemplate(source, variables={}, date=datetime.date(2024, 7, 26))
        return "text: " + template.render(Conversation(messages or MESSAGES, None))
    except (RowError, TokenizerError) as error:
        detail = getattr(error, "detail", str(error))
        return f"refused: {detail}"


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, sooner reached, so that the attacks take seconds."""
    if not LONG:
        monkeypatch.setattr(sandbox, "STEPS", 1 << 19)


@pytest.mark.parametrize("kind", LONG_RUNNING)
@pytest.mark.usefixtures("few_steps")
def test_a_template_without_end_is_ended_by_a_limit(kind: str) -> None:
    found = outcome(LONG_RUNNING[kind])
    words = ("more than", "Range too big", "is no text", "a loop costs")
    assert found.startswith("refused"), found
    assert any(each in found for each in words), found
    tried("chat template without end")


@pytest.mark.parametrize("kind", ["next", "index", "length"])
def test_a_chat_of_many_answers_is_not_rendered_for_each_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where a template looks ahead; the others are rendered once more, however long the chat is."""
    ahead = {
        "next": "{% if loop.nextitem %}{% endif %}",
        "index": "{% if messages[-1] == m %}{% endif %}",
        "length": "{% if loop.index == messages | length %}{% endif %}",
    }
    text = "{%% for m in messages %%}{{ m.role }}: {{ m.content }}%s;{%% endfor %%}"
    text += "{%% if add_generation_prompt %%}assistant: {%% endif %%}"
    monkeypatch.setattr("tokenmill.supervised.chat.STEPS_TOGETHER", 1 << 16)
    for name, between, most in (("forward", "", 3_000), ("ahead", ahead[kind], 40)):
        path = tmp_path / f"{name}.jinja"
        path.write_text(text % between)
        press = Press("bytes", chat_template=path)
        assert not press(chat(*["a"] * most)).rejects
    found = press(chat(*["a"] * 400)).rejects
    assert [str(each.reason) for each in found] == ["template-error"]
    assert "to find 200 answers takes over 65,536 steps" in found[0].detail
    assert found[0].detail.endswith("use --train-on last")
    assert not Press("bytes", chat_template=path, train_on="last")(chat(*["a"] * 400)).rejects
    tried("chat of many answers")


def test_a_chat_takes_steps_as_it_has_messages(tmp_path: Path) -> None:
    """Though its template writes no special token, so that all of it is one text."""
    path = tmp_path / "plain.jinja"
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    path.write_text(text + "{% if add_generation_prompt %}assistant: {% endif %}")
    press, steps = Press("bytes", chat_template=path), []
    for count in (10, 300, 600):
        profile = cProfile.Profile()
        assert not profile.runcall(press, chat(*["a"] * count)).rejects
        steps.append(sum(entry.callcount for entry in profile.getstats()))
    assert steps[2] < 2.2 * steps[1]
    tried("chat of many answers", 3)


def test_templates_that_make_much_take_little_memory() -> None:
    """All in one process that may take 600 MB in all."""
    code = (
        "import json, sys; from tests.hostile.test_templates import LARGE, outcome\n"
        "print(json.dumps({kind: outcome(source) for kind, source in LARGE.items()}))"
    )
    limits = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (600 << 20, 600 << 20))\n"
    done = subprocess.run(
        [sys.executable, "-c", limits + code],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = json.loads(done.stdout)
    words = ("more than", " wide", "adds up numbers", "with a width")
    assert {kind: text for kind, text in found.items() if not any(w in text for w in words)} == {}
    assert all(text.startswith("refused") for text in found.values())
    tried("chat template that makes too much", len(found))


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    messages = json.loads(json.dumps(MESSAGES))
    found = outcome(source, messages)
    assert messages == MESSAGES
    if found.startswith("text: "):
        assert not any(word in found for word in ("<class", "<module", "root:", "uid=", "b'"))
        assert "object at 0x" not in found or "generator" in found or "_Counted" in found
    tried("chat template that tries to get out")


_ATOMS = st.sampled_from(
    ["'x'", "'ab\\n'", "messages", "messages[0].content", "7", "99999", "10**9", "[1, 'a']",
     "range(9999)", "{'a': 1}", "none", "n.a", "'%9s{:9}'", "messages[0]", "true", "-1"]
)  # fmt: skip
_METHODS = ["ljust", "center", "zfill", "replace", "join", "split", "format", "upper", "strip",
            "expandtabs", "items", "get", "index", "count", "partition", "splitlines"]  # fmt: skip
_FILTERS = ["center", "indent", "join", "list", "tojson", "replace", "batch", "slice", "string",
            "map", "sum", "sort", "unique", "length", "round", "format", "trim", "upper", "first",
            "reverse", "title", "truncate", "wordcount", "urlencode", "int", "items"]  # fmt: skip


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arguments = st.lists(inner, max_size=2).map(", ".join)
    return st.one_of(
        st.tuples(inner, st.sampled_from(["+", "*", "**", "%", "~", "-", "//", "in", "=="]), inner)
        .map(lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"),
        st.tuples(inner, st.sampled_from(_METHODS), arguments)
        .map(lambda parts: f"({parts[0]}).{parts[1]}({parts[2]})"),
        st.tuples(inner, st.sampled_from(_FILTERS), arguments)
        .map(lambda parts: f"({parts[0]})|{parts[1]}({parts[2]})"),
        st.tuples(inner, inner).map(lambda parts: f"[{parts[0]}, {parts[1]}]"),
        st.tuples(inner, inner).map(lambda parts: f"({parts[0]})[{parts[1]}:]"),
    )  # fmt: skip


_EXPRESSIONS = st.recursive(_ATOMS, _larger, max_leaves=8)
_TEMPLATES = st.recursive(
    _EXPRESSIONS.map(lambda each: f"{{{{ {each} }}}}"),
    lambda inner: st.one_of(
        st.tuples(_EXPRESSIONS, inner).map(
            lambda parts: f"{{% for i in {parts[0]} %}}{parts[1]}{{% endfor %}}"
        ),
        st.tuples(_EXPRESSIONS, inner).map(
            lambda parts: (
                f"{{% for i in range(40) %}}{{% set n.a = {parts[0]} %}}{{% endfor %}}" + parts[1]
            )
        ),
        st.tuples(_EXPRESSIONS, inner, inner).map(
            lambda parts: f"{{% if {parts[0]} %}}{parts[1]}{{% else %}}{parts[2]}{{% endif %}}"
        ),
        inner.map(lambda each: f"{{% set x %}}{each}{{% endset %}}{{{{ x }}}}"),
        inner.map(lambda each: f"{{% macro f() %}}{each}{{% endmacro %}}{{{{ f() ~ f() }}}}"),
    ),
    max_leaves=5,
)


@attack(short=60, long=3000, parts=2)
@given(_TEMPLATES)
@pytest.mark.usefixtures("few_steps")
def test_any_template_gives_a_text_within_its_limit_or_a_reason(source: str) -> None:
    messages = json.loads(json.dumps(MESSAGES))
    found = outcome("{% set n = namespace(a='y') %}" + source, messages)
    assert messages == MESSAGES
    assert len(found) <= sandbox.SIZES + 32 * 1000
    assert "MemoryError" not in found
    tried("chat template made at random")


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{{ messages" + "[0]" * 5000 + " }}",
        "{{ messages" + "|first" * 5000 + " }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "{% for i in messages %}" * 40 + "{% endfor %}" * 40,
        "{% macro f() %}" * 300 + "{% endmacro %}" * 300,
        "{{ " + "+".join(["messages[0].content"] * 5000) + " }}",
        "{{ " + "~".join(["1"] * 50000) + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ 1e999999999 }}",
        "x" * (2 << 20),
        "{{ '\\ud800' }}",
        "{% for %}",
        "{{",
        "\0{{ messages }}\0",
    ],
    ids=lambda source: f"{source[:24]}... {len(source)}",
)
def test_a_template_that_is_too_deep_or_broken_is_a_sentence_about_the_template(
    source: str,
) -> None:
    try:
        template = ChatTemplate(source, variables={})
        template.render(Conversation(MESSAGES, None))
    except TokenizerError as error:
        assert "the chat template" in error.message  # noqa: PT017
        assert "--chat-template" in str(error.hint)  # noqa: PT017
    except RowError:
        pass
    tried("chat template that is broken or too deep")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["a few words to learn merges from, hi there friend yes " * 40]
    return write_family(FAMILIES["chatml"], tmp_path_factory.mktemp("t") / "chatml", texts)


def nested(depth: int, *, by: str = "list") -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if by == "list" else {"a": value}
    return value


@pytest.mark.parametrize("depth", [99, 150, 400, 900])
@pytest.mark.parametrize("by", ["list", "object"])
@pytest.mark.parametrize("field", ["tools", "message", "messages as text", "variables"])
def test_rows_that_are_nested_too_deep_are_rejected_wherever_python_would_give_up(
    tokenizer: Path, depth: int, by: str, field: str
) -> None:
    row = chat("a|b", "c")
    deep = nested(depth, by=by)
    if field == "tools":
        row["tools"] = [deep]
    elif field == "message":
        row["messages"][1]["tool_calls"] = [deep]
    elif field == "variables":
        row["chat_template_kwargs"] = {"x": deep}
    else:
        row["messages"][0]["x"] = deep
        row["messages"] = json.dumps(row["messages"])
    found = Press(tokenizer)(row)
    is_too_deep = depth > 99 or field in ("message", "messages as text", "tools", "variables")
    assert [reject.reason for reject in found.rejects] == ["invalid-json"] * is_too_deep
    if found.rejects:
        assert "nested more than 100 deep" in found.rejects[0].detail
    fine = Press(tokenizer)(chat("a|b", "c") | {"tools": [nested(90, by=by)]})
    assert fine.rejects == []
    tried("chat that is nested too deep")


def test_a_build_rejects_rows_that_reach_a_limit_and_says_which(
    tokenizer: Path, tmp_path: Path
) -> None:
    rows = [chat(f"say {n}", "b" * 6_000_000 if n == 7 else "b") for n in range(9)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content * (500 if m.content == 'say 3' else 1) ~ '' }}"
        "{{ 'x' * (10**9 if m.content == 'say 5' else 1) }}<|im_end|>{% endfor %}"
    )
    said: dict[str, Any] = {"format": "chat", "chat_template": template, "train_on": "all"}
    with pytest.raises(TooManyRejectsError, match=r"more than 16,777,216 characters"):
        tokenmill.build(
            tmp_path / "chats.jsonl", tokenizer=tokenizer, out=tmp_path / "s", serial=True, **said
        )
    result = tokenmill.build(
        tmp_path / "chats.jsonl",
        tokenizer=tokenizer,
        out=tmp_path / "s",
        serial=True,
        max_rejects=0.5,
        **said,
    )
    # The longest row is far beyond the limit of a short one, and is fine.
    assert (result.totals.documents, result.totals.rejected) == (8, 1)


@pytest.mark.parametrize(
    "config",
    ["{", '{"chat_template": [{"name": [], "template": 3}]}', '{"chat_template": 3}'],
    ids=["cut", "odd", "number"],
)
def test_a_config_that_is_none_is_a_sentence(tokenizer: Path, tmp_path: Path, config: str) -> None:
    for path in tokenizer.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError):
        Press(tmp_path)
    tried("chat template that is broken or too deep")


def test_variables_that_are_nested_too_deep_are_a_sentence(tokenizer: Path) -> None:
    with pytest.raises(UsageError, match="chat_template_kwargs"):
        Press(tokenizer, chat_template_kwargs='{"a": ' + "[" * 99999 + "]" * 99999 + "}")
