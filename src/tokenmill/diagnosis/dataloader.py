"""A torch `DataLoader` whose workers tokenize: the usual answer to a loop that is too slow."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, Dataset

from tokenmill.diagnosis.ways import CHUNK, Stopwatch, encode_one

if TYPE_CHECKING:
    from tokenmill.diagnosis.values import WayResult
    from tokenmill.diagnosis.ways import WayJob
    from tokenmill.engines.base import Engine


ENDLESS = 1 << 40


class Tokenizing(Dataset[torch.Tensor]):
    """The sample's documents again and again, tokenized where they are asked for."""

    def __init__(self, job: WayJob, texts: list[str]) -> None:
        self._job = job
        self._texts = texts
        self._engine: Engine | None = None

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._engine is None:
            self._engine = self._job.load().reference
        ids = encode_one(self._engine, self._texts[index % len(self._texts)])
        return torch.from_numpy(ids.astype("int64"))


def measure(job: WayJob) -> WayResult:
    """Time it. What a sample of one costs is not asked: the workers make batches."""
    texts = job.texts()
    sizes = [len(text.encode()) for text in texts]
    started = time.perf_counter()
    loader = DataLoader(
        Tokenizing(job, texts),
        batch_size=CHUNK,
        num_workers=job.workers,
        sampler=range(ENDLESS),
        collate_fn=list,
    )
    batches = iter(loader)
    # The first batch of each worker waits for its tokenizer; by default two more follow it.
    early = job.workers * 3
    for _ in range(early):
        next(batches)
    begun = time.perf_counter()
    watch, tokens, taken = Stopwatch(), 0, 0
    while time.perf_counter() - begun < job.seconds:
        tokens += sum(map(len, next(batches)))
        taken += 1
    span = watch.stop()
    return job.result(
        engine=job.load().reference.name,
        documents=taken * CHUNK,
        text_bytes=sum(
            itertools.islice(itertools.cycle(sizes), early * CHUNK, (early + taken) * CHUNK)
        ),
        tokens=tokens,
        **span,
        workers=job.workers,
        startup_seconds=begun - started,
        chunk_ms=span["seconds"] * 1000 / taken,
        note="batches of 8 samples, made ahead by the workers",
    )
