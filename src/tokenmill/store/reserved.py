"""All shards of a split in one range of addresses: one call of numpy reads rows from any of them.

    | shard 0 ........ | shard 1 ... | not touched yet | shard 3 ...     each begins on a page

The range is reserved when a stream is opened, which costs nothing, and a shard is mapped into its
place when it is first touched. A gather of equal pieces is then one fancy index, which copies, and
waits for the disk, without the interpreter's lock. No file stays open, so thousands of shards need
no more descriptors than one.

Python's mmap cannot map to a chosen address, so this calls the C library, and only on Linux;
elsewhere, and where the range is refused (a limit on address space), mapped.py does the work.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.format import require_size
from tokenmill.store.mapped import PAGE_BYTES, is_slow, touch
from tokenmill.store.spans import NO_SHARD, distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenmill.store.files import TrackFile
    from tokenmill.store.reader import Store
    from tokenmill.store.spans import Spans, Track

MAX_SHARDS = 25_000
"""Of all open streams. Each is a map of its own; Linux allows a process 65,530 unless told."""
LOOK_SECONDS = 100e-6
"""For each mapped file, between two looks at all of them: a look takes 2 us, so 2% of the time."""
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
        if sys.platform != "linux" or _num_reserved + len(store.shards) > MAX_SHARDS:
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
        self._mapped: dict[int, tuple[str, int, int]] = {}
        """Path, inode and size of the files that are mapped."""
        self._look_at = 0.0
        """When the files are to be looked at again."""

    def read(self, spans: Spans, *, padding: memoryview) -> NDArray[Any]:
        """The values of all spans, back to back."""
        shards = spans.shards
        if self._num_unmapped and not self._is_mapped[shards].all():
            self._map(distinct(shards[~self._is_mapped[shards]]))
        started = perf_counter()
        if started > self._look_at:
            self._require_whole()
        starts = self._bases[shards] + spans.firsts
        if self._is_slow:
            self._bring(spans, starts)
        if spans.length is not None:
            found = self._rows_of(spans.length)[starts].reshape(-1)
        else:
            found = self._join(spans, starts, padding)
        self._is_slow = is_slow(perf_counter() - started, len(shards), found.nbytes)
        return found

    def _require_whole(self) -> None:
        """StoreError if a file was cut off since it was mapped: reading that ends the process."""
        for path, inode, size in list(self._mapped.values()):
            require_size(path, inode=inode, size=size)
        self._look_at = perf_counter() + LOOK_SECONDS * len(self._mapped)

    def _join(self, spans: Spans, starts: NDArray[np.int64], padding: memoryview) -> NDArray[Any]:
        """Pieces of different lengths: as fast as copying, but with the interpreter's lock."""
        lengths = spans.lasts - spans.firsts
        places = map(slice, starts.tolist(), (starts + lengths).tolist())
        pieces = list(map(self._tokens.data.__getitem__, places))
        if padding:
            for place in np.flatnonzero(spans.shards == NO_SHARD).tolist():
                pieces[place] = padding[: int(lengths[place])]
        return np.frombuffer(bytearray().join(pieces), self._tokens.dtype)

    def _bring(self, spans: Spans, starts: NDArray[np.int64]) -> None:
        """Have the pages of all pieces read, many at a time."""
        real = spans.shards != NO_SHARD
        firsts, lasts = starts[real], (starts + spans.lasts - spans.firsts)[real]
        self._range.want(firsts, lasts)
        if spans.length is None:  # a gather waits without the interpreter's lock anyway
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                touch(self._tokens, first, last)

    def _rows_of(self, length: int) -> NDArray[Any]:
        """All stretches of a length, by their first token."""
        if length not in self._rows:
            count = max(0, len(self._tokens) - length + 1)
            strides = (self._tokens.itemsize, self._tokens.itemsize)
            stretches = np.lib.stride_tricks.as_strided(self._tokens, (count, length), strides)
            self._rows = {length: stretches}
        return self._rows[length]

    def _map(self, shards: list[int]) -> None:
        for number in shards:
            shard = self._store.shards[number]
            size = shard.tokens * self._tokens.itemsize
            file = self._store.files.track_file(shard.name, self._track, size=size)
            try:
                inode = self._range.map(
                    file, at=int(self._bases[number]), size=size, random=self._scattered
                )
            except OSError as error:
                raise StoreError(
                    f"{str(file.path)!r} cannot be mapped: {error.strerror or error}",
                    hint=_hint(error),
                ) from error
            self._mapped[number] = str(file.path), inode, file.size
            self._is_mapped[number] = True
        # Counted anew: threads may have mapped one shard twice.
        self._num_unmapped = int(np.count_nonzero(~self._is_mapped))


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
        _count(num_shards)
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

    def want(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> None:
        """Ask for the pages of pieces, without waiting for them; places are counted in tokens."""
        advise = _library().madvise
        begins = self._address + firsts * self._itemsize
        begins -= begins % PAGE_BYTES
        ends = self._address + lasts * self._itemsize
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            advise(begin, end - begin, _MADV_WILLNEED)


_num_reserved = 0


def _count(num_shards: int) -> None:
    """Shards of all ranges of this process: the limit on maps is the process's."""
    global _num_reserved
    _num_reserved += num_shards


def _free(address: int, size: int, num_shards: int) -> None:
    _library().munmap(address, size)
    _count(-num_shards)


def _hint(error: OSError) -> str:
    if error.errno in {errno.ENOMEM, errno.EMFILE, errno.ENFILE}:
        return "close other stores: the system allows this process no more maps or files"
    return "copy the missing file back, or run the build again: it rewrites what is missing"


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
