"""Cuts bytes into blocks of whole records: lines of JSON, pieces of text between separators.

Sits under `jsonl` and `text`. A record belongs to the range in which its first byte lies, so every
record has exactly one owner wherever the cuts fall. A record longer than the limit is passed over
without being held, and reported with its true size.

The data of a block is a view of a buffer that the next block overwrites: use it or copy it first.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from tokenmill import files
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch
from tokenmill.sources.base import (
    LARGEST_BATCH_ROWS,
    Unit,
    UnitEnd,
    byte_units,
    check_unchanged,
    open_decompressed,
)
from tokenmill.sources.columns import too_large

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.sources.base import Source, SourceFile, SourceOptions


# Arrow's JSON parser counts the bytes of a block in 32 bits.
LARGEST_RECORD_BYTES = 1 << 30
_READ_PAST_END = 1 << 16


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole records with their separators; or, without data, one record that is too large."""

    offset: int
    """Place of the first byte in the file."""
    num_bytes: int
    buffer: bytearray = field(default_factory=bytearray)
    low: int = 0
    high: int = 0
    oversize: int = 0
    """Bytes of the record that was passed over, without its separator."""

    @property
    def data(self) -> memoryview:
        """The records: `buffer[low:high]`."""
        return memoryview(self.buffer)[self.low : self.high]


def is_unbordered(separator: bytes) -> bool:
    """Whether occurrences never overlap, so that they can be found from the middle of a file."""
    return not any(separator.startswith(separator[i:]) for i in range(1, len(separator)))


class LineReader:
    """Reads one file in blocks; forward always, backward by seeking or opening again."""

    def __init__(self, file: SourceFile, options: SourceOptions, *, separator: bytes) -> None:
        self._file = file
        self._separator = separator
        self._unbordered = is_unbordered(separator)
        self.is_stream = file.compression is not None or not self._unbordered
        self._target = max(1, options.batch_bytes)
        self._limit = record_limit(options) + len(separator)
        self._most_records = min(LARGEST_BATCH_ROWS, max(1 << 12, self._target // 128))
        self._buffer = bytearray(self._target)
        self._room = options.room_bytes
        self._raw: Any = None
        self.read_seconds = 0.0
        self._floor: float = 0  # no record begins between here and the current position
        self._rewind()

    def close(self) -> None:
        """Close the file."""
        if self._raw is not None:
            self._raw.close()

    def seek(self, start: int) -> None:
        """Go to the first record that begins at or after `start`."""
        if start < self._floor:
            self._rewind()
        if self._position >= start:
            return
        if self.is_stream:
            for _ in self.blocks(start):
                pass
        else:
            self._restart(max(0, start - len(self._separator)))
            self._pass_over()
        self._floor = start

    def has_more(self) -> bool:
        """Whether a byte lies behind the current position."""
        while self._low == self._high and not self._at_end:
            self._fill(1)
        return self._low < self._high

    def blocks(self, end: int | None, *, hasher: Any = None) -> Iterator[LineBlock]:
        """Records from here on that begin before `end`; `hasher` sees all their bytes."""
        want = self._first_read(end)
        while end is None or self._position < end:
            self._fill(want)
            cut = self._cut(end)
            if cut == self._low and self._at_end:
                cut = self._high
                if cut == self._low:
                    break
            if cut == self._low and want < self._limit:
                want = min(2 * want, self._limit)
                continue
            block = self._take(cut, hasher) if cut > self._low else self._take_oversize(hasher)
            self._floor = self._position
            yield block
            want = self._first_read(end)
        self._floor = math.inf if end is None else end

    @property
    def _position(self) -> int:
        return self._base + self._low

    def _rewind(self) -> None:
        """Start over from the first byte."""
        self._floor = 0
        if self._raw is not None and not self.is_stream:
            self._restart(0)
            return
        self.close()
        self._raw = open_decompressed(self._file, room=self._room)
        self._base = self._low = self._high = 0
        self._at_end = False

    def _restart(self, position: int) -> None:
        self._raw.seek(position)
        self._base, self._low, self._high, self._at_end = position, 0, 0, False

    def _first_read(self, end: int | None) -> int:
        """Bytes to read for the next block: little more than what is left of the range."""
        if end is None:
            return self._target
        return min(self._target, max(end - self._position, 0) + _READ_PAST_END)

    def _fill(self, want: int) -> None:
        """Read until `want` bytes are there or the file ends."""
        if self._high - self._low >= want or self._at_end:
            return
        self._make_room(want)
        while self._high < want and not self._at_end:
            self._high += self._read(memoryview(self._buffer)[self._high : want])

    def _make_room(self, want: int) -> None:
        kept = self._buffer[self._low : self._high]
        if len(self._buffer) != max(want, self._target):
            self._buffer = bytearray(max(want, self._target))
        self._buffer[: len(kept)] = kept
        self._base += self._low
        self._low, self._high = 0, len(kept)

    def _read(self, room: memoryview) -> int:
        start = time.perf_counter()
        try:
            count = int(self._raw.readinto(room) or 0)
        except (OSError, EOFError) as error:
            raise files.unreadable(self._file.path, error) from error
        self.read_seconds += time.perf_counter() - start
        if count == 0:
            self._at_end = True
        return count

    def _cut(self, end: int | None) -> int:
        """One past the last whole record in the buffer that begins before `end`."""
        if not self._unbordered:
            return self._cut_from_front(end)
        size = len(self._separator)
        if end is not None and self._base + self._high > end:
            # The first separator that ends at or behind `end` closes the last record of the range.
            first = max(self._low, end - self._base - size)
            if (found := self._buffer.find(self._separator, first, self._high)) >= 0:
                return self._few(found + size)
        found = self._buffer.rfind(self._separator, self._low, self._high)
        return self._few(found + size) if found >= 0 else self._low

    def _few(self, cut: int) -> int:
        """A cut in front of this one, if so many records are not taken at once."""
        while (count := self._buffer.count(self._separator, self._low, cut)) > self._most_records:
            bound = self._low + max(1, (cut - self._low) * self._most_records // count)
            found = self._buffer.rfind(self._separator, self._low, bound)
            if found < 0:
                found = self._buffer.find(self._separator, self._low, cut)
            cut = found + len(self._separator)
        return cut

    def _cut_from_front(self, end: int | None) -> int:
        cut = self._low
        for _ in range(self._most_records):
            if end is not None and self._base + cut >= end:
                break
            found = self._buffer.find(self._separator, cut, self._high)
            if found < 0:
                break
            cut = found + len(self._separator)
        return cut

    def _take(self, cut: int, hasher: Any) -> LineBlock:
        size = cut - self._low
        block = LineBlock(self._position, size, buffer=self._buffer, low=self._low, high=cut)
        if hasher is not None:
            hasher.update(block.data)
        self._low = cut
        return block

    def _take_oversize(self, hasher: Any) -> LineBlock:
        offset = self._position
        ended = self._pass_over(hasher)
        passed = self._position - offset
        size = passed - len(self._separator) if ended else passed
        return LineBlock(offset, passed, oversize=size)

    def _pass_over(self, hasher: Any = None) -> bool:
        """Drop bytes through the next separator; False if the file ends without one."""
        size = len(self._separator)
        while True:
            self._fill(max(self._target, 2 * size))
            found = self._buffer.find(self._separator, self._low, self._high)
            # A separator may begin in the last bytes of the buffer and end in the next ones.
            keep = 0 if self._at_end else size - 1
            cut = found + size if found >= 0 else max(self._low, self._high - keep)
            if hasher is not None:
                hasher.update(memoryview(self._buffer)[self._low : cut])
            self._low = cut
            if found >= 0 or self._at_end:
                return found >= 0


def record_limit(options: SourceOptions) -> int:
    """Bytes of the largest record that is read."""
    return min(options.max_document_bytes, LARGEST_RECORD_BYTES)


# -------------------------------------------------------------------------------------------------
# Reading units of a file that is a sequence of records: what JSON Lines and separated text share.
#
# Joins the block reader (which bytes belong to a unit) with a parser (what rows those bytes hold),
# keeps the row numbers, the digest and the counts.


class RecordParser(Protocol):
    """Turns a block of whole records into rows."""

    separator: bytes

    def rows(self, block: LineBlock, *, first_row: int) -> tuple[RowBatch, int]:
        """Rows of the block, and how many records (lines) it has, blank ones too."""

    def count(self, block: LineBlock) -> int:
        """Rows of the block, without their text."""


class RecordSource:
    """An open file of records."""

    def __init__(self, file: SourceFile, options: SourceOptions, *, parser: RecordParser) -> None:
        self._file = file
        self._parser = parser
        self._limit = record_limit(options)
        check_unchanged(file)
        self._blocks = LineReader(file, options, separator=parser.separator)
        self._end: UnitEnd | None = None

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches."""
        self._end = None
        hasher = xxhash.xxh3_128()
        row = lines = 0
        self._blocks.seek(unit.start)
        for block in self._blocks.blocks(unit.end, hasher=hasher):
            batch, records = self._rows(block, first_row=row)
            row += batch.num_rows
            lines += records
            yield batch
        is_last = unit.end is None or (self._blocks.is_stream and not self._blocks.has_more())
        check_unchanged(self._file)
        self._end = UnitEnd(digest=hasher.hexdigest(), num_lines=lines, is_last=is_last)

    def end(self) -> UnitEnd:
        """Facts about the unit read last."""
        assert self._end is not None, "end() before the unit's rows were all read"
        return self._end

    @property
    def read_seconds(self) -> float:
        """Time spent on getting bytes, decompressed where they were compressed."""
        return self._blocks.read_seconds

    def exists(self, unit: Unit) -> bool:
        """Whether the file reaches the unit."""
        if unit.index == 0 or not self._blocks.is_stream:
            return True
        self._blocks.seek(unit.start)
        return self._blocks.has_more()

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit."""
        self._blocks.seek(unit.start)
        return sum(
            1 if block.oversize else self._parser.count(block)
            for block in self._blocks.blocks(unit.end)
        )

    def digest(self, unit: Unit) -> str:
        """The unit's digest alone."""
        hasher = xxhash.xxh3_128()
        self._blocks.seek(unit.start)
        for _ in self._blocks.blocks(unit.end, hasher=hasher):
            pass
        return hasher.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()

    def _rows(self, block: LineBlock, *, first_row: int) -> tuple[RowBatch, int]:
        if not block.oversize:
            return self._parser.rows(block, first_row=first_row)
        detail = too_large(block.oversize, self._limit)
        reject = Reject(
            first_row, RejectReason.TOO_LARGE, detail, block.offset, size=block.oversize
        )
        rows = np.empty(0, np.int64)
        texts = TextBatch.from_texts([])
        batch = RowBatch(
            texts,
            rows,
            (reject,),
            num_rows=1,
            num_bytes=block.num_bytes,
            largest_row_bytes=0,
        )
        return batch, 1


# -------------------------------------------------------------------------------------------------
# The formats whose units are ranges of bytes or groups of files: how they are cut, and opened.
#
# Cutting needs nothing but sizes, so the parsers (and Arrow with them) are imported when a file is
# opened: a build with nothing left to do never loads them.


class JsonlFormat:
    """JSON Lines, plain or compressed."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:  # noqa: ARG002
        return _is_record_stream(file, b"\n")

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        return byte_units(file, options, stream=self.is_stream(file, options))

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        from tokenmill.sources.jsonl import JsonlParser

        return RecordSource(file, options, parser=JsonlParser(options))


class TextFormat:
    """Text files that a separator splits into documents."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:
        assert options.separator, "text without a separator comes in text-group files"
        return _is_record_stream(file, options.separator.encode())

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        return byte_units(file, options, stream=self.is_stream(file, options))

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        from tokenmill.sources.text import TextParser

        return RecordSource(file, options, parser=TextParser(options))


class TextGroupFormat:
    """Files that are one document each, in groups."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:  # noqa: ARG002
        return False

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:  # noqa: ARG002
        yield Unit(file=file, index=0, start=0, end=None)

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        from tokenmill.sources.text import TextGroupSource

        return TextGroupSource(file, options)


def _is_record_stream(file: SourceFile, separator: bytes) -> bool:
    """Whether the records can only be found from the front of the file."""
    return file.compression is not None or not is_unbordered(separator)
