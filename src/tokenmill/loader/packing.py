"""The packings by name."""

from __future__ import annotations

import shlex
from bisect import bisect_left, insort
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.plan import Extent
from tokenmill.store.durable import checksum_of
from tokenmill.store.format import MAX_DOCUMENT_TOKENS
from tokenmill.store.plans import (
    MAX_ITEM_TOKENS,
    MAX_STREAM_TOKENS,
    PLAN_VERSION,
    PlanKey,
    PlanTally,
    open_plan,
    pack_items,
    unpack_items,
)
from tokenmill.store.reader import PREPARED_SHARDS, Store
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.store.plans import PlanWriter


# -------------------------------------------------------------------------------------------------
# What every packing gives the loader: rows by number, as pieces of the store's token stream.
#
#   | rows (numbers)  ->  pieces (position, length), laid back to back  ->  tokens (rows, seq_len +
#   1)
#
# A row is `seq_len + 1` tokens: the inputs are all but the last, the labels all but the first. The
# pieces of a row fill it exactly; what no document fills is a piece of padding, at the position
# `PADDING`. A layout is a function of the store's content and its own options, never of the
# machine.

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


# -------------------------------------------------------------------------------------------------
# Best-fit decreasing on counts of lengths: which documents share a row.
#
#   | lengths of 2**20 documents -> pieces -> how many of each length -> rows of equal shape
#   | -> which document stands where in them
#
# Longest first, each piece goes to the fullest row that still has room for it. Pieces of one
# length are alike, and so are rows with the same room, so the rule is followed for whole groups of
# rows at once: the loop in Python runs a few times per length, however many documents there are.
# The rest is numpy: about 0.1 microseconds per document, and memory for one block of documents.

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


# -------------------------------------------------------------------------------------------------
# Where the tokens of a store go under `concat` and `pad`, counted from lengths and masks.
#
# A document is *split* if what there is to learn from it (the labels whose input is of the same
# document) stands in more than one row: from the second row on it is read without what came
# before. `best-fit` counts while it plans, and keeps the numbers in its plan.


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


# -------------------------------------------------------------------------------------------------
# `concat`: the stream is cut every `seq_len` tokens, whatever documents it cuts through.
#
# Row i begins at position `i * seq_len` and has one token more than `seq_len`, so that the last
# input has its label; that token is the first input of the next row. Every token is an input
# exactly once (the stream's last one, which has no label, at most), and only the last row is
# padded.

CONCAT = "concat"


class ConcatLayout:
    """A store, cut every `seq_len` tokens."""

    def __init__(self, stream: TokenStream, *, seq_len: int) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.num_rows = max(1, -(-(stream.num_tokens - 1) // seq_len)) if stream.num_tokens else 0

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        return checksum_of(f"{CONCAT} {self.seq_len} {self.stream.store.content}".encode("ascii"))

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


# -------------------------------------------------------------------------------------------------
# `pad`: one document to a row, cut off or padded, as supervised fine-tuning wants it.
#
# Row k is document k: its first `seq_len + 1` tokens, then padding. What is cut off is lost to
# training; `tokenmill layout` says how much that is before anyone trains.

PAD = "pad"


class PadLayout:
    """A store, a document to a row."""

    def __init__(self, stream: TokenStream, *, seq_len: int) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.num_rows = stream.store.num_documents

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        return checksum_of(f"{PAD} {self.seq_len} {self.stream.store.content}".encode("ascii"))

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


# -------------------------------------------------------------------------------------------------
# `best-fit`: whole documents share rows so that almost nothing is padding.
#
#   | lengths -> packing -> a plan beside the store, made once -> pieces of any rows
#
# A document that does not fit a row is split into full rows and a rest that is packed like any
# other; nothing is dropped. Rows come in the order of their first documents, so that reading them
# in order reads the store almost in order.

BEST_FIT = "best-fit"


class BestFitLayout:
    """A store, cut into rows of whole documents; `progress` gets documents planned and in all."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        seq_len: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        _check_limits(stream.store, seq_len=seq_len)
        self.stream = stream
        self.seq_len = seq_len
        key = PlanKey(packing=BEST_FIT, seq_len=seq_len, content=stream.store.content)
        plan = open_plan(
            stream.store,
            key,
            make=lambda writer: _plan(writer, stream.store, seq_len=seq_len, progress=progress),
        )
        self.num_rows = plan.facts.rows
        self._plan = plan
        self._items = plan.items
        self._row_starts = plan.row_starts

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        rule = f"{BEST_FIT} {PLAN_VERSION} {self.seq_len} {self.stream.store.content}"
        return checksum_of(rule.encode("ascii"))

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """What to read for these rows: one piece for each document in them, then padding."""
        self._plan.require_whole()
        first = self._row_starts[rows]
        # One place more than items, for the padding; what is gathered into it is overwritten.
        counts = self._row_starts[rows + 1] - first + 1
        if counts.min(initial=1) < 1 or counts.max(initial=1) > self.seq_len + 2:
            raise self._damaged()
        ends = np.cumsum(counts)
        begins = ends - counts
        wanted = np.repeat(first - begins, counts)
        wanted += np.arange(len(wanted))
        starts, lengths = unpack_items(self._items.take(wanted, mode="clip"))
        last = ends - 1
        starts[last] = PADDING
        lengths[last] = 0
        room = self.seq_len + 1 - np.add.reduceat(lengths, begins) if len(rows) else last
        if room.min(initial=0) < 0:
            raise self._damaged()
        lengths[last] = room
        if room.all():
            return Pieces(starts, lengths)
        filled = lengths > 0
        return Pieces(starts[filled], lengths[filled])

    def segments(self, rows: NDArray[np.int64]) -> Pieces:
        """The same: a piece is of one document."""
        return self.pieces(rows)

    @property
    def used(self) -> int:
        """Tokens of the store that stand in a row: all."""
        return self._plan.facts.used

    def account(self) -> Account:
        """Where the tokens go, as it was counted when the rows were planned; reads all masks."""
        facts = self._plan.facts
        counted = {field.name: getattr(facts, field.name) for field in fields(Account)}
        if self.stream.has_mask:
            # The plan knows of lengths alone. No document is cut off: all its tokens but the first
            # are labels somewhere.
            counted["targets"] = masked_targets(self.stream.store)
        return Account(**counted)

    def _damaged(self) -> StoreError:
        return StoreError(
            f"the plan {str(self._plan.path)!r} has a row of more than {self.seq_len + 1:,} tokens:"
            " it was changed after it was made",
            hint="delete the file: it is made again when it is needed",
        )

    def __reduce__(self) -> tuple[object, ...]:
        # The plan stays on the disk: another process maps it for itself.
        return _reopen, (self.stream, self.seq_len)


def _reopen(stream: TokenStream, seq_len: int) -> BestFitLayout:
    return BestFitLayout(stream, seq_len=seq_len)


def _check_limits(store: Store, *, seq_len: int) -> None:
    if not 0 < seq_len < MAX_ITEM_TOKENS:
        raise UsageError(
            f"seq_len {seq_len:,} is not from 1 to {MAX_ITEM_TOKENS - 1:,}, which is what a plan of"
            " best-fit rows can hold",
            hint="choose another seq_len, or packing='concat'",
        )
    if store.num_tokens > MAX_STREAM_TOKENS:
        raise UsageError(
            f"{store!r} has more than the {MAX_STREAM_TOKENS:,} tokens that a plan of best-fit rows"
            " can point into",
            hint="train on it with packing='concat', or divide it into several stores",
        )


def _plan(
    writer: PlanWriter,
    store: Store,
    *,
    seq_len: int,
    progress: Callable[[int, int], None] | None,
) -> PlanTally:
    """Write all rows; returns what they account for."""
    documents = tokens = pieces = split = 0
    for rows in pack(length_blocks(store), seq_len=seq_len):
        writer.add(rows.items, row_starts=rows.row_starts)
        documents += rows.documents
        tokens += rows.tokens
        pieces += len(rows.items)
        split += rows.split_documents
        if progress is not None:
            progress(documents, store.num_documents)
    return PlanTally(
        documents=store.num_documents,
        tokens=tokens,
        used=tokens,
        dropped=0,
        repeated=pieces - documents,
        split_documents=split,
        cut_documents=0,
        targets=tokens - documents,
    )


class Packing(StrEnum):
    """How documents share rows."""

    CONCAT = "concat"
    BEST_FIT = "best-fit"
    PAD = "pad"

    @classmethod
    def of(cls, value: object) -> Packing:
        """The packing of a name; UsageError lists them all."""
        try:
            return cls(str(value))
        except ValueError:
            raise UsageError(
                f"there is no packing {value!r}",
                hint=f"use one of: {', '.join(map(repr, map(str, cls)))}",
            ) from None


class LayoutSet:
    """The layouts of several streams, for every sequence length that is asked for."""

    def __init__(self, packing: Packing, streams: Sequence[TokenStream]) -> None:
        self._packing = packing
        self._streams = streams
        self._made: dict[int, tuple[Layout, ...]] = {}

    def __call__(self, seq_len: int) -> tuple[Layout, ...]:
        """The layout of each stream."""
        if seq_len not in self._made:
            self._made[seq_len] = tuple(
                make_layout(self._packing, stream, seq_len=seq_len) for stream in self._streams
            )
        return self._made[seq_len]

    def measure(self, seq_len: int) -> list[Extent]:
        """Rows of each stream; tokens too where the shares of a mixture depend on them."""
        layouts = self(seq_len)
        if self._packing is Packing.CONCAT or len(layouts) == 1:
            return [Extent(rows=layout.num_rows) for layout in layouts]
        return [Extent(rows=layout.num_rows, tokens=layout.used) for layout in layouts]


def make_layout(packing: Packing, stream: TokenStream, *, seq_len: int) -> Layout:
    """A stream, cut into rows."""
    if packing is Packing.CONCAT:
        return ConcatLayout(stream, seq_len=seq_len)
    if packing is Packing.PAD:
        return PadLayout(stream, seq_len=seq_len)
    return BestFitLayout(stream, seq_len=seq_len)


# -------------------------------------------------------------------------------------------------
# The verb `layout`: what each packing would do with a store, before anyone trains on it.
#
#   | Store -> one Account per packing -> LayoutReport -> the command line draws it
#
# Only `best-fit` needs more than a pass over the lengths: its plan is made if there is none yet,
# and kept for the training to come. Where a store has masks, they are read too: to count targets.

if TYPE_CHECKING:
    OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutReport:
    """What the packings make of a store."""

    store: str
    split: str | None
    """None means all of them."""
    seq_len: int
    documents: int
    tokens: int
    counted: int | None
    """Tokens that count by their masks; None where the store has none."""
    accounts: tuple[Account, ...]
    batch_size: int | None = None
    """Rows of a global batch: those of all ranks together."""

    def steps(self, account: Account) -> int | None:
        """Batches of one epoch, the last one full or not; None where no size was given."""
        return None if self.batch_size is None else -(-account.rows // self.batch_size)


def layout(
    store: str | os.PathLike[str] | Store,
    *,
    seq_len: int,
    split: str | None = "train",
    packings: Sequence[str] | None = None,
    batch_size: int | None = None,
    on_progress: OnProgress | None = None,
) -> LayoutReport:
    """Account for every token of a split under each packing; an open store has its split already.

    `on_progress` gets the documents that are planned and those in all, where a plan must be made.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value is not None and not 0 < value < MAX_DOCUMENT_TOKENS:
            raise UsageError(f"{name} {value:,} is not from 1 to {MAX_DOCUMENT_TOKENS - 1:,}")
    chosen = Packing if packings is None else dict.fromkeys(map(Packing.of, packings))
    opened = store if isinstance(store, Store) else Store(store, split=split)
    stream = TokenStream(opened)
    return LayoutReport(
        store=str(opened.path if opened.is_remote or isinstance(store, Store) else store),
        split=opened.split,
        seq_len=seq_len,
        documents=opened.num_documents,
        tokens=opened.num_tokens,
        counted=opened.num_counted if opened.has_mask else None,
        accounts=tuple(
            _account(packing, stream, seq_len=seq_len, on_progress=on_progress)
            for packing in chosen
        ),
        batch_size=batch_size,
    )


def _account(
    packing: Packing, stream: TokenStream, *, seq_len: int, on_progress: OnProgress | None
) -> Account:
    if packing is Packing.BEST_FIT:
        return BestFitLayout(stream, seq_len=seq_len, progress=on_progress).account()
    return make_layout(packing, stream, seq_len=seq_len).account()
