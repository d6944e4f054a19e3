"""Kill -9 of any process of a build at any moment, then the same command: the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.builder.stores import make_texts, tree, write_jsonl
from tests.hostile.attack import tried

if TYPE_CHECKING:
    from pathlib import Path

UNITS = 120

COMMAND = """
import sys, tokenmill
workers, out = int(sys.argv[1]), sys.argv[2]
if out.startswith("masked"):
    options = {"inputs": "answers.jsonl", "format": "prompt-completion", "max_length": 200}
elif out.startswith("shared"):
    options = {"inputs": "more.jsonl.gz"}
else:
    options = {"inputs": ["in", "more.jsonl.gz", "small"]}
tokenmill.build(tokenizer="bytes", out=out, workers=workers, memory="4GB", unit_bytes=4000, val=0.2,
                max_rejects=1.0, **options)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input of about a hundred units, and the store of an uninterrupted build."""
    import gzip

    root = tmp_path_factory.mktemp("crash")
    (root / "in").mkdir()
    (root / "small").mkdir()
    for number in range(200):
        small = [f"{number} small {row}" for row in range(5)]
        write_jsonl(root / "small" / f"{number}.jsonl", [*small, b"{bad"])
    for number in range(6):
        texts = [*make_texts(300, seed=number), b"{bad", ""]
        write_jsonl(root / "in" / f"{number}.jsonl", texts)
    data = write_jsonl(root / "raw", make_texts(900, seed=9)).read_bytes()
    (root / "more.jsonl.gz").write_bytes(gzip.compress(data))
    answers = make_texts(1500, seed=5)
    rows = [{"prompt": f"say {k}", "completion": text} for k, text in enumerate(answers)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "answers.jsonl").write_text(lines)
    finish(root, workers=2, out="whole")
    whole = tree(root / "whole")
    assert sum(name.startswith("shards/") and name.endswith(".json") for name in whole) > UNITS
    return root


def start(root: Path, *, workers: int, out: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", COMMAND, str(workers), out], cwd=root)


def finish(root: Path, *, workers: int, out: str) -> None:
    process = start(root, workers=workers, out=out)
    assert process.wait(120) == 0


def begun(store: Path) -> set[str]:
    """What is in the folder of unfinished work."""
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(store / "tmp"))  # noqa: PTH208
    return set()


def kill_at_random(root: Path, dice: random.Random, *, workers: int, out: str) -> str:
    """Start the build, kill one of its processes at a random moment, and say which."""
    left = begun(root / out)
    driver = start(root, workers=workers, out=out)
    began = time.monotonic()
    # Most of the time is start-up; often wait for the first sign of work.
    if dice.random() < 0.7:
        while time.monotonic() - began < 20 and left >= begun(root / out):
            if driver.poll() is not None:
                return "nobody"
            time.sleep(0.002)
    time.sleep(dice.random() * 0.6)
    try:
        children = psutil.Process(driver.pid).children(recursive=True)
        victim = dice.choice([psutil.Process(driver.pid), *children])
        is_driver = victim.pid == driver.pid
        victim.kill()
    except psutil.NoSuchProcess:
        return "nobody"
    if is_driver:
        # It may have ended by itself just before.
        return "driver" if driver.wait(20) == -signal.SIGKILL else "nobody"
    # The build goes on without that worker; now end all of it.
    time.sleep(dice.random() * 0.3)
    driver.kill()
    driver.wait(20)
    return "worker"


def kill_often(
    root: Path, *, workers: int, kills: int, seed: int, out: str = "killed", whole: str = "whole"
) -> None:
    dice = random.Random(seed)
    out = f"{out}-{workers}-{seed}"
    victims: list[str] = []
    for _ in range(6 * kills):
        victims.append(kill_at_random(root, dice, workers=workers, out=out))
        if len(victims) - victims.count("nobody") == kills:
            break
        if (root / out / "tokenmill.json").exists() and dice.random() < 0.7:
            # It got through: compare, and begin again from nothing.
            finish(root, workers=workers, out=out)
            assert tree(root / out) == tree(root / whole)
            out += "x"
    finish(root, workers=workers, out=out)
    assert tree(root / out) == tree(root / whole)
    assert len(victims) - victims.count("nobody") == kills
    assert victims.count("driver") >= kills // 10
    assert victims.count("worker") >= kills // 10
    tried("kill -9 of a process of a build, and not a byte of the store was another", kills)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_killed_at_random_moments_the_store_is_the_same_byte_for_byte(
    folder: Path, workers: int
) -> None:
    kill_often(folder, workers=workers, kills=5, seed=workers)


def test_killed_at_random_moments_a_store_with_masks_is_the_same_byte_for_byte(
    folder: Path,
) -> None:
    finish(folder, workers=1, out="masked-whole")
    whole = tree(folder / "masked-whole")
    assert sum(name.endswith(".mask") for name in whole) > 20
    assert json.loads(whole["tokenmill.json"])["totals"]["pieces"] > 500
    kill_often(folder, workers=2, kills=3, seed=3, out="masked", whole="masked-whole")


@pytest.mark.slow
def test_killed_while_workers_share_a_compressed_file_the_store_is_the_same(folder: Path) -> None:
    finish(folder, workers=1, out="shared-whole")
    assert len(tree(folder / "shared-whole")) > 100
    kill_often(folder, workers=3, kills=12, seed=6, out="shared", whole="shared-whole")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_killed_hundreds_of_times_the_store_is_the_same(
    folder: Path, workers: int, seed: int
) -> None:
    kill_often(folder, workers=workers, kills=25, seed=100 + seed)
