"""The files of a store at a URL, read by ranges.

    RemoteFiles   manifest, receipts, rejects, tokenizer: whole
                  indexes: the lengths alone, a fifth of the file; the rest follows from them
                  pieces of the shards' tokens and masks, in batches, and ahead of their use
    ShardTokens   the tokens (or the mask) of one shard, as an array that is read when it is sliced

Sizes and checksums come from the manifest: opening takes one request, and a listing of each folder
where the server lists them, and no file is ever asked for its size. Everything but tokens and
masks is compared with its checksum; a range of those is known to have the length that was asked
for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from tokenmill import files as files_module
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.files import Failure, RemoteError, StoppedError, join, shown
from tokenmill.store.blocks import (
    BlockFile,
    BlockFolder,
    CacheReader,
    RecentlyUsed,
    changed,
)
from tokenmill.store.facts import Manifest, Receipt
from tokenmill.store.format import (
    HEADER,
    MASK_DTYPE,
    LazyValues,
    index_blocks,
    index_bytes,
    parse_index,
    view_values,
)
from tokenmill.store.layout import (
    checksum_of,
    no_store,
    remove_folder,
    shard_name,
    store_errors,
)
from tokenmill.store.reader import (
    NOT_MOVED,
    StoreFiles,
    expected_sizes,
    incomplete,
    size_problem,
)
from tokenmill.store.snapshots import choose, moved_files, snapshots_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.files import PathInput
    from tokenmill.store.blocks import Piece
    from tokenmill.store.facts import UnitEntry
    from tokenmill.store.format import Index, MaskDtype, TokenArray, TokenDtype
    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.snapshots import Snapshot, SnapshotName


AHEAD_BYTES = 256 << 20
THREADS = 2  # one batch of requests each: the next one begins while the last one comes in


class RemoteReadAhead:
    """Pieces that are read in the background, so that they are here when they are asked for.

    Pieces are known by their place alone, so a later read may group them as it likes. What nobody
    takes is dropped when newer pieces need the room. The threads know the reader, never the store:
    so a store that goes out of use takes its threads along.
    """

    def __init__(self, reader: CacheReader) -> None:
        self._reader = reader
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._jobs: OrderedDict[Piece, tuple[Future[list[memoryview]], int]] = OrderedDict()
        self._bytes = 0
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        self._end: Callable[[], object] = lambda: None

    def _mine(self) -> threading.Lock:
        if self._process != os.getpid():  # the threads are those of the process that forked us
            self._begin_anew()
        return self._lock

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin to read pieces that will be asked for."""
        with self._mine():
            new = [piece for piece in dict.fromkeys(pieces) if piece not in self._jobs]
            size = sum(last - first for _, first, last in new)
            if not new or size > AHEAD_BYTES:
                return
            if self._pool is None:
                pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-ahead")
                self._pool = pool
                self._end = weakref.finalize(self, _end_threads, pool, self._stop, os.getpid())
            job = self._pool.submit(self._reader.read, new, stop=self._stop)
            self._jobs.update({piece: (job, place) for place, piece in enumerate(new)})
            self._bytes += size
            while self._bytes > AHEAD_BYTES:
                (_, first, last), _ = self._jobs.popitem(last=False)
                self._bytes -= last - first

    def take(self, piece: Piece) -> tuple[Future[list[memoryview]], int] | None:
        """The job that reads a piece, and its place there, for the only time; None without one."""
        with self._mine():
            found = self._jobs.pop(piece, None)
            if found is not None:
                self._bytes -= piece[2] - piece[1]
            return found

    def close(self) -> None:
        """End the threads, and forget what they read."""
        end = self._end
        self._begin_anew()
        end()


def _end_threads(pool: ThreadPoolExecutor, stop: threading.Event, process: int) -> None:
    if os.getpid() != process:
        return  # a fork has none of the threads, and perhaps a lock that nobody will give back
    stop.set()
    # Rubbish is collected by any thread: by one of these too, and that one cannot wait for itself.
    own = threading.current_thread().name.startswith("tokenmill-ahead")
    pool.shutdown(wait=not own, cancel_futures=True)


CACHE_BYTES = 10 * 10**9
INDEX_BYTES = 256 << 20  # of the indexes that were used last, at 20 bytes to a document
RANGE_BYTES = 8 << 20  # files that are read whole come in ranges of this size, at once
ShardRange: TypeAlias = tuple[str, int, int]  # a shard, the first byte, the one after the last
Kind: TypeAlias = Literal["bin", "idx", "mask"]  # files of a shard that are read by blocks


class RemoteFiles(StoreFiles):
    """The files of a store at a URL. Pickled, it is the URL and what the manifest was."""

    is_remote = True

    def __init__(
        self,
        url: str,
        *,
        cache: PathInput | None,
        cache_bytes: int | None,
        snapshot: SnapshotName | None = None,
    ) -> None:
        self._url = url
        self.snapshot = snapshot
        if cache is None and cache_bytes is not None:
            raise UsageError(
                f"cache_bytes={cache_bytes:,} bounds a cache folder, and there is none",
                hint="name one with cache=, or leave cache_bytes= out",
            )
        folder = None if cache is None else Path(cache).expanduser().absolute()
        self._cache = folder, CACHE_BYTES if cache_bytes is None else cache_bytes
        self._manifest_checksum: str | None = None
        # Name of a file -> the version of it that is read, as its server calls it.
        self._versions: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self.path: str = shown(self._url)
        self._moved = NOT_MOVED
        self._indexes: RecentlyUsed[str, Index] = RecentlyUsed(INDEX_BYTES)
        self._tokenizer: tuple[int, Path] | None = None
        self._remove_tokenizer: Callable[[], object] = lambda: None

    @property
    def layout(self) -> StoreLayout:
        raise StoreError(
            f"the store {self.path!r} is not a local folder",
            hint="copy it to a local disk first",
        )

    def read_manifest(self) -> Manifest:
        """Read the manifest, and see that the files it names are there."""
        name = "tokenmill.json"
        if self.snapshot is not None:
            chosen = choose(self.snapshot, self.snapshots(), self._read_current, self.path)
            name = name if chosen is None else f"snapshots/{chosen.name}.json"
        data = self._read_named(name)
        checksum = checksum_of(data)
        self._manifest = Manifest.from_bytes(data, path=join(self.path, name))
        self._moved = NOT_MOVED
        if name != "tokenmill.json":
            self._moved = moved_files(self._manifest, self._names("retired"))
        if self._manifest_checksum is None:
            self._require_files()
            self._manifest_checksum = checksum
        elif checksum != self._manifest_checksum:
            raise changed(self._url, "tokenmill.json")
        self.take_manifest(self._manifest)
        return self._manifest

    def take_manifest(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files = _block_files(self._manifest, self._path_of)
        folder, (path, limit_bytes) = None, self._cache
        if path is not None:
            versions = self._versions
            folder = BlockFolder(path, limit_bytes=limit_bytes, store=self.path, versions=versions)
        files = self._files.values()
        self.blocks = CacheReader(self._url, folder=folder, files=files, versions=self._versions)
        self.ahead = RemoteReadAhead(self.blocks)

    def _read_named(self, name: str) -> bytes:
        with store_errors():
            try:
                return files_module.read_bytes(join(self._url, name))
            except RemoteError as error:
                if error.failure is Failure.MISSING:
                    raise no_store(self.path) from error
                raise

    def _read_current(self) -> Manifest:
        name = "tokenmill.json"
        return Manifest.from_bytes(self._read_named(name), path=join(self.path, name))

    def _names(self, folder: str) -> list[str]:
        """What is in a folder; a server that does not tell has no snapshots that could be found."""
        with store_errors():
            try:
                return [*(files_module.list_folder(join(self._url, folder)) or ())]
            except RemoteError as error:
                if error.failure in (Failure.MISSING, Failure.DENIED):
                    return []
                raise

    def snapshots(self) -> list[Snapshot]:
        """What the store was before it grew, oldest first."""
        return snapshots_of(self._names("snapshots"))

    def at_snapshot(self, asked: SnapshotName) -> RemoteFiles:
        """The same store as it was."""
        cache, limit = self._cache
        return RemoteFiles(
            self._url,
            cache=cache,
            cache_bytes=None if cache is None else limit,
            snapshot=asked,
        )

    def _path_of(self, name: str, kind: str, *, folder: str = "shards") -> str:
        if (prefix := self._moved.get(name)) is not None:
            return f"retired/{prefix}{name}.{kind}"
        return f"{folder}/{name}.{kind}"

    def _require_files(self) -> None:
        problems: list[tuple[str, str]] = []
        for folder, expected in expected_sizes(self._manifest, self._moved).items():
            if not expected:
                continue
            versions: dict[str, str] = {}
            with store_errors():
                found = files_module.list_sizes(join(self._url, folder), versions=versions)
            if found is None:
                return
            self._versions |= {f"{folder}/{name}": each for name, each in versions.items()}
            problems += [
                (join(self.path, f"{folder}/{name}"), size_problem(found.get(name), size))
                for name, size in expected.items()
                if found.get(name) != size
            ]
        if problems:
            raise incomplete(*problems[0], others=len(problems) - 1)

    def index(self, shard: str) -> Index:
        index = self._indexes.get(shard)
        return self._download_indexes([shard])[0] if index is None else index

    def prepare_indexes(self, shards: Sequence[str]) -> None:
        """Download indexes that will be asked for, all at once, as far as there is room."""
        room, wanted = INDEX_BYTES // 2, []
        for shard in dict.fromkeys(shards):
            room -= index_bytes((self._files[shard, "idx"].size - HEADER.size) // 4)
            if room < 0:
                break
            if self._indexes.get(shard) is None:
                wanted.append(shard)
        if wanted:
            self._download_indexes(wanted)

    def _download_indexes(self, shards: list[str]) -> list[Index]:
        """Indexes made of their lengths, and compared with what the manifest means."""
        pieces = [(file := self._files[shard, "idx"], HEADER.size, file.size) for shard in shards]
        indexes = []
        for shard, piece, lengths in zip(
            shards, pieces, self.blocks.read(pieces, keep=False), strict=True
        ):
            file, dtype = piece[0], self._manifest.identity.dtype
            data = b"".join(index_blocks([np.frombuffer(lengths, "<i4")], dtype=dtype))
            if checksum_of(data) != file.content:
                # A damaged answer may have been kept: forget it, and ask once more.
                self.blocks.forget(file)
                (again,) = self.blocks.read([piece], keep=False)
                data = b"".join(index_blocks([np.frombuffer(again, "<i4")], dtype=dtype))
            if checksum_of(data) != file.content:
                self.blocks.forget(file)
                raise changed(self._url, file.name)
            indexes.append(parse_index(data, path=join(self.path, file.name)))
            self._indexes.put(shard, indexes[-1], size=len(data))
        return indexes

    def tokens(self, shard: str, *, dtype: TokenDtype) -> TokenArray:
        return cast("TokenArray", self._values(self._files[shard, "bin"], dtype))

    def mask(self, shard: str) -> NDArray[np.uint8]:
        return cast("NDArray[np.uint8]", self._values(self._files[shard, "mask"], MASK_DTYPE))

    def _values(self, file: BlockFile, dtype: TokenDtype | MaskDtype) -> LazyValues:
        def read(first: int, last: int) -> NDArray[Any]:
            width = dtype.itemsize
            (data,) = self.blocks.read([(file, first * width, last * width)])
            return view_values(data.toreadonly(), dtype=dtype)

        return LazyValues(read, size=file.size // dtype.itemsize, dtype=dtype)

    def read(self, wanted: Sequence[ShardRange], *, kind: Kind) -> list[memoryview]:
        """Bytes of shards, in order, with one batch of requests for all that is missing.

        >>> store.remote.read([("a-00", 0, 512), ("b-00", 4096, 4608)], kind="bin")
        """
        pieces = self._pieces(wanted, kind)
        jobs = ((place, self.ahead.take(piece)) for place, piece in enumerate(pieces))
        begun = {place: job for place, job in jobs if job is not None}
        found = self._read_at([place for place in range(len(pieces)) if place not in begun], pieces)
        for place, (job, at) in begun.items():
            # Where one could not be read, asking for it again will tell why.
            with contextlib.suppress(TokenmillError, StoppedError, CancelledError):
                found[place] = job.result()[at]
        found |= self._read_at([place for place in begun if place not in found], pieces)
        return [found[place] for place in range(len(pieces))]

    def _read_at(self, places: list[int], pieces: list[Piece]) -> dict[int, memoryview]:
        data = self.blocks.read([pieces[place] for place in places]) if places else []
        return dict(zip(places, data, strict=True))

    def read_ahead(self, wanted: Sequence[ShardRange], *, kind: Kind) -> None:
        """Begin to read, in the background, what `read` will be asked for."""
        self.ahead.begin(self._pieces(wanted, kind))

    def _pieces(self, wanted: Sequence[ShardRange], kind: Kind) -> list[Piece]:
        return [(self._files[shard, kind], first, last) for shard, first, last in wanted]

    def receipt(self, unit: str) -> Receipt:
        entry, name = self._units[unit], self._path_of(unit, "json")
        data = self._read_whole(name, size=entry.receipt_bytes, checksum=entry.receipt)
        return Receipt.from_bytes(data, path=join(self.path, name))

    def rejects(self, unit: str) -> Iterator[bytes]:
        facts = self._units[unit].rejects
        if facts is not None:
            name = self._path_of(unit, "jsonl", folder="rejects")
            data = self._read_whole(name, size=facts.bytes, checksum=facts.checksum)
            yield from data.splitlines(keepends=True)

    def tokenizer(self) -> Path:
        """A private folder to which the tokenizer's files were downloaded."""
        if self._tokenizer is None or self._tokenizer[0] != os.getpid():
            path = Path(tempfile.mkdtemp(prefix="tokenmill-"))
            self._remove_tokenizer = weakref.finalize(self, remove_folder, path, os.getpid())
            for name, file in self._manifest.identity.tokenizer.files.items():
                whole = f"tokenizer/{name}"
                data = self._read_whole(whole, size=file.bytes, checksum=file.checksum)
                (path / name).write_bytes(data)
            self._tokenizer = os.getpid(), path
        return self._tokenizer[1]

    def _read_whole(self, name: str, *, size: int, checksum: str) -> bytes:
        url = join(self._url, name)
        ranges = [
            (url, first, min(first + RANGE_BYTES, size)) for first in range(0, size, RANGE_BYTES)
        ]
        for _ in range(2):
            with store_errors():
                data = b"".join(files_module.read_ranges(ranges))
            if checksum_of(data) == checksum:
                return data
        raise changed(self._url, name)

    @functools.cached_property
    def _units(self) -> dict[str, UnitEntry]:
        return {unit.name: unit for unit in self._manifest.units}

    def close(self) -> None:
        """End background reads, and give memory and private files back; reading begins anew."""
        self.ahead.close()
        self.blocks.clear()
        self._indexes.clear()
        self._remove_tokenizer()
        self._tokenizer = None

    def __getstate__(self) -> tuple[Any, ...]:
        pinned = self._url, self.snapshot, self._cache, self._manifest_checksum
        return *pinned, dict(self._versions)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._url, self.snapshot, self._cache, self._manifest_checksum, self._versions = state
        self._begin()


def _block_files(
    manifest: Manifest, path_of: Callable[[str, str], str]
) -> dict[tuple[str, Kind], BlockFile]:
    """All files that are read by blocks, numbered alike whatever split is open."""
    files: dict[tuple[str, Kind], BlockFile] = {}
    dtype, block = manifest.identity.dtype, 0
    for unit, shard in manifest.shards():
        name = shard_name(unit.name, split=shard.split)
        found: list[tuple[Kind, int, str]] = [
            ("bin", shard.bin_bytes(dtype), shard.bin),
            ("idx", HEADER.size + 4 * shard.documents, shard.idx),
        ]
        if shard.mask is not None:
            found.append(("mask", shard.tokens, shard.mask))
        for kind, size, checksum in found:
            file = files[name, kind] = BlockFile(
                name=path_of(name, kind),
                size=size,
                content=checksum,
                first_block=block,
                is_whole=kind != "idx",
            )
            block += file.num_blocks
    return files
