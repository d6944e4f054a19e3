from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from .conftest import COMMAND, Cli, numbered_lines

if TYPE_CHECKING:
    from pathlib import Path

FILES = 8


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory, bpe: Path) -> Cli:
    """A folder with files that take the reference engine some seconds, and their whole store."""
    cli = Cli(tmp_path_factory.mktemp("stopping"))
    (cli.folder / "my data").mkdir()
    lines = "".join(numbered_lines(8_000))
    for number in range(FILES):
        (cli.folder / "my data" / f"{number:02}.jsonl").write_text(lines)
    cli(*arguments(bpe, "whole"))
    return cli


def arguments(bpe: Path, store: str) -> list[str]:
    slow = ["--engine", "tokenizers", "--workers", "1", "--quiet"]
    return ["build", "my data", "-t", str(bpe), *slow, "-o", store]


def files_of(store: Path) -> dict[str, bytes]:
    """Everything but the log of runs, which tells of interruptions."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "runs.jsonl" and not path.name.startswith(".lock")
    }


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "stopped: "), (signal.SIGTERM, 143, "stopped by SIGTERM: ")],
)
def test_a_stopped_build_says_what_is_safe_and_the_same_command_completes_it(
    cli: Cli, bpe: Path, number: signal.Signals, code: int, words: str
) -> None:
    store = cli.folder / number.name
    args = arguments(bpe, store.name)
    process = subprocess.Popen(
        [*COMMAND, *args],
        cwd=cli.folder,
        env=cli.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    receipts = store / "shards"
    deadline = time.monotonic() + 60
    while not list(receipts.glob("*.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # As a terminal does: to the workers too.
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert out == ""
    first, second, command = err.splitlines()
    assert first.startswith(words)
    assert second == "to go on from there, run the same command again:"
    assert shlex.split(command) == ["python", "-m", "tokenmill", *args]
    assert not (store / "tokenmill.json").exists()
    kept = len(list(receipts.glob("*.json")))
    units = len(list((cli.folder / "whole" / "shards").glob("*.json")))
    assert 0 < kept < units

    resumed = cli(*args, "--json").json
    assert resumed["units_resumed"] == kept
    assert resumed["units_built"] == units - kept
    assert files_of(store) == files_of(cli.folder / "whole")
