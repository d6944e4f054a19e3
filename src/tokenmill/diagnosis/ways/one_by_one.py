"""The tokenizer is called for each sample, as a dataset does in its `__getitem__`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tokenmill.diagnosis.ways.base import encode_one, measure_calls

if TYPE_CHECKING:
    from tokenmill.diagnosis.ways.base import Job, Measured


def measure(job: Job) -> Measured:
    """Time it."""
    started = time.perf_counter()
    engine = job.load().reference

    def encode(texts: list[str]) -> int:
        return sum(len(encode_one(engine, text)) for text in texts)

    return measure_calls(job, engine, encode, startup_seconds=time.perf_counter() - started)
