from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.torch import slice_row


def test_zigzag_gives_every_peer_an_early_and_a_late_chunk() -> None:
    row = np.arange(8)
    assert slice_row(row, rank=0, size=2).tolist() == [0, 1, 6, 7]
    assert slice_row(row, rank=1, size=2).tolist() == [2, 3, 4, 5]


def test_contiguous_gives_every_peer_one_stretch() -> None:
    rows = np.arange(12).reshape(2, 6)
    parts = [slice_row(rows, rank=r, size=3, order="contiguous").tolist() for r in range(3)]
    assert parts == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


def test_one_peer_holds_the_whole_row() -> None:
    rows = np.arange(12).reshape(2, 6)
    for order in ("zigzag", "contiguous"):
        assert np.array_equal(slice_row(rows, rank=0, size=1, order=order), rows)


@given(size=st.integers(1, 9), chunk=st.integers(1, 4), batch=st.integers(1, 3))
def test_peers_together_hold_every_token_once_and_equal_causal_work(
    size: int, chunk: int, batch: int
) -> None:
    rows = np.arange(batch * 2 * size * chunk).reshape(batch, -1)
    zigzag = [slice_row(rows, rank=r, size=size) for r in range(size)]
    contiguous = [slice_row(rows, rank=r, size=size, order="contiguous") for r in range(size)]

    for parts in (zigzag, contiguous):
        assert {part.shape for part in parts} == {(batch, 2 * chunk)}
        assert np.array_equal(np.sort(np.concatenate(parts, axis=1)), rows)
    # Token number p attends to p + 1 tokens.
    assert len({int((part[0] + 1).sum()) for part in zigzag}) == 1


@pytest.mark.parametrize(
    ("seq_len", "rank", "size", "order", "reason"),
    [
        (6, 0, 2, "zigzag", "rows of 6 tokens cannot be cut into 4 equal chunks"),
        (7, 0, 2, "contiguous", "rows of 7 tokens cannot be cut into 2 equal chunks"),
        (8, 2, 2, "zigzag", "rank 2 of 2"),
        (8, -1, 2, "zigzag", "rank -1 of 2"),
        (8, 0, 0, "zigzag", "rank 0 of 0"),
        (8, 0, 2, "ring", "order='ring'"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_reason(
    seq_len: int, rank: int, size: int, order: str, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        slice_row(np.arange(seq_len), rank=rank, size=size, order=order)
