"""Lightning's Trainer on a data module: epochs, validation, and runs that stop and go on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interop.stores import random_shards, write_store
from tests.loader import stores as loader_stores

import tokenmill
from tokenmill.errors import UsageError

pytest.importorskip("lightning")

import lightning
import torch

from tokenmill.lightning import DataModule

# Importing Lightning takes seconds.
pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {"seq_len": 16, "batch_size": 4, "seed": 3}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lightning") / "store"
    write_store(path, random_shards(2, documents=30))
    return path


class Seeing(lightning.LightningModule):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[np.ndarray[Any, Any]] = []
        self.validated: list[np.ndarray[Any, Any]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append(batch.input_ids.numpy())
        return self.weight.sum() * float(batch.labels.float().mean())

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated.append(batch.input_ids.numpy())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(
    data: DataModule, checkpoint: Path | None = None, *, model: Any = None, **options: Any
) -> tuple[Any, Any]:
    model = model or Seeing()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    plain: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    trainer = lightning.Trainer(**plain | quiet | options)
    # Since 2.6 it has to be said that a checkpoint is trusted.
    says = "weights_only" in inspect.signature(trainer.fit).parameters
    trusted: dict[str, Any] = {"weights_only": False} if checkpoint and says else {}
    trainer.fit(model, data, ckpt_path=checkpoint, **trusted)
    return model, trainer


class Following(Seeing):
    """A table of which id follows which."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(257, 257)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        said = self.table(batch.input_ids).flatten(0, 1)
        return torch.nn.functional.cross_entropy(said, batch.labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def test_a_model_learns_which_letter_follows(tmp_path: Path) -> None:
    alphabets = [[(k % 26 + n) % 26 for n in range(9 + k % 30)] + [256] for k in range(300)]
    loader_stores.write_store(tmp_path / "store", [alphabets], vocab_size=257)
    model, _ = fit(DataModule(tmp_path / "store", **OPTIONS), model=Following(), max_steps=60)
    ids = [4]
    for _ in range(8):
        ids.append(int(model.table(torch.tensor(ids[-1])).argmax()))
    assert ids == [*range(4, 13)]


def test_every_epoch_goes_on_in_another_order(store: Path) -> None:
    model, _ = fit(DataModule(store, **OPTIONS), max_epochs=3)
    loader = tokenmill.Loader(store, **OPTIONS)
    rows = loader.layouts()[0].num_rows
    assert len(model.seen) == 3 * (rows // 4)
    for step, ids in enumerate(model.seen):
        assert np.array_equal(ids, loader.batch(step).input_ids)
    assert not np.array_equal(model.seen[0], model.seen[rows // 4])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_run_goes_on_from_any_checkpoint(store: Path, tmp_path: Path, precision: str) -> None:
    """In the middle of an epoch, at its end and between, with validation that stops early."""
    data = DataModule(store, val_split="train", **OPTIONS)
    kept = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    common: dict[str, Any] = {"max_epochs": 2, "precision": precision, "limit_val_batches": 2}
    whole, trainer = fit(data, enable_checkpointing=True, callbacks=[kept], **common)
    steps = trainer.num_training_batches
    assert len(whole.seen) == 2 * steps
    # Of the sanity check and each epoch.
    assert len(whole.validated) == 6
    assert all(map(np.array_equal, whole.validated, whole.validated[:2] * 3))
    for step in (1, steps // 2, steps, steps + 1, 2 * steps - 1):
        again, _ = fit(data, tmp_path / f"step={step}.ckpt", **common)
        assert len(again.seen) == 2 * steps - step
        assert all(map(np.array_equal, again.seen, whole.seen[step:]))


RANK = """
import sys
import numpy as np
sys.path.insert(0, {root!r})
from tests import test_lightning
store, folder = sys.argv[1:]
data = test_lightning.DataModule(store, **test_lightning.OPTIONS)
common = dict(devices=2, strategy="ddp")
first, trainer = test_lightning.fit(data, max_steps=3, **common)
trainer.save_checkpoint(folder + "/last.ckpt")
again, trainer = test_lightning.fit(data, folder + "/last.ckpt", max_steps=7, **common)
np.save(f"{{folder}}/{{trainer.global_rank}}.npy", np.stack(first.seen + again.seen))
"""


def test_two_ranks_read_their_own_rows_and_go_on_exactly(store: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(root=str(Path(__file__).parents[1])))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    where = ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*launch, *where, str(script), str(store), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        loader = tokenmill.Loader(store, rank=rank, world_size=2, **OPTIONS)
        expected = [loader.batch(step).input_ids for step in range(7)]
        assert np.array_equal(np.load(tmp_path / f"{rank}.npy"), expected)


def test_what_would_repeat_itself_or_is_known_is_refused(store: Path) -> None:
    ending = tokenmill.Mixture({"a": (store, 1)}, max_epochs=1)
    with pytest.raises(UsageError, match="the same order"):
        fit(DataModule(ending, **OPTIONS), max_epochs=2)
    model, _ = fit(DataModule(ending, **OPTIONS), max_epochs=1)
    assert len(model.seen) == len(tokenmill.Loader(ending, **OPTIONS))
    with pytest.raises(UsageError, match="without an end"):
        DataModule(ending, val_split="train", **OPTIONS)
    with pytest.raises(UsageError, match="rank is for Lightning to say"):
        DataModule(store, rank=0, **OPTIONS)
    with pytest.raises(UsageError, match="no Trainer"):
        DataModule(store, **OPTIONS).train_dataloader()
