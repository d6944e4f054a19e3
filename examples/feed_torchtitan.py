"""A store as the dataloader of torchtitan (0.3): in a config function of your own,

    config = llama3_8b()
    config.dataloader = TokenmillDataLoader.Config(dataset="my-store", split="train")

python examples/feed_torchtitan.py STORE [FOLDER FOR CHECKPOINTS]

Needs: pip install torch torchtitan

torchtitan shows documents to its model by positions that begin anew (attn_backend "flex" or
"varlen"), and leaves out labels of -100. Its checkpoints save the loader like any other part of the
run: the state is the same on every rank, and a run may go on with another number of ranks.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import checkpoint
from torchtitan.components.dataloader import BaseDataLoader

import tokenmill
from tokenmill.torch import DeviceFeeder


class TokenmillDataLoader(BaseDataLoader):  # type: ignore[misc]  # it has no types here
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """`dataset` is the store."""

        split: str | None = None
        packing: str = "concat"
        boundaries: str = "mask"
        seed: int = 0
        epochs: float | None = None

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,  # the tokenizer, which the store has used, and when there will be a checkpoint
    ) -> None:
        self.loader = tokenmill.Loader(
            config.dataset,
            split=config.split,
            packing=config.packing,
            boundaries=config.boundaries,
            seed=config.seed,
            epochs=config.epochs,
            rank=dp_rank,
            world_size=dp_world_size,
            seq_len=seq_len,
            batch_size=local_batch_size,
        )
        # torchtitan moves batches to the device itself, one of those it accumulates at a time.
        fields = ("input_ids", "labels", "position_ids")
        self.feeder = DeviceFeeder(self.loader, device="cpu", fields=fields)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.feeder:
            yield {"input": batch.input_ids, "positions": batch.position_ids}, batch.labels

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.feeder.load_state_dict(state_dict)


def sums(loader: BaseDataLoader, *, steps: int) -> list[int]:
    """What a training step would be, on the next so many batches."""
    found = []
    for _, (inputs, labels) in zip(range(steps), loader, strict=False):
        positions = inputs["positions"]
        # Where a position is 0 torchtitan has a document begin; so every row begins one.
        assert not positions[:, 0].any()
        found.append(int(inputs["input"].sum() + positions.sum() + labels.sum()))
    return found


def main(store: str, folder: str = "dcp") -> None:
    config = TokenmillDataLoader.Config(dataset=store, split="train")

    def build() -> BaseDataLoader:
        # As torchtitan's trainer does.
        return config.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=None,
            seq_len=64,
            local_batch_size=8,
            snapshot_every_n_steps=None,
        )

    expected = sums(build(), steps=20)
    stopped = build()
    seen = sums(stopped, steps=7)
    checkpoint.save({"dataloader": stopped}, checkpoint_id=folder)

    resumed = build()
    checkpoint.load({"dataloader": resumed}, checkpoint_id=folder)
    seen += sums(resumed, steps=13)
    print("resumed exactly" if seen == expected else f"{expected} became {seen}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
