"""Several worker counts and batch sizes, and which of them to use on this machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tokenmill.builder.memory import (
    default_budget,
    divide_budget,
    max_document_bytes,
    usable_memory,
)
from tokenmill.config import format_size
from tokenmill.diagnosis.values import Recommendation, SweepPoint
from tokenmill.diagnosis.words import compact, count
from tokenmill.errors import MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenmill.diagnosis.values import SampleFacts, WayResult
    from tokenmill.diagnosis.ways.base import Job

SWEPT = ("batched", "pool", "build")
BATCHES = (1, 8, 64, 512)
NEAR_BEST = 0.95
SPARE = 1.25
ROUND_TO = 250 * 10**6


def worker_counts(cores: int) -> tuple[int, ...]:
    """1, 2, 4 ... and the cores themselves."""
    counts = {cores}
    count = 1
    while count < cores:
        counts.add(count)
        count *= 2
    return tuple(sorted(counts))


def sweep_jobs(job: Job, *, cores: int) -> list[Job]:
    """What is to be tried beside the ways as they were measured."""
    settings = [("batched", cores, batch) for batch in BATCHES]
    settings += [("pool", workers, job.batch) for workers in worker_counts(cores)]
    settings += [("build", workers, job.batch) for workers in worker_counts(cores)]
    return [
        dataclasses.replace(job, way=way, workers=workers, batch=batch)
        for way, workers, batch in settings
    ]


def points(results: Iterable[WayResult]) -> tuple[SweepPoint, ...]:
    """The settings that could be measured, each once."""
    found = {
        (result.key, result.workers, result.batch): SweepPoint(
            key=result.key,
            workers=result.workers,
            batch=result.batch,
            tokens_per_second=result.tokens_per_second,
            cpu_cores=result.cpu_cores,
            peak_memory_bytes=result.peak_memory_bytes,
        )
        for result in results
        if result.problem is None
    }
    order = list(dict.fromkeys(key for key, _, _ in found))
    return tuple(
        found[setting] for setting in sorted(found, key=lambda s: (order.index(s[0]), s[1], s[2]))
    )


def recommend(
    swept: Sequence[SweepPoint], *, sample: SampleFacts, tokenizer_bytes: int
) -> Recommendation | None:
    """The smallest settings within a few percent of the best; None without a build."""
    build = smallest_near_best([point for point in swept if point.key == "build"])
    if build is None:
        return None
    pool = smallest_near_best([point for point in swept if point.key == "pool"])
    batch = smallest_near_best([point for point in swept if point.key == "batched"])
    memory = memory_for(build, sample=sample, tokenizer_bytes=tokenizer_bytes)
    return Recommendation(
        build_workers=build.workers,
        build_memory_bytes=memory,
        pool_workers=None if pool is None else pool.workers,
        batch=None if batch is None else batch.batch,
        reasons=tuple(_reasons(build, pool, batch, memory=memory, sample=sample)),
    )


def smallest_near_best(tried: Sequence[SweepPoint]) -> SweepPoint | None:
    """The setting with the fewest workers and the smallest batch that is nearly the best."""
    if not tried:
        return None
    enough = NEAR_BEST * max(point.tokens_per_second for point in tried)
    near = [point for point in tried if point.tokens_per_second >= enough]
    return min(near, key=lambda point: (point.workers, point.batch))


def memory_for(build: SweepPoint, *, sample: SampleFacts, tokenizer_bytes: int) -> int:
    """A budget for a build: what was seen and some more, and never one that rejects documents."""
    wanted = round(SPARE * build.peak_memory_bytes)
    while True:
        budget = -(-wanted // ROUND_TO) * ROUND_TO
        large_enough = max_document_bytes(budget) >= sample.largest_document_bytes
        if large_enough and _fits(budget, build.workers, tokenizer_bytes):
            return budget
        if budget > usable_memory():
            return usable_memory() // 10**6 * 10**6
        wanted = budget + 1


def _fits(budget: int, workers: int, tokenizer_bytes: int) -> bool:
    try:
        divide_budget(
            budget,
            tokenizer_bytes=tokenizer_bytes,
            most_workers=workers,
            least_workers=workers,
        )
    except MemoryBudgetError:
        return False
    return True


def _reasons(
    build: SweepPoint,
    pool: SweepPoint | None,
    batch: SweepPoint | None,
    *,
    memory: int,
    sample: SampleFacts,
) -> Iterable[str]:
    near = f"the smallest within {1 - NEAR_BEST:.0%} of the best"
    yield (
        f"tokenmill build --workers {build.workers}: {compact(build.tokens_per_second)} tokens/s,"
        f" {near}"
    )
    yield (
        f"--memory {memory // 10**6}MB: {format_size(build.peak_memory_bytes)} were used at the"
        f" peak, and the largest document seen has {format_size(sample.largest_document_bytes)}"
    )
    if memory > default_budget():
        yield (
            f"that is more than a quarter of this machine ({format_size(default_budget())}),"
            " which a build takes by itself"
        )
    if pool is not None:
        yield (
            f"a process pool: {count(pool.workers, 'worker')},"
            f" {compact(pool.tokens_per_second)} tokens/s, {near}"
        )
    if batch is not None:
        yield (
            f"batches in the loop: {count(batch.batch, 'sample')} a call,"
            f" {compact(batch.tokens_per_second)} tokens/s, {near}"
        )
