"""What the formats of rows share: records of a store on their way out, and rows on their way in.

    store -> records (rows or documents) -> cut into files, by size alone -> RecordChunk after chunk
    files -> columns: ids, loss mask, padding -> DocumentBlock after block

Records are a store's rows or documents by number, so that a part of an export is two numbers. A
chunk is a few megabytes of them: views of the mapped shards wherever they are back to back, so that
the one copy made is the one that widens the ids.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop import base
from tokenmill.loader.batch import IGNORED, check_pad_id
from tokenmill.loader.packing import LAYOUTS, PADDING, Layout, find_packing
from tokenmill.store.stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.reader import MappedShard, Store

    Lengths = NDArray[np.int64]
    Costs = Callable[[Lengths], Lengths]

# First record, the one after the last, and their tokens.
Range = tuple[int, int, int]
# Columns that hold ids, in the order in which they are looked for.
ID_NAMES = ("input_ids", "ids", "tokens", "input")
MASK_NAMES = ("loss_mask", "mask")
READ_SETTINGS = {
    "column": base.Setting(
        default="", help=f"import: the column of ids; else the first of {', '.join(ID_NAMES)}"
    ),
    "labels": base.Setting(
        default=True, help="import: whether labels of -100 say what does not count for the loss"
    ),
}
# Of an index of JSON, which becomes some 20 times as much in memory.
INDEX_BYTES = 64 << 20
ROWS_NOTE = "each row became a document; if rows were cut from a stream: --split-at-eos"
CUT_NOTE = "rows were joined and cut after the end-of-text id; what is in two files is cut there"


# -------------------------------------------------------------------------------------------------
# Columns of other people's rows, on their way into a store: which are ids, masks, padding.
#
# A row becomes a document. `attention_mask` takes padding out of it; `loss_mask` (or `mask`), or
# `labels` that are the ids with -100 here and there, say what counts for the loss.


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a file that are read, by what they are for."""

    ids: str
    padding: str | None = None
    mask: str | None = None
    labels: str | None = None
    options: base.ImportOptions
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        found = (self.ids, self.padding, self.mask, self.labels)
        return tuple(name for name in found if name is not None)

    @property
    def has_mask(self) -> bool:
        return self.mask is not None or self.labels is not None

    @classmethod
    def choose(cls, names: Sequence[str], options: base.ImportOptions, *, path: Path) -> Columns:
        """Which columns to read; SourceError lists them where none is known to hold ids."""
        wanted = str(options.settings.get("column") or "")
        candidates = [wanted] if wanted else [name for name in ID_NAMES if name in names]
        if not candidates or candidates[0] not in names:
            what = repr(wanted) if wanted else "that is known to hold ids"
            raise SourceError(
                f"{str(path)!r} has no column {what}",
                hint=f"name it with: --set column=NAME; there are: {', '.join(names) or 'none'}",
            )
        mask = next((name for name in MASK_NAMES if name in names), None)
        use_labels = mask is None and bool(options.settings.get("labels", True))
        return cls(
            ids=candidates[0],
            padding="attention_mask" if "attention_mask" in names else None,
            mask=mask,
            labels="labels" if use_labels and "labels" in names else None,
            options=options,
            path=path,
        )

    def joined(self, found: Mapping[str, tuple[NDArray[Any], Lengths]]) -> base.DocumentBlock:
        """The documents of some rows, whose columns come with the lengths in each."""
        lengths = found[self.ids][1]
        for name, (_, others) in found.items():
            if not np.array_equal(others, lengths):
                raise base.damaged(self.path, f"has {name!r} of other lengths than {self.ids!r}")
        return self.block({name: values for name, (values, _) in found.items()}, lengths)

    def block(self, found: Mapping[str, NDArray[Any]], lengths: Lengths) -> base.DocumentBlock:
        """The documents of some rows, whose columns are flat arrays of the same length."""
        ids = found[self.ids]
        if ids.dtype.kind not in "iu":
            raise base.damaged(
                self.path,
                f"holds {ids.dtype} in its column {self.ids!r}, not whole numbers",
                hint="name the column of ids with: --set column=NAME",
            )
        for name in self.names:
            if len(found[name]) != len(ids):
                raise base.damaged(
                    self.path, f"has rows whose {name!r} and {self.ids!r} are not of one length"
                )
        mask: NDArray[np.uint8] | None = None
        if self.mask is not None:
            mask = (found[self.mask] != 0).view(np.uint8)
        elif self.labels is not None:
            labels = found[self.labels]
            counts = np.not_equal(labels, IGNORED)
            if (np.not_equal(labels, ids) & counts).any():
                raise base.damaged(
                    self.path,
                    f"has labels that are neither its {self.ids!r} nor {IGNORED}, so they do not"
                    " say which ids count",
                    hint="import without them: --set labels=no",
                )
            mask = counts.view(np.uint8)
        if self.padding is None or (real := found[self.padding] != 0).all():
            return base.DocumentBlock(ids, lengths, mask)
        sums = np.append(0, np.cumsum(real))
        ends = np.cumsum(lengths)
        kept = sums[ends] - sums[ends - lengths]
        self.check_padding(lengths - kept)
        return base.DocumentBlock(ids[real], kept, None if mask is None else mask[real])

    def check_padding(self, lacking: Lengths) -> None:
        """Refuse to join rows that are filled up, but for a last one: no stream was cut there."""
        if self.options.split_at_eos and lacking[:-1].any():
            raise UsageError(
                f"{str(self.path)!r} holds rows that are filled up with padding, so they were"
                " packed, not cut from a stream; joined they would be another text",
                hint="leave --split-at-eos out: each row becomes a document",
            )


def cut_at_eos(blocks: base.Blocks, options: base.ImportOptions, *, path: Path) -> base.Blocks:
    """The documents of rows that were cut from a stream: rows joined, cut after each eos."""
    if not options.split_at_eos:
        yield from blocks
        return
    if options.eos_id is None:
        raise UsageError(
            "documents are to end at the end-of-text id, and the tokenizer does not name one",
            hint="name it with --eos TOKEN",
        )
    held: list[base.DocumentBlock] = []
    for block in blocks:
        ends = np.flatnonzero(block.ids == options.eos_id) + 1
        if not len(ends):
            held.append(block)
            base.check_held(
                path, sum(each.ids.nbytes for each in held), "rows without an end-of-text"
            )
            continue
        last = int(ends[-1])
        joined = join_blocks([*held, _part(block, 0, last)])
        before = len(joined.ids) - last
        yield joined._replace(lengths=np.diff(ends + before, prepend=0))
        held = [_part(block, last, len(block.ids))]
    rest = join_blocks(held)
    if len(rest.ids):
        yield rest._replace(lengths=np.array([len(rest.ids)], np.int64))


def _part(block: base.DocumentBlock, first: int, last: int) -> base.DocumentBlock:
    mask = None if block.mask is None else block.mask[first:last]
    return base.DocumentBlock(block.ids[first:last], np.array([last - first], np.int64), mask)


def join_blocks(blocks: Sequence[base.DocumentBlock]) -> base.DocumentBlock:
    """Blocks as one."""
    if not blocks:
        return base.DocumentBlock(np.zeros(0, np.uint16), np.zeros(0, np.int64))
    masks = [block.mask for block in blocks if block.mask is not None]
    return base.DocumentBlock(
        np.concatenate([block.ids for block in blocks]),
        np.concatenate([block.lengths for block in blocks]),
        np.concatenate(masks) if masks else None,
    )


# -------------------------------------------------------------------------------------------------
# Foreign files of rows.


def open_rows(
    parts: Iterable[base.ForeignPart],
    read: Callable[[base.ForeignPart], base.Blocks],
    options: base.ImportOptions,
    *,
    has_mask: bool = False,
) -> base.Foreign:
    """Parts that are read as rows, which are joined and cut at the end-of-text if asked."""
    return base.Foreign(
        parts=tuple(parts),
        blocks=lambda part: cut_at_eos(read(part), options, path=part.file),
        has_mask=has_mask,
        note=CUT_NOTE if options.split_at_eos else ROWS_NOTE,
    )


def row_files(
    path: Path, *suffixes: str, what: str, hint: str = "name a file or a folder of them"
) -> list[tuple[str, Path]]:
    """The files with these suffixes that a path is, or the one that it is; SourceError if none."""
    found = base.find_files(path, *suffixes) or ([(path.name, path)] if path.is_file() else [])
    if not found:
        raise base.damaged(path, f"holds no {what}", hint=hint)
    return found


def row_parts(
    name: str, file: Path, edges: Sequence[int], *, size: int, split: str
) -> Iterator[base.ForeignPart]:
    """The parts of a file of so many bytes, from edge to edge."""
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        share = int(size * ((end - start) / max(1, edges[-1])))
        yield base.ForeignPart(
            path=name, file=file, index=index, start=start, end=end, split=split, bytes=share
        )


def blocks_of(begins: Lengths, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of records that begin at these places, about `most` from the first to the last."""
    first = 0
    while first < len(begins):
        last = first + int(np.searchsorted(begins[first:], int(begins[first]) + most))
        last = max(first + 1, last)
        yield first, last
        first = last


def split_folders(path: Path, marker: str) -> list[tuple[str, Path]]:
    """Folders that hold a file of this name: the path itself, or one for each split below it.

    The first of each pair is what the names of its files begin with: "" or "train/".
    """
    if path.name == marker and path.is_file():
        path = path.parent
    if (path / marker).is_file():
        return [("", path)]
    if not path.is_dir():
        return []
    folders = sorted(folder for folder in path.iterdir() if (folder / marker).is_file())
    return [(f"{folder.name}/", folder) for folder in folders]


def read_json(path: Path) -> Any:
    """The value in a small file of JSON; None where it is none."""
    if base.file_size(path) > INDEX_BYTES:
        raise base.damaged(
            path,
            f"is larger than {INDEX_BYTES:,} bytes, which no index should be",
            hint="write the files again into several folders, each with its own index",
        )
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


# -------------------------------------------------------------------------------------------------
# Records of a store: its documents, or rows of one length, as an export reads them.

# 4 MB as int32: enough to make the calls for it cheap, and about what a cache holds.
BATCH_TOKENS = 1 << 20
IDS = "input_ids"
EXTRA_COLUMNS = ("labels", "attention_mask", "loss_mask")
IDS_SETTING = base.Setting(
    default="int32",
    help="type of the ids: int32, which everything reads, or uint16, half the size",
    choices=("int32", "uint16"),
)
COLUMNS_SETTING = base.Setting(
    default="auto",
    help="columns beside the ids, of labels, attention_mask, loss_mask, with commas between; auto:"
    " labels and loss_mask where the store has a mask; where rows are padded, be it the last alone,"
    " attention_mask (arrow, parquet: labels too); none",
)
# Of formats with columns of one's choice.
WRITE_SETTINGS = {"ids": IDS_SETTING, "columns": COLUMNS_SETTING}
SETTINGS = WRITE_SETTINGS | READ_SETTINGS


def document_blocks(
    store: Store, first: int, last: int, *, most_bytes: int = base.BLOCK_BYTES
) -> base.Blocks:
    """Documents `first` to `last` of a store, about `most_bytes` of ids at a time.

    Views of the mapped shards: a document of any size costs no memory.
    """
    for mapped, low, high in _shard_ranges(store, first, last):
        index, size = mapped.index, mapped.index.dtype.itemsize
        for begin, end in blocks_of(index.offsets[low:high], most_bytes):
            documents = slice(low + begin, low + end)
            lengths = np.asarray(index.lengths[documents], np.int64)
            begin_at = int(index.offsets[low + begin]) // size
            stop = int(index.offsets[low + end - 1]) // size + int(lengths[-1])
            mask = None if mapped.mask is None else mapped.mask[begin_at:stop]
            yield base.DocumentBlock(mapped.tokens[begin_at:stop], lengths, mask)


def _shard_ranges(store: Store, first: int, last: int) -> Iterator[tuple[MappedShard, int, int]]:
    """The shards of documents `first` to `last`, and which of its documents these are."""
    number = store.locate(first)[0] if first < last else len(store.shards)
    for place, shard in enumerate(store.shards[number:], number):
        low = max(first - shard.first_document, 0)
        high = min(last - shard.first_document, shard.documents)
        if low < high:
            yield store.map_shard(place), low, high
        elif shard.first_document >= last:
            return


class RecordChunk(NamedTuple):
    """Some consecutive records."""

    tokens: NDArray[Any]  # rows: (rows, length), maybe with strides; documents: back to back
    lengths: Lengths  # tokens of each record
    real: NDArray[np.bool_] | None  # as `tokens`: False on padding; None where there is none
    mask: NDArray[np.uint8] | None  # as `tokens`: the loss mask; None where all tokens count

    @property
    def counts(self) -> NDArray[np.bool_] | None:
        """Where a token counts for the loss; None is everywhere."""
        if self.mask is None:
            return self.real
        mask = self.mask.astype(np.bool_)
        return mask if self.real is None else mask & self.real

    def column(self, name: str, *, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A column, as `tokens` is; ids become `dtype`."""
        if name == IDS:
            return self.tokens.astype(dtype, order="C", copy=False)
        counts = self.real if name == "attention_mask" else self.counts
        if name == "labels":
            labels = self.tokens.astype(np.int64)
            if counts is not None:
                labels[~counts] = IGNORED
            return labels
        return np.ones(self.tokens.shape, np.int8) if counts is None else counts.astype(np.int8)


class DocumentRecords:
    """The documents of a store."""

    def __init__(self, store: Store) -> None:
        self.count = store.num_documents
        self._store = store

    def batches(self, first: int, last: int, tokens: int = BATCH_TOKENS) -> Iterator[RecordChunk]:
        """Documents `first` to `last`, about so many tokens at a time; longer ones are alone."""
        most = tokens * self._store.dtype.itemsize
        for ids, lengths, mask in document_blocks(self._store, first, last, most_bytes=most):
            yield RecordChunk(ids, lengths, None, mask)

    def lengths(self, first: int, last: int) -> Lengths:
        """Tokens of each of these documents."""
        return np.concatenate([np.zeros(0, np.int64), *self._length_blocks(first, last)])

    def _length_blocks(self, first: int, last: int) -> Iterator[Lengths]:
        for mapped, low, high in _shard_ranges(self._store, first, last):
            yield mapped.index.lengths[low:high].astype(np.int64)

    def cut(self, costs: Costs, *, budget: int) -> Iterator[Range]:
        """Ranges of documents whose costs, given their lengths, are within a budget in all.

        A document that costs more than the budget is alone. Goes over the index once.
        """
        return cut_lengths(self._length_blocks(0, self.count), costs, budget=budget)


def cut_lengths(blocks: Iterable[Lengths], costs: Costs, *, budget: int) -> Iterator[Range]:
    """Ranges of documents whose lengths come in blocks, as `DocumentRecords.cut` gives them."""
    first = number = held = tokens = 0
    for lengths in blocks:
        ends = np.cumsum(costs(lengths), dtype=np.int64)
        sums = np.cumsum(lengths)
        place = 0
        while place < len(ends):
            before, sum_before = (int(ends[place - 1]), int(sums[place - 1])) if place else (0, 0)
            upto = int(np.searchsorted(ends, budget - held + before, side="right"))
            if upto <= place:
                # It does not fit, and goes into the next range, or alone into this one.
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

    `concat` without overlap: each token is in one row. Other packings are those of the loader for
    `length - 1` inputs, whose rows have `length` tokens.
    """

    def __init__(self, store: Store, *, length: int, overlap: int, packing: str) -> None:
        if length < 2:
            raise UsageError(
                f"rows of {length} tokens teach nothing", hint="use a longer --seq-len"
            )
        self._store = store
        self.length = length
        self.pad_id = check_pad_id(store, None)
        self._step = length - overlap
        self._stream = open_stream(store)
        kind = find_packing(packing)
        # None where rows follow each other as the tokens do, so that only the last one is padded.
        self.layout: Layout | None = None
        if not kind.back_to_back:
            self.layout = kind(self._stream, seq_len=length - 1)
            self.count = self.layout.num_rows
        else:
            rows = -(-(store.num_tokens - overlap) // self._step)
            self.count = max(1, rows) if store.num_tokens else 0

    @property
    def padding(self) -> int:
        """Places of rows that no token stands in."""
        if not self.count:
            return 0
        if self.layout is None:
            held = self.count * self._step + self.length - self._step
            return held - self._store.num_tokens
        return self.layout.account().padding

    def lengths(self, first: int, last: int) -> Lengths:
        """All the same."""
        return np.full(last - first, self.length, np.int64)

    def cut(self, costs: Costs, *, budget: int) -> Iterator[Range]:
        """Equally many rows in all ranges but the last."""
        cost = int(costs(self.lengths(0, 1))[0])
        step = max(1, budget // cost)
        for first in range(0, self.count, step):
            last = min(first + step, self.count)
            yield first, last, (last - first) * self.length

    def batches(self, first: int, last: int, tokens: int = BATCH_TOKENS) -> Iterator[RecordChunk]:
        """Rows, as (rows, length) arrays."""
        step = max(1, tokens // self.length)
        for begin in range(first, last, step):
            rows = np.arange(begin, min(begin + step, last), dtype=np.int64)
            yield self._concatenated(rows) if self.layout is None else self._packed(rows)

    def _concatenated(self, rows: Lengths) -> RecordChunk:
        """Rows that are back to back in the stream: views where they are in one shard."""
        low, wanted = int(rows[0]) * self._step, len(rows) * self._step
        wanted += self.length - self._step
        count = min(wanted, self._store.num_tokens - low)
        spans = self._stream.locate(np.array([low], np.int64), np.array([count], np.int64))
        pieces = [
            self._stream.spanned.map_shard(shard).tokens[first:last]
            for shard, first, last in spans.T.tolist()
        ]
        tokens: NDArray[Any] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        has_mask = self._store.has_mask
        mask = self._stream.read_mask(spans).view(np.uint8) if has_mask else None
        real: NDArray[np.bool_] | None = None
        if lacking := wanted - count:
            tokens = np.append(tokens, np.full(lacking, self.pad_id, tokens.dtype))
            mask = None if mask is None else np.append(mask, np.zeros(lacking, np.uint8))
            real = np.arange(wanted) < count

        def as_rows(flat: NDArray[Any] | None) -> Any:
            # With an overlap, the last token of a row is the first of the next.
            if flat is None:
                return None
            return np.lib.stride_tricks.sliding_window_view(flat, self.length)[:: self._step]

        lengths = self.lengths(0, len(rows))
        return RecordChunk(as_rows(tokens), lengths, as_rows(real), as_rows(mask))

    def _packed(self, rows: Lengths) -> RecordChunk:
        """Rows of pieces from here and there."""
        assert self.layout is not None
        starts, lengths = self.layout.pieces(rows)
        shape = len(rows), self.length
        spans = self._stream.locate(starts, lengths)
        tokens = self._stream.read_spans(spans, pad=self.pad_id).reshape(shape)
        real, mask = None, None
        if starts.min(initial=0) == PADDING:
            real = np.repeat(starts != PADDING, lengths).reshape(shape)
        if self._store.has_mask:
            mask = self._stream.read_mask(spans).view(np.uint8).reshape(shape)
        return RecordChunk(tokens, self.lengths(0, len(rows)), real, mask)


Records = DocumentRecords | RowRecords


class RowFormat(base.Format):
    """A format of records, some to a file, and of files that describe those of a split."""

    index: tuple[str, ...] = ()  # the latter
    # What says where rows are padded, unless other columns are asked for.
    padding_columns: tuple[str, ...] = ("attention_mask",)

    def records(self, export: Export, split: str) -> Records:
        """What is written of a split: rows where `seq_len` is given, else documents.

        With an overlap a row has one token more than `seq_len`, which is the next row's first.
        """
        store, options, overlap = export.stores[split], export.options, self.about.row_overlap
        if options.seq_len is None:
            return DocumentRecords(store)
        length = options.seq_len + overlap
        return RowRecords(store, length=length, overlap=overlap, packing=options.packing)

    def rows(self, export: Export, split: str) -> RowRecords:
        """The same of a format that has rows alone."""
        found = self.records(export, split)
        assert isinstance(found, RowRecords)
        return found

    def dtype(self, export: Export, split: str) -> np.dtype[Any]:
        """The type of ids that was asked for; UsageError where the vocabulary does not fit it."""
        name, vocab_size = str(export.options.settings["ids"]), export.stores[split].vocab_size
        if name == "uint16" and vocab_size > 1 << 16:
            raise UsageError(
                f"ids of a vocabulary of {vocab_size:,} do not fit uint16",
                hint="leave the setting out, or: --set ids=int32",
            )
        return np.dtype(name).newbyteorder("<")

    def columns(self, export: Export) -> tuple[str, ...]:
        """The columns beside the ids, in the order of `EXTRA_COLUMNS`; the same for all splits."""
        options = export.options
        text = str(options.settings.get("columns", "none"))
        wanted = {name.strip() for name in text.split(",")} - {"none", ""}
        if text == "auto":
            wanted = {*self.padding_columns} if self.pads(export) else set()
            if any(store.has_mask for store in export.stores.values()):
                # Trainers look at labels alone, and without them count everything.
                wanted |= {"labels", "loss_mask"}
        if unknown := wanted - {*EXTRA_COLUMNS}:
            raise UsageError(
                f"columns={text!r}: there is no column {min(unknown)!r}",
                hint=f"use some of {', '.join(EXTRA_COLUMNS)}; auto; or none",
            )
        return tuple(name for name in EXTRA_COLUMNS if name in wanted)

    def pads(self, export: Export) -> bool:
        """Whether some row is filled up, if only the last one of a split."""
        if export.options.seq_len is None:
            return False
        if not LAYOUTS[export.options.packing].back_to_back:
            return True
        return any(self.rows(export, split).padding for split in export.stores)

    @abstractmethod
    def ranges(self, export: Export, split: str) -> list[Range]:
        """The records of each file."""

    @abstractmethod
    def file_name(self, export: Export, split: str, number: int, count: int) -> str:
        """The name of a file, given how many there are."""

    def plan(self, export: Export) -> list[base.ExportTask]:
        parts = []
        self.columns(export)  # refused here, if they are
        for split in export.stores:
            self.dtype(export, split)
            found = self.ranges(export, split)
            for number, (first, last, tokens) in enumerate(found):
                file = self.file_name(export, split, number, len(found))
                parts.append(base.ExportTask(split, tokens, (file,), first, last))
        return parts

    def index_files(self, export: Export) -> list[str]:
        return [export.name(split, file) for split in export.stores for file in self.index]

    def describe(self, export: Export, split: str, parts: Sequence[base.ExportTask]) -> list[bytes]:
        """The files that describe those of a split."""
        return []

    @abstractmethod
    def how_to_read(self, export: Export) -> list[str]:
        """Lines for the user."""

    def finish(self, export: Export, out: PartFiles) -> list[str]:
        notes, columns = self.how_to_read(export), self.columns(export)
        counts: list[str] = []
        for split, store in export.stores.items():
            parts = [part for part in export.parts if part.split == split]
            described = self.describe(export, split, parts)
            for file, data in zip(self.index, described, strict=True):
                out.write(export.name(split, file), data)
            rows = self.records(export, split)
            if not isinstance(rows, RowRecords):
                continue
            if rows.count and "attention_mask" not in columns:
                notes += _padding_note(rows, split)
            counts.append(
                f"{split}: {rows.count:,} rows of {rows.length:,} tokens, packed by"
                f" {export.options.packing}"
            )
            lost = 0 if rows.layout is None else store.num_tokens - rows.layout.used
            if lost:
                counts.append(
                    f"{split}: {lost:,} of {store.num_tokens:,} tokens are in no row: they come"
                    f" after the first {rows.length:,} of their document"
                )
        return notes + counts


def _padding_note(rows: RowRecords, split: str) -> list[str]:
    """What to know about padding that no column tells of."""
    if rows.layout is not None:
        return [f"{split}: rows are filled up with the id {rows.pad_id}; no column says where"]
    [last] = rows.batches(rows.count - 1, rows.count)
    lacking = 0 if last.real is None else int(np.count_nonzero(~last.real))
    if not lacking:
        return []
    return [f"{split}: the last row ends with {lacking:,} ids of padding ({rows.pad_id})"]
