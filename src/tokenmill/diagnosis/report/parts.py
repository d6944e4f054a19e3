"""The parts of a diagnosis as figures and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.config import format_size
from tokenmill.diagnosis.report.figures import figure
from tokenmill.diagnosis.report.markup import table, tag
from tokenmill.diagnosis.report.plots import (
    Bar,
    Mark,
    Series,
    bar_plot,
    column_plot,
    line_plot,
)
from tokenmill.diagnosis.words import compact, count, milliseconds, tick_text

if TYPE_CHECKING:
    from tokenmill.diagnosis.report.markup import Markup
    from tokenmill.diagnosis.values import Diagnosis, SweepPoint, Verdict, WayResult

STATES = {
    "fed": "fast enough",
    "borderline": "just enough",
    "starved": "too slow",
}


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
    rows = []
    for way in found.ways:
        if way.problem is not None:
            rows.append((way.title, "-", "-", "-", "-", "-", way.problem))
            continue
        rows.append(
            (
                way.title,
                compact(way.tokens_per_second),
                milliseconds(way.sample_ms),
                milliseconds(way.chunk_ms),
                f"{way.cpu_cores:.1f}",
                format_size(way.peak_memory_bytes),
                _remark(way),
            )
        )
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
