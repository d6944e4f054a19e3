"""A map-style dataset below torch's DataLoader: what memmap users, Hugging Face datasets, datatrove
and Megatron-core all end in.

Workers are kept between epochs. The DataLoader has no state of its own, so a resume draws the order
of the epoch again and begins after the rows that were used, in the sampler: none of them is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.contenders.feeding import FeedJob, Pair


class RowOrder(Sampler[int]):
    """All rows, shuffled by seed and epoch, or as they are."""

    def __init__(self, num_rows: int, *, shuffle: bool = True) -> None:
        self._num_rows = num_rows
        self._shuffle = shuffle
        self.epoch = 0
        self.first = 0
        """Rows of the next epoch to leave out."""

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        if not self._shuffle:
            yield from range(first, self._num_rows)
            return
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self._num_rows, generator=generator)[first:].tolist()

    def __len__(self) -> int:
        return self._num_rows


class MapStyle:
    """A dataset in a DataLoader."""

    def __init__(
        self,
        dataset: Any,
        job: FeedJob,
        pair: Callable[[Any], Pair],
        *,
        shuffle: bool = True,
        collate: Callable[[Any], Any] | None = None,
    ) -> None:
        self._pair = pair
        self._order = RowOrder(len(dataset), shuffle=shuffle)
        self._rows_used = 0
        self._batch_size = job.batch_size
        self._batches: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=job.batch_size,
            sampler=self._order,
            num_workers=job.workers,
            persistent_workers=job.workers > 0,
            drop_last=True,
            collate_fn=collate,
        )

    def epoch(self) -> Iterator[Pair]:
        self._rows_used = self._order.first
        for batch in self._batches:
            self._rows_used += self._batch_size
            yield self._pair(batch)
        self._order.epoch += 1

    def state(self) -> tuple[int, int]:
        return self._order.epoch, self._rows_used

    def restore(self, state: tuple[int, int]) -> None:
        self._order.epoch, self._order.first = state


def halves(rows: Any) -> Pair:
    """Inputs and labels of rows of seq_len + 1 tokens: two views."""
    return rows[:, :-1], rows[:, 1:]
