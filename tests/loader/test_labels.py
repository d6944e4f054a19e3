"""Labels of the same places: rows of `seq_len` tokens, all inputs, for models that shift labels."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.loader.stores import numbered_store, write_store

from tokenmill.errors import StateError, UsageError
from tokenmill.loader.loader import Loader

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.reader import Store

LENGTHS = [[5, 17, 1, 9, 30, 2], [12, 3, 8], [26, 4, 4, 19, 7]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return numbered_store(tmp_path / "store", LENGTHS)


def rows_of(store: Store, **options: Any) -> Loader:
    settings = {"seq_len": 8, "batch_size": 2, "epochs": 1, "labels": "same", **options}
    return Loader(store, **settings)


def test_a_row_is_seq_len_tokens_of_which_all_are_inputs_and_labels(store: Store) -> None:
    batch = rows_of(store, shuffle=False, batch_size=1).batch(0)

    assert batch.labels_are == "same"
    assert batch.seq_len == 8
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.labels.tolist() == [[-100, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.doc_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert batch.loss_mask.tolist() == [[False, *[True] * 7]]
    assert batch.cu_seqlens[:3].tolist() == [0, 5, 8]


def test_masked_boundaries_leave_out_the_first_token_of_a_document(store: Store) -> None:
    batch = rows_of(store, shuffle=False, batch_size=1, boundaries="mask").batch(0)
    assert batch.labels.tolist() == [[-100, 1, 2, 3, 4, -100, 6, 7]]


def test_a_mask_of_the_store_says_which_labels_count(tmp_path: Path) -> None:
    ids, counts = [[[10, 11, 12, 13, 14, 15]]], [[[0, 0, 1, 1, 0, 1]]]
    store = write_store(tmp_path / "masked", ids, masks=counts)
    batch = rows_of(store, seq_len=6, batch_size=1, packing="pad").batch(0)
    assert batch.labels.tolist() == [[-100, -100, 12, 13, -100, 15]]
    assert batch.loss_mask.tolist() == [[False, False, True, True, False, True]]


@pytest.mark.parametrize("boundaries", ["keep", "mask"])
@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_a_model_that_shifts_is_asked_for_what_one_that_does_not_is(
    store: Store, packing: str, boundaries: str
) -> None:
    options = {"packing": packing, "boundaries": boundaries}
    same = rows_of(store, **options)
    following = rows_of(store, **options, labels="next", seq_len=7)

    assert len(same) == len(following)
    for one, other in zip(same, following, strict=True):
        assert np.array_equal(one.labels[:, 1:], other.labels)
        assert np.array_equal(one.input_ids[:, :-1], other.input_ids)
        assert np.array_equal(one.position_ids[:, :-1], other.position_ids)
        assert np.array_equal(one.loss_mask[:, 1:], other.loss_mask)


def test_every_token_but_the_first_is_a_label_once_an_epoch(store: Store) -> None:
    asked = Counter(
        label for batch in rows_of(store) for label in batch.labels.ravel().tolist() if label >= 0
    )
    assert asked == Counter(range(1, store.num_tokens))


@pytest.mark.parametrize("dtype", ["int64", "int32", "stored"])
def test_a_loss_mask_says_it_for_every_width(store: Store, dtype: str) -> None:
    batch = rows_of(store, dtype=dtype).batch(0)
    assert np.array_equal(batch.tokens, batch.input_ids)
    assert np.array_equal(batch.labels[batch.loss_mask], batch.tokens[batch.loss_mask])
    assert not batch.loss_mask[:, 0].any()


def test_rows_of_any_steps_are_gathered_into_one_batch(store: Store) -> None:
    loader = rows_of(store, batch_size=1, epochs=2, boundaries="mask")
    steps = [3, 4, 5, 30, 0, 1]
    batch = loader.gather(steps)
    for place, step in enumerate(steps):
        single = loader.batch(step)
        assert np.array_equal(batch.labels[place], single.labels[0])
        assert np.array_equal(batch.position_ids[place], single.position_ids[0])
    with pytest.raises(IndexError, match="step 999 of a run of"):
        loader.gather([0, 999])


def test_a_state_of_other_labels_is_refused(store: Store) -> None:
    state = rows_of(store).state_dict()
    with pytest.raises(StateError):
        rows_of(store, labels="next").load_state_dict(state)


def test_labels_are_next_or_same(store: Store) -> None:
    with pytest.raises(UsageError, match="labels='shifted' is not known"):
        rows_of(store, labels="shifted")
    with pytest.raises(UsageError, match="seq_len=1 is not a whole number of 2 or more"):
        rows_of(store, seq_len=1)
