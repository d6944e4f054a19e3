"""How documents share rows: each packing is one class here, and the verb `layout` compares them."""

from __future__ import annotations

import shlex
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.order import Ints, dealt, ordered_rows
from tokenmill.markup import Told
from tokenmill.options import LayoutOptions, with_options
from tokenmill.records import lazy
from tokenmill.store import plans
from tokenmill.store.format import MAX_DOCUMENT_TOKENS
from tokenmill.store.layout import checksum_of
from tokenmill.store.reader import PREPARED_SHARDS, Store
from tokenmill.store.stream import TokenStream, open_stream
from tokenmill.words import count, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    OnProgress = Callable[[int, int], None]


# -------------------------------------------------------------------------------------------------
# What every packing gives the loader: rows by number, as pieces of the store's token stream.
#
#   rows (numbers)  ->  pieces (position, length), back to back  ->  tokens (rows, seq_len + 1)
#
# A row is `seq_len + 1` tokens: the inputs are all but the last, the labels all but the first. The
# pieces of a row fill it exactly; what no document fills is a piece of padding, at the position
# `PADDING`. A layout is a function of the store's content and its own options, never of the
# machine.

PADDING = -1  # position of a piece that no document fills
# Of a place in a row, as the arrays of an export to npz have it: input, target and mask.
ROW_BYTES = 4 + 4 + 1


# Ranges of a stream in the order in which they are in rows: the positions of their first tokens, or
# `PADDING`; and how many tokens they have, never 0.
Pieces: TypeAlias = tuple[Ints, Ints]


class Holding(NamedTuple):
    """The rows that hold a document, by their numbers, and which of its tokens are where."""

    rows: Ints
    at: Ints  # place in the row
    first: Ints  # token of the document that is there
    tokens: Ints  # how many of them follow each other


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

    @property
    def places(self) -> int:
        return self.rows * (self.seq_len + 1)

    @property
    def array_bytes(self) -> int:
        """What inputs, targets and masks take as arrays of fixed length."""
        return self.rows * self.seq_len * ROW_BYTES

    def documents_of(self, number: int) -> str:
        return f"{count(number, 'document')} ({share(number, self.documents)})"

    @property
    def sentence(self) -> str:
        """What the numbers mean for training."""
        return LAYOUTS[self.packing].sentence.format(
            row=count(self.seq_len + 1, "token"),
            split=self.documents_of(self.split_documents),
            cut=self.documents_of(self.cut_documents),
            dropped=share(self.dropped, self.tokens),
            padding=f"padding: {share(self.padding, self.places)} of all places in rows",
        )


# The packings by name, in the order of `tokenmill.options.PACKINGS`.
LAYOUTS: dict[str, type[Layout]] = {}


class Layout:
    """A store, cut into rows. A subclass is a packing; its name is in `PACKINGS` too."""

    name: ClassVar[str]
    # Changes when the packing cuts rows by other rules: what a saved position depends on.
    rules: ClassVar[str]
    # What the numbers of an account mean for training.
    sentence: ClassVar[str]
    # Whether rows follow each other as the tokens do, so that only the last one is padded.
    back_to_back: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        LAYOUTS[cls.name] = cls

    def __init__(
        self, stream: TokenStream, *, seq_len: int, progress: OnProgress | None = None
    ) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.num_rows = self._open(progress)

    def _open(self, progress: OnProgress | None) -> int:
        """Make ready to find rows, and count them; `progress` gets documents done and in all."""
        raise NotImplementedError

    @classmethod
    def most_pieces(cls, seq_len: int) -> int:
        """Documents that a row can hold, padding counted as one."""
        return seq_len

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        return self.fingerprint_of(self.stream.store.content)

    def fingerprint_of(self, content: str) -> str:
        """The same of a store with this content."""
        return checksum_of(f"{self.rules} {self.seq_len} {content}".encode("ascii"))

    @property
    def num_whole(self) -> int:
        """Rows that are the same whatever comes after the documents that are there."""
        raise NotImplementedError

    def shards_of(self, rows: int) -> int:
        """How many of the first shards hold the first rows, of those that are whole."""
        raise NotImplementedError

    @property
    def used(self) -> int:
        """Tokens of the store that are in a row; may read the whole index."""
        return self.stream.num_tokens

    def pieces(self, rows: Ints) -> Pieces:
        """What to read for these rows, as few pieces as possible."""
        raise NotImplementedError

    def segments(self, rows: Ints) -> Pieces:
        """The same, cut so that every piece is of one document or padding."""
        return self.pieces(rows)

    def holding(self, document: int) -> Holding:
        """Which rows hold a document: the inverse of `segments`."""
        raise NotImplementedError

    def account(self) -> Account:
        """Where the tokens go; may read the whole index, and all masks."""
        raise NotImplementedError

    def _account(
        self, *, used: int, targets: int, row_tokens: int | None = None, **counted: int
    ) -> Account:
        """The account of rows whose places are all used, repeated or padding.

        `targets` are those of a store without masks; `row_tokens` are what documents are cut to.
        """
        store, repeated = self.stream.store, counted.get("repeated", 0)
        return Account(
            packing=self.name,
            seq_len=self.seq_len,
            rows=self.num_rows,
            documents=store.num_documents,
            tokens=store.num_tokens,
            used=used,
            dropped=store.num_tokens - used,
            padding=self.num_rows * (self.seq_len + 1) - used - repeated,
            targets=masked_targets(store, row_tokens=row_tokens) if store.has_mask else targets,
            **{"repeated": 0, "split_documents": 0, "cut_documents": 0, **counted},
        )


# -------------------------------------------------------------------------------------------------
# Best-fit decreasing on counts of lengths: which documents share a row.
#
#   lengths of 2**20 documents -> pieces -> how many of each length -> rows of equal shape
#   -> which document is where in them
#
# Longest first, each piece goes to the fullest row that still has room for it. Pieces of one
# length are alike, and so are rows with the same room, so the rule is followed for whole groups of
# rows at once: the loop in Python runs a few times per length, however many documents there are.
# The rest is numpy: about 0.1 microseconds per document, and memory for one block of documents.

# Plans are a function of these two and of the rules below: whoever changes one must raise
# `PLAN_VERSION` in store/plans.py.
BLOCK_DOCUMENTS = 1 << 20
# Blocks with more pieces than these, of documents much longer than a row, are cut into parts.
PART_PIECES = 1 << 22
SCANNED_ITEMS = 1 << 16  # of a plan, at once, when a document is looked for
_INDEX_BITS = 31
_LAST = 1 << _INDEX_BITS


class PackedRows(NamedTuple):
    """Rows back to back, and what was packed into them."""

    items: NDArray[np.uint64]  # as `tokenmill.store.plans.pack_items` makes them
    row_starts: Ints  # where the items of each row begin
    documents: int  # without those that have no token
    split_documents: int
    tokens: int


# Pieces of one length that go to neighbouring bins: first bin, bins, pieces to each bin.
Run: TypeAlias = tuple[int, int, int]


def length_blocks(store: Store) -> Iterator[NDArray[np.int32]]:
    """Tokens of all documents in order, `BLOCK_DOCUMENTS` at a time, whatever the shards."""
    parts: list[NDArray[np.int32]] = []
    held = 0
    for shard in range(len(store.shards)):
        if shard % PREPARED_SHARDS == 0:
            soon = store.shards[shard : shard + PREPARED_SHARDS]
            store.files.prepare_indexes([each.name for each in soon])
        facts, lengths = store.shards[shard], store.map_shard(shard).index.lengths
        if lengths.min(initial=0) < 0 or int(lengths.sum(dtype=np.int64)) != facts.tokens:
            raise StoreError(
                f"the lengths in the index of shard {facts.name!r} are not those of"
                f" {facts.tokens:,} tokens; its documents cannot be told apart",
                hint=f"see what is damaged with: tokenmill verify {shlex.quote(str(store.path))}",
            )
        while len(lengths):
            part = lengths[: BLOCK_DOCUMENTS - held]
            parts.append(part)
            held, lengths = held + len(part), lengths[len(part) :]
            if held == BLOCK_DOCUMENTS:
                yield np.concatenate(parts)
                parts, held = [], 0
    if held:
        yield np.concatenate(parts)


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
    # row; whether it is a row of last pieces, which comes after the full rows of that document;
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
) -> tuple[Ints, NDArray[np.uint64], NDArray[np.int32]]:
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
    items = np.concatenate(
        (plans.pack_items(positions, rests), plans.pack_items(starts, seq_len + 1))
    )
    return owners, items, rests


def _share_bins(lengths: NDArray[np.int32], *, capacity: int) -> tuple[Ints, Ints]:
    """For each piece, longest first: the lowest index in its bin, and its own."""
    runs = best_fit(np.bincount(lengths, minlength=capacity + 1), capacity=capacity)
    # The bin of each piece, in the order of the runs.
    first_bin, num_bins, per_bin = np.array(runs, np.int32).T
    sizes = num_bins * per_bin
    ends = np.cumsum(sizes, dtype=np.int32)
    bins = np.arange(int(ends[-1]), dtype=np.int32)
    bins -= np.repeat(ends - sizes, sizes)
    bins //= np.repeat(per_bin, sizes)
    bins += np.repeat(first_bin, sizes)
    # By decreasing length, those of equal length ascending. Keys are all different, so that any
    # sort gives the same; small ones sort twice as fast.
    bits = BLOCK_DOCUMENTS.bit_length() - 1
    keys = (capacity - lengths).astype(np.int64)
    keys <<= bits
    keys |= np.arange(len(keys))
    narrow = np.uint32 if capacity >> (32 - bits) == 0 else np.int64
    order = np.sort(keys.astype(narrow)).astype(np.int64) & (BLOCK_DOCUMENTS - 1)
    lowest = np.full(int(bins.max()) + 1, len(order), np.int64)
    np.minimum.at(lowest, bins, order)
    return lowest[bins], order


def best_fit(counts: Ints, *, capacity: int) -> list[Run]:
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
# What there is to learn from where a store has masks. A document is *split* if its targets (labels
# whose input is of the same document) are in more than one row: from the second row on it is read
# without what came before.


def masked_targets(store: Store, *, row_tokens: int | None = None) -> int:
    """Tokens that count, by the masks, without the first of every document: it is no label.

    With `row_tokens`, those that documents have beyond so many are left out.
    """
    total = 0
    for position in range(len(store.shards)):
        for mask, lengths in store.map_shard(position).mask_runs():
            starts = np.cumsum(lengths) - lengths
            kept = lengths if row_tokens is None else np.minimum(lengths, row_tokens)
            bounds = np.stack((starts + 1, starts + kept), axis=1)[kept > 1].ravel()
            if len(bounds):
                # Sums between bounds: every second one is of labels. One more value, so that a
                # document may end with the mask.
                values = np.append(mask, np.uint8(0))
                total += int(np.add.reduceat(values, bounds, dtype=np.int64)[::2].sum())
    return total


# -------------------------------------------------------------------------------------------------
# `concat`: the stream is cut every `seq_len` tokens, whatever documents it cuts through.
#
# Row i begins at position `i * seq_len` and has one token more than `seq_len`, so that the last
# input has its label; that token is the first input of the next row. Every token is an input
# exactly once (the stream's last one, which has no label, at most), and only the last row is
# padded.


class ConcatLayout(Layout):
    name = rules = "concat"
    sentence = (
        "every token is used; split at the end of a row, to go on in the next without what came"
        " before: {split}"
    )
    back_to_back = True

    def _open(self, progress: OnProgress | None) -> int:  # noqa: ARG002 (nothing is planned)
        tokens = self.stream.num_tokens
        return max(1, -(-(tokens - 1) // self.seq_len)) if tokens else 0

    @property
    def num_whole(self) -> int:
        return max(0, self.stream.num_tokens - 1) // self.seq_len

    def shards_of(self, rows: int) -> int:
        shards = self.stream.store.shards
        return bisect_left(shards, rows * self.seq_len + 1, key=lambda shard: shard.first_token)

    def pieces(self, rows: Ints) -> Pieces:
        """One piece for each row; the last row of the layout has padding after it."""
        starts = rows * self.seq_len
        lengths = np.full(len(rows), self.seq_len + 1, np.int64)
        lacking = self.num_rows * self.seq_len + 1 - self.stream.num_tokens
        if not lacking or rows.max(initial=0) < self.num_rows - 1:
            return starts, lengths
        ends = np.flatnonzero(rows == self.num_rows - 1)
        lengths[ends] -= lacking
        starts = np.insert(starts, ends + 1, PADDING)
        lengths = np.insert(lengths, ends + 1, lacking)
        return starts, lengths

    def segments(self, rows: Ints) -> Pieces:
        """The pieces, cut where documents begin."""
        return self.stream.cut_at_documents(*self.pieces(rows))

    def holding(self, document: int) -> Holding:
        """The last token of a row is the first of the next one too."""
        start, tokens = self.stream.document_span(document)
        first = max(0, -(-(start - self.seq_len) // self.seq_len))
        last = min((start + tokens - 1) // self.seq_len, self.num_rows - 1)
        rows = np.arange(first, last + 1 if tokens else first)
        begins = np.maximum(rows * self.seq_len, start)
        ends = np.minimum((rows + 1) * self.seq_len + 1, start + tokens)
        return Holding(rows, begins - rows * self.seq_len, begins - start, ends - begins)

    def account(self) -> Account:
        """A token and its label meet in exactly one row."""
        tokens = nonempty = split = 0
        for lengths in length_blocks(self.stream.store):
            starts = np.cumsum(lengths, dtype=np.int64)
            starts -= lengths
            starts += tokens
            last_inputs = starts + lengths
            last_inputs -= 2
            split += int(np.count_nonzero(starts // self.seq_len < last_inputs // self.seq_len))
            nonempty += int(np.count_nonzero(lengths))
            tokens += int(lengths.sum(dtype=np.int64))
        return self._account(
            used=tokens,
            repeated=max(self.num_rows - 1, 0),
            split_documents=split,
            targets=tokens - nonempty,
        )


# -------------------------------------------------------------------------------------------------
# `best-fit`: whole documents share rows so that almost nothing is padding.
#
# A document that does not fit a row is split into full rows and a rest that is packed like any
# other; nothing is dropped. Rows come in the order of their first documents, so that reading them
# in order reads the store almost in order. The plan is made once, and kept beside the store.


class BestFitLayout(Layout):
    name = "best-fit"
    rules = f"best-fit {plans.PLAN_VERSION}"
    sentence = "every token is used; split, as longer than a row of {row}: {split}; {padding}"

    def _open(self, progress: OnProgress | None) -> int:
        store, seq_len = self.stream.store, self.seq_len
        if not 0 < seq_len < plans.MAX_ITEM_TOKENS:
            raise UsageError(
                f"seq_len {seq_len:,} is not from 1 to {plans.MAX_ITEM_TOKENS - 1:,}, which is what"
                " a plan of best-fit rows can hold",
                hint="choose another seq_len, or packing='concat'",
            )
        if store.num_tokens > plans.MAX_STREAM_TOKENS:
            raise UsageError(
                f"{store!r} has more than the {plans.MAX_STREAM_TOKENS:,} tokens that a plan of"
                " best-fit rows can point into",
                hint="train on it with packing='concat', or divide it into several stores",
            )
        self._plan = plans.open_plan(
            store,
            plans.PlanKey(packing=self.name, seq_len=seq_len, content=store.content),
            make=lambda writer: _plan(writer, store, seq_len=seq_len, progress=progress),
        )
        self._items = self._plan.items
        self._row_starts = self._plan.row_starts
        return self._plan.facts.rows

    def pieces(self, rows: Ints) -> Pieces:
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
        starts, lengths = plans.unpack_items(self._items.take(wanted, mode="clip"))
        last = ends - 1
        starts[last] = PADDING
        lengths[last] = 0
        room = self.seq_len + 1 - np.add.reduceat(lengths, begins) if len(rows) else last
        if room.min(initial=0) < 0:
            raise self._damaged()
        lengths[last] = room
        if room.all():
            return starts, lengths
        filled = lengths > 0
        return starts[filled], lengths[filled]

    @property
    def used(self) -> int:
        return self._plan.facts.used

    def holding(self, document: int) -> Holding:
        """Full rows are found by bisection, the one of the last piece among those of its block.

        Rows are in the order of their first documents, so of their first positions too, and no row
        has documents of two blocks: a scan of a million pieces, about, at most.
        """
        self._plan.require_whole()
        start, tokens = self.stream.document_span(document)
        if not tokens:
            return Holding(*np.zeros((4, 0), np.int64))
        full = max(0, (tokens - 2) // self.seq_len)
        first = self._first_row(start)
        rest = tokens - full * self.seq_len
        wanted = plans.pack_items(np.array([start + full * self.seq_len]), rest)[0]
        block = document - document % BLOCK_DOCUMENTS
        least = self._row_starts[self._first_row(self.stream.document_span(block)[0])]
        end = int(self._row_starts[self._first_row(int(start) + full * self.seq_len + 1)])
        while end > least:
            begin = max(int(least), end - SCANNED_ITEMS)
            if len(found := np.flatnonzero(self._items[begin:end] == wanted)):
                row = int(np.searchsorted(self._row_starts, begin + found[0], side="right")) - 1
                break
            end = begin
        else:
            raise self.stream.damaged(f"lacks, of document {document:,}, the end")
        before = self._items[self._row_starts[row] : begin + found[0]]
        numbers = np.arange(full + 1)
        rows, at, sizes = (
            first + numbers,
            np.zeros_like(numbers),
            np.full_like(numbers, self.seq_len + 1),
        )
        rows[-1], sizes[-1] = row, rest
        at[-1] = int(plans.unpack_items(before)[1].sum())
        return Holding(rows, at, numbers * self.seq_len, sizes)

    def _first_row(self, position: int) -> int:
        """The first row whose first position is not below this one."""

        def begins(row: int) -> int:
            return int(self._items[self._row_starts[row]] >> np.uint64(plans.LENGTH_BITS))

        return bisect_left(range(self.num_rows), position, key=begins)

    def account(self) -> Account:
        """As it was counted when the rows were planned; reads all masks."""
        facts = self._plan.facts  # no document is cut off: all its tokens but the first are labels
        return self._account(
            used=facts.used,
            repeated=facts.repeated,
            split_documents=facts.split_documents,
            targets=facts.targets,
        )

    def _damaged(self) -> StoreError:
        return StoreError(
            f"the plan {str(self._plan.path)!r} has a row of more than {self.seq_len + 1:,} tokens:"
            " it was changed after it was made",
            hint="delete the file: it is made again when it is needed",
        )

    def __reduce__(self) -> tuple[object, ...]:
        # The plan stays on the disk: another process maps it for itself.
        return partial(BestFitLayout, seq_len=self.seq_len), (self.stream,)


def _plan(
    writer: plans.PlanWriter, store: Store, *, seq_len: int, progress: OnProgress | None
) -> plans.PlanTally:
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
    return plans.PlanTally(
        documents=store.num_documents,
        tokens=tokens,
        used=tokens,
        dropped=0,
        repeated=pieces - documents,
        split_documents=split,
        cut_documents=0,
        targets=tokens - documents,
    )


# -------------------------------------------------------------------------------------------------
# `pad`: one document to a row, cut off or padded, as supervised fine-tuning wants it.
#
# Row k is document k: its first `seq_len + 1` tokens, then padding. What is cut off is lost to
# training; `tokenmill layout` says how much that is before anyone trains.


class PadLayout(Layout):
    name = rules = "pad"
    sentence = "{padding}; cut off after {row}: {cut}, which drops {dropped} of all tokens"

    def _open(self, progress: OnProgress | None) -> int:  # noqa: ARG002 (nothing is planned)
        return self.stream.store.num_documents

    @classmethod
    def most_pieces(cls, seq_len: int) -> int:  # noqa: ARG003 (a document, and padding)
        return 2

    @property
    def num_whole(self) -> int:
        return self.num_rows

    def shards_of(self, rows: int) -> int:
        return bisect_left(self.stream.store.shards, rows, key=lambda shard: shard.first_document)

    def pieces(self, rows: Ints) -> Pieces:
        """For each row the beginning of its document, and padding."""
        starts, lengths = self.stream.document_spans(rows)
        lengths = np.minimum(lengths, self.seq_len + 1)
        both = np.stack((starts, np.full_like(starts, PADDING)), axis=1)
        sizes = np.stack((lengths, self.seq_len + 1 - lengths), axis=1)
        return both[sizes > 0], sizes[sizes > 0]

    def holding(self, document: int) -> Holding:
        _, tokens = self.stream.document_span(document)
        kept = [[document], [0], [0], [min(tokens, self.seq_len + 1)]]
        return Holding(*np.array(kept if tokens else [[]] * 4, np.int64))

    @property
    def used(self) -> int:
        return self._counted[0]

    @lazy
    def _counted(self) -> tuple[int, int, int]:
        """Tokens that are in a row, documents with any, and documents that are cut off."""
        used = nonempty = cut = 0
        for lengths in length_blocks(self.stream.store):
            used += int(np.minimum(lengths, self.seq_len + 1).sum(dtype=np.int64))
            nonempty += int(np.count_nonzero(lengths))
            cut += int(np.count_nonzero(lengths > self.seq_len + 1))
        return used, nonempty, cut

    def account(self) -> Account:
        used, nonempty, cut = self._counted
        targets, row_tokens = used - nonempty, self.seq_len + 1
        return self._account(used=used, cut_documents=cut, targets=targets, row_tokens=row_tokens)


def find_packing(name: object) -> type[Layout]:
    """The packing of a name; UsageError lists them all."""
    if str(name) not in LAYOUTS:
        raise UsageError(
            f"there is no packing {name!r}", hint=f"use one of: {', '.join(map(repr, LAYOUTS))}"
        )
    return LAYOUTS[str(name)]


# -------------------------------------------------------------------------------------------------
# What rows cost: attention within documents takes the square of their lengths, all else the same
# for every token. So it is attention alone by which rows are dealt to ranks, and both that say how
# long a rank takes.
#
# The cost of a row in pairs of tokens is the operations of a model whose blocks have 12 * width**2
# parameters: 6 for each parameter and token, 12 * width for each pair. Per block, a token costs as
# much as 6 * width pairs.


def causal_pairs(lengths: Ints, reach: Ints | int | None = None) -> Ints:
    """Pairs of tokens of which one looks at the other, in each range of these lengths.

    With a reach, the ranges are cut after so many tokens.
    """
    if reach is None:
        return lengths * (lengths + 1) // 2
    whole, rest = np.divmod(lengths, reach)
    pairs: Ints = whole * (reach * (reach + 1) // 2) + rest * (rest + 1) // 2
    return pairs


def pairs_of_rows(layout: Layout, rows: Ints, *, seq_len: int, reach: Ints | None = None) -> Ints:
    """What causal attention within documents has to do for the `seq_len` inputs of each row.

    `reach` is the attention window of each row.
    """
    if not len(rows):
        return rows
    _, lengths = layout.segments(rows)
    begins = np.cumsum(lengths) - lengths
    row_tokens = layout.seq_len + 1  # the last one is no input, unless labels are "same"
    starts, lengths, _ = inputs_of(begins, lengths, seq_len=seq_len, row_tokens=row_tokens)
    firsts = starts.searchsorted(np.arange(len(rows)) * seq_len)
    if reach is not None:
        reach = np.repeat(reach, np.diff(firsts, append=len(starts)))
    found: Ints = np.add.reduceat(causal_pairs(lengths, reach), firsts)
    return found


def inputs_of(
    starts: Ints, lengths: Ints, *, seq_len: int, row_tokens: int
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Ranges without what comes after the inputs of each row, and which of them are left."""
    row, start = np.divmod(starts, row_tokens)
    lengths = np.minimum(lengths, seq_len - start)
    kept = lengths > 0
    return (row * seq_len + start)[kept], lengths[kept], kept


# Updates that a load is the mean of, and rows of all of them at most.
LOOKED_UPDATES = 32
ROWS_OF_RANK = 4  # in an update, unless the size of a batch says so
LOOKED_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """How much longer than the mean of all ranks the slowest takes, over some updates."""

    packing: str
    ranks: int
    rows: int
    """Of each rank in an update."""
    updates: int
    """That were looked at: the first ones of a shuffled run."""
    as_drawn: float
    """Mean of slowest/mean."""
    as_drawn_most: float
    balanced: float
    """The same with `balance="attention"` over the rows of an update."""
    balanced_most: float
    least: float
    """No dealing can be below: the dearest row comes with as many others."""


def rank_load(layout: Layout, *, inputs: int, ranks: int, rows: int, width: int) -> RankLoad:
    """Simulated with the rows that a loader draws; `inputs` are those of a row."""
    size = ranks * rows
    updates = max(1, min(LOOKED_UPDATES, LOOKED_ROWS // size))
    drawn, _ = ordered_rows(
        np.arange(updates * size),
        shuffle="full",
        seed=0,
        source="",
        num_rows=layout.num_rows,
        seq_len=layout.seq_len,
    )
    pairs = pairs_of_rows(layout, drawn, seq_len=inputs).reshape(updates, size)
    found = []
    for places, update in zip(
        map(dealt, pairs, repeat(ranks)), pairs + 6 * width * inputs, strict=True
    ):
        each = update.reshape(ranks, rows).sum(axis=1), update[places].sum(axis=1)
        mean, ordered = update.sum() / ranks, np.sort(update)
        least = max(mean, ordered[-1] + ordered[: rows - 1].sum())
        found.append([most / mean for most in (*(sums.max() for sums in each), least)])
    as_drawn, balanced, least = np.array(found).T
    return RankLoad(
        packing=layout.name,
        ranks=ranks,
        rows=rows,
        updates=updates,
        as_drawn=float(as_drawn.mean()),
        as_drawn_most=float(as_drawn.max()),
        balanced=float(balanced.mean()),
        balanced_most=float(balanced.max()),
        least=float(least.mean()),
    )


# -------------------------------------------------------------------------------------------------
# The verb `layout`: what each packing would do with a store, before anyone trains on it.
#
# Only `best-fit` needs more than a pass over the lengths: its plan is made if there is none yet,
# and kept for the training to come. Where a store has masks, they are read too: to count targets.


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutReport(Told):
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
    loads: tuple[RankLoad, ...] = ()
    """Of each packing that has rows, where ranks were asked for."""

    def steps(self, account: Account) -> int | None:
        """Batches of one epoch, the last one full or not; None where no size was given."""
        return None if self.batch_size is None else -(-account.rows // self.batch_size)

    def __repr__(self) -> str:
        padded = ", ".join(f"{a.packing} {share(a.padding, a.places)}" for a in self.accounts)
        return (
            f"LayoutReport({self.store!r}, split={self.split!r}, seq_len={self.seq_len}):"
            f" padded: {padded}"
        )


@with_options(LayoutOptions)
def layout(asked: LayoutOptions) -> LayoutReport:
    """Account for every token of a split under each packing; an open store has its split already.

    `on_progress` gets the documents that are planned and those in all, where a plan must be made.
    """
    store, seq_len, packings = asked.store, asked.seq_len, asked.packings
    for name, value in (("seq_len", seq_len), ("batch_size", asked.batch_size)):
        if value is not None and not 0 < value < MAX_DOCUMENT_TOKENS:
            raise UsageError(f"{name} {value:,} is not from 1 to {MAX_DOCUMENT_TOKENS - 1:,}")
    ranks, rows = asked.ranks, 0
    if ranks is not None:
        for name, value in (("ranks", ranks), ("width", asked.width)):
            if value < 1:
                raise UsageError(f"{name} {value:,} is not a whole number of 1 or more")
        rows, left = divmod(asked.batch_size or ROWS_OF_RANK * ranks, ranks)
        if left or not rows:
            raise UsageError(
                f"batch_size {asked.batch_size:,} is no whole number of rows for each of"
                f" {ranks:,} ranks",
                hint=f"use a multiple, like batch_size {ROWS_OF_RANK * ranks}",
            )
    chosen = dict.fromkeys(map(find_packing, LAYOUTS if packings is None else packings))
    opened = store if isinstance(store, Store) else Store(store, split=asked.split)
    stream = open_stream(opened)
    layouts = [packing(stream, seq_len=seq_len, progress=asked.on_progress) for packing in chosen]
    loads = [
        rank_load(each, inputs=seq_len, ranks=ranks, rows=rows, width=asked.width)
        for each in layouts
        if ranks is not None and each.num_rows
    ]
    return LayoutReport(
        store=str(opened.path if opened.is_remote or isinstance(store, Store) else store),
        split=opened.split,
        seq_len=seq_len,
        documents=opened.num_documents,
        tokens=opened.num_tokens,
        counted=opened.num_counted if opened.has_mask else None,
        accounts=tuple(each.account() for each in layouts),
        batch_size=asked.batch_size,
        loads=tuple(loads),
    )
