from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engines.gigatoken import contested_ranges
from tokenmill.engines.parity import Prescan
from tokenmill.records import TextBatch

SWEPT = [("tokenizers", "0.23.3"), ("gigatoken", "0.10.0")]
RANGES = contested_ranges(patterns=r"\p{S}", normalizes=True, engines=SWEPT) or []
CONTESTED = {point for low, high in RANGES for point in range(low, high + 1)}

near_contested = st.sampled_from(sorted(CONTESTED)).flatmap(
    lambda point: st.integers(
        max(0x80, point - 70), min(point + 70, 0xD7FF if point < 0xD800 else 0x10FFFF)
    )
)
characters = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    near_contested.map(chr),
    st.just("a" * 100),
    st.just("\u20ac\u4e2d\U0001f600" * 60),
)
texts = st.lists(st.lists(characters, max_size=8).map("".join), max_size=6)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_it_finds_exactly_the_documents_with_a_contested_character(documents: list[str]) -> None:
    found = Prescan(RANGES).find(TextBatch.from_texts(documents))
    expected = [i for i, text in enumerate(documents) if CONTESTED & set(map(ord, text))]
    assert found.tolist() == expected


@pytest.mark.parametrize("point", [RANGES[0][0], RANGES[-1][1], 0x088F, 0x20C1])
@pytest.mark.parametrize("shift", range(-4, 3))
def test_a_character_on_the_border_of_two_chunks_is_found(point: int, shift: int) -> None:
    before = "a" * ((1 << 18) + shift)
    batch = TextBatch.from_texts(["x", before + chr(point) + "b", "y"])
    assert Prescan(RANGES).find(batch).tolist() == [1]


@pytest.mark.parametrize("filler", ["\u20ac", "\uff0c\u4f60", "\U0001f600", "\u0c5b\u0c5d"])
def test_scripts_full_of_the_same_first_bytes_are_searched_too(filler: str) -> None:
    documents = [filler * 5000, filler * 5000 + "\u0c5c" + filler, filler * 5000]
    assert Prescan(RANGES).find(TextBatch.from_texts(documents)).tolist() == [1]


def test_a_batch_may_be_a_view_into_a_larger_buffer() -> None:
    batch = TextBatch.from_texts(["\u088f", "ab", "", "\u088f", "", "\u088f"])
    view = TextBatch(batch.data, batch.offsets[1:5])
    assert Prescan(RANGES).find(view).tolist() == [2]
    assert Prescan(RANGES).find(TextBatch(batch.data, batch.offsets[:1])).tolist() == []


def test_classes_that_the_patterns_do_not_name_are_not_contested() -> None:
    letters = contested_ranges(patterns=r"\p{L}\p{N}", normalizes=False, engines=SWEPT)
    assert letters
    batch = TextBatch.from_texts(["\u20c1", "\u1ad0", "\u0897", "\u088f"])
    assert Prescan(letters).find(batch).tolist() == [3]
    assert Prescan(RANGES).find(batch).tolist() == [0, 1, 2, 3]


def test_versions_that_were_not_swept_are_not_trusted_blindly() -> None:
    older = [("tokenizers", "0.20.3"), ("gigatoken", "0.10.0")]
    assert contested_ranges(patterns="", normalizes=False, engines=older) is None
    newer = contested_ranges(
        patterns="", normalizes=False, engines=[("tokenizers", "1.7.0"), ("gigatoken", "0.10.0")]
    )
    assert newer is not None
    unassigned = TextBatch.from_texts(["\u0378", "abc", "\U000e0fff"])
    assert Prescan(newer).find(unassigned).tolist() == [0, 2]


def test_the_positions_are_integers_that_can_index() -> None:
    found = Prescan(RANGES).find(TextBatch.from_texts(["\u088f"]))
    assert found.dtype == np.int64
