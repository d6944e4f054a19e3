"""The tables of exports and imports; `render` puts them on the page."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
            _limits(rows),
            export_table(rows),
            "### Import, GB/s of ids, until the store is on the disk",
            import_table(rows),
        ]
    )


def disk_rate(rows: Sequence[Row]) -> float:
    """Bytes per second that the disk takes: the fastest plain copy."""
    return max(rate(row["write"]) for row in rows if row["role"] == LIMIT and not row["error"])


def _limits(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["role"] == LIMIT and not row["error"]]
    words = [
        f"{_cell(row, 'write')} {'on one thread' if row['workers'] == 1 else 'on all cores'}"
        for row in found
    ]
    return f"A plain copy of the ids, before everything else and after it: {'; '.join(words)}."


def export_table(rows: Sequence[Row]) -> str:
    """A line for each format: ours on one thread and on all cores, and their own writer."""
    head = ["format", "bytes per id", "1 thread", "all cores", "of the disk"]
    head += ["their own writer", "times theirs"]
    lines = [_line(head), "|" + " --- |" * len(head)]
    disk = disk_rate(rows)
    for name, own, peer in _formats(rows):
        many = own[-1]
        share = wide = ""
        if not many["error"]:
            made, ids = many["write"]["made"], many["write"]["bytes"]
            wide = f"{2 * made / ids:.1f}"
            share = f"{rate(many['write']) * made / ids / disk:.2f}"
        cells = [name, wide, *(_cell(row, "write") for row in own), share]
        lines.append(_line([*cells, _label(peer, "write"), _times(own, peer, "write", "write")]))
    return "\n".join(lines)


def import_table(rows: Sequence[Row]) -> str:
    """The same the other way; an import writes as well, so their writers are there too."""
    head = ["format", "1 thread", "all cores", "times their own writer"]
    head += ["their own reader, which writes nothing", "times their reader"]
    lines = [_line(head), "|" + " --- |" * len(head)]
    for name, own, peer in _formats(rows):
        cells = [name, *(_cell(row, "read") for row in own), _times(own, peer, "read", "write")]
        lines.append(_line([*cells, _label(peer, "read"), _times(own, peer, "read", "read")]))
    return "\n".join(lines)


def _formats(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row], Row | None]]:
    """Each format, ours on one thread and on all cores, and the peer's."""
    for name in dict.fromkeys(row["format"] for row in rows if row["role"] == OWN):
        found = [row for row in rows if row["format"] == name]
        own = [_only(found, OWN, workers) for workers in (1, 0)]
        yield name, own, next((row for row in found if row["role"] == PEER), None)


def _label(peer: Row | None, direction: str) -> str:
    return "" if peer is None else f"{_cell(peer, direction)}, {peer['contender']}"


def _only(rows: Sequence[Row], role: str, workers: int) -> Row:
    return next(row for row in rows if row["role"] == role and row["workers"] == workers)


def _cell(row: Row, direction: str) -> str:
    if row["error"]:
        return str(row["error"]).replace("|", "/")
    if direction not in row:
        return ""
    found = row[direction]
    rates = [found["bytes"] / seconds / 1e9 for seconds in found["seconds"]]
    low, middle, high = min(rates), statistics.median(rates), max(rates)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _times(own: Sequence[Row], peer: Row | None, direction: str, theirs: str) -> str:
    """One thread, and all cores, beside what the peer does."""
    if peer is None or peer["error"] or theirs not in peer:
        return ""
    found = [
        rate(row[direction]) / rate(peer[theirs])
        for row in own
        if not row["error"] and direction in row
    ]
    return ", ".join(f"{each:.1f}" for each in found)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
