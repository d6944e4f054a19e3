"""A file that is hashed while it is written, and goes to the disk meanwhile.

Without the second, a file lies in memory until its end, and `finish` waits while the disk takes all
of it at once. Linux can be told to begin earlier; where it cannot, a file takes longer and is the
same.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

import xxhash

from tokenmill.store.facts import FileFacts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRITE_BYTES = 1 << 19
"""Larger writes cost Linux more time per byte, since it allocates large pages for them."""
AHEAD_BYTES = 8 << 20
"""What lies in memory before the disk is told to begin."""
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE: it begins and does not wait


class HashedFile:
    """A new file, or from an offset on a stretch of one that is there."""

    def __init__(self, path: Path, *, offset: int | None = None) -> None:
        self.bytes = 0
        """Written so far."""
        self._offset = offset or 0
        self._begun = 0
        self._hash = xxhash.xxh3_128()
        # Unbuffered: blocks are large.
        self._file = open(path, "xb" if offset is None else "r+b", buffering=0)  # noqa: SIM115
        if offset is not None:
            self._file.seek(offset)

    def write(self, block: bytes | bytearray | memoryview) -> None:
        """Write all of a block, of any contiguous kind."""
        left = memoryview(block).cast("B")
        while left:
            piece = left[:WRITE_BYTES]
            # A write may be cut short, most often when the disk is nearly full.
            piece = piece[: self._file.write(piece)]
            self._hash.update(piece)
            self.bytes += len(piece)
            left = left[len(piece) :]
        if self.bytes - self._begun >= AHEAD_BYTES:
            begin_writing(self._file.fileno(), self._offset + self._begun, self.bytes - self._begun)
            self._begun = self.bytes

    @property
    def checksum(self) -> str:
        """xxh3-128 of what was written so far."""
        return self._hash.hexdigest()

    def finish(self) -> FileFacts:
        """Wait until all of it is on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()
        return FileFacts(bytes=self.bytes, checksum=self.checksum)

    def close(self) -> None:
        self._file.close()


def begin_writing(descriptor: int, offset: int, count: int) -> None:
    """Ask for bytes of a file to go to the disk from now on; nothing is promised."""
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, count, _BEGIN_WRITING)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
