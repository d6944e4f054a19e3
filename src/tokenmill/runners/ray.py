"""Tasks on a Ray cluster: the one at an address, or one on this machine.

    batches of tasks  ->  Ray tasks, no more in flight than twice what can run  ->  outcomes
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
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tokenmill.errors import BuildError, MissingExtraError
from tokenmill.runners.local import (
    Job,
    OnEvent,
    PlaceState,
    TaskDone,
    TaskReport,
    WorkerLost,
    WorkerReady,
    WorkerUsage,
    resolve,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tokenmill.runners.local import Worker


# -------------------------------------------------------------------------------------------------
# The worker side of the Ray runner: what a process of a Ray cluster runs.
#
# Ray keeps a process for the next task of the same job, so the worker (its engine, its locks) is
# made once and kept. Nothing tells such a process that a build is over: a worker that had no task
# for a moment is closed, and made again if there is another one after all.
#
# This module does not import Ray; it is given the driver's mailbox and calls it.

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
class WorkOrder:
    """What all batches of a run have in common."""

    session: str
    job: Job
    folder: str
    """Where the driver works: names of files may be relative to it."""


def work_batch(order: WorkOrder, mailbox: Any, batch: int, tasks: Sequence[Any]) -> Outcome:
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

    def get(self, order: WorkOrder) -> tuple[Identity, Worker]:
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


try:
    import ray
    from ray import exceptions as ray_errors
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingExtraError("ray", extra="ray", purpose="building on a Ray cluster") from error


MAX_RETRIES = 3
"""How often Ray starts a task again whose worker or node was lost."""
MAX_BATCH = 8
BATCHES_PER_SLOT = 8
"""So many batches for each slot at least, or the last ones would keep the build waiting."""
POLL_SECONDS = 0.5
CLUSTER_SECONDS = 5.0
COPY_FACTOR = 3.0
COPY_SECONDS = 30.0
"""A task is copied when it has run this long and COPY_FACTOR times as long as the median."""
STOP_SECONDS = 20.0
CONNECT_SECONDS = 10.0


class RayCluster:
    """A connection to a cluster; as a context manager it ends one that it made."""

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
            _require_listener(address)
            ray.init(**options)
        except (ray_errors.RayError, RuntimeError, ValueError, OSError) as error:
            raise BuildError(
                f"there is no Ray cluster to work on at {address or 'this machine'!r}: "
                f"{_first_line(error)}",
                hint="start one with: ray start --head; or leave --address out to use this "
                "machine alone",
            ) from error

    def node_cpus(self) -> int:
        """CPUs of the largest node; at least 1."""
        return max((int(node["Resources"].get("CPU", 0)) for node in _alive()), default=1) or 1

    def slots(self, cpus: int) -> int:
        """Tasks of so many CPUs that the cluster has room for; at least 1."""
        return max(1, sum(int(node["Resources"].get("CPU", 0)) // cpus for node in _alive()))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._owned:
            ray.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_listener(address: str | None) -> None:
    """OSError where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


class Mailbox:
    """Holds what workers say until the driver asks for it. An actor, on the driver's node."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def put(self, message: Message) -> None:
        self._messages.append(message)

    def take(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages


class RayRunner:
    """Tasks on a Ray cluster."""

    def __init__(
        self,
        cluster: RayCluster,
        *,
        num_workers: int,
        max_workers: int | None = None,
        cpus_per_task: int = 1,
        environment: Mapping[str, str] | None = None,
        copy_seconds: float | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._cluster = cluster
        self._max_workers = max_workers
        self._cpus = cpus_per_task
        self._environment = dict(environment or {})
        self._copy_seconds = COPY_SECONDS if copy_seconds is None else copy_seconds

    def run(self, job: Job, tasks: Iterable[Any], *, on_event: OnEvent) -> None:
        """Carry out every task; raise the first error after stopping the rest."""
        backlog = list(tasks)
        size = len(backlog) // (self.num_workers * BATCHES_PER_SLOT)
        size = min(max(size, 1), MAX_BATCH)
        batches = deque(backlog[i : i + size] for i in range(0, len(backlog), size))
        run = _Run(
            cluster=self._cluster,
            remote=ray.remote(work_batch).options(
                num_cpus=self._cpus,
                max_retries=MAX_RETRIES,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": self._environment},
            ),
            order=ray.put(WorkOrder(session=secrets.token_hex(8), job=job, folder=str(Path.cwd()))),
            mailbox=_start_mailbox(),
            cpus=self._cpus,
            max_workers=self._max_workers,
            backlog=deque(enumerate(batches)),
            on_event=on_event,
            copy_seconds=self._copy_seconds,
        )
        try:
            run.until_done()
        finally:
            run.stop()


@dataclass(eq=False, slots=True)
class _Flight:
    """A batch that was given to Ray."""

    number: int
    tasks: Sequence[Any]
    since: float


@dataclass(kw_only=True, slots=True)
class _Run:
    """One run: what is in flight, and what was heard."""

    cluster: RayCluster
    remote: Any
    order: Any
    cpus: int
    max_workers: int | None
    backlog: deque[tuple[int, Sequence[Any]]]
    on_event: OnEvent
    mailbox: Any
    flights: dict[Any, _Flight] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    copy_seconds: float = COPY_SECONDS
    seconds: list[float] = field(default_factory=list)
    workers: dict[tuple[str, int], int] = field(default_factory=dict)
    attempts: dict[int, set[str]] = field(default_factory=dict)
    delivered: dict[str, int] = field(default_factory=dict)
    _slots: int = 1
    _looked_at: float = 0.0
    _heard_at: float = 0.0
    _nodes: str = ""
    _place: str = ""

    def until_done(self) -> None:
        while self.backlog or self.flights:
            self._look_at_cluster()
            self._submit()
            ray.wait([*self.flights], num_returns=1, timeout=POLL_SECONDS)
            self._listen()
            for reference in self._landed():
                self._land(reference)
            if not self.backlog:
                self._copy_stragglers()

    def _landed(self) -> list[Any]:
        """All that is done by now, so that a thousand workers do not wait for a turn each."""
        references = [*self.flights]
        return list(ray.wait(references, num_returns=len(references), timeout=0)[0])

    def stop(self) -> None:
        """End what still runs, and wait for it: nothing may write when the build goes on."""
        for reference in self.flights:
            ray.cancel(reference, force=True)
        if self.flights:
            ray.wait([*self.flights], num_returns=len(self.flights), timeout=STOP_SECONDS)
        ray.kill(self.mailbox)

    def _submit(self) -> None:
        # Twice what can run: Ray always has a task to place, and an autoscaler sees the demand.
        most = 2 * self._slots if self.max_workers is None else self.max_workers
        while self.backlog and len(self.flights) < most:
            self._start(_Flight(*self.backlog.popleft(), since=time.monotonic()))

    def _start(self, flight: _Flight) -> None:
        reference = self.remote.remote(self.order, self.mailbox, flight.number, flight.tasks)
        self.flights[reference] = flight

    def _land(self, reference: Any) -> None:
        flight = self.flights.pop(reference)
        if flight.number in self.done:
            return  # another copy was first
        outcome = self._outcome(reference, flight)
        if outcome is None:
            return
        self.done.add(flight.number)
        self._drop_copies(flight.number)
        self.seconds.append(time.monotonic() - flight.since)
        worker = self._greet(outcome.worker)
        self._note_attempt(flight, outcome.attempt, worker)
        self.attempts.pop(flight.number, None)
        for report in outcome.reports[self.delivered.pop(outcome.attempt, 0) :]:
            self.on_event(TaskReport(worker, report))
        for task, result in zip(flight.tasks, outcome.results, strict=True):
            self.on_event(TaskDone(worker, task, result))

    def _drop_copies(self, number: int) -> None:
        """End the other copy of a batch that is done; `stop` would wait for it in vain."""
        for reference, flight in self.flights.items():
            if flight.number == number:
                ray.cancel(reference, force=True)

    def _outcome(self, reference: Any, flight: _Flight) -> Outcome | None:
        """What came of a batch; None where another copy of it is still at work."""
        try:
            outcome: Outcome = ray.get(reference)
        except ray_errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                error.cause.add_note(f"on the Ray cluster:\n{error}")
                raise error.cause from None
            raise
        except ray_errors.RayError as error:
            if any(other.number == flight.number for other in self.flights.values()):
                return None
            raise _lost_too_often(flight.tasks[0], _first_line(error)) from error
        return outcome

    def _listen(self) -> None:
        """Pass on what workers said since the last time; silence is no error."""
        if time.monotonic() - self._heard_at < POLL_SECONDS:
            return
        self._heard_at = time.monotonic()
        try:
            messages: list[Message] = ray.get(self.mailbox.take.remote(), timeout=STOP_SECONDS)
        except ray_errors.RayError:
            return
        for message in messages:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        worker = self._greet(message.worker)
        self.on_event(WorkerUsage(worker, message.memory_bytes, message.cpu_percent))
        if message.batch in self.done:
            return
        flight = next(
            (each for each in self.flights.values() if each.number == message.batch), None
        )
        if flight is not None:
            self._note_attempt(flight, message.attempt, worker)
        sent = self.delivered.get(message.attempt, 0)
        if message.first <= sent:
            for report in message.reports[sent - message.first :]:
                self.on_event(TaskReport(worker, report))
            self.delivered[message.attempt] = message.first + len(message.reports)

    def _note_attempt(self, flight: _Flight, attempt: str, worker: int) -> None:
        """A batch that begins more often than it was given out has lost its worker."""
        attempts = self.attempts.setdefault(flight.number, set())
        if attempt in attempts:
            return
        attempts.add(attempt)
        lost = len(attempts) - 1 - (flight.number in self.copied)
        if lost < 1:
            return
        self.on_event(WorkerLost(worker, flight.tasks[0], "its process or its node is gone"))
        if lost > MAX_RETRIES:
            raise _lost_too_often(flight.tasks[0], "killed each time")

    def _greet(self, identity: Identity) -> int:
        if identity.key not in self.workers:
            number = self.workers[identity.key] = len(self.workers)
            self.on_event(WorkerReady(number, identity.pid, identity.ready, host=identity.host))
        return self.workers[identity.key]

    def _look_at_cluster(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= CLUSTER_SECONDS:
            self._looked_at = now
            nodes = _alive()
            self._slots = self.cluster.slots(self.cpus)
            cpus = sum(int(node["Resources"].get("CPU", 0)) for node in nodes)
            plural = "" if len(nodes) == 1 else "s"
            self._nodes = f"{len(nodes)} node{plural}, {cpus} CPUs"
        # What was given to Ray and has not spoken yet still waits for its turn.
        begun = sum(flight.number in self.attempts for flight in self.flights.values())
        if (place := f"{self._nodes}, {begun} at work") != self._place:
            self._place = place
            self.on_event(PlaceState(place))

    def _copy_stragglers(self) -> None:
        """Once nothing is left to hand out, give slow batches to a second worker."""
        if len(self.flights) >= self._slots or not self.seconds:
            return
        limit = max(self.copy_seconds, COPY_FACTOR * statistics.median(self.seconds))
        now = time.monotonic()
        for flight in [*self.flights.values()]:
            if flight.number not in self.copied and now - flight.since > limit:
                self.copied.add(flight.number)
                self._start(_Flight(flight.number, flight.tasks, since=now))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _start_mailbox() -> Any:
    """Where the driver is, so that it is lost with the driver alone."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    return ray.remote(Mailbox).options(**options).remote()


def _lost_too_often(task: Any, reason: object) -> BuildError:
    return BuildError(
        f"{MAX_RETRIES + 1} workers of the cluster were lost one after the other on the same task "
        f"({task}): {reason}; going on would only lose more of them",
        hint="look for a memory limit of the nodes, lower --memory, and run the same command again",
    )
