"""What a build tells about itself: while it runs (`Progress`) and when it is done (`BuildResult`).

Both are plain values: the command line draws them, `--json` prints them, a notebook reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fnmatch
import json
import platform
import shlex
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from tokenmill import words
from tokenmill._version import __version__
from tokenmill.builder.worker import EngineReport, ProgressReport, UnitReport
from tokenmill.errors import UsageError
from tokenmill.markup import Told
from tokenmill.monitor import Recorder, rss_bytes
from tokenmill.records import RejectReason
from tokenmill.runners import local
from tokenmill.store.facts import (
    UNKNOWN_SHARE,
    BoundaryToken,
    Counts,
    SplitTotals,
    StoreIdentity,
    UnknownFacts,
    bytes_per_token,
)
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tokenmill.builder.run import BuildRun, Work
    from tokenmill.files import PathInput
    from tokenmill.options import RowShape
    from tokenmill.store.facts import Manifest, Tally
    from tokenmill.store.layout import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    number: int
    pid: int
    cpu_percent: float
    memory_bytes: int
    doing: str  # name of the unit, or what it waits for


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
class BuildResult(Told):
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
    idle_workers: int
    """Those that had nothing to do in this run, since there were too few units."""
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
    unknown: UnknownFacts | None = None
    """What became of text that the tokenizer does not know, and which it is; `totals` has how much.
    None where it knows everything."""
    eos: BoundaryToken | None = None
    """The token after every document, and its id."""
    bytes_per_token: float | None = None
    """Of text; None where that is not known, as where rows were cut off."""
    template_version: str | None = None
    """How a chat template is used that writes earlier answers in another way once more is said:
    `own`, or `training:` and the name of a version that keeps them."""
    pairs: int | None = None
    """Chosen and rejected answers, of which a document each holds one; None for other stores."""
    part: str | None = None
    """Which part of the build this was; `totals` and `splits` are then those of its units alone."""
    snapshot: str | None = None
    """The newest of what is kept of the store before it grew; None where nothing is."""

    @property
    def working_seconds(self) -> float:
        return max(self.seconds - self.startup_seconds, 0.0)

    def __repr__(self) -> str:
        totals = self.totals
        return (
            f"BuildResult({self.store!r}): {words.count(totals.documents, 'document')},"
            f" {words.count(totals.tokens, 'token')}, {words.duration(self.seconds)}"
        )


# -------------------------------------------------------------------------------------------------
# What came of a build: its result, the line in its log, and where its time went.


def make_result(
    held: Manifest | Tally,
    identity: StoreIdentity,
    work: Work | None = None,
    monitor: Monitor | None = None,
    **more: Any,
) -> BuildResult:
    """What a build did and what the store, or its part, holds now; nothing without a monitor."""
    heard = monitor or Monitor()
    engines, memory = held.engines, None if work is None else work.settings.memory
    who = ({entry.name for entry in engines}, {entry.reference for entry in engines})
    name, reference = (", ".join(sorted(names)) for names in who)
    ready = heard.engine or EngineReport(name, reference, None)
    workers = 0 if memory is None else memory.workers
    return BuildResult(
        nothing_to_do=monitor is None,
        splits=held.splits,
        totals=held.totals,
        built=heard.built,
        units_built=len(heard.units),
        units_resumed=0 if work is None else len(work.plan.done),
        engine=ready.name,
        reference=ready.reference,
        engine_note=ready.note,
        checked_documents=sum(entry.checked_documents for entry in engines),
        checked_bytes=heard.checked_bytes,
        mismatches=sum(entry.mismatches for entry in engines),
        redone_units=tuple(heard.redone),
        workers=workers,
        idle_workers=max(0, workers - len(heard.units)) if heard.units else 0,
        startup_seconds=heard.startup_seconds,
        stage_seconds=heard.stage_seconds,
        limiting_stage=_limiting_stage(heard.stage_seconds),
        peak_memory_bytes=heard.peak_bytes,
        memory_budget_bytes=0 if memory is None else memory.budget,
        dtype=identity.dtype.name,
        eos=identity.eos,
        bytes_per_token=bytes_per_token(held.totals, identity.config),
        pairs=held.totals.documents // 2 if identity.has_pairs else None,
        template_version=_text(identity.config.get("template_version")),
        skipped_files=() if work is None else work.discovery.not_read,
        unknown=held.unknown,
        warnings=(*heard.warnings, *_unknown_warnings(held), *_where_warnings(held, work)),
        **more,
    )


_SHOWN_SOURCES = 3


def _unknown_warnings(held: Manifest | Tally) -> Iterator[str]:
    """A sentence where the tokenizer does not know a good part of the text, or of a file of it."""
    totals, unknown = held.totals, held.unknown
    worst = sorted(
        (
            (source.lost_bytes / source.text_bytes, source.path)
            for source in getattr(held, "sources", ())
            if source.lost_bytes > UNKNOWN_SHARE * source.text_bytes
        ),
        reverse=True,
    )
    lost = totals.lost_bytes
    if unknown is None or not (worst or totals.is_much_unknown):
        return
    became = "left out" if unknown.id is None else f"became {unknown.token!r}"
    said = f"{words.small_share(lost, totals.text_bytes)} of the text is unknown to this tokenizer"
    said += f" and {became}, most often {words.examples(unknown.examples, 4)}"
    shown = [f"{words.small_share(each, 1)} of {path!r}" for each, path in worst[:_SHOWN_SOURCES]]
    more = len(worst) - len(shown)
    shown += [f"as much of {words.count(more, 'other')}"] if more else []
    yield f"{said}; it is {words.listed(shown)}" if shown else said


def _where_warnings(held: Manifest | Tally, work: Work | None) -> Iterator[str]:
    """A sentence where a condition left nothing of the input; a part of it may well be so.

    And where few of all rows were rejected, but many of those that it asks for. They are not
    refused: broken rows, which nobody could ask, would be many beside a few that are wanted.
    """
    totals = held.totals
    wanted = totals.rows - totals.skipped - totals.filtered
    if not totals.filtered:
        return
    if work is not None and totals.rejected > work.settings.options.max_rejects * wanted:
        yield (
            f"{totals.rejected:,} of the {wanted:,} rows that --where did not leave out were"
            f" rejected, more than {work.settings.options.max_rejects:.2%}: rejects/ says why"
        )
    if getattr(held, "sources", ()) and not totals.documents:
        rows = words.count(totals.filtered, "row")
        yield f"the store is empty: --where left out all that could be used, {rows}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _limiting_stage(stages: dict[str, float]) -> str | None:
    """Where most of the workers' time went; writing counts as far as it was waited for."""
    names = ("read", "parse", "render", "encode", "check", "write")
    waits = stages | {"write": stages.get("wait", 0.0)}
    return max(names, key=lambda name: waits.get(name, 0.0)) if stages else None


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


# -------------------------------------------------------------------------------------------------
# Listens to a running build: sums what the workers report and watches memory and cores.
#
# A thread samples the process tree many times a second, since a peak that nobody saw did not stay
# within the budget, it was only missed; a few times a second it tells `on_progress`.

_SAMPLE_SECONDS = 0.05
_TELL_SECONDS = 0.25
_RATE_SECONDS = 10.0


@dataclass(kw_only=True, slots=True)
class Monitor:
    """What is known about a running build. Use as a context manager around the runner."""

    budget: int = 0
    bytes_total: int = 0
    units_total: int | None = None
    on_progress: Callable[[Progress], None] | None = None
    num_workers: int = 0
    started: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    engine: EngineReport | None = None
    on_unit: Callable[[UnitReport], None] | None = None
    # Names: a unit is reported twice if its worker dies right after committing it.
    units: set[str] = field(default_factory=set)
    built: Counts = field(default_factory=Counts.of)
    checked_bytes: int = 0
    redone: list[str] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    startup_seconds: float = 0.0
    peak_bytes: int = 0
    _memory: int = 0
    _num_ready: int = 0
    _lost_breaks: bool = False
    _place: str | None = None
    _begun: dict[str, ProgressReport] = field(default_factory=dict)  # units that are not committed
    _workers: dict[int, WorkerProgress] = field(default_factory=dict)
    # Those of this machine; others tell what they use.
    _processes: dict[int, psutil.Process] = field(default_factory=dict)
    _messages: deque[str] = field(default_factory=deque)
    _history: deque[tuple[float, int, int]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Monitor:
        self._thread = threading.Thread(target=self._watch, name="tokenmill-monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def on_event(self, event: local.Event) -> None:
        """Take in what the runner heard."""
        with self._lock:
            match event:
                case local.WorkerReady():
                    self._greet(event)
                case local.TaskReport(value=ProgressReport() as report):
                    self._begin()
                    if report.unit not in self.units:
                        self._begun[report.unit] = report
                    self._note(event.worker, doing=report.unit)
                case local.TaskReport(value=UnitReport() as report):
                    self._begin()
                    self._begun.pop(report.unit, None)
                    self._finish_unit(report)
                case local.TaskReport(value=EngineReport() as report):
                    self.engine = report
                case local.TaskDone():
                    self._note(event.worker, doing="next unit")
                case local.WorkerUsage(worker, memory, percent):
                    self._note(worker, memory_bytes=memory, cpu_percent=percent)
                case local.PlaceState():
                    self._place = event.words
                case local.WorkerLost():
                    who = f"worker {event.worker} died ({event.reason})"
                    self.warn(f"{who}; {event.task} is built again")

    def _begin(self) -> None:
        if self.phase == "starting":
            self.phase = "building"

    def _note(self, worker: int, **facts: Any) -> None:
        self._workers[worker] = dataclasses.replace(self._workers[worker], **facts)

    def _greet(self, event: local.WorkerReady) -> None:
        self._num_ready += 1
        if self._num_ready <= self.num_workers:
            self.startup_seconds = time.monotonic() - self.started
        self.engine = event.value
        # The first sample of a worker waits for the reference, which may still be loaded.
        if event.value.is_proved:
            self._begin()
        self._processes.pop(event.worker, None)
        if event.host is None:
            with contextlib.suppress(psutil.Error):
                self._processes[event.worker] = psutil.Process(event.pid)
        self._workers[event.worker] = WorkerProgress(
            number=event.worker, pid=event.pid, cpu_percent=0.0, memory_bytes=0, doing="starting"
        )

    def _finish_unit(self, report: UnitReport) -> None:
        if report.unit in self.units:
            return
        self.units.add(report.unit)
        self.built += report.counts
        self.checked_bytes += report.checked_bytes
        if report.lost_breaks is not None and not self._lost_breaks:
            self._lost_breaks = True
            self.warn(
                f"this tokenizer loses line breaks: {report.lost_breaks!r} does not come back with"
                " them; what else is lost is told by tokenmill inspect. SentencePiece keeps them in"
                " models trained with --normalization_rule_name=identity"
                " --remove_extra_whitespaces=false --byte_fallback"
            )
        if self.on_unit is not None:
            self.on_unit(report)
        for stage, seconds in report.stage_seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
        if report.engine.redone:
            self.redone.append(report.unit)
            self.warn(
                f"ids of {report.unit} by {self.engine.name if self.engine else 'the fast engine'} "
                f"differed from {report.engine.reference} on the sample; the whole unit was "
                f"encoded again by {report.engine.reference}"
            )

    def warn(self, message: str) -> None:
        """Keep a sentence for the end, and tell it now."""
        self.warnings.append(message)
        self._messages.append(message)

    def _watch(self) -> None:
        driver = psutil.Process()
        last_told = 0.0
        while not self._stop.wait(_SAMPLE_SECONDS):
            with self._lock:
                for number, process in self._processes.items():
                    self._note(number, memory_bytes=rss_bytes(process))
                others = (each for each in self._workers.values() if each.pid != driver.pid)
                self._memory = rss_bytes(driver) + sum(each.memory_bytes for each in others)
                self.peak_bytes = max(self.peak_bytes, self._memory)
            now = time.monotonic()
            if now - last_told >= _TELL_SECONDS:
                last_told = now
                self.tell()

    def tell(self, phase: str | None = None) -> None:
        """Pass the state on, and each message once."""
        if phase is not None:
            self.phase = phase
        while self.on_progress is not None:
            with self._lock:
                message = self._messages.popleft() if self._messages else None
                progress = self._snapshot(message)
                more = bool(self._messages)
            self.on_progress(progress)
            if not more:
                return

    def _snapshot(self, message: str | None) -> Progress:
        now = time.monotonic()
        done, documents, tokens, rejected = (
            getattr(self.built, name) + sum(getattr(each, name) for each in self._begun.values())
            for name in ("input_bytes", "documents", "tokens", "rejected")
        )
        if self.phase in ("planning", "starting"):
            self._history.clear()  # how long a build takes to start says nothing about its rate
        self._history.append((now, done, tokens))
        while now - self._history[0][0] > _RATE_SECONDS:
            self._history.popleft()
        then, bytes_then, tokens_then = self._history[0]
        span = max(now - then, 1e-9)
        rate = (done - bytes_then) / span
        for number, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                self._note(number, cpu_percent=process.cpu_percent(None))
        return Progress(
            phase=self.phase,
            seconds=now - self.started,
            units_done=len(self.units),
            units_total=self.units_total,
            bytes_done=done,
            bytes_total=max(self.bytes_total, done),
            documents=documents,
            tokens=tokens,
            rejected=rejected,
            memory_bytes=self._memory,
            memory_peak_bytes=self.peak_bytes,
            memory_budget_bytes=self.budget,
            bytes_per_second=rate,
            tokens_per_second=(tokens - tokens_then) / span,
            eta_seconds=max(self.bytes_total - done, 0) / rate if rate > 0 else None,
            workers=tuple(self._workers.values()),
            message=message,
            place=self._place,
        )


# -------------------------------------------------------------------------------------------------
# A build that is recorded: its time line (`monitor`), and where the time of each unit went
# (`profile`).
#
# The time line is no part of the store: it may not be in it, nor among the input, where the next
# run would take it for text. It has no names of input files or tokenizers, which may be URLs with
# keys.


def run_recorded(run: BuildRun) -> BuildResult:
    """Carry out the build and record it; a time line that breaks off becomes a warning."""
    options = run.options
    if options.monitor is not None:
        refuse_bad_place(Path(options.monitor), store=run.layout.root, inputs=run.inputs)
    # How fast a build is depends on these, and not what it writes.
    resources = ("workers", "memory_bytes", "engine", "pin", "serial", "runner", "address")
    facts = {
        "store": run.layout.name.rpartition("/")[2],
        "inputs": len(run.inputs),
        "resources": {name: getattr(options, name) for name in resources},
        "config": options.as_kept(),
    }
    recorder = Recorder(options.monitor, facts=facts)

    def tell(progress: Progress) -> None:
        recorder.note(phase=progress.phase, input_bytes=progress.bytes_done, tokens=progress.tokens)
        if options.on_progress is not None:
            options.on_progress(progress)

    def keep(report: UnitReport) -> None:
        counts = {"input_bytes": report.counts.input_bytes, "tokens": report.counts.tokens}
        stages = {"stage_seconds": report.stage_seconds}
        recorder.units.append({"unit": report.unit, "pid": report.pid, **counts, **stages})

    run.options = dataclasses.replace(options, on_progress=tell)
    run.on_unit = None if options.profile is None else keep
    with recorder:
        result = run.run()
    if options.profile is not None:
        names = ("seconds", "startup_seconds", "workers", "stage_seconds", "limiting_stage")
        profile = {name: getattr(result, name) for name in names} | {"units": recorder.units}
        Path(options.profile).write_text(json.dumps(profile, indent=1) + "\n")
    if recorder.problem is None:
        return result
    warning = f"the time line {str(options.monitor)!r} ends early: {recorder.problem}"
    return dataclasses.replace(result, warnings=(*result.warnings, warning))


def refuse_bad_place(path: Path, *, store: Path, inputs: Sequence[PathInput]) -> None:
    """UsageError where a time line would get into the store or among the input."""
    place = path.absolute().resolve()
    if store.absolute().resolve() in (place, *place.parents):
        raise UsageError(
            f"the time line {str(path)!r} would be in the store; a store holds nothing else",
            hint=f"put it beside the store: --monitor {shlex.quote(store.name)}-timeline.jsonl",
        )
    for each in inputs:
        source = Path(each).absolute()
        if source.resolve() in (place, *place.parents) or fnmatch.fnmatch(str(place), str(source)):
            raise UsageError(
                f"the time line {str(path)!r} would be among the input {str(each)!r}; the next "
                "run would take it for text",
                hint="put it in another folder, such as that of --out",
            )


# -------------------------------------------------------------------------------------------------
# How long the rows of a store are, what of them counts, and what a limit would cost.
#
# Everything is read from the store, so a resumed build tells the same as one in a single run.

PERCENTILES = (1, 10, 50, 90, 99)
# Sequence lengths that people train with: 512 to 131,072.
LIMITS = tuple(2**power for power in range(9, 18))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What a longest length would take away."""

    limit: int
    rows: int  # longer than it
    tokens: int  # after it


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """Tokens per row; one that was cut into several documents is one row."""

    shortest: int
    longest: int
    mean: float
    percentiles: Mapping[int, int]
    counted_tokens: int | None  # tokens that count for the loss; None where there are no masks
    cuts: tuple[Cut, ...]  # for the limits that some row is longer than
    max_length: int | None
    too_long: str
    at_limit: int  # rows of exactly `max_length` tokens: those cut off, and any of that length
    cut_off: int | None  # None where no end token tells, or where it is far away
    rejected_too_long: int
    split_rows: int  # rows that were cut into several documents
    pieces: int  # documents that those became
    silent_documents: int  # documents of which no token counts: pieces of rows, if anything


def measure_rows(path: PathInput, shape: RowShape) -> RowLengths | None:
    """Lengths of all rows of a store; None where it has none."""
    with Store(path, split=None) as store:
        if not len(store):
            return None
        # Of pairs each side by itself.
        shards = range(len(store.shards))
        if shape.has_pairs:
            lengths = np.concatenate([store.map_shard(shard).index.lengths for shard in shards])
        else:
            lengths = np.concatenate([store.row_lengths(shard) for shard in shards])
        counted, silent = (store.num_counted, store.num_silent) if store.has_mask else (None, 0)
        totals = store.manifest.totals
        is_near = shape.too_long != "truncate" or not store.is_remote
        tells = store.eos_id is not None and is_near
        cut_off = _count_cut_off(store, shape) if tells else None
        reasons = store.reject_counts() if shape.too_long == "reject" else {}
    lengths = np.sort(lengths)
    ranks = {p: min(len(lengths) * p // 100, len(lengths) - 1) for p in PERCENTILES}
    over = {each: lengths[lengths > each] - each for each in LIMITS if each < lengths[-1]}
    limit = shape.max_length
    return RowLengths(
        shortest=int(lengths[0]),
        longest=int(lengths[-1]),
        mean=float(lengths.mean()),
        percentiles={p: int(lengths[rank]) for p, rank in ranks.items()},
        counted_tokens=counted,
        cuts=tuple(Cut(limit=n, rows=len(o), tokens=int(o.sum())) for n, o in over.items()),
        max_length=limit,
        too_long=shape.too_long,
        at_limit=0 if limit is None else int(np.count_nonzero(lengths == limit)),
        cut_off=cut_off,
        rejected_too_long=reasons.get(RejectReason.TOO_LONG, 0),
        split_rows=0 if shape.has_pairs else totals.split_rows,
        pieces=0 if shape.has_pairs else totals.pieces,
        silent_documents=silent,
    )


def _count_cut_off(store: Store, shape: RowShape) -> int:
    """Rows of the longest length that have lost their end token."""
    if shape.too_long != "truncate":
        return 0
    count = 0
    for position in range(len(store.shards)):
        shard = store.map_shard(position)
        longest = np.flatnonzero(shard.index.lengths == shape.max_length).tolist()
        count += sum(shard.document(number)[-1] != store.eos_id for number in longest)
    return count
