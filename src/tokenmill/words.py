"""Numbers, sizes, times and lists as people read and write them: the one place that formats them.

The command line, the reports and the sentences of errors all use these, so that a number looks the
same wherever it is shown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Bytes of '4GB', '512MiB', '1.5g' or a plain number (GB counts in thousands, GiB in 1024s)."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        hint = "write a number and a unit, such as 4GB or 512MiB"
        raise UsageError(f"{text!r} is not a size", hint=hint)
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def _scaled(number: float, units: Sequence[str], *, whole: bool, gap: str) -> str:
    """Three digits and a unit; below the first unit a fraction only where it is not `whole`."""
    for unit in units:
        if abs(number) < 999.5 or unit == units[-1]:
            plain = unit == units[0] and (whole or number == int(number))
            digits = 0 if plain or abs(number) >= 99.5 else 1
            return f"{number:,.{digits}f}{gap}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def format_size(num_bytes: float) -> str:
    """'1.5 GB', '63 MB': thousands, as disks and `parse_size` count them."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB"), whole=True, gap=" ")


def compact(number: float) -> str:
    """'38.2M', '950', '12.3': three digits, for places where columns are few."""
    return _scaled(number, ("", "k", "M", "B", "T"), whole=False, gap="")


def count(number: int, noun: str | None = None, *, plural: str | None = None) -> str:
    """'1,234,567', or '1 document' and '2 documents' where a noun is given."""
    if noun is None:
        return f"{number:,}"
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def share(part: float, whole: float) -> str:
    """'12.3%'; '0%' of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def times(factor: float) -> str:
    """'1.3 times', '40 times', 'over 1,000 times'."""
    if factor > 1000:
        return "over 1,000 times"
    return f"{factor:,.0f} times" if factor >= 9.95 else f"{factor:.1f} times"


def rate(num_bytes: float, seconds: float) -> str:
    """'163 MB/s'; an empty string where no time went by."""
    return f"{format_size(num_bytes / seconds)}/s" if seconds > 0 else ""


def of_budget(used: float, budget: float) -> str:
    """'1.1 of 1.5 GB': both in the unit of the larger."""
    number, unit = format_size(budget).split(" ")
    scale = budget / float(number.replace(",", "")) if budget else 1
    return f"{used / scale:,.1f} of {number} {unit}"


def milliseconds(number: float | None) -> str:
    """'0.031', '4.2', '120'; '-' where there is none."""
    if number is None:
        return "-"
    digits = 0 if number >= 99.5 else 1 if number >= 9.95 else 2 if number >= 0.0995 else 3
    return f"{number:,.{digits}f}"


def brief(seconds: float) -> str:
    """'3.2 us', '41.0 ms', '1.3 s', '120 s': for what is mostly far below a second."""
    number, unit = seconds, "s"
    if seconds < 0.9995:
        number, unit = (seconds * 1e6, "us") if seconds < 0.0009995 else (seconds * 1e3, "ms")
    return f"{number:,.{0 if number >= 99.5 else 1}f} {unit}"


def duration(seconds: float) -> str:
    """'0.04 s', '9.9 s', '12 s', '3:07', '2:03:07'."""
    if round(seconds) >= 60:
        return clock(seconds)
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 9.95 else 0}f} s"


def clock(seconds: float) -> str:
    """'0:12', '3:07', '2:03:07': of steady width, for a live line."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def spoken(seconds: float) -> str:
    """'12 s', '3 minutes', '2.5 hours', '4.1 days': for a sentence."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            amount = seconds / size
            text = f"{amount:.0f}" if amount >= 9.95 else f"{amount:.1f}".removesuffix(".0")
            return f"{text} {unit[:-1] if text == '1' else unit}"
    return duration(seconds)


def small_share(part: float, whole: float) -> str:
    """'12%', '0.31%', 'under 0.001%': three digits of what may be very little."""
    percent = 100 * part / whole if whole else 0
    return "under 0.001%" if 0 < percent < 0.001 else f"{percent:.3g}%"


def examples(found: Sequence[tuple[str, int]], most: int = 8) -> str:
    """'a', 'b' and so on: strings that others wrote, with how often each is there."""
    shown = ", ".join(f"{text!r} ({count(times)})" for text, times in found[:most])
    return shown or "which it was is not kept"


def listed(names: Sequence[str], joint: str = "and") -> str:
    """'a', 'a and b', 'a, b and c'."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {joint} {names[-1]}"


def slice_of(paths: Sequence[str], start: int, end: int | None, kind: str) -> str:
    """'bytes 0 to 999 of 'a.jsonl'', 'the 200 files from 'a' to 'b'': a part of the input."""
    if len(paths) > 1:
        return f"the {len(paths):,} files from {paths[0]!r} to {paths[-1]!r}"
    if end is None:
        return f"{kind} {start:,} and on of {paths[0]!r}" if start else repr(paths[0])
    return f"{kind} {start:,} to {max(start, end - 1):,} of {paths[0]!r}"
