"""Formats whose token files are raw ids: megatron, datatrove, olmo, nanogpt, llm.c.

A token file is a header (mostly of 0 bytes) and ids back to back, so it can be mapped as it lies:
for an import, and for reading in place. Where documents end is said by a sidecar, by an
end-of-text id, or by nobody.

    RawFormat.shards(path)      -> RawShard: file, header, dtype, split
    RawFormat.borders(shard)    -> Borders: where its documents end
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.base import (
    BLOCK_BYTES,
    IMPORT_PART_BYTES,
    DocumentBlock,
    ExportTask,
    FileLink,
    Foreign,
    ForeignPart,
    Format,
    ImportOptions,
    damaged,
    file_size,
)
from tokenmill.interop.export import copy_into
from tokenmill.interop.records import shard_blocks
from tokenmill.records import lazy
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.base import ExportOptions
    from tokenmill.interop.export import OutFile, PartFiles
    from tokenmill.store.reader import Store


MOST_TOKENS = 1 << 30
"""Of a document: files without borders are cut here, since an index has 31 bits for a length."""
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}


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


class DocumentBounds(Protocol):
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


def lengths_of(borders: DocumentBounds, first: int, last: int) -> NDArray[np.int64]:
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
    def borders(self, shard: RawShard, options: ImportOptions) -> DocumentBounds:
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
        self._borders: tuple[str, DocumentBounds] | None = None
        self.files = {shard.name: shard.path for shard in shards}
        self.sidecars = {shard.name: shard.files[1:] for shard in shards}
        self.has_borders = format_.has_borders
        self.has_mask = any(shard.mask is not None for shard in shards)
        self.note = None if self.has_borders else NO_BORDERS

    @lazy
    def parts(self) -> tuple[ForeignPart, ...]:
        """In order."""
        return tuple(part for shard in self._shards.values() for part in self._cut(shard))

    def _borders_of(self, shard: RawShard) -> DocumentBounds:
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

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
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
            yield DocumentBlock(tokens[here], lengths, None if mask is None else mask[here])
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


# -------------------------------------------------------------------------------------------------
# How the token file of a raw format gets its bytes: linked, copied, or streamed.
#
# A shard's ids are the same bytes in the store and in the formats; a store behind a URL, or one
# whose files have a header, is streamed through its map.


def token_task(
    store: Store, split: str, file: str, *, shards: Sequence[int], others: Sequence[str] = ()
) -> ExportTask:
    """The part that makes a file of the ids of some shards, and the files beside it."""
    tokens = sum(store.shards[number].tokens for number in shards)
    return ExportTask(
        split=split,
        tokens=tokens,
        files=(file, *others),
        sizes={file: tokens * store.dtype.itemsize},
        task={"shards": [*shards]},
    )


def shards_of(part: ExportTask) -> list[int]:
    """The shards of such a part."""
    shards = part.task["shards"]
    assert isinstance(shards, list)
    return [int(str(number)) for number in shards]


def put_tokens(store: Store, part: ExportTask, out: PartFiles) -> None:
    """Make the token file of a part, which is its first."""
    name, shards = part.files[0], shards_of(part)
    source = local_tokens(store, shards[0]) if len(shards) == 1 else None
    if source is not None:
        out.link_or_copy(name, source, checksum=bin_checksum(store, shards[0]))
        return
    if out.link_mode is FileLink.ALWAYS:
        raise UsageError(
            f"the tokens of {str(store.path)!r} are not in a local file of their own, which a link"
            " needs",
            hint="leave --link out",
        )
    file = out.create(name)
    for number in shards:
        source = local_tokens(store, number)
        if source is None:
            stream_tokens(store, number, file)
        else:
            copy_into(file, source, checksum=bin_checksum(store, number))


def local_tokens(store: Store, number: int) -> Path | None:
    """The file that holds the ids of a shard and nothing else, where there is one."""
    if store.is_remote:
        return None
    shard = store.shards[number]
    size = shard.tokens * store.dtype.itemsize
    file = store.files.track_file(shard.name, "bin", size=size)
    return file.path if file.offset == 0 else None


def bin_checksum(store: Store, number: int) -> str | None:
    """What the store says about the bytes of a shard; None where it is not its own."""
    if "in_place" in store.manifest.identity.config:
        return None
    return _checksums(store)[number]


@lru_cache(maxsize=4)
def _checksums(store: Store) -> list[str]:
    return [entry.bin for _, entry in store.manifest.shards(split=store.split)]


def stream_tokens(store: Store, number: int, file: OutFile) -> None:
    for block in shard_blocks(store, number):
        file.write(np.ascontiguousarray(block.ids).data)


def stream_mask(store: Store, number: int, file: OutFile) -> None:
    """A byte for each token of a shard; 1 for all where the shard has no mask."""
    for block in shard_blocks(store, number):
        mask: Any = np.ones(len(block.ids), np.uint8) if block.mask is None else block.mask
        file.write(np.ascontiguousarray(mask).data)


def one_link(stores: Mapping[str, Store], options: ExportOptions, *, what: str) -> None:
    """Refuse links where a file would be made of several shards."""
    for split, store in stores.items():
        if options.link is not FileLink.NEVER and len(store.shards) != 1:
            raise UsageError(
                f"the split {split!r} has {len(store.shards)} shards and {what} is one file, which"
                " cannot be a link to several",
                hint="leave --link out",
            )


# -------------------------------------------------------------------------------------------------
# Files without borders, cut at the end-of-text id: one stream of tokens over all files of a split.
#
# A document may begin in one file and end in the next, so it belongs to the part in which it
# begins: a part skips what lies before its first beginning, and reads on beyond its end until the
# next.

SCAN_TOKENS = 1 << 22


class TokenSequence:
    """Files back to back, mapped when they are touched."""

    def __init__(self, shards: Sequence[RawShard]) -> None:
        self.shards = [shard for shard in shards if shard.tokens]
        self.starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        self.tokens = int(self.starts[-1])
        self._mapped: tuple[int, NDArray[np.integer[Any]]] | None = None

    def read(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Tokens `first` to `last`: a view where one file has them all."""
        pieces = []
        number = int(np.searchsorted(self.starts, first, side="right")) - 1
        while first < last:
            base, end = int(self.starts[number]), min(last, int(self.starts[number + 1]))
            pieces.append(self._map(number)[first - base : end - base])
            first, number = end, number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.uint16)])

    def _map(self, number: int) -> NDArray[np.integer[Any]]:
        kept = self._mapped  # another thread may put another file there
        if kept is None or kept[0] != number:
            kept = self._mapped = number, self.shards[number].map_tokens()
        return kept[1]

    def begins(self, first: int, last: int, *, eos_id: int, lead: int) -> NDArray[np.int64]:
        """Where documents begin in a stretch; `lead` is 0 for an id in front of each, 1 behind."""
        found = [np.zeros(1, np.int64)] if first == 0 < last else []
        first = max(first, 1)
        while first < last:
            end = min(last, first + SCAN_TOKENS)
            window = self.read(first - lead, end - lead)
            found.append(np.flatnonzero(window == eos_id) + first)
            first = end
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def next_begin(self, position: int, *, eos_id: int, lead: int) -> int:
        """The first beginning at or behind a position, or the end."""
        while position < self.tokens:
            end = min(self.tokens, position + SCAN_TOKENS)
            found = self.begins(position, end, eos_id=eos_id, lead=lead)
            if len(found):
                return int(found[0])
            position = end
        return self.tokens


class EosForeign(Foreign):
    """Raw token files, cut at the end-of-text id wherever it stands."""

    has_borders = False

    def __init__(
        self, shards: Sequence[RawShard], options: ImportOptions, *, in_front: bool
    ) -> None:
        if options.eos_id is None:
            raise _no_eos()
        self._eos_id = options.eos_id
        self._lead = 0 if in_front else 1
        ordered = sorted(shards, key=lambda shard: shard.split)
        self._streams = {
            split: TokenSequence([*group])
            for split, group in groupby(ordered, key=lambda shard: shard.split)
        }
        self.files = {shard.name: shard.path for shard in ordered}
        place = "in front of" if in_front else "behind"
        self.note = f"documents were cut at the id {self._eos_id} {place} each"
        self.parts = tuple(
            part for split, stream in self._streams.items() for part in _cut(stream, split)
        )

    def blocks(self, part: ForeignPart) -> Iterator[DocumentBlock]:
        """The documents that begin in a part."""
        stream = self._streams[part.split]
        base = next(
            int(start)
            for start, shard in zip(stream.starts, stream.shards, strict=False)
            if shard.name == part.path
        )
        assert part.end is not None
        first, last = base + part.start, base + part.end
        rule = {"eos_id": self._eos_id, "lead": self._lead}
        begins = stream.begins(first, last, **rule)
        if not len(begins):
            return
        ends = np.append(begins[1:], stream.next_begin(last, **rule))
        most = BLOCK_BYTES // DTYPES[stream.shards[0].dtype].itemsize
        low = 0
        while low < len(begins):
            start = int(begins[low])
            high = max(low + 1, int(np.searchsorted(begins, start + most)))
            ids = stream.read(start, int(ends[high - 1]))
            yield DocumentBlock(ids, np.diff(ends[low:high], prepend=start))
            low = high


def _cut(stream: TokenSequence, split: str) -> Iterator[ForeignPart]:
    for shard in stream.shards:
        width = DTYPES[shard.dtype].itemsize
        step = IMPORT_PART_BYTES // width
        for index, start in enumerate(range(0, shard.tokens, step)):
            end = min(shard.tokens, start + step)
            yield ForeignPart(
                path=shard.name,
                index=index,
                start=start,
                end=end,
                split=split,
                bytes=(end - start) * width,
            )


def eos_borders(shard: RawShard, options: ImportOptions, *, in_front: bool) -> EndBorders:
    """Where the documents of one file end; those that go on in the next are cut there."""
    if options.eos_id is None:
        raise _no_eos()
    stream = TokenSequence([shard])
    begins = stream.begins(0, stream.tokens, eos_id=options.eos_id, lead=0 if in_front else 1)
    return EndBorders(np.append(begins[1:], stream.tokens) if len(begins) else begins)


def _no_eos() -> UsageError:
    return UsageError(
        "documents are to end at the end-of-text id, and no tokenizer names one",
        hint="name the tokenizer, and its end-of-text with --eos TOKEN",
    )
