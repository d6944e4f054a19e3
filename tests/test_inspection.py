from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill
from tokenmill.cli import show
from tokenmill.errors import UsageError
from tokenmill.inspection import count_ids, inspect, losses, measure_lengths

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["a" * 3, "ab", "\u20ac", "b" * 40, "x" * 600]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, None]))
    tokenmill.build(source, tokenizer="bytes", out=tmp_path / "store", max_rejects=0.5, serial=True)
    return tmp_path / "store"


def test_lengths_and_tokens_are_counted_exactly(store: Path) -> None:
    found = inspect(store)
    assert found.lengths is not None
    assert (found.lengths.shortest, found.lengths.longest) == (3, 601)
    assert found.lengths.mean == (4 + 3 + 4 + 41 + 601) / 5
    assert found.lengths.percentiles[50] == 4
    assert [
        (b.low, b.high, b.documents, b.tokens) for b in found.lengths.histogram if b.documents
    ] == [
        (2, 4, 1, 3),
        (4, 8, 2, 8),
        (32, 64, 1, 41),
        (512, 1024, 1, 601),
    ]
    assert [(top.text, top.count) for top in found.top_tokens[:3]] == [
        ("x", 600),
        ("b", 41),
        ("<|endoftext|>", 5),
    ]
    assert found.tokens_counted == found.totals.tokens == 653
    assert found.ids_seen == 7
    assert found.rejects == {"null-text": 1}


def test_half_characters_are_shown_as_bytes(store: Path) -> None:
    view = inspect(store, doc=2).document
    assert view is not None
    assert [token.text for token in view.tokens] == ["\\xe2", "\\x82", "\\xac", "<|endoftext|>"]
    assert view.text.startswith("\u20ac")
    assert (view.row, view.split) == (2, "train")


def test_a_document_that_is_not_there_is_refused(store: Path) -> None:
    with pytest.raises(UsageError, match=r"no document 5: '.*' has 5, counted from 0") as caught:
        inspect(store, doc=5)
    assert caught.value.hint == "use a number from 0 to 4"


def test_a_large_store_is_sampled_evenly(store: Path) -> None:
    counts = count_ids(tokenmill.Store(store), most_tokens=200, chunk_tokens=10)
    assert 150 <= counts.sum() <= 200
    assert counts.argmax() == ord("x")


@given(st.lists(st.lists(st.integers(1, 3000), max_size=50), min_size=1, max_size=4))
def test_length_facts_agree_with_a_plain_sort(parts: list[list[int]]) -> None:
    flat = sorted(length for part in parts for length in part)
    found = measure_lengths((np.array(part, np.int32) for part in parts), long_tokens=1000)
    if not flat:
        assert found is None
        return
    assert found is not None
    assert (found.shortest, found.longest) == (flat[0], flat[-1])
    assert found.mean == pytest.approx(sum(flat) / len(flat))
    for percent, value in found.percentiles.items():
        assert value == flat[min(len(flat) * percent // 100, len(flat) - 1)]
    assert sum(one.documents for one in found.histogram) == len(flat)
    assert sum(one.tokens for one in found.histogram) == sum(flat)
    for one in found.histogram:
        assert one.documents == sum(one.low <= length < one.high for length in flat)


@pytest.fixture
def lossy(tmp_path: Path, sentencepiece_unigram_model: Path) -> Path:
    """A store by a model with SentencePiece's own normalization."""
    texts = ["plain words here", "two\nlines", "so  much   space", "a \u2124 b", "Big words"]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "store"
    tokenmill.build(
        source, tokenizer=sentencepiece_unigram_model, out=out, serial=True, max_unknown=1
    )
    return out


def test_documents_are_compared_with_their_source_and_what_is_lost_is_named(
    lossy: Path, tmp_path: Path
) -> None:
    found = inspect(lossy).recovery
    assert found is not None
    assert (found.documents, found.same) == (5, 2)
    assert found.lost["line breaks"] == 1
    assert found.lost["runs of spaces"] == 1
    assert found.lost["wide and other forms of characters"] == 1
    assert found.example is not None
    assert (found.example.source, found.example.decoded) == ("two\nlines", "two lines")
    assert found.example.row == 1
    shown = show.recovery_text(found)
    assert shown.startswith("3 of 5 documents compared with the source cannot be had back (60.0%)")
    assert "line breaks lost in 1" in shown
    assert "'two\\nlines' became 'two lines' (row 1 of " in shown
    assert inspect(lossy, sample=0).recovery is None
    assert inspect(lossy, doc=0).recovery is None
    (tmp_path / "texts.jsonl").unlink()
    assert inspect(lossy).recovery is None


def test_documents_that_can_be_had_back_are_said_to_be_so(store: Path) -> None:
    found = inspect(store).recovery
    assert found is not None
    assert (found.documents, found.same, found.lost) == (len(TEXTS), len(TEXTS), {})
    assert found.example is None
    assert show.recovery_text(found).endswith("decoded, each is its text")


@pytest.mark.parametrize(
    ("text", "decoded", "lost"),
    [
        ("Caf\u00e9", "cafe", ["capital letters", "accents"]),
        ("\uff21 \ufb01", "A fi", ["wide and other forms of characters"]),
        ("e\u0301", "\u00e9", ["how accents are composed"]),
        ("don't", "don ' t", ["where spaces are"]),
        (" a ", "a", ["space at the ends"]),
        ("a\r\nb", "a b", ["line breaks"]),
        ("abc", "abd", ["other characters"]),
    ],
)
def test_what_is_lost_has_a_name(text: str, decoded: str, lost: list[str]) -> None:
    assert losses(text, decoded) == lost


def test_only_units_that_can_be_read_from_their_beginning_are_compared(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"text {i} " * 20}) + "\n" for i in range(300))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    out = tmp_path / "store"
    result = tokenmill.build(
        tmp_path / "a.jsonl.gz", tokenizer="bytes", out=out, serial=True, unit_bytes=10_000
    )
    assert result.units_built > 3
    found = inspect(out).recovery
    assert found is not None
    assert 0 < found.documents == found.same < 20
