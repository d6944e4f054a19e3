"""Which steps travel together, and what is sent for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.loader.stores import write_store
from tests.loader.torch.feeding import ALL_FIELDS, assert_same, make_loader, make_store

from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture, Stage
from tokenmill.torch import (
    DEFAULT_FIELDS,
    MOST_STEPS,
    MOST_TOKENS,
    parcels,
    share,
    unstacked,
    widened,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenmill.torch import Parcel


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def parcels_of(
    loader: Loader, *, first: int = 0, fields: Sequence[str] = DEFAULT_FIELDS
) -> list[Parcel]:
    """All parcels; their tensors are those of the loader's batches."""
    found = list(parcels(loader, fields, first=first))
    for steps, seq_len, arrays, shapes in found:
        made = widened(share(arrays), fields, torch.int64)
        for step, batch in zip(steps, unstacked(made, steps, seq_len, shapes), strict=True):
            assert batch.step == step
            assert_same(batch, loader.batch(step), fields)
    sent = [step for steps, *_ in found for step in steps]
    assert sent == list(range(first, len(loader)))
    return found


def test_parcels_grow_to_a_few_steps_and_end_with_the_run(store: Path) -> None:
    for epochs in (0.5, 1, 4, 4.5, 5):
        loader = make_loader(store, epochs=epochs)
        sizes = [len(steps) for steps, *_ in parcels_of(loader)]
        assert sizes[:2] == [1, 2]
        assert max(sizes) <= MOST_STEPS
    assert sizes[:5] == [1, 2, 4, 8, MOST_STEPS]
    assert sizes[-1] < MOST_STEPS
    assert parcels_of(loader, first=len(loader)) == []


def test_steps_with_many_tokens_travel_in_smaller_parcels(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [[[number % 50_000 for number in range(400_000)]]])
    loader = Loader(tmp_path / "store", seq_len=1000, batch_size=100, epochs=5)
    sent = parcels_of(loader)
    assert max(len(steps) for steps, *_ in sent) == MOST_TOKENS // 100_100 == 2


def test_steps_of_another_shape_travel_in_another_parcel(store: Path) -> None:
    stages = [Stage(tokens=200), Stage(tokens=300, seq_len=16)]
    loader = Loader(
        Mixture({"a": (store, 1.0)}, stages=stages, max_epochs=9), seq_len=8, batch_size=4
    )
    sent = parcels_of(loader, fields=ALL_FIELDS)
    shapes = {(arrays["tokens"].shape[1], seq_len) for _, seq_len, arrays, _ in sent}
    assert shapes == {(4, 8), (2, 16)}


def test_steps_with_more_and_fewer_documents_travel_together(store: Path) -> None:
    loader = make_loader(store, epochs=4, cu_seqlens_capacity=[3, 4])
    sent = parcels_of(loader, fields=ALL_FIELDS)
    sizes = [{shape.size for shape in shapes} for *_, shapes in sent]
    assert set.union(*sizes) == {3, 4, 8}
    assert {3, 4, 8} in sizes
    assert max(len(steps) for steps, *_ in sent) == MOST_STEPS
    for steps, _, arrays, shapes in sent:
        assert arrays["cu_seqlens"].shape == (len(steps), max(shape.size for shape in shapes))


def test_a_mask_travels_for_the_parcels_that_need_one(store: Path) -> None:
    loader = make_loader(store, packing="best-fit", pad_id=256, epochs=4)
    sent = parcels_of(loader)
    masked = [[bool((loader.batch(step).labels < 0).any()) for step in steps] for steps, *_ in sent]
    assert [any(steps) for steps in masked] == ["loss_mask" in arrays for _, _, arrays, _ in sent]
    assert any(any(steps) and not all(steps) for steps in masked)
    assert not all(any(steps) for steps in masked)
