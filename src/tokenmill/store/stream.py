"""The tokens of an open split as one long sequence: its shards back to back, in their order.

A position counts tokens from the first shard's first. The loader speaks of positions alone; which
file they are in, and where documents begin, is known here.

Where documents begin is searched in a copy of the index, since an `.idx` is not aligned and numpy
would copy it for every search: in one copy for all shards where documents are few, else in one for
each shard. For a few pieces of a shard the mapped index is bisected in place, which touches a few
pages of it: so it goes with thousands of shards.
"""

from __future__ import annotations

import shlex
from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.lazy import lazy
from tokenmill.store.format import MASK_DTYPE, view_values
from tokenmill.store.mapped import MappedTokens, Views
from tokenmill.store.reserved import ReservedTokens
from tokenmill.store.spans import NO_SHARD, Spans, distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tokenmill.store.format import MaskDtype, TokenArray, TokenDtype
    from tokenmill.store.reader import Store
    from tokenmill.store.spans import Track

NO_PADDING = memoryview(b"")
_ENDLESS = 1 << 62
_ZERO = np.zeros(1, np.int64)
FEW_DOCUMENTS = 1 << 20
"""Up to here all documents are looked up in one array, of 8 MB at most, made in some 10 ms."""
FEW_PIECES = 4
"""Up to here bisecting the mapped index beats searching a copy of it."""
KEPT_BEGINS_BYTES = 64 << 20
"""Copies of where documents begin, 8 bytes each: a store with few documents has them all."""


class TokenStream:
    """Reads pieces of a store by position.

    >>> TokenStream(store).read(np.array([0, 5_000]), np.array([3, 2]), pad=0)
    array([72, 105, 256, 77, 256], dtype=uint16)
    """

    def __init__(self, store: Store, *, scattered: bool = False) -> None:
        """`scattered` says that pieces from anywhere will be read, not one after the other."""
        self.store = store
        self.num_tokens = store.num_tokens
        self.dtype: TokenDtype = store.dtype
        counts = np.array([shard.tokens for shard in store.shards], np.int64)
        self._starts = np.cumsum(counts) - counts
        self._sizes = np.append(counts, _ENDLESS)  # [NO_SHARD] is the size of padding
        self._first_positions: list[int] = self._starts.tolist()
        self._scattered = scattered
        self.has_mask = store.has_mask
        """Whether there are masks to be read with the tokens."""
        self._source = _open_source(store, "bin", scattered=scattered)
        self._kept_padding = 0, NO_PADDING
        self._kept_zeros = NO_PADDING
        # They know the store, not this stream: so it goes, and its maps, when nobody uses it.
        self._offsets = Views(partial(_view_offsets, store), limit=store.max_mapped)
        self._begins = _Begins(partial(_copy_begins, store, self._first_positions))

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], *, pad: int
    ) -> TokenArray:
        """The tokens of all pieces back to back; a piece that starts below 0 is padding."""
        return self.read_spans(self.locate(starts, lengths), pad=pad)

    def locate(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Spans:
        """Where pieces lie: in their order, those cut in two that go on in the next shard."""
        spans = self._spans(starts, lengths)
        if spans.shards.min(initial=0) == NO_SHARD:
            padded = spans.shards == NO_SHARD
            spans.firsts[padded], spans.lasts[padded] = 0, lengths[padded]
        return self._within_shards(spans)

    def read_spans(self, spans: Spans, *, pad: int | None) -> TokenArray:
        """The tokens of all that was located, back to back; `pad` is None if none is padding."""
        if pad is None:
            return self._source.read(spans, padding=NO_PADDING)
        longest = int((spans.lasts - spans.firsts).max(initial=0))
        return self._source.read(spans, padding=self._padding(pad, longest))

    def read_mask(self, spans: Spans) -> NDArray[np.bool_]:
        """Which tokens of all that was located count, back to back; padding does not.

        All others do where the store has no masks.
        """
        if not self.has_mask:
            return np.repeat(spans.shards != NO_SHARD, spans.lasts - spans.firsts)
        padding = NO_PADDING
        if spans.length is None and spans.shards.min(initial=0) == NO_SHARD:
            longest = int((spans.lasts - spans.firsts).max())
            if len(self._kept_zeros) < longest:
                self._kept_zeros = memoryview(bytes(longest))
            padding = self._kept_zeros
        return self._mask_source.read(spans, padding=padding).view(np.bool_)

    @lazy
    def _mask_source(self) -> _Source:
        return _open_source(self.store, "mask", scattered=self._scattered)

    def _padding(self, pad: int, at_least: int) -> memoryview:
        """Padding to cut pieces from: made once, since most rows have some where any have."""
        kept_pad, kept = self._kept_padding
        if kept_pad != pad or len(kept) < at_least:
            kept = np.full(at_least, pad, self.dtype).data
            self._kept_padding = pad, kept
        return kept

    def read_ahead(self, spans: Spans) -> None:
        """Begin to bring what will be read soon, where that takes a network."""
        if self.store.remote is not None:
            real = spans.shards != NO_SHARD
            wanted = Spans(spans.shards[real], spans.firsts[real], spans.lasts[real])
            self.store.remote.read_ahead(*_byte_ranges(wanted, self.dtype), kind="bin")
            if self.has_mask:
                self.store.remote.read_ahead(*_byte_ranges(wanted, MASK_DTYPE), kind="mask")

    def cut_at_documents(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same pieces in the same order, each cut where documents begin inside it.

        Padding stays as it is.
        """
        spans = self._within_shards(self._spans(starts, lengths))
        bases = self._starts[spans.shards]
        starts, ends = spans.firsts + bases, spans.lasts + bases
        return _cut(starts, ends, groups=list(self._find_borders(spans.shards, starts, ends)))

    def _find_borders(
        self, shards: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> Iterator[_Borders]:
        """Shard by shard: which of its documents begin inside which pieces."""
        if self.store.num_documents <= FEW_DOCUMENTS and self.store.remote is None:
            places = np.flatnonzero(shards != NO_SHARD)
            yield _within(self._all_begins, places, starts, ends)
            return
        touched = distinct(shards[shards != NO_SHARD])
        if self.store.remote is not None:
            self.store.remote.prepare_indexes(touched)
        for shard in touched:
            places = np.flatnonzero(shards == shard)
            base = self._first_positions[shard]
            if len(places) < FEW_PIECES:
                offsets, size = self._offsets_of(shard), self.dtype.itemsize
                for place in places.tolist():
                    first = bisect_right(offsets, (int(starts[place]) - base) * size)
                    last = bisect_left(offsets, (int(ends[place]) - base) * size, first)
                    begins = np.array(offsets[first:last], np.int64) // size + base
                    yield _Borders(np.array([place]), _ZERO, np.array([len(begins)]), begins)
            else:
                yield _within(self._begins[shard], places, starts, ends)

    @lazy
    def _all_begins(self) -> NDArray[np.int64]:
        """Positions at which the documents of all shards begin."""
        lengths = self.store.lengths()
        return np.cumsum(lengths, dtype=np.int64) - lengths

    def document_at(self, position: int) -> int:
        """Number of the document that holds a position."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"position {position} of a stream of {self.num_tokens:,} tokens")
        shard = bisect_right(self._first_positions, position) - 1
        offset = (position - self._first_positions[shard]) * self.dtype.itemsize
        local = bisect_right(self._offsets_of(shard), offset) - 1
        return self.store.shards[shard].first_document + local

    def document_span(self, number: int) -> tuple[int, int]:
        """Position and tokens of a document."""
        shard, local = self.store.locate(number)
        offset = self._offsets_of(shard)[local]
        length = int(self.store.map_shard(shard).index.lengths[local])
        return self._first_positions[shard] + offset // self.dtype.itemsize, length

    def _offsets_of(self, shard: int) -> memoryview:
        self.store.map_shard(shard)  # says if it was cut off
        return self._offsets[shard]

    def _spans(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Spans:
        """The shard that each piece begins in, and where; bisection puts padding at NO_SHARD."""
        shards = self._starts.searchsorted(starts, side="right") - 1
        firsts = starts - self._starts[shards]
        return Spans(shards, firsts, firsts + lengths)

    def _within_shards(self, spans: Spans) -> Spans:
        """The same pieces, those cut in two that go on in the next shard."""
        beyond = np.flatnonzero(spans.lasts > self._sizes[spans.shards])
        if not beyond.size:
            return spans
        found = [self._cut_at_shards(*spans.at(place)) for place in beyond.tolist()]
        counts = np.ones(len(spans.shards), np.int64)
        counts[beyond] = [len(pieces) for pieces in found]
        columns = shards, firsts, lasts = [column.repeat(counts) for column in spans[:3]]
        begins = (np.cumsum(counts) - counts)[beyond].tolist()
        for begin, pieces in zip(begins, found, strict=True):
            for column, values in zip(columns, zip(*pieces, strict=True), strict=True):
                column[begin : begin + len(pieces)] = values
        return Spans(shards, firsts, lasts)

    def _cut_at_shards(self, shard: int, first: int, last: int) -> list[tuple[int, int, int]]:
        """Pieces within shards, of one that goes beyond its own."""
        pieces: list[tuple[int, int, int]] = []
        while last > (size := int(self._sizes[shard])):
            if shard + 1 == len(self._first_positions):
                raise self.damaged(f"lies behind the last of its {self.num_tokens:,} tokens")
            pieces.append((shard, first, size))
            shard, first, last = shard + 1, 0, last - size
        pieces.append((shard, first, last))
        return [piece for piece in pieces if piece[1] < piece[2]]

    def damaged(self, problem: str) -> StoreError:
        """The error for a row that no sound index and no sound plan of rows gives."""
        return StoreError(
            f"a row of {str(self.store.path)!r} {problem}: an index or a plan of rows was changed"
            " after it was made",
            hint=f"find what is damaged with: tokenmill verify {shlex.quote(str(self.store.path))}",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.store, self._scattered)


def _copy_begins(store: Store, first_positions: list[int], shard: int) -> NDArray[np.int64]:
    """Positions at which the documents of a shard begin, aligned."""
    offsets = store.map_shard(shard).index.offsets
    return offsets // store.dtype.itemsize + first_positions[shard]


def _view_offsets(store: Store, shard: int) -> memoryview:
    return store.map_shard(shard).index.offsets.view(np.uint8).data.cast("q")


class _Source(Protocol):
    """Reads pieces of shards."""

    def read(self, spans: Spans, *, padding: memoryview) -> NDArray[Any]: ...


def _open_source(store: Store, track: Track, *, scattered: bool) -> _Source:
    if store.remote is not None:
        return _RemoteSource(store, track)
    try:
        return ReservedTokens(store, scattered=scattered, track=track)
    except OSError:
        return MappedTokens(store, scattered=scattered, track=track)


class _RemoteSource:
    """Pieces of the shards of a store behind a URL."""

    def __init__(self, store: Store, track: Track) -> None:
        self._store = store
        self._track: Track = track

    def read(self, spans: Spans, *, padding: memoryview) -> NDArray[Any]:
        assert self._store.remote is not None
        dtype = self._store.track_dtype(self._track)
        real = np.flatnonzero(spans.shards != NO_SHARD)
        wanted = Spans(spans.shards[real], spans.firsts[real], spans.lasts[real])
        found = self._store.remote.read(*_byte_ranges(wanted, dtype), kind=self._track)
        pieces = [padding[:length] for length in (spans.lasts - spans.firsts).tolist()]
        for place, piece in zip(real.tolist(), found, strict=True):
            pieces[place] = piece
        # A bytearray, so that the array is writable: torch warns of one that is not.
        return view_values(bytearray().join(pieces), dtype=dtype)


def _byte_ranges(
    spans: Spans, dtype: TokenDtype | MaskDtype
) -> tuple[list[int], list[int], list[int]]:
    """Shards, first bytes and bytes after the last, as a remote store takes them."""
    size = dtype.itemsize
    return spans.shards.tolist(), (spans.firsts * size).tolist(), (spans.lasts * size).tolist()


def _reopen(store: Store, scattered: bool) -> TokenStream:
    return TokenStream(store, scattered=scattered)


class _Borders(NamedTuple):
    """Documents that begin inside some pieces: `begins[low : low + count]` for each piece."""

    places: NDArray[np.int64]
    """Which pieces."""
    low: NDArray[np.int64]
    counts: NDArray[np.int64]
    begins: NDArray[np.int64]


def _within(
    begins: NDArray[np.int64],
    places: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> _Borders:
    low = begins.searchsorted(starts[places], side="right")
    high = begins.searchsorted(ends[places], side="left")
    return _Borders(places, low, np.maximum(high - low, 0), begins)


def _cut(
    starts: NDArray[np.int64], ends: NDArray[np.int64], *, groups: list[_Borders]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut pieces at borders that were found for groups of them."""
    counts = np.ones(len(starts), np.int64)
    for group in groups:
        counts[group.places] += group.counts
    firsts = np.cumsum(counts) - counts
    cut = np.empty(int(counts.sum()), np.int64)
    cut[firsts] = starts
    for group in groups:
        total = int(group.counts.sum())
        within = np.arange(total) - np.repeat(np.cumsum(group.counts) - group.counts, group.counts)
        to = np.repeat(firsts[group.places] + 1, group.counts) + within
        cut[to] = group.begins[np.repeat(group.low, group.counts) + within]
    lasts = np.empty_like(cut)
    lasts[:-1] = cut[1:]
    lasts[firsts + counts - 1] = ends
    lengths = lasts - cut
    if lengths.size and not lengths.min():  # documents without tokens begin where others do
        return cut[lengths > 0], lengths[lengths > 0]
    return cut, lengths


class _Begins(dict[int, "NDArray[np.int64]"]):
    """Shard -> where its documents begin, copied when first asked for; bounded by bytes."""

    def __init__(self, make: Callable[[int], NDArray[np.int64]]) -> None:
        super().__init__()
        self._make = make
        self._bytes = 0

    def __missing__(self, shard: int) -> NDArray[np.int64]:
        begins = self[shard] = self._make(shard)
        self._bytes += begins.nbytes
        if self._bytes > KEPT_BEGINS_BYTES:
            self._drop_oldest()
        return begins

    def _drop_oldest(self) -> None:
        """Keep what was made last. Counted anew: threads may have added one shard twice."""
        kept = 0
        for shard, begins in reversed(list(self.items())):
            kept += begins.nbytes
            if kept > KEPT_BEGINS_BYTES // 2:
                self.pop(shard, None)
        self._bytes = sum(begins.nbytes for begins in list(self.values()))
