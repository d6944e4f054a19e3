"""The report: one HTML file with everything in it, for a browser that is offline.

The frame of the page is in page.html; its look is that of the viewer, ../look.css, and a little
more, page.css. There is no script in it, and its policy forbids the browser to load anything. Plots
are SVG, 400 units wide, so that on a phone letters stay readable and on a desk two stand side by
side. Colours are classes; the style gives them one look for light and one for dark. Every bar and
point has its number as a `<title>`, which a browser shows under the pointer.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.diagnosis.diagnose import sentence
from tokenmill.diagnosis.values import OTHER_IDS, STATES, Diagnosis, RunMetrics
from tokenmill.markup import LOOK, Markup, digest, safe, tag
from tokenmill.stalls import StepAccount
from tokenmill.words import compact, count, format_size, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenmill.monitor import Timeline
    from tokenmill.stalls import StallReport

    Point = tuple[float, float]
    Rows = Sequence[Sequence[str]]

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
    """A value with its name; `state` gives the colour (fed, borderline, starved or plain).

    `span` is where it would be if it were measured again.
    """

    label: str
    value: float
    shown: str
    state: str = "plain"
    span: Point | None = None


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
    values += [end for bar in bars for end in bar.span or ()]
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
        if bar.span is not None:
            low, high = map(axis, bar.span)
            parts.append(_line(low, high, y + 26.5, y + 26.5, "span"))
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

    `tried` are the only places along the axis, powers of two mostly. With `dots` points are not
    joined.
    """
    levels = [y for each in series for _, y in each.points if math.isfinite(y)]
    levels = [*levels, *(mark.value for mark in marks)] or [1.0]
    if from_zero:
        y_axis = _axis_of(levels, *UPRIGHT, linear=linear)
    else:
        y_axis = linear_axis(min(levels), max(levels), *UPRIGHT, most=5)
    if tried:
        # A margin, so that the first is not on the other axis.
        low, high = min(tried), max(tried)
        margin = max(high / low, 2.0) ** 0.055
        ticks = tried[:: -(-len(tried) // 12)]
        x_axis = Axis(low / margin, high * margin, *ACROSS, ticks, log=True)
    else:
        xs = [x for each in series for x, _ in each.points]
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        low = 0.0 if 0 <= low < high / 3 else low
        high = high if high > low else low + 1
        x_axis = Axis(low, high, *ACROSS, round_numbers(low, high, 6))
    parts = _frame(y_axis, unit=_unit(unit, y_axis), x_label=x_label)
    parts.insert(-2, _line(*ACROSS, HEIGHT - BOTTOM, HEIGHT - BOTTOM, "axis"))
    for value in x_axis.ticks:
        x = x_axis(value)
        parts.insert(-2, _line(x, x, HEIGHT - BOTTOM, HEIGHT - BOTTOM + 4, "axis"))
        anchor = "end" if x > WIDTH - 30 else "middle"
        parts.insert(-2, _text(tick_text(value), x, HEIGHT - BOTTOM + 16, "tick", anchor))
    for number, (name, points, given) in enumerate(series):
        shown = given or [f"{compact(at)}: {y_format(value)}" for at, value in points]
        colour = f"c{number % 7 + 1}"
        path, circles, pen = [], [], "M"
        for (at, value), words in zip(points, shown, strict=True):
            if not math.isfinite(value):
                pen = "M"
                continue
            x, y = x_axis(at), y_axis(value)
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


# -------------------------------------------------------------------------------------------------
# The page.

BUSY = ", as measured on a busy machine"
PAGE, STYLE = (Path(__file__).with_name(name) for name in ("page.html", "page.css"))
MOST_ROWS = 200  # of the table below a plot
KEPT_POINTS = 300
# Figures over steps and over time: title, unit, factor, lines by the names of their values.
WAITS = {"median": "wait_p50_ms", "99% below": "wait_p99_ms"}
LOSSES = {"training": "loss", "validation": "val_loss"}
TRAINING: tuple[tuple[str, str, float, dict[str, str], Callable[[float], str]], ...] = (
    ("Tokens per second in training", "tokens/s", 1, {"": "tokens_per_second"}, compact),
    ("Share of the GPU's peak (MFU)", "%", 100, {"": "mfu"}, compact),
    ("Share of time waiting for data", "%", 100, {"": "wait_share"}, milliseconds),
    ("Wait for data in training", "ms", 1, WAITS, milliseconds),
    ("Loss", "loss", 1, LOSSES, "{:.2f}".format),
    ("Memory of the training", "GB", 1e-9, {"": "memory_bytes"}, compact),
)
CPU = {"its processes": "build_cores", "whole machine": "machine_cores"}
MEMORY = {"its processes": "memory_bytes", "whole machine": "machine_memory_bytes"}
DISK = {"read": "build_read_bytes_per_second", "written": "build_write_bytes_per_second"}
BUILD: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    ("CPU of the build", "cores", 1.0, CPU),
    ("Memory of the build", "GB", 1e-9, MEMORY),
    ("Input of the build", "MB/s", 1e-6, {"input": "input_bytes_per_second"}),
    ("Tokens of the build", "tokens/s", 1.0, {"tokens": "tokens_per_second"}),
    ("Disk of the build", "MB/s", 1e-6, DISK),
)


def render(found: Diagnosis) -> str:
    """The whole page."""
    facts = [("Machine", found.machine.describe())]
    if (sample := found.sample) is not None:
        part = f"{count(sample.documents, 'document')}, {format_size(sample.text_bytes)} of text"
        whole = f"{format_size(sample.input_bytes)} in {count(sample.files, 'file')}"
        facts = [
            ("Input", ", ".join(found.inputs)),
            ("Tokenizer", found.tokenizer or ""),
            ("Measured on", f"{part}, of {whole}"),
            *facts,
        ]
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    how = (
        "Every way ran in a fresh process, on the same documents, with the clock started when its"
        " tokenizer was loaded. Cores: CPU seconds of the process and its workers for each second."
        " Memory: the peak, with the interpreter and the sample in it. What a GPU takes is an"
        " estimate unless a rate was given. Measure your own loop with tokenmill.StallMeter."
    )
    sections = [*_sections(found)]
    made = f"tokenmill {found.machine.tokenmill}, Python {found.machine.python}, {now}."
    style = "".join(path.read_text(encoding="utf-8") for path in (LOOK, STYLE))
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        style=style,
        digest=digest(style),
        title=safe(_title(found)),
        facts=tag(
            "dl",
            *(tag(*each) for fact in facts for each in zip(("dt", "dd"), fact, strict=True)),
            class_="facts",
        ),
        contents=tag(
            "nav",
            *(tag("a", each[0], href=f"#{_anchor(each[0])}") for each in sections),
            aria_label="Contents",
        ),
        sections="".join(
            tag("section", tag("h2", title), *content, id=_anchor(title))
            for title, content in sections
        ),
        footer=tag("footer", tag("p", how) if found.ways else "", tag("p", made)),
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _title(found: Diagnosis) -> str:
    if not found.ways:
        return "What the run says"
    if len(found.demands) != 1:
        return "What feeds a GPU from this machine"
    verdicts = [verdict for verdict in found.verdicts if verdict.way != "loader"]
    states = {verdict.state for verdict in verdicts}
    if "fed" in states:
        return "Not starved: tokenizing while training is fast enough"
    if "borderline" in states:
        busy = any(each.on_busy_machine for each in verdicts if each.state == "borderline")
        return f"Close: tokenizing while training may keep up{BUSY if busy else ''}"
    return "Starved: tokenizing while training is too slow"


def _sections(found: Diagnosis) -> Iterator[tuple[str, Sequence[Markup]]]:
    """The title and content of each."""
    if found.advice:
        words = (tag("p", line) for line in found.advice)
        yield "In plain words", [tag("div", *words, class_="card words")]
    if found.ways:
        if found.commands:
            yield "What to type", [tag("pre", tag("code", each)) for each in found.commands]
        plots = (_throughput(found), _memory(found), *_lengths(found), *_scaling(found))
        yield "What was measured", [tag("div", *plots, class_="figures")]
        yield "Numbers", [tag("div", *_numbers(found), class_="card")]
        yield "What was timed", [tag("div", *_programs(found), class_="card")]
        if found.demands:
            yield "What the GPU takes", [tag("div", *_needs(found), class_="card")]
    evidence = found.evidence
    for title, given, draw in (
        ("Your own loop", evidence.stalls, _stalls),
        ("Training run", evidence.run, _training),
        ("Time line of the build", evidence.timeline, _build),
    ):
        if given is not None:
            yield title, [tag("div", *draw(given), class_="figures")]  # type: ignore[arg-type]


def table(headings: Sequence[str], *rows: Sequence[str]) -> Markup:
    """A table; columns after the first are numbers, at the right."""
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in headings)))
    lines = (
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    )
    return tag("div", tag("table", head, tag("tbody", *lines)), class_="scroll")


def figure(
    title: str, plot: Markup, rows: Rows, says: str = "", legend: Sequence[str] = ()
) -> Markup:
    """A plot: what it shows, what the colours mean, and its numbers; headings are the first row."""
    parts = [tag("h3", title), *([tag("p", says, class_="says")] if says else []), plot]
    if len(legend) > 1:
        names = (
            tag("li", tag("i", class_=f"swatch c{number % 7 + 1}"), name)
            for number, name in enumerate(legend)
        )
        parts.append(tag("ul", *names, class_="legend"))
    if numbers := rows[1:]:
        every = -(-len(numbers) // MOST_ROWS)
        less = f" (one in {every})" if every > 1 else ""
        summary = tag("summary", f"Numbers{less}", aria_label=f"Numbers of: {title}")
        parts.append(tag("details", summary, table(rows[0], *numbers[::every])))
    return tag("figure", *parts, class_="card")


def line_figure(
    title: str, series: Sequence[Series], rows: Rows, says: str = "", **how: Any
) -> Markup:
    """A figure of lines; `how` is told to `line_plot`."""
    return figure(title, line_plot(series, **how), rows, says, [each.name for each in series])


# -------------------------------------------------------------------------------------------------
# The parts of a diagnosis as figures and tables.


def _throughput(found: Diagnosis) -> Markup:
    """What each way feeds, beside what the GPUs take."""
    ways = [way for way in found.ways if way.problem is None]
    is_one = len(found.demands) == 1
    fed = {verdict.way: verdict for verdict in found.verdicts} if is_one else {}
    gpus = found.demands[0].gpus if found.demands else 1
    who = "the GPU takes" if gpus == 1 else f"{gpus} GPUs take"
    marks = []
    for need in found.demands:
        name = f"{who}{' about' if need.is_estimate else ''}" if is_one else f"{need.name}:"
        marks.append(Mark(need.total, f"{name} {compact(need.total)}"))
    says = "The line in a bar is the middle half of the rounds"
    says += "; to the right, what a quiet machine would give." if is_one else "."
    if not is_one:
        says += f" Dashed: what {who} with a model of that name, an estimate."
    elif gpus > 1:
        says += (
            f" Bars are what this machine feeds to {gpus} GPUs: each has a process of its own, as"
            f" far as the {found.machine.cores} cores reach."
        )
    headings = ("way", "tokens/s", "middle half of the rounds", "text MB/s", "documents", "seconds")
    bars, rows = [], [headings]
    for way in ways:
        rate, word, state, span = way.tokens_per_second, "", "plain", way.interval
        if (verdict := fed.get(way.key)) is not None:
            rate, state = verdict.feeds_tokens_per_second, verdict.state
            span = verdict.low_tokens_per_second, verdict.high_tokens_per_second
            word = f", {STATES[state]}"
        elif way.changes_ids:
            word = f", {OTHER_IDS}"
        bars.append(Bar(way.title, rate, f"{compact(rate)}/s{word}", state, span))
        text = f"{way.text_bytes / way.seconds / 1e6:,.1f}" if way.text_bytes else "-"
        documents = f"{way.documents:,}" if way.documents else "-"
        low, high = (compact(rate) for rate in way.interval)
        between = f"{low} to {high}" if len(way.rates) > 1 else "-"
        numbers = (f"{way.tokens_per_second:,.0f}", between, text, documents, f"{way.seconds:.2f}")
        rows.append((way.title, *numbers))
    label = "Tokens per second of each way to tokenize"
    plot = bar_plot(bars, marks=marks, unit="tokens/s", label=label)
    return figure("Tokens per second, each way", plot, rows, says)


def _numbers(found: Diagnosis) -> Iterator[Markup]:
    """All numbers of all ways, and what to use."""
    rows: list[Sequence[str]] = []
    for way in found.ways:
        remarks = [way.engine, count(way.workers, "worker") if way.workers > 1 else ""]
        if way.compared_documents:
            differing = f"{way.differing_documents:,} of {way.compared_documents:,}"
            remarks.append(f"{differing} documents with other ids")
        remark = "; ".join(filter(None, (*remarks, way.note)))
        cells = [*way.cells().values()]
        failed = way.problem is not None
        rows.append((way.title, *(["-"] * len(cells) if failed else cells), way.problem or remark))
    yield tag("h3", "Each way")
    yield table(("way", *found.ways[0].cells(), ""), *rows)
    spread = "\u00b1: half of the rounds are within that share of the median."
    yield tag("p", spread, class_="says")
    if not found.sweep:
        how = "How it scales over workers and batch sizes: run with --sweep."
        yield tag("p", how, class_="says")
    if found.recommendation is not None:
        yield tag("h3", "Settings for this machine")
        yield tag("ul", *(tag("li", reason) for reason in found.recommendation.reasons))


def _needs(found: Diagnosis) -> Iterator[Markup]:
    """What the GPUs take, how the number came about, and each way held against it."""
    rows = [("model", "tokens/s of one GPU", "GPUs", "in all", "where from")]
    for need in found.demands:
        where = "; ".join(filter(None, (need.basis, need.origin)))
        rates = compact(need.tokens_per_second), str(need.gpus), compact(need.total)
        rows.append((need.name, *rates, where))
    yield table(*rows)
    if len(found.demands) == 1:
        by_key = {way.key: way for way in found.ways}
        lines = []
        for verdict in found.verdicts:
            way = by_key[verdict.way]
            said = sentence(verdict, way, found.demands[0])
            lines.append(tag("li", tag("b", way.title), " ", said, class_=verdict.state))
        yield tag("ul", *lines, class_="verdicts")


def _lengths(found: Diagnosis) -> Iterator[Markup]:
    """Tokens per document."""
    if (lengths := found.lengths) is None:
        return
    columns, rows = [], [("tokens", "documents", "tokens in them")]
    for each in lengths.histogram:
        documents, last = f"{each.documents:,}", f"{each.high - 1:,}"
        shown = f"{documents} documents from {each.low:,} to {last} tokens"
        columns.append(Bar(tick_text(each.low), float(each.documents), shown))
        rows.append((f"{each.low:,} to {last}", documents, f"{each.tokens:,}"))
    label = "How many documents have how many tokens"
    plot = column_plot(columns, label=label, unit="documents", x_label="tokens and more")
    half = f"Half of them have {lengths.percentiles[50]:,} tokens or fewer"
    says = f"{half}; the mean is {lengths.mean:,.0f}, the longest has {lengths.longest:,}."
    yield figure("Tokens per document", plot, rows, says)


def _memory(found: Diagnosis) -> Markup:
    """The peak of each way."""
    ways = [way for way in found.ways if way.problem is None]
    peaks = [(way.title, way.peak_memory_bytes) for way in ways]
    bars = [Bar(title, peak / 1e6, format_size(peak)) for title, peak in peaks]
    rows = [("way", "peak"), *((title, format_size(peak)) for title, peak in peaks)]
    says = "The peak of each way with its workers. A page that processes share counts in each."
    plot = bar_plot(bars, unit="MB", label="Peak of memory of each way")
    return figure("Memory, each way", plot, rows, says)


def _programs(found: Diagnosis) -> Iterator[Markup]:
    """The text of every program that was timed, to copy."""
    says = (
        "These programs ran as they are here, each in a process of its own. The documents that they"
        " read are a sample of your input as JSON Lines; --scripts FOLDER writes it with them."
    )
    yield tag("p", says, class_="says")
    for way in found.ways:
        if way.source:
            summary = tag("summary", tag("b", way.title), " ", tag("code", way.call))
            yield tag("details", summary, tag("pre", tag("code", way.source)))


def _scaling(found: Diagnosis) -> Iterator[Markup]:
    """The sweep: over workers, and over batch sizes."""
    titles = {way.key: way.title for way in found.ways}
    for title, keys, axis, x_label in (
        ("Scaling over workers", ("pool", "build"), "workers", "workers"),
        ("Batch size in the loop", ("batched",), "batch", "samples in a call"),
    ):
        lines: dict[str, list[Point]] = {}
        for point in found.sweep:
            if point.key in keys:
                place = (float(getattr(point, axis)), point.tokens_per_second)
                lines.setdefault(titles[point.key], []).append(place)
        rows = [(name, x, y) for name, points in lines.items() for x, y in points]
        numbers = [(name, f"{x:,.0f}", f"{y:,.0f}") for name, x, y in rows]
        if rows:
            yield line_figure(
                title,
                [Series(name, points) for name, points in lines.items()],
                [("way", x_label, "tokens/s"), *numbers],
                label=f"{title}: tokens per second",
                x_label=x_label,
                unit="tokens/s",
                tried=sorted({x for _, x, _ in rows}),
            )


# -------------------------------------------------------------------------------------------------
# Figures of what was given beside the text: a stall report, the metrics of a training, a build.


def _stalls(found: StallReport | StepAccount) -> Iterator[Markup]:
    return _step(found) if isinstance(found, StepAccount) else _waits(found)


def _step(account: StepAccount) -> Iterator[Markup]:
    """What a step is spent on, with its lines, and what taking them out would save."""
    steps, whole = max(account.steps, 1), account.seconds or 1.0

    def part_of(seconds: float) -> str:
        return f"{seconds / whole:.1%}"

    bars, rows = [], [("", "ms a step", "part", "line")]
    for part in account.parts:
        ms = 1000 * part.seconds / steps
        bars.append(Bar(part.name, ms, f"{milliseconds(ms)} ms, {part_of(part.seconds)}"))
        for line in part.lines:
            said = f"{line.where} {line.what} {line.text}".strip()
            taken = milliseconds(1000 * line.seconds / steps)
            rows.append((part.name, taken, part_of(line.seconds), said))
    busy = account.device_busy_seconds
    device = "" if busy is None else f" The device is busy for {part_of(busy)} of it."
    says = f"{account.steps:,} steps of {milliseconds(1000 * account.step_seconds)} ms.{device}"
    plot = bar_plot(bars, unit="ms", label="Milliseconds of a step, by what they are spent on")
    yield figure("Where the time of a step goes", plot, rows, says)
    if account.advice:
        saved = [
            (f"{each.where} {each.text}".strip(), f"{each.gain:.0%}", each.advice)
            for each in account.advice
        ]
        if len(saved) > 1:
            saved.append(("all of these", f"{account.all_gain:.0%}", ""))
        heading = tag("h3", "What taking it out would save")
        yield tag("div", heading, table(("", "of a step", ""), *saved))


def _waits(report: StallReport) -> Iterator[Markup]:
    """How long each step waited for its data."""
    if not report.waits_ms:
        return
    points = thinned([(float(step), ms) for step, ms in report.waits_ms], max)
    shown = [f"step {step:,.0f}: {milliseconds(ms)} ms" for step, ms in points]
    device = report.device_gap
    idle = "" if device is None else f" The device stood idle for {device.share:.1%} of its time."
    yield line_figure(
        "Wait for data, step by step",
        [Series("wait", points, shown)],
        [("step", "ms"), *((f"{step:,}", milliseconds(ms)) for step, ms in report.slowest)],
        f"{report.steps:,} steps, {report.wait_share:.1%} of the time waiting; the first wait,"
        f" {milliseconds(report.first_wait_ms)} ms, is start-up and left out.{idle}",
        label="Milliseconds that each step waited for its data",
        x_label="step",
        unit="ms",
        y_format=milliseconds,
        marks=[Mark(report.p99_ms, f"99% below {milliseconds(report.p99_ms)} ms")],
        dots=True,
    )


def _training(run: RunMetrics) -> Iterator[Markup]:
    """Speed, waits, loss and memory of a training, as far as they were written."""
    for title, unit, factor, names, shown in TRAINING:
        lines = {called or name: run.series(name) for called, name in names.items()}
        how = {"label": f"{title}, over steps", "x_label": "step", "y_format": shown}
        yield from _over(title, lines, unit, factor, "{:,.0f}".format, shown, **how)


def _build(timeline: Timeline) -> Iterator[Markup]:
    """Cores, memory, input and disk of a build over time; runs one after the other."""
    offsets = np.cumsum([0.0, *(segment.length_seconds for segment in timeline.segments)])
    runs = [
        (segment, offset)
        for segment, offset in zip(timeline.segments, offsets, strict=False)
        if len(segment)
    ]
    if not runs:
        return
    seconds = np.concatenate([segment.seconds + offset for segment, offset in runs]).tolist()
    charts: list[tuple[str, str, float, dict[str, Any]]] = []
    for title, unit, factor, fields in BUILD:
        columns = {
            name: np.concatenate([getattr(segment, each) for segment, _ in runs])
            for name, each in fields.items()
        }
        charts.append((title, unit, factor, columns))
    for title, unit, factor, columns in charts:
        lines = {
            name: [*zip(seconds, values.tolist(), strict=True)] for name, values in columns.items()
        }
        how = {"label": f"{title} over time", "x_label": "seconds"}
        yield from _over(title, lines, unit, factor, "{:.1f}".format, "{:,.2f}".format, **how)


def _over(
    title: str,
    lines: dict[str, list[Point]],
    unit: str,
    factor: float,
    place: Callable[[float], str],
    number: Callable[[float], str],
    **how: Any,
) -> Iterator[Markup]:
    """The lines that have values; none where no line has one."""
    series, rows = [], [("line", how["x_label"], unit)]
    for name, found in lines.items():
        points = thinned([(at, value * factor) for at, value in found], np.mean)
        finite = [(at, value) for at, value in points if math.isfinite(value)]
        series += [Series(name, points)] if finite else []
        rows += [(name, place(at), number(value)) for at, value in finite]
    if series:
        scale: dict[str, Any] = {"from_zero": unit != "loss", "linear": unit != "ms"}
        yield line_figure(title, series, rows, unit=unit, **scale, **how)


def thinned(points: Sequence[Point], keep: Callable[[list[float]], float]) -> list[Point]:
    """At most some hundred points: of each range its first place and `keep` of its values."""
    step = -(-len(points) // KEPT_POINTS) or 1
    if step == 1:
        return list(points)
    found = []
    for first in range(0, len(points), step):
        part = points[first : first + step]
        values = [value for _, value in part if math.isfinite(value)]
        found.append((part[0][0], float(keep(values)) if values else math.nan))
    return found
