"""The tables of feeding: rates beside the limit and the fastest peer, resumption, start-up.

Numbers come from results/feed.json and results/startup.json; `render` puts the tables on the page.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.feeders import LIMIT, PEER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Row = dict[str, Any]

PEER_PACKAGES = {
    "feeding": ("litdata", "megatron-core", "datasets", "datatrove"),
    "mosaicml": ("mosaicml-streaming",),
}
"""Environment -> what is measured in it."""
NOTED_PADDING = 0.005
"""Every packing has a last row that is not full; that is not worth a note."""


def rates(row: Row) -> list[float]:
    """Tokens per second of each round."""
    return [t / s for t, s in zip(row["tokens"], row["seconds"], strict=True)]


def rate(row: Row) -> float:
    """The median round."""
    return statistics.median(rates(row))


def fastest(rows: Sequence[Row], role: str) -> float | None:
    """The largest median among the rows of a role that have numbers."""
    found = [rate(row) for row in rows if row["role"] == role and not row["error"]]
    return max(found, default=None)


def feed_body(results: Mapping[str, Any]) -> str:
    """What is shown of results/feed.json, below its origin."""
    rows = results["measurements"]
    facts = (
        f"{results['tokens'] / 1e6:,.1f} million tokens in {results['documents']:,} documents "
        f"({results['corpus']}, {results['tokenizer']}, uint16); rows of {results['seq_len']:,}, "
        f"batches of {results['batch_size']}, shuffled; {results['rounds']} rounds of at least "
        f"{results['seconds']:g} s."
    )
    return "\n\n".join(
        [facts, "### Tokens per second", _rate_table(rows), "### Resume", _resume_table(rows)]
    )


def _rate_table(rows: Sequence[Row]) -> str:
    limit, peer = fastest(rows, LIMIT), fastest(rows, PEER)
    lines = _head("what", "workers", "ids", "million tokens/s", "of the limit", "fastest peer = 1")
    for row in _peers_by_rate(rows):
        cells = [row["contender"], str(row["workers"])]
        if row["error"]:
            cells += ["", _reason(row), "", ""]
        else:
            cells += [row["dtype"], _rate_and_spread(row), _share(row, limit), _times(row, peer)]
        lines.append(_line(cells))
    notes = [
        f"{row['contender']}: {row['padding_share']:.0%} of the places counted are padding."
        for row in rows
        if row["padding_share"] >= NOTED_PADDING
    ]
    return "\n".join(lines + ([""] if notes else []) + notes)


def _peers_by_rate(rows: Sequence[Row]) -> list[Row]:
    """Ours in their order, then the peers, fastest first."""
    peers = [row for row in rows if row["role"] == PEER]
    others = [row for row in rows if row["role"] != PEER]
    return others + sorted(peers, key=lambda row: 0.0 if row["error"] else -rate(row))


def _resume_table(rows: Sequence[Row]) -> str:
    lines = _head("what", "first batch after", "opening before it", "exact")
    for row in rows:
        found = row["resume"]
        if found is None:
            continue
        if found["error"]:
            lines.append(_line([row["contender"], _reason(found), "", ""]))
            continue
        cells = [
            row["contender"],
            _milliseconds(found["first_batch_seconds"]),
            _milliseconds(found["open_seconds"]),
            "yes" if found["exact"] else "no",
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def startup_body(results: Mapping[str, Any]) -> str:
    """What is shown of results/startup.json, below its origin."""
    lines = _head(
        "what",
        "tokens",
        "shards",
        "first batch after opening",
        "first batch after a restore",
        f"memory after {results['batches']:,} batches",
        "of it not file pages",
    )
    for row in results["measurements"]:
        cells = [row["contender"], f"{row['tokens']:,}", f"{row['shards']:,}"]
        if row["error"]:
            cells += [_reason(row), "", "", ""]
        else:
            cells += [
                _milliseconds(row["open_seconds"]),
                _milliseconds(row["resume_seconds"]),
                _megabytes(row["memory_bytes"]),
                _megabytes(row["anonymous_bytes"]),
            ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _head(*names: str) -> list[str]:
    return [_line(names), "|" + " --- |" * len(names)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rate_and_spread(row: Row) -> str:
    found = [value / 1e6 for value in rates(row)]
    digits = 1 if statistics.median(found) < 100 else 0
    return _median_and_spread(found, lambda value: f"{value:,.{digits}f}")


def _milliseconds(seconds: Sequence[float]) -> str:
    found = [1000 * value for value in seconds]
    digits = 1 if statistics.median(found) < 100 else 0
    return f"{_median_and_spread(found, lambda value: f'{value:,.{digits}f}')} ms"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _median_and_spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def _share(row: Row, limit: float | None) -> str:
    return "" if not limit else f"{rate(row) / limit:.2f}"


def _times(row: Row, peer: float | None) -> str:
    return "" if not peer else f"{rate(row) / peer:,.2f}"


def _reason(row: Row) -> str:
    return str(row["error"]).replace("|", "/")
