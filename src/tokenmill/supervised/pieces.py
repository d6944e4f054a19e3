"""A batch of rows as pieces: stretches of plain text to encode, and special tokens between them.

    rows -> Pieces.add ... -> stretches (a TextBatch) -> an engine -> ids -> put_together

All stretches of a batch are encoded by one call, and nothing but lists grows while rows come in:
what is found out about each piece is found out for all of them at once. What counts for the loss
is given in characters of a row's text; most pieces count wholly or not at all, and for the others
`borders` finds the token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.records import TextBatch, TokenBatch
from tokenmill.supervised.rows import encoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.supervised.borders import Borders

Range = tuple[int, int]
STRETCH, SWALLOWED = -1, -2
"""What a piece is if it is no special token: text, or white space that a token beside it takes."""


class Cut(NamedTuple):
    """A row's text, cut at its special tokens."""

    strings: list[str]
    """Back to back they are the text."""
    kinds: list[int]
    """Of each: the id of a special token, STRETCH or SWALLOWED."""


class RowText(NamedTuple):
    """What a row became: its text, in pieces, and what of it counts."""

    text: str
    ranges: Sequence[Range] = ()
    """Characters that count for the loss, ascending."""
    cut: Cut | None = None
    """None where there is no special token in it."""
    before: int | None = None
    """A token in front of the text; it does not count."""
    after: int | None = None
    """A token behind the text; it counts if anything does."""


class _Layout(NamedTuple):
    """Pieces of all rows that have a token, as columns."""

    ids: NDArray[np.int64]
    """Special token's id, or STRETCH."""
    counts: NDArray[np.bool_]
    """Whether all of it counts."""
    partial: NDArray[np.int64]
    """Stretches of which a part counts."""
    strings: list[str]
    starts: NDArray[np.int64]
    """Where they begin in the text of all rows."""
    opens: NDArray[np.bool_]
    """Whether it stands at the beginning of its row's text."""
    row_ends: NDArray[np.int64]
    """Of each row: pieces so far."""


@dataclass(slots=True)
class Pieces:
    """The rows of a batch, taken apart."""

    touching_counts: bool
    """Whether a token counts that only touches what counts, or one that begins in it."""
    _strings: list[str] = field(default_factory=list)
    _kinds: list[int] = field(default_factory=list)
    _row_ends: list[int] = field(default_factory=list)
    """Of each row: pieces so far."""
    _row_starts: list[int] = field(default_factory=list)
    """Of each row: characters so far."""
    _lows: list[int] = field(default_factory=list)
    _highs: list[int] = field(default_factory=list)
    """Characters that count, of all rows together."""
    _length: int = 0
    _layout: _Layout | None = None

    def __len__(self) -> int:
        return len(self._row_ends)

    def add(self, row: RowText) -> None:
        """Take in a row; nothing is kept of one that cannot be encoded."""
        encoded(row.text)
        strings, kinds = self._strings, self._kinds
        base = self._length
        self._row_starts.append(base)
        length = len(row.text)
        for low, high in row.ranges:
            self._lows.append(base + low)
            self._highs.append(base + high)
        if row.before is not None:
            strings.append("")
            kinds.append(row.before)
        if row.cut is None:
            strings.append(row.text)
            kinds.append(STRETCH)
        else:
            strings += row.cut.strings
            kinds += row.cut.kinds
        if row.after is not None:
            # One character more, which counts if the text has one that does.
            strings.append(" ")
            kinds.append(row.after)
            if row.ranges:
                self._lows.append(base + length)
                self._highs.append(base + length + 1)
            length += 1
        self._length = base + length
        self._row_ends.append(len(kinds))

    def stretches(self) -> TextBatch:
        """What is to be encoded, in order."""
        layout = self._laid_out()
        is_text = (layout.ids == STRETCH).tolist()
        pairs = zip(layout.strings, is_text, strict=True)
        return TextBatch.from_texts([string.encode() for string, wanted in pairs if wanted])

    def opening(self) -> NDArray[np.bool_]:
        """Of each stretch: whether its row begins with it."""
        layout = self._laid_out()
        opens: NDArray[np.bool_] = layout.opens[layout.ids == STRETCH]
        return opens

    def put_together(
        self, tokens: TokenBatch, borders: Borders, inner_borders: Borders
    ) -> tuple[TokenBatch, NDArray[np.uint8]]:
        """Ids of the rows, special tokens in their places, and for each whether it counts.

        `inner_borders` are for stretches that do not open their row.
        """
        layout = self._laid_out()
        is_special = layout.ids != STRETCH
        lengths = np.ones(len(layout.ids), np.int64)
        lengths[~is_special] = tokens.lengths
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        ids = np.empty(int(ends[-1]), np.uint32)
        from_text = np.ones(len(ids), bool)
        from_text[ends[:-1][is_special]] = False
        ids[from_text] = tokens.ids
        ids[~from_text] = layout.ids[is_special]
        mask = np.repeat(layout.counts.astype(np.uint8), lengths)
        for piece, start, end in self._partial_ranges(layout):
            low, high = int(ends[piece]), int(ends[piece + 1])
            finder = borders if layout.opens[piece] else inner_borders
            first, last = finder.tokens_in(
                layout.strings[piece], ids[low:high], start, end, touching=self.touching_counts
            )
            mask[low + first : low + last] = 1
        return TokenBatch(ids, np.concatenate(([0], ends[layout.row_ends]))), mask

    def _laid_out(self) -> _Layout:
        """The pieces as columns; worked out once, when all rows are there."""
        if self._layout is None:
            self._layout = self._lay_out()
        return self._layout

    def _lay_out(self) -> _Layout:
        kinds = np.array(self._kinds, np.int64)
        lengths = np.fromiter(map(len, self._strings), np.int64, count=len(self._strings))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        kept = (kinds >= 0) | ((kinds == STRETCH) & (lengths > 0))
        per_row = np.diff(np.array(self._row_ends, np.int64), prepend=0)
        opens = starts == np.repeat(np.array(self._row_starts, np.int64), per_row)
        touched, whole = self._counted(starts, ends)
        is_stretch = kinds == STRETCH
        partial = (touched & ~whole & is_stretch)[kept]
        return _Layout(
            ids=kinds[kept],
            counts=np.where(is_stretch, whole, touched)[kept],
            partial=np.flatnonzero(partial),
            strings=[
                string for string, keep in zip(self._strings, kept.tolist(), strict=True) if keep
            ],
            starts=starts[kept],
            opens=opens[kept],
            row_ends=np.concatenate(([0], np.cumsum(kept)))[self._row_ends],
        )

    def _counted(
        self, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of each piece: whether a range has a character of it, and whether one has all."""
        if not self._lows:
            none = np.zeros(len(starts), bool)
            return none, none
        lows, highs = np.array(self._lows, np.int64), np.array(self._highs, np.int64)
        first = np.minimum(np.searchsorted(highs, starts, side="right"), len(highs) - 1)
        low, high = lows[first], highs[first]
        return (low < ends) & (high > starts), (low <= starts) & (high >= ends)

    def _partial_ranges(self, layout: _Layout) -> Iterator[tuple[int, int, int]]:
        """Of each stretch that counts in part: its place, and the characters that count."""
        if not len(layout.partial):
            return
        highs = np.array(self._highs, np.int64)
        starts = layout.starts[layout.partial]
        firsts = np.searchsorted(highs, starts, side="right").tolist()
        for piece, start, first in zip(
            layout.partial.tolist(), starts.tolist(), firsts, strict=True
        ):
            length = len(layout.strings[piece])
            while first < len(self._lows) and self._lows[first] < start + length:
                low, high = self._lows[first] - start, self._highs[first] - start
                yield piece, max(low, 0), min(high, length)
                first += 1
