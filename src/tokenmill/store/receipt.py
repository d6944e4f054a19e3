"""The receipt of a unit: the small sealed JSON that says the unit is complete, and what it holds.

There is one receipt for all splits of a unit and its rejects, and it is renamed into place last; so
a unit is there as a whole or not at all. No receipt, no shard: files that no receipt claims are
leftovers.
"""

from __future__ import annotations

import functools
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.errors import StoreError
from tokenmill.store.durable import replace_file
from tokenmill.store.facts import (
    Bounds,
    Counts,
    EngineFacts,
    FileFacts,
    RejectsFacts,
    ShardFacts,
    SourceFacts,
    UnitFacts,
)
from tokenmill.store.fields import Fields, FormatVersionError, check_version, version_of
from tokenmill.store.layout import SPLIT_NAME, StoreLayout, shard_name
from tokenmill.store.rows import check_runs, split_counts
from tokenmill.store.sealed import seal, unseal

if TYPE_CHECKING:
    from pathlib import Path


class Claim(NamedTuple):
    """What a build must keep in mind of a unit that is complete: it may have a million of them."""

    splits: tuple[str, ...]
    mask: bool
    rejects: bool
    is_last: bool
    """Nothing of the unit's file lies behind it."""


class Glance(NamedTuple):
    """What planning looks at in a receipt."""

    config: str
    start: int
    end: int | None
    size: int
    version: str
    digest: str
    rows: int
    skipped: int
    largest_row_bytes: int
    smallest_too_large_bytes: int | None
    claim: Claim
    written: int
    """When the receipt was written, in ns, as its file system says."""


@functools.cache
def _claim(splits: tuple[str, ...], mask: bool, rejects: bool, is_last: bool) -> Claim:
    return Claim(splits, mask, rejects, is_last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
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
        return {name: facts for shard in self.shards for name, facts in shard.files.items()}

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
        return seal(
            {
                "format_version": self.version,
                "unit": asdict(self.unit),
                "source": asdict(self.source),
                "config": self.config,
                "counts": self.counts.to_json(),
                "bounds": asdict(self.bounds),
                "engine": asdict(self.engine),
                "shards": [shard.to_json() for shard in self.shards],
                "rejects": None if self.rejects is None else asdict(self.rejects),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path | str) -> Receipt:
        """Read a receipt's file; StoreError names it where anything is wrong."""
        members = unseal(data, path=path)
        check_version(members, path=path)
        try:
            receipt = _receipt(Fields(members, where="receipt"))
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


def glance_at(layout: StoreLayout, unit: str) -> Glance | None:
    """What planning must know of a unit that is complete; None where it must be built (again).

    As `find_receipt`, in a third of the time, since a build may have a million units: what the seal
    vouches for is believed, and looked at member by member when the manifest is made of it.
    """
    path = _path(layout, unit)
    try:
        members: dict[str, Any] = unseal(read_receipt_bytes(layout, unit), path=path)
    except StoreError:
        return None
    check_version(members, path=path)
    try:
        is_complete = members["unit"]["name"] == unit and _has_files(layout, unit, members)
        written = os.stat(path).st_mtime_ns  # noqa: PTH116 (a path object takes longer)
        return _glance(members, written=written) if is_complete else None
    except (AttributeError, KeyError, TypeError, OSError):
        return None


def _has_files(layout: StoreLayout, unit: str, members: dict[str, Any]) -> bool:
    for shard in members["shards"]:
        for kind, facts in shard["files"].items():
            if layout.size("shards", f"{shard['name']}.{kind}") != facts["bytes"]:
                return False
    rejects = members["rejects"]
    return rejects is None or layout.size("rejects", f"{unit}.jsonl") == rejects["bytes"]


def _glance(members: dict[str, Any], *, written: int) -> Glance:
    unit, source, counts = members["unit"], members["source"], members["counts"]
    bounds, shards = members["bounds"], members["shards"]
    return Glance(
        config=members["config"],
        start=unit["start"],
        end=unit["end"],
        size=source["size"],
        version=source["version"],
        digest=source["digest"],
        rows=counts["rows"],
        skipped=counts["skipped"],
        largest_row_bytes=bounds["largest_row_bytes"],
        smallest_too_large_bytes=bounds["smallest_too_large_bytes"],
        claim=_claim(
            tuple(shard["split"] for shard in shards),
            any("mask" in shard["files"] for shard in shards),
            members["rejects"] is not None,
            source["is_last"],
        ),
        written=written,
    )


def rewrite_receipt(layout: StoreLayout, receipt: Receipt) -> None:
    """Replace a receipt whose unit kept its bytes (a source that was touched, not changed)."""
    replace_file(layout, layout.receipt(receipt.unit.name), receipt.to_bytes())


def _receipt(source: Fields) -> Receipt:
    version = source.integer("format_version")
    rejects = source.optional_child("rejects")
    receipt = Receipt(
        unit=source.child("unit").into(UnitFacts),
        source=source.child("source").into(SourceFacts),
        config=source.text("config"),
        counts=Counts.from_json(source.child("counts")),
        bounds=source.child("bounds").into(Bounds),
        engine=source.child("engine").into(EngineFacts),
        shards=tuple(ShardFacts.from_json(shard) for shard in source.children("shards")),
        rejects=None if rejects is None else rejects.into(RejectsFacts),
    )
    source.finish()
    if version != receipt.version:
        raise ValueError(f"its format version is {version}, and its members are another's")
    return receipt
