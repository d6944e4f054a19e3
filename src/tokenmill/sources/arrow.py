"""Arrow IPC files and streams, Feather, and the files of Hugging Face `save_to_disk` (streams).

Units are runs of record batches. A file has a table of its batches; a stream has none, so planning
walks over the heads of its messages once and leaves the data itself alone. The heads also tell what
memory a batch will take.
"""

from __future__ import annotations

import mmap
import struct
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tokenmill import paths
from tokenmill.config import format_size
from tokenmill.errors import SourceError
from tokenmill.sources.base import Unit, check_room
from tokenmill.sources.column_source import UNREADABLE, ColumnSource, damaged
from tokenmill.sources.columns import column_at, field_path
from tokenmill.sources.compression import open_native
from tokenmill.sources.row_json import columns_for, json_rows
from tokenmill.sources.units import unit_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.sources.base import Source, SourceFile, SourceOptions

_FILE_MAGIC = b"ARROW1"
_OLD_FEATHER_MAGIC = b"FEA1"


class ArrowFormat:
    """Arrow IPC files and streams."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:  # noqa: ARG002
        return False

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        """Runs of equally many record batches, about `unit_bytes` each."""
        try:
            schema, count = _facts(file.location)
            _check_columns(schema, options, path=file.path)
        except UNREADABLE as error:
            raise damaged(file.path, error) from error
        step = max(1, count * unit_bytes_of(file, options) // max(1, file.size))
        for index, start in enumerate(range(0, max(1, count), step)):
            yield Unit(file=file, index=index, start=start, end=min(start + step, count))

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        return ArrowSource(file, options)


class ArrowSource(ColumnSource):
    """An open Arrow file or stream; a stream is read on, or from the front again."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        super().__init__(file, options)
        self._native, self._map = _map_or_open(file.location)
        try:
            self._is_file = _is_file_format(self._native, file.path)
            self._restart()
            self._columns = _check_columns(self._reader.schema, options, path=file.path)
            self._needs = _batch_bytes(file.location, is_mapped=self._map is not None)
            self._count = self._reader.num_record_batches if self._is_file else len(self._needs)
        except UNREADABLE as error:
            raise damaged(file.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._native.close()

    def _let_go(self) -> None:
        if self._map is not None and sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED)

    def _restart(self) -> None:
        self._native.seek(0)
        ipc = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        self._reader = ipc(self._native)
        self._next = 0

    def _arrays(self, unit: Unit) -> Iterator[Any]:
        if not self._is_file and unit.start < self._next:
            self._restart()
        index = unit.start if self._is_file else self._next
        while index < (self._count if unit.end is None else unit.end):
            batch = self._batch(index)
            index += 1
            if index > unit.start:
                if self._options.fields:
                    yield json_rows(batch, self._columns)
                else:
                    yield column_at(batch, self._columns)

    def _batch(self, index: int) -> Any:
        if index < len(self._needs):
            needs = self._needs[index]
            check_room(
                needs,
                f"a record batch (number {index}) of {format_size(needs)}",
                path=self._file.path,
                room=self._options.room_bytes,
            )
        if self._is_file:
            return self._reader.get_batch(index)
        self._next += 1
        return self._reader.read_next_batch()

    def _is_last(self, unit: Unit) -> bool:
        return unit.end is None or unit.end >= self._count


def _check_columns(schema: Any, options: SourceOptions, *, path: str) -> tuple[str, ...]:
    """Names of the columns of all fields, or those that lead to the one of the text."""
    if options.fields:
        return columns_for(schema.names, options, path=path)
    return field_path(schema, options.text_field, path=path)


def _facts(path: str) -> tuple[Any, int]:
    """Schema and number of record batches."""
    native = open_native(path)
    with native:
        if _is_file_format(native, path):
            reader = pa.ipc.open_file(native)
            return reader.schema, reader.num_record_batches
    with open_native(path) as native:
        schema = pa.ipc.open_stream(native).schema
    return schema, len(_batch_bytes(path))


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
    if paths.is_remote(path) or not native.size():
        return native, None
    native.close()
    with paths.open_binary(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.BufferReader(pa.py_buffer(mapped)), mapped


def _batch_bytes(path: str, *, is_mapped: bool = False) -> list[int]:
    """Memory that each record batch takes, with the dictionaries in front of it."""
    with paths.open_binary(path) as file:
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


class _Table:
    """A table of a flatbuffer, of which only a few members are looked at."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def place(self, number: int) -> int | None:
        """Where a member stands, if it is there."""
        (back,) = struct.unpack_from("<i", self.data, self.at)
        (size,) = struct.unpack_from("<H", self.data, self.at - back)
        if 4 + 2 * number >= size:
            return None
        (offset,) = struct.unpack_from("<H", self.data, self.at - back + 4 + 2 * number)
        return self.at + offset if offset else None

    def number(self, number: int, form: str) -> int:
        place = self.place(number)
        return 0 if place is None else int(struct.unpack_from(form, self.data, place)[0])

    def child(self, number: int) -> _Table | None:
        place = self.place(number)
        if place is None:
            return None
        return _Table(self.data, place + struct.unpack_from("<I", self.data, place)[0])


def _head(data: bytes) -> tuple[int, int, list[int]]:
    """Kind and body bytes of a message, and where in the body compressed buffers begin.

    A compressed buffer begins with its size once it is decompressed.
    """
    message = _Table(data, struct.unpack_from("<I", data)[0])
    kind, body = message.number(1, "<B"), message.number(3, "<q")
    batch = message.child(2)
    if kind == _DICTIONARY_BATCH and batch is not None:
        batch = batch.child(1)
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH) or batch is None or batch.child(3) is None:
        return kind, body, []
    buffers = batch.child(2)
    if buffers is None:
        return kind, body, []
    (count,) = struct.unpack_from("<I", data, buffers.at)
    entries = (struct.unpack_from("<qq", data, buffers.at + 4 + 16 * i) for i in range(count))
    return kind, body, [offset for offset, length in entries if length >= 8 and offset >= 0]
