"""Where tasks run, and what is heard of them. Runners know nothing of text or tokens.

A `Job` names a function, as 'package.module:function', that each worker calls once with the
payload; it returns a `Worker`. Tasks, results and reports are pickled, so they are small values,
never data.

    runner.run(job, tasks, on_event)    returns when all tasks are done, raises when one failed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

Report = Callable[[Any], None]
"""Sends a small value from a working task to the driver."""


class Worker(Protocol):
    """What a job's function returns: it works on one task after the other."""

    def ready(self) -> Any:
        """A value for the driver, sent once when the worker can start."""

    def work(self, task: Any, report: Report) -> Any:
        """Carry out one task and return its result.

        A worker that only waits for a disk may return a `Future` of the result instead, and gets
        its next task meanwhile; the task counts as done when the future is.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    function: str
    """'package.module:function', importable in any process."""
    payload: Any


@dataclass(frozen=True, slots=True)
class WorkerReady:
    worker: int
    pid: int
    value: Any
    host: str | None = None
    """Where the process is, if it may be on another machine."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    worker: int
    value: Any


@dataclass(frozen=True, slots=True)
class TaskDone:
    worker: int
    task: Any
    result: Any


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died; its task runs again on a fresh one."""

    worker: int
    task: Any
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """What a worker that cannot be looked at from here says of itself."""

    worker: int
    memory_bytes: int
    cpu_percent: float


@dataclass(frozen=True, slots=True)
class PlaceState:
    """Where the tasks run, in words: the nodes of a cluster as they are now."""

    words: str


Event = WorkerReady | TaskReport | TaskDone | WorkerLost | WorkerUsage | PlaceState
OnEvent = Callable[[Event], None]


class Runner(Protocol):
    num_workers: int

    def run(self, job: Job, tasks: Iterable[Any], *, on_event: OnEvent) -> None:
        """Carry out every task; raise the first error after stopping the rest."""


def resolve(function: str) -> Callable[[Any], Worker]:
    """The function that 'package.module:function' names."""
    import importlib

    module, _, name = function.partition(":")
    found: Callable[[Any], Worker] = getattr(importlib.import_module(module), name)
    return found
