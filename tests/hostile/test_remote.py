"""Stores behind a URL whose objects are replaced, damaged or refused while they are read."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import attack, times, tried
from tests.loader.stores import write_store
from tests.store.s3_server import BUCKET, s3_session, upload
from tests.web import Fault, Server, serve

from tokenmill import files
from tokenmill.errors import StoreError
from tokenmill.loader.loader import Loader
from tokenmill.store.blocks import BLOCK_BYTES
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

TOKENS = 2 * BLOCK_BYTES
"""Of each of two shards: four blocks, of which a reader brings one at a time."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp, which is not here")
    monkeypatch.setattr(files, "FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    documents = [range(1 + k % 997, 1 + k % 997 + 4096) for k in range(TOKENS // 4096)]
    masks = [[[1] * 4096] * len(documents)] * 2
    write_store(folder / "large", [documents, documents[::-1]], masks=masks)
    write_store(folder / "small", [[range(1, 500), range(7, 90)], [range(1, 4000)]])
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with serve(folder) as server:
        yield server
    for path, data in before.items():
        if path.read_bytes() != data:
            path.write_bytes(data)


def put(path: Path, data: bytes) -> None:
    """Replace a file as an object store does: at once."""
    staged = path.with_suffix(".new")
    staged.write_bytes(data)
    staged.replace(path)


def replace_by_zeros(folder: Path, kind: str) -> list[str]:
    paths = sorted(folder.glob(f"shards/*.{kind}"))
    for path in paths:
        put(path, bytes(path.stat().st_size))
    return [path.name for path in paths]


def all_tokens(store: Store) -> NDArray[np.integer]:
    return np.concatenate(
        [
            np.concatenate([ids, store.mask(k)]) if store.has_mask else ids
            for k, ids in enumerate(store)
        ]
    )


@pytest.mark.parametrize("kind", ["bin", "mask"])
@pytest.mark.parametrize("how", ["this one", "a worker's", "a loader", "cached"])
def test_an_object_that_is_replaced_while_it_is_open_is_named(
    server: Server, folder: Path, tmp_path: Path, kind: str, how: str
) -> None:
    url = f"{server.address}/large"
    store = Store(url, cache=tmp_path if how == "cached" else None)
    store[0], store.mask(0)
    last = len(store) - 1
    store[last], store.mask(last)
    names = replace_by_zeros(folder / "large", kind)
    if how == "a worker's":
        store = pickle.loads(pickle.dumps(store))
    with pytest.raises(StoreError, match="is not the file that this store had") as caught:
        if how == "a loader":
            for batch in Loader(store, seq_len=512, batch_size=8, epochs=1):
                assert batch.input_ids.all()
                batch.loss_mask  # noqa: B018
        else:
            all_tokens(store)
    assert any(name in caught.value.message for name in names)
    tried("objects replaced while a remote store was open")


def test_an_object_of_s3_that_is_replaced_after_opening_is_named(folder: Path) -> None:
    import fsspec

    with s3_session():
        url = upload(folder / "large", prefix="replaced")
        assert np.array_equal(Store(url)[0], Store(folder / "large")[0])
        store, worker = Store(url), pickle.dumps(Store(url))
        s3 = fsspec.filesystem("s3")
        for name in s3.glob(f"{BUCKET}/replaced/shards/*.bin"):
            s3.pipe_file(name, bytes(2 * TOKENS))
        for each in (store, pickle.loads(worker)):
            # Nothing of the tokens was read before: what was listed is held against them.
            with pytest.raises(StoreError, match=r"\.bin' is not the file that this store had"):
                each[0]
            tried("objects replaced while a remote store was open")


def test_what_was_cached_of_a_damaged_object_is_not_served_when_it_is_sound_again(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    url, expected = f"{server.address}/large", all_tokens(Store(folder / "large"))
    sound = {path: path.read_bytes() for path in (folder / "large" / "shards").iterdir()}
    replace_by_zeros(folder / "large", "bin")
    assert not Store(url, cache=tmp_path)[0].any()  # nobody can tell: see docs/security.md
    for path, data in sound.items():
        path.write_bytes(data)
    assert np.array_equal(all_tokens(Store(url, cache=tmp_path)), expected)
    server.reset()
    assert np.array_equal(all_tokens(Store(url, cache=tmp_path)), expected)
    assert server.sent < expected.nbytes // 100, "and what is sound comes from the cache"
    tried("objects replaced under a cache folder")


def test_a_small_object_is_compared_with_the_manifest(server: Server, folder: Path) -> None:
    replace_by_zeros(folder / "small", "bin")
    store = Store(f"{server.address}/small")
    with pytest.raises(StoreError, match=r"\.bin' is not the file .* or it is damaged"):
        all_tokens(store)


KINDS = ["403", "404", "416", "429", "500", "503", "cut", "short", "whole", "flip"]


@attack(short=15, long=1500, parts=3)
@given(
    faults=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from(["", ".bin", ".idx", ".mask", "json"]),
            st.integers(1, 12),
        ),
        max_size=3,
    ),
    seed=st.integers(0, 10**9),
)
def test_a_server_with_faults_gives_the_same_tokens_or_an_error(
    shared: tuple[Server, dict[str, Store]], faults: list[tuple[str, str, int]], seed: int
) -> None:
    server, stores = shared
    server.faults = [Fault(kind, match, count) for kind, match, count in faults]
    # A bit that flips on its way, in a part of a large object, is not seen: no checksum is of it.
    flips = any(kind == "flip" for kind, _, _ in faults)
    dice = random.Random(seed)
    try:
        local = stores["small" if flips else "large"]
        store = Store(f"{server.address}/{local.layout.root.name}")
        numbers = dice.sample(range(len(store)), min(6, len(store)))
        found = [np.array(store[number]) for number in numbers]
        whole = all_tokens(store) if flips else None
    except StoreError as error:
        assert "127.0.0.1" in error.message  # noqa: PT017
    else:
        if whole is not None:
            assert np.array_equal(whole, all_tokens(local))
        for number, ids in zip(numbers, found, strict=True):
            assert np.array_equal(ids, local[number])
    tried("requests of a remote store answered with faults")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[tuple[Server, dict[str, Store]]]:
    with serve(folder) as server:
        yield server, {name: Store(folder / name) for name in ("small", "large")}


def test_an_object_is_replaced_at_a_random_moment_of_an_epoch(server: Server, folder: Path) -> None:
    store = Store(folder / "large")
    rows = [batch.input_ids.copy() for batch in Loader(store, seq_len=511, batch_size=64, epochs=1)]
    sound = {path: path.read_bytes() for path in (folder / "large" / "shards").glob("*.bin")}
    for case in range(times(short=3, long=100)):
        moment = random.Random(case).randrange(len(rows))
        loader = Loader(f"{server.address}/large", seq_len=511, batch_size=64, epochs=1)
        try:
            for step, batch in enumerate(loader):
                assert np.array_equal(batch.input_ids, rows[step])
                if step == moment:
                    replace_by_zeros(folder / "large", "bin")
        except StoreError as error:
            assert ".bin' is not the file" in error.message  # noqa: PT017
        for path, data in sound.items():
            put(path, data)
        tried("objects replaced while a remote store was open")
