"""The benchmark of training, tried on a CPU, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from benchmarks.training_gpu_table import training_body

from benchmarks import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_trial_on_a_cpu_measures_every_feed(tmp_path: Path) -> None:
    corpus, result = tmp_path / "corpus.jsonl", tmp_path / "result.json"
    texts = [f"text {n} " + " ".join(str(n * k) for k in range(n % 50)) for n in range(300)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, "-m", "benchmarks.training_gpu", "--tiny", "--rounds", "1"]
    command += ["--workers", "1", "--corpus", str(corpus), "--json", str(result)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    found = json.loads(result.read_text())
    [run] = found["measurements"]
    assert set(run["feeds"]) == {"cached", "again", "tokenmill", "single", "batched", "workers"}
    assert run["feeds"]["cached"]["share_of_cached"] == 1
    for feed in run["feeds"].values():
        assert feed["tokens_per_second"] > 0
        assert 0 <= feed["wait_ms_p50"] <= feed["wait_ms_p99"]
    assert str(corpus) not in result.read_text()
    lines = training_body(found).splitlines()
    assert len([line for line in lines if line.startswith("| tiny")]) == 6
