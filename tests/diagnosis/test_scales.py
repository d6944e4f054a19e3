from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.diagnosis.page import Series, line_plot, linear_axis, log_axis, tick_text
from tokenmill.words import compact, milliseconds, spoken, times

numbers = st.floats(1e-6, 1e12)


@given(low=numbers, high=numbers)
def test_a_linear_axis_holds_its_values_and_has_a_few_round_ticks(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    axis = linear_axis(low, high, 0, 100, most=5)
    assert axis.low <= low * (1 + 1e-6)
    assert axis.high >= high * (1 - 1e-6)
    assert 2 <= len(axis.ticks) <= 8
    assert 0 <= axis(low) <= axis(high) <= 100


@given(low=numbers, high=numbers)
def test_a_logarithmic_axis_does_too(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    axis = log_axis(low, high, 200, 0)
    assert axis.low <= low * (1 + 1e-6)
    assert axis.high >= high * (1 - 1e-6)
    assert 2 <= len(axis.ticks) <= 8
    assert axis.ticks == sorted(axis.ticks)
    assert 200 >= axis(low) >= axis(high) >= 0


def test_ticks_are_numbers_that_people_like() -> None:
    assert linear_axis(0, 93, 0, 1).ticks == [0, 20, 40, 60, 80, 100]
    assert log_axis(30, 4000, 0, 1).ticks == [10, 100, 1000]
    assert log_axis(30, 80, 0, 1).ticks == [10, 20, 50, 100]


@pytest.mark.parametrize(
    ("tried", "places"), [((1.0, 8.0, 64.0), [62.9, 217, 371.1]), ((4.0,), [217])]
)
def test_settings_that_are_powers_are_evenly_apart(
    tried: tuple[float, ...], places: list[float]
) -> None:
    points = [(value, 1.0) for value in tried]
    plot = line_plot([Series("a", points)], label="l", x_label="x", unit="y", tried=tried)
    assert [float(x) for x in re.findall(r'cx="([\d.]+)"', plot)] == pytest.approx(places, abs=0.1)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (tick_text(0), "0"),
        (tick_text(0.25), "0.25"),
        (tick_text(10_000), "10k"),
        (tick_text(2_500_000), "2.5M"),
        (tick_text(100), "100"),
        (compact(1_234_567), "1.2M"),
        (compact(950), "950"),
        (milliseconds(None), "-"),
        (milliseconds(0.0312), "0.031"),
        (milliseconds(123.4), "123"),
        (times(1.26), "1.3 times"),
        (times(40.4), "40 times"),
        (times(float("inf")), "over 1,000 times"),
        (spoken(5), "5.0 s"),
        (spoken(60), "1 minute"),
        (spoken(9000), "2.5 hours"),
    ],
)
def test_numbers_are_short(shown: str, expected: str) -> None:
    assert shown == expected
