"""A store or mixture for Lightning's Trainer: `Trainer().fit(model, DataModule("my-store", ...))`.

An epoch of Lightning is one number of steps of a loader without an end, which has another order in
every epoch and goes on from one into the next. Lightning takes no batch ahead of a loader that has
a length, so the state in its checkpoints is that of the batches that were trained on.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tokenmill.errors import MissingExtraError, UsageError

if find_spec("lightning") is None:
    raise MissingExtraError("lightning", extra="lightning", purpose="feeding Lightning's Trainer")

import lightning

from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.torch import DEFAULT_FIELDS, DeviceFeeder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenmill.loader.mixture import StoreInput
    from tokenmill.torch import TensorBatch

__all__ = ["DataModule"]

_GIVEN = {
    "epochs": "Trainer(max_epochs=...)",
    "rank": "the Trainer's devices and num_nodes",
    "world_size": "the Trainer's devices and num_nodes",
}


class DataModule(lightning.LightningDataModule):
    """Batches of a store or mixture for Lightning's Trainer; `batch_size` is that of a device.

    >>> data = DataModule("my-store", seq_len=2048, batch_size=16, val_split="val")
    >>> Trainer(max_epochs=2).fit(model, data, ckpt_path="last.ckpt")

    `training_step` gets a `TensorBatch` with `fields`. Every rank reads its own rows. An epoch is
    as many whole batches as the rows of a store, or of the stores of a mixture, make; it goes on
    where the last one ended. A run goes on from Lightning's checkpoint with the batch after the
    last one that was trained on.

    Options are those of a `Loader`. Validation takes the rows of `val_split` in their order.
    """

    def __init__(
        self,
        source: StoreInput | Mixture,
        *,
        split: str | None = None,
        val_split: str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        **options: Any,
    ) -> None:
        super().__init__()
        if taken := sorted(options.keys() & _GIVEN.keys()):
            raise UsageError(
                f"{taken[0]} is for Lightning to say, and was given to its data module too",
                hint=f"leave it out; it is known from {_GIVEN[taken[0]]}",
            )
        if val_split is not None and isinstance(source, Mixture):
            raise UsageError(
                f"val_split={val_split!r} of a mixture would be validation without an end",
                hint="override val_dataloader, with a DeviceFeeder of a store's split",
            )
        self.source, self.split, self.val_split = source, split, val_split
        self.fields, self.options = tuple(fields), options
        if val_split is not None:
            # Lightning looks whether there is one before it asks.
            self.val_dataloader = self._val_dataloader  # type: ignore[method-assign]

    def train_dataloader(self) -> DeviceFeeder:
        """A feeder for the rank and device of the Trainer."""
        feeder = self._feeder(_TrainFeeder, split=self.split)
        assert self.trainer is not None
        if feeder.loader.num_steps is not None and self.trainer.max_epochs != 1:
            raise UsageError(
                f"the mixture ends after {feeder.loader.num_steps:,} steps, and with"
                f" max_epochs={self.trainer.max_epochs} Lightning would begin anew: every epoch"
                " would have the same order",
                hint="give Trainer(max_epochs=1): an epoch is all of such a mixture",
            )
        return feeder

    def _val_dataloader(self) -> DeviceFeeder:
        return self._feeder(_ValFeeder, split=self.val_split, epochs=1, shuffle=False)

    def _feeder(self, kind: type[DeviceFeeder], **more: Any) -> DeviceFeeder:
        if self.trainer is None:
            raise UsageError(
                "this data module belongs to no Trainer yet, so ranks and devices are not known",
                hint="give it to Trainer.fit(model, data)",
            )
        # Not the global rank: where a model is cut into parts, several ranks take the same rows.
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        device = self.trainer.strategy.root_device
        loader = Loader(
            self.source,
            rank=ranks["rank"],
            world_size=ranks["num_replicas"],
            **self.options | more,
        )
        # To other devices Lightning moves them itself.
        return kind(loader, device=device if device.type == "cuda" else "cpu", fields=self.fields)


class _TrainFeeder(DeviceFeeder):
    """Has the length of an epoch and no end: Lightning stops by the length."""

    def __len__(self) -> int:
        loader = self.loader
        if loader.num_steps is not None:
            return loader.num_steps
        rows = sum(each.num_rows for each in loader.layouts())
        return max(1, rows // (loader.batch_size * loader.world_size))


class _ValFeeder(DeviceFeeder):
    """Begins with the first batch, also after Lightning stopped early in the last validation."""

    def __iter__(self) -> Iterator[TensorBatch]:
        self.loader.seek(0)
        return super().__iter__()
