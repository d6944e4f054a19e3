"""Which rows of a unit the documents of a shard come from, as run lengths.

The numbers alternate: rows passed over, rows taken, rows passed over, ... So `[0, n]` is every row
of the unit, and `[2, 3, 1, 4]` is rows 2, 3, 4, 6, 7, 8, 9. A split that takes one row in a hundred
costs two small numbers per hundred rows, and where every row is used provenance costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class RowRuns:
    """Collects ascending rows into run lengths."""

    def __init__(self) -> None:
        self._runs: list[int] = []
        self._next = 0
        """One past the last row taken."""

    def add(self, rows: NDArray[np.int64]) -> None:
        """Take more rows; they must ascend, and come after all rows taken before."""
        if len(rows) == 0:
            return
        steps = np.diff(rows)
        if rows[0] < self._next or (len(steps) and steps.min() < 1):
            raise ValueError("rows of a shard must ascend: documents were appended out of order")
        breaks = np.flatnonzero(steps > 1) + 1
        starts = np.concatenate(([0], breaks))
        takes = np.diff(np.concatenate((starts, [len(rows)])))
        ends = rows[starts] + takes
        skips = rows[starts] - np.concatenate(([self._next], ends[:-1]))
        runs = np.stack((skips, takes), axis=1).ravel().tolist()
        if self._runs and runs[0] == 0:
            self._runs[-1] += runs[1]
            runs = runs[2:]
        self._runs += runs
        self._next = int(ends[-1])

    def lengths(self) -> tuple[int, ...]:
        return tuple(self._runs)


def row_of(runs: Sequence[int], *, document: int) -> int:
    """The row of its unit that a shard's document comes from."""
    takes = np.cumsum(runs[1::2])
    run = int(np.searchsorted(takes, document, side="right"))
    return sum(runs[0 : 2 * run + 1 : 2]) + document


def check_runs(runs: Sequence[int], *, documents: int, rows: int) -> None:
    """Raise ValueError unless the runs take `documents` of `rows` rows."""
    if len(runs) % 2 or sum(runs[1::2]) != documents or sum(runs) > rows:
        raise ValueError(f"row runs do not give {documents} documents out of {rows} rows")
    if any(length < 1 for length in runs[1:]) or min(runs, default=0) < 0:
        raise ValueError("row runs are not alternating runs of at least one row")
