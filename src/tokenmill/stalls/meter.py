"""Stands between a loop and its batches, and measures how long the loop waits for each.

    loop asks -> [clock] next(batches) [clock] -> loop has its batch, works, and asks again

Time in `next` is waiting, time until the loop asks again is working; wall time is both together.
Time outside of a loop (evaluation, checkpoints between epochs) is neither. What is kept is in
waits.py; `append` to a list is all that happens in a step, and the list is worked into the rest
every thousand steps. What all that costs is measured in docs/benchmarks.md.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tokenmill.stalls.device import DeviceClock
from tokenmill.stalls.report import DeviceGap, StallReport
from tokenmill.stalls.waits import Series, Slowest, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from types import TracebackType
    from typing import Self

Batch = TypeVar("Batch")

_FOLD_STEPS = 1024
_LOOK_STEPS = 16
"""So many steps may pass before a loop uses CUDA for the first time."""
_SLOWEST = 10
_POINTS = 2048


class StallMeter:
    """Measures how long a loop waits for its data.

    >>> with StallMeter() as meter:
    ...     for batch in meter.watch(any_dataloader):
    ...         train_step(batch)
    >>> print(meter.report().describe())

    `with` only says when the last step ended, and may be left out. Watching again, as in a second
    epoch, goes on counting. `report()` may be called at any time, in the loop too. A meter belongs
    to one thread.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._first_wait: float | None = None
        self._working_seconds = 0.0
        self._handed_at: float | None = None
        """When the step that is being worked on began."""
        self._recent: list[float] = []
        self._tally = Tally()
        self._slowest = Slowest(_SLOWEST)
        self._series = Series(_POINTS)
        self._device: DeviceClock | None = None

    def watch(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """The same batches, in the same order, with the wait for each of them measured.

        Making the iterator is part of the first wait: there a DataLoader starts its workers.
        """
        is_inner = self._handed_at is not None
        asked_at = self._ask()
        iterator = iter(batches)
        # A batch that lay in a variable here could not be freed while the loop is at work.
        held: list[Batch] = []
        try:
            while True:
                try:
                    held.append(next(iterator))
                except StopIteration:
                    return
                self._hand(asked_at)
                yield held.pop()
                asked_at = self._ask()
        except GeneratorExit:
            self._stop()
            # The loop was left early. An iterator that was made here is of no use to anyone now;
            # one that was handed in may be.
            if iterator is not batches and (close := getattr(iterator, "close", None)) is not None:
                close()
            raise
        finally:
            self._stop()
            if is_inner:
                self._handed_at = self._clock()

    def _ask(self) -> float:
        """The loop wants a batch: its step is over."""
        if self._device is not None:
            self._device.asked()
        elif self._steps < _LOOK_STEPS:
            self._look_for_device()
        if len(self._recent) >= _FOLD_STEPS:
            self._fold()
        now = self._clock()
        if self._handed_at is not None:
            self._working_seconds += now - self._handed_at
            self._handed_at = None
        return now

    def _hand(self, asked_at: float) -> None:
        """The loop gets its batch: its wait is over."""
        now = self._clock()
        is_first = self._first_wait is None
        if is_first:
            self._first_wait = now - asked_at
        else:
            self._recent.append(now - asked_at)
        self._steps += 1
        if self._device is not None:
            self._device.handed(is_counted=not is_first)
        self._handed_at = now

    def _stop(self) -> None:
        """No step is being worked on any more."""
        if self._handed_at is not None:
            self._working_seconds += self._clock() - self._handed_at
            self._handed_at = None
        if self._device is not None:
            self._device.paused()

    def _look_for_device(self) -> None:
        self._device = DeviceClock.find(self._clock)
        if self._device is not None:
            self._device.asked()

    def _fold(self) -> None:
        if not self._recent:
            return
        waits = np.array(self._recent)
        self._recent.clear()
        # The first wait, that of step 0, is kept apart: these begin at step 1.
        first_step = 1 + self._tally.count
        self._tally.add(waits)
        self._slowest.add(first_step, waits)
        self._series.add(first_step, waits)

    def report(self) -> StallReport:
        """What was measured so far."""
        working = self._working_seconds
        if self._handed_at is not None:
            working += self._clock() - self._handed_at
        self._fold()
        waits = self._tally
        wall = waits.seconds + working
        return StallReport(
            steps=self._steps,
            wall_seconds=wall,
            wait_seconds=waits.seconds,
            wait_share=waits.seconds / wall if wall else 0.0,
            p50_ms=1000 * waits.percentile(50),
            p90_ms=1000 * waits.percentile(90),
            p99_ms=1000 * waits.percentile(99),
            max_ms=1000 * waits.longest,
            slowest=[(step, 1000 * seconds) for step, seconds in self._slowest.found],
            first_wait_ms=1000 * (self._first_wait or 0.0),
            device_gap=self._device_gap(),
            waits_ms=[(step, 1000 * seconds) for step, seconds in self._series.points()],
        )

    def _device_gap(self) -> DeviceGap | None:
        gaps = None if self._device is None else self._device.measured()
        if self._device is None or gaps is None:
            return None
        return DeviceGap(
            steps=gaps.count,
            seconds=gaps.seconds,
            share=gaps.seconds / self._device.seconds if self._device.seconds else 0.0,
            p50_ms=1000 * gaps.percentile(50),
            p99_ms=1000 * gaps.percentile(99),
            max_ms=1000 * gaps.longest,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
