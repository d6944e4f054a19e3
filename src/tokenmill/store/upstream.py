"""Where the store is that a build's folder stands for: in the folder itself, or behind a URL.

    StoreLayout.upstream: Itself (here)  |  Mirror (mirror.py)

Everything that plans, commits and assembles works on a folder. What it changes there it also tells
the upstream, in the same order, so the rules of `commit` hold for both.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path


class Upstream(Protocol):
    """A store that a local folder is worked on for; paths are those of the folder."""

    @property
    def url(self) -> str | None:
        """The address, with all that is in it; None where the folder is the store."""

    def shown(self, path: Path) -> str:
        """What a path of the folder is called in messages."""

    def begin(self) -> None:
        """Bring what a build must know of the store; StoreError where it cannot be had."""

    def bring(self, paths: Sequence[Path]) -> None:
        """Bring files that are in the store and not in the folder."""

    def borrow(self, paths: Sequence[Path]) -> AbstractContextManager[None]:
        """Have files of any size in the folder for a while, as far as the store has them."""

    def size(self, path: str) -> int | None:
        """Bytes of a file of the store; None if it is not there."""

    def put(self, path: Path) -> None:
        """Make a file of the folder a file of the store."""

    def take(self, staged: Path, path: Path) -> None:
        """Make a staged file, which goes from its place, the file `path` of the store."""

    def remove(self, paths: Sequence[Path]) -> None:
        """Take files away from the store; those that are not there are no error."""

    def elsewhere(self, paths: Sequence[Path]) -> list[Path]:
        """Those of the paths that the store has and a look into the folder would not show."""

    def close(self) -> None:
        """Give back what the folder needed of this machine."""


class Itself:
    """The folder is the store: whatever was done in it is done."""

    url = None

    def shown(self, path: Path) -> str:
        return str(path)

    def begin(self) -> None: ...

    def bring(self, paths: Sequence[Path]) -> None: ...

    def borrow(self, paths: Sequence[Path]) -> AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def size(self, path: str) -> int | None:
        try:
            return os.stat(path).st_size  # noqa: PTH116 (a path object costs more than the call)
        except OSError:
            return None

    def put(self, path: Path) -> None: ...

    def take(self, staged: Path, path: Path) -> None:
        staged.replace(path)

    def remove(self, paths: Sequence[Path]) -> None: ...

    def elsewhere(self, paths: Sequence[Path]) -> list[Path]:  # noqa: ARG002
        return []

    def close(self) -> None: ...


ITSELF = Itself()
