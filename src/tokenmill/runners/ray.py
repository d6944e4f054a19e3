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

import secrets
import socket
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import BuildError, MissingExtraError
from tokenmill.runners.base import (
    Job,
    OnEvent,
    PlaceState,
    TaskDone,
    TaskReport,
    WorkerLost,
    WorkerReady,
    WorkerUsage,
)
from tokenmill.runners.ray_worker import Message, Order, Outcome, work_batch

try:
    import ray
    from ray import exceptions as ray_errors
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingExtraError("ray", extra="ray", purpose="building on a Ray cluster") from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tokenmill.runners.ray_worker import Identity

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
            order=ray.put(Order(session=secrets.token_hex(8), job=job, folder=str(Path.cwd()))),
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
