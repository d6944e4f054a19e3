"""The real `tokenmill` command in a process of its own."""

from __future__ import annotations

import os
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
