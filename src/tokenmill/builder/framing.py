"""Puts documents back to back as a shard holds them: BOS, ids, EOS, in the shard's width.

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
    lengths = tokens.lengths
    if documents is not None and len(documents) == len(tokens):
        documents = None
    chosen = lengths if documents is None else lengths[documents]
    extra = (bos_id is not None) + (eos_id is not None)
    framed_lengths = chosen + extra
    if extra == 0 and documents is None:
        return tokens.ids.astype(dtype), framed_lengths
    ends = np.cumsum(framed_lengths)
    framed = scratch.take(int(ends[-1]) if len(ends) else 0, dtype)
    starts = ends - framed_lengths
    inner = starts + (bos_id is not None)
    if len(chosen) and chosen.mean() < _SHORT_TOKENS:
        _place_masked(framed, tokens, documents, inner=inner, chosen=chosen)
    else:
        _place_slices(framed, tokens, documents, inner=inner, chosen=chosen)
    if bos_id is not None:
        framed[starts] = bos_id
    if eos_id is not None:
        framed[ends - 1] = eos_id
    return framed, framed_lengths


def _place_slices(
    framed: NDArray[Any],
    tokens: TokenBatch,
    documents: NDArray[np.int64] | None,
    *,
    inner: NDArray[np.int64],
    chosen: NDArray[np.int64],
) -> None:
    sources = tokens.offsets[:-1] if documents is None else tokens.offsets[documents]
    ids = tokens.ids
    for source, target, length in zip(
        sources.tolist(), inner.tolist(), chosen.tolist(), strict=True
    ):
        framed[target : target + length] = ids[source : source + length]


def _place_masked(
    framed: NDArray[Any],
    tokens: TokenBatch,
    documents: NDArray[np.int64] | None,
    *,
    inner: NDArray[np.int64],
    chosen: NDArray[np.int64],
) -> None:
    # +1 where a document's ids start, -1 behind them: the running sum is 1 on ids, 0 elsewhere.
    steps = np.zeros(len(framed) + 1, np.int8)
    np.add.at(steps, inner, 1)
    np.add.at(steps, inner + chosen, -1)
    holds_ids = np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
    if documents is None:
        framed[holds_ids] = tokens.ids
        return
    kept = np.zeros(len(tokens), np.bool_)
    kept[documents] = True
    framed[holds_ids] = tokens.ids[np.repeat(kept, tokens.lengths)]
