"""The manifest `tokenmill.json`: what a reader must never guess, sealed, and written last.

    StoreIdentity (how text became ids)  +  receipts (what came of it)  ->  Manifest

It is a function of the input and the configuration, byte for byte: no date, no host, no duration,
nothing that depends on the number of workers or on an interruption. `runs.jsonl` keeps those.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.store.collection import without_collection
from tokenmill.store.durable import replace_file
from tokenmill.store.entries import (
    COLUMNS,
    MASK_COLUMNS,
    BoundaryToken,
    EngineEntry,
    ShardEntry,
    SourceEntry,
    SplitTotals,
    StoreIdentity,
    TokenizerFacts,
    UnitEntry,
    source_entries,
    split_totals,
    unit_entries,
)
from tokenmill.store.facts import Counts, FileFacts
from tokenmill.store.fields import Fields, check_version, version_of
from tokenmill.store.layout import SPLIT_NAME, StoreLayout
from tokenmill.store.sealed import Json, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A complete store."""

    identity: StoreIdentity
    totals: Counts
    splits: Mapping[str, SplitTotals]
    engines: tuple[EngineEntry, ...]
    sources: tuple[SourceEntry, ...]
    units: tuple[UnitEntry, ...]
    """In the order of the plan: file by file, and along each file."""

    def __post_init__(self) -> None:
        if len({source.prefix for source in self.sources}) != len(self.sources):
            raise ValueError("two sources have the same prefix")
        if not all(map(SPLIT_NAME.fullmatch, self.splits)):
            raise ValueError(f"splits {list(self.splits)} are not plain names")
        if dict(self.splits) != split_totals(self.units):
            raise ValueError("the totals of the splits are not those of their shards")
        if sum(split.tokens for split in self.splits.values()) != self.totals.tokens:
            raise ValueError("the totals are not those of the shards")

    @property
    def version(self) -> int:
        """Its format version."""
        return version_of(
            masks=self.identity.mask,
            pieces=self.totals.pieces > 0,
            unlisted=self.totals.unlisted > 0,
        )

    def shards(self, *, split: str | None = None) -> Iterator[tuple[UnitEntry, ShardEntry]]:
        """The shards of a split (None: of all), in order, with their units."""
        for unit in self.units:
            for shard in unit.shards:
                if split is None or shard.split == split:
                    yield unit, shard

    def to_bytes(self) -> bytes:
        """The manifest's file."""
        identity = self.identity
        mask: dict[str, Json] = {"mask": True} if identity.mask else {}
        columns = MASK_COLUMNS if identity.mask else COLUMNS
        members: dict[str, Json | Iterator[Json]] = {
            "format_version": self.version,
            "created_by": identity.created_by,
            "dtype": identity.dtype.name,
            "tokenizer": asdict(identity.tokenizer),
            "eos": None if identity.eos is None else asdict(identity.eos),
            "bos": None if identity.bos is None else asdict(identity.bos),
            "special_tokens": identity.special_tokens,
            **mask,
            "config": dict(identity.config),
            "fingerprint": identity.fingerprint,
            "totals": self.totals.to_json(),
            "splits": {name: asdict(self.splits[name]) for name in sorted(self.splits)},
            "engines": [asdict(engine) for engine in self.engines],
            "sources": [asdict(source) for source in self.sources],
            "columns": {kind: [*names] for kind, names in columns.items()},
            "units": (unit.to_json() for unit in self.units),
        }
        return seal(members)

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path | str) -> Manifest:
        """Read a manifest's file; StoreError names it where anything is wrong."""
        try:
            with without_collection():
                members = unseal(data, path=path)
                check_version(members, path=path)
                return _manifest(Fields(members, where="manifest"))
        except ValueError as error:
            raise StoreError(
                f"{str(path)!r} is not a manifest that tokenmill wrote: {error}",
                hint="run the build again with the same command: it writes the manifest anew",
            ) from error


def read_manifest(root: Path) -> Manifest:
    """The manifest of the store in a folder; StoreError where there is none or it is damaged."""
    path = StoreLayout(root).manifest
    StoreLayout(root).require_inside()
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise _no_manifest(root) from error
    except OSError as error:
        raise StoreError(
            f"the manifest {str(path)!r} cannot be read: {error.strerror or error}",
            hint="check the path and its permissions",
        ) from error
    return Manifest.from_bytes(data, path=path)


def write_manifest(layout: StoreLayout, manifest: Manifest) -> None:
    """Put the manifest in place, which makes the store complete."""
    replace_file(layout, layout.manifest, manifest.to_bytes())
    layout.remove_empty_tmp()


def _no_manifest(root: Path) -> StoreError:
    if not root.is_dir():
        return StoreError(f"there is no store at {str(root)!r}", hint="check the path")
    layout = StoreLayout(root)
    if layout.parts.is_dir():
        return StoreError(
            f"the store {str(root)!r} has no tokenmill.json: built in parts, and not finished",
            hint=f"when all parts are built: tokenmill finish {shlex.quote(str(root))}",
        )
    if layout.shards.is_dir():
        return StoreError(
            f"the store {str(root)!r} has no tokenmill.json: its build has not finished",
            hint="run the build again with the same command: it resumes",
        )
    return StoreError(
        f"{str(root)!r} is not a store: it has no tokenmill.json",
        hint="make one with: tokenmill build INPUT --tokenizer TOKENIZER --out STORE",
    )


def _manifest(source: Fields) -> Manifest:
    version = source.integer("format_version")
    has_mask = source.has("mask")
    if has_mask and not source.boolean("mask"):
        raise ValueError("mask is false; a store without masks says nothing of them")
    dtype = source.text("dtype")
    columns = MASK_COLUMNS if has_mask else COLUMNS
    if source.mapping("columns") != columns:
        raise ValueError("columns are not those of this format version")
    sources = source_entries(source.items("sources"))
    manifest = Manifest(
        identity=_identity(source, has_mask=has_mask),
        totals=Counts.from_json(source.child("totals")),
        splits={
            name: Fields(item, where=name).into(SplitTotals)
            for name, item in source.mapping("splits").items()
        },
        engines=tuple(item.into(EngineEntry) for item in source.children("engines")),
        sources=sources,
        units=tuple(unit_entries(sources, source.items("units"), columns=columns)),
    )
    source.finish()
    if version != manifest.version:
        raise ValueError(f"its format version is {version}, and its members are another's")
    if dtype != manifest.identity.dtype.name:
        raise ValueError(f"dtype {dtype!r} is not that of the vocabulary")
    return manifest


def _identity(source: Fields, *, has_mask: bool) -> StoreIdentity:
    eos, bos = source.optional_child("eos"), source.optional_child("bos")
    return StoreIdentity(
        created_by=source.text("created_by"),
        tokenizer=_tokenizer(source.child("tokenizer")),
        eos=None if eos is None else eos.into(BoundaryToken),
        bos=None if bos is None else bos.into(BoundaryToken),
        special_tokens=source.text("special_tokens"),
        config=source.mapping("config"),
        fingerprint=source.text("fingerprint"),
        mask=has_mask,
    )


def _tokenizer(source: Fields) -> TokenizerFacts:
    facts = TokenizerFacts(
        kind=source.text("kind"),
        fingerprint=source.text("fingerprint"),
        vocab_size=source.integer("vocab_size"),
        files={
            name: Fields(item, where=name).into(FileFacts)
            for name, item in source.mapping("files").items()
        },
    )
    source.finish()
    return facts
