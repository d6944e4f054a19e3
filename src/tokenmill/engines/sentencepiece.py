"""The `sentencepiece` package: the reference for `.model` files.

Control symbols (<s>, </s>, ...) in a text are always encoded as text: the package gives them no
other meaning, which is why the policy `parse` does not exist here.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines.base import SpecialTokens, encode_all
from tokenmill.engines.pieces import spaced_piece_bytes
from tokenmill.engines.sentencepiece_model import proto_fields
from tokenmill.errors import MissingExtraError, TokenizerError, UsageError
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.records import TextBatch


_PIECES, _BEGIN, _END = 2, 4, 5
"""Fields of the message SentencePieceText, and of a piece in it."""


class SentencePieceEngine:
    """Encodes with the `sentencepiece` package."""

    name = "sentencepiece"

    def __init__(self, path: Path, *, special_tokens: SpecialTokens, threads: int = 1) -> None:
        refuse_parse(special_tokens)
        try:
            import sentencepiece
        except ImportError as error:
            raise MissingExtraError(
                "sentencepiece", extra="sentencepiece", purpose=f"encoding with {str(path)!r}"
            ) from error
        self.version: str = str(sentencepiece.__version__)
        self._threads = threads
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise TokenizerError(
                f"the sentencepiece package {self.version} cannot load {str(path)!r}: {error}",
                hint="copy the file again from where it came from",
            ) from error

    def encode(self, texts: TextBatch) -> TokenBatch:
        return TokenBatch.from_lists(encode_all(self._encode, texts.texts(), engine=self.name))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        documents: list[list[int]] = self._processor.encode(texts, num_threads=self._threads)
        return documents

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters that each token of the text stands for, as [start, end)."""
        # The package wants protobuf for anything but the bytes of its answer.
        answer: bytes = self._processor.encode_as_serialized_proto(text)
        starts = [0, *itertools.accumulate(len(character.encode()) for character in text)]
        found = []
        for number, piece in proto_fields(answer):
            if number == _PIECES and isinstance(piece, bytes):
                fields = dict(proto_fields(piece))
                begin, end = fields[_BEGIN], fields[_END]
                assert isinstance(begin, int)
                assert isinstance(end, int)
                first = bisect.bisect_right(starts, begin) - 1
                found.append((first, bisect.bisect_left(starts, end)))
        return found

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids; a control symbol is shown as its own name."""
        parts: list[str] = []
        run: list[int] = []
        for token_id in np.asarray(ids).tolist():
            if self._processor.is_control(token_id):
                parts += [self._processor.decode(run), self._processor.id_to_piece(token_id)]
                run = []
            else:
                run.append(token_id)
        return "".join([*parts, self._processor.decode(run)])

    def token_bytes(self, token_id: int) -> bytes:
        return spaced_piece_bytes(self._processor.id_to_piece(token_id))

    def recycle(self) -> bool:
        return False


def refuse_parse(special_tokens: SpecialTokens) -> None:
    """Raise for the one policy that SentencePiece models have no meaning for."""
    if special_tokens is SpecialTokens.PARSE:
        raise UsageError(
            "the policy 'parse' has no meaning for a SentencePiece model: its control symbols "
            "in a text are text by its own rules",
            hint="use --special-tokens text or --special-tokens reject",
        )
