"""Does the feeder make a GPU wait? One training step, fed in four ways, in one process.

    python -m benchmarks.feeding_gpu --json results.json       on a machine with a CUDA device
    python -m benchmarks.feeding_gpu --tiny                    a trial, also on a CPU

Three ways to be bound: GPT-2 by the GPU; a small model by the host, which is where a feeder's
thread can take Python's lock from the training loop; the same with CUDA graphs by the GPU again.

    cached    one batch that is on the device: what a step costs with nothing to wait for
    feeder    DeviceFeeder over a store on disk
    again     the cached batch once more: by how much two measurements of one thing differ

Rounds of all four are interleaved, so that a clock that drifts slows all of them. Nothing waits for
the device inside a round (held by sync debug mode); steps are timed by events on the device. The
store is synthetic: random ids, documents of lognormal lengths. It is written to a temporary folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import machine
from benchmarks.feeding_gpu_table import gpu_body
from tokenmill import Loader
from tokenmill.store.facts import (
    BoundaryToken,
    Bounds,
    Counts,
    EngineFacts,
    SourceFacts,
    StoreIdentity,
    TokenizerFacts,
    UnitFacts,
    assemble_manifest,
    write_manifest,
)
from tokenmill.store.layout import StoreLayout
from tokenmill.store.write import UnitWriter
from tokenmill.torch import DeviceFeeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

VOCAB_SIZE = 16_384
"""Of the store; models may have more."""
EOS = 0
SHARD_TOKENS = 25_000_000
MEDIAN_DOCUMENT = 400
CONTENDERS = ("cached", "feeder", "again")
GOAL = 0.995
PACKAGES = ("numpy", "torch", "triton", "xxhash")
SKIPPED_STEPS = 2
WARM_UP_STEPS = 64
"""Several of the feeder's largest parcels: all its lanes have their memory by then."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batch."""

    layers: int
    heads: int
    width: int
    vocab_size: int
    seq_len: int
    batch_size: int


SHAPES = {
    "gpt2-124m": Shape(
        layers=12, heads=12, width=768, vocab_size=50_304, seq_len=1024, batch_size=32
    ),
    "gpt-10m": Shape(
        layers=8, heads=4, width=256, vocab_size=VOCAB_SIZE, seq_len=1024, batch_size=16
    ),
}
TINY = Shape(layers=2, heads=2, width=32, vocab_size=VOCAB_SIZE, seq_len=64, batch_size=2)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model, and how long it is measured: short steps need more and shorter rounds."""

    model: str
    compile_mode: str | None
    rounds: int
    steps: int
    """Per contender and round."""

    @property
    def shape(self) -> Shape:
        return SHAPES.get(self.model, TINY)


RUNS = (
    Run(model="gpt2-124m", compile_mode="default", rounds=8, steps=25),
    Run(model="gpt-10m", compile_mode="default", rounds=40, steps=32),
    Run(model="gpt-10m", compile_mode="reduce-overhead", rounds=40, steps=32),
)
TINY_RUN = Run(model="tiny", compile_mode=None, rounds=8, steps=32)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width, bias=False)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_2 = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: torch.Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + hidden


class Model(nn.Module):
    """GPT-2 without biases; the head shares the embedding's weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.seq_len, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Trainer:
    """One training step: bf16, compiled, fused AdamW, nothing that waits for the device."""

    def __init__(self, shape: Shape, *, device: torch.device, compile_mode: str | None) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model: nn.Module = Model(shape).to(device)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=device.type == "cuda"
        )
        self._forward: Callable[..., torch.Tensor] = (
            self.model if compile_mode is None else torch.compile(self.model, mode=compile_mode)
        )

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
        is_cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_cuda):
            loss = self._forward(ids, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Clock:
    """Seconds between marks, by the device's own time where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next; waits for the device."""
        if not self._is_cuda:
            pairs = zip(self._times[:-1], self._times[1:], strict=True)
            return [second - first for first, second in pairs]
        torch.cuda.synchronize()
        events = zip(self._events[:-1], self._events[1:], strict=True)
        return [first.elapsed_time(second) / 1000 for first, second in events]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps of one contender in one round."""

    steps: list[float]
    """Seconds on the device."""
    host: float
    """Seconds that the host needed to queue a step, on average."""
    waits: list[float]
    """Seconds that the host waited for each batch."""


def run_segment(
    trainer: Trainer,
    batches: Iterator[dict[str, torch.Tensor]],
    num_steps: int,
    *,
    feeder: DeviceFeeder | None = None,
    is_strict: bool = True,
) -> Segment:
    """So many steps; strict is an error for whatever waits for the device, as compiling does."""
    clock, waits = Clock(trainer.device), []
    set_sync_debug_mode("error" if is_strict else "default")
    begun = time.perf_counter()
    clock.mark()
    for _ in range(num_steps):
        batch = next(batches)
        trainer.step(batch["input_ids"], batch["labels"])
        clock.mark()
        if feeder is not None:
            waits.append(feeder.last_wait_seconds)
    host = (time.perf_counter() - begun) / num_steps
    set_sync_debug_mode("default")
    # The device was idle when the first steps were queued.
    return Segment(steps=clock.seconds()[SKIPPED_STEPS:], host=host, waits=waits)


def set_sync_debug_mode(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def measure(run: Run, store: Path, *, device: torch.device) -> dict[str, Any]:
    """All contenders on one model."""
    shape = run.shape

    torch.compiler.reset()
    trainer = Trainer(shape, device=device, compile_mode=run.compile_mode)
    loader = Loader(store, seq_len=shape.seq_len, batch_size=shape.batch_size, seed=0)
    with DeviceFeeder(loader, device=device) as feeder:
        batches: dict[str, Iterator[dict[str, torch.Tensor]]] = {"feeder": iter(feeder)}
        cached = next(batches["feeder"])
        batches["cached"] = batches["again"] = iter(lambda: cached, None)
        segments: dict[str, list[Segment]] = {name: [] for name in CONTENDERS}
        for name in CONTENDERS:  # warm-up and compilation
            run_segment(trainer, batches[name], WARM_UP_STEPS, is_strict=False)
        gc.collect()
        gc.freeze()
        gc.disable()
        for number in range(run.rounds):
            turn = number % len(CONTENDERS)
            for name in (*CONTENDERS[turn:], *CONTENDERS[:turn]):
                asked = feeder if name == "feeder" else None
                segments[name].append(run_segment(trainer, batches[name], run.steps, feeder=asked))
        gc.enable()
        gc.unfreeze()
    return {
        "model": run.model,
        "compile_mode": run.compile_mode,
        "shape": asdict(shape),
        "parameters": trainer.num_parameters,
        "rounds": run.rounds,
        "steps_per_round": run.steps,
        "contenders": {
            name: summary(found, segments["cached"]) for name, found in segments.items()
        },
    }


def summary(runs: list[Segment], cached: list[Segment]) -> dict[str, Any]:
    """Step times of a contender, and its speed as a share of the cached batch's."""
    speeds = [
        statistics.mean(base.steps) / statistics.mean(run.steps)
        for base, run in zip(cached, runs, strict=True)
    ]
    steps, waits = _joined(run.steps for run in runs), _joined(run.waits for run in runs)
    result: dict[str, Any] = {
        "step_ms_median": 1e3 * float(np.median(steps)),
        "step_ms_mean": 1e3 * float(np.mean(steps)),
        "step_ms_p99": 1e3 * float(np.quantile(steps, 0.99)),
        "host_ms_per_step": 1e3 * statistics.median(run.host for run in runs),
        "speed": statistics.median(speeds),
        "speed_quartiles": np.quantile(speeds, [0.25, 0.75]).tolist(),
        "speed_by_median_step": float(np.median(_joined(run.steps for run in cached)))
        / float(np.median(steps)),
    }
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        if len(waits):
            result[f"wait_us_{name}"] = 1e6 * float(np.quantile(waits, share))
    return result


def _joined(parts: Iterator[list[float]]) -> NDArray[np.float64]:
    return np.array([value for part in parts for value in part])


def write_store(root: Path, *, num_tokens: int) -> None:
    """Random ids in shards, in documents of lognormal lengths, each with an eos at its end."""
    layout = StoreLayout(root)
    identity = StoreIdentity(
        created_by="benchmarks.feeding_gpu",
        tokenizer=TokenizerFacts(
            kind="bytes", fingerprint="0" * 64, vocab_size=VOCAB_SIZE, files={}
        ),
        eos=BoundaryToken(token="<eos>", id=EOS, position="end"),
        bos=None,
        special_tokens="text",
        config={},
        fingerprint="synthetic",
    )
    sizes = [SHARD_TOKENS] * (num_tokens // SHARD_TOKENS) or [num_tokens]
    names = [_write_shard(layout, number, size) for number, size in enumerate(sizes)]
    write_manifest(layout, assemble_manifest(layout, identity, units=names))


def _write_shard(layout: StoreLayout, number: int, size: int) -> str:
    random = np.random.default_rng(number)
    drawn = random.lognormal(np.log(MEDIAN_DOCUMENT), 1.0, size // 100 + 2).astype(np.int64) + 2
    ends = np.cumsum(drawn)
    ends = np.append(ends[ends < size], size)
    ids = random.integers(1, VOCAB_SIZE, size, dtype=np.uint32)
    ids[ends - 1] = EOS
    unit = UnitFacts.of(f"part-{number}.jsonl", index=0, start=0, end=None)
    with UnitWriter(layout, unit, vocab_size=VOCAB_SIZE) as writer:
        lengths = np.diff(ends, prepend=0)
        writer.append("train", ids, lengths=lengths, rows=np.arange(len(ends)))
        receipt = writer.commit(
            source=SourceFacts(
                size=size, version="1", digest="0" * 32, is_last=True, num_lines=len(ends)
            ),
            config="synthetic",
            counts=Counts.of(
                rows=len(ends),
                documents=len(ends),
                empty=0,
                rejected=0,
                input_bytes=size,
                text_bytes=size,
                tokens=size,
            ),
            bounds=Bounds(largest_row_bytes=int(lengths.max()), smallest_too_large_bytes=None),
            engine=EngineFacts(
                name="bytes",
                version="1",
                reference="bytes",
                reference_version="1",
                checked_documents=0,
                mismatches=0,
                redone=False,
                routed_documents=0,
            ),
        )
    return receipt.unit.name


def describe(device: torch.device) -> dict[str, object]:
    """The device that was fed."""
    is_cuda = device.type == "cuda"
    return {
        "name": torch.cuda.get_device_name(device) if is_cuda else "CPU",
        "cuda": torch.version.cuda if is_cuda else None,
    }


def chosen_runs(args: argparse.Namespace) -> list[Run]:
    """What the command line asks for."""
    if args.tiny:
        return [TINY_RUN]
    chosen = [
        run
        for run in RUNS
        if args.model in (None, run.model) and args.compile_mode in (None, run.compile_mode)
    ]
    return [
        replace(run, rounds=args.rounds or run.rounds, steps=args.steps or run.steps)
        for run in chosen
    ]


def print_misses(measurements: list[dict[str, Any]]) -> None:
    for found in measurements:
        speed = found["contenders"]["feeder"]["speed"]
        if speed < GOAL:
            said = f"{found['model']} ({found['compile_mode']}): {speed:.4f}"
            print(f"{said} is below the goal of {GOAL}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", help="of this code, where it has no history beside it")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--rounds", type=int, help="instead of each model's own number")
    parser.add_argument("--steps", type=int, help="per contender and round, likewise")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of the store")
    parser.add_argument("--model", choices=[*SHAPES], help="this one only")
    parser.add_argument("--compile-mode", help="this mode only")
    parser.add_argument("--tiny", action="store_true", help="a trial in seconds")
    args = parser.parse_args()
    if not (torch.cuda.is_available() or args.tiny):
        parser.error("no CUDA device; a trial on the CPU: --tiny")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        write_store(store, num_tokens=200_000 if args.tiny else args.tokens)
        measurements = [measure(run, store, device=device) for run in chosen_runs(args)]
    results = machine.origin(commit=args.commit) | {
        "machine": machine.describe(),
        "versions": {
            name: version for name, version in machine.versions().items() if name in PACKAGES
        },
        "device": describe(device),
        "measurements": measurements,
    }
    print(gpu_body(results))
    print_misses(measurements)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
