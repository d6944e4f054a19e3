from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.builder.plan import (
    budget_with,
    divide_budget,
    max_document_bytes,
    usable_memory,
)
from tokenmill.errors import MemoryBudgetError
from tokenmill.sources.base import MEGABYTE
from tokenmill.words import parse_size


def test_one_and_a_half_gigabytes_are_enough_for_two_workers_with_a_large_vocabulary() -> None:
    plan = divide_budget(parse_size("1.5GB"), tokenizer_bytes=11_500_000, most_workers=2)
    assert plan.workers == 2
    assert plan.batch_bytes >= MEGABYTE


@given(
    budget=st.integers(300, 100_000).map(lambda mb: mb * 10**6),
    tokenizer_bytes=st.integers(0, 40_000_000),
    workers=st.integers(1, 64),
)
def test_shares_never_exceed_the_budget(budget: int, tokenizer_bytes: int, workers: int) -> None:
    try:
        plan = divide_budget(budget, tokenizer_bytes=tokenizer_bytes, most_workers=workers)
    except MemoryBudgetError:
        return
    assert 1 <= plan.workers <= workers
    assert plan.workers * plan.worker_bytes + 8 * plan.max_document_bytes < budget


@given(tokenizer_bytes=st.integers(0, 40_000_000), workers=st.integers(1, 16))
def test_the_smallest_budget_that_the_refusal_names_works(
    tokenizer_bytes: int, workers: int
) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        divide_budget(
            20 * 10**6,
            tokenizer_bytes=tokenizer_bytes,
            most_workers=workers,
            least_workers=workers,
        )
    named = re.search(r"--memory (\d+MB)", caught.value.hint or "")
    assert named is not None
    smallest = parse_size(named[1])
    plan = divide_budget(
        smallest, tokenizer_bytes=tokenizer_bytes, most_workers=workers, least_workers=workers
    )
    assert plan.workers == workers
    with pytest.raises(MemoryBudgetError):
        divide_budget(
            smallest - 30 * 10**6,
            tokenizer_bytes=tokenizer_bytes,
            most_workers=workers,
            least_workers=workers,
        )


def test_the_largest_document_does_not_depend_on_the_workers() -> None:
    one = divide_budget(4 * 10**9, tokenizer_bytes=10**6, most_workers=1)
    many = divide_budget(4 * 10**9, tokenizer_bytes=10**6, most_workers=8)
    assert one.max_document_bytes == many.max_document_bytes == max_document_bytes(4 * 10**9)


def test_usable_memory_is_a_plausible_amount() -> None:
    assert 100 * MEGABYTE < usable_memory() < 1 << 50


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process")
def test_a_limit_makes_allocations_fail_until_it_is_taken_back() -> None:
    # In a process of its own: what other tests hold would count.
    code = """if True:
        import numpy as np, pyarrow as pa
        from tokenmill.builder.plan import limit_memory
        take_back = limit_memory(300 << 20)
        for allocate in (lambda: np.ones(400 << 20, np.uint8), lambda: bytearray(400 << 20),
                         lambda: pa.allocate_buffer(400 << 20)):
            try:
                allocate()
            except MemoryError:
                print("refused")
        take_back()
        print(len(np.ones(400 << 20, np.uint8)))
    """
    environment = {**os.environ, "MIMALLOC_ARENA_EAGER_COMMIT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["refused", "refused", "refused", str(400 << 20)]


@given(
    budget=st.integers(450, 8_000).map(lambda mb: mb * 10**6),
    workers=st.integers(1, 8),
    more=st.integers(1, 4_000_000_000),
)
@example(budget=1_116_000_000, workers=4, more=280_455_017)
def test_the_budget_that_a_refusal_names_has_room_enough(
    budget: int, workers: int, more: int
) -> None:
    plan = divide_budget(budget, tokenizer_bytes=0, most_workers=workers)
    larger = divide_budget(
        parse_size(budget_with(plan, more)), tokenizer_bytes=0, most_workers=plan.workers
    )
    assert larger.room_bytes >= plan.room_bytes + more
