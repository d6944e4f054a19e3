"""Stores that were damaged, or made by someone who wishes harm: an error that names the file."""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

import pytest
from tests.hostile.attack import tried
from tests.loader.stores import write_store

import tokenmill
from tokenmill.errors import StoreError
from tokenmill.loader.loader import Loader
from tokenmill.store import stream
from tokenmill.store.mapped import MappedTokens
from tokenmill.torch import DeviceFeeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tokenmill.store.reader import Store

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork, links or truncation")


def make_store(root: Path, *, masked: bool = False) -> Store:
    """Three shards of many pages each."""
    shards = [[range(k, k + 40) for k in range(1000)] for _ in range(3)]
    masks = [[[1] * 40 for _ in shard] for shard in shards] if masked else None
    return write_store(root, shards, masks=masks)


def in_a_fork(call: Callable[[], None]) -> int:
    """How a copy of this process ends that does the call: 0, or the signal or -1 for an error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def read_documents(store: Store) -> None:
    for number in range(len(store)):
        store[number].sum()
        if store.has_mask:
            store.mask(number)


def iterate(store: Store) -> None:
    for document in store:
        document.sum()


def read_lengths(store: Store) -> None:
    store.lengths().sum()
    store.num_counted  # noqa: B018


def batches_of(store: Store, packing: str, *, feeder: bool) -> Iterator[object]:
    loader = Loader(store, seq_len=64, batch_size=8, packing=packing, epochs=200)
    if feeder:
        fields = ["input_ids", "labels", "doc_ids"]
        yield from DeviceFeeder(loader, device="cpu", fields=fields)
        return
    for batch in loader:
        yield batch.loss_mask
        yield batch.doc_ids


WAYS = ["reserved", "mapped", "feeder"]
READERS: dict[str, Callable[[Store], object]] = {
    "documents": read_documents,
    "iteration": iterate,
    "lengths": read_lengths,
}


@posix
@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        *itertools.product(["bin", "idx", "mask"], ["documents", "iteration"]),
        ("idx", "lengths"),
    ],
)
def test_a_file_that_is_cut_off_while_it_is_open_is_named(
    tmp_path: Path, kind: str, reader: str
) -> None:
    make_store(tmp_path / "store", masked=kind == "mask")

    def attack() -> None:
        store = tokenmill.Store(tmp_path / "store")
        for each in READERS.values():
            each(store)
        path = next((tmp_path / "store" / "shards").glob(f"*.{kind}"))
        os.truncate(path, 4096)
        with pytest.raises(StoreError, match="cut off while it was open") as caught:
            READERS[reader](store)
        assert path.name in caught.value.message

    assert in_a_fork(attack) == 0
    tried("files cut off while they were mapped")


@posix
@pytest.mark.parametrize(
    ("kind", "packing", "way"),
    [
        *itertools.product(["bin"], ["concat", "best-fit", "pad"], [*WAYS, "in place"]),
        *itertools.product(["mask"], ["concat", "best-fit", "pad"], WAYS),
        *itertools.product(["idx"], ["concat", "pad"], WAYS),
        *itertools.product(["plan"], ["best-fit"], [*WAYS, "in place"]),
    ],
)
def test_a_file_that_is_cut_off_under_a_loader_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packing: str, way: str
) -> None:
    root = tmp_path / "store"
    make_store(root, masked=kind == "mask")
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))

    def attack() -> None:
        if way == "mapped":
            monkeypatch.setattr(stream, "ReservedTokens", MappedTokens)
        monkeypatch.setattr(stream, "FEW_DOCUMENTS", 0)  # as more documents are read
        if way == "in place":
            prefix = next((root / "shards").glob("*.bin")).with_suffix("")
            store = tokenmill.Store.open_foreign(prefix, format="megatron")
        else:
            store = tokenmill.Store(root)
        batches = batches_of(store, packing, feeder=way == "feeder")
        for _ in range(4):
            next(batches)
        for path in sorted(tmp_path.rglob(f"*.{kind}")):
            os.truncate(path, 4096)
        time.sleep(0.01)
        with pytest.raises(StoreError, match="cut off while it was open") as caught:
            list(batches)
        assert f".{kind}' " in caught.value.message

    assert in_a_fork(attack) == 0
    tried("files cut off while they were mapped")
