"""How a contender that writes or reads token files is told what to do, timed, and how it answers.

    write    the documents, or rows, of a token pair into a new folder; the clock stops when every
             file is on the disk (fsync), for everyone
    read     all of what `write` made, every id in memory as an array

Rounds follow each other in one process, each `write` into a folder of its own. A rate is bytes of
ids as they are in the pair (two bytes each), whatever width the format has; `made` is what its
files have in fact. Peers write the whole pair, so that what a file costs once weighs about as much
for them as for us.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class InteropJob:
    """What a contender is asked for."""

    format: str
    tokens: str
    """Path of the token pair without its suffix."""
    store: str
    """The store with the same tokens."""
    tokenizer: str
    folder: str
    """The contender's own; holds nothing yet."""
    rounds: int
    workers: int
    """0 is as many as the contender chooses."""
    seq_len: int

    @property
    def made(self) -> Path:
        """What the last round wrote, and all rounds read."""
        return Path(self.folder) / f"written-{self.rounds - 1}"


Write: TypeAlias = "Callable[[InteropJob, Path], int]"
"""Writes into a folder that is not there yet; tokens written."""
Read: TypeAlias = "Callable[[InteropJob, Path, Path], int]"
"""Reads a folder, with a second one for what it makes itself; tokens read."""


def run(write: Write, read: Read | None = None) -> None:
    """All rounds of writing, then of reading; the report is the last line."""
    job = InteropJob(**json.loads(sys.argv[1]))
    report: dict[str, object] = {"write": _rounds(job, lambda out: write(job, out), "written")}
    if read is not None:
        report["read"] = _rounds(job, lambda out: read(job, job.made, out), "read")
    print(json.dumps(report), flush=True)


def _rounds(job: InteropJob, work: Callable[[Path], int], name: str) -> dict[str, object]:
    seconds, tokens, made = [], 0, 0
    for number in range(job.rounds):
        out = Path(job.folder) / f"{name}-{number}"
        # What the round before left to be written would be in the time of this one.
        os.sync()
        begin = time.perf_counter()
        tokens = work(out)
        sync_tree(out)
        seconds.append(round(time.perf_counter() - begin, 4))
        made = tree_bytes(out)
        if number < job.rounds - 1 or name == "read":
            shutil.rmtree(out, ignore_errors=True)
    return {"seconds": seconds, "bytes": 2 * tokens, "made": made}


def tree_bytes(folder: Path) -> int:
    """Of all files that were made."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sync_tree(folder: Path) -> None:
    """Wait until all files are on the disk."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def documents(job: InteropJob) -> Iterator[NDArray[np.uint16]]:
    """The tokens of each document that is written."""
    index = Path(f"{job.tokens}.idx").read_bytes()
    (count,) = struct.unpack_from("<Q", index, 18)
    ends = np.cumsum(np.frombuffer(index, "<i4", count, 34), dtype=np.int64)
    tokens = np.memmap(f"{job.tokens}.bin", np.uint16, "r")
    first = 0
    for last in ends.tolist():
        yield np.asarray(tokens[first:last])
        first = last


def rows(job: InteropJob, *, more: int = 0) -> NDArray[np.uint16]:
    """The stream cut into rows of seq_len (and `more`) tokens; a rest is left."""
    length = job.seq_len + more
    tokens = np.memmap(f"{job.tokens}.bin", np.uint16, "r")
    return np.asarray(tokens[: len(tokens) // length * length]).reshape(-1, length)
