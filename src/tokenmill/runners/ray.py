"""Tasks on a Ray cluster: the one at an address, or one on this machine.

    batches of tasks  ->  Ray tasks, no more in flight than twice what can run  ->  their last word
                          reports on the way  ->  mailbox (an actor)  ->  events

Where a task runs, when it waits, and that it runs again elsewhere when its worker or its node is
lost, is Ray's business (`num_cpus`, `max_retries`). This module hands out batches, so that
committing one unit overlaps with encoding the next and a million units are fewer Ray tasks, passes
on what it hears, and at the end of a run starts a second copy of tasks that take far longer than
others. A task that runs twice commits the same bytes twice, which a store takes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from tokenmill.errors import BuildError, importing
from tokenmill.runners import local
from tokenmill.visible import VisibleStream, guarded

with importing("ray", extra="ray", purpose="building on a Ray cluster"):
    import ray
    from ray import exceptions as ray_errors
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Shorter than a build waits for the workers of the one before it.
IDLE_SECONDS = 3.0
# Between two messages of a worker: a thousand of them must not keep one driver busy.
SEND_SECONDS = 1.0
# How often Ray starts a task again whose worker or node was lost.
MAX_RETRIES = 3
MAX_BATCH = 8
# So many batches for each slot at least, or the last ones would keep the build waiting.
BATCHES_PER_SLOT = 8
POLL_SECONDS = 0.5
CLUSTER_SECONDS = 5.0
COPY_FACTOR = 3.0
# A task is copied when it has run this long and COPY_FACTOR times as long as the median.
COPY_SECONDS = 30.0
STOP_SECONDS = 20.0
CONNECT_SECONDS = 10.0


class Message(NamedTuple):
    """What an attempt at a batch says: reports that were not sent yet; at its end all of them."""

    batch: int
    attempt: str
    host: str
    pid: int
    ready: Any  # what the worker said when it could start
    first: int  # of the reports, among all of the attempt
    reports: list[Any]
    memory_bytes: int
    cpu_percent: float
    results: Sequence[Any] = ()  # of its tasks, at its end: messages may be lost, this one is not


# -------------------------------------------------------------------------------------------------
# What a process of a Ray cluster runs.
#
# Ray keeps a process for the next task of the same job, so the worker (its engine, its locks) is
# made once and kept. Nothing tells such a process that a build is over: a worker that had no task
# for a moment is closed, and made again if there is another one after all.

_busy = threading.Lock()
_process = psutil.Process()
# Of which run, the worker, and what it said when it could start.
_kept: tuple[str, local.Worker, Any] | None = None
_timer: threading.Timer | None = None


def work_batch(
    order: tuple[str, local.Start, str], mailbox: Any, batch: int, tasks: Sequence[Any]
) -> Message:
    """Carry out some tasks in this process; done when all of them are committed.

    The order is that of a run: its name, what makes a worker, and the folder of the driver.
    """
    global _timer
    attempt, reports, lock = secrets.token_hex(8), list[Any](), threading.Lock()
    sent, last = 0, 0.0

    def message(first: int, results: list[Any]) -> Message:
        memory, percent = int(_process.memory_info().rss), _process.cpu_percent(None)
        said = (batch, attempt, socket.gethostname(), os.getpid(), ready, first, reports[first:])
        return Message(*said, memory, percent, results)

    def send() -> None:
        nonlocal sent, last
        mailbox.put.remote(message(sent, []))
        sent, last = len(reports), time.monotonic()

    def report(value: Any) -> None:
        with lock:  # a unit that is being committed reports from a thread of its own
            reports.append(value)
            if time.monotonic() - last >= SEND_SECONDS:
                send()

    with _busy:
        if _timer is not None:
            _timer.cancel()
        worker, ready = _worker(*order)
        try:
            send()
            outcomes = [worker.work(task, report) for task in tasks]
            results = [each.result() if isinstance(each, Future) else each for each in outcomes]
            return message(0, results)
        except BaseException:
            _forget()  # whatever it was, the next task begins afresh
            raise
        finally:
            _timer = threading.Timer(IDLE_SECONDS, _close_idle)
            _timer.daemon = True
            _timer.start()


def _worker(run: str, start: local.Start, folder: str) -> tuple[local.Worker, Any]:
    """The worker that this process keeps from one batch of a run to the next."""
    global _kept
    if _kept is None or _kept[0] != run:
        _forget()
        # A node without that folder may still see everything, if all names are URLs.
        with contextlib.suppress(OSError):
            os.chdir(folder)
        if not isinstance(sys.stderr, VisibleStream):  # Ray shows them where a driver wants it
            sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)
        worker = start()
        _kept = run, worker, worker.ready()
    return _kept[1:]


def _forget() -> None:
    global _kept
    kept, _kept = _kept, None
    if kept is not None:
        kept[1].close()


def _close_idle() -> None:
    # A batch that has begun meanwhile has the lock, and has cancelled the timer.
    if _busy.acquire(blocking=False):
        try:
            _forget()
        finally:
            _busy.release()


# -------------------------------------------------------------------------------------------------
# The driver's side.


class RayCluster:
    """A connection to a cluster; closing it ends one that it made."""

    def __init__(self, address: str | None, *, local_cpus: int) -> None:
        self._owned = not ray.is_initialized()
        if not self._owned:
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            options |= {"address": "local", "num_cpus": local_cpus, "include_dashboard": False}
        else:
            options["address"] = address
        try:
            # Where nobody listens at HOST:PORT, Ray itself would try for minutes.
            host, _, port = (address or "").rpartition("://")[2].rpartition(":")
            if host and port.isdigit():
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            ray.init(**options)
        except (ray_errors.RayError, RuntimeError, ValueError, OSError) as error:
            raise BuildError(
                f"there is no Ray cluster to work on at {address or 'this machine'!r}: "
                f"{_first_line(error)}",
                hint="start one with: ray start --head; or leave --address out to use this "
                "machine alone",
            ) from error

    def node_cpus(self) -> list[int]:
        """CPUs of each node that is alive."""
        nodes = (node for node in ray.nodes() if node["Alive"])
        return [int(node["Resources"].get("CPU", 0)) for node in nodes]

    def slots(self, cpus: int) -> int:
        """Tasks of so many CPUs that the cluster has room for; at least 1."""
        return max(1, sum(each // cpus for each in self.node_cpus()))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._owned:
            ray.shutdown()


class Mailbox:
    """Holds what workers say until the driver asks for it. An actor, on the driver's node."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def put(self, message: Message) -> None:
        self._messages.append(message)

    def take(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages


class _Flight(NamedTuple):
    """A batch that was given to Ray."""

    number: int
    tasks: Sequence[Any]
    since: float


@dataclass(eq=False)
class RayRunner:
    """Tasks on a Ray cluster: one run, what is in flight, and what was heard."""

    cluster: RayCluster
    num_workers: int
    max_workers: int | None = None
    cpus_per_task: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    copy_seconds: float = field(default_factory=lambda: COPY_SECONDS)

    def __post_init__(self) -> None:
        self._backlog: deque[tuple[int, Sequence[Any]]] = deque()
        self._flights: dict[Any, _Flight] = {}
        self._copied: set[int] = set()
        self._seconds: dict[int, float] = {}  # of each batch that is done
        self._workers: dict[tuple[str, int], int] = {}
        self._attempts: dict[int, dict[str, int]] = {}  # batch -> attempt -> reports passed on
        self._slots = 1
        self._looked_at = self._heard_at = 0.0
        self._nodes = self._place = ""

    def run(self, start: local.Start, tasks: Iterable[Any], *, on_event: local.OnEvent) -> None:
        """Carry out every task; raise the first error after stopping the rest."""
        self._on_event = on_event
        todo = list(tasks)
        size = min(max(len(todo) // (self.num_workers * BATCHES_PER_SLOT), 1), MAX_BATCH)
        self._backlog.extend(enumerate(todo[i : i + size] for i in range(0, len(todo), size)))
        # On the driver's node, so that it is lost with the driver alone.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        box = ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
        remote = ray.remote(work_batch).options(
            num_cpus=self.cpus_per_task,
            max_retries=MAX_RETRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {**self.environment}},
        )
        order = ray.put((secrets.token_hex(8), start, str(Path.cwd())))
        mailbox = box.remote()

        def launch(number: int, batch: Sequence[Any]) -> None:
            reference = remote.remote(order, mailbox, number, batch)
            self._flights[reference] = _Flight(number, batch, time.monotonic())

        try:
            while self._backlog or self._is_awaited():
                self._look_at_cluster()
                # Twice what can run: Ray always has a task to place, and an autoscaler sees the
                # demand.
                most = 2 * self._slots if self.max_workers is None else self.max_workers
                while self._backlog and len(self._flights) < most:
                    launch(*self._backlog.popleft())
                ray.wait([*self._flights], num_returns=1, timeout=POLL_SECONDS)
                self._listen(mailbox)
                # All that is done by now, so that a thousand workers do not wait for a turn each.
                flights = [*self._flights]
                for reference in ray.wait(flights, num_returns=len(flights), timeout=0)[0]:
                    self._land(reference)
                for flight in self._stragglers():
                    self._copied.add(flight.number)
                    launch(flight.number, flight.tasks)
        finally:
            # End what still runs, and wait for it: nothing may write when the build goes on.
            for reference in self._flights:
                ray.cancel(reference, force=True)
            if self._flights:
                flights = [*self._flights]
                ray.wait(flights, num_returns=len(flights), timeout=STOP_SECONDS)
            ray.kill(mailbox)

    def _is_awaited(self) -> bool:
        """Whether a batch has no result yet. Of one that has, a copy may never end: older versions
        of Ray (2.44 is one) ask its process to end, which one that stands still does not hear."""
        return any(each.number not in self._seconds for each in self._flights.values())

    def _land(self, reference: Any) -> None:
        flight = self._flights.pop(reference)
        if flight.number in self._seconds:
            return  # another copy was first
        copies = [other for other, each in self._flights.items() if each.number == flight.number]
        try:
            message: Message = ray.get(reference)
        except ray_errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                error.cause.add_note(f"on the Ray cluster:\n{error}")
                raise error.cause from None
            raise
        except ray_errors.RayError as error:
            if copies:
                return  # still at work
            raise _lost_too_often(flight.tasks[0], _first_line(error)) from error
        for other in copies:  # to wait for them at the end would be in vain
            ray.cancel(other, force=True)
        worker = self._hear(message, flight)
        self._seconds[flight.number] = time.monotonic() - flight.since
        self._attempts.pop(flight.number, None)
        for task, result in zip(flight.tasks, message.results, strict=True):
            self._on_event(local.TaskDone(worker, task, result))

    def _listen(self, mailbox: Any) -> None:
        """Pass on what workers said since the last time; silence is no error."""
        if time.monotonic() - self._heard_at < POLL_SECONDS:
            return
        self._heard_at = time.monotonic()
        messages: list[Message] = []
        with contextlib.suppress(ray_errors.RayError):
            messages = ray.get(mailbox.take.remote(), timeout=STOP_SECONDS)
        by_number = {flight.number: flight for flight in self._flights.values()}
        for message in messages:
            self._hear(message, by_number.get(message.batch))

    def _hear(self, message: Message, flight: _Flight | None) -> int:
        """Pass on what a worker said, and return its number."""
        key = message.host, message.pid
        if key not in self._workers:
            self._workers[key] = len(self._workers)
            said = message.pid, message.ready, message.host
            self._on_event(local.WorkerReady(self._workers[key], *said))
        worker = self._workers[key]
        self._on_event(local.WorkerUsage(worker, message.memory_bytes, message.cpu_percent))
        if message.batch in self._seconds:
            return worker
        attempts = self._attempts.setdefault(message.batch, {})
        # A batch that begins more often than it was given out has lost its worker.
        lost = len(attempts) - (message.batch in self._copied)
        if flight is not None and message.attempt not in attempts and lost > 0:
            why = "its process or its node is gone"
            self._on_event(local.WorkerLost(worker, flight.tasks[0], why))
            if lost > MAX_RETRIES:
                raise _lost_too_often(flight.tasks[0], "killed each time")
        sent = attempts.setdefault(message.attempt, 0)
        if message.first <= sent:
            for report in message.reports[sent - message.first :]:
                self._on_event(local.TaskReport(worker, report))
            attempts[message.attempt] = message.first + len(message.reports)
        return worker

    def _look_at_cluster(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= CLUSTER_SECONDS:
            self._looked_at = now
            cpus = self.cluster.node_cpus()
            self._slots = self.cluster.slots(self.cpus_per_task)
            self._nodes = f"{len(cpus)} node{'' if len(cpus) == 1 else 's'}, {sum(cpus)} CPUs"
        # What was given to Ray and has not spoken yet still waits for its turn.
        begun = sum(flight.number in self._attempts for flight in self._flights.values())
        if (place := f"{self._nodes}, {begun} at work") != self._place:
            self._place = place
            self._on_event(local.PlaceState(place))

    def _stragglers(self) -> list[_Flight]:
        """Slow batches, once nothing is left to hand out: a second worker gets them too."""
        if self._backlog or len(self._flights) >= self._slots or not self._seconds:
            return []
        limit = max(self.copy_seconds, COPY_FACTOR * statistics.median(self._seconds.values()))
        now = time.monotonic()
        return [
            flight
            for flight in self._flights.values()
            if flight.number not in self._copied and now - flight.since > limit
        ]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _lost_too_often(task: Any, reason: object) -> BuildError:
    return BuildError(
        f"{MAX_RETRIES + 1} workers of the cluster were lost one after the other on the same task "
        f"({task}): {reason}; going on would only lose more of them",
        hint="look for a memory limit of the nodes, lower --memory, and run the same command again",
    )
