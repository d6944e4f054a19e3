"""What exports of documents read of a store: blocks of whole documents, as views of its maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.interop.base import BLOCK_BYTES, Block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.store.reader import Store


def document_blocks(
    store: Store, *, first: int = 0, last: int | None = None, most_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """Documents `first` to `last` of a store, about `most_bytes` of ids at a time.

    Views of the mapped shards: a document of any size costs no memory.
    """
    end = store.num_documents if last is None else last
    for number, shard in enumerate(store.shards):
        low = max(first - shard.first_document, 0)
        high = min(end - shard.first_document, shard.documents)
        if low < high:
            yield from shard_blocks(store, number, first=low, last=high, most_bytes=most_bytes)


def shard_blocks(
    store: Store,
    shard: int,
    *,
    first: int = 0,
    last: int | None = None,
    most_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """Documents `first` to `last` of one shard."""
    mapped = store.map_shard(shard)
    index, mask = mapped.index, mapped.mask
    size = index.dtype.itemsize
    end = len(index.lengths) if last is None else last
    while first < end:
        base = int(index.offsets[first])
        upto = first + int(np.searchsorted(index.offsets[first:end], base + most_bytes))
        upto = max(first + 1, upto)
        stop = int(index.offsets[upto - 1]) + int(index.lengths[upto - 1]) * size
        here = slice(base // size, stop // size)
        yield Block(
            mapped.tokens[here],
            np.asarray(index.lengths[first:upto], np.int64),
            None if mask is None else mask[here],
        )
        first = upto
