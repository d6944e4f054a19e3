"""Each example of feeding trains, stops, and goes on exactly where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.interop import peers
from tests.loader.stores import write_store

import tokenmill
from tokenmill.engines.references import train_bpe

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *args: str | Path, folder: Path) -> list[str]:
    packages = [str(peers.PEERS)] if name == "feed_torchtitan.py" else []
    path = [each for each in (os.environ.get("PYTHONPATH"), *packages) if each]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, args)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a store in it, of another vocabulary than that of bytes."""
    path = tmp_path_factory.mktemp("examples")
    run("small_store.py", "of-bytes", folder=path)
    texts = [*map(tokenmill.Store(path / "of-bytes").decode, range(300))]
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    train_bpe(texts, vocab_size=400, folder=path / "bpe")
    tokenmill.build(path / "texts.jsonl", tokenizer=path / "bpe", out=path / "store")
    return path


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("feed_pytorch.py", ()),
        ("feed_torchtitan.py", ("torchtitan",)),
        pytest.param("feed_lightning.py", ("lightning",), marks=pytest.mark.slow),
        ("feed_hf_trainer.py", ("transformers", "accelerate")),
    ],
)
def test_the_example_resumes_exactly(folder: Path, name: str, packages: tuple[str, ...]) -> None:
    if "torchtitan" in packages:
        peers.require("torchtitan")
    elif missing := [package for package in packages if find_spec(package) is None]:
        pytest.skip(f"to run {name}: pip install {' '.join(missing)}")
    checkpoints = folder / name.removesuffix(".py")
    checkpoints.mkdir()
    assert run(name, "store", checkpoints, folder=folder)[-1] == "resumed exactly"


@pytest.mark.slow
def test_by_torchtitans_loss_a_model_learns_which_letter_follows(tmp_path: Path) -> None:
    peers.require("torchtitan")
    alphabets = [[(k % 26 + n) % 26 for n in range(9 + k % 30)] + [256] for k in range(300)]
    write_store(tmp_path / "store", [alphabets], vocab_size=257)
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            Path(__file__).parent / "peer_torchtitan.py",
            json.dumps([str(tmp_path / "store"), 257, 4]),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(peers.PEERS)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [5, 6, 7, 8, 9, 10, 11, 12]
