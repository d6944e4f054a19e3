"""Which tokens of a text stand for a range of its characters.

Fast engines give ids and no offsets. But tokens are bytes back to back: as long as the bytes of the
first tokens are the first bytes of the text, the sum of their lengths is a place in it, and only
the tokens in front of a border need a look. Where they are not (the tokenizer normalizes, or has a
token for the unknown) the reference engine is asked for its offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from tokenmill.records import TextBatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine


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


class Borders:
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
