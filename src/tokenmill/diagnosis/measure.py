"""Runs one way in a fresh process and watches the memory of it and its children from outside.

Memory is the sum of resident sets: a page that two processes share counts twice, as it does in the
budget of a build. Looking takes time as well, on machines with thousands of processes most of all,
so the pause between two looks is long beside the look.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from tokenmill.diagnosis.values import WayResult
from tokenmill.diagnosis.ways import WAYS

if TYPE_CHECKING:
    from tokenmill.diagnosis.ways.base import Job

LOOK_SECONDS = 0.05
LOOK_SHARE = 0.03
"""Most of the time that looking may take."""
LATEST_SECONDS = 300.0
KEPT_POINTS = 240
# As the build starts its workers: the child sees the modules that this process sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tokenmill.diagnosis.child import main; main()"
)


def run_way(job: Job) -> WayResult:
    """Carry out the job; what goes wrong in it is told by the result."""
    kind = WAYS[job.way]
    found, memory = _run(job)
    result = WayResult(
        key=job.way,
        title=kind.title,
        engine=found.get("engine", ""),
        in_loop=kind.in_loop,
        feeds=kind.feeds,
        workers=found.get("workers", job.workers),
        batch=job.batch,
        peak_memory_bytes=max((num_bytes for _, num_bytes in memory), default=0),
        memory=thin(memory),
    )
    if "problem" in found:
        return dataclasses.replace(result, problem=found["problem"])
    seconds = max(found["seconds"], 1e-9)
    cpu, others = found.pop("cpu_seconds"), found.pop("other_cpu_seconds")
    return dataclasses.replace(
        result, **found, cpu_cores=cpu / seconds, other_cores=others / seconds
    )


def _run(job: Job) -> tuple[dict[str, Any], list[tuple[float, int]]]:
    with tempfile.TemporaryDirectory(dir=job.folder) as folder, tempfile.TemporaryFile() as err:
        told, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        told.write_text(json.dumps(dataclasses.asdict(job)))
        process = psutil.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(told), str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
        try:
            memory = _watch(process)
        finally:
            _end(process)
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text())
            return found, memory
        return {"problem": _reason(process, err)}, memory


def _watch(process: psutil.Popen) -> list[tuple[float, int]]:
    """Memory over time until the process ends."""
    started = time.monotonic()
    memory: list[tuple[float, int]] = []
    while process.poll() is None and time.monotonic() - started < LATEST_SECONDS:
        look = time.monotonic()
        memory.append((look - started, tree_bytes(process)))
        time.sleep(max(LOOK_SECONDS, (time.monotonic() - look) / LOOK_SHARE))
    return memory


def tree_bytes(process: psutil.Process) -> int:
    """Resident memory of a process and its children."""
    total = 0
    for member in [process, *_children(process)]:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue  # it ended between being listed and being read
    return total


def thin(points: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """At most so many points, the largest of each stretch, so that no peak is lost."""
    step = -(-len(points) // KEPT_POINTS) or 1
    return tuple(
        max(points[first : first + step], key=lambda point: point[1])
        for first in range(0, len(points), step)
    )


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _end(process: psutil.Popen) -> None:
    if process.poll() is None:
        for member in [*_children(process), process]:
            try:
                member.kill()
            except psutil.Error:
                continue
    process.wait()


def _reason(process: psutil.Popen, err: IO[bytes]) -> str:
    err.seek(0)
    lines = err.read().decode("utf-8", errors="replace").strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return f"its process ended with exit code {process.returncode}{said}"
