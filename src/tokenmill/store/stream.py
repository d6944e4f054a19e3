"""The tokens of an open split as one long sequence: its shards back to back, in their order.

A position counts tokens from the first shard's first. The loader speaks of positions alone; which
file they are in, and where documents begin, is known here.

Where documents begin is searched in a copy of the index, since an `.idx` is not aligned and numpy
would copy it for every search: in one copy for all shards where documents are few, else in one for
each shard. For a few pieces of a shard the mapped index is bisected in place, which touches a few
pages of it: so it goes with thousands of shards.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shlex
import sys
import weakref
from bisect import bisect_left, bisect_right
from functools import cache, lru_cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.records import lazy
from tokenmill.store.format import map_of, require_size, view_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.store.format import Ints, TokenArray, TokenDtype
    from tokenmill.store.reader import Shard, Store, TrackFile


Track: TypeAlias = Literal["bin", "mask"]
# Tokens of shards, each span within one shard or padding, as columns of (shard, first, last).
Spans: TypeAlias = "Ints"

NO_SHARD = -1  # shard of a piece that is padding


def distinct(values: NDArray[np.integer]) -> list[int]:
    """The values that occur, in order.

    numpy's own `unique` gives up the interpreter's lock inside C++ code. Before Python 3.14 a
    program that ends stops its other threads where they wait for the lock, and there it aborts.
    """
    return sorted(set(values.tolist()))


# -------------------------------------------------------------------------------------------------
# Reads pieces of mapped shards: one `join` of memory views, as fast as the memory is.
#
# This works everywhere; `ReservedTokens` is what Linux has instead.
#
# Data that is not in memory yet is another matter. A page fault on a map of plain kind reads what
# is around it too (a megabyte and more on some machines), and a join waits for one fault after
# the other, with the interpreter's lock held. So maps that are read here and there are advised so,
# and while reads turn out slow, the pieces of a read are first asked for all at once, and waited
# for without the lock.

SLOW_SECONDS_PER_PIECE = 30e-6
# Above both together a read was slow. From memory a piece takes 1 us, a byte 0.2 ns.
SLOW_SECONDS_PER_BYTE = 2e-9
PAGE_BYTES = mmap.PAGESIZE


class MappedTokens:
    """Pieces of the shards of a local store: of their tokens, or of their masks."""

    def __init__(self, store: Store, *, scattered: bool, track: Track = "bin") -> None:
        self._store = store
        self._track: Track = track
        self._dtype = store.track_dtype(track)

        def view(shard: int) -> memoryview:
            values = store.map_shard(shard).track(track)
            if scattered:
                _advise(values, "MADV_RANDOM", 0, values.nbytes)
            return values.data

        self._view = lru_cache(max(1, store.max_mapped))(view)
        self._is_slow = False

    def read(self, spans: Spans, *, padding: memoryview, length: int | None = None) -> NDArray[Any]:
        """The values of all spans, back to back; `length`: of all, where none is padding."""
        del length  # a join takes pieces of any lengths alike
        pieces = spans.T.tolist()
        views = {shard: self._view(shard) for shard, _, _ in pieces if shard != NO_SHARD}
        for shard in views:
            self._store.map_shard(shard)  # says if it was cut off
        views[NO_SHARD] = padding
        started = perf_counter()
        if self._is_slow:
            self._fetch_pages([piece for piece in pieces if piece[0] != NO_SHARD])
        joined = bytearray().join([views[shard][first:last] for shard, first, last in pieces])
        self._is_slow = is_slow(perf_counter() - started, len(pieces), len(joined))
        return view_values(joined, dtype=self._dtype)

    def _fetch_pages(self, pieces: Sequence[Sequence[int]]) -> None:
        """Have the pages of all pieces read, many at a time."""
        for shard, first, last in pieces:
            values = self._store.map_shard(shard).track(self._track)
            _advise(values, "MADV_WILLNEED", first * values.itemsize, last * values.itemsize)
        for shard, first, last in pieces:
            touch(self._store.map_shard(shard).track(self._track), first, last)


def touch(values: NDArray[Any], first: int, last: int) -> None:
    """Wait until a piece is in memory, without the interpreter's lock, which take() gives up."""
    step = PAGE_BYTES // values.itemsize  # any value of a page will do
    values.take(np.append(np.arange(first, last, step), last - 1))


def is_slow(seconds: float, num_pieces: int, num_bytes: int) -> bool:
    """Whether a read took longer than one from memory does."""
    expected = num_pieces * SLOW_SECONDS_PER_PIECE + num_bytes * SLOW_SECONDS_PER_BYTE
    return seconds > expected


def _advise(values: NDArray[Any], advice: str, first: int, last: int) -> None:
    """Tell the system how bytes of a map will be used, where it has such advice."""
    owner = map_of(values)
    if owner is not None and hasattr(mmap, advice) and first < last:
        start = first - first % PAGE_BYTES
        owner.madvise(getattr(mmap, advice), start, last - start)


# -------------------------------------------------------------------------------------------------
# All shards of a split in one range of addresses, each beginning on a page: one call of numpy reads
# rows from any of them.
#
# The range is reserved when a stream is opened, which costs nothing, and a shard is mapped into
# its place when it is first touched. A gather of equal pieces is then one fancy index, which
# copies, and waits for the disk, without the interpreter's lock. No file stays open, so thousands
# of shards need no more descriptors than one.
#
# Python's mmap cannot map to a chosen address, so this calls the C library, and only on Linux;
# elsewhere, and where the range is refused (a limit on address space), `MappedTokens` does it.

# Of all open streams. Each is a map of its own; Linux allows a process 65,530 unless told.
MAX_SHARDS = 25_000
# For each mapped file, between two looks at all of them: a look takes 2 us, so 1% of the time.
LOOK_SECONDS = 200e-6
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_RANDOM = 1
_MADV_WILLNEED = 3
_FAILED = ctypes.c_void_p(-1).value


class ReservedTokens:
    """Pieces of the shards of a local store: of their tokens, or of their masks.

    OSError where the system does not allow it.
    """

    def __init__(self, store: Store, *, scattered: bool, track: Track = "bin") -> None:
        if sys.platform != "linux" or _reserved[0] + len(store.shards) > MAX_SHARDS:
            raise OSError("no range of addresses is reserved here")
        self._store = store
        self._scattered = scattered
        self._track: Track = track
        dtype = store.track_dtype(track)
        sizes = np.array([shard.tokens for shard in store.shards], np.int64) * dtype.itemsize
        # A map begins on a page of the file: in front of values that a header precedes.
        offsets = [store.files.track_offset(shard.name, track) for shard in store.shards]
        leads = np.array(offsets, np.int64) % PAGE_BYTES
        if np.any(leads % dtype.itemsize):
            raise OSError("values that begin at an odd byte cannot be part of one array")
        room = -(-(leads + sizes) // PAGE_BYTES) * PAGE_BYTES
        places = np.cumsum(room) - room + leads
        self._range = _Range(int(room.sum()), dtype=dtype, num_shards=len(sizes))
        self._tokens: NDArray[Any] = np.asarray(self._range)
        # The last entry is that of shard -1, which is padding.
        self._bases = np.append(places // dtype.itemsize, 0)
        self._is_mapped = np.append(sizes == 0, True)
        self._num_unmapped = int(np.count_nonzero(sizes))
        self._rows: dict[int, NDArray[Any]] = {}
        self._is_slow = False
        # Path, inode and size of the files that are mapped.
        self._mapped: dict[int, tuple[str, int, int]] = {}
        self._look_at = 0.0  # when the files are to be looked at again

    def read(self, spans: Spans, *, padding: memoryview, length: int | None = None) -> NDArray[Any]:
        """The values of all spans, back to back; `length`: of all, where none is padding."""
        shards, firsts, lasts = spans
        if self._num_unmapped and not self._is_mapped[shards].all():
            self._map(distinct(shards[~self._is_mapped[shards]]))
        started = perf_counter()
        if started > self._look_at:
            self._require_whole()
        starts = self._bases[shards] + firsts
        if self._is_slow:
            real = shards != NO_SHARD
            self._fetch_pages(starts[real], (starts + lasts - firsts)[real], wait=length is None)
        if length is not None:
            found: NDArray[Any] = self._rows_of(length)[starts].reshape(-1)
        else:
            if not padding and (firsts < lasts).all():
                # Copied in turn, each piece would wait for the memory anew: so all wait at once.
                self._tokens.take(starts)
            found = self._join(spans, starts, padding)
        self._is_slow = is_slow(perf_counter() - started, len(shards), found.nbytes)
        return found

    def _require_whole(self) -> None:
        """StoreError if a file was cut off since it was mapped: reading that ends the process."""
        for path, inode, size in list(self._mapped.values()):
            require_size(path, inode=inode, size=size)
        self._look_at = perf_counter() + LOOK_SECONDS * len(self._mapped)

    def _join(self, spans: Spans, starts: Ints, padding: memoryview) -> NDArray[Any]:
        """Pieces of different lengths: as fast as copying, but with the interpreter's lock."""
        shards, firsts, lasts = spans
        lengths = lasts - firsts
        ends, tokens = starts + lengths, self._tokens.data
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        pieces = [tokens[start:end] for start, end in places]
        if padding:
            for place in np.flatnonzero(shards == NO_SHARD).tolist():
                pieces[place] = padding[: int(lengths[place])]
        return np.frombuffer(bytearray().join(pieces), self._tokens.dtype)

    def _fetch_pages(self, firsts: Ints, lasts: Ints, *, wait: bool) -> None:
        """Have the pages of all pieces read, many at a time."""
        self._range.want(firsts, lasts)
        if wait:  # a gather waits without the interpreter's lock anyway
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                touch(self._tokens, first, last)

    def _rows_of(self, length: int) -> NDArray[Any]:
        """All ranges of a length, by their first token."""
        if length not in self._rows:
            count = max(0, len(self._tokens) - length + 1)
            strides = (self._tokens.itemsize, self._tokens.itemsize)
            windows = np.lib.stride_tricks.as_strided(self._tokens, (count, length), strides)
            self._rows = {length: windows}
        return self._rows[length]

    def _map(self, shards: list[int]) -> None:
        for number in shards:
            shard = self._store.shards[number]
            size = shard.tokens * self._tokens.itemsize
            with self._store.files.as_opened(shard):
                file, inode = self._map_shard(number, shard, size)
            self._mapped[number] = str(file.path), inode, file.size
            self._is_mapped[number] = True
        # Counted anew: threads may have mapped one shard twice.
        self._num_unmapped = int(np.count_nonzero(~self._is_mapped))

    def _map_shard(self, number: int, shard: Shard, size: int) -> tuple[TrackFile, int]:
        file = self._store.files.track_file(shard.name, self._track, size=size)
        try:
            base, scattered = int(self._bases[number]), self._scattered
            return file, self._range.map(file, at=base, size=size, random=scattered)
        except OSError as error:
            few = error.errno in {errno.ENOMEM, errno.EMFILE, errno.ENFILE}
            raise StoreError(
                f"{str(file.path)!r} cannot be mapped: {error.strerror or error}",
                hint="close other stores: the system allows this process no more maps or files"
                if few
                else "copy the missing file back, or run the build again: it rewrites what is"
                " missing",
            ) from error


class _Range:
    """Reserved addresses, as an array; freed when the last view of it is gone."""

    def __init__(self, size: int, *, dtype: np.dtype[Any], num_shards: int) -> None:
        self._itemsize = dtype.itemsize
        self._address = _call_mmap(
            None,
            max(size, PAGE_BYTES),
            _PROT_NONE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            -1,
        )
        free = weakref.finalize(self, _free, self._address, max(size, PAGE_BYTES), num_shards)
        # When the program ends, a thread may still be reading; the system frees it all then.
        free.atexit = False
        _reserved[0] += num_shards
        self.__array_interface__ = {
            "version": 3,
            "data": (self._address, True),
            "shape": (size // dtype.itemsize,),
            "typestr": dtype.str,
        }

    def map(self, file: TrackFile, *, at: int, size: int, random: bool) -> int:
        """Put the tokens of a file, which must have its size, at a place counted in tokens.

        Returns the file's inode.
        """
        lead = file.offset % PAGE_BYTES
        address, size = self._address + at * self._itemsize - lead, lead + size
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor)
            if found.st_size != file.size:
                raise OSError(f"it has {found.st_size:,} bytes instead of {file.size:,}")
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _call_mmap(address, size, mmap.PROT_READ, flags, descriptor, file.offset - lead)
        finally:
            os.close(descriptor)
        if random:
            _library().madvise(address, size, _MADV_RANDOM)
        return found.st_ino

    def want(self, firsts: Ints, lasts: Ints) -> None:
        """Ask for the pages of pieces, without waiting for them; places are counted in tokens."""
        advise = _library().madvise
        begins = self._address + firsts * self._itemsize
        begins -= begins % PAGE_BYTES
        ends = self._address + lasts * self._itemsize
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            advise(begin, end - begin, _MADV_WILLNEED)


_reserved = [0]  # shards of all ranges of this process: the limit on maps is the process's


def _free(address: int, size: int, num_shards: int) -> None:
    _library().munmap(address, size)
    _reserved[0] -= num_shards


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_int64]
    library.mmap.restype = address
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, number]
    return library


def _call_mmap(
    address: int | None, size: int, protection: int, flags: int, file: int, offset: int = 0
) -> int:
    found = _library().mmap(address, size, protection, flags, file, offset)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


NO_PADDING = memoryview(b"")
_ENDLESS = 1 << 62
_ZERO = np.zeros(1, np.int64)
# Up to here all documents are looked up in one array, of 8 MB at most, made in some 10 ms.
FEW_DOCUMENTS = 1 << 20
# Of a view with up to so many runs it is kept which are near a position: 8 MB at most.
FEW_RUNS = 1 << 18
FEW_PIECES = 4  # up to here bisecting the mapped index beats searching a copy of it
# Copies of where documents begin, 8 bytes each: a store with few documents has them all.
KEPT_BEGINS_BYTES = 64 << 20


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
        self._first_documents = np.array([shard.first_document for shard in store.shards], np.int64)
        self._scattered = scattered
        self.has_mask = store.has_mask  # whether there are masks to be read with the tokens
        self._source = _open_source(store, "bin", scattered=scattered)
        self._kept_padding: dict[Track, tuple[int, memoryview]] = {}
        firsts = self._first_positions

        # They know the store, not this stream: so it goes, and its maps, when nobody uses it.
        def view_offsets(shard: int) -> memoryview:
            return store.map_shard(shard).index.offsets.view(np.uint8).data.cast("q")

        def copy_begins(shard: int) -> Ints:  # positions, aligned
            offsets = store.map_shard(shard).index.offsets
            begins: Ints = offsets // store.dtype.itemsize + firsts[shard]
            return begins

        self._offsets = lru_cache(max(1, store.max_mapped))(view_offsets)
        most = max((shard.documents for shard in store.shards), default=0)
        self._begins = lru_cache(max(1, KEPT_BEGINS_BYTES // max(8, 8 * most)))(copy_begins)

    @property
    def spanned(self) -> Store:
        """The store whose shards spans are of."""
        return self.store

    @property
    def first_positions(self) -> Ints:
        """Where each shard begins."""
        return self._starts

    def read(self, starts: Ints, lengths: Ints, *, pad: int) -> TokenArray:
        """The tokens of all pieces back to back; a piece that starts below 0 is padding."""
        return self.read_spans(self.locate(starts, lengths), pad=pad)

    def locate(self, starts: Ints, lengths: Ints) -> Spans:
        """Where pieces are: in their order, those cut in two that go on in the next shard."""
        spans = self._spans(starts, lengths)
        if spans[0].min(initial=0) == NO_SHARD:
            padded = spans[0] == NO_SHARD
            spans[1, padded], spans[2, padded] = 0, lengths[padded]
        return self._within_shards(spans)

    def read_spans(self, spans: Spans, *, pad: int | None, length: int | None = None) -> TokenArray:
        """The tokens of all that was located, back to back; `pad` is None if none is padding.

        `length` is that of every span, where it is known and none is padding: the fastest read.
        """
        padding = NO_PADDING if pad is None else self._padding("bin", pad, spans)
        return self._source.read(spans, padding=padding, length=length)

    def read_mask(self, spans: Spans, *, length: int | None = None) -> NDArray[np.bool_]:
        """Which tokens of all that was located count, back to back; padding does not.

        All others do where the store has no masks.
        """
        shards, firsts, lasts = spans
        if not self.has_mask:
            return np.repeat(shards != NO_SHARD, lasts - firsts)
        padding = NO_PADDING
        if length is None and shards.min(initial=0) == NO_SHARD:
            padding = self._padding("mask", 0, spans)
        return self._mask_source.read(spans, padding=padding, length=length).view(np.bool_)

    @lazy
    def _mask_source(self) -> _Source:
        return _open_source(self.store, "mask", scattered=self._scattered)

    def _padding(self, track: Track, pad: int, spans: Spans) -> memoryview:
        """Padding to cut pieces from: made once, since most rows have some where any have."""
        longest = int((spans[2] - spans[1]).max(initial=0))
        kept_pad, kept = self._kept_padding.get(track, (pad, NO_PADDING))
        if kept_pad != pad or len(kept) < longest:
            kept = np.full(longest, pad, self.store.track_dtype(track)).data
            self._kept_padding[track] = pad, kept
        return kept

    def read_ahead(self, spans: Spans) -> None:
        """Begin to download what will be read soon, where that takes a network."""
        if self.store.remote is not None:
            for track in ("bin", "mask") if self.has_mask else ("bin",):
                ranges = _byte_ranges(self.store, spans, track)
                self.store.remote.read_ahead(ranges, kind=track)

    def cut_at_documents(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """The same pieces in the same order, each cut where documents begin inside it.

        Padding stays as it is.
        """
        shards, firsts, lasts = self._within_shards(self._spans(starts, lengths))
        bases = self._starts[shards]
        starts, ends = firsts + bases, lasts + bases
        return _cut(starts, ends, groups=list(self._find_boundaries(shards, starts, ends)))

    def _find_boundaries(self, shards: Ints, starts: Ints, ends: Ints) -> Iterator[_Boundaries]:
        """Shard by shard: which of its documents begin inside which pieces."""
        if self.store.num_documents <= FEW_DOCUMENTS and self.store.remote is None:
            places = np.flatnonzero(shards != NO_SHARD)
            yield _within(self._all_begins, places, starts, ends)
            return
        touched = distinct(shards[shards != NO_SHARD])
        if self.store.is_remote:
            self.store.files.prepare_indexes([self.store.shards[k].name for k in touched])
        for shard in touched:
            places = np.flatnonzero(shards == shard)
            base = self._first_positions[shard]
            if len(places) < FEW_PIECES:
                offsets, size = self._offsets_of(shard), self.dtype.itemsize
                for place in places.tolist():
                    first = bisect_right(offsets, (int(starts[place]) - base) * size)
                    last = bisect_left(offsets, (int(ends[place]) - base) * size, first)
                    begins = np.array(offsets[first:last], np.int64) // size + base
                    yield _Boundaries(np.array([place]), _ZERO, np.array([len(begins)]), begins)
            else:
                yield _within(self._begins(shard), places, starts, ends)

    @lazy
    def _all_begins(self) -> Ints:
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
        starts, lengths = self.document_spans(np.array([number], np.int64))
        return int(starts[0]), int(lengths[0])

    def document_spans(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Positions and tokens of documents."""
        shards = self._first_documents.searchsorted(numbers, side="right") - 1
        starts, lengths = np.empty_like(numbers), np.empty_like(numbers)
        for shard in distinct(shards):
            here = shards == shard
            index, local = (
                self.store.map_shard(shard).index,
                numbers[here] - self._first_documents[shard],
            )
            starts[here] = (
                index.offsets[local] // self.dtype.itemsize + self._first_positions[shard]
            )
            lengths[here] = index.lengths[local]
        return starts, lengths

    def _offsets_of(self, shard: int) -> memoryview:
        self.store.map_shard(shard)  # says if it was cut off
        return self._offsets(shard)

    def _spans(self, starts: Ints, lengths: Ints) -> Spans:
        """The shard that each piece begins in, and where; bisection puts padding at NO_SHARD."""
        spans = np.empty((3, len(starts)), np.int64)
        shards, firsts, lasts = spans
        np.subtract(self._starts.searchsorted(starts, side="right"), 1, out=shards)
        np.subtract(starts, self._starts[shards], out=firsts)
        np.add(firsts, lengths, out=lasts)
        return spans

    def _within_shards(self, spans: Spans) -> Spans:
        """The same pieces, those cut in two that go on in the next shard."""
        beyond = np.flatnonzero(spans[2] > self._sizes[spans[0]])
        if not beyond.size:
            return spans
        found = [self._cut_at_shards(*spans[:, place].tolist()) for place in beyond.tolist()]
        counts = np.ones(spans.shape[1], np.int64)
        counts[beyond] = [len(pieces) for pieces in found]
        cut = spans.repeat(counts, axis=1)
        begins = (np.cumsum(counts) - counts)[beyond].tolist()
        for begin, pieces in zip(begins, found, strict=True):
            cut[:, begin : begin + len(pieces)] = np.array(pieces, np.int64).reshape(-1, 3).T
        return cut

    def _cut_at_shards(self, shard: int, first: int, last: int) -> list[tuple[int, int, int]]:
        """Pieces within shards, of one that goes beyond its own."""
        pieces: list[tuple[int, int, int]] = []
        while last > (size := int(self._sizes[shard])):
            if shard + 1 == len(self._first_positions):
                raise self.damaged(f"is after the last of its {self.num_tokens:,} tokens")
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
        return partial(TokenStream, scattered=self._scattered), (self.store,)


_Source: TypeAlias = "ReservedTokens | MappedTokens | _RemoteSource"


def _open_source(store: Store, track: Track, *, scattered: bool) -> _Source:
    if store.remote is not None:
        return _RemoteSource(store, track)
    try:
        return ReservedTokens(store, scattered=scattered, track=track)
    except OSError:
        return MappedTokens(store, scattered=scattered, track=track)


class _RemoteSource:
    """Pieces of the shards of a store at a URL."""

    def __init__(self, store: Store, track: Track) -> None:
        self._store = store
        self._track: Track = track

    def read(self, spans: Spans, *, padding: memoryview, length: int | None = None) -> NDArray[Any]:
        del length  # every span is a range of bytes of its own
        assert self._store.remote is not None
        ranges = _byte_ranges(self._store, spans, self._track)
        found = iter(self._store.remote.read(ranges, kind=self._track))
        shards, firsts, lasts = spans
        lengths, is_real = (lasts - firsts).tolist(), (shards != NO_SHARD).tolist()
        pieces = [next(found) if r else padding[:n] for r, n in zip(is_real, lengths, strict=True)]
        # A bytearray, so that the array is writable: torch warns of one that is not.
        return view_values(bytearray().join(pieces), dtype=self._store.track_dtype(self._track))


def _byte_ranges(store: Store, spans: Spans, track: Track) -> list[tuple[str, int, int]]:
    """Shards, first bytes and bytes after the last, as a remote store takes them; no padding."""
    size = store.track_dtype(track).itemsize
    real = spans[:, spans[0] != NO_SHARD].T.tolist()
    return [(store.shards[shard].name, first * size, last * size) for shard, first, last in real]


class _Boundaries(NamedTuple):
    """Documents that begin inside some pieces: `begins[low : low + count]` for each piece."""

    places: Ints  # which pieces
    low: Ints
    counts: Ints
    begins: Ints


def _within(begins: Ints, places: Ints, starts: Ints, ends: Ints) -> _Boundaries:
    low = begins.searchsorted(starts[places], side="right")
    high = begins.searchsorted(ends[places], side="left")
    return _Boundaries(places, low, np.maximum(high - low, 0), begins)


def _cut(starts: Ints, ends: Ints, *, groups: list[_Boundaries]) -> tuple[Ints, Ints]:
    """Cut pieces at boundaries that were found for groups of them."""
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


def open_stream(store: Store, *, scattered: bool = False) -> TokenStream:
    """The stream of a store, or of a view of one."""
    return (TokenStream if store.view is None else ViewStream)(store, scattered=scattered)


# -------------------------------------------------------------------------------------------------
# The tokens of a view, as one long sequence too: its positions become those of its store.
#
# Where a view goes on elsewhere in the store, a document begins, so pieces are cut there anyway.


class ViewStream(TokenStream):
    """Reads pieces of a view by position. Spans are those of the shards of its store."""

    def __init__(self, store: Store, *, scattered: bool = False) -> None:
        assert store.view is not None
        self.store = store
        self.num_tokens = store.num_tokens
        self.dtype: TokenDtype = store.dtype
        self.has_mask = store.has_mask
        self._runs = store.view.runs(store.split)
        self._of_store = TokenStream(store.view.base(store.split), scattered=scattered)
        self._scattered = scattered

    @property
    def spanned(self) -> Store:
        return self._of_store.store

    def locate(self, starts: Ints, lengths: Ints) -> Spans:
        if self._near is None or starts.min(initial=0) < 0:
            return self._of_store.locate(*self._in_store(starts, lengths))
        runs, begins, ends = self._cut_at_runs(starts, lengths)
        # A run is within a shard, so no piece is to be cut once more.
        shards, shifts = self._in_shards
        shift = shifts[runs]
        return np.stack((shards[runs], begins + shift, ends + shift))

    def read_spans(self, spans: Spans, *, pad: int | None, length: int | None = None) -> TokenArray:
        return self._of_store.read_spans(spans, pad=pad, length=length)

    def read_mask(self, spans: Spans, *, length: int | None = None) -> NDArray[np.bool_]:
        return self._of_store.read_mask(spans, length=length)

    def read_ahead(self, spans: Spans) -> None:
        self._of_store.read_ahead(spans)

    def cut_at_documents(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        found, cut = self._of_store.cut_at_documents(*self._in_store(starts, lengths))
        # They fill the pieces in order: so it is known which piece each is in, and where.
        begins, ends = np.cumsum(cut) - cut, np.cumsum(lengths)
        pieces = ends.searchsorted(begins, side="right")
        places = starts[pieces] + begins - (ends - lengths)[pieces]
        return np.where(found < 0, found, places), cut

    def document_at(self, position: int) -> int:
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"position {position} of a stream of {self.num_tokens:,} tokens")
        runs = self._runs
        run = int(runs.positions.searchsorted(position, side="right")) - 1
        number = self._of_store.document_at(int(runs.bases[run] + position - runs.positions[run]))
        return int(runs.documents[run] + number - runs.firsts[run])

    def document_spans(self, numbers: Ints) -> tuple[Ints, Ints]:
        runs = self._runs
        places = runs.documents.searchsorted(numbers, side="right") - 1
        wanted = runs.firsts[places] + numbers - runs.documents[places]
        starts, lengths = self._of_store.document_spans(wanted)
        return runs.positions[places] + starts - runs.bases[places], lengths

    @lazy
    def _near(self) -> tuple[int, Ints] | None:
        """Of each range of positions, the run that its first one is in; how long they are.

        From there a few steps lead to the run of any position: in random places that takes a third
        of the time of bisecting.
        """
        positions, count = self._runs.positions, len(self._runs.firsts)
        if not 0 < count <= FEW_RUNS or not self.num_tokens:
            return None
        shift = max(0, (self.num_tokens // (2 * count)).bit_length() - 1)
        starts = np.arange((self.num_tokens >> shift) + 1) << shift
        return shift, positions.searchsorted(starts, side="right") - 1

    def _runs_at(self, places: Ints) -> Ints:
        """The run that each position is in."""
        positions, near = self._runs.positions, self._near
        if near is None:
            found: Ints = positions.searchsorted(places, side="right") - 1
            return found
        shift, runs = near
        found = runs[np.maximum(places, 0) >> shift]
        late = np.flatnonzero(positions[found + 1] <= places)
        while late.size:
            found[late] += 1
            late = late[positions[found[late] + 1] <= places[late]]
        return found

    @lazy
    def _in_shards(self) -> tuple[Ints, Ints]:
        """Of each run, the store's shard, and what to add to a position for the place in it."""
        runs, firsts = self._runs, self._of_store.first_positions
        shards = firsts.searchsorted(runs.bases, side="right") - 1  # empty ones are passed over
        return shards, runs.bases - runs.positions[:-1] - firsts[shards]

    def _cut_at_runs(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """The same pieces, cut where the view goes on elsewhere: run, begin and end of each.

        Padding stays.
        """
        positions, ends = self._runs.positions, starts + lengths
        if int(ends.max(initial=0)) > self.num_tokens:
            raise self.damaged(f"is after the last of its {self.num_tokens:,} tokens")
        first, last = self._runs_at(np.concatenate((starts, ends - 1))).reshape(2, -1)
        counts = np.maximum(last - first, 0) + 1
        is_padding = starts < 0
        if is_padding.any():
            counts[is_padding] = 1
        lasts = np.cumsum(counts) - 1
        firsts = lasts - counts + 1
        runs = np.repeat(first - firsts, counts)
        runs += np.arange(len(runs))
        begins, stops = positions[runs], positions[1:].take(runs, mode="clip")
        begins[firsts], stops[lasts] = starts, ends
        filled = begins < stops  # documents without tokens are runs too
        if filled.all():
            return runs, begins, stops
        return runs[filled], begins[filled], stops[filled]

    def _in_store(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """The same pieces in the store, cut where the view goes on elsewhere; padding stays."""
        runs, begins, ends = self._cut_at_runs(starts, lengths)
        shift = self._runs.bases.take(runs, mode="clip") - self._runs.positions[runs]
        return np.where(begins < 0, begins, begins + shift), ends - begins

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ViewStream, scattered=self._scattered), (self.store,)
