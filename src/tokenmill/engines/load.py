"""Loads a tokenizer's engines: the reference that defines its ids, and a fast one if trusted."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from tokenmill.engines import AUTO, REFERENCES, engine_names
from tokenmill.engines.base import SpecialTokens, TokenizerInfo, TokenizerKind
from tokenmill.engines.describe import TokenizerContent, coverages_of, describe, fast_engines
from tokenmill.engines.locate import SIDECAR_SUFFIX, resolve_eos
from tokenmill.engines.parity import CheckedEngine, Sample, SpecialText, probe_texts
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.engines.base import Coverage, Engine
    from tokenmill.engines.huggingface import HuggingFaceEngine


def load_engine(
    tokenizer: TokenizerInfo | str | PathLike[str],
    *,
    choice: str = AUTO,
    special_tokens: SpecialTokens = SpecialTokens.TEXT,
    threads: int = 1,
) -> CheckedEngine:
    """Load the engine for a tokenizer, or for the folder or name of one.

    `auto` takes the first fast engine whose rules cover the tokenizer and that agrees with the
    probes, else the reference. A named engine is taken or refused with the reason.
    """
    info = (
        tokenizer
        if isinstance(tokenizer, TokenizerInfo)
        else describe(tokenizer, policy=special_tokens)
    )
    _check_choice(choice, info.kind)
    if info.kind is TokenizerKind.BYTES:
        return _load_bytes(info, choice, special_tokens)
    path = next(iter(info.files.values()))
    content = TokenizerContent(info.kind, path, info.files.get(path.name + SIDECAR_SUFFIX))
    reference = _load_reference(info, content, special_tokens, threads)
    if choice == reference.name:
        refusal = f"--engine {choice} was asked for"
    else:
        known = info.policy is special_tokens
        coverages = info.coverages if known else coverages_of(content, special_tokens)
        refusals: dict[str, str] = {}
        for coverage in coverages:
            if choice not in (AUTO, coverage.engine):
                continue
            try:
                return _load_fast(info, content, coverage, reference, special_tokens, threads)
            except TokenizerError as error:
                refusals[coverage.engine] = error.message
        refusal = "; ".join(
            reason if len(refusals) == 1 else f"{name}: {reason}"
            for name, reason in refusals.items()
        )
    if choice not in (AUTO, reference.name):
        raise _not_usable(choice, refusal)
    special_text = SpecialText(tuple(info.special_tokens))
    return CheckedEngine(reference, info=info, special_text=special_text, refusal=refusal)


def known_policy(kind: str, special_tokens: str) -> tuple[TokenizerKind, SpecialTokens]:
    """What a store says of its tokenizer; TokenizerError where this version does not know it."""
    try:
        return TokenizerKind(kind), SpecialTokens(special_tokens)
    except ValueError as error:
        raise TokenizerError(
            f"the store says of its tokenizer what is not known here: {error}",
            hint="open it with the version of tokenmill that wrote it",
        ) from error


def load_reference(kind: str, folder: PathLike[str], *, special_tokens: str) -> Engine:
    """The reference engine alone, of the tokenizer that is kept in a store's folder."""
    known, policy = known_policy(kind, special_tokens)
    # The byte tokenizer has no files to be found.
    where = kind if known is TokenizerKind.BYTES else folder
    return load_engine(where, choice=REFERENCES[known], special_tokens=policy).reference


def _load_fast(
    info: TokenizerInfo,
    content: TokenizerContent,
    coverage: Coverage,
    reference: Engine,
    policy: SpecialTokens,
    threads: int,
) -> CheckedEngine:
    """The checked fast engine; TokenizerError says why it may not be used."""
    if coverage.refusal:
        raise TokenizerError(coverage.refusal)
    module = fast_engines()[coverage.engine]
    contested = module.contested(content, coverage, reference)
    special = tuple(info.special_tokens)
    engine = CheckedEngine(
        reference,
        info=info,
        special_text=SpecialText(special),
        fast=module.build(content, coverage, policy=policy, threads=threads),
        contested=contested,
        probes=probe_texts([*special, *info.other_tokens], derived=coverage.probes),
    )
    mismatches = engine.check_probes().mismatches
    if mismatches:
        raise TokenizerError(
            f"it disagrees with {reference.name} {reference.version} on {len(mismatches)} probes, "
            f"first on {mismatches[0].text[:40]!r}"
        )
    return engine


def _load_bytes(info: TokenizerInfo, choice: str, policy: SpecialTokens) -> CheckedEngine:
    from tokenmill.engines.raw_bytes import BytesEngine

    refusal = "the bytes engine needs no faster one"
    if choice not in (AUTO, BytesEngine.name):
        raise _not_usable(choice, refusal)
    # The string of its end of text means nothing to it.
    return CheckedEngine(
        BytesEngine(special_tokens=policy),
        info=info,
        special_text=SpecialText(()),
        refusal=refusal if choice == AUTO else f"--engine {choice} was asked for",
    )


def _not_usable(choice: str, refusal: str) -> TokenizerError:
    return TokenizerError(
        f"{choice} may not be used for this tokenizer: {refusal}; its ids could be wrong",
        hint="use --engine auto",
    )


def _check_choice(choice: str, kind: TokenizerKind) -> None:
    choices = (AUTO, *engine_names())
    if choice not in choices:
        raise UsageError(f"there is no engine {choice!r}", hint=f"use one of: {', '.join(choices)}")
    if choice in REFERENCES.values() and choice != REFERENCES[kind]:
        raise UsageError(
            f"the engine {choice!r} cannot run this tokenizer, which is of the kind {kind.value!r}",
            hint=f"use --engine {REFERENCES[kind]} or --engine auto",
        )


def _load_reference(
    info: TokenizerInfo, content: TokenizerContent, policy: SpecialTokens, threads: int
) -> Engine:
    if content.kind is TokenizerKind.HUGGINGFACE:
        from tokenmill.engines.huggingface import HuggingFaceEngine

        reference = HuggingFaceEngine(content.path, special_tokens=policy, threads=threads)
        _check_added_ids(reference, info.added_tokens, content.path)
        return reference
    if content.kind is TokenizerKind.SENTENCEPIECE:
        from tokenmill.engines.sentencepiece import SentencePieceEngine

        return SentencePieceEngine(content.path, special_tokens=policy, threads=threads)
    from tokenmill.engines.tiktoken import TiktokenEngine

    return TiktokenEngine(content.parsed, special_tokens=policy, threads=threads)


def _check_added_ids(
    reference: HuggingFaceEngine, tokens: Sequence[Mapping[str, Any]], path: Path
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


# -------------------------------------------------------------------------------------------------
# The checked fast engine in one line, for people who must tokenize inside their own loop.
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
