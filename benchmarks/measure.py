"""Runs one contender in a fresh process and, if asked, watches the memory of its whole process
tree.

Watching costs the watched program a little, so a run is either timed or watched, never both. On
Linux memory is PSS: private pages, plus each shared page divided by the processes that share it, so
a file mapped by three workers counts once. Elsewhere the resident sets are added up, which counts
it three times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import psutil

from benchmarks import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MEMORY_KIND = "PSS" if sys.platform.startswith("linux") else "RSS"
TIMEOUT_SECONDS = 3600.0
SAMPLE_SECONDS = 0.02


class ContenderError(Exception):
    """A contender did not end well; the message is the last thing it said."""


@dataclass(slots=True)
class Watched:
    """Memory of a process tree over time."""

    seconds: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return max(self.memory_bytes, default=0)


def run(
    module: str,
    job: Mapping[str, object],
    *,
    python: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The report of `benchmarks.contenders.<module>` for the job; it times itself, undisturbed."""
    return _run(module, job, python, environment, watched=None, sample_seconds=0.2)


def watch(
    module: str,
    job: Mapping[str, object],
    *,
    python: Path | None = None,
    environment: Mapping[str, str] | None = None,
    sample_seconds: float = SAMPLE_SECONDS,
) -> tuple[dict[str, Any], Watched]:
    """The same with its memory; the times in this report are not to be used."""
    watched = Watched()
    report = _run(module, job, python, environment, watched=watched, sample_seconds=sample_seconds)
    return report, watched


def _run(
    module: str,
    job: Mapping[str, object],
    python: Path | None,
    environment: Mapping[str, str] | None,
    *,
    watched: Watched | None,
    sample_seconds: float,
) -> dict[str, Any]:
    command = [str(python or sys.executable), "-m", f"benchmarks.contenders.{module}"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = psutil.Popen(
            [*command, json.dumps(job)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            _wait(process, watched, sample_seconds)
        finally:
            _end(process)
        if process.returncode != 0:
            raise ContenderError(_last_line(err) or f"exit code {process.returncode}")
        report: dict[str, Any] = json.loads(_last_line(out))
    return report


def _wait(process: psutil.Popen, watched: Watched | None, sample_seconds: float) -> None:
    begin = time.monotonic()
    while process.poll() is None:
        if watched is not None:
            watched.memory_bytes.append(_tree_bytes(process))
            watched.seconds.append(time.monotonic() - begin)
        if time.monotonic() - begin > TIMEOUT_SECONDS:
            raise ContenderError(f"no end after {TIMEOUT_SECONDS:.0f} s")
        time.sleep(sample_seconds)


def _tree_bytes(process: psutil.Popen) -> int:
    total = 0
    for member in [process, *_children(process)]:
        try:
            if MEMORY_KIND == "PSS":
                total += member.memory_full_info().pss
            else:
                total += member.memory_info().rss
        except psutil.Error:
            continue  # it ended between being listed and being read
    return total


def _children(process: psutil.Popen) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(process: psutil.Popen) -> None:
    if process.poll() is None:
        for member in [*_children(process), process]:
            member.kill()
        process.wait()


def _last_line(stream: IO[bytes]) -> str:
    stream.seek(0)
    lines = stream.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
