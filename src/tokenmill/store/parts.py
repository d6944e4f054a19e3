"""What the parts of a build leave for the one who finishes it: `parts/00003-of-00064.json`.

    part 1/64, part 2/64, ...  ->  units with receipts, and one small record each  ->  finish

A record repeats what was asked for, so that parts with other options are noticed and `finish` can
plan the units again; it never says which units are complete, the receipts do. Records are removed
when the manifest is written: a finished store does not show how it was made.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.store.durable import replace_file
from tokenmill.store.fields import FORMAT_VERSION, Fields, check_version
from tokenmill.store.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.sealed import Json

RECORD_FILE = re.compile(r"[0-9]{5,}-of-[0-9]{5,}\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """One part of a build."""

    part: int
    parts: int
    fingerprint: str
    """Of the configuration, as the receipts carry it."""
    config: Mapping[str, Json]
    """Every option that decides the bytes, the limit included."""
    inputs: tuple[str, ...] | None
    """As they were named; None where they hold a key that may not be kept."""
    max_document_bytes: int
    runs: tuple[Mapping[str, Json], ...] = ()
    """What `runs.jsonl` will keep of it; empty while the part has not ended."""

    @property
    def name(self) -> str:
        return f"{self.part:05d}-of-{self.parts:05d}.json"

    def to_bytes(self) -> bytes:
        return seal(
            {
                "format_version": FORMAT_VERSION,
                "part": self.part,
                "parts": self.parts,
                "fingerprint": self.fingerprint,
                "config": dict(self.config),
                "inputs": None if self.inputs is None else [*self.inputs],
                "max_document_bytes": self.max_document_bytes,
                "runs": [dict(run) for run in self.runs],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path) -> PartRecord:
        members = unseal(data, path=path)
        check_version(members, path=path)
        try:
            return _record(Fields(members, where="record"))
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


def _record(source: Fields) -> PartRecord:
    source.take("format_version")
    inputs = source.take("inputs")
    if inputs is not None and not isinstance(inputs, list):
        raise ValueError(f"inputs are {inputs!r}, not a list")
    record = PartRecord(
        part=source.integer("part"),
        parts=source.integer("parts"),
        fingerprint=source.text("fingerprint"),
        config=source.mapping("config"),
        inputs=None if inputs is None else tuple(map(str, inputs)),
        max_document_bytes=source.integer("max_document_bytes"),
        runs=tuple(_runs(source.items("runs"))),
    )
    source.finish()
    return record


def _runs(items: list[Json]) -> list[Mapping[str, Json]]:
    if not all(isinstance(item, dict) for item in items):
        raise ValueError("runs are not objects")
    return [item for item in items if isinstance(item, dict)]
