"""LitData: its writer with a TokensLoader, then StreamingDataset and StreamingDataLoader.

Written as its manual does it: one tensor of tokens per document, chunks of 8,012 rows. It shuffles
chunks, and rows within a chunk. Ids stay uint16, which is as fast as it gets.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from benchmarks.contenders.feeding import FeedJob, Pair, documents, run
from benchmarks.contenders.feeding_map_style import halves

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_ROWS = 8012
PARTS = 2
"""The writer starts a process for each."""


def prepare(job: FeedJob) -> None:
    length = job.seq_len + 1
    optimize(
        fn=functools.partial(_part_of_documents, job),
        inputs=list(range(PARTS)),
        output_dir=_folder(job),
        chunk_size=length * CHUNK_ROWS,
        item_loader=TokensLoader(block_size=length),
        num_workers=PARTS,
        verbose=False,
    )


def _part_of_documents(job: FeedJob, part: int) -> Iterator[Any]:
    for number, tokens in enumerate(documents(job)):
        if number % PARTS == part:
            yield torch.from_numpy(tokens.copy())


class LitData:
    def __init__(self, job: FeedJob) -> None:
        dataset = StreamingDataset(
            _folder(job),
            item_loader=TokensLoader(block_size=job.seq_len + 1),
            shuffle=True,
            drop_last=True,
        )
        self._batches = StreamingDataLoader(
            dataset,
            batch_size=job.batch_size,
            num_workers=job.workers,
            persistent_workers=job.workers > 0,
        )

    def epoch(self) -> Iterator[Pair]:
        return map(halves, self._batches)

    def state(self) -> Any:
        return self._batches.state_dict()

    def restore(self, state: Any) -> None:
        self._batches.load_state_dict(state)


def _folder(job: FeedJob) -> str:
    return str(Path(job.folder) / "chunks")


if __name__ == "__main__":
    run(LitData, prepare)
