"""The tables of how fast chats and puzzles become ids and masks, from results/supervised.json."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN = "tokenmill"


def supervised_body(results: Mapping[str, Any]) -> str:
    """The table, and whether the outcomes were equal."""
    rows = results["measurements"]
    own = next(row for row in rows if row["contender"] == OWN)
    lines = [
        "| what | chats/s | million tokens/s | tokenmill is faster | with its start-up |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        mine = row is own
        times = "" if mine else f"{rate(own) / rate(row):.1f} times"
        whole = "" if mine else f"{rate(own, 'whole_seconds') / rate(row):.1f} times"
        tokens = row["tokens"] / row["rows"] * rate(row) / 1e6
        spread = [row["rows"] / seconds for seconds in row["seconds"]]
        shown = f"{rate(row):,.0f} ({min(spread):,.0f} to {max(spread):,.0f})"
        lines.append(f"| {row['contender']} | {shown} | {tokens:.2f} | {times} | {whole} |")
    equal = len({row["digest"] for row in rows}) == 1
    mean = own["text_bytes"] / own["rows"]
    waits = [a - b for a, b in zip(own["whole_seconds"], own["seconds"], strict=True)]
    facts = (
        f"Chats of {mean:,.0f} bytes on average, made of the corpus {results['corpus']}, with the "
        f"tokenizer {own['tokenizer']}; {results['rounds']} rounds in turns, the median counts. "
        f"Ids and masks of the first {results['compared_rows']:,} chats are "
        f"{'the same in all of them' if equal else 'NOT the same'}. tokenmill was given "
        f"{own['rows']:,} chats, and its start-up took {statistics.median(waits):.1f} s."
    )
    return f"{facts}\n\n" + "\n".join(lines) + _puzzles(results.get("puzzles", []))


def _puzzles(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [
        "| tokenizer | script | tokenmill | times as fast | with both start-ups |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        script, own = (
            [statistics.median(row[who][which]) for which in ("seconds", "whole_seconds")]
            for who in ("script", "own")
        )
        lines.append(
            f"| {row['tokenizer']} | {script[0]:.2f} s | {own[0]:.2f} s | "
            f"{script[0] / own[0]:.1f} times | {script[1] / own[1]:.1f} times |"
        )
    equal = all(row["is_equal"] for row in rows)
    facts = (
        f"{rows[0]['rows']:,} puzzles, a script that calls the package for each question and each "
        f"answer beside a build with one worker. The ids are "
        f"{'the same' if equal else 'NOT the same'} in both."
    )
    return f"\n\n{facts}\n\n" + "\n".join(lines)


def rate(row: Mapping[str, Any], seconds: str = "seconds") -> float:
    """Chats per second: the median round."""
    return float(row["rows"] / statistics.median(row[seconds]))
