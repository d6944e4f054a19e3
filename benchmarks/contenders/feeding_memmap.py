"""What people write themselves over one file of tokens.

    mode nanogpt     random offsets, rows widened to int64 one by one, stacked: as nanoGPT's
                     get_batch does, which also maps the file anew for each batch
    mode int64       a Dataset that widens each row, below torch's DataLoader
    mode uint16      the same without widening
    mode unfolded    rows cut from the file beforehand, as views of one tensor: nobody writes this,
                     but a DataLoader of rows cannot be faster
    mode stateful    the first Dataset below torchdata's StatefulDataLoader

nanoGPT draws with replacement, so it has no epochs; its state is that of the random generator.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.contenders.feeding import Feeder, FeedJob, Pair, run, token_file
from benchmarks.contenders.feeding_map_style import MapStyle, halves

if TYPE_CHECKING:
    from collections.abc import Iterator


class NanoGPT:
    def __init__(self, job: FeedJob) -> None:
        self._job = job
        self._random = torch.Generator().manual_seed(0)

    def epoch(self) -> Iterator[Pair]:
        length = self._job.seq_len
        while True:
            data = token_file(self._job)
            last = len(data) - length
            starts = torch.randint(last, (self._job.batch_size,), generator=self._random).tolist()
            inputs = [torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts]
            labels = [
                torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts
            ]
            yield torch.stack(inputs), torch.stack(labels)

    def state(self) -> Any:
        return self._random.get_state()

    def restore(self, state: Any) -> None:
        self._random.set_state(state)


class WideRows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of seq_len + 1 tokens as int64."""

    def __init__(self, job: FeedJob) -> None:
        self._tokens = token_file(job)
        self._length = job.seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, row: int) -> torch.Tensor:
        first = row * self._length
        return torch.from_numpy(self._tokens[first : first + self._length + 1].astype(np.int64))


class NarrowRows(WideRows):
    """Rows of seq_len + 1 tokens as they are in the file."""

    def __init__(self, job: FeedJob) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        super().__init__(job)

    def __getitem__(self, row: int) -> torch.Tensor:
        first = row * self._length
        return torch.from_numpy(self._tokens[first : first + self._length + 1])


class UnfoldedRows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of seq_len + 1 tokens as views of one tensor over the mapped file."""

    def __init__(self, job: FeedJob) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tokens = torch.from_numpy(token_file(job))
        self._rows = tokens.unfold(0, job.seq_len + 1, job.seq_len)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self._rows[row]


class Stateful:
    """torchdata's StatefulDataLoader, which keeps the sampler's state as well."""

    def __init__(self, job: FeedJob) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        # Its own sampler, not ours: that is the one it can put back into the middle of an epoch.
        self._batches = StatefulDataLoader(
            WideRows(job),
            batch_size=job.batch_size,
            shuffle=True,
            num_workers=job.workers,
            persistent_workers=job.workers > 0,
            drop_last=True,
            generator=torch.Generator().manual_seed(0),
        )

    def epoch(self) -> Iterator[Pair]:
        return map(halves, self._batches)

    def state(self) -> Any:
        return self._batches.state_dict()

    def restore(self, state: Any) -> None:
        self._batches.load_state_dict(state)


ROWS = {"int64": WideRows, "uint16": NarrowRows, "unfolded": UnfoldedRows}


def open_feeder(job: FeedJob) -> Feeder:
    if job.mode == "nanogpt":
        return NanoGPT(job)
    if job.mode == "stateful":
        return Stateful(job)
    return MapStyle(ROWS[job.mode](job), job, halves)


if __name__ == "__main__":
    run(open_feeder)
