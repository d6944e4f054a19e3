"""Prompts and completions that are lists of messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.interop import peers
from tests.supervised.families import FAMILIES
from tests.supervised.shaping import Press, chat

import tokenmill
from tokenmill.errors import StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Folder = Callable[[str], Path]


def asked(*contents: str, last: int = 1, **more: Any) -> dict[str, Any]:
    """A row of which the last messages are the completion."""
    messages = chat(*contents)["messages"]
    return {"prompt": messages[:-last], "completion": messages[-last:], **more}


ROWS = [
    asked("why", "because"),
    asked("a", " b ", "c", "\n d"),
    asked("x", "y", "z", "<|im_end|> w", last=3),
]


SAID = ROWS[0]["completion"]


@pytest.mark.parametrize("name", ["chatml", "chatml-generation", "llama3", "mistral-v3"])
def test_all_that_follows_the_prompt_counts(name: str, family_dir: Folder) -> None:
    press = Press(family_dir(name), format="chat-completion")
    whole = Press(family_dir(name), train_on="all")
    found = press(*ROWS)
    chats = whole(*({"messages": row["prompt"] + row["completion"]} for row in ROWS))
    assert found.rejects == []
    assert found.ids == chats.ids
    assert [found.masks[row][0] for row in range(3)] == [0, 0, 0]
    for row, mask in enumerate(found.masks):
        assert mask == sorted(mask), "what counts is the end of the row"
        said = press.said(found, row).strip(" \u2581\n")
        assert said.replace(" ", "").startswith(("because", "d", "y"))
        assert "why" not in said


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [], "completion": ROWS[0]["completion"]}, "bad-conversation"),
        ({"prompt": ROWS[0]["prompt"], "completion": []}, "nothing-to-train-on"),
        ({"prompt": ROWS[0]["prompt"], "completion": ROWS[0]["prompt"]}, "no-assistant-turn"),
        ({"prompt": ROWS[0]["completion"], "completion": SAID}, "bad-conversation"),
        ({"prompt": "text", "completion": ROWS[0]["completion"]}, "bad-conversation"),
        ({"prompt": ROWS[0]["prompt"]}, "missing-field"),
    ],
)  # fmt: skip
def test_rows_without_a_prompt_or_an_answer_are_rejected(
    row: dict[str, Any], reason: str, family_dir: Folder
) -> None:
    found = Press(family_dir("chatml"), format="chat-completion")(ROWS[0], row)
    assert [(each.row, str(each.reason)) for each in found.rejects] == [(1, reason)]


def test_the_format_of_prompts_and_completions_takes_both_and_goes_by_the_first_row(
    family_dir: Folder, bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in ROWS * 20))
    options: dict[str, Any] = {"tokenizer": family_dir("chatml"), "serial": True}
    told = tokenmill.build(source, out=tmp_path / "a", format="prompt-completion", **options)
    said = tokenmill.build(source, out=tmp_path / "b", format="chat-completion", **options)
    assert told.totals == said.totals
    assert told.totals.documents == 60
    stores = [tokenmill.Store(tmp_path / name) for name in "ab"]
    expected = Press(family_dir("chatml"), format="chat-completion")(*ROWS)
    for number in range(60):
        for store in stores:
            mask = store.mask(number)
            assert mask is not None
            assert store[number].tolist() == expected.ids[number % 3]
            assert mask.tolist() == expected.masks[number % 3]
    assert tokenmill.verify(tmp_path / "a").ok
    again: dict[str, Any] = {"out": tmp_path / "a", "format": "prompt-completion"}
    assert tokenmill.build(source, **again, **options).nothing_to_do
    planned = tokenmill.plan(source, format="prompt-completion", **options | {"serial": False})
    assert planned.estimated_tokens == told.totals.tokens
    # Texts are what they were.
    source.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}))
    options["tokenizer"] = bpe_tokenizer_dir
    tokenmill.build(source, out=tmp_path / "c", format="prompt-completion", **options)
    assert '"format":"prompt-completion"' in (
        tmp_path / "c" / "tokenmill.json"
    ).read_text().replace(" ", "")
    with pytest.raises(StoreError, match="of another build"):
        tokenmill.build(source, **again, **options | {"tokenizer": family_dir("chatml")})
    with pytest.raises(UsageError, match="format='chat-completion'"):
        tokenmill.build(
            source,
            out=tmp_path / "d",
            format="prompt-completion",
            chat_date="2024-01-01",
            **options,
        )


@pytest.mark.slow
def test_ids_and_counts_of_completions_are_those_of_trl(family_dir: Folder, tmp_path: Path) -> None:
    peers.require("trl")
    rows = [*ROWS[:2], asked("x", "y", "z", "w", last=3)]
    theirs = peers.run(
        "trl", "complete", family_dir("qwen"), FAMILIES["qwen"].template, rows, tmp_path
    )
    found = Press(family_dir("qwen"), format="chat-completion")(*rows)
    assert found.ids == theirs["input_ids"]
    counted = [[int(label != -100) for label in row] for row in theirs["labels"]]
    assert found.masks == counted
