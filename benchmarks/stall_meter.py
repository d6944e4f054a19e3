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
    Clock = Callable[[], float]

ROUNDS = 9
STEPS = 100_000
CUDA_STEPS = 400
STEP_SECONDS = 0.01


def generated(batch: object, steps: int) -> Iterable[object]:
    """A loader written as a generator."""
    for _ in range(steps):
        yield batch


def plain_seconds(batches: Iterable[object], step: Step, clock: Clock) -> float:
    begin = clock()
    for batch in batches:
        step(batch)
    return clock() - begin


def metered(batches: Iterable[object], step: Step, clock: Clock) -> tuple[float, float]:
    """Seconds of the loop, and of the report behind it."""
    meter = StallMeter()
    begin = clock()
    for batch in meter.watch(batches):
        step(batch)
    end = clock()
    meter.report()
    return end - begin, clock() - end


def measure(
    name: str,
    make: Callable[[], Iterable[object]],
    step: Step,
    *,
    steps: int,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """All rounds of one row."""
    row: dict[str, Any] = {"loop": name, "steps": steps, "plain_ns": [], "metered_ns": []}
    row["report_ms"] = []
    for _ in range(ROUNDS):
        plain = plain_seconds(make(), step, clock)
        loop, report = metered(make(), step, clock)
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
    """Steps of 10 ms, in which the host launches one kernel and then sleeps.

    Time that is slept would hide the meter, so what is compared is the CPU time of the loop.
    """
    import torch

    batch = torch.ones(1, device="cuda")

    def step(tensor: torch.Tensor) -> None:
        tensor.mul_(1.0)
        time.sleep(STEP_SECONDS)

    def make() -> Iterable[object]:
        torch.cuda.synchronize()
        return generated(batch, CUDA_STEPS)

    name = "steps of 10 ms, CUDA events (CPU time)"
    return [measure(name, make, step, steps=CUDA_STEPS, clock=time.thread_time)]


def _device() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def run(*, cuda: bool, commit: str | None) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    return machine.origin(commit=commit) | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": ROUNDS,
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
