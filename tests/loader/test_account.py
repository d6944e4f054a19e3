"""Accounts are compared with what walking through all the rows of the real layouts gives."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import numbered_store

from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.packing import (
    LAYOUTS,
    PADDING,
    Account,
    ConcatLayout,
    Layout,
    PadLayout,
    layout,
)
from tokenmill.options import PACKINGS
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from tokenmill.store.reader import Store

LENGTHS = [[3, 5, 2, 11], [1, 4, 30], [9]]


def walk(rows: Layout, *, packing: str) -> Account:
    """The account of a layout, counted place by place."""
    ends = np.cumsum(rows.stream.store.lengths())
    capacity = rows.seq_len + 1
    seen: Counter[int] = Counter()
    rows_with_targets: dict[int, set[int]] = defaultdict(set)
    padding = targets = 0
    for row in range(rows.num_rows):
        starts, lengths = rows.pieces(np.array([row]))
        places: list[int] = []
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            places += [PADDING] * length if start == PADDING else range(start, start + length)
        assert len(places) == capacity
        padding += places.count(PADDING)
        seen.update(place for place in places if place != PADDING)
        for first, second in itertools.pairwise(places):
            document = int(np.searchsorted(ends, first, side="right"))
            if PADDING not in (first, second) and second == first + 1 < ends[document]:
                targets += 1
                rows_with_targets[document].add(row)
    starts = ends - rows.stream.store.lengths()
    return Account(
        packing=packing,
        seq_len=rows.seq_len,
        rows=rows.num_rows,
        documents=len(ends),
        tokens=int(ends[-1]) if len(ends) else 0,
        used=len(seen),
        dropped=(int(ends[-1]) if len(ends) else 0) - len(seen),
        repeated=seen.total() - len(seen),
        padding=padding,
        split_documents=sum(len(found) > 1 for found in rows_with_targets.values()),
        cut_documents=sum(
            any(place not in seen for place in range(first, last))
            for first, last in zip(starts.tolist(), ends.tolist(), strict=True)
        ),
        targets=targets,
    )


def assert_adds_up(account: Account) -> None:
    assert account.tokens == account.used + account.dropped
    places = account.rows * (account.seq_len + 1)
    assert places == account.used + account.repeated + account.padding
    assert 0 <= account.split_documents <= account.documents
    assert 0 <= account.cut_documents <= account.documents
    assert 0 <= account.targets <= max(account.used - 1, 0)


shards = st.lists(st.lists(st.integers(0, 25), max_size=6), max_size=3)


@settings(max_examples=40, deadline=None)
@given(lengths=shards, seq_len=st.integers(1, 12))
def test_accounts_are_what_walking_the_rows_gives(lengths: list[list[int]], seq_len: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = numbered_store(Path(folder) / "store", lengths)
        for packing, kind in LAYOUTS.items():
            rows = kind(TokenStream(store), seq_len=seq_len)
            account = rows.account()
            assert_adds_up(account)
            assert account == walk(rows, packing=packing)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return numbered_store(tmp_path / "store", LENGTHS)


def test_a_small_store_is_accounted_for_like_this(store: Store) -> None:
    report = layout(store, seq_len=6)
    concat = Account(
        packing="concat",
        seq_len=6,
        rows=11,
        documents=8,
        tokens=65,
        used=65,
        dropped=0,
        repeated=10,
        padding=2,
        split_documents=5,
        cut_documents=0,
        targets=57,
    )
    assert report.accounts == (
        concat,
        replace(concat, packing="best-fit", rows=11, repeated=6, padding=6, split_documents=3),
        replace(
            concat,
            packing="pad",
            rows=8,
            used=36,
            dropped=29,
            repeated=0,
            padding=20,
            split_documents=0,
            cut_documents=3,
            targets=28,
        ),
    )


def test_a_document_whose_last_token_alone_is_in_the_next_row_is_not_split(tmp_path: Path) -> None:
    # Rows of 4 inputs begin at 0, 4, 8: the second document's last token is the first of a row,
    # but what it is predicted from is all in the row before.
    store = numbered_store(tmp_path, [[1, 4, 5]])
    account = ConcatLayout(TokenStream(store), seq_len=4).account()
    assert (account.rows, account.split_documents) == (3, 1)


def test_documents_of_one_token_and_of_none_have_no_targets(tmp_path: Path) -> None:
    store = numbered_store(tmp_path, [[0, 1, 0], [1, 0]])
    stream = TokenStream(store)
    concat, pad = (kind(stream, seq_len=1).account() for kind in (ConcatLayout, PadLayout))
    assert (concat.rows, concat.targets, concat.split_documents) == (1, 0, 0)
    assert (pad.rows, pad.targets, pad.padding) == (5, 0, 8)


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    report = layout(numbered_store(tmp_path, []), seq_len=8, batch_size=4)
    assert [account.rows for account in report.accounts] == [0, 0, 0]
    assert [report.steps(account) for account in report.accounts] == [0, 0, 0]
    for account in report.accounts:
        assert_adds_up(account)


def test_packings_may_be_chosen_and_steps_are_counted_to_the_last_row(store: Store) -> None:
    report = layout(store.path, seq_len=6, packings=["pad", "concat", "pad"], batch_size=3)
    assert [account.packing for account in report.accounts] == ["pad", "concat"]
    assert [report.steps(account) for account in report.accounts] == [3, 4]
    assert (report.store, report.split) == (str(store.path), "train")
    assert not store.layout.layouts.exists()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"seq_len": 0}, "seq_len 0"),
        ({"seq_len": 2**31}, "seq_len 2,147,483,648"),
        ({"seq_len": 8, "batch_size": 0}, "batch_size 0"),
        ({"seq_len": 8, "packings": ["best"]}, "'best-fit'"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(store: Store, wrong: dict[str, int], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        layout(store, **wrong)  # type: ignore[arg-type]


def test_a_split_that_is_not_there_is_refused_with_those_that_are(store: Store) -> None:
    with pytest.raises(StoreError, match="'train'"):
        layout(store.path, seq_len=8, split="val")


def test_every_packing_that_options_offer_has_a_layout_and_the_other_way_round() -> None:
    assert [*LAYOUTS] == [*PACKINGS]
    assert {kind.name for kind in LAYOUTS.values()} == {*PACKINGS}
