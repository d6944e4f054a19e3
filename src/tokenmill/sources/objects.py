"""Rows that a Python program has: tables, datasets, iterables of dicts or texts.

    found = rows_in(inputs)                  None where the inputs are files
    found.write(folder, ...) -> Discovery    one file for each name, in the store's own folder

What is read more than once, cut into units and shared by processes has to be a file, so rows are
written into one first: tables as an Arrow stream of the columns that are needed, all else as JSON
Lines. From there on they are an input like any other. The file goes when the build ends; its name
in the store (`python:train.arrow`) is no file's, and its version follows from its content. So the
same rows given again are recognised, however the objects came to be.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tokenmill import files
from tokenmill.errors import SourceError, UsageError
from tokenmill.sources import base, discovery
from tokenmill.sources.base import SourceFile, SourceOptions
from tokenmill.sources.discovery import Discovery

# How the names of such rows begin, as a store has them.
OF_PYTHON = "python:"
# What the rows of an object without a name are called.
ROWS = "rows"
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1 << 14
_DATASET_ROWS = 1000  # that `datasets` gives at once
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """Objects with rows, by name."""

    named: Mapping[str, Any]

    @property
    def are_used_up(self) -> bool:
        """Whether some of them can be read only once."""
        return any(isinstance(each, Iterator) or _is_reader(each) for each in self.named.values())

    def write(self, folder: Path, options: SourceOptions, *, limit: int | None) -> Discovery:
        """Write them all into files; the rows beyond a limit are left where they are."""
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for number, name in enumerate(sorted(self.named)):
            rows = self.named[name]
            path = folder / str(number)
            is_table = _is_table(rows) or _is_dataset(rows)
            with closing(_File(path)) as file:
                if is_table:
                    _write_table(rows, file, options, limit=limit)
                else:
                    _write_lines(rows, file, options, limit=limit)
            found.append(_source(file, f"{OF_PYTHON}{name}", is_table=is_table))
        if not any(file.size for file in found):
            raise SourceError(
                "there is not one row in what was given",
                hint="an iterator can be read once: make it anew for each build",
            )
        least = base.least_unit_bytes(sum(map(base.text_size, found)))
        splits = {
            file.path: split
            for file in found
            if (split := discovery.split_told([file.path.removeprefix(OF_PYTHON)]))
        }
        every = Discovery(files=tuple(found), skipped=(), least_unit_bytes=least, splits=splits)
        return every.grouped(options)


def rows_in(inputs: Any) -> Rows | None:
    """The rows that are given instead of the names of files; None where files are named."""
    if isinstance(inputs, str | os.PathLike):
        return None
    if _is_table(inputs) or _is_dataset(inputs):
        return Rows({ROWS: inputs})
    if isinstance(inputs, Mapping):
        return Rows(_named(inputs))
    if isinstance(inputs, list | tuple):
        is_named = all(isinstance(each, str | os.PathLike) for each in inputs)
        return None if is_named else Rows({ROWS: _checked(inputs)})
    if not isinstance(inputs, Iterable):
        raise UsageError(
            f"the input is {_kind(inputs)}, which has no rows",
            hint="name files, or give a table, a dataset, or an iterable of dicts or texts",
        )
    return Rows({ROWS: _checked(inputs)})


def _named(given: Mapping[Any, Any]) -> dict[str, Any]:
    """A mapping of names (of splits, mostly) to objects."""
    found = {}
    for name, rows in given.items():
        is_text = isinstance(rows, str | bytes | os.PathLike | Mapping)
        if is_text or not (_is_table(rows) or isinstance(rows, Iterable)):
            raise UsageError(
                f"a mapping names tables or iterables of rows, and {str(name)!r} is {_kind(rows)}",
                hint="give one row as a list of it: [{'text': ...}]",
            )
        if "/" in str(name) or not str(name).strip("."):
            raise UsageError(f"{name!r} is no name for rows", hint="name them as splits: train")
        found[str(name)] = rows if _is_table(rows) or _is_dataset(rows) else _checked(rows)
    return found


def _checked(rows: Iterable[Any]) -> Iterable[Any]:
    """The rows, once the first of them is known to be a text or a dict and not a file's name."""
    is_once = isinstance(rows, Iterator)
    first = list(itertools.islice(rows, 1))
    for each in first:
        is_path = isinstance(each, os.PathLike) or (isinstance(each, str) and _is_file(each))
        if is_path:
            raise UsageError(
                f"the first row is the name of a file, {str(each)!r}, and would be tokenized as "
                "a text",
                hint="give the names of files as a list: build(list(names), ...)",
            )
        if not isinstance(each, str | Mapping):
            raise UsageError(
                f"the first row is {_kind(each)}; rows are dicts or texts",
                hint="give dicts: ({'text': each} for each in rows)",
            )
    return _again(first, rows) if is_once else rows


def _again(first: list[Any], rest: Iterable[Any]) -> Iterator[Any]:
    yield from first
    yield from rest


def _is_file(text: str) -> bool:
    try:
        return len(text) < 4096 and Path(text).exists()
    except (OSError, ValueError):
        return False


def _kind(value: object) -> str:
    kind = type(value)
    is_own = kind.__module__ == "builtins"
    return kind.__qualname__ if is_own else f"{kind.__module__}.{kind.__qualname__}"


def _is_table(rows: object) -> bool:
    """Whether it gives Arrow data: tables of pyarrow, pandas, polars, duckdb and others."""
    return hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")


def _is_reader(rows: object) -> bool:
    return _is_table(rows) and hasattr(rows, "read_next_batch")


def _is_dataset(rows: object) -> bool:
    """Whether it is a `datasets.Dataset`, which holds rows in Arrow tables."""
    is_theirs = type(rows).__module__.partition(".")[0] == "datasets"
    is_theirs = is_theirs and not isinstance(rows, Mapping)  # of the splits of one
    return is_theirs and hasattr(rows, "with_format") and hasattr(rows, "num_rows")


# -------------------------------------------------------------------------------------------------
# Files that rows are written into. Their digest is the version that a store keeps of them.


class _File:
    """A file that is written, digested as it grows."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file, self.digest = path.open("wb", buffering=_BUFFER_BYTES), xxhash.xxh3_128()
        self.path = path

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def writable(self) -> bool:
        return True

    def flush(self) -> None: ...

    def close(self) -> None:
        self._file.close()


def _source(file: _File, name: str, *, is_table: bool) -> SourceFile:
    facts = files.stat(str(file.path))
    return SourceFile(
        path=f"{name}.{'arrow' if is_table else 'jsonl'}",
        address=str(file.path),
        format="arrow" if is_table else "jsonl",
        compression=None,
        size=facts.size,
        version=file.digest.hexdigest(),
        as_found=facts.version,
    )


def _write_lines(
    rows: Iterable[Any], file: _File, options: SourceOptions, *, limit: int | None
) -> None:
    """Rows as JSON Lines: a text is a row of its own field; what is neither is rejected later."""
    for number, row in enumerate(itertools.islice(rows, limit)):
        whole = {options.text_field: row} if isinstance(row, str) else row
        try:
            line = json.dumps(dict(whole) if isinstance(whole, Mapping) else whole, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise SourceError(
                f"row {number:,} cannot be written as JSON: {error}",
                hint="give rows of texts, numbers, lists and dicts, with the fields that are "
                "needed alone",
            ) from error
        file.write(line.encode() + b"\n")


def _plain(value: Any) -> Any:
    """A value of numpy, a time or bytes as JSON has it."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        raise TypeError(f"{_kind(value)} has no order")
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    raise TypeError(f"it has {_kind(value)}")


def _write_table(rows: Any, file: _File, options: SourceOptions, *, limit: int | None) -> None:
    """The columns that are needed as an Arrow stream of batches of a few megabytes."""
    import pyarrow as pa

    writer: Any = None
    left = limit
    schema, batches = _batches(rows, options)
    try:
        writer = pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema)
        for batch in batches:
            for part in _parts(batch if left is None else batch.slice(0, left)):
                writer.write_batch(part)
            if left is not None and (left := left - batch.num_rows) <= 0:
                break
    finally:
        if writer is not None:
            writer.close()


def _parts(batch: Any) -> Iterator[Any]:
    if not batch.num_rows:
        return
    step = max(1, min(_BATCH_ROWS, batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes)))
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)


def _batches(rows: Any, options: SourceOptions) -> tuple[Any, Iterator[Any]]:
    """The schema of the columns that are needed, and their record batches."""
    import pyarrow as pa

    if _is_dataset(rows):
        columns = _needed(rows.column_names, options)
        chosen = rows.select_columns(columns).with_format("arrow")
        tables = chosen.iter(batch_size=_DATASET_ROWS)
        schema = _plain_schema(chosen.features.arrow_schema)
        return schema, (_cast(each, schema) for table in tables for each in table.to_batches())
    try:
        reader = _reader(rows, options)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"{_kind(rows)} gives no table with columns: {reason}",
            hint="give a table whose columns have one type each, or its rows as dicts",
        ) from error
    columns = _needed(reader.schema.names, options)
    schema = _plain_schema(pa.schema([reader.schema.field(each) for each in columns]))
    return schema, (_cast(batch.select(columns), schema) for batch in reader)


def _reader(rows: Any, options: SourceOptions) -> Any:
    """The batches of a table; a column alone is that of the text."""
    import pyarrow as pa

    if not hasattr(rows, "__arrow_c_stream__"):
        array = pa.array(rows)
        if pa.types.is_struct(array.type):
            batch = pa.RecordBatch.from_struct_array(array)
            return pa.Table.from_batches([batch]).to_reader()
        return pa.table({options.text_field: array}).to_reader()
    try:
        return pa.RecordBatchReader.from_stream(rows)
    except pa.ArrowInvalid:
        return pa.table({options.text_field: pa.chunked_array(rows)}).to_reader()


def _needed(names: list[str], options: SourceOptions) -> list[str]:
    """Of the columns those that are read; all, where none of them is there to be named."""
    wanted = [*(options.fields or (options.text_field,))]
    wanted += [] if options.where is None else options.where.columns
    every = {each for name in wanted for each in (name, name.split(".")[0])}
    doubles = {name for name in names if names.count(name) > 1}
    if doubles & every:
        raise SourceError(
            f"there are several columns {min(doubles & every)!r}, and nothing says which is meant",
            hint="give each column a name of its own",
        )
    return [name for name in names if name in every] or [n for n in names if n not in doubles]


def _plain_schema(schema: Any) -> Any:
    """The schema without what programs add to it, and with each value where it stands."""
    import pyarrow as pa

    fields = []
    for each in schema:
        kind = each.type.value_type if pa.types.is_dictionary(each.type) else each.type
        # pyarrow takes no values from a dictionary of views, which polars gives.
        is_view = kind != each.type and pa.types.is_string_view(kind)
        fields.append(pa.field(each.name, pa.large_string() if is_view else kind))
    return pa.schema(fields)


def _cast(batch: Any, schema: Any) -> Any:
    import pyarrow as pa

    arrays = [
        array.dictionary.cast(kind).take(array.indices)
        if pa.types.is_dictionary(array.type)
        else array
        for array, kind in zip(batch.columns, schema.types, strict=True)
    ]
    return pa.record_batch(arrays, schema=schema)
