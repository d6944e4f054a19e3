"""The real `tokenmill` command in a process of its own, without waiting for its imports.

A process that has imported everything forks for each command, which then has its own folder,
environment, streams and end. What depends on how Python starts must start one itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

STREAMS = ("stdin", "stdout", "stderr")
PRELOAD = (
    "pyarrow.parquet",
    "rich.console",
    "rich.live",
    "rich.table",
    "tokenizers",
    "tokenmill.builder.run",
    "tokenmill.builder.verify",
    "tokenmill.cli.main",
    "tokenmill.cli.output",
    "tokenmill.cli.show",
    "tokenmill.inspection",
    "tokenmill.loader.loader",
)


def tokenmill(
    *args: str | Path,
    folder: Path,
    code: int | None = 0,
    environment: Mapping[str, str] = os.environ,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, and check how it ends unless `code` is None."""
    with tempfile.TemporaryDirectory(prefix="command-") as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        request = {
            "args": [os.fsdecode(arg) for arg in args],
            "folder": str(folder),
            "environment": {**environment, **variables},
            "streams": [os.devnull, str(out), str(err)],
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        ended = int(server.stdout.readline())
        done = subprocess.CompletedProcess(
            ["tokenmill", *request["args"]],
            ended,
            out.read_bytes().decode(),
            err.read_bytes().decode(),
        )
    assert code in (None, done.returncode), done
    return done


@functools.cache
def _server() -> subprocess.Popen[str]:
    # It ends when it can read no more from us, so nobody has to stop it.
    return subprocess.Popen(
        [sys.executable, "-m", "tests.command"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(
    *, args: list[str], folder: str, environment: dict[str, str], streams: list[str]
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, (path, stream) in enumerate(zip(streams, STREAMS, strict=True)):
        was: Any = getattr(sys, stream)
        opened = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
        mode = "w" if number else "r"
        fresh = os.fdopen(number, mode, encoding=was.encoding, errors=was.errors, closefd=False)
        setattr(sys, stream, fresh)
        setattr(sys, f"__{stream}__", fresh)
    sys.argv = ["tokenmill", *args]
    runpy.run_module("tokenmill", run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    serve()
