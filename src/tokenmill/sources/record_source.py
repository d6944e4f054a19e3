"""Reading units of a file that is a sequence of records: what JSON Lines and separated text share.

Joins the block reader (which bytes belong to a unit) with a parser (what rows those bytes hold),
keeps the row numbers, the digest and the counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch
from tokenmill.sources.base import UnitEnd
from tokenmill.sources.blocks import BlockReader, record_limit
from tokenmill.sources.columns import too_large
from tokenmill.sources.units import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.sources.base import SourceFile, SourceOptions, Unit
    from tokenmill.sources.blocks import Block


class RecordParser(Protocol):
    """Turns a block of whole records into rows."""

    separator: bytes

    def rows(self, block: Block, *, first_row: int) -> tuple[RowBatch, int]:
        """Rows of the block, and how many records (lines) it has, blank ones too."""

    def count(self, block: Block) -> int:
        """Rows of the block, without their text."""


class RecordSource:
    """An open file of records."""

    def __init__(self, file: SourceFile, options: SourceOptions, *, parser: RecordParser) -> None:
        self._file = file
        self._parser = parser
        self._limit = record_limit(options)
        check_unchanged(file)
        self._blocks = BlockReader(file, options, separator=parser.separator)
        self._end: UnitEnd | None = None

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches."""
        self._end = None
        hasher = xxhash.xxh3_128()
        row = lines = 0
        self._blocks.seek(unit.start)
        for block in self._blocks.blocks(unit.end, hasher=hasher):
            batch, records = self._rows(block, first_row=row)
            row += batch.num_rows
            lines += records
            yield batch
        is_last = unit.end is None or (self._blocks.is_stream and not self._blocks.has_more())
        check_unchanged(self._file)
        self._end = UnitEnd(digest=hasher.hexdigest(), num_lines=lines, is_last=is_last)

    def end(self) -> UnitEnd:
        """Facts about the unit read last."""
        assert self._end is not None, "end() before the unit's rows were all read"
        return self._end

    @property
    def read_seconds(self) -> float:
        """Time spent on getting bytes, decompressed where they were compressed."""
        return self._blocks.read_seconds

    def exists(self, unit: Unit) -> bool:
        """Whether the file reaches the unit."""
        if unit.index == 0 or not self._blocks.is_stream:
            return True
        self._blocks.seek(unit.start)
        return self._blocks.has_more()

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit."""
        self._blocks.seek(unit.start)
        return sum(
            1 if block.oversize else self._parser.count(block)
            for block in self._blocks.blocks(unit.end)
        )

    def digest(self, unit: Unit) -> str:
        """The unit's digest alone."""
        hasher = xxhash.xxh3_128()
        self._blocks.seek(unit.start)
        for _ in self._blocks.blocks(unit.end, hasher=hasher):
            pass
        return hasher.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()

    def _rows(self, block: Block, *, first_row: int) -> tuple[RowBatch, int]:
        if not block.oversize:
            return self._parser.rows(block, first_row=first_row)
        detail = too_large(block.oversize, self._limit)
        reject = Reject(
            first_row, RejectReason.TOO_LARGE, detail, block.offset, size=block.oversize
        )
        rows = np.empty(0, np.int64)
        texts = TextBatch.from_texts([])
        batch = RowBatch(
            texts,
            rows,
            (reject,),
            num_rows=1,
            num_bytes=block.num_bytes,
            largest_row_bytes=0,
        )
        return batch, 1
