"""Other projects' own readers and writers, each in a process that has their packages.

    run("megatron", "read", prefix)  ->  what tests/interop/peer_megatron.py answers, from JSON

`make` unpacks the packages of peers.txt into .venv-peers, beside the environment of the tests.
Where it is missing the tests are skipped and say so; in CI that is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PEERS = ROOT / os.environ.get("PEERS", ".venv-peers")
SECONDS = 120


def require(package: str = "stamp") -> None:
    """Skip the test where the other projects' packages, or one of them, are not there."""
    if (PEERS / package).exists():
        return
    problem = "other projects' packages are not there (.venv-peers): make test brings them"
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(problem)


def run(peer: str, *arguments: object) -> Any:
    """What a peer's script answers; it gets the arguments as JSON."""
    require()
    script = Path(__file__).parent / f"peer_{peer}.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), json.dumps(arguments, default=str)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": str(PEERS), "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == 0, f"{peer} {str(arguments)[:1000]} failed:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])
