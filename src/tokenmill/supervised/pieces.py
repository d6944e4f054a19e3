"""A batch of rows as pieces: stretches of plain text to encode, and special tokens between them.

    rows -> RowPieces.add ... -> stretches (a TextBatch) -> an engine -> ids -> put_together

All stretches of a batch are encoded by one call, and nothing but lists grows while rows come in:
what is found out about each piece is found out for all of them at once. What counts for the loss
is given in characters of a row's text; most pieces count wholly or not at all, and for the others
`TextBoundaries` finds the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.records import TextBatch, TokenBatch, lazy
from tokenmill.supervised.rows import encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine


Range = tuple[int, int]
# What a piece is if it is no special token: text, or white space that a token beside it takes.
STRETCH, SWALLOWED = -1, -2


class PieceCut(NamedTuple):
    """A row's text, cut at its special tokens."""

    strings: list[str]  # back to back they are the text
    kinds: list[int]  # of each: the id of a special token, STRETCH or SWALLOWED


class RowText(NamedTuple):
    """What a row became: its text, in pieces, and what of it counts."""

    text: str
    ranges: Sequence[Range] = ()  # characters that count for the loss, ascending
    cut: PieceCut | None = None  # None where there is no special token in it
    before: int | None = None  # a token in front of the text; it does not count
    after: int | None = None  # a token after the text; it counts if anything does


class _Layout(NamedTuple):
    """Pieces of all rows that have a token, as columns."""

    ids: NDArray[np.int64]  # special token's id, or STRETCH
    counts: NDArray[np.bool_]  # whether all of it counts
    partial: NDArray[np.int64]  # stretches of which a part counts
    strings: list[str]
    starts: NDArray[np.int64]  # where they begin in the text of all rows
    opens: NDArray[np.bool_]  # whether it is the beginning of its row's text
    row_ends: NDArray[np.int64]  # of each row: pieces so far


class RowPieces:
    """The rows of a batch, taken apart.

    `touching_counts` says whether a token counts that only touches what counts, or one that begins
    in it.
    """

    def __init__(self, *, touching_counts: bool) -> None:
        self._touching = touching_counts
        self._strings: list[str] = []
        self._kinds: list[int] = []
        # Of each row: pieces so far, and characters before it.
        self._row_ends: list[int] = []
        self._row_starts: list[int] = []
        # Characters that count, of all rows together.
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._length = 0

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
        is_text = (self._layout.ids == STRETCH).tolist()
        pairs = zip(self._layout.strings, is_text, strict=True)
        return TextBatch.from_texts([string.encode() for string, wanted in pairs if wanted])

    def opening(self) -> NDArray[np.bool_]:
        """Of each stretch: whether its row begins with it."""
        opens: NDArray[np.bool_] = self._layout.opens[self._layout.ids == STRETCH]
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
        layout = self._layout
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
        firsts = np.searchsorted(self._highs, layout.starts[layout.partial], side="right")
        for piece, number in zip(layout.partial.tolist(), firsts.tolist(), strict=True):
            text, start = layout.strings[piece], int(layout.starts[piece])
            low, high = int(ends[piece]), int(ends[piece + 1])
            finder = borders if layout.opens[piece] else inner_borders
            assert finder is not None, "a part counts of a row that has no mask"
            while number < len(self._lows) and self._lows[number] < start + len(text):
                begin, end = self._lows[number] - start, self._highs[number] - start
                first, last = finder.tokens_in(
                    text,
                    ids[low:high],
                    max(begin, 0),
                    min(end, len(text)),
                    touching=self._touching,
                )
                mask[low + first : low + last] = 1
                number += 1
        return TokenBatch(ids, np.concatenate(([0], ends[layout.row_ends]))), mask

    @lazy
    def _layout(self) -> _Layout:
        """The pieces as columns; asked for when all rows are there."""
        kinds = np.array(self._kinds, np.int64)
        lengths = np.fromiter(map(len, self._strings), np.int64, count=len(self._strings))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        is_stretch = kinds == STRETCH
        kept = (kinds >= 0) | (is_stretch & (lengths > 0))
        per_row = np.diff(np.array(self._row_ends, np.int64), prepend=0)
        opens = starts == np.repeat(np.array(self._row_starts, np.int64), per_row)
        # Of each piece: whether a range has a character of it, and whether one has all.
        touched = whole = np.zeros(len(starts), bool)
        if self._lows:
            lows, highs = np.array(self._lows, np.int64), np.array(self._highs, np.int64)
            first = np.minimum(np.searchsorted(highs, starts, side="right"), len(highs) - 1)
            low, high = lows[first], highs[first]
            touched, whole = (low < ends) & (high > starts), (low <= starts) & (high >= ends)
        pairs = zip(self._strings, kept.tolist(), strict=True)
        return _Layout(
            ids=kinds[kept],
            counts=np.where(is_stretch, whole, touched)[kept],
            partial=np.flatnonzero((touched & ~whole & is_stretch)[kept]),
            strings=[string for string, keep in pairs if keep],
            starts=starts[kept],
            opens=opens[kept],
            row_ends=np.concatenate(([0], np.cumsum(kept)))[self._row_ends],
        )


# Which tokens of a text are for a range of its characters.
#
# Fast engines give ids and no offsets. But tokens are bytes back to back: as long as the bytes of
# the first tokens are the first bytes of the text, the sum of their lengths is a place in it, and
# only the tokens in front of a boundary need a look. Where they are not (the tokenizer normalizes,
# or has a token for the unknown) the reference engine is asked for its offsets.

_LONG_TOKEN = 64
_MOST_HEADERS = 1024


class _Located(NamedTuple):
    """The first tokens of a text, up to one that ends after a place, in bytes or characters."""

    spans: list[Range]
    place: int
    content: bytes | str

    def holding(self) -> int:
        """The first token that ends after the place."""
        ends = (i for i, (_, end) in enumerate(self.spans) if end > self.place)
        return next(ends, len(self.spans))

    def beginning(self) -> int:
        """The first token that begins at the place or after it."""
        starts = (i for i, (start, _) in enumerate(self.spans) if start >= self.place)
        return next(starts, len(self.spans))


class TextBoundaries:
    """Finds tokens by characters."""

    def __init__(self, engine: CheckedEngine | Engine, reference: Engine) -> None:
        self._reference: Any = reference
        self._engine = engine
        self._bytes: dict[int, bytes] = {}
        # Ids of texts in front of a boundary: headers of answers are always the same.
        self._headers: dict[str, list[int]] = {}
        self._prefixed = self._added_before("a"), self._added_before(" a")

    def tokens_in(
        self, text: str, ids: NDArray[np.uint32], start: int, end: int, *, touching: bool
    ) -> Range:
        """The tokens [first, last) of text[start:end].

        With `touching`, every token that has a character of it. Else those that begin in it, and
        one that crosses its start with spaces alone: the space before a word is part of its token.
        """
        first = self._first(text, ids, start, touching=touching) if start else 0
        last = len(ids) if end == len(text) else self._locate(text, ids, end).beginning()
        return first, last

    def _first(self, text: str, ids: NDArray[np.uint32], start: int, *, touching: bool) -> int:
        header = text[:start]
        known = self._headers.get(header)
        if known is not None:
            # Does the text begin with the known ids, and have a byte after them?
            some = ids[: len(known) + 1].tolist()
            if some[:-1] == known and self._bytes.get(some[-1]):
                return len(known)
        located = self._locate(text, ids, start)
        spans, place, content = located
        token = located.holding()
        ends_here = isinstance(content, bytes) and token < len(spans) and spans[token][0] == place
        if ends_here and len(header) <= _LONG_TOKEN and len(self._headers) < _MOST_HEADERS:
            self._headers[header] = ids[:token].tolist()
        if touching:
            return token
        first = located.beginning()
        if first and spans[first - 1][1] > place:
            before = content[max(spans[first - 1][0], 0) : place]
            first -= all(each in (ord(" "), " ") for each in before)
        return first

    def _locate(self, text: str, ids: NDArray[np.uint32], place: int) -> _Located:
        target = len(text[:place].encode())
        # A token has a byte at least, and few have more than so many.
        for some in (text[: place + _LONG_TOKEN], text):
            data = some.encode()
            spans = self._spans(data, ids[: len(data) + 1].tolist(), target)
            if spans is not None:
                return _Located(spans, target, data)
        return _Located(self._reference.offsets(text), place, text)

    def _spans(self, data: bytes, ids: list[int], target: int) -> list[Range] | None:
        """Bytes of the first tokens, until one ends after the target; None if they differ."""
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
