"""Where tasks run, and what is heard of them: this process, or a pool of processes here.

Runners know nothing of text or tokens. They are given a callable without arguments that makes a
`Worker` in each process (a class with its arguments, by `functools.partial`). It, the tasks, their
results and reports are pickled, so they are small values, never data.

    runner.run(start, tasks, on_event)    returns when all tasks are done, raises when one failed

Each worker of the pool is a process with a thread here that reads its messages into one queue. On
Linux all of them are forked from one fresh interpreter that has imported and loaded what they need
and has no threads (`ForkServer`); elsewhere each is a fresh interpreter. A worker that dies (killed
for memory, crashed in native code) is replaced and its task is given out again; a task that loses
`max_attempts` workers is an error, since it would kill every worker in turn.

A task may find others: what it reports as a `FoundTask` is given out before the tasks that are
left, those with the smallest `place` first. Such a task has `finds_tasks`, and while one runs no
worker is let go.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

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


# Where it has a method `prepare`, that is called once in the process that workers are forked from.
Start = Callable[[], Worker]
Event = WorkerReady | TaskReport | TaskDone | WorkerLost | WorkerUsage | PlaceState
OnEvent = Callable[[Event], None]

# Not `-m`: that would put the working folder first on the path, where a user's own `tokenizers/` or
# `random.py` would be imported instead. The child sees what this process sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tokenmill.runners import local; getattr(local, sys.argv[2])(*json.loads(sys.argv[3]))"
)
# A pipe that ended, even inside a message.
_ENDED = (EOFError, OSError, pickle.UnpicklingError)


def _launch(
    function: str, modules: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs a function of this module."""
    arguments = json.dumps(sys.path), function, json.dumps(modules)
    command = [sys.executable, "-P", "-c", _BOOT, *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment}, **streams)


class _Child(Protocol):
    """What is asked of a worker's process, however it was started."""

    pid: int

    def kill(self) -> None: ...
    def wait(self) -> int: ...


@dataclass(eq=False, slots=True)
class _Process:
    """One worker process and what it is doing."""

    number: int
    child: _Child
    reader: IO[bytes]
    writer: IO[bytes]
    # Given to it and not done: the one it works on, and one that it may still be committing.
    tasks: dict[int, Any] = field(default_factory=dict)
    listener: threading.Thread | None = None

    def send(self, message: Any) -> None:
        # An error here means that it died just now; its reader thread is about to say so.
        with contextlib.suppress(OSError):
            self.writer.write(pickle.dumps(message))
            self.writer.flush()

    def assign(self, entry: tuple[int, Any]) -> None:
        self.tasks[entry[0]] = entry[1]
        self.send(entry)

    @property
    def finds_tasks(self) -> bool:
        return any(getattr(task, "finds_tasks", False) for task in self.tasks.values())

    def close(self) -> None:
        """After its end: once all that it said is read, no thread of it is in the system either."""
        if self.listener is not None:
            self.listener.join()
        for pipe in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                pipe.close()


def _send(link: socket.socket, message: Any, *numbers: int) -> None:
    """Send a message, and files of this process with it."""
    body = pickle.dumps(message)
    size = len(body).to_bytes(8, "little")
    if numbers:
        socket.send_fds(link, [size], numbers)
    else:
        link.sendall(size)
    link.sendall(body)


def _receive(link: socket.socket) -> tuple[Any, list[int]]:
    size, numbers, *_ = socket.recv_fds(link, 8, 1)
    left, parts = int.from_bytes(size, "little"), list[bytes]()
    while left or not size:
        part = link.recv(left)
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return pickle.loads(b"".join(parts)), numbers


@dataclass(slots=True)
class _Forked:
    """A worker that the server forked; it ends with the server."""

    server: ForkServer
    pid: int

    def kill(self) -> None:
        self.server.close()

    def wait(self) -> int:
        return self.server.ended[self.pid].result()


class ForkServer:
    """A process that imports and loads what workers need, and forks them; see `run_server`."""

    is_possible = sys.platform == "linux" and hasattr(os, "pidfd_open")

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._popen = _launch("run_server", modules, environment, stdin=theirs)
        self._start: Start | None = None
        self._forked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # Process -> how it ended; `is_gone` once the server has ended itself.
        self.ended: dict[int, Future[int]] = {}
        self.is_gone = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def call(self, function: Callable[[], object]) -> None:
        """Have it call something ahead of its work; what comes of an error is the work's affair."""
        with contextlib.suppress(OSError):
            _send(self._link, ("call", function))

    def fork(self, start: Start, *, alone: bool) -> tuple[_Child, socket.socket] | None:
        """A worker and the line to it; None where there cannot be one.

        One that is `alone` is the server itself, which then forks no others.
        """
        if alone and self._start is not None:
            return None
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            if start is not self._start:
                self._start = start
                _send(self._link, ("start", pickle.dumps(start)))
            _send(self._link, ("become" if alone else "fork", None), theirs.fileno())
        if alone:
            return self._popen, ours
        if self.is_gone or (pid := self._forked.get()) is None:
            ours.close()
            return None
        return _Forked(self, pid), ours

    def close(self) -> None:
        """End it, and with it all workers that it forked."""
        self._popen.kill()
        self._popen.wait()
        self._listener.join()
        self._link.close()

    def _listen(self) -> None:
        with contextlib.suppress(*_ENDED):
            while True:
                (kind, pid, code), _ = _receive(self._link)
                if kind == "ended":
                    self.ended[pid].set_result(code)
                    continue
                self.ended[pid] = Future()
                self._forked.put(pid)
        code = self._popen.wait()
        self.is_gone = True
        self._forked.put(None)
        for outcome in self.ended.values():
            if not outcome.done():
                outcome.set_result(code)


_waiting: list[ForkServer] = []


@contextlib.contextmanager
def server_ahead(modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Start a server for the next runner before what makes the runner is even imported."""
    server = ForkServer(modules, environment) if ForkServer.is_possible else None
    if server is not None:
        _waiting.append(server)
    try:
        yield
    finally:
        if server in _waiting:
            _waiting.remove(server)
            server.close()


@dataclass(eq=False, slots=True)
class LocalRunner:
    """Worker processes on this machine, one task at a time each."""

    num_workers: int
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: Sequence[Sequence[int]] | None = None
    max_attempts: int = 3
    forks: bool = ForkServer.is_possible
    _inbox: queue.SimpleQueue[tuple[Any, str, Any]] = field(default_factory=queue.SimpleQueue)
    _processes: list[_Process] = field(default_factory=list)
    _ahead: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _server: ForkServer | None = None

    def start_ahead(self, count: int, modules: Sequence[str]) -> None:
        """Start processes that import the modules while their work is still being planned."""
        if not self.forks:
            self._ahead += [self._fresh(modules) for _ in range(min(count, self.num_workers))]
        elif self._server is None:
            self._server = _waiting.pop() if _waiting else ForkServer((), self.environment)
            self._server.call(functools.partial(_import_all, modules))

    def call_ahead(self, function: Callable[[], object]) -> None:
        """Have the process that workers are forked from, if there is one, load something."""
        if self._server is not None:
            self._server.call(function)

    def close(self) -> None:
        """End the processes that were started ahead and got no work."""
        for popen in self._ahead:
            popen.kill()
        for popen in self._ahead:
            popen.communicate()  # closes the pipes and waits
        self._ahead.clear()
        if self._server is not None:
            self._server.close()
            self._server = None

    def stop(self) -> None:
        """Have `run` end its processes and raise; for other threads than the one that runs."""
        self._inbox.put((None, "stop", BuildError("the run of these tasks was stopped")))

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
                first = min(waiting, key=lambda entry: getattr(entry[1], "place", 0))
                waiting.remove(first)
                return first
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
            self.start_ahead(0, ())
            for number in range(self.num_workers):
                entry = next_task()
                if entry is None and not any(each.finds_tasks for each in self._processes):
                    break
                self._start(start, number, entry)
            while self._processes:
                process, kind, value = self._inbox.get()
                match kind:
                    case "ready":
                        on_event(WorkerReady(process.number, process.child.pid, value))
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
                    case "stop":
                        raise value
                    case "gone":
                        self._processes.remove(process)
                        idle[:] = (each for each in idle if each is not process)
                        reason = _exit_reason(process)
                        process.close()
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
            for process in self._processes:
                process.child.kill()
            for process in self._processes:
                process.child.wait()
                process.close()
            self._processes.clear()
            self.close()

    def _fresh(self, modules: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return _launch("run_child", modules, self.environment, **pipes)

    def _start(self, start: Start, number: int, entry: tuple[int, Any] | None) -> None:
        forked = None
        if self._server is not None:
            forked = self._server.fork(start, alone=self.num_workers == 1)
        if forked is not None:
            child, line = forked
            process = _Process(number, child, line.makefile("rb"), line.makefile("wb"))
            line.close()  # when both files are
        else:
            popen = self._ahead.pop() if self._ahead else self._fresh()
            assert popen.stdin is not None
            assert popen.stdout is not None
            process = _Process(number, popen, popen.stdout, popen.stdin)
            process.send(start)
        if self.cores is not None:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.child.pid, self.cores[number % len(self.cores)])
        self._processes.append(process)
        process.listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        process.listener.start()
        if entry is not None:
            process.assign(entry)

    def _listen(self, process: _Process) -> None:
        with contextlib.suppress(*_ENDED):
            while True:
                self._inbox.put((process, *pickle.load(process.reader)))
        self._inbox.put((process, "gone", None))


def _exit_reason(process: _Process) -> str:
    """How a process ended; BuildError where it would end so again."""
    code = process.child.wait()
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
# What a worker process runs, and the process that workers are forked from.
#
# A fresh interpreter started by name, not by `multiprocessing`: a user's script needs no `if
# __name__ == "__main__"` guard, and nothing of the parent (threads, locks, thread pools) is
# inherited. Messages come on standard input and go to what was standard output, or both on one
# socket; prints of libraries go to standard error.
#
# A worker never outlives its driver: the system ends it with its parent (on Linux), and the thread
# that reads its messages ends the process when they end, however the driver died.

_PR_SET_PDEATHSIG = 1


def end_with_parent(_number: int = 0) -> None:
    """Have the system end this process when the thread that started it ends; only Linux can.

    Unlike a thread that waits for that, it also ends a process that is stopped, or in native code.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _NoPandas:
    """Has a worker be without pandas, where it is installed.

    Arrow imports it with the first array that it makes, in case that is made of what is pandas's.
    That takes long, for what no worker has.
    """

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("workers are without pandas", name=name)


def _settle_in() -> None:
    end_with_parent()
    # Ctrl-C goes to the whole group of processes; the driver alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.meta_path.insert(0, _NoPandas())
    # A worker writes and commits beside its encoding: a thread that has waited for the interpreter
    # need not wait five milliseconds more.
    sys.setswitchinterval(0.0005)
    os.dup2(2, 1)
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # whoever needs it says what is wrong
            importlib.import_module(module)


def run_child(*modules: str) -> None:
    """Serve the driver at the other end of standard input until it is done or gone.

    The modules are imported first: it may be a while until there is work.
    """
    outbox = os.fdopen(os.dup(1), "wb")
    _settle_in()
    _import_all(modules)
    pipe = sys.stdin.buffer
    _serve(lambda: pickle.load(pipe), pipe, outbox)
    # Not sys.exit: joining would wait for library threads, and the reader still blocks on its pipe.
    os._exit(0)


def run_server(*modules: str) -> None:
    """Fork workers for the driver at the other end of standard input, and tell how they end.

    Where this process comes to have more than one thread, whatever library starts it, the driver is
    told that there is no worker, and starts fresh interpreters.
    """
    link = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _settle_in()
    _import_all(modules)
    files = select.poll()
    files.register(link, select.POLLIN)
    workers: dict[int, int] = {}  # a file that stands for the process -> its number
    make: Callable[[], Start] = functools.partial(pickle.loads, b"")
    while True:
        for number, _ in files.poll():
            if number in workers:
                files.unregister(number)
                os.close(number)
                ended, status = os.waitpid(workers.pop(number), 0)
                _send(link, ("ended", ended, os.waitstatus_to_exitcode(status)))
                continue
            try:
                (kind, value), lines = _receive(link)
            except _ENDED:
                os._exit(0)
            if kind == "call":
                with contextlib.suppress(BaseException):
                    value()
            elif kind == "start":
                make = _prepared(value)
            elif (pid := 0 if kind == "become" else fork()) != 0:
                os.close(lines[0])
                if pid is not None:
                    workers[file := os.pidfd_open(pid)] = pid
                    files.register(file, select.POLLIN)
                _send(link, ("forked", pid, 0))
            else:
                try:
                    link.close()
                    for file in workers:
                        os.close(file)
                    with socket.socket(fileno=lines[0]) as line:
                        _serve(make, line.makefile("rb"), line.makefile("wb"))
                finally:
                    os._exit(0)


def fork() -> int | None:
    """Fork this process into one that ends with it; None where that is not safe, or impossible.

    A fork copies the thread that asks for it alone: locks that others hold would never be released
    in the copy.
    """
    own = os.getpid()
    with contextlib.suppress(OSError):
        if len(list(Path("/proc/self/task").iterdir())) == 1:
            if pid := os.fork():
                return pid
            end_with_parent()
            if os.getppid() != own:
                os._exit(0)
            return 0
    return None


def answer_apart(question: Callable[[], bool]) -> Callable[[], bool]:
    """Have a fork of this process find an answer; gives what waits for it, here and in forks.

    The answer is no where that process fails or ends. Where there can be none, it is found here.
    """
    ours, theirs = socket.socketpair()
    pid = fork()
    if pid is None:
        answer = question()
        return lambda: answer
    if pid == 0:
        try:
            if question():
                theirs.send(b"y")
        finally:
            os._exit(0)
    theirs.close()
    return lambda: bool(ours.recv(1, socket.MSG_PEEK))


def _prepared(body: bytes) -> Callable[[], Start]:
    """Gives the start that was sent, prepared; where that fails the worker tries it and says so."""
    try:
        start: Start = pickle.loads(body)
        getattr(start, "prepare", lambda: None)()
    except BaseException:
        return functools.partial(pickle.loads, body)
    # What is alive now is shared with the workers, as long as nobody writes to it.
    gc.freeze()
    return lambda: start


def _serve(make: Callable[[], Start], pipe: IO[bytes], outbox: IO[bytes]) -> None:
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
        start = make()
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
    import psutil

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
