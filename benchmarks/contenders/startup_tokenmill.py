"""tokenmill's loader as a user opens it: a path and two sizes, everything else by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.contenders.startup import StartupJob, run
from tokenmill import Loader

if TYPE_CHECKING:
    from collections.abc import Iterator


class Opened:
    def __init__(self, job: StartupJob) -> None:
        self._loader = Loader(job.path, seq_len=job.seq_len, batch_size=job.batch_size)

    def batches(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch.input_ids, batch.labels

    def state_at(self, step: int) -> Any:
        self._loader.seek(step)
        return self._loader.state_dict()

    def restore(self, state: Any) -> None:
        self._loader.load_state_dict(state)


if __name__ == "__main__":
    run(Opened)
