"""What is kept of any number of waits, in memory that does not grow.

    Tally      how many, how long in all, the longest, and a histogram for percentiles
    Slowest    the longest few, with their steps
    Series     at most 2,048 waits over the whole run, for plots

All of them take waits in portions and give the same answer however these were cut; nothing is drawn
at random. The histogram's bins grow by one percent from one to the next, from 100 ns on, so that a
percentile is right to within one percent of itself (below 100 ns it is 0).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Steps = NDArray[np.int64]

_SMALLEST = 1e-7
_GROWTH = math.log(1.01)
_BINS = 2 + math.ceil(math.log(1e5 / _SMALLEST) / _GROWTH)
"""Up to a day and a bit; what is longer counts as that long, and as what it is in the maximum."""


class Tally:
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
        place = percent / 100 * (self.count - 1)
        below = math.floor(place)
        ends = np.cumsum(self._bins)
        low, high = (self._at(ends, min(rank, self.count - 1)) for rank in (below, below + 1))
        return low + (high - low) * (place - below)

    def _at(self, ends: Steps, rank: int) -> float:
        """The duration of this rank, shortest first: the middle of its bin."""
        if rank == self.count - 1:
            return self.longest
        index = int(np.searchsorted(ends, rank, side="right"))
        middle = _SMALLEST * math.exp((index - 0.5) * _GROWTH) if index else 0.0
        return min(middle, self.longest)


class Slowest:
    """The longest few; of equal ones those that came first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.found: list[tuple[int, float]] = []
        """(step, seconds), longest first."""

    def add(self, first_step: int, durations: Floats) -> None:
        # Most portions have nothing that is longer than what is known already.
        least = self.found[-1][1] if len(self.found) == self._count else -1.0
        places = np.flatnonzero(durations > least)
        # A stable sort: earlier steps stay in front of later ones of the same length.
        places = places[np.argsort(-durations[places], kind="stable")[: self._count]]
        self.found += [(first_step + int(place), float(durations[place])) for place in places]
        self.found.sort(key=lambda wait: (-wait[1], wait[0]))
        del self.found[self._count :]


class Series:
    """The run cut into at most `most` equal stretches of steps, and the longest wait of each.

    Stretches are a power of two steps long, so that they can be joined when there are too many.
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
        if not len(self._steps):
            return
        length = 1
        while int(self._steps[-1]) // length >= self._most:
            length *= 2
        if length == 1:
            return
        stretches = self._steps // length
        order = np.lexsort((self._steps, -self._durations, stretches))
        first = np.flatnonzero(np.diff(stretches[order], prepend=-1))
        kept = order[first]
        self._steps, self._durations = self._steps[kept], self._durations[kept]
