"""Reads pieces of remote files by blocks: from memory, from a local folder, from the server.

    pieces of files -> parts of blocks -> memory? folder? -> one batch of ranges -> pieces, in order

Blocks are aligned ranges of a file. One of which much is wanted is downloaded whole and kept; of
one of which little is wanted, only that is: rows in random order want 4 KB here and 4 KB
there, and whole blocks would be 250 times what is asked for. See `_wants_whole`.

A process that was forked shares nothing with its parent: it begins with an empty memory.
"""

from __future__ import annotations

import contextlib
import itertools
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
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import xxhash

from tokenmill.errors import StoreError, UsageError
from tokenmill.files import StoppedError, join, read_versions, shown
from tokenmill.store.layout import checksum_of, store_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tokenmill.files import Stop, Versioned


# Read in order, 32 at once, from a loopback server 20 ms away (medians of 3): blocks of 256 KiB
# came at 144 MB/s, of 1 MiB at 267, of 4 MiB at 281: little for four times the memory and waste.
BLOCK_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20
# Downloaded at once at most: a call that wants more holds no more than this besides its result.
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
    first_block: int  # blocks of all files of the store that come before it
    is_whole: bool = True  # it is all of the file, and so its checksum can be compared

    @property
    def num_blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)


Piece: TypeAlias = tuple[BlockFile, int, int]  # bytes `first` to `last` of a file


class BlockRange(NamedTuple):
    """Bytes of a file that are in one block, and where they go."""

    first: int
    last: int
    place: int


@dataclass(frozen=True, slots=True)
class FileExtent:
    """Bytes of a file that are asked for at once, and the parts of them that a call wants.

    It is a block, or goes around parts that are close together.
    """

    file: BlockFile
    first: int
    last: int
    parts: list[BlockRange] = field(default_factory=list)
    number: int = -1  # of a block, counted over all files of the store

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def is_dense(self) -> bool:
        return 4 * sum(part.last - part.first for part in self.parts) >= self.size

    def place(self, data: bytes, out: memoryview) -> None:
        """Copy the parts to where they go."""
        view = memoryview(data)
        for first, last, place in self.parts:
            out[place : place + last - first] = view[first - self.first : last - self.first]


def block_of(file: BlockFile, number: int) -> FileExtent:
    """A block, by its number."""
    first = (number - file.first_block) * BLOCK_BYTES
    return FileExtent(file, first, min(first + BLOCK_BYTES, file.size), number=number)


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
        self, pieces: Sequence[Piece], *, keep: bool = True, stop: Stop = None
    ) -> list[memoryview]:
        """The bytes of every piece, in order; without `keep` they take no place in memory."""
        if self._process != os.getpid():
            self._begin()
        sizes = [last - first for _, first, last in pieces]
        out = memoryview(bytearray(sum(sizes)))
        if self._folder is not None:
            self._learn_versions(pieces, stop)
        left = [block for block in _cut(pieces) if not self._from_cache(block, out, keep=keep)]
        wave: list[FileExtent] = []
        size = 0
        for extent in self._extents(left, keep=keep):
            if size + extent.size > WAVE_BYTES:
                self._download(wave, out, keep=keep, stop=stop)
                wave, size = [], 0
            wave.append(extent)
            size += extent.size
        self._download(wave, out, keep=keep, stop=stop)
        ends = itertools.accumulate(sizes)
        return [out[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def clear(self) -> None:
        """Give the memory back."""
        self._memory.clear()

    def forget(self, file: BlockFile) -> None:
        """Drop what is kept of a file whose bytes turned out wrong."""
        for number in range(file.first_block, file.first_block + file.num_blocks):
            self._memory.drop(number)
            if self._folder is not None:
                self._folder.forget(block_of(file, number))

    def _from_cache(self, block: FileExtent, out: memoryview, *, keep: bool) -> bool:
        """Whether a block was in memory or in the folder, and is in its places now."""
        data = self._memory.get(block.number)
        if data is None and self._folder is not None:
            if keep and block.is_dense:
                data = self._folder.get(block)
                if data is not None:
                    self._memory.put(block.number, data, size=len(data))
            elif (parts := self._folder.get_parts(block)) is not None:
                for part, found in zip(block.parts, parts, strict=True):
                    out[part.place : part.place + len(found)] = found
                return True
        if data is None:
            return False
        block.place(data, out)
        return True

    def _extents(self, blocks: list[FileExtent], *, keep: bool) -> Iterator[FileExtent]:
        """What to download: whole blocks, and ranges of the others."""
        # A folder that can hold the whole store fills up once, and then no request is ever made
        # again. Otherwise a whole block pays only if much of it is wanted now, since by the time
        # the rest is wanted it will have been replaced: below a quarter, ask for what is wanted.
        sparse: list[FileExtent] = []
        for block in blocks:
            # A small file that comes whole is compared with its checksum.
            is_file = block.file.is_whole and block.file.size <= GAP_BYTES
            if self._fits_folder or is_file or (keep and block.is_dense):
                yield block
            else:
                sparse.append(block)
        sparse.sort(key=attrgetter("number"))
        for file, group in itertools.groupby(sparse, key=attrgetter("file")):
            yield from _merge(file, [part for block in group for part in block.parts])

    def _download(self, wave: list[FileExtent], out: memoryview, *, keep: bool, stop: Stop) -> None:
        """Download extents to their places, and keep the whole blocks among them.

        A block that is on its way has a flight, which other threads wait for, after their own have
        come: so two threads never wait for each other.
        """
        ours: list[tuple[FileExtent, Future[bytes]]] = []
        theirs: list[tuple[FileExtent, Future[bytes]]] = []
        with self._lock:
            for extent in wave:
                flight = self._flights.get(extent.number)
                if flight is not None:
                    theirs.append((extent, flight))
                else:
                    ours.append((extent, Future()))
                    if extent.number >= 0:
                        self._flights[extent.number] = ours[-1][1]
        asked = [(extent.file, extent.first, extent.last) for extent, _ in ours]
        try:
            answers = self._ask(asked, stop)
            for (extent, flight), (data, _) in zip(ours, answers, strict=True):
                extent.place(data, out)
                if extent.number >= 0:
                    if keep and extent.is_dense:
                        self._memory.put(extent.number, data, size=len(data))
                    if self._folder is not None:
                        self._folder.put(extent, data)
                # Only now: who finds no flight any more must find the block.
                self._flights.pop(extent.number, None)
                flight.set_result(data)
        finally:
            for extent, flight in ours:  # those who wait for what did not come get it themselves
                if not flight.done():
                    self._flights.pop(extent.number, None)
                    flight.cancel()
        for extent, flight in theirs:
            found = _wait_for(flight, stop)
            if found is None:
                ((found, _),) = self._ask([(extent.file, extent.first, extent.last)], stop)
            extent.place(found, out)

    def _learn_versions(self, pieces: Sequence[Piece], stop: Stop) -> None:
        """Ask for a byte of files of which no version is known: what the folder has may be old."""
        files = {file.name: file for file, first, last in pieces if first < last and file.is_whole}
        unknown = [file for name, file in files.items() if name not in self._versions]
        answers = self._ask([(file, 0, 1) for file in unknown], stop)
        for file, (_, version) in zip(unknown, answers, strict=True):
            self._versions.setdefault(file.name, version)

    def _ask(self, ranges: list[Piece], stop: Stop) -> list[Versioned]:
        """The bytes of ranges; StoreError where they are of another version than was seen first."""
        wanted = [(join(self._url, file.name), first, last) for file, first, last in ranges]
        with store_errors():
            answers = read_versions(wanted, stop=stop)
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

    def _mine(self) -> threading.Lock:
        if self._process != os.getpid():
            self.clear()
        return self._lock

    def get(self, key: _Key) -> _Value | None:
        with self._mine():
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: _Key, value: _Value, *, size: int) -> None:
        with self._mine():
            self._bytes += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = (value, size)
            while self._bytes > self._limit and len(self._values) > 1:
                _, (_, dropped) = self._values.popitem(last=False)
                self._bytes -= dropped

    def drop(self, key: _Key) -> None:
        with self._mine():
            self._bytes -= self._values.pop(key, (None, 0))[1]


def changed(url: str, name: str) -> StoreError:
    """The error for a file at a URL that is not the one that it was, or should be."""
    return StoreError(
        f"{join(shown(url), name)!r} is not the file that this store had when it was opened, or"
        " it is damaged; two versions of a store must not be mixed",
        hint="open the store again; if that fails too, copy it to the server again",
    )


def _cut(pieces: Sequence[Piece]) -> list[FileExtent]:
    """The blocks that hold the pieces, in the order in which they are wanted."""
    blocks: dict[int, FileExtent] = {}
    place = 0
    for file, first, last in pieces:
        if not 0 <= first <= last <= file.size:
            raise ValueError(f"bytes {first} to {last} of {file.name!r}, which has {file.size}")
        while first < last:
            number = file.first_block + first // BLOCK_BYTES
            if number not in blocks:
                blocks[number] = block_of(file, number)
            end = min(last, blocks[number].last)
            blocks[number].parts.append(BlockRange(first, end, place))
            place += end - first
            first = end
    return list(blocks.values())


def _merge(file: BlockFile, parts: list[BlockRange]) -> Iterator[FileExtent]:
    """Ranges that hold the parts; those that are close together become one."""
    run: list[BlockRange] = []
    end = 0
    for part in sorted(parts):
        if run and (part.first - end > GAP_BYTES or part.last - run[0].first > MERGED_BYTES):
            yield FileExtent(file, run[0].first, end, run)
            run, end = [], 0
        run.append(part)
        end = max(end, part.last)
    if run:
        yield FileExtent(file, run[0].first, end, run)


def _wait_for(flight: Future[bytes], stop: Stop) -> bytes | None:
    """What another thread downloads; None where it failed."""
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
# The folder is a fixed number of slots, each a file of one block at most. A block may be in the
# few slots of one set, found from its running number in the store; it takes an empty one, or
# replaces the one that was not used for longest. So nothing has to be counted, locked or scanned:
# any number of processes may use the folder at once, and one that is killed leaves a temporary
# file at worst. Running numbers fill the sets evenly: a store that fits the limit is kept whole.
#
# A slot is a header (magic, key of 16 bytes, bytes of the block, xxh3-128 of the block) and the
# block. The key is a hash of the store's address, the file's name and checksum in the manifest,
# the block's place, and the version that the server gives the file, if it does. A slot that is
# damaged, or that holds another block, is one that is not there. Another limit means other sets:
# what was kept under the old one is then downloaded again.

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

    >>> folder = BlockFolder(Path("cache"), limit_bytes=10**10, store="s3://b", versions={})
    """

    def __init__(
        self, path: Path, *, limit_bytes: int, store: str, versions: Mapping[str, str]
    ) -> None:
        self._path = path
        self._store = store
        self._versions = versions
        slots = limit_bytes // (BLOCK_BYTES + HEADER.size)
        if slots < 1:
            raise UsageError(
                f"cache_bytes={limit_bytes:,} is less than one block of {BLOCK_BYTES:,} bytes",
                hint="leave it out, or give it some gigabytes: cache_bytes=10**10",
            )
        self._ways = min(WAYS, slots)
        self._sets = slots // self._ways
        self.capacity_blocks = self._sets * self._ways
        self._writes = True
        self._sound: dict[int, tuple[Path, int]] = {}
        self._prepare()

    def get(self, block: FileExtent) -> bytes | None:
        """The bytes of a block, where they are here and sound."""
        found = self._look(block, [(0, block.size)], sound=None)
        return None if found is None else found[0]

    def get_parts(self, block: FileExtent) -> list[bytes] | None:
        """The parts of a block that are wanted, where it is here and sound.

        A process checks a block as a whole when it first uses it. After that, as long as its slot
        is the same file, only the parts are read: for 4 KB that takes a tenth of the time.
        """
        ranges = [(part.first - block.first, part.last - block.first) for part in block.parts]
        sound = self._sound.get(block.number)
        found = None if sound is None else self._look(block, ranges, sound=sound)
        return self._look(block, ranges, sound=None) if found is None else found

    def _look(
        self, block: FileExtent, ranges: list[tuple[int, int]], *, sound: tuple[Path, int] | None
    ) -> list[bytes] | None:
        """Ranges of a block, from the slot that is known to be sound or from the one it is in."""
        key = self._key(block)
        for path in self._slots(block) if sound is None else sound[:1]:
            inode = None if sound is None else sound[1]
            found = _read_slot(path, key=key, size=block.size, ranges=ranges, sound=inode)
            if found is not None:
                if len(self._sound) >= MAX_SOUND:
                    self._sound.clear()
                self._sound[block.number] = path, found[0]
                with contextlib.suppress(OSError):  # replaced meanwhile, or not ours to touch
                    os.utime(path)
                return found[1]
        self._sound.pop(block.number, None)
        return None

    def put(self, block: FileExtent, data: bytes) -> None:
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
            self._writes = False
            warnings.warn(
                f"the cache folder {str(self._path)!r} cannot be written:"
                f" {error.strerror or error}; reading goes on without it",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            with contextlib.suppress(OSError):
                staged.replace(target)
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)

    def forget(self, block: FileExtent) -> None:
        """Remove a block whose bytes turned out wrong."""
        self._sound.pop(block.number, None)
        for path in self._slots(block):
            if _holds(path, self._key(block)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _key(self, block: FileExtent) -> bytes:
        file = block.file
        place = f"{self._store}\n{file.name}\n{file.content}\n{block.first}-{block.last}"
        if version := self._versions.get(file.name):
            place += f"\n{version}"
        return xxhash.xxh3_128_digest(place.encode("utf-8", "surrogatepass"))

    def _slots(self, block: FileExtent) -> Iterator[Path]:
        first = block.number % self._sets * self._ways
        for slot in range(first, first + self._ways):
            yield self._path / f"{slot // FOLDER_SLOTS:06x}" / f"{slot % FOLDER_SLOTS:03x}.block"

    def _victim(self, block: FileExtent, key: bytes) -> Path:
        """The slot to write to: its own if it is damaged, an empty one, the least recently used."""

        def last_use(path: Path) -> int:
            try:
                return -1 if _holds(path, key) else path.stat().st_mtime_ns
            except OSError:
                return 0

        return min(self._slots(block), key=last_use)

    def _prepare(self) -> None:
        """Remove what killed processes left, and slots of a time when the limit was higher."""
        before = time.time() - STALE_SECONDS
        try:
            (self._path / "tmp").mkdir(parents=True, exist_ok=True)
            for path in [*(self._path / "tmp").iterdir()]:
                with contextlib.suppress(FileNotFoundError):  # its writer is done with it
                    if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime < before:
                        path.unlink()
            for folder in self._path.iterdir():
                if _SLOT_FOLDER.fullmatch(folder.name):
                    beyond = self.capacity_blocks - int(folder.name, 16) * FOLDER_SLOTS
                    for path in [*folder.iterdir()] if beyond < FOLDER_SLOTS else ():
                        if _SLOT_FILE.fullmatch(path.name) and int(path.name[:3], 16) >= beyond:
                            path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"the cache folder {str(self._path)!r} cannot be used: {error.strerror or error}",
                hint="give a folder that can be written, or leave cache= out",
            ) from error


def _read_slot(
    path: Path, *, key: bytes, size: int, ranges: list[tuple[int, int]], sound: int | None
) -> tuple[int, list[bytes]] | None:
    """Inode, and ranges of the block; None unless it is the one that is wanted, and whole.

    Of the inode that is known to be sound, nothing but the ranges is read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            header = file.read(HEADER.size)
            if len(header) != HEADER.size:
                return None
            magic, found, length, digest = HEADER.unpack(header)
            inode = os.fstat(file.fileno()).st_ino
            if (magic, found, length) != (MAGIC, key, size) or sound not in (None, inode):
                return None
            if sound is None:
                data = file.read(size + 1)
                if len(data) != size or xxhash.xxh3_128_digest(data) != digest:
                    return None
                return inode, [data[first:last] for first, last in ranges]
            at = file.fileno(), HEADER.size
            parts = [os.pread(at[0], last - first, at[1] + first) for first, last in ranges]
    except OSError:
        return None
    sizes = [last - first for first, last in ranges]
    return (inode, parts) if [len(part) for part in parts] == sizes else None


def _holds(path: Path, key: bytes) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEADER.size)[8:24] == key
    except OSError:
        return False
