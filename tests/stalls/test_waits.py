"""Any number of waits in little memory: the answers are those of all of them together."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.stalls.meter import Slowest, WaitSeries, WaitTally

if TYPE_CHECKING:
    from collections.abc import Iterator

durations = st.one_of(st.floats(0, 1e-6), st.floats(1e-6, 1e-2), st.floats(1e-2, 5e4))
many = st.lists(durations, max_size=300)
cuts = st.lists(st.integers(0, 300), max_size=4)


def portions(waits: list[float], places: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """The waits cut in pieces, each with the number of its first."""
    edges = sorted({0, len(waits), *(place for place in places if place < len(waits))})
    for begin, end in itertools.pairwise(edges):
        yield begin, np.array(waits[begin:end])


@given(many, cuts, st.floats(0, 100))
def test_percentiles_are_numpys_to_within_a_percent(
    waits: list[float], places: list[int], percent: float
) -> None:
    tally = WaitTally()
    for _, portion in portions(waits, places):
        tally.add(portion)
    expected = float(np.percentile(waits, percent)) if waits else 0.0
    assert abs(tally.percentile(percent) - expected) <= 0.01 * expected + 1e-7
    assert tally.count == len(waits)
    assert np.isclose(tally.seconds, sum(waits))
    assert tally.longest == max(waits, default=0.0)


@given(many, cuts)
def test_the_slowest_are_found_with_their_steps(waits: list[float], places: list[int]) -> None:
    slowest = Slowest(5)
    for first, portion in portions(waits, places):
        slowest.add(first, portion)
    order = sorted(range(len(waits)), key=lambda step: (-waits[step], step))
    assert slowest.found == [(step, waits[step]) for step in order[:5]]


@given(many, cuts)
def test_a_series_keeps_the_longest_of_equal_stretches(
    waits: list[float], places: list[int]
) -> None:
    series = WaitSeries(16)
    for first, portion in portions(waits, places):
        series.add(first, portion)
        series.points()  # looking at it changes nothing
    length = 1
    while len(waits) > 16 * length:
        length *= 2
    expected = []
    for begin in range(0, len(waits), length):
        steps = range(begin, min(begin + length, len(waits)))
        longest = max(steps, key=lambda step: (waits[step], -step))
        expected.append((longest, waits[longest]))
    assert series.points() == expected
    assert len(expected) <= 16


def test_a_tally_of_nothing_is_nothing() -> None:
    tally = WaitTally()
    tally.add(np.zeros(0))
    assert (tally.count, tally.seconds, tally.longest, tally.percentile(50)) == (0, 0.0, 0.0, 0.0)


def test_waits_longer_than_the_last_bin_are_counted() -> None:
    tally = WaitTally()
    tally.add(np.array([1.0, 1e9, 1e9]))
    assert tally.longest == tally.percentile(100) == 1e9
    assert tally.percentile(50) > 9e4
