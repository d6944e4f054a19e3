"""Keeps the counts of attacks that were tried."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.hostile.attack import write_counts

if TYPE_CHECKING:
    import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what this process tried."""
    write_counts(os.environ.get("PYTEST_XDIST_WORKER", "main"))
