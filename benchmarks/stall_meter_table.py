"""The table of what a StallMeter costs, from results/stall_meter.json and stall_meter_gpu.json."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP_NS = 10_000_000
"""A step of 10 ms: a small model on a fast GPU."""


def stall_meter_body(results: Mapping[str, Any]) -> str:
    """What is shown of the results, below their origin."""
    place = "" if results["device"] is None else f"{results['device']}; "
    facts = (
        f"{place}{results['rounds']} rounds, with and without the meter in turns: medians, and for "
        "the difference the least and the most."
    )
    lines = [
        facts,
        "",
        "| loop | without the meter | with it | the meter | of a step of 10 ms | `report()` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["measurements"]:
        costs = [m - p for p, m in zip(row["plain_ns"], row["metered_ns"], strict=True)]
        cost = statistics.median(costs)
        plain, with_it = (statistics.median(row[name]) for name in ("plain_ns", "metered_ns"))
        lines.append(
            f"| {row['loop']} | {plain:,.0f} ns | {with_it:,.0f} ns "
            f"| {cost:,.0f} ns ({min(costs):,.0f} to {max(costs):,.0f}) "
            f"| {100 * cost / STEP_NS:.4f}% | {statistics.median(row['report_ms']):.1f} ms |"
        )
    return "\n".join(lines)
