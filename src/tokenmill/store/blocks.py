"""Reads pieces of remote files by blocks: from memory, from a local folder, from the server.

    pieces of files -> parts of blocks -> memory? folder? -> one batch of ranges -> pieces, in order

Blocks are aligned stretches of a file. One of which much is wanted is brought whole and kept; of
one of which little is wanted, only that is brought: rows in random order want 4 KB here and 4 KB
there, and whole blocks would be 250 times what is asked for. See `_wants_whole`.

A process that was forked shares nothing with its parent: it begins with an empty memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
import threading
import time
import warnings
from collections import OrderedDict
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import xxhash

from tokenmill.errors import StoreError, UsageError
from tokenmill.files import RemoteError, StoppedError, join, read_versions, shown
from tokenmill.store.layout import checksum_of, store_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from io import FileIO
    from pathlib import Path

    from tokenmill.files import Versioned


# Read in order, 32 at once, from a loopback server 20 ms away (medians of 3): blocks of 256 KiB
# came at 144 MB/s, of 1 MiB at 267, of 4 MiB at 281: little for four times the memory and waste.
BLOCK_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20
# Brought at once at most: a call that wants more holds no more than this besides its result.
WAVE_BYTES = 64 << 20
# Ranges closer than this become one: that many bytes cost less than one more request.
GAP_BYTES = 64 << 10
# One range at most, so that a chain of small gaps does not become a whole file.
MERGED_BYTES = 4 << 20
_POLL_SECONDS = 0.2

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFile:
    """A remote file, or the beginning of one."""

    name: str  # relative to the store
    size: int
    content: str  # checksum of the file in the manifest: other bytes are another file
    first_block: int  # blocks of all files of the store that lie before it
    is_whole: bool = True  # it is all of the file, and so its checksum can be compared

    @property
    def num_blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)


Piece: TypeAlias = tuple[BlockFile, int, int]  # bytes `first` to `last` of a file


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRange:
    """A stretch of a file that lies in one block, and where it goes."""

    first: int
    last: int
    place: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedBlock:
    """A block, and the parts of it that a call wants."""

    file: BlockFile
    number: int  # counted over all files of the store
    parts: list[BlockRange] = field(default_factory=list)

    @property
    def first(self) -> int:
        return (self.number - self.file.first_block) * BLOCK_BYTES

    @property
    def last(self) -> int:
        return min(self.first + BLOCK_BYTES, self.file.size)

    @property
    def size(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extent:
    """What one request brings: a whole block, or parts of a file that lie close together."""

    file: BlockFile
    first: int
    last: int
    parts: list[BlockRange]
    block: CachedBlock | None = None


class CacheReader:
    """Reads the files below a URL; safe to use from several threads."""

    def __init__(
        self,
        url: str,
        *,
        folder: BlockFolder | None,
        files: Iterable[BlockFile],
        versions: dict[str, str],
    ) -> None:
        """`versions` tells which version of a file was seen first, and learns it."""
        self._url = url
        self._folder = folder
        self._versions = versions
        num_blocks = sum(file.num_blocks for file in files)
        self._fits_folder = folder is not None and num_blocks <= folder.capacity_blocks
        self._memory: RecentlyUsed[int, bytes] = RecentlyUsed(MEMORY_BYTES)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._flights: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()

    def read(
        self, pieces: Sequence[Piece], *, keep: bool = True, stop: threading.Event | None = None
    ) -> list[memoryview]:
        """The bytes of every piece, in order; without `keep` they take no place in memory."""
        if self._process != os.getpid():
            self._begin()
        out = memoryview(bytearray(sum(last - first for _, first, last in pieces)))
        if self._folder is not None:
            self._learn_versions(pieces, stop)
        left = [
            block
            for block in _cut(pieces)
            if not self._from_memory(block, out) and not self._from_folder(block, out, keep=keep)
        ]
        for wave in _waves(self._extents(left, keep=keep)):
            self._bring(wave, out, keep=keep, stop=stop)
        return list(_slices(out, pieces))

    def clear(self) -> None:
        """Give the memory back."""
        self._memory.clear()

    def forget(self, file: BlockFile) -> None:
        """Drop what is kept of a file whose bytes turned out wrong."""
        for number in range(file.first_block, file.first_block + file.num_blocks):
            self._memory.drop(number)
            if self._folder is not None:
                self._folder.forget(CachedBlock(file=file, number=number))

    def _from_memory(self, block: CachedBlock, out: memoryview) -> bool:
        data = self._memory.get(block.number)
        if data is None:
            return False
        _place(data, block.parts, out, base=block.first)
        return True

    def _from_folder(self, block: CachedBlock, out: memoryview, *, keep: bool) -> bool:
        if self._folder is None:
            return False
        if keep and _is_dense(block):
            data = self._folder.get(block)
            if data is None:
                return False
            self._memory.put(block.number, data, size=len(data))
            _place(data, block.parts, out, base=block.first)
            return True
        parts = self._folder.get_parts(block)
        if parts is None:
            return False
        for part, data in zip(block.parts, parts, strict=True):
            out[part.place : part.place + len(data)] = data
        return True

    def _extents(self, blocks: list[CachedBlock], *, keep: bool) -> Iterator[_Extent]:
        """What to bring: whole blocks, and ranges of the others."""
        sparse: list[CachedBlock] = []
        for block in blocks:
            if self._wants_whole(block, keep=keep):
                yield _whole(block)
            else:
                sparse.append(block)
        sparse.sort(key=attrgetter("number"))
        for file, group in groupby(sparse, key=attrgetter("file")):
            yield from _merge(file, [part for block in group for part in block.parts])

    def _wants_whole(self, block: CachedBlock, *, keep: bool) -> bool:
        # A folder that can hold the whole store fills up once, and then no request is ever made
        # again. Otherwise a whole block pays only if much of it is wanted now, since by the time
        # the rest is wanted it will have been replaced: below a quarter, bring what is asked for.
        return self._fits_folder or (keep and _is_dense(block))

    def _bring(
        self, wave: list[_Extent], out: memoryview, *, keep: bool, stop: threading.Event | None
    ) -> None:
        """Bring a wave to its places, and keep the whole blocks in it.

        A block that another thread is bringing is waited for, after our own have come: so two
        threads never wait for each other.
        """
        ours, theirs = self._share_out(wave)
        begun = [extent for extent, _ in ours]
        try:
            for (extent, flight), data in zip(ours, self._download(begun, stop), strict=True):
                _place(data, extent.parts, out, base=extent.first)
                if extent.block is not None and flight is not None:
                    in_memory = keep and _is_dense(extent.block)
                    self._keep(extent.block, data, flight, in_memory=in_memory)
        finally:
            self._give_up([flight for _, flight in ours if flight is not None])
        for extent, flight in theirs:
            data = _wait_for(flight, stop) or self._download([extent], stop)[0]
            _place(data, extent.parts, out, base=extent.first)

    def _share_out(
        self, wave: list[_Extent]
    ) -> tuple[list[tuple[_Extent, Future[bytes] | None]], list[tuple[_Extent, Future[bytes]]]]:
        """The extents that this thread brings, and those that another already does.

        A whole block that is on its way has a flight, which others may wait for.
        """
        ours: list[tuple[_Extent, Future[bytes] | None]] = []
        theirs: list[tuple[_Extent, Future[bytes]]] = []
        with self._lock:
            for extent in wave:
                if extent.block is None:
                    ours.append((extent, None))
                elif (flight := self._flights.get(extent.block.number)) is not None:
                    theirs.append((extent, flight))
                else:
                    flight = self._flights[extent.block.number] = Future()
                    ours.append((extent, flight))
        return ours, theirs

    def _keep(
        self, block: CachedBlock, data: bytes, flight: Future[bytes], *, in_memory: bool
    ) -> None:
        if in_memory:
            self._memory.put(block.number, data, size=len(data))
        if self._folder is not None:
            self._folder.put(block, data)
        # Only now: who finds no flight any more must find the block.
        self._end(flight)
        flight.set_result(data)

    def _give_up(self, flights: list[Future[bytes]]) -> None:
        """Let those who wait for blocks that did not come get them themselves."""
        for flight in flights:
            if not flight.done():
                self._end(flight)
                flight.cancel()

    def _end(self, flight: Future[bytes]) -> None:
        """Take a flight out, and no other that began for the same block since."""
        with self._lock:
            for number in [number for number, each in self._flights.items() if each is flight]:
                del self._flights[number]

    def _download(self, extents: list[_Extent], stop: threading.Event | None) -> list[bytes]:
        ranges = [(extent.file, extent.first, extent.last) for extent in extents]
        return [data for data, _ in self._ask(ranges, stop)]

    def _learn_versions(self, pieces: Sequence[Piece], stop: threading.Event | None) -> None:
        """Ask for a byte of files of which no version is known: what the folder has may be old."""
        files = {file.name: file for file, first, last in pieces if first < last and file.is_whole}
        unknown = [file for name, file in files.items() if name not in self._versions]
        answers = self._ask([(file, 0, 1) for file in unknown], stop) if unknown else []
        for file, (_, version) in zip(unknown, answers, strict=True):
            self._versions.setdefault(file.name, version)

    def _ask(self, ranges: list[Piece], stop: threading.Event | None) -> list[Versioned]:
        """The bytes of ranges; StoreError where they are of another version than was seen first."""
        wanted = [(join(self._url, file.name), first, last) for file, first, last in ranges]
        try:
            answers = read_versions(wanted, stop=stop)
        except RemoteError as error:
            raise store_error(error) from error
        for (file, first, last), (data, version) in zip(ranges, answers, strict=True):
            if not file.is_whole:  # an index: whoever completes it compares its checksum
                continue
            known = version and self._versions.setdefault(file.name, version)
            is_all = (first, last) == (0, file.size)
            if (known and known != version) or (is_all and checksum_of(data) != file.content):
                raise changed(self._url, file.name)
        return answers


class RecentlyUsed(Generic[_Key, _Value]):
    """The values that were used last, up to a number of bytes; a fork begins with none."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.clear()

    def clear(self) -> None:
        self._process = os.getpid()
        self._bytes = 0
        self._values: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> _Value | None:
        if self._process != os.getpid():
            self.clear()
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: _Key, value: _Value, *, size: int) -> None:
        if self._process != os.getpid():
            self.clear()
        with self._lock:
            self._bytes += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = (value, size)
            while self._bytes > self._limit and len(self._values) > 1:
                _, (_, dropped) = self._values.popitem(last=False)
                self._bytes -= dropped

    def drop(self, key: _Key) -> None:
        if self._process != os.getpid():
            self.clear()
        with self._lock:
            self._bytes -= self._values.pop(key, (None, 0))[1]


def changed(url: str, name: str) -> StoreError:
    """The error for a file behind a URL that is not the one that it was, or should be."""
    return StoreError(
        f"{join(shown(url), name)!r} is not the file that this store had when it was opened, or"
        " it is damaged; two versions of a store must not be mixed",
        hint="open the store again; if that fails too, copy it to the server again",
    )


def _cut(pieces: Sequence[Piece]) -> list[CachedBlock]:
    """The blocks that hold the pieces, in the order in which they are wanted."""
    blocks: dict[int, CachedBlock] = {}
    place = 0
    for file, first, last in pieces:
        if not 0 <= first <= last <= file.size:
            raise ValueError(f"bytes {first} to {last} of {file.name!r}, which has {file.size}")
        while first < last:
            number = file.first_block + first // BLOCK_BYTES
            end = min(last, first - first % BLOCK_BYTES + BLOCK_BYTES)
            block = blocks.get(number)
            if block is None:
                block = blocks[number] = CachedBlock(file=file, number=number)
            block.parts.append(BlockRange(first=first, last=end, place=place))
            place += end - first
            first = end
    return list(blocks.values())


def _is_dense(block: CachedBlock) -> bool:
    return 4 * sum(part.last - part.first for part in block.parts) >= block.size


def _whole(block: CachedBlock) -> _Extent:
    return _Extent(
        file=block.file, first=block.first, last=block.last, parts=block.parts, block=block
    )


def _merge(file: BlockFile, parts: list[BlockRange]) -> Iterator[_Extent]:
    """Ranges that hold the parts; those that lie close together become one."""
    run: list[BlockRange] = []
    first = last = 0
    for part in sorted(parts, key=attrgetter("first")):
        if run and (part.first - last > GAP_BYTES or part.last - first > MERGED_BYTES):
            yield _Extent(file=file, first=first, last=last, parts=run)
            run = []
        if not run:
            first, last = part.first, part.last
        run.append(part)
        last = max(last, part.last)
    if run:
        yield _Extent(file=file, first=first, last=last, parts=run)


def _waves(extents: Iterable[_Extent]) -> Iterator[list[_Extent]]:
    wave: list[_Extent] = []
    size = 0
    for extent in extents:
        length = extent.last - extent.first
        if wave and size + length > WAVE_BYTES:
            yield wave
            wave, size = [], 0
        wave.append(extent)
        size += length
    if wave:
        yield wave


def _place(data: bytes, parts: list[BlockRange], out: memoryview, *, base: int) -> None:
    view = memoryview(data)
    for part in parts:
        size = part.last - part.first
        out[part.place : part.place + size] = view[part.first - base : part.last - base]


def _slices(out: memoryview, pieces: Sequence[Piece]) -> Iterator[memoryview]:
    place = 0
    for _, first, last in pieces:
        yield out[place : place + last - first]
        place += last - first


def _wait_for(flight: Future[bytes], stop: threading.Event | None) -> bytes | None:
    """What another thread brings; None where it failed."""
    while True:
        try:
            return flight.result(_POLL_SECONDS)
        except CancelledError:
            return None
        except TimeoutError:
            if stop is not None and stop.is_set():
                raise StoppedError from None


# -------------------------------------------------------------------------------------------------
# Blocks of remote files, kept in a local folder that never outgrows its limit.
#
# The folder is a fixed number of slots, each a file of one block at most. A block may lie in the
# few slots of one set, found from its running number in the store; it takes an empty one, or
# replaces the one that was not used for longest. So nothing has to be counted, locked or scanned:
# any number of processes may use the folder at once, and one that is killed leaves a temporary
# file at worst. Running numbers fill the sets evenly: a store that fits the limit is kept whole.
#
#   | slot  =  magic, key (16 bytes), bytes of the block, xxh3-128 of the block  |  block
#
# The key is a hash of the store's address, the file's name and checksum in the manifest, the
# block's place, and the version that the server gives the file, if it does. A slot that is
# damaged, or that holds another block, is one that is not there. Another limit means other sets:
# what was kept under the old one is then brought again.

HEADER = struct.Struct("<8s16sQ16s")
MAGIC = b"tmblock1"
WAYS = 8  # slots to a set: more would follow the use of blocks more closely, and cost more looks
FOLDER_SLOTS = 4096
STALE_SECONDS = 3600
MAX_SOUND = 1 << 16  # blocks that a process remembers to have checked: some 10 MB
_SLOT_FOLDER = re.compile(r"[0-9a-f]{6}")
_SLOT_FILE = re.compile(r"[0-9a-f]{3}\.block")
_TEMPORARY = re.compile(r"[0-9]+-[0-9a-f]{16}\.tmp")


class BlockFolder:
    """A folder of slots.

    >>> folder = BlockFolder(Path("cache"), limit_bytes=10**10, block_bytes=1 << 20, store="s3://b")
    """

    def __init__(
        self,
        path: Path,
        *,
        limit_bytes: int,
        block_bytes: int,
        store: str,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._store = store
        self._versions = {} if versions is None else versions
        slots = limit_bytes // (block_bytes + HEADER.size)
        if slots < 1:
            raise UsageError(
                f"cache_bytes={limit_bytes:,} is less than one block of {block_bytes:,} bytes",
                hint="leave it out, or give it some gigabytes: cache_bytes=10**10",
            )
        self._ways = min(WAYS, slots)
        self._sets = slots // self._ways
        self.capacity_blocks = self._sets * self._ways
        self._writes = True
        self._sound: dict[int, tuple[Path, int]] = {}
        self._prepare()

    def get(self, block: CachedBlock) -> bytes | None:
        """The bytes of a block, where they are here and sound."""
        key = self._key(block)
        for path in self._slots(block):
            slot = _read_slot(path, key=key, size=block.size)
            if slot is not None:
                if len(self._sound) >= MAX_SOUND:
                    self._sound.clear()
                self._sound[block.number] = (path, slot.file)
                _touch(path)
                return slot.data
        self._sound.pop(block.number, None)
        return None

    def get_parts(self, block: CachedBlock) -> list[bytes] | None:
        """The parts of a block that are wanted, where it is here and sound.

        A process checks a block as a whole when it first uses it. After that, as long as its slot
        is the same file, only the parts are read: for 4 KB that takes a tenth of the time.
        """
        path, file = self._sound.get(block.number, (None, -1))
        if path is not None:
            parts = _read_parts(path, file=file, key=self._key(block), block=block)
            if parts is not None:
                _touch(path)
                return parts
        data = self.get(block)
        if data is None:
            return None
        return [data[part.first - block.first : part.last - block.first] for part in block.parts]

    def put(self, block: CachedBlock, data: bytes) -> None:
        """Keep a block; a folder that cannot be written is a warning, not an error."""
        if not self._writes:
            return
        key = self._key(block)
        target = self._victim(block, key)
        header = HEADER.pack(MAGIC, key, len(data), xxhash.xxh3_128_digest(data))
        staged = self._path / "tmp" / f"{os.getpid()}-{secrets.token_hex(8)}.tmp"
        try:
            # Each time: whoever empties a folder of temporary files may take these folders too.
            staged.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(exist_ok=True)
            with open(staged, "xb") as file:
                file.write(header)
                file.write(data)
        except OSError as error:
            self._give_up(error)
        else:
            # Windows does not replace a file that another process reads: then it is not kept.
            with contextlib.suppress(OSError):
                staged.replace(target)
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)

    def forget(self, block: CachedBlock) -> None:
        """Remove a block whose bytes turned out wrong."""
        self._sound.pop(block.number, None)
        for path in self._slots(block):
            if _holds(path, self._key(block)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _key(self, block: CachedBlock) -> bytes:
        file = block.file
        place = f"{self._store}\n{file.name}\n{file.content}\n{block.first}-{block.last}"
        if version := self._versions.get(file.name):
            place += f"\n{version}"
        return xxhash.xxh3_128_digest(place.encode("utf-8", "surrogatepass"))

    def _slots(self, block: CachedBlock) -> Iterator[Path]:
        first = block.number % self._sets * self._ways
        for slot in range(first, first + self._ways):
            yield self._path / f"{slot // FOLDER_SLOTS:06x}" / f"{slot % FOLDER_SLOTS:03x}.block"

    def _victim(self, block: CachedBlock, key: bytes) -> Path:
        """The slot to write to: its own if it is damaged, an empty one, the least recently used."""

        def last_use(path: Path) -> int:
            try:
                return -1 if _holds(path, key) else path.stat().st_mtime_ns
            except OSError:
                return 0

        return min(self._slots(block), key=last_use)

    def _give_up(self, error: OSError) -> None:
        self._writes = False
        warnings.warn(
            f"the cache folder {str(self._path)!r} cannot be written: {error.strerror or error};"
            " reading goes on without it",
            RuntimeWarning,
            stacklevel=2,
        )

    def _prepare(self) -> None:
        try:
            (self._path / "tmp").mkdir(parents=True, exist_ok=True)
            for path in [*self._stale_files(), *self._slots_beyond_the_limit()]:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"the cache folder {str(self._path)!r} cannot be used: {error.strerror or error}",
                hint="give a folder that can be written, or leave cache= out",
            ) from error

    def _stale_files(self) -> Iterator[Path]:
        """What processes that were killed left behind."""
        before = time.time() - STALE_SECONDS
        for path in (self._path / "tmp").iterdir():
            with contextlib.suppress(FileNotFoundError):  # its writer is done with it
                if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime < before:
                    yield path

    def _slots_beyond_the_limit(self) -> Iterator[Path]:
        """Of a time when the limit was higher."""
        slots = self._sets * self._ways
        for folder in self._path.iterdir():
            if not _SLOT_FOLDER.fullmatch(folder.name):
                continue
            first = int(folder.name, 16) * FOLDER_SLOTS
            if first + FOLDER_SLOTS <= slots:
                continue
            for path in folder.iterdir():
                if _SLOT_FILE.fullmatch(path.name) and first + int(path.name[:3], 16) >= slots:
                    yield path


class _Slot(NamedTuple):
    file: int  # its number in the filesystem: another one means that the slot was replaced
    data: bytes


def _read_slot(path: Path, *, key: bytes, size: int) -> _Slot | None:
    try:
        with open(path, "rb", buffering=0) as file:
            digest = _read_header(file, key=key, size=size)
            if digest is None:
                return None
            slot = _Slot(os.fstat(file.fileno()).st_ino, file.read(size + 1))
    except OSError:
        return None
    if len(slot.data) != size or xxhash.xxh3_128_digest(slot.data) != digest:
        return None
    return slot


def _read_parts(path: Path, *, file: int, key: bytes, block: CachedBlock) -> list[bytes] | None:
    parts = []
    try:
        with open(path, "rb", buffering=0) as opened:
            if _read_header(opened, key=key, size=block.size) is None:
                return None
            if os.fstat(opened.fileno()).st_ino != file:
                return None
            for part in block.parts:
                opened.seek(HEADER.size + part.first - block.first)
                parts.append(opened.read(part.last - part.first))
    except OSError:
        return None
    complete = all(
        len(data) == part.last - part.first for data, part in zip(parts, block.parts, strict=True)
    )
    return parts if complete else None


def _read_header(file: FileIO, *, key: bytes, size: int) -> bytes | None:
    """The digest of the block in a slot; None unless the block is the one that is wanted."""
    header = file.read(HEADER.size)
    if len(header) != HEADER.size:
        return None
    magic, found, length, digest = HEADER.unpack(header)
    return digest if (magic, found, length) == (MAGIC, key, size) else None


def _holds(path: Path, key: bytes) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEADER.size)[8:24] == key
    except OSError:
        return False


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # replaced meanwhile, or not ours to touch
        os.utime(path)
