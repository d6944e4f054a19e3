from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.engines.detectors import detector_json, pattern_sets

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.describe import describe
from tokenmill.engines.load import load_engine
from tokenmill.engines.parity import SLICE_BYTES, CheckedEngine
from tokenmill.engines.raw_bytes import BytesEngine
from tokenmill.engines.special_text import SpecialText
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


def test_a_sample_finds_a_document_that_is_wrong() -> None:
    engine = checked(WRONG)
    batch = TextBatch.from_texts(["good"] * 3 + ["baZd"] * 3)
    result = engine.check_sample(batch, engine.encode(batch), seed=1)
    assert result.num_documents == 6
    assert {mismatch.text for mismatch in result.mismatches} == {"baZd"}


def test_a_sample_finds_wrong_ids_whoever_made_them() -> None:
    engine = checked(RIGHT)
    batch = TextBatch.from_texts(["abcd"])
    tokens = engine.encode(batch)
    tokens.ids[2] += 1
    assert len(engine.check_sample(batch, tokens, seed=0).mismatches) == 1


def test_long_documents_are_checked_by_slices_that_keep_characters_whole() -> None:
    engine = checked(WRONG)
    batch = TextBatch.from_texts(["\u4e2d\U0001f600Z" * 40_000])
    for seed in range(20):
        result = engine.check_sample(batch, engine.encode(batch), seed=seed, budget_bytes=5000)
        assert 5000 <= result.num_bytes <= 5000 + 16
        assert result.mismatches
        for mismatch in result.mismatches:
            assert len(mismatch.text.encode()) <= SLICE_BYTES + 8
            assert set(mismatch.text) <= {"\u4e2d", "\U0001f600", "Z"}


def test_a_sample_is_small_reproducible_and_different_for_each_seed() -> None:
    engine = checked(WRONG)
    batch = TextBatch.from_texts([f"{i} Z" + "x" * 200 for i in range(20_000)])
    tokens = engine.encode(batch)
    results = [engine.check_sample(batch, tokens, seed=seed) for seed in ("a", "a", "b")]
    assert results[0] == results[1]
    assert results[0].mismatches != results[2].mismatches
    assert 2048 <= results[0].num_bytes < 2048 + SLICE_BYTES
    assert engine.check_sample(batch, tokens, seed=0, budget_bytes=50_000).num_bytes < 60_000


@pytest.mark.parametrize("texts", [[], [""], ["", "", "a", ""]])
def test_tiny_and_empty_batches_can_be_sampled(texts: list[str]) -> None:
    engine = checked(RIGHT)
    batch = TextBatch.from_texts(texts)
    assert engine.check_sample(batch, engine.encode(batch), seed=3).mismatches == ()


def test_without_a_fast_engine_there_is_nothing_to_check(wordpiece_tokenizer_dir: Path) -> None:
    engine = load_engine(wordpiece_tokenizer_dir)
    batch = TextBatch.from_texts(["some text"])
    assert engine.check_probes().num_documents == 0
    assert engine.check_sample(batch, engine.encode(batch), seed=0).num_documents == 0
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
