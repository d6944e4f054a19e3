"""The values of a diagnosis: what was measured, what is needed, what follows.

All are plain: `--json` prints them, the report draws them, the advice is made of them. A rate is
always tokens per second, and a token one that the tokenizer itself makes of the text (no end
tokens), so that all ways count the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.markup import Told
from tokenmill.monitor import Timeline, read_timeline
from tokenmill.stalls import StallReport, StepAccount
from tokenmill.stalls.account import SCHEMA as ACCOUNT_SCHEMA
from tokenmill.words import compact, count, format_size, milliseconds, spoken

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tokenmill.inspection import Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where it was measured."""

    cores: int  # that this process may use
    memory_bytes: int
    cpu: str
    python: str
    tokenmill: str

    def describe(self) -> str:
        return f"{self.cores} cores, {format_size(self.memory_bytes)}, {self.cpu}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """The part of the input that was measured."""

    files: int  # of the whole input
    input_bytes: int  # of the whole input, as it is on disk
    documents: int
    text_bytes: int
    rejected: int
    largest_document_bytes: int
    estimated_text_bytes: int  # of the whole input; a guess where it is compressed


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Where the middle half of the values begins and ends."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class WayResult:
    """One way to get tokens, and what it reached."""

    key: str  # one-by-one, batched, joined, pool, dataloader, build or loader
    title: str
    engine: str
    in_loop: bool  # whether the training loop itself does the work, so that the GPU can wait for it
    feeds: bool  # false for what is done once, before training
    workers: int
    batch: int
    source: str = ""  # the program that was timed
    call: str = ""  # the line of it that people look for
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rates: tuple[float, ...] = ()  # tokens/s of each round
    # The same for each CPU second of the program's own process, without its workers.
    cpu_rates: tuple[float, ...] = ()
    # Until the first call: imports, the tokenizer, the sample, workers; not part of `seconds`.
    startup_seconds: float = 0.0
    sample_ms: float | None = None  # median time until one sample that was asked for is there
    chunk_ms: float | None = None  # the same for 8 samples asked for at once
    cpu_cores: float = 0.0  # CPU seconds of the process and its children, for each second
    other_cores: float = 0.0  # the same of all other programs on the machine, meanwhile
    peak_memory_bytes: int = 0  # resident memory of the process and its children, added up
    compared_documents: int = 0
    # Of those compared: ids are not what the tokenizer makes of the document by itself.
    differing_documents: int = 0
    # Of the sample: they hold the token that documents were joined by, and would be cut there.
    delimited_documents: int = 0
    note: str | None = None
    problem: str | None = None  # why it could not be measured

    @property
    def tokens_per_second(self) -> float:
        """The median of the rounds."""
        if self.rates:
            return statistics.median(self.rates)
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Tokens/s of the middle half of the rounds."""
        return middle_half(self.rates or (self.tokens_per_second,))

    @property
    def documents_per_second(self) -> float | None:
        """None where there are rows, and no documents."""
        return self.tokens_per_second * self.documents / self.tokens if self.documents else None

    @property
    def changes_ids(self) -> bool:
        """Whether a model would not see the tokens that the tokenizer makes of a document."""
        return bool(self.differing_documents or self.delimited_documents)

    def cells(self) -> dict[str, str]:
        """Its numbers as every table shows them, by their headings."""
        rate, (low, high) = self.tokens_per_second, self.interval
        spread = f" \u00b1{50 * (high - low) / rate:.0f}%" if len(self.rates) > 1 and rate else ""
        documents = self.documents_per_second
        return {
            "tokens/s": compact(rate) + spread,
            "documents/s": "-" if documents is None else compact(documents),
            "ms for 1": milliseconds(self.sample_ms),
            "ms for 8": milliseconds(self.chunk_ms),
            "cores": f"{self.cpu_cores:.1f}",
            "memory": format_size(self.peak_memory_bytes),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a training takes."""

    name: str  # of the model, or 'as given'
    tokens_per_second: float  # for each GPU
    gpus: int
    origin: str  # how the number came about, in words
    basis: str = ""  # what an estimate rests on; the same for every model
    is_estimate: bool

    @property
    def total(self) -> float:
        return self.tokens_per_second * self.gpus


STATES = {"fed": "fast enough", "borderline": "close", "starved": "too slow"}
OTHER_IDS = "other ids"  # in the place of a state: it is no way to get these tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One way held against one demand."""

    way: str
    demand: str
    state: str  # starved, borderline or fed
    # To all GPUs together, as far as the cores of this machine reach.
    feeds_tokens_per_second: float
    # Of the middle half of the rounds; the upper one as it would be with the CPU that other
    # programs took, where there was none left.
    low_tokens_per_second: float
    high_tokens_per_second: float
    needs_tokens_per_second: float
    on_busy_machine: bool
    wait_share: float  # least share of time that the GPUs wait: tokenizing overlaps with their work
    # Where it does not: each step begins when its tokens are there, and ends before the next.
    wait_share_in_turn: float
    times_too_slow: float  # below 1 where the way is fast enough


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Settings for this machine: the smallest within a few percent of the best."""

    build_workers: int
    build_memory_bytes: int
    pool_workers: int | None
    batch: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis(Told):
    """Everything that `tokenmill diagnose` found."""

    inputs: tuple[str, ...] = ()
    tokenizer: str | None = None
    machine: Machine
    sample: SampleFacts | None = None
    lengths: Lengths | None = None
    """Tokens per document."""
    demands: tuple[Demand, ...] = ()
    ways: tuple[WayResult, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    sweep: tuple[WayResult, ...] = ()
    """The settings that were tried."""
    recommendation: Recommendation | None = None
    advice: tuple[str, ...]
    commands: tuple[str, ...] = ()
    evidence: Evidence
    """What was given beside the text: a stall report, a run's metrics, a build's time line."""

    def __repr__(self) -> str:
        return f"Diagnosis: {count(len(self.ways), 'way')}; {' '.join(self.advice)}"


# -------------------------------------------------------------------------------------------------
# What a user gives besides: a stall report, the metrics of a training, the time line of a build.
#
# Each is summed up in a sentence or two, and drawn in the report.

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
    """What was given besides."""

    stalls: StallReport | StepAccount | None = None
    run: RunMetrics | None = None
    timeline: Timeline | None = None


def read_evidence(**files: str | os.PathLike[str] | None) -> Evidence:
    """Read the files that were named: `stalls`, `run` and `timeline`."""
    read: dict[str, Any] = {"stalls": read_stalls, "run": read_run, "timeline": read_timeline}
    return Evidence(**{name: read[name](Path(file)) for name, file in files.items() if file})


def read_stalls(path: Path) -> StallReport | StepAccount:
    """A report of a StallMeter or an account of steps, as their `as_json` has them."""
    hint = "write one with: json.dump(meter.report().as_json(), file)"
    try:
        members = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        problem = f"the stall report {str(path)!r} cannot be read: {error}"
        raise UsageError(problem, hint=hint) from error
    if not isinstance(members, dict):
        raise UsageError(f"{str(path)!r} is JSON, but no report of a StallMeter", hint=hint)
    is_account = members.get("schema") == ACCOUNT_SCHEMA
    return StepAccount.from_json(members) if is_account else StallReport.from_json(members)


def read_run(path: Path) -> RunMetrics:
    """The metrics in the folder of a training; a line cut off by a crash is left out."""
    file = path / METRICS if path.is_dir() else path
    try:
        text = file.read_text()
    except OSError as error:
        hint = f"name the folder that `tokenmill train` wrote, with {METRICS} in it"
        raise UsageError(f"the run {str(path)!r} has no metrics: {error}", hint=hint) from error
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
        hint = "let the training run a little longer"
        raise UsageError(f"{str(file)!r} has no line with a step", hint=hint)
    return RunMetrics(str(path), tuple(lines), bad)


def findings(evidence: Evidence) -> list[str]:
    """What it says, in sentences."""
    said: list[str] = []
    if evidence.stalls is not None:
        is_account = isinstance(evidence.stalls, StepAccount)
        name = "Account of a step" if is_account else "Stall report"
        said.append(f"{name}: {evidence.stalls.describe().splitlines()[0]}.")
    if evidence.run is not None:
        parts, run = [], evidence.run
        if rates := [rate for _, rate in run.series("tokens_per_second")]:
            parts.append(f"{compact(statistics.median(rates))} tokens/s")
        if shares := [share for _, share in run.series("wait_share")]:
            waits = statistics.fmean(shares)
            low, high = middle_half(shares)
            word = "close"
            if low > FINE_SHARE or high <= FINE_SHARE:
                word = "starved" if low > FINE_SHARE else "not starved"
            parts.append(f"{waits:.1%} of the time waiting for data ({word})")
        if losses := run.series("loss"):
            parts.append(f"loss {losses[-1][1]:.3f} at step {losses[-1][0]:,.0f}")
        said += [f"Training run: {', '.join(parts)}."] if parts else []
    if (timeline := evidence.timeline) is not None:
        runs = len(timeline.segments)
        parts = [spoken(timeline.seconds) + (f" in {runs} runs" if runs > 1 else "")]
        if seen := [segment for segment in timeline.segments if len(segment)]:
            peak = max(float(np.nanmax(segment.memory_bytes)) for segment in seen)
            parts.append(f"{format_size(peak)} of memory at most")
            own, whole = (
                float(np.nanmean(np.concatenate([getattr(each, name) for each in seen])))
                for name in ("build_cores", "machine_cores")
            )
            cores = seen[0].cpu_percent.shape[1]
            if math.isfinite(own):
                parts.append(f"{own:.1f} cores of its own on average")
            parts.append(f"all programs together had {whole:.1f} of {cores}")
        said.append(f"Build: {', '.join(parts)}.")
    return said


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# -------------------------------------------------------------------------------------------------
# A diagnosis as JSON. The keys are stable and described in docs/diagnosing.md.

SCHEMA = "tokenmill.diagnosis/1"


def as_json(found: Diagnosis) -> dict[str, Any]:
    """For json.dumps: every number, and what follows from them; of the evidence a summary."""
    members = dataclasses.asdict(dataclasses.replace(found, evidence=Evidence(), sweep=()))
    for demand, need in zip(members["demands"], found.demands, strict=True):
        demand["total_tokens_per_second"] = need.total
    for each, way in zip(members["ways"], found.ways, strict=True):
        for name in ("tokens_per_second", "documents_per_second", "interval", "changes_ids"):
            each[name] = getattr(way, name)
    for verdict in members["verdicts"]:
        # A way that feeds nothing is infinitely too slow, which JSON has no number for.
        if verdict["times_too_slow"] == float("inf"):
            verdict["times_too_slow"] = None
    setting, rates = ("key", "workers", "batch"), ("tokens_per_second", "documents_per_second")
    tried = (*setting, *rates, "cpu_cores", "peak_memory_bytes")
    members["sweep"] = [_members(point, *tried) for point in found.sweep]
    stalls, run, timeline = (getattr(found.evidence, name) for name in members["evidence"])
    waits = ["steps", "wait_share", "p50_ms", "p99_ms", "max_ms", "first_wait_ms"]
    if isinstance(stalls, StepAccount):
        waits = ["steps", "step_seconds", "device_busy_seconds", "all_gain"]
    members["evidence"] = {
        "stalls": stalls and _members(stalls, *waits),
        "run": run and {**_members(run, "path", "bad_lines"), "lines": len(run.lines)},
        "timeline": timeline
        and {**_members(timeline, "path", "seconds"), "runs": len(timeline.segments)},
        "findings": findings(found.evidence),
    }
    return {"schema": SCHEMA, **members}


def _members(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}
