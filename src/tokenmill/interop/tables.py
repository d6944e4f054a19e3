"""Arrow tables of tokens: columns of lists, written from records and read back.

`datasets` and Parquet files hold the same columns: a list of ids in each row, maybe `labels` and
masks beside it. What both formats share is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tokenmill.interop.base import Block, check_held, damaged
from tokenmill.interop.columns import (
    COLUMN_SETTING,
    LABELS_SETTING,
    choose_columns,
    make_block,
)
from tokenmill.interop.records import (
    COLUMNS_SETTING,
    IDS,
    IDS_SETTING,
    column,
    extra_columns,
    id_dtype,
    open_records,
    stretch_part,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ImportOptions, Part
    from tokenmill.interop.columns import Columns
    from tokenmill.interop.parts import OutFile
    from tokenmill.interop.records import Batch
    from tokenmill.store.reader import Store

TYPES = {"labels": pa.int64(), "attention_mask": pa.int8(), "loss_mask": pa.int8()}
"""What `datasets` makes of columns with these names."""
FILE_TOKENS = 64 << 20
SETTINGS = {
    "ids": IDS_SETTING,
    "columns": COLUMNS_SETTING,
    "column": COLUMN_SETTING,
    "labels": LABELS_SETTING,
}
"""Of formats with columns of one's choice."""
CHUNK_INDEX = "chunk_index"
LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class Sink:
    """A file of an export as pyarrow wants one."""

    closed = False

    def __init__(self, file: OutFile) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return self._file.bytes

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def table_parts(
    stores: Mapping[str, Store],
    options: ExportOptions,
    name: Callable[[str, int, int], str],
) -> tuple[Part, ...]:
    """A part to a file, whose name is made of its split, its number and their count."""
    columns = extra_columns(stores, options)
    parts = []
    for split, store in stores.items():
        id_dtype(store, options)
        budget = options.file_tokens or FILE_TOKENS
        records = open_records(store, options)
        # A document counts as one token at least: files full of empty ones are bounded too.
        stretches = [*records.cut(lambda lengths: lengths + (lengths == 0), budget=budget)]
        stretches = stretches or [(0, 0, 0)]
        parts += [
            stretch_part(
                split, number, stretch, name(split, number, len(stretches)), columns=columns
            )
            for number, stretch in enumerate(stretches)
        ]
    return tuple(parts)


def list_fields(extra: Sequence[str], dtype: np.dtype[Any]) -> list[Any]:
    """The fields of ids and of the columns beside them."""
    fields = [pa.field(IDS, pa.list_(pa.from_numpy_dtype(dtype)))]
    return fields + [pa.field(name, pa.list_(TYPES[name])) for name in extra]


def list_arrays(
    batch: Batch, extra: Sequence[str], dtype: np.dtype[Any], lengths: NDArray[np.int64]
) -> list[Any]:
    """The columns of a batch as arrays of lists of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    borders = pa.array(offsets)
    values = (column(batch, name, dtype=dtype).reshape(-1) for name in (IDS, *extra))
    return [pa.ListArray.from_arrays(borders, pa.array(each)) for each in values]


def read_batches(
    batches: Iterable[Any],
    columns: Columns,
    options: ImportOptions,
    *,
    path: Path,
    chunked: bool,
) -> Iterator[Block]:
    """Documents of record batches; where rows are chunks, those of a document are joined."""
    held: list[Block] = []
    for batch in batches:
        # What a file says of its buffers is not true before it was compared, entry by entry.
        batch.validate(full=True)
        block = _block(batch, columns, options, path)
        if not chunked:
            yield block
            continue
        begins = _flat_numbers(batch, CHUNK_INDEX, path) == 0
        if not len(begins):
            continue
        first = int(np.argmax(begins)) if begins.any() else len(begins)
        last = len(begins) - 1 - int(np.argmax(begins[::-1])) if begins.any() else 0
        held.append(_rows(block, 0, first))
        check_held(path, sum(each.ids.nbytes for each in held), "a document")
        if begins.any():
            yield from _whole(held)
            if first < last:
                whole = _rows(block, first, last)
                yield whole._replace(
                    lengths=np.add.reduceat(whole.lengths, np.flatnonzero(begins[first:last]))
                )
            held = [_rows(block, last, len(begins))]
    yield from _whole(held)


def _whole(held: Sequence[Block]) -> Iterator[Block]:
    """The one document whose chunks were held back."""
    parts = [block for block in held if len(block.lengths)]
    if parts:
        ids = np.concatenate([block.ids for block in parts])
        masks = [block.mask for block in parts if block.mask is not None]
        mask = np.concatenate(masks) if masks else None
        yield Block(ids, np.array([len(ids)], np.int64), mask)


def _rows(block: Block, first: int, last: int) -> Block:
    ends = np.cumsum(np.concatenate(([0], block.lengths)))
    here = slice(int(ends[first]), int(ends[last]))
    mask = None if block.mask is None else block.mask[here]
    return Block(block.ids[here], block.lengths[first:last], mask)


def table_columns(schema: Any, options: ImportOptions, *, path: Path) -> Columns:
    """Which columns of lists to read."""
    names = [field.name for field in schema if any(check(field.type) for check in LISTS)]
    columns = choose_columns(names, options, path=path)
    for name in (*columns.names, CHUNK_INDEX):
        if len(schema.get_all_field_indices(name)) > 1:
            raise damaged(
                path,
                f"has several columns {name!r}, and nothing says which to read",
                hint="write it again with one of them",
            )
    return columns


def is_chunked(schema: Any) -> bool:
    """Whether rows may be chunks of documents that are too long for one."""
    place = schema.get_field_index(CHUNK_INDEX)
    return bool(place >= 0 and pa.types.is_integer(schema.field(place).type))


def _block(batch: Any, columns: Columns, options: ImportOptions, path: Path) -> Block:
    found, lengths = {}, {}
    for name in columns.names:
        found[name], lengths[name] = _flat_lists(batch, name, path)
    for name in columns.names:
        if not np.array_equal(lengths[name], lengths[columns.ids]):
            raise damaged(path, f"has {name!r} of other lengths than {columns.ids!r}")
    return make_block(found, columns, lengths[columns.ids], options, path=path)


def _flat_lists(batch: Any, name: str, path: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of a column of lists, and how many are in each."""
    lists = batch.column(batch.schema.get_field_index(name))
    if lists.null_count:
        raise damaged(path, f"has rows without {name!r}: null", hint="leave these rows out")
    values = lists.flatten()
    if values.null_count or not pa.types.is_integer(values.type):
        raise damaged(
            path,
            f"holds lists of {values.type} in {name!r}{', some null' if values.null_count else ''}",
            hint="name a column of lists of whole numbers with: --set column=NAME",
        )
    if pa.types.is_fixed_size_list(lists.type):
        if len(lists) and not lists.type.list_size:
            raise damaged(path, f"holds {len(lists):,} rows of {name!r} that are of no length")
        lengths = np.full(len(lists), lists.type.list_size, np.int64)
    else:
        lengths = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return values.to_numpy(), lengths


def _flat_numbers(batch: Any, name: str, path: Path) -> NDArray[Any]:
    numbers = batch.column(batch.schema.get_field_index(name))
    if numbers.null_count:
        raise damaged(path, f"has rows without {name!r}: null")
    found: NDArray[Any] = numbers.to_numpy()
    return found
