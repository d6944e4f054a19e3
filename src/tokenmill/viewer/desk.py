"""What was named when the viewer was started, by numbers: the page can ask for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill._version import __version__
from tokenmill.diagnosis.values import METRICS
from tokenmill.errors import UsageError
from tokenmill.files import is_remote, local_path, shown
from tokenmill.options import as_list
from tokenmill.store.layout import StoreLayout
from tokenmill.store.reader import Store
from tokenmill.viewer.batches import ShownBatches
from tokenmill.viewer.runs import ShownBuild, ShownRun, is_timeline
from tokenmill.viewer.stores import ShownStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenmill.files import PathInput


class Desk:
    """Stores, runs and builds that are shown."""

    def __init__(self, paths: PathInput | Iterable[PathInput]) -> None:
        self.stores: list[ShownStore] = []
        self.runs: list[ShownRun] = []
        self.builds: list[ShownBuild] = []
        for path in as_list(paths):
            self._lay(path)
        if not (self.stores or self.runs or self.builds):
            raise UsageError("nothing to show", hint="name a store: tokenmill view my-store")
        self.batches = [ShownBatches(self.stores)]

    def _lay(self, path: PathInput) -> None:
        """Find out what a path is."""
        here = local_path(path)
        if here is not None and here.is_file() and is_timeline(here):
            self.builds.append(ShownBuild(here))
        elif here is not None and (here.name == METRICS or (here / METRICS).is_file()):
            self.runs.append(ShownRun(here))
        elif here is not None and _is_unfinished(here):
            self.builds.append(ShownBuild(here))
        else:
            self._add_store(Store(path, split=None), path)
            if here is not None and here.is_dir() and StoreLayout(here).building.exists():
                self.builds.append(ShownBuild(here))  # it grows

    def _add_store(self, store: Store, path: PathInput, *, so_far: bool = False) -> None:
        names = {store.name for store in self.stores}
        name = _name(path)
        name = f"{name} ({len(names) + 1})" if name in names else name
        self.stores.append(ShownStore(store, name=name, so_far=so_far))

    def _take_builds(self) -> None:
        """Have what builds have made so far among the stores, and in place of it what is new."""
        known = {store.whole.path: place for place, store in enumerate(self.stores)}
        for build in self.builds:
            folder = build.path.absolute()
            is_done = StoreLayout(folder).manifest.is_file()
            found = Store(folder, split=None) if is_done else build.so_far()
            if found is None:
                continue
            place = known.get(folder)
            if place is None:
                self._add_store(found, folder, so_far=not is_done)
            elif (found.content, is_done) != self.stores[place].state:
                name = self.stores[place].name
                self.stores[place] = ShownStore(found, name=name, so_far=not is_done)
        self.batches[0].forget()

    def about(self) -> dict[str, Any]:
        """Everything that can be asked for; what a build has committed is a store too."""
        self._take_builds()
        return {
            "version": __version__,
            "stores": [store.about() for store in self.stores],
            "runs": [run.name for run in self.runs],
            "builds": [build.name for build in self.builds],
        }


def _is_unfinished(folder: Path) -> bool:
    """Whether a build works there, or was stopped: what it has made has no manifest yet."""
    layout = StoreLayout(folder)
    marks = layout.shards, folder / "tmp", layout.lock, layout.building
    is_begun = any(mark.exists() for mark in marks)
    return is_begun and not layout.manifest.is_file()


def _name(path: PathInput) -> str:
    """The last part of a path, which is short enough for a list."""
    text = str(path)
    return shown(text) if is_remote(text) else Path(text).resolve().name
