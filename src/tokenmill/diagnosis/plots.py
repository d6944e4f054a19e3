"""Bars, lines and columns as SVG.

Drawings are 400 units wide, so that on a phone letters stay readable and on a desk two stand side
by side. Colours are classes; the page gives them one look for light and one for dark. Every bar and
point has its number as a `<title>`, which a browser shows under the pointer.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.visible import visible_lines
from tokenmill.words import compact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Point = tuple[float, float]

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 26, 38
ACROSS = (float(LEFT), float(WIDTH - RIGHT))
UPRIGHT = (float(HEIGHT - BOTTOM), float(TOP))
ROW = 40
LETTER = 6.4  # width of a letter of the drawing, roughly
MANY_POINTS = 24  # a line with more of them has no dots: its shape says it
MANY_DECADES = 6
LOG_RATIO = 20  # from here on the smaller of two values could not be seen on a linear axis


class Bar(NamedTuple):
    """A value with its name; `state` gives the colour (fed, borderline, starved or plain)."""

    label: str
    value: float
    shown: str
    state: str = "plain"


class Mark(NamedTuple):
    """A line across a plot."""

    value: float
    label: str


class Series(NamedTuple):
    """A line; NaN is a gap. `shown` are words for each point, where numbers do not say it."""

    name: str
    points: Sequence[Point]
    shown: Sequence[str] = ()


# -------------------------------------------------------------------------------------------------
# Tags, and text made safe for them.


class Markup(str):
    """A string that is markup already; all others are text."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element. `class_` is class, `_` in a name is `-`; text in it is escaped."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{''.join(map(safe, children))}</{name}>")


def safe(content: str) -> Markup:
    """Markup as it is, text escaped."""
    return content if isinstance(content, Markup) else Markup(html.escape(visible_lines(content)))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return visible_lines(str(value))


# -------------------------------------------------------------------------------------------------
# From values to places on an axis, and round numbers to stand at it.


@dataclass(frozen=True, slots=True)
class Axis:
    """`low` is at `start`, `high` at `end`, in the units of the drawing."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value is; beyond the ends it is put at them."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = map(math.log10, (low, high, max(value, low)))
        part = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + part * (self.end - self.start)


def linear_axis(low: float, high: float, start: float, end: float, *, most: int = 6) -> Axis:
    """An axis whose ends are round numbers around the values."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    step = nice_step(high - low, most)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low, high, start, end, round_numbers(low, high, most))


def log_axis(low: float, high: float, start: float, end: float) -> Axis:
    """From a power of ten below the values to a round number above them.

    Ticks are powers of ten; with 2 and 5 times them where there are few, fewer where there are
    many.
    """
    low = 10.0 ** math.floor(math.log10(low))
    high = max(nice_step(high, 1), low * 10)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
    powers = range(first, last + 1, -(-(last - first) // MANY_DECADES))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    ticks = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    return Axis(low, high, start, end, ticks, log=True)


def nice_step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many fit into the span."""
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of a nice step."""
    step = nice_step(high - low, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_text(number: float) -> str:
    """'10k', '2.5M', '0.2', '0': as short as a number at an axis should be."""
    if abs(number) < 1:
        return f"{number:.6f}".rstrip("0").rstrip(".") or "0"
    text = compact(number)
    digits, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (digits.removesuffix(".0") if "." in digits else digits) + unit


def _axis_of(values: Sequence[float], start: float, end: float, *, linear: bool = False) -> Axis:
    """From 0, or logarithmic where values differ by orders of magnitude."""
    positive = [value for value in values if value > 0]
    if not linear and len(positive) > 1 and max(positive) / min(positive) >= LOG_RATIO:
        return log_axis(min(positive), max(positive), start, end)
    return linear_axis(0, max(values), start, end, most=5)


# -------------------------------------------------------------------------------------------------
# The plots.


def bar_plot(bars: Sequence[Bar], *, label: str, unit: str, marks: Sequence[Mark] = ()) -> Markup:
    """Horizontal bars, names above them; marks are vertical lines."""
    values = [*(bar.value for bar in bars), *(mark.value for mark in marks)]
    values = [value for value in values if value > 0] or [1.0]
    top = 22 + 17 * len(marks)
    bottom = top + ROW * len(bars)
    left, right = 8.0, WIDTH - 8.0
    axis = _axis_of(values, left, right)
    if axis.log:
        axis = log_axis(min(values) / 2, max(values), left, right)
    parts = []
    for number, value in enumerate(axis.ticks):
        x = axis(value)
        anchor = "start" if number == 0 else "end" if x > WIDTH - 30 else "middle"
        parts.append(_line(x, x, top + 4, bottom, "grid"))
        parts.append(_text(tick_text(value), x, bottom + 16, "tick", anchor))
    parts.append(_text(_unit(unit, axis), 8, 14, "unit"))
    names = []
    for number, bar in enumerate(bars):
        y = top + ROW * number
        length = max(axis(bar.value) - left, 2.0) if bar.value > 0 else 2.0
        title = tag("title", f"{bar.label}: {bar.shown}")
        look = {"rx": 2, "class_": f"bar {bar.state}"}
        parts.append(tag("rect", title, x=left, y=y + 20, width=length, height=13, **look))
        names.append(_text(bar.label, left, y + 15, "name"))
        names.append(_text(bar.shown, right, y + 15, "value", "end"))
    for number, mark in enumerate(sorted(marks, key=lambda mark: mark.value)):
        x, y = axis(mark.value), 31 + 17 * number
        wide = len(mark.label) * LETTER
        is_left = x - wide - 6 > 0 and x + wide + 6 > WIDTH
        place = (x - 5, "end") if is_left else (x + 5, "start")
        words = _text(mark.label, place[0], y, "mark-label", place[1])
        parts.append(tag("g", tag("title", mark.label), _line(x, x, y - 10, bottom, "mark"), words))
    # Names last, so that no line goes through them.
    return _svg([*parts, *names], height=bottom + 26, label=label)


def line_plot(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    unit: str,
    y_format: Callable[[float], str] = compact,
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
    linear: bool = False,
    tried: Sequence[float] = (),
    dots: bool = False,
) -> Markup:
    """Lines over an axis; marks are horizontal lines.

    `tried` are the only places along the axis, evenly apart. With `dots` points are not joined.
    """
    levels = [y for each in series for _, y in each.points if math.isfinite(y)]
    levels = [*levels, *(mark.value for mark in marks)] or [1.0]
    if from_zero:
        y_axis = _axis_of(levels, *UPRIGHT, linear=linear)
    else:
        y_axis = linear_axis(min(levels), max(levels), *UPRIGHT, most=5)
    if tried:
        # A margin, so that the first is not on the other axis.
        steps = max(len(tried) - 1, 1)
        x_axis = Axis(-steps / 18, steps * 19 / 18, *ACROSS, range(len(tried)))
        places = {value: float(number) for number, value in enumerate(tried)}
        ticks = [(places[value], tick_text(value)) for value in tried[:: -(-len(tried) // 12)]]
    else:
        xs = [x for each in series for x, _ in each.points]
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        low = 0.0 if 0 <= low < high / 3 else low
        high = high if high > low else low + 1
        x_axis = Axis(low, high, *ACROSS, round_numbers(low, high, 6))
        places = {}
        ticks = [(value, tick_text(value)) for value in x_axis.ticks]
    parts = _frame(y_axis, unit=_unit(unit, y_axis), x_label=x_label)
    parts.insert(-2, _line(*ACROSS, HEIGHT - BOTTOM, HEIGHT - BOTTOM, "axis"))
    for value, words in ticks:
        x = x_axis(value)
        parts.insert(-2, _line(x, x, HEIGHT - BOTTOM, HEIGHT - BOTTOM + 4, "axis"))
        anchor = "end" if x > WIDTH - 30 else "middle"
        parts.insert(-2, _text(words, x, HEIGHT - BOTTOM + 16, "tick", anchor))
    for number, (name, points, given) in enumerate(series):
        shown = given or [f"{compact(at)}: {y_format(value)}" for at, value in points]
        colour = f"c{number % 7 + 1}"
        path, circles, pen = [], [], "M"
        for (at, value), words in zip(points, shown, strict=True):
            if not math.isfinite(value):
                pen = "M"
                continue
            x, y = x_axis(places.get(at, at)), y_axis(value)
            path.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
            title = tag("title", f"{name}, {words}")
            place = {"cx": round(x, 1), "cy": round(y, 1), "r": 2 if dots else 3}
            circles.append(tag("circle", title, **place, class_=f"dot {colour}"))
        line = tag("path", tag("title", name), d=" ".join(path), class_=f"line {colour}")
        drawn = circles if dots or len(circles) <= MANY_POINTS else []
        parts.append(tag("g", *([] if dots else [line]), *drawn))
    for mark in marks:
        y = y_axis(mark.value)
        above = y + 14 if y < TOP + 14 else y - 5
        words = _text(mark.label, WIDTH - RIGHT - 2, above, "mark-label", "end")
        parts.append(tag("g", tag("title", mark.label), _line(*ACROSS, y, y, "mark"), words))
    return _svg(parts, height=HEIGHT, label=label)


def column_plot(columns: Sequence[Bar], *, label: str, unit: str, x_label: str) -> Markup:
    """Upright columns beside each other: a histogram."""
    axis = linear_axis(0, max((c.value for c in columns), default=1) or 1, *UPRIGHT, most=5)
    room = (WIDTH - LEFT - RIGHT) / max(len(columns), 1)
    widest = max((len(column.label) for column in columns), default=1) * LETTER
    every = max(1, math.ceil((widest + 4) / room))
    parts = _frame(axis, unit=unit, x_label=x_label)
    for number, column in enumerate(columns):
        x, y = LEFT + number * room, axis(column.value)
        title = tag("title", f"{column.label} {x_label}: {column.shown}")
        size = {"width": max(room - 2, 1), "height": axis.start - y}
        bar = tag("rect", x=x + 1, y=y, **size, class_=f"bar {column.state}")
        parts.append(tag("g", title, bar))
        if number % every == 0:
            below = HEIGHT - BOTTOM + 15
            parts.append(_text(column.label, x + room / 2, below, "tick", "middle"))
    return _svg(parts, height=HEIGHT, label=label)


def _frame(y: Axis, *, unit: str, x_label: str) -> list[Markup]:
    """The upright axis with its grid, and what both axes are."""
    parts = []
    for value in y.ticks:
        parts.append(_line(*ACROSS, y(value), y(value), "grid"))
        parts.append(_text(tick_text(value), LEFT - 6, y(value) + 4, "tick", "end"))
    parts.append(_text(unit, 4, 13, "unit"))
    parts.append(_text(x_label, WIDTH - RIGHT, HEIGHT - 5, "unit", "end"))
    return parts


def _unit(unit: str, axis: Axis) -> str:
    return f"{unit}, log scale" if axis.log else unit


def _text(words: str, x: float, y: float, class_: str, anchor: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def _line(x1: float, x2: float, y1: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=class_)


def _svg(parts: Sequence[Markup], *, height: float, label: str) -> Markup:
    look = {"role": "img", "aria_label": label, "xmlns": "http://www.w3.org/2000/svg"}
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height:.0f}", **look)
