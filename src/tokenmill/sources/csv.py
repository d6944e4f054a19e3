"""CSV and TSV with a header line, through Arrow's streaming reader: one unit per file.

A row with too few or too many values is rejected by itself. Arrow reports such rows ahead of the
batches around them, by number, so they are put back into their place here. It reports them as
strings, and gives up where they are none: so a byte that is no UTF-8 passes through it as a
character of its own, and is a byte again in the text.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv
import xxhash

from tokenmill.errors import SourceError
from tokenmill.records import Reject, RejectReason, RowBatch
from tokenmill.sources.base import Source, SourceFile, SourceOptions, Unit, open_decompressed
from tokenmill.sources.columns import (
    chosen,
    damaged,
    find_columns,
    is_utf8,
    json_rows,
    of_text,
    rows_of,
    verdicts,
)
from tokenmill.where import KEPT, unknown_column

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SMALLEST_BLOCK_BYTES = 1 << 16
_HEADER_ROWS = 1

# Characters that stand for bytes; where a text has one of them, it stands for its own bytes.
_FIRST_BYTE = 0x10FF00
_MARK = chr(_FIRST_BYTE).encode()[:1]  # a single byte is looked for at the speed of memory
_HIDDEN = {0xDC00 + byte: chr(_FIRST_BYTE + byte) for byte in range(0x80, 0x100)} | {
    code: "".join(chr(_FIRST_BYTE + byte) for byte in chr(code).encode())
    for code in range(_FIRST_BYTE, _FIRST_BYTE + 0x100)
}
_SHOWN = {_FIRST_BYTE + byte: 0xDC00 + byte for byte in range(0x80, 0x100)}


# Texts, null where a row is malformed; those rows; bytes read; whether all is UTF-8; verdicts on
# the rows, where there is a condition.
_Piece = tuple[Any, dict[int, Reject], int, bool, "NDArray[np.int8] | None"]


class CsvSource(Source):
    """A CSV file; opened anew for each reading."""

    @staticmethod
    def plan(file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        """The whole file, once its header is known to have the column."""
        if file.size:
            CsvSource(file, options)._columns()
        yield Unit(file=file)

    def digest(self, unit: Unit) -> str:  # noqa: ARG002
        digest = self.new_digest()
        if self._file.size:
            with _HashingReader(open_decompressed(self._file), digest) as reader:
                reader.read_rest()
        return str(digest.hexdigest())

    def _count(self, piece: Any) -> int:
        return len(piece[0])

    def _pieces(self, unit: Unit, digest: Any) -> Iterator[_Piece]:  # noqa: ARG002
        if not self._file.size:
            return
        raw = open_decompressed(self._file, room=self._options.room_bytes)
        with _HashingReader(raw, digest) as reader:
            malformed: deque[Reject] = deque()
            row = done = 0
            fields = self._options.fields
            # Of several fields, only the header tells which are there.
            columns = self._columns() if fields else (self._options.text_field,)
            condition = self._options.where
            more = () if condition is None else tuple(condition.columns)
            read = tuple(dict.fromkeys((*columns, *more)))
            batches = self._open(reader, read, malformed)
            while batches is not None:
                array = pa.array([], pa.large_binary())
                found = np.empty(0, np.int8)
                try:
                    batch = batches.read_next_batch()
                    if reader.has_hidden:
                        batch = pa.record_batch([*map(_shown, batch.columns)], names=read)
                    array = json_rows(batch, columns) if fields else batch.column(0)
                    if condition is not None:
                        values = {
                            name: of_text(batch.column(read.index(name)), kind)
                            for name, kind in condition.columns.items()
                        }
                        found = verdicts(condition, values, batch.num_rows)
                except StopIteration:
                    batches = None
                except (pa.ArrowException, OSError) as error:
                    raise _unreadable_rows(self._file.path, error) from error
                array, rejects = _with_gaps(array, malformed, first_row=row)
                every = None
                if condition is not None:
                    every = np.full(len(array), KEPT, np.int8)
                    every[np.setdiff1d(np.arange(len(array)), [*rejects])] = found
                yield array, rejects, reader.size - done, not reader.has_hidden, every
                row, done = row + len(array), reader.size
            reader.read_rest()

    def _rows(self, piece: _Piece, first_row: int) -> RowBatch:
        array, rejects, num_bytes, is_valid, found = piece
        limit = self._options.max_document_bytes
        batch = rows_of(
            array, first_row, num_bytes, limit=limit, rejects=rejects, is_valid=is_valid
        )
        return chosen(batch, first_row, found)

    def _columns(self) -> tuple[str, ...]:
        """The columns to read, once the header is known to have them."""
        with _HashingReader(open_decompressed(self._file), xxhash.xxh3_64()) as reader:
            schema = self._open(reader, (), deque()).schema
        self._check_where(schema.names)
        return find_columns(schema, self._options, path=self._file.path)

    def _check_where(self, names: list[str]) -> None:
        condition, path = self._options.where, self._file.path
        for column in () if condition is None else condition.columns:
            if names.count(column) != 1:
                problem, hint = unknown_column(column, names)
                if column in names:
                    problem = f"several columns {column!r}, and --where asks for one"
                raise SourceError(f"{path!r} has {problem}", hint=hint)

    def _open(
        self, reader: _HashingReader, columns: tuple[str, ...], malformed: deque[Reject]
    ) -> Any:
        """Arrow's reader of these columns, or of all, which notes rows that are malformed."""

        def note(row: Any) -> str:
            index = row.number - 1 - _HEADER_ROWS
            detail = f"{row.actual_columns} values instead of {row.expected_columns}"
            malformed.append(Reject(index, RejectReason.MALFORMED_ROW, detail))
            return "skip"

        options = self._options
        # All values are read as they are written.
        texts = columns or options.fields or (options.text_field,)
        types = dict.fromkeys(texts, pa.large_binary())
        block = max(options.batch_bytes, _SMALLEST_BLOCK_BYTES)
        delimiter = "\t" if ".tsv" in self._file.path.lower() else ","
        read = pv.ReadOptions(use_threads=False, block_size=block)
        parse = pv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, invalid_row_handler=note
        )
        convert = pv.ConvertOptions(
            include_columns=list(columns) or None, column_types=types, strings_can_be_null=False
        )
        try:
            return pv.open_csv(reader, read, parse, convert)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable_rows(self._file.path, error) from error


def _with_gaps(
    array: Any, malformed: deque[Reject], *, first_row: int
) -> tuple[Any, dict[int, Reject]]:
    """The array with a null at the place of each malformed row up to its end, and those rejects."""
    parts = [array.slice(0, 0)]
    rejects = {}
    used = size = 0
    while used < len(array) or (malformed and malformed[0].row == first_row + size):
        left = len(array) - used
        step = min(left, malformed[0].row - first_row - size) if malformed else left
        if step:
            parts.append(array.slice(used, step))
            used, size = used + step, size + step
        else:
            rejects[size] = malformed.popleft()
            parts.append(pa.nulls(1, array.type))
            size += 1
    return (pa.concat_arrays(parts) if rejects else array), rejects


def _unreadable_rows(path: str, error: Exception) -> Exception:
    if "straddl" in str(error):
        return SourceError(
            f"{path!r} has a row that is larger than what is read in one go, or a quote that is "
            "never closed",
            hint="allow more memory with: --memory 8GB, or write the file as JSON Lines or Parquet",
        )
    return damaged(path, error)


def _shown(array: Any) -> Any:
    """The values with the bytes that characters stand for."""
    data = array.buffers()[2]
    if data is None or _MARK not in data.to_pybytes():
        return array
    texts = array.to_pylist()
    for place, text in enumerate(texts):
        if text is not None and _MARK in text:
            texts[place] = text.decode().translate(_SHOWN).encode(errors="surrogateescape")
    return pa.array(texts, array.type)


def _whole_characters(data: bytes) -> int:
    """Where a character begins that is not complete; the length if there is none."""
    for place in range(len(data) - 1, max(-1, len(data) - 4), -1):
        if data[place] >= 0xC0:
            size = 2 + (data[place] >= 0xE0) + (data[place] >= 0xF0)
            return place if place + size > len(data) else len(data)
        if data[place] < 0x80:
            break
    return len(data)


class _HashingReader:
    """Passes bytes on to Arrow as UTF-8, digests and counts them."""

    closed = False

    def __init__(self, reader: io.BufferedIOBase, digest: Any) -> None:
        self._reader, self._digest = reader, digest
        self.size = 0
        self.has_hidden = False
        self._begun = b""  # of a character that the next bytes end
        self._ready = b""

    def __enter__(self) -> _HashingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> bytes:
        """So many bytes, fewer only at the end: Arrow takes what it gets for a block."""
        data = b"-"
        while data and len(self._ready) < size:
            data = self._next(size - len(self._ready))
            joined = self._begun + data
            whole = len(joined) if not data else _whole_characters(joined)
            self._begun, more = joined[whole:], joined[:whole]
            if not is_utf8(more) or _MARK in more:
                self.has_hidden = True
                more = more.decode(errors="surrogateescape").translate(_HIDDEN).encode()
            self._ready += more
        found, self._ready = self._ready[:size], self._ready[size:]
        return found

    def _next(self, size: int) -> bytes:
        data = self._reader.read(size)
        self._digest.update(data)
        self.size += len(data)
        return data

    def read_rest(self) -> None:
        """Read what Arrow did not ask for: the digest is of the whole file."""
        while self._next(_SMALLEST_BLOCK_BYTES):
            pass
