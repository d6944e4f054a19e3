"""A diagnosis on the terminal: the ways as a table, then what they mean, then what to type."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

from tokenmill.cli.output import make_console
from tokenmill.cli.progress import show_line
from tokenmill.cli.show import facts, next_steps
from tokenmill.diagnosis.values import as_json as diagnosis_json
from tokenmill.visible import visible
from tokenmill.words import compact, count, format_size, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.table import Table

    from tokenmill.diagnosis.values import Diagnosis, WayResult

STATES = {
    "fed": ("fast enough", "green"),
    "borderline": ("just enough", "yellow"),
    "starved": ("too slow", "red"),
}


@contextlib.contextmanager
def watch_steps(*, quiet: bool = False) -> Iterator[Callable[[int, int, str], None] | None]:
    """Say on stderr what is measured: one line that is redrawn, or a line each in a log."""
    if quiet:
        yield None
        return
    live = sys.stderr.isatty()

    def show(number: int, steps: int, what: str) -> None:
        line = f"[{number}/{steps}] {visible(what)}"
        show_line(line[:78] if live else line, live=live)

    try:
        yield show
    finally:
        if live:
            show_line("", live=True)


def diagnosis_result(found: Diagnosis, *, report: Path | None, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        print(json.dumps(diagnosis_json(found), indent=2))
        return
    console = make_console()
    if found.ways:
        facts(_head(found))
        console.print()
        console.print(ways_table(found))
        console.print()
        facts([("needed" if not n else "", need) for n, need in enumerate(_needs(found))])
    for line in found.advice:
        console.print()
        console.print(visible(line))
    if found.sweep:
        console.print()
        console.print(sweep_table(found))
    if found.recommendation is not None:
        console.print()
        facts([("use", "\n".join(found.recommendation.reasons))])
    console.print()
    next_steps(*found.commands)
    if report is not None:
        facts([("report", str(report))])


def _head(found: Diagnosis) -> list[tuple[str, str]]:
    assert found.sample is not None
    return [
        (
            "text",
            f"{count(found.sample.documents, 'document')}, {format_size(found.sample.text_bytes)}",
        ),
        ("tokenizer", found.tokenizer or ""),
        (
            "machine",
            (
                f"{found.machine.cores} cores, {format_size(found.machine.memory_bytes)},"
                f" {found.machine.cpu}"
            ),
        ),
    ]


def _needs(found: Diagnosis) -> Iterator[str]:
    for need in found.demands:
        all_of_them = f", {need.gpus} GPUs {compact(need.total)}" if need.gpus > 1 else ""
        rate = f"{compact(need.tokens_per_second)} tokens/s for a GPU{all_of_them}"
        yield f"{need.name}: {rate} ({need.origin})"
    yield found.demands[0].basis


def ways_table(found: Diagnosis) -> Table:
    """What each way reached; fits into 80 columns."""
    from rich.table import Table
    from rich.text import Text

    states = (
        {verdict.way: verdict.state for verdict in found.verdicts}
        if len(found.demands) == 1
        else {}
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way", no_wrap=True)
    for heading in ("tokens/s", "ms for 1", "for 8", "cores", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    if states:
        table.add_column("")
    for way in found.ways:
        state = [Text(*STATES.get(states.get(way.key, ""), ("", "")))] if states else []
        table.add_row(way.title, *_cells(way), *state)
    return table


def _cells(way: WayResult) -> tuple[str, ...]:
    if way.problem is not None:
        return ("failed", "", "", "", "")
    return (
        compact(way.tokens_per_second),
        milliseconds(way.sample_ms),
        milliseconds(way.chunk_ms),
        f"{way.cpu_cores:.1f}",
        format_size(way.peak_memory_bytes),
    )


def sweep_table(found: Diagnosis) -> Table:
    """Every setting that was tried."""
    from rich.table import Table

    titles = {way.key: way.title for way in found.ways}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True)
    for heading in ("workers", "batch", "tokens/s", "cores", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in found.sweep:
        table.add_row(
            titles[point.key],
            str(point.workers),
            "" if point.key == "build" else str(point.batch),
            compact(point.tokens_per_second),
            f"{point.cpu_cores:.1f}",
            format_size(point.peak_memory_bytes),
        )
    return table
