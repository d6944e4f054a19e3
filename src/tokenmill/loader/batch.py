"""One batch, as arrays: the fields are computed from tokens and borders when they are first used.

    rows of L + 1 tokens     t0 t1 t2 | u0 u1 . .      | a new document begins   . padding
    input_ids                t0 t1 t2   u0 u1 .
    labels                   t1 t2 u0   u1 -  -        - ignored: -100, as what a mask leaves out
    position_ids              0  1  2    0  1 0
    doc_ids                   0  0  0    1  1 -1
    cu_seqlens                0 3 5 6 6 6              ends, over all rows; the last one repeated

Shapes stay the same from batch to batch, so that a compiled model is not compiled again. They
change with a stage's seq_len, in a last batch that is kept short, and where borders outgrow their
room.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tokenmill.loader.options import Boundaries
from tokenmill.loader.packing import PADDING, Pieces
from tokenmill.records import lazy
from tokenmill.store.stream import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from tokenmill.loader.options import LoaderOptions
    from tokenmill.loader.packing import Layout
    from tokenmill.store.format import TokenArray
    from tokenmill.store.reader import SourceRow
    from tokenmill.store.stream import Spans


NO_ROW = -1
"""Number of a row that is all padding: it fills the last batch up."""
IGNORED = -100
"""Label that losses leave out, as PyTorch's cross entropy does."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows of some steps on one rank; the arrays are (steps, rows of a batch)."""

    steps: range
    seq_len: int
    sources: NDArray[np.int64]
    """Place of each row's source in the mixture."""
    rows: NDArray[np.int64]
    """Number in the layout of the source, or `NO_ROW`."""
    epochs: NDArray[np.int64]
    only: int | None = None
    """The source of all rows, where it is known that there is one, and no row is padding."""

    def part(self, first: int, last: int) -> Draw:
        """Some of the steps, by their places."""
        here = slice(first, last)
        return Draw(
            self.steps[here],
            self.seq_len,
            self.sources[here],
            self.rows[here],
            self.epochs[here],
            self.only,
        )


Borders: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]"
"""Ranges that fill rows one after the other, each of one document or padding: their places in the
flattened rows, their lengths, and which are padding."""


@lru_cache(maxsize=8)
def _ramp(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


class Batch:
    """Rows for one step on one rank.

    With ids in their stored width there is no room for -100: `loss_mask` alone says what counts.
    """

    def __init__(
        self,
        window: Window,
        place: int,
        step: int,
        tokens: TokenArray,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        self._window = window
        self._place = place
        self.step = step
        self.tokens = tokens
        """(rows, seq_len + 1), in the stored width."""
        self.mask = mask
        """(rows, seq_len + 1): which tokens count by the masks of their stores, padding not; None
        where no store has a mask."""

    def keep_views(self, input_ids: TokenArray, labels: TokenArray) -> Self:
        """Views that were made for many batches at once: making them for one costs 2 us."""
        self.__dict__["input_ids"], self.__dict__["labels"] = input_ids, labels
        return self

    @lazy
    def sources(self) -> NDArray[np.int64]:
        """Source of each row, by its place in the mixture."""
        found: NDArray[np.int64] = self._window.draw.sources[self._place]
        return found

    @lazy
    def rows(self) -> NDArray[np.int64]:
        """Number of each row in the layout of its source; -1 for a row of padding."""
        found: NDArray[np.int64] = self._window.draw.rows[self._place]
        return found

    @lazy
    def epochs(self) -> NDArray[np.int64]:
        """Epoch of its source that each row belongs to."""
        found: NDArray[np.int64] = self._window.draw.epochs[self._place]
        return found

    @property
    def seq_len(self) -> int:
        return int(self.tokens.shape[1]) - 1

    @property
    def max_seqlen(self) -> int:
        """Longest document a row can hold: a constant, as compiled kernels want it."""
        return self.seq_len

    @lazy
    def input_ids(self) -> NDArray[np.integer]:
        """(rows, seq_len)."""
        inputs = self.tokens[:, :-1]
        return inputs if self._options.dtype is None else inputs.astype(self._options.dtype)

    @lazy
    def labels(self) -> NDArray[np.integer]:
        """(rows, seq_len): the next token of each input; -100 where it must not count."""
        labels = self.tokens[:, 1:]
        if self._options.dtype is None:
            return labels
        wide = labels.astype(self._options.dtype)
        if not self.all_count:
            wide[~self.loss_mask] = IGNORED
        return wide

    @property
    def all_count(self) -> bool:
        """Whether nothing is masked for sure; told without looking at any border."""
        return self.mask is None and not (self._is_padded or self.masks_borders)

    @property
    def masks_borders(self) -> bool:
        """Whether the label at the end of a document does not count if it is of the next one."""
        return self._options.boundaries is Boundaries.MASK

    @lazy
    def loss_mask(self) -> NDArray[np.bool_]:
        """(rows, seq_len): whether each label counts."""
        if self.all_count:
            return np.ones(self._shape, np.bool_)
        if self.mask is not None and not self.masks_borders:
            return np.ascontiguousarray(self.mask[:, 1:])
        _, lengths, is_padding = self._token_borders
        counts = np.repeat(~is_padding, lengths) if self.mask is None else self.mask.flatten()
        if self.masks_borders:
            counts[np.cumsum(lengths[:-1])] = False
        return np.ascontiguousarray(counts.reshape(self.tokens.shape)[:, 1:])

    @lazy
    def position_ids(self) -> NDArray[np.int32]:
        """(rows, seq_len): place of each token in its document, as far as the row has it."""
        starts, lengths, _ = self._borders
        begins = np.repeat(starts.astype(np.int32), lengths)
        return np.subtract(_ramp(self._num_inputs), begins, out=begins).reshape(self._shape)

    @lazy
    def doc_ids(self) -> NDArray[np.int32]:
        """(rows, seq_len): number of each token's document in its row; -1 for padding."""
        starts, lengths, is_padding = self._borders
        begins_row = starts % self.seq_len == 0
        numbers = np.arange(len(starts), dtype=np.int32)
        numbers -= np.maximum.accumulate(np.where(begins_row, numbers, 0))
        numbers[is_padding] = -1
        return np.repeat(numbers, lengths).reshape(self._shape)

    @lazy
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where documents begin in the flattened rows, 0 first, then the number of tokens."""
        starts, _, _ = self._borders
        capacity = self._capacity
        while capacity < len(starts) + 1:
            capacity *= 2
        ends = np.full(capacity, self._num_inputs, np.int32)
        ends[: len(starts)] = starts
        return ends

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.tokens), self.seq_len

    @property
    def _num_inputs(self) -> int:
        return len(self.tokens) * self.seq_len

    # What a batch needs of the window that it was found in.

    @lazy
    def _options(self) -> LoaderOptions:
        return self._window.options

    @lazy
    def _capacity(self) -> int:
        return self._window.capacity

    @lazy
    def _is_padded(self) -> bool:
        return self._window.is_padded(self._place)

    @lazy
    def _token_borders(self) -> Borders:
        """Documents in the rows, with all their `seq_len + 1` tokens."""
        return self._window.borders(self._place)

    @lazy
    def _borders(self) -> Borders:
        """Documents in the rows, without the last token of each row."""
        return self._window.borders(self._place, inputs=True)

    def __getstate__(self) -> dict[str, object]:
        # The other steps that were found with this one stay behind, and the store.
        found = {name: getattr(self, name) for name in _FOUND}
        kept = {name: value for name, value in self.__dict__.items() if name != "_window"}
        return {**kept, **found}

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, rows={len(self.tokens)}, seq_len={self.seq_len})"


_FOUND = (
    *("sources", "rows", "epochs"),
    *("_options", "_capacity", "_is_padded", "_token_borders", "_borders"),
)
"""What a batch has of its window."""


# -------------------------------------------------------------------------------------------------
# Several steps' tokens read in one go: what batches are views of.
#
# A read of one batch would spend more time on calls than on copying: 16 rows of 2,048 tokens are
# copied in about 10 microseconds.


class Chunk:
    """The tokens of some consecutive steps of a window."""

    def __init__(
        self,
        window: Window,
        first: int,
        tokens: TokenArray,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        self._window = window
        self._first = first
        self.tokens = tokens
        """(steps, rows, seq_len + 1), in the stored width."""
        self.mask = mask
        """Which of the tokens count; None where no store says so. Padding does not."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + (0 if self.mask is None else self.mask.nbytes)

    @property
    def step_tokens(self) -> int:
        """Inputs of a step."""
        _, rows, row_tokens = self.tokens.shape
        return int(rows * (row_tokens - 1))

    @property
    def draw(self) -> Draw:
        """The rows of these steps."""
        return self._window.draw.part(self._first, self._first + len(self))

    @property
    def steps(self) -> range:
        return self._window.draw.steps[self._first : self._first + len(self)]

    def batches(self) -> Iterator[Batch]:
        """The batch of each step."""
        window, places = self._window, range(self._first, self._first + len(self))
        masks = repeat(None) if self.mask is None else self.mask
        batches = map(Batch, repeat(window), places, self.steps, self.tokens, masks)
        if window.options.dtype is not None:
            return batches
        return map(Batch.keep_views, batches, self.tokens[..., :-1], self.tokens[..., 1:])


# -------------------------------------------------------------------------------------------------
# The rows of some steps, found all at once: what a loader looks ahead, and chunks are read from.
#
# To find where a row is takes a dozen calls of numpy, for one row or for thousands; to read it
# takes one. So rows are found for many steps, and read for a few: as many as stay in a core's
# cache on their way. Documents, if anyone asks for them, are looked up for the whole window too.


class Window:
    """Some steps, whose tokens are read when a chunk of them is asked for."""

    def __init__(
        self,
        draw: Draw,
        *,
        layouts: Sequence[Layout],
        options: LoaderOptions,
        capacity: int,
    ) -> None:
        self.draw = draw
        self.options = options
        self.capacity = capacity
        """Entries of cu_seqlens; doubled until it fits for a batch with more documents."""
        self._layouts = layouts
        rows, pad_id = draw.rows.ravel(), options.pad_id
        only = _only_source(draw)
        self._only = None if only is None else SourceRows(layouts[only], rows, pad_id=pad_id)
        self._found: list[tuple[NDArray[np.int64], SourceRows]] = []
        """Where there is not one source alone: the places of the rows of each."""
        if self._only is not None:
            padded = self._only.padded
            self._has_mask = self._only.has_mask
        else:
            self._found = [
                (places, SourceRows(layouts[source], rows[places], pad_id=pad_id))
                for source, places in _by_source(draw)
            ]
            self._has_mask = any(found.has_mask for _, found in self._found)
            padded = rows == NO_ROW
            for places, found in self._found:
                if found.padded is not None:
                    padded[places] = found.padded
        self._padded: list[bool] | None = None
        if padded is not None and padded.any():
            self._padded = padded.reshape(draw.rows.shape).max(axis=1).tolist()

    def __len__(self) -> int:
        return len(self.draw.steps)

    def chunk(self, first: int, last: int) -> Chunk:
        """Read the steps from the `first` to before the `last`, by their places here."""
        width = self.draw.rows.shape[1]
        shape = last - first, width, self.draw.seq_len + 1
        here = first * width, last * width
        tokens = self._read(SourceRows.read, *here, self._empty).reshape(shape)
        if not self._has_mask:
            return Chunk(self, first, tokens)
        mask = self._read(SourceRows.read_mask, *here, np.zeros(1, np.bool_)).reshape(shape)
        return Chunk(self, first, tokens, mask)

    @property
    def _empty(self) -> TokenArray:
        return np.full(1, self.options.pad_id, self._layouts[0].stream.dtype)

    def _read(
        self,
        read: Callable[[SourceRows, int, int], NDArray[Any]],
        first: int,
        last: int,
        empty: NDArray[Any],
    ) -> NDArray[Any]:
        """Values of rows; `empty` is that of rows of padding."""
        if self._only is not None:
            return read(self._only, first, last)
        values = np.tile(empty, (last - first, self.draw.seq_len + 1))
        for here, found, begin, end in self._within(first, last):
            values[here] = read(found, begin, end).reshape(end - begin, -1)
        return values

    def _within(
        self, first: int, last: int
    ) -> Iterator[tuple[NDArray[np.int64], SourceRows, int, int]]:
        """Each source with rows among these: their places, it, and which of its rows they are."""
        for places, found in self._found:
            begin, end = places.searchsorted((first, last)).tolist()
            if begin < end:
                yield places[begin:end] - first, found, begin, end

    def read_ahead(self, first: int, last: int) -> None:
        """Have the rows of some steps downloaded, where they are far away."""
        width = self.draw.rows.shape[1]
        first, last = first * width, last * width
        if self._only is not None:
            self._only.read_ahead(first, last)
        for _, found, begin, end in self._within(first, last):
            found.read_ahead(begin, end)

    def is_padded(self, place: int) -> bool:
        """Whether a step has padding."""
        return self._padded is not None and self._padded[place]

    def borders(self, place: int, *, inputs: bool = False) -> Borders:
        """Documents in the rows of one step; `inputs`: without the last token of each row."""
        found, begins = self._input_borders if inputs else self._token_borders
        starts, lengths, is_padding = found
        here = slice(begins[place], begins[place + 1])
        row_tokens = self.draw.seq_len if inputs else self.draw.seq_len + 1
        base = place * self.draw.rows.shape[1] * row_tokens
        return starts[here] - base, lengths[here], is_padding[here]

    @lazy
    def _token_borders(self) -> tuple[Borders, list[int]]:
        """The documents of all steps, and where those of each step begin."""
        pieces = _segments(self._layouts, self.draw)
        starts = np.cumsum(pieces.lengths) - pieces.lengths
        found = starts, pieces.lengths, pieces.starts == PADDING
        return found, self._begins(starts, self.draw.seq_len + 1)

    @lazy
    def _input_borders(self) -> tuple[Borders, list[int]]:
        """A document may have nothing in a row but its last token, a label."""
        (starts, lengths, is_padding), _ = self._token_borders
        seq_len = self.draw.seq_len
        row, start = np.divmod(starts, seq_len + 1)
        lengths = np.minimum(lengths, seq_len - start)
        kept = lengths > 0
        starts = (row * seq_len + start)[kept]
        return (starts, lengths[kept], is_padding[kept]), self._begins(starts, seq_len)

    def _begins(self, starts: NDArray[np.int64], row_tokens: int) -> list[int]:
        steps, width = self.draw.rows.shape
        found: list[int] = starts.searchsorted(np.arange(steps + 1) * (width * row_tokens)).tolist()
        return found


class SourceRows:
    """Rows of one source, found at once, and read some at a time."""

    def __init__(self, layout: Layout, rows: NDArray[np.int64], *, pad_id: int) -> None:
        self._stream = layout.stream
        self.has_mask: bool = layout.stream.has_mask
        self._pad_id = pad_id
        self._row_tokens = layout.seq_len + 1
        pieces = layout.pieces(rows)
        total, shortest = int(pieces.lengths.sum()), int(pieces.lengths.min(initial=0))
        if total != len(rows) * self._row_tokens or shortest < 0:
            raise self._stream.damaged("does not have the length of a row")
        self._spans = self._stream.locate(pieces.starts, pieces.lengths)
        self._firsts: list[int] | None = None
        """The first span of each row, and the end; None where each row is one span."""
        if len(self._spans.shards) != len(rows):
            ends = np.cumsum(self._spans.lasts - self._spans.firsts)
            row_ends = np.arange(len(rows) + 1) * self._row_tokens
            self._firsts = ends.searchsorted(row_ends, side="right").tolist()
        self.padded: NDArray[np.bool_] | None = None
        """Which rows have padding; None: none of them."""
        is_padding = pieces.starts == PADDING
        if is_padding.any():
            self.padded = np.zeros(len(rows), np.bool_)
            self.padded[_places(pieces, layout.seq_len)[is_padding]] = True

    def read(self, first: int, last: int) -> TokenArray:
        """The tokens of the rows from the `first` to before the `last`."""
        pad = self._pad_id if self._has_padding(first, last) else None
        return self._stream.read_spans(self._part(first, last), pad=pad)

    def _has_padding(self, first: int, last: int) -> bool:
        return self.padded is not None and bool(self.padded[first:last].any())

    def read_mask(self, first: int, last: int) -> NDArray[np.bool_]:
        """Which tokens of these rows count."""
        return self._stream.read_mask(self._part(first, last))

    def _part(self, first: int, last: int) -> Spans:
        begin, end = self._places(first, last)
        is_one_each = end - begin == last - first and not self._has_padding(first, last)
        return self._spans.part(begin, end, self._row_tokens if is_one_each else None)

    def read_ahead(self, first: int, last: int) -> None:
        """Have rows downloaded, where they are far away."""
        self._stream.read_ahead(self._spans.part(*self._places(first, last)))

    def _places(self, first: int, last: int) -> tuple[int, int]:
        """Of the spans of rows."""
        if self._firsts is None:
            return first, last
        return self._firsts[first], self._firsts[last]


def _segments(layouts: Sequence[Layout], draw: Draw) -> Pieces:
    rows = draw.rows.ravel()
    only = _only_source(draw)
    if only is not None:
        return layouts[only].segments(rows)
    empty = np.flatnonzero(rows == NO_ROW)
    parts = [Pieces(np.full(len(empty), PADDING), np.full(len(empty), draw.seq_len + 1))]
    places = [empty]
    for source, here in _by_source(draw):
        parts.append(layouts[source].segments(rows[here]))
        places.append(here[_places(parts[-1], draw.seq_len)])
    order = np.argsort(np.concatenate(places), kind="stable")
    return Pieces(
        np.concatenate([part.starts for part in parts])[order],
        np.concatenate([part.lengths for part in parts])[order],
    )


def _only_source(draw: Draw) -> int | None:
    """The source of all rows, where there is one and no row is padding."""
    if draw.only is not None:
        return draw.only
    if not draw.rows.size:
        return 0
    first = int(draw.sources.flat[0])
    if (draw.sources != first).any() or (draw.rows == NO_ROW).any():
        return None
    return first


def _by_source(draw: Draw) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each source that has rows, with the places of its rows."""
    sources = np.where(draw.rows == NO_ROW, NO_ROW, draw.sources).ravel()
    for source in distinct(sources):
        if source != NO_ROW:
            yield source, np.flatnonzero(sources == source)


def _places(pieces: Pieces, seq_len: int) -> NDArray[np.int64]:
    """Which of the rows each piece lies in: the pieces fill the rows one after the other."""
    found: NDArray[np.int64] = (np.cumsum(pieces.lengths) - pieces.lengths) // (seq_len + 1)
    return found


# -------------------------------------------------------------------------------------------------
# Where the tokens of a row come from: stores, documents, rows of the files they were built of.


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
    """A stretch of a document that stands in a row."""

    document: int
    """Number in the store's split."""
    first_token: int
    """Where the stretch begins in the document."""
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


def trace(draw: Draw, *, layouts: Sequence[Layout], names: Sequence[str]) -> list[RowOrigin]:
    """The origins of all rows of a draw; rows of padding have none and are left out."""
    cells = zip(
        draw.sources.ravel().tolist(),
        draw.rows.ravel(),
        draw.epochs.ravel().tolist(),
        strict=True,
    )
    return [
        RowOrigin(
            source=names[source],
            store=str(layouts[source].stream.store.path),
            epoch=epoch,
            row=int(row),
            parts=tuple(_parts(layouts[source], row)),
        )
        for source, row, epoch in cells
        if row != NO_ROW
    ]


def _parts(layout: Layout, row: np.int64) -> Iterator[DocumentPart]:
    pieces = layout.segments(row.reshape(1))
    stream, at = layout.stream, 0
    for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
        if start != PADDING:
            number = stream.document_at(start)
            yield DocumentPart(
                document=number,
                first_token=start - stream.document_span(number)[0],
                tokens=length,
                at=at,
                source=stream.store.source(number),
            )
        at += length
