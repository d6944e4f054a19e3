"""Blocks of remote files, kept in a local folder that never outgrows its limit.

The folder is a fixed number of slots, each a file of one block at most. A block may lie in the few
slots of one set, found from its running number in the store; it takes an empty one, or replaces the
one that was not used for longest. So nothing has to be counted, locked or scanned: any number of
processes may use the folder at once, and one that is killed leaves a temporary file at worst.
Running numbers fill the sets evenly: a store that fits the limit is kept whole.

    slot  =  magic, key (16 bytes), bytes of the block, xxh3-128 of the block  |  block

The key is a hash of the store's address, the file's name and checksum in the manifest, the block's
place, and the version that the server gives the file, if it does. A slot that is damaged, or that
holds another block, is one that is not there.
Another limit means other sets: what was kept under the old one is then brought again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO
    from pathlib import Path

    from tokenmill.store.blocks import Block

HEADER = struct.Struct("<8s16sQ16s")
MAGIC = b"tmblock1"
WAYS = 8
"""Slots to a set: more would follow the use of blocks more closely, and cost more looks."""
FOLDER_SLOTS = 4096
STALE_SECONDS = 3600
MAX_SOUND = 1 << 16
"""Blocks that a process remembers to have checked: some 10 MB."""
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

    def get(self, block: Block) -> bytes | None:
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

    def get_parts(self, block: Block) -> list[bytes] | None:
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

    def put(self, block: Block, data: bytes) -> None:
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

    def forget(self, block: Block) -> None:
        """Remove a block whose bytes turned out wrong."""
        self._sound.pop(block.number, None)
        for path in self._slots(block):
            if _holds(path, self._key(block)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _key(self, block: Block) -> bytes:
        file = block.file
        place = f"{self._store}\n{file.name}\n{file.content}\n{block.first}-{block.last}"
        if version := self._versions.get(file.name):
            place += f"\n{version}"
        return xxhash.xxh3_128_digest(place.encode("utf-8", "surrogatepass"))

    def _slots(self, block: Block) -> Iterator[Path]:
        first = block.number % self._sets * self._ways
        for slot in range(first, first + self._ways):
            yield self._path / f"{slot // FOLDER_SLOTS:06x}" / f"{slot % FOLDER_SLOTS:03x}.block"

    def _victim(self, block: Block, key: bytes) -> Path:
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
    file: int
    """Its number in the filesystem: another one means that the slot was replaced."""
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


def _read_parts(path: Path, *, file: int, key: bytes, block: Block) -> list[bytes] | None:
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
