"""Disks that are full, and files that may grow no more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The system refuses to let any file of this process grow past `size` (EFBIG)."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(path: Path, *, size: str) -> Iterator[None]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root on Linux")
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("this system does not let root mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
