"""An Arrow column of text as rows: views of its buffers, and rejects for rows without usable text.

All formats that Arrow reads end here. A column that calls itself a string need not be valid UTF-8
(neither the JSON reader nor Parquet files promise it), so it is checked, at several GB/s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tokenmill.errors import SourceError
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

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
