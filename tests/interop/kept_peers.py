"""Peers that take seconds to import: one process each, kept for all tests of a run.

    ask("mosaicml", "read", folder)  ->  what tests/interop/peer_mosaicml.py answers, from JSON

The script reads a call on each line of its input, and answers on a line that begins with `>`.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from tests.interop import peers


def ask(peer: str, *arguments: object) -> Any:
    """What a peer's script answers."""
    peers.require()
    process, errors = _start(peer)
    assert process.stdin is not None
    assert process.stdout is not None
    if process.poll() is None:
        process.stdin.write(json.dumps(arguments, default=str) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
    _start.cache_clear()
    errors.seek(0)
    raise AssertionError(f"{peer} {arguments} failed:\n{errors.read()[-4000:]}")


@lru_cache
def _start(peer: str) -> tuple[subprocess.Popen[str], IO[str]]:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).parent / f"peer_{peer}.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, "PYTHONPATH": str(peers.PEERS), "HF_HUB_OFFLINE": "1"},
    )
    atexit.register(_stop, process)
    return process, errors


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
