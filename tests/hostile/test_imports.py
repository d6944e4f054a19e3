"""Imports of files that lie: about sizes and offsets, about what they unpack to, about names.

All of it runs in programs of their own (foreign_files.py), with guards around what they map
(guard.py) and nothing between a crash and the test.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.hostile.attack import LONG, times, tried
from tests.hostile.foreign_files import BASES, CASES
from tests.hostile.guard import run_guarded
from tests.interop.rows import small_store
from tests.interop.stores import EOS, import_ids

import tokenmill
from tokenmill.errors import SourceError
from tokenmill.interop.export import export_store
from tokenmill.interop.in_place import convert

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_GROWTH = 256 << 20
"""What a refused file may cost: the bombs among them are larger."""
MOST_BYTES = 1 << 30
"""What a program may hold that imports small files, damaged as they are, and torch."""


def outcomes(*arguments: object) -> Iterator[dict[str, Any]]:
    """What the program prints of each case; the last one alone has no outcome if it crashed."""
    done = run_guarded("tests.hostile.foreign_files", *arguments)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]} ended it: {done.stderr[-3000:]}"
    return (line for line in lines if "peak_bytes" in line)


def test_files_that_lie_are_refused_before_they_cost_anything(tmp_path: Path) -> None:
    wrong = []
    for found in outcomes("cases", tmp_path):
        tried("imports of files that lie about themselves")
        held = found.get("error") == "SourceError" and not found["left"]
        if not held or found["peak_bytes"] - found["before_bytes"] > MOST_GROWTH:
            wrong.append(found)
    assert not wrong


@pytest.mark.parametrize("kinds", [[kind] for kind in BASES] if LONG else [[*BASES]])
def test_damaged_files_give_their_own_ids_or_an_error(tmp_path: Path, kinds: list[str]) -> None:
    wrong = []
    for found in outcomes("damage", tmp_path, "0", times(short=4, long=1000), *kinds):
        tried("imports of files damaged at random")
        broken = "fault" in {**found.get("in_place", {}), **found}
        if broken or found.get("strange") or found["left"] or found["peak_bytes"] > MOST_BYTES:
            wrong.append(found)
    assert not wrong


def test_every_case_was_there() -> None:
    """The names are what the report counts; none may have been overwritten."""
    assert len(CASES) > 80
    assert {"megatron", "mds of fixed sizes", "packed arrow file", "packed parquet"} < {*BASES}


def test_a_long_document_is_refused_in_place(tmp_path: Path) -> None:
    """Its length would not fit the 31 bits of an index."""
    CASES["datatrove: a document of 2^32 tokens"](tmp_path)
    store = tokenmill.Store.open_foreign(tmp_path, format="datatrove")
    with pytest.raises(SourceError, match="4,294,967,296 tokens"):
        len(store[0])
    tried("imports of files that lie about themselves")


def test_a_conversion_names_the_file_too(tmp_path: Path) -> None:
    for case in ("mds: negative sizes", "litdata: infinite tokens", "npy: a header of brackets"):
        source = tmp_path / case.partition(":")[0]
        source.mkdir()
        name = CASES[case](source)
        with pytest.raises(SourceError, match=str(source)):
            convert(source, format=name, to="nanogpt", out=tmp_path / "out")
        with pytest.raises(SourceError, match=str(source)):
            import_ids(source, tmp_path / "out", format_name=None)
        tried("imports of files that lie about themselves")


def test_large_packed_shards_are_read_all_the_same(tmp_path: Path) -> None:
    """The limits on what is unpacked are far above what honest files do."""
    store = small_store(tmp_path / "made", [[5, 1, 300, 7, 40]])
    for kind in ("packed mds", "packed litdata"):
        source = tmp_path / kind
        source.mkdir()
        name = BASES[kind](source)
        import_ids(source, tmp_path / f"{kind} store", format_name=name)
        found = tokenmill.Store(tmp_path / f"{kind} store")
        assert [each.tolist() for each in found] == [each.tolist() for each in store]


def test_rows_without_an_end_are_not_joined_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.interop.base.HELD_BYTES", 1 << 16)
    np.save(tmp_path / "a.npy", np.ones((1 << 16, 64), np.uint16))
    with pytest.raises(SourceError, match="rows without an end-of-text"):
        import_ids(tmp_path / "a.npy", tmp_path / "out", format_name="npz", split_at_eos=True)
    rows = np.ones((1 << 10, 64), np.uint16)
    rows[:, -1] = EOS
    np.save(tmp_path / "a.npy", rows)
    made = import_ids(tmp_path / "a.npy", tmp_path / "out", format_name="npz", split_at_eos=True)
    assert made.documents == len(rows)


def test_links_and_names_reach_nothing_else(tmp_path: Path) -> None:
    """A link is a file like any other, and one that leads nowhere is an error."""
    store = small_store(tmp_path / "made", [[5, 1, 300]])
    export_store(store.path, to="megatron", out=tmp_path / "a")
    index = next((tmp_path / "a").glob("*.idx"))
    index.rename(tmp_path / "elsewhere.idx")
    index.symlink_to(tmp_path / "elsewhere.idx")
    assert import_ids(tmp_path / "a", tmp_path / "1", format_name="megatron").documents == 3
    for target in (index, tmp_path / "nothing"):
        index.unlink()
        index.symlink_to(target)
        with pytest.raises(SourceError):
            import_ids(tmp_path / "a", tmp_path / "2", format_name="megatron")
        tried("imports of files that lie about themselves")
