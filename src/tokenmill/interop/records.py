"""What the formats of rows write: rows of one length, or documents, as columns of numpy arrays.

    store -> Records (rows or documents) -> cut into files, by size alone -> Batch after Batch

`Records` speaks of a store's rows or documents by number, so that a part of an export is two
numbers. A batch is a few megabytes of them: views of the mapped shards wherever they lie back to
back, so that the one copy made is the one that widens the ids.
"""

from __future__ import annotations

import itertools
import json
import mmap
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    DocumentBlock,
    ExportTask,
    Setting,
    check_expansion,
    check_held,
    damaged,
    file_size,
)
from tokenmill.loader.batch import IGNORED
from tokenmill.loader.options import check_pad_id
from tokenmill.loader.packing import LAYOUTS, PADDING, Layout, find_packing
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions, ImportOptions
    from tokenmill.store.reader import Store


# -------------------------------------------------------------------------------------------------
# Columns of other people's rows, on their way into a store: which are ids, masks, padding.
#
# A row becomes a document. `attention_mask` takes padding out of it; `loss_mask` (or `mask`), or
# `labels` that are the ids with -100 here and there, say what counts for the loss.

ID_NAMES = ("input_ids", "ids", "tokens", "input")
"""Columns that hold ids, in the order in which they are looked for."""
MASK_NAMES = ("loss_mask", "mask")
COLUMN_SETTING = Setting(
    default="", help=f"import: the column of ids; else the first of {', '.join(ID_NAMES)}"
)
LABELS_SETTING = Setting(
    default=True, help="import: whether labels of -100 say what does not count for the loss"
)
INDEX_BYTES = 64 << 20
"""Of an index of JSON, which becomes some 20 times as much in memory."""
UNPACKED_BYTES = (1 << 32) - 1
"""Of a packed file of MDS or LitData: offsets in them are of 32 bits."""
ROWS_NOTE = "each row became a document; if rows were cut from a stream: --split-at-eos"
CUT_NOTE = "rows were joined and cut behind the end-of-text id; what lies in two files is cut there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a file that are read, by what they are for."""

    ids: str
    padding: str | None = None
    mask: str | None = None
    labels: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        found = (self.ids, self.padding, self.mask, self.labels)
        return tuple(name for name in found if name is not None)

    @property
    def has_mask(self) -> bool:
        return self.mask is not None or self.labels is not None


def choose_columns(
    names: Sequence[str], options: ImportOptions, *, path: Path | str, prefer: str | None = None
) -> Columns:
    """Which columns to read; SourceError lists them where none is known to hold ids."""
    wanted = str(options.settings.get("column") or "") or prefer
    candidates = [wanted] if wanted else [name for name in ID_NAMES if name in names]
    if not candidates or candidates[0] not in names:
        raise SourceError(
            f"{str(path)!r} has no column {wanted!r}"
            if wanted
            else f"{str(path)!r} has no column that is known to hold ids",
            hint=f"name it with: --set column=NAME; there are: {', '.join(names) or 'none'}",
        )
    mask = next((name for name in MASK_NAMES if name in names), None)
    use_labels = mask is None and bool(options.settings.get("labels", True))
    return Columns(
        ids=candidates[0],
        padding="attention_mask" if "attention_mask" in names else None,
        mask=mask,
        labels="labels" if use_labels and "labels" in names else None,
    )


def make_block(
    found: Mapping[str, NDArray[Any]],
    columns: Columns,
    lengths: NDArray[np.int64],
    options: ImportOptions,
    *,
    path: Path | str,
) -> DocumentBlock:
    """The documents of some rows, whose columns are flat arrays of the same length."""
    ids = found[columns.ids]
    if ids.dtype.kind not in "iu":
        raise damaged(
            path,
            f"holds {ids.dtype} in its column {columns.ids!r}, not whole numbers",
            hint="name the column of ids with: --set column=NAME",
        )
    for name in columns.names:
        if len(found[name]) != len(ids):
            raise damaged(
                path, f"has rows whose {name!r} and {columns.ids!r} are not of one length"
            )
    mask = _mask(found, columns, ids, path=path)
    if columns.padding is not None:
        block = _without_padding(ids, lengths, mask, found[columns.padding] != 0)
        check_padding(lengths - block.lengths, options, path=path)
        return block
    return DocumentBlock(ids, lengths, mask)


def check_padding(lacking: NDArray[np.int64], options: ImportOptions, *, path: Path | str) -> None:
    """Refuse to join rows that are filled up, but for a last one: no stream was cut there."""
    if options.split_at_eos and lacking[:-1].any():
        raise UsageError(
            f"{str(path)!r} holds rows that are filled up with padding, so they were packed, not"
            " cut from a stream; joined they would be another text",
            hint="leave --split-at-eos out: each row becomes a document",
        )


def _mask(
    found: Mapping[str, NDArray[Any]], columns: Columns, ids: NDArray[Any], *, path: Path | str
) -> NDArray[np.uint8] | None:
    if columns.mask is not None:
        return _bytes(found[columns.mask] != 0)
    if columns.labels is None:
        return None
    labels = found[columns.labels]
    counts = np.not_equal(labels, IGNORED)
    if (np.not_equal(labels, ids) & counts).any():
        raise damaged(
            path,
            f"has labels that are neither its {columns.ids!r} nor {IGNORED}, so they do not say"
            " which ids count",
            hint="import without them: --set labels=no",
        )
    return _bytes(counts)


def _bytes(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return flags.view(np.uint8)


def _without_padding(
    ids: NDArray[Any],
    lengths: NDArray[np.int64],
    mask: NDArray[np.uint8] | None,
    real: NDArray[np.bool_],
) -> DocumentBlock:
    if real.all():
        return DocumentBlock(ids, lengths, mask)
    sums = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(real, out=sums[1:])
    ends = np.cumsum(lengths)
    kept = sums[ends] - sums[ends - lengths]
    return DocumentBlock(ids[real], kept, None if mask is None else mask[real])


def cut_at_eos(
    blocks: Iterable[DocumentBlock], options: ImportOptions, *, path: Path | str
) -> Iterator[DocumentBlock]:
    """The documents of rows that were cut from a stream: rows joined, cut behind each eos."""
    if not options.split_at_eos:
        yield from blocks
        return
    if options.eos_id is None:
        raise UsageError(
            "documents are to end at the end-of-text id, and the tokenizer does not name one",
            hint="name it with --eos TOKEN",
        )
    held: list[DocumentBlock] = []
    for block in blocks:
        ends = np.flatnonzero(block.ids == options.eos_id) + 1
        if not len(ends):
            held.append(block)
            check_held(path, sum(each.ids.nbytes for each in held), "rows without an end-of-text")
            continue
        last = int(ends[-1])
        joined = _join([*held, _part(block, 0, last)])
        before = len(joined.ids) - last
        yield joined._replace(lengths=np.diff(ends + before, prepend=0))
        held = [_part(block, last, len(block.ids))]
    rest = _join(held)
    if len(rest.ids):
        yield rest._replace(lengths=np.array([len(rest.ids)], np.int64))


def _part(block: DocumentBlock, first: int, last: int) -> DocumentBlock:
    mask = None if block.mask is None else block.mask[first:last]
    return DocumentBlock(block.ids[first:last], np.array([last - first], np.int64), mask)


def _join(blocks: Sequence[DocumentBlock]) -> DocumentBlock:
    if not blocks:
        return DocumentBlock(np.zeros(0, np.uint16), np.zeros(0, np.int64))
    masks = [block.mask for block in blocks if block.mask is not None]
    return DocumentBlock(
        np.concatenate([block.ids for block in blocks]),
        np.concatenate([block.lengths for block in blocks]),
        np.concatenate(masks) if masks else None,
    )


def note_of(options: ImportOptions) -> str:
    """What an import of rows tells of borders."""
    return CUT_NOTE if options.split_at_eos else ROWS_NOTE


def gather(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Stretches of a file back to back: one strided copy where all are alike, else a join."""
    if not len(starts):
        return np.zeros(0, np.uint8)
    if int(starts.min()) < 0 or int(ends.max()) > len(data) or (ends < starts).any():
        raise IndexError("stretches that do not lie in the file")
    if len(starts) == 1:
        return data[int(starts[0]) : int(ends[0])]
    length = int(ends[0] - starts[0])
    step = int(starts[1] - starts[0])
    alike = bool((ends - starts == length).all()) and bool((np.diff(starts) == step).all())
    if alike and 0 < length <= step:
        rows = np.lib.stride_tricks.as_strided(
            data[int(starts[0]) :], (len(starts), length), (step, 1), writeable=False
        )
        return np.ascontiguousarray(rows).reshape(-1)
    view = data.data
    pieces = [view[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return np.frombuffer(bytearray().join(pieces), np.uint8)


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
    if file_size(path) > INDEX_BYTES:
        raise damaged(
            path,
            f"is larger than {INDEX_BYTES:,} bytes, which no index should be",
            hint="write the files again into several folders, each with its own index",
        )
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def whole_number(value: object, *, path: Path, most: int | None = None) -> int:
    """A count or a size of an index; SourceError where it is none, or larger than it can be."""
    if type(value) is not int or value < 0 or (most is not None and value > most):
        limit = "" if most is None else f" up to {most:,}"
        raise damaged(path, f"says {repr(value)[:40]} where a count or size{limit} must stand")
    return value


def unpack(path: Path, codec: str, *, size: int) -> NDArray[np.uint8]:
    """The bytes of a packed file, piece by piece by way of the disk: they may be 4 GB."""
    check_expansion(path, size, packed=file_size(path))
    left, buffer = size, memoryview(bytearray(min(BLOCK_BYTES, size + 1)))
    with tempfile.TemporaryFile() as file:
        try:
            with pa.CompressedInputStream(pa.memory_map(str(path)), codec) as stream:
                while left >= 0 and (count := stream.readinto(buffer)):
                    left -= count
                    file.write(buffer[:count])
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, f"cannot be unpacked: {error}") from error
        if left or not size:
            raise damaged(path, f"does not unpack to the {size:,} bytes of its index")
        file.flush()
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)


def ranges(count: int, *, total_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Stretches of `count` records that are about `part_bytes` each; one for none at all."""
    parts = max(1, min(count, -(-total_bytes // part_bytes)))
    borders = [count * i // parts for i in range(parts + 1)]
    yield from itertools.pairwise(borders)


def first_bytes(path: Path, count: int = 16) -> bytes:
    """The beginning of a file; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def files_below(path: Path, suffixes: Iterable[str]) -> list[tuple[str, Path]]:
    """The file itself, or all files below a folder with these suffixes: name and path, sorted."""
    wanted = tuple(suffixes)
    if path.is_file():
        return [(path.name, path)] if path.name.endswith(wanted) else []
    found = sorted(
        each for each in path.rglob("*") if each.name.endswith(wanted) and each.is_file()
    )
    return [(each.relative_to(path).as_posix(), each) for each in found]


# -------------------------------------------------------------------------------------------------
# What exports of documents read of a store: blocks of whole documents, as views of its maps.


def document_blocks(
    store: Store, *, first: int = 0, last: int | None = None, most_bytes: int = BLOCK_BYTES
) -> Iterator[DocumentBlock]:
    """Documents `first` to `last` of a store, about `most_bytes` of ids at a time.

    Views of the mapped shards: a document of any size costs no memory.
    """
    end = store.num_documents if last is None else last
    for number, shard in enumerate(store.shards):
        low = max(first - shard.first_document, 0)
        high = min(end - shard.first_document, shard.documents)
        if low < high:
            yield from shard_blocks(store, number, first=low, last=high, most_bytes=most_bytes)


def shard_blocks(
    store: Store,
    shard: int,
    *,
    first: int = 0,
    last: int | None = None,
    most_bytes: int = BLOCK_BYTES,
) -> Iterator[DocumentBlock]:
    """Documents `first` to `last` of one shard."""
    mapped = store.map_shard(shard)
    index, mask = mapped.index, mapped.mask
    size = index.dtype.itemsize
    end = len(index.lengths) if last is None else last
    while first < end:
        base = int(index.offsets[first])
        upto = first + int(np.searchsorted(index.offsets[first:end], base + most_bytes))
        upto = max(first + 1, upto)
        stop = int(index.offsets[upto - 1]) + int(index.lengths[upto - 1]) * size
        here = slice(base // size, stop // size)
        yield DocumentBlock(
            mapped.tokens[here],
            np.asarray(index.lengths[first:upto], np.int64),
            None if mask is None else mask[here],
        )
        first = upto


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


class RecordChunk(NamedTuple):
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

    def batches(
        self, first: int, last: int, *, tokens: int = BATCH_TOKENS
    ) -> Iterator[RecordChunk]:
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

    def batches(
        self, first: int, last: int, *, tokens: int = BATCH_TOKENS
    ) -> Iterator[RecordChunk]:
        """Documents, those of more tokens than asked for alone."""
        most_bytes = tokens * self._store.dtype.itemsize
        for ids, lengths, mask in document_blocks(
            self._store, first=first, last=last, most_bytes=most_bytes
        ):
            yield RecordChunk(ids, lengths, None, mask)

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
        kind = find_packing(packing)
        self._layout: Layout | None = None
        if not kind.back_to_back:
            self._layout = kind(self._stream, seq_len=length - 1)
            self.count = self._layout.num_rows
        else:
            rows = -(-(store.num_tokens - overlap) // self._step)
            self.count = max(1, rows) if store.num_tokens else 0

    @property
    def back_to_back(self) -> bool:
        """Whether rows follow each other as the tokens do, so that only the last one is padded."""
        return self._layout is None

    @property
    def dropped(self) -> int:
        """Tokens that are in no row."""
        return 0 if self._layout is None else self._store.num_tokens - self._layout.used

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

    def batches(
        self, first: int, last: int, *, tokens: int = BATCH_TOKENS
    ) -> Iterator[RecordChunk]:
        """Rows, as (rows, length) arrays."""
        step = max(1, tokens // self._length)
        for begin in range(first, last, step):
            rows = np.arange(begin, min(begin + step, last), dtype=np.int64)
            yield self._packed(rows) if self._layout is not None else self._concatenated(rows)

    def _concatenated(self, rows: NDArray[np.int64]) -> RecordChunk:
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
        return RecordChunk(
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

    def _packed(self, rows: NDArray[np.int64]) -> RecordChunk:
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
        return RecordChunk(tokens, np.full(len(rows), self._length, np.int64), real, mask)

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
        pads = options.seq_len is not None and not LAYOUTS[options.packing].back_to_back
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


def column(batch: RecordChunk, name: str, *, dtype: np.dtype[Any]) -> NDArray[Any]:
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


def _ones(batch: RecordChunk) -> NDArray[np.int8]:
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
    split: str, stretch: tuple[int, int, int], file: str, *, columns: Sequence[str] = ()
) -> ExportTask:
    """The part that writes a stretch of records into a file of its own."""
    first, last, tokens = stretch
    return ExportTask(
        split=split,
        tokens=tokens,
        files=(file,),
        task={"first": first, "last": last, "columns": [*columns]},
    )


def stretch_of(part: ExportTask) -> tuple[int, int]:
    """First and last record of such a part."""
    first, last = part.task["first"], part.task["last"]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last


def columns_of(part: ExportTask) -> tuple[str, ...]:
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
    rows = open_records(store, options, overlap=overlap)
    notes = [f"{split}: {rows.count:,} rows of {length:,} tokens, packed by {options.packing}"]
    lost = rows.dropped if isinstance(rows, RowRecords) else 0
    if lost:
        notes.append(
            f"{split}: {lost:,} of {store.num_tokens:,} tokens are in no row: they come after"
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
