"""Words of Unigram models have the ids that the packages give them, near ties among them."""

from __future__ import annotations

import itertools
import json
import random
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_words import texts as words_texts
from tests.engines.test_words import ways
from tests.hostile.attack import attack

from tokenmill.engines import find_kernel, words
from tokenmill.engines.load import describe, load_engine
from tokenmill.engines.references import SentencePieceEngine, read_sentencepiece_model
from tokenmill.engines.unigram import LONGEST_PART, Trie, json_learner, kernel_model
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.engines.parity import CheckedEngine

relaxed = attack(short=5, long=2000)
is_compiled = pytest.mark.skipif(find_kernel() is None, reason="the compiled part is not there")

# Runs of the same pieces in another order are as good; the sums before them decide.
ties = st.builds(
    lambda character, count, around: around[0] + character * count + around[1],
    st.sampled_from(["-", "a", "=", "the", "12", "\u00e9", "-a"]),
    st.integers(1, 60),
    st.tuples(st.sampled_from(["", "x", '("', "the"]), st.sampled_from(["", ".", "s"])),
)
visible = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=30)
any_words = st.lists(ties | visible | st.sampled_from(["the", "\u65e5", "<unk>", "caf\u00e9"]))
texts = st.lists(
    st.builds(str.join, st.sampled_from([" ", "  ", "\n"]), any_words), min_size=1, max_size=4
)


@cache
def load(path: Path) -> CheckedEngine:
    return load_engine(path, choice="words")


def encode_both(engine: CheckedEngine, batch: list[str]) -> None:
    given_texts = TextBatch.from_texts(batch)
    expected = engine.reference.encode(given_texts)
    is_model = isinstance(engine.reference, SentencePieceEngine)
    for _ in [None] if is_model else ways(engine):
        for text, ids, others in zip(batch, engine.encode(given_texts), expected, strict=True):
            assert ids.tolist() == others.tolist(), text


@pytest.mark.parametrize("alphabet", [b"abcdefgh\xff\x00", bytes(range(200))])
def test_a_trie_has_its_pieces_and_nothing_else(alphabet: bytes) -> None:
    dice = random.Random(0)
    pieces = list({bytes(dice.choices(alphabet, k=dice.randint(1, 7))) for _ in range(3000)})
    trie = Trie([*pieces, b""])
    known = {piece: number for number, piece in enumerate(pieces)}
    begins = {piece[:size] for piece in pieces for size in range(len(piece) + 1)}
    for _ in range(3000):
        text, node = bytes(dice.choices(alphabet + b"z", k=8)), trie.root
        for size in range(1, 9):
            child = int(trie.bases[node]) + text[size - 1]
            assert (trie.parents[child] == node) == (text[:size] in begins)
            if text[:size] not in begins:
                break
            node = child
            assert trie.values[node] == known.get(text[:size], -1)


def metaspace(**options: Any) -> dict[str, Any]:
    plain = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    return {**plain, "split": True, **options}


COLLAPSE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
SPLIT = {"type": "WhitespaceSplit"}
SHAPES: dict[str, dict[str, Any]] = {
    "spaces kept": {},
    "spaces collapsed": {"normalizer": COLLAPSE},
    "no prefix": {"pre_tokenizer": metaspace(prepend_scheme="never")},
    "lower case": {"normalizer": {"type": "Lowercase"}},
    "quotes replaced": {
        "normalizer": {"type": "Replace", "pattern": {"String": "``"}, "content": "a"}
    },
    "split first": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, metaspace()]},
    },
    "bytes": {"byte_fallback": True},
}


@pytest.fixture(scope="module")
def shapes(
    tmp_path_factory: pytest.TempPathFactory, unigram_tokenizer_dir: Path
) -> dict[str, Path]:
    found = {}
    for name, changes in SHAPES.items():
        content = json.loads((unigram_tokenizer_dir / "tokenizer.json").read_text())
        content.update(normalizer=None, pre_tokenizer=metaspace())
        content["model"]["vocab"].append(["\u2581\u2581", -1.0])  # which no word can have
        if "byte_fallback" in changes:
            content["model"]["byte_fallback"] = True
            content["model"]["vocab"] += [[f"<0x{byte:02X}>", -30.0] for byte in range(256)]
        else:
            content.update(changes)
        found[name] = tmp_path_factory.mktemp("json") / "tokenizer.json"
        found[name].write_text(json.dumps(content))
    return found


@relaxed
@given(batch=texts)
@pytest.mark.parametrize("name", SHAPES)
def test_words_of_a_tokenizer_json(shapes: dict[str, Path], name: str, batch: list[str]) -> None:
    encode_both(load(shapes[name]), batch)


@pytest.mark.parametrize("name", SHAPES)
def test_few_words_of_a_tokenizer_json_are_left_to_the_reference(
    shapes: dict[str, Path], name: str, training_texts: list[str]
) -> None:
    content = json.loads(shapes[name].read_text())
    cutting = words.cut_json(content)
    learner = json_learner(content, images=cutting.images, spaces=cutting.spaces)
    assert learner is not None
    known = sorted({f" {word}" for text in training_texts for word in text.split()})
    plain = [word.encode() for word in known if word.isascii()]
    tokens, left = learner.learn(plain)
    assert len(left) < len(plain) / 20
    reference = load_engine(shapes[name], choice="tokenizers").reference
    expected = reference.encode(TextBatch.from_texts(plain))
    for place in set(range(len(plain))) - set(left.tolist()):
        assert tokens[place].tolist() == expected[place].tolist(), plain[place]


def test_words_that_are_not_understood_are_left_to_the_reference(shapes: dict[str, Path]) -> None:
    content = json.loads(shapes["spaces kept"].read_text())
    cutting = words.cut_json(content)
    learner = json_learner(content, images=cutting.images, spaces=cutting.spaces)
    assert learner is not None
    strange = ["\u65e5", "a\x00", "<unk>", "-" * 30, "the" * LONGEST_PART, " ", "caf\u00e9"]
    tokens, left = learner.learn([b" the", *(f" {word}".encode() for word in strange), b" the"])
    assert left.tolist() == list(range(1, len(strange) + 1))
    assert tokens[0].tolist() == tokens[len(strange) + 1].tolist() != []


@pytest.mark.parametrize(
    "change",
    [
        {"unk_id": None},
        {"pre_tokenizer": {"type": "BertPreTokenizer"}},
        {"normalizer": {"type": "Sequence", "normalizers": [COLLAPSE, {"type": "NFKC"}]}},
        {"score": 1e5},
        {"score": float("nan")},
        {"piece": "\u2581"},
        {},
    ],
)
def test_models_that_are_not_understood_have_no_learner(
    shapes: dict[str, Path], change: dict[str, Any]
) -> None:
    content = json.loads(shapes["spaces kept"].read_text())
    content.update({key: value for key, value in change.items() if key in content})
    model = content["model"]
    model["unk_id"] = change.get("unk_id", model["unk_id"])
    model["vocab"].append([change.get("piece", "a new one"), change.get("score", -5.0)])
    found = json_learner(content, images=np.arange(256).astype(np.uint8), spaces=b" ")
    assert (found is None) == bool(change)


# SentencePiece models, whose package adds scores along a whole document.

KEEP = {"remove_extra_whitespaces": False}
IDENTITY = {"normalization_rule_name": "identity"}
MODELS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "byte fallback": {"byte_fallback": True},
    "identity, whitespace kept": {**IDENTITY, **KEEP},
    "no prefix, whitespace kept": {**KEEP, "add_dummy_prefix": False},
    "case folded, symbols": {
        "normalization_rule_name": "nmt_nfkc_cf",
        "user_defined_symbols": ["<X>", "the", "~", "~~~~"],
    },
    "line breaks as symbols": {"user_defined_symbols": ["\n"], "byte_fallback": True, **KEEP},
}
REFUSED: dict[str, dict[str, Any]] = {
    "a symbol is not ASCII": {"user_defined_symbols": ["\u00e9t\u00e9"]},
    "a piece holds a space inside": {"split_by_whitespace": False},
}
# Each of these alone comes to a sum at which nearly every word is delicate, and many to a reset.
fillers = st.builds(
    lambda word, count: word * count,
    st.sampled_from(["the ", "\u65e5 ", "(a) ", "-----------\n", "~~~ ", "Word ", "<X>the "]),
    st.sampled_from([0, 1, 50, 1000, 8000, 30000]),
)
long_texts = st.lists(
    st.lists(fillers | ties | texts.map(" ".join), max_size=5).map(" ".join), min_size=1, max_size=3
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]) -> dict[str, Path]:
    lines = [line for text in training_texts[:60:4] for line in text.splitlines() if line]
    found = {}
    for name, options in {**MODELS, **REFUSED}.items():
        prefix = tmp_path_factory.mktemp("model") / "tokenizer"
        given_options: dict[str, Any] = {"vocab_size": 700, "hard_vocab_limit": False, **options}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=str(prefix),
            minloglevel=2,
            num_threads=1,
            **given_options,
        )
        found[name] = prefix.with_suffix(".model")
    return found


@is_compiled
@relaxed
@given(batch=st.one_of(words_texts, long_texts))
@pytest.mark.parametrize("name", MODELS)
def test_documents_of_a_sentencepiece_model(
    models: dict[str, Path], name: str, batch: list[str]
) -> None:
    encode_both(load(models[name]), batch)


@pytest.mark.parametrize("reason", REFUSED)
def test_a_sentencepiece_model_that_is_refused(models: dict[str, Path], reason: str) -> None:
    assert reason in (describe(models[reason]).coverages[1].refusal or "")


def _message(*fields: tuple[int, int | bytes | float]) -> bytes:
    """A protobuf message of numbers, texts and scores."""
    found = b""
    for number, value in fields:
        if isinstance(value, bytes):
            found += bytes([number << 3 | 2, len(value)]) + value
        elif isinstance(value, float):
            found += bytes([number << 3 | 5]) + struct.pack("<f", value)
        else:
            found += bytes([number << 3, value])
    return found


@pytest.fixture(scope="module")
def near_ties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which a pair is nearly as good as its two characters."""
    dice = random.Random(1)
    scores = {character: -dice.uniform(2, 12) for character in "abcdef"}
    pairs = {
        one + other: scores[one] + scores[other] + dice.choice([0, 1e-4, -1e-3, 5e-3, -2e-2])
        for one in scores
        for other in scores
    }
    pieces = [(b"<unk>", 0.0, 2), ("\u2581".encode(), -3.0, 1)]
    pieces += [(text.encode(), score, 1) for text, score in {**scores, **pairs}.items()]
    data = b"".join(
        _message((1, _message((1, text), (2, score), (3, kind)))) for text, score, kind in pieces
    )
    path = tmp_path_factory.mktemp("ties") / "tokenizer.model"
    path.write_bytes(data + _message((2, _message((3, 1))), (3, _message((4, 0)))))
    return path


def near_tie_texts() -> TextBatch:
    dice = random.Random(0)
    known = ["".join(dice.choices("abcdef", k=dice.randint(1, 9))) for _ in range(2000)]
    known += ["x", "xx", "axb", "\u65e5"]
    counts = (100, 100, 1000, 1000, 4500)
    return TextBatch.from_texts(" ".join(dice.choices(known, k=count)) for count in counts)


def find_wrong(engine: CheckedEngine) -> list[int]:
    """The places of documents that have other ids than by the reference."""
    given_texts = near_tie_texts()
    pairs = zip(engine.encode(given_texts), engine.reference.encode(given_texts), strict=True)
    return [place for place, (ids, other) in enumerate(pairs) if not np.array_equal(ids, other)]


@is_compiled
def test_sums_decide_near_ties(near_ties: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nearly every word is one; without sums, or their resets, documents would be wrong."""
    engine = load_engine(near_ties, choice="words")
    assert isinstance(engine.fast, words.WordEngine)
    monkeypatch.setattr(engine.fast, "_by_reference", None)
    assert find_wrong(engine) == []
    content = read_sentencepiece_model(near_ties)
    cutting = words.cut_sentencepiece(content)
    model = list(kernel_model(content, images=cutting.images, spaces=cutting.spaces))
    assert model[8] == 0.0
    model[8] = -1e9  # so that every word is taken for decided
    engine.fast._kernel = find_kernel().Words(b" ", -1, 1000, 0, 1, tuple(model))
    assert find_wrong(engine) == [0, 1, 2, 3, 4]


@is_compiled
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_part_gives_no_document_to_the_reference(
    models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where whitespace is kept, if it is in front, and where U+2581 is in a text."""
    engine = load_engine(models[name], choice="words")
    assert isinstance(engine.fast, words.WordEngine)
    monkeypatch.setattr(engine.fast, "_by_reference", None)
    batch = [
        *(
            "the \u65e5\u672c\u8a9e words",
            "\uff46\uff55ll\u3000width",
            "e\u0301\u00a8 \ufdfa",
            "<X>the~~~~",
        ),
        *(
            "x" * 5000,
            "-" * 3000 + " the",
            "a\u00a0\u00a0 b\u00a0",
            "\u200b \ufeff \x00",
            "a\n\nb\r\nc \n",
        ),
        *("\u65e5" * 3000, "the " * 20000, "", "a"),
    ]
    given_texts = TextBatch.from_texts(batch)
    expected = engine.reference.encode(given_texts)
    for text, ids, others in zip(batch, engine.encode(given_texts), expected, strict=True):
        assert ids.tolist() == others.tolist(), text
    with pytest.raises(TypeError):
        engine.encode(TextBatch.from_texts(["a \u2581b"]))


@is_compiled
def test_one_near_tie_is_decided_at_every_sum(near_ties: Path) -> None:
    engine = load_engine(near_ties, choice="words")
    pairs = map("".join, itertools.product("abcdef", repeat=2))
    encode_both(engine, [f"{'a ' * (97 * k)}{pair}" for k, pair in enumerate([*pairs] * 2)])


@is_compiled
def test_an_older_package_is_not_trusted_with_sums(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentencepiece, "__version__", "0.2.1")
    engine = load_engine(models["defaults"])
    assert engine.name == "sentencepiece"
    assert "in another way" in (engine.refusal or "")


def test_without_the_compiled_part_a_sentencepiece_model_is_its_packages(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_KERNEL", "0")
    engine = load_engine(models["defaults"])
    assert engine.name == "sentencepiece"
    assert "not compiled here" in (engine.refusal or "")
    with pytest.raises(TokenizerError, match="not compiled here"):
        load_engine(models["defaults"], choice="words")
