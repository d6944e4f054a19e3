"""How long a CUDA device had nothing of this loop to do between two steps.

Two events per step, on the stream that is current where the loop asks for its batch:

    step k's kernels ... [end]   next(batches)   [start]  step k+1's kernels ...

The device passes an event when it has done all that was put into the stream before it. So the time
between `end` and `start`, as the device sees it, is

- about nothing where the host runs ahead: both lie in the queue behind step k's kernels, and the
  device finds them one right after the other, however long the host has waited for the batch;
- the time from the end of step k's kernels, or from the moment the batch was asked for if that is
  later, to the moment it was there, where the host came too late: real idle time.

What it does not show: idle time inside a step, as a host leaves that launches kernels too slowly;
the time from `start` to the first kernel; what other streams do meanwhile. A copy to the device
that the loop itself makes is work of the step; one that `next` makes or waits for on this stream is
part of the gap. Work that the loop puts into another stream, while this one is current when it asks
for the batch, is not seen at all, and the gap is then as long as the wait.

Nothing here waits: an event is read when `query` says that it is done, steps later if need be. But
calls of CUDA are not free: some tens of microseconds for a step. So, after the first steps, a step
is measured only while all such calls together took less than 0.03% of the time: every step where
steps are long, one of some where they are short.

torch is never imported, only used where the program has it, with CUDA already in use.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.stalls.waits import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    Event = Any

_MOST_UNREAD = 64
"""Steps that the host may be ahead; where it is more, steps in between are left out."""
_READ_AT_ONCE = 4
_FREE_EVENTS = 128
"""The first 64 steps are measured whatever it costs: a short run must have numbers too."""
_MOST_SHARE = 0.0003
"""Of the time, that events may take after them."""
_KEPT = 256


class DeviceClock:
    """Measures gaps between steps with events from a small ring."""

    def __init__(self, cuda: Any, clock: Callable[[], float]) -> None:
        self.tally = Tally()
        self.seconds = 0.0
        """Of the device, over the steps that were measured."""
        self._cuda = cuda
        self._clock = clock
        self._is_broken = False
        self._free: list[Event] = []
        self._unread: deque[tuple[Event, Event, Event, bool]] = deque()
        """Start of a step, its end, start of the next, and whether that one is measured too."""
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
        # A step that was not measured has no start; behind a pause there is no step.
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

    def measured(self) -> Tally | None:
        """All gaps so far; None where there are none."""
        if not self._is_broken:
            try:
                self.read()
            except RuntimeError:
                self._give_up()
        self._fold()
        return self.tally if self.tally.count else None

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
