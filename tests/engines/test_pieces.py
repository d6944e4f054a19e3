"""Documents encoded in pieces have the ids of the whole, by every engine that may encode them."""

from __future__ import annotations

import base64
import itertools
import json
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.detectors import byte_level_json, pattern_sets, split_sequence
from tests.engines.strategies import documents
from tests.engines.test_words import (  # noqa: F401 (fixtures)
    MODELS,
    bpe_with_suffix,
    files,
    models,
    punctuated,
    shapes,
    spaced,
)
from tests.hostile.attack import attack

from tokenmill.engines import gigatoken
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import find_tokenizer, load_engine
from tokenmill.engines.pieces import PieceCutter, encode_pieces, find_cutter
from tokenmill.engines.references import RankDefinition
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

relaxed = attack(short=4, long=2000)
_LETTERS = ["a", "Zz", "S", "don", "\u0416\u0437", "\u6f22", "\u5b57", "\uc548", "\ucfff"]
_BETWEEN = [
    *(" \n\t\r!'/12."),
    "  ",
    "\r\n",
    "\n\n",
    "'s",
    "'LL ",
    "\u0301",
    "\u00a0",
    "\u3000",
    "\u2028",
]
_RUNS = st.lists(st.sampled_from([*_LETTERS, *_BETWEEN, "a ", "b\n", "c  d"]), max_size=30)
texts = st.one_of(_RUNS.map("".join), spaced.map("".join), punctuated.map("".join), documents)


@cache
def load(path: Path | str, policy: SpecialTokens = SpecialTokens.TEXT) -> tuple[Any, PieceCutter]:
    cutter = find_cutter(find_tokenizer(path))
    assert cutter is not None
    return load_engine(path, special_tokens=policy), cutter


def check(path: Path | str, text: str, policy: SpecialTokens = SpecialTokens.TEXT) -> int:
    """How many pieces there were."""
    engine, cutter = load(path, policy)
    data = np.frombuffer(text.encode(), np.uint8)
    expected = engine.reference.encode(TextBatch.from_texts([text])).ids.tolist()
    count = 0
    for piece_bytes in (0, 7):
        sizes = cutter.sizes(data.data, piece_bytes=piece_bytes)
        assert sum(sizes) == len(data)
        for encode, most in itertools.product((engine.reference.encode, engine.encode), (1, 12)):
            found = encode_pieces(
                data, sizes, left_out=cutter.left_out, encode=encode, most_bytes=most
            )
            assert found.tolist() == expected, (text, sizes)
        count = max(count, len(sizes))
    return count


_SEEN = [bytes([each]) for each in b"aAsZ1! \n\r\t'/"] + ["\u0416".encode(), "\u6f22".encode()]


def _revealing(pre_tokenizer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A tokenizer that joins whatever is beside each other, unless it is split."""
    joined = [(each[:1], each[1:2]) for each in _SEEN if len(each) > 1]
    joined += [(each[:2], each[2:]) for each in _SEEN if len(each) > 2]
    pairs = [(a, b) for a in _SEEN for b in _SEEN]
    doubled = [(a + b, c) for (a, b), c in itertools.product(pairs, _SEEN)]
    return byte_level_json([*joined, *pairs, *doubled], pre_tokenizer=pre_tokenizer, **changes)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Byte-level tokenizers by their patterns, and with NFC before them."""
    found = {}
    patterns = [*pattern_sets(), *((each,) for each in gigatoken.SPELLINGS), ("",)]
    for number, each in enumerate(patterns):
        split: Any = split_sequence(each) if each != ("",) else None
        changes = {"normalizer": {"type": "NFC"}} if number % 2 else {}
        content = _revealing(split, **changes)
        found[str(number)] = tmp_path_factory.mktemp("splits") / "tokenizer.json"
        found[str(number)].write_text(json.dumps(content))
    return found


@pytest.mark.parametrize(
    "number", range(len(gigatoken.KNOWN_SPLITS) + len(gigatoken.SPELLINGS) + 1)
)
def test_a_byte_level_tokenizer(splits: dict[str, Path], number: int) -> None:
    @relaxed
    @given(texts)
    def run(text: str) -> None:
        check(splits[str(number)], text)

    run()
    text = "a  a\n\na a!\n a\r\n'a' a's \u6f22 \u0416\n1 a 11 a "
    assert check(splits[str(number)], text) > 1


@pytest.mark.parametrize("pattern", sorted(gigatoken.RANK_PATTERNS))
def test_a_rank_file(pattern: str, tmp_path: Path) -> None:
    merges = [a + b for a, b in itertools.product(_SEEN[:12], repeat=2)]
    tokens = [bytes([byte]) for byte in range(256)] + merges
    ranks = tmp_path / "small.tiktoken"
    ranks.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    definition = RankDefinition(
        pattern=pattern, special_tokens={"<|end|>": 999}, eos_token="<|end|>", normalization="NFC"
    )
    sidecar = tmp_path / "small.tiktoken.json"
    sidecar.write_text(json.dumps(asdict(definition)))

    @relaxed
    @given(texts)
    def run(text: str) -> None:
        check(ranks, text)

    run()
    assert check(ranks, "a a\nb b  cafe\u0301 x") == 5
    other = {**asdict(definition), "special_tokens": {"<|end|>": 999, "a b": 1000}}
    sidecar.write_text(json.dumps(other))
    assert find_cutter(find_tokenizer(ranks)) is None


@relaxed
@given(text=texts)
@pytest.mark.parametrize("name", MODELS)
def test_a_sentencepiece_model(models: dict[str, Path], name: str, text: str) -> None:  # noqa: F811
    check(models[name], text)


@relaxed
@given(text=texts)
@pytest.mark.parametrize("policy", [SpecialTokens.TEXT, SpecialTokens.PARSE])
@pytest.mark.parametrize("name", shapes({}))
def test_a_tokenizer_json(
    files: dict[str, Path],  # noqa: F811
    name: str,
    policy: SpecialTokens,
    text: str,
) -> None:
    check(files[name], text, policy)


@relaxed
@given(text=texts)
def test_bytes_and_a_bpe_with_a_suffix(bpe_with_suffix: Path, text: str) -> None:  # noqa: F811
    check("bytes", text)
    check(bpe_with_suffix, text)


def test_pieces_are_as_small_as_asked_for(
    models: dict[str, Path],  # noqa: F811
    files: dict[str, Path],  # noqa: F811
    bpe_tokenizer_dir: Path,
) -> None:
    text = memoryview(b"some words in a row\nand more of them " * 1000)
    for path in (models["defaults"], files["t5"], bpe_tokenizer_dir):
        sizes = load(path)[1].sizes(text, piece_bytes=100)
        assert len(sizes) > 300
        assert max(sizes) < 120


def test_words_are_not_cut_beside_one_that_cannot_be_encoded_apart(
    models: dict[str, Path],  # noqa: F811
) -> None:
    _, cutter = load(models["defaults"])
    assert cutter.sizes(memoryview("a \u2581b c d".encode()), piece_bytes=0) == [8, 2]
    long = b"x" * 2000
    assert cutter.sizes(memoryview(b"a " + long + b" b " + long), piece_bytes=0) == [4005]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": [{"content": "a b", "id": 0}]},
        {"added_tokens": [{"content": "<x>", "id": 0, "rstrip": True}]},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"pre_tokenizer": split_sequence((r"\p{L}+ ?",))},
        {"pre_tokenizer": split_sequence((r"\w+", r"\s"))},
    ],
)
def test_what_is_not_known_is_not_cut(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**byte_level_json(), **changes}))
    assert find_cutter(find_tokenizer(path)) is None


def test_a_unigram_model_is_not_cut(sentencepiece_unigram_model: Path) -> None:
    assert find_cutter(find_tokenizer(sentencepiece_unigram_model)) is None
