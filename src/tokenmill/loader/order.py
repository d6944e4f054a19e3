"""Which row comes when: a function of (seed, epoch, index), computed for any index at once.

    index (0, 1, 2 ...)  ->  epoch, index in the epoch  ->  row

The full shuffle is a keyed permutation of 0..n-1: a Feistel network on the next power of two,
walked until it lands below n. It keeps no table, so that an epoch of any size starts at once, and
it is made of 64-bit integers alone, so that it is the same on every machine. What a seed gives must
never change, since runs are resumed by it: a change of anything here is a new `VERSION`.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.store.stream import distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


VERSION = 1
ROUNDS = 6
MIN_BITS = 6
"""Smaller networks shuffle badly; walking down from 64 to a few rows costs nothing to speak of."""
RUN_TOKENS = 1 << 17
"""Block shuffle reads stretches of so many tokens: 256 KiB or 512 KiB in one go."""
WINDOW_RUNS = 256
"""Block shuffle mixes the rows of so many stretches: about 33 million tokens."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Shuffle(StrEnum):
    """How the rows of an epoch are ordered."""

    FULL = "full"
    BLOCK = "block"
    NONE = "none"

    @classmethod
    def of(cls, value: object) -> Shuffle:
        """What a user may say: True, False, or a name."""
        if isinstance(value, bool):
            return cls.FULL if value else cls.NONE
        try:
            return cls(str(value))
        except ValueError:
            raise UsageError(
                f"shuffle={value!r} is not known",
                hint='use shuffle=True (any row may come next), "block" (slow disks) or False',
            ) from None


class Permutation:
    """A permutation of 0..size-1 that is a function of its key.

    >>> Permutation(5, key="seed 0")(np.arange(5))
    array([...])
    """

    def __init__(self, size: int, *, key: str) -> None:
        self.size = size
        bits = max(MIN_BITS, (size - 1).bit_length())
        self._right_bits = np.uint64(bits // 2)
        self._left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._right_mask = np.uint64((1 << (bits // 2)) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each index goes; all must be below the size."""
        return self._walk(indices, range(ROUNDS))

    def inverse(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index that goes to each value."""
        return self._walk(values, range(ROUNDS - 1, -1, -1))

    def _walk(self, indices: NDArray[np.int64], rounds: range) -> NDArray[np.int64]:
        if self.size == 1:
            return np.zeros_like(indices)
        found = self._network(indices.astype(np.uint64), rounds)
        size = np.uint64(self.size)
        while (outside := found >= size).any():
            found[outside] = self._network(found[outside], rounds)
        return found.astype(np.int64)

    def _network(self, values: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        left, right = values >> self._right_bits, values & self._right_mask
        for number in rounds:
            key = self._keys[number]
            if number % 2:
                right ^= _mix(left, key) & self._right_mask
            else:
                left ^= _mix(right, key) & self._left_mask
        left <<= self._right_bits
        left |= right
        return left


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = values + key
    mixed *= _MULTIPLIER
    mixed ^= mixed >> _HALF
    mixed *= _MIXER
    mixed >>= _HALF
    return mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The rows of one source, epoch after epoch without end."""

    shuffle: Shuffle
    seed: int
    source: str
    """Sources of a mixture have orders of their own."""
    num_rows: int
    seq_len: int
    run_tokens: int = RUN_TOKENS
    window_runs: int = WINDOW_RUNS

    def rows(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row at each index of the endless order, and the epoch it belongs to."""
        first, last = int(indices.min(initial=0)), int(indices.max(initial=0))
        if (epoch := last // self.num_rows) == first // self.num_rows:  # so it nearly always is
            places = indices - epoch * self.num_rows
            return self._epoch_rows(places, epoch), np.full_like(places, epoch)
        epochs, places = np.divmod(indices, self.num_rows)
        rows = np.empty_like(places)
        for epoch in distinct(epochs):
            here = epochs == epoch
            rows[here] = self._epoch_rows(places[here], epoch)
        return rows, epochs

    def _epoch_rows(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        if self.shuffle is Shuffle.NONE:
            return places
        if self.shuffle is Shuffle.FULL:
            return Permutation(self.num_rows, key=self._key(epoch))(places)
        return self._block_rows(places, epoch)

    def _key(self, epoch: int, *parts: object) -> str:
        facts = ("tokenmill order", VERSION, self.seed, epoch, *parts, self.source)
        return "\n".join(map(str, facts))

    def _block_rows(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Runs of rows in a shuffled order; the rows of each window of runs shuffled.

        The last run is short unless it divides evenly. Places behind it are moved up by what it
        lacks, so that place // run is the number of a run; inside its window likewise.
        """
        run = max(1, self.run_tokens // self.seq_len)
        num_runs = -(-self.num_rows // run)
        lacking = num_runs * run - self.num_rows
        runs = Permutation(num_runs, key=self._key(epoch, "runs"))
        short = int(runs.inverse(np.array([num_runs - 1], np.int64))[0])
        end_of_short = short * run + run - lacking
        window = self.window_runs * run
        moved = places + np.where(places >= end_of_short, lacking, 0)
        rows = np.empty_like(places)
        for number in distinct(moved // window):
            here = moved // window == number
            first = number * window
            holds_short = first <= short * run < first + window
            size = min(window, num_runs * run - first) - (lacking if holds_short else 0)
            before = lacking if first > short * run else 0
            inner = Permutation(size, key=self._key(epoch, "window", number))
            mixed = inner(places[here] - (first - before)) + first
            if holds_short:
                mixed += np.where(mixed >= end_of_short, lacking, 0)
            rows[here] = runs(mixed // run) * run + mixed % run
        return rows


# -------------------------------------------------------------------------------------------------
# Which source of a mixture gives which row: integer arithmetic, O(1) for any row, no state.
#
#   | weights -> parts (whole numbers, their sum is the period) -> Round (one period) -> Schedule
#
# A round is Tijdeman's chairman assignment: with n sources, at every prefix of s rows each source
# has been drawn s * part / period times, give or take at most 1 - 1/(2n - 2): always less than one
# row. A schedule repeats its round until a source is used up; then a round of the remaining
# sources begins (a new phase). Where phases end follows from the tables; no row is ever walked
# over.

if TYPE_CHECKING:
    Weight = float | Fraction
    Located = tuple[NDArray[np.int64], NDArray[np.int64]]

MAX_PERIOD = 65_536
"""Longest round: its tables take 1.5 MiB and about 30 ms to build."""
SAME_SHARE = Fraction(1, 10**12)
"""Shares nearer than this are one: 1/6 is not the decimal that a float of it prints."""


def weights_to_parts(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights, in lowest terms, their sum at most `MAX_PERIOD`.

    A float is read as the decimal it prints: 0.7 is 7/10. A ratio that no such round can hold gets
    the parts of a round of `MAX_PERIOD` by largest remainder, at least 1 for a positive weight.

    >>> weights_to_parts([0.7, 0.3])
    (7, 3)
    """
    values = [exact_weight(weight) for weight in weights]
    total = sum(values)
    if total == 0:
        raise UsageError(
            f"the weights {[*map(str, weights)]} leave nothing to draw from",
            hint="give at least one source a weight above 0",
        )
    shares = [value / total for value in values]
    near = [share.limit_denominator(MAX_PERIOD) for share in shares]
    if all(abs(a - b) < SAME_SHARE for a, b in zip(shares, near, strict=True)):
        parts = _lowest_terms(near)
        # A share that was rounded to nothing would never be drawn.
        is_whole = sum(near) == 1 and sum(parts) <= MAX_PERIOD
        if is_whole and near.count(Fraction(0)) == shares.count(Fraction(0)):
            return parts
    return _largest_remainder(_lowest_terms(shares))


def exact(number: object) -> Fraction | None:
    """A number as it is printed; None for what is no finite number."""
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        return None
    return Fraction(str(number))


def exact_weight(weight: Weight) -> Fraction:
    """A weight as it is printed; UsageError for what is none."""
    value = exact(weight)
    if value is None or value < 0:
        raise UsageError(
            f"the weight {weight!r} is no share of anything",
            hint="give a finite number, like 0.7, or 0 for never",
        )
    return value


def _lowest_terms(values: Sequence[Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers in the same ratio."""
    denominator = math.lcm(*(value.denominator for value in values))
    numbers = [int(value * denominator) for value in values]
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _largest_remainder(numbers: Sequence[int]) -> tuple[int, ...]:
    """Parts of a round of `MAX_PERIOD`; a number too small for one part gets one all the same."""
    drawn = [i for i, number in enumerate(numbers) if number]
    if len(drawn) > MAX_PERIOD:
        raise UsageError(
            f"{len(drawn):,} sources are more than the {MAX_PERIOD:,} that a mixture can hold",
            hint="join small stores into fewer",
        )
    parts = [0] * len(numbers)
    total, left = sum(numbers), MAX_PERIOD
    while small := [i for i in drawn if numbers[i] * left < total]:
        for i in small:
            parts[i] = 1
        total, left = total - sum(numbers[i] for i in small), left - len(small)
        drawn = [i for i in drawn if not parts[i]]
    remainders = []
    for i in drawn:
        parts[i], remainder = divmod(numbers[i] * left, total)
        remainders.append((-remainder, i))
    for _, i in sorted(remainders)[: MAX_PERIOD - sum(parts)]:
        parts[i] += 1
    return _lowest_terms([Fraction(part) for part in parts])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Round:
    """One period: which source each place belongs to, and where the places of a source are."""

    parts: NDArray[np.int64]
    source: NDArray[np.int64]
    """Source of each place."""
    rank: NDArray[np.int64]
    """How many places before this one belong to the same source."""
    order: NDArray[np.int64]
    """The places of source 0, then those of source 1, and so on."""
    starts: NDArray[np.int64]
    """Where the places of each source begin in `order`."""
    only: int | None
    """The source, where there is no other."""

    @property
    def period(self) -> int:
        return len(self.source)

    def row_of_draw(self, source: int, draw: int) -> int:
        """Row, in an endless chain of rounds, at which a source is drawn after `draw` draws."""
        turn, rank = divmod(draw, int(self.parts[source]))
        return turn * self.period + int(self.order[int(self.starts[source]) + rank])

    def counts(self, row: int) -> list[int]:
        """Draws of each source before a row, in an endless chain of rounds."""
        turn, place = divmod(row, self.period)
        begun = np.bincount(self.source[:place], minlength=len(self.parts))
        counts: list[int] = (turn * self.parts + begun).tolist()
        return counts


@functools.lru_cache(maxsize=16)
def make_round(parts: tuple[int, ...]) -> Round:
    """The round of these parts, which must be in lowest terms; made once per process."""
    source = _assign(parts)
    sizes = np.array(parts, np.int64)
    starts = np.cumsum(sizes) - sizes
    order = np.argsort(source, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    drawn = [i for i, part in enumerate(parts) if part]
    only = drawn[0] if len(drawn) == 1 else None
    return Round(parts=sizes, source=source, rank=rank, order=order, starts=starts, only=only)


def _assign(parts: tuple[int, ...]) -> NDArray[np.int64]:
    """Earliest deadline first among the draws whose time has come; ties go to the lower source."""
    period = sum(parts)
    drawn = [i for i, part in enumerate(parts) if part]
    if len(drawn) == 1:
        return np.full(period, drawn[0], np.int64)
    windows = [_windows(i, parts, 2 * len(drawn) - 2) for i in drawn]
    releases, keys = (np.concatenate(column) for column in zip(*windows, strict=True))
    waiting: list[int] = keys[np.argsort(releases, kind="stable")].tolist()
    released = np.cumsum(np.bincount(releases, minlength=period + 1))[1:].tolist()
    heap: list[int] = []
    chosen, pushed = [], 0
    for end in released:
        for key in waiting[pushed:end]:
            heapq.heappush(heap, key)
        pushed = end
        chosen.append(heapq.heappop(heap))
    return np.array(chosen, np.int64) % len(parts)


def _windows(
    source: int, parts: tuple[int, ...], slack: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First step of each draw of a source, and its last step joined with the source.

    After step s a source may have been drawn c times only if |c - s * part / period| is at most
    1 - 1/slack. Tijdeman (1980) proved that some sequence keeps to that for all sources; where one
    does, earliest deadline first finds one.
    """
    part, period = parts[source], sum(parts)
    draws = np.arange(part)
    first = -((draws * slack + 1) * period // -(part * slack))
    last = ((draws + 1) * slack - 1) * period // (part * slack)
    return first, last * len(parts) + source


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Phase:
    """Rows of a schedule between two sources that are used up."""

    round: Round
    start: int
    end: int | None
    first: NDArray[np.int64]
    """Index of each source at `start`."""

    def locate(self, rows: NDArray[np.int64]) -> Located:
        if self.round.only is not None:
            source = np.full(len(rows), self.round.only, np.int64)
            return source, rows + (int(self.first[self.round.only]) - self.start)
        turn, place = np.divmod(rows - self.start, self.round.period)
        source = self.round.source[place]
        index = self.first[source] + turn * self.round.parts[source] + self.round.rank[place]
        return source, index

    def counts(self, row: int) -> list[int]:
        drawn = self.round.counts(row - self.start)
        return [first + more for first, more in zip(self.first.tolist(), drawn, strict=True)]


class MixtureSchedule:
    """The rows of one stage of a mixture, numbered from 0.

    Row r is row number `index` of its `source`: `first[source]` and as many more as the stage has
    drawn from it before. A source is used up at index `limits[source]` (None: never); the others
    then share its part, in proportion to their own. The schedule ends when none is left.

    >>> Schedule((2, 1), first=(0, 100), limits=(None, None)).locate(np.arange(6))
    (array([0, 1, 0, 0, 1, 0]), array([  0, 100,   1,   2, 101,   3]))
    """

    def __init__(
        self, parts: Sequence[int], *, first: Sequence[int], limits: Sequence[int | None]
    ) -> None:
        if not len(parts) == len(first) == len(limits):
            raise ValueError(f"{len(parts)} parts, {len(first)} firsts, {len(limits)} limits")
        self.parts = tuple(parts)
        self.first = tuple(first)
        self.limits = tuple(limits)
        self.num_rows = self._count_rows()
        # Made when a row asks for them, and replaced as a whole: readers may be threads.
        self._phases: tuple[_Phase, ...] = ()

    def _count_rows(self) -> int | None:
        """Rows until all sources that have a part are used up; None if one never is."""
        rows = 0
        for part, first, limit in zip(self.parts, self.first, self.limits, strict=True):
            if part and limit is None:
                return None
            if part and limit is not None:
                rows += max(0, limit - first)
        return rows

    def locate(self, rows: NDArray[np.int64]) -> Located:
        """Source of each row, and index of the row in it; rows in any order."""
        rows = np.asarray(rows, np.int64)
        if not len(rows):
            return rows, rows
        low, high = int(rows.min()), int(rows.max())
        phases = self._reach(low, high)
        if low >= phases[-1].start:
            return phases[-1].locate(rows)
        source, index = np.empty_like(rows), np.empty_like(rows)
        for phase in phases:
            here = rows >= phase.start
            if phase.end is not None:
                here &= rows < phase.end
            source[here], index[here] = phase.locate(rows[here])
        return source, index

    def counts(self, row: int) -> tuple[int, ...]:
        """Index that each source has reached before a row: `first`, and what was drawn since."""
        if row == 0:
            return self.first
        phase = self._reach(row - 1, row - 1)[-1]
        return tuple(phase.counts(row))

    def _reach(self, low: int, high: int) -> tuple[_Phase, ...]:
        """The phases up to the one that holds row `high`."""
        if low < 0 or (self.num_rows is not None and high >= self.num_rows):
            raise IndexError(f"rows {low} to {high} of a schedule of {self.num_rows} rows")
        phases = self._phases
        while not phases or (phases[-1].end is not None and phases[-1].end <= high):
            phases = (*phases, self._next_phase(phases[-1] if phases else None))
            self._phases = phases
        for number, phase in enumerate(phases):
            if phase.end is None or phase.end > high:
                return phases[: number + 1]
        raise AssertionError("the last phase holds the row")

    def _next_phase(self, before: _Phase | None) -> _Phase:
        start, first = 0, list(self.first)
        if before is not None:
            assert before.end is not None
            start, first = before.end, before.counts(before.end)
        left = [
            None if limit is None else limit - reached
            for limit, reached in zip(self.limits, first, strict=True)
        ]
        parts = [
            0 if more is not None and more <= 0 else part
            for part, more in zip(self.parts, left, strict=True)
        ]
        divisor = math.gcd(*parts)
        round_ = make_round(tuple(part // divisor for part in parts))
        ends = [
            start + round_.row_of_draw(source, more - 1) + 1
            for source, more in enumerate(left)
            if more is not None and parts[source]
        ]
        return _Phase(
            round=round_,
            start=start,
            end=min(ends, default=None),
            first=np.array(first, np.int64),
        )

    def __repr__(self) -> str:
        return f"Schedule({self.parts}, first={self.first}, limits={self.limits})"
