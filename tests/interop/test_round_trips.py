"""Whatever documents a store has: exported, imported, and read in place, they come back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interop.stores import (
    NARROW,
    WIDE,
    flat,
    ids_of,
    import_ids,
    shards,
    write_store,
)

import tokenmill

EXAMPLES = settings(max_examples=8, deadline=None)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where syncing hundreds of small files costs nothing."""
BORDERED = ("megatron", "datatrove", "olmo")


def check(found: list[list[list[int]]], *, to: str, vocab_size: int, **options: Any) -> None:
    """Through an export, an import and in place."""
    expected = flat(found)
    root = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        write_store(root / "store", found, vocab_size=vocab_size)
        tokenmill.export_store(root / "store", to=to, out=root / "out", workers=1, **options)
        more: dict[str, Any] = {"dtype": "uint32"} if (to, vocab_size) == ("olmo", WIDE) else {}
        result = import_ids(
            root / "out", root / "back", format_name=None, vocab_size=vocab_size, **more
        )
        assert ids_of(tokenmill.Store(root / "back")) == expected
        assert result.documents == len(expected)
        assert result.has_boundaries
        in_place = tokenmill.Store.open_foreign(root / "out", **more)
        assert ids_of(in_place) == expected
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("to", BORDERED)
@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@EXAMPLES
@given(data=st.data())
def test_documents_come_back(to: str, vocab_size: int, data: st.DataObject) -> None:
    eos = data.draw(st.booleans())
    found = data.draw(shards(vocab_size, eos=eos))
    check(found, to=to, vocab_size=vocab_size)


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@EXAMPLES
@given(data=st.data())
def test_merged_shards_come_back(vocab_size: int, data: st.DataObject) -> None:
    found = data.draw(shards(vocab_size, eos=True))
    check(found, to="megatron", vocab_size=vocab_size, merge=True)


@EXAMPLES
@given(found=shards(NARROW, eos=True))
def test_nanogpt_comes_back_where_it_is_cut_at_eos(found: list[list[list[int]]]) -> None:
    root = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        write_store(root / "store", found)
        tokenmill.export_store(root / "store", to="nanogpt", out=root / "out", workers=1)
        tokens = [token for document in flat(found) for token in document]
        assert np.fromfile(root / "out" / "train.bin", "<u2").tolist() == tokens
        result = import_ids(root / "out", root / "back", format_name="nanogpt", split_at_eos=True)
        assert ids_of(tokenmill.Store(root / "back")) == flat(found)
        assert not result.has_boundaries
        assert result.eos == "appended"
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@EXAMPLES
@given(data=st.data())
def test_llmc_has_eos_in_front_and_cuts_files_anywhere(
    vocab_size: int, data: st.DataObject
) -> None:
    found = data.draw(shards(vocab_size, eos=True))
    size = data.draw(st.integers(1, 20))
    # What is told apart by its end-of-text alone has one, and stands in front in llm.c's files.
    expected = [[document[-1], *document[:-1]] for document in flat(found)]
    root = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        write_store(root / "store", found, vocab_size=vocab_size)
        tokenmill.export_store(
            root / "store", to="llmc", out=root / "out", workers=1, file_tokens=size
        )
        files = sorted((root / "out").glob("*.bin"))
        dtype = "<u2" if vocab_size == NARROW else "<u4"
        width = np.dtype(dtype).itemsize
        sizes = [path.stat().st_size for path in files]
        assert all(each == 1024 + size * width for each in sizes[:-1])
        tokens = np.concatenate([np.fromfile(path, dtype, offset=1024) for path in files])
        assert tokens.tolist() == [token for document in expected for token in document]
        result = import_ids(
            root / "out",
            root / "back",
            format_name=None,
            vocab_size=vocab_size,
            split_at_eos=True,
        )
        assert ids_of(tokenmill.Store(root / "back")) == expected
        assert result.eos == ("prepended" if any(len(d) > 1 for d in expected) else "appended")
    finally:
        shutil.rmtree(root)


@EXAMPLES
@given(found=shards(NARROW, eos=False), size=st.integers(1, 20))
def test_llmc_puts_an_id_in_front_where_a_store_has_none(
    found: list[list[list[int]]], size: int
) -> None:
    root = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        # An import of such documents finds no end-of-text.
        write_store(root / "first", found)
        tokenmill.export_store(root / "first", to="megatron", out=root / "pairs", workers=1)
        import_ids(root / "pairs", root / "store", format_name="megatron")
        tokenmill.export_store(
            root / "store", to="llmc", out=root / "out", workers=1, file_tokens=size, eot=7
        )
        files = sorted((root / "out").glob("*.bin"))
        tokens = [np.fromfile(path, "<u2", offset=1024) for path in files]
        expected = [token for document in flat(found) for token in [7, *document]]
        assert np.concatenate([*tokens, np.zeros(0, "<u2")]).tolist() == expected
    finally:
        shutil.rmtree(root)


def test_one_huge_document_comes_back(tmp_path: Path) -> None:
    """Larger than any block that is read or written in one go."""
    huge = np.random.default_rng(0).integers(0, 250, 4_500_000).tolist()
    write_store(tmp_path / "store", [[[1, 2], [*huge, 256]], [[3, 256]]])
    for to in BORDERED:
        tokenmill.export_store(tmp_path / "store", to=to, out=tmp_path / to, workers=1)
        import_ids(tmp_path / to, tmp_path / f"{to}-back", format_name=None)
        back = tokenmill.Store(tmp_path / f"{to}-back")
        assert [len(document) for document in back] == [2, len(huge) + 1, 2]
        assert np.array_equal(back[1][:-1], huge)
