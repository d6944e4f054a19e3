"""The page: what it says first, the order of its parts, and how it looks."""

from __future__ import annotations

import datetime
import math
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

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
    from tokenmill.diagnosis.values import Diagnosis, RunMetrics, SweepPoint, Verdict, WayResult
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
    says: str = "",
    legend: Sequence[str] = (),
    headings: Sequence[str] = (),
    rows: Sequence[Sequence[Content]] = (),
) -> Markup:
    """A plot with everything that belongs to it."""
    parts: list[Markup] = [tag("h3", title)]
    if says:
        parts.append(tag("p", says, class_="says"))
    parts.append(plot)
    if len(legend) > 1:
        parts.append(
            tag(
                "ul",
                *(
                    tag("li", tag("i", class_=f"swatch c{number % 7 + 1}"), name)
                    for number, name in enumerate(legend)
                ),
                class_="legend",
            )
        )
    if rows:
        parts.append(_numbers(title, headings, rows))
    return tag("figure", join(parts))


def _numbers(title: str, headings: Sequence[str], rows: Sequence[Sequence[Content]]) -> Markup:
    every = -(-len(rows) // MOST_ROWS)
    shown = list(rows)[::every]
    less = f" (one in {every})" if every > 1 else ""
    return tag(
        "details",
        tag("summary", f"Numbers{less}", aria_label=f"Numbers of: {title}"),
        table(headings, shown),
    )


# -------------------------------------------------------------------------------------------------
# The parts of a diagnosis as figures and tables.


def throughput(found: Diagnosis) -> Markup:
    """What each way feeds, beside what the GPUs take."""
    ways = [way for way in found.ways if way.problem is None]
    fed = {verdict.way: verdict for verdict in found.verdicts} if _is_one(found) else {}
    return figure(
        "Tokens per second, each way",
        bar_plot(
            [_way_bar(way, fed.get(way.key)) for way in ways],
            marks=_needs(found),
            unit="tokens/s",
            label="Tokens per second of each way to tokenize",
        ),
        says=_says(found),
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
    rate = way.tokens_per_second if verdict is None else verdict.feeds_tokens_per_second
    word = "" if verdict is None else f", {STATES[verdict.state]}"
    return Bar(
        label=way.title,
        value=rate,
        shown=f"{compact(rate)}/s{word}",
        state="plain" if verdict is None else verdict.state,
    )


def _needs(found: Diagnosis) -> list[Mark]:
    """A line for each demand; of several, each has the name of its model."""
    if not _is_one(found):
        return [
            Mark(value=need.total, label=f"{need.name}: {compact(need.total)}")
            for need in found.demands
        ]
    [need] = found.demands
    who = "the GPU takes" if need.gpus == 1 else f"{need.gpus} GPUs take"
    about = " about" if need.is_estimate else ""
    return [Mark(value=need.total, label=f"{who}{about} {compact(need.total)}")]


def _says(found: Diagnosis) -> str:
    gpus = found.demands[0].gpus if found.demands else 1
    if not _is_one(found):
        who = "the GPU takes" if gpus == 1 else f"{gpus} GPUs take"
        return f"Dashed: what {who} with a model of that name, an estimate."
    if gpus == 1:
        return ""
    return (
        f"Bars are what this machine feeds to {gpus} GPUs: each has a process of its own, as far as"
        f" the {found.machine.cores} cores reach."
    )


def _is_one(found: Diagnosis) -> bool:
    return len(found.demands) == 1


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
    return "; ".join(part for part in parts if part)


def needs_table(found: Diagnosis) -> Markup:
    """What the GPUs take, and how the number came about."""
    rows = [
        (
            need.name,
            compact(need.tokens_per_second),
            str(need.gpus),
            compact(need.total),
            "; ".join(part for part in (need.basis, need.origin) if part),
        )
        for need in found.demands
    ]
    return table(("model", "tokens/s of one GPU", "GPUs", "in all", "where from"), rows)


def lengths(found: Diagnosis) -> Markup | None:
    """Tokens per document."""
    if found.lengths is None:
        return None
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
    return figure(
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


def memory(found: Diagnosis) -> Markup | None:
    """Memory of each way over time."""
    ways = [way for way in found.ways if len(way.memory) > 1]
    if not ways:
        return None
    series = [
        Series(
            name=way.title,
            points=[(seconds, num_bytes / 1e6) for seconds, num_bytes in way.memory],
            shown=[f"{seconds:.1f} s: {format_size(size)}" for seconds, size in way.memory],
        )
        for way in ways
    ]
    return figure(
        "Memory over time",
        line_plot(
            series,
            label="Memory of each way over time",
            x_label="seconds since it began",
            unit="MB",
            linear=True,
        ),
        says="Each way with its workers, from loading the tokenizer to the end. A page that"
        " processes share is counted in each.",
        legend=[way.title for way in ways],
        headings=("way", "peak", "seconds"),
        rows=[
            (way.title, format_size(way.peak_memory_bytes), f"{way.memory[-1][0]:.1f}")
            for way in ways
        ],
    )


def scaling(found: Diagnosis) -> list[Markup]:
    """The sweep: over workers, and over batch sizes."""
    titles = {way.key: way.title for way in found.ways}
    tried: dict[str, list[SweepPoint]] = {}
    for point in found.sweep:
        tried.setdefault(point.key, []).append(point)
    by_workers = {
        titles[key]: [(float(point.workers), point.tokens_per_second) for point in tried[key]]
        for key in ("pool", "build")
        if key in tried
    }
    by_batch = {
        titles[key]: [(float(point.batch), point.tokens_per_second) for point in tried[key]]
        for key in ("batched",)
        if key in tried
    }
    figures = []
    if by_workers:
        figures.append(_scaling("Scaling over workers", by_workers, x_label="workers"))
    if by_batch:
        figures.append(_scaling("Batch size in the loop", by_batch, x_label="samples in a call"))
    return figures


def _scaling(
    title: str,
    lines: dict[str, list[tuple[float, float]]],
    *,
    x_label: str,
) -> Markup:
    return figure(
        title,
        line_plot(
            [Series(name=name, points=points) for name, points in lines.items()],
            label=f"{title}: tokens per second",
            x_label=x_label,
            unit="tokens/s",
            tried=sorted({x for points in lines.values() for x, _ in points}),
        ),
        legend=list(lines),
        headings=("way", x_label, "tokens/s"),
        rows=[
            (name, f"{x:,.0f}", f"{y:,.0f}") for name, points in lines.items() for x, y in points
        ],
    )


def recommendation(found: Diagnosis) -> Markup | None:
    """Settings for this machine."""
    if found.recommendation is None:
        return None
    return tag("ul", *(tag("li", reason) for reason in found.recommendation.reasons))


# -------------------------------------------------------------------------------------------------
# Figures of what was brought along: a stall report, the metrics of a training, a build.

if TYPE_CHECKING:
    Point = tuple[float, float]

KEPT_POINTS = 300
MANY_CORES = 8
"""With more of them, the busiest, the mean and the idlest are drawn, not each."""


def waits(report: StallReport) -> Markup | None:
    """How long each step waited for its data."""
    if not report.waits_ms:
        return None
    points = thinned([(float(step), ms) for step, ms in report.waits_ms], max)
    device = report.device_gap
    idle = "" if device is None else f" The device stood idle for {device.share:.1%} of its time."
    return figure(
        "Wait for data, step by step",
        line_plot(
            [Series(name="wait", points=points, shown=_steps(points))],
            label="Milliseconds that each step waited for its data",
            x_label="step",
            unit="ms",
            y_format=milliseconds,
            marks=[Mark(value=report.p99_ms, label=f"99% below {milliseconds(report.p99_ms)} ms")],
            dots=True,
        ),
        says=f"{report.steps:,} steps, {report.wait_share:.1%} of the time waiting; the first wait,"
        f" {milliseconds(report.first_wait_ms)} ms, is start-up and left out.{idle}",
        headings=("step", "ms"),
        rows=[(f"{step:,}", milliseconds(ms)) for step, ms in report.slowest],
    )


def _steps(points: Sequence[Point]) -> list[str]:
    return [f"step {step:,.0f}: {milliseconds(ms)} ms" for step, ms in points]


def training(run: RunMetrics) -> Iterator[Markup]:
    """Speed, waits, loss and memory of a training, as far as they were written."""
    for title, names, unit, factor, fmt in (
        ("Tokens per second in training", ("tokens_per_second",), "tokens/s", 1, compact),
        ("Share of the GPU's peak (MFU)", ("mfu",), "%", 100, compact),
        ("Share of time waiting for data", ("wait_share",), "%", 100, milliseconds),
        ("Wait for data in training", ("wait_p50_ms", "wait_p99_ms"), "ms", 1, milliseconds),
        ("Loss", ("loss", "val_loss"), "loss", 1, _loss),
        ("Memory of the GPU", ("memory_bytes",), "GB", 1e-9, compact),
    ):
        lines = {
            name: [(step, value * factor) for step, value in run.series(name)] for name in names
        }
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            yield _over_steps(title, lines, unit=unit, y_format=fmt)


def _over_steps(
    title: str,
    lines: dict[str, list[Point]],
    *,
    unit: str,
    y_format: Callable[[float], str],
) -> Markup:
    series = [
        Series(name=NAMES.get(name, name), points=thinned(points, np.mean))
        for name, points in lines.items()
    ]
    return figure(
        title,
        line_plot(
            series,
            label=f"{title}, over steps",
            x_label="step",
            unit=unit,
            y_format=y_format,
            from_zero=unit != "loss",
            linear=unit != "ms",
        ),
        legend=[each.name for each in series],
        headings=("line", "step", unit),
        rows=[
            (each.name, f"{step:,.0f}", y_format(value))
            for each in series
            for step, value in each.points
        ],
    )


NAMES = {
    "loss": "training",
    "val_loss": "validation",
    "wait_p50_ms": "median",
    "wait_p99_ms": "99% below",
}


def build(timeline: Timeline) -> Iterator[Markup]:
    """Cores, memory, input and disk of a build over time; runs behind each other."""
    offsets = np.cumsum([0.0, *(segment.length_seconds for segment in timeline.segments)])
    parts = [
        (segment, offset)
        for segment, offset in zip(timeline.segments, offsets, strict=False)
        if len(segment)
    ]
    if not parts:
        return
    yield _over_time("CPU of the build", _cores(parts), unit="% of each core")
    for title, fields, unit, factor in (
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
    ):
        lines = {
            name: [(at, value * factor) for at, value in _column(parts, attrgetter(field))]
            for name, field in fields.items()
        }
        lines = {name: line for name, line in lines.items() if _has_values(line)}
        if lines:
            yield _over_time(title, lines, unit=unit)


def _cores(parts: Sequence[tuple[Segment, float]]) -> dict[str, list[Point]]:
    """A line for each core, or three for many."""
    cores = min(segment.cpu_percent.shape[1] for segment, _ in parts)
    if cores <= MANY_CORES:
        return {f"core {core}": _column(parts, partial(_core, core=core)) for core in range(cores)}
    return {
        "busiest": _column(parts, lambda segment: np.nanmax(segment.cpu_percent, axis=1)),
        "mean": _column(parts, lambda segment: np.nanmean(segment.cpu_percent, axis=1)),
        "idlest": _column(parts, lambda segment: np.nanmin(segment.cpu_percent, axis=1)),
    }


def _core(segment: Segment, *, core: int) -> NDArray[np.float64]:
    return segment.cpu_percent[:, core]


def _column(
    parts: Sequence[tuple[Segment, float]], values: Callable[[Segment], NDArray[np.float64]]
) -> list[Point]:
    return [
        (float(second + offset), float(value))
        for segment, offset in parts
        for second, value in zip(segment.seconds, values(segment), strict=True)
    ]


def _over_time(title: str, lines: dict[str, list[Point]], *, unit: str) -> Markup:
    series = [Series(name=name, points=thinned(points, np.mean)) for name, points in lines.items()]
    return figure(
        title,
        line_plot(
            series,
            label=f"{title} over time",
            x_label="seconds",
            unit=unit,
            linear=True,
        ),
        legend=list(lines),
        headings=("line", "seconds", unit),
        rows=[
            (each.name, f"{second:.1f}", f"{value:,.2f}")
            for each in series
            for second, value in each.points
            if math.isfinite(value)
        ],
    )


def _has_values(points: Sequence[Point]) -> bool:
    return any(math.isfinite(value) for _, value in points)


def thinned(points: Sequence[Point], keep: Callable[[list[float]], float]) -> list[Point]:
    """At most some hundred points: of each stretch its first place and `keep` of its values."""
    step = -(-len(points) // KEPT_POINTS) or 1
    if step == 1:
        return list(points)
    found = []
    for first in range(0, len(points), step):
        stretch = points[first : first + step]
        values = [value for _, value in stretch if math.isfinite(value)]
        found.append((stretch[0][0], float(keep(values)) if values else math.nan))
    return found


def _loss(value: float) -> str:
    return f"{value:.2f}"


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
svg .line.c1 { stroke: var(--c1); } svg .line.c2 { stroke: var(--c2); }
svg .line.c3 { stroke: var(--c3); } svg .line.c4 { stroke: var(--c4); }
svg .line.c5 { stroke: var(--c5); } svg .line.c6 { stroke: var(--c6); }
svg .line.c7 { stroke: var(--c7); }
svg .dot.c1 { fill: var(--c1); } svg .dot.c2 { fill: var(--c2); } svg .dot.c3 { fill: var(--c3); }
svg .dot.c4 { fill: var(--c4); } svg .dot.c5 { fill: var(--c5); } svg .dot.c6 { fill: var(--c6); }
svg .dot.c7 { fill: var(--c7); }
.swatch.c1 { background: var(--c1); } .swatch.c2 { background: var(--c2); }
.swatch.c3 { background: var(--c3); } .swatch.c4 { background: var(--c4); }
.swatch.c5 { background: var(--c5); } .swatch.c6 { background: var(--c6); }
.swatch.c7 { background: var(--c7); }
@media (max-width: 600px) {
  main { padding: 18px 12px 36px; }
  figure, .words { padding: 14px 12px; }
  dl div { grid-template-columns: 88px 1fr; }
}
@media print { body { background: #fff; } figure { break-inside: avoid; } }
"""


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(found: Diagnosis) -> str:
    """The whole page."""
    title = "tokenmill diagnose"
    head = join(
        (
            Markup('<meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            Markup('<meta name="color-scheme" content="light dark">'),
            Markup('<link rel="icon" href="data:,">'),
            tag("title", _title(found)),
            tag("style", Markup(STYLE)),
        )
    )
    body = tag(
        "main",
        tag("header", tag("p", title, class_="brand"), tag("h1", _title(found)), _facts(found)),
        *_sections(found),
        _footer(found),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


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


def _sections(found: Diagnosis) -> Iterator[Markup]:
    if found.advice:
        yield _section("In plain words", [tag("p", line) for line in found.advice], class_="words")
    if found.ways:
        yield from _measured(found)
    yield from _brought(found)


def _measured(found: Diagnosis) -> Iterator[Markup]:
    if found.commands:
        yield _section("What to type", [tag("pre", tag("code", line)) for line in found.commands])
    figures = [throughput(found), lengths(found), memory(found)]
    yield _section("What was measured", [_grid([*figures, *scaling(found)])])
    tables = [tag("h3", "Each way"), ways_table(found)]
    if not found.sweep:
        tables.append(
            tag("p", "How it scales over workers and batch sizes: run with --sweep.", class_="says")
        )
    advised = recommendation(found)
    if advised is not None:
        tables += [tag("h3", "Settings for this machine"), advised]
    yield _section("Numbers", tables)
    if found.demands:
        yield _section("What the GPU takes", [needs_table(found), *_verdicts(found)])


def _verdicts(found: Diagnosis) -> list[Markup]:
    if len(found.demands) != 1:
        return []
    by_key = {way.key: way for way in found.ways}
    return [
        tag(
            "ul",
            *(
                tag(
                    "li",
                    tag("b", by_key[verdict.way].title),
                    " ",
                    sentence(verdict, by_key[verdict.way], found.demands[0]),
                    class_=verdict.state,
                )
                for verdict in found.verdicts
            ),
            class_="verdicts",
        )
    ]


def _brought(found: Diagnosis) -> Iterator[Markup]:
    evidence = found.evidence
    if evidence.stalls is not None:
        yield _section("Stall report", [_grid([waits(evidence.stalls)])])
    if evidence.run is not None:
        yield _section("Training run", [_grid(training(evidence.run))])
    if evidence.timeline is not None:
        yield _section("Time line of the build", [_grid(build(evidence.timeline))])


def _grid(figures: Iterable[Markup | None]) -> Markup:
    return tag("div", *(each for each in figures if each is not None), class_="grid")


def _section(title: str, content: Iterable[Markup], **attributes: object) -> Markup:
    return tag("section", tag("h2", title), *content, **attributes)


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


# -------------------------------------------------------------------------------------------------
# The report: one HTML file with everything in it, for a browser that is offline.
#
#   | page.py       the page: what it says first, the order of its parts, the look
#   | parts.py      the parts of a diagnosis as figures and tables
#   | runs.py       figures of what was brought along: a stall report, a training, a build
#   | figures.py    a figure: title, plot, legend, and its numbers as a table
#   | plots.py      bars, lines and columns as SVG
#   | scales.py     from values to places, and round numbers for axes
#   | markup.py     tags and escaping: every text of the user goes through it
#
# There is no script in it, and a policy in its head forbids the browser to load anything.


def write_report(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page."""
    path.write_text(render(diagnosis), encoding="utf-8")
