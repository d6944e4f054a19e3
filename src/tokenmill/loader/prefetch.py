"""Reads ahead in a thread, where that pays: items are made while others are being used.

Handing an item from thread to thread costs some 50 microseconds, more than it takes to make one
from memory. So items are made where they are used until making them turns out slow, as it does when
the disk or the network has to be waited for.

The thread holds no reference to the iterator that the user has, so an abandoned one is collected
and its thread ends; so does the thread of one that is closed, that raised, or that outlives the
program.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

T = TypeVar("T")
SLOW_ITEMS = 3
"""So many slow items in a row make a thread worth its cost."""
JOIN_SECONDS = 10.0
"""A read of a remote store may be under way when the reader is told to stop."""


def read_ahead_when_slow(
    items: Iterator[T], *, depth: int, name: str, slow_seconds: Callable[[T], float]
) -> Iterator[T]:
    """The items; after some that took longer than `slow_seconds` the others are made in a thread.

    The first item is not judged by: it pays for whatever has to be set up. One slow item says
    little either: the machine may have been busy with something else.
    """
    for item in items:
        yield item
        break
    num_slow = 0
    started = perf_counter()
    for item in items:
        num_slow = num_slow + 1 if perf_counter() - started > slow_seconds(item) else 0
        yield item
        if num_slow == SLOW_ITEMS:
            break
        started = perf_counter()
    else:
        return
    ahead = ReadAhead(items, depth=depth, name=name)
    try:
        yield from ahead
    finally:
        ahead.close()


class _Channel(Generic[T]):
    """What the thread and the consumer share."""

    def __init__(self, depth: int) -> None:
        self.items: deque[T] = deque()
        self.changed = threading.Condition()
        self.depth = depth
        self.ended = False
        self.stopped = False
        self.error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Hand an item over; False when nobody wants any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or len(self.items) < self.depth)
            if self.stopped:
                return False
            self.items.append(item)
            self.changed.notify_all()
            return True

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def take(self) -> T | None:
        """The next item; None when there are no more. Raises what the thread raised."""
        with self.changed:
            self.changed.wait_for(lambda: self.items or self.ended or self.stopped)
            if self.items:
                item = self.items.popleft()
                self.changed.notify_all()
                return item
            error, self.error = self.error, None
        if error is not None:
            raise error
        return None

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.items.clear()
            self.changed.notify_all()


class ReadAhead(Generic[T]):
    """An iterator whose items are made in a thread, at most `depth` ahead."""

    def __init__(self, items: Iterator[T], *, depth: int, name: str) -> None:
        channel: _Channel[T] = _Channel(depth)
        thread = threading.Thread(target=_produce, args=(items, channel), name=name, daemon=True)
        self._channel = channel
        self._process = os.getpid()
        self._close = weakref.finalize(self, _close, channel, thread, self._process)
        thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._process:
            raise RuntimeError(
                "an iterator that reads ahead was begun in another process: its thread was left"
                " behind by fork; begin a new one here with iter(loader)"
            )
        item = self._channel.take()
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """End the thread and wait for it."""
        self._close()


def _produce(items: Iterator[T], channel: _Channel[T]) -> None:
    try:
        for item in items:
            if not channel.put(item):
                break
            del item  # the consumer's alone now
    except BaseException as error:  # a border between threads: raised again by the consumer
        channel.end(error)
    else:
        channel.end(None)


def _close(channel: _Channel[T], thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return
    channel.stop()
    # A program may end just before the thread begins, which then finds that it is stopped.
    if thread is not threading.current_thread() and thread.ident is not None:
        thread.join(JOIN_SECONDS)
