"""Where the tokens of a store go under `concat` and `pad`, counted from lengths and masks.

A document is *split* if what there is to learn from it (the labels whose input is of the same
document) stands in more than one row: from the second row on it is read without what came before.
`best-fit` counts while it plans, and keeps the numbers in its plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.loader.layouts.base import Account
from tokenmill.loader.layouts.packing import length_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenmill.store.reader import Store


def concat_account(store: Store, *, seq_len: int) -> Account:
    """Where the tokens go if the stream is cut every `seq_len` tokens.

    Row i is the positions from `i * seq_len` on, `seq_len + 1` of them, so a token and its label
    meet in exactly one row.
    """
    tokens = nonempty = split = 0
    for lengths in length_blocks(store):
        starts = np.cumsum(lengths, dtype=np.int64)
        starts -= lengths
        starts += tokens
        last_inputs = starts + lengths
        last_inputs -= 2
        split += int(np.count_nonzero(starts // seq_len < last_inputs // seq_len))
        nonempty += int(np.count_nonzero(lengths))
        tokens += int(lengths.sum(dtype=np.int64))
    rows = max(-(-(tokens - 1) // seq_len), 1) if tokens else 0
    repeated = max(rows - 1, 0)
    return Account(
        packing="concat",
        seq_len=seq_len,
        rows=rows,
        documents=store.num_documents,
        tokens=tokens,
        used=tokens,
        dropped=0,
        repeated=repeated,
        padding=rows * (seq_len + 1) - tokens - repeated,
        split_documents=split,
        cut_documents=0,
        targets=masked_targets(store) if store.has_mask else tokens - nonempty,
    )


def pad_account(store: Store, *, seq_len: int) -> Account:
    """Where the tokens go if each document has a row of its own, cut off or padded."""
    used, nonempty, cut = pad_used(store, seq_len=seq_len), 0, 0
    for lengths in length_blocks(store):
        nonempty += int(np.count_nonzero(lengths))
        cut += int(np.count_nonzero(lengths > seq_len + 1))
    return Account(
        packing="pad",
        seq_len=seq_len,
        rows=store.num_documents,
        documents=store.num_documents,
        tokens=store.num_tokens,
        used=used,
        dropped=store.num_tokens - used,
        repeated=0,
        padding=store.num_documents * (seq_len + 1) - used,
        split_documents=0,
        cut_documents=cut,
        targets=(
            masked_targets(store, row_tokens=seq_len + 1) if store.has_mask else used - nonempty
        ),
    )


def pad_used(store: Store, *, seq_len: int) -> int:
    """Tokens that stand in a row if each document has a row of its own."""
    blocks = length_blocks(store)
    return sum(int(np.minimum(lengths, seq_len + 1).sum(dtype=np.int64)) for lengths in blocks)


def masked_targets(store: Store, *, row_tokens: int | None = None) -> int:
    """Tokens that count, by the masks, without the first of every document: it is no label.

    With `row_tokens`, those that documents have beyond so many are left out.
    """
    total = 0
    for position in range(len(store.shards)):
        for mask, lengths in store.map_shard(position).mask_runs():
            total += _count_targets(mask, lengths, row_tokens=row_tokens)
    return total


def _count_targets(
    mask: NDArray[np.uint8], lengths: NDArray[np.int64], *, row_tokens: int | None
) -> int:
    starts = np.cumsum(lengths) - lengths
    kept = lengths if row_tokens is None else np.minimum(lengths, row_tokens)
    bounds = np.stack((starts + 1, starts + kept), axis=1)[kept > 1].ravel()
    if not len(bounds):
        return 0
    # Sums between bounds: every second one is of labels. One more value, so that a document may
    # end with the mask.
    sums = np.add.reduceat(np.append(mask, np.uint8(0)), bounds, dtype=np.int64)
    return int(sums[::2].sum())
