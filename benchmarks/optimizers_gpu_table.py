"""The table of optimizers, from results/optimizers_gpu.json. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = ("model", "optimizer", "update, device", "update, host", "first step", "kept")


def optimizers_body(results: Mapping[str, Any]) -> str:
    """What is shown of results/optimizers_gpu.json, below its origin."""
    device = results["device"]
    facts = f"{device['name']}, CUDA {device['cuda']}; median of {results['steps']} updates."
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in results["measurements"]]
    return f"{facts}\n\n" + "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [row["model"], row["optimizer"]]
    if row["error"]:
        return [*cells, row["error"].replace("|", "/"), "", "", ""]
    return [
        *cells,
        f"{row['device_ms']:,.2f} ms",
        f"{row['host_ms']:,.2f} ms",
        f"{row['first_step_seconds']:,.1f} s",
        f"{row['state_bytes'] / 1e9:,.2f} GB",
    ]
