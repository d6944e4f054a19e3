"""What `grep` finds is what decoding every document and looking for the text finds."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builder.stores import make_texts, write_jsonl
from tests.once import once

import tokenmill
from tokenmill import search
from tokenmill.errors import UsageError
from tokenmill.search import GrepResult, grep

if TYPE_CHECKING:
    from pathlib import Path

# Reached over by matches: ends of tokens, of documents and of what is looked at in one go.
TEXTS = [
    *make_texts(14),
    *["aaaaaaa", "aaaa", "aa ab\n\naab", "a", " leading", "\u00e9t\u00e9 \u6c34\u6c34 \U0001f600"],
    "<|endoftext|> is text, and so is </s>",
    "grain " * 60,
]
KINDS = ("bytes", "bpe", "unigram", "wordpiece", "spm-bpe", "spm-unigram", "tiktoken")


@pytest.fixture(scope="module")
def stores(
    tmp_path_factory: pytest.TempPathFactory,
    bpe_tokenizer_dir: Path,
    unigram_tokenizer_dir: Path,
    wordpiece_tokenizer_dir: Path,
    sentencepiece_bpe_model: Path,
    sentencepiece_unigram_model: Path,
) -> dict[str, Path]:
    """The same texts in the ids of every kind of tokenizer, in three units, with a split val."""

    def make(folder: Path) -> dict[str, Path]:
        tokenizers: dict[str, str | Path] = {
            "bytes": "bytes",
            "bpe": bpe_tokenizer_dir,
            "unigram": unigram_tokenizer_dir,
            "wordpiece": wordpiece_tokenizer_dir,
            "spm-bpe": sentencepiece_bpe_model,
            "spm-unigram": sentencepiece_unigram_model,
            "tiktoken": _rank_file(folder),
        }
        files = [write_jsonl(folder / f"{n}.jsonl", TEXTS[n::3]) for n in range(3)]
        for name, tokenizer in tokenizers.items():
            tokenmill.build(
                files, tokenizer=tokenizer, out=folder / name, val=0.2, serial=True, max_unknown=1
            )
        return {name: folder / name for name in tokenizers}

    return once(tmp_path_factory, "searched", make)


def brute_force(store: tokenmill.Store, text: str) -> list[tuple[str, int, int]]:
    """Split, number in it, and how many matches."""
    numbers = dict.fromkeys(("train", "val"), 0)
    found = []
    for shard in store.shards:
        for number in range(shard.first_document, shard.first_document + shard.documents):
            if times := store.decode(number).count(text):
                found.append((shard.split, numbers[shard.split], times))
            numbers[shard.split] += 1
    return found


def places_of(text: str, whole: str) -> int:
    """Where it begins, also inside of itself."""
    return sum(whole.startswith(text, place) for place in range(len(whole)))


def counted(found: GrepResult) -> list[tuple[str, int, int]]:
    groups = itertools.groupby(found.matches, lambda each: (each.split, each.document))
    return [(*document, len(list(matches))) for document, matches in groups]


@pytest.mark.parametrize("kind", KINDS)
def test_every_match_is_found_and_no_other(
    stores: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "CHUNK_TOKENS", 40)
    monkeypatch.setattr(search, "BLOCK_TOKENS", 150)
    monkeypatch.setattr(search, "FEW_IDS", 3)
    store = tokenmill.Store(stores[kind], split=None)
    decoded = [store.decode(number) for number in range(len(store))]
    assert (grep(store, "grain").decoded_by is None) == (kind != "wordpiece")
    splits = {split: tokenmill.Store(stores[kind], split=split) for split in ("train", "val")}

    # WordPiece's package decodes every document each time.
    @settings(max_examples=6 if kind == "wordpiece" else 25, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        whole = data.draw(st.sampled_from(decoded))
        first = data.draw(st.integers(0, max(0, len(whole) - 1)))
        size = data.draw(st.sampled_from([1, 2, 3, 5, 9, 60]))
        text = whole[first : first + size] or "a"
        if data.draw(st.integers(0, 4)) == 0:
            text += data.draw(st.sampled_from(["a", " ", "\u6c34", "grain", "\n"]))
        found = grep(store, text, limit=100_000, context=6)
        assert counted(found) == brute_force(store, text)
        assert found.num_documents == len(brute_force(store, text))
        for match in found.matches[:5]:
            document = splits[match.split]
            around = match.before + text + match.after
            assert around.strip("\ufffd") in document.decode(match.document)
            # The fewest tokens that hold it: without either end they hold one less. None is too
            # much to ask, since a token at an end may hold another.
            ids = document[match.document]
            span = ids[match.token : match.token + match.tokens]
            if kind in ("bytes", "bpe", "tiktoken"):
                times = places_of(text, store.reference.decode(span))
                assert times > places_of(text, store.reference.decode(span[1:]))
                assert times > places_of(text, store.reference.decode(span[:-1]))

    check()


def test_what_is_around_a_document_is_no_part_of_its_text(stores: dict[str, Path]) -> None:
    found = grep(stores["bpe"], "<|endoftext|>")
    assert [match.tokens > 1 for match in found.matches] == [True]  # the one that a document says
    assert grep(stores["bpe"], "aa", split="val", limit=0).split == "val"


def test_a_place_is_that_of_the_document_in_its_source(stores: dict[str, Path]) -> None:
    (match,) = grep(stores["spm-bpe"], "leading").matches
    rows = TEXTS[TEXTS.index(" leading") % 3 :: 3]
    assert match.source.path.endswith(f"{TEXTS.index(' leading') % 3}.jsonl")
    assert rows[match.source.row] == " leading"


def test_text_that_the_tokenizer_writes_otherwise_is_told(stores: dict[str, Path]) -> None:
    found = grep(stores["wordpiece"], "GRAIN")
    assert (found.num_matches, found.written) == (0, "grain")
    assert grep(stores["bpe"], "nowhere at all").written is None


def test_what_cannot_be_looked_for_is_refused(stores: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="is empty"):
        grep(stores["bytes"], "")
    with pytest.raises(UsageError, match="is no text"):
        grep(stores["bytes"], "\ud800")


def _rank_file(folder: Path) -> Path:
    """A vocabulary of tiktoken's: all bytes, and some words."""
    import base64
    import json

    pieces = [bytes([byte]) for byte in range(256)] + [b"gr", b"ai", b"grai", b"grain", b" grain"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (folder / "words.tiktoken").write_text("".join(lines))
    told = {"pattern": r" ?\S+|\s+", "special_tokens": {"<|end|>": 261}, "eos_token": "<|end|>"}
    (folder / "words.tiktoken.json").write_text(json.dumps(told))
    return folder / "words.tiktoken"
