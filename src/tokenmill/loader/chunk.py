"""Several steps' rows read in one go: what a loader reads, and batches are views of.

A read of one batch would spend more time on calls than on copying: 16 rows of 2,048 tokens are
copied in about 15 microseconds. So tokens are read for several steps at once, and borders of
documents, if anyone asks for them, are looked up for all of them at once too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.lazy import lazy
from tokenmill.loader.batch import NO_ROW, Batch, Borders, Tiling
from tokenmill.loader.layouts.base import PADDING, Pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.batch import BatchFormat, Draw
    from tokenmill.loader.layouts.base import Layout
    from tokenmill.store.format import TokenArray


class Chunk:
    """The tokens of some steps."""

    def __init__(
        self,
        draw: Draw,
        *,
        layouts: Sequence[Layout],
        pad_id: int,
        format: BatchFormat,  # noqa: A002 (what it is)
    ) -> None:
        self.draw = draw
        self._layouts = layouts
        self.format = format
        tokens, padded = _read(layouts, draw, pad_id=pad_id)
        self.tokens = tokens.reshape(*draw.rows.shape, draw.seq_len + 1)
        """(steps, rows, seq_len + 1), in the stored width."""
        self._padded: list[bool] | None = None
        if padded is not None:
            self._padded = [bool(row.any()) for row in padded.reshape(draw.rows.shape)]

    def __len__(self) -> int:
        return len(self.draw.steps)

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes

    def batches(self) -> Iterator[Batch]:
        """The batch of each step."""
        steps = zip(self.draw.steps, self.tokens, strict=True)
        batches = (Batch(self, place, *step) for place, step in enumerate(steps))
        if self.format.dtype is not None:
            return batches
        views = zip(batches, self.tokens[..., :-1], self.tokens[..., 1:], strict=True)
        return (batch.keep_views(inputs, labels) for batch, inputs, labels in views)

    def is_padded(self, place: int) -> bool:
        """Whether a step has padding."""
        return self._padded is not None and self._padded[place]

    def borders(self, place: int) -> Borders:
        """Where documents begin in the rows of one step."""
        borders, places = self._borders
        rows, seq_len = self.draw.rows.shape[1], self.draw.seq_len
        tokens, inputs = (at[place : place + 2] for at in places)
        return Borders(
            borders.tokens.part(*tokens, base=place * rows * (seq_len + 1)),
            borders.inputs.part(*inputs, base=place * rows * seq_len),
        )

    def only(self, place: int) -> OneStep:
        """One of the steps, without the others and without the store."""
        return OneStep(
            draw=self.draw.part(place, place + 1),
            format=self.format,
            has_padding=self.is_padded(place),
            found=self.borders(place),
        )

    @lazy
    def _borders(self) -> tuple[Borders, tuple[list[int], list[int]]]:
        """The borders of all steps, and where those of each step begin."""
        pieces = _segments(self._layouts, self.draw)
        tokens = Tiling(
            np.cumsum(pieces.lengths) - pieces.lengths, pieces.lengths, pieces.starts == PADDING
        )
        inputs = _without_last(tokens, self.draw.seq_len)
        steps, rows = self.draw.rows.shape
        ends = np.arange(steps + 1) * rows
        places: tuple[list[int], list[int]] = (
            tokens.starts.searchsorted(ends * (self.draw.seq_len + 1)).tolist(),
            inputs.starts.searchsorted(ends * self.draw.seq_len).tolist(),
        )
        return Borders(tokens, inputs), places


@dataclass(frozen=True, kw_only=True, slots=True)
class OneStep:
    """What a batch needs after it was pickled."""

    draw: Draw
    format: BatchFormat
    has_padding: bool
    found: Borders

    def is_padded(self, place: int) -> bool:  # noqa: ARG002 (there is one)
        return self.has_padding

    def borders(self, place: int) -> Borders:  # noqa: ARG002
        return self.found

    def only(self, place: int) -> OneStep:  # noqa: ARG002
        return self


def _without_last(tiling: Tiling, seq_len: int) -> Tiling:
    """The inputs of rows: a document may have nothing in a row but its last token, a label."""
    row, start = np.divmod(tiling.starts, seq_len + 1)
    lengths = np.minimum(tiling.lengths, seq_len - start)
    kept = lengths > 0
    return Tiling((row * seq_len + start)[kept], lengths[kept], tiling.is_padding[kept])


def read_ahead(layouts: Sequence[Layout], draw: Draw) -> None:
    """Have the rows of a draw brought, where they are far away."""
    for source, places in _by_source(draw):
        pieces = layouts[source].pieces(draw.rows.ravel()[places])
        layouts[source].stream.read_ahead(pieces.starts, pieces.lengths)


def _read(
    layouts: Sequence[Layout], draw: Draw, *, pad_id: int
) -> tuple[TokenArray, NDArray[np.bool_] | None]:
    """Tokens of all rows, and which rows have padding (None: no row)."""
    rows = draw.rows.ravel()
    only = _only_source(draw)
    if only is not None:
        return _read_source(layouts[only], rows, pad_id=pad_id)
    tokens = np.full((len(rows), draw.seq_len + 1), pad_id, layouts[0].stream.dtype)
    padded = rows == NO_ROW
    for source, places in _by_source(draw):
        found, found_padded = _read_source(layouts[source], rows[places], pad_id=pad_id)
        tokens[places] = found.reshape(len(places), -1)
        if found_padded is not None:
            padded[places] = found_padded
    return tokens, padded if padded.any() else None


def _read_source(
    layout: Layout, rows: NDArray[np.int64], *, pad_id: int
) -> tuple[TokenArray, NDArray[np.bool_] | None]:
    pieces = layout.pieces(rows)
    if pieces.length is not None:
        return layout.stream.read_equal(pieces.starts, pieces.length), None
    tokens = layout.stream.read(pieces.starts, pieces.lengths, pad=pad_id)
    is_padding = pieces.starts == PADDING
    if not is_padding.any():
        return tokens, None
    padded = np.zeros(len(rows), np.bool_)
    padded[_places(pieces, layout.seq_len)[is_padding]] = True
    return tokens, padded


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
    for source in np.unique(sources).tolist():
        if source != NO_ROW:
            yield source, np.flatnonzero(sources == source)


def _places(pieces: Pieces, seq_len: int) -> NDArray[np.int64]:
    """Which of the rows each piece lies in: the pieces fill the rows one after the other."""
    found: NDArray[np.int64] = (np.cumsum(pieces.lengths) - pieces.lengths) // (seq_len + 1)
    return found
