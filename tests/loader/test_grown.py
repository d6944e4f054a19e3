"""A run whose store grew: the epoch ends as it would have, the next one has what was added."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import write_store
from tests.loader.test_trace import place_of

import tokenmill
from tokenmill.errors import StateError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage
from tokenmill.loader.order import ordered_rows
from tokenmill.loader.packing import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tokenmill.store.reader import Store

# Shards by the names of their files, and when each came; in the order of their names.
ADDED = {
    "web": {"a": 1, "b": 0, "c": 2, "d": 0},
    "code": {"k": 0, "l": 1},
}
LENGTHS = {
    "a": [7, 30, 4],
    "b": [3, 0, 9, 1, 40, 17, 2],
    "c": [12, 12],
    "d": [8, 8, 16, 5, 9, 33, 7, 1, 6],
    "k": [25, 4, 11, 9],
    "l": [30, 1, 2, 28],
}
TIMES = 3


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Store]]:
    """Stores that grew, as they were each time; no two of their tokens are the same."""
    folder, position = tmp_path_factory.mktemp("grown"), 0
    shards = dict[str, list[range]]()
    for name, lengths in LENGTHS.items():
        shards[name] = []
        for length in lengths:
            shards[name].append(range(position, position + length))
            position += length
    for store, added in ADDED.items():
        for time in range(TIMES):
            names = [name for name in added if added[name] <= time]
            paths = [f"{name}.jsonl" for name in names]
            write_store(folder / store, [shards[name] for name in names], paths=paths)
    found = []
    for time in range(TIMES):  # one that did not grow a second time has one snapshot
        kept = {name: tokenmill.Store(folder / name).snapshots() for name in ADDED}
        numbers = {n: each[time].name if time < len(each) else None for n, each in kept.items()}
        found.append({n: tokenmill.Store(folder / n, snapshot=s) for n, s in numbers.items()})
    return found


def source_of(stores: dict[str, Store], mixed: object, caps: Any = None) -> Any:
    if not mixed:
        return stores["web"]
    return Mixture({name: (stores[name], 1 + k) for k, name in enumerate(stores)}, max_epochs=caps)


OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([1, 2, 6]),
        "world_size": st.sampled_from([1, 2]),
        "packing": st.sampled_from([*LAYOUTS]),
        "shuffle": st.sampled_from(["full", "block", "nearby", "none"]),
        "labels": st.sampled_from(["next", "same"]),
        "seed": st.integers(0, 2),
        "balance": st.sampled_from([None, "attention"]),
    }
)


def opened(source: Any, given: dict[str, Any], **more: Any) -> Loader:
    return Loader(source, seq_len=8, prefetch=0, **{**given, **more})


def expected_rows(loader: Loader, name: str, eras: Sequence[tuple[Loader, int]]) -> Iterator[bytes]:
    """Rows of a source, epoch for epoch, by the loaders of what it held and until when."""
    epoch, place = 0, loader.mixture.names.index(name)
    while True:
        held = next(each for each, until in eras if epoch < until)
        layout = held.layouts()[place]
        rows, _ = ordered_rows(
            np.arange(epoch * layout.num_rows, (epoch + 1) * layout.num_rows),
            shuffle=loader.shuffle,
            seed=loader.seed,
            source=name,
            num_rows=layout.num_rows,
            seq_len=8,
        )
        for row in rows.tolist():
            starts, lengths = layout.segments(np.array([row]))
            stream = np.concatenate(list(held.mixture.stores[place]))
            parts = [
                stream[start : start + length] if start >= 0 else np.full(length, loader.pad_id)
                for start, length in zip(starts, lengths, strict=True)
            ]
            yield np.concatenate(parts).astype(np.int64).tobytes()
        epoch += 1


def rows_of(state: Any, given: dict[str, Any], source: Any, steps: range) -> list[Any]:
    """Source and tokens of the rows of steps, over all ranks."""
    found: list[Any] = [[] for _ in steps]
    for rank in range(given["world_size"]):
        loader = opened(source, given, rank=rank)
        loader.load_state_dict(state)
        for of_step, batch in zip(found, loader.batches(), strict=False):
            names = [loader.mixture.names[place] for place in batch.sources.ravel()]
            tokens = [row.astype(np.int64).tobytes() for row in batch.tokens]
            of_step += zip(names, tokens, strict=True)
    return found


@settings(deadline=None, max_examples=30)
@given(
    given=OPTIONS,
    mixed=st.booleans(),
    first=st.integers(0, 70),
    second=st.integers(0, 40),
    of_batch=st.sampled_from([0, 4]),
)
def test_a_run_goes_on_with_what_its_store_held_until_the_epoch_ends(
    times: list[dict[str, Store]],
    given: dict[str, Any],
    mixed: bool,
    first: int,
    second: int,
    of_batch: int,
) -> None:
    sources = [source_of(each, mixed) for each in times]
    before = [opened(source, given) for source in sources]
    rows = before[0].batch_size * before[0].world_size
    first //= rows
    # What comes when, counted row by row.
    begun = 0 if first else 1 if second // rows else 2  # how much there was when the run began
    whole = opened(sources[begun], given, batch_size=rows, world_size=1)
    endless = islice(whole, 240 // rows)
    order = [whole.mixture.names[k] for batch in endless for k in batch.sources]
    before[0].seek(first)
    state, drawn, eras, reached = before[0].state_dict(), 0, {}, Counter[str]()
    for name in before[0].mixture.names:
        eras[name] = list[tuple[Loader, int]]()
    at = first
    for time, grows_at in ((1, first), (2, first + second // rows)):
        drawn = grows_at * rows
        now = opened(sources[time], given)
        if grows_at > at:
            other = opened(sources[time - 1], given)
            other.load_state_dict(state)
            other.seek(grows_at)
            state, at = other.state_dict(), grows_at
        now.load_state_dict(state)
        state = now.state_dict()
        reached = Counter(order[:drawn])
        for place, name in enumerate(now.mixture.names):
            left, until = reached[name], 0
            while left > 0:  # epochs begun
                held = next((e for e, end in eras[name] if until < end), before[time - 1])
                count = held.layouts()[place].num_rows
                left, until = left - count, until + 1
            # Shares are what they were: also of a source that has not been drawn from.
            until = max(until, drawn > 0)
            if until > (eras[name][-1][1] if eras[name] else 0):
                eras[name].append((before[time - 1], until))
    latest = opened(sources[2], given)
    made = {name: expected_rows(latest, name, [*eras[name], (before[2], 10**9)]) for name in eras}
    expected = [(name, next(made[name])) for name in order]
    steps = range(at, min(at + 90 // rows, len(order) // rows))
    found = rows_of(state, given, sources[2], steps)
    for step, of_step in zip(steps, found, strict=True):
        want = expected[step * rows : (step + 1) * rows]
        if given["balance"]:
            of_step, want = sorted(of_step), sorted(want)
        assert of_step == want, (step, first, second)
    # Another batch size goes on at the same row.
    if of_batch and not given["balance"]:
        other = opened(sources[2], given, batch_size=of_batch, world_size=1)
        other.load_state_dict(state)
        tokens = [row.astype(np.int64).tobytes() for b in islice(other, 9) for row in b.tokens]
        assert tokens == [row for _, row in expected[at * rows :][: len(tokens)]]


STAGES = [
    Stage(tokens=8 * 30),
    Stage(tokens=8 * 40, weights={"web": 0.2, "code": 0.8}),
    Stage(tokens=8 * 50, seq_len=16),
    Stage(weights={"web": 1, "code": 0}, seq_len=4),
]


@settings(deadline=None, max_examples=20)
@given(
    given=OPTIONS,
    stages=st.sampled_from([None, [], STAGES]),
    parts=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    more=st.sampled_from([{}, {"batch_size": 4, "world_size": 1, "balance": None}]),
)
def test_documents_are_traced_through_what_a_store_held(
    times: list[dict[str, Store]],
    given: dict[str, Any],
    stages: list[Stage] | None,
    parts: tuple[int, int],
    more: dict[str, Any],
) -> None:
    def source(time: int) -> Any:
        if stages is None:
            return times[time]["web"]
        pairs = {name: (store, 1) for name, store in times[time].items()}
        return Mixture(pairs, stages=stages, max_epochs=3)

    given = {**given, "batch_size": 4}
    epochs = {"epochs": 3} if stages is None else {}
    state: Any = None
    for time, part in enumerate((*parts, 0)):
        given = {**given, **(more if time == 1 else {})}
        loader = opened(source(time), given, **epochs)
        if state is not None:
            loader.load_state_dict(state)
        assert loader.num_steps is not None
        left = loader.num_steps - loader.step
        loader.seek(loader.step + left * part // 200)
        state = loader.state_dict()
    ranks = [opened(source(2), given, rank=rank, **epochs) for rank in range(given["world_size"])]
    for each in ranks:
        each.load_state_dict(state)
    first, end = ranks[0]._plan.origin_step, loader.num_steps
    assert end is not None
    expected = defaultdict(set)  # by the rows of files: numbers of documents are others each time
    for step in range(first, end):
        for rank, each in enumerate(ranks):
            for place, row in enumerate(each.rows(step)):
                for held in row.parts:
                    expected[row.source, held.source.path, held.source.row].add(
                        (step, rank, place, held.at, held.first_token, held.tokens, row.epoch)
                    )
    for name, store in zip(loader.mixture.names, loader.mixture.stores, strict=True):
        for document in range(len(store)):
            found = [place_of(each) for each in loader.trace(document, source=name)]
            shown = [each[:7] for each in found if each[0] is not None]
            origin = store.source(document)
            assert len(set(shown)) == len(shown)
            assert set(shown) == expected.pop((name, origin.path, origin.row), set())
    assert not expected


def test_the_end_of_an_epoch_and_what_follows_are_told(times: list[dict[str, Store]]) -> None:
    given: Any = {"seq_len": 8, "batch_size": 4, "prefetch": 0}
    old, new = (Loader(each["web"], epochs=3, **given) for each in times[:2])
    old.seek(2)
    new.load_state_dict(old.state_dict())
    (growth,) = new.growth()
    rows = [each.layouts()[0].num_rows for each in (old, new)]
    assert (growth.source, growth.epoch, growth.step) == ("", 1, rows[0] // 4)
    assert (growth.documents_before, growth.documents) == (16, 19)
    assert new.num_steps == -(-(rows[0] + 2 * rows[1]) // 4)
    assert new.state_dict()["seen"][""]["epochs"] == 8 / rows[0]
    epochs = np.concatenate([batch.epochs.ravel() for batch in new.batches(first=0)])
    assert Counter(epochs.tolist())[0] == rows[0]
    assert Counter(epochs.tolist())[1] == rows[1]
    assert growth.step is not None
    new.seek(growth.step + 1)
    assert new.growth() == []
    # On the store as it was the state is what it was.
    again = Loader(times[0]["web"], epochs=3, **given)
    again.load_state_dict(old.state_dict())
    assert again.growth() == []
    assert old.state_dict() == again.state_dict()


def test_a_state_of_what_is_kept_no_more_is_refused_until_its_epoch_has_ended(
    tmp_path: Path,
) -> None:
    shards = [[range(k * 10, k * 10 + 10) for k in range(9)], [range(100, 150)]]
    given: Any = {"seq_len": 8, "batch_size": 2, "prefetch": 0}
    old = Loader(write_store(tmp_path, shards[:1]), **given)
    old.seek(3)
    state = old.state_dict()
    new = Loader(write_store(tmp_path, shards), **given)
    new.load_state_dict(state)
    (growth,) = new.growth()
    new.seek((growth.step or 0) + 2)
    later = new.state_dict()
    expected = [batch.tokens.tolist() for batch in islice(new, 9)]
    tokenmill.prune(tmp_path)
    pruned = Loader(tmp_path, **given)
    with pytest.raises(StateError, match="does not hold what it held") as caught:
        pruned.load_state_dict(state)
    assert "tokenmill prune" in str(caught.value.hint)
    pruned.load_state_dict(later)
    assert [batch.tokens.tolist() for batch in islice(pruned, 9)] == expected
    with pytest.raises(StateError, match="does not keep what it held until epoch 1"):
        pruned.batch(0)
    with pytest.raises(StateError, match="does not keep what it held until epoch 1"):
        list(islice(pruned.trace(0), 3))
