"""Reads test files the way a build does, so that tests can compare plain lists."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tokenmill.records import RejectReason
from tokenmill.sources.base import is_stream, open_source, plan_units
from tokenmill.sources.discovery import source_file
from tokenmill.sources.lines import CopySource, RecordSource

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
                for each in batch.rejects:
                    path, row = batch.file_of(each.row)
                    result.details.append(each._replace(path=path, row_in_file=row))
                result.num_rows += batch.num_rows
                result.num_bytes += batch.num_bytes
                result.num_batches += 1
            result.ends.append(source.end())
            assert source.digest(unit) == source.end().digest
            assert source.count_rows(unit) == result.num_rows - first
    if file.traits.has_records and is_stream(file, options):
        read_copies(file, options, result)
    return result


def read_copies(file: SourceFile, options: SourceOptions, expected: Reading) -> int:
    """Read each unit of a stream from a copy, which gives the same; says how many had one."""
    copied = 0
    details, ends = iter(expected.details), iter(expected.ends)
    texts, places = iter(expected.documents), iter(expected.places)
    with tempfile.NamedTemporaryFile() as kept, closing(RecordSource(file, options)) as stream:
        for unit in plan_units(file, options):
            if not stream.exists(unit):
                break
            copy = stream.copy(unit, kept.name)
            if copy is not None:
                copied += 1
                assert Path(kept.name).stat().st_size == copy.num_bytes
            opened = CopySource(file, options, copy) if copy else open_source(file, options)
            with closing(opened) as source:
                for _ in range(2):  # as where the engine disagrees
                    batches = [*source.read(unit)]
                assert source.end() == next(ends)
            reasons = {each.reason for batch in batches for each in batch.rejects}
            assert copy is not None or RejectReason.TOO_LARGE in reasons
            for batch in batches:
                for text in batch.texts.texts():
                    assert text == next(texts)
                for place in [] if batch.places is None else batch.places.tolist():
                    assert place == next(places)
                for reject in batch.rejects:
                    assert reject == next(details)
    assert not any(map(list, (details, ends, texts, places)))
    return copied


def compress(data: bytes, kind: str) -> bytes:
    """One complete member, frame or stream."""
    if kind == "zst":
        return bytes(pa.compress(data, codec="zstd", asbytes=True))
    if kind == "gz":
        return gzip.compress(data)
    return bz2.compress(data) if kind == "bz2" else lzma.compress(data)
