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
    """One behind the other."""
    return Markup("".join(map(safe, parts)))


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Content]], **attributes: object
) -> Markup:
    """A table; columns behind the first are numbers, and stand on the right."""
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
    ends = {"start": 8.0, "end": WIDTH - 8.0}
    scale = (
        log_scale(min(positive) / 2, max(positive), **ends)
        if log
        else linear_scale(0, max(positive), most=5, **ends)
    )
    parts = [
        _grid_x(scale, top=top, bottom=bottom, fmt=tick_text),
        tag("text", f"{unit}{', log scale' if log else ''}", x=8, y=14, class_="unit"),
        *(_bar(bar, scale, y=top + ROW * number) for number, bar in enumerate(bars)),
        *(
            _mark_x(mark, scale, y=31 + 17 * number, bottom=bottom)
            for number, mark in enumerate(sorted(marks, key=lambda mark: mark.value))
        ),
        # Names last, so that no line goes through them.
        *(_bar_names(bar, scale, y=top + ROW * number) for number, bar in enumerate(bars)),
    ]
    return _svg(parts, height=bottom + 26, label=label)


def _bar(bar: Bar, scale: Scale, *, y: float) -> Markup:
    length = max(scale(bar.value) - scale.start, 2.0) if bar.value > 0 else 2.0
    return tag(
        "rect",
        tag("title", f"{bar.label}: {bar.shown}"),
        x=scale.start,
        y=y + 20,
        width=length,
        height=13,
        rx=2,
        class_=f"bar {bar.state}",
    )


def _bar_names(bar: Bar, scale: Scale, *, y: float) -> Markup:
    return join(
        (
            tag("text", bar.label, x=scale.start, y=y + 15, class_="name"),
            tag("text", bar.shown, x=scale.end, y=y + 15, class_="value", text_anchor="end"),
        )
    )


def _mark_x(mark: Mark, scale: Scale, *, y: float, bottom: float) -> Markup:
    x = scale(mark.value)
    wide = len(mark.label) * LETTER
    left = x - wide - 6 > 0 and x + wide + 6 > WIDTH
    return tag(
        "g",
        tag("title", mark.label),
        tag("line", x1=x, x2=x, y1=y - 10, y2=bottom, class_="mark"),
        tag(
            "text",
            mark.label,
            x=x - 5 if left else x + 5,
            y=y,
            class_="mark-label",
            text_anchor="end" if left else "start",
        ),
    )


def line_plot(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    unit: str,
    y_format: Format = compact,
    x_format: Format = tick_text,
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
    log_y = from_zero and not linear and needs_log(levels)
    across = {"start": float(LEFT), "end": float(WIDTH - RIGHT)}
    upright = {"start": float(HEIGHT - BOTTOM), "end": float(TOP)}
    x_scale = EvenScale(values=tuple(tried), **across) if tried else _from_zero(xs, **across)
    if log_y:
        y_scale = log_scale(min(y for y in levels if y > 0), max(levels), **upright)
    else:
        y_scale = linear_scale(0 if from_zero else min(levels), max(levels), most=5, **upright)
    parts = [
        _grid_y(y_scale, fmt=tick_text),
        _ticks_x(x_scale, fmt=x_format),
        tag("text", f"{unit}{', log scale' if log_y else ''}", x=4, y=13, class_="unit"),
        tag("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 5, class_="unit", text_anchor="end"),
        *(
            _series(each, x_scale, y_scale, colour=number % 7 + 1, dots=dots, y_format=y_format)
            for number, each in enumerate(series)
        ),
        *(_mark_y(mark, y_scale) for mark in marks),
    ]
    return _svg(parts, height=HEIGHT, label=label)


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
    places = [
        (x(at), y(value), text)
        for (at, value), text in zip(series.points, shown, strict=True)
        if math.isfinite(value)
    ]
    parts = []
    if not dots:
        drawn = " ".join(
            f"{'L' if index and not gap else 'M'}{x(at):.1f} {y(value):.1f}"
            for index, (at, value, gap) in enumerate(_with_gaps(series.points))
        )
        parts.append(tag("path", tag("title", series.name), d=drawn, class_=f"line c{colour}"))
    if dots or len(places) <= MANY_POINTS:
        parts += [
            tag(
                "circle",
                tag("title", f"{series.name}, {text}"),
                cx=round(px, 1),
                cy=round(py, 1),
                r=2 if dots else 3,
                class_=f"dot c{colour}",
            )
            for px, py, text in places
        ]
    return tag("g", *parts)


def _with_gaps(points: Sequence[Point]) -> list[tuple[float, float, bool]]:
    """Points that have a value, and whether the one before had none."""
    found, gap = [], False
    for at, value in points:
        if math.isfinite(value):
            found.append((at, value, gap))
        gap = not math.isfinite(value)
    return found


def column_plot(columns: Sequence[Bar], *, label: str, unit: str, x_label: str) -> Markup:
    """Upright columns beside each other: a histogram."""
    upright = {"start": float(HEIGHT - BOTTOM), "end": float(TOP)}
    scale = linear_scale(0, max((c.value for c in columns), default=1) or 1, most=5, **upright)
    room = (WIDTH - LEFT - RIGHT) / max(len(columns), 1)
    widest = max((len(column.label) for column in columns), default=1) * LETTER
    every = max(1, math.ceil((widest + 4) / room))
    parts = [
        _grid_y(scale, fmt=tick_text),
        tag("text", unit, x=4, y=13, class_="unit"),
        tag("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 5, class_="unit", text_anchor="end"),
    ]
    for number, column in enumerate(columns):
        x, y = LEFT + number * room, scale(column.value)
        parts.append(
            tag(
                "g",
                tag("title", f"{column.label} {x_label}: {column.shown}"),
                tag(
                    "rect",
                    x=x + 1,
                    y=y,
                    width=max(room - 2, 1),
                    height=scale.start - y,
                    class_=f"bar {column.state}",
                ),
            )
        )
        if number % every == 0:
            parts.append(
                tag(
                    "text",
                    column.label,
                    x=x + room / 2,
                    y=HEIGHT - BOTTOM + 15,
                    class_="tick",
                    text_anchor="middle",
                )
            )
    return _svg(parts, height=HEIGHT, label=label)


def _grid_x(scale: Scale, *, top: float, bottom: float, fmt: Format) -> Markup:
    parts = []
    ticks = scale.ticks(5)
    for number, value in enumerate(ticks):
        x = scale(value)
        anchor = "start" if number == 0 else "end" if x > WIDTH - 30 else "middle"
        parts.append(tag("line", x1=x, x2=x, y1=top + 4, y2=bottom, class_="grid"))
        parts.append(tag("text", fmt(value), x=x, y=bottom + 16, class_="tick", text_anchor=anchor))
    return join(parts)


def _grid_y(scale: Scale, *, fmt: Format) -> Markup:
    parts = []
    for value in scale.ticks(5):
        y = scale(value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", fmt(value), x=LEFT - 6, y=y + 4, class_="tick", text_anchor="end"))
    return join(parts)


def _ticks_x(scale: Scale | EvenScale, *, fmt: Format) -> Markup:
    y = HEIGHT - BOTTOM
    parts = [tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="axis")]
    for value in scale.ticks(6):
        x = scale(value)
        anchor = "end" if x > WIDTH - 30 else "middle"
        parts.append(tag("line", x1=x, x2=x, y1=y, y2=y + 4, class_="axis"))
        parts.append(tag("text", fmt(value), x=x, y=y + 16, class_="tick", text_anchor=anchor))
    return join(parts)


def _mark_y(mark: Mark, scale: Scale) -> Markup:
    y = scale(mark.value)
    below = y < TOP + 14
    return tag(
        "g",
        tag("title", mark.label),
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="mark"),
        tag(
            "text",
            mark.label,
            x=WIDTH - RIGHT - 2,
            y=y + 14 if below else y - 5,
            class_="mark-label",
            text_anchor="end",
        ),
    )


def _svg(parts: Sequence[Markup], *, height: float, label: str) -> Markup:
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )
