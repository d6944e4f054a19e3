"""Where documents are shown is what `rows` says of every step, the other way round."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store

from tokenmill.errors import UsageError
from tokenmill.loader.loader import Loader, Showing
from tokenmill.loader.mixture import Mixture, Stage
from tokenmill.loader.order import SHUFFLES, MixtureSchedule, ordered_rows, places_of_rows
from tokenmill.loader.packing import LAYOUTS
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenmill.store.reader import Store

Place = tuple[int | None, ...]
LENGTHS = {
    "web": [[3, 0, 9, 1, 40, 17, 2], [], [8, 8, 16, 5, 9, 33, 7, 1, 6]],
    "code": [[25, 4, 11, 9], [30, 1, 2]],
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    root = tmp_path_factory.mktemp("trace")
    return {name: numbered_store(root / name, lengths) for name, lengths in LENGTHS.items()}


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 400),
    run_tokens=st.integers(1, 40),
    window_runs=st.integers(1, 9),
    shuffle=st.sampled_from(SHUFFLES),
    epoch=st.integers(0, 3),
)
def test_places_of_rows_invert_every_shuffle(
    num_rows: int, run_tokens: int, window_runs: int, shuffle: str, epoch: int
) -> None:
    facts: dict[str, Any] = {
        "shuffle": shuffle,
        "seed": 3,
        "source": "s",
        "num_rows": num_rows,
        "seq_len": 4,
        "run_tokens": run_tokens,
        "window_runs": window_runs,
    }
    places = np.arange(num_rows)
    rows, _ = ordered_rows(epoch * num_rows + places, **facts)
    assert sorted(rows.tolist()) == places.tolist()
    assert places_of_rows(rows, epoch, **facts).tolist() == places.tolist()


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_rows_of_a_schedule_are_found_by_their_sources(data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
    first = data.draw(st.lists(st.integers(0, 9), min_size=len(parts), max_size=len(parts)))
    more = st.none() | st.integers(0, 12)
    limits = [None if (left := data.draw(more)) is None else start + left for start in first]
    schedule = MixtureSchedule(parts, first=first, limits=limits)
    rows = np.arange(80 if schedule.num_rows is None else min(80, schedule.num_rows))
    sources, indices = schedule.locate(rows)
    for source in range(len(parts)):
        mine = sources == source
        assert schedule.rows_at(source, indices[mine]).tolist() == rows[mine].tolist()
        limit = limits[source]
        never = [first[source] - 1] + ([] if limit is None else [max(limit, first[source])])
        assert (schedule.rows_at(source, np.array(never)) == -1).all()


@pytest.mark.parametrize("packing", LAYOUTS)
@pytest.mark.parametrize("seq_len", [1, 3, 8, 100])
def test_rows_that_hold_a_document_are_those_whose_segments_are_of_it(
    stores: dict[str, Store], packing: str, seq_len: int
) -> None:
    stream = TokenStream(stores["web"])
    layout = LAYOUTS[packing](stream, seq_len=seq_len)
    expected = defaultdict(list)
    for row in range(layout.num_rows):
        at = 0
        for start, length in zip(*layout.segments(np.array([row])), strict=True):
            if start >= 0:
                number = stream.document_at(int(start))
                first = int(start) - stream.document_span(number)[0]
                expected[number].append((row, at, first, int(length)))
            at += int(length)
    assert len(expected) > 10
    for number in range(len(stores["web"])):
        held = layout.holding(number)
        found = list(zip(*(column.tolist() for column in held), strict=True))
        assert sorted(found) == sorted(expected[number])


def brute_force(loaders: list[Loader], steps: Iterable[int]) -> dict[tuple[str, int], set[Place]]:
    """What every rank says of every step."""
    found: dict[tuple[str, int], set[Place]] = defaultdict(set)
    for step in steps:
        for rank, loader in enumerate(loaders):
            batch = loader.batch(step)
            for place, origin in enumerate(loader.rows(step)):
                of_row = origin.epoch, origin.row, batch.seq_len
                for part in origin.parts:
                    found[origin.source, part.document].add(
                        (step, rank, place, part.at, part.first_token, part.tokens, *of_row)
                    )
    return found


def place_of(each: Showing) -> Place:
    return (
        *(each.step, each.rank, each.place, each.at, each.first_token, each.tokens),
        *(each.epoch, each.row, each.seq_len),
    )


STAGES = [
    Stage(tokens=8 * 50),
    Stage(tokens=8 * 40, weights={"web": 0.2, "code": 0.8}),
    Stage(tokens=8 * 50, seq_len=16),
    Stage(weights={"web": 1, "code": 0}, seq_len=4),
]


@st.composite
def loaders(draw: st.DrawFn, stores: dict[str, Store]) -> list[Loader]:
    world = draw(st.sampled_from([1, 2, 3]))
    balance = draw(st.sampled_from([None, None, "attention"]))
    given: dict[str, Any] = {
        "seq_len": 8,
        "batch_size": draw(st.sampled_from([2, 4, 6])),
        "world_size": world,
        "packing": draw(st.sampled_from([*LAYOUTS])),
        "shuffle": draw(st.sampled_from(SHUFFLES)),
        "labels": draw(st.sampled_from(["next", "same"])),
        "last": draw(st.sampled_from(["pad", "keep", "drop"])),
        "seed": draw(st.integers(0, 3)),
        "balance": balance,
        "accumulate": 1 if balance is None else draw(st.sampled_from([1, 3])),
        "prefetch": 0,
    }
    caps: Any = draw(st.sampled_from([3, {"web": 2.5, "code": 7}]))
    weights = draw(st.sampled_from([(1, 1), (0.3, 0.7), (0, 1)]))
    pairs = {name: (stores[name], weight) for name, weight in zip(stores, weights, strict=True)}
    stages = draw(st.sampled_from([[], STAGES]))
    source: Any = stores["web"]
    if draw(st.booleans()):
        source = Mixture(pairs, stages=stages, max_epochs=caps)
    else:
        given["epochs"] = draw(st.sampled_from([2, 2.5]))
    return [Loader(source, rank=rank, **given) for rank in range(world)]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_document_is_shown_where_the_rows_of_all_ranks_have_it(
    stores: dict[str, Store], data: st.DataObject
) -> None:
    made = data.draw(loaders(stores))
    require_inverse(made, made[data.draw(st.integers(0, len(made) - 1))])


def require_inverse(made: list[Loader], tracer: Loader) -> None:
    """One of the loaders of all ranks traces every document to where the rows of all have it."""
    steps = made[0].num_steps
    assert steps is not None
    expected = brute_force(made, range(steps))
    assert expected
    for source, store in zip(tracer.mixture.names, tracer.mixture.stores, strict=True):
        for document in range(len(store)):
            shown = list(map(place_of, tracer.trace(document, source=source)))
            assert len(set(shown)) == len(shown)
            assert set(shown) == expected[source, document]
            if tracer.balance is None:
                assert [each[0] for each in shown] == sorted(each[0] or 0 for each in shown)


@pytest.mark.parametrize("packing", LAYOUTS)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 3))]
)
def test_every_packing_shuffle_and_number_of_ranks_is_traced_of_a_store_mixture_and_stages(
    stores: dict[str, Store], packing: str, shuffle: str, world_size: int
) -> None:
    pairs = {"web": (stores["web"], 0.3), "code": (stores["code"], 0.7)}
    sources: list[tuple[Any, float | None]] = [(stores["web"], 2)]
    sources += [(Mixture(pairs, stages=stages, max_epochs=2), None) for stages in ([], STAGES)]
    for source, epochs in sources:
        open_rank = partial(
            Loader,
            source,
            world_size=world_size,
            packing=packing,
            shuffle=shuffle,
            epochs=epochs,
            seq_len=8,
            batch_size=4,
            prefetch=0,
        )
        made = [open_rank(rank=rank) for rank in range(world_size)]
        require_inverse(made, made[-1])


@settings(deadline=None, max_examples=25)
@given(data=st.data(), before=st.sampled_from([2, 3]), after=st.sampled_from([4, 8]))
def test_after_a_resume_with_another_batch_size_rows_of_before_are_known_without_their_steps(
    stores: dict[str, Store], data: st.DataObject, before: int, after: int
) -> None:
    pairs = {name: (store, 1) for name, store in stores.items()}
    mixture = Mixture(pairs, stages=STAGES, max_epochs=3)
    packing = data.draw(st.sampled_from([*LAYOUTS]))
    first = Loader(mixture, seq_len=8, batch_size=2 * before, packing=packing, prefetch=0)
    steps = first.num_steps
    assert steps is not None
    at = data.draw(st.integers(1, steps - 1))
    first.seek(at)
    loader = Loader(mixture, seq_len=8, batch_size=after, packing=packing, prefetch=0)
    loader.load_state_dict(first.state_dict())
    last = loader.num_steps
    assert last is not None
    old, new = brute_force([first], range(at)), brute_force([loader], range(at, last))
    for source, store in stores.items():
        for document in range(len(store)):
            shown = list(map(place_of, loader.trace(document, source=source)))
            # A plan of the same rows in each step goes on as the first one.
            rows = sorted(each[3:] for each in shown if each[0] is None or each[0] < at)
            assert rows == sorted(each[3:] for each in old[source, document])
            assert {e for e in shown if e[0] is not None and e[0] >= at} == new[source, document]


def test_an_endless_run_is_traced_as_far_as_one_looks(stores: dict[str, Store]) -> None:
    loader = Loader(stores["web"], seq_len=8, batch_size=4)
    shown = list(takewhile(lambda each: (each.step or 0) < 100, loader.trace(4)))
    assert len({each.epoch for each in shown}) > 10
    expected = brute_force([loader], range(100))["", 4]
    assert set(map(place_of, shown)) == expected
    assert list(loader.trace(1)) == []  # it has no token: no end is waited for


def test_what_cannot_be_traced_is_refused(stores: dict[str, Store]) -> None:
    loader = Loader(stores["web"], seq_len=8, batch_size=4)
    for wrong in (-1, 16):
        with pytest.raises(UsageError, match="there is no document"):
            loader.trace(wrong)
    mixture = Mixture({name: (store, 1) for name, store in stores.items()})
    mixed = Loader(mixture, seq_len=8, batch_size=4)
    for name in (None, "wiki"):
        with pytest.raises(UsageError, match="does not say which store"):
            mixed.trace(0, source=name)
