"""Which split a document belongs to: a hash of its text, so that it never moves.

The text itself is the identity: a document keeps its split when its file is renamed, cut otherwise
or grows, and two equal documents are never on both sides of the border between training and
validation.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenmill.records import TextBatch

VAL = "val"

_SEED = 0x746F6B656E6D696C  # 'tokenmil': fixed for ever, or documents would move


def in_validation(texts: TextBatch, fraction: float) -> NDArray[np.bool_]:
    """True for the documents of the split `val`."""
    threshold = int(fraction * 2**64)
    data = np.ascontiguousarray(texts.data).data
    bounds = texts.offsets.tolist()
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter(
        (digest(data[start:end], _SEED) < threshold for start, end in itertools.pairwise(bounds)),
        np.bool_,
        count=len(texts),
    )
