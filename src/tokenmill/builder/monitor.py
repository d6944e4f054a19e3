"""Listens to a running build: sums what the workers report and watches memory and cores.

A thread samples the process tree many times a second, since a peak that nobody saw did not stay
within the budget, it was only missed; a few times a second it tells `on_progress`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from tokenmill.builder.messages import EngineReport, ProgressReport, UnitReport
from tokenmill.builder.progress import Progress, WorkerProgress
from tokenmill.runners import (
    PlaceState,
    TaskDone,
    TaskReport,
    WorkerLost,
    WorkerReady,
    WorkerUsage,
)
from tokenmill.store.facts import Counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.runners import Event

_SAMPLE_SECONDS = 0.05
_TELL_SECONDS = 0.25
_RATE_SECONDS = 10.0


@dataclass(slots=True)
class _WorkerState:
    number: int
    pid: int
    process: psutil.Process | None
    """None where it is on another machine; it tells then what it uses."""
    doing: str = "starting"
    memory_bytes: int = 0
    cpu_percent: float = 0.0


@dataclass(kw_only=True, slots=True)
class Monitor:
    """What is known about a running build. Use as a context manager around the runner."""

    budget: int
    bytes_total: int
    units_total: int | None
    on_progress: Callable[[Progress], None] | None
    num_workers: int
    started: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    engine: EngineReport | None = None
    keeps_reports: bool = False
    """Remember the report of every unit; there may be a million of them."""
    units: set[str] = field(default_factory=set)
    """Names: a unit is reported twice if its worker dies right after committing it."""
    built: Counts = field(default_factory=Counts)
    checked_bytes: int = 0
    redone: list[str] = field(default_factory=list)
    reports: list[UnitReport] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    startup_seconds: float = 0.0
    peak_bytes: int = 0
    _bytes_done: int = 0
    _documents: int = 0
    _tokens: int = 0
    _rejected: int = 0
    _memory: int = 0
    _num_ready: int = 0
    _place: str | None = None
    _workers: dict[int, _WorkerState] = field(default_factory=dict)
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

    def on_event(self, event: Event) -> None:
        """Take in what the runner heard."""
        with self._lock:
            match event:
                case WorkerReady():
                    self._greet(event)
                case TaskReport(value=ProgressReport() as report):
                    self._bytes_done += report.input_bytes
                    self._documents += report.documents
                    self._tokens += report.tokens
                    self._rejected += report.rejected
                    self._workers[event.worker].doing = report.unit
                case TaskReport(value=UnitReport() as report):
                    self._finish_unit(report)
                case TaskDone():
                    self._workers[event.worker].doing = "next unit"
                case WorkerUsage():
                    state = self._workers[event.worker]
                    state.memory_bytes, state.cpu_percent = event.memory_bytes, event.cpu_percent
                case PlaceState():
                    self._place = event.words
                case WorkerLost():
                    self.warn(
                        f"worker {event.worker} died ({event.reason}); {event.task} is built again"
                    )

    def _greet(self, event: WorkerReady) -> None:
        self._num_ready += 1
        if self._num_ready <= self.num_workers:
            self.startup_seconds = time.monotonic() - self.started
        self.engine = event.value
        self.phase = "building"
        process: psutil.Process | None = None
        if event.host is None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(event.pid)
        self._workers[event.worker] = _WorkerState(event.worker, event.pid, process)

    def _finish_unit(self, report: UnitReport) -> None:
        if report.unit in self.units:
            return
        self.units.add(report.unit)
        self.built += report.counts
        self.checked_bytes += report.checked_bytes
        if self.keeps_reports:
            self.reports.append(report)
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
                self._sample(driver)
            now = time.monotonic()
            if now - last_told >= _TELL_SECONDS:
                last_told = now
                self.tell()

    def _sample(self, driver: psutil.Process) -> None:
        total = int(driver.memory_info().rss)
        for state in self._workers.values():
            if state.process is not None:
                if state.pid == os.getpid():
                    continue
                try:
                    state.memory_bytes = int(state.process.memory_info().rss)
                except psutil.Error:
                    state.memory_bytes = 0
            total += state.memory_bytes
        self._memory = total
        self.peak_bytes = max(self.peak_bytes, total)

    def tell(self, phase: str | None = None) -> None:
        """Pass the state on, and each message once."""
        if phase is not None:
            self.phase = phase
        if self.on_progress is None:
            return
        while True:
            with self._lock:
                message = self._messages.popleft() if self._messages else None
                progress = self._snapshot(message)
                more = bool(self._messages)
            self.on_progress(progress)
            if not more:
                return

    def _snapshot(self, message: str | None) -> Progress:
        now = time.monotonic()
        self._history.append((now, self._bytes_done, self._tokens))
        while now - self._history[0][0] > _RATE_SECONDS:
            self._history.popleft()
        then, bytes_then, tokens_then = self._history[0]
        span = max(now - then, 1e-9)
        rate = (self._bytes_done - bytes_then) / span
        left = max(self.bytes_total - self._bytes_done, 0)
        return Progress(
            phase=self.phase,
            seconds=now - self.started,
            units_done=len(self.units),
            units_total=self.units_total,
            bytes_done=self._bytes_done,
            bytes_total=max(self.bytes_total, self._bytes_done),
            documents=self._documents,
            tokens=self._tokens,
            rejected=self._rejected,
            memory_bytes=self._memory,
            memory_peak_bytes=self.peak_bytes,
            memory_budget_bytes=self.budget,
            bytes_per_second=rate,
            tokens_per_second=(self._tokens - tokens_then) / span,
            eta_seconds=left / rate if rate > 0 else None,
            workers=tuple(self._describe(state) for state in self._workers.values()),
            message=message,
            place=self._place,
        )

    def _describe(self, state: _WorkerState) -> WorkerProgress:
        if state.process is not None:
            with contextlib.suppress(psutil.Error):
                state.cpu_percent = state.process.cpu_percent(None)
        return WorkerProgress(
            number=state.number,
            pid=state.pid,
            cpu_percent=state.cpu_percent,
            memory_bytes=state.memory_bytes,
            doing=state.doing,
        )
