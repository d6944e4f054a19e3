"""Templates that rewrite what was said: training versions, and answers found where they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.command import tokenmill_here
from tests.interop import peers
from tests.supervised.families import CHATML
from tests.supervised.shaping import Press, chat

import tokenmill
from tokenmill.errors import StoreError
from tokenmill.supervised.rows import Conversation
from tokenmill.supervised.sandbox import ChatTemplate, training_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Folder = Callable[[str], Path]

# Of Qwen3's kind: reasoning is written in answers after the last question alone.
REASONING = """
{%- set ns = namespace(last_query_index=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last_query_index = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}{% set content = m.content %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query_index %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.name + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# The same, in words that nobody knows.
UNKNOWN = REASONING.replace("last_query_index", "newest")

PLAIN = chat("a", "b", "c", "d", "e", "f")["messages"]
THINKING: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "so"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "<think>\nthus\n</think>\n\nd"},
]
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "b", "reasoning_content": "so"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def template_file(folder: Path, text: str) -> Path:
    path = folder / "template.jinja"
    path.write_text(text)
    return path


@pytest.mark.parametrize("messages", [PLAIN, THINKING, CALLING])
def test_a_training_version_writes_every_answer_as_when_it_was_the_last_thing_said(
    messages: list[dict[str, Any]], family_dir: Folder, tmp_path: Path
) -> None:
    press = Press(family_dir("qwen"), chat_template=template_file(tmp_path, REASONING))
    found = press({"messages": messages})
    assert found.rejects == []
    template = ChatTemplate(REASONING, variables={})
    expected, answers = "", []
    whole = template.render_placed(Conversation(messages, None))
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            # By the template itself, rendering up to here.
            head = template.render_placed(Conversation(messages[: number + 1], None))
            part = head[0][head[1][number] :]
            answers.append(part.removeprefix("<|im_start|>assistant\n"))
        else:
            part = whole[0][whole[1][number] : whole[1][number + 1]]
        expected += part
    assert found.texts == [expected]
    assert press.said(found) == "".join(answers)
    assert "<think>\n" in answers[0]


def test_a_template_as_it_is_has_its_answers_found_where_it_writes_them(
    family_dir: Folder, tmp_path: Path
) -> None:
    for text, version in ((UNKNOWN, "training"), (REASONING, "own")):
        path = template_file(tmp_path, text)
        press = Press(family_dir("qwen"), chat_template=path, template_version=version)
        found = press(*({"messages": each} for each in (PLAIN, THINKING, CALLING)))
        assert found.rejects == []
        template = ChatTemplate(text, variables={})
        for row, messages in enumerate((PLAIN, THINKING, CALLING)):
            assert found.texts[row] == template.render(Conversation(messages, None))
        thought = "<think>\n\n</think>\n\n"
        assert press.said(found, 0) == f"b<|im_end|>d<|im_end|>{thought}f<|im_end|>"
        thought = "<think>\nthus\n</think>\n\n"
        assert press.said(found, 1) == f"b<|im_end|>{thought}d<|im_end|>"
        calls = "<tool_call>f</tool_call><|im_end|>"
        assert press.said(found, 2).startswith(f"{calls}b<|im_end|><think>")


def test_the_last_answer_is_found_in_the_templates_own_text(
    family_dir: Folder, tmp_path: Path
) -> None:
    press = Press(
        family_dir("qwen"), chat_template=template_file(tmp_path, REASONING), train_on="last"
    )
    found = press({"messages": THINKING})
    assert found.texts[0].count("<think>") == 1
    assert press.said(found) == "<think>\nthus\n</think>\n\nd<|im_end|>"


@pytest.mark.parametrize(
    "change",
    [
        # What a tool says is written with the call, so that it would count.
        (
            "{{- '<|im_end|>\\n' }}\n{%- elif",
            "{{ (messages[loop.index0 + 1] or m).content if m.tool_calls }}<|im_end|>\n{% elif",
        ),
        # Not what the message says.
        ("{{- content }}", "{{- content | upper }}"),
    ],
)
def test_answers_that_are_not_what_their_message_says_are_rejected(
    change: tuple[str, str], family_dir: Folder, tmp_path: Path
) -> None:
    text = UNKNOWN.replace(*change)
    assert text != UNKNOWN
    if "upper" not in change[1]:
        text = text.replace("'\\n<tool_response>\\n' + m.content + ", "'' + ")
    found = Press(family_dir("qwen"), chat_template=template_file(tmp_path, text))(
        {"messages": CALLING}
    )
    assert [str(reject.reason) for reject in found.rejects] == ["not-a-prefix"]


def test_a_training_version_that_changes_more_than_answers_is_not_used(
    family_dir: Folder, tmp_path: Path
) -> None:
    # A question is written in another way when more is asked: no reasoning of an answer.
    question = "m.content + '<|im_end|>\\n' }}{% endif %}\n{%- endfor"
    other = "m.content + ('?' if loop.index0 > ns.last_query_index - 1 else '') + '<|im_end|>\\n'"
    text = REASONING.replace(question, other + " }}{% endif %}\n{%- endfor")
    text = text.replace("ns.last_query_index - 1", "ns.last_query_index")
    assert "'?' if" in text
    press = Press(family_dir("qwen"), chat_template=template_file(tmp_path, text))
    found = press({"messages": PLAIN})
    assert [str(reject.reason) for reject in found.rejects] == ["not-a-prefix"]
    assert found.rejects[0].detail.endswith("use --template-version own")


def test_special_tokens_in_reasoning_are_text(family_dir: Folder, tmp_path: Path) -> None:
    press = Press(family_dir("qwen"), chat_template=template_file(tmp_path, REASONING))
    evil = [dict(each) for each in THINKING]
    evil[2]["reasoning_content"] = "so<|im_end|>"
    tame = [dict(each) for each in THINKING]
    tame[2]["reasoning_content"] = "so"
    found = press({"messages": evil}, {"messages": tame})
    assert found.rejects == []
    end = press.engine.info.special_tokens["<|im_end|>"]
    assert found.ids[0].count(end) == found.ids[1].count(end)
    assert "so<|im_end|>" in found.texts[0]


def test_known_templates_are_known_by_their_code() -> None:
    assert training_version(REASONING) == training_version("{# x #}" + REASONING) == "qwen3"
    assert training_version(UNKNOWN) is training_version(CHATML) is None
    assert training_version("{% for %}") is None


def test_stores_say_how_their_rows_were_rendered_and_go_on_so(
    family_dir: Folder, tmp_path: Path
) -> None:
    source = tmp_path / "chats.jsonl"
    single = chat("a", "b")
    rows = [{"messages": PLAIN}, single, {"messages": THINKING}]
    source.write_text("\n".join(map(json.dumps, rows)))
    options: dict[str, Any] = {"tokenizer": family_dir("qwen"), "format": "chat", "serial": True}
    options["chat_template"] = template_file(tmp_path, REASONING)
    new = tokenmill.build(source, out=tmp_path / "new", **options)
    assert (new.totals.documents, new.template_version) == (3, "training:qwen3")
    assert tokenmill.verify(tmp_path / "new").ok
    # As stores of before were built.
    before = options | {"out": tmp_path / "old", "max_rejects": 1.0}
    old = tokenmill.build(source, template_version="prefix", **before)
    assert (old.totals.documents, old.template_version) == (1, None)
    manifest = json.loads((tmp_path / "old" / "tokenmill.json").read_text())
    assert "template_version" not in json.dumps(manifest)
    (tmp_path / "more.jsonl").write_text(source.read_text() + "\n")
    again = tokenmill.build([source, tmp_path / "more.jsonl"], **before)
    assert (again.totals.documents, again.template_version) == (2, None)
    assert tokenmill.verify(tmp_path / "old").ok
    for version in ("prefix", "own"):
        with pytest.raises(StoreError, match="template_version"):
            tokenmill.build(source, out=tmp_path / "new", template_version=version, **options)
    # Templates that rewrite nothing make the stores that they made.
    options["chat_template"] = template_file(tmp_path, CHATML)
    plain = tokenmill.build(source, out=tmp_path / "plain", **options)
    assert plain.template_version is None
    assert "template_version" not in (tmp_path / "plain" / "tokenmill.json").read_text()


def test_the_summary_says_which_version_was_used(family_dir: Folder, tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": THINKING}))
    template_file(tmp_path, REASONING)
    args = ("build", source, "-t", family_dir("qwen"), "--format", "chat")
    told = tokenmill_here(
        *args, "-o", "s", "--chat-template", "template.jinja", folder=tmp_path
    ).stdout
    assert "the qwen3 training version: earlier answers keep" in " ".join(told.split())
    told = tokenmill_here("inspect", "s", folder=tmp_path).stdout
    assert "the qwen3 training version" in " ".join(told.split())


# Beside TRL, on published templates that its package has.

_SAME = ("qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano")
# There TRL counts the header of each answer too, with which the model is asked.
_WITH_HEADER = ("deepseek_r1_distill", "gptoss")


@pytest.mark.slow
def test_ids_and_counts_of_templates_that_rewrite_are_those_of_trl(
    family_dir: Folder, tmp_path: Path
) -> None:
    talks = [PLAIN, PLAIN[:2], THINKING, [{**each, "content": "x " * 9} for each in PLAIN]]
    calls = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calling = [dict(each) for each in CALLING]
    calling[1]["tool_calls"] = [calls]
    names = [*_SAME, *_WITH_HEADER]
    folder = family_dir("qwen")
    peers.require("trl")
    answers = peers.run("trl", "count", folder, names, [*talks, calling])
    for name in names:
        rows = [*talks, calling] if name in _SAME else talks
        today: Any = {"chat_date": answers["today"]} if name == "gptoss" else {}
        press = Press(
            folder, chat_template=template_file(tmp_path, answers["templates"][name]), **today
        )
        found = press(*({"messages": messages} for messages in rows))
        assert found.rejects == [], name
        for row, messages in enumerate(rows):
            theirs = answers[name][row]
            assert found.ids[row] == theirs["input_ids"], (name, row)
            if name in _SAME:
                assert found.masks[row] == theirs["assistant_masks"], (name, row)
            else:
                both = np.array([found.masks[row], theirs["assistant_masks"]])
                assert (both[0] <= both[1]).all(), (name, row)
                turns = sum(message["role"] == "assistant" for message in messages)
                headers = press.engine.decode(np.array(found.ids[row])[both[0] < both[1]])
                assert headers.lower().count("assistant") == turns, headers
