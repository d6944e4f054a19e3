"""What an engine is to the rest of tokenmill: a batch of Arrow text in, flat ids and offsets out.

Engines never add special tokens by themselves (no BOS, no template): what stands between
documents is the build's decision, and it is written down in the manifest.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from tokenmill.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.engines.describe import TokenizerContent
    from tokenmill.records import TextBatch, TokenBatch


Found = TypeVar("Found")


class SpecialTokens(enum.StrEnum):
    """What to do with the string of a special token inside a document."""

    TEXT = "text"
    """Ordinary characters: a web page cannot end a document."""
    PARSE = "parse"
    """The special token itself, as `tokenizers` does by default."""
    REJECT = "reject"
    """The document is rejected."""


class TokenizerKind(enum.StrEnum):
    HUGGINGFACE = "huggingface"
    SENTENCEPIECE = "sentencepiece"
    TIKTOKEN = "tiktoken"
    BYTES = "bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Whether a fast engine may run a tokenizer, or why not, and what to look at if it does."""

    engine: str
    refusal: str | None = None
    patterns: str = ""
    """Text of the split patterns, which says which classes of characters matter."""
    normalizes: bool = False
    """Whether text is brought into NFC, whose tables differ between the engines."""
    probes: tuple[str, ...] = ()
    """Texts that this very tokenizer makes delicate; the probes must hold them."""
    contested: tuple[str, ...] = ()
    """Strings that send a document to the reference engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """What can be said about a tokenizer without loading an engine. Picklable and small."""

    kind: TokenizerKind
    files: Mapping[str, Path]
    """File name inside a store's `tokenizer/` folder -> where it lies now. Empty for bytes."""
    fingerprint: str
    """sha256 of the canonical content: equal for equal tokenizers, however formatted."""
    vocab_size: int
    """One more than the largest id, added tokens counted."""
    special_tokens: Mapping[str, int]
    """Content -> id of every special token."""
    other_tokens: Mapping[str, int] = field(default_factory=dict)
    """Content -> id of added tokens that are not special, and of tokens that the metadata name."""
    eos_token: str | None
    """As the tokenizer's own metadata names it; None where it does not say."""
    bos_token: str | None
    coverages: tuple[Coverage, ...] = ()
    """What each fast engine says of this tokenizer, under the policy that was described for."""
    policy: SpecialTokens | None = None
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    """Added tokens as a tokenizer.json has them, with all that it says of them."""
    has_normalizer: bool = False
    spaces_beginnings: bool = False
    """Whether a text gets a space in front, but only where it is the beginning of everything."""


class UnencodableError(TokenizerError):
    """The reference itself fails on some texts of a batch."""

    def __init__(self, documents: Mapping[int, str], *, engine: str) -> None:
        place, reason = next(iter(documents.items()))
        super().__init__(
            f"{engine} fails on {len(documents)} of the texts, first on text {place}: {reason}",
            hint="leave such texts out, or look at the patterns of the tokenizer: one that goes "
            "back and forth over a text fails on long runs",
        )
        self.documents = dict(documents)
        """Their positions in the batch, and why."""


def encode_all(
    encode: Callable[[list[str]], Sequence[Found]], texts: list[str], *, engine: str
) -> Sequence[Found]:
    """What `encode` makes of the texts; where it fails, UnencodableError names those at fault."""
    failed: dict[int, str] = {}
    found: list[Found] = []
    try:
        return encode(texts)
    except BaseException as error:
        reason = failure_of(error)
    if len(texts) == 1:
        raise UnencodableError({0: reason}, engine=engine)
    for place, text in enumerate(texts):
        try:
            found += encode([text])
        except BaseException as error:
            failed[place] = failure_of(error)
    if failed:
        raise UnencodableError(failed, engine=engine)
    return found


def failure_of(error: BaseException) -> str:
    """What a package says of its failure; the error itself is raised where it is not one."""
    # A Rust panic is no Exception; anything else (an interrupt) is not ours to hold.
    is_panic = type(error).__name__ == "PanicException"
    if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic):
        raise error
    return f"it panicked: {error}" if is_panic else str(error) or repr(error)


class Engine(Protocol):
    """Turns text into ids and back. Not thread-safe; one per worker."""

    name: str
    version: str

    def encode(self, texts: TextBatch) -> TokenBatch:
        """Ids of each document; the text must be valid UTF-8.

        UnencodableError where the engine fails on some of them.
        """

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids, special tokens shown as their content."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id stands for, to show borders between tokens."""

    def recycle(self) -> bool:
        """Give cached memory back to the system; False where the engine keeps no cache."""


class FastEngine(Protocol):
    """What a module of a fast engine has; `tokenmill.engines.FAST_ENGINES` lists the modules.

    None of these loads the package before `build`. A TokenizerError of `contested` or `build` is
    a refusal too: the reference runs the tokenizer then, and the manifest says why.
    """

    def covers(self, tokenizer: TokenizerContent, policy: SpecialTokens) -> Coverage:
        """Whether every setting of the tokenizer is one that the engine is known to honour."""

    def contested(
        self, tokenizer: TokenizerContent, coverage: Coverage, reference: Engine
    ) -> Callable[[TextBatch], NDArray[np.int64]] | None:
        """Finds the positions, ascending, of documents that only the reference may encode."""

    def build(
        self,
        tokenizer: TokenizerContent,
        coverage: Coverage,
        *,
        policy: SpecialTokens,
        threads: int,
    ) -> Engine:
        """The engine for a tokenizer that it covers."""


# -------------------------------------------------------------------------------------------------
# The table that byte-level vocabularies are written with: one printable character per byte.
#
# GPT-2 introduced it, and every `ByteLevel` tokenizer.json since uses it. Bytes that print stand
# for themselves; the 68 others (controls, space, 0x7f-0xa0, 0xad) are counted up from U+0100.

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(0x100) if byte not in _PRINTABLE)

BYTE_TO_CHAR: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + position) for position, byte in enumerate(_OTHERS)
}
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}

# 0xc0, 0xc1 and 0xf5-0xff never occur in UTF-8, so a vocabulary may lack them.
UTF8_BYTES = tuple(byte for byte in range(0x100) if byte not in (0xC0, 0xC1) and byte < 0xF5)

_CODES = np.full(0x181, 0xFF, np.uint8)
for _char, _byte in CHAR_TO_BYTE.items():
    _CODES[ord(_char)] = _byte

_WRITTEN = re.compile(f"[{re.escape(''.join(CHAR_TO_BYTE))}]*")


def is_written(piece: str) -> bool:
    """Whether a vocabulary entry is written in the table throughout."""
    return _WRITTEN.fullmatch(piece) is not None


def to_bytes(piece: str) -> bytes | None:
    """Bytes of a byte-level vocabulary entry; None if it is not written in the table."""
    try:
        return bytes(CHAR_TO_BYTE[char] for char in piece)
    except KeyError:
        return None


def from_bytes(data: bytes) -> str:
    """A byte string as a byte-level vocabulary writes it."""
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


def codes_of(pieces: Iterable[str]) -> NDArray[np.uint8]:
    """The byte of each character of the entries, back to back; 0xff where it stands for none."""
    points = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32)
    codes: NDArray[np.uint8] = _CODES[np.minimum(points, len(_CODES) - 1)]
    return codes


# -------------------------------------------------------------------------------------------------
# What one entry of a tokenizer.json's vocabulary stands for, as bytes.
#
# Only for showing tokens to people: a decoder may do more (join, strip, clean up) than one token
# can show.

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def json_token_bytes(content: dict[str, Any], piece: str) -> bytes:
    """Bytes of a vocabulary entry of a tokenizer.json."""
    if _uses(content.get("pre_tokenizer"), "ByteLevel") or _uses(
        content.get("decoder"), "ByteLevel"
    ):
        data = to_bytes(piece)
        return piece.encode() if data is None else data
    model = content["model"]
    if model.get("type") == "WordPiece":
        return piece.removeprefix(model.get("continuing_subword_prefix") or "##").encode()
    return spaced_piece_bytes(piece)


def spaced_piece_bytes(piece: str) -> bytes:
    """Bytes of a piece that writes spaces as U+2581 and lone bytes as <0xHH>."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _uses(step: dict[str, Any] | None, kind: str) -> bool:
    if step is None:
        return False
    members = (step.get("pretokenizers") or []) + (step.get("decoders") or [])
    return step.get("type") == kind or any(_uses(member, kind) for member in members)
