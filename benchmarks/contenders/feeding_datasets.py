"""Hugging Face datasets: rows of seq_len + 1 tokens, saved by save_to_disk.

    mode loader             map-style, below torch's DataLoader
    mode batches            map-style, shuffle and iter(batch_size): no DataLoader
    mode iterable-loader    to_iterable_dataset, a shuffle buffer of 1,000 rows, torch's DataLoader
    mode iterable           the same with iter(batch_size)

The format is numpy: with "torch" this version converts every row through Python lists and reaches 4
million tokens/s, a tenth. The iterable kind has a state, but without the rows in its buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
from torch.utils.data import DataLoader

from benchmarks.contenders.feeding import Feeder, FeedJob, Pair, rows, run
from benchmarks.contenders.feeding_map_style import MapStyle, halves

if TYPE_CHECKING:
    from collections.abc import Iterator

BUFFER_ROWS = 1000
PARTS = 16
"""Parts that the iterable kind is cut into, so that workers have some to share."""


def prepare(job: FeedJob) -> None:
    values = pa.array(rows(job).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(values, job.seq_len + 1)
    datasets.Dataset(pa.table({"ids": column})).save_to_disk(_folder(job))


class Iterable:
    def __init__(self, job: FeedJob, saved: Any) -> None:
        parts = saved.to_iterable_dataset(num_shards=PARTS).with_format("numpy")
        self._dataset = parts.shuffle(seed=0, buffer_size=BUFFER_ROWS)
        self._batch_size = job.batch_size
        self._epoch = 0
        self._loader: DataLoader[Any] | None = None
        if job.mode == "iterable-loader":
            self._loader = DataLoader(
                self._dataset,
                batch_size=job.batch_size,
                num_workers=job.workers,
                persistent_workers=job.workers > 0,
                drop_last=True,
            )

    def epoch(self) -> Iterator[Pair]:
        self._dataset.set_epoch(self._epoch)
        self._epoch += 1
        own = self._dataset.iter(self._batch_size, drop_last_batch=True)
        return map(_pair, own if self._loader is None else self._loader)

    def state(self) -> Any:
        return self._dataset.state_dict()

    def restore(self, state: Any) -> None:
        self._dataset.load_state_dict(state)


class Batches:
    """The dataset's own batches, without a DataLoader."""

    def __init__(self, job: FeedJob, saved: Any) -> None:
        self._dataset = saved
        self._batch_size = job.batch_size
        self._seed = 0
        self._first = 0
        self._batches_used = 0

    def epoch(self) -> Iterator[Pair]:
        shuffled = self._dataset.shuffle(seed=self._seed, keep_in_memory=True)
        self._batches_used, self._first = self._first, 0
        first_row = self._batches_used * self._batch_size
        rest = shuffled.select(range(first_row, len(shuffled)), keep_in_memory=True)
        for batch in rest.iter(self._batch_size, drop_last_batch=True):
            self._batches_used += 1
            yield _pair(batch)
        self._seed += 1

    def state(self) -> tuple[int, int]:
        return self._seed, self._batches_used

    def restore(self, state: tuple[int, int]) -> None:
        self._seed, self._first = state


def open_feeder(job: FeedJob) -> Feeder:
    saved = datasets.load_from_disk(_folder(job))
    if job.mode.startswith("iterable"):
        return Iterable(job, saved)
    narrow = saved.with_format("numpy", dtype=np.uint16)
    return Batches(job, narrow) if job.mode == "batches" else MapStyle(narrow, job, _pair)


def _pair(batch: dict[str, Any]) -> Pair:
    return halves(batch["ids"])


def _folder(job: FeedJob) -> str:
    return str(Path(job.folder) / "saved")


if __name__ == "__main__":
    datasets.disable_progress_bars()
    run(open_feeder, prepare)
