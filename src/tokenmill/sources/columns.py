"""An Arrow column of text as rows: views of its buffers, and rejects for rows without usable text.

All formats end here, with texts or with rows of several fields, which become JSON. A column that
calls itself a string need not be valid UTF-8
(neither the JSON reader nor Parquet files promise it), so it is checked, at several GB/s.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tokenmill import files as files_module
from tokenmill import where
from tokenmill.errors import SourceError
from tokenmill.files import RemoteError, shown
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.sources.base import SourceOptions
    from tokenmill.where import Condition, Test


class _Compute:
    """`pyarrow.compute` when it is first used: plain text needs none of it, and it makes a function
    for each of hundreds of kernels while it is imported."""

    def __getattr__(self, name: str) -> Any:
        import pyarrow.compute

        return getattr(pyarrow.compute, name)


pc: Any = _Compute()
_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def is_text(kind: Any) -> bool:
    """Whether a column of this Arrow type can hold text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (*_BYTES, *_BYTES.values(), pa.null())


def find_columns(schema: Any, options: SourceOptions, *, path: str) -> tuple[str, ...]:
    """Columns of all fields, or the names that lead to the one of the text; SourceError if none.

    A column literally named "a.b" goes before b inside a.
    """
    names = schema.names
    if options.fields:
        columns = {
            field: field if field in names else field.split(".")[0] for field in options.fields
        }
        missing = [field for field, column in columns.items() if column not in names]
        found = tuple(dict.fromkeys(column for column in columns.values() if column in names))
        if (missing and options.needs_all_fields) or not found:
            lacking = ", ".join(map(repr, missing))
            raise SourceError(
                f"{path!r} has no column {lacking}; its columns are: {', '.join(names)}",
                hint="name the columns that it has, in --template or with the options of the "
                "format",
            )
        for column in found:
            _refuse_doubles(column, names, path=path)
        return found
    field = options.text_field
    found = (field,) if field in names else tuple(field.split("."))
    fields, kind = list(schema), None
    for name in found:
        _refuse_doubles(name, [each.name for each in fields], path=path)
        kind = next((each.type for each in fields if each.name == name), None)
        fields = list(kind) if kind is not None and pa.types.is_struct(kind) else []
    if kind is None or not is_text(kind):
        has = f"{path!r} has no column {field!r}"
        is_other = f"column {field!r} of {path!r} is of type {kind}, not text"
        raise SourceError(
            f"{has if kind is None else is_other}; its columns are: {', '.join(_leaves(schema))}",
            hint="name the one that holds the text with: --text-field NAME",
        )
    return found


def _refuse_doubles(column: str, names: Sequence[str], *, path: str) -> None:
    if (count := names.count(column)) > 1:
        raise SourceError(
            f"{path!r} has {count} columns {column!r}, and nothing says which of them is meant",
            hint="write the file again with a name for each column, or leave it out",
        )


def _leaves(fields: Any, prefix: str = "") -> list[str]:
    names: list[str] = []
    for each in fields:
        nested = pa.types.is_struct(each.type)
        names += _leaves(each.type, f"{prefix}{each.name}.") if nested else [prefix + each.name]
    return names


def column_at(batch: Any, names: tuple[str, ...]) -> Any:
    """The array that the names lead to, null where a struct on the way is null."""
    array = batch.column(batch.schema.names.index(names[0]))
    return array if len(names) == 1 else pc.struct_field(checked(array), list(names[1:]))


def checked(array: Any) -> Any:
    """The array with bytes for its strings, its offsets and indices within its data.

    A file may say anything, and an offset beyond the data would read this process's memory.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    array.validate()
    # As bytes: of strings, UTF-8 would be checked too, and that costs the row and not the file.
    array = array.view(_of_bytes(array.type))
    array.validate(full=True)
    return array


def _of_bytes(kind: Any) -> Any:
    """The type with bytes where it has strings."""
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_of_bytes(each.type)) for each in kind])
    for nested, make in _LISTS:
        if nested(kind):
            return make(kind.value_field.with_type(_of_bytes(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_of_bytes(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        key, value = (
            each.with_type(_of_bytes(each.type)) for each in (kind.key_field, kind.item_field)
        )
        return pa.map_(key, value, keys_sorted=kind.keys_sorted)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _of_bytes(kind.value_type), ordered=kind.ordered)
    return _BYTES.get(kind, kind)


def flat(array: Any) -> Any:
    """The same values, checked, as an array of bytes with wide offsets, in one piece."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    array = checked(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.large_binary())


def text_batch(array: Any) -> TextBatch:
    """A flat array's own buffers as a batch; null slots are whatever is there."""
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return TextBatch.from_texts([])
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return TextBatch(np.frombuffer(b"" if data is None else data, np.uint8), bounds)


def flat_array(texts: TextBatch) -> Any:
    """The batch's own buffers as an array of strings, which they are known to be."""
    buffers = [None, pa.py_buffer(texts.offsets), pa.py_buffer(texts.data)]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers)


def rows_of(
    array: Any,
    first_row: int,
    num_bytes: int,
    *,
    limit: int,
    rejects: Mapping[int, Reject] | None = None,
    offsets: NDArray[np.int64] | None = None,
    sizes: NDArray[np.int64] | None = None,
    is_valid: bool = False,
) -> RowBatch:
    """Rows of a flat array (of bytes, or of strings), those without usable text rejected.

    `rejects` (by slot) are decided already; `offsets` are the places of the slots in the file,
    `sizes` what the limit counts where that is not the bytes of the text. `is_valid`: all of it is
    known to be UTF-8.
    """
    found = dict(rejects or {})
    lengths = text_batch(array).lengths
    sizes = lengths if sizes is None else sizes

    def reject(slot: int, reason: RejectReason, detail: str, size: int | None = None) -> None:
        offset = None if offsets is None else int(offsets[slot])
        found.setdefault(slot, Reject(first_row + slot, reason, detail, offset, size=size))

    if array.null_count > len(found):  # whose slots are null too
        for slot in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            if slot not in found:
                reject(slot, RejectReason.NULL_TEXT, "the text is null")
    for slot in np.flatnonzero(lengths > limit).tolist():
        size = int(lengths[slot])
        reject(slot, RejectReason.TOO_LARGE, too_large(size, limit), size)
    if not (is_valid or _is_valid_utf8(array)):
        for slot, text in enumerate(array.cast(pa.large_binary()).to_pylist()):
            if text is not None and (why := utf8_error(text)):
                reject(slot, RejectReason.INVALID_UTF8, why)
    rows = np.arange(first_row, first_row + len(array), dtype=np.int64)
    kept = np.ones(len(array), bool)
    if found:
        kept[list(found)] = False
    return RowBatch(
        text_batch(array.filter(pa.array(kept)) if found else array),
        rows[kept] if found else rows,
        tuple(found[slot] for slot in sorted(found)),
        num_rows=len(array),
        num_bytes=num_bytes,
        largest_row_bytes=int(sizes[sizes <= limit].max(initial=0)),
        places=offsets[kept] if found and offsets is not None else offsets,
    )


def _is_valid_utf8(array: Any) -> bool:
    try:
        array.view(pa.large_string()).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def is_utf8(data: bytes | memoryview) -> bool:
    """Whether the bytes are valid UTF-8, all of them together."""
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    array = pa.Array.from_buffers(pa.large_string(), 1, [None, offsets, pa.py_buffer(data)])
    return _is_valid_utf8(array)


def utf8_error(text: bytes) -> str | None:
    """What is wrong with the bytes as UTF-8, or None."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        where = f"byte 0x{text[error.start]:02x} at position {error.start} of the text"
        return f"{where}: {error.reason}"
    return None


def too_large(size: int, limit: int) -> str:
    """The detail of a row that does not fit the memory budget."""
    return f"{size:,} bytes; the limit is {limit:,}"


# What Arrow raises for a file that is not what its name says, or has a name that is no UTF-8, or a
# value (a date, say) that Python has none for.
UNREADABLE = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, RecursionError)


def damaged(path: str, error: Exception) -> Exception:
    """The error for a file whose content does not have the form that its name promises."""
    if isinstance(error, MemoryError):  # Arrow's is one of its own kind too
        return MemoryError(*error.args)
    if isinstance(error, RemoteError):
        return files_module.unreadable(path, error)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return SourceError(
        f"{shown(path)!r} cannot be read as what its name says: {reason}",
        hint="copy or write the file again, or leave it out, then run the same command again",
    )


# -------------------------------------------------------------------------------------------------
# Which rows a condition keeps: a verdict on each, of whole columns by Arrow's compute functions.
#
# A column is compared as what the condition takes it for: text as bytes, numbers as whole numbers
# where all are, else as floats. A verdict follows from the row alone, whatever rows are beside it.

_COMPARED = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


def where_columns(
    schema: Any, condition: Condition | None, *, path: str
) -> dict[str, tuple[str, ...]]:
    """The names that lead to each column of a condition; SourceError where one does not fit."""
    found: dict[str, tuple[str, ...]] = {}
    for column, kind in ({} if condition is None else condition.columns).items():
        names = (column,) if column in schema.names else tuple(column.split("."))
        fields, type_ = list(schema), None
        for name in names:
            _refuse_doubles(name, [each.name for each in fields], path=path)
            type_ = next((each.type for each in fields if each.name == name), None)
            fields = list(type_) if type_ is not None and pa.types.is_struct(type_) else []
        if type_ is None:
            problem, hint = where.unknown_column(column, [*_leaves(schema)])
            raise SourceError(f"{path!r} has {problem}", hint=hint)
        if not _fits(type_, kind):
            raise SourceError(
                f"column {column!r} of {path!r} is of type {type_}, and --where compares it with "
                f"{kind}: no row would be used",
                hint="compare it with what it holds: text in single quotes, numbers without, or "
                "true or false",
            )
        found[column] = names
    return found


def _fits(type_: Any, kind: str | None) -> bool:
    type_ = type_.value_type if pa.types.is_dictionary(type_) else type_
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    types = pa.types
    if kind is None or types.is_null(type_):
        return True
    if kind == where.FLAG:
        return bool(types.is_boolean(type_))
    is_number = types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_)
    return bool(is_number) if kind == where.NUMBER else is_text(type_) or _is_time(type_)


def _is_time(type_: Any) -> bool:
    return bool(pa.types.is_timestamp(type_) or pa.types.is_date(type_) or pa.types.is_time(type_))


def verdicts(condition: Condition, arrays: Mapping[str, Any], count: int) -> NDArray[np.int8]:
    """A verdict on each of so many rows, from the columns of the condition by their names."""
    ready = {name: _comparable(arrays[name], kind) for name, kind in condition.columns.items()}
    found = where.combine(
        condition.whole,
        lambda test: _test(test, ready[test.column]),
        invert=pc.invert,
        join={"and": pc.and_kleene, "or": pc.or_kleene},
    )
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    assert len(found) == count
    decided = found.cast(pa.int8()).fill_null(where.UNDECIDED)
    return np.asarray(decided.to_numpy(zero_copy_only=False), np.int8)


def _comparable(array: Any, kind: str | None) -> Any:
    """The values as what they are compared with; each of a dictionary once."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    array = checked(array)
    if pa.types.is_dictionary(array.type):
        values = _comparable(array.dictionary, kind)
        return pa.DictionaryArray.from_arrays(array.indices, values, safe=False)
    type_ = array.type
    if kind is None:
        return array
    if pa.types.is_null(type_):
        return array.cast({where.TEXT: pa.large_binary(), where.FLAG: pa.bool_()}.get(kind, _FLOAT))
    if kind == where.TEXT:
        return array if _is_time(type_) else array.cast(pa.large_binary())
    if kind == where.NUMBER:
        is_whole = pa.types.is_integer(type_) and type_ != pa.uint64()
        return array.cast(pa.int64() if is_whole else _FLOAT, safe=False)
    return array


_FLOAT = pa.float64()


def _test(test: Test, array: Any) -> Any:
    if pa.types.is_dictionary(array.type):
        found = _test(test, array.dictionary).take(array.indices)
        return pc.fill_null(found, pa.scalar(value=True)) if test.operator == "is null" else found
    if test.operator == "is null":
        return pc.is_null(array)
    if test.operator == "is true":
        return array
    if test.operator == "like":
        return _is_like(array, str(test.values[0]))
    if pa.types.is_integer(array.type) and any(isinstance(each, float) for each in test.values):
        array = array.cast(_FLOAT, safe=False)
    values = [_literal(value, array.type) for value in test.values]
    if test.operator != "in":
        return getattr(pc, _COMPARED[test.operator])(array, values[0])
    found = pc.is_in(array, pa.array([each.as_py() for each in values], array.type))
    return pc.if_else(pc.is_valid(array), found, pa.scalar(None, pa.bool_()))


def _literal(value: where.Literal, type_: Any) -> Any:
    if not isinstance(value, str):
        return pa.scalar(value, type_)
    if not _is_time(type_):
        return pa.scalar(value.encode(), type_)
    try:
        return pa.scalar(value).cast(type_)
    except pa.ArrowInvalid as error:
        raise SourceError(
            f"--where compares a column of type {type_} with {value!r}, which is none: {error}",
            hint="write it as in '2024-07-26' or '2024-07-26 12:00:00'"
            + (", with the zone: '2024-07-26 12:00:00Z'" if getattr(type_, "tz", None) else ""),
        ) from error


def _is_like(array: Any, pattern: str) -> Any:
    if _is_time(array.type):
        raise SourceError(
            f"--where asks whether a column of type {array.type} is like {pattern!r}, and that is "
            "for text",
            hint="compare it: date >= '2024-07-01'",
        )
    if _is_valid_utf8(array):
        return pc.match_like(array.view(pa.large_string()), pattern)
    rule = where.like_rule(pattern)
    texts = (None if each is None else each.decode(errors="replace") for each in array.to_pylist())
    found = [None if text is None else rule.fullmatch(text) is not None for text in texts]
    return pa.array(found, pa.bool_())


_NUMBER_FORM = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"


def of_text(array: Any, kind: str | None) -> Any:
    """Text as what it is compared with, null where it is empty or something else: for CSV."""
    array = array.cast(pa.large_binary())
    given = pc.greater(pc.binary_length(array), 0)
    array = pc.if_else(given, array, pa.scalar(None, array.type))
    if kind in (None, where.TEXT):
        return array
    if not _is_valid_utf8(array):
        texts = (
            each if each is None or not utf8_error(each) else None for each in array.to_pylist()
        )
        array = pa.array(list(texts), array.type)
    texts = array.view(pa.large_string())
    if kind == where.FLAG:
        lower = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
        known = pc.is_in(lower, pa.array(["true", "false"], lower.type))
        return pc.if_else(known, pc.equal(lower, "true"), pa.scalar(None, pa.bool_()))
    numbers = pc.match_substring_regex(texts, _NUMBER_FORM)
    texts = pc.if_else(numbers, texts, pa.scalar(None, texts.type))
    return pc.utf8_ltrim(pc.utf8_trim_whitespace(texts), characters="+").cast(_FLOAT)


def chosen(batch: RowBatch, first_row: int, found: NDArray[np.int8] | None) -> RowBatch:
    """The batch without the rows that the verdicts on its rows leave out."""
    if found is None or (found == where.KEPT).all():
        return batch
    rows = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    kept = found[batch.rows - first_row] == where.KEPT
    texts = batch.texts
    array = pa.Array.from_buffers(
        pa.large_binary(),
        len(texts),
        [None, *map(pa.py_buffer, map(np.ascontiguousarray, (texts.offsets, texts.data)))],
    )
    return replace(
        batch,
        texts=text_batch(array.filter(pa.array(kept))),
        rows=batch.rows[kept],
        rejects=tuple(r for r in batch.rejects if found[r.row - first_row] == where.KEPT),
        places=None if batch.places is None else batch.places[kept],
        left_out=rows[found != where.KEPT],
        undecided=rows[found == where.UNDECIDED],
    )


# -------------------------------------------------------------------------------------------------
# Rows of several fields as JSON: what is handed on where a row is more than one text.
#
# A JSON line is its own. Rows of tables become one here. Where a table's nested value has a member
# that the row never had, Arrow says null; such members are left out again, except for the two that
# every message of a chat has.

_ALWAYS = frozenset(("role", "content"))


def json_rows(batch: Any, columns: Sequence[str]) -> Any:
    """One JSON object for each row of a record batch, as a flat array of text."""
    arrays = [batch.column(batch.schema.names.index(column)) for column in columns]
    for array in arrays:
        checked(array)

    def written(row: Iterable[Any]) -> str:
        return json.dumps(_filled(dict(zip(columns, row, strict=True))), default=_plain)

    rows: list[str | bytes] = []
    try:
        rows += map(written, zip(*(array.to_pylist() for array in arrays), strict=True))
    except UnicodeDecodeError:
        rows.clear()
        for slot in range(batch.num_rows):
            try:
                rows.append(written(array[slot].as_py() for array in arrays))
            except UnicodeDecodeError as error:
                rows.append(bytes(error.object))  # which the row is rejected for
    return pa.array(rows, pa.large_binary())


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
