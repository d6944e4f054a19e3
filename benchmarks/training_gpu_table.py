"""The table of training fed in several ways, from results/training_gpu.json. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = (
    "model",
    "fed by",
    "tokens/s",
    "of the cached batch",
    "wait, median",
    "99% below",
    "cores",
    "for feeding",
)


def labels(workers: int) -> dict[str, str]:
    """Feed -> what the table calls it, in the table's order."""
    return {
        "cached": "one cached batch",
        "again": "the cached batch again",
        "tokenmill": "tokenmill",
        "single": "`encode` in the loop",
        "batched": "`encode_batch` in the loop",
        "workers": f"`DataLoader`, {workers} workers that `encode`",
    }


def training_body(results: Mapping[str, Any]) -> str:
    """What is shown of results/training_gpu.json, below its origin."""
    device = results["device"]
    facts = (
        f"{device['name']}, CUDA {device['cuda']}; {results['text_bytes'] / 1e6:,.0f} MB of text. "
        "Tokens per second are the median of the rounds, by the device's clock. Cores are CPU "
        "time of the process and its workers divided by time; what the cached batch takes of "
        "them, to launch kernels, is taken off in the last column."
    )
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    for found in results["measurements"]:
        names = labels(results["workers"])
        lines += [_line(found, name, label) for name, label in names.items()]
    return f"{facts}\n\n" + "\n".join(lines)


def _line(found: Mapping[str, Any], name: str, label: str) -> str:
    feed = found["feeds"][name]
    shape = f"{found['micro_batch']} x {found['seq_len']:,}"
    cells = (
        f"{found['model']}, {found['parameters'] / 1e6:,.0f}M, {shape}",
        label,
        f"{feed['tokens_per_second']:,.0f}",
        "1" if name == "cached" else f"{feed['share_of_cached']:.4f}",
        f"{feed['wait_ms_p50']:,.3f} ms",
        f"{feed['wait_ms_p99']:,.3f} ms",
        f"{feed['cores']:.2f}",
        "" if name in ("cached", "again") else f"{feed['cores_of_feeding']:.2f}",
    )
    return f"| {' | '.join(cells)} |"
