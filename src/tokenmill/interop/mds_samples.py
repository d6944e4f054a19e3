"""The bytes of MDS shards: header, samples, and the options of the writer that stand in them.

    shard     u32 samples | u32 offsets, one more | JSON of the writer's options | samples
    sample    u32 size of each column | column after column, by name
    column    byte: dimensions and width of the shape | shape | values

All of it follows from the lengths, so that a shard is written as it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenmill.interop.base import BLOCK_BYTES
from tokenmill.interop.records import IDS, column, json_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from tokenmill.interop.records import Batch

HASH = "xxh3_128"
"""What the files of an export are hashed with anyway; MosaicML's readers know it."""
ONE_DIMENSION = 1 << 2
PIECE_TOKENS = BLOCK_BYTES // 8
MOST_HEAD_BYTES = 5


class SampleLayout:
    """Columns of samples, and what their bytes look like."""

    def __init__(
        self, columns: Mapping[str, str], *, dtype: np.dtype[Any], size_limit: int
    ) -> None:
        """`columns`: name in the file -> column of the records."""
        self._columns = dict(sorted(columns.items()))
        self._dtype = dtype
        types = {IDS: dtype, "labels": np.dtype("<i8")}
        self._types = [types.get(name, np.dtype(np.int8)) for name in self._columns.values()]
        self.size_limit = size_limit
        self.config = {
            "column_encodings": [f"ndarray:{kind.name}" for kind in self._types],
            "column_names": list(self._columns),
            "column_sizes": [None] * len(self._columns),
            "compression": None,
            "format": "mds",
            "hashes": [HASH],
            "size_limit": size_limit,
            "version": 2,
        }
        self._config_bytes = json_bytes(self.config)

    @property
    def room(self) -> int:
        """What samples may add to a shard before the next one begins."""
        return self.size_limit - 8 - len(self._config_bytes)

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of samples of these lengths."""
        sizes: NDArray[np.int64] = self._column_sizes(lengths).sum(axis=1)
        return sizes + 4 * len(self._types)

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """What samples add to a shard; documents without tokens make none."""
        return np.where(lengths > 0, self.sizes(lengths) + 4, 0)

    def header(self, lengths: NDArray[np.int64]) -> bytes:
        """What a shard of such samples begins with."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(self.sizes(lengths), out=offsets[1:])
        offsets += 4 + 4 * len(offsets) + len(self._config_bytes)
        count = np.array([len(lengths)], "<u4")
        return count.tobytes() + offsets.astype("<u4").tobytes() + self._config_bytes

    def encode(self, batch: Batch) -> Iterator[memoryview | bytes]:
        """The samples of a batch."""
        if batch.tokens.ndim == 2:
            yield self._rows(batch).data
        elif len(batch.lengths) == 1:
            yield from self._one_document(batch)
        else:
            yield memoryview(self._documents(batch))

    def _column_sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        widths = np.array([kind.itemsize for kind in self._types])
        heads = 1 + (1 << _width_codes(lengths))
        sizes: NDArray[np.int64] = lengths[:, None] * widths + heads[:, None]
        return sizes

    def _rows(self, batch: Batch) -> NDArray[np.uint8]:
        """Samples of one length: an array of records, in which each column is filled at once."""
        rows, length = batch.tokens.shape
        lengths = batch.lengths[:1]
        head = _heads(lengths).tobytes()[: 1 + (1 << int(_width_codes(lengths)[0]))]
        fields: list[Any] = [("sizes", f"V{4 * len(self._types)}")]
        for name, kind in zip(self._columns, self._types, strict=True):
            fields += [(f"{name} head", f"V{len(head)}"), (name, kind, (length,))]
        samples = np.empty(rows, np.dtype(fields))
        samples["sizes"] = np.void(self._column_sizes(lengths).astype("<u4").tobytes())
        for name, source in self._columns.items():
            samples[f"{name} head"] = np.void(head)
            # The assignment widens the ids: no copy before it.
            samples[name] = (
                batch.tokens if source == IDS else column(batch, source, dtype=self._dtype)
            )
        return samples.view(np.uint8)

    def _documents(self, batch: Batch) -> Any:
        """Samples of any lengths: heads and values as columns of bytes, which Arrow joins."""
        lengths = batch.lengths[batch.lengths > 0]
        if not len(lengths):
            return b""
        sizes = self._column_sizes(lengths).astype("<u4").view(np.uint8)
        pieces = []
        for source, kind in zip(self._columns.values(), self._types, strict=True):
            pieces.append(_head_array(lengths, sizes))
            sizes = sizes[:, :0]  # they stand before the first column
            values = column(batch, source, dtype=self._dtype)
            pieces.append(_binary_array(values, lengths * kind.itemsize))
        empty = pa.scalar(b"", pa.large_binary())
        return pc.binary_join_element_wise(*pieces, empty).buffers()[2]

    def _one_document(self, batch: Batch) -> Iterator[memoryview | bytes]:
        """One document, however long, a piece at a time."""
        lengths = batch.lengths
        if not lengths[0]:
            return
        yield self._column_sizes(lengths).astype("<u4").tobytes()
        head = _heads(lengths).tobytes()[: 1 + (1 << int(_width_codes(lengths)[0]))]
        for source in self._columns.values():
            yield head
            for first in range(0, int(lengths[0]), PIECE_TOKENS):
                here = slice(first, first + PIECE_TOKENS)
                mask = None if batch.mask is None else batch.mask[here]
                piece = batch._replace(tokens=batch.tokens[here], mask=mask)
                yield column(piece, source, dtype=self._dtype).data.cast("B")


def _width_codes(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1 or 2 where a length takes one, two or four bytes."""
    return np.searchsorted(np.array([1 << 8, 1 << 16]), lengths, side="right")


def _heads(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """(documents, 5): the byte that tells the width of the length, then the length."""
    heads = np.empty((len(lengths), MOST_HEAD_BYTES), np.uint8)
    heads[:, 0] = ONE_DIMENSION | _width_codes(lengths)
    heads[:, 1:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return heads


def _head_array(lengths: NDArray[np.int64], sizes: NDArray[np.uint8]) -> Any:
    """What stands before the values of a column, as an Arrow array."""
    used = sizes.shape[1] + 1 + (1 << _width_codes(lengths))
    heads = np.concatenate((sizes, _heads(lengths)), axis=1)
    return _binary_array(heads[np.arange(heads.shape[1]) < used[:, None]], used)


def _binary_array(values: NDArray[Any], sizes: NDArray[np.int64]) -> Any:
    """Values of documents back to back, so many bytes each, as an Arrow array."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(sizes), buffers)
