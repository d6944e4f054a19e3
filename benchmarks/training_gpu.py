"""Does tokenizing in the loop starve a GPU? The same trainer, fed in five ways, at three sizes.

    python -m benchmarks.training_gpu --corpus C.jsonl.zst --tokenizer FOLDER --json results.json
    python -m benchmarks.training_gpu --tiny       a trial on a CPU, on the standard library's text

What is measured is the reference trainer itself (`tokenmill.trainer`): bf16, compiled, fused AdamW,
clipping. The feeds are told in training_feeds.py; they take turns in rounds. Each is opened at the
beginning of its turn, is given some steps to fill its queues, and is then measured: tokens per
second by the device's clock, the wait for every batch by the host's, and the CPU time of this
process and its workers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from tokenizers import Tokenizer

import tokenmill
from benchmarks import corpora, machine
from benchmarks.feeding_gpu import Clock, describe
from benchmarks.training_feeds import FEEDS, Material
from benchmarks.training_gpu_table import training_body
from tokenmill.engines.references import train_bpe
from tokenmill.trainer.loop import Trainer, TrainRanks, peak_flops, settle
from tokenmill.trainer.options import TrainOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.trainer.loop import Setup

PACKAGES = ("numpy", "tokenizers", "torch", "triton")
LONG = 1_000_000
"""Steps of the schedule: the learning rate hardly moves while it is measured."""
GOALS = {"small": 500_000, "medium": 46_000}
"""Tokens per second."""
GOAL_SHARE = 0.995
GOAL_WAIT = 0.01
"""Of a step, for the 99th percentile of the waits."""
GOAL_CORES = 0.25
TINY_LINES = 100


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model, and how long it is measured."""

    model: str
    seq_len: int
    micro_batch: int
    rounds: int
    steps: int
    """Of each feed, in each round."""
    skipped: int
    """Steps before those, in which queues fill."""


RUNS = (
    Run(model="mini", seq_len=1024, micro_batch=32, rounds=3, steps=60, skipped=60),
    Run(model="small", seq_len=1024, micro_batch=64, rounds=3, steps=20, skipped=20),
    Run(model="medium", seq_len=2048, micro_batch=8, rounds=2, steps=12, skipped=8),
)
TINY_RUN = Run(model="tiny", seq_len=64, micro_batch=2, rounds=2, steps=10, skipped=5)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One feed in one round."""

    step_seconds: list[float]
    waits: list[float]
    cpu_seconds: float
    """Of this process and its workers."""
    wall_seconds: float


class Waiting:
    """Batches, with the seconds that the host waited for each."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.seconds: list[float] = []
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            asked = time.perf_counter()
            batch = next(self._batches)
            self.seconds.append(time.perf_counter() - asked)
            yield batch


def take_turn(trainer: Trainer, name: str, material: Material, run: Run) -> Turn:
    """Open a feed, let it fill its queues, measure, close it."""
    with FEEDS[name](material, trainer.setup) as batches:
        waiting = Waiting(batches)
        trainer.feed(waiting)
        for _ in range(run.skipped):
            trainer.step()
        synchronize()
        waiting.seconds.clear()
        clock = Clock(trainer.setup.device)
        begun, cpu = time.perf_counter(), cpu_seconds()
        clock.mark()
        for _ in range(run.steps):
            trainer.step()
            clock.mark()
        seconds = clock.seconds()
        return Turn(
            step_seconds=seconds,
            waits=list(waiting.seconds),
            cpu_seconds=cpu_seconds() - cpu,
            wall_seconds=time.perf_counter() - begun,
        )


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cpu_seconds() -> float:
    """Of all threads of this process, and of its workers."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(run: Run, material: Material, *, vocab_size: int) -> dict[str, Any]:
    """All feeds on one model."""
    torch.compiler.reset()
    setup = make_setup(run, vocab_size=vocab_size)
    trainer = Trainer(setup)
    turns: dict[str, list[Turn]] = {name: [] for name in FEEDS}
    take_turn(trainer, "cached", material, run)  # compiles
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(run.rounds):
        names = [*FEEDS]
        turn = 2 * number % len(names)
        for name in (*names[turn:], *names[:turn]):
            turns[name].append(take_turn(trainer, name, material, run))
            gc.collect()
    gc.enable()
    gc.unfreeze()
    flops = setup.config.flops_per_token(setup.seq_len, vocab_size)
    peak = peak_flops(setup.device, setup.dtype)
    found = {name: summary(some, turns["cached"], setup) for name, some in turns.items()}
    best = found["tokenmill"]["tokens_per_second"]
    return {
        **asdict(run),
        "parameters": setup.config.num_parameters(vocab_size),
        "mfu": None if peak is None else best * flops / peak,
        "feeds": found,
    }


def make_setup(run: Run, *, vocab_size: int) -> Setup:
    options = TrainOptions(
        "store",
        model=run.model,
        seq_len=run.seq_len,
        micro_batch=run.micro_batch,
        accumulate=1,
        steps=LONG,
        checkpointing=False,
    )
    return settle(options, vocab_size=vocab_size, ranks=TrainRanks())


def summary(turns: list[Turn], cached: list[Turn], setup: Setup) -> dict[str, Any]:
    """A feed beside the cached batch."""
    tokens = setup.batch_tokens
    rates = [tokens / statistics.mean(turn.step_seconds) for turn in turns]
    shares = [
        statistics.mean(base.step_seconds) / statistics.mean(turn.step_seconds)
        for base, turn in zip(cached, turns, strict=True)
    ]
    steps = np.concatenate([turn.step_seconds for turn in turns])
    waits = np.concatenate([turn.waits for turn in turns])
    cores = [turn.cpu_seconds / turn.wall_seconds for turn in turns]
    base_cores = [turn.cpu_seconds / turn.wall_seconds for turn in cached]
    return {
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_all": rates,
        "share_of_cached": statistics.median(shares),
        "share_of_cached_all": shares,
        "step_ms": 1e3 * float(np.median(steps)),
        "wait_ms_p50": 1e3 * float(np.quantile(waits, 0.5)),
        "wait_ms_p99": 1e3 * float(np.quantile(waits, 0.99)),
        "cores": statistics.median(cores),
        "cores_of_feeding": statistics.median(cores) - statistics.median(base_cores),
    }


def read_texts(path: Path) -> list[str]:
    """The field `text` of JSON Lines, compressed or not."""
    with pa.input_stream(str(path)) as file:
        return [json.loads(line)["text"] for line in file.read().splitlines()]


def prepare(args: argparse.Namespace, folder: Path) -> tuple[Material, int]:
    """Text, tokenizer, and the store that is built from them."""
    if args.tiny and args.corpus is None:
        args.corpus = folder / "corpus.jsonl"
        lines = corpora.base_lines(corpora.available()[0])
        args.corpus.write_bytes(b"".join(itertools.islice(lines, TINY_LINES)))
    texts = [text for text in read_texts(args.corpus) if text]
    if args.tiny and args.tokenizer is None:
        args.tokenizer = train_bpe(texts, vocab_size=1000, folder=folder / "tokenizer")
    store = folder / "store"
    # The engine that the other feeds use, too: how fast a store is built is not the question.
    tokenmill.build(args.corpus, tokenizer=str(args.tokenizer), out=store, engine="tokenizers")
    opened = tokenmill.Store(store)
    assert opened.eos_id is not None
    tokenizer = Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
    material = Material(
        texts=texts,
        tokenizer=tokenizer,
        eos=opened.eos_id,
        store=store,
        num_workers=args.workers,
    )
    return material, opened.vocab_size


def misses(found: dict[str, Any]) -> list[str]:
    """The goals that were not reached."""
    feed = found["feeds"]["tokenmill"]
    said = []
    goal = GOALS.get(found["model"])
    if goal is not None and feed["tokens_per_second"] < goal:
        said.append(f"{feed['tokens_per_second']:,.0f} tokens/s is below {goal:,}")
    if feed["share_of_cached"] < GOAL_SHARE:
        said.append(f"{feed['share_of_cached']:.4f} of the cached batch is below {GOAL_SHARE}")
    if feed["wait_ms_p99"] > GOAL_WAIT * feed["step_ms"]:
        said.append(f"p99 wait {feed['wait_ms_p99']:.3f} ms of a step of {feed['step_ms']:.1f} ms")
    if feed["cores_of_feeding"] > GOAL_CORES:
        said.append(f"feeding takes {feed['cores_of_feeding']:.2f} cores, above {GOAL_CORES}")
    return [f"{found['model']}: {each}" for each in said]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, help="JSON Lines with a field text")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--commit", help="of this code, where it has no history beside it")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--model", choices=[run.model for run in RUNS], help="this one only")
    parser.add_argument("--rounds", type=int, help="instead of each model's own number")
    parser.add_argument("--workers", type=int, default=8, help="of the DataLoader")
    parser.add_argument("--tiny", action="store_true", help="a trial in seconds")
    args = parser.parse_args()
    if not (torch.cuda.is_available() or args.tiny):
        parser.error("no CUDA device; a trial on the CPU: --tiny")
    if not args.tiny and (args.corpus is None or args.tokenizer is None):
        parser.error("--corpus and --tokenizer are needed")
    return args


def main() -> None:
    args = arguments()
    chosen = [TINY_RUN] if args.tiny else [r for r in RUNS if args.model in (None, r.model)]
    with tempfile.TemporaryDirectory() as folder:
        material, vocab_size = prepare(args, Path(folder))
        measurements = []
        for run in chosen:
            begun = time.perf_counter()
            rounds = args.rounds or run.rounds
            found = measure(replace(run, rounds=rounds), material, vocab_size=vocab_size)
            measurements.append(found)
            print(f"{run.model}: {time.perf_counter() - begun:.0f} s", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    versions = machine.versions()
    results = machine.origin(commit=args.commit) | {
        "machine": machine.describe(),
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
        "device": describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "workers": args.workers,
        "text_bytes": sum(len(text.encode()) for text in material.texts),
        "measurements": measurements,
    }
    print(training_body(results))
    print("\n".join(miss for found in measurements for miss in misses(found)))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
