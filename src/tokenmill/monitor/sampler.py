"""One sample of the machine, and of this process with all its children.

Rates are differences to the sample before; the first one is taken when a sampler is made, and is
not shown. What a system does not tell (PSS outside Linux, disk counters in some containers) is
None.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        processes = [self._process]
        with contextlib.suppress(psutil.Error):
            processes += self._process.children(recursive=True)
        for process in processes:
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
