from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.loader.stores import numbered_store

from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.packing import PADDING, BestFitLayout
from tokenmill.store.plans import HEADER_BYTES, MAX_ITEM_TOKENS
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.loader.packing import Pieces
    from tokenmill.store.reader import Store

SEQ_LEN = 6
LENGTHS = [[3, 5, 2], [11, 1, 4, 30, 9], [7, 7, 14, 2, 2]]
PAD = 59_999


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return numbered_store(tmp_path / "store", LENGTHS)


@pytest.fixture
def layout(store: Store) -> BestFitLayout:
    return BestFitLayout(TokenStream(store), seq_len=SEQ_LEN)


def as_lists(pieces: Pieces) -> list[tuple[int, int]]:
    return list(zip(pieces[0].tolist(), pieces[1].tolist(), strict=True))


def row_by_row(layout: BestFitLayout) -> list[list[tuple[int, int]]]:
    return [as_lists(layout.pieces(np.array([row]))) for row in range(layout.num_rows)]


def test_rows_hold_whole_documents_and_the_pieces_of_long_ones(layout: BestFitLayout) -> None:
    assert row_by_row(layout) == [
        [(0, 3), (22, 4)],
        [(3, 5), (8, 2)],
        [(10, 7)],
        [(16, 5), (91, 2)],
        [(21, 1), (50, 6)],
        [(26, 7)],
        [(32, 7)],
        [(38, 7)],
        [(44, 7)],
        [(56, 7)],
        [(62, 3), (93, 2), (95, 2)],
        [(65, 7)],
        [(72, 7)],
        [(79, 7)],
        [(85, 7)],
    ]


def test_rows_asked_for_together_are_the_rows_asked_for_alone(layout: BestFitLayout) -> None:
    alone = row_by_row(layout)
    rows = np.random.default_rng(0).integers(0, layout.num_rows, 200)
    together = as_lists(layout.pieces(rows))
    assert together == [piece for row in rows.tolist() for piece in alone[row]]
    assert as_lists(layout.segments(rows)) == together
    assert as_lists(layout.pieces(np.empty(0, np.int64))) == []


def test_pieces_fill_every_row_exactly_and_padding_comes_last(store: Store) -> None:
    rows = row_by_row(BestFitLayout(TokenStream(store), seq_len=9))
    padded = [row for row in rows if row[-1][0] == PADDING]
    assert 0 < len(padded) < len(rows)
    for row in rows:
        assert sum(length for _, length in row) == 9 + 1
        assert all(length > 0 for _, length in row)
        assert all(start != PADDING for start, _ in row[:-1])


def test_every_pair_of_neighbouring_tokens_of_a_document_is_in_exactly_one_row(
    store: Store, layout: BestFitLayout
) -> None:
    pieces = layout.pieces(np.arange(layout.num_rows))
    read = layout.stream.read(pieces[0], pieces[1], pad=PAD)
    tokens = read.reshape(layout.num_rows, SEQ_LEN + 1)
    found = [
        (first, second)
        for row in tokens.tolist()
        for first, second in itertools.pairwise(row)
        if second == first + 1 and _document(store, first) == _document(store, second)
    ]
    expected = [pair for document in store for pair in itertools.pairwise(document.tolist())]
    assert sorted(found) == expected
    assert layout.account().targets == len(expected)


def _document(store: Store, token: int) -> int:
    """The document that a token of a numbered store is of."""
    ends = np.cumsum(store.lengths())
    return int(np.searchsorted(ends, token, side="right"))


def test_a_store_without_documents_has_no_rows(tmp_path: Path) -> None:
    layout = BestFitLayout(TokenStream(numbered_store(tmp_path, [[]])), seq_len=3)
    assert layout.num_rows == 0
    assert as_lists(layout.pieces(np.empty(0, np.int64))) == []
    account = layout.account()
    assert (account.rows, account.tokens, account.targets, account.padding) == (0, 0, 0, 0)


def test_a_pickled_layout_opens_its_plan_again(layout: BestFitLayout) -> None:
    data = pickle.dumps(layout)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert row_by_row(again) == row_by_row(layout)
    assert again.fingerprint == layout.fingerprint


def test_a_fingerprint_is_of_the_rows(tmp_path: Path, layout: BestFitLayout) -> None:
    same = numbered_store(tmp_path / "same", LENGTHS)
    other = numbered_store(tmp_path / "other", [*LENGTHS, [1]])
    assert BestFitLayout(TokenStream(same), seq_len=SEQ_LEN).fingerprint == layout.fingerprint
    assert BestFitLayout(TokenStream(other), seq_len=SEQ_LEN).fingerprint != layout.fingerprint
    assert BestFitLayout(TokenStream(same), seq_len=5).fingerprint != layout.fingerprint


def test_progress_is_told_when_a_plan_is_made_and_only_then(store: Store) -> None:
    calls: list[tuple[int, int]] = []
    for _ in range(2):
        BestFitLayout(
            TokenStream(store), seq_len=9, progress=lambda done, total: calls.append((done, total))
        )
    assert calls == [(13, 13)]


@pytest.mark.parametrize("seq_len", [0, -1, MAX_ITEM_TOKENS])
def test_a_length_that_a_plan_cannot_hold_is_refused(store: Store, seq_len: int) -> None:
    with pytest.raises(UsageError, match="concat"):
        BestFitLayout(TokenStream(store), seq_len=seq_len)
    assert not store.layout.layouts.exists()


def test_rows_may_be_a_million_tokens_long(store: Store) -> None:
    layout = BestFitLayout(TokenStream(store), seq_len=2**20)
    assert layout.num_rows == 1
    pieces = layout.pieces(np.array([0]))
    documents = np.cumsum(store.lengths()) - store.lengths()
    assert pieces[1].sum() == 2**20 + 1
    assert pieces[0].tolist() == [*documents, PADDING]


def test_a_plan_that_was_changed_is_not_read_over_the_end_of_a_row(
    store: Store, layout: BestFitLayout
) -> None:
    (path,) = store.layout.layouts.iterdir()
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 1] ^= 1
    path.write_bytes(data)
    changed = BestFitLayout(TokenStream(store), seq_len=SEQ_LEN)
    with pytest.raises(StoreError, match="delete the file"):
        changed.pieces(np.array([0]))
