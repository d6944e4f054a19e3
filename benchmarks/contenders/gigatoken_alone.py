"""The ceiling: gigatoken on text that already is in memory as Arrow columns. No reading, no
writing.

In the time: `encode_batch` alone, with the caches of a tokenizer that has seen no text yet.
Not in it: reading, parsing, start of processes, loading of the tokenizer.

    mode threads     one call on its own thread pool, all cores
    mode processes   one process per core with one thread each; the clock runs from the moment
                     the first starts encoding until the last is done
"""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import awkward as ak
import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.json

from benchmarks.contenders.protocol import Job, Report, answer, read_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier

BLOCK_BYTES = 64 << 20


class Encoded(NamedTuple):
    """What became of a share, and when, by the clock that all processes share."""

    begin: float
    end: float
    documents: int
    tokens: int


def read_column(files: list[str]) -> Any:
    """The text of all files as one Arrow array with 64-bit offsets."""
    options = pyarrow.json.ReadOptions(block_size=BLOCK_BYTES)
    tables = [pyarrow.json.read_json(path, read_options=options) for path in files]
    return pa.concat_tables(tables)["text"].cast(pa.large_string()).combine_chunks()


def as_awkward(column: Any) -> Any:
    """Wrap an Arrow array without copying its text."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    characters = ak.contents.NumpyArray(
        np.frombuffer(data, np.uint8), parameters={"__array__": "char"}
    )
    strings = ak.contents.ListOffsetArray(
        ak.index.Index64(bounds), characters, parameters={"__array__": "string"}
    )
    return ak.Array(strings)


def share(column: Any, index: int, count: int) -> Any:
    """The index-th of `count` consecutive parts with about the same number of bytes."""
    bounds = np.frombuffer(column.buffers()[1], np.int64)[: len(column) + 1]
    cuts = np.searchsorted(bounds, [bounds[-1] * part // count for part in (index, index + 1)])
    first, last = int(cuts[0]), len(column) if index + 1 == count else int(cuts[1])
    return column.slice(first, last - first)


def count_tokens(encoded: Any) -> int:
    """Ids in the result."""
    return int(ak.count(encoded))


def encode_by_threads(job: Job) -> Report:
    texts = as_awkward(read_column(job.files))
    tokenizer = gigatoken.Tokenizer(job.tokenizer)
    begin = time.perf_counter()
    encoded = tokenizer.encode_batch(texts, parallel=True)
    seconds = time.perf_counter() - begin
    return Report(seconds=seconds, documents=len(texts), tokens=count_tokens(encoded))


def encode_share(job: Job, index: int, ready: Barrier) -> Encoded:
    """Encode one share, when all processes are ready for it."""
    texts = as_awkward(share(read_column(job.files), index, job.workers))
    tokenizer = gigatoken.Tokenizer(job.tokenizer)
    ready.wait()
    begin = time.monotonic()
    encoded = tokenizer.encode_batch(texts, parallel=False)
    return Encoded(begin, time.monotonic(), len(texts), count_tokens(encoded))


def encode_by_processes(job: Job, encode: Callable[..., Encoded] = encode_share) -> Report:
    """All shares at once, by a function that takes the job, a number and a barrier to wait at."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(job.workers) as pool:
        ready = manager.Barrier(job.workers)
        tasks = [(job, index, ready) for index in range(job.workers)]
        begins, ends, documents, tokens = zip(*pool.starmap(encode, tasks, 1), strict=True)
    return Report(seconds=max(ends) - min(begins), documents=sum(documents), tokens=sum(tokens))


if __name__ == "__main__":
    job = read_job()
    answer(encode_by_threads(job) if job.mode == "threads" else encode_by_processes(job))
