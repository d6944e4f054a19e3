"""`tokenmill build` on the sample: the cost of tokenizing, paid once.

The store is left in the working folder, for the loader to be timed on. No end tokens are added, so
that all ways make the same tokens of the same text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.builder.build import build
from tokenmill.diagnosis.sample import LINES
from tokenmill.diagnosis.ways.base import Measured, Stopwatch

if TYPE_CHECKING:
    from tokenmill.diagnosis.ways.base import Job

UNITS_PER_WORKER = 4
SMALLEST_UNIT = 1 << 20
SHORT_SECONDS = 0.2


def store_path(folder: str | Path, *, workers: int) -> Path:
    """Where the store of a build with so many workers lies."""
    return Path(folder) / f"store-{workers}"


def measure(job: Job) -> Measured:
    """Build, and take the time at work; where the text is too short for that, the whole time."""
    lines = Path(job.folder) / LINES
    unit_bytes = max(SMALLEST_UNIT, lines.stat().st_size // (UNITS_PER_WORKER * job.workers))
    watch = Stopwatch()
    result = build(
        lines,
        tokenizer=job.tokenizer,
        out=store_path(job.folder, workers=job.workers),
        eos=False,
        workers=job.workers,
        unit_bytes=unit_bytes,
    )
    span = watch.stop()
    short = result.working_seconds < SHORT_SECONDS
    seconds = result.seconds if short else result.working_seconds
    return Measured(
        engine=result.engine,
        documents=result.built.documents,
        text_bytes=result.built.text_bytes,
        tokens=result.built.tokens,
        seconds=seconds,
        # Taken over the whole build, and brought to the part of it that is measured.
        cpu_seconds=span["cpu_seconds"] * seconds / span["seconds"],
        other_cpu_seconds=span["other_cpu_seconds"] * seconds / span["seconds"],
        workers=result.workers,
        startup_seconds=0.0 if short else result.startup_seconds,
        note="the sample is so small that most of the time is start-up: a larger input is faster"
        if short
        else None,
    )
