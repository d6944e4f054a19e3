from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.diagnosis.plots import EvenScale, linear_scale, log_scale, tick_text
from tokenmill.words import compact, milliseconds, spoken, times

numbers = st.floats(1e-6, 1e12)


@given(low=numbers, high=numbers)
def test_a_linear_axis_holds_its_values_and_has_a_few_round_ticks(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    scale = linear_scale(low, high, start=0, end=100, most=5)
    ticks = scale.ticks(5)
    assert scale.low <= low * (1 + 1e-6)
    assert scale.high >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8
    assert 0 <= scale(low) <= scale(high) <= 100


@given(low=numbers, high=numbers)
def test_a_logarithmic_axis_does_too(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    scale = log_scale(low, high, start=200, end=0)
    ticks = scale.ticks()
    assert scale.low <= low * (1 + 1e-6)
    assert scale.high >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(ticks)
    assert 200 >= scale(low) >= scale(high) >= 0


def test_ticks_are_numbers_that_people_like() -> None:
    assert linear_scale(0, 93, start=0, end=1).ticks() == [0, 20, 40, 60, 80, 100]
    assert log_scale(30, 4000, start=0, end=1).ticks() == [10, 100, 1000]
    assert log_scale(30, 80, start=0, end=1).ticks() == [10, 20, 50, 100]


def test_an_axis_of_settings_has_them_evenly_apart() -> None:
    scale = EvenScale(values=(1, 8, 64), start=0, end=100)
    assert [scale(value) for value in scale.ticks()] == pytest.approx([5, 50, 95])
    assert EvenScale(values=(4,), start=0, end=100)(4) == 5


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
