"""Stores behind a URL: the same store, little is read, and every failure says what happened."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.loader.stores import write_store
from tests.store.remote_jobs import read_some
from tests.web import Fault, Server, serve

import tokenmill
from tokenmill import files as files_module
from tokenmill.errors import StoreError, UsageError
from tokenmill.store import blocks
from tokenmill.store import remote as remote_module
from tokenmill.store.blocks import BLOCK_BYTES

from .s3_server import S3, s3_session, upload
from .samples import GOLDEN, SampleStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.store.remote import RemoteFiles

SMALL = SampleStore(
    units=GOLDEN.units, tokenizer_files={"tokenizer.json": b"{}", "vocab.txt": b"a\nb\n"}
)
SHARDS, SHARD_BYTES = 2, 6 * BLOCK_BYTES - 2000


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is served: `small`, with everything a store may have, and `large`, of several blocks."""
    folder = tmp_path_factory.mktemp("served")
    SMALL.write(folder / "small")
    ends = np.cumsum(np.random.default_rng(0).integers(1, 3000, 3000))
    ends = np.append(ends[ends < SHARD_BYTES // 2], SHARD_BYTES // 2)
    lengths = np.diff(ends, prepend=0).tolist()
    documents = [range(17 * k % 50_000, 17 * k % 50_000 + size) for k, size in enumerate(lengths)]
    write_store(folder / "large", [documents, documents[::-1]])
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serve(folder) as server:
        yield server


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3]:
    with s3_session() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3) -> S3:
    s3_server.log.clear()
    s3_server.slow_downs, s3_server.denied, s3_server.delay_seconds = 0, "", 0.0
    s3_server.most_at_once = 0
    return s3_server


@pytest.fixture(params=["http", "memory", "s3"])
def small_url(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "http":
        server: Server = request.getfixturevalue("server")
        return f"{server.address}/small"
    if request.param == "s3":
        request.getfixturevalue("s3")
        return upload(folder / "small", prefix="remote/small")
    return upload_to_memory(folder / "small", "small")


def upload_to_memory(folder: Path, name: str) -> str:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe(f"/{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"memory://{name}"


def ids(store: tokenmill.Store) -> list[list[int]]:
    return [document.tolist() for document in store]


def test_everything_that_a_store_can_do_works_behind_a_url(small_url: str, folder: Path) -> None:
    local = tokenmill.Store(folder / "small", split=None)
    with tokenmill.Store(small_url, split=None) as store:
        assert (len(store), store.num_tokens, store.dtype.name) == (6, 73, "uint16")
        assert ids(store) == ids(local)
        assert [store[k].tolist() for k in range(-6, 6)] == [
            local[k].tolist() for k in range(-6, 6)
        ]
        assert not store[0].flags.writeable
        assert store.lengths().tolist() == local.lengths().tolist()
        assert [store.source(k) for k in range(6)] == [local.source(k) for k in range(6)]
        assert list(store.rejects()) == list(local.rejects())
        assert [store.decode(k) for k in range(6)] == [local.decode(k) for k in range(6)]
        assert store.content == local.content
        assert ids(tokenmill.Store(small_url, split="val")) == ids(
            tokenmill.Store(folder / "small", split="val")
        )
        mapped, expected = store.map_shard(1), local.map_shard(1)
        assert np.array_equal(mapped.index.offsets, expected.index.offsets)
        assert np.array_equal(mapped.index.documents, expected.index.documents)
        assert np.array_equal(np.asarray(mapped.tokens), expected.tokens)
        assert (len(mapped.tokens), mapped.tokens[3]) == (len(expected.tokens), expected.tokens[3])
        assert mapped.tokens[5:2].tolist() == []
        assert mapped.tokens[::-2].tolist() == expected.tokens[::-2].tolist()
        assert store.is_remote
        assert str(store.path).endswith("small")
        assert small_url in repr(store)
    assert store[0].tolist() == local[0].tolist(), "a closed store opens its files again"


def test_the_tokenizer_is_brought_to_a_private_folder_that_goes_with_the_store(
    server: Server,
) -> None:
    store = tokenmill.Store(f"{server.address}/small")
    brought = store.tokenizer_dir
    assert {path.name: path.read_bytes() for path in brought.iterdir()} == SMALL.tokenizer_files
    if sys.platform != "win32":
        assert brought.stat().st_mode & 0o077 == 0
    store.close()
    assert not brought.exists()
    brought = store.tokenizer_dir
    assert len(list(brought.iterdir())) == 2
    del store
    assert not brought.exists(), "nothing else refers to the store, so it is gone at once"


def test_opening_over_http_is_one_request_and_a_document_is_two(server: Server) -> None:
    store = tokenmill.Store(f"{server.address}/large")
    assert server.log == ["GET /large/tokenmill.json"]
    server.reset()
    document = store[700]
    assert [line.split()[0] for line in server.log] == ["GET", "GET"]
    index, tokens = server.log
    assert f"bytes=34-{33 + 4 * store.shards[0].documents}" in index, "a fifth of the index"
    first, _, last = tokens.rpartition("bytes=")[2].partition("-")
    assert int(last) + 1 - int(first) == document.nbytes
    server.reset()
    assert store[701].tolist()
    assert len(server.log) == 1, "the index is here now"


def test_opening_lists_folders_where_the_server_does(s3: S3, folder: Path) -> None:
    url = upload(folder / "small", prefix="listed")
    s3.log.clear()
    tokenmill.Store(url)
    assert sum("list-type=2" in line for line in s3.log) == 3
    assert sum("tokenmill.json" in line for line in s3.log) == 1, "nobody asks for its size first"
    assert len(s3.log) == 4
    s3.denied = "list-type"
    assert len(tokenmill.Store(url)) == 4, "whoever may read need not be allowed to list"


def test_lost_and_cut_files_are_found_at_opening_by_name(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "small", tmp_path / "broken")
    lost, *others = sorted((copy / "shards").glob("*.bin"))
    lost.unlink()
    with pytest.raises(StoreError, match=r"memory://broken1/shards/.*\.bin' is missing;"):
        tokenmill.Store(upload_to_memory(copy, "broken1"))
    others[0].write_bytes(others[0].read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"17 bytes instead of 18 \(and 1 more files\)"):
        tokenmill.Store(upload_to_memory(copy, "broken2"))


def test_a_file_of_the_wrong_size_on_a_server_without_lists_is_found_when_it_is_read(
    folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder / "small", tmp_path / "small")
    with serve(tmp_path) as server:
        store = tokenmill.Store(f"{server.address}/small")
        path = copy / "shards" / f"{store.shards[0].name}.bin"
        path.write_bytes(path.read_bytes()[:-6])
        with pytest.raises(
            StoreError, match=r"bin' cannot be read: 90 bytes came instead of the 9"
        ):
            list(store)
        path.unlink()
        with pytest.raises(StoreError, match=r"bin' cannot be read: it is not there") as caught:
            list(store)
        assert "copy the store to the server again" in str(caught.value.hint)


class Large:
    """The store `large`, and what its tokens are."""

    def __init__(self, folder: Path, url: str, **options: object) -> None:
        self.store = tokenmill.Store(url, **options)  # type: ignore[arg-type]
        local = tokenmill.Store(folder / "large")
        self.expected = [local.map_shard(k).tokens.tobytes() for k in range(SHARDS)]
        assert self.store.remote is not None
        self.remote: RemoteFiles = self.store.remote

    def check(self, pieces: NDArray[np.int64]) -> None:
        """Read pieces (shard, first, last) and compare them."""
        found = self.remote.read(self.named(pieces), kind="bin")
        assert len(found) == len(pieces) > 0
        for data, (shard, first, last) in zip(found, pieces.tolist(), strict=True):
            assert data == self.expected[shard][first:last]

    def begin(self, pieces: NDArray[np.int64]) -> None:
        self.remote.read_ahead(self.named(pieces), kind="bin")

    def named(self, pieces: NDArray[np.int64]) -> list[tuple[str, int, int]]:
        return [(self.store.shards[k].name, first, last) for k, first, last in pieces.tolist()]


@pytest.fixture
def large(folder: Path, server: Server) -> Iterator[Large]:
    large = Large(folder, f"{server.address}/large")
    server.reset()
    yield large
    large.store.close()


def scattered(count: int, *, seed: int, size: int = 4098) -> NDArray[np.int64]:
    dice = np.random.default_rng(seed)
    firsts = dice.integers(0, SHARD_BYTES - size, count)
    return np.stack([dice.integers(0, SHARDS, count), firsts, firsts + size], axis=1)


def in_order(first: int, last: int, *, shard: int = 0, size: int = 4096) -> NDArray[np.int64]:
    firsts = np.arange(first, last, size)
    return np.stack([np.full(len(firsts), shard), firsts, np.minimum(firsts + size, last)], axis=1)


@pytest.mark.parametrize("cached", [False, True])
def test_any_pieces_are_the_bytes_of_the_files(
    folder: Path, server: Server, tmp_path: Path, cached: bool
) -> None:
    cache = {"cache": tmp_path / "cache"} if cached else {}
    large = Large(folder, f"{server.address}/large", **cache)
    dice = np.random.default_rng(1)
    for _ in range(15):
        count = int(dice.integers(1, 30))
        ends = np.sort(dice.integers(0, SHARD_BYTES + 1, (count, 2)), axis=1)
        if dice.random() < 0.5:
            ends[:, 1] = np.minimum(ends[:, 0] + dice.integers(0, 5000, count), SHARD_BYTES)
        large.check(np.column_stack([dice.integers(0, SHARDS, count), ends]))
    everything = np.array([[shard, 0, SHARD_BYTES] for shard in range(SHARDS)])
    large.check(everything)
    large.check(everything[:, [0, 1, 1]])
    with pytest.raises(ValueError, match="which has"):
        large.check(np.array([[0, 0, SHARD_BYTES + 1]]))


def test_scattered_pieces_bring_little_more_than_themselves(large: Large, server: Server) -> None:
    pieces = scattered(30, seed=2)
    large.check(pieces)
    wanted = int((pieces[:, 2] - pieces[:, 1]).sum())
    assert wanted <= server.sent < 3 * wanted, "blocks would be 90 times as much"
    assert len(server.log) <= 30


def test_pieces_that_lie_close_together_come_in_one_request(large: Large, server: Server) -> None:
    near = np.array([[0, first, first + 100] for first in (0, 30_000, 60_000, 400_000)])
    large.check(near)
    assert sorted(line.rpartition(" ")[2] for line in server.log) == [
        "bytes=0-60099",
        "bytes=400000-400099",
    ]


def test_a_chain_of_close_pieces_is_cut_into_ranges(large: Large, server: Server) -> None:
    firsts = range(0, SHARD_BYTES - 100, 50_000)
    large.check(np.array([[0, first, first + 100] for first in firsts]))
    assert len(server.log) == 2
    assert 50_000 * len(firsts) * 0.9 < server.sent < SHARD_BYTES


def test_pieces_in_order_bring_every_block_once(large: Large, server: Server) -> None:
    for first in range(0, 4 * BLOCK_BYTES, BLOCK_BYTES // 2):
        large.check(in_order(first, first + BLOCK_BYTES // 2))
    assert len(server.log) == 4
    assert server.sent == 4 * BLOCK_BYTES
    server.reset()
    large.check(in_order(0, 4 * BLOCK_BYTES))
    assert server.log == [], "they are still in memory"


def test_what_a_call_wants_is_asked_for_at_once(large: Large, server: Server) -> None:
    server.together = threading.Barrier(23)
    large.check(scattered(24, seed=3))
    assert (len(server.log), server.most_at_once) == (23, 23), "two of them lie close together"
    assert not server.together.broken


def test_a_call_that_wants_much_comes_in_waves(
    large: Large, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "WAVE_BYTES", 2 * BLOCK_BYTES)
    server.together = threading.Barrier(2)
    large.check(np.array([[0, 0, SHARD_BYTES]]))
    assert (len(server.log), server.most_at_once) == (6, 2)
    assert not server.together.broken


def test_iterating_brings_runs_of_documents(folder: Path, server: Server) -> None:
    store = tokenmill.Store(f"{server.address}/large")
    server.reset()
    local = tokenmill.Store(folder / "large")
    assert all(np.array_equal(a, b) for a, b in zip(store, local, strict=True))
    assert len(server.log) == 2 * 6 + 2, "every block and index once, for thousands of documents"


def test_indexes_of_many_shards_come_at_once(large: Large, server: Server) -> None:
    server.together = threading.Barrier(2)
    large.remote.prepare_indexes([large.store.shards[k].name for k in (0, 1, 0)])
    assert (len(server.log), server.most_at_once) == (2, 2)
    server.reset()
    large.store.lengths()
    large.store.map_shard(1)
    assert server.log == []


@pytest.mark.parametrize("kind", ["500", "503", "429", "cut", "short"])
def test_failures_that_pass_are_not_noticed(large: Large, server: Server, kind: str) -> None:
    server.faults = [Fault(kind, match=".bin", times=3), Fault(kind, match=".idx", times=1)]
    large.check(np.concatenate([scattered(5, seed=4), in_order(0, 2 * BLOCK_BYTES)]))
    assert len(large.store.map_shard(1).index.lengths)
    assert all(fault.times == 0 for fault in server.faults)


@pytest.mark.parametrize(
    ("kind", "reason", "advice"),
    [
        ("403", "the server answers 403 Forbidden", "credentials"),
        ("401", "the server answers 401 Unauthorized", "credentials"),
        ("404", "it is not there", "copy the store to the server again, with all its files"),
        ("500", r"the server answers 500 .*\(8 attempts\)", "check the network"),
        ("cut", r"\(8 attempts\)", "check the network"),
        ("short", r"50 bytes came instead of the 100 from byte 6 \(8 attempts\)", "network"),
        ("whole", "bytes came instead of the 100 from byte 6", "answers range requests"),
        ("418", "the server answers 418", "check the address"),
    ],
)
def test_failures_that_stay_say_which_file_why_and_what_to_do(
    large: Large, server: Server, kind: str, reason: str, advice: str
) -> None:
    server.faults = [Fault(kind, match=".bin")]
    with pytest.raises(StoreError, match=reason) as caught:
        large.remote.read(large.named(np.array([[1, 6, 106]])), kind="bin")
    assert f"{server.address}/large/shards/{large.store.shards[1].name}.bin" in str(caught.value)
    assert advice in str(caught.value.hint)
    attempts = files_module.ATTEMPTS if "attempts" in reason else 1
    assert len(server.asked(".bin")) <= attempts + (kind == "cut"), "aiohttp may ask once more"
    server.faults = []
    large.check(np.array([[1, 6, 106]]))


def test_a_missing_store_and_a_missing_server_are_named(server: Server) -> None:
    with pytest.raises(StoreError, match=r"there is no store at 'http.*/none'") as caught:
        tokenmill.Store(f"{server.address}/none")
    assert "check the address" in str(caught.value.hint)
    with pytest.raises(StoreError, match=r"'http://127.0.0.1:1/store/tokenmill.json' cannot be r"):
        tokenmill.Store("http://127.0.0.1:1/store")
    with pytest.raises(StoreError, match="nosuch") as caught:
        tokenmill.Store("nosuch://bucket/store")
    assert "s3://" in str(caught.value.hint)


def test_nothing_secret_of_an_address_is_ever_shown(server: Server) -> None:
    url = f"{server.address}/large?signature=hunter2"
    store = tokenmill.Store(url)
    assert server.log[0] == "GET /large/tokenmill.json?signature=hunter2", "but it is sent"
    server.faults = [Fault(kind, times=1) for kind in ("403", "404", "whole")]
    server.faults += [Fault("cut", times=50)]
    texts = [repr(store), str(store.path)]
    for _ in range(4):
        try:
            store[2]
        except StoreError:
            texts.append(traceback.format_exc())
    for missing in (f"{server.address}/none?a=hunter2", "http://127.0.0.1:1/?hunter2"):
        with pytest.raises(StoreError) as caught:
            tokenmill.Store(missing)
        texts.append("".join(traceback.format_exception(caught.value)))
    assert len(texts) == 8
    assert not any("hunter2" in text for text in texts)


def test_s3_throttling_passes_and_a_refusal_is_clear(s3: S3, folder: Path) -> None:
    url = upload(folder / "small", prefix="throttled")
    expected = ids(tokenmill.Store(folder / "small"))
    s3.slow_downs = 2
    store = tokenmill.Store(url)
    assert s3.slow_downs == 0
    s3.denied = ".bin"
    with pytest.raises(StoreError, match=r"s3://bucket/throttled/shards/.*403 Forbidden") as caught:
        ids(store)
    assert "the-key" not in "".join(traceback.format_exception(caught.value))
    s3.denied = ""
    assert ids(store) == expected
    for missing in ("s3://bucket/none", "s3://no-such-bucket/store"):
        with pytest.raises(StoreError, match=f"there is no store at '{missing}'"):
            tokenmill.Store(missing)


def test_s3_is_asked_for_many_ranges_at_once(s3: S3, folder: Path) -> None:
    large = Large(folder, upload(folder / "large", prefix="many"))
    s3.delay_seconds = 0.2
    large.check(scattered(40, seed=11, size=100))
    assert s3.most_at_once > 20, "botocore alone would stop at 10"


def test_a_damaged_index_is_asked_for_again_and_then_refused(
    folder: Path, server: Server, tmp_path: Path
) -> None:
    url, cache = f"{server.address}/large", tmp_path / "cache"
    server.faults = [Fault("flip", match=".idx", times=1)]
    assert len(tokenmill.Store(url, cache=cache)[0]) > 0
    assert len(server.asked(".idx")) == 2
    server.reset()
    assert len(tokenmill.Store(url, cache=cache)[1]) > 0
    assert server.asked(".idx") == [], "the right one was kept"
    shutil.rmtree(cache)
    server.faults = [Fault("flip", match=".idx", times=2)]
    with pytest.raises(StoreError, match=r"idx' is not the file .* or it is damaged"):
        tokenmill.Store(url, cache=cache)[0]
    assert len(tokenmill.Store(url, cache=cache)[0]) > 0, "nothing wrong was kept"


def test_damaged_small_files_are_asked_for_again(server: Server) -> None:
    store = tokenmill.Store(f"{server.address}/small")
    server.faults = [Fault("flip", match=".json", times=1)]
    assert store.source(0).row == 0
    server.faults = [Fault("flip", match=".jsonl", times=2)]
    with pytest.raises(StoreError, match=r"jsonl' is not the file"):
        list(store.rejects())


def test_a_cache_folder_saves_all_later_requests_but_those_for_versions(
    folder: Path, server: Server, tmp_path: Path
) -> None:
    url, cache = f"{server.address}/large", tmp_path / "cache"
    shards = sorted(path.name for path in (folder / "large").glob("shards/*.bin"))
    versions = [f"GET /large/shards/{name} bytes=0-0" for name in shards]
    first = Large(folder, url, cache=cache)
    for seed in range(8):
        first.check(scattered(40, seed=seed))
    first.store.lengths()
    blocks = [line for line in server.log if ".bin" in line and line not in versions]
    assert len(blocks) == 12, "each block once, since the folder holds the store"
    server.reset()
    again = Large(folder, url, cache=str(cache))
    again.check(scattered(100, seed=9))
    again.check(in_order(0, SHARD_BYTES, shard=1))
    assert all(map(np.array_equal, again.store, tokenmill.Store(folder / "large")))
    assert sorted(server.log) == [*versions, "GET /large/tokenmill.json"]


def test_a_cache_smaller_than_the_store_stays_within_its_limit(
    folder: Path, server: Server, tmp_path: Path
) -> None:
    cache, limit = tmp_path / "cache", 5 * (BLOCK_BYTES + 100)
    large = Large(folder, f"{server.address}/large", cache=cache, cache_bytes=limit)
    for shard in (0, 1, 0):
        large.check(np.array([[shard, 0, SHARD_BYTES]]))
        large.store.close()
        used = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        assert 4 * BLOCK_BYTES < used <= limit
    server.reset()
    large.check(scattered(20, seed=1))
    assert server.sent < 20 * 3 * 4098, "no whole blocks for pieces, as they would not stay"


def test_a_damaged_block_is_brought_again(folder: Path, server: Server, tmp_path: Path) -> None:
    url, cache = f"{server.address}/large", tmp_path / "cache"
    Large(folder, url, cache=cache).check(in_order(0, SHARD_BYTES))
    for path in cache.glob("*/*.block"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    server.reset()
    large = Large(folder, url, cache=cache)
    large.check(scattered(50, seed=5))
    large.check(in_order(0, SHARD_BYTES))
    assert len({line for line in server.asked(".bin") if "shards" in line}) >= 6


def test_a_store_that_changed_at_its_url_never_reads_old_blocks(tmp_path: Path) -> None:
    root, cache = tmp_path / "web" / "store", tmp_path / "cache"
    old, new = [[range(k, k + 500)] * 400 for k in (0, 1)]
    write_store(root, [old])
    with serve(root.parent) as server:
        url = f"{server.address}/store"
        opened = tokenmill.Store(url, cache=cache)
        sent = pickle.dumps(opened)
        assert opened[0].tolist() == list(old[0])
        shutil.rmtree(root)
        write_store(root, [new])
        assert ids(tokenmill.Store(url, cache=cache)) == list(map(list, new))
        with pytest.raises(StoreError, match=r"tokenmill.json' is not the file .* not be mixed"):
            pickle.loads(sent)
        shutil.rmtree(root)
        write_store(root, [[*new[1:], range(7), range(493)]])
        assert opened[0].tolist() == list(old[0]), "what is in the folder is what it was"
        uncached = tokenmill.Store(url)
        shutil.rmtree(root)
        write_store(root, [old])
        with pytest.raises(StoreError, match=r"idx' is not the file that this store had"):
            uncached[0]


def test_a_cache_that_cannot_be_used_is_refused_at_opening(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cache folder"):
        tokenmill.Store(f"{server.address}/small", cache=tmp_path / "file")
    with pytest.raises(UsageError, match="less than one block"):
        tokenmill.Store(f"{server.address}/small", cache=tmp_path / "c", cache_bytes=1000)
    with pytest.raises(UsageError, match="name one with cache="):
        tokenmill.Store(f"{server.address}/small", cache_bytes=10**9)


def test_a_local_store_ignores_the_cache_and_loads_nothing_remote(
    folder: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, tokenmill\n"
        "store = tokenmill.Store(sys.argv[1], cache=sys.argv[2])\n"
        "store[0], list(store), store.source(0), store.lengths()\n"
        "assert store.remote is None and not store.is_remote\n"
        "bad = {'fsspec', 'tokenmill.store.remote', 'asyncio'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)\n"
    )
    arguments = [str(folder / "small"), str(tmp_path / "cache")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    assert not (tmp_path / "cache").exists()
    assert len(tokenmill.Store((folder / "small").as_uri())) == 4


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_store_works_in_other_processes(
    folder: Path, server: Server, tmp_path: Path, method: str
) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("there is no fork here")
    store = tokenmill.Store(f"{server.address}/large", cache=tmp_path / "cache")
    assert len(pickle.dumps(store)) < 1000
    expected = read_some(store)
    server.reset()
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map_async(read_some, [store, store]).get(60) == [expected, expected]
        pool.close()
        pool.join()
    assert not server.asked(".bin"), "they share the folder, and nothing else"
    assert read_some(store) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("first", ["read", "read ahead"])
def test_a_fork_in_the_middle_of_background_reads_goes_its_own_way(
    large: Large, server: Server, first: str
) -> None:
    server.delay_seconds = 0.2
    begun, other = in_order(0, 4 * BLOCK_BYTES), in_order(0, BLOCK_BYTES, shard=1)
    large.begin(begun)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits for what its parent holds
        status = 1
        try:
            if first == "read":
                large.check(begun)
            large.begin(other)
            large.check(np.concatenate([other, begun]))
            large.store.close()
            status = 0
        finally:
            os._exit(status)
    large.check(begun)
    assert os.waitpid(child, 0)[1] == 0


def ahead_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("tokenmill-ahead")]


def test_what_was_begun_is_here_when_it_is_asked_for(large: Large, server: Server) -> None:
    server.delay_seconds = 0.5
    pieces = scattered(12, seed=6)
    large.begin(pieces)
    assert server.sent == 0, "it does not wait"
    large.check(pieces[5:8])
    asked = len(server.log)
    assert 6 < asked <= 12
    large.check(pieces[8:])
    large.check(pieces[:5])
    assert len(server.log) == asked
    large.check(pieces)
    assert len(server.log) > asked, "it is given once"


def test_a_read_waits_for_what_is_on_its_way_and_brings_the_rest(
    large: Large, server: Server
) -> None:
    server.delay_seconds = 0.2
    large.begin(in_order(0, 3 * BLOCK_BYTES))
    time.sleep(0.05)
    large.check(np.concatenate([in_order(0, 4 * BLOCK_BYTES), scattered(3, seed=7)]))
    large.check(in_order(BLOCK_BYTES // 2, 4 * BLOCK_BYTES, size=5000))
    assert len(server.asked(".bin")) <= 4 + 3
    assert len({line for line in server.log if "bytes=" in line}) == len(server.log)


def test_two_threads_bring_a_block_once(large: Large, server: Server) -> None:
    server.delay_seconds = 0.1
    failures: list[BaseException] = []

    def read() -> None:
        try:
            large.check(in_order(0, 5 * BLOCK_BYTES))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(server.log) == 5


def test_a_background_read_that_fails_is_told_by_the_read_that_wants_it(
    large: Large, server: Server
) -> None:
    server.faults = [Fault("403", match=".bin")]
    large.begin(scattered(3, seed=8))
    with pytest.raises(StoreError, match="403 Forbidden"):
        large.check(scattered(3, seed=8))
    server.faults = []
    large.begin(scattered(3, seed=8))
    large.check(scattered(3, seed=8))


def test_what_nobody_takes_is_dropped(
    large: Large, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "AHEAD_BYTES", 20 * 4098)
    for seed in range(5):
        large.begin(scattered(15, seed=seed))
    large.begin(np.array([[0, 0, SHARD_BYTES]]))  # more than there is room for
    assert large.store.files.ahead._bytes <= 20 * 4098  # type: ignore[attr-defined]
    for seed in range(5):
        large.check(scattered(15, seed=seed))


@pytest.mark.parametrize("ending", ["close", "garbage", "with"])
def test_no_thread_survives_a_store(folder: Path, server: Server, ending: str) -> None:
    large = Large(folder, f"{server.address}/large")
    server.delay_seconds = 30 if ending == "close" else 0.3
    large.begin(in_order(0, 4 * BLOCK_BYTES))
    large.begin(scattered(5, seed=1))
    assert ahead_threads()
    start = time.perf_counter()
    if ending == "close":
        large.store.close()
    elif ending == "with":
        with large.store:
            pass
    else:
        del large
        gc.collect()
    assert not ahead_threads()
    assert time.perf_counter() - start < 5, "requests are given up, not waited for"
    server.delay_seconds = 0
    if ending == "close":
        large.check(scattered(5, seed=1))


def test_a_store_that_is_dropped_while_it_reads_ahead_lets_the_process_end(
    server: Server,
) -> None:
    code = (
        "import sys, tokenmill\n"
        "store = tokenmill.Store(sys.argv[1])\n"
        "store.remote.read_ahead([(store.shards[0].name, 0, 1 << 20)], kind='bin')\n"
    )
    url = f"{server.address}/large"
    done = subprocess.run([sys.executable, "-c", code, url], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
