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
    from collections.abc import Sequence

    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine


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
        self._prefixed = self._added_before("a"), self._added_before(" a")

    def tokens_in(
        self, text: str, ids: Sequence[int], start: int, end: int, *, touching: bool
    ) -> tuple[int, int]:
        """The tokens [first, last) that stand for text[start:end].

        With `touching`, every token that has a character of it. Else those that begin in it, and
        one that crosses its start with spaces alone: the space before a word is part of its token.
        """
        if start == 0:
            first = 0
        elif touching:
            first = self._locate(text, ids, start).holding()
        else:
            located = self._locate(text, ids, start)
            first = located.beginning()
            if first and located.opens_with_spaces(first - 1):
                first -= 1
        last = len(ids) if end == len(text) else self._locate(text, ids, end).beginning()
        return first, last

    def _locate(self, text: str, ids: Sequence[int], place: int) -> _Located:
        data = text.encode()
        target = len(text[:place].encode())
        spans = self._spans(data, ids, target)
        if spans is not None:
            return _Located(spans, target, data)
        return _Located(cast("_HasOffsets", self._reference).offsets(text), place, text)

    def _spans(self, data: bytes, ids: Sequence[int], target: int) -> list[tuple[int, int]] | None:
        """Bytes of the first tokens, until one ends behind the target; None if they differ."""
        shift = self._prefixed[data.startswith(b" ")]
        position = -shift
        spans, pieces = [], []
        for token in ids:
            piece = self._bytes.get(token)
            if piece is None:
                piece = self._bytes[token] = self._engine.token_bytes(token)
            pieces.append(piece)
            spans.append((position, position + len(piece)))
            position += len(piece)
            if position > target:
                break
        return spans if data.startswith(b"".join(pieces)[shift:]) else None

    def _added_before(self, text: str) -> int:
        """Bytes that the tokenizer puts in front of a text: one for SentencePiece's first space."""
        ids = self._reference.encode(TextBatch.from_texts([text])).ids.tolist()
        joined = b"".join(self._engine.token_bytes(token) for token in ids)
        return int(joined == b" " + text.encode())
