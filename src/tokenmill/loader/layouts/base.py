"""What every packing gives the loader: rows by number, as pieces of the store's token stream.

    rows (numbers)  ->  pieces (position, length), laid back to back  ->  tokens (rows, seq_len + 1)

A row is `seq_len + 1` tokens: the inputs are all but the last, the labels all but the first. The
pieces of a row fill it exactly; what no document fills is a piece of padding, at the position
`PADDING`. A layout is a function of the store's content and its own options, never of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.store.stream import TokenStream

PADDING = -1
"""Position of a piece that no document fills."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of a stream in the order in which they lie in the rows."""

    starts: NDArray[np.int64]
    """Position of the first token in the stream, or `PADDING`."""
    lengths: NDArray[np.int64]
    """Tokens; never 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Where the tokens of a store go in one epoch: nothing is lost without being counted here.

    `tokens == used + dropped`, and `rows * (seq_len + 1) == used + repeated + padding`.
    """

    packing: str
    seq_len: int
    rows: int
    documents: int
    tokens: int
    used: int
    """Tokens of the store that stand in a row (each counted once)."""
    dropped: int
    """Tokens that stand in no row: what `pad` cuts off long documents."""
    repeated: int
    """Tokens that stand in two rows: last label of one, first input of the next."""
    padding: int
    """Places of rows that hold no token."""
    split_documents: int
    """Documents whose targets stand in more than one row."""
    cut_documents: int
    """Documents of which tokens were dropped."""
    targets: int
    """Labels that are tokens of the same document as their input, and that count where the store
    has masks: what there is to learn from."""


class Layout(Protocol):
    """A store, cut into rows."""

    stream: TokenStream
    seq_len: int
    num_rows: int

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        ...

    @property
    def used(self) -> int:
        """Tokens of the store that stand in a row; may read the whole index."""
        ...

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """What to read for these rows, as few pieces as possible."""
        ...

    def segments(self, rows: NDArray[np.int64]) -> Pieces:
        """The same, cut so that every piece is of one document or padding."""
        ...

    def account(self) -> Account:
        """Where the tokens go; may read the whole index, and all masks."""
        ...
