"""JSON Lines: a block of lines at a time through Arrow's parser, and line by line where that fails.

Arrow reads a block as JSON values with white space between them, which JSON Lines does not mean:
two objects on one line, or one object on two, would pass. They cannot if every line begins with "{"
and ends with "}" (nowhere in valid JSON does "{" follow "}", so no value crosses a line) and there
are as many values as lines. Lines of another shape never reach Arrow, which also crashes on a block
that begins with null.

A block that does not parse is halved until few lines are left, which Python decides one by one. It
takes what Arrow takes, except for lines that are nested deeply, and Arrow is asked about those. So
a line gets the same answer whatever block it is in, and bad lines cost little more than good ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch, field_of, kind_of
from tokenmill.sources.columns import is_utf8, rows_of, text_batch, too_large, utf8_error
from tokenmill.sources.lines import record_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tokenmill.sources.base import SourceOptions
    from tokenmill.sources.lines import LineBlock


# -------------------------------------------------------------------------------------------------
# One JSON line, decided by Python's json module: its text, or the exact reason why it has none.
#
# The block parser below asks here only about lines that Arrow refused or found no text in.
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
    return _text(row, field)


def _text(row: dict[str, Any], field: str) -> bytes | tuple[RejectReason, str]:
    try:
        value = field_of(row, field)
    except KeyError:
        return RejectReason.MISSING_FIELD, f"no field {field!r}; there are: {_shown(row)}"
    if value is None:
        return RejectReason.NULL_TEXT, f"field {field!r} is null"
    if not isinstance(value, str):
        return RejectReason.NOT_A_STRING, f"field {field!r} is {kind_of(value)}"
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        return RejectReason.LONE_SURROGATE, f"\\u{code:04x} at character {error.start} of the text"


def _shown(row: dict[str, Any]) -> str:
    return ascii(", ".join(row))[1:-1][:_DETAIL_CHARACTERS] or "none"


BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
_SPACE = 32
_LONG_LINE_BYTES = 512
_FEW_LINES = 256
_MEMO_LINES = 1 << 12
_MEMO_LINE_BYTES = 64


class JsonlParser:
    """Rows of blocks of lines."""

    separator = b"\n"

    def __init__(self, options: SourceOptions) -> None:
        self._field = options.text_field
        self._whole = bool(options.fields)
        self._limit = record_limit(options)
        self._memo: dict[bytes, bytes | tuple[RejectReason, str]] = {}
        self._options = pj.ParseOptions(
            explicit_schema=_schema(options.text_field), unexpected_field_behavior="ignore"
        )

    def rows(self, block: LineBlock, *, first_row: int) -> tuple[RowBatch, int]:
        """Rows of the block and its number of lines."""
        lines = _Lines(block, limit=self._limit)
        rejects: dict[int, Reject] = {}
        if self._whole:
            return self._whole_lines(lines, block, first_row), lines.total
        self._reject(lines, np.flatnonzero(lines.odd), first_row, rejects)
        plain = lines.take_out_odd()
        array = self._parse(lines, plain, first_row, rejects) if len(plain) else _EMPTY
        if len(plain) < len(lines.odd):
            slots = np.cumsum(~lines.odd) - 1
            array = array.take(pa.array(slots, mask=lines.odd))
        if array.null_count > len(rejects):
            self._explain_nulls(lines, array, first_row, rejects)
        batch = rows_of(
            array,
            first_row=first_row,
            num_bytes=block.num_bytes,
            max_document_bytes=self._limit,
            rejects=rejects,
            offsets=lines.starts + lines.offset,
            sizes=lines.ends - lines.starts,
        )
        return batch, lines.total

    def _whole_lines(self, lines: _Lines, block: LineBlock, first_row: int) -> RowBatch:
        """Rows that are their lines, to be parsed by whoever needs several fields of them."""
        if not lines.odd.any() and len(lines.starts):
            return self._all_lines(lines, block, first_row)
        rejects: dict[int, Reject] = {}
        texts: list[bytes | None] = []
        for index, size in enumerate(lines.sizes.tolist()):
            if size > self._limit:
                offset = int(lines.starts[index]) + lines.offset
                detail = too_large(size, self._limit)
                rejects[index] = Reject(
                    first_row + index, RejectReason.TOO_LARGE, detail, offset, size=size
                )
            texts.append(None if size > self._limit else lines.at(index))
        return rows_of(
            pa.array(texts, pa.large_binary()),
            first_row=first_row,
            num_bytes=block.num_bytes,
            max_document_bytes=self._limit,
            rejects=rejects,
            offsets=lines.starts + lines.offset,
            sizes=lines.ends - lines.starts,
        )

    def _all_lines(self, lines: _Lines, block: LineBlock, first_row: int) -> RowBatch:
        """Rows of a block in which nothing is odd: each line with its end, which is white space."""
        starts = lines.starts
        offsets = np.append(starts, lines.ends[-1])
        return RowBatch(
            TextBatch(np.frombuffer(bytes(lines.data), np.uint8), offsets),
            np.arange(first_row, first_row + len(starts), dtype=np.int64),
            (),
            num_rows=len(starts),
            num_bytes=block.num_bytes,
            largest_row_bytes=int((lines.ends - starts).max()),
            places=starts + lines.offset,
        )

    def count(self, block: LineBlock) -> int:
        """Lines of the block that are not blank."""
        return len(_Lines(block, limit=self._limit).starts)

    def _parse(
        self,
        lines: _Lines,
        plain: NDArray[np.int64],
        first_row: int,
        rejects: dict[int, Reject],
    ) -> Any:
        """Text of these lines, null where a line has none; nothing else stands between them."""
        table = self._table(lines.data[lines.starts[plain[0]] : lines.ends[plain[-1]]])
        if table is not None and table.num_rows == len(plain):
            return _text_column(table, self._field)
        if len(plain) <= _FEW_LINES:
            texts = self._texts(lines, plain, first_row, rejects)
            return pa.array(texts, pa.large_binary()).view(pa.large_string())
        halves = np.array_split(plain, 2)
        return pa.concat_arrays([self._parse(lines, half, first_row, rejects) for half in halves])

    def _table(self, data: memoryview) -> Any:
        """The values in the bytes as Arrow reads them; None where it refuses them."""
        read = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            source = pa.BufferReader(pa.py_buffer(data))
            return pj.read_json(source, parse_options=self._options, read_options=read)
        except MemoryError:
            raise
        except pa.ArrowException:
            return None

    def _texts(
        self,
        lines: _Lines,
        plain: NDArray[np.int64],
        first_row: int,
        rejects: dict[int, Reject],
    ) -> list[bytes | None]:
        """Text of each line by itself, or None with the reject noted."""
        texts: list[bytes | None] = []
        refused: list[int] = []
        for index, start, end in lines.places(plain):
            found = self._decided(bytes(lines.data[start:end]).strip(WHITESPACE))
            if isinstance(found, bytes):
                texts.append(found)
                continue
            table = None
            if found[1] == NESTED_TOO_DEEPLY:  # which Arrow does not mind
                table = self._table(lines.data[start:end])
            if table is not None and table.num_rows == 1:
                column = _text_column(table, self._field)
                texts.append(None if column.null_count else text_batch(column).bytes_at(0))
            else:
                texts.append(None)
                refused.append(index)
        self._reject(lines, np.array(refused, np.int64), first_row, rejects)
        return texts

    def _decided(self, line: bytes) -> bytes | tuple[RejectReason, str]:
        """What Python says of a line; of a short one that came before, what it said then."""
        if len(line) > _MEMO_LINE_BYTES:
            return decide(line, self._field)
        if (found := self._memo.get(line)) is None:
            if len(self._memo) >= _MEMO_LINES:
                self._memo.clear()
            found = self._memo[line] = decide(line, self._field)
        return found

    def _reject(
        self,
        lines: _Lines,
        indices: NDArray[np.int64],
        first_row: int,
        rejects: dict[int, Reject],
    ) -> None:
        """Note why these lines, which have no text, are rejected."""
        for index, start, end in lines.places(indices):
            row, offset = first_row + index, lines.offset + start
            if (
                end - start + len(BOM) > self._limit
                and (size := int(lines.sizes[index])) > self._limit
            ):
                detail = too_large(size, self._limit)
                rejects[index] = Reject(row, RejectReason.TOO_LARGE, detail, offset, size)
                continue
            found = self._decided(bytes(lines.data[start:end]).strip(WHITESPACE))
            assert not isinstance(found, bytes), "a line that has text was to be rejected"
            rejects[index] = Reject(row, found[0], found[1], offset)

    def _explain_nulls(
        self, lines: _Lines, array: Any, first_row: int, rejects: dict[int, Reject]
    ) -> None:
        nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
        if rejects:
            nulls = np.setdiff1d(nulls, np.fromiter(rejects, np.int64, len(rejects)))
        self._reject(lines, nulls, first_row, rejects)


_EMPTY = pa.array([], pa.large_string())


class _Lines:
    """Where the lines of a block that are not blank begin and end."""

    def __init__(self, block: LineBlock, *, limit: int) -> None:
        self.data = block.data
        self.offset = block.offset
        view = np.frombuffer(self.data, np.uint8)
        self.ends = _line_ends(block)
        self.starts = np.zeros(len(self.ends), np.int64)
        self.starts[1:] = self.ends[:-1] + 1
        self.total = len(self.ends)
        # Before the mark is taken off: the block reader counts it too when it measures a record.
        self.sizes = self.ends - self.starts
        if block.offset == 0 and bytes(self.data[: len(BOM)]) == BOM:
            self.starts[0] = len(BOM)
        self.odd = ~_looks_like_object(view, self.starts, self.ends) | (self.sizes > limit)
        if self.odd.any():
            self._look_closer(limit)
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

    def _look_closer(self, limit: int) -> None:
        """Drop blank lines; a line with white space around its object is an ordinary one."""
        blank = self.sizes == 0
        for index, start, end in self.places(np.flatnonzero(self.odd & ~blank)):
            line = bytes(self.data[start:end]).strip(WHITESPACE)
            if not line:
                blank[index] = True
            elif line.startswith(b"{") and line.endswith(b"}"):
                self.odd[index] = self.sizes[index] > limit
        # A blank line over the limit is a row all the same: a larger one is passed over unseen.
        kept = ~blank | (self.sizes > limit)
        self.starts, self.ends = self.starts[kept], self.ends[kept]
        self.sizes, self.odd = self.sizes[kept], self.odd[kept]


def _looks_like_object(
    view: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    # An empty line begins with its own end, so it fails whatever neighbour the indices touch.
    last = view[ends - 1]
    closed = (last == _CLOSE) | ((last == _RETURN) & (view[np.maximum(ends - 2, 0)] == _CLOSE))
    return np.asarray((view[np.minimum(starts, len(view) - 1)] == _OPEN) & closed)


def _line_ends(block: LineBlock) -> NDArray[np.int64]:
    """Where the lines of the block end; the end of the block closes the last."""
    few: list[int] = []
    many = np.empty(0, np.int64)
    position = block.low
    # One find per line is faster than numpy while lines are long; short ones are left to numpy.
    for _ in range(block.num_bytes // _LONG_LINE_BYTES + 1):
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


def _single(column: Any) -> Any:
    # combine_chunks() would copy even a single chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _text_column(table: Any, field: str) -> Any:
    literal = _single(table.column(0))
    if table.num_columns == 1:
        return literal
    nested = pc.struct_field(_single(table.column(1)), field.split(".")[1:])
    return nested if literal.null_count == len(literal) else pc.coalesce(literal, nested)
