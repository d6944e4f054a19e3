"""The limit: one numpy gather per batch, from a mapped file, and nothing else.

The file is seen as overlapping rows of seq_len + 1 tokens, and sixteen of them at a time are copied
out in the order of a permutation that is in memory. No shards, no documents, no state that could
be kept for long: what a loader does beyond copying has to fit between this and its own rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.contenders.feeding import FeedJob, Pair, run, token_file

if TYPE_CHECKING:
    from collections.abc import Iterator


class Gather:
    """All rows of the file, permuted anew in each epoch."""

    def __init__(self, job: FeedJob) -> None:
        # A plain array: slicing a memmap object costs more than copying the row.
        tokens = np.asarray(token_file(job))
        self._rows = sliding_window_view(tokens, job.seq_len + 1)[:: job.seq_len]
        self._batch_size = job.batch_size
        self._random = np.random.default_rng(0)

    def epoch(self) -> Iterator[Pair]:
        order = self._random.permutation(len(self._rows))
        for first in range(0, len(order) - self._batch_size + 1, self._batch_size):
            batch = self._rows[order[first : first + self._batch_size]]
            yield batch[:, :-1], batch[:, 1:]

    def state(self) -> Any:
        raise NotImplementedError

    def restore(self, state: Any) -> None:
        raise NotImplementedError


if __name__ == "__main__":
    run(Gather)
