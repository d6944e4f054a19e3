from __future__ import annotations

import io

import pytest
from rich.console import Console

from tokenmill.builder.progress import Progress, WorkerProgress
from tokenmill.cli.output import BuildView, PlainLines, cpu, live, watch
from tokenmill.options import unheard


def progress(**changes: object) -> Progress:
    values: dict[str, object] = {
        "phase": "building",
        "seconds": 12.3,
        "units_done": 12,
        "units_total": 19,
        "bytes_done": 1_260_000_000,
        "bytes_total": 2_000_000_000,
        "documents": 1_234_567,
        "tokens": 294_000_000,
        "rejected": 0,
        "memory_bytes": 1_130_000_000,
        "memory_peak_bytes": 1_200_000_000,
        "memory_budget_bytes": 1_500_000_000,
        "bytes_per_second": 163e6,
        "tokens_per_second": 38.2e6,
        "eta_seconds": 12.0,
        "workers": workers(98, 97),
    }
    return Progress(**{**values, **changes})  # type: ignore[arg-type]


def workers(*percents: float) -> tuple[WorkerProgress, ...]:
    return tuple(
        WorkerProgress(number=n, pid=n, cpu_percent=p, memory_bytes=1, doing="x")
        for n, p in enumerate(percents)
    )


def drawn(state: Progress, *, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(BuildView().draw(state, width=width))
    return captured.get().splitlines()


def test_the_bar_shows_every_fact_a_person_watches_for() -> None:
    shown = "\n".join(drawn(progress(rejected=3), width=120))
    for fact in (
        "63.0%",
        "163 MB/s",
        "38.2M tokens/s",
        "ETA 0:12",
        "1.2M documents",
        "units 12/19",
        "memory 1.1 of 1.5 GB",
        "cpu 98 97%",
        "3 rejected",
    ):
        assert fact in shown


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_terminal_gets_two_lines_and_none_wraps(width: int) -> None:
    lines = drawn(progress(workers=workers(*[97.0] * 64), rejected=12_345), width=width)
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)


def test_many_workers_are_one_block_each() -> None:
    assert cpu(workers(98, 7), blocks=True) == "98 7%"
    assert cpu(workers(0, 50, 100, 250, 100), blocks=True) == "100% \u0020\u2584\u2588\u2588\u2588"
    assert cpu(workers(10, 20, 30, 40, 50), blocks=False) == "30% (10 to 50) of 5 workers"
    assert cpu((), blocks=True) == "-"


def test_a_build_is_at_its_end_only_when_its_units_are() -> None:
    encoded = {"bytes_done": 2_000_000_000, "eta_seconds": 0.0}
    for total in (19, None):
        shown = "\n".join(drawn(progress(**encoded, units_total=total), width=100))
        assert "99.9%" in shown
    assert "100.0%" in "\n".join(drawn(progress(**encoded, units_done=19), width=100))


@pytest.mark.parametrize(
    ("phase", "words"),
    [("planning", "describing the tokenizer"), ("starting", "workers load the tokenizer")],
)
def test_what_a_build_waits_for_is_said(phase: str, words: str) -> None:
    assert words in "\n".join(drawn(progress(phase=phase), width=100))


def test_an_unknown_end_is_told_as_unknown() -> None:
    shown = "\n".join(drawn(progress(units_total=None, eta_seconds=None), width=100))
    assert "units 12/?" in shown
    assert "ETA -:--" in shown


def test_plain_lines_come_at_the_start_and_then_at_intervals() -> None:
    stream = io.StringIO()
    rare, often = (
        PlainLines(BuildView(), stream),
        PlainLines(BuildView(), stream, every_seconds=0.0),
    )
    rare(progress(phase="planning"))
    rare(progress(phase="starting"))
    for _ in range(3):
        rare(progress())
    assert stream.getvalue() == "building 2.0 GB in 19 units\n"
    for _ in range(3):
        often(progress())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1] == (
        "[0:12]  63.0%  units 12/19  163 MB/s  38.2M tokens/s  1,234,567 documents"
        "  memory 1.1 of 1.5 GB  cpu 98 97%  ETA 0:12"
    )


def test_a_message_is_printed_at_once_whatever_the_interval() -> None:
    stream = io.StringIO()
    lines = PlainLines(BuildView(), stream)
    lines(progress())
    lines(progress(message="worker 1 died"))
    lines(progress())
    assert stream.getvalue().splitlines()[1:] == ["worker 1 died"]


def test_the_live_bar_keeps_messages_and_removes_itself() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    with live(BuildView(), console) as show:
        show(progress(phase="starting"))
        show(progress(message="worker 1 died [kill -9]"))
        show(progress())
    assert stream.getvalue().count("worker 1 died [kill -9]") == 1
    assert "63.0%" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")


def test_a_quiet_run_has_nobody_to_tell() -> None:
    with watch(BuildView(), quiet=True) as on_progress:
        assert on_progress is unheard


def test_a_reader_who_left_does_not_stop_the_build() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    PlainLines(BuildView(), Closed())(progress())
