"""Opens a store: documents by number, as views of the mapped files.

Opening reads the manifest and lists the folders; a shard is mapped when it is first touched. A
Python map keeps a file descriptor open before 3.13, so at most so many shards stay mapped as the
process's limit allows; views that were handed out stay valid when their shard is unmapped.
"""

from __future__ import annotations

import functools
import json
import operator
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.store.format import Index, TokenArray, TokenDtype, map_file, read_index, view_tokens
from tokenmill.store.layout import StoreLayout, shard_name
from tokenmill.store.manifest import Manifest, read_manifest
from tokenmill.store.presence import require_files
from tokenmill.store.receipt import read_receipt
from tokenmill.store.rows import row_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from tokenmill.store.receipt import Receipt

MAX_MAPPED_SHARDS = 8192
"""Two maps each; Linux allows a process 65,530 maps unless told otherwise."""
CACHED_RECEIPTS = 64


class Decoder(Protocol):
    """What `Store.decode` needs of an engine."""

    def decode(self, ids: NDArray[np.integer]) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A shard of an open store."""

    name: str
    unit: str
    split: str
    documents: int
    tokens: int
    first_document: int
    """Number of its first document in the store, as it was opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedShard:
    """The contents of a shard, as read-only views."""

    tokens: TokenArray
    index: Index

    def document(self, number: int) -> TokenArray:
        """The tokens of one document."""
        first = int(self.index.offsets[number]) // self.index.dtype.itemsize
        return self.tokens[first : first + int(self.index.lengths[number])]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """Where a document comes from."""

    path: str
    unit: int
    """Position of the unit in its file."""
    row_in_unit: int
    row: int
    """Position in the file, counted from 0."""
    line: int | None
    """Line of the file, counted from 1; None where blank lines hide it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedRow:
    """A row that is not in the store, and why."""

    unit: str
    file: str
    row: int
    offset: int | None
    reason: str
    detail: str


class Store:
    """The documents of one split of a store, or of all (`split=None`).

    >>> store = Store("store")
    >>> store[0]
    array([72, 105, 256], dtype=uint16)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = "train",
        decoder: Callable[[Store], Decoder] | None = None,
    ) -> None:
        self._open(Path(path).absolute(), split, decoder)

    def _open(
        self, path: Path, split: str | None, decoder: Callable[[Store], Decoder] | None
    ) -> None:
        self.layout = StoreLayout(path)
        self.split = split
        self.manifest: Manifest = read_manifest(path)
        self._make_decoder = decoder
        self._decoder: Decoder | None = None
        require_files(self.layout, self.manifest)
        self.shards: tuple[Shard, ...] = tuple(self._list_shards())
        self._starts = [shard.first_document for shard in self.shards]
        self.num_documents = sum(shard.documents for shard in self.shards)
        self.num_tokens = sum(shard.tokens for shard in self.shards)
        # Caches of this store, not of the class: they must go when the store goes.
        self._map = functools.lru_cache(_max_mapped_shards())(self._map_shard)
        self._receipt = functools.lru_cache(CACHED_RECEIPTS)(self._read_receipt)

    def _list_shards(self) -> Iterator[Shard]:
        splits = self.manifest.splits
        if self.split is not None and splits and self.split not in splits:
            raise StoreError(
                f"{str(self.path)!r} has no split {self.split!r}",
                hint=f"open one it has: {', '.join(map(repr, splits))}, or split=None for all",
            )
        first = 0
        for unit, entry in self.manifest.shards(split=self.split):
            yield Shard(
                name=shard_name(unit.name, split=entry.split),
                unit=unit.name,
                split=entry.split,
                documents=entry.documents,
                tokens=entry.tokens,
                first_document=first,
            )
            first += entry.documents

    @property
    def path(self) -> Path:
        return self.layout.root

    @property
    def dtype(self) -> TokenDtype:
        return self.manifest.identity.dtype

    @property
    def vocab_size(self) -> int:
        return self.manifest.identity.tokenizer.vocab_size

    @property
    def eos_id(self) -> int | None:
        """Id that ends every document, where the build put one."""
        eos = self.manifest.identity.eos
        return None if eos is None else eos.id

    @property
    def bos_id(self) -> int | None:
        """Id that begins every document, where the build put one."""
        bos = self.manifest.identity.bos
        return None if bos is None else bos.id

    @property
    def tokenizer_dir(self) -> Path:
        """The copy of the tokenizer's files."""
        return self.layout.tokenizer

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, number: SupportsIndex) -> TokenArray:
        shard, local = self.locate(number)
        return self.map_shard(shard).document(local)

    def __iter__(self) -> Iterator[TokenArray]:
        for shard in range(len(self.shards)):
            mapped = self.map_shard(shard)
            for local in range(self.shards[shard].documents):
                yield mapped.document(local)

    def locate(self, number: SupportsIndex) -> tuple[int, int]:
        """Position of the shard that holds a document, and the document's place in it."""
        wanted = operator.index(number)
        if wanted < 0:
            wanted += self.num_documents
        if not 0 <= wanted < self.num_documents:
            raise IndexError(f"document {number} of a store of {self.num_documents:,}")
        shard = bisect_right(self._starts, wanted) - 1
        return shard, wanted - self._starts[shard]

    def map_shard(self, shard: int) -> MappedShard:
        """The contents of a shard, by its position in `shards`."""
        return self._map(shard)

    def _map_shard(self, position: int) -> MappedShard:
        shard = self.shards[position]
        idx_path = self.layout.shard_file(shard.name, "idx")
        index = read_index(idx_path)
        if index.dtype != self.dtype or index.bin_bytes != shard.tokens * self.dtype.itemsize:
            raise StoreError(
                f"{str(idx_path)!r} is of another shard: it is for {index.bin_bytes:,} bytes of"
                f" {index.dtype.name}",
                hint=f"see what is damaged with: tokenmill verify {self.path}",
            )
        data = map_file(self.layout.shard_file(shard.name, "bin"))
        return MappedShard(tokens=view_tokens(data, dtype=self.dtype), index=index)

    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every document: 4 bytes each, in memory."""
        parts = [self.map_shard(i).index.lengths for i in range(len(self.shards))]
        return np.concatenate([np.empty(0, np.int32), *parts])

    def source(self, number: SupportsIndex) -> SourceRow:
        """Where a document comes from."""
        position, local = self.locate(number)
        shard = self.shards[position]
        receipt = self._receipt(shard.unit)
        runs = next(facts.rows for facts in receipt.shards if facts.split == shard.split)
        row = row_of(runs, document=local)
        rows_before, lines_before = self._before[shard.unit]
        has_blank_lines = receipt.source.num_lines != receipt.counts.rows
        members = receipt.unit.members
        if members:
            return SourceRow(
                path=members[row], unit=receipt.unit.index, row_in_unit=row, row=0, line=1
            )
        return SourceRow(
            path=receipt.unit.path,
            unit=receipt.unit.index,
            row_in_unit=row,
            row=rows_before + row,
            line=None if has_blank_lines else lines_before + row + 1,
        )

    @functools.cached_property
    def _before(self) -> dict[str, tuple[int, int]]:
        """Unit -> rows and lines of its file that lie before it."""
        before: dict[str, tuple[int, int]] = {}
        passed = [(0, 0)] * len(self.manifest.sources)
        for unit in self.manifest.units:
            rows, lines = before[unit.name] = passed[unit.source]
            passed[unit.source] = (rows + unit.rows, lines + unit.lines)
        return before

    def _read_receipt(self, unit: str) -> Receipt:
        return read_receipt(self.layout, unit)

    def rejects(self) -> Iterator[RejectedRow]:
        """The rows of all splits that could not be used, in order."""
        for unit in self.manifest.units:
            if unit.rejects is None:
                continue
            with self.layout.rejects_file(unit.name).open("rb") as lines:
                for line in lines:
                    yield RejectedRow(unit=unit.name, **json.loads(line))

    def decode(self, number: SupportsIndex) -> str:
        """The text of a document, without the tokens that the build put around it."""
        if self._decoder is None:
            if self._make_decoder is None:
                raise UsageError(
                    "this store was opened without a tokenizer",
                    hint="open it with: tokenmill.Store(path)",
                )
            self._decoder = self._make_decoder(self)
        first = 0 if self.bos_id is None else 1
        last = None if self.eos_id is None else -1
        return self._decoder.decode(self[number][first:last])

    def close(self) -> None:
        """Unmap all shards; views that were handed out stay valid."""
        self._map.cache_clear()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> tuple[Path, str | None, Callable[[Store], Decoder] | None]:
        return self.path, self.split, self._make_decoder

    def __setstate__(
        self, state: tuple[Path, str | None, Callable[[Store], Decoder] | None]
    ) -> None:
        self._open(*state)

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}, split={self.split!r}): {self.num_documents:,} documents,"
            f" {self.num_tokens:,} tokens"
        )


def _max_mapped_shards() -> int:
    if sys.version_info >= (3, 13) or sys.platform == "win32":
        return MAX_MAPPED_SHARDS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_MAPPED_SHARDS
    # Two descriptors to a shard, and half of the limit is left to the rest of the process.
    return max(8, min(MAX_MAPPED_SHARDS, soft // 4))
