"""Where tasks run, and what is heard of them: this process, or a pool of processes here.

Runners know nothing of text or tokens. They are given a callable without arguments that makes a
`Worker` in each process (a class with its arguments, by `functools.partial`). It, the tasks, their
results and reports are pickled, so they are small values, never data.

    runner.run(start, tasks, on_event)    returns when all tasks are done, raises when one failed

Each worker of the pool is a fresh interpreter with a thread here that reads its messages into one
queue. A worker that dies (killed for memory, crashed in native code) is replaced and its task is
given out again; a task that loses `max_attempts` workers is an error, since it would kill every
worker in turn.

A task may find others: what it reports as a `FoundTask` is given out before the tasks that are
left. Such a task has `finds_tasks`, and while one runs no worker is let go.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import psutil

from tokenmill.errors import BuildError
from tokenmill.visible import guarded

# Sends a small value from a working task to the driver.
Report = Callable[[Any], None]


class Worker(Protocol):
    """Works on one task after the other."""

    def ready(self) -> Any:
        """A value for the driver, sent once when the worker can start."""

    def work(self, task: Any, report: Report) -> Any:
        """Carry out one task and return its result.

        A worker that only waits for a disk may return a `Future` of the result instead, and gets
        its next task meanwhile; the task counts as done when the future is.
        """

    def close(self) -> None: ...


class WorkerReady(NamedTuple):
    worker: int
    pid: int
    value: Any
    host: str | None = None  # where the process is, if it may be on another machine


class TaskReport(NamedTuple):
    worker: int
    value: Any


class FoundTask(NamedTuple):
    """Reported by a task that finds others; what was found twice under one name counts once."""

    name: str
    task: Any


class TaskDone(NamedTuple):
    worker: int
    task: Any
    result: Any


class WorkerLost(NamedTuple):
    """A worker died; its task runs again on a fresh one."""

    worker: int
    task: Any
    reason: str


class WorkerUsage(NamedTuple):
    """What a worker that cannot be looked at from here says of itself."""

    worker: int
    memory_bytes: int
    cpu_percent: float


class PlaceState(NamedTuple):
    """Where the tasks run, in words: the nodes of a cluster as they are now."""

    words: str


Start = Callable[[], Worker]
Event = WorkerReady | TaskReport | TaskDone | WorkerLost | WorkerUsage | PlaceState
OnEvent = Callable[[Event], None]

# Not `-m`: that would put the working folder first on the path, where a user's own `tokenizers/` or
# `random.py` would be imported instead. The child sees what this process sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tokenmill.runners.local import run_child; run_child(*json.loads(sys.argv[2]))"
)
# A pipe that ended, even inside a message.
_ENDED = (EOFError, OSError, pickle.UnpicklingError)


@dataclass(eq=False, slots=True)
class _Process:
    """One worker process and what it is doing."""

    number: int
    popen: subprocess.Popen[bytes]
    # Given to it and not done: the one it works on, and one that it may still be committing.
    tasks: dict[int, Any] = field(default_factory=dict)

    def send(self, message: Any) -> None:
        assert self.popen.stdin is not None
        # An error here means that it died just now; its reader thread is about to say so.
        with contextlib.suppress(OSError):
            self.popen.stdin.write(pickle.dumps(message))
            self.popen.stdin.flush()

    def assign(self, entry: tuple[int, Any]) -> None:
        self.tasks[entry[0]] = entry[1]
        self.send(entry)

    @property
    def finds_tasks(self) -> bool:
        return any(getattr(task, "finds_tasks", False) for task in self.tasks.values())


@dataclass(eq=False, slots=True)
class LocalRunner:
    """Worker processes on this machine, one task at a time each."""

    num_workers: int
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: Sequence[Sequence[int]] | None = None
    max_attempts: int = 3
    _inbox: queue.SimpleQueue[tuple[_Process, str, Any]] = field(default_factory=queue.SimpleQueue)
    _processes: list[_Process] = field(default_factory=list)
    _ahead: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_ahead(self, count: int, modules: Sequence[str]) -> None:
        """Start processes that import the modules while their work is still being planned."""
        for number in range(min(count, self.num_workers)):
            self._ahead[number] = self._spawn(number, modules)

    def close(self) -> None:
        """End the processes that were started ahead and got no work."""
        for popen in self._ahead.values():
            popen.kill()
        for popen in self._ahead.values():
            popen.communicate()  # closes the pipes and waits
        self._ahead.clear()

    def run(self, start: Start, tasks: Iterable[Any], *, on_event: OnEvent) -> None:
        """Carry out every task; raise the first error after stopping the rest."""
        numbers, rest = itertools.count(), iter(tasks)
        waiting: deque[tuple[int, Any]] = deque()  # what lost its worker, and what was found
        names: set[str] = set()
        attempts: Counter[int] = Counter()
        idle: list[_Process] = []
        vacant: list[int] = []  # numbers of workers that are gone

        def next_task() -> tuple[int, Any] | None:
            if waiting:
                return waiting.popleft()
            return next(((next(numbers), task) for task in rest), None)

        def deal() -> None:
            """Give tasks to the idle, who are let go where none can come any more."""
            while (idle or vacant) and (entry := next_task()) is not None:
                if idle:
                    # Last to those that are finding, for whom the others may be waiting.
                    process = min(idle, key=lambda each: each.finds_tasks)
                    idle.remove(process)
                    process.assign(entry)
                else:
                    self._start(start, vacant.pop(), entry)
            if not any(process.finds_tasks for process in self._processes):
                while idle:
                    idle.pop().send(None)

        try:
            for number in range(self.num_workers):
                entry = next_task()
                if entry is None and not any(each.finds_tasks for each in self._processes):
                    break
                self._start(start, number, entry)
            self.close()
            while self._processes:
                process, kind, value = self._inbox.get()
                match kind:
                    case "ready":
                        on_event(WorkerReady(process.number, process.popen.pid, value))
                        if not process.tasks:
                            idle.append(process)
                            deal()
                    case "report" if isinstance(value, FoundTask):
                        if value.name not in names:
                            names.add(value.name)
                            waiting.append((next(numbers), value.task))
                            deal()
                    case "report":
                        on_event(TaskReport(process.number, value))
                    case "done":
                        task, result = value
                        on_event(TaskDone(process.number, process.tasks.pop(task), result))
                        deal()
                    case "free":
                        idle.append(process)
                        deal()
                    case "error":
                        error, trace = value
                        error.add_note(f"in worker {process.number}:\n{trace}")
                        raise error
                    case "gone":
                        self._processes.remove(process)
                        idle[:] = (each for each in idle if each is not process)
                        reason = _exit_reason(process)
                        for number, task in process.tasks.items():
                            on_event(WorkerLost(process.number, task, reason))
                            attempts[number] += 1
                            if attempts[number] >= self.max_attempts:
                                raise _lost_too_often(self.max_attempts, task, reason)
                            waiting.appendleft((number, task))
                        # Also after a normal end: another worker may have been lost since this one
                        # was let go.
                        vacant.append(process.number)
                        deal()
        finally:
            self.close()
            for process in self._processes:
                process.popen.kill()
            for process in self._processes:
                process.popen.wait()
            self._processes.clear()

    def _spawn(self, number: int, modules: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        arguments = map(json.dumps, (sys.path, modules))
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.environment},
        )
        if self.cores is not None:
            os.sched_setaffinity(popen.pid, self.cores[number % len(self.cores)])
        return popen

    def _start(self, start: Start, number: int, entry: tuple[int, Any] | None) -> None:
        popen = self._ahead.pop(number, None)
        process = _Process(number, popen or self._spawn(number))
        self._processes.append(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        process.send(start)
        if entry is not None:
            process.assign(entry)

    def _listen(self, process: _Process) -> None:
        assert process.popen.stdout is not None
        with contextlib.suppress(*_ENDED):
            while True:
                self._inbox.put((process, *pickle.load(process.popen.stdout)))
        self._inbox.put((process, "gone", None))


def _exit_reason(process: _Process) -> str:
    """How a process ended; BuildError where it would end so again."""
    code = process.popen.wait()
    reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    if code == -signal.SIGABRT and process.tasks:
        task = next(iter(process.tasks.values()))
        raise BuildError(
            f"a worker ended itself ({reason}) while it worked on {task}; "
            "native code does so when it gets no more memory, and it would do so again",
            hint="allow more with a larger --memory or fewer --workers, or leave the file "
            "out; what the worker said last stands above",
        )
    return reason


def _lost_too_often(count: int, task: Any, reason: str) -> BuildError:
    return BuildError(
        f"{count} workers died one after the other on the same task ({task}), the last one "
        f"{reason}; going on would only lose more of them",
        hint="look for a memory limit of the machine or container (signal 9 usually means "
        "that), lower --workers or --memory, and run the same command again",
    )


# -------------------------------------------------------------------------------------------------
# What a worker process runs.
#
# A fresh interpreter started by name, not by `multiprocessing`: a user's script needs no `if
# __name__ == "__main__"` guard, and nothing of the parent (threads, locks, thread pools) is
# inherited. Messages come on standard input and go to what was standard output; prints of
# libraries go to standard error.
#
# A worker never outlives its driver: the system ends it with its parent (on Linux), and the thread
# that reads standard input ends the process when that closes, however the driver died.

_PR_SET_PDEATHSIG = 1


def end_with_parent(_number: int = 0) -> None:
    """Have the system end this process when the thread that started it ends; only Linux can.

    Unlike a thread that waits for that, it also ends a process that is stopped, or in native code.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_child(*modules: str) -> None:
    """Serve the driver at the other end of standard input until it is done or gone.

    The modules are imported first: it may be a while until there is work.
    """
    end_with_parent()
    # Ctrl-C goes to the whole group of processes; the driver alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outbox = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)
    for module in modules:
        with contextlib.suppress(Exception):  # whoever needs it says what is wrong
            importlib.import_module(module)
    _serve(sys.stdin.buffer, outbox)
    # Not sys.exit: joining would wait for library threads, and the reader still blocks on its pipe.
    os._exit(0)


def _serve(pipe: IO[bytes], outbox: IO[bytes]) -> None:
    lock = threading.Lock()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(*_ENDED):
            while True:
                inbox.put(pickle.load(pipe))
        os._exit(0)

    def send(kind: str, value: Any) -> None:
        body = pickle.dumps((kind, value))
        with lock:
            outbox.write(body)
            outbox.flush()

    def fail(error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        try:
            send("error", (error, trace))
        except Exception:  # an error that cannot be pickled still has its words
            send("error", (RuntimeError(f"{type(error).__name__}: {error}"), trace))

    def settle(number: int, future: Future[Any]) -> None:
        if (error := future.exception()) is None:
            send("done", (number, future.result()))
        else:
            fail(error)

    try:
        start: Start = pickle.load(pipe)
        threading.Thread(target=receive, daemon=True).start()
        worker = start()
        send("ready", worker.ready())
        while (message := inbox.get()) is not None:
            number, task = message
            outcome = worker.work(task, lambda value: send("report", value))
            if isinstance(outcome, Future):
                outcome.add_done_callback(functools.partial(settle, number))
            else:
                send("done", (number, outcome))
            send("free", None)
        worker.close()
    except BaseException as error:  # the end of the process: everything is told to the driver
        fail(error)


class SerialRunner:
    """One worker, this process: for debuggers, profilers and tests."""

    num_workers = 1

    def run(self, start: Start, tasks: Iterable[Any], *, on_event: OnEvent) -> None:
        """Carry out every task in order."""
        with closing(start()) as worker:
            on_event(WorkerReady(0, os.getpid(), worker.ready()))
            for task in tasks:
                result = worker.work(task, lambda value: on_event(TaskReport(0, value)))
                if isinstance(result, Future):
                    result = result.result()
                on_event(TaskDone(0, task, result))


# -------------------------------------------------------------------------------------------------
# Which cores the workers should have: physical ones, NUMA node by node.

_NODES, _CPUS = Path("/sys/devices/system/node"), Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Physical cores that this process may use; at least 1."""
    usable = usable_cores()
    logical = psutil.cpu_count(logical=True) or len(usable)
    physical = psutil.cpu_count(logical=False) or logical
    # In a container that may use some of the cores, take the machine's ratio of the two.
    return max(1, min(len(usable), round(len(usable) * physical / logical)))


def pinning(num_workers: int) -> list[list[int]] | None:
    """A core for each worker, one NUMA node after the other; None where cores cannot be bound."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    usable = usable_cores()
    nodes = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    cores = [core for node in nodes for core in _parse_list(node.read_text())]
    order = [core for core in cores if core in usable] or sorted(usable)
    siblings = {core: _CPUS / f"cpu{core}/topology/thread_siblings_list" for core in order}
    first_threads = [
        core
        for core, path in siblings.items()
        if not path.exists() or _parse_list(path.read_text())[0] == core
    ] or order
    return [[first_threads[i % len(first_threads)]] for i in range(num_workers)]


def usable_cores() -> set[int]:
    """Cores that this process may use, threads of a core counted one by one."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _parse_list(text: str) -> list[int]:
    """'0-3,8' as the kernel writes it."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return cores
