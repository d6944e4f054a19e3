"""What a build tells about itself: while it runs (`Progress`) and when it is done (`BuildResult`).

Both are plain values: the command line draws them, `--json` prints them, a notebook reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.builder.lengths import RowLengths
    from tokenmill.store.entries import SplitTotals
    from tokenmill.store.facts import Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    number: int
    pid: int
    cpu_percent: float
    memory_bytes: int
    doing: str
    """Name of the unit, or what it waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A build at one moment."""

    phase: str
    """planning, starting, building, finishing or done."""
    seconds: float
    units_done: int
    units_total: int | None
    """None while a compressed input hides how many there are."""
    bytes_done: int
    """Input (decompressed) worked on in this run."""
    bytes_total: int
    """Input of this run; an estimate where it is compressed."""
    documents: int
    tokens: int
    rejected: int
    memory_bytes: int
    memory_peak_bytes: int
    memory_budget_bytes: int
    bytes_per_second: float
    """Over the last seconds, start-up left out."""
    tokens_per_second: float
    eta_seconds: float | None
    workers: tuple[WorkerProgress, ...]
    message: str | None = None
    """Something that a person should read now: a lost worker, a unit done again."""
    place: str | None = None
    """Where it runs, if not here: the nodes of the cluster at this moment, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildResult:
    """What a build did and what the store holds now."""

    store: str
    nothing_to_do: bool
    splits: Mapping[str, SplitTotals]
    totals: Counts
    """The whole store."""
    built: Counts
    """This run alone."""
    units_total: int
    units_built: int
    units_resumed: int
    """Found complete and kept."""
    engine: str
    reference: str
    engine_note: str | None
    """Why the fast engine was not used, where it was not."""
    checked_documents: int
    checked_bytes: int
    """Text that this run encoded again by the reference."""
    mismatches: int
    redone_units: tuple[str, ...]
    """Units whose sample disagreed with the reference and that it encoded in full."""
    workers: int
    seconds: float
    startup_seconds: float
    """Until every worker had its engine loaded and probed."""
    stage_seconds: Mapping[str, float]
    """Sum over the workers of this run: read, parse, encode, check, write (which overlaps with the
    others) and wait (of the encoder, for what it needs)."""
    limiting_stage: str | None
    peak_memory_bytes: int
    memory_budget_bytes: int
    dtype: str
    skipped_files: tuple[tuple[str, str], ...] = ()
    """Files below the input folders that were not used, with the reason."""
    warnings: tuple[str, ...] = field(default=())
    lengths: RowLengths | None = None
    """Of a store with masks: how long its rows are, and what of them counts."""
    bytes_per_token: float | None = None
    """Of text; None where that is not known, as where rows were cut off."""
    part: str | None = None
    """Which part of the build this was; `totals` and `splits` are then those of its units alone."""

    @property
    def working_seconds(self) -> float:
        return max(self.seconds - self.startup_seconds, 0.0)
