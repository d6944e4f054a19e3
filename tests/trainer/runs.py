"""Stores and trainers that are small enough for a CPU, for the tests of the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch
from tests.loader.stores import write_store

from tokenmill.loader.loader import Loader
from tokenmill.torch import DeviceFeeder
from tokenmill.trainer.loop import Setup, Trainer, TrainRanks, settle
from tokenmill.trainer.options import TrainOptions

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tokenmill.store.reader import Store

VOCAB = 300
SEQ_LEN = 32
COMMAND = [sys.executable, "-m", "tokenmill", "train"]


def counting_store(root: Path, *, documents: int = 200) -> Store:
    """Documents that count up from different numbers: soon learned, and of many lengths."""
    shard = [
        [(start + place) % 63 + 1 for place in range(5 + start * 7 % 40)] + [256]
        for start in range(documents)
    ]
    return write_store(root, [shard], vocab_size=VOCAB)


def make_setup(*, ranks: TrainRanks | None = None, **options: Any) -> Setup:
    """On the CPU, in float32, not compiled."""
    said = {"model": "tiny", "seq_len": SEQ_LEN, "steps": 20, "device": "cpu", **options}
    return settle(TrainOptions("store", **said), vocab_size=VOCAB, ranks=ranks or TrainRanks())


def make_trainer(store: Store, setup: Setup) -> Trainer:
    """Fed from a store, as a run is."""
    options = setup.options
    loader = Loader(
        store,
        seq_len=setup.seq_len,
        batch_size=setup.micro_batch,
        packing=options.packing,
        boundaries=options.boundaries,
    )
    feeder = DeviceFeeder(loader, device=setup.device, fields=setup.fields)
    return Trainer(setup, batches=feeder)


def losses_of(trainer: Trainer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        trainer.step()
        found.append(trainer.row[0].clone())
    return torch.stack(found).tolist()


def train_command(
    *args: str | Path, folder: Path, launcher: Iterable[str] = COMMAND, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    done = subprocess.run(
        [*launcher, *map(str, args)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run, without those of evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run)}
