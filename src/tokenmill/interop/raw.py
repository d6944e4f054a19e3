"""Formats whose token files are raw ids: megatron, datatrove, olmo, nanogpt, llm.c.

A token file is a header (mostly of 0 bytes) and ids back to back, so it can be mapped as it lies:
for an import, and for reading in place. Where documents end is said by a sidecar, by an
end-of-text id, or by nobody.

    RawFormat.shards(path)      -> RawShard: file, header, dtype, split
    RawFormat.borders(shard)    -> Borders: where its documents end
"""

from __future__ import annotations

import re
from abc import abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    Block,
    Foreign,
    ForeignPart,
    Format,
    ImportOptions,
    damaged,
    file_size,
)
from tokenmill.lazy import lazy
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MOST_TOKENS = 1 << 30
"""Of a document: files without borders are cut here, since an index has 31 bits for a length."""
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}
_VAL = re.compile(r"(^|[^a-z])(val|valid|validation)([^a-z]|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawShard:
    """A token file as its format describes it."""

    name: str
    """Relative to what was opened, with / between: its identity."""
    path: Path
    dtype: str
    tokens: int
    split: str
    offset: int = 0
    """Bytes of header in front of the tokens."""
    index: Path | None = None
    """The file that says where documents end."""
    mask: Path | None = None
    """The file with a byte for each token, 1 = counts."""

    @property
    def size(self) -> int:
        """Bytes of the whole token file."""
        return self.offset + self.tokens * DTYPES[self.dtype].itemsize

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.path, self.index, self.mask) if path is not None)

    def map_tokens(self) -> NDArray[np.integer[Any]]:
        """The ids, mapped."""
        data = map_file(self.path)
        if len(data) != self.size:
            raise damaged(
                self.path,
                f"has {len(data):,} bytes instead of {self.size:,}: it changed after it was opened",
                hint="run the same command again when nothing writes to it",
            )
        return np.frombuffer(data, DTYPES[self.dtype], self.tokens, self.offset)

    def map_mask(self) -> NDArray[np.uint8] | None:
        """A byte for each token, where there is a mask."""
        if self.mask is None:
            return None
        mask = np.frombuffer(map_file(self.mask), np.uint8)
        if len(mask) != self.tokens:
            raise damaged(self.mask, f"has {len(mask):,} bytes for {self.tokens:,} tokens")
        return mask


class Borders(Protocol):
    """Where the documents of a shard are, counted in tokens."""

    def __len__(self) -> int:
        """Documents."""
        ...

    def begin(self, number: int) -> int:
        """First token of a document; of the one behind the last: the end."""
        ...

    def ends(self, first: int, last: int) -> NDArray[np.int64]:
        """Where documents `first` to `last` end."""
        ...


@dataclass(frozen=True, slots=True)
class EndBorders:
    """Documents that lie back to back, by where each ends; the array may be a mapped file."""

    array: NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.array)

    def begin(self, number: int) -> int:
        return int(self.array[number - 1]) if number else 0

    def ends(self, first: int, last: int) -> NDArray[np.int64]:
        return np.asarray(self.array[first:last], np.int64)


def no_borders(tokens: int) -> EndBorders:
    """One document to a file, cut where it would be too long for an index."""
    ends = np.arange(MOST_TOKENS, tokens, MOST_TOKENS, dtype=np.int64)
    return EndBorders(np.append(ends, tokens) if tokens else ends)


def lengths_of(borders: Borders, first: int, last: int) -> NDArray[np.int64]:
    """Tokens of documents `first` to `last`."""
    ends = borders.ends(first, last)
    return np.diff(ends, prepend=borders.begin(first))


class RawFormat(Format):
    """A format whose token files are raw ids."""

    has_borders = True

    @abstractmethod
    def shards(self, path: Path, options: ImportOptions) -> list[RawShard]:
        """The token files below a path, in order, with sizes checked; SourceError otherwise."""

    @abstractmethod
    def borders(self, shard: RawShard, options: ImportOptions) -> Borders:
        """Where the documents of a shard are, checked: they fill the tokens without a gap."""

    def count_documents(self, shard: RawShard, options: ImportOptions) -> int:
        """Documents of a shard; formats that know it without reading the borders say so."""
        return len(self.borders(shard, options))

    def open(self, path: Path, options: ImportOptions) -> Foreign:
        """Open files for import."""
        return RawForeign(self, self.shards(path, options), options)


class RawForeign(Foreign):
    """Raw token files, read document by document as their borders say."""

    def __init__(
        self, format_: RawFormat, shards: Sequence[RawShard], options: ImportOptions
    ) -> None:
        self._format = format_
        self._options = options
        self._shards = {shard.name: shard for shard in shards}
        self._borders: tuple[str, Borders] | None = None
        self.files = {shard.name: shard.path for shard in shards}
        self.sidecars = {shard.name: shard.files[1:] for shard in shards}
        self.has_borders = format_.has_borders
        self.has_mask = any(shard.mask is not None for shard in shards)
        self.note = None if self.has_borders else NO_BORDERS

    @lazy
    def parts(self) -> tuple[ForeignPart, ...]:
        """In order."""
        return tuple(part for shard in self._shards.values() for part in self._cut(shard))

    def _borders_of(self, shard: RawShard) -> Borders:
        """Those of the shard that was read last are kept: parts of one file come together."""
        kept = self._borders  # another thread may put others there
        if kept is None or kept[0] != shard.name:
            kept = self._borders = shard.name, self._format.borders(shard, self._options)
        return kept[1]

    def _cut(self, shard: RawShard) -> Iterator[ForeignPart]:
        """Parts of a file, each of whole documents and about the same size."""
        borders, width = self._borders_of(shard), DTYPES[shard.dtype].itemsize
        first, number = 0, 0
        while first < len(borders) or number == 0:
            target = borders.begin(first) + IMPORT_PART_BYTES // width
            last = bisect_left(range(len(borders)), target, lo=first, key=borders.begin)
            last = min(max(last, first + 1), len(borders))
            yield ForeignPart(
                path=shard.name,
                index=number,
                start=first,
                end=last,
                split=shard.split,
                bytes=(borders.begin(last) - borders.begin(first)) * width,
            )
            first, number = last, number + 1

    def blocks(self, part: ForeignPart) -> Iterator[Block]:
        """The documents of a part: views of the mapped file."""
        shard = self._shards[part.path]
        borders = self._borders_of(shard)
        tokens, mask = shard.map_tokens(), shard.map_mask()
        most = BLOCK_BYTES // tokens.itemsize
        first, stop = part.start, len(borders) if part.end is None else part.end
        while first < stop:
            base = borders.begin(first)
            last = bisect_left(range(stop), base + most, lo=first, key=borders.begin)
            last = min(max(last, first + 1), stop)
            here = slice(base, borders.begin(last))
            lengths = lengths_of(borders, first, last)
            yield Block(tokens[here], lengths, None if mask is None else mask[here])
            first = last


NO_BORDERS = (
    "the format does not say where documents end: each file is one document (cut every"
    f" {MOST_TOKENS:,} tokens); to cut at the end-of-text id use --split-at-eos"
)


def find_files(path: Path, suffix: str) -> list[tuple[str, Path]]:
    """The files with a suffix that a path stands for: itself, or all below a folder, sorted.

    Each with its name relative to the folder.
    """
    if path.is_dir():
        found = sorted(
            each
            for each in path.rglob(f"*{suffix}")
            if each.is_file() and not any(p.startswith(".") for p in each.relative_to(path).parts)
        )
        return [(each.relative_to(path).as_posix(), each) for each in found]
    return [(path.name, path)] if path.name.endswith(suffix) and path.is_file() else []


def require_files(found: list[Any], path: Path, what: str) -> None:
    if not found:
        raise SourceError(
            f"there is nothing of the kind {what} at {str(path)!r}",
            hint="check the path, or name another format with --from",
        )


def count_tokens(path: Path, *, dtype: str, offset: int = 0) -> int:
    """Tokens in a raw file; SourceError where its size does not fit."""
    size = file_size(path) - offset
    width = DTYPES[dtype].itemsize
    if size < 0 or size % width:
        raise damaged(
            path,
            f"has {max(size, 0):,} bytes of tokens, which is not a multiple of the {width} of a"
            f" {dtype}: it was cut off, or its ids have another type",
            hint="say which type its ids have with --dtype, or get the file again",
        )
    return size // width


def raw_dtype(options: ImportOptions, *, default: str = "uint16") -> str:
    """The type of ids that files do not name themselves."""
    name = options.dtype or default
    if name not in DTYPES:
        raise UsageError(
            f"dtype={name!r} is not a type of ids", hint=f"use one of: {', '.join(DTYPES)}"
        )
    return name


def split_of(name: str, options: ImportOptions) -> str:
    """The split of a file: as asked for, else val where its name says so, else train."""
    if options.split is not None:
        return options.split
    return "val" if _VAL.search(name.lower()) else "train"


def check_ends(ends: NDArray[np.integer[Any]], *, tokens: int, path: Path) -> None:
    """Raise SourceError unless ends never fall and the last is the number of tokens."""
    for first in range(0, len(ends), 1 << 20):
        block = ends[first : first + (1 << 20) + 1]
        if len(block) > 1 and np.any(block[1:] < block[:-1]):
            raise damaged(path, f"has a document after {first:,} that ends before it begins")
    last = int(ends[-1]) if len(ends) else 0
    if last != tokens:
        raise damaged(
            path,
            f"says that documents end at token {last:,}, and the token file has {tokens:,}: one of"
            " the two was cut off or is of another file, or its ids have another type",
            hint=_hint_of_ends(last, tokens),
        )


def _hint_of_ends(last: int, tokens: int) -> str | None:
    """Twice or half as many tokens: most likely the width is another."""
    if last and tokens == 2 * last:
        return "its ids have 4 bytes, most likely: --dtype uint32"
    return "its ids have 2 bytes, most likely: --dtype uint16" if last == 2 * tokens else None
