"""Conversations: their forms, what counts of them, and why some are rejected."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.supervised.families import CHATML, FAMILIES
from tests.supervised.shaping import Press, chat

from tokenmill.errors import MissingExtraError, TokenizerError, UsageError
from tokenmill.options import RowShape
from tokenmill.supervised.chat import doubtful_header
from tokenmill.supervised.rows import Conversation
from tokenmill.supervised.sandbox import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Folder = Callable[[str], Path]


def test_sharegpt_is_the_same_conversation(family_dir: Folder) -> None:
    press = Press(family_dir("chatml"))
    row = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"},
        ],
        "system": "be kind",
    }
    found = press(row, chat("hi", "hello", system="be kind"))
    assert found.rejects == []
    assert found.ids[0] == found.ids[1]
    assert found.masks[0] == found.masks[1]


def test_a_conversation_may_be_the_text_of_one_in_any_field(family_dir: Folder) -> None:
    press = Press(family_dir("chatml"), messages_field="data.talk")
    talk = '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]'
    found = press({"data": {"talk": talk}})
    assert found.texts == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{", "invalid-json"),
        (b"[1]", "not-an-object"),
        ({"text": "x"}, "missing-field"),
        ({"messages": []}, "bad-conversation"),
        ({"messages": "nonsense"}, "bad-conversation"),
        ({"messages": {"role": "user"}}, "bad-conversation"),
        ({"messages": [1]}, "bad-conversation"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad-conversation"),
        (
            {"messages": [{"role": "user"}, {"role": "assistant", "content": ""}]},
            "bad-conversation",
        ),
        (chat("only a question"), "no-assistant-turn"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown-role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown-role"),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, "unknown-role"),
        (
            b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
            "lone-surrogate",
        ),
        (chat("x", "y") | {"tools": 5}, "bad-conversation"),
    ],
)
def test_a_bad_conversation_is_a_rejected_row_and_leaves_its_neighbours_alone(
    row: object, reason: str, family_dir: Folder
) -> None:
    good = chat("hi", "hello")
    found = Press(family_dir("chatml"))(good, row, good)
    assert [(reject.row, str(reject.reason)) for reject in found.rejects] == [(1, reason)]
    assert len(found.ids) == 2
    assert found.ids[0] == found.ids[1]


def test_a_template_may_refuse_a_conversation(family_dir: Folder) -> None:
    messages = [{"role": "assistant", "content": "I begin"}, {"role": "user", "content": "no"}]
    found = Press(family_dir("mistral-v1"))({"messages": messages})
    assert [str(reject.reason) for reject in found.rejects] == ["template-error"]
    assert "roles must take turns" in found.rejects[0].detail


def test_a_template_that_fails_on_a_message_without_content_is_told_which(
    family_dir: Folder, tmp_path: Path
) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{% for m in messages %}{{ '<' in m.content }}{% endfor %}" + CHATML)
    talk = chat("a", "b", "c", "d")
    talk["messages"][1]["content"] = None
    found = Press(family_dir("chatml"), chat_template=template)(talk)
    assert "message 1 has no content (null)" in found.rejects[0].detail


def test_macros_and_blocks_inside_of_loops_are_what_they_are_elsewhere(
    family_dir: Folder, tmp_path: Path
) -> None:
    template = tmp_path / "macro.jinja"
    template.write_text(
        "{% macro turn(m) %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
        "{% generation %}{% for word in m.content.split() %}{{ word }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ turn(m) }}{% endif %}{% endfor %}"
    )
    press = Press(family_dir("chatml"), chat_template=template)
    found = press(chat("why", "be cause", "and", "so"))
    assert found.rejects == []
    assert found.texts == [
        (
            "<|im_start|>user\nwhy<|im_start|>assistant\nbecause<|im_end|>"
            "<|im_start|>user\nand<|im_start|>assistant\nso<|im_end|>"
        )
    ]
    assert press.said(found) == "because<|im_end|>so<|im_end|>"


_LOSING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('!')[-1] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_answers_that_change_when_more_is_said_are_rejected_unless_only_the_last_counts(
    family_dir: Folder, tmp_path: Path
) -> None:
    template = tmp_path / "losing.jinja"
    template.write_text(_LOSING)
    row = chat("a", "thought!b", "c", "thought!d")
    found = Press(family_dir("chatml"), chat_template=template)(row)
    assert [str(reject.reason) for reject in found.rejects] == ["not-a-prefix"]
    press = Press(family_dir("chatml"), chat_template=template, train_on="last")
    found = press(row)
    assert press.said(found) == "thought!d<|im_end|>"


def test_a_reject_says_that_reasoning_was_dropped_and_what_to_do(
    family_dir: Folder, tmp_path: Path
) -> None:
    template = tmp_path / "losing.jinja"
    template.write_text(_LOSING)
    found = Press(family_dir("chatml"), chat_template=template)(chat("a", "thought!b", "c", "d"))
    assert "writes message 1 in another way once more is said" in found.rejects[0].detail
    assert found.rejects[0].detail.endswith("use --train-on last")
    whole = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template.write_text(whole + "{% if add_generation_prompt %}>{% endif %}")
    press = Press(family_dir("chatml"), chat_template=template, train_on="last")
    assert press(chat("a", "b")).rejects[0].detail.endswith("template with generation blocks")


# Templates that cannot write the header of an answer by itself.


@pytest.mark.parametrize(
    ("answer", "header"),
    [
        (
            "{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}",
            "<|im_start|>assistant\n",
        ),
        ("{{ 'ASSISTANT: ' + m.content + '<|im_end|>' }}", "ASSISTANT: "),
        ("{{ ' ' + m.content + '<|im_end|>' }}", ""),
        ("{{ m.content + '<|im_end|>' }}", ""),
    ],
)
def test_what_all_answers_begin_with_is_not_what_they_say(
    answer: str, header: str, family_dir: Folder, tmp_path: Path
) -> None:
    template = tmp_path / "bare.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']' }}"
        "{% else %}" + answer + "{% endif %}{% endfor %}"
    )
    press = Press(family_dir("chatml"), chat_template=template)
    found = press(chat("why", "because", "and", "so"))
    said = press.said(found)
    assert "ASSISTANT" not in said.upper()
    assert said.replace(" ", "") == "because<|im_end|>so<|im_end|>"
    doubt = doubtful_header(press.engine.info, RowShape(format="chat"))
    assert doubt is not None
    assert (repr(header) if header else "the message before it") in doubt


def test_a_template_that_tells_answers_needs_no_warning(family_dir: Folder) -> None:
    for name in ("chatml", "chatml-generation"):
        press = Press(family_dir(name))
        assert doubtful_header(press.engine.info, RowShape(format="chat")) is None


# Variables.


_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and "
    "thinking is defined and not thinking %}{{ '<think></think>' }}{% endif %}{{ m.content }}"
    "{{ (mark or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_variables_of_a_build_and_of_a_row_reach_the_template(
    family_dir: Folder, tmp_path: Path
) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(_THINKING)
    options: dict[str, Any] = {"chat_template": template}
    row = chat("a", "b")
    off = row | {"chat_template_kwargs": {"thinking": False}}
    text = row | {"chat_template_kwargs": '{"thinking": false, "mark": "!"}'}
    press = Press(family_dir("chatml"), **options)
    assert ["<think>" in text for text in press(row, off).texts] == [False, True]
    assert press.said(press(text)) == "<think></think>b!<|im_end|>"
    options["chat_template_kwargs"] = '{"thinking": false}'
    on = row | {"chat_template_kwargs": {"thinking": True}}
    found = Press(family_dir("chatml"), **options)(row, on)
    assert ["<think>" in text for text in found.texts] == [True, False]


@pytest.mark.parametrize("value", [5, "no JSON", ["x"], {"messages": []}, {"a b": 1}])
def test_variables_that_are_none_reject_their_row(value: object, family_dir: Folder) -> None:
    found = Press(family_dir("chatml"))(chat("a", "b") | {"chat_template_kwargs": value})
    assert [str(reject.reason) for reject in found.rejects] == ["bad-conversation"]
    if not isinstance(value, str):
        with pytest.raises(UsageError, match="chat_template_kwargs"):
            RowShape(format="chat", chat_template_kwargs=json.dumps(value))


def test_a_special_token_in_a_variable_of_a_row_is_text(family_dir: Folder, tmp_path: Path) -> None:
    template = tmp_path / "mark.jinja"
    template.write_text(_THINKING)
    press = Press(family_dir("chatml"), chat_template=template)
    evil = press(chat("a", "b") | {"chat_template_kwargs": {"mark": "<|im_end|>"}})
    end = press(chat("a", "b")).ids[0][-2]
    assert evil.texts[0].count("<|im_end|>") == 4
    assert evil.ids[0].count(end) == 2


@pytest.mark.parametrize("name", ["chatml", "chatml-generation"])
def test_what_counts_can_be_chosen(name: str, family_dir: Folder) -> None:
    row = chat("one", "two", "three", "four")
    for train_on, said in (
        ("assistant", "two<|im_end|>four<|im_end|>"),
        ("last", "four<|im_end|>"),
    ):
        press = Press(family_dir(name), train_on=train_on)
        assert press.said(press(row)) == said
    press = Press(family_dir(name), train_on="all")
    found = press(row)
    assert set(found.masks[0]) == {1}
    assert press.said(found) == found.texts[0]


def test_prefixes_and_generation_blocks_agree(family_dir: Folder) -> None:
    rows = [chat("a", " b ", "c", "\n\nd\U0001f600"), chat("x", "y", system="z")]
    by_prefix = Press(family_dir("chatml"))(*rows)
    by_blocks = Press(family_dir("chatml-generation"))(*rows)
    assert by_prefix.ids == by_blocks.ids
    assert by_prefix.masks == by_blocks.masks


def test_a_store_never_depends_on_the_day_it_is_made(family_dir: Folder, tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    with pytest.raises(UsageError, match="today's date"):
        Press(family_dir("chatml"), chat_template=template)
    press = Press(family_dir("chatml"), chat_template=template, chat_date="2024-07-26")
    assert press(chat("a", "b")).texts[0].startswith("26 Jul 2024<|im_start|>")
    template.write_text("{{ strftime_now('%Y') if strftime_now is defined else 'once' }}" + CHATML)
    press = Press(family_dir("chatml"), chat_template=template)
    assert press(chat("a", "b")).texts[0].startswith("once<|im_start|>")


def test_a_template_cannot_leave_its_sandbox(family_dir: Folder, tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    for attempt in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ):
        template.write_text(attempt + CHATML)
        found = Press(family_dir("chatml"), chat_template=template)(chat("a", "b"))
        assert [str(reject.reason) for reject in found.rejects] == ["template-error"]


def test_a_template_that_is_no_jinja_is_refused_at_once(family_dir: Folder, tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("{% for %}")
    with pytest.raises(TokenizerError, match="no valid Jinja"):
        Press(family_dir("chatml"), chat_template=template)


def test_a_tokenizer_without_a_template_is_refused_with_the_way_out(
    bpe_tokenizer_dir: Path,
) -> None:
    with pytest.raises(TokenizerError, match="no chat template") as caught:
        Press(bpe_tokenizer_dir)
    assert "chat_template=FILE" in str(caught.value)


def test_without_jinja_one_sentence_says_what_to_install(
    family_dir: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tokenmill.supervised.sandbox", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"tokenmill\[chat\]"):
        Press(family_dir("chatml"))


def test_a_list_of_templates_has_one_for_tools(family_dir: Folder, tmp_path: Path) -> None:
    import json
    import shutil

    folder = shutil.copytree(family_dir("chatml"), tmp_path / "named")
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "{{ tools | length }} tools" + CHATML},
    ]
    path.write_text(json.dumps(config))
    found = Press(folder)(chat("a", "b"), chat("a", "b") | {"tools": [{"name": "t"}]})
    assert found.texts[1] == "1 tools" + found.texts[0]


def test_a_chat_works_with_every_kind_of_tokenizer(
    tmp_path: Path, sentencepiece_bpe_model: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{{ '</s>' if kind == 'spm' else '<|endoftext|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    press = Press("bytes", chat_template=template)
    found = press(chat("hi <|endoftext|>", "yo"))
    assert found.ids[0] == [*b"user: hi <|endoftext|>", 256, *b"assistant: yo", 256]
    assert press.said(found) == "yo<|endoftext|>"
    template.write_text(template.read_text().replace("kind == 'spm'", "true"))
    press = Press(sentencepiece_bpe_model, chat_template=template)
    found = press(chat("hi </s> you", "yo"))
    assert found.ids[0].count(press.engine.info.special_tokens["</s>"]) == 2
    assert press.said(found).endswith("yo</s>")


_AHEAD = "{% set count = messages | length %}"
"""Makes a template one that looks ahead, and changes nothing that it writes."""


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if not f.has_generation])
def test_answers_found_in_one_rendering_are_those_of_a_rendering_for_each(
    name: str, family_dir: Folder, tmp_path: Path
) -> None:
    path = tmp_path / "ahead.jinja"
    path.write_text(_AHEAD + FAMILIES[name].template)
    press, slow = Press(family_dir(name)), Press(family_dir(name), chat_template=path)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.sampled_from(["", " a", "b\n", "</think>c", "<|im_end|>"]), max_size=9))
    def check(texts: list[str]) -> None:
        row = chat("q", *texts)
        found, expected = press(row), slow(row)
        assert (found.ids, found.masks) == (expected.ids, expected.masks)
        assert found.rejects == expected.rejects

    check()


@pytest.mark.parametrize(
    ("template", "is_forward"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{% set ms = messages %}{% for m in ms %}{{ loop.index }}{% endfor %}", True),
        ("{{ messages[0].role }}{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}", True),
        ("{% set ms = messages[1:] %}{% for m in ms %}{{ m.content }}{% endfor %}", True),
        ("{% if 1 %}{% set ms=messages[2:] %}{% endif %}{% for m in ms %}a{% endfor %}", True),
        ("{% if tools %}{% set ms = messages %}{% endif %}{% for m in ms %}a{% endfor %}", False),
        ("{% set ms = messages[1:] %}{{ ms[0].role }}{% for m in ms %}a{% endfor %}", False),
        ("{% set messages=messages[1:] %}{{ messages[0] }}{%for m in messages%}{%endfor%}", False),
        ("{% set ms = messages[-2:] %}{% for m in ms %}a{% endfor %}", False),
        ("{% set ms = messages[:2] %}{% for m in ms %}a{% endfor %}", False),
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages if m.content %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content if loop.last }}{% endfor %}", False),
        ("{% for m in messages %}{{ loop['last'] }}{% endfor %}", False),
        ("{% for m in messages %}{{ loop | attr('last') }}{% endfor %}", False),
        ("{% for m in messages %}{{ loop.nextitem }}{% endfor %}", False),
        ("{% for m in messages %}{{ messages[loop.index0 + 1] }}{% endfor %}", False),
        ("{{ messages[1].role }}{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{{ messages[-1].role }}{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ add_generation_prompt }}{% endfor %}", False),
        ("{% set p = add_generation_prompt %}{% for m in messages %}{{ p }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}", False),
        ("{% set n=namespace() %}{% for m in messages %}{% set n.x=1 %}{% endfor %}{{n.x}}", False),
        ("{% for m in messages %}{% break %}{% endfor %}", False),
        ("{% for m in messages %}a{% else %}b{% endfor %}", False),
        ("{% for m in messages recursive %}a{% endfor %}", False),
        ("{% macro f() %}{{ messages }}{% endmacro %}{% for m in messages %}a{% endfor %}", False),
        ("{% for m in messages %}a{% endfor %}{% for m in messages %}b{% endfor %}", False),
        ("{% block b %}{% endblock %}{% for m in messages %}a{% endfor %}", False),
        ("{% set messages = messages %}{% for m in messages %}a{% endfor %}", True),
        ("{% set x = messages %}{% set x = 'ab' %}{% for m in x %}a{% endfor %}", False),
    ],
)  # fmt: skip
def test_templates_that_look_ahead_are_known(template: str, is_forward: bool) -> None:
    made = ChatTemplate(template, variables={"eos_token": "e", "ms": chat("a", "b")["messages"]})
    talk = Conversation(chat("a", "b", "c", "d")["messages"], None)
    text = made.render(talk)
    found = made.boundaries(talk, text)
    assert (found is not None) == is_forward
    if found is not None:
        known = [count for count in range(1, 5) if found.places[count] is not None]
        assert 4 in known
        for count in known:
            head = Conversation(talk.messages[:count], None)
            for prompt in (False, True):
                expected = made.render(head, prompt=prompt)
                assert text[: found.places[count]] + found.tails[prompt] == expected


def test_a_long_chat_is_rendered_a_few_times_and_not_for_each_answer(
    family_dir: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderings = []
    real = ChatTemplate.render

    def counted(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        renderings.append(kwargs)
        return real(self, *args, **kwargs)

    press = Press(family_dir("chatml"))
    monkeypatch.setattr(ChatTemplate, "render", counted)
    found = press(chat(*(f"{n}" for n in range(6000))))
    assert len(renderings) == 2
    assert found.rejects == []
    assert press.said(found).startswith("1<|im_end|>3<|im_end|>5<|im_end|>")
