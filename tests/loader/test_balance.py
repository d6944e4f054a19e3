"""Rows dealt by their cost: the same global batches, and no other rows after a resume."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store

from tokenmill.errors import StateError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage
from tokenmill.loader.order import dealt
from tokenmill.loader.packing import layout as lay_out
from tokenmill.loader.packing import pairs_of_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tokenmill.loader.batch import Batch
    from tokenmill.store.reader import Store

PACKINGS = ("concat", "best-fit", "pad")
Row = tuple[int, int, int]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Short documents mostly, some of a few rows."""
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / 6, 300)
    lengths[random.choice(300, 25, replace=False)] = random.integers(30, 150, 25)
    parts = np.array_split(lengths, 3)
    folder = tmp_path_factory.mktemp("balance")
    return numbered_store(folder / "store", [part.tolist() for part in parts])


def make(store: Store | Mixture, **options: Any) -> Loader:
    return Loader(store, **{"seq_len": 32, "batch_size": 2, "seed": 3, "prefetch": 0, **options})


def rows_of(batch: Batch) -> list[Row]:
    columns = (batch.sources, batch.epochs, batch.rows)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def ranks_of(store: Store | Mixture, world_size: int, **options: Any) -> list[Loader]:
    return [make(store, rank=r, world_size=world_size, **options) for r in range(world_size)]


def assert_same_updates(plain: Sequence[Loader], balanced: Sequence[Loader], steps: int) -> None:
    """Each update has the same rows, dealt otherwise; ranks and steps have as many as before."""
    accumulate = balanced[0].accumulate
    for first in range(0, steps, accumulate):
        update = range(first, min(first + accumulate, steps))
        theirs, ours = (
            [rows_of(loader.batch(step)) for loader in loaders for step in update]
            for loaders in (plain, balanced)
        )
        assert list(map(len, theirs)) == list(map(len, ours))
        assert Counter(itertools.chain(*theirs)) == Counter(itertools.chain(*ours))


# Dealing.


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks),
            st.integers(1, 5).flatmap(
                lambda size: st.lists(
                    st.integers(0, 10**9), min_size=ranks * size, max_size=ranks * size
                )
            ),
        )
    )
)
def test_every_row_is_dealt_once_and_no_exchange_of_two_rows_would_help(
    case: tuple[int, list[int]],
) -> None:
    ranks, costs = case
    places = dealt(np.array(costs), ranks)
    assert sorted(places.ravel().tolist()) == list(range(len(costs)))
    assert places.shape == (ranks, len(costs) // ranks)
    table = np.array(costs)[places]
    assert (np.diff(table, axis=1) <= 0).all()
    sums = table.sum(axis=1)
    most = int(sums.argmax())
    if sums[most] * ranks <= 1.001 * sums.sum():
        return
    for other, mine, theirs in itertools.product(range(ranks), *[range(table.shape[1])] * 2):
        change = table[most, mine] - table[other, theirs]
        assert max(sums[most] - change, sums[other] + change) >= sums[most] or change <= 0


def test_what_is_dealt_never_changes() -> None:
    """A run may be resumed by a later release, and inside an update."""
    costs = np.array([k * k * 7919 % 10_007 for k in range(24)])
    assert dealt(costs, 4).tolist() == [
        [12, 19, 8, 18, 2, 9],
        [21, 13, 23, 6, 3, 0],
        [1, 11, 17, 16, 14, 22],
        [5, 7, 4, 20, 10, 15],
    ]
    assert dealt(np.zeros(6, np.int64), 3).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert dealt(costs, 1).tolist() == [
        [21, 12, 1, 5, 7, 11, 13, 17, 19, 4, 8, 23, 16, 20, 6, 18, 2, 10, 3, 14, 9, 15, 22, 0]
    ]


def test_dealing_is_as_good_as_the_best_of_all_ways_or_nearly() -> None:
    random = np.random.default_rng(5)
    excess = []
    for _ in range(20):
        costs = random.lognormal(10, 1, 9).astype(np.int64)
        found = costs[dealt(costs, 3)].sum(axis=1).max()
        best = min(
            max(costs[list(a)].sum(), costs[list(b)].sum(), costs.sum() - costs[list(a + b)].sum())
            for a in itertools.combinations(range(9), 3)
            for b in itertools.combinations(sorted({*range(9)} - {*a}), 3)
        )
        excess.append(found / best)
    assert max(excess) < 1.12
    assert np.mean(excess) < 1.02


# What a row costs.


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_cost_of_a_row_is_counted_in_its_documents(store: Store, packing: str) -> None:
    for window, labels in ((None, "next"), (7, "next"), (None, "same"), (7, "same")):
        options = {"window": window, "labels": labels, "last": "keep"}
        loader = make(store, packing=packing, epochs=1, **options)
        layout = loader.layouts()[0]
        rows = np.arange(layout.num_rows)
        reach = None if window is None else np.full(len(rows), window)
        costs = pairs_of_rows(layout, rows, seq_len=32, reach=reach)
        for batch in loader:
            assert batch.attention_pairs == costs[batch.rows].sum()
            ids = batch.doc_ids
            for row, own in zip(batch.rows, ids, strict=True):
                lengths = [len(list(group)) for _, group in itertools.groupby(own.tolist())]
                parts = lengths
                if window is not None:
                    parts = [min(7, n - at) for n in lengths for at in range(0, n, 7)]
                assert costs[row] == sum(n * (n + 1) // 2 for n in parts)
    assert len(pairs_of_rows(layout, rows[:0], seq_len=32)) == 0


# Loaders.


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(1, 1), (2, 1), (3, 1), (5, 2), (2, 4), (1, 3)]
)
def test_a_balanced_global_batch_has_the_same_rows(
    store: Store, packing: str, world_size: int, accumulate: int
) -> None:
    epochs = 0.3 if packing == "pad" else 1.2
    plain = ranks_of(store, world_size, packing=packing, epochs=epochs)
    balanced = ranks_of(
        store,
        world_size,
        packing=packing,
        epochs=epochs,
        balance="attention",
        accumulate=accumulate,
    )
    assert len(plain[0]) == len(balanced[0])
    assert_same_updates(plain, balanced, len(plain[0]))
    # Iterating gives the batches of the steps, whatever is drawn together.
    for loader in balanced[:2]:
        for step, batch in enumerate(loader):
            assert rows_of(batch) == rows_of(loader.batch(step))
            if step % 3:
                continue
            origins = [(row.epoch, row.row) for row in loader.rows(step)]
            assert origins == [(epoch, row) for _, epoch, row in rows_of(batch) if row >= 0]
        for batch in loader.batches(first=1, stride=3):
            assert rows_of(batch) == rows_of(loader.batch(batch.step))


def test_balanced_ranks_are_more_even(store: Store) -> None:
    def slowest(**options: Any) -> float:
        loaders = ranks_of(store, 8, batch_size=4, **options)
        costs = [[loader.batch(step).attention_pairs for step in range(16)] for loader in loaders]
        per_update = np.array(costs).reshape(8, -1, 4).sum(axis=2)
        return float((per_update.max(axis=0) / per_update.mean(axis=0)).mean())

    today = slowest()
    within_steps = slowest(balance="attention")
    within_updates = slowest(balance="attention", accumulate=4)
    assert within_updates < 1.003
    assert within_updates < within_steps < 1 + (today - 1) / 2


def test_mixtures_and_stages_are_balanced_too(store: Store, tmp_path: Path) -> None:
    other = numbered_store(tmp_path / "other", [[3, 200, 5, 1, 90, 4, 4] * 6])
    stages = [Stage(tokens=1000), Stage(tokens=3000, seq_len=64, weights={"a": 0.2, "b": 0.8})]
    sources = {"a": (store, 0.7), "b": (other, 0.3)}
    mixture = Mixture(sources, stages=[*stages, Stage(tokens=1000)], max_epochs=9)
    for accumulate in (1, 3):
        plain = ranks_of(mixture, 2, batch_size=4)
        balanced = ranks_of(mixture, 2, batch_size=4, balance="attention", accumulate=accumulate)
        assert len(plain[0]) > 10
        assert_same_updates(plain, balanced, len(plain[0]))
        assert {batch.seq_len for batch in balanced[0]} == {32, 64}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_balanced_run_is_resumed_from_every_step(store: Store, accumulate: int) -> None:
    options: dict[str, Any] = {"balance": "attention", "accumulate": accumulate, "epochs": 1}
    loader = make(store, world_size=2, rank=1, **options)
    expected = [rows_of(batch) for batch in loader]
    plain = make(store, world_size=2, rank=1, epochs=1)
    loader.seek(0)
    for step in range(len(expected)):
        state = json.loads(json.dumps(loader.state_dict()))
        plain.seek(step)
        if step % accumulate == 0:
            # Nothing of the balance is in the state: a run may begin and end to be balanced.
            assert state == plain.state_dict()
            for other in (make(store, world_size=3, epochs=1), pickle.loads(pickle.dumps(plain))):
                other.load_state_dict(state)
        else:
            assert state["version"] == 2
        assert state["step"] == step
        again = make(store, world_size=2, rank=1, **options)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [rows_of(batch) for batch in again] == expected[step:]
        assert rows_of(next(loader.batches())) == expected[step]
        loader.seek(step + 1)


def test_no_row_is_lost_where_ranks_change_at_the_end_of_an_update(store: Store) -> None:
    whole = make(store, batch_size=24, epochs=2)
    for step in (0, 2, 4):
        first = ranks_of(store, 3, batch_size=4, epochs=2, balance="attention", accumulate=2)
        seen: Counter[Row] = Counter()
        for loader in first:
            for at in range(step):
                seen.update(rows_of(loader.batch(at)))
        first[0].seek(step)
        state = first[0].state_dict()
        # Twelve rows in each step and four steps in an update, where there were two: from here on.
        for loader in ranks_of(store, 2, batch_size=6, epochs=2, balance="attention", accumulate=4):
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            for batch in loader:
                seen.update(rows_of(batch))
                between = loader.state_dict()
                again = make(
                    store,
                    world_size=2,
                    rank=loader.rank,
                    batch_size=6,
                    epochs=2,
                    balance="attention",
                    accumulate=4,
                )
                again.load_state_dict(between)
                if loader.step < len(loader):
                    ours = next(loader.batches())
                    assert rows_of(next(again.batches())) == rows_of(ours)
        drawn: Counter[Row] = Counter()
        for batch in whole:
            drawn.update(rows_of(batch))
        for found in (seen, drawn):
            found.pop((-1, -1, -1), None)
        assert seen == drawn


def test_a_state_inside_an_update_is_not_for_another_way_of_dealing(store: Store) -> None:
    options: dict[str, Any] = {"balance": "attention", "accumulate": 4, "world_size": 2}
    loader = make(store, **options)
    loader.seek(5)
    state = loader.state_dict()
    for change in (
        {"world_size": 1, "batch_size": 4},
        {"batch_size": 3},
        {"accumulate": 2},
        {"accumulate": 1, "balance": None},
        {"window": 5},
    ):
        with pytest.raises(StateError, match="inside an update, after 1 of its 4 steps"):
            make(store, **{**options, **change}).load_state_dict(state)
    for damage in ({"steps": 4}, {"steps": 0}, {"steps": -1}, {"before": 9}, {"window": 3}):
        broken = {**state, "update": {**state["update"], **damage}}
        with pytest.raises(StateError, match="changed after it was saved"):
            make(store, **options).load_state_dict(broken)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"balance": "even"}, "balance='even' is not known"),
        ({"balance": True}, "balance=True is not known"),
        ({"accumulate": 2}, "nothing is without balance="),
        ({"accumulate": 0, "balance": "attention"}, "accumulate=0"),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    store: Store, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        make(store, **changes)


# Attention windows.


def windowed(loader: Loader) -> Iterator[tuple[int, int | None, Batch]]:
    tokens = 0
    for batch in loader:
        yield tokens, loader.window_at(batch.step), batch
        tokens += batch.input_ids.size * loader.world_size


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_window_adds_boundaries_and_changes_nothing_else(store: Store, packing: str) -> None:
    schedule = [(0, 5), (400, 12), (1000.0, None)]
    plain = iter(make(store, packing=packing, epochs=2))
    met = set()
    for tokens, reach, batch in windowed(make(store, packing=packing, epochs=2, window=schedule)):
        expected = [number for begin, number in schedule if begin <= tokens][-1]
        assert reach == expected
        met.add(reach)
        other = next(plain)
        for name in ("tokens", "labels", "position_ids", "doc_ids", "rows"):
            assert np.array_equal(getattr(batch, name), getattr(other, name))
        size = batch.input_ids.size
        starts = set(other.cu_seqlens.tolist()) - {size}
        for begin, end in itertools.pairwise([*sorted(starts), size]):
            starts |= set(range(begin, end, reach or size))
        assert batch.cu_seqlens[: len(starts)].tolist() == sorted(starts)
        assert set(batch.cu_seqlens[len(starts) :].tolist()) == {size}
        lengths = [n for n in np.diff(batch.cu_seqlens).tolist() if n]
        assert batch.num_documents == len(lengths)
        assert batch.attention_pairs == sum(n * (n + 1) // 2 for n in lengths)
        assert max(lengths) <= batch.max_seqlen <= (reach or 32)
        copy = pickle.loads(pickle.dumps(batch))
        assert copy.cu_seqlens.tolist() == batch.cu_seqlens.tolist()
        assert copy.attention_shape == batch.attention_shape
    assert met == {5, 12, None}


def test_a_schedule_of_windows_counts_tokens_through_stages_and_resumes(store: Store) -> None:
    stages = [Stage(tokens=1000), Stage(tokens=3000, seq_len=64)]
    mixture = Mixture({"a": (store, 1.0)}, stages=stages)
    options: dict[str, Any] = {"batch_size": 4, "window": [(0, 9), (500, 20), (2000, 50)]}
    loader = make(mixture, **options)
    expected = []
    for tokens, reach, batch in windowed(loader):
        assert reach == (9 if tokens < 500 else 20 if tokens < 2000 else 50)
        expected.append((tokens, batch.cu_seqlens.tolist()))
    assert {size for tokens, _ in expected for size in (tokens > 2000, tokens > 500)} == {
        False,
        True,
    }
    for step in range(len(expected)):
        loader.seek(step)
        state = loader.state_dict()
        again = make(mixture, **options)
        again.load_state_dict(state)
        sizes = [batch.cu_seqlens.tolist() for batch in again]
        assert sizes == [size for _, size in expected[step:]]
        # Half as many rows in a step: the window changes at the same token.
        halved = make(mixture, **{**options, "batch_size": 2})
        halved.load_state_dict(state)
        tokens = expected[step][0]
        for batch in halved:
            reach = 9 if tokens < 500 else 20 if tokens < 2000 else 50
            assert halved.window_at(batch.step) == reach
            tokens += batch.input_ids.size


def test_one_window_holds_for_the_whole_run(store: Store) -> None:
    loader = make(store, window=6)
    assert loader.window_at(0) == loader.window_at(10**6) == 6
    assert make(store, window=32).window_at(0) is None
    assert make(store).window_at(0) is None
    assert max(np.diff(loader.batch(3).cu_seqlens)) == 6
    most = [len(batch.cu_seqlens) for batch in map(loader.batch, range(0, 200, 7))]
    assert len(set(most)) <= 3


@pytest.mark.parametrize(
    "window",
    [
        0,
        -1,
        2.5,
        True,
        "8",
        [],
        [(1, 8)],
        [(0, 8), (0, 9)],
        [(0, 8), (9.5, 9)],
        [(0, 0)],
        [8],
        [(0, 8), (5, 2), (3, 1)],
    ],
)
def test_what_is_no_window_is_refused(store: Store, window: Any) -> None:
    with pytest.raises(UsageError, match="is no attention window"):
        make(store, window=window)


@pytest.mark.parametrize("last", ["pad", "keep"])
def test_rows_of_several_steps_are_gathered_as_they_are_dealt(store: Store, last: str) -> None:
    balanced: dict[str, Any] = {"balance": "attention", "accumulate": 3, "window": 9}
    for more in ({}, balanced):
        for loader in ranks_of(store, 2, batch_size=3, epochs=1, last=last, **more):
            for steps in ([0, 1, 2], [3], [1, 5, 6], [*range(len(loader))]):
                expected = [row for step in steps for row in rows_of(loader.batch(step))]
                batch = loader.gather(steps)
                assert rows_of(batch) == expected
                assert max(np.diff(batch.cu_seqlens)) <= (9 if more else 32)


# What `tokenmill layout` says before a run.


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_load_of_ranks_is_that_of_a_loaders_batches(store: Store, packing: str) -> None:
    report = lay_out(store, seq_len=32, packings=[packing], batch_size=24, ranks=4, width=1)
    [load] = report.loads
    assert (load.packing, load.ranks, load.rows) == (packing, 4, 6)
    for expected, most, more in (
        (load.as_drawn, load.as_drawn_most, {}),
        (load.balanced, load.balanced_most, {"balance": "attention"}),
    ):
        loaders = ranks_of(store, 4, batch_size=6, packing=packing, **{"seed": 0, **more})
        costs = [
            [loader.batch(step).attention_pairs + 6 * 32 * 6 for loader in loaders]
            for step in range(load.updates)
        ]
        found = np.max(costs, axis=1) / np.mean(costs, axis=1)
        assert np.isclose(found.mean(), expected)
        assert np.isclose(found.max(), most)
    assert 1 <= load.least <= load.balanced + 1e-12 <= load.as_drawn
    assert not lay_out(store, seq_len=32).loads
    # Of three steps in one update, the same rows are dealt.
    update = lay_out(store, seq_len=32, packings=[packing], batch_size=72, ranks=4, width=1).loads[
        0
    ]
    assert update.rows == 18
    assert update.balanced <= load.balanced


def test_rows_that_do_not_come_out_even_for_ranks_are_refused(store: Store) -> None:
    for batch_size in (6, 3):
        with pytest.raises(UsageError, match="whole number of rows for each of 4 ranks"):
            lay_out(store, seq_len=32, batch_size=batch_size, ranks=4)
    for ranks, width in ((0, 8), (2, 0)):
        with pytest.raises(UsageError, match="is not a whole number of 1 or more"):
            lay_out(store, seq_len=32, ranks=ranks, width=width)


def test_a_run_that_was_resumed_is_resumed_from_every_step_of_its_stages(store: Store) -> None:
    stages = [Stage(tokens=tokens, seq_len=seq_len) for tokens, seq_len in ((700, 32), (900, 64))]
    mixture = Mixture({"a": (store, 1.0)}, stages=[*stages, Stage(tokens=1500, seq_len=32)])
    begun = make(mixture, batch_size=4)
    begun.seek(2)
    options: dict[str, Any] = {"batch_size": 2, "balance": "attention", "accumulate": 4}
    loader = make(mixture, **options)
    loader.load_state_dict(begun.state_dict())
    states: list[dict[str, Any]] = []
    expected, versions = [], []
    for batch in loader:
        expected.append(rows_of(batch))
        states.append(loader.state_dict())
        versions.append(states[-1]["version"])
    assert versions.count(2) > 20
    assert {state["update"]["before"] for state in states if "update" in state} > {0}
    for place, state in enumerate(states, start=1):
        again = make(mixture, **options)
        again.load_state_dict(state)
        assert again.state_dict() == state
        if place < len(states):
            assert [rows_of(batch) for batch in again] == expected[place:]
