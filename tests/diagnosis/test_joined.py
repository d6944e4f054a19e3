"""Joined by a delimiter token and split at its id: where that gives the same ids, and where not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sentencepiece

from tokenmill.diagnosis import diagnose
from tokenmill.diagnosis.ways import run_way

from .test_measure import job_of, keep

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["import os", "  two words \n", "x = \u4f60\u597d", "\U0001f600", "a", "end\n\n"] * 3


@pytest.fixture(scope="module")
def with_symbol(tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]) -> Path:
    """A SentencePiece model with the package's defaults and a symbol that it finds in a text."""
    folder = tmp_path_factory.mktemp("symbol")
    (folder / "text").write_text("\n".join(training_texts[:20]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "with"),
        vocab_size=600,
        user_defined_symbols=["<eod>"],
        minloglevel=2,
    )
    return folder / "with.model"


def test_special_tokens_that_the_tokenizer_finds_give_the_ids_of_each_document(
    tmp_path: Path, bpe_tokenizer_dir: Path
) -> None:
    result = run_way(job_of(keep(tmp_path, TEXTS), bpe_tokenizer_dir, way="joined"))
    assert result.problem is None
    assert "'<|endoftext|>'" in result.source
    assert (result.compared_documents, result.differing_documents) == (len(TEXTS), 0)
    assert not result.changes_ids
    [said] = diagnose.seams(result)
    assert "all 18 documents that were compared have the ids" in said
    assert "as long as no text contains the token" in said


def test_a_text_that_holds_the_delimiter_is_told_of(
    tmp_path: Path, bpe_tokenizer_dir: Path
) -> None:
    texts = [*TEXTS, "one <|endoftext|> two"]
    result = run_way(job_of(keep(tmp_path, texts), bpe_tokenizer_dir, way="joined"))
    assert result.problem is None
    assert (result.differing_documents, result.delimited_documents) == (0, 1)
    assert result.changes_ids
    assert "would be cut in two" in diagnose.seams(result)[0]
    # Also where there is no other to compare.
    alone = run_way(job_of(keep(tmp_path, texts[-1:]), bpe_tokenizer_dir, way="joined"))
    assert (alone.compared_documents, alone.delimited_documents) == (0, 1)
    assert "would be cut in two" in diagnose.seams(alone)[0]


def test_a_space_that_belongs_to_the_beginning_of_a_text_is_missing_after_a_symbol(
    tmp_path: Path, with_symbol: Path
) -> None:
    result = run_way(job_of(keep(tmp_path, ["import os"] * 8), with_symbol, way="joined"))
    assert result.problem is None
    # The first of each group of four has it.
    assert (result.compared_documents, result.differing_documents) == (8, 6)
    assert "6 of 8 documents (75%) get other ids" in diagnose.seams(result)[0]


def test_a_sentencepiece_model_without_such_a_symbol_cannot_be_joined(
    tmp_path: Path, sentencepiece_unigram_model: Path
) -> None:
    result = run_way(job_of(keep(tmp_path, TEXTS), sentencepiece_unigram_model, way="joined"))
    assert "takes </s> in a text for text" in str(result.problem)
    assert "--user_defined_symbols" in str(result.problem)
    assert diagnose.seams(result) == []
