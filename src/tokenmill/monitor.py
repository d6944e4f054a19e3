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
"""

from __future__ import annotations

import contextlib
import dataclasses
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
    from collections.abc import Iterable, Mapping
    from types import TracebackType
    from typing import BinaryIO, Self

    from numpy.typing import NDArray


# -------------------------------------------------------------------------------------------------
# One sample of the machine, and of this process with all its children.
#
# Rates are differences to the sample before; the first one is taken when a sampler is made, and is
# not shown. What a system does not tell (PSS outside Linux, disk counters in some containers) is
# None.

if TYPE_CHECKING:
    Sample = dict[str, object]

_HAS_PSS = sys.platform.startswith("linux")


class _Traffic(NamedTuple):
    """Bytes read and written since a beginning."""

    read: int
    written: int


class _Member(NamedTuple):
    """A process of the build."""

    pid: int
    rss: int
    pss: int | None
    traffic: _Traffic | None


def describe_machine() -> dict[str, object]:
    """What a reader needs to judge the numbers; names no host, path or person."""
    return {
        "cores": psutil.cpu_count(),
        "cores_physical": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


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


def tree_cpu_seconds() -> float:
    """CPU seconds so far of this process, its children that live, and those that ended."""
    total = 0.0
    for process in tree(psutil.Process()):
        with contextlib.suppress(psutil.Error):  # it ended just now; its parent has counted it
            total += sum(process.cpu_times()[:4])
    return total


class Sampler:
    """Reads the counters, and remembers those of the last time."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._at = time.monotonic()
        self._disk = _disk_traffic()
        self._known = {member.pid: member.traffic for member in self._members()}
        self._cores = _core_times()

    def sample(self) -> Sample:
        """What is in use now, and the rates since the last call."""
        now = time.monotonic()
        span = max(now - self._at, 1e-9)
        members, disk = self._members(), _disk_traffic()
        disk_rates = _rates(self._disk, disk, span)
        own_rates = self._own_rates(members, span)
        cores = _core_times()
        percents = [_percent(*pair) for pair in zip(self._cores, cores, strict=False)]
        self._at, self._disk, self._cores = now, disk, cores
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": percents,
            "processes": len(members),
            "memory_rss_bytes": sum(member.rss for member in members),
            "memory_pss_bytes": _total(member.pss for member in members),
            "machine_memory_bytes": int(memory.total - memory.available),
            "disk_read_bytes_per_second": disk_rates[0],
            "disk_write_bytes_per_second": disk_rates[1],
            "build_read_bytes_per_second": own_rates[0],
            "build_write_bytes_per_second": own_rates[1],
        }

    def _members(self) -> list[_Member]:
        """The processes of the build, without those that end while they are looked at."""
        found: list[_Member] = []
        for process in tree(self._process):
            with contextlib.suppress(psutil.Error):
                found.append(_look_at(process))
        return found

    def _own_rates(self, members: Iterable[_Member], span: float) -> tuple[float | None, ...]:
        """What the build itself reads and writes; a new process began at nothing."""
        begun = _Traffic(0, 0)
        read = written = 0.0
        is_known = False
        for member in members:
            if member.traffic is None:
                continue
            is_known = True
            before = self._known.get(member.pid) or begun
            read += max(member.traffic.read - before.read, 0)
            written += max(member.traffic.written - before.written, 0)
        self._known = {member.pid: member.traffic for member in members}
        return (read / span, written / span) if is_known else (None, None)


def _look_at(process: psutil.Process) -> _Member:
    pss = None
    if _HAS_PSS:
        # Another user's process, as after a change of rights, may hide it.
        with contextlib.suppress(psutil.AccessDenied):
            pss = int(process.memory_full_info().pss)
    traffic = None
    if hasattr(process, "io_counters"):
        with contextlib.suppress(psutil.AccessDenied):
            counters = process.io_counters()
            traffic = _Traffic(counters.read_bytes, counters.write_bytes)
    return _Member(process.pid, int(process.memory_info().rss), pss, traffic)


def _core_times() -> list[tuple[float, float]]:
    """Seconds in use and in all, for each core. (psutil's own percentages are kept per thread.)"""
    found = []
    for times in psutil.cpu_times(percpu=True):
        members = times._asdict()
        # Time of guests is in that of the user already.
        total = sum(members.values()) - members.get("guest", 0) - members.get("guest_nice", 0)
        found.append((total - members["idle"] - members.get("iowait", 0), total))
    return found


def _percent(before: tuple[float, float], after: tuple[float, float]) -> float:
    used, total = (new - old for old, new in zip(before, after, strict=True))
    return round(min(max(100 * used / total, 0.0), 100.0), 1) if total > 0 else 0.0


def _disk_traffic() -> _Traffic | None:
    """All disks of the machine together."""
    try:
        counters = psutil.disk_io_counters()
    except (OSError, RuntimeError, NotImplementedError):
        return None
    return None if counters is None else _Traffic(counters.read_bytes, counters.write_bytes)


def _rates(
    before: _Traffic | None, after: _Traffic | None, span: float
) -> tuple[float | None, float | None]:
    if before is None or after is None:
        return None, None
    # A disk that was taken away takes its counts with it.
    read, written = (max(new - old, 0) for old, new in zip(before, after, strict=True))
    return read / span, written / span


def _total(amounts: Iterable[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    total = 0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


# -------------------------------------------------------------------------------------------------
# A time line as arrays, for plots and programs.
#
# Every run of a build is a segment. What was not known at a sample is NaN in its array. The last
# line of a segment may be cut off, by a kill or a full disk, and is left out; any other line that
# is no line of a time line means that the file is something else, or damaged, and is refused.

if TYPE_CHECKING:
    Floats = NDArray[np.float64]
    Lines = list[dict[str, Any]]

SCHEMA = "tokenmill.timeline/1"
_BEGINNING = b'{"kind":"'


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """One run of a build. Arrays have one value per sample; rates are since the one before."""

    header: Mapping[str, Any]
    """started, machine, build, and more."""
    summary: Mapping[str, Any] | None
    """None where the run was killed."""
    time: Floats
    """Seconds since 1970."""
    seconds: Floats
    """Since the run began."""
    cpu_percent: Floats
    """(samples, cores)."""
    processes: Floats
    memory_rss_bytes: Floats
    """Of the build's processes; pages that several of them share are counted more than once."""
    memory_pss_bytes: Floats
    """The same with shared pages divided among those that share them; NaN outside Linux."""
    machine_memory_bytes: Floats
    """In use, by whomever."""
    disk_read_bytes_per_second: Floats
    """All disks, all programs."""
    disk_write_bytes_per_second: Floats
    build_read_bytes_per_second: Floats
    """The build's own processes, from the disk: what is in the page cache is not read again."""
    build_write_bytes_per_second: Floats
    input_bytes: Floats
    """Worked on so far in this run, decompressed."""
    tokens: Floats
    input_bytes_per_second: Floats
    tokens_per_second: Floats
    phases: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.seconds)

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
        raise UsageError(
            f"the time line {str(path)!r} cannot be read: {error.strerror or error}",
            hint="write one with: tokenmill build ... --monitor timeline.jsonl",
        ) from error
    runs: list[Lines] = []
    cut: int | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        members = _parse(line)
        is_header = members is not None and members.get("schema") == SCHEMA
        if cut is not None and not is_header:
            raise _not_a_timeline(path, cut)
        if members is None and _is_begun(line):
            cut = number
        elif members is None or (not runs and not is_header):
            raise _not_a_timeline(path, number)
        elif is_header:
            cut = None
            runs.append([members])
        else:
            runs[-1].append(members)
    if not runs:
        raise _not_a_timeline(path, 1)
    return Timeline(path=str(path), segments=tuple(_segment(run) for run in runs))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        members = json.loads(line)
    except ValueError:
        return None
    return members if isinstance(members, dict) and "kind" in members else None


def _is_begun(line: bytes) -> bool:
    """Whether this may be the beginning of a line of ours."""
    length = min(len(line), len(_BEGINNING))
    return line[:length] == _BEGINNING[:length]


def _not_a_timeline(path: Path, number: int) -> UsageError:
    return UsageError(
        f"line {number:,} of {str(path)!r} is no line of a time line; it is another kind of file, "
        "or was changed",
        hint="name the file that was written by: tokenmill build ... --monitor FILE",
    )


def _segment(lines: Lines) -> Segment:
    samples = [line for line in lines if line["kind"] == "sample"]
    summaries = [line for line in lines if line["kind"] == "summary"]
    cores = [sample.get("cpu_percent") or [] for sample in samples]
    widest = max(map(len, cores), default=int(lines[0]["machine"]["cores"] or 0))
    # A core may be switched off, or on, while the build runs.
    percents = [[*map(_number, row), *[np.nan] * (widest - len(row))] for row in cores]

    def column(name: str) -> Floats:
        return np.array([_number(sample.get(name)) for sample in samples], dtype=np.float64)

    # Every other array is named as its member in the file.
    arrays = [field.name for field in dataclasses.fields(Segment) if field.type == "Floats"]
    plain = [name for name in arrays if name != "cpu_percent"]
    return Segment(
        header=lines[0],
        summary=summaries[-1] if summaries else None,
        cpu_percent=np.array(percents, dtype=np.float64).reshape(len(samples), widest),
        phases=tuple(str(sample.get("phase")) for sample in samples),
        **{name: column(name) for name in plain},
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


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
    """The file, to be written after what is in it; UsageError where that cannot or may not be."""
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
    """Go on after an older time line; anything else that is there is left alone."""
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


__all__ = ["Recorder", "Segment", "Timeline", "read_timeline", "record"]
