"""The real `tokenmill` command, in a process of its own or in this one."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING

import pytest

from tokenmill.cli.main import run as run_command

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


def tokenmill_here(
    *args: str | Path,
    folder: Path,
    code: int | None = 0,
    environment: Mapping[str, str] = os.environ,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """The same in this process, since starting Python takes longer than most commands.

    Not for what is said of memory, which would be that of the tests too.
    """
    streams = [io.BytesIO(), io.BytesIO()]
    out, err = (io.TextIOWrapper(stream, "utf-8", newline="") for stream in streams)
    wanted, on_term = {**environment, **variables}, signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        for name in os.environ.keys() - wanted.keys():
            patch.delenv(name)
        for name, value in wanted.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["tokenmill", *map(str, args)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            run_command()
        except SystemExit as end:
            ended = int(end.code or 0)
        except Exception:  # the interpreter would print it
            traceback.print_exc(file=err)
            ended = 1
        finally:
            signal.signal(signal.SIGTERM, on_term)
    out.flush()
    err.flush()
    said = [stream.getvalue().decode() for stream in streams]
    assert code in (None, ended), said
    return subprocess.CompletedProcess(["tokenmill", *map(str, args)], ended, *said)


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
