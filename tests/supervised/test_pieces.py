"""Rows with masks that are too long for one document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.supervised.shaping import chat

import tokenmill
from tokenmill.options import RowShape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Folder = Callable[[str], Path]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(count: int) -> list[dict[str, Any]]:
    return [
        chat(f"what is {i}? " * (1 + i % 7), "well, " * (i % 23), "and?", "so")
        for i in range(count)
    ]


@pytest.mark.parametrize("limit", [8, 33, 64])
def test_the_pieces_of_a_chat_are_its_tokens_and_its_mask(
    family_dir: Folder, tmp_path: Path, limit: int
) -> None:
    source = write(tmp_path / "c.jsonl", chats(80))
    options: dict[str, Any] = {"tokenizer": family_dir("chatml"), "format": "chat"}
    options["serial"] = True
    tokenmill.build(source, out=tmp_path / "whole", **options)
    result = tokenmill.build(source, out=tmp_path / "s", max_length=limit, **options)
    whole, store = tokenmill.Store(tmp_path / "whole"), tokenmill.Store(tmp_path / "s")
    ids: list[list[int]] = [[] for _ in range(80)]
    masks: list[list[int]] = [[] for _ in range(80)]
    silent = 0
    for number in range(len(store)):
        row, mask = store.source(number).row, store.mask(number)
        assert mask is not None
        assert 1 <= len(store[number]) <= limit
        ids[row] += store[number].tolist()
        masks[row] += mask.tolist()
        silent += not mask.any()
    assert ids == [document.tolist() for document in whole]
    expected = [whole.mask(number) for number in range(80)]
    assert masks == [mask.tolist() for mask in expected if mask is not None]
    assert result.lengths is not None
    assert result.lengths.silent_documents == store.num_silent == silent
    assert result.lengths.split_rows == sum(len(each) > limit for each in ids) > 20
    totals = result.totals
    assert totals.rows == totals.documents - totals.pieces + totals.split_rows == 80
    assert tokenmill.verify(tmp_path / "s").ok


def test_pieces_are_documents_of_their_own_for_the_loader(
    family_dir: Folder, tmp_path: Path
) -> None:
    source = write(tmp_path / "c.jsonl", chats(40))
    options: dict[str, Any] = {"tokenizer": family_dir("chatml"), "format": "chat"}
    tokenmill.build(source, out=tmp_path / "s", max_length=32, serial=True, **options)
    store = tokenmill.Store(tmp_path / "s")
    loader = tokenmill.Loader(store, seq_len=31, batch_size=4, packing="pad", shuffle=False)
    seen = 0
    for batch in loader:
        for row in range(4):
            if seen == len(store):
                break
            length = len(store[seen])
            assert batch.tokens[row, :length].tolist() == store[seen].tolist()
            seen += 1
        if seen == len(store):
            break
    assert seen == len(store) > 60


def test_the_end_token_is_that_of_the_last_piece(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "completion": "cdefgh"}, {"prompt": "ab", "completion": "cde"}]
    source = write(tmp_path / "p.jsonl", rows)
    tokenmill.build(
        source,
        tokenizer="bytes",
        out=tmp_path / "s",
        format="prompt-completion",
        max_length=4,
        serial=True,
    )
    store = tokenmill.Store(tmp_path / "s")
    assert [document.tolist() for document in store] == [
        [*b"abcd"],
        [*b"efgh"],
        [256],
        [*b"abcd"],
        [*b"e", 256],
    ]
    assert np.concatenate([store.mask(n) for n in range(5)]).tolist() == [
        0,
        0,
        *[1] * 7,
        0,
        0,
        *[1] * 4,
    ]
    assert [store.decode(n) for n in range(5)] == ["abcd", "efgh", "", "abcd", "e"]


def test_a_store_of_an_older_build_that_kept_long_rows_whole_is_another_one() -> None:
    old = {"format": "prompt-completion", "max_length": 4, "too_long": "split"}
    shape = RowShape.of_identity(old)
    assert shape is not None
    assert shape.piece_tokens is None
    new = RowShape(format="prompt-completion", max_length=4)
    assert RowShape.of_identity(new.shape_identity()) == new
    assert new.shape_identity().items() != old.items()
