"""The real `tokenmill` command in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def tokenmill(
    *args: str | Path,
    folder: Path,
    code: int | None = 0,
    environment: Mapping[str, str] = os.environ,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, and check how it ends unless `code` is None."""
    run = subprocess.run(
        [sys.executable, "-m", "tokenmill", *args],
        cwd=folder,
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    # Not as text: that would make one character of an end of a line with two.
    out, err = run.stdout.decode(), run.stderr.decode()
    assert code in (None, run.returncode), (run, out, err)
    return subprocess.CompletedProcess(run.args, run.returncode, out, err)


def in_terminal(
    *command: str, folder: Path, columns: int = 80, environment: Mapping[str, str] = os.environ
) -> str:
    """Run a program of Python in a terminal, to its end; all that the terminal was sent."""
    size = {"COLUMNS": str(columns), "LINES": "30", "TERM": "xterm-256color"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**environment, **size},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        sent = b""
        while True:
            try:
                block = os.read(ours, 1 << 16)
            except OSError:  # Linux reports the end of a terminal as an error.
                break
            if not block:
                break
            sent += block
    os.close(ours)
    assert process.returncode == 0, sent
    return sent.decode()
