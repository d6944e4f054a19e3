from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.engines.test_parity import RIGHT, WRONG, checked

from tokenmill.engines.load import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


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
