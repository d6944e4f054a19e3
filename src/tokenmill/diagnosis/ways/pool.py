"""A `multiprocessing.Pool` whose workers tokenize, fed by `imap`.

Workers are spawned, not forked: a tokenizer that has started threads must not be forked. The clock
starts when all of them have their tokenizer.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING

from tokenmill.diagnosis.ways.base import (
    Measured,
    Rounds,
    Stopwatch,
    encode_one,
    latencies,
)
from tokenmill.runners.child import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.pool import Pool
    from multiprocessing.synchronize import Barrier

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.diagnosis.ways.base import Job
    from tokenmill.engines.base import Engine

READY_SECONDS = 120.0

_engine: Engine | None = None


def measure(job: Job) -> Measured:
    """Time it."""
    texts = job.texts()
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(job.workers + 1)
    with context.Pool(job.workers, initializer=_prepare, initargs=(job, ready)) as pool:
        ready.wait(READY_SECONDS)
        name = pool.apply(_engine_name)
        startup = time.perf_counter() - started
        return _measure(job, pool, texts, engine=name, startup_seconds=startup)


def _measure(
    job: Job, pool: Pool, texts: list[str], *, engine: str, startup_seconds: float
) -> Measured:
    def encode(group: list[str]) -> int:
        return sum(map(len, pool.map(_encode, group, chunksize=1)))

    sample_ms, chunk_ms = latencies(encode, texts, seconds=job.seconds / 4)
    rounds = Rounds(texts, batch=job.batch, seconds=job.seconds)
    watch = Stopwatch()
    tokens = sum(map(len, pool.imap(_encode, rounds.singles(), chunksize=job.batch)))
    return Measured(
        engine=engine,
        documents=rounds.documents,
        text_bytes=rounds.text_bytes,
        tokens=tokens,
        **watch.stop(),
        workers=job.workers,
        startup_seconds=startup_seconds,
        sample_ms=sample_ms,
        chunk_ms=chunk_ms,
    )


def _prepare(job: Job, ready: Barrier) -> None:
    global _engine
    end_with_parent()
    _engine = job.load().reference
    ready.wait(READY_SECONDS)


def _encode(text: str) -> NDArray[np.uint32]:
    assert _engine is not None
    return encode_one(_engine, text)


def _engine_name() -> str:
    assert _engine is not None
    return _engine.name
