"""Where the tokens of a store go under `concat` and `pad`, counted from the lengths alone.

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
        targets=tokens - nonempty,
    )


def pad_account(store: Store, *, seq_len: int) -> Account:
    """Where the tokens go if each document has a row of its own, cut off or padded."""
    used = nonempty = cut = 0
    for lengths in length_blocks(store):
        used += int(np.minimum(lengths, seq_len + 1).sum(dtype=np.int64))
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
        targets=used - nonempty,
    )
