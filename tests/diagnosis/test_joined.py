from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tokenmill.diagnosis.ways import compare, split_ids, token_sizes
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.references import HuggingFaceEngine, SentencePieceEngine
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.engines.base import Engine

LETTERS = {"a": 0, "b": 1, "\n": 2}


def engine_with(folder: Path, merges: list[tuple[str, str]]) -> HuggingFaceEngine:
    """A BPE over three characters, with these merges."""
    vocab = LETTERS | {left + right: 3 + n for n, (left, right) in enumerate(merges)}
    path = folder / "tokenizer.json"
    Tokenizer(models.BPE(vocab=vocab, merges=merges)).save(str(path))
    return HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT)


def differing(engine: Engine, texts: list[str], *, vocab_size: int, batch: int) -> tuple[int, int]:
    return compare(engine, texts, sizes=token_sizes(engine, vocab_size), batch=batch)


def test_a_merge_over_the_seam_is_counted_in_every_document_that_it_changes(tmp_path: Path) -> None:
    merging = engine_with(tmp_path, [("a", "\n")])
    # All but the last of a group have a seam behind them; b does not merge with it.
    assert differing(merging, ["ba", "ab", "a", "aa"], vocab_size=4, batch=4) == (4, 2)
    assert differing(merging, ["ba", "ab", "a", "aa"], vocab_size=4, batch=1) == (4, 0)
    at_the_front = engine_with(tmp_path, [("\n", "b")])
    assert differing(at_the_front, ["ba", "ab", "b", "bb"], vocab_size=4, batch=2) == (4, 1)


def test_documents_are_the_same_where_nothing_merges_with_the_seam(tmp_path: Path) -> None:
    plain = engine_with(tmp_path, [("a", "b")])
    assert differing(plain, ["ab", "ba", "abab", "b"], vocab_size=4, batch=3) == (4, 0)


def test_ids_are_split_where_the_texts_were_joined(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, [("a", "b")])
    texts = ["ab", "a\nb", "b"]
    ids = engine.encode(TextBatch.from_texts(["\n\n".join(texts)])).ids
    parts = split_ids(ids, texts, token_sizes(engine, 4))
    assert parts is not None
    assert [part.tolist() for part in parts] == [[3], [0, 2, 1], [1]]


def test_a_real_tokenizer_with_a_space_in_front_differs_behind_every_seam(
    sentencepiece_bpe_model: Path,
) -> None:
    engine = SentencePieceEngine(sentencepiece_bpe_model, special_tokens=SpecialTokens.TEXT)
    # Only the first document of a joined string gets the space that the model puts in front.
    assert differing(engine, ["import os", "import re"], vocab_size=1200, batch=2) == (2, 1)


@pytest.mark.parametrize("name", ["unigram_tokenizer_dir", "wordpiece_tokenizer_dir"])
def test_borders_are_lost_where_a_tokenizer_changes_the_text(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    engine = HuggingFaceEngine(folder / "tokenizer.json", special_tokens=SpecialTokens.TEXT)
    texts = ["\ufb01ne  words", "more of them"]
    assert differing(engine, texts, vocab_size=2000, batch=2) == (0, 0)


def test_texts_of_several_bytes_a_letter_are_split_by_bytes(bpe_tokenizer_dir: Path) -> None:
    path = bpe_tokenizer_dir / "tokenizer.json"
    engine = HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT)
    texts = ["\u4f60\u597d", "caf\u00e9", "\U0001f600"]
    sizes = token_sizes(engine, 2000)
    ids = engine.encode(TextBatch.from_texts(["\n\n".join(texts)])).ids
    parts = split_ids(ids, texts, sizes)
    assert parts is not None
    assert [engine.decode(part) for part in parts] == texts
    assert np.concatenate(parts).size < len(ids)
