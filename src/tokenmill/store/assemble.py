"""Makes a manifest out of receipts, one at a time and in the order of the plan.

The build does this at its end; `check_store` does it again and compares.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.store.collection import without_collection
from tokenmill.store.entries import (
    EngineEntry,
    RejectsEntry,
    ShardEntry,
    SourceEntry,
    SplitTotals,
    StoreIdentity,
    UnitEntry,
    split_totals,
)
from tokenmill.store.facts import COUNTS, Counts, FileFacts, facts_of
from tokenmill.store.layout import unit_prefix
from tokenmill.store.manifest import Manifest
from tokenmill.store.receipt import Receipt, read_receipt, read_receipt_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tokenmill.store.facts import ShardFacts
    from tokenmill.store.layout import StoreLayout

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
            rejects=None if rejects is None else RejectsEntry(*astuple(rejects)),
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
            width = shard.bin.bytes - shard.tokens * identity.dtype.itemsize
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


def _shard_entry(shard: ShardFacts) -> ShardEntry:
    entry = ShardEntry(
        split=shard.split,
        documents=shard.documents,
        tokens=shard.tokens,
        bin=shard.bin.checksum,
        idx=shard.idx.checksum,
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
            old = splits.get(shard.split, SplitTotals())
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
    with without_collection():
        while batch := list(itertools.islice(remaining, _BATCH_UNITS)):
            if layout.upstream.url is not None:
                layout.upstream.bring([layout.receipt(unit) for unit in batch])
            for unit in batch:
                data = read_receipt_bytes(layout, unit)
                receipt = Receipt.from_bytes(data, path=f"{layout.root}/shards/{unit}.json")
                assembler.add(receipt, file=facts_of(data))
        return assembler.manifest()
