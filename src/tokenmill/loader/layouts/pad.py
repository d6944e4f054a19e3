"""`pad`: one document to a row, cut off or padded, as supervised fine-tuning wants it.

Row k is document k: its first `seq_len + 1` tokens, then padding. What is cut off is lost to
training; `tokenmill layout` says how much that is before anyone trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.loader.account import pad_account, pad_used
from tokenmill.loader.layouts.base import PADDING, Pieces
from tokenmill.store.sealed import checksum_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenmill.loader.layouts.base import Account
    from tokenmill.store.stream import TokenStream

PACKING = "pad"


class PadLayout:
    """A store, a document to a row."""

    def __init__(self, stream: TokenStream, *, seq_len: int) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.num_rows = stream.store.num_documents

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        return checksum_of(f"{PACKING} {self.seq_len} {self.stream.store.content}".encode("ascii"))

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """For each row the beginning of its document, and padding."""
        spans = np.array([self.stream.document_span(row) for row in rows.tolist()], np.int64)
        starts = np.full((len(rows), 2), PADDING, np.int64)
        lengths = np.empty((len(rows), 2), np.int64)
        if len(rows):
            starts[:, 0] = spans[:, 0]
            np.minimum(spans[:, 1], self.seq_len + 1, out=lengths[:, 0])
        np.subtract(self.seq_len + 1, lengths[:, 0], out=lengths[:, 1])
        filled = lengths > 0
        return Pieces(starts[filled], lengths[filled])

    def segments(self, rows: NDArray[np.int64]) -> Pieces:
        """The same: a piece is of one document."""
        return self.pieces(rows)

    @property
    def used(self) -> int:
        """Tokens of the store that stand in a row; reads the whole index."""
        return pad_used(self.stream.store, seq_len=self.seq_len)

    def account(self) -> Account:
        """Where the tokens go; reads the whole index, and all masks."""
        return pad_account(self.stream.store, seq_len=self.seq_len)
