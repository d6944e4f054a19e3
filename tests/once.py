"""What takes long to make is made once for all processes that share out the tests."""

from __future__ import annotations

import fcntl
import os
import pickle
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

T = TypeVar("T")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What `make` returns for a folder of its own, which tests only read."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, kept = root / name, root / f"{name}.pickle"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            folder.mkdir()
            kept.write_bytes(pickle.dumps(make(folder)))
    found: T = pickle.loads(kept.read_bytes())
    return found
