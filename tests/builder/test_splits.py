from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.builder.worker import in_validation
from tokenmill.records import TextBatch


def test_the_split_of_a_text_is_fixed_for_ever() -> None:
    texts = TextBatch.from_texts([f"document {n}" for n in range(40)])
    chosen = np.flatnonzero(in_validation(texts, 0.2)).tolist()
    # If this list changes, documents of existing stores move between splits.
    assert chosen == [0, 7, 11, 12, 18, 19, 21, 23, 33, 34, 37, 38]


def test_the_share_is_about_the_one_asked_for() -> None:
    texts = TextBatch.from_texts([f"text number {n}" for n in range(20_000)])
    share = in_validation(texts, 0.05).mean()
    assert 0.04 < share < 0.06


@given(st.lists(st.text(max_size=20), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_equal_texts_share_a_split_wherever_they_stand(texts: list[str], fraction: float) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    together = in_validation(TextBatch.from_texts(texts), fraction).tolist()
    alone = [bool(in_validation(TextBatch.from_texts([text]), fraction)[0]) for text in texts]
    assert together == alone
