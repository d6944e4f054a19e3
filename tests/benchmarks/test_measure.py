"""One measurement: a process of its own, its report, its memory, its failure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import measure

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def job(tmp_path: Path) -> dict[str, object]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["some words and some more words"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        lines = [{"id": str(i), "text": f"some words {i} caf\u00e9" * 50} for i in range(40)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files.append(str(path))
    return {
        "files": files,
        "tokenizer": str(tmp_path),
        "out": str(tmp_path / "out"),
        "workers": 2,
        "memory": "1.5GB",
    }


CONTENDERS = [
    ("gigatoken_alone", "threads"),
    ("gigatoken_alone", "processes"),
    ("tokenizers_stable", "loop"),
    ("tokenizers_stable", "batch"),
    ("tokenizers_stable", "batch-fast"),
    ("tokenmill_build", ""),
]


@pytest.mark.slow
def test_all_contenders_of_this_environment_make_the_same_tokens(job: dict[str, object]) -> None:
    reports = [measure.run(module, job | {"mode": mode}) for module, mode in CONTENDERS[2:]]
    alone, tree = (measure.watch(module, job | {"mode": mode}) for module, mode in CONTENDERS[:2])
    reports += [alone[0], tree[0]]
    assert all(report["seconds"] > report["startup_seconds"] >= 0 for report in reports)
    reports.append(measure.run("tokenmill_command", job))

    assert {report["documents"] for report in reports} == {80}
    assert len({report["tokens"] for report in reports}) == 1
    assert reports[0]["tokens"] > 80
    assert 0 < alone[1].peak_bytes < tree[1].peak_bytes, "memory of child processes is counted"


def test_a_contender_that_fails_is_reported_in_its_own_words(job: dict[str, object]) -> None:
    with pytest.raises(measure.ContenderError, match=r"missing\.jsonl"):
        measure.run("tokenizers_stable", job | {"files": ["missing.jsonl"], "mode": "loop"})
