"""Keeps the counts of attacks that were tried, and shares the long ones out."""

from __future__ import annotations

import os

import pytest
from tests.hostile.attack import write_counts


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the parts of a random attack."""
    if (parts := getattr(metafunc.function, "parts", 1)) > 1:
        metafunc.fixturenames.append("part")
        metafunc.parametrize("part", range(parts))


@pytest.fixture
def part(request: pytest.FixtureRequest) -> int:
    """Which part of an attack this is; none of them knows."""
    return int(request.param)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what this process tried."""
    write_counts(os.environ.get("PYTEST_XDIST_WORKER", "main"))
