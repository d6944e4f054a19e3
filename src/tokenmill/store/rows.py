"""Which rows of a unit the documents of a shard come from, as run lengths.

The numbers alternate: rows passed over, rows taken, rows passed over, ... So `[0, n]` is every row
of the unit, and `[2, 3, 1, 4]` is rows 2, 3, 4, 6, 7, 8, 9. A split that takes one row in a hundred
costs two small numbers per hundred rows, and where every row is used provenance costs nothing.

A row may become several documents, one behind the other: its *pieces*. They are listed in the same
manner: rows of one document, pieces of the row behind them, and so on. So `[5, 3]` is five rows of
one document each, one of three, and then rows of one document again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class RowRuns:
    """Collects the rows of documents into run lengths."""

    def __init__(self) -> None:
        self._runs: list[int] = []
        self._pieces: list[int] = []
        self._whole = 0
        """Rows of one document since the last one of several."""
        self._next = 0
        """One past the last row taken."""

    def add(self, rows: NDArray[np.int64]) -> None:
        """Take the rows of more documents; they must ascend, and come after all taken before.

        A row that stands there several times has so many pieces; all of them must come at once.
        """
        if len(rows) == 0:
            return
        steps = np.diff(rows)
        if rows[0] < self._next or (len(steps) and steps.min() < 0):
            raise ValueError("rows of a shard must ascend: documents were appended out of order")
        if len(steps) and steps.min() == 0:
            firsts = np.concatenate(([0], np.flatnonzero(steps) + 1))
            self._add_pieces(np.diff(firsts, append=len(rows)))
            rows = rows[firsts]
            steps = np.diff(rows)
        else:
            self._whole += len(rows)
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

    def _add_pieces(self, counts: NDArray[np.int64]) -> None:
        """Take the number of documents of each row."""
        several = np.flatnonzero(counts > 1)
        whole = np.diff(several, prepend=-1) - 1
        whole[0] += self._whole
        self._pieces += np.stack((whole, counts[several]), axis=1).ravel().tolist()
        self._whole = len(counts) - 1 - int(several[-1])

    def lengths(self) -> tuple[int, ...]:
        return tuple(self._runs)

    def pieces(self) -> tuple[int, ...]:
        return tuple(self._pieces)


class Place(NamedTuple):
    """Where a document comes from: a row of its unit, and which of its pieces it is."""

    row: int
    piece: int
    pieces: int


def place_of(runs: Sequence[int], pieces: Sequence[int], *, document: int) -> Place:
    """The row of its unit that a shard's document comes from."""
    taken, piece, count = _taken_row(pieces, document)
    takes = np.cumsum(runs[1::2])
    run = int(np.searchsorted(takes, taken, side="right"))
    return Place(sum(runs[0 : 2 * run + 1 : 2]) + taken, piece, count)


def _taken_row(pieces: Sequence[int], document: int) -> tuple[int, int, int]:
    """Which of the rows that were taken a document is of, its piece, and how many there are."""
    whole, counts = np.array(pieces[0::2], np.int64), np.array(pieces[1::2], np.int64)
    ends = np.cumsum(whole + counts)
    split = int(np.searchsorted(ends, document, side="right"))
    row = document - int((counts[:split] - 1).sum())
    if split == len(counts) or document < ends[split] - counts[split]:
        return row, 0, 1
    piece = document - int(ends[split] - counts[split])
    return row - piece, piece, int(counts[split])


def split_counts(pieces: Sequence[int]) -> tuple[int, int]:
    """How many rows have several pieces, and how many pieces those are."""
    return len(pieces) // 2, sum(pieces[1::2])


def row_lengths(lengths: NDArray[np.integer], pieces: Sequence[int]) -> NDArray[np.int64]:
    """Tokens of each row, from those of each document."""
    whole, counts = np.array(pieces[0::2], np.int64), np.array(pieces[1::2], np.int64)
    begins = np.ones(len(lengths), bool)
    ends = np.cumsum(whole + counts)
    for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
        begins[end - count + 1 : end] = False
    return np.add.reduceat(lengths.astype(np.int64), np.flatnonzero(begins))


def check_runs(
    runs: Sequence[int], *, documents: int, rows: int, pieces: Sequence[int] = ()
) -> None:
    """Raise ValueError unless the runs take `documents` of `rows` rows."""
    if len(pieces) % 2 or any(count < 2 for count in pieces[1::2]) or min(pieces, default=0) < 0:
        raise ValueError("pieces are not rows of one document and rows of several in turns")
    split, several = split_counts(pieces)
    taken = documents - several + split
    if taken < sum(pieces[0::2]) + split:
        raise ValueError(f"pieces are not those of {documents} documents")
    if len(runs) % 2 or sum(runs[1::2]) != taken or sum(runs) > rows:
        raise ValueError(f"row runs do not give {taken} rows out of {rows}")
    if any(length < 1 for length in runs[1:]) or min(runs, default=0) < 0:
        raise ValueError("row runs are not alternating runs of at least one row")
