"""What a source of text is to the rest of tokenmill: files, the units they are cut into, and rows.

    discover(inputs, options) -> SourceFile...   names, sizes, versions (`discovery`)
    plan_units(file, options) -> Unit...         cut by the file and the options alone
    open_source(file, options) -> Source         reads the rows of a unit in bounded batches

A unit is worked on in one go and becomes one receipt. Which worker reads it, and when, never
changes what it holds. A *stream* (a compressed file, text with a separator that cannot be found
from the middle) has units too, but their number is known only at its end: unit k owns the rows
that start in [k * unit_bytes, (k + 1) * unit_bytes) of the decompressed bytes.

To add a format, write its `Source` and an entry of `FORMATS`. What reads a format, and Arrow with
it, is imported only when a file of it is opened: a build with nothing left to do never loads it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import lzma
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import xxhash

from tokenmill import files
from tokenmill.errors import MemoryBudgetError, SourceError
from tokenmill.words import format_size, slice_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tokenmill.records import RowBatch
    from tokenmill.where import Condition


MEGABYTE = 1 << 20
SMALLEST_UNIT_BYTES = 8 * MEGABYTE
# What is kept for a row (its place, its length, why it is rejected) may be more than its bytes.
LARGEST_BATCH_ROWS = 1 << 16
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}


@dataclass(frozen=True, slots=True)
class InputFormat:
    """A format as the rest of tokenmill knows it, without importing what reads it."""

    reader: str  # module within `sources`, and class of its Source
    title: str
    suffixes: tuple[str, ...] = ()  # those that messages name
    more_suffixes: tuple[str, ...] = ()  # others that mean it too
    has_fields: bool = True  # a row has fields, or is one text
    has_records: bool = False  # of which a plain file is read with no more memory than a batch
    rows_are_lines: bool = False
    counts: str = "bytes"  # what a unit's range counts
    in_bytes: bool = False  # these are bytes of text, of which a row takes one at least
    compresses_itself: bool = False  # and so is not read inside gz and the like


# Every format by the name that a store records; in the order in which messages name them.
FORMATS = {
    "jsonl": InputFormat(
        "lines:RecordSource",
        "JSON Lines",
        suffixes=(".jsonl",),
        more_suffixes=(".ndjson", ".json"),
        has_records=True,
        rows_are_lines=True,
        in_bytes=True,
    ),
    "parquet": InputFormat(
        "tables:ParquetSource",
        "Parquet",
        suffixes=(".parquet",),
        counts="row groups",
        compresses_itself=True,
    ),
    "arrow": InputFormat(
        "tables:ArrowSource",
        "Arrow",
        suffixes=(".arrow", ".feather"),
        counts="record batches",
        compresses_itself=True,
    ),
    "csv": InputFormat("csv:CsvSource", "CSV", suffixes=(".csv", ".tsv"), in_bytes=True),
    "text": InputFormat(
        "lines:RecordSource",
        "text",
        suffixes=(".txt", ".md"),
        more_suffixes=(
            *(".text", ".rst", ".py", ".c", ".h", ".cpp", ".java", ".js"),
            *(".ts", ".go", ".rs", ".html", ".xml", ".yaml", ".toml"),
        ),
        has_fields=False,
        has_records=True,
        in_bytes=True,
    ),
    "group": InputFormat("lines:GroupSource", "group", has_fields=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """How text is read. All of it is part of the configuration that a store records."""

    # Column or JSON key that holds the text; dots reach into nested objects (`data.text`).
    text_field: str = "text"
    # Of a row of several: its text is then a JSON object that holds them. None for one text.
    fields: tuple[str, ...] = ()
    needs_all_fields: bool = True  # a table must have all of them, or one at least
    where: Condition | None = None  # rows for which it is not true are left out
    separator: str | None = None  # between documents; None makes each text file one document
    unit_bytes: int | None = None  # of text; None chooses by the file's size
    least_unit_bytes: int = SMALLEST_UNIT_BYTES  # of that choice; less where the input is small
    in_order: bool = True  # groups are of any format; older stores have some of text, read apart
    by_name: bool = False  # a file's name may tell the split of its rows
    reads_strays: bool = False  # text beside data files is read too, as in older stores
    batch_bytes: int = 8 * MEGABYTE  # read in one go; bounds memory, never changes the result
    # What a reader may hold at once of what a file cannot be read without: a page of Parquet, a
    # batch of Arrow, the window of a decompressor. A file that needs more is an error.
    room_bytes: int = 1 << 30
    # A row whose text is larger is rejected. Follows from the memory budget.
    max_document_bytes: int = 64 * MEGABYTE


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One input file (or one group of small files) as it was found."""

    path: str  # as the user named it, normalised, with / between folders: the file's identity
    format: str  # a name in FORMATS
    compression: str | None  # gz, zst, bz2, xz or None
    size: int
    version: str  # changes with the file: modification time, or what a remote system gives (ETag)
    # Files of a group, in order; path, size and version of the group follow from them.
    members: tuple[SourceFile, ...] = ()
    # Where it is read from, if that holds more than its path does: a password, a signature. The
    # path is written into the store and shown; this never is.
    address: str | None = field(default=None, compare=False, repr=False)
    # The split of all its rows, where its name tells: another of them than those drawn by text.
    split: str | None = None
    # What the system says of the file, where its version follows from its content instead.
    as_found: str | None = field(default=None, compare=False, repr=False)
    # When anything about it was last changed, in ns; never written into a store.
    changed: int = field(default=0, compare=False, repr=False)

    @property
    def traits(self) -> InputFormat:
        """What is known of its format."""
        return FORMATS[self.format]

    @property
    def location(self) -> str:
        """What opens the file."""
        return self.address or self.path

    @property
    def title(self) -> str:
        """What messages call it."""
        return slice_of(self.paths, 0, None, "")

    @property
    def paths(self) -> tuple[str, ...]:
        """Its own, or those of the files of a group."""
        return tuple(each.path for each in self.members) or (self.path,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A slice of a source file: bytes of text, or row groups, or a whole file."""

    file: SourceFile
    index: int = 0  # among the units of its file; with the path it is the unit's identity
    start: int = 0  # first byte of text, or first row group or record batch
    end: int | None = None  # one past the last; None means to the end of the file
    text_bytes: int | None = field(default=None, compare=False)  # in it, where the plan knows

    @property
    def title(self) -> str:
        """What messages call it."""
        file = self.file
        return slice_of(file.paths, self.start, self.end, file.traits.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitEnd:
    """What is known about a unit after its last row."""

    digest: str  # xxh3-128 of what it covers, so that a touched but equal file is recognised
    num_lines: int  # passed, blank ones too, so that later units know their numbers; or rows
    is_last: bool  # nothing of the file is after this unit
    member_rows: tuple[int, ...] = ()  # of each file of a group; none where all have one row


@dataclass(frozen=True, slots=True)
class UnitCopy:
    """The records of one unit of a stream in a file of their own, for whoever works on it."""

    path: str
    offset: int  # of their first byte in the stream
    num_bytes: int
    is_last: bool  # nothing of the stream is after them


class Source(ABC):
    """An open source file. Units may be read in any order; ascending order is cheap for streams.

    A format says how a unit comes piece by piece (blocks of lines, columns), and what rows a piece
    has.
    """

    read_seconds = 0.0
    """Time spent on getting bytes so far; 0 where a library reads and decodes in one go."""
    new_digest: Callable[[], Any] = xxhash.xxh3_128
    before_large: Callable[[], None] | None = None
    """Called before a record is held that is far larger than a batch."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        self._file, self._options = file, options
        self._end: UnitEnd | None = None
        self._check_unchanged()

    @staticmethod
    def plan(file: SourceFile, options: SourceOptions) -> Iterator[Unit]:  # noqa: ARG004
        """The units of a file that is not cut by bytes."""
        yield Unit(file=file)

    @abstractmethod
    def _pieces(self, unit: Unit, digest: Any) -> Iterator[Any]:
        """What the unit holds, piece by piece; `digest` sees all of it."""

    @abstractmethod
    def _rows(self, piece: Any, first_row: int) -> RowBatch:
        """Rows of a piece."""

    def _count(self, piece: Any) -> int:
        """Rows of a piece, without their text."""
        return len(piece)

    def _is_last(self, unit: Unit) -> bool:
        return unit.end is None

    def _check_unchanged(self) -> None:
        if not self._file.members:
            check_unchanged(self._file)

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches of about `batch_bytes`; SourceError if it cannot be read."""
        self._end = None
        digest = self.new_digest()
        row = lines = 0
        for piece in self._pieces(unit, digest):
            batch = self._rows(piece, row)
            row, lines = row + batch.num_rows, lines + batch.num_rows + batch.blank_lines
            yield batch
        is_last = self._is_last(unit)
        self._check_unchanged()
        self._end = UnitEnd(digest=digest.hexdigest(), num_lines=lines, is_last=is_last)

    def end(self) -> UnitEnd:
        """Facts about the unit read last; valid after its iterator is exhausted."""
        assert self._end is not None, "end() before the unit's rows were all read"
        return self._end

    def exists(self, unit: Unit) -> bool:  # noqa: ARG002
        """For streams: whether the stream reaches the unit. Always true elsewhere."""
        return True

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit, without building text where the format allows it."""
        return sum(self._count(piece) for piece in self._pieces(unit, self.new_digest()))

    def digest(self, unit: Unit) -> str:
        """The unit's digest alone, as fast as the bytes can be read."""
        digest = self.new_digest()
        deque(self._pieces(unit, digest), maxlen=0)
        return str(digest.hexdigest())

    def close(self) -> None:  # noqa: B027
        """Close the file, where one is open between readings."""


def is_document(file: SourceFile, options: SourceOptions) -> bool:
    """Whether the whole file is one document."""
    return file.format == "text" and options.separator is None


def _reader(file: SourceFile, options: SourceOptions) -> type[Source]:
    reader = "lines:TextFileSource" if is_document(file, options) else file.traits.reader
    module, _, name = reader.partition(":")
    found: type[Source] = getattr(import_module(f"tokenmill.sources.{module}"), name)
    return found


def reader_modules(files: Iterable[SourceFile]) -> list[str]:
    """Names of the modules that read the files; each imports what it reads them with."""
    readers = {each.traits.reader for file in files for each in (file, *file.members)}
    return sorted({f"tokenmill.sources.{reader.partition(':')[0]}" for reader in readers})


def open_source(file: SourceFile, options: SourceOptions) -> Source:
    """The file, ready to be read."""
    return _reader(file, options)(file, options)


# -------------------------------------------------------------------------------------------------
# How a file is cut into units, and the check that it stayed the same while it was read.
#
# The cut is a function of the input's size and the options, never of the machine: large enough that
# a unit's fixed costs vanish, small enough that workers share one file and a crash loses little.
# Only a small input has smaller units, so only there a new file may change the cut of others, and
# seldom: when the size of all of them passes a power of two.

LARGEST_UNIT_BYTES = 256 * MEGABYTE
LEAST_UNIT_BYTES = MEGABYTE // 4
UNITS_PER_FILE = 32
UNITS_PER_INPUT = 16
FINER_BYTES = 64 * MEGABYTE  # an input of so much has twice as many, in stores that group in order
TEXT_PER_COMPRESSED_BYTE = 4


def least_unit_bytes(size: int, *, in_order: bool = True) -> int:
    """Bytes of text that a unit has at least, in an input of about `size` bytes of text."""
    units = UNITS_PER_INPUT * (2 if in_order and size >= FINER_BYTES else 1)
    share = 1 << max(size // units, 1).bit_length() - 1
    return min(max(share, LEAST_UNIT_BYTES), SMALLEST_UNIT_BYTES)


def unit_bytes_for(size: int, options: SourceOptions) -> int:
    """Bytes of text in a unit of a file that holds about `size` bytes of text."""
    least = max(-(-size // UNITS_PER_FILE), options.least_unit_bytes)
    return options.unit_bytes or min(least, LARGEST_UNIT_BYTES)


def text_size(file: SourceFile) -> int:
    """Bytes of text in the file, estimated from its size where it is compressed."""
    if file.members:
        return sum(map(text_size, file.members))
    return file.size * (1 if file.compression is None else TEXT_PER_COMPRESSED_BYTE)


def separator_of(file: SourceFile, options: SourceOptions) -> bytes:
    """What ends the records of a file that has them."""
    assert file.format == "jsonl" or options.separator, "text without one comes in groups"
    return b"\n" if file.format == "jsonl" else (options.separator or "").encode()


def is_unbordered(separator: bytes) -> bool:
    """Whether occurrences never overlap, so that they can be found from the middle of a file."""
    return not any(separator.startswith(separator[i:]) for i in range(1, len(separator)))


def is_stream(file: SourceFile, options: SourceOptions) -> bool:
    """Whether the number of units is known only at the end of the file."""
    return file.traits.has_records and (
        file.compression is not None or not is_unbordered(separator_of(file, options))
    )


def plan_units(file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
    """The units of the file; of a stream without end, for `Source.exists` to end it."""
    if file.members:
        # One file of each kind is looked into: enough to know that an option names no column, and
        # about how much text there is.
        shares: dict[str, float] = {}
        for member in file.members:
            if member.format not in shares:
                shares[member.format] = _text_per_byte(member, options)
        text_bytes = round(sum(text_size(each) * shares[each.format] for each in file.members))
        yield Unit(file=file, text_bytes=text_bytes)
        return
    if not file.traits.has_records:
        yield from _reader(file, options).plan(file, options)
        return
    step = unit_bytes_for(text_size(file), options)
    count = max(1, -(-file.size // step))
    endless = is_stream(file, options)
    for index in itertools.count() if endless else range(count):
        end = None if not endless and index == count - 1 else (index + 1) * step
        yield Unit(file=file, index=index, start=index * step, end=end)


def _text_per_byte(file: SourceFile, options: SourceOptions) -> float:
    """Text in a file for each byte that `text_size` gives it, as far as its plan knows."""
    units = () if file.traits.has_records else plan_units(file, options)
    known = sum(unit.text_bytes or 0 for unit in units)
    return known / text_size(file) if known else 1.0


def check_unchanged(file: SourceFile) -> None:
    """Raise if the file is not the one that was planned with."""
    found = files.stat(file.location, fresh=True)
    version = file.as_found or file.version
    if (found.size, found.version) != (file.size, version):
        raise SourceError(
            f"{file.path!r} changed while it was in use: {file.size:,} bytes (version "
            f"{version}) when the build was planned, now {found.size:,} ({found.version}); "
            "its rows would be a mixture of both",
            hint="wait until nothing writes to it, then run the same command again",
        )


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


# -------------------------------------------------------------------------------------------------
# Compressed files as one stream of bytes, all members, frames and streams of them.
#
# A file that ends too early or goes wrong in the middle is an OSError, never a silent end: Python's
# own `bz2` and `lzma` file objects take a damaged second stream for trailing garbage and drop it,
# so they are not used.

_ARROW_CODECS = {"zst": "zstd", "bz2": "bz2"}
_CHUNK_BYTES = 1 << 18
_FIRST_BYTES = 1 << 12
_LZMA2 = 0x21
_GZIP_OR_ZLIB = 32 + 15  # bits of the window, and that the header tells which
_XZ_BYTES = 1 << 20  # what a decoder of xz holds beside its dictionary
_ZSTD_HEAD_BYTES = 18


def open_decompressed(file: SourceFile, *, room: int | None = None) -> io.BufferedIOBase:
    """Open a file for reading its text bytes from the front, within `room` bytes of memory."""
    raw: Any = files.open_binary(file.location)
    if file.compression is not None and file.size == 0:
        raw.close()
        raise files.unreadable(
            file.path, OSError(f"an empty file is not a complete {file.compression} file")
        )
    if file.compression == "xz":
        raw = _XzReader(raw, path=file.path, room=room)
    elif file.compression == "gz":
        raw = _GzReader(raw)
    elif file.compression is not None:
        if file.compression == "zst" and room is not None:
            window = _zstd_window(raw.read(_ZSTD_HEAD_BYTES))
            raw.seek(0)
            check_room(window, f"a zstd window of {format_size(window)}", path=file.path, room=room)
        import pyarrow as pa

        codec = _ARROW_CODECS[file.compression]
        # Arrow takes 64 KB at a time, and would wait for the interpreter's lock for each.
        size = min(file.size, MEGABYTE)
        raw = pa.BufferedInputStream(pa.PythonFile(raw, mode="r"), size)
        raw = pa.CompressedInputStream(raw, codec)
    return cast("io.BufferedIOBase", raw)


class _GzReader(io.RawIOBase):
    """Concatenated gzip members, inflated by zlib-ng, or by Python's zlib where that is missing."""

    def __init__(self, raw: BinaryIO) -> None:
        self._zlib: Any
        try:
            from zlib_ng import zlib_ng

            self._zlib = zlib_ng
        except ImportError:
            import zlib

            self._zlib = zlib
        self._raw = raw
        self._decoder: Any = None
        self._input, self._next_bytes = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while len(view):
            if not self._input:
                self._input = memoryview(self._raw.read(_CHUNK_BYTES))
            is_end = not self._input
            if self._decoder is None:
                if is_end:
                    return 0
                self._decoder, self._next_bytes = (
                    self._zlib.decompressobj(_GZIP_OR_ZLIB),
                    _FIRST_BYTES,
                )
            data = self._inflate(len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if is_end and self._decoder is not None:
                raise OSError("Truncated compressed stream")
        return 0

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _inflate(self, size: int) -> bytes:
        # What a call leaves is copied, so a member that may be small gets little at first.
        given = self._input[: self._next_bytes]
        self._next_bytes = min(2 * self._next_bytes, _CHUNK_BYTES)
        decoder = self._decoder
        try:
            data: bytes = decoder.decompress(given, size)
        except self._zlib.error as error:
            reason = str(error).rpartition(": ")[2]  # after its number
            raise OSError(f"zlib inflate failed: {reason}") from error
        left = len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
        self._input = self._input[len(given) - left :]
        if decoder.eof:
            self._decoder = None
        return data


class _XzReader(io.RawIOBase):
    """Concatenated xz streams and the zero padding allowed between them."""

    def __init__(self, raw: BinaryIO, *, path: str, room: int | None) -> None:
        self._raw, self._path, self._room = raw, path, room
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
