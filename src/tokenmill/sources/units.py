"""How a file is cut into units, and the check that it stayed the same while it was read.

The cut is a function of the file's size and the options, never of the machine: large enough that a
unit's fixed costs vanish, small enough that workers share one file and a crash loses little.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tokenmill import paths
from tokenmill.errors import SourceError
from tokenmill.sources.base import MEGABYTE, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.sources.base import SourceFile, SourceOptions

SMALLEST_UNIT_BYTES = 8 * MEGABYTE
LARGEST_UNIT_BYTES = 256 * MEGABYTE
UNITS_PER_FILE = 32
TEXT_PER_COMPRESSED_BYTE = 4


def unit_bytes_for(size: int) -> int:
    """Bytes of text in a unit of a file that holds about `size` bytes of text."""
    return min(max(-(-size // UNITS_PER_FILE), SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)


def text_size(file: SourceFile) -> int:
    """Bytes of text in the file, estimated from its size where it is compressed."""
    return file.size if file.compression is None else file.size * TEXT_PER_COMPRESSED_BYTE


def unit_bytes_of(file: SourceFile, options: SourceOptions) -> int:
    """Bytes of text in a unit of this file."""
    return options.unit_bytes or unit_bytes_for(text_size(file))


def byte_units(file: SourceFile, options: SourceOptions, *, stream: bool) -> Iterator[Unit]:
    """Units by byte range; without end for a stream, whose length is not known."""
    step = unit_bytes_of(file, options)
    count = max(1, -(-file.size // step))
    for index in itertools.count() if stream else range(count):
        last = not stream and index == count - 1
        end = None if last else (index + 1) * step
        yield Unit(file=file, index=index, start=index * step, end=end)


def check_unchanged(file: SourceFile) -> None:
    """Raise if the file is not the one that was planned with."""
    found = paths.stat(file.location, fresh=True)
    if (found.size, found.version) != (file.size, file.version):
        raise SourceError(
            f"{file.path!r} changed while it was in use: {file.size:,} bytes (version "
            f"{file.version}) when the build was planned, now {found.size:,} ({found.version}); "
            "its rows would be a mixture of both",
            hint="wait until nothing writes to it, then run the same command again",
        )
