"""Rows by their length: cut off, rejected, or in several documents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builder.stores import make_texts, tree, write_jsonl

import tokenmill
from tokenmill.builder.encode import cut_lengths, fit_rows
from tokenmill.errors import UsageError
from tokenmill.options import RowShape
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from tokenmill.records import RejectReason

EOS = 256
lengths_of_rows = st.lists(st.integers(0, 30), max_size=12)


@given(lengths=lengths_of_rows.map(lambda each: [n + 1 for n in each]), limit=st.integers(2, 9))
def test_pieces_are_as_long_as_they_may_be_and_add_up_to_their_row(
    lengths: list[int], limit: int
) -> None:
    pieces, counts = cut_lengths(np.array(lengths, np.int64), limit)
    by_row = np.split(pieces, np.cumsum(counts)[:-1]) if len(lengths) else []
    assert [int(row.sum()) for row in by_row] == lengths
    for row in by_row:
        assert set(row[:-1].tolist()) <= {limit}
        assert 1 <= row[-1] <= limit


@given(data=st.data(), limit=st.integers(2, 9), too_long=st.sampled_from(["truncate", "reject"]))
def test_rows_with_masks_are_cut_off_or_rejected(
    data: st.DataObject, limit: int, too_long: str
) -> None:
    masks = data.draw(st.lists(st.lists(st.integers(0, 1), max_size=15), max_size=6))
    batch = batch_of([list(range(len(mask))) for mask in masks], masks)
    shape = RowShape(format="chat", max_length=limit, too_long=too_long)
    fitted = fit_rows(shape, batch, (None, None))
    kept: list[int] = []
    reasons: dict[int, str] = {}
    for place, mask in enumerate(masks):
        if too_long == "reject" and len(mask) > limit:
            reasons[place] = "too-long"
        elif mask and not any(mask[1:limit]):
            reasons[place] = "nothing-to-train-on"
        else:
            kept.append(place)
    assert fitted.kept.tolist() == kept
    assert names(fitted.reasons) == reasons
    assert [fitted.tokens[i].tolist() for i in range(len(kept))] == [
        list(range(min(len(masks[place]), limit))) for place in kept
    ]
    assert fitted.tokens.mask is not None
    joined = [value for place in kept for value in masks[place][:limit]]
    assert fitted.tokens.mask.tolist() == joined


def test_a_row_whose_only_targets_begin_its_pieces_is_nothing_to_train_on() -> None:
    shape = RowShape(format="chat", max_length=3)
    masks = [[0, 0, 0, 1], [0, 0, 0, 0, 1], [1, 0]]
    batch = batch_of([list(range(len(mask))) for mask in masks], masks)
    fitted = fit_rows(shape, batch, (None, None))
    assert names(fitted.reasons) == {0: "nothing-to-train-on", 2: "nothing-to-train-on"}


def batch_of(rows: list[list[int]], masks: list[list[int]]) -> TokenBatch:
    batch = TokenBatch.from_lists(rows)
    mask = np.array([value for row in masks for value in row], np.uint8)
    return TokenBatch(batch.ids, batch.offsets, mask)


def names(reasons: Any) -> dict[int, str]:
    found: dict[int, tuple[RejectReason, str]] = dict(reasons)
    return {place: str(reason) for place, (reason, _) in found.items()}


# Builds of plain text.


def rows_of(store: tokenmill.Store) -> dict[int, list[list[int]]]:
    """Row -> its pieces, checked to be all of them and in order."""
    rows: dict[int, list[list[int]]] = {}
    for number in range(len(store)):
        source = store.source(number)
        pieces = rows.setdefault(source.row, [])
        assert source.piece == len(pieces)
        pieces.append(store[number].tolist())
    for number in range(len(store)):
        assert store.source(number).pieces == len(rows[store.source(number).row])
    return rows


@pytest.mark.parametrize("bos", [False, True])
def test_long_texts_become_several_documents(
    bos: bool, bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    texts = ["", *make_texts(60)]
    source = write_jsonl(tmp_path / "t.jsonl", texts)
    options: dict[str, Any] = {
        "tokenizer": bpe_tokenizer_dir,
        "bos": "<|endoftext|>" if bos else False,
    }
    options["serial"] = True
    tokenmill.build(source, out=tmp_path / "whole", **options)
    result = tokenmill.build(source, out=tmp_path / "s", max_length=20, **options)
    whole, store = tokenmill.Store(tmp_path / "whole"), tokenmill.Store(tmp_path / "s")
    rows = rows_of(store)
    joined = [[token for piece in pieces for token in piece] for pieces in rows.values()]
    assert joined == [document.tolist() for document in whole]
    assert max(len(piece) for pieces in rows.values() for piece in pieces) == 20
    split = [len(pieces) for pieces in rows.values() if len(pieces) > 1]
    totals, lengths = result.totals, result.lengths
    assert (totals.rows, totals.empty, totals.documents) == (61, 1, len(store))
    assert (totals.split_rows, totals.pieces) == (len(split), sum(split))
    assert len(split) > 10
    assert lengths is not None
    assert (lengths.split_rows, lengths.longest) == (len(split), max(map(len, whole)))
    beginnings = [store.decode(n) for n in range(len(store)) if store.source(n).piece == 0]
    assert all(map(str.startswith, texts[1:], [each.rstrip("\ufffd") for each in beginnings]))
    report = tokenmill.verify(tmp_path / "s")
    assert (report.ok, report.documents_reencoded) == (True, min(100, len(store)))


@pytest.mark.parametrize("too_long", ["truncate", "reject"])
def test_long_texts_are_cut_off_or_rejected(too_long: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["abc", "abcd", "", "abcde"])
    result = tokenmill.build(
        source,
        tokenizer="bytes",
        out=tmp_path / "s",
        max_length=4,
        too_long=too_long,
        max_rejects=1.0,
        serial=True,
    )
    store = tokenmill.Store(tmp_path / "s")
    cut = [[*b"abcd"], [*b"abcd"]] if too_long == "truncate" else []
    # Of what was rejected no text was written; of what was cut off, nobody knows how much.
    assert result.bytes_per_token == (None if cut else 3 / 4)
    assert result.lengths is not None
    assert (result.lengths.cut_off, result.lengths.rejected_too_long) == (len(cut), 2 - len(cut))
    assert [document.tolist() for document in store] == [[*b"abc", EOS], *cut]
    rejects = [(row.row, row.reason, row.offset) for row in store.rejects()]
    second = source.read_bytes().index(b"\n") + 1
    assert rejects[:1] == ([] if cut else [(1, "too-long", second)])
    assert [store.decode(n) for n in range(len(store))] == ["abc", *["abcd"] * len(cut)]
    assert tokenmill.verify(tmp_path / "s").ok


def test_a_store_of_pieces_that_was_tampered_with_is_found_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", make_texts(20))
    options: dict[str, Any] = {"tokenizer": "bytes", "out": tmp_path / "s", "serial": True}
    tokenmill.build(source, max_length=16, **options)
    changed = source.read_bytes().replace(b"grain", b"GRAIN")
    assert changed != source.read_bytes()
    times = source.stat()
    source.write_bytes(changed)
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = tokenmill.verify(tmp_path / "s")
    assert 0 < report.mismatches < report.documents_reencoded


def test_pieces_do_not_depend_on_workers_units_or_an_interruption(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", make_texts(200))
    options: dict[str, Any] = {"tokenizer": "bytes", "max_length": 50, "unit_bytes": 4000}
    options["val"] = 0.3
    tokenmill.build(source, out=tmp_path / "one", serial=True, **options)
    tokenmill.build(source, out=tmp_path / "two", workers=2, **options)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    receipts = sorted((tmp_path / "two" / "shards").glob("*.json"))
    assert len(receipts) > 4
    (tmp_path / "two" / "tokenmill.json").unlink()
    for receipt in receipts[::2]:
        receipt.unlink()
    tokenmill.build(source, out=tmp_path / "two", workers=1, **options)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    # No row is in both splits.
    rows = [
        set(rows_of(tokenmill.Store(tmp_path / "one", split=name))) for name in ("train", "val")
    ]
    assert not rows[0] & rows[1]
    assert len(rows[1]) > 20


def test_a_limit_that_nothing_exceeds_makes_a_store_that_older_readers_read(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["short", "shorter"])
    options: dict[str, Any] = {"tokenizer": "bytes", "out": tmp_path / "s", "serial": True}
    tokenmill.build(source, max_length=50, **options)
    assert json.loads((tmp_path / "s" / "tokenmill.json").read_text())["format_version"] == 1
    with pytest.raises(UsageError):
        tokenmill.build(source, max_length=1, **options | {"out": tmp_path / "t"})


def test_a_plan_counts_pieces(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", make_texts(50))
    planned = tokenmill.plan(source, tokenizer="bytes", max_length=30)
    result = tokenmill.build(
        source, tokenizer="bytes", out=tmp_path / "s", max_length=30, serial=True
    )
    assert planned.estimated_documents == result.totals.documents > 60
    assert planned.estimated_tokens == result.totals.tokens


def test_pieces_and_rejects_of_small_text_files_name_their_file(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in {"a": "abcdefgh", "b": "a longer one", "c": "xyz"}.items():
        (folder / f"{name}.txt").write_text(text)
    options: dict[str, Any] = {"tokenizer": "bytes", "serial": True, "max_rejects": 1.0}
    out = tmp_path / "s"
    tokenmill.build(folder, out=out, max_length=4, **options)
    store = tokenmill.Store(out)
    found = [(Path(store.source(n).path).stem, store.source(n).piece) for n in range(len(store))]
    assert found == [*(("a", n) for n in range(3)), *(("b", n) for n in range(4)), ("c", 0)]
    tokenmill.build(folder, out=tmp_path / "t", max_length=9, too_long="reject", **options)
    rejects = list(tokenmill.Store(tmp_path / "t").rejects())
    assert [(Path(row.file).stem, row.reason) for row in rejects] == [("b", "too-long")]
    for each in (out, tmp_path / "t"):
        assert tokenmill.verify(each).ok


def test_bytes_of_text_are_those_of_the_rows_that_were_written(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "completion": "c\u00e9"}, {"prompt": "ab" * 9, "completion": "long"}]
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tokenmill.build(
        source,
        tokenizer="bytes",
        out=tmp_path / "s",
        format="prompt-completion",
        max_length=8,
        too_long="reject",
        max_rejects=1.0,
        serial=True,
    )
    assert result.totals.text_bytes == len("abc\u00e9".encode())
