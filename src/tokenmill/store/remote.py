"""The files of a store behind a URL, read by ranges.

    RemoteFiles   manifest, receipts, rejects, tokenizer: whole
                  indexes: the lengths alone, a fifth of the file; the rest follows from them
    RemoteTokens  pieces of the shards' tokens and masks, in batches, and ahead of their use
    ShardTokens   the tokens (or the mask) of one shard, as an array that is read when it is sliced

Sizes and checksums come from the manifest: opening takes one request, and a listing of each folder
where the server lists them, and no file is ever asked for its size. Everything but tokens and
masks is compared with its checksum; a range of those is known to have the length that was asked
for.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from tokenmill import files as files_module
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.files import Failure, RemoteError, StoppedError, join, shown
from tokenmill.store.blocks import (
    BLOCK_BYTES,
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
    index_blocks,
    index_bytes,
    parse_index,
    view_values,
)
from tokenmill.store.layout import checksum_of, remove_folder, shard_name, store_error
from tokenmill.store.reader import expected_sizes, incomplete, size_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.store.blocks import Piece
    from tokenmill.store.facts import UnitEntry
    from tokenmill.store.format import Index, MaskDtype, TokenArray, TokenDtype
    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.reader import TrackFile
    from tokenmill.store.stream import Track


# -------------------------------------------------------------------------------------------------
# Reads pieces in the background, so that they are here when they are asked for.
#
#   | begin(pieces) -> a job in a thread: BlockReader.read -> take(piece), once
#
# Pieces are known by their place alone, so a later read may group them as it likes. What nobody
# takes is dropped when newer pieces need the room. The threads know the reader, never the store:
# so a store that goes out of use takes its threads along.

AHEAD_BYTES = 256 << 20
THREADS = 2  # one batch of requests each: the next one begins while the last one comes in


class RemoteReadAhead:
    """Pieces that were begun and not yet taken."""

    def __init__(self, reader: CacheReader) -> None:
        self._reader = reader
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._jobs: OrderedDict[Piece, tuple[Future[list[memoryview]], int]] = OrderedDict()
        self._bytes = 0
        self._threads: _Threads | None = None

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin to read pieces that will be asked for."""
        if self._process != os.getpid():  # the threads are those of the process that forked us
            self._begin_anew()
        with self._lock:
            new = [piece for piece in dict.fromkeys(pieces) if piece not in self._jobs]
            size = sum(map(_size, new))
            if not new or size > AHEAD_BYTES:
                return
            if self._threads is None:
                self._threads = _Threads(self)
            job = self._threads.submit(self._reader, new)
            self._jobs.update({piece: (job, place) for place, piece in enumerate(new)})
            self._bytes += size
            while self._bytes > AHEAD_BYTES:
                dropped, _ = self._jobs.popitem(last=False)
                self._bytes -= _size(dropped)

    def take(self, piece: Piece) -> Taken | None:
        """A piece that was begun, for the only time; None where it was not."""
        if self._process != os.getpid():
            self._begin_anew()
        with self._lock:
            found = self._jobs.pop(piece, None)
            if found is None:
                return None
            self._bytes -= _size(piece)
        return Taken(*found)

    def close(self) -> None:
        """End the threads, and forget what they brought."""
        threads, ours = self._threads, self._process == os.getpid()
        self._begin_anew()
        if threads is not None and ours:
            threads.end()


class Taken:
    """A piece that comes."""

    def __init__(self, job: Future[list[memoryview]], place: int) -> None:
        self._job = job
        self._place = place

    def wait(self) -> memoryview | None:
        """Its bytes; None where they could not be read, and asking for them will tell why."""
        try:
            return self._job.result()[self._place]
        except (TokenmillError, StoppedError, CancelledError):
            return None


class _Threads:
    """Threads that end when they are told to, or when their owner is gone."""

    def __init__(self, owner: RemoteReadAhead) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-ahead")
        self._stop = threading.Event()
        self.end = weakref.finalize(owner, _end, self._pool, self._stop, os.getpid())

    def submit(self, reader: CacheReader, pieces: list[Piece]) -> Future[list[memoryview]]:
        return self._pool.submit(reader.read, pieces, stop=self._stop)


def _end(pool: ThreadPoolExecutor, stop: threading.Event, process: int) -> None:
    if os.getpid() != process:
        return  # a fork has none of the threads, and perhaps a lock that nobody will give back
    stop.set()
    # Rubbish is collected by any thread: by one of these too, and that one cannot wait for itself.
    own = threading.current_thread().name.startswith("tokenmill-ahead")
    pool.shutdown(wait=not own, cancel_futures=True)


def _size(piece: Piece) -> int:
    return piece[2] - piece[1]


CACHE_BYTES = 10 * 10**9
INDEX_BYTES = 256 << 20  # of the indexes that were used last, at 20 bytes to a document
RANGE_BYTES = 8 << 20  # files that are read whole come in ranges of this size, at once
Kind: TypeAlias = Literal["bin", "idx", "mask"]  # files of a shard that are read by blocks


class _CacheFolder(NamedTuple):
    path: str
    limit_bytes: int


def _cache_folder(
    cache: str | os.PathLike[str] | None, cache_bytes: int | None
) -> _CacheFolder | None:
    if cache is not None:
        folder = Path(cache).expanduser().absolute()
        return _CacheFolder(str(folder), CACHE_BYTES if cache_bytes is None else cache_bytes)
    if cache_bytes is not None:
        raise UsageError(
            f"cache_bytes={cache_bytes:,} bounds a cache folder, and there is none",
            hint="name one with cache=, or leave cache_bytes= out",
        )
    return None


class RemoteFiles:
    """The files of a store behind a URL. Pickled, it is the URL and what the manifest was."""

    def __init__(
        self, url: str, *, cache: str | os.PathLike[str] | None, cache_bytes: int | None
    ) -> None:
        self._url = url
        self._cache = _cache_folder(cache, cache_bytes)
        self._manifest_checksum: str | None = None
        # Name of a file -> the version of it that is read, as its server calls it.
        self._versions: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._indexes: RecentlyUsed[str, Index] = RecentlyUsed(INDEX_BYTES)
        self._tokenizer: _PrivateFolder | None = None

    @property
    def path(self) -> str:
        return shown(self._url)

    @property
    def layout(self) -> StoreLayout:
        raise self._not_local()

    def track_file(self, shard: str, track: Track, *, size: int) -> TrackFile:  # noqa: ARG002
        raise self._not_local()

    def track_offset(self, shard: str, track: Track) -> int:  # noqa: ARG002
        raise self._not_local()

    def _not_local(self) -> StoreError:
        return StoreError(
            f"the store {self.path!r} is not a local folder",
            hint="copy it to a local disk first",
        )

    def read_manifest(self) -> Manifest:
        """Read the manifest, and see that the files it names are there."""
        data = self._manifest_bytes()
        checksum = checksum_of(data)
        self._manifest = Manifest.from_bytes(data, path=join(self.path, "tokenmill.json"))
        if self._manifest_checksum is None:
            self._require_files()
            self._manifest_checksum = checksum
        elif checksum != self._manifest_checksum:
            raise changed(self._url, "tokenmill.json")
        self._files = _block_files(self._manifest)
        self.blocks = CacheReader(
            self._url,
            folder=self._open_folder(),
            files=self._files.values(),
            versions=self._versions,
        )
        self.ahead = RemoteReadAhead(self.blocks)
        return self._manifest

    def _manifest_bytes(self) -> bytes:
        try:
            return files_module.read_bytes(join(self._url, "tokenmill.json"))
        except RemoteError as error:
            if error.failure is not Failure.MISSING:
                raise store_error(error) from error
            raise StoreError(
                f"there is no store at {self.path!r}: it has no tokenmill.json",
                hint="check the address; a store has this file once its build has finished",
            ) from error

    def _require_files(self) -> None:
        problems: list[tuple[str, str]] = []
        for folder, expected in expected_sizes(self._manifest).items():
            found = self._list(folder) if expected else {}
            if found is None:
                return
            for name, size in expected.items():
                if found.get(name) != size:
                    problem = size_problem(found.get(name), size)
                    problems.append((join(self.path, f"{folder}/{name}"), problem))
        if problems:
            raise incomplete(*problems[0], others=len(problems) - 1)

    def _list(self, folder: str) -> dict[str, int] | None:
        versions: dict[str, str] = {}
        try:
            found = files_module.list_sizes(join(self._url, folder), versions=versions)
        except RemoteError as error:
            raise store_error(error) from error
        self._versions.update({f"{folder}/{name}": each for name, each in versions.items()})
        return found

    def index(self, shard: str) -> Index:
        index = self._indexes.get(shard)
        return self._bring_indexes([shard])[0] if index is None else index

    def prepare_indexes(self, shards: Sequence[str]) -> None:
        """Bring indexes that will be asked for, all at once, as far as there is room for them."""
        room, wanted = INDEX_BYTES // 2, []
        for shard in dict.fromkeys(shards):
            room -= index_bytes(self._num_documents(shard))
            if room < 0:
                break
            if self._indexes.get(shard) is None:
                wanted.append(shard)
        if wanted:
            self._bring_indexes(wanted)

    def _bring_indexes(self, shards: list[str]) -> list[Index]:
        pieces = [(file := self.file(shard, "idx"), HEADER.size, file.size) for shard in shards]
        found = self.blocks.read(pieces, keep=False)
        indexes = []
        for shard, piece, data in zip(shards, pieces, found, strict=True):
            index = self._complete_index(piece[0], data)
            if index is None:
                # A damaged answer may have been kept: forget it, and ask once more.
                self.blocks.forget(piece[0])
                index = self._complete_index(piece[0], *self.blocks.read([piece], keep=False))
            if index is None:
                self.blocks.forget(piece[0])
                raise changed(self._url, piece[0].name)
            self._indexes.put(shard, index, size=index_bytes(len(index.lengths)))
            indexes.append(index)
        return indexes

    def _complete_index(self, file: BlockFile, lengths: memoryview) -> Index | None:
        """The index with these lengths; None if it is not the one that the manifest means."""
        parts = [np.frombuffer(lengths, "<i4")]
        data = b"".join(index_blocks(parts, dtype=self._manifest.identity.dtype))
        if checksum_of(data) != file.content:
            return None
        return parse_index(data, path=join(self.path, file.name))

    def tokens(self, shard: str, *, dtype: TokenDtype) -> TokenArray:
        tokens = ShardTokens(self.blocks, self.file(shard, "bin"), dtype=dtype)
        return cast("TokenArray", tokens)  # as far as len() and slices go

    def mask(self, shard: str) -> NDArray[np.uint8]:
        mask = ShardTokens(self.blocks, self.file(shard, "mask"), dtype=MASK_DTYPE)
        return cast("NDArray[np.uint8]", mask)

    def open_tokens(self, shards: Sequence[str]) -> RemoteTokens:
        return RemoteTokens(self, shards)

    def receipt(self, unit: str) -> Receipt:
        entry, name = self._units[unit], f"shards/{unit}.json"
        data = self._read_whole(name, size=entry.receipt_bytes, checksum=entry.receipt)
        return Receipt.from_bytes(data, path=join(self.path, name))

    def rejects(self, unit: str) -> Iterator[bytes]:
        facts = self._units[unit].rejects
        if facts is not None:
            name = f"rejects/{unit}.jsonl"
            data = self._read_whole(name, size=facts.bytes, checksum=facts.checksum)
            yield from data.splitlines(keepends=True)

    def tokenizer(self) -> Path:
        """A private folder to which the tokenizer's files were brought."""
        if self._tokenizer is None or self._tokenizer.process != os.getpid():
            folder = _PrivateFolder()
            for name, facts in self._manifest.identity.tokenizer.files.items():
                data = self._read_whole(
                    f"tokenizer/{name}", size=facts.bytes, checksum=facts.checksum
                )
                (folder.path / name).write_bytes(data)
            self._tokenizer = folder
        return self._tokenizer.path

    def _read_whole(self, name: str, *, size: int, checksum: str) -> bytes:
        url = join(self._url, name)
        ranges = [
            (url, first, min(first + RANGE_BYTES, size)) for first in range(0, size, RANGE_BYTES)
        ]
        for _ in range(2):
            try:
                data = b"".join(files_module.read_ranges(ranges))
            except RemoteError as error:
                raise store_error(error) from error
            if checksum_of(data) == checksum:
                return data
        raise changed(self._url, name)

    @functools.cached_property
    def _units(self) -> dict[str, UnitEntry]:
        return {unit.name: unit for unit in self._manifest.units}

    def file(self, shard: str, kind: Kind) -> BlockFile:
        """A file of a shard, as it is read by blocks."""
        return self._files[shard, kind]

    def _num_documents(self, shard: str) -> int:
        return (self.file(shard, "idx").size - HEADER.size) // 4

    def _open_folder(self) -> BlockFolder | None:
        if self._cache is None:
            return None
        return BlockFolder(
            Path(self._cache.path),
            limit_bytes=self._cache.limit_bytes,
            block_bytes=BLOCK_BYTES,
            store=self.path,
            versions=self._versions,
        )

    def close(self) -> None:
        """End background reads, and give memory and private files back; reading begins anew."""
        self.ahead.close()
        self.blocks.clear()
        self._indexes.clear()
        if self._tokenizer is not None:
            self._tokenizer.remove()
            self._tokenizer = None

    def __getstate__(self) -> tuple[str, _CacheFolder | None, str | None, dict[str, str]]:
        return self._url, self._cache, self._manifest_checksum, dict(self._versions)

    def __setstate__(
        self, state: tuple[str, _CacheFolder | None, str | None, dict[str, str]]
    ) -> None:
        self._url, self._cache, self._manifest_checksum, self._versions = state
        self._begin()


def _block_files(manifest: Manifest) -> dict[tuple[str, Kind], BlockFile]:
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
                name=f"shards/{name}.{kind}",
                size=size,
                content=checksum,
                first_block=block,
                is_whole=kind != "idx",
            )
            block += file.num_blocks
    return files


class RemoteTokens:
    """Reads pieces of the shards of an open split.

    A shard is named by its position in `Store.shards`, a piece by its first byte and the one after
    its last, in the shard's file of a kind.
    """

    def __init__(self, files: RemoteFiles, shards: Sequence[str]) -> None:
        self._files = files
        self._shards = shards

    def read(
        self, shards: Sequence[int], firsts: Sequence[int], lasts: Sequence[int], *, kind: Kind
    ) -> list[memoryview]:
        """The bytes of every piece, in order, with one batch of requests for all that is missing.

        >>> store.remote.read([0, 3], [0, 4096], [512, 4608], kind="bin")
        """
        pieces = self._pieces(shards, firsts, lasts, kind)
        begun = {
            place: job for place, piece in enumerate(pieces) if (job := self._ahead.take(piece))
        }
        found: dict[int, memoryview] = {}
        self._fill(found, pieces, [place for place in range(len(pieces)) if place not in begun])
        for place, job in begun.items():
            data = job.wait()
            if data is not None:
                found[place] = data
        self._fill(found, pieces, [place for place in begun if place not in found])
        return [found[place] for place in range(len(pieces))]

    def _fill(self, found: dict[int, memoryview], pieces: list[Piece], places: list[int]) -> None:
        if places:
            data = self._files.blocks.read([pieces[place] for place in places])
            found.update(zip(places, data, strict=True))

    def read_ahead(
        self, shards: Sequence[int], firsts: Sequence[int], lasts: Sequence[int], *, kind: Kind
    ) -> None:
        """Begin to read pieces, in the background, that `read` will be asked for."""
        self._ahead.begin(self._pieces(shards, firsts, lasts, kind))

    def prepare_indexes(self, shards: Sequence[int]) -> None:
        """Bring the indexes of shards that will be looked at, all at once."""
        self._files.prepare_indexes([self._shards[shard] for shard in shards])

    @property
    def _ahead(self) -> RemoteReadAhead:
        return self._files.ahead

    def _pieces(
        self, shards: Sequence[int], firsts: Sequence[int], lasts: Sequence[int], kind: Kind
    ) -> list[Piece]:
        return [
            (self._files.file(self._shards[shard], kind), first, last)
            for shard, first, last in zip(shards, firsts, lasts, strict=True)
        ]


class ShardTokens:
    """The ids or the mask of a remote shard: an array as far as its length and slices go."""

    ndim = 1

    def __init__(
        self, blocks: CacheReader, file: BlockFile, *, dtype: TokenDtype | MaskDtype
    ) -> None:
        self._blocks = blocks
        self._file = file
        self.dtype = dtype
        self.size = file.size // dtype.itemsize
        self.nbytes = file.size
        self.shape = (self.size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            return self[:][key]
        first, last, step = key.indices(self.size)
        if step != 1:
            return self[:][key]
        width = self.dtype.itemsize
        last = max(first, last)
        (data,) = self._blocks.read([(self._file, first * width, last * width)])
        return view_values(data.toreadonly(), dtype=self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self[:], dtype=dtype, copy=copy)


class _PrivateFolder:
    """A folder that is gone when this object, or the process that made it, is gone."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix="tokenmill-"))
        self.remove = weakref.finalize(self, remove_folder, self.path, self.process)
