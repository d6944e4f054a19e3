from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from tests.loader.stores import write_store
from tests.loader.torch.feeding import (
    ALL_FIELDS,
    LAYOUTS,
    assert_same,
    make_loader,
    make_store,
)

from tokenmill.errors import UsageError
from tokenmill.torch import DeviceFeeder, TensorBatch, slice_row, to_tensors

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_hold_what_the_batch_holds(tmp_path: Path, layout: dict[str, Any]) -> None:
    loader = make_loader(make_store(tmp_path), **layout)
    assert loader.num_steps is not None
    ignored = []
    for step in range(loader.num_steps):
        batch = loader.batch(step)
        tensors = to_tensors(batch, fields=ALL_FIELDS)
        assert_same(tensors, batch, ALL_FIELDS)
        assert tensors["labels"].dtype == torch.int64
        assert (tensors.step, tensors.max_seqlen) == (step, batch.max_seqlen)
        assert tensors.num_documents == batch.num_documents
        assert tensors.attention_pairs == batch.attention_pairs
        plain = to_tensors(batch)  # for which no document is looked up
        assert (plain.max_seqlen, plain.num_documents, plain.attention_pairs) == (8, None, None)
        assert torch.equal(plain.labels, tensors.labels)
        assert plain.labels_are == batch.labels_are
        ignored.append(int((tensors.labels == -100).sum()))
    assert max(ignored) > 0
    assert min(ignored) == 0 or layout != LAYOUTS[0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_of_any_loader_come_in_the_dtype_that_was_asked_for(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    store = make_store(tmp_path)
    expected = make_loader(store, **LAYOUTS[2])
    for stored in ("stored", "int32", "int64"):
        loader = make_loader(store, **LAYOUTS[2], dtype=stored)
        tensors = to_tensors(loader.batch(1), fields=("labels", "input_ids"), dtype=dtype)
        assert {t.dtype for t in tensors.values()} == {dtype}
        assert_same(tensors, expected.batch(1), ("labels", "input_ids"))


def test_a_batch_is_a_mapping_with_attributes() -> None:
    ids = torch.arange(6).reshape(2, 3)
    batch = TensorBatch({"input_ids": ids}, step=7, max_seqlen=3)

    assert batch.input_ids is batch["input_ids"] is ids
    assert dict(**batch) == {"input_ids": ids}
    assert (batch.step, batch.max_seqlen) == (7, 3)
    with pytest.raises(AttributeError, match=r"no 'labels', only \['input_ids'\]"):
        _ = batch.labels


def test_a_batch_is_unpacked_as_a_pair_whatever_else_it_has(tmp_path: Path) -> None:
    batch = make_loader(make_store(tmp_path)).batch(0)
    input_ids, labels = batch
    assert (input_ids is batch.input_ids, labels is batch.labels) == (True, True)
    loader = make_loader(make_store(tmp_path / "other"))
    with DeviceFeeder(loader, device="cpu", fields=ALL_FIELDS) as feeder:
        for fed in feeder:
            inputs, targets = cast("Any", fed)
            assert inputs is fed["input_ids"]
            assert targets is fed["labels"]
            assert {**fed}.keys() == dict(fed).keys() == set(ALL_FIELDS)


@pytest.mark.parametrize("twin", [copy.copy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_copies_keep_the_step(twin: Any) -> None:
    numbers = {"step": 7, "max_seqlen": 3, "num_documents": 2, "attention_pairs": 4}
    batch = TensorBatch({"input_ids": torch.arange(3)}, **numbers)
    other = twin(batch)
    assert isinstance(other, TensorBatch)
    assert {name: getattr(other, name) for name in numbers} == numbers
    assert torch.equal(other.input_ids, batch.input_ids)


def test_a_batch_moves_as_a_whole() -> None:
    numbers = {"step": 7, "max_seqlen": 3, "num_documents": 2, "attention_pairs": 4}
    batch = TensorBatch({"input_ids": torch.arange(3)}, **numbers)
    moved = batch.to("meta", non_blocking=True)
    assert moved.input_ids.device.type == "meta"
    assert {name: getattr(moved, name) for name in numbers} == numbers


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fields": ("input_ids", "targets")}, r"no fields \['targets'\]"),
        ({"fields": ()}, "at least one field"),
        ({"fields": ("labels", "labels")}, "none twice"),
        ({"dtype": torch.uint16}, "-100"),
        ({"dtype": torch.float32}, "torch.float32"),
    ],
)
def test_what_cannot_be_given_is_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    batch = make_loader(make_store(tmp_path)).batch(0)
    with pytest.raises(UsageError, match=reason):
        to_tensors(batch, **options)


def test_tensors_are_cut_for_context_parallelism_as_arrays_are(tmp_path: Path) -> None:
    batch = make_loader(make_store(tmp_path)).batch(0)
    tensors = to_tensors(batch)
    for rank in range(2):
        part = slice_row(tensors.input_ids, rank=rank, size=2)
        assert part.is_contiguous()
        assert part.tolist() == slice_row(batch.input_ids, rank=rank, size=2).tolist()


def test_ids_are_copies_even_where_nothing_has_to_be_widened(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [[[*range(60_000, 60_100)]]], vocab_size=100_000)
    batch = make_loader(tmp_path / "store").batch(0)
    assert batch.tokens.dtype == np.int32
    tensors = to_tensors(batch, dtype=torch.int32)
    assert_same(tensors, batch, ("input_ids", "labels"))
    tensors.labels.zero_()
    assert_same({"input_ids": tensors.input_ids}, batch, ("input_ids",))
    assert batch.tokens.all()
