from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.loader import order
from tokenmill.loader.order import SHUFFLES, NearbyWindows, check_shuffle, ordered_rows, permuted

Order = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def make(shuffle: str, num_rows: int, **changes: Any) -> Order:
    facts = {"seed": 0, "source": "", "seq_len": 2048, **changes}
    return partial(ordered_rows, shuffle=shuffle, num_rows=num_rows, **facts)


def rows_of(order: Order, first: int, last: int) -> list[int]:
    rows, _ = order(np.arange(first, last))
    found: list[int] = rows.tolist()
    return found


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 5000), st.integers())
def test_a_permutation_is_a_bijection_for_any_size_and_key(size: int, seed: int) -> None:
    values = permuted(np.arange(size), size, key=str(seed))
    assert sorted(values.tolist()) == list(range(size))
    back = permuted(values, size, key=str(seed), inverse=True)
    assert back.tolist() == list(range(size))


@settings(deadline=None)
@given(st.integers(2**33, 2**44), st.lists(st.integers(0, 2**33 - 1), min_size=1, unique=True))
def test_a_permutation_of_trillions_is_inverted_by_its_inverse(
    size: int, indices: list[int]
) -> None:
    values = permuted(np.array(indices), size, key="large")
    assert values.min() >= 0
    assert values.max() < size
    assert permuted(values, size, key="large", inverse=True).tolist() == indices


@pytest.mark.slow
def test_every_order_of_four_rows_is_about_equally_likely() -> None:
    seen = Counter(tuple(permuted(np.arange(4), 4, key=str(k)).tolist()) for k in range(2400))
    assert set(seen) == set(permutations(range(4)))
    # 100 expected each; chi-square with 23 degrees of freedom exceeds 58 once in 10,000.
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 58


def test_neighbours_are_sent_far_apart() -> None:
    values = permuted(np.arange(20_000), 1_000_000, key="spread")
    gaps = np.abs(np.diff(values))
    assert 0.9 < gaps.mean() / (1_000_000 / 3) < 1.1
    counts, _ = np.histogram(values, bins=100, range=(0, 1_000_000))
    assert ((counts - 200) ** 2 / 200).sum() < 162  # chi-square, 99 degrees, 1 in 10,000


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SHUFFLES), st.integers(1, 700), st.integers(1, 9), st.integers(1, 7))
def test_every_epoch_holds_every_row_once(
    shuffle: str, num_rows: int, run_rows: int, window_runs: int
) -> None:
    made = make(shuffle, num_rows, seq_len=16, run_tokens=run_rows * 16, window_runs=window_runs)
    for epoch in (0, 1, 5):
        rows = rows_of(made, epoch * num_rows, (epoch + 1) * num_rows)
        assert sorted(rows) == list(range(num_rows))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SHUFFLES), st.integers(1, 300), st.integers(0, 500), st.integers(1, 300))
def test_any_stretch_of_the_order_is_that_of_the_whole(
    shuffle: str, num_rows: int, first: int, count: int
) -> None:
    made = make(shuffle, num_rows, seq_len=1 << 14)  # 8 rows to a run
    assert rows_of(made, first, first + count) == rows_of(made, 0, first + count)[first:]


def test_epochs_seeds_and_sources_have_orders_of_their_own() -> None:
    orders = [
        rows_of(make("full", 50), 0, 50),
        rows_of(make("full", 50), 50, 100),
        rows_of(make("full", 50, seed=1), 0, 50),
        rows_of(make("full", 50, source="code"), 0, 50),
        rows_of(make("block", 50), 0, 50),
    ]
    assert len({tuple(rows) for rows in orders}) == len(orders)


def test_no_shuffle_is_the_order_of_the_rows() -> None:
    rows, epochs = make("none", 3)(np.arange(7))
    assert rows.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert epochs.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_a_block_shuffle_reads_runs_of_rows() -> None:
    run = order.RUN_TOKENS // 2048
    window = run * order.WINDOW_RUNS
    rows = np.array(rows_of(make("block", 10 * window), 0, window))
    runs, counts = np.unique(rows // run, return_counts=True)
    assert len(runs) == order.WINDOW_RUNS
    assert (counts == run).all()
    assert runs.max() - runs.min() > 5 * order.WINDOW_RUNS, "the runs come from everywhere"
    assert np.abs(np.diff(rows // run)).mean() > order.WINDOW_RUNS, "rows of all runs are mixed"


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 900), st.integers(0, 900), st.integers(1, 5), st.integers(1, 9))
def test_nearby_rows_are_known_when_their_window_is_there(
    num_rows: int, more: int, run_rows: int, window_runs: int
) -> None:
    made = partial(make, "nearby", seq_len=16, run_tokens=run_rows * 16, window_runs=window_runs)
    whole = NearbyWindows(run_rows, window_runs).whole(num_rows)
    before, after = (rows_of(made(size), 0, whole) for size in (num_rows, num_rows + more))
    assert before == after
    assert sorted(before) == list(range(whole)), "in the order of the stream, window by window"
    assert num_rows - whole < run_rows * window_runs * 2


def test_nearby_windows_grow_from_one_run_and_later_epochs_are_mixed_as_blocks() -> None:
    rows = np.array(rows_of(make("nearby", 64 * 600), 0, 64 * 600)) // 64
    ends = [1, 3, 7, 15, 31, 63, 127, 255, 511, 600]
    for first, end in pairwise([0, *ends]):
        assert set(rows[first * 64 : end * 64].tolist()) == set(range(first, end))
    assert NearbyWindows.of(2048).end_of(64) == 3 * 64
    blocks = partial(rows_of, first=5000, last=9000)
    assert blocks(make("nearby", 5000)) == blocks(make("block", 5000)) != list(range(4000))


def test_the_order_of_a_seed_never_changes() -> None:
    """Golden: runs that were begun with an earlier release are resumed by these numbers."""
    assert rows_of(make("full", 10, seed=42), 0, 20) == GOLDEN_FULL
    far = make("full", 10**12, seed=-1, source="web")
    assert rows_of(far, 3 * 10**12, 3 * 10**12 + 4) == GOLDEN_FAR
    blocks = make("block", 11, seed=7, seq_len=1 << 15)
    assert rows_of(blocks, 0, 22) == GOLDEN_BLOCK
    assert rows_of(make("nearby", 11, seed=7, seq_len=1 << 15), 0, 11) == GOLDEN_NEARBY


def test_an_unknown_shuffle_says_what_there_is() -> None:
    assert [*map(check_shuffle, (True, False, "block"))] == ["full", "none", "block"]
    with pytest.raises(UsageError, match="shuffle='chunks' is not known"):
        check_shuffle("chunks")


GOLDEN_FULL = [7, 5, 9, 2, 8, 0, 4, 3, 6, 1, 9, 7, 6, 0, 1, 3, 4, 2, 5, 8]
GOLDEN_FAR = [655493592737, 413179012779, 575497889909, 854225460639]
GOLDEN_BLOCK = [8, 10, 3, 5, 0, 6, 7, 4, 1, 9, 2, 7, 9, 1, 8, 3, 10, 4, 5, 0, 2, 6]
GOLDEN_NEARBY = [0, 2, 3, 1, 9, 4, 5, 6, 10, 8, 7]
