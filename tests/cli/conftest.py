"""Runs the real command on real files, in this process unless it has to be one of its own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.command import in_terminal as terminal_output
from tests.command import tokenmill, tokenmill_here
from tests.once import once

from tokenmill.engines.references import train_bpe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "tokenmill"]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


@dataclass(frozen=True)
class Cli:
    """The command, run in one folder with a fixed environment."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
        return {**kept, "TERM": "xterm-256color", "PYTHONFAULTHANDLER": "1"}

    def __call__(self, *args: str | Path, code: int | None = 0, **variables: str) -> Outcome:
        """In this process."""
        return self._outcome(tokenmill_here, *args, code=code, **variables)

    def apart(self, *args: str | Path, code: int = 0, **variables: str) -> Outcome:
        """In a process of its own."""
        return self._outcome(tokenmill, *args, code=code, **variables)

    def _outcome(self, run: Callable[..., Any], *args: str | Path, **options: Any) -> Outcome:
        done = run(*args, folder=self.folder, environment=self.environment, **options)
        return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def numbered_lines(count: int) -> Iterator[str]:
    """JSON lines whose text tells which line it is."""
    for number in range(count):
        yield json.dumps({"text": f"document {number} says hello {number % 7} times"}) + "\n"


def write_corpus(folder: Path) -> Path:
    """200 documents in a JSON Lines file."""
    path = folder / "corpus.jsonl"
    path.write_text("".join(numbered_lines(200)))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE that knows its end token."""
    texts = list(numbered_lines(500))
    return once(
        tmp_path_factory,
        "bpe-cli",
        lambda folder: train_bpe(texts, vocab_size=400, folder=folder),
    )


def in_terminal(cli: Cli, *args: str, columns: int, **variables: str) -> str:
    """All that a terminal was sent."""
    environment = {**cli.environment, **variables}
    command = ("-m", "tokenmill", *args)
    return terminal_output(*command, folder=cli.folder, columns=columns, environment=environment)
