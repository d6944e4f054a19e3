"""The tables of exports and imports; `render` puts them on the page."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT, OWN, PEER = "limit", "own", "peer"
Row = dict[str, Any]


def rate(found: Mapping[str, Any]) -> float:
    """Bytes of ids per second: the median round."""
    return float(found["bytes"]) / float(statistics.median(found["seconds"]))


def interop_body(results: Mapping[str, Any]) -> str:
    """What is shown of results/interop.json, below its origin."""
    rows = results["measurements"]
    facts = (
        f"{results['tokens'] / 1e6:,.1f} million tokens in {results['documents']:,} documents"
        f" ({results['corpus']}, {results['tokenizer']}), {2 * results['tokens'] / 1e6:,.0f} MB as"
        f" uint16; peers write {results['peer_tokens'] / 1e6:,.1f} million of them; rows of"
        f" {results['seq_len']:,} in mds, pt and npz, documents elsewhere; {results['rounds']}"
        " rounds, median (slowest to fastest)."
    )
    return "\n\n".join(
        [
            facts,
            "### Export, GB/s of ids, until it is on the disk",
            table(rows, "write", "their own writer"),
            "### Import, GB/s of ids",
            table(rows, "read", "their own reader"),
        ]
    )


def table(rows: Sequence[Row], direction: str, theirs: str) -> str:
    """A line for each format: ours with one process and with all cores, and theirs."""
    head = ["format", "tokenmill, 1 process", "tokenmill, all cores", theirs, "times theirs"]
    lines = [_line(head), "|" + " --- |" * len(head)]
    for name in dict.fromkeys(row["format"] for row in rows):
        found = [row for row in rows if row["format"] == name]
        limit = next((row for row in found if row["role"] == LIMIT), None)
        if limit is not None:
            if direction in limit:
                lines.append(
                    _line(["*a plain copy of the ids*", _cell(limit, direction), "", "", ""])
                )
            continue
        one, many = (_only(found, OWN, workers) for workers in (1, 0))
        peer = next((row for row in found if row["role"] == PEER), None)
        label = "" if peer is None else f"{_cell(peer, direction)}, {peer['contender']}"
        times = _times([row for row in (one, many) if row], peer, direction)
        lines.append(_line([name, _cell(one, direction), _cell(many, direction), label, times]))
    return "\n".join(lines)


def _only(rows: Sequence[Row], role: str, workers: int) -> Row | None:
    return next((r for r in rows if r["role"] == role and r["workers"] == workers), None)


def _cell(row: Row | None, direction: str) -> str:
    if row is None:
        return ""
    if row["error"]:
        return str(row["error"]).replace("|", "/")
    if direction not in row:
        return ""
    found = row[direction]
    rates = [found["bytes"] / seconds / 1e9 for seconds in found["seconds"]]
    low, middle, high = min(rates), statistics.median(rates), max(rates)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _times(own: Sequence[Row], peer: Row | None, direction: str) -> str:
    """One process, and all cores, beside the peer."""
    if peer is None or peer["error"] or direction not in peer:
        return ""
    theirs = rate(peer[direction])
    found = [rate(row[direction]) / theirs for row in own if not row["error"] and direction in row]
    return ", ".join(f"{each:.1f}" for each in found)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
