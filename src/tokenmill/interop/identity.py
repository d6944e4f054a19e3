"""Who an imported store is: its tokenizer, what was imported, and where its end-of-text id stands.

The last is not asked but found: after all documents are read, it is known whether each of them
begins or ends with the id. A prepended end-of-text (as llm.c has it) is a token that begins every
document, so it stands as `bos` in the manifest, with its own name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill._version import __version__
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.describe import describe
from tokenmill.engines.end_tokens import resolve_eos
from tokenmill.engines.locate import find_tokenizer
from tokenmill.errors import StoreError
from tokenmill.store.durable import replace_file
from tokenmill.store.entries import BoundaryToken, StoreIdentity, TokenizerFacts
from tokenmill.store.facts import facts_of
from tokenmill.store.fields import FORMAT_VERSION

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.reader import MappedShard
    from tokenmill.store.sealed import Json

UNKNOWN = "unknown"
"""Kind of the tokenizer of ids that nobody named one for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTokenizer:
    """The tokenizer that made foreign ids, as far as an import needs it."""

    facts: TokenizerFacts
    files: Mapping[str, Path]
    eos: tuple[str, int] | None


def name_tokenizer(source: str | os.PathLike[str], *, eos: str | None = None) -> NamedTokenizer:
    """The tokenizer of a name; its end-of-text as asked for, or as its metadata say, or none."""
    files = find_tokenizer(source)
    info = describe(files, policy=None)
    named = info.eos_token is not None or eos is not None
    return NamedTokenizer(
        facts=TokenizerFacts(
            kind=str(info.kind),
            fingerprint=info.fingerprint,
            vocab_size=info.vocab_size,
            files={name: facts_of(path.read_bytes()) for name, path in files.files.items()},
        ),
        files=files.files,
        eos=resolve_eos(info, eos) if named else None,
    )


def unknown_tokenizer(vocab_size: int, *, eos_id: int | None = None) -> NamedTokenizer:
    """For ids whose tokenizer nobody named."""
    facts = TokenizerFacts(kind=UNKNOWN, fingerprint=UNKNOWN, vocab_size=vocab_size, files={})
    eos = None if eos_id is None else (f"id {eos_id}", eos_id)
    return NamedTokenizer(facts=facts, files={}, eos=eos)


def import_identity(
    tokenizer: NamedTokenizer, config: Mapping[str, Json], *, mask: bool
) -> StoreIdentity:
    """The identity of an imported store, before its end-of-text is found."""
    content: dict[str, Json] = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.facts.fingerprint,
        "vocab_size": tokenizer.facts.vocab_size,
        "config": dict(config),
    }
    if mask:
        content["mask"] = True
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True).encode()
    return StoreIdentity(
        created_by=f"tokenmill {__version__}",
        tokenizer=tokenizer.facts,
        eos=None,
        bos=None,
        special_tokens=str(SpecialTokens.TEXT),
        config=config,
        fingerprint=hashlib.sha256(canonical).hexdigest(),
        mask=mask,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EosTally:
    """How many documents have the end-of-text id where."""

    documents: int = 0
    """Those that have tokens."""
    first: int = 0
    last: int = 0

    def __add__(self, other: EosTally) -> EosTally:
        return EosTally(
            documents=self.documents + other.documents,
            first=self.first + other.first,
            last=self.last + other.last,
        )

    @property
    def place(self) -> str:
        """Where it stands: appended, prepended, mixed or none."""
        if self.documents and self.last == self.documents:
            return "appended"
        if self.documents and self.first == self.documents:
            return "prepended"
        return "mixed" if self.first or self.last else "none"

    def sentence(self, token: str) -> str:
        """What was found, in words."""
        if self.place in {"appended", "prepended"}:
            where = "ends" if self.place == "appended" else "begins"
            return f"every document {where} with {token}"
        if self.place == "none":
            return f"no document begins or ends with {token}"
        return (
            f"{self.last:,} of {self.documents:,} documents end with {token} and {self.first:,}"
            " begin with it: the store says that none is there"
        )


def tally_eos(
    shard: MappedShard, eos_id: int | None, *, block_documents: int = 1 << 18
) -> EosTally:
    """Look at the first and last token of every document of a shard."""
    index, tokens = shard.index, shard.tokens
    tally = EosTally()
    for first in range(0, len(index.lengths), block_documents):
        here = slice(first, first + block_documents)
        lengths = index.lengths[here].astype(np.int64)
        begins = index.offsets[here][lengths > 0] // index.dtype.itemsize
        lasts = begins + lengths[lengths > 0] - 1
        known = eos_id is not None
        tally += EosTally(
            documents=len(begins),
            first=int(np.count_nonzero(tokens[begins] == eos_id)) if known else 0,
            last=int(np.count_nonzero(tokens[lasts] == eos_id)) if known else 0,
        )
    return tally


def with_eos(
    identity: StoreIdentity, tally: EosTally, eos: tuple[str, int] | None
) -> StoreIdentity:
    """The identity with the end-of-text where it was found."""
    if eos is None or tally.place not in {"appended", "prepended"}:
        return identity
    token, number = eos
    if tally.place == "appended":
        return replace(identity, eos=BoundaryToken(token=token, id=number, position="end"))
    return replace(identity, bos=BoundaryToken(token=token, id=number, position="start"))


def copy_tokenizer(layout: StoreLayout, tokenizer: NamedTokenizer) -> None:
    """Copy the tokenizer's files into the store, so that it needs nothing else to be read."""
    layout.tokenizer.mkdir(parents=True, exist_ok=True)
    for name, source in tokenizer.files.items():
        wanted, target = tokenizer.facts.files[name], layout.tokenizer / name
        if target.exists() and facts_of(target.read_bytes()) == wanted:
            continue
        data = source.read_bytes()
        if facts_of(data) != wanted:
            raise StoreError(
                f"the tokenizer file {str(source)!r} changed while it was read",
                hint="run the same command again",
            )
        replace_file(layout, target, data)
