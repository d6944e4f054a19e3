"""The report: one HTML file with everything in it, for a browser that is offline."""

from __future__ import annotations

import datetime
import math
from functools import partial
from operator import attrgetter
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.diagnosis.diagnose import sentence
from tokenmill.diagnosis.plots import (
    Bar,
    Mark,
    Markup,
    Series,
    bar_plot,
    column_plot,
    join,
    line_plot,
    table,
    tag,
    tick_text,
)
from tokenmill.diagnosis.values import STATES
from tokenmill.words import compact, count, format_size, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.diagnosis.plots import Content
    from tokenmill.diagnosis.values import Diagnosis, RunMetrics, Verdict, WayResult
    from tokenmill.monitor import Segment, Timeline
    from tokenmill.stalls import StallReport


# -------------------------------------------------------------------------------------------------
# A figure: what it shows, the plot, what the colours mean, and its numbers as a table.

MOST_ROWS = 200
"""Of the table below a plot."""


def figure(
    title: str,
    plot: Markup,
    *,
    headings: Sequence[str],
    rows: Sequence[Sequence[Content]],
    says: str = "",
    legend: Sequence[str] = (),
) -> Markup:
    """A plot with everything that belongs to it."""
    parts = [tag("h3", title), tag("p", says, class_="says") if says else Markup(), plot]
    if len(legend) > 1:
        names = (
            tag("li", tag("i", class_=f"swatch c{number % 7 + 1}"), name)
            for number, name in enumerate(legend)
        )
        parts.append(tag("ul", *names, class_="legend"))
    if rows:
        every = -(-len(rows) // MOST_ROWS)
        less = f" (one in {every})" if every > 1 else ""
        summary = tag("summary", f"Numbers{less}", aria_label=f"Numbers of: {title}")
        parts.append(tag("details", summary, table(headings, rows[::every])))
    return tag("figure", *parts)


def line_figure(
    title: str,
    series: Sequence[Series],
    *,
    headings: Sequence[str],
    rows: Sequence[Sequence[Content]],
    says: str = "",
    **how: Any,
) -> Markup:
    """A figure of lines; `how` is told to `line_plot`."""
    names = [each.name for each in series]
    plot = line_plot(series, **how)
    return figure(title, plot, says=says, legend=names, headings=headings, rows=rows)


# -------------------------------------------------------------------------------------------------
# The parts of a diagnosis as figures and tables.


def throughput(found: Diagnosis) -> Markup:
    """What each way feeds, beside what the GPUs take."""
    ways = [way for way in found.ways if way.problem is None]
    is_one = len(found.demands) == 1
    fed = {verdict.way: verdict for verdict in found.verdicts} if is_one else {}
    gpus = found.demands[0].gpus if found.demands else 1
    who = "the GPU takes" if gpus == 1 else f"{gpus} GPUs take"
    says, marks = "", []
    for need in found.demands:
        about = " about" if need.is_estimate else ""
        name = f"{who}{about}" if is_one else f"{need.name}:"
        marks.append(Mark(value=need.total, label=f"{name} {compact(need.total)}"))
    if not is_one:
        says = f"Dashed: what {who} with a model of that name, an estimate."
    elif gpus > 1:
        says = (
            f"Bars are what this machine feeds to {gpus} GPUs: each has a process of its own, as"
            f" far as the {found.machine.cores} cores reach."
        )
    return figure(
        "Tokens per second, each way",
        bar_plot(
            [_way_bar(way, fed.get(way.key)) for way in ways],
            marks=marks,
            unit="tokens/s",
            label="Tokens per second of each way to tokenize",
        ),
        says=says,
        headings=("way", "tokens/s", "text MB/s", "documents", "seconds"),
        rows=[
            (
                way.title,
                f"{way.tokens_per_second:,.0f}",
                f"{way.text_bytes / way.seconds / 1e6:,.1f}" if way.text_bytes else "-",
                f"{way.documents:,}" if way.documents else "-",
                f"{way.seconds:.2f}",
            )
            for way in ways
        ],
    )


def _way_bar(way: WayResult, verdict: Verdict | None) -> Bar:
    if verdict is None:
        rate, word, state = way.tokens_per_second, "", "plain"
    else:
        rate, state = verdict.feeds_tokens_per_second, verdict.state
        word = f", {STATES[state]}"
    return Bar(label=way.title, value=rate, shown=f"{compact(rate)}/s{word}", state=state)


def ways_table(found: Diagnosis) -> Markup:
    """All numbers of all ways."""
    rows = [
        (way.title, *["-"] * 5, way.problem)
        if way.problem is not None
        else (way.title, *way.cells(), _remark(way))
        for way in found.ways
    ]
    headings = ("way", "tokens/s", "ms, 1 sample", "ms, 8 samples", "cores", "memory", "")
    return table(headings, rows)


def _remark(way: WayResult) -> str:
    parts = [way.engine, count(way.workers, "worker") if way.workers > 1 else ""]
    if way.compared_documents:
        parts.append(
            f"{way.differing_documents:,} of {way.compared_documents:,} documents with other ids"
        )
    parts.append(way.note or "")
    return "; ".join(filter(None, parts))


def needs_table(found: Diagnosis) -> Markup:
    """What the GPUs take, and how the number came about."""
    rows = [
        (
            need.name,
            compact(need.tokens_per_second),
            str(need.gpus),
            compact(need.total),
            "; ".join(filter(None, (need.basis, need.origin))),
        )
        for need in found.demands
    ]
    return table(("model", "tokens/s of one GPU", "GPUs", "in all", "where from"), rows)


def lengths(found: Diagnosis) -> Iterator[Markup]:
    """Tokens per document."""
    if found.lengths is None:
        return
    bins = found.lengths.histogram
    columns = [
        Bar(
            label=tick_text(each.low),
            value=float(each.documents),
            shown=f"{each.documents:,} documents from {each.low:,} to {each.high - 1:,} tokens",
        )
        for each in bins
    ]
    middle = found.lengths.percentiles[50]
    yield figure(
        "Tokens per document",
        column_plot(
            columns,
            label="How many documents have how many tokens",
            unit="documents",
            x_label="tokens and more",
        ),
        says=f"Half of them have {middle:,} tokens or fewer; the mean is {found.lengths.mean:,.0f},"
        f" the longest has {found.lengths.longest:,}.",
        headings=("tokens", "documents", "tokens in them"),
        rows=[
            (f"{each.low:,} to {each.high - 1:,}", f"{each.documents:,}", f"{each.tokens:,}")
            for each in bins
        ],
    )


def memory(found: Diagnosis) -> Iterator[Markup]:
    """Memory of each way over time."""
    ways = [way for way in found.ways if len(way.memory) > 1]
    if not ways:
        return
    yield line_figure(
        "Memory over time",
        [
            Series(
                name=way.title,
                points=[(seconds, num_bytes / 1e6) for seconds, num_bytes in way.memory],
                shown=[f"{seconds:.1f} s: {format_size(size)}" for seconds, size in way.memory],
            )
            for way in ways
        ],
        label="Memory of each way over time",
        x_label="seconds since it began",
        unit="MB",
        linear=True,
        says="Each way with its workers, from loading the tokenizer to the end. A page that"
        " processes share is counted in each.",
        headings=("way", "peak", "seconds"),
        rows=[
            (way.title, format_size(way.peak_memory_bytes), f"{way.memory[-1][0]:.1f}")
            for way in ways
        ],
    )


def scaling(found: Diagnosis) -> Iterator[Markup]:
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
        if lines:
            yield line_figure(
                title,
                [Series(name=name, points=points) for name, points in lines.items()],
                label=f"{title}: tokens per second",
                x_label=x_label,
                unit="tokens/s",
                tried=sorted({x for points in lines.values() for x, _ in points}),
                headings=("way", x_label, "tokens/s"),
                rows=[
                    (name, f"{x:,.0f}", f"{y:,.0f}")
                    for name, points in lines.items()
                    for x, y in points
                ],
            )


# -------------------------------------------------------------------------------------------------
# Figures of what was given beside the text: a stall report, the metrics of a training, a build.

if TYPE_CHECKING:
    Point = tuple[float, float]
    Values = Callable[[Segment], NDArray[np.float64]]

KEPT_POINTS = 300
MANY_CORES = 8
"""With more of them, the busiest, the mean and the idlest are drawn, not each."""
TRAINING = (
    ("Tokens per second in training", ("tokens_per_second",), "tokens/s", 1, compact),
    ("Share of the GPU's peak (MFU)", ("mfu",), "%", 100, compact),
    ("Share of time waiting for data", ("wait_share",), "%", 100, milliseconds),
    ("Wait for data in training", ("wait_p50_ms", "wait_p99_ms"), "ms", 1, milliseconds),
    ("Loss", ("loss", "val_loss"), "loss", 1, "{:.2f}".format),
    ("Memory of the GPU", ("memory_bytes",), "GB", 1e-9, compact),
)
NAMES = {
    "loss": "training",
    "val_loss": "validation",
    "wait_p50_ms": "median",
    "wait_p99_ms": "99% below",
}
BUILD: tuple[tuple[str, dict[str, str], str, float], ...] = (
    (
        "Memory of the build",
        {"its processes": "memory_bytes", "whole machine": "machine_memory_bytes"},
        "GB",
        1e-9,
    ),
    ("Input of the build", {"input": "input_bytes_per_second"}, "MB/s", 1e-6),
    ("Tokens of the build", {"tokens": "tokens_per_second"}, "tokens/s", 1.0),
    (
        "Disk of the build",
        {"read": "build_read_bytes_per_second", "written": "build_write_bytes_per_second"},
        "MB/s",
        1e-6,
    ),
)


def waits(report: StallReport) -> Iterator[Markup]:
    """How long each step waited for its data."""
    if not report.waits_ms:
        return
    points = thinned([(float(step), ms) for step, ms in report.waits_ms], max)
    shown = [f"step {step:,.0f}: {milliseconds(ms)} ms" for step, ms in points]
    device = report.device_gap
    idle = "" if device is None else f" The device stood idle for {device.share:.1%} of its time."
    yield line_figure(
        "Wait for data, step by step",
        [Series(name="wait", points=points, shown=shown)],
        label="Milliseconds that each step waited for its data",
        x_label="step",
        unit="ms",
        y_format=milliseconds,
        marks=[Mark(value=report.p99_ms, label=f"99% below {milliseconds(report.p99_ms)} ms")],
        dots=True,
        says=f"{report.steps:,} steps, {report.wait_share:.1%} of the time waiting; the first wait,"
        f" {milliseconds(report.first_wait_ms)} ms, is start-up and left out.{idle}",
        headings=("step", "ms"),
        rows=[(f"{step:,}", milliseconds(ms)) for step, ms in report.slowest],
    )


def training(run: RunMetrics) -> Iterator[Markup]:
    """Speed, waits, loss and memory of a training, as far as they were written."""
    for title, names, unit, factor, fmt in TRAINING:
        lines = {NAMES.get(name, name): run.series(name) for name in names}
        yield from _over(
            title,
            lines,
            unit=unit,
            factor=factor,
            label=f"{title}, over steps",
            x_label="step",
            row=("{:,.0f}".format, fmt),
            y_format=fmt,
        )


def build(timeline: Timeline) -> Iterator[Markup]:
    """Cores, memory, input and disk of a build over time; runs one after the other."""
    offsets = np.cumsum([0.0, *(segment.length_seconds for segment in timeline.segments)])
    parts = [
        (segment, offset)
        for segment, offset in zip(timeline.segments, offsets, strict=False)
        if len(segment)
    ]
    if not parts:
        return
    cores = _cores(min(segment.cpu_percent.shape[1] for segment, _ in parts))
    charts: list[tuple[str, dict[str, Values], str, float]] = [
        ("CPU of the build", cores, "% of each core", 1.0)
    ]
    for title, fields, unit, factor in BUILD:
        columns: dict[str, Values] = {name: attrgetter(each) for name, each in fields.items()}
        charts.append((title, columns, unit, factor))
    for title, columns, unit, factor in charts:
        lines = {
            name: [
                (float(second + offset), float(value))
                for segment, offset in parts
                for second, value in zip(segment.seconds, values(segment), strict=True)
            ]
            for name, values in columns.items()
        }
        yield from _over(
            title,
            lines,
            unit=unit,
            factor=factor,
            label=f"{title} over time",
            x_label="seconds",
            row=("{:.1f}".format, "{:,.2f}".format),
        )


def _cores(number: int) -> dict[str, Values]:
    """A line for each core, or three for many."""
    if number <= MANY_CORES:
        return {f"core {core}": partial(_core, core=core) for core in range(number)}
    return {
        "busiest": lambda segment: np.nanmax(segment.cpu_percent, axis=1),
        "mean": lambda segment: np.nanmean(segment.cpu_percent, axis=1),
        "idlest": lambda segment: np.nanmin(segment.cpu_percent, axis=1),
    }


def _core(segment: Segment, *, core: int) -> NDArray[np.float64]:
    return segment.cpu_percent[:, core]


def _over(
    title: str,
    lines: dict[str, list[Point]],
    *,
    unit: str,
    factor: float,
    x_label: str,
    row: tuple[Callable[[float], str], Callable[[float], str]],
    **how: Any,
) -> Iterator[Markup]:
    """The lines that have values; none where no line has one."""
    series = [
        Series(name=name, points=thinned([(at, value * factor) for at, value in points], np.mean))
        for name, points in lines.items()
        if any(math.isfinite(value) for _, value in points)
    ]
    if not series:
        return
    place, number = row
    yield line_figure(
        title,
        series,
        x_label=x_label,
        unit=unit,
        from_zero=unit != "loss",
        linear=unit != "ms",
        headings=("line", x_label, unit),
        rows=[
            (each.name, place(at), number(value))
            for each in series
            for at, value in each.points
            if math.isfinite(value)
        ],
        **how,
    )


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


# -------------------------------------------------------------------------------------------------
# How the page looks: one set of rules, two sets of colours.

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5b6675; --line: #e1e5ea;
  --grid: #e8ebef; --mark: #1b2430; --code: #f1f3f6;
  --fed: #1d8a5f; --borderline: #b97a00; --starved: #cf4a35; --plain: #3b6fd4;
  --c1: #3b6fd4; --c2: #d9712b; --c3: #1d8a5f; --c4: #a24fc0; --c5: #b98a00; --c6: #0f8f9c;
  --c7: #c43d6b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2028; --ink: #e6eaf0; --soft: #9aa6b5; --line: #2a323d;
    --grid: #28303a; --mark: #e6eaf0; --code: #11161c;
    --fed: #3fbf8a; --borderline: #e0a83a; --starved: #ef7a64; --plain: #7aa2f0;
    --c1: #7aa2f0; --c2: #f09a5c; --c3: #3fbf8a; --c4: #cc8be3; --c5: #e0bd4a; --c6: #4cc3cf;
    --c7: #f07fa3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 48px; }
.brand { margin: 0; color: var(--soft); font-size: 14px; letter-spacing: .02em; }
h1 { margin: 2px 0 14px; font-size: clamp(22px, 4.4vw, 32px); line-height: 1.2;
  text-wrap: balance; }
h2 { margin: 0 0 12px; font-size: 20px; }
h3 { margin: 0 0 4px; font-size: 16px; }
dl { margin: 0; display: grid; gap: 4px 24px; }
dl div { display: grid; grid-template-columns: 104px 1fr; gap: 12px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
section { margin-top: 34px; }
.words { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; }
.words p { margin: 0 0 10px; max-width: 78ch; overflow-wrap: anywhere; }
.words p:last-child { margin-bottom: 0; }
pre { margin: 0 0 10px; padding: 12px 14px; background: var(--code); border: 1px solid var(--line);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 14px; }
pre code { user-select: all; }
.grid { display: grid; gap: 18px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; padding: 16px 18px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; min-width: 0; }
figure svg { display: block; width: 100%; max-width: 600px; height: auto; margin-top: 8px; }
.says { margin: 0; color: var(--soft); font-size: 14px; }
.legend { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: 2px 16px; font-size: 13.5px; color: var(--soft); }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
details { margin-top: 10px; font-size: 14px; }
summary { cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
td:last-child { overflow-wrap: break-word; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 500; }
section > .scroll tbody th { white-space: nowrap; }
section > .scroll + h3 { margin-top: 24px; }
th:first-child { text-align: left; padding-left: 0; }
section > .scroll td:last-child, section > .scroll th:last-child { text-align: left;
  min-width: 220px; }
.verdicts { padding-left: 0; list-style: none; }
.verdicts li { margin: 6px 0; padding-left: 12px; border-left: 4px solid var(--plain); }
.verdicts .fed { border-color: var(--fed); }
.verdicts .borderline { border-color: var(--borderline); }
.verdicts .starved { border-color: var(--starved); }
footer { margin-top: 40px; color: var(--soft); font-size: 14px; }
svg text { font-family: inherit; font-size: 12px; fill: var(--ink); paint-order: stroke;
  stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
svg .tick, svg .unit { fill: var(--soft); font-size: 11.5px; }
svg .value { font-variant-numeric: tabular-nums; fill: var(--soft); }
svg .name { font-weight: 500; }
svg .grid { stroke: var(--grid); }
svg .axis { stroke: var(--soft); stroke-width: .8; }
svg .mark { stroke: var(--mark); stroke-width: 1.4; stroke-dasharray: 5 4; }
svg .mark-label { font-weight: 600; }
svg .bar { fill: var(--plain); }
svg .bar.fed { fill: var(--fed); }
svg .bar.borderline { fill: var(--borderline); }
svg .bar.starved { fill: var(--starved); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .line { stroke: var(--c); } svg .dot { fill: var(--c); } .swatch { background: var(--c); }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
@media (max-width: 600px) {
  main { padding: 18px 12px 36px; }
  figure, .words { padding: 14px 12px; }
  dl div { grid-template-columns: 88px 1fr; }
}
@media print { body { background: #fff; } figure { break-inside: avoid; } }
"""

# There is no script in the page, and this forbids the browser to load anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
PAGE = Template(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    "<title>$title</title><style>$style</style></head><body><main>"
    '<header><p class="brand">tokenmill diagnose</p><h1>$title</h1>$facts</header>'
    "$sections$footer</main></body></html>\n"
)


def render(found: Diagnosis) -> str:
    """The whole page."""
    return PAGE.substitute(
        title=join([_title(found)]),
        style=STYLE,
        facts=_facts(found),
        sections=join(
            tag("section", tag("h2", title), *content, class_=class_)
            for title, class_, content in _sections(found)
        ),
        footer=_footer(found),
    )


def write_report(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page."""
    path.write_text(render(diagnosis), encoding="utf-8")


def _title(found: Diagnosis) -> str:
    if not found.ways:
        return "What the run says"
    if len(found.demands) != 1:
        return "What feeds a GPU from this machine"
    states = {verdict.state for verdict in found.verdicts if verdict.way != "loader"}
    if "fed" in states:
        return "Not starved: tokenizing while training is fast enough"
    if "borderline" in states:
        return "Close to starved: tokenizing while training just keeps up"
    return "Starved: tokenizing while training is too slow"


def _facts(found: Diagnosis) -> Markup:
    facts = []
    if (sample := found.sample) is not None:
        files = count(sample.files, "file")
        part = f"{count(sample.documents, 'document')}, {format_size(sample.text_bytes)} of text"
        facts += [
            ("Input", ", ".join(found.inputs)),
            ("Tokenizer", found.tokenizer or ""),
            ("Measured on", f"{part}, of {format_size(sample.input_bytes)} in {files}"),
        ]
    facts.append(("Machine", found.machine.describe()))
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts))


def _sections(found: Diagnosis) -> Iterator[tuple[str, str | None, list[Markup]]]:
    """The title, class and content of each."""
    if found.advice:
        yield "In plain words", "words", [tag("p", line) for line in found.advice]
    if found.ways:
        if found.commands:
            yield "What to type", None, [tag("pre", tag("code", each)) for each in found.commands]
        plots = (throughput(found), *lengths(found), *memory(found), *scaling(found))
        yield "What was measured", None, [_grid(plots)]
        yield "Numbers", None, list(_numbers(found))
        if found.demands:
            yield "What the GPU takes", None, [needs_table(found), *_verdicts(found)]
    evidence = found.evidence
    if evidence.stalls is not None:
        yield "Stall report", None, [_grid(waits(evidence.stalls))]
    if evidence.run is not None:
        yield "Training run", None, [_grid(training(evidence.run))]
    if evidence.timeline is not None:
        yield "Time line of the build", None, [_grid(build(evidence.timeline))]


def _grid(figures: Iterable[Markup]) -> Markup:
    return tag("div", *figures, class_="grid")


def _numbers(found: Diagnosis) -> Iterator[Markup]:
    yield tag("h3", "Each way")
    yield ways_table(found)
    if not found.sweep:
        how = "How it scales over workers and batch sizes: run with --sweep."
        yield tag("p", how, class_="says")
    if found.recommendation is not None:
        yield tag("h3", "Settings for this machine")
        yield tag("ul", *(tag("li", reason) for reason in found.recommendation.reasons))


def _verdicts(found: Diagnosis) -> Iterator[Markup]:
    if len(found.demands) != 1:
        return
    [need] = found.demands
    by_key = {way.key: way for way in found.ways}
    lines = []
    for verdict in found.verdicts:
        way = by_key[verdict.way]
        said = sentence(verdict, way, need)
        lines.append(tag("li", tag("b", way.title), " ", said, class_=verdict.state))
    yield tag("ul", *lines, class_="verdicts")


def _footer(found: Diagnosis) -> Markup:
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    how = (
        "Every way ran in a fresh process, on the same documents, with the clock started when its"
        " tokenizer was loaded. Cores: CPU seconds of the process and its workers for each second."
        " Memory: the peak, with the interpreter and the sample in it. What a GPU takes is an"
        " estimate unless a rate was given. Measure your own loop with tokenmill.StallMeter."
        if found.ways
        else ""
    )
    made = f"tokenmill {found.machine.tokenmill}, Python {found.machine.python}, {now}."
    return tag("footer", tag("p", how) if how else "", tag("p", made))
