"""`tokenmill.Loader` on the store of the sample: what a training loop gets once text is tokens.

The store is small and was just written, so it lies in the system's cache; a large one on a slow
disk is read at the speed of the disk. A sample is here a row of `seq_len` tokens, not a document.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tokenmill.api import Store
from tokenmill.diagnosis.ways.base import CHUNK, Measured, Stopwatch, latencies
from tokenmill.diagnosis.ways.pretokenize import store_path
from tokenmill.loader.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.diagnosis.ways.base import Job
    from tokenmill.loader.batch import Batch


def measure(job: Job) -> Measured:
    """Time it with batches of 8 rows, inputs and labels."""
    started = time.perf_counter()
    store = Store(store_path(job.folder, workers=job.workers))
    # Shorter rows for a small sample: padding is read faster than tokens.
    seq_len = min(job.seq_len, max(store.num_tokens // CHUNK, 1))
    many, one = (_batches(store, seq_len, size) for size in (CHUNK, 1))
    tokens, _ = _take(many), _take(one)
    startup = time.perf_counter() - started

    def take(texts: list[str]) -> int:
        return _take(one if len(texts) == 1 else many)

    sample_ms, chunk_ms = latencies(take, [""] * CHUNK, seconds=job.seconds / 4)
    watch, begun, steps = Stopwatch(), time.perf_counter(), 0
    while time.perf_counter() - begun < job.seconds:
        _take(many)
        steps += 1
    span = watch.stop()
    return Measured(
        engine="none: ids are read",
        documents=0,
        text_bytes=0,
        tokens=steps * tokens,
        **span,
        workers=1,
        startup_seconds=startup,
        sample_ms=sample_ms,
        chunk_ms=chunk_ms,
        note=f"a sample is a row of {seq_len:,} tokens; the store is in the system's cache",
    )


def _batches(store: Store, seq_len: int, batch_size: int) -> Iterator[Batch]:
    return iter(Loader(store, seq_len=seq_len, batch_size=batch_size))


def _take(batches: Iterator[Batch]) -> int:
    batch = next(batches)
    _ = batch.labels
    return int(batch.input_ids.size)
