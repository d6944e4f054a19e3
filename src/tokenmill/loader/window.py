"""The rows of some steps, found all at once: what a loader looks ahead, and chunks are read from.

    Draw (row numbers) -> Window (pieces of shards, of all rows) -> Chunk (tokens of some steps)

To find where a row lies takes a dozen calls of numpy, for one row or for thousands; to read it
takes one. So rows are found for many steps, and read for a few: as many as stay in a core's cache
on their way. Borders of documents, if anyone asks for them, are looked up for the whole window too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.lazy import lazy
from tokenmill.loader.batch import NO_ROW, Tiling
from tokenmill.loader.chunk import Chunk, OneStep
from tokenmill.loader.layouts.base import PADDING, Pieces
from tokenmill.store.spans import distinct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.batch import BatchFormat, Draw
    from tokenmill.loader.layouts.base import Layout
    from tokenmill.store.format import TokenArray
    from tokenmill.store.spans import Spans


class Window:
    """Some steps, whose tokens are read when a chunk of them is asked for."""

    def __init__(
        self,
        draw: Draw,
        *,
        layouts: Sequence[Layout],
        pad_id: int,
        format: BatchFormat,  # noqa: A002 (what it is)
    ) -> None:
        self.draw = draw
        self.format = format
        self._layouts = layouts
        self._pad_id = pad_id
        only = _only_source(draw)
        rows = draw.rows.ravel()
        if only is not None:
            self._rows: SourceRows | None = SourceRows(layouts[only], rows, pad_id=pad_id)
            self._places: list[tuple[NDArray[np.int64], SourceRows]] = []
            padded = self._rows.padded
            self._has_mask = layouts[only].stream.has_mask
        else:
            self._rows = None
            self._places = [
                (places, SourceRows(layouts[source], rows[places], pad_id=pad_id))
                for source, places in _by_source(draw)
            ]
            self._has_mask = any(found.has_mask for _, found in self._places)
            padded = rows == NO_ROW
            for places, found in self._places:
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
        tokens = self._read(first * width, last * width).reshape(shape)
        if not self._has_mask:
            return Chunk(self, first, tokens)
        mask = self._read_mask(first * width, last * width).reshape(shape)
        return Chunk(self, first, tokens, mask)

    def _read(self, first: int, last: int) -> TokenArray:
        if self._rows is not None:
            return self._rows.read(first, last)
        shape = (last - first, self.draw.seq_len + 1)
        tokens: TokenArray = np.full(shape, self._pad_id, self._layouts[0].stream.dtype)
        for here, found, begin, end in self._within(first, last):
            tokens[here] = found.read(begin, end).reshape(end - begin, -1)
        return tokens

    def _read_mask(self, first: int, last: int) -> NDArray[np.bool_]:
        if self._rows is not None:
            return self._rows.read_mask(first, last)
        mask = np.zeros((last - first, self.draw.seq_len + 1), np.bool_)
        for here, found, begin, end in self._within(first, last):
            mask[here] = found.read_mask(begin, end).reshape(end - begin, -1)
        return mask

    def _within(
        self, first: int, last: int
    ) -> Iterator[tuple[NDArray[np.int64], SourceRows, int, int]]:
        """Each source with rows among these: their places, it, and which of its rows they are."""
        for places, found in self._places:
            begin, end = places.searchsorted((first, last)).tolist()
            if begin < end:
                yield places[begin:end] - first, found, begin, end

    def read_ahead(self, first: int, last: int) -> None:
        """Have the rows of some steps brought, where they are far away."""
        width = self.draw.rows.shape[1]
        first, last = first * width, last * width
        if self._rows is not None:
            self._rows.read_ahead(first, last)
        for _, found, begin, end in self._within(first, last):
            found.read_ahead(begin, end)

    def is_padded(self, place: int) -> bool:
        """Whether a step has padding."""
        return self._padded is not None and self._padded[place]

    def token_borders(self, place: int) -> Tiling:
        """Documents in the rows of one step, with all their `seq_len + 1` tokens."""
        base = self.draw.rows.shape[1] * (self.draw.seq_len + 1)
        return _of_step(*self._token_borders, place, base=base)

    def input_borders(self, place: int) -> Tiling:
        """Documents in the rows of one step, without the last token of each row."""
        base = self.draw.rows.shape[1] * self.draw.seq_len
        return _of_step(*self._input_borders, place, base=base)

    def only(self, place: int) -> OneStep:
        """One of the steps, without the others and without the store."""
        return OneStep(
            draw=self.draw.part(place, place + 1),
            format=self.format,
            has_padding=self.is_padded(place),
            tokens=self.token_borders(place),
            inputs=self.input_borders(place),
        )

    @lazy
    def _token_borders(self) -> tuple[Tiling, list[int]]:
        """The documents of all steps, and where those of each step begin."""
        pieces = _segments(self._layouts, self.draw)
        starts = np.cumsum(pieces.lengths) - pieces.lengths
        tiling = Tiling(starts, pieces.lengths, pieces.starts == PADDING)
        return tiling, self._begins(tiling, self.draw.seq_len + 1)

    @lazy
    def _input_borders(self) -> tuple[Tiling, list[int]]:
        tiling = _without_last(self._token_borders[0], self.draw.seq_len)
        return tiling, self._begins(tiling, self.draw.seq_len)

    def _begins(self, tiling: Tiling, row_tokens: int) -> list[int]:
        steps, width = self.draw.rows.shape
        found: list[int] = tiling.starts.searchsorted(
            np.arange(steps + 1) * (width * row_tokens)
        ).tolist()
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
        """Have rows brought, where they are far away."""
        self._stream.read_ahead(self._spans.part(*self._places(first, last)))

    def _places(self, first: int, last: int) -> tuple[int, int]:
        """Of the spans of rows."""
        if self._firsts is None:
            return first, last
        return self._firsts[first], self._firsts[last]


def _of_step(tiling: Tiling, begins: list[int], place: int, *, base: int) -> Tiling:
    return tiling.part(begins[place], begins[place + 1], base=place * base)


def _without_last(tiling: Tiling, seq_len: int) -> Tiling:
    """The inputs of rows: a document may have nothing in a row but its last token, a label."""
    row, start = np.divmod(tiling.starts, seq_len + 1)
    lengths = np.minimum(tiling.lengths, seq_len - start)
    kept = lengths > 0
    return Tiling((row * seq_len + start)[kept], lengths[kept], tiling.is_padding[kept])


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
