"""The report: one HTML file with everything in it, for a browser that is offline.

The frame of the page and its style are in page.html. There is no script in it, and its policy
forbids the browser to load anything.
"""

from __future__ import annotations

import datetime
import math
from pathlib import Path
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
    line_plot,
    safe,
    tag,
    tick_text,
)
from tokenmill.diagnosis.values import STATES
from tokenmill.words import compact, count, format_size, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenmill.diagnosis.plots import Point
    from tokenmill.diagnosis.values import Diagnosis, RunMetrics
    from tokenmill.monitor import Timeline
    from tokenmill.stalls import StallReport

PAGE = Path(__file__).with_name("page.html")
MOST_ROWS = 200  # of the table below a plot
KEPT_POINTS = 300
MANY_CORES = 8  # with more of them, the busiest, the mean and the idlest are drawn, not each
TRAINING: tuple[tuple[str, dict[str, str], str, float, Callable[[float], str]], ...] = (
    ("Tokens per second in training", {"tokens_per_second": ""}, "tokens/s", 1, compact),
    ("Share of the GPU's peak (MFU)", {"mfu": ""}, "%", 100, compact),
    ("Share of time waiting for data", {"wait_share": ""}, "%", 100, milliseconds),
    (
        "Wait for data in training",
        {"wait_p50_ms": "median", "wait_p99_ms": "99% below"},
        "ms",
        1,
        milliseconds,
    ),
    ("Loss", {"loss": "training", "val_loss": "validation"}, "loss", 1, "{:.2f}".format),
    ("Memory of the GPU", {"memory_bytes": ""}, "GB", 1e-9, compact),
)
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


def write_report(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page."""
    path.write_text(render(diagnosis), encoding="utf-8")


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
    made = f"tokenmill {found.machine.tokenmill}, Python {found.machine.python}, {now}."
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=safe(_title(found)),
        facts=tag("dl", *(tag("div", tag("dt", name), tag("dd", is_)) for name, is_ in facts)),
        sections="".join(
            tag("section", tag("h2", title), *content, class_=class_)
            for title, class_, content in _sections(found)
        ),
        footer=tag("footer", tag("p", how) if found.ways else "", tag("p", made)),
    )


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


def _sections(found: Diagnosis) -> Iterator[tuple[str, str | None, Sequence[Markup]]]:
    """The title, class and content of each."""
    if found.advice:
        yield "In plain words", "words", [tag("p", line) for line in found.advice]
    if found.ways:
        if found.commands:
            yield "What to type", None, [tag("pre", tag("code", each)) for each in found.commands]
        plots = (_throughput(found), *_lengths(found), *_memory(found), *_scaling(found))
        yield "What was measured", None, [tag("div", *plots, class_="grid")]
        yield "Numbers", None, [*_numbers(found)]
        if found.demands:
            yield "What the GPU takes", None, [*_needs(found)]
    evidence = found.evidence
    for title, given, draw in (
        ("Stall report", evidence.stalls, _waits),
        ("Training run", evidence.run, _training),
        ("Time line of the build", evidence.timeline, _build),
    ):
        if given is not None:
            yield title, None, [tag("div", *draw(given), class_="grid")]  # type: ignore[arg-type]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table; columns after the first are numbers, and stand on the right."""
    head = tag("thead", tag("tr", *(tag("th", text, scope="col") for text in headings)))
    lines = (
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    )
    return tag("div", tag("table", head, tag("tbody", *lines)), class_="scroll")


def figure(
    title: str,
    plot: Markup,
    *,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    says: str = "",
    legend: Sequence[str] = (),
) -> Markup:
    """A plot: what it shows, what the colours mean, and its numbers as a table."""
    parts = [tag("h3", title), *([tag("p", says, class_="says")] if says else []), plot]
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
    rows: Sequence[Sequence[str]],
    says: str = "",
    **how: Any,
) -> Markup:
    """A figure of lines; `how` is told to `line_plot`."""
    legend = [each.name for each in series]
    plot = line_plot(series, **how)
    return figure(title, plot, says=says, legend=legend, headings=headings, rows=rows)


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
    says = ""
    if not is_one:
        says = f"Dashed: what {who} with a model of that name, an estimate."
    elif gpus > 1:
        says = (
            f"Bars are what this machine feeds to {gpus} GPUs: each has a process of its own, as"
            f" far as the {found.machine.cores} cores reach."
        )
    bars, rows = [], []
    for way in ways:
        rate, word, state = way.tokens_per_second, "", "plain"
        if (verdict := fed.get(way.key)) is not None:
            rate, state = verdict.feeds_tokens_per_second, verdict.state
            word = f", {STATES[state]}"
        bars.append(Bar(way.title, rate, f"{compact(rate)}/s{word}", state))
        text = f"{way.text_bytes / way.seconds / 1e6:,.1f}" if way.text_bytes else "-"
        documents = f"{way.documents:,}" if way.documents else "-"
        numbers = (f"{way.tokens_per_second:,.0f}", text, documents, f"{way.seconds:.2f}")
        rows.append((way.title, *numbers))
    label = "Tokens per second of each way to tokenize"
    return figure(
        "Tokens per second, each way",
        bar_plot(bars, marks=marks, unit="tokens/s", label=label),
        says=says,
        headings=("way", "tokens/s", "text MB/s", "documents", "seconds"),
        rows=rows,
    )


def _numbers(found: Diagnosis) -> Iterator[Markup]:
    """All numbers of all ways, and what to use."""
    rows = []
    for way in found.ways:
        remarks = [way.engine, count(way.workers, "worker") if way.workers > 1 else ""]
        if way.compared_documents:
            differing = f"{way.differing_documents:,} of {way.compared_documents:,}"
            remarks.append(f"{differing} documents with other ids")
        remark = "; ".join(filter(None, (*remarks, way.note)))
        failed = way.problem is not None
        rows.append((way.title, *(["-"] * 5 if failed else way.cells()), way.problem or remark))
    yield tag("h3", "Each way")
    yield table(("way", "tokens/s", "ms, 1 sample", "ms, 8 samples", "cores", "memory", ""), rows)
    if not found.sweep:
        how = "How it scales over workers and batch sizes: run with --sweep."
        yield tag("p", how, class_="says")
    if found.recommendation is not None:
        yield tag("h3", "Settings for this machine")
        yield tag("ul", *(tag("li", reason) for reason in found.recommendation.reasons))


def _needs(found: Diagnosis) -> Iterator[Markup]:
    """What the GPUs take, how the number came about, and each way held against it."""
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
    yield table(("model", "tokens/s of one GPU", "GPUs", "in all", "where from"), rows)
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
    columns, rows = [], []
    for each in lengths.histogram:
        documents, last = f"{each.documents:,}", f"{each.high - 1:,}"
        shown = f"{documents} documents from {each.low:,} to {last} tokens"
        columns.append(Bar(tick_text(each.low), float(each.documents), shown))
        rows.append((f"{each.low:,} to {last}", documents, f"{each.tokens:,}"))
    label = "How many documents have how many tokens"
    yield figure(
        "Tokens per document",
        column_plot(columns, label=label, unit="documents", x_label="tokens and more"),
        says=f"Half of them have {lengths.percentiles[50]:,} tokens or fewer; the mean is"
        f" {lengths.mean:,.0f}, the longest has {lengths.longest:,}.",
        headings=("tokens", "documents", "tokens in them"),
        rows=rows,
    )


def _memory(found: Diagnosis) -> Iterator[Markup]:
    """Memory of each way over time."""
    series, rows = [], []
    for way in found.ways:
        if len(way.memory) > 1:
            points = [(seconds, num_bytes / 1e6) for seconds, num_bytes in way.memory]
            shown = [f"{seconds:.1f} s: {format_size(size)}" for seconds, size in way.memory]
            series.append(Series(way.title, points, shown))
            peak = format_size(way.peak_memory_bytes)
            rows.append((way.title, peak, f"{way.memory[-1][0]:.1f}"))
    if series:
        yield line_figure(
            "Memory over time",
            series,
            label="Memory of each way over time",
            x_label="seconds since it began",
            unit="MB",
            linear=True,
            says="Each way with its workers, from loading the tokenizer to the end. A page that"
            " processes share is counted in each.",
            headings=("way", "peak", "seconds"),
            rows=rows,
        )


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
        if rows:
            yield line_figure(
                title,
                [Series(name, points) for name, points in lines.items()],
                label=f"{title}: tokens per second",
                x_label=x_label,
                unit="tokens/s",
                tried=sorted({x for _, x, _ in rows}),
                headings=("way", x_label, "tokens/s"),
                rows=[(name, f"{x:,.0f}", f"{y:,.0f}") for name, x, y in rows],
            )


# -------------------------------------------------------------------------------------------------
# Figures of what was given beside the text: a stall report, the metrics of a training, a build.


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
        label="Milliseconds that each step waited for its data",
        x_label="step",
        unit="ms",
        y_format=milliseconds,
        marks=[Mark(report.p99_ms, f"99% below {milliseconds(report.p99_ms)} ms")],
        dots=True,
        says=f"{report.steps:,} steps, {report.wait_share:.1%} of the time waiting; the first wait,"
        f" {milliseconds(report.first_wait_ms)} ms, is start-up and left out.{idle}",
        headings=("step", "ms"),
        rows=[(f"{step:,}", milliseconds(ms)) for step, ms in report.slowest],
    )


def _training(run: RunMetrics) -> Iterator[Markup]:
    """Speed, waits, loss and memory of a training, as far as they were written."""
    for title, names, unit, factor, shown in TRAINING:
        lines = {called or name: run.series(name) for name, called in names.items()}
        how = {"label": f"{title}, over steps", "x_label": "step", "y_format": shown}
        yield from _over(title, lines, unit, factor, row=("{:,.0f}".format, shown), **how)


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
    num_cores = min(segment.cpu_percent.shape[1] for segment, _ in runs)
    cores = np.concatenate([segment.cpu_percent[:, :num_cores] for segment, _ in runs])
    columns = {f"core {core}": cores[:, core] for core in range(num_cores)}
    if num_cores > MANY_CORES:
        summed: dict[str, Any] = {"busiest": np.nanmax, "mean": np.nanmean, "idlest": np.nanmin}
        columns = {
            name: np.concatenate([of(segment.cpu_percent, axis=1) for segment, _ in runs])
            for name, of in summed.items()
        }
    charts = [("CPU of the build", columns, "% of each core", 1.0)]
    for title, fields, unit, factor in BUILD:
        columns = {
            name: np.concatenate([getattr(segment, each) for segment, _ in runs])
            for name, each in fields.items()
        }
        charts.append((title, columns, unit, factor))
    for title, columns, unit, factor in charts:
        lines = {
            name: [*zip(seconds, values.tolist(), strict=True)] for name, values in columns.items()
        }
        how = {"label": f"{title} over time", "x_label": "seconds"}
        yield from _over(title, lines, unit, factor, row=("{:.1f}".format, "{:,.2f}".format), **how)


def _over(
    title: str,
    lines: dict[str, list[Point]],
    unit: str,
    factor: float,
    *,
    row: tuple[Callable[[float], str], Callable[[float], str]],
    **how: Any,
) -> Iterator[Markup]:
    """The lines that have values; none where no line has one."""
    series = [
        Series(name, thinned([(at, value * factor) for at, value in points], np.mean))
        for name, points in lines.items()
        if any(math.isfinite(value) for _, value in points)
    ]
    place, number = row
    if series:
        yield line_figure(
            title,
            series,
            unit=unit,
            from_zero=unit != "loss",
            linear=unit != "ms",
            headings=("line", how["x_label"], unit),
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
