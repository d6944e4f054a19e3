from __future__ import annotations

import dataclasses

import pytest

from tokenmill.builder.plan import divide_budget, whole_bytes, worker_counts
from tokenmill.diagnosis.diagnose import (
    memory_for,
    points,
    recommend,
    smallest_near_best,
)
from tokenmill.diagnosis.values import SampleFacts, WayResult

SAMPLE = SampleFacts(
    files=1,
    input_bytes=10**9,
    estimated_text_bytes=10**9,
    documents=1000,
    text_bytes=10**7,
    rejected=0,
    largest_document_bytes=10_000,
)


def point(key: str, workers: int, rate: int, *, batch: int = 64, memory: int = 0) -> WayResult:
    return WayResult(
        key=key,
        title=key,
        engine="tokenizers",
        in_loop=False,
        feeds=True,
        workers=workers,
        batch=batch,
        tokens=rate,
        seconds=1.0,
        peak_memory_bytes=memory,
    )


@pytest.mark.parametrize(
    ("cores", "counts"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 2, 4, 6)),
        (8, (1, 2, 4, 8)),
        (96, (1, 2, 4, 8, 16, 32, 64, 96)),
    ],
)
def test_worker_counts_double_up_to_the_cores(cores: int, counts: tuple[int, ...]) -> None:
    assert worker_counts(cores) == counts


def test_the_smallest_setting_that_is_nearly_the_best_wins() -> None:
    tried = [point("build", n, rate) for n, rate in ((1, 50), (2, 96), (4, 100), (8, 99))]
    best = smallest_near_best(tried)
    assert best is not None
    assert best.workers == 2
    assert smallest_near_best([]) is None
    # One that differs from the best by no more than its own rounds do is as good.
    noisy = dataclasses.replace(tried[0], rates=(40, 45, 50, 98, 99))
    assert smallest_near_best([noisy, *tried[1:]]) == noisy


def test_memory_is_what_was_seen_and_some_more_in_round_numbers() -> None:
    seen = point("build", 2, 1, memory=2 * 10**9)
    assert memory_for(seen, sample=SAMPLE, tokenizer_bytes=10**6) == 2_500_000_000


def test_memory_is_never_so_small_that_the_build_refuses_it() -> None:
    budget = memory_for(point("build", 4, 1, memory=10**7), sample=SAMPLE, tokenizer_bytes=10**7)
    plan = divide_budget(budget, tokenizer_bytes=10**7, most_workers=4, least_workers=4)
    assert plan.workers == 4


def test_memory_is_never_so_small_that_the_largest_document_is_rejected() -> None:
    large = dataclasses.replace(SAMPLE, largest_document_bytes=3_000_000)
    budget = memory_for(point("build", 1, 1, memory=10**8), sample=large, tokenizer_bytes=10**6)
    assert whole_bytes(budget) >= 3_000_000


def test_a_recommendation_needs_a_build_that_was_measured() -> None:
    assert recommend([point("pool", 1, 5)], sample=SAMPLE, tokenizer_bytes=1) is None
    found = recommend(
        [point("pool", 1, 5), point("pool", 2, 9), point("build", 2, 90, memory=10**9)],
        sample=SAMPLE,
        tokenizer_bytes=10**6,
    )
    assert found is not None
    assert (found.build_workers, found.pool_workers, found.batch) == (2, 2, None)
    assert any(f"--memory {found.build_memory_bytes // 10**6}MB" in why for why in found.reasons)


def test_settings_that_failed_are_left_out_and_each_is_there_once() -> None:
    way = point("pool", 2, 10)
    failed = dataclasses.replace(way, workers=4, problem="no")
    found = points([way, failed, way, point("loader", 1, 9), point("batched", 2, 5)])
    assert [(each.key, each.workers) for each in found] == [("batched", 2), ("pool", 2)]
