"""Bars, lines and columns as SVG.

Drawings are 400 units wide, so that on a phone letters stay readable and on a desk two stand side
by side. Colours are classes; the page gives them one look for light and one for dark. Every bar and
point has its number as a `<title>`, which a browser shows under the pointer.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.visible import visible_lines
from tokenmill.words import compact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def tick_text(number: float) -> str:
    """'10k', '2.5M', '0.2', '0': as short as a number at an axis should be."""
    if abs(number) < 1:
        return f"{number:.6f}".rstrip("0").rstrip(".") or "0"
    text = compact(number)
    digits, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (digits.removesuffix(".0") if "." in digits else digits) + unit


# -------------------------------------------------------------------------------------------------
# From values to places on an axis, and round numbers to stand at it.

MANY_DECADES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """An axis: `low` lies at `start`, `high` at `end`, in the units of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies; beyond the ends it is put at them."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            part = (math.log10(max(value, self.low)) - low) / (high - low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers from low to high."""
        return (
            log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, most)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvenScale:
    """An axis with a few values only, each as far from the next."""

    values: tuple[float, ...]
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where one of the values lies."""
        steps = max(len(self.values) - 1, 1)
        # A margin, so that the first does not lie on the other axis.
        room = (self.end - self.start) * 0.9
        return self.start + (self.end - self.start) * 0.05 + self.values.index(value) / steps * room

    def ticks(self, most: int = 6) -> list[float]:
        """The values, or every n-th where they are many."""
        return list(self.values[:: -(-len(self.values) // (2 * most)) or 1])


def linear_scale(low: float, high: float, *, start: float, end: float, most: int = 6) -> Scale:
    """A scale whose ends are round numbers around the values."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    step = nice_step(high - low, most)
    return Scale(
        low=math.floor(low / step + 1e-9) * step,
        high=math.ceil(high / step - 1e-9) * step,
        start=start,
        end=end,
    )


def log_scale(low: float, high: float, *, start: float, end: float) -> Scale:
    """A scale from a power of ten below the values to a round number above them."""
    bottom = 10.0 ** math.floor(math.log10(low))
    top = next(
        factor * 10.0 ** math.floor(math.log10(high))
        for factor in (1, 2, 5, 10)
        if factor * 10.0 ** math.floor(math.log10(high)) >= high * (1 - 1e-9)
    )
    return Scale(low=bottom, high=max(top, bottom * 10), start=start, end=end, log=True)


def nice_step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many fit into the span."""
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of a nice step."""
    step = nice_step(high - low, most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 times them where there are few, fewer where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
    decades = last - first
    every = -(-decades // MANY_DECADES)
    factors = (1, 2, 5) if decades <= 2 else (1,)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


# -------------------------------------------------------------------------------------------------
# Tags, and text made safe for them.


class Markup(str):
    """A string that is markup already; all others are text."""

    __slots__ = ()


Content = str | Markup


def tag(name: str, *children: Content, **attributes: object) -> Markup:
    """An element. `class_` is class, `_` in a name is `-`; text in it is escaped."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(map(safe, children))
    return Markup(f"<{name}{words}>{inner}</{name}>")


def safe(content: Content) -> Markup:
    """Markup as it is, text escaped."""
    return content if isinstance(content, Markup) else Markup(html.escape(visible_lines(content)))


def join(parts: Iterable[Content]) -> Markup:
    """One after the other."""
    return Markup("".join(map(safe, parts)))


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Content]], **attributes: object
) -> Markup:
    """A table; columns after the first are numbers, and stand on the right."""
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in headings)))
    body = tag(
        "tbody",
        *(
            tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
            for row in rows
        ),
    )
    return tag("div", tag("table", head, body), class_="scroll", **attributes)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return visible_lines(str(value))


if TYPE_CHECKING:
    Format = Callable[[float], str]
    Point = tuple[float, float]

WIDTH = 400
HEIGHT = 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 26, 38
ACROSS = {"start": float(LEFT), "end": float(WIDTH - RIGHT)}
UPRIGHT = {"start": float(HEIGHT - BOTTOM), "end": float(TOP)}
ROW = 40
LETTER = 6.4
"""Width of a letter of the drawing, roughly."""
MANY_POINTS = 24
"""A line with more of them has no dots: its shape says it."""
LOG_RATIO = 20
"""From here on the smaller of two values could not be seen on a linear scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A value with its name; `state` gives the colour (fed, borderline, starved or plain)."""

    label: str
    value: float
    shown: str
    state: str = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A line across a plot."""

    value: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line. `None` values are gaps."""

    name: str
    points: Sequence[Point]
    shown: Sequence[str] = ()
    """Words for each point; made of the numbers where there are none."""


def needs_log(values: Sequence[float]) -> bool:
    """Whether values differ by orders of magnitude."""
    positive = [value for value in values if value > 0]
    return len(positive) > 1 and max(positive) / min(positive) >= LOG_RATIO


def bar_plot(bars: Sequence[Bar], *, label: str, unit: str, marks: Sequence[Mark] = ()) -> Markup:
    """Horizontal bars, names above them; marks are vertical lines."""
    values = [bar.value for bar in bars] + [mark.value for mark in marks]
    positive = [value for value in values if value > 0] or [1.0]
    log = needs_log(positive)
    top = 22 + 17 * len(marks)
    bottom = top + ROW * len(bars)
    left, right = 8.0, WIDTH - 8.0
    if log:
        scale = log_scale(min(positive) / 2, max(positive), start=left, end=right)
    else:
        scale = linear_scale(0, max(positive), most=5, start=left, end=right)
    parts = [
        _grid_x(scale, top=top, bottom=bottom),
        _text(_unit(unit, log=log), 8, 14, "unit"),
    ]
    names = []
    for number, bar in enumerate(bars):
        y = top + ROW * number
        length = max(scale(bar.value) - left, 2.0) if bar.value > 0 else 2.0
        title = tag("title", f"{bar.label}: {bar.shown}")
        look = {"rx": 2, "class_": f"bar {bar.state}"}
        parts.append(tag("rect", title, x=left, y=y + 20, width=length, height=13, **look))
        names.append(_text(bar.label, left, y + 15, "name"))
        names.append(_text(bar.shown, right, y + 15, "value", anchor="end"))
    for number, mark in enumerate(sorted(marks, key=lambda mark: mark.value)):
        x, y = scale(mark.value), 31 + 17 * number
        wide = len(mark.label) * LETTER
        is_left = x - wide - 6 > 0 and x + wide + 6 > WIDTH
        anchor = "end" if is_left else "start"
        words = _text(mark.label, x - 5 if is_left else x + 5, y, "mark-label", anchor=anchor)
        line = _line(x, x, y - 10, bottom, "mark")
        parts.append(tag("g", tag("title", mark.label), line, words))
    # Names last, so that no line goes through them.
    return _svg([*parts, *names], height=bottom + 26, label=label)


def line_plot(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    unit: str,
    y_format: Format = compact,
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
    linear: bool = False,
    tried: Sequence[float] = (),
    dots: bool = False,
) -> Markup:
    """Lines over an axis; marks are horizontal lines.

    `tried` are the only places along the axis, evenly apart. With `dots` points are not joined.
    """
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points if math.isfinite(y)]
    levels = [*ys, *(mark.value for mark in marks)] or [1.0]
    log = from_zero and not linear and needs_log(levels)
    x_scale = EvenScale(values=tuple(tried), **ACROSS) if tried else _from_zero(xs, **ACROSS)
    if log:
        y_scale = log_scale(min(y for y in levels if y > 0), max(levels), **UPRIGHT)
    else:
        y_scale = linear_scale(0 if from_zero else min(levels), max(levels), most=5, **UPRIGHT)
    lines = [
        _series(each, x_scale, y_scale, colour=number % 7 + 1, dots=dots, y_format=y_format)
        for number, each in enumerate(series)
    ]
    for mark in marks:
        y = y_scale(mark.value)
        place = y + 14 if y < TOP + 14 else y - 5
        words = _text(mark.label, WIDTH - RIGHT - 2, place, "mark-label", anchor="end")
        line = _line(LEFT, WIDTH - RIGHT, y, y, "mark")
        lines.append(tag("g", tag("title", mark.label), line, words))
    frame = _frame(y_scale, x_scale, unit=_unit(unit, log=log), x_label=x_label)
    return _svg([*frame, *lines], height=HEIGHT, label=label)


def _from_zero(values: Sequence[float], *, start: float, end: float) -> Scale:
    """An axis that begins at 0, unless the values are far away from there."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if 0 <= low < high / 3:
        low = 0.0
    return Scale(low=low, high=high if high > low else low + 1, start=start, end=end)


def _series(
    series: Series, x: Scale | EvenScale, y: Scale, *, colour: int, dots: bool, y_format: Format
) -> Markup:
    shown = series.shown or [f"{compact(at)}: {y_format(value)}" for at, value in series.points]
    steps, circles = [], []
    pen = "M"
    for (at, value), text in zip(series.points, shown, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        steps.append(f"{pen}{x(at):.1f} {y(value):.1f}")
        pen = "L"
        title = tag("title", f"{series.name}, {text}")
        place = {"cx": round(x(at), 1), "cy": round(y(value), 1), "r": 2 if dots else 3}
        circles.append(tag("circle", title, **place, class_=f"dot c{colour}"))
    parts = []
    if not dots:
        name = tag("title", series.name)
        parts.append(tag("path", name, d=" ".join(steps), class_=f"line c{colour}"))
    if dots or len(circles) <= MANY_POINTS:
        parts += circles
    return tag("g", *parts)


def column_plot(columns: Sequence[Bar], *, label: str, unit: str, x_label: str) -> Markup:
    """Upright columns beside each other: a histogram."""
    scale = linear_scale(0, max((c.value for c in columns), default=1) or 1, most=5, **UPRIGHT)
    room = (WIDTH - LEFT - RIGHT) / max(len(columns), 1)
    widest = max((len(column.label) for column in columns), default=1) * LETTER
    every = max(1, math.ceil((widest + 4) / room))
    parts = _frame(scale, None, unit=unit, x_label=x_label)
    for number, column in enumerate(columns):
        x, y = LEFT + number * room, scale(column.value)
        title = tag("title", f"{column.label} {x_label}: {column.shown}")
        size = {"width": max(room - 2, 1), "height": scale.start - y}
        parts.append(
            tag("g", title, tag("rect", x=x + 1, y=y, **size, class_=f"bar {column.state}"))
        )
        if number % every == 0:
            place = (x + room / 2, HEIGHT - BOTTOM + 15)
            parts.append(_text(column.label, *place, "tick", anchor="middle"))
    return _svg(parts, height=HEIGHT, label=label)


def _frame(y: Scale, x: Scale | EvenScale | None, *, unit: str, x_label: str) -> list[Markup]:
    """The upright axis with its grid, the other one if there is one, and what both are."""
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in y.ticks(5):
        level = y(value)
        parts.append(_line(left, right, level, level, "grid"))
        parts.append(_text(tick_text(value), left - 6, level + 4, "tick", anchor="end"))
    if x is not None:
        parts.append(_line(left, right, bottom, bottom, "axis"))
        for value in x.ticks(6):
            at = x(value)
            parts.append(_line(at, at, bottom, bottom + 4, "axis"))
            anchor = "end" if at > WIDTH - 30 else "middle"
            parts.append(_text(tick_text(value), at, bottom + 16, "tick", anchor=anchor))
    parts.append(_text(unit, 4, 13, "unit"))
    parts.append(_text(x_label, right, HEIGHT - 5, "unit", anchor="end"))
    return parts


def _grid_x(scale: Scale, *, top: float, bottom: float) -> Markup:
    parts = []
    for number, value in enumerate(scale.ticks(5)):
        x = scale(value)
        anchor = "start" if number == 0 else "end" if x > WIDTH - 30 else "middle"
        parts.append(_line(x, x, top + 4, bottom, "grid"))
        parts.append(_text(tick_text(value), x, bottom + 16, "tick", anchor=anchor))
    return join(parts)


def _unit(unit: str, *, log: bool) -> str:
    return f"{unit}, log scale" if log else unit


def _text(words: str, x: float, y: float, class_: str, *, anchor: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def _line(x1: float, x2: float, y1: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=class_)


def _svg(parts: Sequence[Markup], *, height: float, label: str) -> Markup:
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )
