from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.builder.worker import enough_share, split_batch
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch


def make_batch(rows: list[bytes | None], *, first_row: int, extra_bytes: int) -> RowBatch:
    """Rows with text, and None for rejected ones."""
    texts = [row for row in rows if row is not None]
    return RowBatch(
        TextBatch.from_texts(texts),
        np.array([first_row + i for i, row in enumerate(rows) if row is not None], np.int64),
        tuple(
            Reject(first_row + i, RejectReason.INVALID_JSON, "bad")
            for i, row in enumerate(rows)
            if row is None
        ),
        num_rows=len(rows),
        num_bytes=sum(map(len, texts)) + extra_bytes,
        largest_row_bytes=max(map(len, texts), default=0),
    )


@given(
    rows=st.lists(st.none() | st.binary(max_size=8), max_size=12),
    first_row=st.integers(0, 5),
    most_bytes=st.integers(1, 20),
    extra_bytes=st.integers(0, 30),
)
def test_parts_of_a_batch_hold_every_row_once_and_in_order(
    rows: list[bytes | None], first_row: int, most_bytes: int, extra_bytes: int
) -> None:
    batch = make_batch(rows, first_row=first_row, extra_bytes=extra_bytes)
    parts = list(split_batch(batch, most_bytes))
    texts = [part.texts.bytes_at(i) for part in parts for i in range(len(part.texts))]
    assert texts == [row for row in rows if row is not None]
    assert [row for part in parts for row in part.rows.tolist()] == batch.rows.tolist()
    assert sorted(reject.row for part in parts for reject in part.rejects) == [
        reject.row for reject in batch.rejects
    ]
    assert sum(part.num_rows for part in parts) == batch.num_rows
    assert sum(part.num_bytes for part in parts) == batch.num_bytes
    assert all(part.texts.num_bytes <= most_bytes or len(part.texts) == 1 for part in parts)
    # Rows of a part come before all rows of the next one: a limit cuts both kinds alike.
    for before, after in itertools.pairwise(parts):
        early = [*before.rows.tolist(), *(reject.row for reject in before.rejects)]
        late = [*after.rows.tolist(), *(reject.row for reject in after.rejects)]
        assert max(early) < min(late)


@given(st.integers(1, 10**6), st.integers(0, 10**7))
@example(29, 71)
def test_the_share_that_a_failed_build_offers_lets_it_pass(rejected: int, kept: int) -> None:
    used = rejected + kept
    share = float(enough_share(rejected, used))
    assert rejected <= share * used
    assert share <= min(1.0, max(rejected / used + 0.02, 5 * rejected / used) + 1e-9)
