"""Parquet: units are runs of row groups, and only the columns that are needed are read.

Planning reads the footer, so a missing column or one of another type is found before the build
starts.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.sources.base import LARGEST_BATCH_ROWS, MEGABYTE, Unit
from tokenmill.sources.column_source import UNREADABLE, ColumnSource, damaged
from tokenmill.sources.columns import column_at, field_path
from tokenmill.sources.compression import open_native
from tokenmill.sources.row_json import columns_for, json_rows
from tokenmill.sources.units import unit_bytes_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.sources.base import Source, SourceFile, SourceOptions


class ParquetFormat:
    """Parquet files."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:  # noqa: ARG002
        return False

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        """Runs of row groups whose text is about `unit_bytes` in all."""
        with _open(file.location) as parquet:
            _, sizes = _facts(parquet, file, options)
        target = options.unit_bytes or unit_bytes_for(sum(sizes))
        start = held = index = 0
        for group, size in enumerate(sizes):
            held += size
            if held >= target or group == len(sizes) - 1:
                yield Unit(file=file, index=index, start=start, end=group + 1)
                start, held, index = group + 1, 0, index + 1
        if not sizes:
            yield Unit(file=file, index=0, start=0, end=0)

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        return ParquetSource(file, options)


class ParquetSource(ColumnSource):
    """An open Parquet file."""

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        super().__init__(file, options)
        self._parquet = _open(file.location)
        self._names, self._sizes = _facts(self._parquet, file, options)
        self._columns = self._names if options.fields else (".".join(self._names),)

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit, as the footer says."""
        return sum(self._parquet.metadata.row_group(i).num_rows for i in self._groups(unit))

    def close(self) -> None:
        """Close the file."""
        self._parquet.close()

    def _arrays(self, unit: Unit) -> Iterator[Any]:
        # One row group at a time: the length of rows may differ much between them.
        for group in self._groups(unit):
            rows = self._parquet.metadata.row_group(group).num_rows
            mean = max(1, self._sizes[group] // max(1, rows))
            # Half of what is asked for: the size in the footer may be that of a dictionary.
            size = min(max(1, self._options.batch_bytes // (2 * mean)), LARGEST_BATCH_ROWS)
            batches = self._parquet.iter_batches(
                size, row_groups=[group], columns=list(self._columns), use_threads=False
            )
            for batch in batches:
                rows -= batch.num_rows
                if self._options.fields:
                    yield json_rows(batch, self._columns)
                else:
                    yield column_at(batch, self._names)
            if rows:
                raise pa.ArrowInvalid(f"row group {group} lacks {rows:,} of the rows in its footer")

    def _is_last(self, unit: Unit) -> bool:
        return unit.end is None or unit.end >= len(self._sizes)

    def _groups(self, unit: Unit) -> range:
        return range(unit.start, len(self._sizes) if unit.end is None else unit.end)


def _open(path: str) -> Any:
    source = open_native(path)
    try:
        # A buffer makes the reader go page by page instead of holding a whole column chunk.
        return pq.ParquetFile(
            source, pre_buffer=False, buffer_size=MEGABYTE, page_checksum_verification=True
        )
    except UNREADABLE as error:
        source.close()
        raise damaged(path, error) from error


def _facts(
    parquet: Any, file: SourceFile, options: SourceOptions
) -> tuple[tuple[str, ...], list[int]]:
    """Names of the columns of all fields, or those that lead to the text; and bytes per group."""
    try:
        schema = parquet.schema_arrow
        if options.fields:
            names = columns = columns_for(schema.names, options, path=file.path)
        else:
            names = field_path(schema, options.text_field, path=file.path)
            columns = (".".join(names),)
        _check_chunks(parquet.metadata, columns, size=file.size)
        return names, _text_sizes(parquet.metadata, columns)
    except UNREADABLE as error:
        raise damaged(file.path, error) from error


class _SizeAlone(io.RawIOBase):
    """A file of which nothing can be had but its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._size if whence else offset

    def tell(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        raise EOFError(size)


def _check_chunks(metadata: Any, columns: tuple[str, ...], *, size: int) -> None:
    """Refuse a footer with a bad entry for a column: a plain look at one ends the process.

    Arrow's readers go through all entries and raise an error before they read the first byte.
    """
    source = pa.PythonFile(_SizeAlone(size), mode="r")
    with contextlib.suppress(EOFError):
        probe = pq.ParquetFile(source, metadata=metadata, pre_buffer=True)
        next(probe.iter_batches(1, columns=list(columns)), None)


def _text_sizes(metadata: Any, columns: tuple[str, ...]) -> list[int]:
    """Uncompressed bytes of the columns in each row group, those below them counted."""
    below = tuple(f"{column}." for column in columns)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    wanted = [i for i, name in enumerate(paths) if name in columns or name.startswith(below)]
    assert wanted, f"{columns} are in the schema but not among the columns"
    sizes = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        chunks = [group.column(i) for i in wanted]
        for i, chunk in zip(wanted, chunks, strict=True):
            # What lies behind the rows that the footer counts would be passed over.
            is_flat = metadata.schema.column(i).max_repetition_level == 0
            if is_flat and chunk.num_values != group.num_rows:
                raise pa.ArrowInvalid(
                    f"row group {index} has {chunk.num_values:,} values of {paths[i]!r} and "
                    f"{group.num_rows:,} rows"
                )
        sizes.append(sum(chunk.total_uncompressed_size for chunk in chunks))
    return sizes
