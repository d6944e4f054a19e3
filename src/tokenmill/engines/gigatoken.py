"""gigatoken, the fast engine for byte-level and SentencePiece BPE; the home of awkward too.

Text goes in and ids come out as awkward arrays over our own buffers, without a copy. Three
hazards of gigatoken 0.10 are handled here: it recognises special tokens in text whatever one
asks, so under `text` it is given a tokenizer without them; its caches grow without bound, so
`recycle` builds it anew; its thread pool hangs in a forked child, so one thread means
`parallel=False`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines import byte_level
from tokenmill.engines.added_tokens import kept_tokens
from tokenmill.engines.base import SpecialTokens, failure_of
from tokenmill.engines.coverage import RESPELLED
from tokenmill.errors import TokenizerError
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.engines.json_text import AddedTokensText
    from tokenmill.engines.rank_files import RankFile
    from tokenmill.records import TextBatch


class GigatokenEngine:
    """Encodes with gigatoken. Made by the functions below, which know what it may be given."""

    name = "gigatoken"

    def __init__(self, build: Callable[[], Any], *, threads: int = 1) -> None:
        self.version = version("gigatoken")
        self._build = build
        # None lets gigatoken stay on one thread where it finds itself in a child process.
        self._parallel = None if threads > 1 else False
        self._tokenizer = _built(build)
        self._vocab: dict[int, bytes] | None = None

    def encode(self, texts: TextBatch) -> TokenBatch:
        if not len(texts):
            return TokenBatch(np.empty(0, np.uint32), np.zeros(1, np.int64))
        import awkward

        first = int(texts.offsets[0])
        content = awkward.contents.NumpyArray(
            texts.data[first : texts.offsets[-1]], parameters={"__array__": "char"}
        )
        offsets = texts.offsets - first if first else texts.offsets
        strings = awkward.contents.ListOffsetArray(
            awkward.index.Index64(offsets), content, parameters={"__array__": "string"}
        )
        try:
            encoded = self._tokenizer.encode_batch(awkward.Array(strings), parallel=self._parallel)
        except BaseException as error:
            raise TokenizerError(
                f"gigatoken cannot encode {texts.num_bytes:,} bytes of text: {failure_of(error)}",
                hint="use the reference engine: --engine tokenizers, sentencepiece or tiktoken",
            ) from error
        layout = encoded.layout
        return TokenBatch(
            np.asarray(layout.content.data, np.uint32), np.asarray(layout.offsets.data, np.int64)
        )

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        data: bytes = self._tokenizer.decode(np.asarray(ids, np.uint32))
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if self._vocab is None:
            self._vocab = dict(self._tokenizer.vocab)
        return self._vocab.get(token_id, b"")

    def recycle(self) -> bool:
        """Drop the tokenizer with its caches, hand the memory back, build it again."""
        self._tokenizer = self._vocab = None
        gc.collect()
        _trim_heap()
        self._tokenizer = _built(self._build)
        return True


def from_text(
    content: AddedTokensText, *, patterns: str, special_tokens: SpecialTokens, threads: int = 1
) -> GigatokenEngine:
    """The engine for the text of a tokenizer.json that `coverage` accepts, and its patterns."""
    kept = kept_tokens({"added_tokens": content.tokens}, special_tokens)
    text = content.with_tokens(kept)
    if patterns == RESPELLED[0]:
        known, other = map(json.dumps, RESPELLED)
        # Only where it is a pattern: the string may be that of a token too.
        text, count = re.subn(r'("Regex"\s*:\s*)' + re.escape(known), lambda m: m[1] + other, text)
        if not count:
            raise TokenizerError("its split pattern is spelled with escapes that are not covered")
    data = text.encode()
    return GigatokenEngine(lambda: _gigatoken().Tokenizer.from_json(data), threads=threads)


def from_json(
    content: dict[str, Any], *, special_tokens: SpecialTokens, threads: int = 1
) -> GigatokenEngine:
    """The engine for a parsed tokenizer.json that `coverage` accepts."""
    reduced = content | {"added_tokens": kept_tokens(content, special_tokens)}
    data = json.dumps(reduced, ensure_ascii=False).encode()
    return GigatokenEngine(lambda: _gigatoken().Tokenizer.from_json(data), threads=threads)


def from_sentencepiece(path: Path, *, threads: int = 1) -> GigatokenEngine:
    """The engine for a SentencePiece model that `coverage` accepts; control symbols stay text."""
    _gigatoken()
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    content = json.loads(sentencepiece_to_tokenizer_json(path.read_bytes()))
    return from_json(content, special_tokens=SpecialTokens.TEXT, threads=threads)


def from_ranks(
    ranks: RankFile, *, pattern: str, special_tokens: SpecialTokens, threads: int = 1
) -> GigatokenEngine:
    """The engine for a rank file that `coverage` accepts, with its pattern as gigatoken spells it.

    gigatoken's own loader of rank files derives one merge for each token and panics where it finds
    none, as in Llama 3. tiktoken joins any two neighbours whose joined bytes have a rank, and
    takes a piece that has a rank as it is: that is said here as a tokenizer.json.
    """
    vocab = {byte_level.from_bytes(token): rank for token, rank in ranks.ranks.items()}
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(vocab, key=vocab.__getitem__)
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]
    added = [
        {"id": index, "content": text, "special": True, "normalized": False}
        for text, index in ranks.definition.special_tokens.items()
    ]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    byte_level_step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    content = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level_step]},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }
    return from_json(content, special_tokens=special_tokens, threads=threads)


def _gigatoken() -> Any:
    import gigatoken

    return gigatoken


def _built(build: Callable[[], Any]) -> Any:
    try:
        return build()
    except BaseException as error:
        reason = failure_of(error)
    raise TokenizerError(
        f"gigatoken cannot load this tokenizer: {reason}",
        hint="use the reference engine: --engine auto",
    )


def _trim_heap() -> None:
    """Ask the C library to return free memory; only glibc has a call for it."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
