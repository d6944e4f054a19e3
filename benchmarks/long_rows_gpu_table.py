"""The tables of long rows, from results/long_rows_gpu.json. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SPEED_HEAD = (
    "model, rows",
    "attention",
    "tokens/s",
    "of the peak",
    "micro-batch",
    "layers computed again",
    "memory used",
    "estimated",
    "kernel, and what a layer took",
)
KERNELS = (
    "flash",
    "cudnn",
    "varlen",
    "flex",
    "flex, its mask",
    "varlen, filled up to 2,049",
)
KERNEL_HEAD = ("heads, row, tokens", "documents", "longest", *KERNELS)
MEMORY_HEAD = (
    "model",
    "micro-batch",
    "estimated",
    "used",
    "estimated / used",
    "all computed again",
)
GOALS = {
    "medium:16384:documents": 85_000,
    "medium:8192:documents": 88_000,
    "large:32768:documents": 40_000,
}
"""Tokens per second."""
SHARE_OF_SHORT = 0.9
SHARE_OF_FLASH = 0.99
ESTIMATE_WITHIN = 0.15
LOSS_WITHIN = 0.01


def long_rows_body(results: Mapping[str, Any]) -> str:
    """What is shown of results/long_rows_gpu.json, below its origin."""
    device, store = results["device"], results["store"]
    measured = results["measurements"]
    facts = (
        f"{device['name']}, CUDA {device['cuda']}; {store['tokens']:,} tokens in"
        f" {store['documents']:,} documents. Tokens per second are the median of"
        f" {results['steps']} steps, by the device's clock."
    )
    speeds = {name: found for name, found in measured.items() if name.count(":") == 2}
    speeds = {name: found for name, found in speeds.items() if not name.startswith("memory")}
    memory = [_memory(name, each) for name, each in measured.items() if name.startswith("memory")]
    parts = [
        facts,
        _table(SPEED_HEAD, [_speed(name, found) for name, found in sorted(speeds.items())]),
        "One layer's attention, forward and backward, in ms:",
        _table(
            KERNEL_HEAD,
            [_kernels(name, each) for name, each in measured.items() if name.startswith("kernels")],
        ),
        *([] if not memory else ["Memory, estimated and used:", _table(MEMORY_HEAD, memory)]),
        _losses(measured.get("losses", {})),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _speed(name: str, found: Mapping[str, Any]) -> list[str]:
    model, row, attention = name.split(":")
    begin = [f"{model}, {int(row):,}", f"`{attention}`"]
    if "error" in found:
        return [*begin, _plain(found["error"]), *[""] * (len(SPEED_HEAD) - 3)]
    mfu = found["mfu"]
    return [
        *begin,
        f"{found['tokens_per_second']:,.0f}",
        "-" if mfu is None else f"{mfu:.1%}",
        f"{found['micro_batch']} rows",
        f"{found['recomputed']} of {found['layers']}",
        _gigabytes(found["peak_bytes"]),
        _gigabytes(found["estimated_bytes"]),
        _plain(found["kernel"]) if attention.startswith("documents") else "",
    ]


def _kernels(name: str, found: Mapping[str, Any]) -> list[str]:
    _, heads, width, row, tokens = name.split(":")
    begin = [f"{heads} x {width}, {int(row):,}, {int(tokens):,}"]
    if "error" in found:
        return [*begin, _plain(found["error"]), *[""] * (len(KERNEL_HEAD) - 2)]
    times = [found.get(kernel) for kernel in KERNELS]
    cells = ["-" if not isinstance(each, float) else f"{each:.2f}" for each in times]
    return [*begin, f"{found['documents']:,}", f"{found['longest']:,}", *cells]


def _memory(name: str, found: Mapping[str, Any]) -> list[str]:
    _, model, row = name.split(":")
    begin = [f"{model}, {int(row):,}"]
    if "error" in found:
        return [*begin, _plain(found["error"]), *[""] * (len(MEMORY_HEAD) - 2)]
    kept, again = found["kept"], found.get("recomputed")
    return [
        *begin,
        f"{found['micro_batch']} rows",
        _gigabytes(kept["estimated_bytes"]),
        _gigabytes(kept["peak_bytes"]),
        _ratio(kept),
        "" if again is None else f"{_gigabytes(again['peak_bytes'])}, {_ratio(again)}",
    ]


def _ratio(found: Mapping[str, Any]) -> str:
    peak = found["peak_bytes"]
    return "-" if not peak else f"{found['estimated_bytes'] / peak:.2f}"


def _losses(found: Mapping[str, Any]) -> str:
    if not found or "error" in found:
        return ""
    exact = found["mask, fp32"]
    said = [
        f"{label} {_apart(losses, exact):.2%}"
        for label, losses in found.items()
        if isinstance(losses, list) and label != "mask, fp32"
    ]
    return (
        f"Losses of {len(exact)} steps beside those by a mask in float32, at most apart:"
        f" {', '.join(said)}."
    )


def _apart(losses: list[float], others: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(losses, others, strict=True))


def misses(results: Mapping[str, Any], goals: Mapping[str, float] = GOALS) -> list[str]:
    """The goals that were not reached."""
    measured, said = results["measurements"], []

    def rate(name: str) -> float | None:
        found = measured.get(name, {}).get("tokens_per_second")
        return None if found is None else float(found)

    for name, goal in goals.items():
        if (found := rate(name)) is not None and found < goal:
            said.append(f"{name}: {found:,.0f} tokens/s is below {goal:,}")
    for name, other, share in (
        ("medium:16384:documents", "medium:2048:flash", SHARE_OF_SHORT),
        ("small:1024:documents", "small:1024:flash", SHARE_OF_FLASH),
    ):
        ours, theirs = rate(name), rate(other)
        if ours is not None and theirs is not None and ours < share * theirs:
            said.append(f"{name}: {ours / theirs:.3f} of {other} is below {share}")
    for name, found in measured.items():
        parts = (found, found.get("kept") or {}, found.get("recomputed") or {})
        for part in (each for each in parts if isinstance(each, dict) and each.get("peak_bytes")):
            ratio = part["estimated_bytes"] / part["peak_bytes"]
            if abs(ratio - 1) > ESTIMATE_WITHIN:
                said.append(f"{name}: the estimate is {ratio:.2f} of what was used")
    losses = measured.get("losses", {})
    for label, each in losses.items():
        if isinstance(each, list) and _apart(each, losses["mask, fp32"]) > LOSS_WITHIN:
            said.append(f"losses: {label} is further than {LOSS_WITHIN:.0%} from the mask")
    return said


def _gigabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"


def _plain(text: str) -> str:
    return text.replace("|", "/")
