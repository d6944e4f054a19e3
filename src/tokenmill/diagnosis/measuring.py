"""Takes the sample, runs every way on it, then the sweep: all that is measured, in order."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.api import Store
from tokenmill.diagnosis.measure import run_way
from tokenmill.diagnosis.sample import take_sample
from tokenmill.diagnosis.sweep import SWEPT, points, recommend, sweep_jobs
from tokenmill.diagnosis.ways import WAYS
from tokenmill.diagnosis.ways.base import Job
from tokenmill.diagnosis.ways.pretokenize import store_path
from tokenmill.diagnosis.words import count
from tokenmill.engines.describe import describe
from tokenmill.engines.load import REFERENCES, load_engine
from tokenmill.errors import UsageError
from tokenmill.inspection import measure_lengths
from tokenmill.runners.cores import physical_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.diagnosis.values import Recommendation, SampleFacts, SweepPoint, WayResult
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.inspection import Lengths

    OnStep = Callable[[int, int, str], None]
    """Told before each step: its number, how many there are, and what it does."""

BATCH = 64
ALONE = ("one-by-one", "joined", "loader")
"""Ways that are one thread, whatever the number of workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be measured."""

    inputs: tuple[str, ...]
    tokenizer: str
    text_field: str = "text"
    separator: str | None = None
    seconds: float = 1.0
    sample_mb: float = 32.0
    workers: int | None = None
    seq_len: int = 1024
    sweep: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 60:
            raise UsageError(
                f"seconds={self.seconds!r} is no time to measure each way for",
                hint="use more than 0 and at most 60, such as --seconds 2",
            )
        if not 0 < self.sample_mb <= 4096:
            raise UsageError(
                f"sample_mb={self.sample_mb!r} is no size of a sample",
                hint="use more than 0 and at most 4096, such as --sample-mb 32",
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers={self.workers!r} does no work", hint="use 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """What was found."""

    info: TokenizerInfo
    sample: SampleFacts
    lengths: Lengths | None
    ways: tuple[WayResult, ...]
    sweep: tuple[SweepPoint, ...]
    recommendation: Recommendation | None


def usable_cores() -> int:
    """Cores that this process may use, threads of a core counted one by one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_all(request: Request, *, on_step: OnStep | None = None) -> Measurements:
    """Measure everything that was asked for."""
    info = describe(request.tokenizer)
    _check_loads(info)
    with tempfile.TemporaryDirectory(prefix="tokenmill-diagnose-") as folder:
        base = Job(
            way="",
            folder=folder,
            tokenizer=request.tokenizer,
            kind=info.kind.value,
            workers=request.workers or usable_cores(),
            batch=BATCH,
            seconds=request.seconds,
            seq_len=request.seq_len,
        )
        jobs = _way_jobs(base, build_workers=request.workers or physical_cores())
        swept = sweep_jobs(base, cores=base.workers) if request.sweep else []
        more = [job for job in swept if job not in jobs]
        tell = _Teller(on_step, steps=1 + len(jobs) + len(more))
        tell("reading a sample")
        sample = take_sample(
            request.inputs,
            folder=Path(folder),
            most_bytes=round(request.sample_mb * 1e6),
            text_field=request.text_field,
            separator=request.separator,
        )
        ways = tuple(_run(job, tell) for job in jobs)
        tried = points([*ways, *(_run(job, tell) for job in more)]) if request.sweep else ()
        return Measurements(
            info=info,
            sample=sample,
            lengths=_lengths(folder, ways),
            ways=ways,
            sweep=tuple(point for point in tried if point.key in SWEPT),
            recommendation=recommend(tried, sample=sample, tokenizer_bytes=_size(info)),
        )


def _check_loads(info: TokenizerInfo) -> None:
    """Fail here and with its own words, not once in every way."""
    before = dict(os.environ)
    try:
        load_engine(info, choice=REFERENCES[info.kind])
    finally:
        # An engine holds its threads back by variables, which the ways would inherit.
        os.environ.clear()
        os.environ.update(before)


class _Teller:
    def __init__(self, on_step: OnStep | None, *, steps: int) -> None:
        self._on_step = on_step
        self._steps = steps
        self._number = 0

    def __call__(self, what: str) -> None:
        self._number += 1
        if self._on_step is not None:
            self._on_step(self._number, self._steps, what)


def _way_jobs(base: Job, *, build_workers: int) -> list[Job]:
    """A job for each way; the build comes before the loader, which reads what it wrote."""
    jobs = []
    for way in WAYS:
        if way == "dataloader" and find_spec("torch") is None:
            continue
        workers = base.workers
        if way in ("build", "loader"):
            workers = build_workers
        jobs.append(dataclasses.replace(base, way=way, workers=workers))
    return jobs


def _run(job: Job, tell: _Teller) -> WayResult:
    setting = "" if job.way in ALONE else f", {count(job.workers, 'worker')}"
    batch = f", {count(job.batch, 'sample')} a call" if job.way == "batched" else ""
    tell(f"{WAYS[job.way].title}{setting}{batch}")
    return run_way(job)


def _lengths(folder: str, ways: tuple[WayResult, ...]) -> Lengths | None:
    """Tokens per document of the sample, from the store that the build made of it."""
    build = next((way for way in ways if way.key == "build" and way.problem is None), None)
    if build is None:
        return None
    store = Store(store_path(folder, workers=build.workers))
    return measure_lengths(
        store.map_shard(shard).index.lengths for shard in range(len(store.shards))
    )


def _size(info: TokenizerInfo) -> int:
    return sum(path.stat().st_size for path in info.files.values())
