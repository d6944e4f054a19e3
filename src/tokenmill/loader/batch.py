"""One batch, as arrays: fields are computed from tokens and documents when they are first used.

    rows of L + 1 tokens     t0 t1 t2 | u0 u1 . .      | a new document begins   . padding
    input_ids                t0 t1 t2   u0 u1 .
    labels                   t1 t2 u0   u1 -  -        - ignored: -100, as what a mask leaves out
    position_ids              0  1  2    0  1 0
    doc_ids                   0  0  0    1  1 -1
    cu_seqlens                0 3 5 6 6 6              ends, over all rows; the last one repeated
                                                       (an attention window ends them earlier)

With labels="same" a row is L tokens, all of them inputs, and each label is that of its own place:

    input_ids                t0 t1 t2 | u0 u1 .
    labels                    - t1 t2   u0 u1 -        the first of a row follows nothing in it

Shapes stay the same from batch to batch, so that a compiled model is not compiled again. They
change with a stage's seq_len, and in a last batch that is kept short; and `cu_seqlens` has one of a
few sizes, which are known before the run (`Loader.cu_seqlens_sizes`): a kernel for attention within
documents works for every entry, also where it repeats the one before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import UsageError
from tokenmill.loader.order import Ints
from tokenmill.loader.packing import PADDING, causal_pairs, inputs_of
from tokenmill.markup import Shown
from tokenmill.records import lazy
from tokenmill.store.stream import NO_SHARD, distinct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenmill.loader.loader import Loader
    from tokenmill.loader.packing import Layout
    from tokenmill.store.format import TokenArray
    from tokenmill.store.reader import SourceRow, Store
    from tokenmill.store.stream import Spans, TokenStream


NO_ROW = -1  # number of a row that is all padding: it fills the last batch up
LEAST_MAX_SEQLEN = 128  # tokens of a block of a kernel: less is no less work
IGNORED = -100  # label that losses leave out, as PyTorch's cross entropy does
# What labels a batch has: those of the next tokens, or, for a model that shifts them by itself as
# those of transformers do, those of the tokens at the same places.
LABELS = ("next", "same")

Bools: TypeAlias = NDArray[np.bool_]
# Ranges that fill rows one after the other, each of one document or padding: their places in the
# flattened rows, their lengths, and which are padding.
DocumentRanges: TypeAlias = tuple[Ints, Ints, Bools]
# Steps of a window that were read in one go, by their places: their tokens, (steps, rows, seq_len +
# 1), and which of them count, None where no store says so.
Chunk: TypeAlias = "tuple[Window, range, TokenArray, Bools | None]"


def check_pad_id(store: Store, pad_id: int | None) -> int:
    """The id of padding: any will do, since its labels never count; the end of text by default."""
    if pad_id is None:
        return store.eos_id or 0
    if type(pad_id) is not int or not 0 <= pad_id < store.vocab_size:
        raise UsageError(
            f"pad_id={pad_id!r} is not an id of the vocabulary of {store.vocab_size:,}",
            hint="leave it out: padding never counts, and the end of text does for it",
        )
    return pad_id


@lru_cache(maxsize=8)
def _ramp(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


class Batch(Shown):
    """Rows for one step on one rank.

    With ids in their stored width there is no room for -100: `loss_mask` alone says what counts.
    """

    def __init__(
        self, window: Window, place: int, step: int, tokens: TokenArray, mask: Bools | None = None
    ) -> None:
        self._window = window
        self._place = place
        self.step = step
        self.tokens = tokens
        """(rows, seq_len + 1), in the stored width; (rows, seq_len) where labels are "same"."""
        self.mask = mask
        """As many: which tokens count by the masks of their stores, padding not; None where no
        store has a mask."""

    def __iter__(self) -> Iterator[NDArray[np.integer]]:
        """`input_ids, labels = batch`."""
        return iter((self.input_ids, self.labels))

    def keep_views(self, input_ids: TokenArray, labels: TokenArray) -> Self:
        """Views that were made for many batches at once: making them for one costs 2 us."""
        self.__dict__["input_ids"], self.__dict__["labels"] = input_ids, labels
        return self

    @property
    def labels_are(self) -> str:
        """Labels are the tokens after the inputs ("next"), or the inputs ("same")."""
        return "next" if self._window.lead else "same"

    @property
    def sources(self) -> Ints:
        """Source of each row, by its place in the mixture."""
        found: Ints = self._window.sources[self._place]
        return found

    @property
    def rows(self) -> Ints:
        """Number of each row in the layout of its source; -1 for a row of padding."""
        found: Ints = self._window.rows[self._place]
        return found

    @property
    def epochs(self) -> Ints:
        """Epoch of its source that each row belongs to."""
        found: Ints = self._window.epochs[self._place]
        return found

    @property
    def seq_len(self) -> int:
        return int(self.tokens.shape[1]) - self._window.lead

    @property
    def attention_shape(self) -> AttentionShape:
        """What a kernel wants to know of the documents, as plain numbers."""
        return self._window.attention_shapes[self._place]

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest range of `cu_seqlens`, or a few more: the next power of two, 128 or
        more, and `seq_len` at most. So there are few of them, as compiled kernels want it."""
        return self.attention_shape.max_seqlen

    @property
    def num_documents(self) -> int:
        """Ranges of `cu_seqlens` that have a token; the padding of a row counts as one."""
        return self.attention_shape.num_documents

    @property
    def attention_pairs(self) -> int:
        """Pairs of tokens of which one looks at the other, itself included, in causal attention
        within the ranges of `cu_seqlens`: what attention has to do for this batch."""
        return self.attention_shape.attention_pairs

    @lazy
    def input_ids(self) -> NDArray[np.integer]:
        """(rows, seq_len)."""
        inputs, dtype = self.tokens[:, : self.seq_len], self._window.dtype
        return inputs if dtype is None else inputs.astype(dtype)

    @lazy
    def labels(self) -> NDArray[np.integer]:
        """(rows, seq_len): the next token of each input, or with labels="same" the same; -100 where
        it must not count."""
        labels, dtype = self.tokens[:, self._window.lead :], self._window.dtype
        if dtype is None:
            return labels
        wide = labels.astype(dtype)
        if not self.all_count:
            wide[~self.loss_mask] = IGNORED
        elif not self._window.lead:
            wide[:, 0] = IGNORED
        return wide

    @property
    def all_count(self) -> bool:
        """Whether nothing is masked for sure, but for the first label of a row where labels are
        "same"; told without looking at any document."""
        return self.mask is None and not (
            self.masks_boundaries or self._window.is_padded(self._place)
        )

    @property
    def masks_boundaries(self) -> bool:
        """Whether the label at the end of a document does not count if it is of the next one."""
        return self._window.masks_boundaries

    @lazy
    def loss_mask(self) -> Bools:
        """(rows, seq_len): whether each label counts."""
        lead = self._window.lead
        if self.all_count:
            counts: Bools = np.ones(self._shape, np.bool_)
        elif self.mask is not None and not self.masks_boundaries:
            counts = self.mask[:, lead:].copy()
        else:
            _, lengths, is_padding = self._window.documents(self._place)
            counts = np.repeat(~is_padding, lengths) if self.mask is None else self.mask.flatten()
            if self.masks_boundaries:
                counts[np.cumsum(lengths[:-1])] = False
            counts = np.ascontiguousarray(counts.reshape(self.tokens.shape)[:, lead:])
        if not lead:
            counts[:, 0] = False
        return counts

    @lazy
    def position_ids(self) -> NDArray[np.int32]:
        """(rows, seq_len): place of each token in its document, as far as the row has it."""
        starts, lengths, _ = self._documents
        begins = np.repeat(starts.astype(np.int32), lengths)
        return np.subtract(_ramp(len(begins)), begins, out=begins).reshape(self._shape)

    @lazy
    def doc_ids(self) -> NDArray[np.int32]:
        """(rows, seq_len): number of each token's document in its row; -1 for padding."""
        starts, lengths, is_padding = self._documents
        begins_row = starts % self.seq_len == 0
        numbers = np.arange(len(starts), dtype=np.int32)
        numbers -= np.maximum.accumulate(np.where(begins_row, numbers, 0))
        numbers[is_padding] = -1
        return np.repeat(numbers, lengths).reshape(self._shape)

    @lazy
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where documents begin in the flattened rows, 0 first, then the number of tokens."""
        starts, _ = self._window.attended(self._place)
        ends = np.full(self.attention_shape.size, len(self.tokens) * self.seq_len, np.int32)
        ends[: len(starts)] = starts
        return ends

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.tokens), self.seq_len

    @lazy
    def _documents(self) -> DocumentRanges:
        """Documents in the rows, without the last token of each row."""
        return self._window.documents(self._place, inputs=True)

    def __getstate__(self) -> dict[str, object]:
        # The other steps that were found with this one stay here, and the store.
        return {**self.__dict__, "_window": self._window.alone(self._place), "_place": 0}

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, rows={len(self.tokens)}, seq_len={self.seq_len})"


# -------------------------------------------------------------------------------------------------
# The rows of some steps, found all at once: what a loader looks ahead.
#
# To find where a row is takes a dozen calls of numpy, for one row or for thousands; to read it
# takes one. So rows are found for many steps, and read for a few: as many as stay in a core's
# cache on their way. (A read of one batch would spend more time on calls than on copying: 16 rows
# of 2,048 tokens are copied in about 10 microseconds.) Documents, if anyone asks for them, are
# looked up for the whole window too.


class AttentionShape(NamedTuple):
    """What a kernel wants to know of the documents of a step, as plain numbers; see `Batch`."""

    size: int  # of cu_seqlens
    max_seqlen: int
    num_documents: int
    attention_pairs: int


def rounded_up(number: int, *, least: int) -> int:
    """To a power of two: few numbers for what is compiled or planned for each of them."""
    return max(least, 1 << max(0, number - 1).bit_length())


def room_for(entries: int, sizes: Sequence[int]) -> int:
    """The least of the sizes that holds so many entries; beyond them, one doubled."""
    for size in sizes:
        if entries <= size:
            return size
    size = sizes[-1]
    while size < entries:
        size *= 2
    return size


class Window:
    """Some steps on one rank, whose tokens are read when a chunk of them is asked for.

    `sources` (as `Loader.layout_of` knows them), `rows` (numbers in the layouts, or `NO_ROW`) and
    `epochs` are (steps, rows of a batch).
    """

    def __init__(
        self,
        loader: Loader,
        seq_len: int,
        steps: range,
        sources: Ints,
        rows: Ints,
        epochs: Ints,
        *,
        reaches: Ints | None = None,
    ) -> None:
        self.seq_len, self.steps = seq_len, steps
        # Tokens of a row that are labels alone: the last one, or none.
        self.lead = int(loader.labels == "next")
        self.row_tokens = seq_len + self.lead
        self._reaches = reaches  # tokens of the attention window of each step; None: no window
        self._numbers, self.rows, self.epochs = sources, rows, epochs
        self.sources = loader.sources_of(sources)  # places in the mixture
        self.dtype = loader.dtype
        self.masks_boundaries = loader.boundaries == "mask"
        self._sizes = loader.cu_seqlens_sizes(seq_len)
        self._pad_id = loader.pad_id
        self._stored_dtype = loader.mixture.stores[0].dtype
        self._layouts: dict[int, Layout] = {}
        # Of each source: the places of its rows, their spans, the first of each row.
        self._found: list[tuple[int, Ints, Spans, Sequence[int]]] = []
        padded = rows.ravel() == NO_ROW
        drawn = np.where(padded, NO_ROW, sources.ravel()) if padded.any() else sources.ravel()
        is_one = drawn.size and (drawn == drawn[0]).all()  # so it often is, and soon seen
        for source in [int(drawn[0])] if is_one else distinct(drawn):
            if source != NO_ROW:
                self._layouts[source] = loader.layout_of(source, seq_len)
                self._find(source, np.flatnonzero(drawn == source), padded)
        self._has_mask = any(self._layouts[source].stream.has_mask for source, *_ in self._found)
        # Which steps have padding; None: none of them.
        self._padded: list[bool] | None = None
        if padded.any():
            self._padded = padded.reshape(rows.shape).max(axis=1).tolist()

    def _find(self, source: int, places: Ints, padded: Bools) -> None:
        """Find the rows of one source, and note which of all rows have padding."""
        layout, row_tokens = self._layouts[source], self.row_tokens
        starts, lengths = layout.pieces(self._rows_at(places))
        if int(lengths.sum()) != len(places) * row_tokens or lengths.min(initial=0) < 0:
            raise layout.stream.damaged("does not have the length of a row")
        spans = layout.stream.locate(starts, lengths)
        firsts: Sequence[int] = range(len(places) + 1)
        if spans.shape[1] != len(places):
            ends = np.cumsum(spans[2] - spans[1])
            row_ends = np.arange(len(places) + 1) * row_tokens
            firsts = ends.searchsorted(row_ends, side="right").tolist()
        self._found.append((source, places, spans, firsts))
        is_padding = starts == PADDING
        if is_padding.any():
            padded[places[_rows_of(lengths, row_tokens)[is_padding]]] = True

    def _rows_at(self, places: Ints) -> Ints:
        rows: Ints = self.rows.ravel()
        return rows if len(places) == len(rows) else rows[places]

    def read(self, first: int, last: int) -> Chunk:
        """The steps from the `first` to before the `last`, by their places here."""
        shape = last - first, self.rows.shape[1], self.row_tokens
        tokens = self._read(first, last, masks=False).reshape(shape)
        mask = self._read(first, last, masks=True).reshape(shape) if self._has_mask else None
        return self, range(first, last), tokens, mask

    def _read(self, first: int, last: int, *, masks: bool) -> NDArray[Any]:
        """Tokens of steps, or which of them count."""

        def read(stream: TokenStream, part: Spans, length: int | None) -> NDArray[Any]:
            if masks:
                return stream.read_mask(part, length=length)
            pad = None if length is not None or self._padded is None else self._pad_id
            return stream.read_spans(part, pad=pad, length=length)

        parts, num_rows = list(self._parts(first, last)), (last - first) * self.rows.shape[1]
        if len(parts) == 1 and len(parts[0][0]) == num_rows:
            return read(*parts[0][1:])
        dtype = np.dtype(np.bool_) if masks else self._stored_dtype
        values = np.full((num_rows, self.row_tokens), 0 if masks else self._pad_id, dtype)
        for here, stream, part, length in parts:
            first_row = first * self.rows.shape[1]
            values[here - first_row] = read(stream, part, length).reshape(-1, self.row_tokens)
        return values

    def read_ahead(self, first: int, last: int) -> None:
        """Have the rows of some steps downloaded, where they are far away."""
        for _, stream, part, _ in self._parts(first, last):
            stream.read_ahead(part)

    def _parts(
        self, first: int, last: int
    ) -> Iterator[tuple[Ints, TokenStream, Spans, int | None]]:
        """Each source with rows in these steps: their places, its stream, and where they are.

        The last is the length of every span, where each is a whole row without padding.
        """
        first, last = first * self.rows.shape[1], last * self.rows.shape[1]
        for source, places, spans, firsts in self._found:
            begin, end = first, last
            if len(places) != self.rows.size:
                begin, end = places.searchsorted((first, last)).tolist()
            low, high = firsts[begin], firsts[end]
            is_even = high - low == end - begin
            if is_even and self._padded is not None:
                is_even = NO_SHARD not in spans[0, low:high]
            if begin < end:
                length = self.row_tokens if is_even else None
                yield places[begin:end], self._layouts[source].stream, spans[:, low:high], length

    def is_padded(self, place: int) -> bool:
        """Whether a step has padding."""
        return self._padded is not None and self._padded[place]

    def documents(self, place: int, *, inputs: bool = False) -> DocumentRanges:
        """Documents in the rows of one step; `inputs`: without the last token of each row."""
        (starts, lengths, is_padding), begins = self._inputs if inputs else self._documents
        here = slice(begins[place], begins[place + 1])
        base = place * self.rows.shape[1] * (self.seq_len if inputs else self.row_tokens)
        return starts[here] - base, lengths[here], is_padding[here]

    @lazy
    def _documents(self) -> tuple[DocumentRanges, list[int]]:
        """The documents of all steps, and where those of each step begin."""
        empty = np.flatnonzero(self.rows.ravel() == NO_ROW)
        parts = [(np.full(len(empty), PADDING), np.full(len(empty), self.row_tokens))]
        places = [empty]
        for source, here, _, _ in self._found:
            parts.append(self._layouts[source].segments(self._rows_at(here)))
            places.append(here[_rows_of(parts[-1][1], self.row_tokens)])
        starts, lengths = parts[-1]
        if len(parts[0][0]) or len(parts) > 2:
            order = np.argsort(np.concatenate(places), kind="stable")
            starts, lengths = (np.concatenate(column)[order] for column in zip(*parts, strict=True))
        begins = np.cumsum(lengths) - lengths
        return (begins, lengths, starts == PADDING), self._of_steps(begins, self.row_tokens)

    @lazy
    def _inputs(self) -> tuple[DocumentRanges, list[int]]:
        """The same for inputs: a document may have nothing in a row but its last token, a label."""
        (starts, lengths, is_padding), _ = self._documents
        starts, lengths, kept = inputs_of(
            starts, lengths, seq_len=self.seq_len, row_tokens=self.row_tokens
        )
        return (starts, lengths, is_padding[kept]), self._of_steps(starts, self.seq_len)

    def attended(self, place: int) -> tuple[Ints, Ints]:
        """Places and lengths of the ranges in the rows of a step that attention stays within."""
        (starts, lengths), begins = self._attended
        here = slice(begins[place], begins[place + 1])
        return starts[here] - place * self.rows.shape[1] * self.seq_len, lengths[here]

    @lazy
    def _attended(self) -> tuple[tuple[Ints, Ints], list[int]]:
        """Documents, or with an attention window their parts: one window after the other."""
        (starts, lengths, _), begins = self._inputs
        if self._reaches is None:
            return (starts, lengths), begins
        reach = np.repeat(self._reaches, np.diff(begins))
        counts = -(-lengths // reach)
        ends = np.cumsum(counts)
        begin = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        begin *= np.repeat(reach, counts)
        parts = np.minimum(np.repeat(lengths, counts) - begin, np.repeat(reach, counts))
        starts = np.repeat(starts, counts) + begin
        return (starts, parts), self._of_steps(starts, self.seq_len)

    @lazy
    def attention_shapes(self) -> list[AttentionShape]:
        """Of each step."""
        (_, lengths), begins = self._attended
        counts = np.diff(begins)
        sizes = [room_for(documents + 1, self._sizes) for documents in counts.tolist()]
        # One more, so that a step may have no row at all.
        longest, pairs = np.append(lengths, 0), np.append(causal_pairs(lengths), 0)
        longest = np.where(counts, np.maximum.reduceat(longest, begins[:-1]), 0)
        pairs = np.where(counts, np.add.reduceat(pairs, begins[:-1]), 0)
        rounded = [
            min(self.seq_len, rounded_up(most, least=LEAST_MAX_SEQLEN)) for most in longest.tolist()
        ]
        if self._reaches is not None:
            rounded = list(map(min, rounded, self._reaches.tolist()))
        return list(map(AttentionShape, sizes, rounded, counts.tolist(), pairs.tolist()))

    def _of_steps(self, starts: Ints, row_tokens: int) -> list[int]:
        steps, width = self.rows.shape
        found: list[int] = starts.searchsorted(np.arange(steps + 1) * (width * row_tokens)).tolist()
        return found

    def alone(self, place: int) -> Window:
        """One step without its store: for a batch that goes to another process."""
        one, here = copy.copy(self), slice(place, place + 1)
        one.steps, one._layouts, one._found = self.steps[here], {}, []
        one._numbers = one._numbers[here]
        one.sources, one.rows, one.epochs = self.sources[here], self.rows[here], self.epochs[here]
        one._padded = [self.is_padded(place)]
        for name, inputs in (("_documents", False), ("_inputs", True)):
            found = self.documents(place, inputs=inputs)
            one.__dict__[name] = found, [0, len(found[0])]
        attended = self.attended(place)
        one.__dict__["_attended"] = attended, [0, len(attended[0])]
        one.__dict__["attention_shapes"] = self.attention_shapes[place : place + 1]
        return one

    def origins(self, names: Sequence[str]) -> Iterator[RowOrigin]:
        """What made the rows; rows of padding have no origin and are left out."""
        columns = (self.sources, self._numbers, self.rows, self.epochs)
        lists = (column.ravel().tolist() for column in columns)
        for source, number, row, epoch in zip(*lists, strict=True):
            if row == NO_ROW:
                continue
            layout, at, parts = self._layouts[number], 0, []
            pieces = layout.segments(np.array([row], np.int64))
            for start, length in zip(*(column.tolist() for column in pieces), strict=True):
                if start != PADDING:
                    document = layout.stream.document_at(start)
                    part = DocumentPart(
                        document=document,
                        first_token=start - layout.stream.document_span(document)[0],
                        tokens=length,
                        at=at,
                        source=layout.stream.store.source(document),
                    )
                    parts.append(part)
                at += length
            yield RowOrigin(
                source=names[source],
                store=str(layout.stream.store.path),
                epoch=epoch,
                row=row,
                parts=tuple(parts),
            )


def batches_of(chunk: Chunk) -> Iterator[Batch]:
    """The batch of each step."""
    window, places, tokens, mask = chunk
    steps = window.steps[places.start : places.stop]
    masks = repeat(None) if mask is None else mask
    batches = map(Batch, repeat(window), places, steps, tokens, masks)
    if window.dtype is not None:
        return batches
    return map(Batch.keep_views, batches, tokens[..., : window.seq_len], tokens[..., window.lead :])


def _rows_of(lengths: Ints, row_tokens: int) -> Ints:
    """Which of the rows each piece is in: the pieces fill the rows one after the other."""
    found: Ints = (np.cumsum(lengths) - lengths) // row_tokens
    return found


# -------------------------------------------------------------------------------------------------
# Where the tokens of a row come from: stores, documents, rows of the files they were built of.


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
    """A part of a document that is in a row."""

    document: int
    """Number in the store's split."""
    first_token: int
    """Where it begins in the document."""
    tokens: int
    at: int
    """Where it begins in the row."""
    source: SourceRow
    """The row of the input file that the document was made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOrigin:
    """What made one row of a batch."""

    source: str
    """Name in the mixture; '' for a single store."""
    store: str
    epoch: int
    row: int
    """Number in the layout."""
    parts: tuple[DocumentPart, ...]
