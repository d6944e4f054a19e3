"""Which row comes when: a function of (seed, epoch, index), computed for any index at once.

    index (0, 1, 2 ...)  ->  epoch, index in the epoch  ->  row

The full shuffle is a keyed permutation of 0..n-1: a Feistel network on the next power of two,
walked until it lands below n. It keeps no table, so that an epoch of any size starts at once, and
it is made of 64-bit integers alone, so that it is the same on every machine. What a seed gives must
never change, since runs are resumed by it: a change of anything here is a new `VERSION`.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import operator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import UsageError
from tokenmill.store.stream import distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

Weight: TypeAlias = float | Fraction
Ints: TypeAlias = NDArray[np.int64]
Located: TypeAlias = tuple[Ints, Ints]  # two numbers for each row that was asked for

VERSION = 1
SHUFFLES = ("full", "block", "nearby", "none")
ROUNDS = 6
# Smaller networks shuffle badly; walking down from 64 to a few rows costs nothing to speak of.
MIN_BITS = 6
RUN_TOKENS = 1 << 17  # block shuffle reads ranges of so many tokens: 256 KiB or 512 KiB in one go
WINDOW_RUNS = 256  # block shuffle mixes the rows of so many ranges: about 33 million tokens

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
ENDLESS = 1 << 62  # rows of what has no end


def check_shuffle(value: object) -> str:
    """How the rows of an epoch are ordered, of what a user may say: True, False, or a name."""
    name = str(value)
    if isinstance(value, bool):
        name = "full" if value else "none"
    if name not in SHUFFLES:
        raise UsageError(
            f"shuffle={value!r} is not known",
            hint='use shuffle=True (any row may come next), "block" (slow disks), "nearby" (a store'
            " that is still being built) or False",
        )
    return name


def permuted(indices: Ints, size: int, *, key: str, inverse: bool = False) -> Ints:
    """Where a permutation of 0..size-1, which is a function of its key, sends each index.

    >>> permuted(np.arange(5), 5, key="seed 0")
    array([...])
    """
    if size == 1:
        return np.zeros_like(indices)
    bits = max(MIN_BITS, (size - 1).bit_length())
    shift = np.uint64(bits // 2)
    left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    right_mask = np.uint64((1 << (bits // 2)) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    rounds = list(enumerate(np.frombuffer(digest, "<u8").astype(np.uint64)))
    if inverse:
        rounds.reverse()

    def network(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> shift, values & right_mask
        for number, round_key in rounds:
            if number % 2:
                right ^= _mix(left, round_key) & right_mask
            else:
                left ^= _mix(right, round_key) & left_mask
        left <<= shift
        left |= right
        return left

    found = network(indices.astype(np.uint64))
    while (outside := found >= np.uint64(size)).any():
        found[outside] = network(found[outside])
    return found.astype(np.int64)


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = values + key
    mixed *= _MULTIPLIER
    mixed ^= mixed >> _HALF
    mixed *= _MIXER
    mixed >>= _HALF
    return mixed


def ordered_rows(
    indices: Ints,
    *,
    shuffle: str,
    seed: int,
    source: str,
    num_rows: int,
    seq_len: int,
    run_tokens: int = RUN_TOKENS,
    window_runs: int = WINDOW_RUNS,
) -> Located:
    """The row at each index of a source's endless order, and the epoch it belongs to.

    Sources of a mixture have orders of their own, by their names.
    """
    order = _Order(shuffle, seed, source, num_rows, max(1, run_tokens // seq_len), window_runs)
    first, last = int(indices.min(initial=0)), int(indices.max(initial=0))
    if (epoch := last // num_rows) == first // num_rows:  # so it nearly always is
        places = indices - epoch * num_rows
        return order.rows(places, epoch), np.full_like(places, epoch)
    epochs, places = np.divmod(indices, num_rows)
    rows = np.empty_like(places)
    for epoch in distinct(epochs):
        here = epochs == epoch
        rows[here] = order.rows(places[here], epoch)
    return rows, epochs


def places_of_rows(
    rows: Ints,
    epoch: int,
    *,
    shuffle: str,
    seed: int,
    source: str,
    num_rows: int,
    seq_len: int,
    run_tokens: int = RUN_TOKENS,
    window_runs: int = WINDOW_RUNS,
) -> Ints:
    """The inverse of `ordered_rows`: how many rows of an epoch come before each of these."""
    order = _Order(shuffle, seed, source, num_rows, max(1, run_tokens // seq_len), window_runs)
    return order.places(rows, epoch)


class NearbyWindows(NamedTuple):
    """Windows of a stream of rows: the first is one run, each twice the one before, to the largest.

    A reader that follows a build can begin with the first run, and mixes as much as block shuffle
    does when some 30 million tokens are there.
    """

    run: int
    most_runs: int

    @classmethod
    def of(cls, seq_len: int) -> NearbyWindows:
        """Those of a loader."""
        return cls(max(1, RUN_TOKENS // seq_len), WINDOW_RUNS)

    @property
    def _growing(self) -> int:
        """How many windows come before those of the largest size."""
        return (self.most_runs - 1).bit_length()

    def holding(self, rows: Ints) -> Ints:
        """The window of each row."""
        firsts = np.array([self.bounds(k)[0] for k in range(self._growing + 1)], np.int64)
        later = np.maximum(rows - firsts[-1], 0) // (self.run * self.most_runs)
        found: Ints = firsts.searchsorted(rows, side="right") - 1 + later
        return found

    def bounds(self, number: int) -> tuple[int, int]:
        """First row of a window, and the row after its last; there may be fewer in the stream."""
        growing = min(number, self._growing)
        later = number - growing
        first = ((1 << growing) - 1 + later * self.most_runs) * self.run
        size = min(1 << growing, self.most_runs) * self.run
        return first, first + size

    def whole(self, num_rows: int) -> int:
        """Rows in windows that are whole when the stream has so many: their order is known."""
        return self.bounds(int(self.holding(np.array([num_rows]))[0]))[0]

    def end_of(self, row: int) -> int:
        """The row after the last one of the window that has a row."""
        return self.bounds(int(self.holding(np.array([row]))[0]))[1]


class _Order(NamedTuple):
    """Orders of the rows of a source: one for each epoch.

    Block shuffle is runs of rows in a shuffled order; the rows of each window of runs shuffled. The
    last run is short unless it divides evenly. Places after it are moved up by what it lacks, so
    that place // run is the number of a run; inside its window likewise.

    Nearby is that from the second epoch on. In the first one, rows come in the order of the stream,
    those of each window shuffled: so a window is known when its rows are, whatever follows it.
    """

    shuffle: str
    seed: int
    source: str
    num_rows: int
    run: int
    window_runs: int

    def key(self, *parts: object) -> str:
        return "\n".join(map(str, ("tokenmill order", VERSION, self.seed, *parts, self.source)))

    def rows(self, places: Ints, epoch: int) -> Ints:
        """The row at each place of an epoch."""
        if self.shuffle == "none":
            return places
        if self.shuffle == "full":
            return permuted(places, self.num_rows, key=self.key(epoch))
        if self.is_nearby(epoch):
            return self._near(places, inverse=False)
        blocks, rows = self._blocks(epoch), np.empty_like(places)
        moved = places + np.where(places >= blocks.end, blocks.lacking, 0)
        for number in distinct(moved // blocks.window):
            here = moved // blocks.window == number
            first, size, before = blocks.of_window(number)
            key = self.key(epoch, "window", number)
            mixed = permuted(places[here] - (first - before), size, key=key) + first
            if blocks.is_short(number):
                mixed += np.where(mixed >= blocks.end, blocks.lacking, 0)
            runs = permuted(mixed // self.run, blocks.num_runs, key=self.key(epoch, "runs"))
            rows[here] = runs * self.run + mixed % self.run
        return rows

    def places(self, rows: Ints, epoch: int) -> Ints:
        """The place in an epoch of each row."""
        if self.shuffle == "none":
            return rows
        if self.shuffle == "full":
            return permuted(rows, self.num_rows, key=self.key(epoch), inverse=True)
        if self.is_nearby(epoch):
            return self._near(rows, inverse=True)
        blocks, places = self._blocks(epoch), np.empty_like(rows)
        key = self.key(epoch, "runs")
        runs = permuted(rows // self.run, blocks.num_runs, key=key, inverse=True)
        mixed = runs * self.run + rows % self.run
        for number in distinct(mixed // blocks.window):
            here = mixed // blocks.window == number
            first, size, before = blocks.of_window(number)
            inner = mixed[here] - first
            if blocks.is_short(number):
                inner -= np.where(mixed[here] >= blocks.end, blocks.lacking, 0)
            key = self.key(epoch, "window", number)
            places[here] = permuted(inner, size, key=key, inverse=True) + (first - before)
        return places

    def is_nearby(self, epoch: int) -> bool:
        """Whether rows stay in windows of the stream."""
        return self.shuffle == "nearby" and epoch == 0

    def _near(self, places: Ints, *, inverse: bool) -> Ints:
        """Rows of the first epoch, each in the window of the stream that its place is in."""
        found = np.empty_like(places)
        windows = NearbyWindows(self.run, self.window_runs)
        numbers = windows.holding(places)
        for number in distinct(numbers):
            here = numbers == number
            first, end = windows.bounds(number)
            key, size = self.key(0, "nearby", number), min(end, self.num_rows) - first
            found[here] = permuted(places[here] - first, size, key=key, inverse=inverse) + first
        return found

    def _blocks(self, epoch: int) -> _Blocks:
        num_runs = -(-self.num_rows // self.run)
        lacking = num_runs * self.run - self.num_rows
        last_run = np.array([num_runs - 1], np.int64)
        key = self.key(epoch, "runs")
        short = int(permuted(last_run, num_runs, key=key, inverse=True)[0])
        begin = short * self.run
        window = self.window_runs * self.run
        return _Blocks(
            num_runs, num_runs * self.run, lacking, begin, begin + self.run - lacking, window
        )


class _Blocks(NamedTuple):
    """Where the short run of an epoch is, and what follows from it."""

    num_runs: int
    rows: int  # were no run short
    lacking: int
    begin: int  # of the short run
    end: int  # of its rows
    window: int  # rows of a window

    def is_short(self, number: int) -> bool:
        return number == self.begin // self.window

    def of_window(self, number: int) -> tuple[int, int, int]:
        """First place of a window, were no run short; its rows; what lacks before it."""
        first = number * self.window
        size = min(self.window, self.rows - first)
        size -= self.lacking if self.is_short(number) else 0
        return first, size, self.lacking if first > self.begin else 0


# -------------------------------------------------------------------------------------------------
# Which rank takes which rows of a global batch, so that their costs are even.
#
# Rows are dealt from the dearest on to the rank that has the least so far; then the rank that has
# the most exchanges a row with another one, whichever makes the larger of the two the smallest, as
# long as that helps. Integers alone: every rank and every machine finds the same.

EVEN = Fraction(1, 1000)  # above the mean: not worth another exchange
MOST_EXCHANGES = 1 << 20  # to choose among; with more rows than that, dealing them is even enough


def dealt(costs: Ints, ranks: int) -> Ints:
    """Places of the rows of each rank, equally many and by decreasing cost: (ranks, rows of one).

    >>> dealt(np.array([9, 1, 8, 1]), 2)
    array([[0, 3], [2, 1]])
    """
    size = len(costs) // ranks
    places = np.argsort(-costs, kind="stable")
    # The first row of each is that of its number: a heap of sums and ranks that have room.
    taken: list[list[int]] = [[place] for place in places[:ranks].tolist()]
    heap = [(int(costs[row]), rank) for rank, (row,) in enumerate(taken)] if size > 1 else []
    heapq.heapify(heap)
    for place, cost in zip(places[ranks:].tolist(), costs[places[ranks:]].tolist(), strict=True):
        total, rank = heap[0]
        taken[rank].append(place)
        if len(taken[rank]) == size:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (total + cost, rank))
    found = np.array(taken, np.int64)
    _exchange(found, costs[found])
    order = np.argsort(-costs[found], axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1)


def _exchange(places: Ints, costs: Ints) -> None:
    """Rows of the rank that has the most for others, in place, as long as that helps."""
    if costs.size * costs.shape[1] > MOST_EXCHANGES:
        return
    sums = costs.sum(axis=1)
    ranks, total = len(sums), int(sums.sum())
    for _ in range(4 * ranks):
        most = int(sums.argmax())
        if (int(sums[most]) * ranks - total) * EVEN.denominator <= total * EVEN.numerator:
            return
        less = costs[most][:, None, None] - costs  # what it has less after each exchange
        larger = np.maximum(sums[most] - less, sums[:, None] + less)
        best = int(larger.argmin())
        if larger.flat[best] >= sums[most]:
            return
        mine, other, theirs = (int(at) for at in np.unravel_index(best, larger.shape))
        change = less[mine, other, theirs]
        for table in (places, costs):
            kept = table[most, mine]
            table[most, mine] = table[other, theirs]
            table[other, theirs] = kept
        sums[most] -= change
        sums[other] += change


# -------------------------------------------------------------------------------------------------
# Which source of a mixture gives which row: integer arithmetic, O(1) for any row, no state.
#
#   weights -> parts (whole numbers, their sum is the period) -> Round (one period) -> schedule
#
# A round is Tijdeman's chairman assignment: with n sources, at every prefix of s rows each source
# has been drawn s * part / period times, give or take at most 1 - 1/(2n - 2): always less than one
# row. A schedule repeats its round until a source is used up; then a schedule of the others
# follows. Where it begins follows from the tables; no row is ever walked over.

MAX_PERIOD = 65_536  # longest round: its tables take 1.5 MiB and about 30 ms to build
# Shares nearer than this are one: 1/6 is not the decimal that a float of it prints.
SAME_SHARE = Fraction(1, 10**12)


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

    parts: Ints
    source: Ints  # source of each place
    rank: Ints  # how many places before this one belong to the same source
    order: Ints  # the places of source 0, then those of source 1, and so on
    starts: Ints  # where the places of each source begin in `order`
    only: int | None  # the source, where there is no other

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


@lru_cache(maxsize=16)
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


def _assign(parts: tuple[int, ...]) -> Ints:
    """Earliest deadline first among the draws whose time has come; ties go to the lower source.

    After step s a source may have been drawn c times only if |c - s * part / period| is at most
    1 - 1/slack. Tijdeman (1980) proved that some sequence keeps to that for all sources; where one
    does, earliest deadline first finds one.
    """
    period = sum(parts)
    drawn = [i for i, part in enumerate(parts) if part]
    if len(drawn) == 1:
        return np.full(period, drawn[0], np.int64)
    slack = 2 * len(drawn) - 2
    # Of each draw: its first step, and its last step joined with the source.
    releases, keys = [], []
    for source in drawn:
        part, draws = parts[source], np.arange(parts[source])
        releases.append(-((draws * slack + 1) * period // -(part * slack)))
        last = ((draws + 1) * slack - 1) * period // (part * slack)
        keys.append(last * len(parts) + source)
    first = np.concatenate(releases)
    waiting: list[int] = np.concatenate(keys)[np.argsort(first, kind="stable")].tolist()
    heap: list[int] = []
    chosen, pushed = [], 0
    for end in np.cumsum(np.bincount(first, minlength=period + 1))[1:].tolist():
        for key in waiting[pushed:end]:
            heapq.heappush(heap, key)
        pushed = end
        chosen.append(heapq.heappop(heap))
    return np.array(chosen, np.int64) % len(parts)


class MixtureSchedule:
    """The rows of one stage of a mixture, numbered from 0.

    Row r is row number `index` of its `source`: `first[source]` and as many more as the stage has
    drawn from it before. A source is used up at index `limits[source]` (None: never); the others
    then share its part, in proportion to their own. The schedule ends when none is left.

    >>> MixtureSchedule((2, 1), first=(0, 100), limits=(None, None)).locate(np.arange(6))
    (array([0, 1, 0, 0, 1, 0]), array([  0, 100,   1,   2, 101,   3]))
    """

    def __init__(
        self, parts: Sequence[int], *, first: Sequence[int], limits: Sequence[int | None]
    ) -> None:
        self.parts, self.first, self.limits = tuple(parts), tuple(first), tuple(limits)
        left = [
            None if limit is None else max(0, limit - reached)
            for reached, limit in zip(first, limits, strict=True)
        ]
        wanted = [more for part, more in zip(parts, left, strict=True) if part]
        self.num_rows = None if None in wanted else sum(filter(None, wanted))
        # Sources that are not used up share the rows below `_end`, by a round of their own.
        self._first = np.array(first, np.int64)
        self._end = 0
        live = [0 if more == 0 else part for part, more in zip(parts, left, strict=True)]
        if divisor := math.gcd(*live):
            self._round = make_round(tuple(part // divisor for part in live))
            ends = [
                self._round.row_of_draw(source, more - 1) + 1
                for source, more in enumerate(left)
                if more is not None and live[source]
            ]
            self._end = min(ends, default=ENDLESS)

    def locate(self, rows: Ints) -> Located:
        """Source of each row, and index of the row in it; rows in any order."""
        rows = np.asarray(rows, np.int64)
        if not len(rows):
            return rows, rows
        phase, start = self._holding(int(rows.min()))
        last, _ = self._holding(int(rows.max()))
        if phase is last:  # so it nearly always is
            return phase._by_round(rows - start)
        source, index = np.empty_like(rows), np.empty_like(rows)
        while True:
            here = (rows >= start) & (rows < start + phase._end)
            source[here], index[here] = phase._by_round(rows[here] - start)
            if phase is last:
                return source, index
            phase, start = phase._then, start + phase._end

    def rows_at(self, source: int, indices: Ints) -> Ints:
        """The inverse of `locate`: the row that is each index of a source; -1 where none is."""
        found, phase, start = np.full_like(indices, -1), self, 0
        while phase._end:
            places = np.flatnonzero((found < 0) & (indices >= phase.first[source]))
            if len(places) and (part := int(phase._round.parts[source])):
                turn, rank = np.divmod(indices[places] - phase.first[source], part)
                at = int(phase._round.starts[source]) + rank
                rows = turn * phase._round.period + phase._round.order[at]
                inside = rows < phase._end
                found[places[inside]] = rows[inside] + start
            if phase._end == ENDLESS:
                break
            phase, start = phase._then, start + phase._end
        return found

    def counts(self, row: int) -> tuple[int, ...]:
        """Index that each source has reached before a row: `first`, and what was drawn since."""
        if row == 0:
            return self.first
        phase, start = self._holding(row - 1)
        return phase._reached(row - start)

    def _holding(self, row: int) -> tuple[MixtureSchedule, int]:
        """The schedule, this or a later one, whose round gives a row; and where it begins."""
        if row < 0 or (self.num_rows is not None and row >= self.num_rows):
            raise IndexError(f"row {row} of a schedule of {self.num_rows} rows")
        phase, start = self, 0
        while row - start >= phase._end:
            phase, start = phase._then, start + phase._end
        return phase, start

    @cached_property
    def _then(self) -> MixtureSchedule:
        """What follows when a source is used up."""
        return MixtureSchedule(self.parts, first=self._reached(self._end), limits=self.limits)

    def _by_round(self, rows: Ints) -> Located:
        found = self._round
        if found.only is not None:
            return np.full_like(rows, found.only), rows + self.first[found.only]
        turn, place = np.divmod(rows, found.period)
        source = found.source[place]
        return source, self._first[source] + turn * found.parts[source] + found.rank[place]

    def _reached(self, row: int) -> tuple[int, ...]:
        return tuple(map(operator.add, self.first, self._round.counts(row)))

    def __repr__(self) -> str:
        return f"MixtureSchedule({self.parts}, first={self.first}, limits={self.limits})"
