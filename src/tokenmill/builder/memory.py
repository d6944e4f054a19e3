"""Divides one memory budget among the processes of a build, and keeps a worker within its share.

    budget = driver + workers x (engine + batches in flight + engine cache) + one large document

What a share must hold was measured (see `docs/decisions/0003-memory-budget.md`): the interpreter
with its libraries, the tokenizer as both engines hold it, and the copies of a batch on its way from
raw bytes to shard. What is left is the cache of the fast engine, which grows with the text: the
worker watches its own size and has the engine drop the cache when its share is full. One document
may be far larger than a batch; workers take turns at those, so that the budget needs room for one
of them only.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from tokenmill.errors import MemoryBudgetError
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

MEGABYTE = 1 << 20

_DRIVER_BYTES = 110 * MEGABYTE
_LIBRARIES_BYTES = 110 * MEGABYTE
UPLOAD_BYTES = 80 * MEGABYTE
"""More for each process whose store is behind a URL: network libraries, and parts being sent."""
_TOKENIZER_FACTOR = 18
"""Memory of the fast and the reference engine together, per byte of tokenizer file."""
BATCH_FACTOR = 14
"""Copies of a batch alive at once: raw and parsed ahead, text and ids in work, ids to write."""
_CACHE_BYTES = 48 * MEGABYTE
"""The least that makes the fast engine's cache worth having."""
LARGE_DOCUMENT_FACTOR = 160
"""Memory per byte of a document that a reference engine encodes alone, at about a token a byte.
The fast engine needs far less, but which engine is used may not decide which rows are rejected."""

_USUAL_ROOM = 192 * MEGABYTE
_SMALLEST_BATCH = 1 * MEGABYTE
_LARGEST_BATCH = 8 * MEGABYTE


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """How a budget is spent."""

    budget: int
    workers: int
    worker_bytes: int
    """Size at which a worker drops its caches."""
    batch_bytes: int
    max_document_bytes: int = 0
    """Follows from the budget alone: it decides which rows are rejected, and so may not depend on
    the number of workers."""
    room_bytes: int = 0
    """What a reader may hold at once beside its batches; a file that needs more is an error."""
    hard_bytes: int = 0
    """Size at which a worker gets no more memory: its share and one large document."""
    worker_cpus: int = 1
    """CPUs of a cluster's node for each worker, so that no more start there than fit."""


def default_budget() -> int:
    """A quarter of the memory that this process may use."""
    return usable_memory() // 4


def usable_memory() -> int:
    """Memory of the machine, or of the control group that limits this process."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def max_document_bytes(budget: int) -> int:
    """The largest document that a budget can take; a larger one is a rejected row."""
    return max(budget // (4 * LARGE_DOCUMENT_FACTOR), 256 * 1024)


def divide_budget(
    budget: int,
    *,
    tokenizer_bytes: int,
    most_workers: int,
    least_workers: int = 1,
    upload_bytes: int = 0,
) -> MemoryPlan:
    """Shares for as many workers as fit, up to `most_workers`; refuses where too few do."""
    document = max_document_bytes(budget)
    driver = _DRIVER_BYTES + upload_bytes
    fixed = upload_bytes + _LIBRARIES_BYTES + _TOKENIZER_FACTOR * tokenizer_bytes + _CACHE_BYTES
    free = budget - driver - LARGE_DOCUMENT_FACTOR * document
    workers = min(most_workers, free // (fixed + BATCH_FACTOR * _SMALLEST_BATCH))
    if workers < least_workers:
        share = fixed + BATCH_FACTOR * _SMALLEST_BATCH
        # The large document takes a quarter of any budget.
        smallest = (driver + least_workers * share) * 4 // 3
        smallest = -(-smallest // (10 * 10**6)) * 10 * 10**6
        raise MemoryBudgetError(
            f"a memory budget of {format_size(budget)} is too small for {least_workers} "
            f"worker{'s' if least_workers > 1 else ''} with this tokenizer, each of which needs "
            f"{format_size(share)} beside {format_size(driver)} for the driver and a "
            "quarter of the budget for large documents",
            hint=f"the smallest that works is --memory {smallest // 10**6}MB"
            + (", or use fewer --workers" if least_workers > 1 else ""),
        )
    share = free // workers
    batch = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, (share - fixed) // (2 * BATCH_FACTOR)))
    # Taken from what the engine's cache could grow to.
    spare = share - fixed - BATCH_FACTOR * batch
    room = max(4 * batch, spare // 2, min(spare, _USUAL_ROOM))
    return MemoryPlan(
        budget=budget,
        workers=workers,
        worker_bytes=share,
        batch_bytes=batch,
        max_document_bytes=document,
        room_bytes=room,
        hard_bytes=share + LARGE_DOCUMENT_FACTOR * document,
    )


def budget_with(plan: MemoryPlan, more_bytes: int) -> str:
    """A budget, as one writes it, whose readers have so many bytes more room."""
    # Batches may grow first; of what is left half is room; a quarter of all is a large document's.
    batches = BATCH_FACTOR * (_LARGEST_BATCH - plan.batch_bytes)
    more = (2 * more_bytes + plan.room_bytes + batches + MEGABYTE) * plan.workers * 4 // 3
    return f"{-(-(plan.budget + more) // 10**8) * 100}MB"


_SPARE_BYTES = 8 * MEGABYTE
"""Mapped and never used: stacks of threads, what allocators keep."""


def limit_memory(most_bytes: int) -> Callable[[], None]:
    """Make this process get no more memory than that; what is returned takes the limit back.

    For a process of one's own that works on what may be hostile. Beyond the limit Python, numpy and
    Arrow raise MemoryError, to be caught around the work (`BuildWorker.work` does) and told as an
    error that names the file; native code that cannot raise ends the process with SIGABRT, which
    `LocalRunner` tells as such an error and does not try again. Only Linux has such a limit.
    """
    if sys.platform != "linux":
        return lambda: None
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as file:
        facts = dict(line.split(":", 1) for line in file if line.startswith(("VmData", "VmRSS")))
    mapped, used = (int(facts[name].split()[0]) * 1024 for name in ("VmData", "VmRSS"))
    limit = mapped + max(0, most_bytes - used) + _SPARE_BYTES
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, before)


class MemoryGuard:
    """A worker's eye on its own size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._process = psutil.Process()
        self.kept_free = 0
        """What a reader may take at any moment."""

    def is_over(self) -> bool:
        return int(self._process.memory_info().rss) > self._limit - self.kept_free


def release_free_memory() -> None:
    """Give memory that was freed but kept by the allocators back to the system."""
    import pyarrow

    pyarrow.default_memory_pool().release_unused()
    if os.name == "posix":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
