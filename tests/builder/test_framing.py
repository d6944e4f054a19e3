from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.builder.encode import Scratch, frame_documents
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence


def framed_by_hand(
    documents: Sequence[Sequence[int]], *, bos: int | None, eos: int | None
) -> tuple[list[int], list[int]]:
    rows = [
        [*([] if bos is None else [bos]), *document, *([] if eos is None else [eos])]
        for document in documents
    ]
    return [token for row in rows for token in row], [len(row) for row in rows]


@given(
    documents=st.lists(st.lists(st.integers(0, 60000), min_size=1, max_size=6), max_size=8),
    long_tokens=st.integers(0, 400),
    chosen=st.sets(st.integers(0, 8)),
    take_all=st.booleans(),
    bos=st.none() | st.just(7),
    eos=st.none() | st.just(9),
)
def test_documents_are_framed_as_one_would_by_hand(
    documents: list[list[int]],
    long_tokens: int,
    chosen: set[int],
    take_all: bool,
    bos: int | None,
    eos: int | None,
) -> None:
    # A long document moves the mean, so that both ways of placing ids are taken.
    if long_tokens:
        documents = [*documents, list(range(long_tokens))]
    tokens = TokenBatch.from_lists(documents)
    scratch = Scratch()
    # Leftovers of an earlier batch must not shine through.
    scratch.take(5000, np.dtype("<u2"))[:] = 12345
    picked = sorted(i for i in range(len(documents)) if take_all or i in chosen)
    ids, lengths = frame_documents(
        tokens.ids,
        tokens.offsets,
        documents=np.array(picked, np.int64),
        dtype=np.dtype("<u2"),
        frame=(bos, eos),
        scratch=scratch,
    )
    expected = [documents[index] for index in picked]
    assert (ids.tolist(), lengths.tolist()) == framed_by_hand(expected, bos=bos, eos=eos)
    assert ids.dtype == np.dtype("<u2")
