"""The tables of results/short_builds.json, which `short_builds` measures."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN = "tokenmill"


def short_builds_body(results: Mapping[str, Any]) -> str:
    """The tables of results/short_builds.json."""
    head = "tokenizer | imports | from_file | 1.5 times, imports | first | engine's load"
    lines = [
        f"| {head} | and imports and 0.5 s | again |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in _medians(results["starts"]).items():
        imports = row["imports"]
        reference, engine = (row[each] - imports for each in ("from_file", "engine"))
        cells = [imports, reference, imports + 1.5 * reference, row["first"]]
        cells += [engine, imports + engine + 0.5, row["again"]]
        lines.append(f"| {name} | {' | '.join(f'{cell:.2f} s' for cell in cells)} |")
    size = f"{results['input_bytes'] / 1e6:.0f} MB of JSON Lines, {results['workers']} workers"
    parts = [f"Rounds: {results['rounds']}, of which the median counts.", "\n".join(lines)]
    for name, row in _medians(results["peers"]).items():
        table = ["| what | seconds | tokenmill, first, is faster | tokenmill, again |"]
        table.append("| --- | ---: | ---: | ---: |")
        own = [row[f"{OWN}, {what}"] for what in ("first", "again")]
        for what, seconds in row.items():
            if isinstance(seconds, str):
                table.append(f"| {what} | {seconds} | | |")
                continue
            times = [f"{seconds / each:.1f} times" for each in own]
            times = ["", ""] if what.startswith(OWN) else times
            table.append(f"| {what} | {seconds:.2f} | {' | '.join(times)} |")
        parts += [f"**{name}** ({size})", "\n".join(table)]
    return "\n\n".join(parts)


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tokenizer -> what -> its median; the reason where one round has no time."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["tokenizer"] for row in rows):
        own = [row for row in rows if row["tokenizer"] == name]
        for what in own[0]:
            values = [row[what] for row in own]
            reasons = [each for each in values if isinstance(each, str)]
            if what != "tokenizer":
                found.setdefault(name, {})[what] = (
                    reasons[0] if reasons else statistics.median(values)
                )
    return found
