"""The table of feeding a GPU, from results/feeding_gpu.json. Needs neither torch nor a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

LABELS = {
    "cached": "one cached batch",
    "again": "the cached batch again",
    "feeder": "`DeviceFeeder`",
}
"""Contender -> what the table calls it, in the table's order."""


def gpu_body(results: Mapping[str, Any]) -> str:
    """What is shown of results/feeding_gpu.json, below its origin."""
    device = results["device"]
    facts = (
        f"{device['name']}, CUDA {device['cuda']}; bf16, fused AdamW, `torch.compile`. "
        "Speed is the time of a step on the cached batch divided by the time of this step: 1 is "
        "never having to wait, and the row of the cached batch measured again shows how exact that "
        "is. It is the median of the rounds, with the half of them around it; `next()` is what the "
        "training loop waits for a batch."
    )
    head = ("model", "compile mode", "fed by", "step", "speed", "next(), median", "99% below")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for run in results["measurements"]:
        lines += [_line(run, name) for name in LABELS]
    return f"{facts}\n\n" + "\n".join(lines)


def _line(run: Mapping[str, Any], name: str) -> str:
    found = run["contenders"][name]
    shape = run["shape"]
    model = f"{run['parameters'] / 1e6:,.0f}M, {shape['batch_size']} x {shape['seq_len']:,}"
    speed = "1"
    if name != "cached":
        low, high = found["speed_quartiles"]
        speed = f"{found['speed']:.4f} ({low:.4f} to {high:.4f})"
    keys = ("wait_us_p50", "wait_us_p99")
    waits = [f"{found[key]:.1f} us" if key in found else "" for key in keys]
    step = f"{found['step_ms_mean']:.2f} ms"
    return f"| {' | '.join([model, str(run['compile_mode']), LABELS[name], step, speed, *waits])} |"
