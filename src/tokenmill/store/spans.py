"""Pieces of shards, as a stream hands them to whatever reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Track: TypeAlias = Literal["bin", "mask"]
"""A file of a shard that has one value for every token, and so is read by the same pieces."""

NO_SHARD = -1
"""Shard of a piece that is padding."""


def distinct(values: NDArray[np.integer]) -> list[int]:
    """The values that occur, in order.

    numpy's own `unique` gives up the interpreter's lock inside C++ code. Before Python 3.14 a
    program that ends stops its other threads where they wait for the lock, and there it aborts.
    """
    return sorted(set(values.tolist()))


class Spans(NamedTuple):
    """Tokens from `firsts` to `lasts` of shards, each within one shard or padding."""

    shards: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    length: int | None = None
    """Length of all, where it is known to be one and none is padding: such are read fastest."""

    def at(self, place: int) -> tuple[int, int, int]:
        """One of them: shard, first and last."""
        return int(self.shards[place]), int(self.firsts[place]), int(self.lasts[place])

    def part(self, first: int, last: int, length: int | None = None) -> Spans:
        """Some of them, by their places; `length` is that of all, if it is known."""
        here = slice(first, last)
        return Spans(self.shards[here], self.firsts[here], self.lasts[here], length)
