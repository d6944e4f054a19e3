"""Pieces of shards, as a stream hands them to whatever reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_SHARD = -1
"""Shard of a piece that is padding."""


class Spans(NamedTuple):
    """Tokens from `firsts` to `lasts` of shards, each within one shard or padding."""

    shards: NDArray[np.int64]
    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    length: int | None = None
    """Length of all, where it is known to be one and none is padding: such are read fastest."""
