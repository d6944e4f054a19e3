"""The ceiling of a build with the engine `words`: the engine on text that is in memory already, in
one process per core. No reading, no writing.

In the time: its `encode` alone, in batches as a build makes them, with a cache that has seen no
text yet. Not in it: reading, parsing, start of processes, loading of the tokenizer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.contenders.gigatoken_alone import (
    Encoded,
    encode_by_processes,
    read_column,
    share,
)
from benchmarks.contenders.protocol import Job, answer, read_job
from tokenmill.engines.load import load_engine
from tokenmill.records import TextBatch, cut_ranges

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

BATCH_BYTES = 8 << 20


def encode_share(job: Job, index: int, ready: Barrier) -> Encoded:
    """Encode one share, when all processes are ready for it."""
    column = share(read_column(job.files), index, job.workers)
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    engine, text, tokens = load_engine(job.tokenizer), np.frombuffer(data, np.uint8), 0
    if engine.fast is None:
        raise ValueError(engine.refusal)
    ready.wait()
    begin = time.monotonic()
    for first, last in cut_ranges(bounds, BATCH_BYTES):
        tokens += len(engine.encode(TextBatch(text, bounds[first : last + 1])).ids)
    return Encoded(begin, time.monotonic(), len(column), tokens)


if __name__ == "__main__":
    answer(encode_by_processes(read_job(), encode_share))
