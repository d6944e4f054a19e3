"""The time line of a build: what machine and processes did while it ran, as JSON Lines.

    {"kind": "header", "schema": "tokenmill.timeline/1", "machine": {...}, "build": {...}, ...}
    {"kind": "sample", "seconds": 0.5, "cpu_percent": [97.1, 98.4], "memory_rss_bytes": ..., ...}
    {"kind": "summary", "outcome": "done", "seconds": ..., "peak_memory_bytes": ..., ...}

A build that goes on writes after what is there: a header begins a new segment. A build that was
killed has no summary, and at worst half a last line.

A thread takes a sample every half second and writes it as one line in one call, so that a build
that is killed leaves at most one line unfinished. A file that cannot be written is an error before
any work is done. If writing fails later, as on a full disk, recording ends and `problem` says why:
the build goes on. Where looking at the processes takes long, samples become fewer, so that the
thread is busy for a twentieth of the time at most.

A recorder also keeps what each unit took, where a profile is asked for; the time line does not have
it, since units are called after the input.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import stat
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from tokenmill._version import __version__
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO, Self

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Lines = list[dict[str, Any]]

SCHEMA = "tokenmill.timeline/1"
INTERVAL_SECONDS = 0.5
_BEGINNING = b'{"kind":"'
_IDLE_FACTOR = 19
# A last sample over less than this says nothing about rates; it is taken only if there is none.
_SHORTEST_SECONDS = 0.1
_HAS_PSS = sys.platform.startswith("linux")


def tree(process: psutil.Process) -> list[psutil.Process]:
    """The process and its children, as far as the system shows them."""
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return [process]


def rss_bytes(process: psutil.Process) -> int:
    """Resident memory of one process; none where it has ended."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def tree_bytes(process: psutil.Process) -> int:
    """Resident memory of a process and its children."""
    return sum(map(rss_bytes, tree(process)))


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds so far of the processes and of their children that ended."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it ended just now; its parent has counted it
            total += sum(process.cpu_times()[:4])
    return total


# -------------------------------------------------------------------------------------------------
# One sample of the machine, and of this process with all its children: what differs between two
# looks. What a system does not tell (PSS outside Linux, disk counters in some containers) is NaN,
# and null in the file.


class _Look(NamedTuple):
    """Counters at one moment."""

    at: float
    cores: Floats  # seconds in use and in all, of each
    disk: Floats  # bytes read and written, all disks together
    members: dict[int, Floats]  # of each process: RSS, PSS, bytes read and written, CPU seconds


def _look() -> _Look:
    disk = np.full(2, np.nan)
    with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
        if (counters := psutil.disk_io_counters()) is not None:
            disk[:] = counters.read_bytes, counters.write_bytes
    members = {}
    for process in tree(psutil.Process()):
        # Without those that end while they are looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            members[process.pid] = _look_at(process)
    return _Look(time.monotonic(), _core_seconds(), disk, members)


def _look_at(process: psutil.Process) -> Floats:
    found = np.full(5, np.nan)
    found[0] = process.memory_info().rss
    found[4] = sum(process.cpu_times()[:2])
    # Another user's process, as after a change of rights, may hide the rest.
    with contextlib.suppress(psutil.AccessDenied):
        if _HAS_PSS:
            found[1] = process.memory_full_info().pss
    with contextlib.suppress(psutil.AccessDenied):
        if hasattr(process, "io_counters"):
            found[2:4] = process.io_counters()[2:4]
    return found


def _core_seconds() -> Floats:
    """(psutil's own percentages are kept per thread.)"""
    found = []
    for times in psutil.cpu_times(percpu=True):
        members = times._asdict()
        # Time of guests is in that of the user already.
        total = sum(members.values()) - members.get("guest", 0) - members.get("guest_nice", 0)
        found.append((total - members["idle"] - members.get("iowait", 0), total))
    return np.array(found)


def _sample(before: _Look, now: _Look) -> dict[str, object]:
    """What is in use now, and the rates since the look before."""
    span = max(now.at - before.at, 1e-9)
    both = min(len(before.cores), len(now.cores))
    used, total = (now.cores[:both] - before.cores[:both]).T
    percents = np.clip(100 * used / np.where(total > 0, total, np.inf), 0, 100).round(1)
    # A disk that was taken away takes its counts with it.
    disk = np.maximum(now.disk - before.disk, 0) / span
    # A new process began at nothing.
    spent = [
        np.maximum(each[2:] - np.nan_to_num(before.members.get(pid, np.zeros(5))[2:]), 0)
        for pid, each in now.members.items()
    ]
    own = [each[:2] for each in spent if not np.isnan(each[0])]
    build = np.sum(own, axis=0) / span if own else np.full(2, np.nan)
    memory = psutil.virtual_memory()
    rss, pss = np.sum([each[:2] for each in now.members.values()], axis=0)
    rates = {
        "disk_read_bytes_per_second": disk[0],
        "disk_write_bytes_per_second": disk[1],
        "build_read_bytes_per_second": build[0],
        "build_write_bytes_per_second": build[1],
    }
    return {
        "cpu_percent": percents.tolist(),
        "build_cpu_percent": round(100 * float(sum(each[2] for each in spent)) / span, 1),
        "processes": len(now.members),
        "memory_rss_bytes": int(rss),
        "memory_pss_bytes": None if np.isnan(pss) else int(pss),
        "machine_memory_bytes": int(memory.total - memory.available),
        **{name: None if np.isnan(rate) else float(rate) for name, rate in rates.items()},
    }


# -------------------------------------------------------------------------------------------------
# A time line as arrays, for plots and programs.
#
# The last line of a segment may be cut off, by a kill or a full disk, and is left out; any other
# line that is no line of a time line means that the file is something else, or damaged.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """One run of a build. Arrays have one value per sample, and are attributes:

    `time` since 1970 and `seconds` since the run began; `cpu_percent` (samples, cores) of all
    programs, `build_cpu_percent` of the build's own processes (100 is one core); `processes`;
    `memory_rss_bytes` of the build's processes, where pages that several of them share are counted
    more than once, and `memory_pss_bytes`, where they are divided among those (NaN outside Linux);
    `machine_memory_bytes` in use, by whomever; `disk_read_bytes_per_second` and
    `disk_write_bytes_per_second` of all programs, `build_read_bytes_per_second` and
    `build_write_bytes_per_second` of the build's own processes, from the disk and not from the page
    cache; `input_bytes` (decompressed) and `tokens` so far in this run, and
    `input_bytes_per_second` and `tokens_per_second`. Rates are since the sample before; what was
    not known is NaN.
    """

    header: Mapping[str, Any]
    """started, machine, build, and more."""
    summary: Mapping[str, Any] | None
    """None where the run was killed."""
    samples: Sequence[Mapping[str, Any]]

    def __getattr__(self, name: str) -> Floats:
        if name.startswith("_") or (self.samples and name not in self.samples[0]):
            raise AttributeError(f"a time line has no {name!r}")
        return _floats([sample.get(name) for sample in self.samples])

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def cpu_percent(self) -> Floats:
        cores = [sample.get("cpu_percent") or [] for sample in self.samples]
        widest = max(map(len, cores), default=int(self.header["machine"]["cores"] or 0))
        # A core may be switched off, or on, while the build runs.
        rows = [_floats([*row, *[None] * (widest - len(row))]) for row in cores]
        return np.array(rows, np.float64).reshape(len(rows), widest)

    @property
    def machine_cores(self) -> Floats:
        """Cores in use, by whomever."""
        return np.asarray(np.nansum(self.cpu_percent, axis=1) / 100)

    @property
    def build_cores(self) -> Floats:
        """Cores that the build's own processes had; NaN in a file of before."""
        return _floats([sample.get("build_cpu_percent") for sample in self.samples]) / 100

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(str(sample.get("phase")) for sample in self.samples)

    @property
    def memory_bytes(self) -> Floats:
        """PSS where it is known, else RSS."""
        pss = self.memory_pss_bytes
        return np.where(np.isnan(pss), self.memory_rss_bytes, pss)

    @property
    def length_seconds(self) -> float:
        """How long the run took, or lived."""
        if self.summary is not None:
            return float(self.summary["seconds"])
        return float(self.seconds[-1]) if len(self) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """All runs in one file, oldest first."""

    path: str
    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        """Of all runs, without the time between them."""
        return sum(segment.length_seconds for segment in self.segments)


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Read what `tokenmill build --monitor FILE` wrote, or is writing."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        problem = f"the time line {str(path)!r} cannot be read: {error.strerror or error}"
        hint = "write one with: tokenmill build ... --monitor timeline.jsonl"
        raise UsageError(problem, hint=hint) from error
    runs: list[Lines] = []
    bad = cut = 0
    for number, line in enumerate(lines, 1):
        if bad or not line.strip():
            continue
        members: Any = None
        with contextlib.suppress(ValueError):
            members = json.loads(line)
        is_ours = isinstance(members, dict) and "kind" in members
        is_header = is_ours and members.get("schema") == SCHEMA
        if is_header:
            cut = 0
            runs.append([members])
        elif cut or not runs:
            bad = cut or number
        elif is_ours:
            runs[-1].append(members)
        elif line.startswith(_BEGINNING[: len(line)]):
            cut = number  # the beginning of a line of ours
        else:
            bad = number
    if bad or not runs:
        raise UsageError(
            f"line {bad or 1:,} of {str(path)!r} is no line of a time line; it is another kind of "
            "file, or was changed",
            hint="name the file that was written by: tokenmill build ... --monitor FILE",
        )
    segments = []
    for header, *others in runs:
        samples = [line for line in others if line["kind"] == "sample"]
        summary = next((line for line in others if line["kind"] == "summary"), None)
        segments.append(Segment(header=header, summary=summary, samples=samples))
    return Timeline(path=str(path), segments=tuple(segments))


def _floats(values: list[Any]) -> Floats:
    numbers = [value if isinstance(value, int | float) else np.nan for value in values]
    return np.array(numbers, np.float64)


# -------------------------------------------------------------------------------------------------
# The recorder.


class _Done(NamedTuple):
    """How far a build is; replaced as a whole, so that no lock is needed."""

    at: float = 0.0
    phase: str = "none"
    input_bytes: int = 0
    tokens: int = 0


class Recorder:
    """Records what is done in the `with` block that it is used in; without a path, units alone.

    `facts` go into the header as they are: leave out whatever must not be read by others.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        facts: Mapping[str, object] | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        if interval_seconds <= 0:
            raise UsageError(f"interval_seconds={interval_seconds!r} is not a time", hint="use 0.5")
        self.path = None if path is None else Path(path)
        self.problem: str | None = None  # why recording ended early
        self.num_samples = 0
        self.units: list[dict[str, object]] = []
        self._facts = dict(facts or {})
        self._interval = interval_seconds
        self._file: BinaryIO | None = None
        self._done = self._written = _Done()
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, *, phase: str, input_bytes: int, tokens: int) -> None:
        """Say how far the build is; any thread may, at any time."""
        self._done = _Done(time.monotonic(), phase, input_bytes, tokens)

    def __enter__(self) -> Self:
        if self.path is None:
            return self
        self._file = _open(self.path)
        self._last = _look()
        self._began = self._last.at
        machine = {
            "cores": psutil.cpu_count(),
            "cores_physical": psutil.cpu_count(logical=False),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
        }
        self._write(
            "header",
            schema=SCHEMA,
            started=_now(),
            tokenmill=__version__,
            interval_seconds=self._interval,
            machine=machine,
            build=self._facts,
        )
        if self.problem is not None:
            self._file.close()
            raise _unwritable(self.path, self.problem)
        self._thread = threading.Thread(target=self._run, name="tokenmill-timeline", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is None or self._file is None:
            return
        self._stop.set()
        self._thread.join()
        if not self.num_samples or time.monotonic() - self._last.at >= _SHORTEST_SECONDS:
            self._take()
        self._write(
            "summary",
            ended=_now(),
            outcome="done" if kind is None else kind.__name__,
            seconds=round(time.monotonic() - self._began, 3),
            samples=self.num_samples,
            peak_memory_bytes=self._peak_bytes,
            phase=self._done.phase,
            input_bytes=self._done.input_bytes,
            tokens=self._done.tokens,
        )
        self._file.close()

    def _run(self) -> None:
        pause = self._interval
        while not self._stop.wait(pause):
            begin = time.monotonic()
            self._take()
            cost = time.monotonic() - begin
            pause = max(self._interval - cost, _IDLE_FACTOR * cost)

    def _take(self) -> None:
        """Write a sample, with how far the build is, and its speed since the last one."""
        if self.problem is not None:
            return
        try:
            now = _look()
            sample: dict[str, Any] = _sample(self._last, now)
        except Exception as error:
            # Systems differ in what they let us see; none of it is worth a build.
            self.problem = f"{type(error).__name__}: {error}"
            return
        self._last = now
        used = sample["memory_pss_bytes"] or sample["memory_rss_bytes"]
        self._peak_bytes = max(self._peak_bytes, used)
        self.num_samples += 1
        done, before, self._written = self._done, self._written, self._done
        span = done.at - before.at if before.at else 0.0
        rates = {
            f"{name}_per_second": (getattr(done, name) - getattr(before, name)) / span
            if span > 0
            else None
            for name in ("input_bytes", "tokens")
        }
        self._write(
            "sample",
            time=round(time.time(), 3),
            seconds=round(now.at - self._began, 3),
            **sample,
            phase=done.phase if done.at else "planning",
            input_bytes=done.input_bytes,
            tokens=done.tokens,
            **rates,
        )

    def _write(self, kind: str, **members: object) -> None:
        if self._file is None or self.problem is not None:
            return
        text = json.dumps({"kind": kind, **members}, separators=(",", ":"), default=str)
        line = text.encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes of a line could be written")
        except OSError as error:
            self.problem = error.strerror or str(error)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _open(path: Path) -> BinaryIO:
    """The file, to be written after an older time line; UsageError where something else is there.

    Something else that is no file, such as a pipe, would wait for its reader.
    """
    with contextlib.ExitStack() as opened:
        try:
            if path.exists() and not stat.S_ISREG(path.stat().st_mode):
                raise _unwritable(path, "it is there and is no file")
            file = opened.enter_context(path.open("a+b", buffering=0))
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error
        if size := file.seek(0, os.SEEK_END):
            file.seek(0)
            if SCHEMA.encode() not in file.read(200):
                problem = f"{str(path)!r} exists and is no time line; it would be damaged"
                raise UsageError(problem, hint="name a new file: --monitor timeline.jsonl")
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")  # a build that was killed left half a line
        opened.pop_all()
    return file


def _unwritable(path: Path, reason: str) -> UsageError:
    hint = "name a file in a folder that exists and has room: --monitor timeline.jsonl"
    return UsageError(f"the time line {str(path)!r} cannot be written: {reason}", hint=hint)
