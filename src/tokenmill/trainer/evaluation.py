"""Loss on the split val: the same rows every time, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from tokenmill.loader.loader import Loader
from tokenmill.torch import DeviceFeeder
from tokenmill.trainer.loop import inputs_of

if TYPE_CHECKING:
    from tokenmill.store.reader import Store
    from tokenmill.trainer.loop import Trainer
    from tokenmill.trainer.setup import Setup

NO_SPLIT = (
    "this store has no split val, so nothing is evaluated; to have one, build it with:"
    " tokenmill build ... --val 0.01"
)


class Evaluation:
    """What is looked at, and how."""

    def __init__(self, store: Store, setup: Setup, *, cu_seqlens_capacity: int) -> None:
        options, ranks = setup.options, setup.ranks
        self.setup = setup
        loader = Loader(
            store,
            seq_len=setup.seq_len,
            batch_size=setup.micro_batch,
            packing=options.packing,
            boundaries=options.boundaries,
            shuffle=False,
            rank=ranks.rank,
            world_size=ranks.world_size,
            epochs=1,
            # As in training: another size would compile once more.
            cu_seqlens_capacity=cu_seqlens_capacity,
        )
        rows = setup.micro_batch * ranks.world_size
        self.num_batches = min(len(loader), -(-options.eval_rows // rows))
        self._loader = loader

    @torch.no_grad()
    def loss(self, trainer: Trainer) -> float:
        """Mean over the labels that count. Waits for the device."""
        totals = torch.zeros(2, device=self.setup.device)
        self._loader.seek(0)
        trainer.model.eval()
        feeder = DeviceFeeder(self._loader, device=self.setup.device, fields=self.setup.fields)
        with feeder:
            for _, batch in zip(range(self.num_batches), feeder, strict=False):
                loss, count = trainer.local_forward(*inputs_of(batch, self.setup.fields))
                totals += torch.stack((loss, count))
        trainer.model.train()
        if self.setup.ranks.world_size > 1:
            distributed.all_reduce(totals)
        return float(totals[0] / totals[1].clamp(min=1))
