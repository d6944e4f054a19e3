"""Jobs for the runner tests; worker processes import them by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.runners.local import FoundTask

if TYPE_CHECKING:
    from tokenmill.runners.local import Report


class Finder(NamedTuple):
    """A task that finds others, on a thread beside them; it dies once where it is told to."""

    kind: str
    value: tuple[tuple[tuple[Any, ...], ...], str | None]

    @property
    def finds_tasks(self) -> bool:
        return True


class Placed(NamedTuple):
    """A task that goes before those of a larger place."""

    kind: str
    value: Any
    place: int


@dataclass
class Start:
    """Starts workers that are ready with the number of the process that `prepare` ran in."""

    how: str
    prepared_in: int | None = None

    def prepare(self) -> None:
        if self.how == "fails":
            raise ValueError("cannot be prepared")
        if self.how == "with a thread":
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        self.prepared_in = os.getpid()

    def __call__(self) -> Worker:
        if self.how == "fails":
            self.prepare()
        return Worker(self.prepared_in)


class Worker:
    """Does what each task says: ('square', 3), ('die once', path), ('fail', text)..."""

    def __init__(self, payload: Any = None) -> None:
        self.payload = payload
        self.pool = ThreadPoolExecutor(1)

    def ready(self) -> Any:
        return self.payload

    def work(self, task: tuple[str, Any], report: Report) -> Any:
        kind, value, *_ = task
        if kind == "square":
            report(("squaring", value))
            return value * value
        if kind == "find":
            tasks, death = value
            return self.pool.submit(self._find, tasks, death, report)
        if kind == "later":
            return self._later(value)
        if kind == "die once" and not Path(value).exists():
            Path(value).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "die when told" and not Path(value).exists():
            while not Path(value).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang once" and not Path(value).exists():
            Path(value).touch()
            time.sleep(600)
        if kind == "kill parent once" and not Path(value).exists():
            Path(value).touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "abort":
            os.abort()
        if kind == "fail":
            raise ValueError(value)
        if kind == "sleep":
            time.sleep(value)
        if kind == "print":
            print(value, flush=True)
        return kind

    def _later(self, value: float) -> Future[float]:
        def settle() -> float:
            time.sleep(value)
            return value

        return self.pool.submit(settle)

    def _find(self, tasks: tuple[Any, ...], death: str | None, report: Report) -> None:
        for task in tasks:
            report(FoundTask(str(task), task))
        if death is not None and not Path(death).exists():
            Path(death).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
