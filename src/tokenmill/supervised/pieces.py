"""A batch of rows as pieces: stretches of plain text to encode, and special tokens between them.

    rows -> Pieces.add ... -> stretches (a TextBatch) -> an engine -> ids -> put_together

All stretches of a batch are encoded by one call, and nothing but lists grows while rows come in:
what is found out about each piece is found out for all of them at once. What counts for the loss
is given in characters of a row's text; most pieces count wholly or not at all, and for the others
`borders` finds the token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np

from tokenmill.records import TextBatch, TokenBatch
from tokenmill.supervised.rows import encoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine


Range = tuple[int, int]
STRETCH, SWALLOWED = -1, -2
"""What a piece is if it is no special token: text, or white space that a token beside it takes."""


class PieceCut(NamedTuple):
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
    cut: PieceCut | None = None
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
class RowPieces:
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
        self,
        tokens: TokenBatch,
        borders: TextBoundaries | None,
        inner_borders: TextBoundaries | None,
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
            assert finder is not None, "a part counts of a row that has no mask"
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


# -------------------------------------------------------------------------------------------------
# Which tokens of a text stand for a range of its characters.
#
# Fast engines give ids and no offsets. But tokens are bytes back to back: as long as the bytes of
# the first tokens are the first bytes of the text, the sum of their lengths is a place in it, and
# only the tokens in front of a border need a look. Where they are not (the tokenizer normalizes,
# or has a token for the unknown) the reference engine is asked for its offsets.

_LONG_TOKEN = 64
_MOST_HEADERS = 1024


class _HasOffsets(Protocol):
    def offsets(self, text: str) -> list[tuple[int, int]]: ...


class _Located(NamedTuple):
    """The first tokens of a text, up to one that ends behind a place, in bytes or characters."""

    spans: list[tuple[int, int]]
    place: int
    content: bytes | str

    def holding(self) -> int:
        """The first token that ends behind the place."""
        return next(
            (i for i, (_, end) in enumerate(self.spans) if end > self.place), len(self.spans)
        )

    def beginning(self) -> int:
        """The first token that begins at the place or behind it."""
        return next(
            (i for i, (start, _) in enumerate(self.spans) if start >= self.place), len(self.spans)
        )

    @property
    def is_border(self) -> bool:
        """Whether tokens end at the place, in bytes."""
        token = self.holding()
        is_inside = token < len(self.spans) and self.spans[token][0] == self.place
        return is_inside and isinstance(self.content, bytes)

    def opens_with_spaces(self, token: int) -> bool:
        """Whether the token crosses the place with nothing but spaces in front of it."""
        start, end = self.spans[token]
        before = self.content[max(start, 0) : self.place]
        return end > self.place and all(each in (ord(" "), " ") for each in before)


class TextBoundaries:
    """Finds tokens by characters."""

    def __init__(self, engine: CheckedEngine | Engine, reference: Engine) -> None:
        self._reference = reference
        self._engine = engine
        self._bytes: dict[int, bytes] = {}
        self._headers: dict[str, list[int]] = {}
        """Ids of texts that stood in front of a border: headers of answers are always the same."""
        self._prefixed = self._added_before("a"), self._added_before(" a")

    def tokens_in(
        self, text: str, ids: NDArray[np.uint32], start: int, end: int, *, touching: bool
    ) -> tuple[int, int]:
        """The tokens [first, last) that stand for text[start:end].

        With `touching`, every token that has a character of it. Else those that begin in it, and
        one that crosses its start with spaces alone: the space before a word is part of its token.
        """
        first = self._first(text, ids, start, touching=touching) if start else 0
        last = len(ids) if end == len(text) else self._locate(text, ids, end).beginning()
        return first, last

    def _first(self, text: str, ids: NDArray[np.uint32], start: int, *, touching: bool) -> int:
        header = text[:start]
        known = self._headers.get(header)
        if known is not None and self._begins_with(ids, known):
            return len(known)
        located = self._locate(text, ids, start)
        if located.is_border and len(header) <= _LONG_TOKEN and len(self._headers) < _MOST_HEADERS:
            self._headers[header] = ids[: located.holding()].tolist()
        if touching:
            return located.holding()
        first = located.beginning()
        return first - 1 if first and located.opens_with_spaces(first - 1) else first

    def _begins_with(self, ids: NDArray[np.uint32], known: list[int]) -> bool:
        """Whether the text of these ids begins with some known ones, and has a byte behind them."""
        some = ids[: len(known) + 1].tolist()
        return some[:-1] == known and bool(self._bytes.get(some[-1]))

    def _locate(self, text: str, ids: NDArray[np.uint32], place: int) -> _Located:
        target = len(text[:place].encode())
        # A token has a byte at least, and few have more than so many.
        some = text[: place + _LONG_TOKEN]
        data = some.encode()
        spans = self._spans(data, ids[: len(data) + 1].tolist(), target)
        if spans is None and len(some) < len(text):
            data = text.encode()
            spans = self._spans(data, ids.tolist(), target)
        if spans is not None:
            return _Located(spans, target, data)
        return _Located(cast("_HasOffsets", self._reference).offsets(text), place, text)

    def _spans(self, data: bytes, ids: list[int], target: int) -> list[tuple[int, int]] | None:
        """Bytes of the first tokens, until one ends behind the target; None if they differ."""
        shift = self._prefixed[data.startswith(b" ")]
        position = -shift
        spans, pieces, known = [], [], self._bytes
        for token in ids:
            piece = known.get(token)
            if piece is None:
                piece = known[token] = self._engine.token_bytes(token)
            pieces.append(piece)
            end = position + len(piece)
            spans.append((position, end))
            position = end
            if position > target:
                break
        return spans if data.startswith(b"".join(pieces)[shift:]) else None

    def _added_before(self, text: str) -> int:
        """Bytes that the tokenizer puts in front of a text: one for SentencePiece's first space."""
        ids = self._reference.encode(TextBatch.from_texts([text])).ids.tolist()
        joined = b"".join(self._engine.token_bytes(token) for token in ids)
        return int(joined == b" " + text.encode())
