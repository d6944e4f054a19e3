"""The build beside a run: text becomes a store in a process of its own, which the run follows.

    BuildBeside (a thread here)  ->  a process: tokenmill.build(..., followed=True)  ->  its workers

What is trained on is read from the store alone, by a `Follower`; of the build the run hears how far
it is, and how it ended. The process is one of `runners.local`: Ctrl-C is the run's affair alone, it
ends with the run however that ends, and one that is killed is started again and resumes.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenmill.errors import StoreLockedError
from tokenmill.runners.local import LocalRunner, TaskDone, TaskReport, WorkerLost
from tokenmill.store.layout import WORKER_WAIT_SECONDS
from tokenmill.words import share

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.builder.progress import BuildResult, Progress
    from tokenmill.options import BuildOptions
    from tokenmill.runners.local import Event, Report

TELLS_SECONDS = 0.5
NICE = 10  # of 19 steps of priority
LOCKED_POLL_SECONDS = 0.2


class BuildTask:
    """A worker whose only task is a whole build.

    It and its own workers give way to the trainer where there are too few cores for all: a trainer
    that has to wait for the build leaves it what there is.
    """

    def ready(self) -> None:
        os.nice(NICE)

    def work(self, task: BuildOptions, report: Report) -> BuildResult:
        """Build, and report each progress."""
        from tokenmill.builder.run import make_run

        run = make_run(replace(task, on_progress=report))
        try:
            return run.run()
        finally:
            run.close()

    def close(self) -> None: ...


class BuildBeside:
    """Begins to build when it is made; use as a context manager, which ends what is not done.

    `tell` hears what a person should read, from another thread.
    """

    def __init__(self, options: BuildOptions, *, tell: Callable[[str], None]) -> None:
        self.options, self._tell = options, tell
        self.result: BuildResult | None = None
        self._seen: Progress | None = None
        self._error: BaseException | None = None
        self._is_stopped = False
        self._is_planned, self._has_ended = threading.Event(), threading.Event()
        self._runner = LocalRunner(1, forks=False)
        self._thread = threading.Thread(target=self._build, name="tokenmill build", daemon=True)
        self._thread.start()

    def __enter__(self) -> BuildBeside:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True
        while self._thread.is_alive():
            self._runner.stop()
            self._thread.join(TELLS_SECONDS)

    def wait_until_planned(self) -> None:
        """Until the store says what it will be made of, or is finished; the error of the build.

        What is there before that may be of an earlier one.
        """
        self._is_planned.wait()
        self.require()

    def require(self) -> None:
        """The error of the build, if it has ended with one."""
        if self._error is not None:
            raise self._error

    def describe(self) -> str | None:
        """How far it is, in words; None when it has ended."""
        seen = self._seen
        if self._has_ended.is_set() or seen is None or not seen.bytes_total:
            return None
        return f"{share(min(seen.bytes_done, seen.bytes_total), seen.bytes_total)} built"

    def finish(self, on_wait: Callable[[str], None]) -> BuildResult:
        """Wait for its end; `on_wait` hears how far it is."""
        while not self._has_ended.wait(TELLS_SECONDS):
            on_wait(self.describe() or "nothing built yet")
        self.require()
        assert self.result is not None
        return self.result

    def _build(self) -> None:
        """In a thread: the system ends the process with the thread that started it."""
        try:
            self._run_when_free()
        except BaseException as error:
            self._error = error
            if not self._is_stopped and self._is_planned.is_set():
                self._tell(f"the build failed: {error}")
        finally:
            self._has_ended.set()
            self._is_planned.set()

    def _run_when_free(self) -> None:
        """A build that a killed run had begun may need a moment to end."""
        waited = 0.0
        while True:
            try:
                return self._runner.run(BuildTask, [self.options], on_event=self._hear)
            except StoreLockedError:
                if self._is_stopped or waited >= WORKER_WAIT_SECONDS:
                    raise
                waited += LOCKED_POLL_SECONDS
                time.sleep(LOCKED_POLL_SECONDS)

    def _hear(self, event: Event) -> None:
        match event:
            case TaskReport(value=progress):
                self._seen = progress
                if progress.message is not None:
                    self._tell(f"build: {progress.message}")
                if progress.phase != "planning":
                    self._is_planned.set()
            case TaskDone(result=result):
                self.result = result
            case WorkerLost(reason=reason):
                self._tell(f"the process that builds died ({reason}); it is started again")
