from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.strategies import batches

from tokenmill.engines.parity import SpecialText
from tokenmill.records import TextBatch

TOKENS = ["<|endoftext|>", "</s>", "[INST]", "a.b*c", "<\uff5cend\u2581of\uff5c>", "\\d", "(x)^$"]


@settings(max_examples=200, deadline=None)
@given(batches, st.lists(st.sampled_from(TOKENS), max_size=3), st.integers(0, 5))
def test_it_finds_the_strings_and_nothing_else(
    documents: list[str], planted: list[str], where: int
) -> None:
    position = where % len(documents)
    documents[position] += "".join(planted)
    found = SpecialText(TOKENS).find(TextBatch.from_texts(documents))
    assert found.tolist() == [any(token in text for token in TOKENS) for text in documents]


def test_a_batch_may_be_a_view_and_the_list_of_strings_empty() -> None:
    batch = TextBatch.from_texts(["</s>", "a", "b</s>", "</s", ">"])
    view = TextBatch(batch.data, batch.offsets[1:])
    assert SpecialText(["</s>"]).find(view).tolist() == [False, True, False, False]
    assert SpecialText([]).find(batch).tolist() == [False] * 5
