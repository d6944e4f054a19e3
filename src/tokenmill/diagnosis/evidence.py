"""What a user brings along: a stall report, the metrics of a training, the time line of a build.

They are read, summed up in a sentence or two, and drawn in the report.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.config import format_size
from tokenmill.diagnosis.words import clock, compact
from tokenmill.errors import UsageError
from tokenmill.monitor import read_timeline
from tokenmill.stalls.report import StallReport

if TYPE_CHECKING:
    import os

    from tokenmill.monitor import Timeline

METRICS = "metrics.jsonl"
FINE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """What a training wrote about itself, line by line."""

    path: str
    lines: tuple[dict[str, Any], ...]
    bad_lines: int

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of every line that has a number of this name."""
        return [
            (float(line["step"]), float(line[name]))
            for line in self.lines
            if _is_number(line.get("step")) and _is_number(line.get(name))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What was brought along."""

    stalls: StallReport | None = None
    run: RunMetrics | None = None
    timeline: Timeline | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.stalls, self.run, self.timeline))


def read_evidence(
    *,
    stalls: str | os.PathLike[str] | None = None,
    run: str | os.PathLike[str] | None = None,
    timeline: str | os.PathLike[str] | None = None,
) -> Evidence:
    """Read the files that were named."""
    return Evidence(
        stalls=None if stalls is None else read_stalls(Path(stalls)),
        run=None if run is None else read_run(Path(run)),
        timeline=None if timeline is None else read_timeline(timeline),
    )


def read_stalls(path: Path) -> StallReport:
    """A report that a StallMeter's `as_json` was written to."""
    try:
        members = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the stall report {str(path)!r} cannot be read: {error}",
            hint="write one with: json.dump(meter.report().as_json(), file)",
        ) from error
    if not isinstance(members, dict):
        raise UsageError(
            f"{str(path)!r} is JSON, but no report of a StallMeter",
            hint="write one with: json.dump(meter.report().as_json(), file)",
        )
    return StallReport.from_json(members)


def read_run(path: Path) -> RunMetrics:
    """The metrics in the folder of a training; a line cut off by a crash is left out."""
    file = path / METRICS if path.is_dir() else path
    try:
        text = file.read_text()
    except OSError as error:
        raise UsageError(
            f"the run {str(path)!r} has no metrics: {error}",
            hint=f"name the folder that `tokenmill train` wrote, with {METRICS} in it",
        ) from error
    lines, bad = [], 0
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        else:
            bad += bool(row.strip())
    if not any(_is_number(line.get("step")) for line in lines):
        raise UsageError(
            f"{str(file)!r} has no line with a step", hint="let the training run a little longer"
        )
    return RunMetrics(str(path), tuple(lines), bad)


def findings(evidence: Evidence) -> list[str]:
    """What it says, in sentences."""
    said: list[str] = []
    if evidence.stalls is not None:
        said.append(f"Stall report: {evidence.stalls.describe().splitlines()[0]}.")
    if evidence.run is not None:
        said += _run_findings(evidence.run)
    if evidence.timeline is not None:
        said.append(_timeline_finding(evidence.timeline))
    return said


def _run_findings(run: RunMetrics) -> list[str]:
    said = []
    if rates := [rate for _, rate in run.series("tokens_per_second")]:
        said.append(f"{compact(statistics.median(rates))} tokens/s")
    if shares := [share for _, share in run.series("wait_share")]:
        waits = statistics.fmean(shares)
        word = "not starved" if waits <= FINE_SHARE else "starved"
        said.append(f"{waits:.1%} of the time waiting for data ({word})")
    if losses := run.series("loss"):
        said.append(f"loss {losses[-1][1]:.3f} at step {losses[-1][0]:,.0f}")
    return [f"Training run: {', '.join(said)}."] if said else []


def _timeline_finding(timeline: Timeline) -> str:
    """How long a build took, what it used at most, and how busy the cores were."""
    runs = len(timeline.segments)
    parts = [clock(timeline.seconds) + (f" in {runs} runs" if runs > 1 else "")]
    seen = [segment for segment in timeline.segments if len(segment)]
    if seen:
        peak = max(float(np.nanmax(segment.memory_bytes)) for segment in seen)
        busy = statistics.fmean(float(np.nanmean(segment.cpu_percent)) for segment in seen)
        parts += [f"{format_size(peak)} of memory at most", f"cores {busy:.0f}% busy"]
    return f"Build: {', '.join(parts)}."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
