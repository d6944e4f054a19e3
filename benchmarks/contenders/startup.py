"""How long a loader takes until its first batch, and how much memory it has after many.

    open      from the constructor to the first batch
    keep      keep the state in the middle of the first epoch, for the next two
    resume    from the constructor, with that state restored, to the first batch; and the part of
              it from the restore on
    memory    what the process has grown by after so many batches

Imports are over before any clock starts. `memory` is what the process has more than before the
constructor: resident pages, and those of them that are no pages of files.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupJob:
    """What a contender is asked for."""

    action: str
    path: str
    """A store, or one file of tokens."""
    state: str
    """File for the state between `keep` and `resume`."""
    seq_len: int
    batch_size: int
    middle: int
    """Step in the middle of an epoch."""
    batches: int


class Opened(Protocol):
    """An open loader."""

    def batches(self) -> Iterator[Any]: ...
    def state_at(self, step: int) -> Any: ...
    def restore(self, state: Any) -> None: ...


def run(open_loader: Callable[[StartupJob], Opened]) -> None:
    """Do what the first argument says and print the answer as the last line."""
    job = StartupJob(**json.loads(sys.argv[1]))
    actions = {"open": _open, "keep": _keep, "resume": _resume, "memory": _memory}
    print(json.dumps(actions[job.action](open_loader, job)), flush=True)


def _open(open_loader: Callable[[StartupJob], Opened], job: StartupJob) -> dict[str, float]:
    begin = time.perf_counter()
    next(open_loader(job).batches())
    return {"open_seconds": time.perf_counter() - begin}


def _keep(open_loader: Callable[[StartupJob], Opened], job: StartupJob) -> dict[str, float]:
    Path(job.state).write_bytes(pickle.dumps(open_loader(job).state_at(job.middle)))
    return {}


def _resume(open_loader: Callable[[StartupJob], Opened], job: StartupJob) -> dict[str, float]:
    state = pickle.loads(Path(job.state).read_bytes())
    begin = time.perf_counter()
    loader = open_loader(job)
    opened = time.perf_counter()
    loader.restore(state)
    next(loader.batches())
    end = time.perf_counter()
    return {"resume_seconds": end - begin, "restore_seconds": end - opened}


def _memory(open_loader: Callable[[StartupJob], Opened], job: StartupJob) -> dict[str, int]:
    gc.collect()
    before = _resident()
    batches = open_loader(job).batches()
    for _ in range(job.batches):
        next(batches)
    gc.collect()
    resident, anonymous = (now - then for now, then in zip(_resident(), before, strict=True))
    return {"memory_bytes": resident, "anonymous_bytes": anonymous}


def _resident() -> tuple[int, int]:
    """Resident bytes, and those that are no file's (where the system tells them apart)."""
    memory = psutil.Process().memory_info()
    return memory.rss, memory.rss - getattr(memory, "shared", 0)
