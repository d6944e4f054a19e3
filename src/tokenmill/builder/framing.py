"""Puts documents back to back as a shard holds them: BOS, ids, EOS, in the shard's width.

A mask goes the same way. A BOS that is put in front does not count: nothing comes before it that
could predict it. An EOS that is put behind counts if the token in front of it does: it is the end
of what the model is to say, or of what it is told.

One pass over the ids narrows and places them. Copying slice by slice is fastest for documents of
more than about a hundred tokens; shorter ones go through a mask, whose cost does not grow with
their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenmill.records import TokenBatch

_SHORT_TOKENS = 96


class Scratch:
    """An array that is used again: a fresh one of megabytes costs a page fault per 4 KB of it."""

    def __init__(self) -> None:
        self._array: NDArray[Any] = np.empty(0, np.uint8)

    def take(self, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        num_bytes = length * dtype.itemsize
        if len(self._array) < num_bytes:
            self._array = np.empty(num_bytes + num_bytes // 4, np.uint8)
        return self._array[:num_bytes].view(dtype)


def frame_documents(
    tokens: TokenBatch,
    *,
    documents: NDArray[np.int64] | None,
    dtype: np.dtype[Any],
    bos_id: int | None,
    eos_id: int | None,
    scratch: Scratch,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Ids of the chosen documents (None: all), framed, and the length of each.

    The ids are valid until the scratch is used again.
    """
    column = _Column(tokens.ids, tokens.offsets, documents)
    return _frame(column, dtype=dtype, first=bos_id, last=eos_id, scratch=scratch)


def frame_mask(
    tokens: TokenBatch,
    *,
    documents: NDArray[np.int64] | None,
    has_bos: bool,
    has_eos: bool,
    scratch: Scratch,
) -> NDArray[np.uint8] | None:
    """What of the chosen documents counts, framed as they are; none of them may be empty.

    None where there is no mask. Valid until the scratch is used again.
    """
    if tokens.mask is None:
        return None
    framed, lengths = _frame(
        _Column(tokens.mask, tokens.offsets, documents),
        dtype=np.dtype(np.uint8),
        first=0 if has_bos else None,
        last=0 if has_eos else None,
        scratch=scratch,
    )
    if has_eos:
        ends = np.cumsum(lengths)
        framed[ends - 1] = framed[ends - 2]
    return framed


class _Column:
    """Values of documents back to back, and which of the documents are wanted."""

    def __init__(
        self,
        values: NDArray[Any],
        offsets: NDArray[np.int64],
        documents: NDArray[np.int64] | None,
    ) -> None:
        self.values = values
        self.offsets = offsets
        self.lengths = np.diff(offsets)
        self.documents = documents
        if documents is not None and len(documents) == len(self.lengths):
            self.documents = None
        self.chosen = self.lengths if self.documents is None else self.lengths[self.documents]
        """Lengths of those that are wanted."""


def _frame(
    column: _Column, *, dtype: np.dtype[Any], first: int | None, last: int | None, scratch: Scratch
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    extra = (first is not None) + (last is not None)
    framed_lengths = column.chosen + extra
    if extra == 0 and column.documents is None:
        return column.values.astype(dtype), framed_lengths
    ends = np.cumsum(framed_lengths)
    framed = scratch.take(int(ends[-1]) if len(ends) else 0, dtype)
    starts = ends - framed_lengths
    inner = starts + (first is not None)
    if len(column.chosen) and column.chosen.mean() < _SHORT_TOKENS:
        _place_masked(framed, column, inner=inner)
    else:
        _place_slices(framed, column, inner=inner)
    if first is not None:
        framed[starts] = first
    if last is not None:
        framed[ends - 1] = last
    return framed, framed_lengths


def _place_slices(framed: NDArray[Any], column: _Column, *, inner: NDArray[np.int64]) -> None:
    documents, values = column.documents, column.values
    sources = column.offsets[:-1] if documents is None else column.offsets[documents]
    for source, target, length in zip(
        sources.tolist(), inner.tolist(), column.chosen.tolist(), strict=True
    ):
        framed[target : target + length] = values[source : source + length]


def _place_masked(framed: NDArray[Any], column: _Column, *, inner: NDArray[np.int64]) -> None:
    # +1 where a document's values start, -1 behind them: the running sum is 1 on values, 0
    # elsewhere.
    steps = np.zeros(len(framed) + 1, np.int8)
    np.add.at(steps, inner, 1)
    np.add.at(steps, inner + column.chosen, -1)
    holds_values = np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
    if column.documents is None:
        framed[holds_values] = column.values
        return
    kept = np.zeros(len(column.lengths), np.bool_)
    kept[column.documents] = True
    framed[holds_values] = column.values[np.repeat(kept, column.lengths)]
