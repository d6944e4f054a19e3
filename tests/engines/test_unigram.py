"""Words of Unigram models have the ids that the packages give them, near ties among them."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.attack import attack

from tokenmill.engines import words
from tokenmill.engines.load import load_engine
from tokenmill.engines.unigram import LONGEST_PART, Trie, json_learner
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.engines.parity import CheckedEngine

relaxed = attack(short=10, long=2000)

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
    engine = load(shapes[name])
    given_texts = TextBatch.from_texts(batch)
    expected = engine.reference.encode(given_texts)
    assert engine.encode(given_texts).ids.tolist() == expected.ids.tolist()


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
