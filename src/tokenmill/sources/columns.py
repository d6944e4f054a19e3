"""An Arrow column of text as rows: views of its buffers, and rejects for rows without usable text.

All formats that Arrow reads end here. A column that calls itself a string need not be valid UTF-8
(neither the JSON reader nor Parquet files promise it), so it is checked, at several GB/s.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tokenmill import files as files_module
from tokenmill.errors import SourceError
from tokenmill.files import RemoteError, shown
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch
from tokenmill.sources.base import LARGEST_BATCH_ROWS, UnitEnd, check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.sources.base import SourceFile, SourceOptions, Unit


TEXT_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)


def is_text(kind: Any) -> bool:
    """Whether a column of this Arrow type can hold text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_view = kind in (
        getattr(pa, "string_view", pa.string)(),
        getattr(pa, "binary_view", pa.binary)(),
    )
    return is_view or pa.types.is_null(kind) or any(check(kind) for check in TEXT_TYPES)


def field_path(schema: Any, field: str, *, path: str) -> tuple[str, ...]:
    """Names that lead to the text column; a column literally named "a.b" goes before b inside a."""
    if field in schema.names:
        names: tuple[str, ...] = (field,)
        refuse_doubles(names, schema.names, path=path)
        kind = schema.field(field).type
    else:
        names = tuple(field.split("."))
        kind = _nested_type(schema, names, path=path)
    if kind is None:
        raise SourceError(
            f"{path!r} has no column {field!r}; its columns are: {', '.join(_leaves(schema))}",
            hint="name the one that holds the text with: --text-field NAME",
        )
    if not is_text(kind):
        raise SourceError(
            f"column {field!r} of {path!r} is of type {kind}, not text; "
            f"its columns are: {', '.join(_leaves(schema))}",
            hint="name the one that holds the text with: --text-field NAME",
        )
    return names


def refuse_doubles(columns: Iterable[str], names: Sequence[str], *, path: str) -> None:
    """Raise where a table has two columns of a name that is needed."""
    for column in columns:
        if (count := names.count(column)) > 1:
            raise SourceError(
                f"{path!r} has {count} columns {column!r}, and nothing says which of them is meant",
                hint="write the file again with a name for each column, or leave it out",
            )


def _nested_type(schema: Any, names: tuple[str, ...], *, path: str) -> Any:
    fields = list(schema)
    kind = None
    for name in names:
        refuse_doubles((name,), [each.name for each in fields], path=path)
        kind = next((each.type for each in fields if each.name == name), None)
        if kind is None:
            return None
        fields = list(kind) if pa.types.is_struct(kind) else []
    return kind


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


def flat(array: Any) -> Any:
    """The same values, checked, as an array of bytes that stands in one piece."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    array = checked(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array if _has_offsets(array.type) else array.cast(pa.large_binary())


def _has_offsets(kind: Any) -> bool:
    return any(check(kind) for check in TEXT_TYPES)


def text_batch(array: Any) -> TextBatch:
    """The array's own buffers as a batch; null slots are whatever lies there."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return TextBatch.from_texts([])
    bounds: NDArray[Any] = np.frombuffer(offsets, np.int64 if wide else np.int32)
    bounds = bounds[array.offset : array.offset + len(array) + 1]
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return TextBatch(content, bounds.astype(np.int64, copy=False))


def rows_of(
    array: Any,
    *,
    first_row: int,
    num_bytes: int,
    max_document_bytes: int,
    rejects: Mapping[int, Reject] | None = None,
    offsets: NDArray[np.int64] | None = None,
    sizes: NDArray[np.int64] | None = None,
    is_valid: bool = False,
) -> RowBatch:
    """Rows of a flat array, those without usable text rejected.

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

    if array.null_count:
        for slot in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            if slot not in found:
                reject(slot, RejectReason.NULL_TEXT, "the text is null")
    for slot in np.flatnonzero(lengths > max_document_bytes).tolist():
        size = int(lengths[slot])
        reject(slot, RejectReason.TOO_LARGE, too_large(size, max_document_bytes), size)
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
        largest_row_bytes=int(sizes[sizes <= max_document_bytes].max(initial=0)),
        places=offsets[kept] if found and offsets is not None else offsets,
    )


def _is_valid_utf8(array: Any) -> bool:
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        wide = pa.types.is_large_binary(kind)
        array = array.view(pa.large_string() if wide else pa.string())
    try:
        array.validate(full=True)
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
        return (
            f"byte 0x{text[error.start]:02x} at position {error.start} of the text: {error.reason}"
        )
    return None


def too_large(size: int, limit: int) -> str:
    """The detail of a row that does not fit the memory budget."""
    return f"{size:,} bytes; the limit is {limit:,}"


class ColumnDigest:
    """Digest of a text column: the same however the rows are batched."""

    def __init__(self) -> None:
        self._lengths = xxhash.xxh3_128()
        self._data = xxhash.xxh3_128()

    def update(self, array: Any) -> None:
        """Take in the next rows, a flat array."""
        batch = text_batch(array)
        lengths = batch.lengths
        if array.null_count:
            lengths = np.where(
                array.is_null().to_numpy(zero_copy_only=False), -1 - lengths, lengths
            )
        self._lengths.update(np.ascontiguousarray(lengths).data)
        if len(batch):
            self._data.update(batch.data[batch.offsets[0] : batch.offsets[-1]].data)

    def hexdigest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._lengths.digest() + self._data.digest())


# -------------------------------------------------------------------------------------------------
# Reading units of a file that holds a text column: what Parquet and Arrow files share.
#
# The digest of such a unit covers the text column alone, as decoded: a file that was written again
# with other compression or other columns keeps its digest, one whose text changed does not.

UNREADABLE = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, RecursionError)
"""What Arrow raises for a file that is not what its name says, or has a name that is no UTF-8, or a
value (a date, say) that Python has none for."""


def damaged(path: str, error: Exception) -> Exception:
    """The error for a file whose content does not have the form that its name promises."""
    if isinstance(error, MemoryError):  # Arrow's is one of its own kind too
        return MemoryError(*error.args)
    if isinstance(error, RemoteError):
        return files_module.unreadable(path, error)
    return SourceError(
        f"{shown(path)!r} cannot be read as what its name says: {_reason(error)}",
        hint="copy or write the file again, or leave it out, then run the same command again",
    )


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class ColumnSource(ABC):
    """An open file with a text column."""

    read_seconds = 0.0

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        self._file = file
        self._options = options
        self._end: UnitEnd | None = None
        check_unchanged(file)

    @abstractmethod
    def _arrays(self, unit: Unit) -> Iterator[Any]:
        """The unit's text column, piece by piece."""

    @abstractmethod
    def _is_last(self, unit: Unit) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def _let_go(self) -> None:  # noqa: B027
        """The rows so far are no longer needed: give back memory that they lie in."""

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches."""
        self._end = None
        digest = ColumnDigest()
        row = 0
        for array in self._flat_arrays(unit):
            digest.update(array)
            yield rows_of(
                array,
                first_row=row,
                num_bytes=text_batch(array).num_bytes,
                max_document_bytes=self._options.max_document_bytes,
            )
            row += len(array)
        check_unchanged(self._file)
        last = self._is_last(unit)
        self._end = UnitEnd(digest=digest.hexdigest(), num_lines=row, is_last=last)

    def end(self) -> UnitEnd:
        """Facts about the unit read last."""
        assert self._end is not None, "end() before the unit's rows were all read"
        return self._end

    def exists(self, unit: Unit) -> bool:  # noqa: ARG002
        """Always: the units were counted when the file was planned."""
        return True

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit."""
        return sum(len(array) for array in self._flat_arrays(unit))

    def digest(self, unit: Unit) -> str:
        """The unit's digest alone."""
        digest = ColumnDigest()
        for array in self._flat_arrays(unit):
            digest.update(array)
        return digest.hexdigest()

    def _flat_arrays(self, unit: Unit) -> Iterator[Any]:
        held: list[Any] = []
        rows = size = 0
        try:
            parts = (
                piece
                for array in self._arrays(unit)
                for part in _undecoded(array, self._options.batch_bytes)
                for piece in _pieces(flat(part), self._options.batch_bytes)
            )
            for part in parts:
                held.append(part)
                rows, size = rows + len(held[-1]), size + text_batch(held[-1]).num_bytes
                # A reader gives few rows at a time where it does not know how long they are.
                if 2 * size >= self._options.batch_bytes or 2 * rows >= LARGEST_BATCH_ROWS:
                    yield _joined(held)
                    self._let_go()
                    rows = size = 0
            if held:
                yield _joined(held)
        except (*UNREADABLE, StopIteration) as error:
            raise damaged(self._file.path, error) from error


def _undecoded(array: Any, most_bytes: int) -> Iterator[Any]:
    """The array, in slices of about `most_bytes` of text where each value stands there once."""
    if not pa.types.is_dictionary(array.type):
        yield array
        return
    lengths = pc.binary_length(flat(array.dictionary)).take(array.indices).fill_null(0)
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    low = 0
    while low < len(array):
        bound = most_bytes + (int(ends[low - 1]) if low else 0)
        high = max(low + 1, int(np.searchsorted(ends, bound, side="right")))
        yield array.slice(low, high - low)
        low = high
    if not len(array):
        yield array


def _joined(arrays: list[Any]) -> Any:
    """The arrays as one, and the list without them."""
    array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    arrays.clear()
    return array


def _pieces(array: Any, batch_bytes: int) -> Iterator[Any]:
    """Slices of about `batch_bytes`; most arrays are one."""
    batch = text_batch(array)
    if batch.num_bytes <= 2 * batch_bytes:
        yield array
        return
    low = 0
    while low < len(array):
        bound = batch.offsets[low] + batch_bytes
        high = max(low + 1, int(np.searchsorted(batch.offsets, bound, side="right")) - 1)
        yield array.slice(low, high - low)
        low = high


# -------------------------------------------------------------------------------------------------
# Rows of several fields as JSON: what is handed on where a row is more than one text.
#
# A JSON line is its own. Rows of tables become one here. Where a table's nested value has a member
# that the row never had, Arrow says null; such members are left out again, except for the two that
# every message of a chat has.

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
