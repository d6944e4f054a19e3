"""What an update of the weights costs: fused AdamW, torchao's 8-bit AdamW, and bitsandbytes'.

    python -m benchmarks.optimizers_gpu --json results.json

The parameters are those of the trainer's models, the gradients random; nothing else runs. Time is
that of `step()` by the device's clock and by the host's; memory is what the optimizer keeps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from benchmarks.feeding_gpu import describe
from benchmarks.optimizers_gpu_table import optimizers_body
from tokenmill.trainer.model import Model, make_optimizer
from tokenmill.trainer.options import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = ("small", "medium")
VOCAB_SIZE = 50_257
SEQ_LEN = 1024
STEPS = 30
WARM_UP_STEPS = 3
PACKAGES = ("torch", "triton", "torchao", "bitsandbytes")


def _ours(kind: str) -> Callable[[torch.nn.Module, torch.Tensor], torch.optim.Optimizer]:
    def make(model: torch.nn.Module, rate: torch.Tensor) -> torch.optim.Optimizer:
        return make_optimizer(model, kind=kind, learning_rate=rate, weight_decay=0.1)

    return make


def _as_it_is(model: torch.nn.Module, rate: torch.Tensor) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(model.parameters(), lr=float(rate))
    return optimizer


OPTIMIZERS = {
    "fused AdamW": _ours("adamw"),
    "torchao AdamW8bit": _ours("torchao"),
    "bitsandbytes AdamW8bit": _ours("bitsandbytes"),
    "the same, as it is": _as_it_is,
}


def measure(name: str, model_name: str, device: torch.device) -> dict[str, Any]:
    """Time and memory of one optimizer on the parameters of one model."""
    with device:
        model = Model(PRESETS[model_name], vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    optimizer = OPTIMIZERS[name](model, torch.tensor(1e-4, device=device))
    optimizer.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    kept = torch.cuda.memory_allocated() - before
    for _ in range(WARM_UP_STEPS):
        optimizer.step()
    device_ms, host_ms = [], []
    for _ in range(STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        optimizer.step()
        end.record()
        host_ms.append((time.perf_counter() - started) * 1000)
        end.synchronize()
        device_ms.append(begin.elapsed_time(end))
    return {
        "first_step_seconds": round(first, 3),
        "device_ms": round(statistics.median(device_ms), 3),
        "host_ms": round(statistics.median(host_ms), 3),
        "state_bytes": kept,
    }


def run(commit: str | None) -> dict[str, Any]:
    """All optimizers on all models; a package that is missing or fails has its reason instead."""
    device = torch.device("cuda")
    measurements = []
    for model in MODELS:
        for name in OPTIMIZERS:
            found: dict[str, Any] = {"model": model, "optimizer": name, "error": None}
            try:
                found |= measure(name, model, device)
            except Exception as error:  # one optimizer must not cost the others their numbers
                found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            measurements.append(found)
            torch.cuda.empty_cache()
    versions = machine.versions()
    return machine.origin(commit=commit) | {
        "machine": machine.describe(),
        "device": describe(device),
        "steps": STEPS,
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
        "measurements": measurements,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", help="of a copy without its history")
    arguments = parser.parse_args()
    results = run(arguments.commit)
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(optimizers_body(results))


if __name__ == "__main__":
    main()
