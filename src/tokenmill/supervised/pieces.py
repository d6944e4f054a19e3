"""A batch of rows as pieces: stretches of plain text to encode, and special tokens between them.

    rows -> Pieces.add ... -> stretches (a TextBatch) -> an engine -> ids -> put_together

All stretches of a batch are encoded by one call. What counts for the loss is given in characters of
a row's text; most pieces count wholly or not at all, and for the others `borders` finds the token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenmill.records import TextBatch, TokenBatch
from tokenmill.supervised.rows import encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.supervised.borders import Borders
    from tokenmill.supervised.specials import Found

Range = tuple[int, int]
_STRETCH = -1


class RowText(NamedTuple):
    """What a row became: its text, the special tokens in it, and what of it counts."""

    text: str
    ranges: Sequence[Range] = ()
    """Characters that count for the loss, ascending."""
    specials: Sequence[Found] = ()
    before: int | None = None
    """A token in front of the text; it does not count."""
    after: int | None = None
    """A token behind the text; it counts if anything does."""


class Partial(NamedTuple):
    """A stretch of which a part counts."""

    piece: int
    text: str
    ranges: tuple[Range, ...]
    """Characters of the stretch that count."""
    opens: bool
    """Whether its row begins with it."""


@dataclass(slots=True)
class Pieces:
    """The rows of a batch, taken apart."""

    touching_counts: bool
    """Whether a token counts that only touches what counts, or one that begins in it."""
    _stretches: list[bytes] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    """Of each piece: a special token's id, or _STRETCH."""
    _counts: list[bool] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    """Of each row: pieces so far."""
    _partial: list[Partial] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)
    """Of each stretch: whether its row begins with it."""

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, row: RowText) -> None:
        """Take in a row; nothing is kept of one that cannot be encoded."""
        text, specials, ranges = row.text, row.specials, row.ranges
        # All of it first: an error must leave no half of a row behind.
        bounds = [0]
        for found in specials:
            bounds += (found.start, found.end)
        bounds.append(len(text))
        stretches = [text[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
        data = [encoded(stretch) for stretch in stretches]
        if row.before is not None:
            self._add_token(row.before, counts=False)
        for number, stretch in enumerate(stretches):
            if stretch:
                self._add_stretch(bounds[2 * number], stretch, data[number], ranges)
            if number < len(specials):
                one = specials[number]
                self._add_token(one.id, counts=_touches(ranges, one.own_start, one.own_end))
        if row.after is not None:
            self._add_token(row.after, counts=bool(ranges))
        self._ends.append(len(self._ids))

    def _add_token(self, token: int, *, counts: bool) -> None:
        self._ids.append(token)
        self._counts.append(counts)

    def _add_stretch(self, start: int, stretch: str, data: bytes, ranges: Sequence[Range]) -> None:
        end = start + len(stretch)
        counts = False
        if _touches(ranges, start, end):
            inside = [(max(a, start), min(b, end)) for a, b in ranges if a < end and start < b]
            counts = inside == [(start, end)]
            if not counts:
                moved = tuple((a - start, b - start) for a, b in inside)
                self._partial.append(Partial(len(self._ids), stretch, moved, start == 0))
        self._counts.append(counts)
        self._ids.append(_STRETCH)
        self._stretches.append(data)
        self.opens.append(start == 0)

    def stretches(self) -> TextBatch:
        """What is to be encoded, in order."""
        return TextBatch.from_texts(self._stretches)

    def put_together(
        self, tokens: TokenBatch, borders: Borders, inner_borders: Borders
    ) -> tuple[TokenBatch, NDArray[np.uint8]]:
        """Ids of the rows, special tokens in their places, and for each whether it counts.

        `inner_borders` are for stretches that do not open their row.
        """
        special = np.array(self._ids, np.int64)
        is_special = special != _STRETCH
        lengths = np.ones(len(special), np.int64)
        lengths[~is_special] = tokens.lengths
        ends = np.zeros(len(special) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        ids = np.empty(int(ends[-1]), np.uint32)
        from_text = np.ones(len(ids), bool)
        from_text[ends[:-1][is_special]] = False
        ids[from_text] = tokens.ids
        ids[~from_text] = special[is_special]
        mask = np.repeat(np.array(self._counts, np.uint8), lengths)
        for part in self._partial:
            low, high = int(ends[part.piece]), int(ends[part.piece + 1])
            inner = ids[low:high].tolist()
            finder = borders if part.opens else inner_borders
            for start, end in part.ranges:
                first, last = finder.tokens_in(
                    part.text, inner, start, end, touching=self.touching_counts
                )
                mask[low + first : low + last] = 1
        rows = np.concatenate(([0], ends[np.array(self._ends, np.int64)]))
        return TokenBatch(ids, rows), mask


def _touches(ranges: Sequence[Range], start: int, end: int) -> bool:
    for low, high in ranges:  # noqa: SIM110 (a generator would take twice the time)
        if low < end and start < high:
            return True
    return False
