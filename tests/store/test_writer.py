from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.disks import file_size_limit, small_disk

from tokenmill.errors import BuildError
from tokenmill.records import Reject, RejectReason
from tokenmill.store.check import check_store
from tokenmill.store.facts import Counts, assemble_manifest, facts_of, write_manifest
from tokenmill.store.layout import StoreLayout
from tokenmill.store.reader import Store
from tokenmill.store.write import BLOCK_TOKENS, UnitWriter

from .samples import (
    SampleUnit,
    commit_facts,
    identity,
    new_writer,
    tree,
    unit_facts,
    write_unit,
)
from .test_format import megatron_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.store.facts import Receipt

UNIT = SampleUnit(path="data/a.jsonl")


def append(writer: UnitWriter, documents: Sequence[Sequence[int]], *, first_row: int = 0) -> None:
    ids = np.array([token for document in documents for token in document], np.uint32)
    lengths = np.array([len(document) for document in documents], np.int64)
    rows = np.arange(first_row, first_row + len(lengths))
    writer.append("train", ids, lengths=lengths, rows=rows)


def commit(writer: UnitWriter, *, documents: int, tokens: int, rejected: int = 0) -> Receipt:
    facts = commit_facts(UNIT, texts=[])
    counts = {"rows": documents + rejected, "documents": documents, "rejected": rejected}
    facts["counts"] = Counts.of(**counts, tokens=tokens)
    return writer.commit(**facts)  # type: ignore[arg-type]


def finish_store(layout: StoreLayout, receipt: Receipt, *, vocab_size: int) -> None:
    manifest = assemble_manifest(layout, identity(vocab_size=vocab_size), units=[receipt.unit.name])
    write_manifest(layout, manifest)


@settings(max_examples=30, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.lists(st.integers(0, 256), max_size=5), max_size=4), min_size=1, max_size=4
    ),
    vocab_size=st.sampled_from([257, 65_499, 65_500, 200_000]),
)
def test_documents_come_back_and_the_files_are_what_megatron_would_write(
    batches: list[list[list[int]]], vocab_size: int
) -> None:
    documents = [document for batch in batches for document in batch]
    tokens = [token for document in documents for token in document]
    with tempfile.TemporaryDirectory() as folder:
        layout = StoreLayout(Path(folder))
        with new_writer(layout, UNIT, vocab_size=vocab_size) as writer:
            first_row = 0
            for batch in batches:
                append(writer, batch, first_row=first_row)
                first_row += len(batch)
            receipt = commit(writer, documents=len(documents), tokens=len(tokens))
        finish_store(layout, receipt, vocab_size=vocab_size)

        assert check_store(folder).findings == ()
        with Store(folder) as store:
            assert [document.tolist() for document in store] == documents
            assert [store[k].tolist() for k in range(len(store))] == documents
            assert store.lengths().tolist() == [len(document) for document in documents]
        kind, code, itemsize = ("H", 8, 2) if vocab_size < 65_500 else ("i", 4, 4)
        name = receipt.unit.name
        if documents:
            assert layout.shard_file(name, "bin").read_bytes() == struct.pack(
                f"<{len(tokens)}{kind}", *tokens
            )
            expected = megatron_index(list(map(len, documents)), code=code, itemsize=itemsize)
            assert layout.shard_file(name, "idx").read_bytes() == expected
        else:
            assert receipt.shards == ()


@pytest.mark.parametrize("vocab_size", [65_499, 65_500])
def test_one_document_larger_than_a_block_comes_back(tmp_path: Path, vocab_size: int) -> None:
    layout = StoreLayout(tmp_path)
    ids = np.arange(3 * BLOCK_TOKENS + 17, dtype=np.uint32) % vocab_size
    with new_writer(layout, UNIT, vocab_size=vocab_size) as writer:
        append(writer, [[1, 2, 3]])
        writer.append("train", ids, lengths=np.array([len(ids)]), rows=np.array([1]))
        receipt = commit(writer, documents=2, tokens=3 + len(ids))
    finish_store(layout, receipt, vocab_size=vocab_size)
    np.testing.assert_array_equal(Store(tmp_path)[1], ids)
    assert receipt.shards[0].max_id == vocab_size - 1
    assert check_store(tmp_path).is_sound


def test_batches_of_any_size_and_type_give_the_same_bytes(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 50_000, 2 * BLOCK_TOKENS + 5)
    trees = []
    for step, dtype in [(1000, np.uint32), (len(ids), np.int64), (7777, np.uint16)]:
        layout = StoreLayout(tmp_path / str(step))
        with new_writer(layout, UNIT, vocab_size=50_000) as writer:
            for first in range(0, len(ids), step):
                part = ids[first : first + step].astype(dtype)
                rows = np.arange(first, first + len(part))
                writer.append("train", part, lengths=np.ones(len(part), np.int32), rows=rows)
            commit(writer, documents=len(ids), tokens=len(ids))
        trees.append(tree(layout.root))
    assert trees[0] == trees[1] == trees[2]
    assert len(trees[0]) == 3


def test_checksums_and_sizes_in_the_receipt_are_those_of_the_files(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    unit = SampleUnit(path="a", rows=[("train", "abc"), ("val", "d"), ("reject", "e")])
    receipt = write_unit(layout, unit)
    for name, facts in receipt.files.items():
        assert facts_of((layout.shards / name).read_bytes()) == facts
    assert receipt.rejects is not None
    rejects = layout.rejects_file(receipt.unit.name).read_bytes()
    assert facts_of(rejects).checksum == receipt.rejects.checksum
    assert [shard.split for shard in receipt.shards] == ["train", "val"]
    assert [shard.rows for shard in receipt.shards] == [(0, 1), (1, 1)]
    assert not any(layout.tmp.iterdir())


def test_a_reject_is_one_line_with_its_file_row_offset_and_reason(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    rejects = [
        Reject(row=3, reason=RejectReason.INVALID_JSON, detail="line\nbreak \u2603", offset=99),
        Reject(row=4, reason=RejectReason.TOO_LARGE, detail="", path="member.txt"),
    ]
    with new_writer(layout, UNIT) as writer:
        writer.rejects(rejects)
        receipt = commit(writer, documents=0, tokens=0, rejected=2)
    lines = layout.rejects_file(receipt.unit.name).read_text("ascii").splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "file": "data/a.jsonl",
            "row": 3,
            "offset": 99,
            "reason": "invalid-json",
            "detail": "line\nbreak \u2603",
        },
        {"file": "member.txt", "row": 4, "offset": None, "reason": "too-large", "detail": ""},
    ]


@pytest.mark.parametrize("ids", [[256, 257], [-1, 0]])
def test_an_id_outside_the_vocabulary_is_our_own_bug_and_leaves_nothing(
    tmp_path: Path, ids: list[int]
) -> None:
    layout = StoreLayout(tmp_path)
    writer = new_writer(layout, UNIT)
    with pytest.raises(ValueError, match="leave the 257 known ones"):
        writer.append("train", np.array(ids), lengths=np.array([2]), rows=np.array([0]))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([1], [0]), ([3], [0]), ([2], [0, 1]), ([1, 1], [1, 0]), ([3, -1], [0, 1])],
)
def test_lengths_and_rows_that_do_not_fit_the_ids_are_our_own_bug(
    tmp_path: Path, lengths: list[int], rows: list[int]
) -> None:
    writer = new_writer(StoreLayout(tmp_path), UNIT)
    with pytest.raises(ValueError), writer:
        writer.append("train", np.array([1, 2]), lengths=np.array(lengths), rows=np.array(rows))
    assert tree(tmp_path) == {}


def test_counts_that_do_not_match_what_was_written_are_refused(tmp_path: Path) -> None:
    with new_writer(StoreLayout(tmp_path), UNIT) as writer:
        append(writer, [[1, 2], [3]])
        with pytest.raises(ValueError, match="3 tokens, its counts say 4"):
            commit(writer, documents=2, tokens=4)
    assert tree(tmp_path) == {}


def test_a_writer_that_is_left_without_commit_leaves_no_file(tmp_path: Path) -> None:
    with new_writer(StoreLayout(tmp_path), UNIT) as writer:
        append(writer, [[1, 2], [3]])
        writer.rejects([Reject(row=2, reason=RejectReason.NULL_TEXT, detail="")])
        assert len(tree(tmp_path)) == 2
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(("num_documents", "stage"), [(BLOCK_TOKENS, "append"), (60_000, "commit")])
def test_a_write_that_fails_leaves_no_file_and_says_where_and_how_to_go_on(
    tmp_path: Path, num_documents: int, stage: str
) -> None:
    # One token to a document: the .bin (2 bytes each) reaches the limit before the commit in one
    # case, the .idx (20 bytes each) during the commit in the other.
    layout = StoreLayout(tmp_path)
    writer = new_writer(layout, UNIT)
    ids, rows = np.zeros(num_documents, np.uint32), np.arange(num_documents)
    lengths = np.ones(num_documents, np.int32)
    reached = []
    with file_size_limit(300_000), pytest.raises(BuildError) as caught, writer:
        writer.append("train", ids, lengths=lengths, rows=rows)
        reached.append("commit")
        commit(writer, documents=num_documents, tokens=num_documents)
    assert (reached == ["commit"]) == (stage == "commit")
    assert tree(tmp_path) == {}
    assert writer_path(layout) in caught.value.message
    assert "free there" in caught.value.message
    assert "run the same command again" in str(caught.value.hint)


def writer_path(layout: StoreLayout) -> str:
    return str(layout.receipt(unit_facts(UNIT).name))


def test_a_full_disk_keeps_the_finished_units_and_the_next_try_succeeds(tmp_path: Path) -> None:
    with small_disk(tmp_path, size="1m"):
        layout = StoreLayout(tmp_path)
        write_unit(layout, SampleUnit(path="done", rows=[("train", "abc")]))
        before = tree(tmp_path)
        ballast = tmp_path / "ballast"
        ballast.write_bytes(bytes(700_000))
        for attempt in range(2):
            ids = np.zeros(200_000, np.uint32)
            full = pytest.raises(BuildError, match="No space left")
            outcome = full if attempt == 0 else contextlib.nullcontext()
            with outcome as caught, new_writer(layout, UNIT) as writer:
                writer.append("train", ids, lengths=np.array([len(ids)]), rows=np.array([0]))
                commit(writer, documents=1, tokens=len(ids))
            if caught is not None:
                assert str(caught.value.hint).startswith("make space")
                ballast.unlink()
                assert tree(tmp_path) == before
        assert len(tree(tmp_path)) == len(before) + 3
