from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import write_corpus

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str | Path, folder: Path) -> str:
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, args)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_a_store_is_built_then_read_with_numpy_alone(tmp_path: Path, bpe: Path) -> None:
    built = run("build_a_store.py", write_corpus(tmp_path).name, bpe, "store", folder=tmp_path)
    first, second, third = built.splitlines()
    assert first.startswith("200 documents, ")
    assert "of corpus.jsonl and begins: 'document " in second
    assert third == "verified"

    lines = run("train_from_numpy.py", "store", folder=tmp_path).splitlines()
    assert len(lines) == 4
    assert "inputs (4, 128)" in lines[1]


def test_text_is_tokenized_in_a_loop_of_ones_own(bpe: Path, corpus: Path) -> None:
    out = run("tokenize_in_your_loop.py", bpe, corpus.name, corpus.name, folder=corpus.parent)
    first, second = out.splitlines()
    assert first == second
    assert first.startswith("corpus.jsonl: ")


@pytest.mark.parametrize("name", ["build_a_store.py", "train_from_numpy.py"])
def test_an_example_without_arguments_says_what_it_needs(tmp_path: Path, name: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"python examples/{name} " in done.stderr
    assert "Traceback" not in done.stderr


def test_every_example_has_a_test() -> None:
    tests = Path(__file__).parents[1]
    tested = "".join(path.read_text() for path in tests.rglob("test_*.py"))
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 3
    assert all(f'"{name}"' in tested for name in names)
