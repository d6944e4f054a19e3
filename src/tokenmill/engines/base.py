"""What an engine is to the rest of tokenmill: a batch of Arrow text in, flat ids and offsets out.

Engines never add special tokens by themselves (no BOS, no template): what is between documents is
the build's decision, and it is written down in the manifest.
"""

from __future__ import annotations

import ctypes
import enum
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from tokenmill.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.engines.load import TokenizerFiles
    from tokenmill.records import TextBatch, TokenBatch


Found = TypeVar("Found")


class SpecialTokens(enum.StrEnum):
    """What to do with the string of a special token inside a document."""

    TEXT = "text"  # ordinary characters: a web page cannot end a document
    PARSE = "parse"  # the special token itself, as `tokenizers` does by default
    REJECT = "reject"  # the document is rejected


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
    # Text of the split patterns, which says which classes of characters matter.
    patterns: str = ""
    # Whether text is put into NFC, whose tables differ between the engines.
    normalizes: bool = False
    # Texts that this very tokenizer makes delicate; the probes must hold them.
    probes: tuple[str, ...] = ()
    # Strings that send a document to the reference engine.
    contested: tuple[str, ...] = ()
    # Ways of running it, with one thread or several, whose probes agreed here before.
    proved: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """What a tokenizer makes of text that it does not know."""

    token: str | None  # such as <unk>; None where unknown text is dropped without a word
    id: int | None
    by_word: bool = False  # whether a word with anything unknown in it is unknown as a whole
    is_fused: bool = False  # whether unknown characters in a row share one id
    missing_bytes: tuple[int, ...] = ()  # of a byte-level vocabulary that lacks some


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """What can be said about a tokenizer without loading an engine. Picklable and small."""

    kind: TokenizerKind
    # File name inside a store's `tokenizer/` folder -> where it is now. Empty for bytes.
    files: Mapping[str, Path]
    # sha256 of the canonical content: equal for equal tokenizers, however formatted.
    fingerprint: str
    # One more than the largest id, added tokens counted.
    vocab_size: int
    # Content -> id: of every special token; of other added tokens and those that metadata name.
    special_tokens: Mapping[str, int]
    other_tokens: Mapping[str, int] = field(default_factory=dict)
    # As the tokenizer's own metadata name them; None where they do not say.
    eos_token: str | None
    bos_token: str | None
    # What each fast engine says of this tokenizer, under the policy that was described for.
    coverages: tuple[Coverage, ...] = ()
    policy: SpecialTokens | None = None
    # Added tokens as a tokenizer.json has them, with all that it says of them.
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    has_normalizer: bool = False
    # Whether a text gets a space in front, but only where it is the beginning of everything.
    spaces_beginnings: bool = False
    # None where every text can be encoded with nothing lost.
    unknown: Unknown | None = None
    # Name under which the user's cache keeps all of this; None where nothing is kept.
    key: str | None = None


class UnencodableError(TokenizerError):
    """The reference itself fails on some texts of a batch."""

    def __init__(self, documents: Mapping[int, str], *, engine: str) -> None:
        place, reason = next(iter(documents.items()))
        super().__init__(
            f"{engine} fails on {len(documents)} of the texts, first on text {place}: {reason}",
            hint="leave such texts out, or look at the patterns of the tokenizer: one that goes "
            "back and forth over a text fails on long runs",
        )
        self.documents = dict(documents)  # their positions in the batch, and why
        self.engine = engine


@contextmanager
def taken_from(places: Sequence[int] | NDArray[np.int64]) -> Iterator[None]:
    """Texts that fail inside are named by their places in the batch that they were taken from."""
    try:
        yield
    except UnencodableError as error:
        documents = {int(places[index]): why for index, why in error.documents.items()}
        raise UnencodableError(documents, engine=error.engine) from error


def encode_all(
    encode: Callable[[list[str]], Sequence[Found]], texts: list[str], *, engine: str
) -> Sequence[Found]:
    """What `encode` makes of the texts; where it fails, UnencodableError names those at fault."""
    try:
        return encode(texts)
    except BaseException as error:
        failed = {0: failure_of(error)}
    found: list[Found] = []
    if len(texts) > 1:
        failed = {}
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


def trim_heap() -> None:
    """Have the C library give memory that was freed back to the system; only glibc has that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Engine(Protocol):
    """Turns text into ids and back. Not thread-safe; one per worker.

    One that keeps caches has `recycle()` too, which gives their memory back to the system. One that
    costs much for each call has `few_bytes`: for so much text its `encode_one(text)`, or the
    reference's where it has none, is faster than its `encode`. One has `plain(text)`, a list of ids
    by the reference itself, for texts of fewer than `plain_characters`.
    """

    name: str
    version: str

    def encode(self, texts: TextBatch) -> TokenBatch:
        """Ids of each document; the text must be valid UTF-8.

        UnencodableError where the engine fails on some of them.
        """

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids, special tokens shown as their content."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id, to show boundaries between tokens."""


class FastEngine(Protocol):
    """What a module of a fast engine has; `tokenmill.engines.FAST_ENGINES` lists the modules.

    None of these loads the package before `build`. A TokenizerError of `contested` or `build` is
    a refusal too: the reference runs the tokenizer then, and the manifest says why.
    """

    def covers(self, tokenizer: TokenizerFiles, policy: SpecialTokens) -> Coverage:
        """Whether every setting of the tokenizer is one that the engine is known to honour."""

    def contested(
        self, tokenizer: TokenizerFiles, coverage: Coverage, reference: Engine
    ) -> Callable[[TextBatch], NDArray[np.int64]] | None:
        """Finds the positions, ascending, of documents that only the reference may encode."""

    def build(
        self,
        tokenizer: TokenizerFiles,
        coverage: Coverage,
        *,
        reference: Engine,
        policy: SpecialTokens,
        threads: int,
    ) -> Engine:
        """The engine for a tokenizer that it covers."""


# The table that byte-level vocabularies are written with: one printable character per byte. GPT-2
# introduced it, and every `ByteLevel` tokenizer.json since uses it. Bytes that print are
# themselves; the 68 others (controls, space, 0x7f-0xa0, 0xad) are counted up from U+0100.

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(0x100) if byte not in _PRINTABLE)

BYTE_TO_CHAR: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + position) for position, byte in enumerate(_OTHERS)
}
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}

# 0xc0, 0xc1 and 0xf5-0xff never occur in UTF-8, so a vocabulary may lack them.
UTF8_BYTES = tuple(byte for byte in range(0x100) if byte not in (0xC0, 0xC1) and byte < 0xF5)

_CODES = np.full(0x181, 0xFF, np.uint8)
_CODES[list(map(ord, CHAR_TO_BYTE))] = list(CHAR_TO_BYTE.values())
_WRITTEN = re.compile(f"[{re.escape(''.join(CHAR_TO_BYTE))}]*")


def is_written(piece: str) -> bool:
    """Whether a vocabulary entry is written in the table throughout."""
    return _WRITTEN.fullmatch(piece) is not None


def to_bytes(piece: str) -> bytes | None:
    """Bytes of a byte-level vocabulary entry; None if it is not written in the table."""
    return bytes(map(CHAR_TO_BYTE.__getitem__, piece)) if is_written(piece) else None


def from_bytes(data: bytes) -> str:
    """A byte string as a byte-level vocabulary writes it."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, data))


def codes_of(pieces: Iterable[str]) -> NDArray[np.uint8]:
    """The byte of each character of the entries, back to back; 0xff where it means none."""
    points = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32)
    codes: NDArray[np.uint8] = _CODES[np.minimum(points, len(_CODES) - 1)]
    return codes


def nested_steps(*steps: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Steps of a tokenizer.json (normalizer, pre-tokenizer, decoder) and all that are in them."""
    for step in filter(None, steps):
        yield step
        for members in ("normalizers", "pretokenizers", "decoders"):
            yield from nested_steps(*(step.get(members) or ()))
