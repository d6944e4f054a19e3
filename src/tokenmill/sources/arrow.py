"""Arrow IPC files and streams, Feather, and the files of Hugging Face `save_to_disk` (streams).

Units are runs of record batches. A file has a table of its batches; a stream has none, so planning
walks over its messages once, through a memory map that leaves the data itself alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tokenmill import paths
from tokenmill.errors import SourceError
from tokenmill.sources.base import Unit
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
        self._native = open_native(file.location)
        try:
            self._is_file = _is_file_format(self._native, file.path)
            self._restart()
            self._columns = _check_columns(self._reader.schema, options, path=file.path)
            self._count: int = _facts(file.location)[1]
        except UNREADABLE as error:
            raise damaged(file.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._native.close()

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
    with open_native(path) if paths.is_remote(path) else pa.memory_map(path) as native:
        reader = pa.ipc.open_stream(native)
        schema = reader.schema
        return schema, sum(1 for _ in reader)


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
