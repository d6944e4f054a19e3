"""Loads a tokenizer's engines: the reference that defines its ids, and a fast one if trusted."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, overload

from tokenmill.engines.base import Engine, SpecialTokens, TokenizerInfo, TokenizerKind
from tokenmill.engines.describe import describe, find_added_tokens, read_tokenizer_json, well_formed
from tokenmill.engines.gigatoken import (
    RANK_PATTERNS,
    Coverage,
    cover_json,
    cover_ranks,
    cover_sentencepiece,
)
from tokenmill.engines.locate import SIDECAR_SUFFIX, resolve_eos
from tokenmill.engines.parity import (
    CheckedEngine,
    Prescan,
    Sample,
    SpecialText,
    contested_ranges,
    probe_texts,
)
from tokenmill.engines.sentencepiece import read_sentencepiece_model
from tokenmill.engines.tiktoken import RankFile, read_rank_file
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.engines.huggingface import HuggingFaceEngine


FAST_ENGINE = "gigatoken"
REFERENCES = {
    TokenizerKind.HUGGINGFACE: "tokenizers",
    TokenizerKind.SENTENCEPIECE: "sentencepiece",
    TokenizerKind.TIKTOKEN: "tiktoken",
    TokenizerKind.BYTES: "bytes",
}
AUTO = "auto"
ENGINE_CHOICES = (AUTO, FAST_ENGINE, *REFERENCES.values())


def load_engine(
    tokenizer: TokenizerInfo | str | PathLike[str],
    *,
    choice: str = AUTO,
    special_tokens: SpecialTokens = SpecialTokens.TEXT,
    threads: int = 1,
) -> CheckedEngine:
    """Load the engine for a tokenizer, or for the folder or name of one.

    `auto` takes the fast engine if its rules cover the tokenizer and the probes agree, else the
    reference. A named engine is taken or refused with the reason.
    """
    info = (
        tokenizer
        if isinstance(tokenizer, TokenizerInfo)
        else describe(tokenizer, policy=special_tokens)
    )
    _check_choice(choice, info.kind)
    parts = _PARTS[info.kind](info, special_tokens, threads)
    # The string of the bytes engine's end of text means nothing to it.
    matched = () if info.kind is TokenizerKind.BYTES else tuple(info.special_tokens)
    if choice == parts.reference.name:
        refusal = f"--engine {choice} was asked for"
    else:
        engine, refusal = _load_fast(info, parts, matched)
        if engine is not None:
            return engine
    if choice == FAST_ENGINE:
        raise TokenizerError(
            f"gigatoken may not be used for this tokenizer: {refusal}; its ids could be wrong",
            hint="use --engine auto",
        )
    return CheckedEngine(
        parts.reference, info=info, special_text=SpecialText(matched), refusal=refusal
    )


def _load_fast(
    info: TokenizerInfo, parts: _Parts, matched: tuple[str, ...]
) -> tuple[CheckedEngine | None, str]:
    """The checked fast engine, or why it may not be used."""
    reference, coverage = parts.reference, parts.coverage
    if coverage.refusal:
        return None, coverage.refusal
    known = f"{reference.name} {reference.version}"
    ranges = contested_ranges(
        patterns=coverage.patterns,
        normalizes=coverage.normalizes,
        engines=[(reference.name, reference.version), (FAST_ENGINE, version(FAST_ENGINE))],
    )
    if ranges is None:
        return None, f"{known} was never compared with it"
    try:
        fast = parts.build()
    except TokenizerError as error:
        return None, error.message
    # A SentencePiece model carries its own tables; no engine adds Unicode tables to it.
    prescan = None if info.kind is TokenizerKind.SENTENCEPIECE else Prescan(ranges)
    engine = CheckedEngine(
        reference,
        info=info,
        special_text=SpecialText(matched),
        fast=fast,
        prescan=prescan,
        contested_text=SpecialText(coverage.contested) if coverage.contested else None,
        probes=probe_texts([*matched, *info.other_tokens], derived=coverage.probes),
    )
    mismatches = engine.check_probes().mismatches
    if mismatches:
        first = mismatches[0].text[:40]
        return None, f"it disagrees with {known} on {len(mismatches)} probes, first on {first!r}"
    return engine, ""


def _check_choice(choice: str, kind: TokenizerKind) -> None:
    if choice not in ENGINE_CHOICES:
        raise UsageError(
            f"there is no engine {choice!r}", hint=f"use one of: {', '.join(ENGINE_CHOICES)}"
        )
    if choice not in (AUTO, FAST_ENGINE, REFERENCES[kind]):
        raise UsageError(
            f"the engine {choice!r} cannot run this tokenizer, which is of the kind {kind.value!r}",
            hint=f"use --engine {REFERENCES[kind]} or --engine auto",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    reference: Engine
    coverage: Coverage
    build: Callable[[], Engine]
    """Builds the fast engine, if it comes to that."""


def _json_parts(info: TokenizerInfo, special_tokens: SpecialTokens, threads: int) -> _Parts:
    from tokenmill.engines import gigatoken
    from tokenmill.engines.huggingface import HuggingFaceEngine

    path = info.files["tokenizer.json"]
    coverage = _described_coverage(info, special_tokens)
    if coverage is None:
        with well_formed(path):
            coverage = cover_json(read_tokenizer_json(path), special_tokens)
    patterns = coverage.patterns
    content = find_added_tokens(path.read_text(encoding="utf-8-sig"))
    reference = HuggingFaceEngine(path, special_tokens=special_tokens, threads=threads)
    _check_added_ids(reference, content.tokens, path)
    return _Parts(
        reference=reference,
        coverage=coverage,
        build=lambda: gigatoken.from_text(
            content,
            patterns=patterns,
            special_tokens=special_tokens,
            threads=threads,
        ),
    )


def _described_coverage(info: TokenizerInfo, special_tokens: SpecialTokens) -> Coverage | None:
    """The coverage that is known already, if it is for this policy."""
    return info.coverage if info.policy is special_tokens else None


def _check_added_ids(
    reference: HuggingFaceEngine, tokens: list[dict[str, Any]], path: Path
) -> None:
    """Raise if the file's id of a special token, and so of eos, is not the reference's."""
    for token in tokens:
        found = reference.added_token_id(token["content"])
        if found is not None and found != token["id"]:
            raise TokenizerError(
                f"the added token {token['content']!r} has the id {token['id']} in {str(path)!r}, "
                f"but {reference.name} {reference.version} gives it {found}",
                hint='write the file anew with: python -c "import sys, tokenizers as t; '
                't.Tokenizer.from_file(sys.argv[1]).save(sys.argv[1])" '
                f"{shlex.quote(str(path))}",
            )


def _sentencepiece_parts(
    info: TokenizerInfo, special_tokens: SpecialTokens, threads: int
) -> _Parts:
    from tokenmill.engines import gigatoken
    from tokenmill.engines.sentencepiece import SentencePieceEngine

    path = next(iter(info.files.values()))
    return _Parts(
        reference=SentencePieceEngine(path, special_tokens=special_tokens, threads=threads),
        coverage=_described_coverage(info, special_tokens)
        or cover_sentencepiece(read_sentencepiece_model(path)),
        build=lambda: gigatoken.from_sentencepiece(path, threads=threads),
    )


def _rank_parts(info: TokenizerInfo, special_tokens: SpecialTokens, threads: int) -> _Parts:
    from tokenmill.engines import gigatoken
    from tokenmill.engines.tiktoken import TiktokenEngine

    ranks = _read_ranks(info.files)
    return _Parts(
        reference=TiktokenEngine(ranks, special_tokens=special_tokens, threads=threads),
        coverage=_described_coverage(info, special_tokens) or cover_ranks(ranks, special_tokens),
        build=lambda: gigatoken.from_ranks(
            ranks,
            pattern=RANK_PATTERNS[ranks.definition.pattern],
            special_tokens=special_tokens,
            threads=threads,
        ),
    )


def _bytes_parts(info: TokenizerInfo, special_tokens: SpecialTokens, _threads: int) -> _Parts:
    from tokenmill.engines.raw_bytes import BytesEngine

    engine = BytesEngine(special_tokens=special_tokens)
    coverage = Coverage(engine=None, refusal=info.fast_engine_refusal)
    return _Parts(reference=engine, coverage=coverage, build=lambda: engine)


def _read_ranks(files: Mapping[str, Path]) -> RankFile:
    sidecars = [path for name, path in files.items() if name.endswith(SIDECAR_SUFFIX)]
    ranks = next(path for path in files.values() if path not in sidecars)
    return read_rank_file(ranks, sidecar=sidecars[0] if sidecars else None)


_PARTS = {
    TokenizerKind.HUGGINGFACE: _json_parts,
    TokenizerKind.SENTENCEPIECE: _sentencepiece_parts,
    TokenizerKind.TIKTOKEN: _rank_parts,
    TokenizerKind.BYTES: _bytes_parts,
}


# -------------------------------------------------------------------------------------------------
# The checked fast engine in one line, for people who must tokenize inside their own loop.
#
#   | tokenizer = tokenmill.load_tokenizer("path/or/hub-id")
#   | encoded = tokenizer.encode_batch(texts)        # encoded.ids, encoded.offsets, encoded[3]
#
# Unlike the build's workers this uses every core by default. As in a build, a small part of the
# text is encoded again by the reference; on a disagreement the call is redone and the fast engine
# is given up, with a warning.


@dataclass(frozen=True, slots=True, eq=False)
class Encoded(Sequence["NDArray[np.uint32]"]):
    """Ids of documents back to back; document i is `encoded[i]`."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint32]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.uint32]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint32] | list[NDArray[np.uint32]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.ids[self.offsets[position] : self.offsets[position + 1]]


class Tokenizer:
    """Text to ids and back, by the fastest engine that agrees with the reference."""

    def __init__(self, checked: CheckedEngine) -> None:
        self._checked = checked
        self._engine: CheckedEngine | Engine = checked
        self._sample = Sample()

    @property
    def engine(self) -> str:
        """Name of the engine in use."""
        return self._engine.name

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._checked.info.vocab_size

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a document; None where the tokenizer does not name one."""
        try:
            return resolve_eos(self._checked.info)[1]
        except TokenizerError:
            return None

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Ids of each text."""
        batch = TextBatch.from_texts(texts)
        tokens = self._engine.encode(batch)
        if self._engine is self._checked:
            result = self._checked.check_sample(batch, tokens, self._sample)
            if result.mismatches:
                self._give_up(result.mismatches[0].text)
                tokens = self._engine.encode(batch)
        return Encoded(tokens.ids, tokens.offsets)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of one text."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids, special tokens shown as their content."""
        return self._checked.decode(ids)

    def _give_up(self, text: str) -> None:
        reference = self._checked.reference
        warnings.warn(
            f"{self._checked.name} and {reference.name} disagree on {text[:60]!r}; "
            f"{reference.name} is used from here on, which is slower and right",
            RuntimeWarning,
            stacklevel=3,
        )
        self._engine = reference


def load_tokenizer(
    path: str | PathLike[str],
    *,
    special_tokens: SpecialTokens | str = SpecialTokens.TEXT,
    engine: str = AUTO,
    threads: int | None = None,
) -> Tokenizer:
    """Load a tokenizer with the checked fast engine; `threads` defaults to every core."""
    checked = load_engine(
        path,
        choice=engine,
        special_tokens=SpecialTokens(special_tokens),
        threads=threads or os.cpu_count() or 1,
    )
    return Tokenizer(checked)
