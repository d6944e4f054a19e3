"""Masks through the loader: what counts is what a walk over the tokens of each row says."""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import write_store
from tests.web import serve

from tokenmill.errors import StateError
from tokenmill.loader.batch import IGNORED
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.loader.packing import LAYOUTS, layout
from tokenmill.store.reader import Store
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.loader.batch import Batch

PACKINGS = ["concat", "best-fit", "pad"]
PAD = 59_999
"""No token of the stores here."""

documents = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=25), min_size=1, max_size=14
).flatmap(lambda found: st.tuples(st.just(found), st.integers(1, len(found))))


class Made(NamedTuple):
    """A store whose token k has the id k, and what is known of each token."""

    store: Store
    counts: dict[int, bool]
    document: dict[int, int]


def make(root: Path, masks: list[list[bool]], *, cut: int, masked: bool, first: int = 0) -> Made:
    """A store of two shards, cut after some documents."""
    ids = itertools.count(first)
    shards = [[[next(ids) for _ in mask] for mask in part] for part in (masks[:cut], masks[cut:])]
    found = [
        [[int(value) for value in mask] for mask in part] for part in (masks[:cut], masks[cut:])
    ]
    store = write_store(root, shards, masks=found if masked else None)
    tokens = [
        (token, value or not masked, number)
        for number, (one, mask) in enumerate(zip(itertools.chain(*shards), masks, strict=True))
        for token, value in zip(one, mask, strict=True)
    ]
    return Made(
        store,
        {token: value for token, value, _ in tokens},
        {token: number for token, _, number in tokens},
    )


def walked(batch: Batch, made: Made, *, mask_borders: bool) -> list[list[bool]]:
    """Whether each label counts, token by token."""
    rows = []
    for row in batch.tokens.tolist():
        counts = []
        for token, label in itertools.pairwise(row):
            same = made.document.get(token) == made.document.get(label)
            counts.append(made.counts.get(label, False) and (same or not mask_borders))
        rows.append(counts)
    return rows


def check_batch(batch: Batch, made: Made, *, mask_borders: bool) -> None:
    expected = np.array(walked(batch, made, mask_borders=mask_borders))
    assert np.array_equal(batch.loss_mask, expected)
    assert batch.loss_mask.dtype == np.bool_
    assert batch.loss_mask.flags.c_contiguous
    labels = batch.tokens[:, 1:].astype(np.int64)
    assert np.array_equal(batch.labels, np.where(expected, labels, IGNORED))
    assert np.array_equal(batch.input_ids, batch.tokens[:, :-1])


@pytest.mark.parametrize("boundaries", ["keep", "mask"])
@pytest.mark.parametrize("packing", PACKINGS)
@settings(deadline=None, max_examples=40)
@given(made_of=documents, seq_len=st.integers(1, 12), batch_size=st.integers(1, 4))
def test_a_label_counts_if_its_token_does(
    tmp_path_factory: pytest.TempPathFactory,
    packing: str,
    boundaries: str,
    made_of: tuple[list[list[bool]], int],
    seq_len: int,
    batch_size: int,
) -> None:
    masks, cut = made_of
    made = make(tmp_path_factory.mktemp("store"), masks, cut=cut, masked=True)
    loader = Loader(
        made.store,
        seq_len=seq_len,
        batch_size=batch_size,
        packing=packing,
        boundaries=boundaries,
        epochs=2,
        pad_id=PAD,
    )
    batches = list(loader)
    for batch in batches:
        check_batch(batch, made, mask_borders=boundaries == "mask")
    again = loader.batch(len(batches) - 1)
    assert np.array_equal(again.loss_mask, batches[-1].loss_mask)


@pytest.mark.parametrize("packing", PACKINGS)
@settings(deadline=None, max_examples=40)
@given(made_of=documents, seq_len=st.integers(1, 12), masked=st.booleans())
def test_targets_are_the_labels_that_count(
    tmp_path_factory: pytest.TempPathFactory,
    packing: str,
    made_of: tuple[list[list[bool]], int],
    seq_len: int,
    masked: bool,
) -> None:
    masks, cut = made_of
    made = make(tmp_path_factory.mktemp("store"), masks, cut=cut, masked=masked)
    rows = LAYOUTS[packing](TokenStream(made.store), seq_len=seq_len)
    loader = Loader(
        made.store,
        seq_len=seq_len,
        batch_size=3,
        packing=packing,
        boundaries="mask",
        epochs=1,
        pad_id=PAD,
    )
    counted = sum(int(batch.loss_mask.sum()) for batch in loader)
    account = rows.account()
    assert account.targets == counted
    assert account.used == rows.used
    (told,) = layout(made.store, seq_len=seq_len, packings=[packing]).accounts
    assert told == account


@settings(deadline=None, max_examples=25)
@given(
    first=documents,
    second=documents,
    masked=st.tuples(st.booleans(), st.booleans()),
    packing=st.sampled_from(PACKINGS),
    boundaries=st.sampled_from(["keep", "mask"]),
)
def test_in_a_mixture_all_tokens_of_a_store_without_masks_count(
    tmp_path_factory: pytest.TempPathFactory,
    first: tuple[list[list[bool]], int],
    second: tuple[list[list[bool]], int],
    masked: tuple[bool, bool],
    packing: str,
    boundaries: str,
) -> None:
    root = tmp_path_factory.mktemp("mixture")
    one = make(root / "a", first[0], cut=first[1], masked=masked[0])
    two = make(root / "b", second[0], cut=second[1], masked=masked[1], first=10_000)
    made = Made(
        one.store,
        one.counts | two.counts,
        one.document | {token: number + 1_000 for token, number in two.document.items()},
    )
    loader = Loader(
        Mixture({"a": (one.store, 0.6), "b": (two.store, 0.4)}),
        seq_len=5,
        batch_size=3,
        packing=packing,
        boundaries=boundaries,
        pad_id=PAD,
    )
    for batch in itertools.islice(loader, 12):
        check_batch(batch, made, mask_borders=boundaries == "mask")
        assert batch.mask is not None or not any(masked[k] for k in np.unique(batch.sources))


MASKS = [
    [k % 3 == 0 for k in range(9)],
    [True, False],
    [False] * 6,
    [k % 2 == 0 for k in range(40)],
]


def load(store: Store, **options: Any) -> Loader:
    settings: dict[str, Any] = {"seq_len": 7, "batch_size": 2, "pad_id": PAD, "epochs": 1}
    return Loader(store, **{**settings, **options})


def test_stored_labels_have_no_room_for_what_does_not_count(tmp_path: Path) -> None:
    made = make(tmp_path, MASKS, cut=2, masked=True)
    for batch in load(made.store, dtype="stored"):
        assert np.shares_memory(batch.labels, batch.tokens)
        assert np.array_equal(batch.loss_mask, walked(batch, made, mask_borders=False))


def test_a_last_batch_filled_with_padding_counts_nothing_there(tmp_path: Path) -> None:
    made = make(tmp_path, MASKS, cut=2, masked=True)
    loader = load(made.store, batch_size=5)
    last = list(loader)[-1]
    assert (last.rows == -1).any()
    assert not last.loss_mask[last.rows == -1].any()
    check_batch(last, made, mask_borders=False)


def test_a_pickled_batch_has_its_mask_and_not_those_of_other_steps(tmp_path: Path) -> None:
    made = make(tmp_path, MASKS, cut=2, masked=True)
    for boundaries in ("keep", "mask"):
        loader = load(made.store, epochs=40, boundaries=boundaries)
        batch = list(itertools.islice(loader, 30))[-1]
        data = pickle.dumps(batch)
        assert len(data) < 4000
        check_batch(pickle.loads(data), made, mask_borders=boundaries == "mask")


def test_a_state_is_refused_where_the_masks_are_others(tmp_path: Path) -> None:
    made = make(tmp_path / "a", MASKS, cut=2, masked=True)
    same = make(tmp_path / "b", MASKS, cut=2, masked=True)
    others = [
        make(tmp_path / "c", MASKS, cut=2, masked=False),
        make(tmp_path / "d", [[True, *mask[1:]] for mask in MASKS], cut=2, masked=True),
    ]
    loader = load(made.store)
    next(iter(loader))
    state = loader.state_dict()
    load(same.store).load_state_dict(state)
    for other in others:
        with pytest.raises(StateError):
            load(other.store).load_state_dict(state)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [True, "block"])
def test_masks_behind_a_url_are_those_of_the_local_store(
    tmp_path: Path, packing: str, shuffle: bool | str
) -> None:
    made = make(tmp_path / "store", MASKS, cut=2, masked=True)
    options = {"packing": packing, "shuffle": shuffle, "epochs": 3}
    with serve(tmp_path) as server, Store(f"{server.address}/store") as store:
        remote = list(load(store, **options))
    for batch, expected in zip(remote, load(made.store, **options), strict=True):
        assert np.array_equal(batch.tokens, expected.tokens)
        check_batch(batch, made, mask_borders=False)
