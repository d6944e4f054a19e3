"""What came of a build: its result, the line in its log, and where its time went."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill._version import __version__
from tokenmill.builder.progress import BuildResult
from tokenmill.store.facts import Counts, bytes_per_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.builder.lengths import RowLengths
    from tokenmill.builder.memory import MemoryPlan
    from tokenmill.builder.monitor import Monitor
    from tokenmill.builder.plan import WorkPlan
    from tokenmill.sources import Discovery
    from tokenmill.store.entries import EngineEntry, SplitTotals
    from tokenmill.store.manifest import Manifest
    from tokenmill.store.sealed import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a store, or one part of it, holds now."""

    totals: Counts
    splits: Mapping[str, SplitTotals]
    engines: tuple[EngineEntry, ...]
    units: int
    dtype: str
    bytes_per_token: float | None


def held_by(manifest: Manifest) -> Held:
    """What a complete store holds."""
    return Held(
        totals=manifest.totals,
        splits=manifest.splits,
        engines=manifest.engines,
        units=len(manifest.units),
        dtype=manifest.identity.dtype.name,
        bytes_per_token=bytes_per_token(manifest.totals, manifest.identity.config),
    )


def make_result(
    held: Held,
    *,
    store: str,
    discovery: Discovery,
    plan: WorkPlan,
    memory: MemoryPlan,
    monitor: Monitor | None,
    seconds: float,
    lengths: RowLengths | None = None,
    part: str | None = None,
) -> BuildResult:
    """What a build did and what the store holds now; without a monitor, it did nothing."""
    ready = None if monitor is None else monitor.engine
    engines = held.engines
    stages = {} if monitor is None else monitor.stage_seconds
    return BuildResult(
        store=store,
        nothing_to_do=monitor is None,
        splits=held.splits,
        totals=held.totals,
        built=Counts() if monitor is None else monitor.built,
        units_total=held.units,
        units_built=0 if monitor is None else len(monitor.units),
        units_resumed=len(plan.done),
        engine=ready.name if ready else ", ".join(sorted({entry.name for entry in engines})),
        reference=ready.reference
        if ready
        else ", ".join(sorted({entry.reference for entry in engines})),
        engine_note=ready.note if ready else None,
        checked_documents=sum(entry.checked_documents for entry in engines),
        checked_bytes=0 if monitor is None else monitor.checked_bytes,
        mismatches=sum(entry.mismatches for entry in engines),
        redone_units=() if monitor is None else tuple(monitor.redone),
        workers=memory.workers,
        seconds=seconds,
        startup_seconds=0.0 if monitor is None else monitor.startup_seconds,
        stage_seconds=stages,
        limiting_stage=_limiting_stage(stages),
        peak_memory_bytes=0 if monitor is None else monitor.peak_bytes,
        memory_budget_bytes=memory.budget,
        dtype=held.dtype,
        bytes_per_token=held.bytes_per_token,
        skipped_files=tuple((skipped.path, skipped.reason) for skipped in discovery.skipped),
        warnings=() if monitor is None else tuple(monitor.warnings),
        lengths=lengths,
        part=part,
    )


def _limiting_stage(stages: dict[str, float]) -> str | None:
    """Where most of the workers' time went; writing counts as far as it was waited for."""
    if not stages:
        return None
    held_up = {
        name: stages.get(name, 0.0) for name in ("read", "parse", "render", "encode", "check")
    }
    held_up["write"] = stages.get("wait", 0.0)
    return max(held_up, key=lambda name: held_up[name])


def run_record(result: BuildResult) -> dict[str, Json]:
    """What `runs.jsonl` keeps of a run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tokenmill": __version__,
        "host": platform.node(),
        "python": platform.python_version(),
        "workers": result.workers,
        **({} if result.part is None else {"part": result.part}),
        "seconds": round(result.seconds, 3),
        "startup_seconds": round(result.startup_seconds, 3),
        "units_built": result.units_built,
        "input_bytes": result.built.input_bytes,
        "tokens": result.built.tokens,
        "peak_memory_bytes": result.peak_memory_bytes,
        "memory_budget_bytes": result.memory_budget_bytes,
        "stage_seconds": {name: round(value, 3) for name, value in result.stage_seconds.items()},
    }


def profile_of(result: BuildResult, monitor: Monitor) -> dict[str, object]:
    """What `--profile` writes: where the time of each unit went."""
    return {
        "seconds": result.seconds,
        "startup_seconds": result.startup_seconds,
        "workers": result.workers,
        "stage_seconds": dict(result.stage_seconds),
        "limiting_stage": result.limiting_stage,
        "units": [
            {
                "unit": report.unit,
                "pid": report.pid,
                "input_bytes": report.counts.input_bytes,
                "tokens": report.counts.tokens,
                "stage_seconds": report.stage_seconds,
            }
            for report in monitor.reports
        ],
    }
