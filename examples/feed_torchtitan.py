"""A data loader as torchtitan and trainers like it want one: stateful, and made for a dp rank.

python examples/feed_torchtitan.py STORE [FOLDER FOR CHECKPOINTS]

Needs: pip install torch (and not torchtitan itself)

It yields ({"input": ids}, labels), and torch.distributed.checkpoint saves it like any other part of
the run. The state is the same on every rank, and a run may go on with another number of ranks.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.stateful import Stateful

import tokenmill
from tokenmill.torch import DeviceFeeder


class TokenmillDataLoader(Stateful):
    def __init__(self, store: str, *, dp_rank: int, dp_world_size: int, **options: Any) -> None:
        self.loader = tokenmill.Loader(
            store, split="train", rank=dp_rank, world_size=dp_world_size, **options
        )
        self.feeder = DeviceFeeder(self.loader)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.feeder:
            yield {"input": batch.input_ids}, batch.labels

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)


def sums(loader: TokenmillDataLoader, *, steps: int) -> list[int]:
    """What a training step would be, on the next so many batches."""
    batches = zip(range(steps), loader, strict=False)
    return [int(inputs["input"].sum() + labels.sum()) for _, (inputs, labels) in batches]


def main(store: str, folder: str = "dcp") -> None:
    options = {"dp_rank": 0, "dp_world_size": 1, "seq_len": 64, "batch_size": 8}
    expected = sums(TokenmillDataLoader(store, **options), steps=20)

    stopped = TokenmillDataLoader(store, **options)
    seen = sums(stopped, steps=7)
    checkpoint.save({"dataloader": stopped}, checkpoint_id=folder)

    resumed = TokenmillDataLoader(store, **options)
    checkpoint.load({"dataloader": resumed}, checkpoint_id=folder)
    seen += sums(resumed, steps=13)
    print("resumed exactly" if seen == expected else f"{expected} became {seen}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
