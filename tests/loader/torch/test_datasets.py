from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.loader.torch.feeding import (
    ALL_FIELDS,
    LAYOUTS,
    assert_same,
    make_loader,
    make_store,
)
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tokenmill.errors import UsageError
from tokenmill.torch import BatchDataset, TensorBatch, TokenDataset

if TYPE_CHECKING:
    from pathlib import Path

ROW_FIELDS = tuple(field for field in ALL_FIELDS if field != "cu_seqlens")
WORKERS = [
    pytest.param(0, None, id="none"),
    pytest.param(2, "fork", id="fork"),
    pytest.param(2, "spawn", id="spawn"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def rows_of(store: Path, **layout: Any) -> dict[str, np.ndarray[Any, Any]]:
    """All rows in the order of the layout, as the loader gives them."""
    loader = make_loader(store, epochs=1, shuffle=False, batch_size=1, **layout)
    batches = list(loader)
    return {name: np.concatenate([getattr(b, name) for b in batches]) for name in ROW_FIELDS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_by_number_are_the_rows_of_the_layout(store: Path, layout: dict[str, Any]) -> None:
    expected = rows_of(store, **layout)
    rows = TokenDataset(store, seq_len=8, fields=ROW_FIELDS, **layout)
    assert len(rows) == len(expected["labels"]) > 10
    for number in range(len(rows)):
        assert list(rows[number]) == list(ROW_FIELDS)
        for name, tensor in rows[number].items():
            assert tensor.tolist() == expected[name][number].tolist()
    several = rows.__getitems__([5, 0, 5, -1])
    for row, number in zip(several, [5, 0, 5, len(rows) - 1], strict=True):
        assert row["labels"].tolist() == expected["labels"][number].tolist()


def test_rows_that_are_not_there_are_index_errors(store: Path) -> None:
    rows = TokenDataset(store, seq_len=8)
    assert rows[-1]["input_ids"].tolist() == rows[len(rows) - 1]["input_ids"].tolist()
    for number in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError, match=f"row {number} of a layout of"):
            _ = rows[number]
    with pytest.raises(UsageError, match="single row has no cu_seqlens"):
        TokenDataset(store, seq_len=8, fields=("cu_seqlens",))


@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, "fork"), pytest.param(1, "spawn", marks=pytest.mark.slow)],
)
def test_any_sampler_and_any_workers_read_rows(
    store: Path, workers: int, context: str | None
) -> None:
    expected = rows_of(store, **LAYOUTS[1])["labels"]
    rows = TokenDataset(store, seq_len=8, boundaries="mask")
    order = list(RandomSampler(rows, generator=torch.Generator().manual_seed(3)))
    batches = DataLoader(
        rows,
        batch_size=4,
        sampler=order,
        num_workers=workers,
        multiprocessing_context=context,
    )
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels.tolist() == expected[order].tolist()


def test_ranks_of_a_distributed_sampler_share_the_rows(store: Path) -> None:
    rows = TokenDataset(store, seq_len=8, packing="pad", pad_id=256)
    numbers = []
    for rank in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(
            rows, num_replicas=2, rank=rank, seed=1
        )
        assert len(list(DataLoader(rows, batch_size=7, sampler=sampler))) == 1
        numbers += list(sampler)
    assert sorted(numbers) == list(range(len(rows)))


def test_a_dataset_travels_as_a_path_and_options(store: Path) -> None:
    rows = TokenDataset(store, seq_len=8, packing="best-fit", fields=ROW_FIELDS)
    sent = pickle.dumps(rows)
    assert len(sent) < 1000
    other = pickle.loads(sent)
    assert len(other) == len(rows)
    assert all(torch.equal(other[3][name], rows[3][name]) for name in ROW_FIELDS)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_workers_together_give_the_loaders_own_stream(
    store: Path, workers: int, context: str | None
) -> None:
    first = 5
    expected = list(make_loader(store, **LAYOUTS[2]))
    loader = make_loader(store, **LAYOUTS[2])
    loader.seek(first)
    dataset = BatchDataset(loader, fields=ALL_FIELDS)
    assert len(dataset) == len(expected) - first
    batches = list(
        DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)
    )
    for batch, numpy_batch in zip(batches, expected[first:], strict=True):
        assert isinstance(batch, TensorBatch)
        assert (batch.step, batch.max_seqlen) == (numpy_batch.step, 8)
        assert_same(batch, numpy_batch, ALL_FIELDS)
    assert loader.step == first


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_that_have_nothing_to_do_are_no_trouble(store: Path, workers: int) -> None:
    loader = make_loader(store, batch_size=64)
    assert len(loader) == 1
    batches = DataLoader(BatchDataset(loader), batch_size=None, num_workers=workers)
    assert [batch.step for batch in batches] == [0]


def test_a_plain_dataloader_resumes_by_the_loader(store: Path) -> None:
    loader = make_loader(store, epochs=None)
    for batch in DataLoader(BatchDataset(loader), batch_size=None, num_workers=2):
        loader.seek(batch.step + 1)
        if batch.step == 6:
            break
    state = loader.state_dict()

    other = make_loader(store, epochs=None)
    other.load_state_dict(state)
    batch = next(iter(DataLoader(BatchDataset(other), batch_size=None, num_workers=1)))
    assert_same(batch, loader.batch(7), ("input_ids", "labels"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_resumes_from_every_step(store: Path, workers: int) -> None:
    options: dict[str, Any] = {"packing": "best-fit", "boundaries": "mask", "batch_size": 3}
    expected = [batch.labels.tolist() for batch in make_loader(store, epochs=1, **options)]

    def make() -> Any:
        dataset = BatchDataset(make_loader(store, epochs=1, **options))
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    states = []
    batches = make()
    for batch in batches:
        states.append(batches.state_dict())
        assert batch.labels.tolist() == expected[len(states) - 1]
    assert len(states) == len(expected) >= 5
    for consumed, state in enumerate(states[:-1], 1):
        resumed = make()
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert [batch.labels.tolist() for batch in resumed] == expected[consumed:]


def test_a_state_of_another_run_is_refused(store: Path) -> None:
    batches = StatefulDataLoader(BatchDataset(make_loader(store)), batch_size=None)
    next(iter(batches))
    other = StatefulDataLoader(BatchDataset(make_loader(store, seed=9)), batch_size=None)
    other.load_state_dict(batches.state_dict())
    with pytest.raises(Exception, match="seed"):
        next(iter(other))
