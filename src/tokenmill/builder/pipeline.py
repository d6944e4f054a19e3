"""Threads around the encoder: one writes behind it and, for remote files, one reads ahead of it.

The calls that take the time (reading, encoding, hashing, writing, fsync) release the GIL, so they
really overlap. Queues hold one item each: that bounds memory, and more would not be faster. A local
file is read and parsed by the encoder's own thread: the kernel reads ahead by itself, there is a
worker for every core already, and a batch that one core has parsed is best encoded by that core
(with a thread of its own, builds from warm files were slower).
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

T = TypeVar("T")

_END = object()


class StageClock:
    """Seconds spent in each stage; a stage is timed by one thread at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def timed(self, stage: str, call: Callable[..., T], *arguments: Any) -> T:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.add(stage, time.perf_counter() - start)


def read_ahead(items: Iterable[T], *, clock: StageClock) -> Generator[T]:
    """The items, each fetched by a thread while the caller works on the one before.

    Time that the caller had to wait is counted as `wait`. Closing the iterator stops the thread
    before it returns, so the source can be used again at once.
    """
    handover: queue.Queue[Any] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def offer(value: Any) -> bool:
        while not stopped.is_set():
            try:
                handover.put(value, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def fetch() -> None:
        try:
            for item in items:
                if not offer((item, None)):
                    return
            offer((_END, None))
        except BaseException as error:  # handed to the caller, who raises it
            offer((_END, error))

    thread = threading.Thread(target=fetch, name="tokenmill-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = clock.timed("wait", handover.get)
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()


class WriteBehind:
    """Runs calls one after the other on a thread of its own, at most two ahead of it.

    As a context manager it ends with all calls done; the first error of a call is raised by the
    next `submit` or at the end, and the calls behind it are dropped.
    """

    def __init__(self, clock: StageClock) -> None:
        self._clock = clock
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name="tokenmill-write-behind", daemon=True
        )

    def __enter__(self) -> WriteBehind:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._queue.put(_END)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._error is not None:
            raise self._error
        self._clock.timed("wait", self._queue.put, (call, arguments))

    def _run(self) -> None:
        while (entry := self._queue.get()) is not _END:
            if self._error is None:
                call, arguments = entry
                try:
                    self._clock.timed("write", call, *arguments)
                except BaseException as error:  # raised by the thread that submits
                    self._error = error
            # A batch must not stay alive while the thread waits for the next one.
            entry = call = arguments = None
