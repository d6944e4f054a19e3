"""The token pair `.bin` + `.idx`, exactly as Megatron-LM reads it.

`.bin` is the ids of all documents back to back. `.idx` is a header of 34 bytes and three arrays:
tokens of each document, byte offset of each document, and the running number of sequences at the
end of each document. A document is one sequence here, so the last array is always 0, 1, ..., n, and
the whole file is a function of the lengths and the dtype.

The arrays start at byte 34: they are unaligned in memory. numpy reads such views, slightly slower;
code that casts the pointer would not.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tokenmill.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Megatron-LM's own limit. Others go up to 65,536; the code in the header keeps both readable.
UINT16_VOCAB_LIMIT = 65_500
MAX_DOCUMENT_TOKENS = 2**31 - 1
BLOCK_DOCUMENTS = 1 << 16

MaskDtype: TypeAlias = np.dtype[np.uint8]
# One byte for a token: 1 where it counts for the loss, else 0.
MASK_DTYPE: MaskDtype = np.dtype("u1")
TokenDtype: TypeAlias = np.dtype[np.uint16] | np.dtype[np.int32]
TokenArray: TypeAlias = "NDArray[np.uint16] | NDArray[np.int32]"
Ints: TypeAlias = "NDArray[np.int64]"
DTYPE_CODES: dict[TokenDtype, int] = {np.dtype("<u2"): 8, np.dtype("<i4"): 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """The arrays of an `.idx`, as read-only views of the mapped file."""

    dtype: TokenDtype
    lengths: NDArray[np.int32]  # tokens of each document
    offsets: Ints  # byte position of each document in the `.bin`
    documents: Ints  # 0, 1, ..., n: sequences up to the end of each document

    @property
    def bin_bytes(self) -> int:
        """Size that the `.bin` must have."""
        if len(self.lengths) == 0:
            return 0
        return int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize


def token_dtype(vocab_size: int) -> TokenDtype:
    """The type of ids for a vocabulary, added tokens counted."""
    if not 0 < vocab_size <= MAX_DOCUMENT_TOKENS:
        raise ValueError(f"a vocabulary of {vocab_size} ids does not fit 31 bits")
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def index_bytes(num_documents: int) -> int:
    """Size of the `.idx` of so many documents."""
    return HEADER.size + 20 * num_documents + 8


def index_blocks(parts: Sequence[NDArray[np.int32]], *, dtype: TokenDtype) -> Iterator[bytes]:
    """The bytes of an `.idx` for the lengths in `parts`, in blocks of bounded size."""
    num_documents = sum(len(part) for part in parts)
    yield HEADER.pack(MAGIC, 1, DTYPE_CODES[dtype], num_documents, num_documents + 1)
    for block in _blocks(parts):
        yield block.astype("<i4").tobytes()
    position = 0
    for block in _blocks(parts):
        ends = np.cumsum(block, dtype="<i8") * dtype.itemsize + position
        yield (ends - block.astype("<i8") * dtype.itemsize).tobytes()
        position = int(ends[-1])
    for first in range(0, num_documents + 1, BLOCK_DOCUMENTS):
        last = min(first + BLOCK_DOCUMENTS, num_documents + 1)
        yield np.arange(first, last, dtype="<i8").tobytes()


def _blocks(parts: Sequence[NDArray[np.int32]]) -> Iterator[NDArray[np.int32]]:
    for part in parts:
        for first in range(0, len(part), BLOCK_DOCUMENTS):
            yield part[first : first + BLOCK_DOCUMENTS]


def read_index(path: Path) -> Index:
    """Map an `.idx` with header and size checked; `check_index` looks at every entry."""
    return parse_index(map_file(path), path=path)


def parse_index(data: mmap.mmap | bytes, *, path: Path | str) -> Index:
    """The arrays in the bytes of an `.idx`; StoreError names it where header or size are wrong."""
    if len(data) < HEADER.size:
        raise _damaged(path, f"has {len(data)} bytes, less than its header")
    magic, version, code, num_sequences, num_entries = HEADER.unpack_from(data)
    if magic != MAGIC or version != 1:
        raise _damaged(path, "does not begin as an index of Megatron-LM's version 1")
    dtype = next((dtype for dtype, known in DTYPE_CODES.items() if known == code), None)
    if dtype is None:
        raise _damaged(path, f"has the dtype code {code}, not 4 (int32) or 8 (uint16)")
    if num_entries != num_sequences + 1 or len(data) != index_bytes(num_sequences):
        raise _damaged(
            path,
            f"has {len(data)} bytes, {num_sequences} sequences and {num_entries} document entries",
        )
    first = HEADER.size
    index = Index(
        dtype=dtype,
        lengths=np.frombuffer(data, "<i4", num_sequences, first),
        offsets=np.frombuffer(data, "<i8", num_sequences, first + 4 * num_sequences),
        documents=np.frombuffer(data, "<i8", num_sequences + 1, first + 12 * num_sequences),
    )
    if index.documents[0] != 0 or index.documents[-1] != num_sequences:
        raise _damaged(path, f"has a document array that does not run from 0 to {num_sequences}")
    return index


def check_index(index: Index, *, path: Path) -> None:
    """Raise StoreError unless offsets are the running lengths and each document is one sequence."""
    position = 0
    for first in range(0, len(index.lengths), BLOCK_DOCUMENTS):
        block = slice(first, first + BLOCK_DOCUMENTS)
        lengths = index.lengths[block].astype(np.int64)
        if lengths.min() < 0:
            raise _damaged(path, f"has a negative length after document {first}")
        ends = np.cumsum(lengths) * index.dtype.itemsize + position
        if not np.array_equal(index.offsets[block], ends - lengths * index.dtype.itemsize):
            raise _damaged(path, f"has offsets after document {first} that its lengths do not give")
        position = int(ends[-1])
    for first in range(0, len(index.documents), BLOCK_DOCUMENTS):
        entries = index.documents[first : first + BLOCK_DOCUMENTS]
        if not np.array_equal(entries, np.arange(first, first + len(entries))):
            raise _damaged(path, f"has a document after {first} that is not one sequence")


def view_values(
    data: mmap.mmap | bytes | bytearray | memoryview, *, dtype: TokenDtype | MaskDtype
) -> NDArray[Any]:
    """The values in the bytes of a file that has one for every token, or of a part of one."""
    return np.frombuffer(data, dtype)


class LazyValues:
    """Values that are read when they are sliced: an array as far as its length and slices go."""

    ndim = 1

    def __init__(
        self, read: Callable[[int, int], NDArray[Any]], *, size: int, dtype: np.dtype[Any]
    ) -> None:
        self._read = read
        self.size, self.dtype, self.itemsize = size, dtype, dtype.itemsize
        self.nbytes, self.shape = size * dtype.itemsize, (size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice) or key.step not in (None, 1):
            return self[:][key]
        first, last, _ = key.indices(self.size)
        return self._read(first, last) if first < last else np.empty(0, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self[:], dtype=dtype, copy=copy)


def counted_by_document(mask: NDArray[np.uint8], lengths: NDArray[np.integer]) -> Ints:
    """Tokens that count, of each document; masks are back to back."""
    counts = np.zeros(len(lengths), np.int64)
    filled = np.flatnonzero(lengths)
    if len(filled):
        ends = np.cumsum(lengths[filled], dtype=np.int64)
        counts[filled] = np.add.reduceat(mask, ends - lengths[filled], dtype=np.int64)
    return counts


class FileMap(mmap.mmap):
    """A map that knows its file: reading what was cut off a mapped file ends the process."""

    path: Path
    inode: int

    def require_whole(self) -> None:
        """StoreError if the file was cut off since it was mapped."""
        if sys.version_info >= (3, 13):  # no descriptor is kept
            require_size(str(self.path), inode=self.inode, size=len(self))
        elif self.size() < len(self):
            raise _cut_off(str(self.path), self.size(), len(self))


def require_size(path: str, *, inode: int, size: int) -> None:
    """StoreError if a mapped file was cut off; one that was removed or replaced stays mapped."""
    try:
        found = os.stat(path)  # noqa: PTH116 (a path object costs more than the call)
    except OSError:
        return
    if found.st_size < size and found.st_ino == inode:
        raise _cut_off(path, found.st_size, size)


def _cut_off(path: str, found: int, size: int) -> StoreError:
    return StoreError(
        f"{path!r} was cut off while it was open: it has {found:,} bytes instead of {size:,}",
        hint="copy the file again, or run the build again: it rewrites what is missing",
    )


def map_of(values: NDArray[Any]) -> FileMap | None:
    """The map that an array is a view of; None where it is of other memory."""
    owner: object = getattr(values, "base", None)
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, FileMap) else None


def map_file(path: Path) -> mmap.mmap | bytes:
    """A read-only map of a file (its empty bytes where it has none, which no system maps)."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size == 0:
                return b""
            if sys.version_info >= (3, 13):
                mapped = FileMap(file.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False)
            else:
                mapped = FileMap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.path, mapped.inode = path, found.st_ino
            return mapped
    except OSError as error:
        raise StoreError(
            f"{str(path)!r} cannot be mapped: {error.strerror or error}",
            hint="copy the missing file back, or run the build again: it rewrites what is missing",
        ) from error


def _damaged(path: Path | str, problem: str) -> StoreError:
    return StoreError(
        f"{str(path)!r} {problem}; its documents cannot be told apart",
        hint="run the build again with the same command: it rewrites the damaged unit",
    )


# -------------------------------------------------------------------------------------------------
# Which rows of a unit the documents of a shard come from, as run lengths.
#
# The numbers alternate: rows passed over, rows taken, rows passed over, ... So `[0, n]` is every
# row of the unit, and `[2, 3, 1, 4]` is rows 2, 3, 4, 6, 7, 8, 9. A split that takes one row in a
# hundred costs two small numbers per hundred rows, and where every row is used provenance costs
# nothing.
#
# A row may become several documents, one after the other: its *pieces*. They are listed in the
# same manner: rows of one document, pieces of the row after them, and so on. So `[5, 3]` is five
# rows of one document each, one of three, and then rows of one document again.


class RowRuns:
    """Collects the rows of documents into run lengths."""

    def __init__(self) -> None:
        self._runs: list[int] = []
        self._pieces: list[int] = []
        self._whole = 0  # rows of one document since the last one of several
        self._next = 0  # one past the last row taken

    def add(self, rows: Ints) -> None:
        """Take the rows of more documents; they must ascend, and come after all taken before.

        A row that is there several times has so many pieces; all of them must come at once.
        """
        if len(rows) == 0:
            return
        steps = np.diff(rows)
        if rows[0] < self._next or (len(steps) and steps.min() < 0):
            raise ValueError("rows of a shard must ascend: documents were appended out of order")
        if len(steps) and steps.min() == 0:
            firsts = np.concatenate(([0], np.flatnonzero(steps) + 1))
            self._add_pieces(np.diff(firsts, append=len(rows)))
            rows = rows[firsts]
            steps = np.diff(rows)
        else:
            self._whole += len(rows)
        breaks = np.flatnonzero(steps > 1) + 1
        starts = np.concatenate(([0], breaks))
        takes = np.diff(np.concatenate((starts, [len(rows)])))
        ends = rows[starts] + takes
        skips = rows[starts] - np.concatenate(([self._next], ends[:-1]))
        runs = np.stack((skips, takes), axis=1).ravel().tolist()
        if self._runs and runs[0] == 0:
            self._runs[-1] += runs[1]
            runs = runs[2:]
        self._runs += runs
        self._next = int(ends[-1])

    def _add_pieces(self, counts: Ints) -> None:
        """Take the number of documents of each row."""
        several = np.flatnonzero(counts > 1)
        whole = np.diff(several, prepend=-1) - 1
        whole[0] += self._whole
        self._pieces += np.stack((whole, counts[several]), axis=1).ravel().tolist()
        self._whole = len(counts) - 1 - int(several[-1])

    def lengths(self) -> tuple[int, ...]:
        return tuple(self._runs)

    def pieces(self) -> tuple[int, ...]:
        return tuple(self._pieces)


class Place(NamedTuple):
    """Where a document comes from: a row of its unit, and which of its pieces it is."""

    row: int
    piece: int
    pieces: int


def numbers_of_runs(runs: Sequence[int]) -> Ints:
    """The numbers that run lengths take."""
    skips, takes = np.array(runs[0::2], np.int64), np.array(runs[1::2], np.int64)
    found: Ints = np.arange(int(takes.sum())) + np.repeat(np.cumsum(skips), takes)
    return found


def place_of(runs: Sequence[int], pieces: Sequence[int], *, document: int) -> Place:
    """The row of its unit that a shard's document comes from."""
    whole, counts = np.array(pieces[0::2], np.int64), np.array(pieces[1::2], np.int64)
    ends = np.cumsum(whole + counts)
    split = int(np.searchsorted(ends, document, side="right"))
    taken, piece, count = document - int((counts[:split] - 1).sum()), 0, 1
    if split < len(counts) and document >= ends[split] - counts[split]:
        piece, count = document - int(ends[split] - counts[split]), int(counts[split])
    # Which of the rows that were taken it is of; now which row of the unit that is.
    taken -= piece
    run = int(np.searchsorted(np.cumsum(runs[1::2]), taken, side="right"))
    return Place(sum(runs[0 : 2 * run + 1 : 2]) + taken, piece, count)


def split_counts(pieces: Sequence[int]) -> tuple[int, int]:
    """How many rows have several pieces, and how many pieces those are."""
    return len(pieces) // 2, sum(pieces[1::2])


def row_starts(documents: int, pieces: Sequence[int]) -> Ints:
    """The first document of each row, of so many documents."""
    whole, counts = np.array(pieces[0::2], np.int64), np.array(pieces[1::2], np.int64)
    begins = np.ones(documents, bool)
    ends = np.cumsum(whole + counts)
    for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
        begins[end - count + 1 : end] = False
    return np.flatnonzero(begins)


def row_lengths(lengths: NDArray[np.integer], pieces: Sequence[int]) -> Ints:
    """Tokens of each row, from those of each document."""
    return np.add.reduceat(lengths.astype(np.int64), row_starts(len(lengths), pieces))


def check_runs(
    runs: Sequence[int], *, documents: int, rows: int, pieces: Sequence[int] = ()
) -> None:
    """Raise ValueError unless the runs take `documents` of `rows` rows."""
    if len(pieces) % 2 or any(count < 2 for count in pieces[1::2]) or min(pieces, default=0) < 0:
        raise ValueError("pieces are not rows of one document and rows of several in turns")
    split, several = split_counts(pieces)
    taken = documents - several + split
    if taken < sum(pieces[0::2]) + split:
        raise ValueError(f"pieces are not those of {documents} documents")
    if len(runs) % 2 or sum(runs[1::2]) != taken or sum(runs) > rows:
        raise ValueError(f"row runs do not give {taken} rows out of {rows}")
    if any(length < 1 for length in runs[1:]) or min(runs, default=0) < 0:
        raise ValueError("row runs are not alternating runs of at least one row")
