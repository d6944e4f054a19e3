"""tokenmill's loader, over a store as `tokenmill build` left it, as tensors of int64.

mode batches    BatchDataset(loader) below torch's DataLoader
mode rows       TokenDataset below torch's DataLoader, shuffled by its sampler
mode feeder     DeviceFeeder, with the CPU for a device
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from benchmarks.contenders.feeding import Feeder, FeedJob, Pair, run
from benchmarks.contenders.feeding_map_style import MapStyle
from tokenmill import Loader
from tokenmill.torch import BatchDataset, DeviceFeeder, TokenDataset

if TYPE_CHECKING:
    from collections.abc import Iterator


def open_loader(job: FeedJob) -> Loader:
    # The feeder and the DataLoader's workers read ahead themselves.
    return Loader(
        job.store, split="train", seq_len=job.seq_len, batch_size=job.batch_size, prefetch=0
    )


class Batches:
    def __init__(self, job: FeedJob) -> None:
        self._loader = open_loader(job)
        self._batches: DataLoader[Any] = DataLoader(
            BatchDataset(self._loader), batch_size=None, num_workers=job.workers
        )
        self._step = 0

    def epoch(self) -> Iterator[Pair]:
        for batch in self._batches:
            self._step = batch.step + 1
            yield batch.input_ids, batch.labels

    def state(self) -> Any:
        self._loader.seek(self._step)
        return self._loader.state_dict()

    def restore(self, state: Any) -> None:
        self._loader.load_state_dict(state)


class OnDevice:
    def __init__(self, job: FeedJob) -> None:
        self._feeder = DeviceFeeder(open_loader(job), device="cpu")

    def epoch(self) -> Iterator[Pair]:
        for batch in self._feeder:
            yield batch.input_ids, batch.labels

    def state(self) -> Any:
        return self._feeder.state_dict()

    def restore(self, state: Any) -> None:
        self._feeder.load_state_dict(state)


def open_feeder(job: FeedJob) -> Feeder:
    if job.mode == "batches":
        return Batches(job)
    if job.mode == "feeder":
        return OnDevice(job)
    return MapStyle(TokenDataset(job.store, seq_len=job.seq_len), job, _pair)


def _pair(batch: dict[str, Any]) -> Pair:
    return batch["input_ids"], batch["labels"]


if __name__ == "__main__":
    run(open_feeder)
