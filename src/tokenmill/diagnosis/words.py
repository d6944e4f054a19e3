"""Numbers and lists as people read them, in the advice and in the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def compact(number: float) -> str:
    """'38.2M', '950', '1.2k': three digits and a unit."""
    for unit in ("", "k", "M", "B", "T"):
        if abs(number) < 999.5 or unit == "T":
            digits = 0 if abs(number) >= 99.5 or (not unit and number == int(number)) else 1
            return f"{number:,.{digits}f}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def count(number: int, noun: str) -> str:
    """'1 worker', '1,200 workers'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def tick_text(number: float) -> str:
    """'10k', '2.5M', '0.2', '0': as short as a number at an axis should be."""
    if abs(number) < 1:
        return f"{number:.6f}".rstrip("0").rstrip(".") or "0"
    text = compact(number)
    digits, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (digits.removesuffix(".0") if "." in digits else digits) + unit


def times(factor: float) -> str:
    """'1.3 times', '40 times', 'over 1,000 times'."""
    if factor > 1000:
        return "over 1,000 times"
    return f"{factor:,.0f} times" if factor >= 9.95 else f"{factor:.1f} times"


def milliseconds(number: float | None) -> str:
    """'0.031', '4.2', '120'; '-' where there is none."""
    if number is None:
        return "-"
    digits = 0 if number >= 99.5 else 1 if number >= 9.95 else 2 if number >= 0.0995 else 3
    return f"{number:,.{digits}f}"


def duration(seconds: float) -> str:
    """'0.04 s', '9.9 s', '12 s'."""
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 9.95 else 0}f} s"


def clock(seconds: float) -> str:
    """'3 minutes', '2.5 hours', '4.1 days'."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            amount = seconds / size
            text = f"{amount:.0f}" if amount >= 9.95 else f"{amount:.1f}".removesuffix(".0")
            return f"{text} {unit[:-1] if text == '1' else unit}"
    return duration(seconds)


def listed(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
