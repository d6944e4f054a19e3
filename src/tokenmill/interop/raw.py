"""Formats whose token files are raw ids: megatron, datatrove, olmo, nanogpt, llm.c.

A token file is a header (mostly of 0 bytes) and ids back to back, so it can be mapped as it is: for
an import, and for reading in place. Where documents end is said by a sidecar, by an end-of-text id,
or by nobody.

    RawFormat.shards(path)      -> RawShard: file, header, dtype, split
    RawFormat.ends(shard)       -> where each of its documents ends, counted in tokens
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop import base
from tokenmill.interop.records import blocks_of, document_blocks
from tokenmill.store.format import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.interop.export import Export, PartFiles
    from tokenmill.store.facts import ShardEntry
    from tokenmill.store.reader import Store
    from tokenmill.store.stream import Track

# Of a document: files without boundaries are cut here, since an index has 31 bits for a length.
MOST_TOKENS = 1 << 30
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}
NO_BOUNDARIES = (
    "the format does not say where documents end: each file is one document (cut every"
    f" {MOST_TOKENS:,} tokens); to cut at the end-of-text id use --split-at-eos"
)
SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class RawShard:
    """A token file as its format describes it."""

    name: str  # relative to what was opened, with / between: its identity
    path: Path
    dtype: str
    tokens: int
    split: str
    offset: int = 0  # bytes of header before the tokens
    index: Path | None = None  # the file that says where documents end
    mask: Path | None = None  # the file with the loss mask, a byte for each token

    @property
    def width(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def size(self) -> int:
        """Bytes of the whole token file."""
        return self.offset + self.tokens * self.width

    def part(self, index: int, start: int, end: int, *, tokens: int) -> base.ForeignPart:
        """A range of it, as its format counts."""
        return base.ForeignPart(
            path=self.name,
            file=self.path,
            beside=tuple(path for path in (self.index, self.mask) if path is not None),
            index=index,
            start=start,
            end=end,
            split=self.split,
            bytes=tokens * self.width,
        )

    def map_tokens(self) -> NDArray[np.integer[Any]]:
        """The ids, mapped."""
        data = map_file(self.path)
        if len(data) != self.size:
            raise base.damaged(
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
            raise base.damaged(self.mask, f"has {len(mask):,} bytes for {self.tokens:,} tokens")
        return mask


class RawFormat(base.Format):
    """A format whose token files are raw ids."""

    suffix: str  # of the token files
    # Where the end-of-text id is, for formats that do not say where documents end.
    eos_in_front: bool | None = None

    # Export: a token file for each shard, and files beside it.

    def names(self, store: Store, split: str, number: int) -> tuple[str, ...]:
        """The token file of a shard, and the files beside it."""
        raise NotImplementedError  # of formats that plan otherwise

    def plan(self, export: Export) -> list[base.ExportTask]:
        return [
            token_task(store, split, self.names(store, split, number), number, number + 1)
            for split, store in export.stores.items()
            for number in range(len(store.shards))
        ]

    def write(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        put_tokens(export, part, out)
        self.write_beside(export, part, out)

    def write_beside(self, export: Export, part: base.ExportTask, out: PartFiles) -> None:
        """Make the files beside the token file of a part."""

    # Import, and reading in place.

    def token_files(self, path: Path) -> list[tuple[str, Path]]:
        """The token files that a path is, each with its name."""
        found = base.find_files(path, self.suffix)
        if not found and self.eos_in_front is not None and path.is_file():
            return [(path.name, path)]
        return found

    @abstractmethod
    def shard(self, name: str, path: Path, options: base.ImportOptions) -> RawShard:
        """What a token file and those beside it say, sizes checked; SourceError otherwise."""

    def shards(self, path: Path, options: base.ImportOptions) -> list[RawShard]:
        """The token files that a path is, in order."""
        found = self.token_files(path)
        if not found:
            raise SourceError(
                f"there is nothing of the kind {self.about.title} at {str(path)!r}",
                hint="check the path, or name another format with --from",
            )
        return [self.shard(name, file, options) for name, file in found]

    def ends(self, shard: RawShard, options: base.ImportOptions) -> NDArray[np.int64]:
        """Where each document of a shard ends, checked; the array may be a mapped file."""
        if not options.split_at_eos:
            found = np.arange(MOST_TOKENS, shard.tokens, MOST_TOKENS, dtype=np.int64)
            return np.append(found, shard.tokens) if shard.tokens else found
        # Documents that go on in the next file are cut here.
        stream = TokenSequence([shard], options, in_front=self.eos_in_front is True)
        begins = stream.begins(0, stream.tokens)
        return np.append(begins[1:], stream.tokens) if len(begins) else begins

    def count_documents(self, shard: RawShard, options: base.ImportOptions) -> int:
        """Documents of a shard; formats that know it without reading all ends say so."""
        return len(self.ends(shard, options))

    def open(self, path: Path, options: base.ImportOptions) -> base.Foreign:
        shards = self.shards(path, options)
        if self.eos_in_front is not None and options.split_at_eos:
            return _open_streams(shards, options, in_front=self.eos_in_front)
        by_name = {shard.name: shard for shard in shards}
        # Those of the shard that was read last are kept: parts of one file come together.
        ends_of = lru_cache(1)(lambda name: self.ends(by_name[name], options))

        def blocks(part: base.ForeignPart) -> base.Blocks:
            """The documents of a part: views of the mapped file."""
            shard, ends = by_name[part.path], ends_of(part.path)[part.start : part.end]
            first = int(ends_of(part.path)[part.start - 1]) if part.start else 0
            begins = np.append(first, ends[:-1]) if len(ends) else ends
            tokens, mask = shard.map_tokens(), shard.map_mask()
            for low, high in blocks_of(begins, base.BLOCK_BYTES // shard.width):
                here = slice(int(begins[low]), int(ends[high - 1]))
                lengths = np.asarray(ends[low:high] - begins[low:high], np.int64)
                yield base.DocumentBlock(
                    tokens[here], lengths, None if mask is None else mask[here]
                )

        return base.Foreign(
            parts=tuple(part for shard in shards for part in _cut(shard, ends_of(shard.name))),
            blocks=blocks,
            has_boundaries=self.eos_in_front is None,
            has_mask=any(shard.mask is not None for shard in shards),
            note=None if self.eos_in_front is None else NO_BOUNDARIES,
        )


def _cut(shard: RawShard, ends: NDArray[np.int64]) -> Iterator[base.ForeignPart]:
    """Parts of a file, each of whole documents and about the same size."""
    first = begin = number = 0
    while first < len(ends) or number == 0:
        target = begin + base.IMPORT_PART_BYTES // shard.width
        last = min(max(int(np.searchsorted(ends, target)), first) + 1, len(ends))
        end = int(ends[last - 1]) if last else 0
        yield shard.part(number, first, last, tokens=end - begin)
        first, begin, number = last, end, number + 1


def raw_shard(
    name: str, path: Path, options: base.ImportOptions, *, dtype: str | None = None, **more: Any
) -> RawShard:
    """A token file without a header; SourceError where its size does not fit its type."""
    kind = dtype or options.dtype or "uint16"
    if kind not in DTYPES:
        raise UsageError(
            f"dtype={kind!r} is not a type of ids", hint=f"use one of: {', '.join(DTYPES)}"
        )
    size, width = base.file_size(path), DTYPES[kind].itemsize
    if size % width:
        raise base.damaged(
            path,
            f"has {size:,} bytes of tokens, which is not a multiple of the {width} of a"
            f" {kind}: it was cut off, or its ids have another type",
            hint="say which type its ids have with --dtype, or get the file again",
        )
    split = base.split_of(name, options)
    return RawShard(name=name, path=path, dtype=kind, tokens=size // width, split=split, **more)


def check_ends(ends: NDArray[np.int64], *, tokens: int, path: Path) -> None:
    """Raise SourceError unless ends never fall and the last is the number of tokens."""
    for first in range(0, len(ends), 1 << 20):
        block = ends[first : first + (1 << 20) + 1]
        if block[0] < 0 or np.any(block[1:] < block[:-1]):
            raise base.damaged(path, f"has a document after {first:,} that ends before it begins")
    last = int(ends[-1]) if len(ends) else 0
    if last == tokens:
        return
    hint = None  # twice or half as many tokens: most likely the width is another
    if last and tokens == 2 * last:
        hint = "its ids have 4 bytes, most likely: --dtype uint32"
    elif last == 2 * tokens:
        hint = "its ids have 2 bytes, most likely: --dtype uint16"
    raise base.damaged(
        path,
        f"says that documents end at token {last:,}, and the token file has {tokens:,}: one of"
        " the two was cut off or is of another file, or its ids have another type",
        hint=hint,
    )


# -------------------------------------------------------------------------------------------------
# How the token file of a raw format gets its bytes: linked, copied, or streamed.
#
# A shard's ids are the same bytes in the store and in the formats; a store at a URL, or one whose
# files have a header, is streamed through its map.


def token_task(
    store: Store, split: str, files: Sequence[str], first: int, last: int
) -> base.ExportTask:
    """The part that makes a file of the ids of some shards, and the files beside it."""
    tokens = sum(shard.tokens for shard in store.shards[first:last])
    sizes = {files[0]: tokens * store.dtype.itemsize}
    return base.ExportTask(split, tokens, tuple(files), first, last, sizes)


def put_tokens(export: Export, part: base.ExportTask, out: PartFiles) -> None:
    """Make the token file of a part, which is its first."""
    _put(export, part, part.files[0], "bin", out)


def put_mask(export: Export, part: base.ExportTask, out: PartFiles) -> None:
    """Make the file with the loss mask of a part, which is its last where the store has masks."""
    if export.stores[part.split].has_mask:
        _put(export, part, part.files[-1], "mask", out)


def _put(export: Export, part: base.ExportTask, name: str, track: Track, out: PartFiles) -> None:
    store = export.stores[part.split]
    sources = {number: _local_file(store, number, track) for number in range(part.first, part.last)}
    source = sources[part.first] if len(sources) == 1 else None
    if source is not None:
        out.link_or_copy(name, source, checksum=_checksum(store, part.first, track))
        return
    if export.options.link == "always":
        raise UsageError(
            f"the tokens of {str(store.path)!r} are not in a local file of their own, which a link"
            " needs",
            hint="leave --link out",
        )
    file = out.create(name)
    for number, source in sources.items():
        if source is not None:
            file.append_file(source, checksum=_checksum(store, number, track))
            continue
        for block in shard_blocks(store, number):
            file.write(np.ascontiguousarray(block.ids if track == "bin" else block.mask).data)


def shard_blocks(store: Store, number: int) -> base.Blocks:
    """The documents of a shard."""
    shard = store.shards[number]
    return document_blocks(store, shard.first_document, shard.first_document + shard.documents)


def document_ends(
    store: Store, number: int, step: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Where documents of a shard begin and end, counted in tokens, so many at a time."""
    index = store.map_shard(number).index
    for first in range(0, len(index.lengths), step):
        begins = index.offsets[first : first + step] // index.dtype.itemsize
        yield begins, begins + index.lengths[first : first + step]


def _local_file(store: Store, number: int, track: Track) -> Path | None:
    """The file that holds the ids, or the mask, of a shard and nothing else, where there is one."""
    if store.is_remote or store.view is not None:
        return None
    shard, width = store.shards[number], store.track_dtype(track).itemsize
    file = store.files.track_file(shard.name, track, size=shard.tokens * width)
    return file.path if file.offset == 0 else None


def _checksum(store: Store, number: int, track: Track) -> str | None:
    """What the store says about the bytes of a shard; None where it is not its own."""
    if "in_place" in store.manifest.identity.config:
        return None
    entry = _entries(store)[number]
    return entry.bin if track == "bin" else entry.mask


@lru_cache(maxsize=4)
def _entries(store: Store) -> list[ShardEntry]:
    return [entry for _, entry in store.manifest.shards(split=store.split)]


# -------------------------------------------------------------------------------------------------
# Files without boundaries, cut at the end-of-text id: one stream of tokens over the files of a
# split.
#
# A document may begin in one file and end in the next, so it belongs to the part in which it
# begins: a part skips what is before its first beginning, and reads on beyond its end until the
# next.


class TokenSequence:
    """Files back to back, mapped when they are touched."""

    def __init__(
        self, shards: Sequence[RawShard], options: base.ImportOptions, *, in_front: bool
    ) -> None:
        if options.eos_id is None:
            raise UsageError(
                "documents are to end at the end-of-text id, and no tokenizer names one",
                hint="name the tokenizer, and its end-of-text with --eos TOKEN",
            )
        self._eos_id = options.eos_id
        self._lead = 0 if in_front else 1
        self.shards = [shard for shard in shards if shard.tokens]
        self.starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        self.tokens = int(self.starts[-1])
        self._map = lru_cache(1)(lambda number: self.shards[number].map_tokens())

    def read(self, first: int, last: int) -> NDArray[np.integer[Any]]:
        """Tokens `first` to `last`: a view where one file has them all."""
        pieces = []
        number = int(np.searchsorted(self.starts, first, side="right")) - 1
        while first < last:
            at, end = int(self.starts[number]), min(last, int(self.starts[number + 1]))
            pieces.append(self._map(number)[first - at : end - at])
            first, number = end, number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.uint16)])

    def begins(self, first: int, last: int) -> NDArray[np.int64]:
        """Where documents begin in a range."""
        found = [np.zeros(int(first == 0 < last), np.int64)]
        first = max(first, 1)
        while first < last:
            end = min(last, first + SCAN_TOKENS)
            window = self.read(first - self._lead, end - self._lead)
            found.append(np.flatnonzero(window == self._eos_id) + first)
            first = end
        return np.concatenate(found)

    def next_begin(self, position: int) -> int:
        """The first beginning at or after a position, or the end."""
        while position < self.tokens:
            end = min(self.tokens, position + SCAN_TOKENS)
            found = self.begins(position, end)
            if len(found):
                return int(found[0])
            position = end
        return self.tokens

    def blocks(self, part: base.ForeignPart) -> base.Blocks:
        """The documents that begin in a part."""
        number = [shard.name for shard in self.shards].index(part.path)
        at, last = int(self.starts[number]), part.end
        assert last is not None
        begins = self.begins(at + part.start, at + last)
        if not len(begins):
            return
        ends = np.append(begins[1:], self.next_begin(at + last))
        for low, high in blocks_of(begins, base.BLOCK_BYTES // self.shards[0].width):
            ids = self.read(int(begins[low]), int(ends[high - 1]))
            yield base.DocumentBlock(ids, ends[low:high] - begins[low:high])

    def parts(self) -> Iterator[base.ForeignPart]:
        for shard in self.shards:
            step = base.IMPORT_PART_BYTES // shard.width
            for index, start in enumerate(range(0, shard.tokens, step)):
                end = min(shard.tokens, start + step)
                yield shard.part(index, start, end, tokens=end - start)


def _open_streams(
    shards: Sequence[RawShard], options: base.ImportOptions, *, in_front: bool
) -> base.Foreign:
    """Raw token files, cut at the end-of-text id wherever it is."""
    streams = {
        split: TokenSequence(
            [shard for shard in shards if shard.split == split], options, in_front=in_front
        )
        for split in sorted({shard.split for shard in shards})
    }
    place = "in front of" if in_front else "after"
    return base.Foreign(
        parts=tuple(part for stream in streams.values() for part in stream.parts()),
        blocks=lambda part: streams[part.split].blocks(part),
        has_boundaries=False,
        note=f"documents were cut at the id {options.eos_id} {place} each",
    )
