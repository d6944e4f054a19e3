"""Reads pieces of mapped shards: one `join` of memory views, as fast as the memory is.

This works everywhere; reserved.py is what Linux has instead.

Data that is not in memory yet is another matter. A page fault on a map of plain kind reads what
lies around it too (a megabyte and more on some machines), and a join waits for one fault after the
other, with the interpreter's lock held. So maps that are read here and there are advised so, and
while reads turn out slow, the pieces of a read are first asked for all at once, and waited for
without the lock.
"""

from __future__ import annotations

import mmap
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.store.format import map_of, view_values
from tokenmill.store.spans import NO_SHARD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tokenmill.store.reader import Store
    from tokenmill.store.spans import Spans, Track

SLOW_SECONDS_PER_PIECE = 30e-6
SLOW_SECONDS_PER_BYTE = 2e-9
"""Above both together a read was slow. From memory a piece takes 1 us, a byte 0.2 ns."""
PAGE_BYTES = mmap.PAGESIZE


class MappedTokens:
    """Pieces of the shards of a local store: of their tokens, or of their masks."""

    def __init__(self, store: Store, *, scattered: bool, track: Track = "bin") -> None:
        self._store = store
        self._track: Track = track
        self._dtype = store.track_dtype(track)
        self._views = Views(partial(_view, store, track, scattered), limit=store.max_mapped)
        self._is_slow = False

    def read(self, spans: Spans, *, padding: memoryview) -> NDArray[Any]:
        """The values of all spans, back to back."""
        pieces = list(zip(*(column.tolist() for column in spans[:3]), strict=True))
        views = {shard: self._views[shard] for shard, _, _ in pieces if shard != NO_SHARD}
        for shard in views:
            self._store.map_shard(shard)  # says if it was cut off
        views[NO_SHARD] = padding
        started = perf_counter()
        if self._is_slow:
            self._bring([piece for piece in pieces if piece[0] != NO_SHARD])
        joined = bytearray().join([views[shard][first:last] for shard, first, last in pieces])
        self._is_slow = is_slow(perf_counter() - started, len(pieces), len(joined))
        return view_values(joined, dtype=self._dtype)

    def _bring(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Have the pages of all pieces read, many at a time."""
        for shard, first, last in pieces:
            values = self._store.map_shard(shard).track(self._track)
            _advise(values, "MADV_WILLNEED", first * values.itemsize, last * values.itemsize)
        for shard, first, last in pieces:
            touch(self._store.map_shard(shard).track(self._track), first, last)


def touch(values: NDArray[Any], first: int, last: int) -> None:
    """Wait until a piece is in memory, without the interpreter's lock, which take() gives up."""
    step = PAGE_BYTES // values.itemsize  # any value of a page brings it
    values.take(np.append(np.arange(first, last, step), last - 1))


def is_slow(seconds: float, num_pieces: int, num_bytes: int) -> bool:
    """Whether a read took longer than one from memory does."""
    expected = num_pieces * SLOW_SECONDS_PER_PIECE + num_bytes * SLOW_SECONDS_PER_BYTE
    return seconds > expected


class Views(dict[int, memoryview]):
    """Shard -> view of its map, made when it is first asked for; beyond a limit the oldest go."""

    def __init__(self, make: Callable[[int], memoryview], *, limit: int) -> None:
        super().__init__()
        self._make = make
        self._limit = limit

    def __missing__(self, shard: int) -> memoryview:
        view = self[shard] = self._make(shard)
        if len(self) > max(1, self._limit):
            # Threads may do this at once: the list is made in one go, and who comes second pops
            # nothing.
            for oldest in list(self)[: len(self) - max(1, self._limit)]:
                self.pop(oldest, None)
        return view


def _view(store: Store, track: Track, scattered: bool, shard: int) -> memoryview:
    values = store.map_shard(shard).track(track)
    if scattered:
        _advise(values, "MADV_RANDOM", 0, values.nbytes)
    return values.data


def _advise(values: NDArray[Any], advice: str, first: int, last: int) -> None:
    """Tell the system how bytes of a map will be used, where it has such advice."""
    owner = map_of(values)
    if owner is not None and hasattr(mmap, advice) and first < last:
        start = first - first % PAGE_BYTES
        owner.madvise(getattr(mmap, advice), start, last - start)
