"""Measures how long a loop waits for each of its batches.

    loop asks -> [clock] next(batches) [clock] -> loop has its batch, works, and asks again

Time in `next` is waiting, time until the loop asks again is working; wall time is both together.
Time outside of a loop (evaluation, checkpoints between epochs) is neither. `append` to a list is
all that happens in a step, and the list is worked into the rest every thousand steps. What all
that costs is measured in docs/benchmarks.md.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.words import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping
    from typing import Self

    from numpy.typing import NDArray

    from tokenmill.stalls.account import StepAccount
    from tokenmill.stalls.watch import StepWatch

    Event = Any
    Floats = NDArray[np.float64]
    Steps = NDArray[np.int64]


# -------------------------------------------------------------------------------------------------
# What a StallMeter found: numbers for programs, and the same in words for people.

SCHEMA = "tokenmill.stalls/1"
# Up to here a loop is not called starved: a better feed could not make it a hundredth faster.
FINE_SHARE = 0.01
SHOWN_WAITS = 5
FAR_ABOVE = 20  # a longest wait so many times the usual step is worth a sentence of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGap:
    """How long the CUDA device had nothing of the loop to do between steps (see `DeviceClock`)."""

    steps: int
    """Steps whose events were read: the last few may still be on their way."""
    seconds: float
    share: float
    """Of the device's own time over these steps."""
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReport:
    """How long a loop has waited for its data. Steps are counted from 0."""

    steps: int
    """Batches that were handed out."""
    wall_seconds: float
    """Time in the loop, waiting and working, from the first batch on."""
    wait_seconds: float
    wait_share: float
    """Part of the wall time: 0 is never, 1 is always."""
    p50_ms: float
    """Percentiles are right to within one percent of themselves."""
    p90_ms: float
    p99_ms: float
    max_ms: float
    slowest: list[tuple[int, float]]
    """(step, milliseconds) of the longest waits, longest first."""
    first_wait_ms: float
    """The wait for the first batch. It is start-up, and in none of the other numbers."""
    device_gap: DeviceGap | None
    """None where the loop does not use CUDA."""
    waits_ms: list[tuple[int, float]]
    """For plots: (step, milliseconds), every wait of a short run. A long one is cut into at most
    2,048 equal ranges, and the longest wait of each is here."""
    build_wait_seconds: float = 0.0
    """Of the waiting, that for the build that a loader follows: its text was not tokenized yet."""

    @property
    def starved_share(self) -> float:
        """What a better feed could save: the device's idle time where it is known, else the waits.

        A loop on CUDA may wait as long as its device is busy: that costs nothing.
        """
        return self.wait_share if self.device_gap is None else self.device_gap.share

    @property
    def possible_speedup(self) -> float:
        """How many times as fast the loop would be if it never had to wait."""
        return 1 / max(1 - self.starved_share, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """For json.dumps; `from_json` reads it back."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> StallReport:
        """The report that `as_json` was made from."""
        declared = dataclasses.fields(cls)
        needed = [each.name for each in declared if each.default is dataclasses.MISSING]
        if members.get("schema") != SCHEMA or any(name not in members for name in needed):
            raise UsageError(
                f"this is no report of a StallMeter (its schema is {members.get('schema')!r}, "
                f"expected {SCHEMA!r})",
                hint="write one with: json.dump(meter.report().as_json(), file)",
            )
        values = {each.name: members.get(each.name, each.default) for each in declared}
        gap = values["device_gap"]
        values["device_gap"] = None if gap is None else DeviceGap(**gap)
        for name in ("slowest", "waits_ms"):
            values[name] = [(int(step), float(ms)) for step, ms in values[name]]
        return cls(**values)

    def describe(self) -> str:
        """The report in plain words, and what to do about it."""
        if not self.steps:
            return "nothing was measured: the loop has not been handed a batch yet"
        rows = self._rows()
        width = max(map(len, rows))
        lines = [self._verdict(), "", *(f"{name:<{width}}  {text}" for name, text in rows.items())]
        if self.steps > 1 and (advice := self._advice()):
            lines += ["", *advice]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.steps == 1:
            return "one batch only: there is no wait yet but that for the first one"
        waits = f"your loop waits {_percent(self.wait_share)} of its time for data"
        if self.device_gap is not None:
            idle = f"the device stands idle for {_percent(self.device_gap.share)} of its own"
            waits = f"{waits}, and {idle}"
        if self.starved_share <= FINE_SHARE:
            return f"{waits}: it is not starved"
        times = self.possible_speedup
        faster = f"{times:.2f} times" if times < 100 else "more than 100 times"
        return f"{waits}: without that it would be {faster} as fast"

    def _rows(self) -> dict[str, str]:
        rows = {
            "steps": f"{self.steps:,} in {brief(self.wall_seconds)}",
            "first batch": f"after {_ms(self.first_wait_ms)}, counted nowhere else",
        }
        if self.steps > 1:
            rows["waits"] = (
                f"{brief(self.wait_seconds)} in all: median {_ms(self.p50_ms)}, 90% below"
                f" {_ms(self.p90_ms)}, 99% below {_ms(self.p99_ms)}, longest {_ms(self.max_ms)}"
            )
            shown = self.slowest[:SHOWN_WAITS]
            rows["slowest"] = ", ".join(f"step {step:,}: {_ms(wait)}" for step, wait in shown)
        if self.build_wait_seconds:
            part = _percent(self.build_wait_seconds / max(self.wait_seconds, 1e-9))
            rows["for the build"] = (
                f"{brief(self.build_wait_seconds)}, {part} of the waiting: the text that came next"
                " was not built yet"
            )
        if (gap := self.device_gap) is not None:
            rows["device idle"] = (
                f"{brief(gap.seconds)} in all: median {_ms(gap.p50_ms)}, 99% below"
                f" {_ms(gap.p99_ms)}, longest {_ms(gap.max_ms)} (of {gap.steps:,} steps)"
            )
        return rows

    def _advice(self) -> list[str]:
        if self.starved_share > FINE_SHARE:
            if self.build_wait_seconds > self.wait_seconds / 2:
                return [
                    "the loop is faster than the build that it follows: give the build more cores,",
                    "or let it come further first; with a finished store nothing is waited for",
                ]
            return [
                "what your text, tokenizer and machine can feed, each way, and what to change:",
                "    tokenmill diagnose DATA --tokenizer TOKENIZER",
                "or tokenize once, before you train, and never in the loop again:",
                "    tokenmill build DATA --tokenizer TOKENIZER --out STORE",
            ]
        # A usual step is what the loop's own work takes.
        step_ms = 1000 * max(self.wall_seconds - self.wait_seconds, 1e-9) / self.steps
        if self.max_ms <= FAR_ABOVE * step_ms:
            return []
        step, longest = self.slowest[0]
        steps = f"as long as {longest / step_ms:,.0f} steps take"
        return [
            f"one wait stands out: step {step:,} waited {_ms(longest)}, {steps};",
            "a new epoch, a new file or a slow disk looks like that",
        ]


def _ms(milliseconds: float) -> str:
    return brief(milliseconds / 1000)


def _percent(share: float) -> str:
    """'43%', '2.1%', '0.03%': two digits that count."""
    percent = 100 * share
    digits = 0 if percent >= 9.95 or not percent else 1 if percent >= 0.095 else 2
    return "under 0.01%" if 0 < percent < 0.005 else f"{percent:.{digits}f}%"


# -------------------------------------------------------------------------------------------------
# What is kept of any number of waits, in memory that does not grow.
#
# All of them take waits in portions and give the same answer however these were cut; nothing is
# drawn at random. The histogram's bins grow by one percent from one to the next, from 100 ns on,
# so that a percentile is right to within one percent of itself (below 100 ns it is 0).

_SMALLEST = 1e-7
_GROWTH = math.log(1.01)
# Up to a day and a bit; what is longer counts as that long, and as what it is in the maximum.
_BINS = 2 + math.ceil(math.log(1e5 / _SMALLEST) / _GROWTH)


class WaitTally:
    """Counts durations, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.longest = 0.0
        self._bins = np.zeros(_BINS, dtype=np.int64)

    def add(self, durations: Floats) -> None:
        if not len(durations):
            return
        self.count += len(durations)
        self.seconds += float(durations.sum())
        self.longest = max(self.longest, float(durations.max()))
        # Bin 0 holds everything below the smallest; maximum() keeps the logarithm away from 0.
        exponents = np.log(np.maximum(durations, _SMALLEST / 2) / _SMALLEST) / _GROWTH
        bins = np.clip(np.floor(exponents) + 1, 0, _BINS - 1).astype(np.int64)
        self._bins += np.bincount(bins, minlength=_BINS)

    def percentile(self, percent: float) -> float:
        """As numpy's default has it, between the two nearest ranks; 0 of nothing."""
        if not self.count:
            return 0.0
        ends = np.cumsum(self._bins)

        def at(rank: int) -> float:
            """The duration of this rank, shortest first: the middle of its bin."""
            if rank >= self.count - 1:
                return self.longest
            index = int(np.searchsorted(ends, rank, side="right"))
            middle = _SMALLEST * math.exp((index - 0.5) * _GROWTH) if index else 0.0
            return min(middle, self.longest)

        place = percent / 100 * (self.count - 1)
        below = math.floor(place)
        return at(below) + (at(below + 1) - at(below)) * (place - below)

    def milliseconds(self, *percents: int) -> dict[str, float]:
        """Percentiles and the longest, as reports have them."""
        found = {f"p{percent}_ms": 1000 * self.percentile(percent) for percent in percents}
        return {**found, "max_ms": 1000 * self.longest}


class Slowest:
    """The longest few; of equal ones those that came first."""

    def __init__(self, count: int) -> None:
        self._count = count
        # (step, seconds), longest first.
        self.found: list[tuple[int, float]] = []

    def add(self, first_step: int, durations: Floats) -> None:
        # Most portions have nothing that is longer than what is known already.
        least = self.found[-1][1] if len(self.found) == self._count else -1.0
        waits = enumerate(durations.tolist(), first_step)
        self.found += [(step, seconds) for step, seconds in waits if seconds > least]
        self.found.sort(key=lambda wait: (-wait[1], wait[0]))
        del self.found[self._count :]


class WaitSeries:
    """The run cut into at most `most` equal ranges of steps, and the longest wait of each.

    Ranges are a power of two steps long, so that they can be joined when there are too many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps: Steps = np.zeros(0, dtype=np.int64)
        self._durations: Floats = np.zeros(0)

    def add(self, first_step: int, durations: Floats) -> None:
        steps = np.arange(first_step, first_step + len(durations), dtype=np.int64)
        self._steps = np.concatenate([self._steps, steps])
        self._durations = np.concatenate([self._durations, durations])
        if len(self._steps) > 2 * self._most:
            self._thin()

    def points(self) -> list[tuple[int, float]]:
        """(step, seconds), in order."""
        self._thin()
        return list(zip(self._steps.tolist(), self._durations.tolist(), strict=True))

    def _thin(self) -> None:
        length = 1
        while len(self._steps) and int(self._steps[-1]) // length >= self._most:
            length *= 2
        if length == 1:
            return
        ranges = self._steps // length
        order = np.lexsort((self._steps, -self._durations, ranges))
        kept = order[np.flatnonzero(np.diff(ranges[order], prepend=-1))]
        self._steps, self._durations = self._steps[kept], self._durations[kept]


# -------------------------------------------------------------------------------------------------
# How long a CUDA device had nothing of this loop to do between two steps.
#
# Two events per step, on the stream that is current where the loop asks for its batch:
#
#   step k's kernels ... [end]   next(batches)   [start]  step k+1's kernels ...
#
# The device passes an event when it has done all that was put into the stream before it. So the
# time between `end` and `start`, as the device sees it, is
#
# - about nothing where the host runs ahead: both are in the queue after step k's kernels, and the
#   device finds them one right after the other, however long the host has waited for the batch;
# - the time from the end of step k's kernels, or from the moment the batch was asked for if that is
#   later, to the moment it was there, where the host came too late: real idle time.
#
# What it does not show: idle time inside a step, as a host leaves that launches kernels too
# slowly; the time from `start` to the first kernel; what other streams do meanwhile. A copy to the
# device that the loop itself makes is work of the step; one that `next` makes or waits for on this
# stream is part of the gap. Work that the loop puts into another stream, while this one is current
# when it asks for the batch, is not seen at all, and the gap is then as long as the wait.
#
# Nothing here waits: an event is read when `query` says that it is done, steps later if need be.
# But calls of CUDA are not free: some tens of microseconds for a step. So, after the first steps,
# a step is measured only while all such calls together took less than 0.03% of the time: every
# step where steps are long, one of some where they are short.
#
# torch is never imported, only used where the program has it, with CUDA already in use.

# Steps that the host may be ahead; where it is more, steps in between are left out.
_MOST_UNREAD = 64
_READ_AT_ONCE = 4
# The first 64 steps are measured whatever it costs: a short run must have numbers too.
_FREE_EVENTS = 128
_MOST_SHARE = 0.0003  # of the time, that events may take after them
_KEPT = 256


class DeviceClock:
    """Measures gaps between steps with events from a small ring."""

    def __init__(self, cuda: Any, clock: Callable[[], float]) -> None:
        self.tally = WaitTally()
        # Of the device, over the steps that were measured.
        self.seconds = 0.0
        self._cuda = cuda
        self._clock = clock
        self._is_broken = False
        self._free: list[Event] = []
        # Start of a step, its end, start of the next, and whether that one is measured too.
        self._unread: deque[tuple[Event, Event, Event, bool]] = deque()
        self._start: Event | None = None
        self._end: Event | None = None
        self._gaps: list[float] = []
        self._is_paused = True
        self._num_recorded = 0
        self._begun = self._clock()
        self._spent = 0.0

    @classmethod
    def find(cls, clock: Callable[[], float]) -> DeviceClock | None:
        """A clock, if this program uses CUDA already."""
        torch: Any = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        return cls(cuda, clock) if cuda is not None and cuda.is_initialized() else None

    def asked(self) -> None:
        """All work of a step has been put into the stream."""
        # A step that was not measured has no start; after a pause there is no step.
        is_wanted = self._start is not None or (self._is_paused and self._has_time())
        if not is_wanted and not self._unread:
            return
        called = self._clock()
        try:
            self.read(_READ_AT_ONCE)
            if is_wanted:
                self._end = self._record()
        except RuntimeError:
            self._give_up()
        self._spent += self._clock() - called

    def handed(self, *, is_counted: bool) -> None:
        """The batch is there; what follows in the stream is the next step's."""
        end, before = self._end, self._start
        self._start = self._end = None
        was_paused, self._is_paused = self._is_paused, False
        if end is None and not self._has_time():
            return
        called = self._clock()
        try:
            self._start = start = self._record()
        except RuntimeError:
            self._give_up()
        else:
            if before is None and was_paused:
                before = end  # the gap is all there is of this step
            if is_counted and None not in (before, end, start):
                goes_on = self._has_time()
                self._unread.append((before, end, start, goes_on))
                self._start = start if goes_on else None
        self._spent += self._clock() - called

    def _has_time(self) -> bool:
        """Whether measuring one more step keeps within what it may cost."""
        if self._num_recorded < _FREE_EVENTS:
            return True
        return self._spent < _MOST_SHARE * (self._clock() - self._begun)

    def paused(self) -> None:
        """The loop has ended: what comes now is no part of a step."""
        self._start = self._end = None
        self._is_paused = True

    def read(self, most: int = _MOST_UNREAD) -> None:
        """Take in what the device has passed by now."""
        unread = self._unread
        while most and unread and unread[0][2].query():
            before, end, start, goes_on = unread.popleft()
            # Milliseconds, and exact to half a microsecond: never less than nothing.
            self._gaps.append(max(end.elapsed_time(start), 0.0) / 1000)
            self.seconds += max(before.elapsed_time(start), 0.0) / 1000
            self._free.append(end)
            if before is not end:
                self._free.append(before)
            if not goes_on:
                self._free.append(start)
            most -= 1
        if len(self._gaps) >= _KEPT:
            self._fold()

    def gap(self) -> DeviceGap | None:
        """All gaps so far; None where there are none."""
        if not self._is_broken:
            try:
                self.read()
            except RuntimeError:
                self._give_up()
        self._fold()
        gaps = self.tally
        if not gaps.count:
            return None
        return DeviceGap(
            steps=gaps.count,
            seconds=gaps.seconds,
            share=gaps.seconds / self.seconds if self.seconds else 0.0,
            **gaps.milliseconds(50, 99),
        )

    def _record(self) -> Event | None:
        if self._is_broken or len(self._unread) >= _MOST_UNREAD:
            return None
        # In a graph that is being captured an event would become a node of it.
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        self._num_recorded += 1
        return event

    def _fold(self) -> None:
        self.tally.add(np.array(self._gaps))
        self._gaps.clear()

    def _give_up(self) -> None:
        """Events of two devices, or a device that failed: the loop will hear of it, not from us."""
        self._is_broken = True
        self._unread.clear()
        self._free.clear()
        self._start = self._end = None


Batch = TypeVar("Batch")

_FOLD_STEPS = 1024
_LOOK_STEPS = 16  # so many steps may pass before a loop uses CUDA for the first time
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

    With `account=(10, 30)` these steps are looked at as a whole: `account()` says where their time
    went. Until then, and in them, a step costs more than it does with a meter alone.
    """

    def __init__(
        self,
        *,
        account: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if account is not None and not 1 <= account[0] < account[1]:
            raise UsageError(
                f"account={account!r} is no range of steps", hint="such as account=(10, 30)"
            )
        self._window = account
        self._watch: StepWatch | None = None
        self._account: StepAccount | None = None
        self._clock = clock
        self._steps = 0
        self._first_wait: float | None = None
        self._working_seconds = 0.0
        # When the step that is being worked on began.
        self._handed_at: float | None = None
        self._recent: list[float] = []
        self._tally = WaitTally()
        self._slowest = Slowest(_SLOWEST)
        self._series = WaitSeries(_POINTS)
        self._device: DeviceClock | None = None
        # Loops that are watched, innermost last, and how long each had waited for a build before.
        self._followers: list[tuple[object, float]] = []
        self._build_seconds = 0.0  # of loops that have ended

    def watch(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """The same batches, in the same order, with the wait for each of them measured.

        Making the iterator is part of the first wait: there a DataLoader starts its workers.
        """
        if self._window is not None and self._watch is None:
            from tokenmill.stalls.watch import StepWatch

            self._watch = StepWatch(first=self._window[0], last=self._window[1])
        is_inner = self._handed_at is not None
        asked_at = self._ask()
        self._followers.append((batches, _build_seconds(batches)))
        iterator = iter(batches)
        # A batch that lay in a variable here could not be freed while the loop is at work.
        held: list[Batch] = []
        try:
            while True:
                try:
                    held.append(next(iterator))
                except StopIteration:
                    return
                if self._first_wait is None:
                    self._followers[-1] = (batches, _build_seconds(batches))
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
            self._build_seconds += _since(self._followers.pop())
            if is_inner:
                self._handed_at = self._clock()

    def _ask(self) -> float:
        """The loop wants a batch: its step is over."""
        if self._watch is not None:
            self._watch.asked()
        if self._device is None and self._steps < _LOOK_STEPS:
            self._device = DeviceClock.find(self._clock)
        if self._device is not None:
            self._device.asked()
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
        if self._watch is not None:
            self._watch.handed()
        if self._device is not None:
            self._device.handed(is_counted=not is_first)
        self._handed_at = now

    def _stop(self) -> None:
        """No step is being worked on any more."""
        if self._watch is not None:
            self._watch.handed()  # where it asked and there was no batch
        if self._handed_at is not None:
            self._working_seconds += self._clock() - self._handed_at
            self._handed_at = None
        if self._device is not None:
            self._device.paused()

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
            **waits.milliseconds(50, 90, 99),
            slowest=[(step, 1000 * seconds) for step, seconds in self._slowest.found],
            first_wait_ms=1000 * (self._first_wait or 0.0),
            device_gap=None if self._device is None else self._device.gap(),
            waits_ms=[(step, 1000 * seconds) for step, seconds in self._series.points()],
            build_wait_seconds=self._build_seconds + sum(map(_since, self._followers)),
        )

    def account(self) -> StepAccount:
        """Where the time of the steps that were asked for went; looking at them ends with it."""
        if self._account is None:
            if self._watch is None:
                raise UsageError(
                    "this meter was not asked for an account, or has not watched a loop yet",
                    hint="make it with: StallMeter(account=(10, 30))",
                )
            self._account = self._watch.finish()
        return self._account

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _build_seconds(batches: object) -> float:
    """How long iterations of a loader or feeder have waited for a build; 0 of anything else."""
    return float(getattr(batches, "build_wait_seconds", 0.0))


def _since(followed: tuple[object, float]) -> float:
    batches, before = followed
    return _build_seconds(batches) - before


__all__ = ["DeviceGap", "StallMeter", "StallReport"]
