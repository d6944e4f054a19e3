"""For scale: one file without documents, shards or checks, read as nanoGPT reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.contenders.startup import StartupJob, run

if TYPE_CHECKING:
    from collections.abc import Iterator


class Opened:
    def __init__(self, job: StartupJob) -> None:
        self._job = job
        self._random = torch.Generator().manual_seed(0)

    def batches(self) -> Iterator[Any]:
        length = self._job.seq_len
        while True:
            data = np.memmap(self._job.path, dtype=np.uint16, mode="r")
            last = len(data) - length
            starts = torch.randint(last, (self._job.batch_size,), generator=self._random).tolist()
            yield tuple(
                torch.stack(
                    [
                        torch.from_numpy(data[i + shift : i + shift + length].astype(np.int64))
                        for i in starts
                    ]
                )
                for shift in (0, 1)
            )

    def state_at(self, step: int) -> Any:
        # Some other state; to draw all numbers up to a step would take minutes.
        return self._random.manual_seed(step).get_state()

    def restore(self, state: Any) -> None:
        self._random.set_state(state)


if __name__ == "__main__":
    run(Opened)
