"""Mixtures through the loader: shares, stages, resume inside any of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import write_store

from tokenmill.errors import StateError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenmill.store.reader import Store

PACKINGS = ["concat", "best-fit", "pad"]
STAGES = [
    Stage(tokens=16 * 24),
    Stage(tokens=16 * 36, weights={"web": 0.25, "code": 0.75}),
    Stage(tokens=16 * 24, seq_len=16),
    Stage(weights={"web": 0, "code": 1}, seq_len=4),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """Tokens of the first are below 1,000, those of the second above."""
    folder = tmp_path_factory.mktemp("mixed")
    web = [[range(k, k + 1 + k % 23) for k in range(0, 600, 7)], [range(700, 760)]]
    code = [[range(1000 + k, 1000 + k + 1 + k % 11) for k in range(0, 90, 5)]]
    return write_store(folder / "web", web), write_store(folder / "code", code)


def mix(stores: tuple[Store, Store], **changes: Any) -> Mixture:
    web, code = stores
    return Mixture({"web": (web, 0.7), "code": (code, 0.3)}, **changes)


def make(mixture: Mixture, **changes: Any) -> Loader:
    return Loader(mixture, **{"seq_len": 8, "batch_size": 4, "prefetch": 0, **changes})


def rows_of(loaders: Sequence[Loader], steps: int) -> list[tuple[int, ...]]:
    """Source, epoch, row and tokens of the rows of so many global batches, rank after rank."""
    iterators = [iter(loader) for loader in loaders]
    found: list[tuple[int, ...]] = []
    for _ in range(steps):
        for iterator in iterators:
            batch = next(iterator, None)
            if batch is None:
                return found
            cells = zip(batch.sources, batch.epochs, batch.rows, batch.tokens, strict=True)
            found += [(int(s), int(e), int(r), *t.tolist()) for s, e, r, t in cells]
    return found


def test_shares_of_rows_hold_at_every_prefix_and_tokens_are_of_their_source(
    stores: tuple[Store, Store],
) -> None:
    loader = make(mix(stores), pad_id=59_999)
    seen: Counter[int] = Counter()
    for count, (source, _, _, *tokens) in enumerate(rows_of([loader], 100), start=1):
        seen[source] += 1
        assert abs(seen[0] - 0.7 * count) < 1
        real = [token for token in tokens if token != 59_999]
        assert all((token >= 1000) == (source == 1) for token in real)
    state = loader.state_dict()["seen"]
    assert [state[name]["rows"] for name in ("web", "code")] == [280, 120]
    assert [state[name]["tokens"] for name in ("web", "code")] == [280 * 8, 120 * 8]


@pytest.mark.parametrize("packing", PACKINGS)
def test_shares_are_of_tokens_where_rows_are_not_full(
    stores: tuple[Store, Store], packing: str
) -> None:
    loader = make(mix(stores), packing=packing, pad_id=59_999)
    rows = rows_of([loader], 600)
    tokens = [sum(token != 59_999 for token in row[3:]) for row in rows]
    share = sum(n for n, row in zip(tokens, rows, strict=True) if row[0] == 0) / sum(tokens)
    assert share == pytest.approx(0.7, abs=0.01)


def test_every_source_goes_through_its_own_epochs(stores: tuple[Store, Store]) -> None:
    loader = make(mix(stores))
    sizes = [layout.num_rows for layout in loader.layouts()]
    rows = rows_of([loader], 3 * sum(sizes))
    for source, size in enumerate(sizes):
        drawn = [(epoch, row) for s, epoch, row, *_ in rows if s == source]
        assert len(drawn) > size, "more than an epoch, or this shows nothing"
        for first in range(0, len(drawn) - size, size):
            epoch = drawn[first : first + size]
            assert sorted(epoch) == [(first // size, row) for row in range(size)]


@settings(deadline=None, max_examples=25)
@given(
    packing=st.sampled_from(PACKINGS),
    worlds=st.sampled_from([(8, 1, 1), (8, 1, 2), (8, 2, 1), (8, 4, 2), (8, 2, 4), (24, 3, 3)]),
    at=st.integers(0, 20),
)
def test_resume_inside_any_stage_on_any_world_size(
    stores: tuple[Store, Store], packing: str, worlds: tuple[int, int, int], at: int
) -> None:
    size, before, after = worlds

    def ranks(world: int) -> list[Loader]:
        mixture = mix(stores, stages=STAGES)
        return [
            make(mixture, batch_size=size // world, rank=r, world_size=world, packing=packing)
            for r in range(world)
        ]

    whole = rows_of(ranks(1), 60)
    first = ranks(before)
    read = rows_of(first, at)
    state = json.loads(json.dumps(first[-1].state_dict()))
    second = ranks(after)
    for loader in second:
        loader.load_state_dict(state)
    read += rows_of(second, 4)
    assert read == whole[: len(read)]


def test_stages_change_weights_and_rows_but_not_the_tokens_of_a_batch(
    stores: tuple[Store, Store],
) -> None:
    loader = make(mix(stores, stages=STAGES))
    shapes = [loader.batch(step).input_ids.shape for step in range(40)]
    assert shapes[:12] == [(4, 8)] * 12
    assert shapes[12:30] == [(4, 8)] * 18
    assert shapes[30:40] == [(2, 16)] * 10
    assert loader.batch(50).input_ids.shape == (8, 4)
    assert set(loader.batch(50).sources.tolist()) == {1}
    assert loader.num_steps is None


def test_a_source_with_a_cap_is_left_to_the_others(stores: tuple[Store, Store]) -> None:
    loader = make(mix(stores, max_epochs={"code": 1.5, "web": 2}), batch_size=1)
    rows = rows_of([loader], 10_000)
    sizes = [layout.num_rows for layout in loader.layouts()]
    drawn = Counter(row[0] for row in rows)
    assert drawn == {0: 2 * sizes[0], 1: int(1.5 * sizes[1])}
    assert len(loader) == len(rows)


def test_the_state_of_other_weights_or_sources_is_refused(stores: tuple[Store, Store]) -> None:
    loader = make(mix(stores))
    rows_of([loader], 3)
    state = loader.state_dict()
    web, code = stores
    with pytest.raises(StateError, match=r"mixture=.*weights"):
        make(Mixture({"web": (web, 0.5), "code": (code, 0.5)})).load_state_dict(state)
    with pytest.raises(StateError, match="the source 'web', 'code' does not hold what it held"):
        make(Mixture({"web": (code, 0.7), "code": (web, 0.3)})).load_state_dict(state)
    with pytest.raises(StateError):
        make(Mixture({"web": (web, 0.7), "books": (code, 0.3)})).load_state_dict(state)


def test_what_makes_no_sense_with_a_mixture_is_refused(stores: tuple[Store, Store]) -> None:
    with pytest.raises(UsageError, match="epochs=1 says nothing of a mixture"):
        make(mix(stores), epochs=1)
    with pytest.raises(UsageError, match="make batch_size a multiple of 2"):
        make(mix(stores, stages=STAGES), batch_size=3, world_size=2, rank=0)


def test_rows_name_the_source(stores: tuple[Store, Store], tmp_path: Path) -> None:
    loader = make(mix(stores))
    batch = loader.batch(7)
    origins = loader.rows(7)
    assert [origin.source for origin in origins] == [
        ("web", "code")[source] for source in batch.sources.tolist()
    ]
    assert {origin.store for origin in origins} <= {str(store.path) for store in stores}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("names", [["web"], ["web", "code"]])
def test_rows_found_for_many_steps_and_read_for_some_are_those_of_each_step(
    stores: tuple[Store, Store], packing: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of three steps, windows of many chunks, rows that go from shard to shard.
    monkeypatch.setattr("tokenmill.loader.loader.CHUNK_TOKENS", 3 * 4 * 8)
    sources = {name: (store, 0.5) for name, store in zip(names, stores, strict=False)}
    loader = make(Mixture(sources, max_epochs=3), packing=packing, boundaries="mask")
    windows = [len(window.steps) for window, _, _, _ in loader.chunks(0)]
    assert max(windows) > 3, "else this shows nothing"
    for batch in loader.batches():
        alone = loader.batch(batch.step)
        for field in ("tokens", "labels", "position_ids", "doc_ids", "cu_seqlens", "rows"):
            assert getattr(batch, field).tolist() == getattr(alone, field).tolist()
    assert batch.step == len(loader) - 1
