"""Best-fit decreasing on counts of lengths: which documents share a row.

    lengths of 2**20 documents -> pieces -> how many of each length -> rows of equal shape
    -> which document stands where in them

Longest first, each piece goes to the fullest row that still has room for it. Pieces of one length
are alike, and so are rows with the same room, so the rule is followed for whole groups of rows at
once: the loop in Python runs a few times per length, however many documents there are. The rest is
numpy: about 0.1 microseconds per document, and memory for one block of documents.
"""

from __future__ import annotations

import shlex
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.plans import pack_items
from tokenmill.store.reader import PREPARED_SHARDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from tokenmill.store.reader import Store

# Plans are a function of these two and of the rules below: whoever changes one must raise
# `PLAN_VERSION` in store/plans.py.
BLOCK_DOCUMENTS = 1 << 20
PART_PIECES = 1 << 22
"""Blocks with more pieces than these, of documents much longer than a row, are cut into parts."""
_INDEX_BITS = 31
_LAST = 1 << _INDEX_BITS


class PackedRows(NamedTuple):
    """Rows back to back, and what was packed into them."""

    items: NDArray[np.uint64]
    """As `tokenmill.store.plans.pack_items` makes them."""
    row_starts: NDArray[np.int64]
    """Where the items of each row begin."""
    documents: int
    """Without those that have no token."""
    split_documents: int
    tokens: int


Run: TypeAlias = tuple[int, int, int]
"""Pieces of one length that go to neighbouring bins: first bin, bins, pieces to each bin."""


def length_blocks(store: Store) -> Iterator[NDArray[np.int32]]:
    """Tokens of all documents in order, `BLOCK_DOCUMENTS` at a time, whatever the shards."""
    parts: list[NDArray[np.int32]] = []
    held = 0
    for shard in range(len(store.shards)):
        if shard % PREPARED_SHARDS == 0:
            soon = store.shards[shard : shard + PREPARED_SHARDS]
            store.files.prepare_indexes([each.name for each in soon])
        lengths = _shard_lengths(store, shard)
        while len(lengths):
            part = lengths[: BLOCK_DOCUMENTS - held]
            parts.append(part)
            held, lengths = held + len(part), lengths[len(part) :]
            if held == BLOCK_DOCUMENTS:
                yield np.concatenate(parts)
                parts, held = [], 0
    if held:
        yield np.concatenate(parts)


def _shard_lengths(store: Store, shard: int) -> NDArray[np.int32]:
    lengths = store.map_shard(shard).index.lengths
    facts = store.shards[shard]
    if lengths.min(initial=0) < 0 or int(lengths.sum(dtype=np.int64)) != facts.tokens:
        raise StoreError(
            f"the lengths in the index of shard {facts.name!r} are not those of {facts.tokens:,}"
            " tokens; its documents cannot be told apart",
            hint=f"see what is damaged with: tokenmill verify {shlex.quote(str(store.path))}",
        )
    return lengths


def _earlier_pieces(lengths: NDArray[np.int32], *, seq_len: int) -> NDArray[np.int32]:
    """Pieces of each document before its last: they fill a row each.

    Piece j is the tokens from `j * seq_len` on, `seq_len + 1` of them: its last is the next one's
    first, so that the label there is learnt from.
    """
    earlier: NDArray[np.int32] = (lengths - 2) // np.int32(seq_len)
    return np.maximum(earlier, 0)


def pack(blocks: Iterable[NDArray[np.int32]], *, seq_len: int) -> Iterator[PackedRows]:
    """Rows of the documents of a stream, whose lengths come in blocks of `BLOCK_DOCUMENTS`.

    No row spans two blocks. Documents without tokens are left out.
    """
    position = 0
    for block in blocks:
        for part in _parts(block, seq_len=seq_len):
            yield _pack(part, position=position, seq_len=seq_len)
            position += int(part.sum(dtype=np.int64))


def _parts(lengths: NDArray[np.int32], *, seq_len: int) -> Iterator[NDArray[np.int32]]:
    """The documents in as few parts as keep within `PART_PIECES`, about equally many in each."""
    if not lengths.all():
        lengths = lengths[lengths > 0]
    earlier = _earlier_pieces(lengths, seq_len=seq_len)
    total = len(lengths) + int(earlier.sum(dtype=np.int64))
    num_parts = -(-total // PART_PIECES)
    parts = [lengths]
    if num_parts > 1:
        ends = np.cumsum(earlier + 1, dtype=np.int64)
        wanted = np.arange(1, num_parts) * total // num_parts
        parts = np.split(lengths, np.searchsorted(ends, wanted, side="right"))
    return (part for part in parts if len(part))


def _pack(lengths: NDArray[np.int32], *, position: int, seq_len: int) -> PackedRows:
    """Rows by their first document, documents in a row by their number."""
    owners, items, rests = _cut(lengths, position=position, seq_len=seq_len)
    lowest, documents = _share_bins(rests, capacity=seq_len + 1)
    # One sort puts the pieces in order. Its keys are, from the highest bit: lowest document of the
    # row; whether it is a row of last pieces, which comes behind the full rows of that document;
    # index of the piece, which is the document's number for a last piece.
    keys = np.empty(len(items), np.int64)
    last, earlier = keys[: len(lengths)], keys[len(lengths) :]
    last[:] = lowest
    earlier[:] = owners
    keys <<= _INDEX_BITS + 1
    last |= documents
    last |= _LAST
    earlier |= np.arange(len(lengths), len(items))
    keys.sort()
    items = items[keys & (_LAST - 1)]
    keys >>= _INDEX_BITS
    begins = np.ones(len(items), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=begins[1:])
    begins |= (keys & 1) == 0
    return PackedRows(
        items=items,
        row_starts=np.flatnonzero(begins),
        documents=len(lengths),
        split_documents=int(np.count_nonzero(np.diff(owners, prepend=-1))),
        tokens=int(lengths.sum(dtype=np.int64)),
    )


def _cut(
    lengths: NDArray[np.int32], *, position: int, seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int32]]:
    """Owners of the earlier pieces; items, first of the last pieces; lengths of the last pieces."""
    positions = np.cumsum(lengths, dtype=np.int64)
    positions -= lengths
    positions += position
    earlier = _earlier_pieces(lengths, seq_len=seq_len)
    long = np.flatnonzero(earlier)
    counts = earlier[long]
    owners = np.repeat(long, counts)
    starts = np.arange(len(owners)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    starts *= seq_len
    starts += positions[owners]
    rests = lengths.copy()
    rests[long] -= counts * np.int32(seq_len)
    positions[long] += counts * np.int64(seq_len)
    items = np.concatenate((pack_items(positions, rests), pack_items(starts, seq_len + 1)))
    return owners, items, rests


def _share_bins(
    lengths: NDArray[np.int32], *, capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each piece, longest first: the lowest index in its bin, and its own."""
    runs = best_fit(np.bincount(lengths, minlength=capacity + 1), capacity=capacity)
    bins = _spread(runs)
    order = _longest_first(lengths, capacity=capacity)
    lowest = np.full(int(bins.max()) + 1, len(order), np.int64)
    np.minimum.at(lowest, bins, order)
    return lowest[bins], order


def _longest_first(lengths: NDArray[np.int32], *, capacity: int) -> NDArray[np.int64]:
    """Indices by decreasing length, those of equal length ascending."""
    bits = BLOCK_DOCUMENTS.bit_length() - 1
    keys = (capacity - lengths).astype(np.int64)
    keys <<= bits
    keys |= np.arange(len(keys))
    # Keys are all different, so that any sort gives the same; small ones sort twice as fast.
    narrow = np.uint32 if capacity >> (32 - bits) == 0 else np.int64
    ordered = np.sort(keys.astype(narrow)).astype(np.int64)
    return ordered & (BLOCK_DOCUMENTS - 1)


def _spread(runs: list[Run]) -> NDArray[np.int32]:
    """The bin of each piece, in the order of the runs."""
    first_bin, num_bins, per_bin = np.array(runs, np.int32).T
    sizes = num_bins * per_bin
    ends = np.cumsum(sizes, dtype=np.int32)
    bins = np.arange(int(ends[-1]), dtype=np.int32)
    bins -= np.repeat(ends - sizes, sizes)
    bins //= np.repeat(per_bin, sizes)
    bins += np.repeat(first_bin, sizes)
    return bins


def best_fit(counts: NDArray[np.int64], *, capacity: int) -> list[Run]:
    """Where best-fit decreasing puts `counts[n]` pieces of each length n, longest first."""
    runs: list[Run] = []
    opened = 0
    rooms: list[int] = []  # that any open bin has left, ascending
    groups: dict[int, list[tuple[int, int]]] = {}  # room -> first bin and number of neighbours

    def put(room: int, first: int, bins: int) -> None:
        if room in groups:
            groups[room].append((first, bins))
        else:
            groups[room] = [(first, bins)]
            insort(rooms, room)

    lengths = np.flatnonzero(counts)[::-1]
    for length, left in zip(lengths.tolist(), counts[lengths].tolist(), strict=True):
        while left:
            place = bisect_left(rooms, length)
            if place == len(rooms):
                room, first, bins = capacity, opened, -(-left // (capacity // length))
                opened += bins
            else:
                room = rooms[place]
                first, bins = groups[room].pop()
                if not groups[room]:
                    del groups[room], rooms[place]
            # A bin that has taken one piece is the fullest that can take the next: it goes on
            # until it cannot.
            per_bin = room // length
            full = min(bins, left // per_bin)
            if full:
                runs.append((first, full, per_bin))
                put(room - per_bin * length, first, full)
                left -= full * per_bin
            if left and full < bins:
                runs.append((first + full, 1, left))
                put(room - left * length, first + full, 1)
                full, left = full + 1, 0
            if full < bins:
                put(room, first + full, bins - full)
    return runs
