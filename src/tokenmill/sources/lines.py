"""Files that are sequences of records: JSON Lines, and text, in documents or in whole files; and
groups of small files of any format, which are read one after the other.

A block is some whole records; a record belongs to the range in which its first byte is, so every
record has exactly one owner wherever the cuts fall. A record longer than the limit is passed over
without being held, and reported with its true size. The data of a block is a view of a buffer that
the next block overwrites: use it or copy it first.

JSON Lines are read by a part in C, where there is one (`FieldReader`). Lines that it leaves, for
any doubt about them, go through Arrow's parser, and so do all lines where it is not there. Arrow
reads a block as JSON values with white space between them, which JSON Lines does not mean: two
objects on one line, or one object on two, would pass. They cannot if every line begins with "{" and
ends with "}" (nowhere in valid JSON does "{" follow "}", so no value crosses a line) and there are
as many values as lines. Lines of another shape never reach Arrow, which also crashes on a block
that begins with null.

A block that does not parse is halved until few lines are left, which Python decides one by one. It
takes what Arrow takes, except for lines that are nested deeply, and Arrow is asked about those. So
a line gets the same answer whatever block it is in, and bad lines cost little more than good ones.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import xxhash

from tokenmill import files
from tokenmill.compiled import find_compiled
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch, field_of, kind_of
from tokenmill.sources import base
from tokenmill.sources.base import (
    MEGABYTE,
    Source,
    SourceFile,
    SourceOptions,
    Unit,
    UnitCopy,
)
from tokenmill.sources.columns import (
    chosen,
    flat_array,
    is_utf8,
    pc,
    rows_of,
    text_batch,
    too_large,
    utf8_error,
    verdicts,
)
from tokenmill.where import FLAG, KEPT, NUMBER, TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.where import Condition

BOM = b"\xef\xbb\xbf"
# Arrow's JSON parser counts the bytes of a block in 32 bits.
LARGEST_RECORD_BYTES = 1 << 30
_READ_PAST_END = 1 << 16


def record_limit(options: SourceOptions) -> int:
    """Bytes of the largest record that is read."""
    return min(options.max_document_bytes, LARGEST_RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole records with their separators; or, without data, one record that is too large."""

    offset: int  # of the first byte in the file
    num_bytes: int
    buffer: bytearray = field(default_factory=bytearray)
    low: int = 0
    high: int = 0
    oversize: int = 0  # bytes of the record that was passed over, without its separator

    @property
    def data(self) -> memoryview:
        """The records: `buffer[low:high]`."""
        return memoryview(self.buffer)[self.low : self.high]


class RecordSource(Source):
    """An open file of records: forward always, backward by seeking or opening again."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        super().__init__(file, options)
        self._parser = (JsonlParser if file.format == "jsonl" else TextParser)(options)
        self._separator = base.separator_of(file, options)
        self._unbordered = base.is_unbordered(self._separator)
        self._is_stream = base.is_stream(file, options)
        # A small file needs no more, and a group is many of them.
        most = options.batch_bytes if self._is_stream else min(options.batch_bytes, file.size + 1)
        self._target = max(1, most)
        self._limit = record_limit(options) + len(self._separator)
        self._most_records = min(base.LARGEST_BATCH_ROWS, max(1 << 12, self._target // 128))
        self._buffer = bytearray(self._target)
        self._spare: bytearray | None = None  # takes turns with the buffer, where there is one
        self._raw: Any = None
        # What is in the buffer, and where its first byte is in the file.
        self._base, self._low, self._high, self._at_end = 0, 0, 0, False
        self._floor: float = 0  # no record begins between here and the current position
        self._rewind()

    def exists(self, unit: Unit) -> bool:
        if unit.index == 0 or not self._is_stream:
            return True
        self._seek(unit.start)
        return self._has_more()

    def copy(self, unit: Unit, path: str) -> UnitCopy | None:
        """Write the records of a stream's unit into a file; None where they do not fit.

        That is on the disk, or because one of them is far too large. A thread writes what was read
        while the next is read into another buffer.
        """
        assert unit.end is not None, "only a file that is no stream has a unit without an end"
        self._seek(unit.start)
        self._spare = self._spare or bytearray(self._target)
        offset, room = self._position, unit.end - unit.start + self._limit
        writes: list[Future[int]] = []
        with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:

            def write(data: memoryview) -> None:
                nonlocal room
                room -= len(data)
                wait(writes[-1:])
                if room >= 0:
                    writes.append(pool.submit(file.write, data))

            if self._unbordered:
                self._take_until(unit.end, write)
                self._floor = unit.end
            else:
                for block in self._blocks(unit.end, xxhash.xxh3_64()):
                    write(block.data)
                    wait(writes[-1:])  # a block may take more than one reading
        size = self._position - offset
        written = sum(each.result() for each in writes if each.exception() is None)
        is_last = not self._has_more()
        return UnitCopy(path, offset, size, is_last) if written == size else None

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()

    def _is_last(self, unit: Unit) -> bool:
        return unit.end is None or (self._is_stream and not self._has_more())

    def _rows(self, piece: LineBlock, first_row: int) -> RowBatch:
        if not piece.oversize:
            return self._parser.rows(piece, first_row=first_row)
        size, limit = piece.oversize, record_limit(self._options)
        what = RejectReason.TOO_LARGE, too_large(size, limit), piece.offset, size
        held = TextBatch.from_texts([]), np.empty(0, np.int64), (Reject(first_row, *what),)
        return RowBatch(*held, num_rows=1, num_bytes=piece.num_bytes, largest_row_bytes=0)

    def _count(self, piece: LineBlock) -> int:
        return 1 if piece.oversize else self._parser.count(piece)

    def _pieces(self, unit: Unit, digest: Any) -> Iterator[LineBlock]:
        self._seek(unit.start)
        return self._blocks(unit.end, digest)

    def _seek(self, start: int) -> None:
        """Go to the first record that begins at or after `start`."""
        if start < self._floor:
            self._rewind()
        if self._position >= start:
            return
        if not self._unbordered:
            deque(self._blocks(start, xxhash.xxh3_64()), maxlen=0)
        elif self._is_stream:
            self._take_until(start, _drop)
        else:
            self._rewind(max(0, start - len(self._separator)))
            self._pass_over(_drop, _READ_PAST_END)
        self._floor = start

    def _take_until(self, end: int, take: Callable[[memoryview], object]) -> None:
        """Go to the first record that begins at or after `end`; `take` sees all bytes up to it.

        The records before it are not looked at, which takes a separator that is unbordered.
        """
        before = end - len(self._separator)
        while self._position < before:
            self._fill(min(self._target, before - self._position))
            cut = min(self._high, before - self._base)
            if cut == self._low:  # the file ends
                return
            take(memoryview(self._buffer)[self._low : cut])
            self._low = cut
        if self._position < end:
            self._pass_over(take, _READ_PAST_END)

    def _has_more(self) -> bool:
        """Whether a byte is after the current position."""
        while self._low == self._high and not self._at_end:
            self._fill(1)
        return self._low < self._high

    def _blocks(self, end: int | None, digest: Any) -> Iterator[LineBlock]:
        """Records from here on that begin before `end`; `digest` sees all their bytes."""
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
                if want > 2 * self._target and self.before_large is not None:
                    self.before_large()
                continue
            offset = self._position
            if cut > self._low:
                size = cut - self._low
                block = LineBlock(offset, size, buffer=self._buffer, low=self._low, high=cut)
                digest.update(block.data)
                self._low = cut
            else:
                is_ended = self._pass_over(digest.update)
                passed = self._position - offset
                size = passed - len(self._separator) if is_ended else passed
                block = LineBlock(offset, passed, oversize=size)
            self._floor = self._position
            yield block
            want = self._first_read(end)
        self._floor = math.inf if end is None else end

    @property
    def _position(self) -> int:
        return self._base + self._low

    def _rewind(self, position: int = 0) -> None:
        """Go to a byte of the file; in a stream, to the first one."""
        if self._raw is not None and not self._is_stream:
            self._raw.seek(position)
        else:
            self.close()
            self._raw = base.open_decompressed(self._file, room=self._options.room_bytes)
        self._base, self._low, self._high, self._at_end = position, 0, 0, False
        self._floor = position

    def _first_read(self, end: int | None) -> int:
        """Bytes to read for the next block: little more than what is left of the range."""
        if end is None:
            return self._target
        return min(self._target, max(end - self._position, 0) + _READ_PAST_END)

    def _fill(self, want: int) -> None:
        """Read until `want` bytes are there or the file ends."""
        if self._high - self._low >= want or self._at_end:
            return
        kept = self._buffer[self._low : self._high]
        if self._spare is not None:
            self._buffer, self._spare = self._spare, self._buffer
        if len(self._buffer) != max(want, self._target):
            self._buffer = bytearray(max(want, self._target))
        self._buffer[: len(kept)] = kept
        self._base += self._low
        self._low, self._high = 0, len(kept)
        while self._high < want and not self._at_end:
            start = time.perf_counter()
            try:
                count = self._raw.readinto(memoryview(self._buffer)[self._high : want]) or 0
            except (OSError, EOFError) as error:
                raise files.unreadable(self._file.path, error) from error
            self.read_seconds += time.perf_counter() - start
            self._high += count
            self._at_end = count == 0

    def _cut(self, end: int | None) -> int:
        """One past the last whole record in the buffer that begins before `end`."""
        size = len(self._separator)
        if not self._unbordered:
            cut = self._low
            for _ in range(self._most_records):
                found = self._buffer.find(self._separator, cut, self._high)
                if found < 0 or (end is not None and self._base + cut >= end):
                    break
                cut = found + size
            return cut
        if end is not None and self._base + self._high > end:
            # The first separator that ends at or after `end` closes the last record of the range.
            first = max(self._low, end - self._base - size)
            if (found := self._buffer.find(self._separator, first, self._high)) >= 0:
                return self._few(found + size)
        found = self._buffer.rfind(self._separator, self._low, self._high)
        return self._few(found + size) if found >= 0 else self._low

    def _few(self, cut: int) -> int:
        """This cut, or one before it where so many records are not taken at once."""
        while (count := self._count_separators(cut)) > self._most_records:
            bound = self._low + max(1, (cut - self._low) * self._most_records // count)
            found = self._buffer.rfind(self._separator, self._low, bound)
            if found < 0:
                found = self._buffer.find(self._separator, self._low, cut)
            cut = found + len(self._separator)
        return cut

    def _count_separators(self, end: int) -> int:
        if len(self._separator) > 1:
            return self._buffer.count(self._separator, self._low, end)
        # Several times as fast for a single byte.
        data = np.frombuffer(memoryview(self._buffer)[self._low : end], np.uint8)
        return int(np.count_nonzero(data == self._separator[0]))

    def _pass_over(
        self, take: Callable[[memoryview], object], most_bytes: int | None = None
    ) -> bool:
        """Take bytes through the next separator; False if the file ends without one."""
        size = len(self._separator)
        want = min(self._target, most_bytes or self._target)
        while True:
            self._fill(max(want, 2 * size))
            found = self._buffer.find(self._separator, self._low, self._high)
            # A separator may begin in the last bytes of the buffer and end in the next ones.
            keep = 0 if self._at_end else size - 1
            cut = found + size if found >= 0 else max(self._low, self._high - keep)
            take(memoryview(self._buffer)[self._low : cut])
            self._low = cut
            if found >= 0 or self._at_end:
                return found >= 0


def _drop(_: memoryview) -> None: ...


class CopySource(RecordSource):
    """One unit of a stream, of which a copy was made."""

    def __init__(self, file: SourceFile, options: SourceOptions, copy: UnitCopy) -> None:
        self._copy = copy
        super().__init__(file, options)

    def _is_last(self, unit: Unit) -> bool:  # noqa: ARG002
        return self._copy.is_last

    def _seek(self, start: int) -> None:  # noqa: ARG002
        self._rewind()

    def _rewind(self, position: int = 0) -> None:  # noqa: ARG002
        self.close()
        self._raw = open(self._copy.path, "rb", buffering=0)  # noqa: SIM115
        self._base, self._low, self._high, self._at_end = self._copy.offset, 0, 0, False


# -------------------------------------------------------------------------------------------------
# One JSON line, decided by Python's json module: its text, or the exact reason why it has none.
#
# The block parser asks here only about lines that Arrow refused or found no text in.
# What Arrow refuses but Python takes is accepted with Python's meaning: the last of duplicate keys
# wins, numbers out of range and lone surrogates in other fields do not matter.

WHITESPACE = b" \t\r"
NESTED_TOO_DEEPLY = "nested too deeply"
_DETAIL_CHARACTERS = 60

# Numbers are never text; as strings they would be, and int() refuses those of many digits.
_DECODER = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.0)


def decide(line: bytes, field: str) -> bytes | tuple[RejectReason, str]:
    """UTF-8 of the text of a line that is not blank, or why there is none."""
    if why := utf8_error(line):
        return RejectReason.INVALID_UTF8, why.replace("of the text", "of the line")
    try:
        row = _DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        return RejectReason.INVALID_JSON, f"{error.msg} at character {error.pos} of the line"
    except RecursionError:
        return RejectReason.INVALID_JSON, NESTED_TOO_DEEPLY
    if not isinstance(row, dict):
        return RejectReason.NOT_AN_OBJECT, f"the line holds {kind_of(row)}"
    try:
        value = field_of(row, field)
    except KeyError:
        shown = ascii(", ".join(row))[1:-1][:_DETAIL_CHARACTERS] or "none"
        return RejectReason.MISSING_FIELD, f"no field {field!r}; there are: {shown}"
    if value is None:
        return RejectReason.NULL_TEXT, f"field {field!r} is null"
    if not isinstance(value, str):
        return RejectReason.NOT_A_STRING, f"field {field!r} is {kind_of(value)}"
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        return RejectReason.LONE_SURROGATE, f"\\u{code:04x} at character {error.start} of the text"


_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_IS_SPACE = np.isin(np.arange(256), [*WHITESPACE])
_SPACE = 32
_LONG_LINE_BYTES = 512
_FEW_LINES = 256
# Of lines that are left to Arrow: each is a call of it, which takes as long as many lines do.
_MOST_RUNS = 32
_MEMO_LINES = 1 << 12
_MEMO_LINE_BYTES = 64


class ReadFields(NamedTuple):
    """What became of lines."""

    texts: TextBatch  # of each; of one that was not read it is empty
    places: NDArray[np.int64]  # bytes of each that are before the part that was named
    is_read: NDArray[np.bool_]


class FieldReader:
    """Reads fields of JSON lines and puts them together, by `fields.c`.

    Only lines are read that leave no doubt: all others are the caller's.
    """

    def __init__(self, part: Any, template: Sequence[tuple[bool, str]], first: int | None) -> None:
        fields = list(dict.fromkeys(text for is_field, text in template if is_field))
        numbers = {field: number for number, field in enumerate(fields)}
        self._fill, self._slack = part.fill, part.AT_A_TIME
        self._first = -1 if first is None else first
        self._names = tuple(field.encode() for field in fields)
        self._parts = tuple(
            numbers[text] if is_field else text.encode() for is_field, text in template
        )
        used = Counter(each for each in self._parts if isinstance(each, int))
        self._times = max(used.values())
        self._extra = sum(len(each) for each in self._parts if isinstance(each, bytes))

    @classmethod
    def of(
        cls, template: Sequence[tuple[bool, str]], *, first: int | None = None
    ) -> FieldReader | None:
        """For (True, field) and (False, text), and the part whose place is asked for.

        None where there is no compiled part, and for fields with dots, which have rules of their
        own, or too many of them.
        """
        part = find_compiled("tokenmill.sources.fields", 1)
        has_dots = any(is_field and "." in text for is_field, text in template)
        return (
            None
            if part is None or has_dots or len(template) > part.MOST
            else cls(part, template, first)
        )

    def read(
        self,
        data: memoryview | NDArray[np.uint8],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> ReadFields:
        """Texts of lines of the data, which are UTF-8."""
        count = len(starts)
        most = self._times * int((ends - starts).sum()) + self._extra * count
        # Arrow keeps such memory for the next batch; numpy would ask the system for it each time.
        texts = np.frombuffer(pa.allocate_buffer(most + self._slack), np.uint8)
        offsets, places = np.empty(count + 1, np.int64), np.empty(count, np.int64)
        is_read = np.empty(count, np.bool_)
        template = self._names, self._parts, self._first
        self._fill(data, starts, ends, *template, texts, offsets, places, is_read)
        return ReadFields(TextBatch(texts, offsets), places, is_read)


class JsonlParser:
    """Rows of blocks of lines."""

    def __init__(self, options: SourceOptions) -> None:
        self._field = options.text_field
        self._whole = bool(options.fields)
        self._limit = record_limit(options)
        self.memo: dict[bytes, bytes | tuple[RejectReason, str]] = {}
        self._reader = FieldReader.of([(True, options.text_field)])
        self._options = pj.ParseOptions(
            explicit_schema=_schema(options.text_field), unexpected_field_behavior="ignore"
        )
        self._where, self._asking = options.where, _asking(options.where)

    def rows(self, block: LineBlock, *, first_row: int) -> RowBatch:
        """Rows of the block."""
        lines = _Lines(block, limit=self._limit)
        rejects = _Rejects(self, lines, first_row)
        places, sizes = lines.starts + lines.offset, lines.ends - lines.starts
        num_bytes, limit, blank = block.num_bytes, self._limit, lines.total - len(sizes)
        if not self._whole:
            array = self._texts(lines, rejects)
        elif lines.odd.any() or not len(sizes):
            rejects.add(np.flatnonzero(lines.sizes > limit))
            found = [None if at in rejects else lines.at(at) for at in range(len(sizes))]
            array = pa.array(found, pa.large_binary())
        else:
            # Rows are their lines, each with its end, which is white space.
            data = np.frombuffer(bytes(lines.data), np.uint8)
            texts = TextBatch(data, np.append(lines.starts, lines.ends[-1]))
            rows = np.arange(first_row, first_row + len(sizes), dtype=np.int64)
            largest = int(sizes.max())
            batch = RowBatch(texts, rows, (), len(rows), num_bytes, largest, places, blank)
            return chosen(batch, first_row, self._verdicts(lines))
        batch = rows_of(
            array, first_row, num_bytes, limit=limit, rejects=rejects, offsets=places, sizes=sizes
        )
        return chosen(replace(batch, blank_lines=blank), first_row, self._verdicts(lines))

    def _verdicts(self, lines: _Lines) -> NDArray[np.int8] | None:
        """The verdict of the condition on each line; what is no object is kept, and rejected."""
        if self._where is None:
            return None
        found = np.full(len(lines.starts), KEPT, np.int8)
        plain = lines.take_out_odd()
        if len(plain):
            found[plain] = self._judged(lines, plain)
        return found

    def _judged(self, lines: _Lines, plain: NDArray[np.int64]) -> NDArray[np.int8]:
        condition = self._where
        assert condition is not None
        data = lines.data[lines.starts[plain[0]] : lines.ends[plain[-1]]]
        found = self._asked(data, len(plain))
        if found is not None:
            return found
        if len(plain) > _FEW_LINES:
            halves = np.array_split(plain, 2)
            return np.concatenate([self._judged(lines, half) for half in halves])
        one_by_one: list[int] = []
        for _, start, end in lines.places(plain):
            verdict = condition.decide(bytes(lines.data[start:end]))
            if verdict is None:  # nested deeply, which Arrow does not mind
                asked = self._asked(lines.data[start:end], 1)
                verdict = KEPT if asked is None else int(asked[0])
            one_by_one.append(verdict)
        return np.array(one_by_one, np.int8)

    def _asked(self, data: memoryview, count: int) -> NDArray[np.int8] | None:
        """Verdicts on so many lines by Arrow; None where it refuses them."""
        if self._asking is None or self._where is None:
            return None
        table = self._table(data, self._asking)
        if table is None or table.num_rows != count:
            return None
        arrays = {name: _column(table, name) for name in self._where.columns}
        return verdicts(self._where, arrays, count)

    def count(self, block: LineBlock) -> int:
        """Lines of the block that are not blank."""
        return len(_Lines(block, limit=self._limit).starts)

    def _texts(self, lines: _Lines, rejects: _Rejects) -> Any:
        """Text of each line, null where it has none, which is noted."""
        rejects.add(np.flatnonzero(lines.odd))
        plain = lines.take_out_odd()
        array = self._parse(lines, plain, rejects) if len(plain) else _EMPTY
        if len(plain) < len(lines.odd):
            slots = np.cumsum(~lines.odd) - 1
            array = array.take(pa.array(slots, mask=lines.odd))
        if array.null_count > len(rejects):
            nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            rejects.add(np.setdiff1d(nulls, np.fromiter(rejects, np.int64, len(rejects))))
        return array

    def _parse(self, lines: _Lines, plain: NDArray[np.int64], rejects: _Rejects) -> Any:
        """Text of these lines, null where a line has none; nothing else is between them."""
        if self._reader is None:
            return self._by_arrow(lines, plain, rejects)
        read = self._reader.read(lines.data, lines.starts[plain], lines.ends[plain])
        left = np.flatnonzero(~read.is_read)
        runs = np.split(left, np.flatnonzero(np.diff(left) > 1) + 1) if len(left) else []
        if len(runs) > _MOST_RUNS:
            return self._by_arrow(lines, plain, rejects)
        texts = flat_array(read.texts)
        pieces, done = [], 0
        for run in runs:
            pieces += [texts[done : run[0]], self._by_arrow(lines, plain[run], rejects)]
            done = int(run[-1]) + 1
        return pa.concat_arrays([*pieces, texts[done:]]) if pieces else texts

    def _by_arrow(self, lines: _Lines, plain: NDArray[np.int64], rejects: _Rejects) -> Any:
        """The same, by Arrow."""
        table = self._table(lines.data[lines.starts[plain[0]] : lines.ends[plain[-1]]])
        if table is not None and table.num_rows == len(plain):
            return _text_column(table, self._field)
        if len(plain) > _FEW_LINES:
            halves = np.array_split(plain, 2)
            return pa.concat_arrays([self._by_arrow(lines, half, rejects) for half in halves])
        texts: list[bytes | None] = []
        refused: list[int] = []
        for index, start, end in lines.places(plain):
            found = self.decided(bytes(lines.data[start:end]).strip(WHITESPACE))
            table = None
            if not isinstance(found, bytes) and found[1] == NESTED_TOO_DEEPLY:
                table = self._table(lines.data[start:end])  # Arrow does not mind
            if isinstance(found, bytes):
                texts.append(found)
            elif table is not None and table.num_rows == 1:
                column = _text_column(table, self._field)
                texts.append(None if column.null_count else text_batch(column).bytes_at(0))
            else:
                texts.append(None)
                refused.append(index)
        rejects.add(np.array(refused, np.int64))
        return pa.array(texts, pa.large_binary()).view(pa.large_string())

    def _table(self, data: memoryview, options: Any = None) -> Any:
        """The values in the bytes as Arrow reads them; None where it refuses them."""
        read = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            source = pa.BufferReader(pa.py_buffer(data))
            return pj.read_json(source, parse_options=options or self._options, read_options=read)
        except MemoryError:
            raise
        except pa.ArrowException:
            return None

    def decided(self, line: bytes) -> bytes | tuple[RejectReason, str]:
        """What Python says of a line; of a short one that came before, what it said then."""
        if len(line) > _MEMO_LINE_BYTES:
            return decide(line, self._field)
        if (found := self.memo.get(line)) is None:
            if len(self.memo) >= _MEMO_LINES:
                self.memo.clear()
            found = self.memo[line] = decide(line, self._field)
        return found


class _Rejects(dict[int, Reject]):
    """Why lines of a block, by their number, are rejected."""

    def __init__(self, parser: JsonlParser, lines: _Lines, first_row: int) -> None:
        self._parser, self._lines, self._first_row = parser, lines, first_row

    def add(self, indices: NDArray[np.int64]) -> None:
        """Note why these lines, which have no text, are rejected."""
        if not len(indices):
            return
        lines, limit, data = self._lines, self._lines.limit, bytes(self._lines.data)
        is_large = lines.sizes[indices] > limit
        for index in indices[is_large].tolist():
            size, offset = int(lines.sizes[index]), int(lines.starts[index]) + lines.offset
            what = RejectReason.TOO_LARGE, too_large(size, limit), offset, size
            self[index] = Reject(self._first_row + index, *what)
        memo, decided = self._parser.memo, self._parser.decided
        for index, start, end in lines.places(indices[~is_large]):
            line = data[start:end]
            found = memo.get(line) or decided(line.strip(WHITESPACE))
            assert not isinstance(found, bytes), "a line that has text was to be rejected"
            self[index] = Reject(self._first_row + index, *found, lines.offset + start)


_EMPTY = pa.nulls(0, pa.large_string())


class _Lines:
    """Where the lines of a block that are not blank begin and end."""

    def __init__(self, block: LineBlock, *, limit: int) -> None:
        self.data, self.offset, self.limit = block.data, block.offset, limit
        view = np.frombuffer(self.data, np.uint8)
        self.ends = _line_ends(block)
        self.starts = np.zeros(len(self.ends), np.int64)
        self.starts[1:] = self.ends[:-1] + 1
        self.total = len(self.ends)
        # Before the mark is taken off: the block reader counts it too when it measures a record.
        self.sizes = self.ends - self.starts
        if block.offset == 0 and bytes(self.data[: len(BOM)]) == BOM:
            self.starts[0] = len(BOM)
        # An empty line begins with its own end, so it fails whatever neighbour the indices touch.
        first = view[np.minimum(self.starts, len(view) - 1)]
        last, before = view[self.ends - 1], view[np.maximum(self.ends - 2, 0)]
        last = np.where(last == _RETURN, before, last)
        self.odd = (first != _OPEN) | (last != _CLOSE) | (self.sizes > limit)
        if self.odd.any():
            self._look_closer(_IS_SPACE[first] | _IS_SPACE[last])
        if not is_utf8(self.data):
            # Arrow looks at the bytes of the text alone, and not at those of names or other fields.
            self.odd |= [not is_utf8(self.at(index)) for index in range(len(self.odd))]

    def at(self, index: int) -> bytes:
        """The line, without its end."""
        return bytes(self.data[self.starts[index] : self.ends[index]]).strip(WHITESPACE)

    def places(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Number, start and end of each line; far faster than to look each of them up."""
        starts, ends = self.starts[indices].tolist(), self.ends[indices].tolist()
        return zip(indices.tolist(), starts, ends, strict=True)

    def take_out_odd(self) -> NDArray[np.int64]:
        """The lines that are left once those that are odd were made white space, in place."""
        if self.odd.any():
            edges = np.zeros(len(self.data) + 1, np.int8)
            edges[self.starts[self.odd]] = 1
            edges[self.ends[self.odd]] = -1
            inside = np.cumsum(edges[:-1], dtype=np.int8).view(bool)
            np.frombuffer(self.data, np.uint8)[inside] = _SPACE
        return np.flatnonzero(~self.odd)

    def _look_closer(self, has_space: NDArray[np.bool_]) -> None:
        """Drop blank lines; a line with white space around its object is an ordinary one."""
        blank = self.starts == self.ends
        for index, start, end in self.places(np.flatnonzero(self.odd & ~blank & has_space)):
            line = bytes(self.data[start:end]).strip(WHITESPACE)
            if not line:
                blank[index] = True
            elif line.startswith(b"{") and line.endswith(b"}"):
                self.odd[index] = self.sizes[index] > self.limit
        # A blank line over the limit is a row all the same: a larger one is passed over unseen.
        kept = ~blank | (self.sizes > self.limit)
        self.starts, self.ends = self.starts[kept], self.ends[kept]
        self.sizes, self.odd = self.sizes[kept], self.odd[kept]


def _line_ends(block: LineBlock) -> NDArray[np.int64]:
    """Where the lines of the block end; the end of the block closes the last."""
    few: list[int] = []
    many = np.empty(0, np.int64)
    position = block.low
    # One find per line is faster than numpy while lines are long; short ones are left to numpy.
    beginning = min(block.high, block.low + _FEW_LINES * _LONG_LINE_BYTES)
    is_short = block.buffer.count(b"\n", block.low, beginning) > _FEW_LINES
    for _ in range(0 if is_short else block.num_bytes // _LONG_LINE_BYTES + 1):
        found = block.buffer.find(b"\n", position, block.high)
        if found < 0:
            break
        few.append(found - block.low)
        position = found + 1
    else:
        passed = position - block.low
        many = np.flatnonzero(np.frombuffer(block.data, np.uint8)[passed:] == _NEWLINE) + passed
    is_open = block.buffer[block.high - 1] != _NEWLINE
    last = [block.num_bytes] if is_open else []
    return np.concatenate([np.array(few, np.int64), many, np.array(last, np.int64)])


def _schema(field: str) -> Any:
    names = field.split(".")
    nested = pa.field(names[-1], pa.large_string())
    for name in reversed(names[:-1]):
        nested = pa.field(name, pa.struct([nested]))
    literal = [pa.field(field, pa.large_string())] if len(names) > 1 else []
    return pa.schema([*literal, nested])


# The values of a condition, as Arrow is to read them.
_TYPES = {TEXT: pa.large_string(), NUMBER: pa.float64(), FLAG: pa.bool_()}


def _asking(condition: Condition | None) -> Any:
    """How Arrow is to read the columns of a condition; None where that cannot be said.

    That is where a column may be anything, or is an object and a value at once.
    """
    tree: dict[str, Any] = {}
    for column, kind in ({} if condition is None else condition.columns).items():
        if kind is None:
            return None
        for names in {(column,), tuple(column.split("."))}:
            at = tree
            for name in names[:-1]:
                at = at.setdefault(name, {})
                if not isinstance(at, dict):
                    return None
            if at.setdefault(names[-1], _TYPES[kind]) != _TYPES[kind]:
                return None
    if not tree:
        return None
    return pj.ParseOptions(
        explicit_schema=pa.schema(_fields(tree)), unexpected_field_behavior="ignore"
    )


def _fields(tree: dict[str, Any]) -> list[Any]:
    return [
        pa.field(name, pa.struct(_fields(below)) if isinstance(below, dict) else below)
        for name, below in tree.items()
    ]


def _column(table: Any, name: str) -> Any:
    """The values of a field, as `field_of` finds them."""
    literal, (first, *below) = _single(table.column(name)), name.split(".")
    if not below:
        return literal
    nested = pc.struct_field(_single(table.column(first)), below)
    return nested if literal.null_count == len(literal) else pc.coalesce(literal, nested)


def _single(column: Any) -> Any:
    # combine_chunks() would copy even a single chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _text_column(table: Any, field: str) -> Any:
    literal = _single(table.column(0))
    if table.num_columns == 1:
        return literal
    nested = pc.struct_field(_single(table.column(1)), field.split(".")[1:])
    return nested if literal.null_count == len(literal) else pc.coalesce(literal, nested)


# -------------------------------------------------------------------------------------------------
# Text: documents between separators, or whole files.
#
# Files that are one document each come in groups (see `discovery`), because a unit per small file
# would cost more than its text. A separator that cannot overlap itself is found from anywhere, so
# such files are cut by byte range; any other separator is looked for from the front, as a stream.


class TextParser:
    """Rows of blocks of separated text."""

    def __init__(self, options: SourceOptions) -> None:
        self._separator = (options.separator or "").encode()
        self._limit = record_limit(options)

    def rows(self, block: LineBlock, *, first_row: int) -> RowBatch:
        """Rows of the block; each is a record."""
        pieces = self._split(block)
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        starts = np.zeros(len(pieces), np.int64)
        np.cumsum(lengths[:-1] + len(self._separator), out=starts[1:])
        if block.offset == 0 and len(pieces[0]) <= self._limit:
            pieces[0] = pieces[0].removeprefix(BOM)
        array, size, limit = pa.array(pieces, pa.large_binary()), block.num_bytes, self._limit
        places = starts + block.offset
        return rows_of(array, first_row, size, limit=limit, offsets=places, sizes=lengths)

    def count(self, block: LineBlock) -> int:
        """Records of the block."""
        return len(self._split(block))

    def _split(self, block: LineBlock) -> list[bytes]:
        pieces = bytes(block.data).split(self._separator)
        return pieces if pieces[-1] else pieces[:-1]


class TextFileSource(Source):
    """A text file that is one document."""

    def count_rows(self, unit: Unit) -> int:  # noqa: ARG002
        return 1

    def _pieces(self, unit: Unit, digest: Any) -> Iterator[tuple[int, bytes | None]]:  # noqa: ARG002
        """Size and text of the file; no text above the limit."""
        file, limit, chunks, size = self._file, self._options.max_document_bytes, list[bytes](), 0
        step = min(file.size + 1, MEGABYTE) if file.compression is None else MEGABYTE
        reader = base.open_decompressed(file, room=self._options.room_bytes)
        try:
            while chunk := reader.read(step):
                size += len(chunk)
                digest.update(chunk)
                if size > 2 * self._options.batch_bytes and self.before_large is not None:
                    self.before_large()
                chunks.append(chunk)
                if size > limit:
                    chunks.clear()
        except (OSError, EOFError) as error:
            raise files.unreadable(file.path, error) from error
        finally:
            reader.close()
        yield size, b"".join(chunks) if size <= limit else None

    def _rows(self, piece: tuple[int, bytes | None], first_row: int) -> RowBatch:
        size, content = piece
        texts, rejects = list[bytes](), list[Reject]()
        if content is None:
            detail = too_large(size, self._options.max_document_bytes)
            rejects.append(Reject(first_row, RejectReason.TOO_LARGE, detail, size=size))
        elif why := utf8_error(content):
            rejects.append(Reject(first_row, RejectReason.INVALID_UTF8, why))
        else:
            texts.append(content.removeprefix(BOM))
        return RowBatch(
            TextBatch.from_texts(texts),
            np.full(len(texts), first_row, np.int64),
            tuple(rejects),
            num_rows=1,
            num_bytes=size,
            largest_row_bytes=0 if content is None else size,
        )


# -------------------------------------------------------------------------------------------------
# Groups of small files (see `discovery`): a unit for each of them would cost more than its text.


class GroupSource(Source):
    """A group of files, each read as its format is; the only unit is all of them, in their order.

    Rows of many files are joined into one batch: a call of the engine costs as much as their text.
    """

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        self._member_rows: list[int] = []
        yield from super().read(unit)
        rows = self._member_rows
        self._end = replace(self.end(), member_rows=() if set(rows) == {1} else tuple(rows))

    def count_rows(self, unit: Unit) -> int:  # noqa: ARG002
        return sum(source.count_rows(whole) for source, whole in self._members())

    def digest(self, unit: Unit) -> str:  # noqa: ARG002
        digest = self.new_digest()
        for source, whole in self._members():
            _digest_member(digest, whole.file.path, source.digest(whole))
        return str(digest.hexdigest())

    def _members(self) -> Iterator[tuple[Source, Unit]]:
        for member in self._file.members:
            with closing(base.open_source(member, self._options)) as source:
                source.before_large = self.before_large
                yield source, Unit(file=member)

    def _pieces(self, unit: Unit, digest: Any) -> Iterator[list[RowBatch]]:  # noqa: ARG002
        held: list[RowBatch] = []
        before = rows = size = 0
        for source, whole in self._members():
            read_before, rows_of_file = self.read_seconds, 0
            for batch in source.read(whole):
                self.read_seconds = read_before + source.read_seconds
                held.append(_moved(batch, before, whole.file.path))
                rows_of_file, size = rows_of_file + batch.num_rows, size + batch.num_bytes
                rows += batch.num_rows
                if 2 * size >= self._options.batch_bytes or 2 * rows >= base.LARGEST_BATCH_ROWS:
                    yield held
                    held, rows, size = [], 0, 0
            _digest_member(digest, whole.file.path, source.end().digest)
            self._member_rows.append(rows_of_file)
            before += rows_of_file
        if held:
            yield held

    def _rows(self, piece: list[RowBatch], first_row: int) -> RowBatch:  # noqa: ARG002
        return piece[0] if len(piece) == 1 else _joined(piece)


def _digest_member(digest: Any, path: str, content: str) -> None:
    # The path counts too: it is written into rejects and tells where a document came from.
    digest.update(path.encode(errors="surrogateescape") + b"\0" + bytes.fromhex(content))


def _moved(batch: RowBatch, before: int, path: str) -> RowBatch:
    """Rows of a file as those of a unit that has so many rows before them.

    The texts are copied: a file that is mapped may change once it was read and found unchanged.
    """
    offsets = batch.texts.offsets
    data = batch.texts.data[offsets[0] : offsets[-1]].copy()
    return replace(
        batch,
        texts=TextBatch(data, offsets - offsets[0]),
        rows=batch.rows + before,
        rejects=tuple(each._replace(row=each.row + before) for each in batch.rejects),
        files=((before, path),),
        left_out=batch.left_out + before,
        undecided=batch.undecided + before,
    )


def _joined(batches: list[RowBatch]) -> RowBatch:
    """Consecutive rows as one batch."""
    lengths = np.concatenate([each.texts.lengths for each in batches])
    data = np.concatenate([each.texts.data for each in batches])
    places = None
    if any(each.places is not None for each in batches):
        places = np.concatenate(
            [each.rows * 0 - 1 if each.places is None else each.places for each in batches]
        )
    return RowBatch(
        TextBatch(data, np.append(0, np.cumsum(lengths))),
        np.concatenate([each.rows for each in batches]),
        tuple(itertools.chain.from_iterable(each.rejects for each in batches)),
        num_rows=sum(each.num_rows for each in batches),
        num_bytes=sum(each.num_bytes for each in batches),
        largest_row_bytes=max(each.largest_row_bytes for each in batches),
        places=places,
        blank_lines=sum(each.blank_lines for each in batches),
        files=tuple(dict(each.files[0] for each in batches).items()),
        left_out=np.concatenate([each.left_out for each in batches]),
        undecided=np.concatenate([each.undecided for each in batches]),
    )
