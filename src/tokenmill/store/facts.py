"""The facts that receipts and manifests are made of: small frozen values, read and written as JSON.

Members are the fields, in their order. Those that are numbers are counts: never negative, never
floats.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from tokenmill.store.fields import Fields
from tokenmill.store.layout import unit_name
from tokenmill.store.sealed import checksum_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.store.fields import Checksum
    from tokenmill.store.sealed import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """Size and checksum of one file."""

    bytes: int
    checksum: Checksum


def facts_of(data: bytes) -> FileFacts:
    """Size and checksum of a file with these bytes."""
    return FileFacts(bytes=len(data), checksum=checksum_of(data))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFacts:
    """Which slice of which file the unit is."""

    name: str
    path: str
    index: int
    start: int
    end: int | None
    """None means to the end of the file."""
    members: tuple[str, ...] = ()
    """Where the unit is a group of files of one row each: their paths, row by row."""

    @classmethod
    def of(
        cls,
        path: str,
        *,
        index: int,
        start: int,
        end: int | None,
        members: tuple[str, ...] = (),
    ) -> UnitFacts:
        """The facts of a unit, its name worked out."""
        name = unit_name(path, index=index)
        return cls(name=name, path=path, index=index, start=start, end=end, members=members)

    def __post_init__(self) -> None:
        if self.name != unit_name(self.path, index=self.index):
            raise ValueError(f"unit {self.name!r} is not named after {self.path!r}, {self.index}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """The input file as it was when the unit was read."""

    size: int
    version: str
    digest: str
    """xxh3-128 of the input bytes of the unit."""
    is_last: bool
    num_lines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Every row of a unit, accounted for; they add up over units."""

    rows: int = 0
    documents: int = 0
    empty: int = 0
    rejected: int = 0
    skipped: int = 0
    """Left out by a limit."""
    input_bytes: int = 0
    text_bytes: int = 0
    """UTF-8 of the documents written."""
    tokens: int = 0
    split_rows: int = 0
    """Rows that became several documents."""
    pieces: int = 0
    """Documents that those became."""
    unlisted: int = 0
    """Rejected rows that are counted by reason, and not listed one by one."""

    def __post_init__(self) -> None:
        used = self.documents + self.empty + self.rejected + self.skipped
        if self.rows != used - self.pieces + self.split_rows:
            pieces = f", {self.pieces} of them of {self.split_rows} rows," if self.pieces else ""
            raise ValueError(
                f"{self.rows} rows are not {self.documents} documents{pieces} + {self.empty} empty"
                f" + {self.rejected} rejected + {self.skipped} skipped"
            )
        if self.unlisted > self.rejected:
            raise ValueError(f"{self.unlisted} of {self.rejected} rejected rows are not listed")

    def to_json(self) -> dict[str, Json]:
        """Its members; those of later format versions only where they say something."""
        members: dict[str, Json] = asdict(self)
        if not self.pieces:
            del members["split_rows"], members["pieces"]
        if not self.unlisted:
            del members["unlisted"]
        return members

    @classmethod
    def from_json(cls, source: Fields) -> Counts:
        """What `to_json` wrote."""
        names = COUNTS[:-3] + (COUNTS[-3:-1] if source.has("pieces") else ())
        names += COUNTS[-1:] if source.has("unlisted") else ()
        counts = cls(**{name: source.integer(name) for name in names})
        source.finish()
        return counts

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in COUNTS})


def bytes_per_token(totals: Counts, config: Mapping[str, object]) -> float | None:
    """UTF-8 bytes of text behind each token of a store of this configuration.

    None where that is not known: where rows were cut off, only a part of their text was written,
    and whoever imported tokens has not seen any text.
    """
    is_cut = config.get("max_length") is not None and config.get("too_long") == "truncate"
    if not totals.tokens or not totals.text_bytes or is_cut:
        return None
    return totals.text_bytes / totals.tokens


COUNTS = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Which limits on a document's size give this very unit: resume with another budget."""

    largest_row_bytes: int
    smallest_too_large_bytes: int | None
    """None where no document was too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """Who made the ids, and how they were checked."""

    name: str
    version: str
    reference: str
    reference_version: str
    checked_documents: int = 0
    mismatches: int = 0
    redone: bool = False
    """The unit was encoded again by the reference after a mismatch."""
    routed_documents: int = 0
    """Documents given to the reference from the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskFacts:
    """The file that says which tokens of a shard count for the loss."""

    bytes: int
    checksum: Checksum
    counted: int
    """Tokens that count."""
    silent: int
    """Documents of which no token counts."""

    @property
    def file(self) -> FileFacts:
        return FileFacts(bytes=self.bytes, checksum=self.checksum)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """The documents of a unit that belong to one split."""

    name: str
    split: str
    documents: int
    tokens: int
    max_id: int
    rows: tuple[int, ...]
    """Run lengths over the unit's rows; see rows.py."""
    pieces: tuple[int, ...] = ()
    """Which of its rows became several documents; see rows.py."""
    bin: FileFacts
    idx: FileFacts
    mask: MaskFacts | None = None

    def __post_init__(self) -> None:
        mask = self.mask
        if mask is None:
            return
        if mask.bytes != self.tokens or mask.counted > self.tokens or mask.silent > self.documents:
            raise ValueError(
                f"a mask of {mask.bytes} bytes, {mask.counted} tokens that count and {mask.silent}"
                f" silent documents is not of {self.tokens} tokens in {self.documents} documents"
            )

    @property
    def files(self) -> dict[str, FileFacts]:
        """File name -> facts."""
        files = {f"{self.name}.bin": self.bin, f"{self.name}.idx": self.idx}
        return files if self.mask is None else {**files, f"{self.name}.mask": self.mask.file}

    def to_json(self) -> Json:
        files: dict[str, Json] = {"bin": asdict(self.bin), "idx": asdict(self.idx)}
        if self.mask is not None:
            files["mask"] = asdict(self.mask)
        return {
            "name": self.name,
            "split": self.split,
            "documents": self.documents,
            "tokens": self.tokens,
            "max_id": self.max_id,
            "rows": list(self.rows),
            **({"pieces": list(self.pieces)} if self.pieces else {}),
            "files": files,
        }

    @classmethod
    def from_json(cls, source: Fields) -> ShardFacts:
        files = source.child("files")
        shard = cls(
            name=source.text("name"),
            split=source.text("split"),
            documents=source.integer("documents"),
            tokens=source.integer("tokens"),
            max_id=source.integer("max_id"),
            rows=source.integers("rows"),
            pieces=source.integers("pieces") if source.has("pieces") else (),
            bin=files.child("bin").into(FileFacts),
            idx=files.child("idx").into(FileFacts),
            mask=files.child("mask").into(MaskFacts) if files.has("mask") else None,
        )
        files.finish()
        source.finish()
        return shard


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectsFacts:
    """The file of a unit's rejected rows."""

    rows: int
    bytes: int
    checksum: Checksum


def unlisted_rejects(line: bytes) -> dict[str, int]:
    """Reason -> rows that are not listed, of the last line of a file of rejects; {} of a row's."""
    if not line.startswith(b'{"more":'):
        return {}
    try:
        source = Fields(json.loads(line), where="the last line")
    except RecursionError as error:
        raise ValueError(str(error)) from error
    counts = source.mapping("more")
    source.finish()
    reasons = Fields(counts, where="more")
    return {reason: reasons.integer(reason) for reason in counts}
