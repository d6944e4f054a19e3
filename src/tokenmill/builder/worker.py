"""The worker of a build: loads the engine once, then turns one task after the other into units.

It runs in a process of its own (or in the driver's, for debugging) and knows the store only as a
folder. Committing a unit waits for the disk; the next unit is read and encoded meanwhile.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenmill.builder.memory import MemoryGuard, budget_with, limit_memory, release_free_memory
from tokenmill.builder.unit import (
    EngineDisagreesError,
    Fitting,
    Scratch,
    StageClock,
    UnitPass,
    UnitRules,
    UnitTally,
)
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import load_engine
from tokenmill.errors import MemoryBudgetError
from tokenmill.sources import format_of
from tokenmill.store.facts import Bounds, Counts, EngineFacts, SourceFacts, UnitFacts
from tokenmill.store.format import token_dtype
from tokenmill.store.layout import join_layout, unit_name
from tokenmill.store.lock import TurnLock, WorkerLock
from tokenmill.store.write import UnitWriter
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tokenmill.builder.memory import MemoryPlan
    from tokenmill.builder.plan import Task
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.options import RowShape
    from tokenmill.runners import Report
    from tokenmill.sources.base import Source, SourceFile, SourceOptions, Unit, UnitEnd
    from tokenmill.store.layout import StoreLayout
    from tokenmill.supervised.shaper import Shaper


# -------------------------------------------------------------------------------------------------
# What the driver and the workers of a build tell each other: small values, nothing else.
#
# The driver knows the workers by these alone; it never loads an engine.


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """All that a worker must know; small enough to be sent to any machine."""

    store: str
    """The folder in which the build works."""
    url: str | None
    """Where the store is, if that folder only mirrors it."""
    corner: str = ""
    """Folder in the store's tmp/ for this run alone, where other parts work at the same time."""
    lock_token: str
    """Names the build that has the store's lock."""
    config: str
    """Fingerprint that the receipts carry."""
    options: SourceOptions
    tokenizer: TokenizerInfo
    """The copy in the store, described once by the driver."""
    special_tokens: str
    engine: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    val_fraction: float
    max_reject_fraction: float
    memory: MemoryPlan
    is_own_process: bool = True
    """Whether a worker may limit the memory of its process; not where that is the user's own."""
    shape: RowShape | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Which engine a worker uses, sent when it is ready."""

    name: str
    reference: str
    note: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """What was done since the last report."""

    unit: str
    input_bytes: int
    documents: int
    tokens: int
    rejected: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport:
    """A unit is committed."""

    unit: str
    pid: int
    counts: Counts
    engine: EngineFacts
    checked_bytes: int = 0
    stage_seconds: dict[str, float]


_REPORT_SECONDS = 0.2


def start_worker(settings: WorkerSettings) -> BuildWorker:
    """What the runner calls in each worker process."""
    return BuildWorker(settings)


def make_shaper(settings: WorkerSettings, engine: CheckedEngine) -> Shaper | None:
    """What makes documents of rows; None where a row is one text."""
    if settings.shape is None or not settings.shape.has_fields:
        return None
    from tokenmill.supervised.shaper import Shaper

    return Shaper(
        settings.shape,
        engine,
        bos=settings.bos_id,
        eos=settings.eos_id,
        reject_special=settings.special_tokens == "reject",
    )


class BuildWorker:
    """Builds units until there are no more tasks."""

    def __init__(self, settings: WorkerSettings, *, engine: CheckedEngine | None = None) -> None:
        self._settings = settings
        self._layout = dataclasses.replace(
            join_layout(settings.store, url=settings.url, token=settings.lock_token),
            corner=settings.corner,
        )
        self._lock = WorkerLock(self._layout, token=settings.lock_token)
        self._lock.acquire()
        self._engine = engine or load_engine(
            _tokenizer_here(settings.tokenizer, self._layout),
            choice=settings.engine,
            special_tokens=SpecialTokens(settings.special_tokens),
        )
        self._shaper = make_shaper(settings, self._engine)
        fitting = Fitting.of(settings.shape, bos_id=settings.bos_id, eos_id=settings.eos_id)
        self._rules = UnitRules(
            vocab_size=settings.vocab_size,
            dtype=token_dtype(settings.vocab_size),
            bos_id=settings.bos_id if fitting is None else None,
            eos_id=settings.eos_id if fitting is None else None,
            fitting=fitting,
            val_fraction=settings.val_fraction,
            reject_special=settings.special_tokens == "reject",
            max_reject_fraction=settings.max_reject_fraction,
            batch_bytes=settings.options.batch_bytes,
        )
        self._guard = MemoryGuard(settings.memory.worker_bytes)
        self._committer = ThreadPoolExecutor(1, "tokenmill-commit")
        self._pending: Future[None] | None = None
        self._scratch = Scratch()
        self._source: Source | None = None
        self._file: SourceFile | None = None
        # What is alive now stays alive: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        self._unlimit: Callable[[], None] = lambda: None
        if settings.is_own_process:
            self._unlimit = limit_memory(settings.memory.hard_bytes)

    def ready(self) -> EngineReport:
        return EngineReport(
            name=self._engine.name,
            reference=self._engine.reference.name,
            note=self._engine.refusal,
        )

    def work(self, task: Task, report: Report) -> Future[None] | None:
        """Build the units of the task; done when the last of them is committed."""
        try:
            source = self._open(task.file)
            for unit in _units_of(task, source, self._settings.options):
                self._build(source, unit, task.row_limits.get(unit.index), report)
        except BaseException as error:
            # The driver ends everything when it hears of this; wait for the unit before.
            if self._pending is not None:
                wait([self._pending])
            if isinstance(error, MemoryError):
                raise self._out_of_memory(task.file.path) from None
            if isinstance(error, MemoryBudgetError) and error.short_bytes is not None:
                enough = budget_with(self._settings.memory, error.short_bytes)
                error.hint = f"allow more with --memory {enough}{self._or_fewer()}"
            raise
        return self._pending

    def close(self) -> None:
        self._committer.shutdown(wait=True)
        self._close_source()
        self._lock.release()
        self._layout.upstream.close()
        self._unlimit()

    def _out_of_memory(self, path: str) -> MemoryBudgetError:
        budget = self._settings.memory.budget
        return MemoryBudgetError(
            f"a worker came to the end of its share of the memory, {format_size(budget)} in all, "
            f"while it worked on {path!r}: something in that file takes far more than its size",
            hint=f"allow more with --memory {-(-2 * budget // 10**8) * 100}MB{self._or_fewer()}, "
            "or leave the file out",
        )

    def _or_fewer(self) -> str:
        return " or fewer --workers" if self._settings.memory.workers > 1 else ""

    def _open(self, file: SourceFile) -> Source:
        """The file's source; it stays open, since the next task is mostly of the same file."""
        if self._source is None or self._file != file:
            self._close_source()
            # A line or a record is held once, as part of a batch.
            is_plain = file.traits.holds_one_batch and file.compression is None
            self._guard.kept_free = 0 if is_plain else self._settings.options.room_bytes
            self._source = format_of(file).open(file, self._settings.options)
            self._file = file
        return self._source

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _build(self, source: Source, unit: Unit, row_limit: int | None, report: Report) -> None:
        progress = _ProgressMeter(unit_name(unit.file.path, index=unit.index), report)
        # Nothing to disagree with where the reference is the engine.
        use_reference = self._engine.fast is None
        try:
            draft = self._attempt(source, unit, row_limit, progress, use_reference)
        except EngineDisagreesError as disagreement:
            progress.restart()
            draft = self._attempt(source, unit, row_limit, progress, use_reference=True)
            draft.was_redone = True
            draft.tally.checked_documents = disagreement.checked_documents
            draft.tally.checked_bytes = disagreement.checked_bytes
            draft.tally.mismatches = 1
        # At most one unit is being committed; an error of the one before is raised here.
        if self._pending is not None:
            draft.clock.timed("wait", self._pending.result)
        self._pending = self._committer.submit(self._commit, draft, report)

    def _attempt(
        self,
        source: Source,
        unit: Unit,
        row_limit: int | None,
        progress: _ProgressMeter,
        use_reference: bool,
    ) -> _Draft:
        facts = UnitFacts.of(
            unit.file.path,
            index=unit.index,
            start=unit.start,
            end=unit.end,
            members=tuple(member.path for member in unit.file.members),
        )
        writer = UnitWriter(
            self._layout, facts, dtype=self._rules.dtype, vocab_size=self._settings.vocab_size
        )
        clock = StageClock()

        def on_batch(tally: UnitTally) -> None:
            progress.update(tally)
            self._mind_memory()

        unit_pass = UnitPass(
            rules=self._rules,
            engine=self._engine,
            use_reference=use_reference,
            writer=writer,
            clock=clock,
            on_batch=on_batch,
            large_turn=self._large_turn,
            scratch=self._scratch,
            shaper=self._shaper,
        )
        try:
            end = unit_pass.run(source, unit, row_limit=row_limit)
        except BaseException:
            writer.abort()
            raise
        progress.finish(unit_pass.tally)
        return _Draft(unit=unit, writer=writer, tally=unit_pass.tally, end=end, clock=clock)

    def _commit(self, draft: _Draft, report: Report) -> None:
        tally = draft.tally
        counts = Counts(
            rows=tally.rows,
            documents=tally.documents,
            empty=tally.empty,
            rejected=tally.rejected,
            skipped=tally.skipped,
            input_bytes=tally.input_bytes,
            text_bytes=tally.text_bytes,
            tokens=tally.tokens,
            split_rows=tally.split_rows,
            pieces=tally.pieces,
        )
        engine = _engine_facts(self._engine, tally, was_redone=draft.was_redone)
        try:
            start = time.perf_counter()
            receipt = draft.writer.commit(
                source=SourceFacts(
                    size=draft.unit.file.size,
                    version=draft.unit.file.version,
                    digest=draft.end.digest,
                    is_last=draft.end.is_last,
                    num_lines=draft.end.num_lines,
                ),
                config=self._settings.config,
                counts=counts,
                bounds=Bounds(
                    largest_row_bytes=tally.largest_row_bytes,
                    smallest_too_large_bytes=tally.smallest_too_large_bytes,
                ),
                engine=engine,
            )
        except BaseException as error:
            draft.writer.abort()
            if isinstance(error, MemoryError):
                raise self._out_of_memory(draft.unit.file.path) from None
            raise
        draft.clock.add("write", time.perf_counter() - start)
        report(
            UnitReport(
                unit=receipt.unit.name,
                pid=os.getpid(),
                counts=receipt.counts,
                engine=engine,
                checked_bytes=tally.checked_bytes,
                stage_seconds=draft.clock.seconds,
            )
        )

    def _mind_memory(self) -> None:
        if self._guard.is_over():
            self._engine.recycle()
            release_free_memory()

    def _large_turn(self) -> AbstractContextManager[Any]:
        return TurnLock(self._layout)


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A unit that is written but not committed."""

    unit: Unit
    writer: UnitWriter
    tally: UnitTally
    end: UnitEnd
    clock: StageClock
    was_redone: bool = False


@dataclass(slots=True)
class _ProgressMeter:
    """Sends what was added since the last report, a few times a second."""

    unit: str
    report: Report
    _sent: UnitTally = field(default_factory=UnitTally)
    _last: float = field(default_factory=time.monotonic)

    def update(self, tally: UnitTally) -> None:
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self.finish(tally)

    def finish(self, tally: UnitTally) -> None:
        self._last = time.monotonic()
        self.report(
            ProgressReport(
                unit=self.unit,
                input_bytes=tally.input_bytes - self._sent.input_bytes,
                documents=tally.documents - self._sent.documents,
                tokens=tally.tokens - self._sent.tokens,
                rejected=tally.rejected - self._sent.rejected,
            )
        )
        self._sent = UnitTally(
            input_bytes=tally.input_bytes,
            documents=tally.documents,
            tokens=tally.tokens,
            rejected=tally.rejected,
        )

    def restart(self) -> None:
        """Take back what was reported: the unit begins again."""
        self.finish(UnitTally())


def _tokenizer_here(tokenizer: TokenizerInfo, layout: StoreLayout) -> TokenizerInfo:
    """The store's copy of the tokenizer; a worker on another machine brings it first."""
    files = {name: layout.tokenizer / name for name in tokenizer.files}
    layout.upstream.bring(list(files.values()))
    return dataclasses.replace(tokenizer, files=files)


def _units_of(task: Task, source: Source, options: SourceOptions) -> Iterator[Unit]:
    """The units that a task names."""
    for unit in format_of(task.file).plan(task.file, options):
        if task.step is None:
            if unit.index == task.first:
                yield unit
                return
            continue
        if task.last is not None and unit.index > task.last:
            return
        if unit.index < task.first or (unit.index - task.first) % task.step:
            continue
        if not source.exists(unit):
            return
        if unit.index not in task.done:
            yield unit


def _engine_facts(engine: CheckedEngine, tally: UnitTally, *, was_redone: bool) -> EngineFacts:
    used = engine.reference if was_redone else engine.engine
    return EngineFacts(
        name=used.name,
        version=used.version,
        reference=engine.reference.name,
        reference_version=engine.reference.version,
        checked_documents=tally.checked_documents,
        mismatches=tally.mismatches,
        redone=was_redone,
        routed_documents=tally.routed_documents,
    )
