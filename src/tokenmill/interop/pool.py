"""Runs the parts of an export or import on threads: numpy, Arrow and the disk do the work.

They all let other threads run, so that threads fill the cores as processes would, and none has to
start. A thread cannot be stopped from outside: after an error, and when the program is interrupted,
the others end where they next report.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from tokenmill.errors import UsageError
from tokenmill.runners.cores import physical_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    OnProgress = Callable[[int, int], None]
    """Told how much is done, of how much; by any thread, one at a time."""
    Report = Callable[[int], None]
    """Told by a task, now and then, how much of it is done."""

T = TypeVar("T")
R = TypeVar("R")


class _Stopped(BaseException):
    """Ends a task whose result nobody waits for."""


def run_tasks(
    work: Callable[[T, Report], R],
    tasks: Sequence[T],
    *,
    workers: int | None,
    on_report: Callable[[T, int], None],
    on_done: Callable[[T, R], None],
) -> int:
    """Carry out all tasks; returns how many were worked on at a time.

    The first error is raised when nothing runs any more. `on_done` is called on this thread.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers={workers!r} is not a whole number of 1 or more")
    count = min(workers or physical_cores(), len(tasks))
    if not count:
        return 0
    stop = threading.Event()

    def run_one(task: T) -> R:
        def report(amount: int) -> None:
            if stop.is_set():
                raise _Stopped
            on_report(task, amount)

        return work(task, report)

    with ThreadPoolExecutor(count, thread_name_prefix="part") as pool:
        try:
            futures = {pool.submit(run_one, task): task for task in tasks}
            for future in as_completed(futures):
                on_done(futures[future], future.result())
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return count


@dataclass(kw_only=True)
class Progress:
    """How much is done of many parts, those included that are being worked on."""

    total: int
    done: int
    on_progress: OnProgress | None
    _running: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, name: str, amount: int) -> None:
        """So much of a part is done."""
        with self._lock:
            self._running[name] = amount
            self._show()

    def finish(self, name: str, amount: int) -> None:
        """A part is done, and was so much."""
        with self._lock:
            self._running.pop(name, None)
            self.done += amount
            self._show()

    def _show(self) -> None:
        if self.on_progress is not None:
            self.on_progress(min(self.total, self.done + sum(self._running.values())), self.total)
