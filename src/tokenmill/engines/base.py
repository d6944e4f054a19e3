"""What an engine is to the rest of tokenmill: a batch of Arrow text in, flat ids and offsets out.

Engines never add special tokens by themselves (no BOS, no template): what stands between
documents is the build's decision, and it is written down in the manifest.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tokenmill.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.engines.coverage import Coverage
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
    fast_engine: str | None
    """Name of the fast engine whose coverage rules accept this tokenizer, or None."""
    fast_engine_refusal: str | None
    """Why the fast engine may not be used, for the manifest and the summary."""
    coverage: Coverage | None = None
    """Which texts the fast engine may be given, under the policy that was described for."""
    policy: SpecialTokens = SpecialTokens.TEXT
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
    """gigatoken, tokenizers, sentencepiece, tiktoken or bytes."""
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
