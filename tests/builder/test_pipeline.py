from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from tokenmill.builder.unit import StageClock, WriteBehind, read_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    count = len(produced)
    time.sleep(0.05)
    assert len(produced) == count < 10


def test_the_reader_works_ahead_by_a_bounded_number_of_items() -> None:
    produced = []

    def items() -> Iterator[int]:
        for number in range(10):
            produced.append(number)
            yield number

    reader = read_ahead(items(), clock=StageClock())
    next(reader)
    time.sleep(0.1)
    assert 2 <= len(produced) <= 3
    reader.close()


def test_calls_run_in_order_and_are_all_done_at_the_end() -> None:
    done: list[int] = []
    clock = StageClock()
    with WriteBehind(clock) as behind:
        for number in range(50):
            behind.submit(done.append, number)
    assert done == list(range(50))
    assert clock.seconds["write"] >= 0


def test_an_error_behind_is_raised_and_later_calls_are_dropped() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), WriteBehind(StageClock()) as behind:
        behind.submit(done.append, 1)
        behind.submit(fail)
        for number in range(2, 100):
            behind.submit(done.append, number)
    assert done == [1]


def test_an_error_in_front_is_not_hidden_by_the_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="in front"), WriteBehind(StageClock()):
        raise ValueError("in front")
    assert threading.active_count() == before
