"""Masks on the torch side: tensors, feeders and datasets hold what the loader's batches hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.loader.torch.feeding import (
    ALL_FIELDS,
    LAYOUTS,
    assert_same,
    make_loader,
    make_store,
)
from torch.utils.data import DataLoader

from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.torch import BatchDataset, DeviceFeeder, TokenDataset, to_tensors

if TYPE_CHECKING:
    from pathlib import Path

MODES = [
    pytest.param({}, id="fresh"),
    pytest.param({"reuse_buffers": True}, id="reused"),
]
FIELDS = [ALL_FIELDS, ("labels",), ("loss_mask",), ("input_ids",), ("loss_mask", "labels")]
ROW_FIELDS = tuple(field for field in ALL_FIELDS if field != "cu_seqlens")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path, has_mask=True)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_hold_what_the_batch_holds(
    store: Path, layout: dict[str, Any], fields: tuple[str, ...]
) -> None:
    for batch in make_loader(store, **layout):
        assert_same(to_tensors(batch, fields=fields), batch, fields)
        assert not batch.loss_mask.all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fed_tensors_are_the_loaders_batches(
    store: Path, layout: dict[str, Any], fields: tuple[str, ...], mode: dict[str, Any]
) -> None:
    expected = list(make_loader(store, **layout))
    with DeviceFeeder(make_loader(store, **layout), device="cpu", fields=fields, **mode) as feeder:
        for batch, numpy_batch in zip(feeder, expected, strict=True):
            assert_same(batch, numpy_batch, fields)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fed_mixture_counts_all_tokens_of_a_store_without_masks(
    tmp_path: Path, store: Path, layout: dict[str, Any]
) -> None:
    mixture = Mixture({"masked": (store, 0.5), "plain": (make_store(tmp_path), 0.5)})

    def loader() -> Loader:
        return Loader(mixture, seq_len=8, batch_size=2, **layout)

    numpy_batches = loader().batches()
    with DeviceFeeder(loader(), device="cpu", fields=ALL_FIELDS) as feeder:
        for step, batch in enumerate(feeder):
            assert_same(batch, next(numpy_batches), ALL_FIELDS)
            if step == 40:
                break


@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)],
)
def test_workers_read_masks(store: Path, workers: int, context: str | None) -> None:
    layout = LAYOUTS[2]
    expected = list(make_loader(store, **layout))
    batches = DataLoader(
        BatchDataset(make_loader(store, **layout), fields=ALL_FIELDS),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
    )
    for batch, numpy_batch in zip(batches, expected, strict=True):
        assert_same(batch, numpy_batch, ALL_FIELDS)
    rows = make_loader(store, epochs=1, shuffle=False, batch_size=1, **layout)
    found = DataLoader(
        TokenDataset(store, seq_len=8, fields=ROW_FIELDS, **layout),
        batch_size=1,
        num_workers=workers,
        multiprocessing_context=context,
    )
    for row, numpy_batch in zip(found, rows, strict=True):
        assert_same(row, numpy_batch, ROW_FIELDS)
