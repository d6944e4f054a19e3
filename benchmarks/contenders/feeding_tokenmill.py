"""tokenmill's loader, over a store as `tokenmill build` left it, as numpy arrays.

    mode concat  block  best-fit  pad     ids in their stored width, labels as views, no prefetching
    mode prefetch                         concat with it
    mode fields                           concat with int64 ids, position ids and cu_seqlens

Nothing is prepared. Best-fit plans a store when it is first opened, before any clock starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.contenders.feeding import FeedJob, Pair, run
from tokenmill import Loader

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIONS: dict[str, dict[str, Any]] = {
    "concat": {"dtype": "stored"},
    "prefetch": {"dtype": "stored", "prefetch": 2},
    "block": {"dtype": "stored", "shuffle": "block"},
    "best-fit": {"dtype": "stored", "packing": "best-fit"},
    "pad": {"dtype": "stored", "packing": "pad"},
    "fields": {},
}


class Arrays:
    """The loader's batches as they are."""

    def __init__(self, job: FeedJob) -> None:
        options = {"prefetch": 0} | OPTIONS[job.mode]
        self._loader = Loader(
            job.store, split="train", seq_len=job.seq_len, batch_size=job.batch_size, **options
        )
        self._has_fields = job.mode == "fields"

    @property
    def padding_share(self) -> float:
        """Places of rows that hold no token."""
        [layout] = self._loader.layouts()
        account = layout.account()
        return account.padding / (account.rows * (account.seq_len + 1))

    def epoch(self) -> Iterator[Pair]:
        for batch in self._loader:
            if self._has_fields:
                _ = batch.position_ids, batch.cu_seqlens
            yield batch.input_ids, batch.labels

    def state(self) -> Any:
        return self._loader.state_dict()

    def restore(self, state: Any) -> None:
        self._loader.load_state_dict(state)


if __name__ == "__main__":
    run(Arrays)
