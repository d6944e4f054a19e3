"""From values to places on an axis, and round numbers to stand at it."""

from __future__ import annotations

import math
from dataclasses import dataclass

MANY_DECADES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """An axis: `low` lies at `start`, `high` at `end`, in the units of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies; beyond the ends it is put at them."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            part = (math.log10(max(value, self.low)) - low) / (high - low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers from low to high."""
        return (
            log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, most)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvenScale:
    """An axis with a few values only, each as far from the next."""

    values: tuple[float, ...]
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where one of the values lies."""
        steps = max(len(self.values) - 1, 1)
        # A margin, so that the first does not lie on the other axis.
        room = (self.end - self.start) * 0.9
        return self.start + (self.end - self.start) * 0.05 + self.values.index(value) / steps * room

    def ticks(self, most: int = 6) -> list[float]:
        """The values, or every n-th where they are many."""
        return list(self.values[:: -(-len(self.values) // (2 * most)) or 1])


def linear_scale(low: float, high: float, *, start: float, end: float, most: int = 6) -> Scale:
    """A scale whose ends are round numbers around the values."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    step = nice_step(high - low, most)
    return Scale(
        low=math.floor(low / step + 1e-9) * step,
        high=math.ceil(high / step - 1e-9) * step,
        start=start,
        end=end,
    )


def log_scale(low: float, high: float, *, start: float, end: float) -> Scale:
    """A scale from a power of ten below the values to a round number above them."""
    bottom = 10.0 ** math.floor(math.log10(low))
    top = next(
        factor * 10.0 ** math.floor(math.log10(high))
        for factor in (1, 2, 5, 10)
        if factor * 10.0 ** math.floor(math.log10(high)) >= high * (1 - 1e-9)
    )
    return Scale(low=bottom, high=max(top, bottom * 10), start=start, end=end, log=True)


def nice_step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many fit into the span."""
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of a nice step."""
    step = nice_step(high - low, most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 times them where there are few, fewer where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
    decades = last - first
    every = -(-decades // MANY_DECADES)
    factors = (1, 2, 5) if decades <= 2 else (1,)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
