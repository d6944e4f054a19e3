"""The worker side of the Ray runner: what a process of a Ray cluster runs.

Ray keeps a process for the next task of the same job, so the worker (its engine, its locks) is made
once and kept. Nothing tells such a process that a build is over: a worker that had no task for a
moment is closed, and made again if there is another one after all.

This module does not import Ray; it is given the driver's mailbox and calls it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from tokenmill.runners.base import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.runners.base import Job, Worker

IDLE_SECONDS = 3.0
"""Shorter than a build waits for the workers of the one before it."""
SEND_SECONDS = 1.0
"""Between two messages of a worker: a thousand of them must not keep one driver busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A process of the cluster."""

    host: str
    pid: int
    ready: Any
    """What the worker said when it could start."""

    @property
    def key(self) -> tuple[str, int]:
        return self.host, self.pid


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Reports of one attempt at a batch, from the first that was not sent yet."""

    batch: int
    attempt: str
    worker: Identity
    first: int
    reports: list[Any]
    memory_bytes: int
    cpu_percent: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A batch that is done, with all its reports: messages may be lost, this is not."""

    attempt: str
    worker: Identity
    reports: list[Any]
    results: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What all batches of a run have in common."""

    session: str
    job: Job
    folder: str
    """Where the driver works: names of files may be relative to it."""


def work_batch(order: Order, mailbox: Any, batch: int, tasks: Sequence[Any]) -> Outcome:
    """Carry out some tasks in this process; done when all of them are committed."""
    with _busy:
        identity, worker = _kept.get(order)
        try:
            return _work(identity, worker, mailbox, batch, tasks)
        except BaseException:
            _kept.forget()  # whatever it was, the next task begins afresh
            raise
        finally:
            _kept.close_when_idle()


def _work(
    identity: Identity, worker: Worker, mailbox: Any, batch: int, tasks: Sequence[Any]
) -> Outcome:
    log = _Log(identity, mailbox, batch)
    log.send()
    outcomes = [worker.work(task, log.add) for task in tasks]
    results = [each.result() if isinstance(each, Future) else each for each in outcomes]
    return Outcome(attempt=log.attempt, worker=identity, reports=log.reports, results=results)


@dataclass(slots=True)
class _Log:
    """The reports of an attempt; now and then they are sent on, for those who watch."""

    worker: Identity
    mailbox: Any
    batch: int
    attempt: str = field(default_factory=lambda: secrets.token_hex(8))
    reports: list[Any] = field(default_factory=list)
    _sent: int = 0
    _last: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, report: Any) -> None:
        with self._lock:  # a unit that is being committed reports from a thread of its own
            self.reports.append(report)
            if time.monotonic() - self._last >= SEND_SECONDS:
                self.send()

    def send(self) -> None:
        first, self._sent, self._last = self._sent, len(self.reports), time.monotonic()
        self.mailbox.put.remote(
            Message(
                batch=self.batch,
                attempt=self.attempt,
                worker=self.worker,
                first=first,
                reports=self.reports[first:],
                memory_bytes=int(_process.memory_info().rss),
                cpu_percent=_process.cpu_percent(None),
            )
        )


@dataclass(slots=True)
class _Kept:
    """The worker that this process keeps from one batch to the next."""

    session: str = ""
    identity: Identity | None = None
    worker: Worker | None = None
    timer: threading.Timer | None = None

    def get(self, order: Order) -> tuple[Identity, Worker]:
        if self.timer is not None:
            self.timer.cancel()
        if self.worker is None or self.identity is None or self.session != order.session:
            self.forget()
            # A node without that folder may still see everything, if all names are URLs.
            with contextlib.suppress(OSError):
                os.chdir(order.folder)
            self.worker = resolve(order.job.function)(order.job.payload)
            self.identity = Identity(
                host=socket.gethostname(), pid=os.getpid(), ready=self.worker.ready()
            )
            self.session = order.session
        return self.identity, self.worker

    def forget(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()

    def close_when_idle(self) -> None:
        self.timer = threading.Timer(IDLE_SECONDS, _close_idle)
        self.timer.daemon = True
        self.timer.start()


def _close_idle() -> None:
    # A batch that has begun meanwhile has the lock, and has cancelled the timer.
    if _busy.acquire(blocking=False):
        try:
            _kept.forget()
        finally:
            _busy.release()


_busy = threading.Lock()
_kept = _Kept()
_process = psutil.Process()
