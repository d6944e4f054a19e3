"""The loader on a store behind a URL: the same batches, brought ahead of time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.loader.stores import write_store
from tests.web import Fault, Server, serve

from tokenmill import files
from tokenmill.errors import StoreError
from tokenmill.loader.loader import Loader
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenmill.loader.batch import Batch

PACKINGS = ["concat", "best-fit", "pad"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "plans"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    lengths = np.random.default_rng(0).integers(1, 900, 600).tolist()
    shards = [[range(k % 50_000, k % 50_000 + n) for k, n in enumerate(lengths)]] * 3
    write_store(folder / "store", shards)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serve(folder) as server:
        yield server


def take(loader: Loader, count: int) -> list[Batch]:
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [True, "block", False])
@pytest.mark.parametrize("cached", [True, False])
def test_batches_are_those_of_the_local_store(
    folder: Path, server: Server, tmp_path: Path, packing: str, shuffle: bool | str, cached: bool
) -> None:
    far = Store(f"{server.address}/store", cache=tmp_path / "blocks" if cached else None)
    local, remote_ = (
        Loader(store, seq_len=512, batch_size=8, packing=packing, shuffle=shuffle)
        for store in (folder / "store", far)
    )
    for near, brought in zip(take(local, 40), take(remote_, 40), strict=True):
        assert brought.tokens.tolist() == near.tokens.tolist()
        assert brought.position_ids.tolist() == near.position_ids.tolist()
    assert remote_.state_dict() == local.state_dict()
    far.close()


def test_the_next_rows_are_asked_for_while_others_are_used(server: Server) -> None:
    far = Store(f"{server.address}/store")
    loader = Loader(far, seq_len=512, batch_size=8, prefetch=0)
    batches = iter(loader)
    next(batches)
    # A step is 8 rows of 513 tokens; the two steps after it are read together.
    three_steps = (server.folder / "store/tokenmill.json").stat().st_size + 3 * 8 * 513 * 2
    for _ in range(200):
        if server.sent > three_steps:
            break
        time.sleep(0.02)
    assert server.sent > three_steps
    next(batches)
    far.close()
    assert not [t.name for t in threading.enumerate() if "tokenmill" in t.name]


def test_a_rank_reads_only_the_rows_it_is_given(server: Server) -> None:
    def read(*, rank: int, world_size: int, steps: int) -> int:
        """Bytes of tokens that a rank asks for; all ranks together have 32 rows in a step."""
        server.reset()
        far = Store(f"{server.address}/large")
        loader = Loader(
            far, seq_len=8191, batch_size=32 // world_size, rank=rank, world_size=world_size
        )
        take(loader, steps)
        far.close()
        return sum(map(range_bytes, server.asked(".bin")))

    long = [range(k, k + 20_000) for k in range(300)]
    write_store(server.folder / "large", [long, long[::-1]])
    row_bytes = 8192 * 2
    alone = read(rank=0, world_size=1, steps=20)
    assert alone >= 20 * 32 * row_bytes
    for rank in (0, 3):
        brought = read(rank=rank, world_size=4, steps=20)
        assert 20 * 8 * row_bytes <= brought < 0.45 * alone, "its quarter, and a few steps ahead"


def range_bytes(line: str) -> int:
    first, _, last = line.rpartition("bytes=")[2].partition("-")
    return int(last) + 1 - int(first)


def test_a_server_that_fails_for_good_is_an_error_that_names_it(server: Server) -> None:
    far = Store(f"{server.address}/store")
    batches = iter(Loader(far, seq_len=512, batch_size=8))
    next(batches)
    server.faults.append(Fault(kind="404", match=".bin"))
    with pytest.raises(StoreError, match=r"\.bin"):
        for _ in range(2000):
            next(batches)
    far.close()
    assert not [t.name for t in threading.enumerate() if "tokenmill" in t.name]
