"""Figures of what was brought along: a stall report, the metrics of a training, a build."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.diagnosis.report.figures import figure
from tokenmill.diagnosis.report.plots import Mark, Series, line_plot
from tokenmill.diagnosis.words import compact, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.diagnosis.evidence import RunMetrics
    from tokenmill.diagnosis.report.markup import Markup
    from tokenmill.monitor import Segment, Timeline
    from tokenmill.stalls.report import StallReport

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
