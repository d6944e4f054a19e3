"""How long the rows of a store are, what of them counts, and what a limit would cost.

Everything is read from the store, so a resumed build tells the same as one in a single run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.records import RejectReason
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from tokenmill.config import RowShape

PERCENTILES = (1, 10, 50, 90, 99)
LIMITS = tuple(2**power for power in range(9, 18))
"""Sequence lengths that people train with: 512 to 131,072."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What a longest length would take away."""

    limit: int
    rows: int
    """Longer than it."""
    tokens: int
    """Behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLengths:
    """Tokens per row; one that was cut into several documents is one row."""

    shortest: int
    longest: int
    mean: float
    percentiles: Mapping[int, int]
    counted_tokens: int | None
    """Tokens that count for the loss; None where there are no masks."""
    cuts: tuple[Cut, ...]
    """For the limits that some row is longer than."""
    max_length: int | None
    too_long: str
    at_limit: int
    """Rows of exactly `max_length` tokens: those cut off, and any that have just this length."""
    cut_off: int | None
    """Rows that were cut off; None where no end token tells, or where it is far away."""
    rejected_too_long: int
    split_rows: int
    """Rows that were cut into several documents."""
    pieces: int
    """Documents that those became."""
    silent_documents: int
    """Documents of which no token counts: pieces of rows, if anything."""


def measure_rows(path: str | os.PathLike[str], shape: RowShape) -> RowLengths | None:
    """Lengths of all rows of a store; None where it has none."""
    with Store(path, split=None) as store:
        if not len(store):
            return None
        lengths = np.concatenate([store.row_lengths(shard) for shard in range(len(store.shards))])
        counted, silent = (store.num_counted, store.num_silent) if store.has_mask else (None, 0)
        totals = store.manifest.totals
        is_near = shape.too_long != "truncate" or not store.is_remote
        tells = store.eos_id is not None and is_near
        cut_off = _count_cut_off(store, shape) if tells else None
        reasons = store.reject_counts() if shape.too_long == "reject" else {}
    lengths = np.sort(lengths)
    ranks = {p: min(len(lengths) * p // 100, len(lengths) - 1) for p in PERCENTILES}
    limit = shape.max_length
    return RowLengths(
        shortest=int(lengths[0]),
        longest=int(lengths[-1]),
        mean=float(lengths.mean()),
        percentiles={p: int(lengths[rank]) for p, rank in ranks.items()},
        counted_tokens=counted,
        cuts=tuple(_cut(lengths, each) for each in LIMITS if each < lengths[-1]),
        max_length=limit,
        too_long=shape.too_long,
        at_limit=0 if limit is None else int(np.count_nonzero(lengths == limit)),
        cut_off=cut_off,
        rejected_too_long=reasons.get(RejectReason.TOO_LONG, 0),
        split_rows=totals.split_rows,
        pieces=totals.pieces,
        silent_documents=silent,
    )


def _count_cut_off(store: Store, shape: RowShape) -> int:
    """Rows of the longest length that have lost their end token."""
    if shape.too_long != "truncate":
        return 0
    count = 0
    for position in range(len(store.shards)):
        shard = store.map_shard(position)
        longest = np.flatnonzero(shard.index.lengths == shape.max_length).tolist()
        count += sum(shard.document(number)[-1] != store.eos_id for number in longest)
    return count


def _cut(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], limit: int) -> Cut:
    longer = lengths[lengths > limit]
    return Cut(limit=limit, rows=len(longer), tokens=int((longer - limit).sum()))
