"""A pool of worker processes on this machine.

Each worker is a fresh interpreter (`runners/child.py`) with a thread here that reads its messages
into one queue. A worker that dies (killed for memory, crashed in native code) is replaced and its
task is given out again; a task that loses `max_attempts` workers is an error, since it would kill
every worker in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenmill.errors import BuildError
from tokenmill.runners.base import (
    Job,
    OnEvent,
    TaskDone,
    TaskReport,
    WorkerLost,
    WorkerReady,
)
from tokenmill.runners.frames import read_frame, write_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# Not `-m`: that would put the working folder first on the path, where a user's own `tokenizers/` or
# `random.py` would be imported instead. The child sees what this process sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tokenmill.runners.child import main; main()"
)


@dataclass(eq=False, slots=True)
class _Process:
    """One worker process and what it is doing."""

    number: int
    popen: subprocess.Popen[bytes]
    tasks: dict[int, Any] = field(default_factory=dict)
    """Given to it and not done: the one it works on, and one that it may still be committing."""

    def send(self, message: Any) -> None:
        assert self.popen.stdin is not None
        # An error here means that it died just now; its reader thread is about to say so.
        with contextlib.suppress(OSError):
            write_frame(self.popen.stdin, message)

    def assign(self, entry: tuple[int, Any]) -> None:
        self.tasks[entry[0]] = entry[1]
        self.send(entry)

    def exit_reason(self) -> str:
        code = self.popen.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(slots=True)
class _Backlog:
    """Tasks not given out yet: those that lost a worker first, then the rest in order."""

    tasks: Iterator[tuple[int, Any]]
    max_attempts: int
    returned: deque[tuple[int, Any]] = field(default_factory=deque)
    attempts: dict[int, int] = field(default_factory=dict)

    def next(self) -> tuple[int, Any] | None:
        return self.returned.popleft() if self.returned else next(self.tasks, None)

    def give_back(self, number: int, task: Any, reason: str) -> None:
        count = self.attempts[number] = self.attempts.get(number, 0) + 1
        if count >= self.max_attempts:
            raise BuildError(
                f"{count} workers died one after the other on the same task ({task}), the last one "
                f"{reason}; going on would only lose more of them",
                hint="look for a memory limit of the machine or container (signal 9 usually means "
                "that), lower --workers or --memory, and run the same command again",
            )
        self.returned.append((number, task))


class LocalRunner:
    """Worker processes on this machine, one task at a time each."""

    def __init__(
        self,
        num_workers: int,
        *,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[Sequence[int]] | None = None,
        max_attempts: int = 3,
    ) -> None:
        self.num_workers = num_workers
        self._environment = {**os.environ, **(environment or {})}
        self._cores = cores
        self._max_attempts = max_attempts
        self._inbox: queue.SimpleQueue[tuple[_Process, str, Any]] = queue.SimpleQueue()
        self._processes: list[_Process] = []

    def run(self, job: Job, tasks: Iterable[Any], *, on_event: OnEvent) -> None:
        """Carry out every task; raise the first error after stopping the rest."""
        backlog = _Backlog(iter(enumerate(tasks)), self._max_attempts)
        try:
            for number in range(self.num_workers):
                if (entry := backlog.next()) is None:
                    break
                self._start(job, number, entry)
            while self._processes:
                self._handle(job, backlog, *self._inbox.get(), on_event=on_event)
        finally:
            self._stop()

    def _start(self, job: Job, number: int, entry: tuple[int, Any]) -> None:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
        )
        if self._cores is not None:
            os.sched_setaffinity(popen.pid, self._cores[number % len(self._cores)])
        process = _Process(number, popen)
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        process.send(job)
        process.assign(entry)

    def _listen(self, process: _Process) -> None:
        assert process.popen.stdout is not None
        try:
            while True:
                kind, value = read_frame(process.popen.stdout)
                self._inbox.put((process, kind, value))
        except (EOFError, OSError):
            self._inbox.put((process, "gone", None))

    def _handle(
        self,
        job: Job,
        backlog: _Backlog,
        process: _Process,
        kind: str,
        value: Any,
        *,
        on_event: OnEvent,
    ) -> None:
        match kind:
            case "ready":
                on_event(WorkerReady(process.number, process.popen.pid, value))
            case "report":
                on_event(TaskReport(process.number, value))
            case "done":
                number, result = value
                on_event(TaskDone(process.number, process.tasks.pop(number), result))
            case "free":
                if (entry := backlog.next()) is not None:
                    process.assign(entry)
                else:
                    process.send(None)
            case "error":
                error, trace = value
                error.add_note(f"in worker {process.number}:\n{trace}")
                raise error
            case "gone":
                self._lose(job, backlog, process, on_event=on_event)

    def _lose(self, job: Job, backlog: _Backlog, process: _Process, *, on_event: OnEvent) -> None:
        self._processes.remove(process)
        reason = process.exit_reason()
        for number, task in process.tasks.items():
            if process.popen.returncode == -signal.SIGABRT:
                raise BuildError(
                    f"a worker ended itself ({reason}) while it worked on {task}; native code does "
                    "so when it gets no more memory, and it would do so again",
                    hint="allow more with a larger --memory or fewer --workers, or leave the file "
                    "out; what the worker said last stands above",
                )
            on_event(WorkerLost(process.number, task, reason))
            backlog.give_back(number, task, reason)
        # Also after a normal end: another worker may have been lost since this one was let go.
        if (entry := backlog.next()) is not None:
            self._start(job, process.number, entry)

    def _stop(self) -> None:
        for process in self._processes:
            process.popen.kill()
        for process in self._processes:
            process.popen.wait()
        self._processes.clear()
