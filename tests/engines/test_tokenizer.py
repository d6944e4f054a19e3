from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.test_parity import RIGHT, WRONG, WrongOnZ, checked

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import Tokenizer, load_tokenizer
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def test_a_tokenizer_in_one_line(bpe_tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(bpe_tokenizer_dir)
    texts = ["Hello world", "", "caf\u00e9 <|endoftext|>"]
    encoded = tokenizer.encode_batch(texts)
    assert (tokenizer.engine, tokenizer.vocab_size, tokenizer.eos_id) == ("gigatoken", 2000, 0)
    assert len(encoded) == 3
    assert encoded.offsets.tolist()[-1] == len(encoded.ids)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert encoded[-1].tolist() == encoded[2].tolist() == tokenizer.encode(texts[2]).tolist()
    assert [len(ids) for ids in encoded[:2]] == [len(encoded[0]), 0]
    assert isinstance(encoded, Sequence)
    assert len({encoded, tokenizer.encode_batch(texts)}) == 2, "compared by what they are"
    with pytest.raises(IndexError):
        encoded[3]


def test_policy_and_engine_can_be_named(bpe_tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(
        bpe_tokenizer_dir, special_tokens="parse", engine="tokenizers", threads=1
    )
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.encode("<|endoftext|>").tolist() == [0]


def test_a_tokenizer_without_a_named_eos_has_none(bpe_tokenizer_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes((bpe_tokenizer_dir / "tokenizer.json").read_bytes())
    assert load_tokenizer(path).eos_id is None


def test_a_disagreement_is_loud_and_the_reference_takes_over() -> None:
    tokenizer = Tokenizer(checked(WRONG))
    with pytest.warns(RuntimeWarning, match="wrong and bytes disagree"):
        encoded = tokenizer.encode_batch(["aZ"])
    assert encoded[0].tolist() == [97, 90]
    assert tokenizer.engine == "bytes"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokenizer.encode("Z").tolist() == [90]


def test_later_calls_are_checked_too() -> None:
    tokenizer = Tokenizer(checked(WRONG))
    tokenizer.encode("fine")
    for _ in range(20):
        tokenizer.encode("fine")
    with pytest.warns(RuntimeWarning):
        tokenizer.encode("Z")
    assert tokenizer.engine == "bytes"


def test_a_right_engine_is_kept() -> None:
    tokenizer = Tokenizer(checked(RIGHT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            assert np.array_equal(tokenizer.encode("Z"), [90])
    assert tokenizer.engine == "bytes"


class WrongAlone(WrongOnZ):
    """A fast engine whose call for one text has the flaw too."""

    few_bytes = 1000

    def encode_one(self, text: str) -> NDArray[np.uint32]:
        return self.encode(TextBatch.from_texts([text])).ids


def test_texts_that_are_encoded_alone_are_checked_too() -> None:
    tokenizer = Tokenizer(checked(WrongAlone(special_tokens=SpecialTokens.TEXT)))
    for _ in range(20):
        tokenizer.encode("fine")
    with pytest.warns(RuntimeWarning, match="wrong and bytes disagree on 'two\\\\nZ\\\\n'"):
        encoded = tokenizer.encode_batch(["fine", "two\nZ\n"])
    assert encoded[1].tolist() == list(b"two\nZ\n")
    assert tokenizer.engine == "bytes"


@pytest.fixture(scope="session")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank file of its own, whose publisher normalizes."""
    path = tmp_path_factory.mktemp("ranks") / "own.tiktoken"
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"\xc3\xa9"]
    lines = [b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    path.write_bytes(b"".join(lines))
    definition = {"pattern": r"\s?\p{L}+|\s|.", "special_tokens": {}, "normalization": "NFC"}
    path.with_name(path.name + ".json").write_text(json.dumps(definition))
    return path


TOKENIZERS = (
    "bpe_tokenizer_dir",
    "unigram_tokenizer_dir",
    "wordpiece_tokenizer_dir",
    "sentencepiece_bpe_model",
    "sentencepiece_unigram_model",
    "rank_file",
)


@pytest.fixture(scope="session", params=TOKENIZERS)
def each(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(request.getfixturevalue(request.param))


@given(
    texts=st.lists(st.text(max_size=40) | st.sampled_from(["the \u00e9", "e\u0301 \ufb01  x\n"]))
)
def test_a_few_texts_have_the_ids_of_the_reference(each: Tokenizer, texts: list[str]) -> None:
    reference = each._checked.reference
    expected = [ids.tolist() for ids in reference.encode(TextBatch.from_texts(texts))]
    encoded = each.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == expected
    assert [each.encode(text).tolist() for text in texts] == expected
    assert [str(encoded.ids.dtype), str(encoded.offsets.dtype)] == ["uint32", "int64"]


def test_one_text_and_many_go_the_way_that_fits(each: Tokenizer) -> None:
    page = "It is the first page of th\u00e9 book,\nand then some <unk> more. " * 60
    for texts in ([], [""], [page], [page, ""] * 8, [page] * 200):
        expected = each._checked.reference.encode(TextBatch.from_texts(texts))
        encoded = each.encode_batch(texts)
        assert encoded.ids.tolist() == expected.ids.tolist()
        assert encoded.offsets.tolist() == expected.offsets.tolist()
        assert encoded.ids.flags.writeable


def test_half_a_character_is_refused_in_one_text_and_in_many(each: Tokenizer) -> None:
    for texts in (["a\ud800"], ["good", "a\ud800"], ["good " * 100_000, "a\ud800"]):
        with pytest.raises(UnicodeEncodeError):
            each.encode_batch(texts)
    with pytest.raises(UnicodeEncodeError):
        each.encode("a\ud800")


def test_the_time_of_the_last_call_is_said(bpe_tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(bpe_tokenizer_dir)
    assert tokenizer.timing == "tokenized 0 samples in 0.000 ms (0.000 ms per sample)"
    tokenizer.encode_batch(["some words"] * 8)
    number = r"[\d,.]+"
    said = rf"tokenized 8 samples in {number} ms \({number} ms per sample\)"
    assert re.fullmatch(said, tokenizer.timing)
    tokenizer.encode("some words")
    assert tokenizer.timing.startswith("tokenized 1 sample in ")


def test_processes_give_the_same_ids(sentencepiece_unigram_model: Path) -> None:
    alone = load_tokenizer(sentencepiece_unigram_model)
    pooled = load_tokenizer(sentencepiece_unigram_model, workers=2)
    texts = [f"some words and more {k} \u00e9" * (k % 90) for k in range(1500)]
    assert sum(map(len, texts)) > 1 << 20
    expected, encoded = alone.encode_batch(texts), pooled.encode_batch(texts)
    assert np.array_equal(encoded.ids, expected.ids)
    assert np.array_equal(encoded.offsets, expected.offsets)
    assert pooled.engine == alone.engine
    with pytest.raises(UnicodeEncodeError):
        pooled.encode_batch([*texts, "a\ud800"])


def test_the_environment_of_the_process_stays_as_it_is(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    text = tmp_path / "in.jsonl"
    text.write_text("".join(json.dumps({"text": f"some words {k}"}) + "\n" for k in range(20)))
    code = """
import os, sys
import tokenmill
before = dict(os.environ)
tokenizer, text, out = sys.argv[1:]
tokenmill.build(text, tokenizer=tokenizer, out=out, serial=False, workers=1)
assert tokenmill.Store(out).decode(0) == "some words 0"
tokenmill.load_tokenizer(tokenizer, threads=1).encode("words")
tokenmill.load_tokenizer(tokenizer, engine="tokenizers").encode("words")
assert dict(os.environ) == before
"""
    command = [sys.executable, "-c", code, str(bpe_tokenizer_dir), str(text), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
