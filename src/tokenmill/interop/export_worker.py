"""The worker of an export: makes the files of one part after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.interop.parts import ExportFolder, PartFiles
from tokenmill.interop.registry import get_format
from tokenmill.store.lock import WorkerLock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.interop.base import ExportOptions, Part
    from tokenmill.runners import Report
    from tokenmill.store.reader import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """All that a worker of an export must know."""

    stores: Mapping[str, Store]
    format: str
    options: ExportOptions
    out: str
    export: str
    lock_token: str


def start_worker(settings: WorkerSettings) -> ExportWorker:
    """What the runner calls in each worker process."""
    return ExportWorker(settings)


class ExportWorker:
    """Makes parts until there are no more tasks."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._format = get_format(settings.format)
        self._folder = ExportFolder(Path(settings.out))
        self._lock = WorkerLock(self._folder.books, token=settings.lock_token)
        self._lock.acquire()

    def ready(self) -> None:
        return None

    def work(self, task: Part, report: Report) -> None:
        settings = self._settings
        with PartFiles(self._folder, task, settings.options.link) as out:
            store = settings.stores[task.split]
            out.commit(settings.export, self._format.write(store, task, settings.options, out))

    def close(self) -> None:
        self._lock.release()
