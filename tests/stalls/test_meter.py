"""A meter in other people's loops: what it hands on, what it counts, and what it leaves alone."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stalls.clocks import Clock

from tokenmill import StallMeter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

waits_and_works = st.lists(st.tuples(st.floats(1e-4, 9), st.floats(0, 9)), min_size=2, max_size=40)


def slow(clock: Clock, waits: Sequence[float]) -> Iterator[int]:
    """A generator that takes its time for each batch."""
    for number, seconds in enumerate(waits):
        clock.pass_by(seconds)
        yield number


@given(waits_and_works)
def test_waiting_and_working_add_up(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    meter = StallMeter(clock=clock)
    waits, works = zip(*steps, strict=True)
    for number in meter.watch(slow(clock, waits)):
        clock.pass_by(works[number])
    clock.pass_by(1000)  # behind the loop: nobody waits
    report = meter.report()

    assert report.steps == len(steps)
    assert np.isclose(report.first_wait_ms, 1000 * waits[0])
    assert np.isclose(report.wait_seconds, sum(waits[1:]))
    assert np.isclose(report.wall_seconds, sum(waits[1:]) + sum(works))
    assert np.isclose(report.wait_share, sum(waits[1:]) / (sum(waits[1:]) + sum(works)))
    assert np.isclose(report.p50_ms, 1000 * np.percentile(waits[1:], 50), rtol=0.01)
    assert np.isclose(report.p90_ms, 1000 * np.percentile(waits[1:], 90), rtol=0.01)
    assert np.isclose(report.p99_ms, 1000 * np.percentile(waits[1:], 99), rtol=0.01)
    assert np.isclose(report.max_ms, 1000 * max(waits[1:]))
    assert [step for step, _ in report.waits_ms] == list(range(1, len(steps)))
    assert np.allclose([ms for _, ms in report.waits_ms], 1000 * np.array(waits[1:]))


def test_the_slowest_waits_are_named_by_step() -> None:
    clock = Clock()
    meter = StallMeter(clock=clock)
    waits = [7.0, *[0.001] * 5000]
    waits[1234], waits[4321] = 0.5, 0.25
    for _ in meter.watch(slow(clock, waits)):
        clock.pass_by(0.01)
    report = meter.report()

    assert [step for step, _ in report.slowest[:2]] == [1234, 4321]
    assert np.allclose([ms for _, ms in report.slowest[:3]], [500, 250, 1])
    assert len(report.waits_ms) <= 2048
    assert {1234, 4321} < {step for step, _ in report.waits_ms}
    assert report.device_gap is None


def test_a_report_in_the_loop_counts_the_step_so_far_and_disturbs_nothing() -> None:
    clock = Clock()
    watched, asked = StallMeter(clock=clock), StallMeter(clock=clock)
    waits = [1.0, 2.0, 3.0]
    shares = []
    for _ in watched.watch(asked.watch(slow(clock, waits))):
        clock.pass_by(4.0)
        shares.append(asked.report().wait_share)

    assert np.allclose(shares, [0, 2 / 10, 5 / 17])
    assert watched.report() == asked.report()


def test_break_ends_the_last_step() -> None:
    clock = Clock()
    meter = StallMeter(clock=clock)
    for number in meter.watch(slow(clock, [1.0] * 9)):
        clock.pass_by(2.0)
        if number == 3:
            break
    clock.pass_by(1000)

    report = meter.report()
    assert (report.steps, report.wall_seconds, report.wait_seconds) == (4, 11.0, 3.0)


def test_with_ends_the_last_step_of_an_iterator_that_is_kept() -> None:
    clock = Clock()
    with StallMeter(clock=clock) as meter:
        batches = meter.watch(slow(clock, [1.0] * 9))
        for _ in range(4):
            next(batches)
            clock.pass_by(2.0)
    clock.pass_by(1000)

    report = meter.report()
    assert (report.steps, report.wall_seconds, report.wait_seconds) == (4, 11.0, 3.0)
    batches.close()
    assert meter.report() == report


def test_a_second_epoch_goes_on_and_its_start_is_a_wait_like_any_other() -> None:
    clock = Clock()
    meter = StallMeter(clock=clock)
    for _ in range(2):
        for _ in meter.watch(slow(clock, [5.0, 1.0])):
            clock.pass_by(2.0)
        clock.pass_by(1000)  # evaluation

    report = meter.report()
    assert (report.steps, report.first_wait_ms) == (4, 5000.0)
    assert report.slowest[0] == (2, 5000.0)
    assert (report.wall_seconds, report.wait_seconds) == (15.0, 7.0)


def test_a_loop_inside_a_loop_is_counted_once() -> None:
    clock = Clock()
    meter = StallMeter(clock=clock)
    for _ in meter.watch(slow(clock, [1.0, 1.0])):
        clock.pass_by(2.0)
        for _ in meter.watch(slow(clock, [0.5, 0.5])):
            clock.pass_by(0.25)
        clock.pass_by(3.0)

    report = meter.report()
    assert report.steps == 6
    assert report.wait_seconds == 1.0 + 4 * 0.5
    assert report.wall_seconds == 1.0 + 2 * (2.0 + 2 * 0.75 + 3.0)


class Loader:
    """Starts when it is iterated, as a DataLoader does its workers, and knows who is open."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_open = 0

    def __iter__(self) -> Iterator[int]:
        self.clock.pass_by(30.0)
        return LoaderIterator(self)


class LoaderIterator:
    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        loader.num_open += 1

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.loader.clock.pass_by(1.0)
        return 1

    def close(self) -> None:
        self.loader.num_open -= 1


def test_starting_a_loader_is_part_of_its_first_wait() -> None:
    clock = Clock()
    meter = StallMeter(clock=clock)
    for _ in meter.watch(Loader(clock)):
        break
    assert meter.report().first_wait_ms == 31_000.0


def test_an_iterator_that_the_meter_made_is_closed_when_the_loop_is_left() -> None:
    loader = Loader(Clock())
    for _ in StallMeter().watch(loader):
        assert loader.num_open == 1
        break
    assert loader.num_open == 0


def test_an_iterator_of_the_caller_stays_his() -> None:
    numbers = slow(Clock(), [0.0] * 5)
    meter = StallMeter()
    for number in meter.watch(numbers):
        if number == 1:
            break
    assert list(meter.watch(numbers)) == [2, 3, 4]
    assert meter.report().steps == 5


def test_an_abandoned_watch_of_a_generator_leaves_nothing_open() -> None:
    ended = []

    class Batches:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(10)
            finally:
                ended.append(True)

    batches = StallMeter().watch(Batches())
    assert next(batches) == 0
    assert not ended
    del batches
    gc.collect()
    assert ended == [True]


def test_an_error_of_the_loader_comes_through_and_the_meter_goes_on() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("bad record 17")

    meter = StallMeter()
    seen: list[int] = []
    with pytest.raises(ValueError, match="bad record 17"):
        seen.extend(meter.watch(failing()))
    assert list(meter.watch([2, 3])) == [2, 3]
    assert meter.report().steps == 3


def test_something_that_is_no_iterable_is_refused_as_a_for_loop_does() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        list(StallMeter().watch(5))  # type: ignore[arg-type]


def test_a_batch_is_not_kept_while_the_loop_works() -> None:
    class Tensor:
        pass

    def make() -> Iterator[Tensor]:
        yield Tensor()

    for batch in StallMeter().watch(make()):
        alive = weakref.ref(batch)
        del batch
        assert alive() is None


def test_a_torch_dataloader_with_workers_is_watched() -> None:
    from torch.utils.data import DataLoader

    data: Any = list(range(64))
    meter = StallMeter()
    loader: DataLoader[Any] = DataLoader(data, batch_size=8, num_workers=1)
    for _ in range(2):
        seen = [int(number) for batch in meter.watch(loader) for number in batch]
        assert seen == data
    report = meter.report()
    assert report.steps == 16
    assert report.first_wait_ms > 0
    assert report.device_gap is None


def test_a_device_feeder_is_watched_and_its_thread_ends_with_the_loop(tmp_path: Path) -> None:
    from tests.loader.torch.feeding import make_loader, make_store, tokenmill_threads

    from tokenmill.torch import DeviceFeeder

    loader = make_loader(make_store(tmp_path))
    meter = StallMeter()
    for batch in meter.watch(DeviceFeeder(loader, device="cpu")):
        if batch.step == 2:
            break
    assert not tokenmill_threads()
    assert loader.step == meter.report().steps == 3
