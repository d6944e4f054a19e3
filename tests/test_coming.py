"""docs/coming-from-a-script.md: what it says to type is typed, in its order, on small input."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.command import tokenmill, tokenmill_here
from tests.pages import blocks

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-a-script.md"
# Commands that load torch or time things; the slow test types them too.
LONG = ("train", "diagnose")
# What a machine without a GPU, and in a hurry, types instead.
SMALLER = {
    "small": "tiny",
    "large": "tiny",
    "50": "2",
    "adamw8bit": "adamw",
    "32768": "64",
}
SCRIPT = """
import torch

layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(20):
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


class EnoughError(Exception):
    """A loop that never ends was seen to work."""


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    training_texts: list[str],
    sentencepiece_unigram_model: Path,
    bpe_tokenizer_dir: Path,
) -> Path:
    """A folder with all that the page's commands read."""
    folder = tmp_path_factory.mktemp("coming")
    rows = [{"text": text} for text in training_texts[:120]]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "data.jsonl").write_text("".join(lines))
    shutil.copy(sentencepiece_unigram_model, folder / "sp.model")
    for path in bpe_tokenizer_dir.iterdir():
        shutil.copy(path, folder)
    puzzles = [{"question": f"return {n} + {n}", "answer": f"it is {2 * n}"} for n in range(300)]
    (folder / "puzzles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in puzzles))
    (folder / "finpile").mkdir()
    for number in range(4):
        with gzip.open(folder / "finpile" / f"{number:05}.jsonl.gz", "wt") as file:
            file.writelines(lines[number::4])
    (folder / "fineweb-edu").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "fineweb-edu" / "000.parquet")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def run_python(code: str, folder: Path) -> None:
    """Run a block in the folder; what it calls a step is looked at, and ends it."""
    seen: list[Any] = []

    def train_step(inputs: Any, targets: Any) -> None:
        assert inputs.shape == targets.shape == (8, 1024)
        assert (inputs[0, 1:] == targets[0, :-1]).all()
        seen.append(inputs)
        if len(seen) == 3:
            raise EnoughError

    def train_arrays(inputs: Any, targets: Any, mask: Any) -> None:
        assert inputs.shape == targets.shape == mask.shape
        assert inputs.shape[1] == 512
        assert 0 < mask.mean() < 0.5
        seen.append(inputs)

    names: dict[str, Any] = {"train_step": train_step, "train_arrays": train_arrays}
    with contextlib.chdir(folder), contextlib.suppress(EnoughError):
        exec(compile(code.replace('"cuda"', '"cpu"'), PAGE.name, "exec"), names)
    assert seen or len(names["ids"]) == 1024


def test_what_the_page_says_to_type_works_in_its_order(place: Path) -> None:
    typed = 0
    for words, code in blocks(PAGE):
        if code:
            if "datasets" not in code or find_spec("datasets") is not None:
                run_python(code, place)
        elif words[0] == "tokenmill" and words[1] not in LONG:
            tokenmill_here(*words[1:], "--json", folder=place)
            typed += 1
    assert typed >= 12


@pytest.mark.slow
def test_what_trains_and_what_times_works_too(place: Path) -> None:
    stores = [words for words, _ in blocks(PAGE) if words[1:2] == ["build"]]
    for words in stores:
        tokenmill_here(*words[1:], folder=place)
    typed = 0
    for words, _ in blocks(PAGE):
        if words[:1] == ["python"]:
            done = subprocess.run(
                [sys.executable, *words[1:]], cwd=place, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            assert "where the time of a step goes" in done.stderr
        elif words[1:2] and words[1] in LONG:
            again = [SMALLER.get(word, word) for word in words[1:]]
            if words[1] == "diagnose":
                again += ["--seconds", "0.05", "--sample-mb", "0.1"]
            else:
                again += ["--steps", "2", "--device", "cpu"]
            tokenmill(*again, folder=place)
            typed += 1
    assert typed == 6


def test_every_section_says_what_changes() -> None:
    sections = PAGE.read_text().split("\n## ")[1:-1]
    assert len(sections) == 6
    for section in sections:
        assert "```text" in section
        assert "| what changes | |" in section


def test_the_flags_of_the_table_are_there() -> None:
    from tokenmill.cli.main import FOREIGN_FLAGS

    table = PAGE.read_text().split("\n## Flags")[1]
    known = {name for names in FOREIGN_FLAGS for name in names.split()}
    named = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:]
    flags = [flag for cell in named for flag in re.findall(r"`--([\w-]+)", cell)]
    assert len(flags) > 10
    for flag in flags:
        assert flag.replace("-", "_") in known | {"workers", "save_every"}, flag
