"""Runs the parts of an export or import in worker processes, or here where that is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.errors import UsageError
from tokenmill.runners import Job, LocalRunner, SerialRunner
from tokenmill.runners.base import TaskDone
from tokenmill.runners.cores import physical_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenmill.runners import Event

WORTH_BYTES = 64 << 20
"""A worker takes a third of a second to start: less than this is done sooner without one."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def run_tasks(
    function: str,
    settings: Any,
    tasks: Sequence[Any],
    *,
    workers: int | None,
    total_bytes: int,
    on_done: Callable[[Any, Any], None],
) -> int:
    """Carry out all tasks; returns how many processes worked. `workers=1` is this one alone."""
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers={workers!r} is not a whole number of 1 or more")
    if not tasks:
        return 0
    if workers is None:
        workers = physical_cores() if total_bytes >= WORTH_BYTES else 1
    workers = min(workers, len(tasks))

    def on_event(event: Event) -> None:
        if isinstance(event, TaskDone):
            on_done(event.task, event.result)

    runner = SerialRunner() if workers == 1 else LocalRunner(workers, environment=_ENVIRONMENT)
    runner.run(Job(function=function, payload=settings), tasks, on_event=on_event)
    return workers
