"""What a source of text is to the rest of tokenmill: files, the units they are cut into, and rows.

    discover(inputs) -> SourceFile...   names, sizes, versions; nothing is read
    plan_units(file) -> Unit...         cut by the file and the options alone
    open_source(file) -> Source         reads the rows of a unit in bounded batches

A unit is worked on in one go and becomes one receipt. Which worker reads it, and when, never
changes what it holds. A *stream* (a compressed file, text with a separator that cannot be found
from the middle) has units too, but their number is known only at its end: unit k owns the rows
that start in [k * unit_bytes, (k + 1) * unit_bytes) of the decompressed bytes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import lzma
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from tokenmill import files
from tokenmill import files as files_module
from tokenmill.errors import MemoryBudgetError, SourceError
from tokenmill.sources import FORMATS
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from tokenmill.records import RowBatch
    from tokenmill.sources import InputFormat


MEGABYTE = 1 << 20
LARGEST_BATCH_ROWS = 1 << 16
"""What is kept for a row (its place, its length, why it is rejected) may be more than its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """How text is read. All of it is part of the configuration that a store records."""

    text_field: str = "text"
    """Column or JSON key that holds the text; dots reach into nested objects (`data.text`)."""
    fields: tuple[str, ...] = ()
    """Fields of a row that has several: its text is then a JSON object that holds them. Empty
    where a row is one text."""
    needs_all_fields: bool = True
    """Whether a table must have all of them, or one at least."""
    separator: str | None = None
    """Splits a text file into documents; None makes each text file one document."""
    unit_bytes: int | None = None
    """Bytes of text in a unit; None chooses by the file's size (see `unit_bytes_for`)."""
    batch_bytes: int = 8 * MEGABYTE
    """Input read in one go. Bounds memory; never changes the result."""
    room_bytes: int = 1 << 30
    """What a reader may hold at once of what a file cannot be read without: a page of Parquet, a
    batch of Arrow, the window of a decompressor. A file that needs more is an error."""
    max_document_bytes: int = 64 * MEGABYTE
    """A row whose text is larger is rejected. Follows from the memory budget."""


def check_room(needs: int, what: str, *, path: str, room: int) -> None:
    """Refuse what a reader would have to hold at once and has no room for."""
    if needs > room:
        error = MemoryBudgetError(
            f"{path!r} has {what}, and reading it takes {format_size(needs)} of memory at once; a "
            f"worker of this build has room for {format_size(room)}",
            hint="allow more with --memory, or write the file again in smaller parts",
        )
        error.short_bytes = needs - room
        raise error


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One input file (or one group of small text files) as it was found."""

    path: str
    """As the user named it, normalised, with / between folders: the file's identity."""
    format: str
    """A name in `sources.FORMATS`."""
    compression: str | None
    """gz, zst, bz2, xz or None."""
    size: int
    version: str
    """Changes when the file changes: modification time, or what a remote system gives (ETag)."""
    members: tuple[SourceFile, ...] = ()
    """Files of a text-group, in order; path, size and version of the group follow from them."""
    address: str | None = field(default=None, compare=False, repr=False)
    """Where it is read from, if that holds more than its path does: a password, a signature. The
    path is written into the store and shown; this never is."""

    changed: int = field(default=0, compare=False, repr=False)
    """When anything about it was last changed, in ns; never written into a store."""

    @property
    def traits(self) -> InputFormat:
        """What is known of its format."""
        return FORMATS[self.format]

    @property
    def location(self) -> str:
        """What opens the file."""
        return self.address or self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A slice of a source file: bytes of text, or row groups, or a whole file."""

    file: SourceFile
    index: int
    """Position among the units of its file; with the path it is the unit's identity."""
    start: int
    """First byte (JSON Lines, text) or first row group / record batch (Parquet, Arrow)."""
    end: int | None
    """One past the last; None means to the end of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitEnd:
    """What is known about a unit after its last row."""

    digest: str
    """xxh3-128 of what the unit covers, so that a touched but equal file is recognised."""
    num_lines: int
    """Lines passed, blank ones too, so that later units know their line numbers; or rows."""
    is_last: bool
    """Nothing of the file lies behind this unit."""


class Source(Protocol):
    """An open source file. Units may be read in any order; ascending order is cheap for streams."""

    @property
    def read_seconds(self) -> float:
        """Time spent on getting bytes so far; 0 where a library reads and decodes in one go."""

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches of about `batch_bytes`; SourceError if it cannot be read."""

    def end(self) -> UnitEnd:
        """Facts about the unit read last; valid after its iterator is exhausted."""

    def exists(self, unit: Unit) -> bool:
        """For streams: whether the stream reaches the unit. Always true elsewhere."""

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit, without building text where the format allows it."""

    def digest(self, unit: Unit) -> str:
        """The unit's digest alone, as fast as the bytes can be read."""

    def close(self) -> None: ...


class SourceFormat(Protocol):
    """One file format: how it is cut and opened. Registered in `sources.FORMATS`."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:
        """Whether the number of units is known only at the end of the file."""

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        """The units of the file; of a stream without end, for `Source.exists` to end it."""

    def open(self, file: SourceFile, options: SourceOptions) -> Source: ...


# -------------------------------------------------------------------------------------------------
# How a file is cut into units, and the check that it stayed the same while it was read.
#
# The cut is a function of the file's size and the options, never of the machine: large enough that
# a unit's fixed costs vanish, small enough that workers share one file and a crash loses little.

SMALLEST_UNIT_BYTES = 8 * MEGABYTE
LARGEST_UNIT_BYTES = 256 * MEGABYTE
UNITS_PER_FILE = 32
TEXT_PER_COMPRESSED_BYTE = 4


def unit_bytes_for(size: int) -> int:
    """Bytes of text in a unit of a file that holds about `size` bytes of text."""
    return min(max(-(-size // UNITS_PER_FILE), SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)


def text_size(file: SourceFile) -> int:
    """Bytes of text in the file, estimated from its size where it is compressed."""
    return file.size if file.compression is None else file.size * TEXT_PER_COMPRESSED_BYTE


def unit_bytes_of(file: SourceFile, options: SourceOptions) -> int:
    """Bytes of text in a unit of this file."""
    return options.unit_bytes or unit_bytes_for(text_size(file))


def byte_units(file: SourceFile, options: SourceOptions, *, stream: bool) -> Iterator[Unit]:
    """Units by byte range; without end for a stream, whose length is not known."""
    step = unit_bytes_of(file, options)
    count = max(1, -(-file.size // step))
    for index in itertools.count() if stream else range(count):
        last = not stream and index == count - 1
        end = None if last else (index + 1) * step
        yield Unit(file=file, index=index, start=index * step, end=end)


def check_unchanged(file: SourceFile) -> None:
    """Raise if the file is not the one that was planned with."""
    found = files.stat(file.location, fresh=True)
    if (found.size, found.version) != (file.size, file.version):
        raise SourceError(
            f"{file.path!r} changed while it was in use: {file.size:,} bytes (version "
            f"{file.version}) when the build was planned, now {found.size:,} ({found.version}); "
            "its rows would be a mixture of both",
            hint="wait until nothing writes to it, then run the same command again",
        )


# -------------------------------------------------------------------------------------------------
# Compressed files as one stream of bytes, all members, frames and streams of them.
#
# Sits between `paths` and the block reader. A file that ends too early or goes wrong in the middle
# is an OSError, never a silent end: Python's own `bz2` and `lzma` file objects take a damaged
# second stream for trailing garbage and drop it, so they are not used.
#
# Discovery looks into files through this module, so it imports Arrow only when it needs it.

_ARROW_CODECS = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}
_CHUNK_BYTES = 1 << 18
_LZMA2 = 0x21
_XZ_BYTES = 1 << 20
"""What a decoder of xz holds beside its dictionary."""
_ZSTD_HEAD_BYTES = 18


class ByteReader(Protocol):
    """What the readers need of a file: the next bytes, into a buffer of theirs."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...

    def read(self, size: int = -1, /) -> bytes: ...

    def close(self) -> None: ...


def open_decompressed(file: SourceFile, *, room: int | None = None) -> ByteReader:
    """Open a file for reading its text bytes from the front, within `room` bytes of memory."""
    raw = files_module.open_binary(file.location)
    if file.compression is None:
        return cast("ByteReader", raw)
    if file.size == 0:
        raw.close()
        raise files_module.unreadable(
            file.path, OSError(f"an empty file is not a complete {file.compression} file")
        )
    if file.compression == "xz":
        return cast("ByteReader", _XzReader(raw, path=file.path, room=room))
    if file.compression == "zst" and room is not None:
        window = _zstd_window(raw.read(_ZSTD_HEAD_BYTES))
        raw.seek(0)
        check_room(window, f"a zstd window of {format_size(window)}", path=file.path, room=room)
    import pyarrow as pa

    codec = _ARROW_CODECS[file.compression]
    return cast("ByteReader", pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec))


class _XzReader(io.RawIOBase):
    """Concatenated xz streams and the zero padding allowed between them."""

    def __init__(self, raw: BinaryIO, *, path: str, room: int | None) -> None:
        self._raw = raw
        self._path = path
        self._room = room
        self._decoder: lzma.LZMADecompressor | None = None
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while len(view):
            if self._decoder is None and not self._next_stream():
                return 0
            if data := self._decode(len(view)):
                view[: len(data)] = data
                return len(data)
        return 0

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _next_stream(self) -> bool:
        """Begin the next stream; False at the end of the file."""
        self._input = self._input.lstrip(b"\0")
        while not self._input:
            self._input = self._raw.read(_CHUNK_BYTES)
            if not self._input:
                return False
            self._input = self._input.lstrip(b"\0")
        if self._room is not None:
            needs = 0
            with contextlib.suppress(IndexError, ValueError):  # damage, which the decoder names
                needs = _xz_dictionary(self._input)
            what = f"an xz dictionary of {format_size(needs)}"
            check_room(needs + _XZ_BYTES, what, path=self._path, room=self._room)
        # A later block may have a larger one.
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=self._room)
        return True

    def _decode(self, size: int) -> bytes:
        assert self._decoder is not None
        if self._decoder.needs_input and not self._input:
            self._input = self._raw.read(_CHUNK_BYTES)
            if not self._input:
                raise OSError("Truncated compressed stream")
        try:
            data = self._decoder.decompress(self._input, size)
        except lzma.LZMAError as error:
            if self._room is not None and "limit exceeded" in str(error):
                what = "an xz dictionary that is larger than the first"
                check_room(2 * self._room, what, path=self._path, room=self._room)
            raise OSError(f"xz decompress failed: {error}") from error
        self._input = b""
        if self._decoder.eof:
            self._input, self._decoder = self._decoder.unused_data, None
        return data


def _xz_dictionary(head: bytes) -> int:
    """Size of the dictionary of the first block of an xz stream; 0 where there is none."""
    flags = head[13:14]
    if len(head) < 32 or not flags:
        return 0
    at = 14
    for bit in (0x40, 0x80):  # the sizes of the block, where it has them
        if flags[0] & bit:
            while head[at] & 0x80:
                at += 1
            at += 1
    for _ in range((flags[0] & 3) + 1):
        kind, size = head[at : at + 2]
        if kind == _LZMA2 and size == 1:
            bits = head[at + 2] & 63
            return (2 | bits & 1) << (bits // 2 + 11) if bits < 40 else (1 << 32) - 1
        at += 2 + size
    return 0


def _zstd_window(head: bytes) -> int:
    """Bytes that the first frame of a zstd file refers back to; 0 where there is none."""
    if len(head) < _ZSTD_HEAD_BYTES or head[:4] != b"\x28\xb5\x2f\xfd":
        return 0
    flags = head[4]
    if not flags & 0x20:
        base = 1 << (10 + (head[5] >> 3))
        return base + base // 8 * (head[5] & 7)
    size = 1 << (flags >> 6)
    at = 5 + (0, 1, 2, 4)[flags & 3]
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)


def open_native(path: str) -> Any:
    """Open an uncompressed file for Arrow's own readers."""
    import pyarrow as pa

    found = files_module.open_binary(path)
    if files_module.is_remote(path):
        return pa.PythonFile(found, mode="r")
    found.close()  # it is a file: Arrow would wait for a pipe
    try:
        return pa.OSFile(path)
    except OSError as error:
        raise files_module.unreadable(path, error) from error
