"""Reading units of a file that holds a text column: what Parquet and Arrow files share.

The digest of such a unit covers the text column alone, as decoded: a file that was written again
with other compression or other columns keeps its digest, one whose text changed does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenmill import paths
from tokenmill.errors import SourceError
from tokenmill.remote import RemoteError, shown
from tokenmill.sources.base import LARGEST_BATCH_ROWS, UnitEnd
from tokenmill.sources.columns import ColumnDigest, flat, rows_of, text_batch
from tokenmill.sources.units import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.records import RowBatch
    from tokenmill.sources.base import SourceFile, SourceOptions, Unit


UNREADABLE = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, RecursionError)
"""What Arrow raises for a file that is not what its name says, or has a name that is no UTF-8, or a
value (a date, say) that Python has none for."""


def damaged(path: str, error: Exception) -> Exception:
    """The error for a file whose content does not have the form that its name promises."""
    if isinstance(error, MemoryError):  # Arrow's is one of its own kind too
        return MemoryError(*error.args)
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

    def _let_go(self) -> None:  # noqa: B027
        """The rows so far are no longer needed: give back memory that they lie in."""

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches."""
        self._end = None
        digest = ColumnDigest()
        row = 0
        for array in self._flat_arrays(unit):
            digest.update(array)
            yield rows_of(
                array,
                first_row=row,
                num_bytes=text_batch(array).num_bytes,
                max_document_bytes=self._options.max_document_bytes,
            )
            row += len(array)
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
        held: list[Any] = []
        rows = size = 0
        try:
            parts = (
                piece
                for array in self._arrays(unit)
                for part in _undecoded(array, self._options.batch_bytes)
                for piece in _pieces(flat(part), self._options.batch_bytes)
            )
            for part in parts:
                held.append(part)
                rows, size = rows + len(held[-1]), size + text_batch(held[-1]).num_bytes
                # A reader gives few rows at a time where it does not know how long they are.
                if 2 * size >= self._options.batch_bytes or 2 * rows >= LARGEST_BATCH_ROWS:
                    yield _joined(held)
                    self._let_go()
                    rows = size = 0
            if held:
                yield _joined(held)
        except (*UNREADABLE, StopIteration) as error:
            raise damaged(self._file.path, error) from error


def _undecoded(array: Any, most_bytes: int) -> Iterator[Any]:
    """The array, in slices of about `most_bytes` of text where each value stands there once."""
    if not pa.types.is_dictionary(array.type):
        yield array
        return
    lengths = pc.binary_length(flat(array.dictionary)).take(array.indices).fill_null(0)
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    low = 0
    while low < len(array):
        bound = most_bytes + (int(ends[low - 1]) if low else 0)
        high = max(low + 1, int(np.searchsorted(ends, bound, side="right")))
        yield array.slice(low, high - low)
        low = high
    if not len(array):
        yield array


def _joined(arrays: list[Any]) -> Any:
    """The arrays as one, and the list without them."""
    array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    arrays.clear()
    return array


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
