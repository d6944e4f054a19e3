"""What `make test-fast` runs is found by names, and watched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests import fast

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def start(_: Path) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def connect(_: Path) -> None:
    with socket.socket() as one:
        one.connect_ex(("127.0.0.1", 9))


def sync(folder: Path) -> None:
    with (folder / "file").open("wb") as file:
        os.fsync(file.fileno())


class Starter:
    def __call__(self) -> None:
        start(self.folder)

    folder: Path


STARTERS = {"any": Starter()}


@pytest.fixture
def starter() -> Starter:
    return STARTERS["any"]


def is_marked(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("fast") is not None


def test_a_test_is_fast_unless_something_it_uses_is_not(request: pytest.FixtureRequest) -> None:
    assert is_marked(request)


@pytest.mark.usefixtures("starter")
def test_a_fixture_may_make_it_slow(request: pytest.FixtureRequest) -> None:
    assert not is_marked(request)


@pytest.mark.parametrize("what", [start, connect, sync])
def test_a_fast_test_that_does_any_of_it_fails(
    what: Callable[[Path], None], tmp_path: Path
) -> None:
    config = SimpleNamespace(option=SimpleNamespace(markexpr="fast"))
    item: Any = SimpleNamespace(get_closest_marker=lambda _: object(), config=config)
    with pytest.raises(pytest.fail.Exception, match="add the name"), fast.watched(item):
        what(tmp_path)
    with fast.watched(item):
        (tmp_path / "file").touch()
