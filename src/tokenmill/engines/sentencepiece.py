"""The `sentencepiece` package: the reference for `.model` files.

Control symbols (<s>, </s>, ...) in a text are always encoded as text: the package gives them no
other meaning, which is why the policy `parse` does not exist here.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines.base import SpecialTokens, encode_all, spaced_piece_bytes
from tokenmill.errors import MissingExtraError, TokenizerError, UsageError
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.records import TextBatch


# -------------------------------------------------------------------------------------------------
# Reads what tokenmill must know from a SentencePiece `.model`, without the sentencepiece package.
#
# The file is one protobuf message: pieces, then the trainer's and the normalizer's settings. Only
# the fields below are read. The pieces' scores are left alone: encoding is the sentencepiece
# package's work.

# Field numbers of sentencepiece_model.proto.
_SENTENCEPIECE_MODEL_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_TYPE = 1, 3
_MODEL_TYPE, _WHITESPACE_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_BOS_PIECE, _EOS_PIECE = 46, 47
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_WHITESPACE, _ESCAPE_WHITESPACE = 2, 3, 4, 5


class PieceType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(enum.IntEnum):
    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SentencePieceModel:
    """The facts of a model that decide which engine may run it and which tokens are special."""

    model_type: ModelType
    pieces: tuple[tuple[str, PieceType], ...]
    """Text and type; the position is the id."""
    byte_fallback: bool
    bos_piece: str
    eos_piece: str
    has_charsmap: bool
    """Whether text is normalized by a table (NFKC and the like) before it is split."""
    adds_dummy_prefix: bool
    removes_extra_whitespace: bool
    escapes_whitespace: bool
    whitespace_is_suffix: bool

    @property
    def control_pieces(self) -> dict[str, int]:
        """Control symbols: the special tokens of a model."""
        return {
            text: index
            for index, (text, kind) in enumerate(self.pieces)
            if kind is PieceType.CONTROL
        }


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a `.model` file."""
    try:
        return _parse(path.read_bytes())
    except (ValueError, IndexError) as error:
        raise TokenizerError(
            f"file {str(path)!r} is not a complete SentencePiece model: {error}",
            hint="copy it again from where it came from",
        ) from error


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[tuple[str, PieceType]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in proto_fields(data):
        if not isinstance(value, bytes):
            continue
        if number == _SENTENCEPIECE_MODEL_PIECES:
            piece = dict(proto_fields(value))
            text = piece.get(_PIECE_TEXT, b"")
            kind = piece.get(_PIECE_TYPE, PieceType.NORMAL)
            if not isinstance(text, bytes) or not isinstance(kind, int):
                raise ValueError(f"piece {len(pieces)} is malformed")
            pieces.append((text.decode(), PieceType(kind)))
        elif number == _TRAINER:
            trainer.update(proto_fields(value))
        elif number == _NORMALIZER:
            normalizer.update(proto_fields(value))
    if not pieces:
        raise ValueError("it holds no pieces")
    return SentencePieceModel(
        model_type=ModelType(_integer(trainer, _MODEL_TYPE, 1)),
        pieces=tuple(pieces),
        byte_fallback=bool(_integer(trainer, _BYTE_FALLBACK, 0)),
        bos_piece=_text(trainer, _BOS_PIECE, "<s>"),
        eos_piece=_text(trainer, _EOS_PIECE, "</s>"),
        has_charsmap=bool(normalizer.get(_CHARSMAP, b"")),
        adds_dummy_prefix=bool(_integer(normalizer, _DUMMY_PREFIX, 1)),
        removes_extra_whitespace=bool(_integer(normalizer, _REMOVE_WHITESPACE, 1)),
        escapes_whitespace=bool(_integer(normalizer, _ESCAPE_WHITESPACE, 1)),
        whitespace_is_suffix=bool(_integer(trainer, _WHITESPACE_SUFFIX, 0)),
    )


def _integer(message: dict[int, int | bytes], number: int, default: int) -> int:
    value = message.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is not a number")
    return value


def _text(message: dict[int, int | bytes], number: int, default: str) -> str:
    value = message.get(number, default.encode())
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is not a text")
    return value.decode()


def proto_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            number, position = _varint(data, position)
            yield key >> 3, number
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire_type} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"it ends inside a field at byte {position}")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7


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
