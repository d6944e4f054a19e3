"""`concat`: the stream is cut every `seq_len` tokens, whatever documents it cuts through.

Row i begins at position `i * seq_len` and has one token more than `seq_len`, so that the last input
has its label; that token is the first input of the next row. Every token is an input exactly once
(the stream's last one, which has no label, at most), and only the last row is padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.loader.account import concat_account
from tokenmill.loader.layouts.base import PADDING, Pieces
from tokenmill.store.sealed import checksum_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenmill.loader.layouts.base import Account
    from tokenmill.store.stream import TokenStream

PACKING = "concat"


class ConcatLayout:
    """A store, cut every `seq_len` tokens."""

    def __init__(self, stream: TokenStream, *, seq_len: int) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.num_rows = max(1, -(-(stream.num_tokens - 1) // seq_len)) if stream.num_tokens else 0

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        return checksum_of(f"{PACKING} {self.seq_len} {self.stream.store.content}".encode("ascii"))

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """One piece for each row; the last row of the layout has padding after it."""
        starts = rows * self.seq_len
        lengths = np.full(len(rows), self.seq_len + 1, np.int64)
        lacking = self.num_rows * self.seq_len + 1 - self.stream.num_tokens
        if not lacking or rows.max(initial=0) < self.num_rows - 1:
            return Pieces(starts, lengths)
        ends = np.flatnonzero(rows == self.num_rows - 1)
        lengths[ends] -= lacking
        starts = np.insert(starts, ends + 1, PADDING)
        lengths = np.insert(lengths, ends + 1, lacking)
        return Pieces(starts, lengths)

    def segments(self, rows: NDArray[np.int64]) -> Pieces:
        """The pieces, cut where documents begin."""
        pieces = self.pieces(rows)
        return Pieces(*self.stream.cut_at_documents(pieces.starts, pieces.lengths))

    @property
    def used(self) -> int:
        """Tokens of the store that stand in a row: all."""
        return self.stream.num_tokens

    def account(self) -> Account:
        """Where the tokens go; reads the whole index, and all masks."""
        return concat_account(self.stream.store, seq_len=self.seq_len)
