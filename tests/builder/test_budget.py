"""Peak memory of the whole process tree, measured on real builds of text that is hard on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.builder.plan import max_document_bytes
from tokenmill.words import parse_size


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def random_words(num_bytes: int, *, seed: int) -> str:
    """Words that never repeat: an engine that remembers words remembers all of them."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(ord("a"), ord("z") + 1, num_bytes, dtype=np.uint8)
    letters[rng.integers(0, num_bytes, num_bytes // 9)] = ord(" ")
    return letters.tobytes().decode()


def write_documents(path: Path, *, num_bytes: int, document_bytes: int) -> None:
    with path.open("w") as file:
        for seed in range(num_bytes // document_bytes):
            file.write(json.dumps({"text": random_words(document_bytes, seed=seed)}) + "\n")


def build_in_a_fresh_process(tokenizer: Path, *, workers: int, budget: int) -> dict[str, Any]:
    """The driver counts too, so it must not be this process with all that tests have loaded."""
    command = [sys.executable, "-m", "tokenmill", "build", "a.jsonl", "--out", "store", "--no-eos"]
    command += ["--tokenizer", str(tokenizer), "--workers", str(workers), "--memory", str(budget)]
    done = subprocess.run([*command, "--json", "--quiet"], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_cache_that_only_grows_is_kept_within_the_budget(
    workers: int, bpe_tokenizer_dir: Path
) -> None:
    write_documents(Path("a.jsonl"), num_bytes=48_000_000, document_bytes=40_000)
    budget = parse_size("480MB") if workers == 1 else parse_size("760MB")
    result = build_in_a_fresh_process(bpe_tokenizer_dir, workers=workers, budget=budget)
    assert result["engine"] == "gigatoken"
    assert result["totals"]["documents"] == 1200
    assert 0.3 * budget < result["peak_memory_bytes"] <= budget


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_documents_of_the_largest_size_stay_within_the_budget(
    kind: str, request: pytest.FixtureRequest
) -> None:
    budget = parse_size("1GB")
    largest = max_document_bytes(budget)
    with Path("a.jsonl").open("w") as file:
        # A reference takes minutes for such a document.
        count = 4 if kind == "bpe" else 1
        for seed in range(count):
            text = random_words(largest - 100, seed=seed)
            file.write(json.dumps({"text": text}) + "\n")
    tokenizer = request.getfixturevalue(f"{kind}_tokenizer_dir")
    result = build_in_a_fresh_process(tokenizer, workers=2, budget=budget)
    assert result["totals"]["documents"] == count
    assert result["peak_memory_bytes"] <= budget
