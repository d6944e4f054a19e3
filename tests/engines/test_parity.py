from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.detectors import detector_json, pattern_sets

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import describe, load_engine
from tokenmill.engines.parity import PIECE_BYTES, CheckedEngine, Sample, SpecialText
from tokenmill.engines.references import BytesEngine
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from pathlib import Path


class WrongOnZ(BytesEngine):
    """A fast engine with a flaw: it takes every Z for a z."""

    name = "wrong"

    def encode(self, texts: TextBatch) -> TokenBatch:
        tokens = super().encode(texts)
        return TokenBatch(np.where(tokens.ids == ord("Z"), ord("z"), tokens.ids), tokens.offsets)


def checked(fast: BytesEngine, probes: list[str] | None = None) -> CheckedEngine:
    return CheckedEngine(
        BytesEngine(special_tokens=SpecialTokens.TEXT),
        info=describe("bytes"),
        special_text=SpecialText([]),
        fast=fast,
        probes=probes or [],
    )


WRONG = WrongOnZ(special_tokens=SpecialTokens.TEXT)
RIGHT = BytesEngine(special_tokens=SpecialTokens.TEXT)


def test_probes_find_a_wrong_engine_and_pass_a_right_one() -> None:
    found = checked(WRONG, ["abc", "aZ", "zZ"]).check_probes()
    assert [mismatch.text for mismatch in found.mismatches] == ["aZ", "zZ"]
    assert found.mismatches[0].found == (97, 122)
    assert found.mismatches[0].expected == (97, 90)
    passed = checked(RIGHT, ["abc", "aZ"]).check_probes()
    assert (passed.num_documents, passed.mismatches) == (2, ())


def test_a_sample_finds_the_first_document_that_is_wrong() -> None:
    engine = checked(WRONG)
    batch = TextBatch.from_texts(["good"] * 3 + ["baZd"] * 3)
    result = engine.check_sample(batch, engine.encode(batch), Sample())
    assert (result.num_documents, result.num_bytes) == (4, 16)
    assert [mismatch.text for mismatch in result.mismatches] == ["baZd"]


def test_a_sample_finds_wrong_ids_whoever_made_them() -> None:
    engine = checked(RIGHT)
    batch = TextBatch.from_texts(["abcd"])
    tokens = engine.encode(batch)
    tokens.ids[2] += 1
    assert len(engine.check_sample(batch, tokens, Sample()).mismatches) == 1


def test_long_documents_are_checked_by_pieces_that_keep_characters_whole() -> None:
    engine = checked(WRONG)
    text = "\u4e2d\U0001f600Z" * 40_000
    batch = TextBatch.from_texts([text, text])
    pieces = Sample().choose(batch)
    assert len(pieces) > 5
    for index, start, stop in pieces:
        assert set(batch.bytes_at(index)[start:stop].decode()) <= {"\u4e2d", "\U0001f600", "Z"}
        assert stop - start <= PIECE_BYTES + 8
    assert {stop for _, _, stop in pieces} >= {len(text.encode())}, "the end is not looked at"
    assert engine.check_sample(batch, engine.encode(batch), Sample()).mismatches


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    end=st.sampled_from(["", " ", "\n ", "x\n", "\t"]),
)
def test_a_sample_follows_from_the_text_and_not_from_its_batches(
    sizes: list[int], cuts: list[int], end: str
) -> None:
    texts = [("ab " * size)[:size] + end * (size % 3) for size in sizes]
    whole = Sample().choose(TextBatch.from_texts(texts))
    sample, found = Sample(), []
    bounds = [0, *sorted(min(cut, len(texts)) for cut in cuts), len(texts)]
    for low, high in pairwise(bounds):
        batch = TextBatch.from_texts(texts[low:high])
        found += [(low + index, start, stop) for index, start, stop in sample.choose(batch)]
    assert found == whole


_ENDINGS = st.text("a \n\t1.\u00e9\u3000", max_size=9)


@given(batches=st.lists(st.lists(_ENDINGS, max_size=3), max_size=60), start=st.text("ab\u4e2d"))
def test_texts_that_pass_are_those_of_which_nothing_would_be_chosen(
    batches: list[list[str]], start: str
) -> None:
    batches = [[start * 9 + end for end in ends] for ends in batches]
    plain, quick = Sample(), Sample()
    passed = 0
    for texts in batches:
        chosen = plain.choose(TextBatch.from_texts(texts))
        if quick.passes(texts):
            passed += 1
            assert not chosen
        else:
            assert quick.choose(TextBatch.from_texts(texts)) == chosen != []
        assert vars(quick) == vars(plain)


@pytest.mark.parametrize(
    ("count", "size"), [(5, 100), (15_000, 400), (40, 100_000), (1, 20_000_000), (300_000, 8)]
)
def test_a_sample_holds_a_byte_in_4096_and_a_kilobyte_of_any_text(count: int, size: int) -> None:
    total = count * size
    sample, pieces = Sample(), 0
    for _ in range(4):
        batch = TextBatch.from_texts(["x" * size] * count)
        pieces += sum(stop - start for _, start, stop in sample.choose(batch))
    assert pieces >= min(4 * total, max(1024, 4 * total // 4096))
    assert pieces <= 4 * total // 4096 + 2048 * 40 + 256 * 40


def test_each_kind_of_ending_is_looked_at_and_again_when_there_are_more() -> None:
    texts = ["word" * 50] * 5000
    odd = {
        3000: "a\n ",
        3001: "a \n",
        3500: "a\t",
        4000: "a\n  ",
        4001: "a\n ",
        4900: "7",
        4901: "a\u00a0",
    }
    for index, text in odd.items():
        texts[index] = "word" * 300 + text
    chosen = {index for index, _, _ in Sample().choose(TextBatch.from_texts(texts))}
    assert set(odd) - chosen == {4000, 4001}, "the second and third of their kind"


@pytest.mark.parametrize("texts", [[], [""], ["", "", "a", ""]])
def test_tiny_and_empty_batches_can_be_sampled(texts: list[str]) -> None:
    engine = checked(RIGHT)
    batch = TextBatch.from_texts(texts)
    assert engine.check_sample(batch, engine.encode(batch), Sample()).mismatches == ()


def test_without_a_fast_engine_there_is_nothing_to_check(wordpiece_tokenizer_dir: Path) -> None:
    engine = load_engine(wordpiece_tokenizer_dir, choice="tokenizers")
    batch = TextBatch.from_texts(["some text"])
    assert engine.check_probes().num_documents == 0
    assert engine.check_sample(batch, engine.encode(batch), Sample()).num_documents == 0
    assert engine.recycle() is False


def test_documents_with_contested_characters_are_spliced_in_where_they_stood(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(detector_json(pattern_sets()[0])))
    engine = load_engine(path)
    assert engine.fast is not None
    contested = "a\u088fa \u088f\u088f"
    texts = [contested, "plain", "", contested + "x", "b", contested]
    batch = TextBatch.from_texts(texts)
    found, alone = engine.encode(batch), engine.fast.encode(batch)
    expected = engine.reference.encode(batch)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert alone.ids.tolist() != expected.ids.tolist(), "the routing is not needed"
