"""Writes a time line while a build runs.

A thread takes a sample every half second and writes it as one line in one call, so that a build
that is killed leaves at most one line unfinished. A file that cannot be written is an error before
any work is done. If writing fails later, as on a full disk, recording ends and `problem` says why:
the build goes on. Where looking at the processes takes long, samples become fewer, so that the
thread is busy for a twentieth of the time at most.
"""

from __future__ import annotations

import datetime
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill._version import __version__
from tokenmill.errors import UsageError
from tokenmill.monitor.sampler import Sampler, describe_machine
from tokenmill.monitor.timeline import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import BinaryIO, Self

INTERVAL_SECONDS = 0.5
_IDLE_FACTOR = 19
_SHORTEST_SECONDS = 0.1
"""A last sample over less than this says nothing about rates; it is taken only if there is none."""


def record(
    path: str | os.PathLike[str],
    *,
    facts: Mapping[str, object] | None = None,
    interval_seconds: float = INTERVAL_SECONDS,
) -> Recorder:
    """Record the time line of what is done in the `with` block that this is used in.

    `facts` go into the header as they are: leave out whatever must not be read by others.
    """
    if interval_seconds <= 0:
        raise UsageError(f"interval_seconds={interval_seconds!r} is not a time", hint="use 0.5")
    return Recorder(Path(path), facts=dict(facts or {}), interval_seconds=interval_seconds)


class Recorder:
    """Made by `record`."""

    def __init__(self, path: Path, *, facts: dict[str, object], interval_seconds: float) -> None:
        self.path = path
        self.problem: str | None = None
        """Why recording ended early."""
        self._facts = facts
        self._interval = interval_seconds
        self._file: BinaryIO | None = None
        self._noted: tuple[float, str, int, int] | None = None
        """When, phase, bytes of input, tokens: replaced as a whole, so that no lock is needed."""
        self._written: tuple[float, str, int, int] | None = None
        self.num_samples = 0
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, *, phase: str, input_bytes: int, tokens: int) -> None:
        """Say how far the build is; any thread may, at any time."""
        self._noted = (time.monotonic(), phase, input_bytes, tokens)

    def __enter__(self) -> Self:
        self._file = _open(self.path)
        self._began = self._last = time.monotonic()
        self._sampler = Sampler()
        self._write(
            {
                "kind": "header",
                "schema": SCHEMA,
                "started": _now(),
                "tokenmill": __version__,
                "interval_seconds": self._interval,
                "machine": describe_machine(),
                "build": self._facts,
            }
        )
        if self.problem is not None:
            self._close()
            raise _unwritable(self.path, self.problem)
        self._thread = threading.Thread(target=self._run, name="tokenmill-timeline", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if not self.num_samples or time.monotonic() - self._last >= _SHORTEST_SECONDS:
            self._sample()
        _, phase, input_bytes, tokens = self._noted or (0.0, "none", 0, 0)
        self._write(
            {
                "kind": "summary",
                "ended": _now(),
                "outcome": "done" if kind is None else kind.__name__,
                "seconds": round(time.monotonic() - self._began, 3),
                "samples": self.num_samples,
                "peak_memory_bytes": self._peak_bytes,
                "phase": phase,
                "input_bytes": input_bytes,
                "tokens": tokens,
            }
        )
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _run(self) -> None:
        pause = self._interval
        while not self._stop.wait(pause):
            begin = time.monotonic()
            self._sample()
            cost = time.monotonic() - begin
            pause = max(self._interval - cost, _IDLE_FACTOR * cost)

    def _sample(self) -> None:
        if self.problem is not None:
            return
        try:
            sample = self._sampler.sample()
        except Exception as error:
            # Systems differ in what they let us see; none of it is worth a build.
            self.problem = f"{type(error).__name__}: {error}"
            return
        self._last = time.monotonic()
        memory = sample["memory_pss_bytes"] or sample["memory_rss_bytes"]
        assert isinstance(memory, int)
        self._peak_bytes = max(self._peak_bytes, memory)
        self.num_samples += 1
        seconds = round(self._last - self._began, 3)
        at = {"kind": "sample", "time": round(time.time(), 3), "seconds": seconds}
        self._write(at | sample | self._done())

    def _done(self) -> dict[str, object]:
        """How far the build is, and its speed since the last sample."""
        noted, before = self._noted, self._written
        self._written = noted
        if noted is None:
            return {"phase": "planning", "input_bytes": 0, "tokens": 0} | _no_speed()
        at, phase, input_bytes, tokens = noted
        done = {"phase": phase, "input_bytes": input_bytes, "tokens": tokens}
        if before is None or at <= before[0]:
            return done | _no_speed()
        span = at - before[0]
        return done | {
            "input_bytes_per_second": (input_bytes - before[2]) / span,
            "tokens_per_second": (tokens - before[3]) / span,
        }

    def _write(self, members: Mapping[str, object]) -> None:
        if self._file is None or self.problem is not None:
            return
        line = json.dumps(members, separators=(",", ":"), default=str).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes of a line could be written")
        except OSError as error:
            self.problem = error.strerror or str(error)


def _no_speed() -> dict[str, object]:
    return {"input_bytes_per_second": None, "tokens_per_second": None}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _open(path: Path) -> BinaryIO:
    """The file, to be written behind what is in it; UsageError where that cannot or may not be."""
    try:
        # Something else, such as a pipe, would wait for its reader here.
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise _unwritable(path, "it is there and is no file")
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error
    try:
        _continue(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _unwritable(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"the time line {str(path)!r} cannot be written: {reason}",
        hint="name a file in a folder that exists and has room: --monitor timeline.jsonl",
    )


def _continue(file: BinaryIO, path: Path) -> None:
    """Go on behind an older time line; anything else that lies there is left alone."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(0)
    if SCHEMA.encode() not in file.read(200):
        raise UsageError(
            f"{str(path)!r} exists and is no time line; it would be damaged",
            hint="name a new file: --monitor timeline.jsonl",
        )
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.write(b"\n")  # a build that was killed left half a line
