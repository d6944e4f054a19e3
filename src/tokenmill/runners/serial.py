"""Runs the tasks in this process, one after the other: for debuggers, profilers and tests."""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tokenmill.runners.base import Job, OnEvent, TaskDone, TaskReport, WorkerReady, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable


class SerialRunner:
    """One worker, this process."""

    num_workers = 1

    def run(self, job: Job, tasks: Iterable[Any], *, on_event: OnEvent) -> None:
        """Carry out every task in order."""
        with closing(resolve(job.function)(job.payload)) as worker:
            on_event(WorkerReady(0, os.getpid(), worker.ready()))
            for task in tasks:
                result = worker.work(task, lambda value: on_event(TaskReport(0, value)))
                if isinstance(result, Future):
                    result = result.result()
                on_event(TaskDone(0, task, result))
