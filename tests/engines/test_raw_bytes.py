from __future__ import annotations

import pytest
from hypothesis import given
from tests.engines.strategies import batches

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import load_engine
from tokenmill.errors import UsageError
from tokenmill.records import TextBatch


@given(batches)
def test_bytes_are_their_own_ids_and_come_back(documents: list[str]) -> None:
    engine = load_engine("bytes")
    tokens = engine.encode(TextBatch.from_texts(documents))
    for index, text in enumerate(documents):
        assert tokens[index].tolist() == list(text.encode())
        assert engine.decode(tokens[index]) == text


def test_the_end_of_text_is_shown_and_broken_text_does_not_fail() -> None:
    engine = load_engine("bytes")
    assert engine.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert engine.decode([0xFF]) == "\ufffd"
    assert engine.token_bytes(65) == b"A"


def test_a_special_token_string_means_nothing_to_bytes() -> None:
    batch = TextBatch.from_texts(["<|endoftext|>"])
    engine = load_engine("bytes", special_tokens=SpecialTokens.REJECT)
    assert engine.find_special(batch).tolist() == [False]
    with pytest.raises(UsageError, match="parse"):
        load_engine("bytes", special_tokens=SpecialTokens.PARSE)


def test_a_view_into_a_larger_buffer_starts_at_zero() -> None:
    batch = TextBatch.from_texts(["abc", "de"])
    tokens = load_engine("bytes").encode(TextBatch(batch.data, batch.offsets[1:]))
    assert (tokens.ids.tolist(), tokens.offsets.tolist()) == ([100, 101], [0, 2])
