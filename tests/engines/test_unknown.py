"""What a tokenizer does not know is found, character by character, as its reference says it."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import attack
from tests.once import once
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tokenmill.engines.load import describe, load_engine
from tokenmill.engines.unknown import Lost, UnknownText
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenmill.engines.parity import CheckedEngine

relaxed = attack(short=12, long=3000)
KINDS = ("spm-unigram", "spm-bpe", "unigram", "wordpiece", "wordlevel", "bpe", "bpe-fused")
DROPPING = ("dropping", "dropping-bytes")

_known = st.text("abcdefghijklmnop  .", max_size=12)
_strange = st.lists(
    st.sampled_from(
        [
            *"\u65e5\u672c\u8a9e\u306e\U0001f600\ufe0f~^\n\u3000\u2103\uac01\u00e9",
            *("e\u0301", "<unk>", "[UNK]", "\U0001f468\u200d\U0001f469", "  ", "x\u65e5y"),
        ]
    ),
    max_size=4,
).map("".join)
documents = st.lists(_known | _strange, max_size=8).map("".join)


def lines() -> list[str]:
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnop", k=dice.randint(1, 7))) for _ in range(300)]
    return [" ".join(dice.choices(words, k=12)) + "." for _ in range(400)]


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers of every kind, none of which has seen more than a few letters."""
    return once(tmp_path_factory, "unknowing", _train)


def _train(folder: Path) -> Path:
    import sentencepiece

    for kind in ("unigram", "bpe"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines()),
            model_prefix=str(folder / f"spm-{kind}"),
            vocab_size=120,
            model_type=kind,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    nothing: dict[str, Any] = {"vocab_size": 120, "show_progress": False}
    unk = ["<unk>"]
    space = pre_tokenizers.Metaspace()
    bpe = trainers.BpeTrainer(**nothing)
    of_unk = trainers.BpeTrainer(special_tokens=unk, **nothing)
    made: dict[str, tuple[Any, Any, Any, Any]] = {
        "unigram": (
            models.Unigram(),
            normalizers.NFKC(),
            space,
            trainers.UnigramTrainer(special_tokens=unk, unk_token="<unk>", **nothing),
        ),
        "wordpiece": (
            models.WordPiece(unk_token="[UNK]"),
            normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
            trainers.WordPieceTrainer(special_tokens=["[UNK]"], **nothing),
        ),
        "wordlevel": (
            models.WordLevel(unk_token="<unk>"),
            None,
            pre_tokenizers.Whitespace(),
            trainers.WordLevelTrainer(special_tokens=unk, **nothing),
        ),
        "bpe": (models.BPE(unk_token="<unk>"), None, space, of_unk),
        "bpe-fused": (models.BPE(unk_token="<unk>", fuse_unk=True), None, space, of_unk),
        "dropping": (models.BPE(), None, space, bpe),
        "dropping-bytes": (
            models.BPE(),
            None,
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            bpe,
        ),
    }
    for name, (model, normalizer, pre_tokenizer, trainer) in made.items():
        tokenizer = Tokenizer(model)
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.train_from_iterator(lines(), trainer)
        tokenizer.save(str(folder / f"{name}.json"))
    return folder


@cache
def load(folder: Path, name: str) -> tuple[CheckedEngine, UnknownText]:
    suffix = "model" if name.startswith("spm") else "json"
    engine = load_engine(folder / f"{name}.{suffix}")
    unknown = UnknownText.of(engine.info, engine.reference)
    assert unknown is not None
    return engine, unknown


def find(engine: CheckedEngine, unknown: UnknownText, texts: Sequence[str]) -> Lost:
    batch, counter = TextBatch.from_texts(texts), Counter[str]()
    found = unknown.find(batch, engine.encode(batch), counter)
    assert (found is None) == (not counter) or found is not None
    return found or Lost(*np.zeros((2, len(texts)), np.int64))


def lost_by_offsets(engine: CheckedEngine, unknown: UnknownText, text: str) -> str:
    """The characters of a text for which the reference has the unknown token alone."""
    reference: Any = engine.reference
    ids = reference.encode(TextBatch.from_texts([text])).ids.tolist()
    lost = set[int]()
    for number, (first, last) in zip(ids, reference.offsets(text), strict=True):
        if number == unknown.unknown.id and text[first:last] != unknown.unknown.token:
            lost |= {*range(first, last)}
    return "".join(text[place] for place in sorted(lost))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_lost_is_what_the_reference_has_no_other_id_for(
    tokenizers: Path, name: str
) -> None:
    engine, unknown = load(tokenizers, name)

    @relaxed
    @given(st.lists(documents, max_size=5))
    def check(texts: list[str]) -> None:
        found = find(engine, unknown, texts)
        expected = [lost_by_offsets(engine, unknown, text) for text in texts]
        assert found.characters.tolist() == list(map(len, expected))
        assert found.num_bytes.tolist() == [len(text.encode()) for text in expected]

    check()
    assert find(engine, unknown, ["\u65e5 ."]).num_bytes.tolist() == [3]


@pytest.mark.parametrize("name", DROPPING)
def test_what_is_dropped_without_a_word_is_found_too(tokenizers: Path, name: str) -> None:
    engine, unknown = load(tokenizers, name)
    assert (unknown.unknown.id, unknown.unknown.token) == (None, None)
    known = set("".join(lines()))

    @relaxed
    @given(st.lists(documents, max_size=5))
    def check(texts: list[str]) -> None:
        # That whitespace becomes a piece of its own kind is no loss of text.
        expected = [[c for c in text if c not in known and not c.isspace()] for text in texts]
        found = find(engine, unknown, [text.replace("\n", " ") for text in texts])
        lengths = list(map(len, expected))
        if name == "dropping-bytes":
            lengths = [n + text.count("\u3000") for n, text in zip(lengths, texts, strict=True)]
        assert found.characters.tolist() == lengths

    check()
    text = "\u65e5a\u672cb"
    assert len(engine.encode(TextBatch.from_texts([text])).ids) <= 3
    assert find(engine, unknown, [text]).characters.tolist() == [2]


@pytest.mark.parametrize("name", ["spm-unigram", "wordpiece", "dropping-bytes"])
def test_documents_are_looked_at_one_by_one(tokenizers: Path, name: str) -> None:
    engine, unknown = load(tokenizers, name)
    dice = random.Random(1)
    texts = ["".join(dice.choices("abc \u65e5\u672c\n~", k=dice.randint(0, 40))) for _ in range(99)]
    together = find(engine, unknown, texts)
    alone = [int(find(engine, unknown, [text]).num_bytes[0]) for text in texts]
    assert together.num_bytes.tolist() == alone
    batch, among = TextBatch.from_texts(texts), np.arange(3, 90, 4)
    some = unknown.find(batch, engine.encode(batch), Counter(), among=among)
    assert some is not None
    assert some.num_bytes.tolist() == together.num_bytes[among].tolist()


def test_a_document_of_any_length_is_looked_at_in_parts(tokenizers: Path) -> None:
    engine, unknown = load(tokenizers, "bpe-fused")
    text = "a \u65e5" * 10 + "\u672c" * 700_000 + " b\u65e5"
    counter = Counter[str]()
    batch = TextBatch.from_texts(["abc", text])
    asked: list[str] = []
    unknown._by_reference = asked.append  # type: ignore[method-assign, assignment]
    try:
        found = unknown.find(batch, engine.encode(batch), counter)
    finally:
        del unknown._by_reference
    assert found is not None
    assert not asked, "a run that is cut by a window is one run"
    assert found.characters.tolist() == [0, 700_011]
    assert counter == {"\u65e5": 11, "\u672c": 700_000}


@pytest.mark.parametrize(
    "fixture", ["bpe_tokenizer_dir", "sentencepiece_bpe_model"], ids=["byte-level", "fallback"]
)
def test_a_tokenizer_that_knows_every_byte_knows_every_text(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    assert describe(request.getfixturevalue(fixture)).unknown is None


def test_bytes_that_only_some_fallback_pieces_are_there_for_do_not_count(
    tokenizers: Path, tmp_path: Path
) -> None:
    content = json.loads((tokenizers / "bpe.json").read_text())
    content["model"]["byte_fallback"] = True
    content["model"]["vocab"] |= {f"<0x{byte:02X}>": 1000 + byte for byte in range(256)}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert describe(path).unknown is None
    del content["model"]["vocab"]["<0xE6>"]
    path.write_text(json.dumps(content))
    found = describe(path).unknown
    assert found is not None
    assert found.token == "<unk>"
