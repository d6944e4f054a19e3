"""Loaders that are stopped and resumed at random, and given states that no loader saved."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import attack, tried
from tests.hostile.test_stores import VALUES, change
from tests.loader.stores import numbered_store

from tokenmill.errors import StateError, TokenmillError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage, _checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenmill.store.reader import Store

SEQ_LEN = 8


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    root = tmp_path_factory.mktemp("stores")
    dice = random.Random(0)
    lengths = [[dice.randrange(0, 40) for _ in range(25)] for _ in range(3)]
    return [
        numbered_store(root / "one", lengths),
        numbered_store(root / "other", [[30, 5, 0, 70]]),
    ]


def run(loaders: list[Loader]) -> NDArray[np.int64]:
    """The rows of the next global step, those of the ranks one after the other."""
    return np.concatenate([next(iter(loader)).input_ids for loader in loaders])


@attack(short=10, long=1600, parts=8)
@given(seed=st.integers(0, 10**9))
def test_resumed_at_random_on_any_number_of_ranks_every_row_comes_once_and_in_order(
    stores: list[Store], seed: int
) -> None:
    dice = random.Random(seed)
    options: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "seed": dice.randrange(5),
        "packing": dice.choice(["concat", "best-fit", "pad"]),
        "shuffle": dice.choice([True, False, "block"]),
    }
    mixture = Mixture({"a": (stores[0], 2.0), "b": (stores[1], 1.0)})
    source: Store | Mixture = mixture if dice.random() < 0.5 else stores[0]
    whole = (row for batch in Loader(source, batch_size=16, **options) for row in batch.input_ids)
    state: dict[str, Any] | None = None
    for _ in range(dice.randrange(2, 7)):
        world, size = dice.choice([1, 2, 3, 5]), dice.choice([1, 2, 4])
        loaders = [
            Loader(source, batch_size=size, rank=rank, world_size=world, prefetch=0, **options)
            for rank in range(world)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        for _ in range(dice.randrange(0, 4)):
            found = run(loaders)
            assert np.array_equal(found, np.array(list(itertools.islice(whole, len(found)))))
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = json.loads(json.dumps(states[0]))
        tried("resumes of a loader on another number of ranks")


@attack(short=40, long=8000, parts=2)
@given(seed=st.integers(0, 10**9), sealed=st.booleans())
def test_a_changed_state_is_refused_or_gives_rows(
    stores: list[Store], seed: int, sealed: bool
) -> None:
    dice = random.Random(seed)
    stages = [
        Stage(tokens=80, weights={"a": 1.0, "b": 1.0}, seq_len=4),
        Stage(weights={"a": 1.0, "b": 0.0}),
    ]
    mixture = Mixture({"a": (stores[0], 1.0), "b": (stores[1], 1.0)}, stages=stages)
    loader = Loader(mixture, seq_len=SEQ_LEN, batch_size=2)
    loader.seek(dice.randrange(40))
    good = loader.state_dict()
    state: dict[str, Any] = copy.deepcopy(good)
    change(state, dice)
    if sealed:
        state.pop("checksum", None)
        try:
            state["checksum"] = _checksum(state)
        except (TypeError, ValueError):
            state["checksum"] = "0" * 32
    fresh = Loader(mixture, seq_len=SEQ_LEN, batch_size=2)
    with contextlib.suppress(StateError):
        fresh.load_state_dict(state)
        assert sealed or state == good, "a state without its checksum is never taken"
        with contextlib.suppress(StopIteration, TokenmillError):
            assert next(iter(fresh)).input_ids.size == 2 * SEQ_LEN
    tried("states of a loader that were changed")


def test_what_is_no_state_is_refused(stores: list[Store]) -> None:
    loader = Loader(stores[0], seq_len=SEQ_LEN, batch_size=2)
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in [*VALUES, b"x", object(), {1: 2}, {"version": {}}, nested]:
        with pytest.raises(StateError):
            loader.load_state_dict(value)  # type: ignore[arg-type]
        for name in ("step", "position", "stores", "version", "mixture"):
            state = {**loader.state_dict(), name: value}
            if state != loader.state_dict():
                with pytest.raises(StateError):
                    loader.load_state_dict(state)
                tried("states of a loader that were changed")


def test_a_state_that_was_pickled_is_the_same(stores: list[Store]) -> None:
    loader = Loader(stores[0], seq_len=SEQ_LEN, batch_size=2)
    loader.seek(7)
    expected = next(iter(loader)).input_ids
    loader.seek(7)
    fresh = Loader(stores[0], seq_len=SEQ_LEN, batch_size=2)
    fresh.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert np.array_equal(next(iter(fresh)).input_ids, expected)
