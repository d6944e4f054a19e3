"""Runs a program whose reads beyond a file end it: `python -m tests.hostile.guard MODULE ...`.

A map of a file ends within a page, and its neighbour is whatever else is mapped: who reads too far
finds bytes there. Here every file that Python, numpy or Arrow open is copied to the end of a page
that is followed by one which nobody may touch, and so is the page before. Beside that, the
allocators of Python and Arrow check what is around each block, and fresh memory is never zeros.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
CHECKS = {
    "PYTHONMALLOC": "debug",
    "ARROW_DEBUG_MEMORY_POOL": "abort",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_PERTURB_": "165",
}
_PAGE = mmap.PAGESIZE
_MOST_BYTES = 16 << 20
"""Of what is copied; the files that are larger are there for their memory."""
_mmap, _memory_map, _file, _parquet = mmap.mmap, pa.memory_map, pa.OSFile, pq.ParquetFile
_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def run_guarded(
    module: str, *arguments: object, path: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a module so; what it printed, and how it ended."""
    command = [sys.executable, "-X", "faulthandler", "-m", __name__, module, *map(str, arguments)]
    # It sees the packages that this process sees, wherever they are.
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, path, *filter(None, sys.path))))
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **CHECKS, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )


class Guarded:
    """In the place of `mmap.mmap`: a copy of the file between two pages that end the process."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        mapped = _mmap(*given, **named)
        return mapped if len(mapped) > _MOST_BYTES else cls._of(mapped[:])

    @classmethod
    def _of(cls, data: bytes) -> Any:
        room = -(-len(data) // _PAGE) * _PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = _library.mmap(None, room + 2 * _PAGE, 0, flags, -1, 0)
        _library.mprotect(base + _PAGE, room, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(base + _PAGE, 0xA5, room)
        first = base + _PAGE + room - len(data)
        ctypes.memmove(first, data, len(data))
        _library.mprotect(base + _PAGE, room, mmap.PROT_READ)
        # An array of C has the buffer of any address; it is of the class too, as a map would be.
        kind: Any = type(cls.__name__, (ctypes.c_char * len(data), cls), {"__init__": _nothing})
        found = kind.from_address(first)
        found.held = base, room + 2 * _PAGE
        return found

    def __del__(self) -> None:
        if held := getattr(self, "held", None):
            _library.munmap(*held)

    def __getitem__(self, key: Any) -> Any:
        found = memoryview(self).cast("B")[key]  # type: ignore[arg-type]
        return bytes(found) if isinstance(found, memoryview) else found

    def size(self) -> int:
        return len(self)  # type: ignore[arg-type]

    def madvise(self, *_: int) -> None:
        """A copy is given back whole."""

    close = madvise


def _nothing(*_: Any, **__: Any) -> None:
    """The memory is there already."""


def _reader(path: Any, kind: Any = _file, mode: str = "r") -> Any:
    """What Arrow reads a file from."""
    native = kind(path, mode)
    if mode not in ("r", "rb") or not 0 < native.size() <= _MOST_BYTES:
        return native
    with native:
        return pa.BufferReader(pa.py_buffer(Guarded._of(native.read())))


def place() -> None:
    """From now on, whatever is mapped or opened by Arrow has its guards."""
    mmap.mmap = Guarded  # type: ignore[misc]
    pa.OSFile = lambda path, mode="r": _reader(path, _file, mode)
    pa.memory_map = lambda path, mode="r": _reader(path, _memory_map, mode)
    pq.ParquetFile = lambda source, **options: _parquet(
        _reader(str(source)) if options.pop("memory_map", False) else source, **options
    )


if __name__ == "__main__":
    if sys.platform == "linux":
        place()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
