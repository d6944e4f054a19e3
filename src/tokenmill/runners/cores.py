"""Which cores the workers should have: physical ones, NUMA node by node."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_NODES = Path("/sys/devices/system/node")


def physical_cores() -> int:
    """Physical cores that this process may use; at least 1."""
    usable = _usable_cores()
    logical = psutil.cpu_count(logical=True) or len(usable)
    physical = psutil.cpu_count(logical=False) or logical
    # In a container that may use some of the cores, take the machine's ratio of the two.
    return max(1, min(len(usable), round(len(usable) * physical / logical)))


def pinning(num_workers: int) -> list[list[int]] | None:
    """A core for each worker, one NUMA node after the other; None where cores cannot be bound."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    usable = _usable_cores()
    order = [core for node in _numa_nodes() for core in node if core in usable] or sorted(usable)
    first_threads = [core for core in order if _is_first_thread(core)] or order
    return [[first_threads[i % len(first_threads)]] for i in range(num_workers)]


def _usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _numa_nodes() -> list[list[int]]:
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [_parse_list(path.read_text()) for path in lists]


def _is_first_thread(core: int) -> bool:
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return not siblings.exists() or _parse_list(siblings.read_text())[0] == core


def _parse_list(text: str) -> list[int]:
    """'0-3,8' as the kernel writes it."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return cores
