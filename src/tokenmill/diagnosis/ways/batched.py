"""Many samples in one call, which lets the package use every core (`encode_batch`)."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from tokenmill.diagnosis.ways.base import measure_calls
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from tokenmill.diagnosis.ways.base import Job, Measured


def measure(job: Job) -> Measured:
    """Time it."""
    started = time.perf_counter()
    engine = job.load(threads=job.workers).reference

    def encode(texts: list[str]) -> int:
        return len(engine.encode(TextBatch.from_texts(texts)).ids)

    measured = measure_calls(job, engine, encode, startup_seconds=time.perf_counter() - started)
    return dataclasses.replace(measured, workers=job.workers)
