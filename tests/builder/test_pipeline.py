from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tokenmill.builder.encode import StageClock
from tokenmill.builder.worker import UnitWrites, read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_items_arrive_in_order_and_the_thread_ends() -> None:
    before = threading.active_count()
    assert list(read_ahead(range(100), clock=StageClock())) == list(range(100))
    assert threading.active_count() == before


def test_an_error_of_the_source_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for item in read_ahead(items(), clock=StageClock()):
            seen.append(item)  # noqa: PERF402 - the items before the error matter
    assert seen == [1]


def test_closing_early_stops_the_thread_before_it_returns() -> None:
    produced = []

    def items() -> Iterator[int]:
        for number in range(1_000_000):
            produced.append(number)
            yield number

    before = threading.active_count()
    reader = read_ahead(items(), clock=StageClock())
    assert next(reader) == 0
    reader.close()
    assert threading.active_count() == before
    assert len(produced) < 10


def test_the_reader_works_ahead_by_a_bounded_number_of_items() -> None:
    taken, ahead = 0, []
    is_ahead = threading.Event()

    def items() -> Iterator[int]:
        for number in range(10_000):
            ahead.append(number - taken)
            if number == 2:
                is_ahead.set()
            yield number

    with contextlib.closing(read_ahead(items(), clock=StageClock())) as reader:
        next(reader)
        taken = 1
        assert is_ahead.wait(60), "one item waits to be taken, and one to be handed over"
        for number in range(1, 100):
            assert next(reader) == number
            taken += 1
    assert 1 <= max(ahead) <= 2, "one more while an item is being taken"


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("waits", [UnitWrites.drain, UnitWrites.finish])
def test_calls_run_in_order_and_are_all_done_at_the_end(
    thread: ThreadPoolExecutor, waits: Callable[[UnitWrites], None]
) -> None:
    done: list[int] = []
    clock = StageClock()
    writes = UnitWrites(thread, clock)
    for number in range(50):
        writes.submit(done.append, number)
    writes.submit(time.sleep, 0.02)
    waits(writes)
    assert done == list(range(50))
    assert clock["write"] >= 0.02


@pytest.mark.parametrize("count", [2, 100])
def test_an_error_of_the_thread_is_raised_and_later_calls_are_dropped(
    thread: ThreadPoolExecutor, count: int
) -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("disk full")

    writes = UnitWrites(thread, StageClock())
    with pytest.raises(OSError, match="disk full"):
        writes.submit(done.append, 1)
        writes.submit(fail)
        for number in range(2, count):
            writes.submit(done.append, number)
        writes.finish()
    assert done == [1]
    # The unit after it has the same thread.
    others = UnitWrites(thread, StageClock())
    others.submit(done.append, 3)
    others.finish()
    assert done == [1, 3]


def test_calls_that_have_not_begun_are_dropped_when_they_are_stopped(
    thread: ThreadPoolExecutor,
) -> None:
    done: list[int] = []
    has_begun, goes_on = threading.Event(), threading.Event()

    def first() -> None:
        has_begun.set()
        assert goes_on.wait(60)
        done.append(1)

    writes = UnitWrites(thread, StageClock())
    writes.submit(first)
    writes.submit(done.append, 2)
    assert has_begun.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    writes.stop()
    assert done == [1]
