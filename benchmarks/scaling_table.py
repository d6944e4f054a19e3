"""The tables of docs/scaling.md, from results/scaling.json and results/scaling_cores.json."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CORPUS_TOKENS = 627 * 10**9
"""SlimPajama's."""
MANY_CORES = 1024
WORDS = {
    "plan": "plan: find the files, cut them into units",
    "resume": "resume: check every receipt, sweep, write the manifest",
    "read": "open: read the manifest",
    "monitor": "listen: take in the report of a unit",
    "commit": "commit a unit, synced (a worker's cost)",
    "dispatch": "hand out a task and hear of it (local runner)",
}


def scaling_body(results: Mapping[str, Any]) -> str:
    """What is shown of the simulation, below its origin."""
    rows = {row["step"]: row for row in results["measurements"]}
    size = results["units"] * results["unit_bytes"] / 1e15
    facts = (
        f"{results['units']:,} units of {results['unit_bytes'] / 1e9:.0f} GB, {size:,.2f} PB of "
        f"input; receipts {rows['receipts']['receipt_bytes'] / 1e9:.2f} GB, manifest "
        f"{rows['resume']['manifest_bytes'] / 1e6:,.0f} MB."
    )
    lines = [
        facts,
        "",
        "| step | units measured | seconds | for each unit | for 100,000 units | peak memory |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for step, words in WORDS.items():
        row = rows[step]
        each = row["seconds"] / row["units"]
        memory = f"{row['peak_memory_bytes'] / 1e9:.2f} GB"
        lines.append(
            f"| {words} | {row['units']:,} | {row['seconds']:,.1f} | {each * 1e6:,.0f} us "
            f"| {each * 1e5:,.1f} s | {memory} |"
        )
    return "\n".join(lines)


def cores_body(results: Mapping[str, Any]) -> str:
    """What is shown of the builds with more and more workers, below their origin."""
    rows: Sequence[Mapping[str, Any]] = results["measurements"]
    sizes = results["input_bytes"]
    kinds = list(dict.fromkeys(row["format"] for row in rows))
    facts = (
        f"The corpus {results['corpus']}, repeated, in {results['files']} files: "
        + ", ".join(f"{sizes[kind] / 1e9:.2f} GB as .{kind}" for kind in kinds)
        + f"; {results['tokenizer']}, engine {results['engine']}; {results['rounds']} rounds each, "
        "medians, start-up left out."
    )
    lines = [
        facts,
        "",
        "| input | workers | MB of text/s | million tokens/s | times one worker | of perfect |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in kinds:
        own = [row for row in rows if row["format"] == kind]
        lines += [_cores_row(row, _rate(own[0])) for row in own]
    plain = [row for row in rows if row["format"] == kinds[0]]
    shared = (
        [*shared_body(results["shared"], results["decompressing"]), ""]
        if "shared" in results
        else []
    )
    parts = _parts(results["parts"])
    return "\n".join([*lines, "", *shared, *parts, "", *_cost_of_a_corpus(plain)])


def shared_body(
    rows: Sequence[Mapping[str, Any]], packages: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Few compressed files with one worker and with all, and how fast one is decompressed."""
    rates = ", ".join(
        f".{each['format']} by {each['package']} "
        f"{statistics.median(each['bytes_per_second']) / 1e6:,.0f} MB/s"
        for each in packages
    )
    lines = [
        "Few compressed files, which the workers share:",
        "",
        "| input | workers | MB of text/s | million tokens/s | times one worker |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        alike = (
            each
            for each in rows
            if (each["format"], each["files"]) == (row["format"], row["files"])
        )
        first = _rate(next(alike))
        name = f"{row['files']} {'file' if row['files'] == 1 else 'files'}, .{row['format']}"
        cells = f"{_rate(row) / 1e6:,.0f} | {_token_rate(row) / 1e6:,.1f}"
        lines.append(f"| {name} | {row['workers']} | {cells} | {_rate(row) / first:.2f} |")
    return [*lines, "", f"Decompressing alone, one thread, whole lines of JSON counted: {rates}."]


def _cores_row(row: Mapping[str, Any], first: float) -> str:
    rate, workers = _rate(row), row["workers"]
    return (
        f"| .{row['format']} | {workers} | {rate / 1e6:,.0f} | {_token_rate(row) / 1e6:,.1f} "
        f"| {rate / first:.2f} | {rate / first / workers:.0%} |"
    )


def _parts(results: Mapping[str, Any]) -> list[str]:
    """One program beside parts, each from its start to its end."""
    count, seconds = results["count"], results["seconds"]
    build, parts, finish = (
        statistics.median(each[name] for each in seconds) for name in ("build", "parts", "finish")
    )
    text = (
        f"One build with {count} workers took {build:.1f} s from start to end; {count} parts of "
        f"one worker each, all at once, took {parts:.1f} s, and `finish` {finish:.2f} s."
    )
    return [text]


def _cost_of_a_corpus(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a large corpus would take at these rates: computed, not measured."""
    by_workers = {row["workers"]: _token_rate(row) for row in rows}
    most = max(by_workers)
    lines = [
        f"At these rates {CORPUS_TOKENS / 1e9:,.0f} billion tokens take (computed, not measured):",
        "",
        "| cores | time | counted as |",
        "| --- | --- | --- |",
    ]
    for workers in sorted({1, most}):
        taken = _duration(CORPUS_TOKENS / by_workers[workers])
        lines.append(f"| {workers} | {taken} | this machine |")
    machines = MANY_CORES // most
    taken = _duration(CORPUS_TOKENS / (by_workers[most] * machines))
    text, ids = machines * _rate(rows[-1]) / 1e9, machines * by_workers[most] * 2 / 1e9
    counted = (
        f"{machines} such machines, each with its own part, start-up left out; storage that gives "
        f"{text:,.0f} GB of text/s and takes {ids:,.0f} GB of ids/s"
    )
    return [*lines, f"| {machines * most:,} | {taken} | {counted} |"]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} seconds"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def _token_rate(row: Mapping[str, Any]) -> float:
    return float(row["tokens"] / statistics.median(row["working_seconds"]))


def _rate(row: Mapping[str, Any]) -> float:
    return float(row["text_bytes"] / statistics.median(row["working_seconds"]))
