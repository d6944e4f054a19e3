"""The tables of docs/benchmarks.md: from the committed results, and from results made up here."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.short_builds_table import short_builds_body

from benchmarks import interop_tables, render, scaling_table

PAGE = """before
<!-- build:begin -->old<!-- build:end -->
between
<!-- flatness:begin -->
<!-- flatness:end -->
<!-- outside:begin --><!-- outside:end -->
<!-- short_builds:begin --><!-- short_builds:end -->
<!-- words:begin --><!-- words:end -->
<!-- supervised:begin --><!-- supervised:end -->
<!-- loop:begin --><!-- loop:end -->
<!-- feed:begin --><!-- feed:end -->
<!-- startup:begin --><!-- startup:end -->
<!-- interop:begin --><!-- interop:end -->
<!-- feeding_gpu:begin --><!-- feeding_gpu:end -->
<!-- training_gpu:begin --><!-- training_gpu:end -->
<!-- optimizers_gpu:begin --><!-- optimizers_gpu:end -->
<!-- long_rows_gpu:begin --><!-- long_rows_gpu:end -->
<!-- first_step:begin --><!-- first_step:end -->
<!-- asking:begin --><!-- asking:end -->
<!-- balance:begin --><!-- balance:end -->
<!-- viewing:begin --><!-- viewing:end -->
<!-- stall_meter:begin --><!-- stall_meter:end -->
<!-- stall_meter_gpu:begin --><!-- stall_meter_gpu:end -->
<!-- stalls_gpu:begin --><!-- stalls_gpu:end -->
after
"""
MACHINE = {
    "cpu": "Some CPU",
    "cores_logical": 2,
    "cores_physical": 1,
    "memory_bytes": 16_000_000_000,
    "system": "Linux",
    "python": "CPython 3.11",
}
ORIGIN = {
    "date": "2026-01-02 03:04 UTC",
    "commit": "abc",
    "command": "python -m benchmarks.build",
    "machine": MACHINE,
    "versions": {"gigatoken": "0.10.0"},
}


def row(contender: str, *, seconds: list[float], startup: float = 0.0, **more: Any) -> render.Row:
    return {
        "table": "engine",
        "corpus": "english",
        "tokenizer": "gpt2",
        "contender": contender,
        "error": None,
        "seconds": seconds,
        "startup_seconds": [startup] * len(seconds),
        "documents": 10,
        "tokens": 50_000_000,
        "text_bytes": 200_000_000,
        "input_bytes": 210_000_000,
        "peak_memory_bytes": 1_234_000_000,
    } | more


def results(*rows: render.Row) -> dict[str, Any]:
    return ORIGIN | {"measurements": list(rows)}


def table_row(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_committed_results_give() -> None:
    page = render.PAGE.read_text()

    assert render.render(page, render.stored_results()) == page


def test_text_outside_the_markers_stays_and_old_tables_go() -> None:
    page = render.render(PAGE, {})

    assert (
        page
        == """before
<!-- build:begin -->
Not measured yet; run: make bench
<!-- build:end -->
between
<!-- flatness:begin -->
Not measured yet; run: python -m benchmarks.flatness
<!-- flatness:end -->
<!-- outside:begin -->
Not measured yet; run: python -m benchmarks.outside
<!-- outside:end -->
<!-- short_builds:begin -->
Not measured yet; run: make bench
<!-- short_builds:end -->
<!-- words:begin -->
Not measured yet; run: python -m benchmarks.words
<!-- words:end -->
<!-- supervised:begin -->
Not measured yet; run: make bench
<!-- supervised:end -->
<!-- loop:begin -->
Not measured yet; run: make bench
<!-- loop:end -->
<!-- feed:begin -->
Not measured yet; run: make bench
<!-- feed:end -->
<!-- startup:begin -->
Not measured yet; run: make bench
<!-- startup:end -->
<!-- interop:begin -->
Not measured yet; run: make bench
<!-- interop:end -->
<!-- feeding_gpu:begin -->
Not measured yet; run: python -m benchmarks.feeding_gpu, on a machine with a GPU
<!-- feeding_gpu:end -->
<!-- training_gpu:begin -->
Not measured yet; run: python -m benchmarks.training_gpu, on a machine with a GPU
<!-- training_gpu:end -->
<!-- optimizers_gpu:begin -->
Not measured yet; run: python -m benchmarks.optimizers_gpu, on a machine with a GPU
<!-- optimizers_gpu:end -->
<!-- long_rows_gpu:begin -->
Not measured yet; run: python -m benchmarks.long_rows_gpu, on a machine with a GPU
<!-- long_rows_gpu:end -->
<!-- first_step:begin -->
Not measured yet; run: python -m benchmarks.first_step
<!-- first_step:end -->
<!-- asking:begin -->
Not measured yet; run: python -m benchmarks.asking
<!-- asking:end -->
<!-- balance:begin -->
Not measured yet; run: python -m benchmarks.balance
<!-- balance:end -->
<!-- viewing:begin -->
Not measured yet; run: python -m benchmarks.viewing
<!-- viewing:end -->
<!-- stall_meter:begin -->
Not measured yet; run: python -m benchmarks.stall_meter
<!-- stall_meter:end -->
<!-- stall_meter_gpu:begin -->
Not measured yet; run: python -m benchmarks.stall_meter --cuda, on a machine with a GPU
<!-- stall_meter_gpu:end -->
<!-- stalls_gpu:begin -->
Not measured yet; run: python -m benchmarks.stalls_gpu, on a machine with a GPU
<!-- stalls_gpu:end -->
after
"""
    )


def test_rendering_again_changes_nothing() -> None:
    stored = {"build": results(row(render.CEILINGS[0], seconds=[1.0]))}
    once = render.render(PAGE, stored)

    assert "Some CPU" in once
    assert render.render(once, stored) == once


@pytest.mark.parametrize("page", ["", PAGE + PAGE, "<!-- build:end --><!-- build:begin -->"])
def test_a_page_without_exactly_one_pair_of_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="build:begin"):
        render.render(page, {})


def test_the_ceiling_is_the_better_way_to_run_the_engine_and_shares_leave_start_up_out() -> None:
    text = render.build_section(
        results(
            row(render.CEILINGS[0], seconds=[2.0, 2.0, 2.0]),
            row(render.CEILINGS[1], seconds=[1.0, 1.0, 1.0]),
            row("tokenmill from jsonl", seconds=[2.0, 2.25, 9.0], startup=1.0),
        )
    )

    assert "| english | gpt2 | 200 MB/s | 0.80 | - | - |" in text
    assert table_row(text, "tokenmill from jsonl")[1:] == [
        "160 (25 to 200)",
        "168",
        "40.0",
        "0.80",
        "2.25 s",
        "1.23 GB",
    ]
    assert table_row(text, render.CEILINGS[0])[2:5] == ["", "25.0", "0.50"]


def test_the_clock_around_the_command_is_held_against_the_engine_of_its_own_table() -> None:
    text = render.outside_section(
        results(
            row(render.CEILINGS[1], seconds=[1.0]),
            row(render.OUTSIDE, seconds=[3.25], startup=2.0),
            row(render.CEILINGS[2], seconds=[8.0], tokenizer="wordpiece"),
            row("tokenmill from jsonl", seconds=[18.0], startup=2.0, tokenizer="wordpiece"),
        )
    )

    assert table_row(text, render.OUTSIDE)[4] == "0.80"
    assert table_row(text, "tokenmill from jsonl")[4] == "0.50"


def test_peers_are_compared_without_and_with_the_start_up_of_both() -> None:
    text = render.build_section(
        results(
            row("tokenmill from jsonl", seconds=[2.0], startup=1.0, table="peers"),
            row("datasets.map", seconds=[90.0], startup=10.0, table="peers"),
        )
    )

    cells = table_row(text, "datasets.map")
    assert cells[1:5] == ["2.5 (2.5 to 2.5)", "90.00 s", "80.0 times", "45.0 times"]


def test_peers_are_also_compared_with_the_rate_on_the_large_corpus() -> None:
    text = render.build_section(
        results(
            row("tokenmill from jsonl", seconds=[1.5], startup=1.0, table="engine"),
            row("tokenmill from jsonl", seconds=[2.0], startup=1.0, table="peers"),
            row("datasets.map", seconds=[90.0], startup=10.0, table="peers"),
        )
    )

    assert table_row(text, "datasets.map")[5] == "160.0 times"


def test_a_contender_without_numbers_stays_in_the_table_with_its_reason() -> None:
    text = render.build_section(
        results(
            row("tokenmill from jsonl", seconds=[2.0], table="peers"),
            row("datatrove", seconds=[], table="peers", error="not installed: no | wheel"),
        )
    )

    assert table_row(text, "datatrove")[1] == "not installed: no / wheel"


def test_memory_over_time_is_shown_in_tenths_that_cover_every_sample() -> None:
    memory = [1_000_000_000] * 95 + [1_500_000_000]
    text = render.flatness_section(
        ORIGIN
        | {
            "tokenizer": "qwen3",
            "workers": 2,
            "memory_budget": "1.5GB",
            "memory_kind": "PSS",
            "sample_seconds": 0.5,
            "input_bytes": 5_000_000_000,
            "documents": 7,
            "tokens": 10**9,
            "seconds": [float(i) for i in range(96)],
            "memory_bytes": memory,
        }
    )

    assert "peak 1.50 GB" in text
    assert table_row(text, "tenth 1")[1:] == ["up to 8 s", "1.00 GB"]
    assert table_row(text, "tenth 10")[1:] == ["up to 95 s", "1.50 GB"]


def test_answers_of_the_viewer_are_listed_with_what_they_were_asked_of() -> None:
    numbers = {"tokens": 1_000_000, "documents": 900, "shards": 4, "start_seconds": 0.5}
    memory = {"own_bytes": 150e6, "resident_bytes": 200e6}
    answers = [{"what": "overview", "first": 0.0123, "median": 0.0049}]
    text = render.viewing_section(ORIGIN | numbers | memory | {"answers": answers})
    assert "A store of 1,000,000 tokens in 900 documents and 4 shards." in text
    assert table_row(text, "overview")[1:] == ["12.3 ms", "4.9 ms"]


def test_what_the_meter_costs_is_the_difference_of_its_rounds() -> None:
    text = render.stall_meter_section(
        ORIGIN
        | {
            "rounds": 3,
            "device": None,
            "measurements": [
                {
                    "loop": "over a list",
                    "plain_ns": [100.0, 300.0, 100.0],
                    "metered_ns": [1100.0, 2300.0, 1900.0],
                    "report_ms": [1.0, 3.0, 2.0],
                }
            ],
        }
    )

    assert table_row(text, "over a list") == [
        "over a list",
        "100 ns",
        "1,900 ns",
        "1,800 ns (1,000 to 2,000)",
        "0.0180%",
        "2.0 ms",
    ]


def test_exports_stand_beside_their_projects_writers() -> None:
    def moved(name: str, role: str, workers: int, seconds: list[float], **more: Any) -> render.Row:
        found = {"seconds": seconds, "bytes": 1_000_000_000, "made": 2_000_000_000}
        names = {"format": name, "contender": "theirs", "role": role, "workers": workers}
        return names | {"error": None, "write": found, "read": found} | more

    copies = [
        {"format": "copy", "role": "limit", "workers": workers, "error": None}
        | {"write": {"seconds": seconds, "bytes": 1_000_000_000, "made": 1_000_000_000}}
        for workers, seconds in ((1, [1.0]), (0, [0.25]), (1, [0.5]))
    ]
    rows = [
        *copies,
        moved("mds", "own", 1, [2.0, 1.0, 4.0]),
        moved("mds", "own", 0, [1.0, 1.0, 1.0]),
        moved("mds", "peer", 1, [20.0, 10.0, 10.0]) | {"read": {"seconds": [0.5], "bytes": 10**9}},
        moved("llmc", "own", 1, [1.0]),
        moved("llmc", "own", 0, [1.0], error="lost"),
    ]
    write, read = interop_tables.export_table(rows), interop_tables.import_table(rows)
    assert table_row(write, "mds")[1:] == [
        "4.0",
        "0.500 (0.250 to 1.000)",
        "1.000 (1.000 to 1.000)",
        "0.50",
        "0.100 (0.050 to 0.100), theirs",
        "5.0, 10.0",
    ]
    assert table_row(write, "llmc")[3:] == ["lost", "", "", ""]
    assert table_row(read, "mds")[3:] == ["5.0, 10.0", "2.000 (2.000 to 2.000), theirs", "0.2, 0.5"]
    assert "copy" not in read


def test_the_page_on_scaling_is_what_the_committed_results_give() -> None:
    page = render.SCALING_PAGE.read_text()

    assert render.render(page, render.stored_results(), render.SCALING_SECTIONS) == page


def test_scaling_is_told_for_each_unit_and_for_a_hundred_thousand() -> None:
    steps = [
        {"step": step, "units": 1000, "seconds": 2.0, "peak_memory_bytes": 10**9}
        for step in (*scaling_table.WORDS, "receipts")
    ]
    steps[1]["manifest_bytes"], steps[-1]["receipt_bytes"] = 3 * 10**6, 5 * 10**9
    text = render.scaling_section(
        ORIGIN | {"units": 1000, "unit_bytes": 10**10, "measurements": steps}
    )

    plan = table_row(text, scaling_table.WORDS["plan"])
    assert plan[1:] == ["1,000", "2.0", "2,000 us", "200.0 s", "1.00 GB"]
    assert "0.01 PB of input; receipts 5.00 GB, manifest 3 MB." in text


def test_more_workers_are_held_against_one_and_a_corpus_is_costed_at_their_rate() -> None:
    rows = [
        {"format": kind, "workers": count, "text_bytes": 4e9, "tokens": 10**9}
        | {"working_seconds": [seconds]}
        for kind, count, seconds in (
            ("jsonl", 1, 100.0),
            ("jsonl", 16, 10.0),
            ("jsonl.zst", 1, 200.0),
        )
    ]
    facts = {"corpus": "c", "files": 16, "tokenizer": "t", "engine": "e", "rounds": 1}
    facts |= {"input_bytes": {"jsonl": 5e9, "jsonl.zst": 1e9}, "measurements": rows}
    facts |= {"parts": {"count": 16, "seconds": [{"build": 9.0, "parts": 11.0, "finish": 0.5}]}}
    few = {"format": "jsonl.gz", "files": 3, "text_bytes": 4e9, "tokens": 10**9}
    facts["shared"] = [
        few | {"workers": 1, "working_seconds": [40.0]},
        few | {"workers": 16, "working_seconds": [5.0]},
    ]
    facts["decompressing"] = [
        {"format": "jsonl.gz", "package": "zlib-ng", "bytes_per_second": [5e8, 6e8, 7e8]}
    ]
    text = render.cores_section(ORIGIN | facts)
    assert "| 3 files, .jsonl.gz | 16 | 800 | 200.0 | 8.00 |" in text
    assert "counted: .jsonl.gz by zlib-ng 600 MB/s." in text

    speed, cost = text.split("computed, not measured")
    assert "| .jsonl | 16 | 400 | 100.0 | 10.00 | 62% |" in speed
    assert "| .jsonl.zst | 1 | 20 | 5.0 | 1.00 | 100% |" in speed
    assert "16 parts of one worker each, all at once, took 11.0 s, and `finish` 0.50 s" in speed
    assert table_row(cost, "16")[1] == "104 minutes"
    assert table_row(text, "1,024")[1] == "98 seconds"


def test_short_builds_are_shown_by_their_medians_and_reasons() -> None:
    start = {"tokenizer": "gpt2", "imports": 0.4, "from_file": 0.6, "engine": 0.7, "again": 1.0}
    peers: dict[str, Any] = {"tokenizer": "gpt2", "tokenmill, first": 2.0, "tokenmill, again": 1.0}
    rounds: list[dict[str, Any]] = [
        {"datasets.map": 12.0, "datatrove": "not installed"},
        {"datasets.map": 8.0},
    ]
    results = {
        "rounds": 2,
        "workers": 2,
        "input_bytes": 20_000_000,
        "starts": [start | {"first": seconds} for seconds in (0.5, 0.7)],
        "peers": [peers | rounds[0], peers | rounds[0] | rounds[1]],
    }
    lines = short_builds_body(results).splitlines()
    figures = "0.40 s | 0.20 s | 0.70 s | 0.60 s | 0.30 s | 1.20 s | 1.00 s"
    assert f"| gpt2 | {figures} |" in lines
    assert "**gpt2** (20 MB of JSON Lines, 2 workers)" in lines
    assert "| datasets.map | 10.00 | 5.0 times | 10.0 times |" in lines
    assert "| datatrove | not installed | | |" in lines
