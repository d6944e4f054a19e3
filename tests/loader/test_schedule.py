"""Rounds keep every prefix near its share; schedules are the same by formula as by walking."""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.loader.order import MAX_PERIOD, MixtureSchedule, make_round, weights_to_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any).map(weights_to_parts)


@st.composite
def schedules(draw: st.DrawFn, *, endless: bool = True) -> MixtureSchedule:
    parts = draw(PARTS)
    first = [draw(st.integers(0, 50)) for _ in parts]
    limit = st.integers(0, 90)
    limits = [draw(st.none() | limit if endless else limit) for _ in parts]
    return MixtureSchedule(parts, first=first, limits=limits)


def walk(schedule: MixtureSchedule, rows: int) -> list[tuple[int, int]]:
    """Row after row, with nothing but `make_round` taken on trust."""
    counts = list(schedule.first)
    walked: list[tuple[int, int]] = []
    parts, place = live_parts(schedule, counts), 0
    while len(walked) < rows and any(parts):
        source = int(make_round(parts).source[place % sum(parts)])
        walked.append((source, counts[source]))
        counts[source] += 1
        place += 1
        if counts[source] == schedule.limits[source]:
            parts, place = live_parts(schedule, counts), 0
    return walked


def live_parts(schedule: MixtureSchedule, counts: Sequence[int]) -> tuple[int, ...]:
    live = [
        0 if limit is not None and count >= limit else part
        for part, count, limit in zip(schedule.parts, counts, schedule.limits, strict=True)
    ]
    return weights_to_parts(live) if any(live) else tuple(live)


def pairs(located: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int]]:
    source, index = located
    return list(zip(source.tolist(), index.tolist(), strict=True))


def worst_error(parts: Sequence[int]) -> Fraction:
    """Largest distance of a source's count from its exact share, over all prefixes of a round."""
    period, worst = sum(parts), Fraction(0)
    steps = np.arange(1, period + 1)
    for source, part in enumerate(parts):
        counts = np.cumsum(make_round(tuple(parts)).source == source)
        worst = max(worst, Fraction(int(np.abs(counts * period - steps * part).max()), period))
    return worst


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([0.7, 0.3], (7, 3)),
        ([70, 30], (7, 3)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
        ([1 / 6, 1 / 3, 1 / 2], (1, 2, 3)),
        ([1 / 7] * 7, (1,) * 7),
        ([0, 5.0, 0], (0, 1, 0)),
        ([1e-3, 1], (1, 1000)),
        ([1e-20, 1], (1, 65_535)),
        ([np.float32(0.7), np.int64(1)], (7, 10)),
        ([1, 65_535], (1, 65_535)),
        # 131,071 = 1 : 131,070 needs a longer round: the small one is rounded up to a part.
        ([1, 131_070], (1, 65_535)),
        # Quotas 8,090.88 + 15,372.85 + 42,072.28: the largest remainders get the two places left.
        ([0.123457, 0.234571, 0.641972], (8_091, 15_373, 42_072)),
    ],
)
def test_weights_become_the_smallest_whole_numbers_in_their_ratio(
    weights: list[float], parts: tuple[int, ...]
) -> None:
    assert weights_to_parts(weights) == parts


@pytest.mark.parametrize(
    "weights",
    [[], [0, 0.0], [-0.1, 1], [math.nan, 1], [math.inf, 1], ["0.7", 1], [True, 1], [None, 1]],
)
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match=r"weight"):
        weights_to_parts(weights)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_parts_are_in_lowest_terms_and_as_near_to_the_weights_as_a_round_can_be(
    weights: list[float],
) -> None:
    assume(any(weights))
    parts = weights_to_parts(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    assert math.gcd(*parts) == 1
    assert sum(parts) <= MAX_PERIOD
    for part, weight in zip(parts, exact, strict=True):
        assert (part > 0) == (weight > 0)
        # Sources rounded up to one part take up to 30 parts from the others.
        assert abs(Fraction(part, sum(parts)) - weight / sum(exact)) <= Fraction(31, MAX_PERIOD)


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=9).filter(any),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
)
def test_weights_of_one_ratio_give_one_schedule(
    weights: list[int], factor: int, divisor: int
) -> None:
    scaled = [Fraction(weight * factor, divisor) for weight in weights]
    assert weights_to_parts(scaled) == weights_to_parts(weights)


def test_every_source_gets_a_part_even_among_thousands_of_tiny_ones() -> None:
    parts = weights_to_parts([1e-12] * 3000 + [1, 2])
    assert parts[:3000] == (1,) * 3000
    assert sum(parts) == MAX_PERIOD
    assert abs(parts[3001] / parts[3000] - 2) < 1e-3


@given(PARTS)
def test_at_every_prefix_each_source_is_less_than_one_row_from_its_share(
    parts: tuple[int, ...],
) -> None:
    sources = sum(part > 0 for part in parts)
    bound = Fraction(0) if sources == 1 else 1 - Fraction(1, 2 * sources - 2)
    assert worst_error(parts) <= bound < 1


@given(PARTS)
def test_the_tables_of_a_round_agree_with_its_sequence(parts: tuple[int, ...]) -> None:
    cycle = make_round(parts)
    sequence = cycle.source.tolist()
    assert tuple(sequence.count(i) for i in range(len(parts))) == parts
    for place, source in enumerate(sequence):
        assert cycle.rank[place] == sequence[:place].count(source)
        assert cycle.row_of_draw(source, int(cycle.rank[place])) == place
    for row in range(2 * len(sequence) + 2):
        twice = (sequence * 3)[:row]
        assert cycle.counts(row) == [twice.count(i) for i in range(len(parts))]


def test_two_sources_alternate_as_evenly_as_rounding_allows() -> None:
    assert make_round((7, 3)).source.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert make_round((1, 1)).source.tolist() == [0, 1]


def test_three_sources_keep_their_golden_order() -> None:
    # The order is part of what a seed promises: it must not change between versions.
    assert make_round((5, 3, 2)).source.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]


def test_the_longest_round_is_built_in_a_blink_and_keeps_its_promise() -> None:
    parts = weights_to_parts([1 + 0.37 * i + i**1.7 / 9 for i in range(20)])
    assert sum(parts) == MAX_PERIOD
    start = time.process_time()
    make_round.__wrapped__(parts)
    assert time.process_time() - start < 0.15
    assert worst_error(parts) <= 1 - Fraction(1, 38)


@given(schedules())
def test_rows_by_formula_are_those_of_a_walk(schedule: MixtureSchedule) -> None:
    rows = 400 if schedule.num_rows is None else schedule.num_rows
    assert pairs(schedule.locate(np.arange(rows))) == walk(schedule, rows)


@given(schedules(endless=False))
def test_a_schedule_ends_when_its_last_source_is_used_up(schedule: MixtureSchedule) -> None:
    walked = walk(schedule, 10_000)
    assert schedule.num_rows == len(walked)
    assert schedule.counts(len(walked)) == tuple(
        max(first, limit or 0) if part else first
        for part, first, limit in zip(schedule.parts, schedule.first, schedule.limits, strict=True)
    )
    with pytest.raises(IndexError):
        schedule.locate(np.array([len(walked)]))
    with pytest.raises(IndexError):
        schedule.counts(len(walked) + 1)


@given(schedules(), st.data())
def test_any_rows_in_any_order_are_those_of_the_sequence(
    schedule: MixtureSchedule, data: st.DataObject
) -> None:
    size = 200 if schedule.num_rows is None else schedule.num_rows
    assume(size > 0)
    rows = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    fresh = MixtureSchedule(schedule.parts, first=schedule.first, limits=schedule.limits)
    picked = pairs(fresh.locate(np.array(rows, np.int64)))
    sequence = walk(schedule, size)
    assert picked == [sequence[row] for row in rows]
    assert pairs(fresh.locate(np.arange(start, stop))) == sequence[start:stop]


@given(schedules(), st.integers(0, 300))
def test_counts_are_what_locate_has_drawn(schedule: MixtureSchedule, row: int) -> None:
    assume(schedule.num_rows is None or row <= schedule.num_rows)
    source, _ = schedule.locate(np.arange(row))
    drawn = np.bincount(source, minlength=len(schedule.parts)).tolist()
    expected = [first + more for first, more in zip(schedule.first, drawn, strict=True)]
    assert list(schedule.counts(row)) == expected


@given(schedules())
def test_no_source_is_drawn_past_its_limit_and_its_rows_come_one_by_one(
    schedule: MixtureSchedule,
) -> None:
    rows = 500 if schedule.num_rows is None else schedule.num_rows
    source, index = schedule.locate(np.arange(rows))
    for i, (first, limit) in enumerate(zip(schedule.first, schedule.limits, strict=True)):
        mine = index[source == i].tolist()
        assert mine == list(range(first, first + len(mine)))
        assert limit is None or not mine or mine[-1] < limit


def test_when_a_source_is_used_up_the_others_share_its_part_in_proportion() -> None:
    schedule = MixtureSchedule((1, 2, 4), first=(0, 0, 0), limits=(None, None, 4))
    source, _ = schedule.locate(np.arange(7 + 300))
    # The last row of source 2 is the seventh at the latest; after it, one in three is source 0.
    end = int(np.flatnonzero(source == 2)[-1]) + 1
    assert end <= 7
    after = source[end:]
    for row in range(1, len(after)):
        assert abs(int((after[:row] == 0).sum()) - row / 3) < 1


def test_a_row_of_the_far_future_costs_no_more_than_the_first() -> None:
    schedule = MixtureSchedule((7, 3), first=(0, 0), limits=(None, 3 * 10**14))
    row = 10**15 - 7
    source, index = schedule.locate(np.array([row - 1, row, 10**15, 10**15 + 1]))
    counts = schedule.counts(row)
    assert sum(counts) == row
    assert abs(counts[1] - 3 * 10**14) < 10
    # Past 10**15 rows source 1 is used up.
    assert source[2:].tolist() == [0, 0]
    assert index[2:].tolist() == [7 * 10**14, 7 * 10**14 + 1]
