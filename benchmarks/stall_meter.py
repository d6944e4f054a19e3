"""Measures what a StallMeter costs: `python -m benchmarks.stall_meter`, some seconds.

    python -m benchmarks.stall_meter            writes stall_meter.json
    python -m benchmarks.stall_meter --cuda     with events, on a machine with a GPU;
                                                writes stall_meter_gpu.json
    --commit ID, --json FILE                    for a copy without its history

The same loop runs over the same batches with a meter and without one, in turns, in one process. A
step of the loop does next to nothing, so that what the meter adds can be seen; the difference of
the two times is the meter's. Its aim is a thousandth of a step of 10 ms: 10,000 ns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, machine, render
from tokenmill import StallMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Step = Callable[[Any], object]

ROUNDS = 9
STEPS = 100_000
CUDA_STEPS = 600
CUDA_ROUNDS = 5
FIRST_STEPS = 100
STEP_SECONDS = 0.01


def generated(batch: Any, steps: int) -> Iterable[Any]:
    """A loader written as a generator."""
    for _ in range(steps):
        yield batch


def plain_seconds(batches: Iterable[object], step: Step) -> float:
    begin = time.perf_counter()
    for batch in batches:
        step(batch)
    return time.perf_counter() - begin


def metered(batches: Iterable[object], step: Step) -> tuple[float, float]:
    """Seconds of the loop, and of the report after it."""
    meter = StallMeter()
    begin = time.perf_counter()
    for batch in meter.watch(batches):
        step(batch)
    end = time.perf_counter()
    meter.report()
    return end - begin, time.perf_counter() - end


def measure(
    name: str,
    make: Callable[[], Iterable[object]],
    step: Step,
    *,
    steps: int,
) -> dict[str, Any]:
    """All rounds of one row."""
    row: dict[str, Any] = {"loop": name, "steps": steps, "plain_ns": [], "metered_ns": []}
    row["report_ms"] = []
    for _ in range(ROUNDS):
        plain = plain_seconds(make(), step)
        loop, report = metered(make(), step)
        row["plain_ns"].append(round(1e9 * plain / steps, 1))
        row["metered_ns"].append(round(1e9 * loop / steps, 1))
        row["report_ms"].append(round(1e3 * report, 3))
    return row


def measure_host() -> list[dict[str, Any]]:
    batch = object()
    return [
        measure("over a list", lambda: [batch] * STEPS, id, steps=STEPS),
        measure("over a generator", lambda: generated(batch, STEPS), id, steps=STEPS),
        measure("over an iterator", lambda: itertools.repeat(batch, STEPS), id, steps=STEPS),
    ]


def measure_cuda() -> list[dict[str, Any]]:
    """Steps of 10 ms, in which the host launches one kernel and is busy otherwise.

    Against the noise of such steps a difference of whole loops shows nothing. So what is timed is
    from asking for a batch until it is there, with the meter and without, after the first steps,
    which the meter measures all.
    """
    import torch

    batch = torch.ones(1, device="cuda")
    row: dict[str, Any] = {"loop": "steps of 10 ms, CUDA events", "steps": CUDA_STEPS}
    row |= {"plain_ns": [], "metered_ns": [], "report_ms": []}
    for _ in range(CUDA_ROUNDS):
        torch.cuda.synchronize()
        row["plain_ns"].append(asking_ns(generated(batch, CUDA_STEPS)))
        meter = StallMeter()
        row["metered_ns"].append(asking_ns(meter.watch(generated(batch, CUDA_STEPS))))
        began = time.perf_counter()
        meter.report()
        row["report_ms"].append(round(1e3 * (time.perf_counter() - began), 3))
    return [row]


def asking_ns(batches: Iterable[Any]) -> float:
    """Mean time from asking for a batch until it is there."""
    spent, asked = 0.0, time.perf_counter()
    for number, tensor in enumerate(batches):
        began = time.perf_counter()
        if number >= FIRST_STEPS:
            spent += began - asked
        tensor.mul_(1.0)
        while time.perf_counter() - began < STEP_SECONDS:
            pass
        asked = time.perf_counter()
    return round(1e9 * spent / (CUDA_STEPS - FIRST_STEPS), 1)


def _device() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def run(*, cuda: bool, commit: str | None) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    return machine.origin(commit=commit) | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": CUDA_ROUNDS if cuda else ROUNDS,
        "device": _device() if cuda else None,
        "measurements": measure_cuda() if cuda else measure_host(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="with events; needs a GPU")
    parser.add_argument("--commit", help="for a copy without its history")
    parser.add_argument("--json", type=Path, help="where the results go")
    arguments = parser.parse_args()
    results = run(cuda=arguments.cuda, commit=arguments.commit)
    name = "stall_meter_gpu.json" if arguments.cuda else "stall_meter.json"
    target = arguments.json or RESULTS / name
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(render.stall_meter_section(results))


if __name__ == "__main__":
    main()
