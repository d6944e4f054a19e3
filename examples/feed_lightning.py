"""Train from a store with Lightning. Its checkpoints hold the loader's state: nothing else to do.

python examples/feed_lightning.py STORE [FOLDER FOR CHECKPOINTS]

Needs: pip install 'tokenmill[torch,lightning]'

The data module knows ranks and device from the Trainer, and an epoch of Lightning is one of the
store, each in another order.
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn

import tokenmill
from tokenmill.lightning import DataModule
from tokenmill.torch import TensorBatch

STEPS = 20


class Model(lightning.LightningModule):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size))
        self.seen: list[int | None] = []

    def training_step(self, batch: TensorBatch, _: int) -> STEP_OUTPUT:
        self.seen.append(batch.step)
        logits = self.layers(batch.input_ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(store: str, checkpoint: Path, *, until: int) -> list[int | None]:
    """Steps of the loader that were trained on, from the checkpoint on if there is one."""
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=until,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataModule(store, split="train", seq_len=64, batch_size=8)
    model = Model(tokenmill.Store(store, split=None).vocab_size)
    trainer.fit(model, data, ckpt_path=checkpoint if checkpoint.exists() else None)
    trainer.save_checkpoint(checkpoint)
    return model.seen


def main(store: str, folder: str = ".") -> None:
    checkpoint = Path(folder) / "lightning.ckpt"
    steps = train(store, checkpoint, until=7) + train(store, checkpoint, until=STEPS)
    print("resumed exactly" if steps == list(range(STEPS)) else f"another stream: {steps}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
