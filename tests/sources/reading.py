"""Reads test files the way a build does, so that tests can compare plain lists."""

from __future__ import annotations

import bz2
import gzip
import lzma
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tokenmill.sources.base import open_source, plan_units
from tokenmill.sources.discovery import source_file

if TYPE_CHECKING:
    from tokenmill.records import Reject
    from tokenmill.sources.base import SourceFile, SourceOptions, UnitEnd

Rejection = tuple[int, str]


@dataclass
class Reading:
    """All rows of a file, numbered through its units."""

    texts: list[tuple[int, str]] = field(default_factory=list)
    rejects: list[Rejection] = field(default_factory=list)
    details: list[Reject] = field(default_factory=list)
    ends: list[UnitEnd] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Of the rows with text, where the format has them."""
    num_rows: int = 0
    num_bytes: int = 0
    num_batches: int = 0

    @property
    def documents(self) -> list[str]:
        return [text for _, text in self.texts]


def read(file: SourceFile | Path, options: SourceOptions) -> Reading:
    """Read every unit; checks what must hold for any file."""
    if isinstance(file, Path):
        file = source_file(str(file))
    result = Reading()
    with closing(open_source(file, options)) as source:
        for unit in plan_units(file, options):
            if not source.exists(unit):
                assert result.ends[-1].is_last
                break
            first = result.num_rows
            for batch in source.read(unit):
                assert batch.num_rows == len(batch.texts) + len(batch.rejects)
                rows = sorted([*batch.rows.tolist(), *(each.row for each in batch.rejects)])
                start = result.num_rows - first
                assert rows == list(range(start, start + batch.num_rows))
                numbers = (batch.rows + first).tolist()
                if batch.places is not None:
                    assert len(batch.places) == len(batch.texts)
                    result.places += batch.places.tolist()
                result.texts += list(zip(numbers, batch.texts.texts(), strict=True))
                result.rejects += [(each.row + first, str(each.reason)) for each in batch.rejects]
                result.details += batch.rejects
                result.num_rows += batch.num_rows
                result.num_bytes += batch.num_bytes
                result.num_batches += 1
            result.ends.append(source.end())
            assert source.digest(unit) == source.end().digest
            assert source.count_rows(unit) == result.num_rows - first
    return result


def compress(data: bytes, kind: str) -> bytes:
    """One complete member, frame or stream."""
    if kind == "zst":
        return bytes(pa.compress(data, codec="zstd", asbytes=True))
    if kind == "gz":
        return gzip.compress(data)
    return bz2.compress(data) if kind == "bz2" else lzma.compress(data)
