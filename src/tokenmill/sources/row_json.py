"""Rows of several fields as JSON: what is handed on where a row is more than one text.

A JSON line is its own. Rows of tables become one here. Where a table's nested value has a member
that the row never had, Arrow says null; such members are left out again, except for the two that
every message of a chat has.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tokenmill.errors import SourceError
from tokenmill.sources.columns import checked, refuse_doubles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenmill.sources.base import SourceOptions

_ALWAYS = frozenset(("role", "content"))


def columns_for(names: Sequence[str], options: SourceOptions, *, path: str) -> tuple[str, ...]:
    """Columns of a table that hold the fields; SourceError where they are not there."""
    found: list[str] = []
    missing: list[str] = []
    for field in options.fields:
        column = field if field in names else field.split(".")[0]
        (found if column in names else missing).append(column if column in names else field)
    if (missing and options.needs_all_fields) or not found:
        lacking = ", ".join(map(repr, missing))
        raise SourceError(
            f"{path!r} has no column {lacking}; its columns are: {', '.join(names)}",
            hint="name the columns that it has, in --template or with the options of the format",
        )
    refuse_doubles(found, names, path=path)
    return tuple(dict.fromkeys(found))


def json_rows(batch: Any, columns: Sequence[str]) -> Any:
    """One JSON object for each row of a record batch, as a flat array of text."""
    arrays = [batch.column(batch.schema.names.index(column)) for column in columns]
    for array in arrays:
        checked(array)
    try:
        rows = _written(zip(*(array.to_pylist() for array in arrays), strict=True), columns)
    except UnicodeDecodeError:
        rows = [_row(arrays, slot, columns) for slot in range(batch.num_rows)]
    return pa.array(rows, pa.large_binary())


def _written(rows: Iterable[tuple[Any, ...]], columns: Sequence[str]) -> list[str | bytes]:
    return [
        json.dumps(_filled(dict(zip(columns, row, strict=True))), default=_plain) for row in rows
    ]


def _row(arrays: Sequence[Any], slot: int, columns: Sequence[str]) -> str | bytes:
    """One row; bytes of it that are no UTF-8 stand for it, so that it is rejected for them."""
    try:
        return _written([tuple(array[slot].as_py() for array in arrays)], columns)[0]
    except UnicodeDecodeError as error:
        return bytes(error.object)


def _filled(value: Any) -> Any:
    """The value without members that are null."""
    if isinstance(value, dict):
        return {
            key: _filled(entry)
            for key, entry in value.items()
            if entry is not None or key in _ALWAYS
        }
    if isinstance(value, list):
        # A map's entries are pairs.
        return [_filled(entry) for entry in value]
    return value


def _plain(value: Any) -> str:
    # Bytes that are no UTF-8 become halves of characters, for which the row is rejected later.
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)
