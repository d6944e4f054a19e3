"""Parquet and Arrow files: units are runs of row groups or record batches.

Only the columns that are needed are read. Planning reads the footer, so a missing column or one of
another type is found before the build starts.
"""

from __future__ import annotations

import io
import mmap
import struct
import sys
from abc import abstractmethod
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tokenmill import files as files_module
from tokenmill.errors import SourceError
from tokenmill.records import RowBatch, cut_ranges, lazy
from tokenmill.sources import base, columns
from tokenmill.sources.base import MEGABYTE, Source, SourceFile, SourceOptions, Unit, check_room
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray


class ColumnDigest:
    """Digest of a text column: the same however the rows are batched."""

    def __init__(self) -> None:
        self._lengths = xxhash.xxh3_128()
        self._data = xxhash.xxh3_128()
        self._verdicts: Any = None

    def update(self, array: Any, verdicts: NDArray[np.int8] | None = None) -> None:
        """Take in the next rows, a flat array, and where there is a condition its verdicts."""
        if verdicts is not None:
            self._verdicts = self._verdicts or xxhash.xxh3_128()
            self._verdicts.update(verdicts.data)
        batch = columns.text_batch(array)
        lengths = batch.lengths
        if array.null_count:
            is_null = array.is_null().to_numpy(zero_copy_only=False)
            lengths = np.where(is_null, -1 - lengths, lengths)
        self._lengths.update(np.ascontiguousarray(lengths).data)
        if len(batch):
            self._data.update(batch.data[batch.offsets[0] : batch.offsets[-1]].data)

    def hexdigest(self) -> str:
        digests = self._lengths.digest() + self._data.digest()
        if self._verdicts is not None:
            digests += self._verdicts.digest()
        return xxhash.xxh3_128_hexdigest(digests)


class _Piece(NamedTuple):
    """Texts of consecutive rows, and where there is a condition the verdicts on them."""

    texts: Any
    verdicts: NDArray[np.int8] | None


class ColumnSource(Source):
    """An open file with a text column, or columns of several fields.

    The digest of a unit covers the text alone, as decoded: a file that was written again with other
    compression or other columns keeps its digest, one whose text changed does not.
    """

    new_digest = ColumnDigest
    _columns: tuple[str, ...]
    _where: dict[str, tuple[str, ...]]  # what leads to each column of the condition
    _num_parts: int  # row groups or record batches of the file

    @abstractmethod
    def _batches(self, unit: Unit) -> Iterator[Any]:
        """The unit's record batches, with the columns at least."""

    def _let_go(self) -> None:
        """The rows so far are no longer needed: give back memory that they are in."""

    def _is_last(self, unit: Unit) -> bool:
        return unit.end is None or unit.end >= self._num_parts

    def _count(self, piece: _Piece) -> int:
        return len(piece.texts)

    def _rows(self, piece: _Piece, first_row: int) -> RowBatch:
        texts = piece.texts
        size, limit = columns.text_batch(texts).num_bytes, self._options.max_document_bytes
        batch = columns.rows_of(texts, first_row, size, limit=limit)
        return columns.chosen(batch, first_row, piece.verdicts)

    def _pieces(self, unit: Unit, digest: ColumnDigest) -> Iterator[_Piece]:
        held: list[_Piece] = []
        rows = size = 0
        try:
            for part in self._flat_arrays(unit):
                held.append(part)
                rows += len(part.texts)
                size += columns.text_batch(part.texts).num_bytes
                # A reader gives few rows at a time where it does not know how long they are.
                if 2 * size >= self._options.batch_bytes or 2 * rows >= base.LARGEST_BATCH_ROWS:
                    del part
                    yield _joined(held, digest)
                    self._let_go()
                    rows = size = 0
            if held:
                yield _joined(held, digest)
        except (*columns.UNREADABLE, StopIteration) as error:
            raise columns.damaged(self._file.path, error) from error

    def _flat_arrays(self, unit: Unit) -> Iterator[_Piece]:
        """The text in arrays of about `batch_bytes`; most come as one."""
        most = self._options.batch_bytes
        for batch in self._batches(unit):
            fields = self._options.fields
            found, at = self._verdicts(batch), 0
            array = (columns.json_rows if fields else columns.column_at)(batch, self._columns)
            for part in _undecoded(array, most):
                whole = columns.flat(part)
                texts = columns.text_batch(whole)
                ranges: Iterable[tuple[int, int]] = [(0, len(whole))]
                if texts.num_bytes > 2 * most:
                    ranges = cut_ranges(texts.offsets, most)
                for low, high in ranges:
                    verdicts = None if found is None else found[at + low : at + high]
                    yield _Piece(whole.slice(low, high - low), verdicts)
                at += len(whole)

    def _verdicts(self, batch: Any) -> NDArray[np.int8] | None:
        condition = self._options.where
        if condition is None:
            return None
        arrays = {name: columns.column_at(batch, path) for name, path in self._where.items()}
        return columns.verdicts(condition, arrays, batch.num_rows)


def _undecoded(array: Any, most_bytes: int) -> Iterator[Any]:
    """The array, in slices of about `most_bytes` of text where each value is there once."""
    if not pa.types.is_dictionary(array.type):
        yield array
        return
    lengths = pc.binary_length(columns.flat(array.dictionary)).take(array.indices).fill_null(0)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
    for low, high in cut_ranges(offsets, most_bytes):
        yield array.slice(low, high - low)


def _joined(pieces: list[_Piece], digest: ColumnDigest) -> _Piece:
    """The pieces as one, digested, and the list without them."""
    piece = pieces[0]
    if len(pieces) > 1:
        verdicts = [each.verdicts for each in pieces if each.verdicts is not None]
        texts = pa.concat_arrays([each.texts for each in pieces])
        piece = _Piece(texts, np.concatenate(verdicts) if verdicts else None)
    pieces.clear()
    digest.update(*piece)
    return piece


def open_native(path: str) -> Any:
    """Open an uncompressed file for Arrow's own readers."""
    found = files_module.open_binary(path)
    if files_module.is_remote(path):
        return pa.PythonFile(found, mode="r")
    found.close()  # it is a file: Arrow would wait for a pipe
    try:
        return pa.OSFile(path)
    except OSError as error:
        raise files_module.unreadable(path, error) from error


class ParquetSource(ColumnSource):
    """An open Parquet file."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        super().__init__(file, options)
        self._parquet = _open(file.location)
        self._columns, self._paths, self._sizes, self._where = _facts(self._parquet, file, options)
        self._num_parts = len(self._sizes)

    @staticmethod
    def plan(file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        """Runs of row groups whose text is about `unit_bytes` in all."""
        with _open(file.location) as parquet:
            *_, sizes, _ = _facts(parquet, file, options)
        target = base.unit_bytes_for(sum(sizes), options)
        start = held = index = 0
        for group, size in enumerate(sizes):
            held += size
            if held >= target or group == len(sizes) - 1:
                yield Unit(file=file, index=index, start=start, end=group + 1, text_bytes=held)
                start, held, index = group + 1, 0, index + 1
        if not sizes:
            yield Unit(file=file, end=0)

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit, as the footer says."""
        return sum(self._parquet.metadata.row_group(i).num_rows for i in self._groups(unit))

    def close(self) -> None:
        self._parquet.close()

    def _batches(self, unit: Unit) -> Iterator[Any]:
        # One row group at a time: the length of rows may differ much between them.
        for group in self._groups(unit):
            rows = self._parquet.metadata.row_group(group).num_rows
            size = self._rows_at_once(group)
            for batch in self._parquet.iter_batches(
                size, row_groups=[group], columns=list(self._paths), use_threads=False
            ):
                rows -= batch.num_rows
                yield batch
            if rows:
                raise pa.ArrowInvalid(f"row group {group} lacks {rows:,} of the rows in its footer")

    def _rows_at_once(self, group: int) -> int:
        """Rows whose decoded text is bounded, as the headers of the pages say."""
        metadata, room = self._parquet.metadata.row_group(group), self._options.room_bytes
        rows, target = max(1, metadata.num_rows), self._options.batch_bytes // 2
        most = min(max(1, target * rows // max(1, self._sizes[group])), base.LARGEST_BATCH_ROWS)
        for index in columns_below(self._parquet.metadata, self._paths):
            chunk = metadata.column(index)
            is_small = 3 * chunk.total_uncompressed_size <= room
            # A value of a dictionary may stand in every row.
            most_bytes = 2 * chunk.total_uncompressed_size * chunk.num_values
            if is_small and (not chunk.has_dictionary_page or most_bytes <= min(room, target)):
                continue
            values = -(-chunk.num_values // rows)
            with files_module.open_binary(self._file.location) as file:
                for page in pages(file, chunk):
                    what = f"a page of {format_size(page.size)} in column {chunk.path_in_schema!r}"
                    needs = page.compressed + 2 * page.size
                    check_room(needs, what, path=self._file.path, room=room)
                    if page.is_dictionary:
                        most = min(most, room // max(1, 2 * page.size * values))
                    else:
                        most = min(most, target * page.num_values // max(1, page.size * values))
                    if is_small:
                        break
        return max(1, int(most))

    def _groups(self, unit: Unit) -> range:
        return range(unit.start, self._num_parts if unit.end is None else unit.end)


def _open(path: str) -> Any:
    source = open_native(path)
    try:
        # A buffer makes the reader go page by page instead of holding a whole column chunk.
        return pq.ParquetFile(
            source, pre_buffer=False, buffer_size=MEGABYTE, page_checksum_verification=True
        )
    except columns.UNREADABLE as error:
        source.close()
        raise columns.damaged(path, error) from error


def _facts(
    parquet: Any, file: SourceFile, options: SourceOptions
) -> tuple[tuple[str, ...], tuple[str, ...], list[int], dict[str, tuple[str, ...]]]:
    """What `find_columns` says, the paths of all columns to read, the bytes of the first in each
    row group, and what leads to the columns of the condition."""
    try:
        names = columns.find_columns(parquet.schema_arrow, options, path=file.path)
        paths = names if options.fields else (".".join(names),)
        of_where = columns.where_columns(parquet.schema_arrow, options.where, path=file.path)
        more = (".".join(path) for path in of_where.values())
        every = tuple(dict.fromkeys((*paths, *more)))
        check_chunks(parquet.metadata, every, size=file.size)
        return names, every, _text_sizes(parquet.metadata, paths), of_where
    except columns.UNREADABLE as error:
        raise columns.damaged(file.path, error) from error


class _SizeAlone(io.RawIOBase):
    """A file of which nothing can be had but its size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.was_read = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._size if whence else offset

    def tell(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:  # noqa: ARG002
        # No error from here: Arrow would keep it, with all that the frames of its traceback hold.
        self.was_read = True
        return b""


def check_chunks(metadata: Any, columns: tuple[str, ...], *, size: int) -> None:
    """Refuse a footer with a bad entry for a column: a plain look at one ends the process.

    Arrow's readers go through all entries and raise an error before they read the first byte.
    """
    file = _SizeAlone(size)
    try:
        # Of one row group they do so in this thread too, which takes a small part of the time.
        many = metadata.num_row_groups > 1
        probe = pq.ParquetFile(pa.PythonFile(file, mode="r"), metadata=metadata, pre_buffer=many)
        next(probe.iter_batches(1, columns=list(columns), use_threads=False), None)
    except (pa.ArrowException, OSError):
        if not file.was_read:
            raise


def _text_sizes(metadata: Any, columns: tuple[str, ...]) -> list[int]:
    """Uncompressed bytes of the columns in each row group, those below them counted."""
    wanted = columns_below(metadata, columns)
    sizes = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        chunks = [group.column(i) for i in wanted]
        for i, chunk in zip(wanted, chunks, strict=True):
            # What comes after the rows that the footer counts would be passed over.
            is_flat = metadata.schema.column(i).max_repetition_level == 0
            if is_flat and chunk.num_values != group.num_rows:
                raise pa.ArrowInvalid(
                    f"row group {index} has {chunk.num_values:,} values of "
                    f"{chunk.path_in_schema!r} and {group.num_rows:,} rows"
                )
        sizes.append(sum(chunk.total_uncompressed_size for chunk in chunks))
    return sizes


def columns_below(metadata: Any, columns: tuple[str, ...]) -> list[int]:
    """Numbers of the columns, those below them counted."""
    below = tuple(f"{column}." for column in columns)
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    wanted = [i for i, name in enumerate(names) if name in columns or name.startswith(below)]
    assert wanted, f"{columns} are in the schema but not among the columns"
    return wanted


class _Page(NamedTuple):
    compressed: int
    size: int
    num_values: int
    is_dictionary: bool


def pages(file: Any, chunk: Any) -> Iterator[_Page]:
    """The pages of a column chunk by their headers; ends where one is not understood.

    Arrow reads the headers too and says what is wrong with them, but first it takes the memory.
    """
    start = chunk.data_page_offset
    if chunk.has_dictionary_page:
        start = min(start, chunk.dictionary_page_offset)
    end = start + chunk.total_compressed_size
    while start < end:
        size = _HEADER_BYTES
        while True:
            file.seek(start)
            data = file.read(size)
            try:
                header, used = _thrift(data, 0)
                break
            except IndexError:
                if len(data) < size or size > MEGABYTE:
                    return
                size *= 16
            except (KeyError, RecursionError):
                return
        kinds = [header.get(number) for number in (5, 7, 8)]
        about = next((kind for kind in kinds if isinstance(kind, dict)), {})
        found = [header.get(3), header.get(2), about.get(1, 0)]
        compressed, whole, num_values = (each if type(each) is int else -1 for each in found)
        if min(compressed, whole, num_values) < 0:
            return
        yield _Page(compressed, whole, num_values, is_dictionary=type(header.get(7)) is dict)
        start += used + compressed


def _thrift(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol and where it ends; IndexError if it goes on."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at, kind = at + 1, head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _varint(data, at)
            number = number >> 1
        if kind == _STRUCT:
            fields[number], at = _thrift(data, at)
        elif kind == _BINARY:
            size, at = _varint(data, at)
            at += size
        elif kind in _INTEGERS:
            value, at = _varint(data, at)
            fields[number] = (value >> 1) ^ -(value & 1)
        else:
            at += _FIXED[kind]
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


_HEADER_BYTES = 512
_INTEGERS, _BINARY, _STRUCT = (4, 5, 6), 8, 12
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}


# -------------------------------------------------------------------------------------------------
# Arrow IPC files and streams, Feather, and the files of Hugging Face `save_to_disk` (streams).
#
# Units are runs of record batches. A file has a table of its batches; a stream has none, so
# planning walks over the heads of its messages once and leaves the data itself alone. The heads
# also tell what memory a batch will take.

_FILE_MAGIC = b"ARROW1"
_OLD_FEATHER_MAGIC = b"FEA1"


class ArrowSource(ColumnSource):
    """An open Arrow file or stream; a stream is read on, or from the front again."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        super().__init__(file, options)
        self._native, self._map = _map_or_open(file.location)
        try:
            self._is_file = _is_file_format(self._native, file.path)
            self._restart()
            schema = self._reader.schema
            self._columns = columns.find_columns(schema, options, path=file.path)
            self._where = columns.where_columns(schema, options.where, path=file.path)
            self._num_parts = self._reader.num_record_batches if self._is_file else len(self._needs)
        except columns.UNREADABLE as error:
            raise columns.damaged(file.path, error) from error

    @staticmethod
    def plan(file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        """Runs of equally many record batches, about `unit_bytes` each."""
        with closing(ArrowSource(file, options)) as source:
            count = source._num_parts
        target = base.unit_bytes_for(base.text_size(file), options)
        step = max(1, count * target // max(1, file.size))
        for index, start in enumerate(range(0, max(1, count), step)):
            yield Unit(file=file, index=index, start=start, end=min(start + step, count))

    def close(self) -> None:
        self._native.close()

    @lazy
    def _needs(self) -> list[int]:
        return batch_bytes(self._file.location, is_mapped=self._map is not None)

    def _let_go(self) -> None:
        if self._map is not None and sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED)

    def _restart(self) -> None:
        self._native.seek(0)
        ipc = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        self._reader = ipc(self._native)
        self._next = 0

    def _batches(self, unit: Unit) -> Iterator[Any]:
        if not self._is_file and unit.start < self._next:
            self._restart()
        index = unit.start if self._is_file else self._next
        while index < (self._num_parts if unit.end is None else unit.end):
            if index < len(self._needs):
                needs = self._needs[index]
                what = f"a record batch (number {index}) of {format_size(needs)}"
                check_room(needs, what, path=self._file.path, room=self._options.room_bytes)
            if self._is_file:
                batch = self._reader.get_batch(index)
            else:
                batch = self._reader.read_next_batch()
                self._next += 1
            index += 1
            if index > unit.start:
                yield batch


def _is_file_format(native: Any, path: str) -> bool:
    native.seek(0)
    magic = native.read(8)
    native.seek(0)
    if magic.startswith(_OLD_FEATHER_MAGIC):
        raise SourceError(
            f"{path!r} is a Feather V1 file, which is no longer read",
            hint="write it again with: pyarrow.feather.write_feather(table, path)",
        )
    return bool(magic.startswith(_FILE_MAGIC))


_CONTINUES = 0xFFFFFFFF
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


def _map_or_open(path: str) -> tuple[Any, mmap.mmap | None]:
    """The file for Arrow's readers; mapped where that can be, since a batch may be of any size."""
    native = open_native(path)
    if files_module.is_remote(path) or not native.size():
        return native, None
    native.close()
    with files_module.open_binary(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.BufferReader(pa.py_buffer(mapped)), mapped


def batch_bytes(path: str, *, is_mapped: bool) -> list[int]:
    """Memory that each record batch takes, with the dictionaries in front of it."""
    with files_module.open_binary(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        at = 8 if file.read(6) == _FILE_MAGIC else 0
        needs: list[int] = []
        dictionaries = 0
        try:
            while at + 4 <= size:
                file.seek(at)
                (length,) = struct.unpack("<I", file.read(4))
                if length == _CONTINUES:
                    (length,) = struct.unpack("<I", file.read(4))
                    at += 4
                if not length:
                    break
                if at + 4 + length > size:
                    raise pa.ArrowInvalid(f"a message of {length:,} bytes goes beyond the end")
                kind, body, buffers = _head(file.read(length))
                at += 4 + length
                if not 0 <= body <= size - at:
                    raise pa.ArrowInvalid(f"a message body of {body:,} bytes goes beyond the end")
                held = 0 if is_mapped else body
                for offset in buffers:
                    file.seek(at + offset)
                    held += max(0, struct.unpack("<q", file.read(8))[0])
                if kind == _DICTIONARY_BATCH:
                    dictionaries += held
                elif kind == _RECORD_BATCH:
                    needs.append(dictionaries + held)
                at += body
        except (struct.error, IndexError) as error:
            raise pa.ArrowInvalid(f"a message has no valid head: {error}") from error
    return needs


def _member(data: bytes, table: int, number: int, form: str = "<I") -> int:
    """A number in a flatbuffer's table or, in the form of an offset, where a child is; else 0."""
    members = table - int(struct.unpack_from("<i", data, table)[0])
    if not table or 4 + 2 * number >= struct.unpack_from("<H", data, members)[0]:
        return 0
    place = int(struct.unpack_from("<H", data, members + 4 + 2 * number)[0])
    if not place:
        return 0
    value = int(struct.unpack_from(form, data, table + place)[0])
    return table + place + value if form == "<I" else value


def _head(data: bytes) -> tuple[int, int, list[int]]:
    """Kind and body bytes of a message, and where in the body compressed buffers begin.

    A compressed buffer begins with its size once it is decompressed.
    """
    message = int(struct.unpack_from("<I", data)[0])
    kind, body = _member(data, message, 1, "<B"), _member(data, message, 3, "<q")
    batch = _member(data, message, 2)
    if kind == _DICTIONARY_BATCH:
        batch = _member(data, batch, 1)
    is_batch = kind in (_DICTIONARY_BATCH, _RECORD_BATCH)
    buffers = _member(data, batch, 2) if is_batch and _member(data, batch, 3) else 0
    if not buffers:
        return kind, body, []
    (count,) = struct.unpack_from("<I", data, buffers)
    entries = (struct.unpack_from("<qq", data, buffers + 4 + 16 * i) for i in range(count))
    return kind, body, [offset for offset, length in entries if length >= 8 and offset >= 0]
