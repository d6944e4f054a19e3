"""Numbers as people read them: separators, units, and rates with their denominator."""

from __future__ import annotations

from tokenmill.config import format_size


def count(number: int, noun: str | None = None, *, plural: str | None = None) -> str:
    """'1,234,567', or '1 document' and '2 documents' where a noun is given."""
    if noun is None:
        return f"{number:,}"
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def compact(number: float) -> str:
    """'38.2M', '950': three digits, for places where columns are few."""
    for unit in ("", "k", "M", "B", "T"):
        if abs(number) < 999.5 or unit == "T":
            digits = 0 if not unit or abs(number) >= 99.5 else 1
            return f"{number:,.{digits}f}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def share(part: float, whole: float) -> str:
    """'12.3%'; '0%' of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def duration(seconds: float) -> str:
    """'0.04 s', '9.9 s', '12 s', '3:07', '2:03:07'."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return clock(seconds)


def clock(seconds: float) -> str:
    """'0:12', '3:07', '2:03:07': of steady width, for a live line."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(num_bytes: float, seconds: float) -> str:
    """'163 MB/s'; an empty string where no time went by."""
    return f"{format_size(num_bytes / seconds)}/s" if seconds > 0 else ""


def of_budget(used: float, budget: float) -> str:
    """'1.1 of 1.5 GB': both in the unit of the larger."""
    number, unit = format_size(budget).split(" ")
    scale = budget / float(number.replace(",", "")) if budget else 1
    return f"{used / scale:,.1f} of {number} {unit}"
