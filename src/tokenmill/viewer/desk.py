"""What was named when the viewer was started, by numbers: the page can ask for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill._version import __version__
from tokenmill.errors import UsageError
from tokenmill.files import is_remote, shown
from tokenmill.options import as_list
from tokenmill.store.reader import Store
from tokenmill.viewer.stores import ShownStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenmill.files import PathInput


class Desk:
    """Stores, runs and builds that are shown."""

    def __init__(self, paths: PathInput | Iterable[PathInput]) -> None:
        self.stores: list[ShownStore] = []
        for path in as_list(paths):
            self.stores.append(ShownStore(Store(path, split=None), name=_name(path)))
        if not self.stores:
            raise UsageError("nothing to show", hint="name a store: tokenmill view my-store")

    def about(self) -> dict[str, Any]:
        """Everything that can be asked for."""
        return {"version": __version__, "stores": [store.about() for store in self.stores]}


def _name(path: PathInput) -> str:
    """The last part of a path, which is short enough for a list."""
    text = str(path)
    return shown(text) if is_remote(text) else Path(text).resolve().name
