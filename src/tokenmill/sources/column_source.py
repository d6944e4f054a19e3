"""Reading units of a file that holds a text column: what Parquet and Arrow files share.

The digest of such a unit covers the text column alone, as decoded: a file that was written again
with other compression or other columns keeps its digest, one whose text changed does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tokenmill import paths
from tokenmill.errors import SourceError
from tokenmill.remote import RemoteError, shown
from tokenmill.sources.base import UnitEnd
from tokenmill.sources.columns import ColumnDigest, flat, rows_of, text_batch
from tokenmill.sources.units import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.records import RowBatch
    from tokenmill.sources.base import SourceFile, SourceOptions, Unit


UNREADABLE = (pa.ArrowException, OSError, EOFError, UnicodeError, RecursionError)
"""What Arrow raises for a file that is not what its name says; names in it may be no UTF-8."""


def damaged(path: str, error: Exception) -> SourceError:
    """The error for a file whose content does not have the form that its name promises."""
    if isinstance(error, RemoteError):
        return paths.unreadable(path, error)
    return SourceError(
        f"{shown(path)!r} cannot be read as what its name says: {_reason(error)}",
        hint="copy or write the file again, or leave it out, then run the same command again",
    )


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class ColumnSource(ABC):
    """An open file with a text column."""

    read_seconds = 0.0

    def __init__(self, file: SourceFile, options: SourceOptions) -> None:
        self._file = file
        self._options = options
        self._end: UnitEnd | None = None
        check_unchanged(file)

    @abstractmethod
    def _arrays(self, unit: Unit) -> Iterator[Any]:
        """The unit's text column, piece by piece."""

    @abstractmethod
    def _is_last(self, unit: Unit) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches."""
        self._end = None
        digest = ColumnDigest()
        row = 0
        for array in self._flat_arrays(unit):
            digest.update(array)
            for piece in _pieces(array, self._options.batch_bytes):
                yield rows_of(
                    piece,
                    first_row=row,
                    num_bytes=text_batch(piece).num_bytes,
                    max_document_bytes=self._options.max_document_bytes,
                )
                row += len(piece)
        check_unchanged(self._file)
        last = self._is_last(unit)
        self._end = UnitEnd(digest=digest.hexdigest(), num_lines=row, is_last=last)

    def end(self) -> UnitEnd:
        """Facts about the unit read last."""
        assert self._end is not None, "end() before the unit's rows were all read"
        return self._end

    def exists(self, unit: Unit) -> bool:  # noqa: ARG002
        """Always: the units were counted when the file was planned."""
        return True

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit."""
        return sum(len(array) for array in self._flat_arrays(unit))

    def digest(self, unit: Unit) -> str:
        """The unit's digest alone."""
        digest = ColumnDigest()
        for array in self._flat_arrays(unit):
            digest.update(array)
        return digest.hexdigest()

    def _flat_arrays(self, unit: Unit) -> Iterator[Any]:
        try:
            yield from (flat(array) for array in self._arrays(unit))
        except (*UNREADABLE, StopIteration) as error:
            raise damaged(self._file.path, error) from error


def _pieces(array: Any, batch_bytes: int) -> Iterator[Any]:
    """Slices of about `batch_bytes`; most arrays are one."""
    batch = text_batch(array)
    if batch.num_bytes <= 2 * batch_bytes:
        yield array
        return
    low = 0
    while low < len(array):
        bound = batch.offsets[low] + batch_bytes
        high = max(low + 1, int(np.searchsorted(batch.offsets, bound, side="right")) - 1)
        yield array.slice(low, high - low)
        low = high
