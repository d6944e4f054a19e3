"""What holds for all formats of rows: round trips, cutting into files, resuming."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.interop.rows import back, documents, import_bytes, small_store
from tests.loader.stores import write_store
from tests.store.samples import EOS, tree

import tokenmill
from tokenmill.errors import UsageError
from tokenmill.interop import base
from tokenmill.interop.base import ImportOptions, complete_settings, detect_format
from tokenmill.interop.chunks import SampleLayout
from tokenmill.interop.export import ExportResult, export_store
from tokenmill.interop.records import RowRecords, cut_lengths

ROW_FORMATS = ("mds", "litdata", "arrow", "parquet", "pt", "npz")
DOCUMENT_FORMATS = ROW_FORMATS[:4]
LENGTHS = [[5, 0, 1, 300, 7], [700, 2], [40, 40, 40, 1]]

shards = st.lists(
    st.lists(
        st.lists(st.integers(0, EOS - 1), max_size=9).map(lambda ids: [*ids, EOS]), max_size=6
    ),
    min_size=1,
    max_size=4,
).filter(lambda found: any(map(len, found)))


@pytest.mark.parametrize("to", DOCUMENT_FORMATS)
@settings(max_examples=6, deadline=None)
@example(made=[[[EOS]]], file_tokens=1)
@example(made=[[], [[1, EOS]], []], file_tokens=1)
@given(made=shards, file_tokens=st.sampled_from([1, 7, 30, 1_000]))
def test_documents_come_back(to: str, made: list[list[list[int]]], file_tokens: int) -> None:
    held = [document for shard in made for document in shard]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_store(root / "store", made, vocab_size=257)
        # MDS has a header of some 250 bytes that its limit counts.
        limit = {} if to != "mds" else {"size_limit": 300 + 4 * file_tokens}
        tokens = {"file_tokens": file_tokens} if to != "mds" else {}
        export_store(root / "store", to=to, out=root / "out", **tokens, **limit)
        assert back(root / "out", root / "back") == held


@pytest.mark.parametrize("to", ROW_FORMATS)
@settings(max_examples=4, deadline=None)
@given(made=shards, seq_len=st.sampled_from([2, 3, 8]))
def test_rows_cut_at_eos_are_the_documents(
    to: str, made: list[list[list[int]]], seq_len: int
) -> None:
    """But for what is padding and looks like documents of nothing but their end."""
    held = [document for shard in made for document in shard]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_store(root / "store", made, vocab_size=257)
        columns = {"columns": "attention_mask"} if to not in ("litdata", "npz") else {}
        export_store(root / "store", to=to, out=root / "out", seq_len=seq_len, **columns)
        if to == "litdata":  # whose rows share a token each
            with pytest.raises(UsageError, match="overlap by a token"):
                back(root / "out", root / "back", split_at_eos=True)
            return
        found = back(root / "out", root / "back", split_at_eos=True)
    assert found[: len(held)] == held
    assert all(document == [EOS] for document in found[len(held) :])


@pytest.mark.parametrize("to", ROW_FORMATS)
def test_wide_ids_come_back(tmp_path: Path, to: str) -> None:
    row = np.random.default_rng(0).integers(0, 150_000, 4_000).tolist()
    write_store(tmp_path / "store", [[row]], vocab_size=150_000)
    export_store(tmp_path / "store", to=to, out=tmp_path / "out", seq_len=200)
    foreign = detect_format(tmp_path / "out")

    assert foreign.about.name == to
    options = ImportOptions(settings=complete_settings(foreign, {}))
    opened = foreign.open(tmp_path / "out", options)
    ids = np.concatenate([b.ids for part in opened.parts for b in opened.blocks(part)])
    overlap = 200 + (to in ("litdata", "npz"))
    assert ids[:overlap].tolist() == row[:overlap]
    assert {*ids.tolist()} <= {*row, EOS, 0}


@pytest.mark.parametrize("to", ROW_FORMATS)
def test_workers_and_a_second_run_change_no_byte(tmp_path: Path, to: str) -> None:
    store = small_store(tmp_path / "store", LENGTHS)

    def export(out: Path, workers: int) -> ExportResult:
        file_tokens = None if to == "npz" else 500
        return export_store(
            store.path, to=to, out=out, seq_len=32, file_tokens=file_tokens, workers=workers
        )

    once = export(tmp_path / "a", 1)
    before = visible(tmp_path / "a")
    again = export(tmp_path / "a", 1)

    assert not once.nothing_to_do
    assert again.nothing_to_do
    assert visible(tmp_path / "a") == before
    if to in ("mds", "npz"):
        export(tmp_path / "b", 2)
        assert visible(tmp_path / "b") == before


def visible(folder: Path) -> dict[str, bytes]:
    """What others see of an export."""
    return {name: data for name, data in tree(folder).items() if not name.startswith(".")}


@pytest.mark.parametrize("to", ["mds", "parquet"])
def test_a_lost_file_is_made_again_and_no_other(tmp_path: Path, to: str) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to=to, out=tmp_path / "out", file_tokens=400)
    files = sorted(path for path in (tmp_path / "out").iterdir() if path.suffix[1:] == to)
    assert len(files) > 2
    data, other = files[0].read_bytes(), files[1].stat().st_ino
    files[0].unlink()
    result = export_store(store.path, to=to, out=tmp_path / "out", file_tokens=400)

    assert files[0].read_bytes() == data
    assert files[1].stat().st_ino == other
    assert result.parts_resumed == result.parts - 1


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 400), max_size=30), min_size=1, max_size=4),
    budget=st.integers(1, 2_000),
)
def test_documents_are_cut_as_a_writer_would_that_goes_one_by_one(
    lengths: list[list[int]], budget: int
) -> None:
    blocks = [np.array(each, np.int64) for each in lengths]
    layout = SampleLayout({"tokens": "input_ids"}, dtype=np.dtype("<i4"), size_limit=1 << 20)

    wanted, held, first = [], 0, 0
    flat = [length for shard in lengths for length in shard]
    costs = layout.costs(np.array(flat, np.int64)).tolist()
    for number, cost in enumerate(costs):
        if number > first and held + cost > budget:
            wanted.append((first, number, sum(flat[first:number])))
            first, held = number, 0
        held += cost
    if flat:
        wanted.append((first, len(flat), sum(flat[first:])))
    assert [*cut_lengths(blocks, layout.costs, budget=budget)] == wanted


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_small_batches_give_the_same_rows_as_large_ones(
    tmp_path: Path, packing: str, overlap: int
) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    rows = RowRecords(store, length=31 + overlap, overlap=overlap, packing=packing)

    [whole] = rows.batches(0, rows.count)
    few = [*rows.batches(0, rows.count, tokens=100)]
    assert len(few) > 2
    assert np.array_equal(np.concatenate([batch.tokens for batch in few]), whole.tokens)
    real = [np.ones(b.tokens.shape, bool) if b.real is None else b.real for b in few]
    assert whole.real is not None
    assert np.array_equal(np.concatenate(real), whole.real)


def test_unknown_columns_are_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[3]])

    with pytest.raises(UsageError, match="no column 'label'"):
        export_store(store.path, to="arrow", out=tmp_path / "out", columns="label")


@pytest.mark.parametrize(
    ("to", "packing"),
    [
        ("npz", "best-fit"),
        ("litdata", "concat"),
        ("arrow", "best-fit"),
        ("mds", "pad"),
    ],
)
def test_rows_that_would_be_another_text_are_not_joined(
    tmp_path: Path, to: str, packing: str
) -> None:
    store = small_store(tmp_path / "store", [[5, 30, 7], [70, 2], [40, 40, 25]])
    out = tmp_path / "rows"
    export_store(store.path, to=to, out=out, seq_len=16, packing=packing)
    with pytest.raises(UsageError, match="another text"):
        import_bytes(out, tmp_path / "back", format=to, split_at_eos=True)
    assert not (tmp_path / "back").exists()
    if to == "litdata":
        return
    # Masks tell it too, where nobody else does.
    shutil.rmtree(out / ".tokenmill-export")
    with pytest.raises(UsageError, match="filled up with padding"):
        import_bytes(out, tmp_path / "back", format=to, split_at_eos=True)


@pytest.mark.parametrize("to", ["mds", "pt", "arrow", "parquet"])
def test_rows_cut_from_a_stream_are_joined_and_padding_is_mentioned(
    tmp_path: Path, to: str
) -> None:
    store = small_store(tmp_path / "store", [[5, 30, 7], [70, 2], [40, 40, 25]])
    export_store(store.path, to=to, out=tmp_path / "told", seq_len=16)
    assert back(tmp_path / "told", tmp_path / "whole", split_at_eos=True) == documents(store)
    export_store(store.path, to=to, out=tmp_path / "rows", seq_len=16, columns="none")
    result = import_bytes(tmp_path / "rows", tmp_path / "back", format=to, split_at_eos=True)
    lacking = -store.num_tokens % 16
    assert lacking > 1
    assert documents(tokenmill.Store(tmp_path / "back")) == documents(store) + [[EOS]] * lacking
    assert any(f"{lacking} documents at the ends" in note for note in result.notes)


# Each packing, and whether it pads more rows than the last.
PACKED = [("concat", False), ("pad", True), ("best-fit", True)]


@pytest.mark.parametrize("to", ROW_FORMATS)
@pytest.mark.parametrize(("packing", "pads"), PACKED)
@settings(max_examples=3, deadline=None)
@example(made=[[[1, 1, EOS]]], seq_len=5, masked=True, silent=True)
@given(made=shards, seq_len=st.sampled_from([2, 3, 8]), masked=st.booleans(), silent=st.booleans())
def test_rows_come_back_without_their_padding_and_nothing_else_is_lost(
    to: str,
    packing: str,
    pads: bool,
    made: list[list[list[int]]],
    seq_len: int,
    masked: bool,
    silent: bool,
) -> None:
    if to == "litdata" and (pads or masked):
        return  # refused, and without a place for masks: see below
    masks = [[[int(not silent and i % 3 > 0) for i in document] for document in shard]
             for shard in made] if masked else None  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_store(root / "store", made, vocab_size=257, masks=masks)
        store, overlap = tokenmill.Store(root / "store"), int(to in ("litdata", "npz"))
        export_store(root / "store", to=to, out=root / "out", seq_len=seq_len, packing=packing)
        source = RowRecords(store, length=seq_len + overlap, overlap=overlap, packing=packing)
        wanted, wanted_masks = list[list[int]](), list[list[int]]()
        for batch in source.batches(0, source.count):
            for row, tokens in enumerate(batch.tokens):
                real = slice(None) if batch.real is None else batch.real[row]
                wanted.append(tokens[real].tolist())
                if batch.mask is not None:
                    wanted_masks.append(batch.mask[row][real].tolist())
        import_bytes(root / "out", root / "back")
        found = tokenmill.Store(root / "back", split=None)
        assert documents(found) == wanted
        assert sum(map(len, wanted)) == source.count * source.length - source.padding
        if not masked:
            assert not found.has_mask
        elif to != "npz":  # whose masks are of targets
            masks_found = [found.mask(number) for number in range(len(found))]
            assert [m.tolist() for m in masks_found if m is not None] == wanted_masks


@pytest.mark.parametrize("to", ["mds", "pt", "arrow", "parquet"])
def test_rows_that_are_padded_say_so_and_others_need_not(tmp_path: Path, to: str) -> None:
    store = small_store(tmp_path / "store", [[40, 24]])
    for name, seq_len, padded in (("even", 16, False), ("odd", 15, True)):
        export_store(store.path, to=to, out=tmp_path / name, seq_len=seq_len)
        foreign = detect_format(tmp_path / name)
        options = ImportOptions(settings=complete_settings(foreign, {}))
        opened = foreign.open(tmp_path / name, options)
        lengths = np.concatenate([b.lengths for p in opened.parts for b in opened.blocks(p)])
        assert (lengths[-1] < seq_len) == padded
        assert int(lengths.sum()) == store.num_tokens


def test_padding_that_nothing_could_tell_of_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[40, 25]])
    for packing in ("pad", "best-fit"):
        with pytest.raises(UsageError, match="it would be trained on"):
            export_store(
                store.path, to="litdata", out=tmp_path / "out", seq_len=16, packing=packing
            )


def test_an_export_tells_what_is_not_in_it(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[5, 30, 7]])
    result = export_store(store.path, to="arrow", out=tmp_path / "a", seq_len=16, packing="pad")
    lost = sum(max(0, len(ids) - 16) for ids in documents(store))
    assert lost > 0
    assert any(f"{lost} of {store.num_tokens} tokens are in no row" in n for n in result.notes)
    assert any("3 rows of 16 tokens" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"to": "arrow", "packing": "pad"}, "packing='pad' is about rows"),
        ({"to": "megatron", "file_tokens": 100}, "not cut by tokens"),
    ],
)
def test_options_without_a_meaning_are_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    store = small_store(tmp_path / "store", [[5]])
    with pytest.raises(UsageError, match=problem):
        export_store(store.path, out=tmp_path / "out", **options)


@pytest.mark.parametrize("to", ["mds", "parquet", "arrow", "pt", "npz"])
def test_parts_of_a_file_cut_no_document_that_is_joined(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "IMPORT_PART_BYTES", 100)
    store = small_store(tmp_path / "store", [[50, 300, 70, 12]])
    groups: dict[str, Any] = {"group_tokens": 64} if to == "parquet" else {}
    export_store(store.path, to=to, out=tmp_path / "rows", seq_len=16, **groups)
    rows = import_bytes(tmp_path / "rows", tmp_path / "rows-back", format=to)
    assert rows.parts > 1 or to in ("arrow", "pt")
    found = back(tmp_path / "rows", tmp_path / "back", format=to, split_at_eos=True)
    assert found[: len(store)] == documents(store)
