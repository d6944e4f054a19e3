"""What the formats of rows write: rows of one length, or documents, as columns of numpy arrays.

    store -> Records (rows or documents) -> cut into files, by size alone -> Batch after Batch

`Records` speaks of a store's rows or documents by number, so that a part of an export is two
numbers. A batch is a few megabytes of them: views of the mapped shards wherever they lie back to
back, so that the one copy made is the one that widens the ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop.base import Part, Setting
from tokenmill.interop.reading import document_blocks
from tokenmill.loader.batch import IGNORED
from tokenmill.loader.layouts.base import PADDING
from tokenmill.loader.layouts.packings import Packing, make_layout
from tokenmill.loader.options import check_pad_id
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions
    from tokenmill.store.reader import Store

BATCH_TOKENS = 1 << 20
"""4 MB as int32: enough to make the calls for it cheap, and about what a cache holds."""
IDS = "input_ids"
EXTRA_COLUMNS = ("labels", "attention_mask", "loss_mask")

IDS_SETTING = Setting(
    default="int32",
    help="type of the ids: int32, which everything reads, or uint16, half the size",
    choices=("int32", "uint16"),
)
COLUMNS_SETTING = Setting(
    default="auto",
    help="columns beside the ids, of labels, attention_mask, loss_mask, with commas between; auto:"
    " loss_mask where the store has one, attention_mask where the packing pads; none",
)


class Batch(NamedTuple):
    """Some consecutive records."""

    tokens: NDArray[Any]
    """Rows: (rows, length), maybe with strides; documents: their ids back to back."""
    lengths: NDArray[np.int64]
    """Tokens of each record."""
    real: NDArray[np.bool_] | None
    """As `tokens`: False on padding; None where there is none."""
    mask: NDArray[np.uint8] | None
    """As `tokens`: 0 where a token does not count for the loss; None where all do."""

    @property
    def counts(self) -> NDArray[np.bool_] | None:
        """Where a token counts for the loss; None is everywhere."""
        if self.mask is None:
            return self.real
        mask = self.mask.astype(np.bool_)
        return mask if self.real is None else mask & self.real


class Records(Protocol):
    """The rows or documents of a store, by number."""

    count: int
    length: int | None
    """Tokens of every record, where they are all the same."""
    has_mask: bool

    def batches(self, first: int, last: int, *, tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
        """Records `first` to `last`, about so many tokens at a time."""
        ...

    def lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """Tokens of each of these records."""
        ...

    def cut(
        self, costs: Callable[[NDArray[np.int64]], NDArray[np.int64]], *, budget: int
    ) -> Iterator[tuple[int, int, int]]:
        """Stretches of records whose costs, given their lengths, are within a budget in all.

        First, last, and tokens of each; a record that costs more than the budget is alone.
        """
        ...


def open_records(store: Store, options: ExportOptions, *, overlap: int = 0) -> Records:
    """What an export is made of: rows where `seq_len` is given, else documents.

    With `overlap` a row has one token more than `seq_len`, which is the next row's first.
    """
    if options.seq_len is None:
        return DocumentRecords(store)
    return RowRecords(
        store, length=options.seq_len + overlap, overlap=overlap, packing=options.packing
    )


class DocumentRecords:
    """The documents of a store."""

    length: int | None = None

    def __init__(self, store: Store) -> None:
        self.count = store.num_documents
        self.has_mask = store.has_mask
        self._store = store

    def batches(self, first: int, last: int, *, tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
        """Documents, those of more tokens than asked for alone."""
        most_bytes = tokens * self._store.dtype.itemsize
        for ids, lengths, mask in document_blocks(
            self._store, first=first, last=last, most_bytes=most_bytes
        ):
            yield Batch(ids, lengths, None, mask)

    def lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """Tokens of each of these documents."""
        parts = list(self._length_blocks(first, last))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _length_blocks(self, first: int, last: int) -> Iterator[NDArray[np.int64]]:
        for number, shard in enumerate(self._store.shards):
            low = max(first - shard.first_document, 0)
            high = min(last - shard.first_document, shard.documents)
            if low < high:
                yield self._store.map_shard(number).index.lengths[low:high].astype(np.int64)

    def cut(
        self, costs: Callable[[NDArray[np.int64]], NDArray[np.int64]], *, budget: int
    ) -> Iterator[tuple[int, int, int]]:
        """Go over the index once, a shard at a time."""
        return cut_lengths(self._length_blocks(0, self.count), costs, budget=budget)


def cut_lengths(
    blocks: Iterable[NDArray[np.int64]],
    costs: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    *,
    budget: int,
) -> Iterator[tuple[int, int, int]]:
    """Stretches of records whose lengths come in blocks, as `Records.cut` gives them."""
    first = number = held = tokens = 0
    for lengths in blocks:
        ends = np.cumsum(costs(lengths), dtype=np.int64)
        sums = np.cumsum(lengths)
        place = 0
        while place < len(ends):
            before, sum_before = (int(ends[place - 1]), int(sums[place - 1])) if place else (0, 0)
            upto = int(np.searchsorted(ends, budget - held + before, side="right"))
            if upto <= place:
                # It does not fit, and goes into the next stretch, or alone into this one.
                upto = place + (number + place == first)
            if upto > place:
                held += int(ends[upto - 1]) - before
                tokens += int(sums[upto - 1]) - sum_before
            if upto < len(ends):
                yield first, number + upto, tokens
                first, held, tokens = number + upto, 0, 0
            place = upto
        number += len(lengths)
    if first < number:
        yield first, number, tokens


class RowRecords:
    """A store cut into rows of `length` tokens, in its order, as the loader would cut it.

    `concat` without overlap: each token stands in one row. Other packings are those of the
    loader for `length - 1` inputs, whose rows have `length` tokens.
    """

    def __init__(self, store: Store, *, length: int, overlap: int, packing: str) -> None:
        if length < 2:
            raise UsageError(
                f"rows of {length} tokens teach nothing", hint="use a longer --seq-len"
            )
        self._store = store
        self.length: int | None = length
        self._length = length
        self.has_mask = store.has_mask
        self.pad_id = check_pad_id(store, None)
        self._step = length - overlap
        self._stream = TokenStream(store)
        kind = Packing.of(packing)
        self._layout = None
        if kind is not Packing.CONCAT:
            self._layout = make_layout(kind, self._stream, seq_len=length - 1)
            self.count = self._layout.num_rows
        else:
            rows = -(-(store.num_tokens - overlap) // self._step)
            self.count = max(1, rows) if store.num_tokens else 0

    @property
    def back_to_back(self) -> bool:
        """Whether rows follow each other as the tokens do, so that only the last one is padded."""
        return self._layout is None

    def lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """All the same."""
        return np.full(last - first, self._length, np.int64)

    def cut(
        self, costs: Callable[[NDArray[np.int64]], NDArray[np.int64]], *, budget: int
    ) -> Iterator[tuple[int, int, int]]:
        """Equally many rows in all stretches but the last."""
        cost = int(costs(np.array([self._length], np.int64))[0])
        step = max(1, budget // cost)
        for first in range(0, self.count, step):
            last = min(first + step, self.count)
            yield first, last, (last - first) * self._length

    def batches(self, first: int, last: int, *, tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
        """Rows, as (rows, length) arrays."""
        step = max(1, tokens // self._length)
        for begin in range(first, last, step):
            rows = np.arange(begin, min(begin + step, last), dtype=np.int64)
            yield self._packed(rows) if self._layout is not None else self._concatenated(rows)

    def _concatenated(self, rows: NDArray[np.int64]) -> Batch:
        """Rows that lie back to back in the stream."""
        low, wanted = int(rows[0]) * self._step, len(rows) * self._step
        wanted += self._length - self._step
        high = min(low + wanted, self._store.num_tokens)
        tokens, mask = self._stretch(low, high)
        real: NDArray[np.bool_] | None = None
        if high - low < wanted:
            lacking = wanted - (high - low)
            tokens = np.append(tokens, np.full(lacking, self.pad_id, tokens.dtype))
            mask = None if mask is None else np.append(mask, np.zeros(lacking, np.uint8))
            real = self._as_rows(np.arange(wanted) < high - low)
        return Batch(
            self._as_rows(tokens),
            np.full(len(rows), self._length, np.int64),
            real,
            None if mask is None else self._as_rows(mask),
        )

    def _as_rows(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Rows as a view: with an overlap, the last token of one is the first of the next."""
        return np.lib.stride_tricks.sliding_window_view(flat, self._length)[:: self._step]

    def _stretch(self, low: int, high: int) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
        """Tokens and mask of a stretch of the stream; a view where it lies in one shard."""
        length = np.array([high - low], np.int64)
        spans = self._stream.locate(np.array([low], np.int64), length)
        tokens, masks = [], []
        for place in range(len(spans.shards)):
            shard, first, last = spans.at(place)
            mapped = self._store.map_shard(shard)
            tokens.append(mapped.tokens[first:last])
            if self.has_mask:
                masks.append(_mask_slice(mapped.mask, first, last))
        joined: NDArray[Any] = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
        return joined, np.concatenate(masks) if masks else None

    def _packed(self, rows: NDArray[np.int64]) -> Batch:
        """Rows of pieces from here and there."""
        assert self._layout is not None
        pieces = self._layout.pieces(rows)
        shape = len(rows), self._length
        tokens = self._stream.read(pieces.starts, pieces.lengths, pad=self.pad_id).reshape(shape)
        real: NDArray[np.bool_] | None = None
        if pieces.starts.min(initial=0) == PADDING:
            real = np.repeat(pieces.starts != PADDING, pieces.lengths).reshape(shape)
        mask = None
        if self.has_mask:
            mask = self._piece_masks(pieces.starts, pieces.lengths).reshape(shape)
        return Batch(tokens, np.full(len(rows), self._length, np.int64), real, mask)

    def _piece_masks(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        found = [
            np.zeros(length, np.uint8)
            if start == PADDING
            else self._stretch(start, start + length)[1]
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return np.concatenate([piece for piece in found if piece is not None])


def _mask_slice(mask: NDArray[np.uint8] | None, first: int, last: int) -> NDArray[np.uint8]:
    return np.ones(last - first, np.uint8) if mask is None else mask[first:last]


def id_dtype(store: Store, options: ExportOptions) -> np.dtype[Any]:
    """The type of ids that was asked for; UsageError where the vocabulary does not fit it."""
    name = str(options.settings["ids"])
    if name == "uint16" and store.vocab_size > 1 << 16:
        raise UsageError(
            f"ids of a vocabulary of {store.vocab_size:,} do not fit uint16",
            hint="leave the setting out, or: --set ids=int32",
        )
    return np.dtype(name).newbyteorder("<")


def extra_columns(stores: Mapping[str, Store], options: ExportOptions) -> tuple[str, ...]:
    """The columns beside the ids, in the order of `EXTRA_COLUMNS`; the same for all splits."""
    text = str(options.settings["columns"])
    if text == "auto":
        pads = options.seq_len is not None and options.packing != Packing.CONCAT
        wanted = {"attention_mask"} if pads else set()
        wanted |= {"loss_mask"} if any(store.has_mask for store in stores.values()) else set()
    else:
        wanted = {name.strip() for name in text.split(",")} - {"none", ""}
    if unknown := wanted - {*EXTRA_COLUMNS}:
        raise UsageError(
            f"columns={text!r}: there is no column {min(unknown)!r}",
            hint=f"use some of {', '.join(EXTRA_COLUMNS)}; auto; or none",
        )
    return tuple(name for name in EXTRA_COLUMNS if name in wanted)


def column(batch: Batch, name: str, *, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A column of a batch, as `tokens` is; ids become `dtype`."""
    if name == "attention_mask":
        return _ones(batch) if batch.real is None else batch.real.astype(np.int8)
    counts = batch.counts
    if name == "loss_mask":
        return _ones(batch) if counts is None else counts.astype(np.int8)
    if name == "labels":
        labels = batch.tokens.astype(np.int64)
        if counts is not None:
            labels[~counts] = IGNORED
        return labels
    return batch.tokens.astype(dtype, order="C", copy=False)


def _ones(batch: Batch) -> NDArray[np.int8]:
    return np.ones(batch.tokens.shape, np.int8)


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the splits of an export go: one alone at the top, several in folders of their names."""

    splits: tuple[str, ...]

    def name(self, split: str, file: str) -> str:
        """The name of a split's file in the export."""
        return file if len(self.splits) == 1 else f"{split}/{file}"

    def paths(self, root: Path) -> list[str]:
        """The folder of each split."""
        return [str(root)] if len(self.splits) == 1 else [str(root / name) for name in self.splits]


def stretch_part(
    split: str,
    number: int,
    stretch: tuple[int, int, int],
    file: str,
    *,
    columns: Sequence[str] = (),
) -> Part:
    """The part that writes a stretch of records into a file of its own."""
    first, last, tokens = stretch
    return Part(
        name=f"{split}-{number:06d}",
        split=split,
        tokens=tokens,
        files=(file,),
        task={"first": first, "last": last, "columns": [*columns]},
    )


def stretch_of(part: Part) -> tuple[int, int]:
    """First and last record of such a part."""
    first, last = part.task["first"], part.task["last"]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last


def columns_of(part: Part) -> tuple[str, ...]:
    """The columns beside the ids, as they were planned for all splits together."""
    columns = part.task["columns"]
    assert isinstance(columns, list)
    return tuple(map(str, columns))


def json_bytes(value: object) -> bytes:
    """As Python's own writer puts it, keys sorted: what most projects' indexes are."""
    return json.dumps(value, sort_keys=True).encode()


def rows_note(store: Store, options: ExportOptions, split: str, *, overlap: int) -> list[str]:
    """How many rows were written, and what is not in them."""
    if options.seq_len is None:
        return []
    length = options.seq_len + overlap
    rows = open_records(store, options, overlap=overlap).count
    notes = [f"{split}: {rows:,} rows of {length:,} tokens, packed by {options.packing}"]
    if options.packing == Packing.PAD:
        lost = int(np.maximum(store.lengths().astype(np.int64) - length, 0).sum())
        if lost:
            notes.append(
                f"{split}: {lost:,} of {store.num_tokens:,} tokens are in no row: they lie behind"
                f" the first {length:,} of their document"
            )
    return notes


def padding_note(records: Records, split: str, columns: Sequence[str]) -> list[str]:
    """What to know about padding that no column tells of."""
    if not isinstance(records, RowRecords) or not records.count or "attention_mask" in columns:
        return []
    if not records.back_to_back:
        return [f"{split}: rows are filled up with the id {records.pad_id}; no column says where"]
    [last] = records.batches(records.count - 1, records.count)
    if last.real is None:
        return []
    lacking = int(np.count_nonzero(~last.real))
    return [f"{split}: the last row ends with {lacking:,} ids of padding ({records.pad_id})"]
