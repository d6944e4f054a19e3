"""The receipt of a unit: the small sealed JSON that says the unit is complete, and what it holds.

There is one receipt for all splits of a unit and its rejects, and it is renamed into place last; so
a unit is there as a whole or not at all. No receipt, no shard: files that no receipt claims are
leftovers.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.errors import StoreError
from tokenmill.store.facts import (
    COLUMNS,
    COUNTS,
    FORMAT_VERSION,
    MASK_COLUMNS,
    BoundaryToken,
    Bounds,
    Count,
    Counts,
    EngineEntry,
    EngineFacts,
    Fact,
    FileFacts,
    FormatVersionError,
    RejectsEntry,
    RejectsFacts,
    ShardEntry,
    ShardFacts,
    SourceEntry,
    SourceFacts,
    SplitTotals,
    StoreIdentity,
    TokenizerFacts,
    UnitEntry,
    UnitFacts,
    UnitRow,
    check_version,
    facts_of,
    read_fact,
    split_totals,
    unit_entries,
    version_of,
)
from tokenmill.store.format import check_runs, split_counts
from tokenmill.store.layout import (
    SPLIT_NAME,
    Json,
    StoreLayout,
    replace_file,
    seal,
    seal_line,
    shard_name,
    unit_prefix,
    unseal,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


class Claim(NamedTuple):
    """What a build must keep in mind of a unit that is complete: it may have a million of them."""

    splits: tuple[str, ...]
    mask: bool
    rejects: bool
    is_last: bool
    """Nothing of the unit's file lies behind it."""


@functools.cache
def _claim(splits: tuple[str, ...], mask: bool, rejects: bool, is_last: bool) -> Claim:
    return Claim(splits, mask, rejects, is_last)


class Receipt(Fact, frozen=True, kw_only=True):
    """A unit that is complete."""

    unit: UnitFacts
    source: SourceFacts
    config: str
    """Fingerprint of everything in the configuration that decides the bytes."""
    counts: Counts
    bounds: Bounds
    engine: EngineFacts
    shards: tuple[ShardFacts, ...]
    rejects: RejectsFacts | None

    def __post_init__(self) -> None:
        for shard in self.shards:
            if not SPLIT_NAME.fullmatch(shard.split):
                raise ValueError(f"split {shard.split!r} is not lower-case letters, digits and _")
            if shard.name != shard_name(self.unit.name, split=shard.split):
                raise ValueError(f"shard {shard.name!r} is not named after its unit and split")
            check_runs(
                shard.rows,
                documents=shard.documents,
                rows=self.counts.rows,
                pieces=shard.pieces,
            )
        if self.unit.members and len(self.unit.members) < self.counts.rows:
            raise ValueError(f"{self.counts.rows} rows of {len(self.unit.members)} grouped files")
        if len({shard.split for shard in self.shards}) != len(self.shards):
            raise ValueError("two shards of one unit have the same split")
        if len({shard.mask is None for shard in self.shards}) > 1:
            raise ValueError("some shards of one unit have a mask, others have none")
        self._check_totals()

    def _check_totals(self) -> None:
        split = [split_counts(shard.pieces) for shard in self.shards]
        found = {
            "split rows": (sum(rows for rows, _ in split), self.counts.split_rows),
            "pieces": (sum(pieces for _, pieces in split), self.counts.pieces),
            "documents": (sum(shard.documents for shard in self.shards), self.counts.documents),
            "tokens": (sum(shard.tokens for shard in self.shards), self.counts.tokens),
            "rejected": (0 if self.rejects is None else self.rejects.rows, self.counts.rejected),
        }
        for name, (files, counted) in found.items():
            if files != counted:
                raise ValueError(f"the unit's files have {files} {name}, its counts say {counted}")

    @property
    def has_mask(self) -> bool:
        """Whether its shards have masks; a unit without shards has none."""
        return any(shard.mask is not None for shard in self.shards)

    @property
    def version(self) -> int:
        """Its format version."""
        return version_of(
            masks=self.has_mask,
            pieces=self.counts.pieces > 0,
            unlisted=self.counts.unlisted > 0,
        )

    @property
    def files(self) -> dict[str, FileFacts]:
        """Files in `shards/` that this receipt claims, itself left out."""
        return {name: facts for shard in self.shards for name, facts in shard.named_files.items()}

    @property
    def claim(self) -> Claim:
        """What it claims, and no more; most units of a store share one object."""
        return _claim(
            tuple(shard.split for shard in self.shards),
            self.has_mask,
            self.rejects is not None,
            self.source.is_last,
        )

    def to_bytes(self) -> bytes:
        """The receipt's file."""
        return seal({"format_version": self.version, **self.to_json()})

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path | str) -> Receipt:
        """Read a receipt's file; StoreError names it where anything is wrong."""
        members = unseal(data, path=path)
        check_version(members, path=path)
        try:
            version = members.pop("format_version")
            receipt = read_fact(members, cls, where="receipt")
            if version != receipt.version:
                raise ValueError(f"its format version is {version}, and its members are another's")
            if not str(path).endswith(f"{receipt.unit.name}.json"):
                raise ValueError(f"it is of the unit {receipt.unit.name!r}")
            return receipt
        except ValueError as error:
            raise StoreError(
                f"{str(path)!r} is not a receipt that tokenmill wrote: {error}",
                hint="remove it and run the build again with the same command",
            ) from error


def read_receipt(layout: StoreLayout, unit: str) -> Receipt:
    """The receipt of a unit; StoreError where it is missing or damaged."""
    return Receipt.from_bytes(read_receipt_bytes(layout, unit), path=_path(layout, unit))


def _path(layout: StoreLayout, unit: str) -> str:
    """`layout.receipt`, without the path object: making those takes as long as reading the file."""
    return f"{layout.root}/shards/{unit}.json"


def read_receipt_bytes(layout: StoreLayout, unit: str) -> bytes:
    """The bytes of a unit's receipt; StoreError where it cannot be read."""
    try:
        with open(_path(layout, unit), "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise StoreError(
            f"the receipt {layout.upstream.shown(layout.receipt(unit))!r} cannot be read:"
            f" {error.strerror or error}",
            hint="run the build again with the same command: it rewrites the unit",
        ) from error


def find_receipt(layout: StoreLayout, unit: str) -> Receipt | None:
    """The receipt of a unit that is complete; None where the unit must be built (again).

    Sizes of the files are checked, their bytes are not: that is what `check_store` is for.
    """
    try:
        receipt = read_receipt(layout, unit)
    except FormatVersionError:
        raise
    except StoreError:
        return None
    for name, facts in receipt.files.items():
        if layout.size("shards", name) != facts.bytes:
            return None
    rejects = receipt.rejects
    if rejects is not None and layout.size("rejects", f"{unit}.jsonl") != rejects.bytes:
        return None
    return receipt


def rewrite_receipt(layout: StoreLayout, receipt: Receipt) -> None:
    """Replace a receipt whose unit kept its bytes (a source that was touched, not changed)."""
    replace_file(layout, layout.receipt(receipt.unit.name), receipt.to_bytes())


# -------------------------------------------------------------------------------------------------
# The manifest `tokenmill.json`: what a reader must never guess, sealed, and written last.
#
#   | StoreIdentity (how text became ids)  +  receipts (what came of it)  ->  Manifest
#
# It is a function of the input and the configuration, byte for byte: no date, no host, no
# duration, nothing that depends on the number of workers or on an interruption. `runs.jsonl` keeps
# those.


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
            "tokenizer": identity.tokenizer.to_json(),
            "eos": None if identity.eos is None else identity.eos.to_json(),
            "bos": None if identity.bos is None else identity.bos.to_json(),
            "special_tokens": identity.special_tokens,
            **mask,
            "config": dict(identity.config),
            "fingerprint": identity.fingerprint,
            "totals": self.totals.to_json(),
            "splits": {name: self.splits[name].to_json() for name in sorted(self.splits)},
            "engines": [engine.to_json() for engine in self.engines],
            "sources": [source.to_json() for source in self.sources],
            "columns": {kind: [*names] for kind, names in columns.items()},
            "units": (unit.to_json() for unit in self.units),
        }
        return seal(members)

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path | str) -> Manifest:
        """Read a manifest's file; StoreError names it where anything is wrong."""
        try:
            members: dict[str, Any] = unseal(data, path=path)
            check_version(members, path=path)
            return _manifest(members)
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


class _ManifestMembers(Fact, frozen=True, kw_only=True):
    created_by: str
    dtype: str
    tokenizer: TokenizerFacts
    eos: BoundaryToken | None
    bos: BoundaryToken | None
    special_tokens: str
    mask: bool = False
    config: dict[str, Any]
    fingerprint: str
    totals: Counts
    splits: dict[str, SplitTotals]
    engines: tuple[EngineEntry, ...]
    sources: tuple[SourceEntry, ...]
    columns: dict[str, list[str]]
    units: list[UnitRow]


def _manifest(members: dict[str, Any]) -> Manifest:
    version = members.pop("format_version")
    if members.get("mask", True) is False:
        raise ValueError("mask is false; a store without masks says nothing of them")
    found = read_fact(members, _ManifestMembers, where="manifest")
    columns = MASK_COLUMNS if found.mask else COLUMNS
    width = len(columns["shard"])
    if found.columns != columns:
        raise ValueError("columns are not those of this format version")
    if any(len(shard) != width for unit in members["units"] for shard in unit[-1]):
        raise ValueError("a shard does not have the columns of this format version")
    if found.mask and any(shard.mask is None for unit in found.units for shard in unit[-1]):
        raise ValueError("a shard of a store with masks has none")
    if len(found.units) != sum(source.units for source in found.sources):
        raise ValueError(f"there are {len(found.units)} units, not those that the sources say")
    manifest = Manifest(
        identity=StoreIdentity(
            created_by=found.created_by,
            tokenizer=found.tokenizer,
            eos=found.eos,
            bos=found.bos,
            special_tokens=found.special_tokens,
            config=found.config,
            fingerprint=found.fingerprint,
            mask=found.mask,
        ),
        totals=found.totals,
        splits=found.splits,
        engines=found.engines,
        sources=found.sources,
        units=unit_entries(found.sources, found.units),
    )
    if version != manifest.version:
        raise ValueError(f"its format version is {version}, and its members are another's")
    if found.dtype != manifest.identity.dtype.name:
        raise ValueError(f"dtype {found.dtype!r} is not that of the vocabulary")
    return manifest


# -------------------------------------------------------------------------------------------------
# Makes a manifest out of receipts, one at a time and in the order of the plan.
#
# The build does this at its end; `check_store` does it again and compares.

if TYPE_CHECKING:
    EngineKey = tuple[str, str, str, str]


_BATCH_UNITS = 256
"""Receipts that are asked for at once where the store is behind a URL."""


class ManifestAssembler:
    """Takes receipts, unit by unit and file by file, and keeps only their entries."""

    def __init__(self, identity: StoreIdentity) -> None:
        self._identity = identity
        self._sum = _Sum()
        self._sources: list[_Source] = []
        self._units: list[UnitEntry] = []

    def add(self, receipt: Receipt, *, file: FileFacts) -> UnitEntry:
        """Add the next unit; `file` is its receipt's own file."""
        self._check(receipt)
        self._add_source(receipt)  # may refuse the unit, so it goes before the rest
        self._sum.add(receipt)
        rejects = receipt.rejects
        unit = UnitEntry(
            name=receipt.unit.name,
            source=len(self._sources) - 1,
            rows=receipt.counts.rows,
            lines=receipt.source.num_lines,
            receipt_bytes=file.bytes,
            receipt=file.checksum,
            rejects=None if rejects is None else _rejects_entry(rejects),
            shards=tuple(map(_shard_entry, receipt.shards)),
        )
        self._units.append(unit)
        return unit

    def manifest(self) -> Manifest:
        """The manifest of all units added; StoreError where their receipts do not go together."""
        try:
            return Manifest(
                identity=self._identity,
                totals=self._sum.totals(),
                splits=split_totals(self._units),
                engines=self._sum.engines(),
                sources=tuple(source.entry() for source in self._sources),
                units=tuple(self._units),
            )
        except ValueError as error:
            raise StoreError(
                f"the receipts of {len(self._units):,} units do not go together: {error}",
                hint="see which are damaged with: tokenmill verify STORE",
            ) from error

    def _check(self, receipt: Receipt) -> None:
        identity, unit = self._identity, receipt.unit
        if receipt.config != identity.fingerprint:
            raise StoreError(
                f"unit {unit.name!r} was built with the configuration {receipt.config!r}, the store"
                f" has {identity.fingerprint!r}; mixing them would silently corrupt training",
                hint="run the build again with the same command, or build into a new folder",
            )
        for shard in receipt.shards:
            width = shard.files.bin.bytes - shard.tokens * identity.dtype.itemsize
            if shard.max_id >= identity.tokenizer.vocab_size or width != 0:
                raise StoreError(
                    f"shard {shard.name!r} does not hold {identity.dtype.name} ids"
                    f" under {identity.tokenizer.vocab_size}",
                    hint="run the build again with the same command",
                )
            if (shard.mask is not None) != identity.mask:
                has, wants = ("a mask", "none") if shard.mask else ("no mask", "one")
                raise StoreError(
                    f"shard {shard.name!r} has {has}, the store has {wants} for every shard",
                    hint="build into a new folder",
                )

    def _add_source(self, receipt: Receipt) -> None:
        unit, facts = receipt.unit, receipt.source
        is_known = bool(self._sources) and self._sources[-1].path == unit.path
        last = self._sources[-1] if is_known else _Source(unit.path, facts.size, facts.version)
        if (last.size, last.version) != (facts.size, facts.version):
            raise StoreError(
                f"units of {unit.path!r} were read from two versions of the file; together they"
                " would be neither",
                hint="run the build again with the same command",
            )
        if unit.index != last.units:
            raise StoreError(
                f"unit {unit.index} of {unit.path!r} follows {last.units} others: a receipt is"
                " missing, or is of another unit",
                hint="run the build again with the same command",
            )
        if not is_known:
            self._sources.append(last)
        last.units += 1
        last.rows += receipt.counts.rows


@dataclass(slots=True)
class _Source:
    """An input file whose units are still being added."""

    path: str
    size: int
    version: str
    units: int = 0
    rows: int = 0

    def entry(self) -> SourceEntry:
        return SourceEntry(
            path=self.path,
            prefix=unit_prefix(self.path),
            size=self.size,
            version=self.version,
            units=self.units,
            rows=self.rows,
        )


class _Sum:
    """Counts of many units, and what engines did: numbers that grow, as there may be millions."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTS, 0)
        self._engines: dict[EngineKey, list[int]] = {}

    def add(self, receipt: Receipt) -> None:
        for name in COUNTS:
            self._counts[name] += getattr(receipt.counts, name)
        engine = receipt.engine
        key = (engine.name, engine.version, engine.reference, engine.reference_version)
        total = self._engines.setdefault(key, [0] * 5)
        total[0] += 1
        total[1] += engine.checked_documents
        total[2] += engine.mismatches
        total[3] += engine.redone
        total[4] += engine.routed_documents

    def totals(self) -> Counts:
        return Counts(**self._counts)

    def engines(self) -> tuple[EngineEntry, ...]:
        return tuple(_engine_entry(key, self._engines[key]) for key in sorted(self._engines))


def _engine_entry(key: EngineKey, total: Sequence[int]) -> EngineEntry:
    name, version, reference, reference_version = key
    return EngineEntry(
        name=name,
        version=version,
        reference=reference,
        reference_version=reference_version,
        units=total[0],
        checked_documents=total[1],
        mismatches=total[2],
        redone_units=total[3],
        routed_documents=total[4],
    )


def _rejects_entry(rejects: RejectsFacts) -> RejectsEntry:
    return RejectsEntry(rows=rejects.rows, bytes=rejects.bytes, checksum=rejects.checksum)


def _shard_entry(shard: ShardFacts) -> ShardEntry:
    entry = ShardEntry(
        split=shard.split,
        documents=shard.documents,
        tokens=shard.tokens,
        bin=shard.files.bin.checksum,
        idx=shard.files.idx.checksum,
    )
    if (mask := shard.mask) is None:
        return entry
    return entry._replace(mask=mask.checksum, counted=mask.counted, silent=mask.silent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What some units hold together."""

    totals: Counts
    splits: Mapping[str, SplitTotals]
    engines: tuple[EngineEntry, ...]


def tally_units(layout: StoreLayout, units: Iterable[str]) -> Tally:
    """What the named units hold, wherever they stand in their files."""
    total = _Sum()
    splits: dict[str, SplitTotals] = {}
    for unit in units:
        receipt = read_receipt(layout, unit)
        total.add(receipt)
        for shard in receipt.shards:
            old = splits.get(shard.split, SplitTotals(documents=0, tokens=0, shards=0))
            splits[shard.split] = SplitTotals(
                documents=old.documents + shard.documents,
                tokens=old.tokens + shard.tokens,
                shards=old.shards + 1,
            )
    return Tally(
        totals=total.totals(),
        splits={name: splits[name] for name in sorted(splits)},
        engines=total.engines(),
    )


def assemble_manifest(
    layout: StoreLayout, identity: StoreIdentity, *, units: Iterable[str]
) -> Manifest:
    """The manifest of the named units, whose receipts are read one after the other."""
    assembler = ManifestAssembler(identity)
    remaining = iter(units)
    while batch := list(itertools.islice(remaining, _BATCH_UNITS)):
        if layout.upstream.url is not None:
            layout.upstream.bring([layout.receipt(unit) for unit in batch])
        for unit in batch:
            data = read_receipt_bytes(layout, unit)
            assembler.add(Receipt.from_bytes(data, path=_path(layout, unit)), file=facts_of(data))
    return assembler.manifest()


# -------------------------------------------------------------------------------------------------
# What the parts of a build leave for the one who finishes it: `parts/00003-of-00064.json`.
#
#   | part 1/64, part 2/64, ...  ->  units with receipts, and one small record each  ->  finish
#
# A record repeats what was asked for, so that parts with other options are noticed and `finish`
# can plan the units again; it never says which units are complete, the receipts do. Records are
# removed when the manifest is written: a finished store does not show how it was made.

RECORD_FILE = re.compile(r"[0-9]{5,}-of-[0-9]{5,}\.json")


class PartRecord(Fact, frozen=True, kw_only=True):
    """One part of a build."""

    part: Count
    parts: Count
    fingerprint: str
    """Of the configuration, as the receipts carry it."""
    config: dict[str, Any]
    """Every option that decides the bytes, the limit included."""
    inputs: tuple[str, ...] | None
    """As they were named; None where they hold a key that may not be kept."""
    max_document_bytes: Count
    runs: tuple[dict[str, Any], ...]
    """What `runs.jsonl` will keep of it; empty while the part has not ended."""

    @property
    def name(self) -> str:
        return f"{self.part:05d}-of-{self.parts:05d}.json"

    def to_bytes(self) -> bytes:
        return seal({"format_version": FORMAT_VERSION, **self.to_json()})

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path) -> PartRecord:
        members = unseal(data, path=path)
        check_version(members, path=path)
        try:
            del members["format_version"]
            return read_fact(members, cls, where="record")
        except ValueError as error:
            raise StoreError(
                f"{str(path)!r} is not a record that tokenmill wrote: {error}",
                hint="delete it and run its part again: that takes a moment where the units are "
                "complete",
            ) from error


def write_record(layout: StoreLayout, record: PartRecord) -> None:
    """Put the record in place of the one that an earlier run of this part left."""
    layout.parts.mkdir(exist_ok=True)
    replace_file(layout, layout.parts / record.name, record.to_bytes())


def read_records(layout: StoreLayout) -> list[PartRecord]:
    """The records of all parts that were started, part by part."""
    if not layout.parts.is_dir():
        return []
    layout.require_inside()
    found = sorted(path for path in layout.parts.iterdir() if RECORD_FILE.fullmatch(path.name))
    return [PartRecord.from_bytes(path.read_bytes(), path=path) for path in found]


def remove_records(layout: StoreLayout) -> None:
    """Forget the parts, after the manifest is written."""
    found = [*layout.parts.iterdir()] if layout.parts.is_dir() else []
    shutil.rmtree(layout.parts, ignore_errors=True)
    layout.upstream.remove(found)


# -------------------------------------------------------------------------------------------------
# `runs.jsonl`: a log of the builds that made a store, one sealed line each.
#
# Dates, hosts, seconds and peak memory go here and nowhere else, because they differ from run to
# run; the log is no part of the store's identity, and a store without it is complete.


def append_run(layout: StoreLayout, facts: Mapping[str, Json]) -> None:
    """Add a line."""
    append_runs(layout, [facts])


def append_runs(layout: StoreLayout, runs: Sequence[Mapping[str, Json]]) -> None:
    """Add lines; the file is replaced as a whole, so that a crash cannot leave half a line."""
    replace_file(layout, layout.runs, _read(layout) + b"".join(map(seal_line, runs)))
    layout.remove_empty_tmp()


def read_runs(layout: StoreLayout) -> list[dict[str, Json]]:
    """All runs, oldest first; StoreError where a line was changed."""
    lines = _read(layout).splitlines(keepends=True)
    return [unseal(line, path=layout.runs) for line in lines]


def _read(layout: StoreLayout) -> bytes:
    try:
        return layout.runs.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreError(
            f"{str(layout.runs)!r} cannot be read: {error.strerror or error}"
        ) from error
