"""Opens a store: documents by number, as views of the mapped files.

Opening reads the manifest and lists the folders; a shard is mapped when it is first touched. A
Python map keeps a file descriptor open before 3.13, so at most so many shards stay mapped as the
process's limit allows; views that were handed out stay valid when their shard is unmapped.

A store at a URL is read by ranges instead; `StoreFiles` knows the difference.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import resource
import shlex
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex, cast, overload

import numpy as np

from tokenmill.errors import StoreError, UsageError, abridged
from tokenmill.files import PathInput, local_path
from tokenmill.markup import Shown
from tokenmill.records import lazy
from tokenmill.store.facts import (
    UNCOUNTED,
    Count,
    Fact,
    Receipt,
    content_fingerprint,
    describe_forgotten,
    read_fact,
    read_forgotten,
    read_manifest,
    read_receipt,
    unlisted_rejects,
)
from tokenmill.store.format import (
    MASK_DTYPE,
    counted_by_document,
    map_file,
    map_of,
    place_of,
    read_index,
    row_lengths,
    row_starts,
    view_values,
)
from tokenmill.store.layout import StoreLayout, is_inside, shard_name
from tokenmill.store.snapshots import list_snapshots, open_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from pandas import DataFrame

    from tokenmill.engines.base import Engine
    from tokenmill.store.documents import Head
    from tokenmill.store.facts import Manifest, ShardEntry, ShardFacts
    from tokenmill.store.format import FileMap, Index, Ints, MaskDtype, TokenArray, TokenDtype
    from tokenmill.store.remote import RemoteFiles
    from tokenmill.store.snapshots import Moved, Snapshot, SnapshotName
    from tokenmill.store.stream import Track
    from tokenmill.store.views import ViewFiles


# -------------------------------------------------------------------------------------------------
# Whether every file that a manifest names is there, inside the folder, with its size.
#
# This is what opening a store checks: one listing per folder, no file is read. A file that was cut
# off, lost in a copy, or replaced by a link to somewhere else is found here, by name. Of a store
# of many thousand shards the names alone are looked at, since asking for 30,000 sizes takes a
# tenth of a second and more; sizes are compared again anyway whenever a shard is mapped.

MANY_UNITS = 4096
NOT_MOVED: Moved = {}
_ANY = -1  # size of a file that was not asked for its size


def require_files(layout: StoreLayout, manifest: Manifest, moved: Moved = NOT_MOVED) -> None:
    """Raise StoreError, which names the first file, unless every file is there with its size."""
    few = len(manifest.units) <= MANY_UNITS
    problems = list(find_problems(layout, manifest, moved, sizes=few))
    if problems:
        raise incomplete(*problems[0], others=len(problems) - 1)


def incomplete(path: Path | str, problem: str, *, others: int) -> StoreError:
    """The error for a store of which a file is not as the manifest says."""
    more = f" (and {others} more files)" if others else ""
    return StoreError(
        f"{str(path)!r} {problem}{more}; the store is incomplete",
        hint="copy the store again with all its files, or run its build again: it repairs it",
    )


def find_problems(
    layout: StoreLayout, manifest: Manifest, moved: Moved = NOT_MOVED, *, sizes: bool = True
) -> Iterator[tuple[Path, str]]:
    """Files that are missing, of another size if `sizes`, or links that leave the store."""
    for name_of_folder, expected in expected_sizes(manifest, moved).items():
        folder = layout.root / name_of_folder
        if expected and not is_inside(str(folder), root=layout.root):
            yield folder, "is a link that leaves the store"
        elif expected:
            files = _sizes(folder, root=layout.root, ask=sizes)
            for name, size in expected.items():
                found = files.get(name)
                if found not in (size, _ANY):
                    yield folder / name, size_problem(found, size)


def expected_sizes(manifest: Manifest, moved: Moved = NOT_MOVED) -> dict[str, dict[str, int]]:
    """Folder, relative to the store -> name -> bytes of every file that the manifest claims.

    `moved` are the units of a snapshot that are in `retired/`.
    """
    dtype = manifest.identity.dtype
    shards: dict[str, int] = {}
    rejects: dict[str, int] = {}
    retired: dict[str, int] = {}
    for unit in manifest.units:
        prefix = moved.get(unit.name, "")
        own, lines = (retired, retired) if prefix else (shards, rejects)
        own[f"{prefix}{unit.name}.json"] = unit.receipt_bytes
        if unit.rejects is not None:
            lines[f"{prefix}{unit.name}.jsonl"] = unit.rejects.bytes
        for shard in unit.shards:
            name = prefix + shard_name(unit.name, split=shard.split)
            own[f"{name}.bin"] = shard.bin_bytes(dtype)
            own[f"{name}.idx"] = shard.idx_bytes
            if shard.mask is not None:
                own[f"{name}.mask"] = shard.tokens
    tokenizer = {name: facts.bytes for name, facts in manifest.identity.tokenizer.files.items()}
    found = {"shards": shards, "rejects": rejects, "tokenizer": tokenizer}
    return found | {"retired": retired} if retired else found


def _sizes(folder: Path, *, root: Path, ask: bool) -> dict[str, int | str]:
    """Name -> bytes, or what is wrong with the file; plain files are not asked unless `ask`."""
    found: dict[str, int | str] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:  # of a missing folder, every file in it is reported as missing
            # Plain files first: a large store has 100,000 of them.
            if entry.is_file(follow_symlinks=False):
                found[entry.name] = entry.stat(follow_symlinks=False).st_size if ask else _ANY
            elif entry.is_symlink() and not is_inside(entry.path, root=root):
                found[entry.name] = "is a link that leaves the store"
            else:
                try:
                    is_file = entry.is_file()
                    found[entry.name] = entry.stat().st_size if is_file else "is not a file"
                except OSError as error:
                    found[entry.name] = f"cannot be read: {error.strerror or error}"
    return found


def size_problem(found: int | str | None, size: int) -> str:
    """What is wrong with a file that has not this size; text is what is wrong already."""
    if found is None:
        return "is missing"
    return found if isinstance(found, str) else f"has {found:,} bytes instead of {size:,}"


class TrackFile(NamedTuple):
    """Where the tokens of a shard, or its mask, are on a local disk."""

    path: Path
    offset: int  # byte of its first value: 0 in a store's own files
    size: int  # bytes that the whole file must have


class StoreFiles:
    """The files of an open store: here in a local folder, mapped.

    Those of a store at a URL are `remote.RemoteFiles`, other projects' files are those of
    `interop.in_place`. Pickled, it opens the same files again.
    """

    is_remote = False
    path: Path | str  # the folder, or the URL as it may be shown
    # The manifest that was read, and what the system said of the store's before that.
    _opened: tuple[Manifest, object] | None = None

    def __init__(self, path: Path, *, snapshot: SnapshotName | None = None) -> None:
        self.path = path
        self.snapshot = snapshot
        self._moved: Moved = NOT_MOVED  # units and shards of a snapshot

    def __getstate__(self) -> Any:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    @property
    def layout(self) -> StoreLayout:
        """The paths of a local store; StoreError for another."""
        assert not isinstance(self.path, str)
        return StoreLayout(self.path)

    @property
    def plan_folder(self) -> Path | None:
        """The folder beside whose shards plans of rows may be kept; None where there is none."""
        return self.path if isinstance(self.path, os.PathLike) else None

    def read_manifest(self) -> Manifest:
        """Read the manifest, and see that the files it names are there."""
        seen = self._look()
        if self.snapshot is None:
            manifest = read_manifest(self.layout.root)
        else:
            manifest, self._moved = open_snapshot(self.layout, self.snapshot)
        require_files(self.layout, manifest, self._moved)
        self._opened = manifest, seen
        return manifest

    def _look(self) -> object:
        try:
            found = self.layout.manifest.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    @contextlib.contextmanager
    def as_opened(self, shard: Shard) -> Iterator[None]:
        """Open files of a shard inside: StoreError if they are no more those that it had.

        A build removes the manifest and a receipt before it replaces what they tell of.
        """
        try:
            yield
        finally:
            if self._opened is not None and self._look() != self._opened[1]:
                self._require_same(shard, self._opened[0])

    def _require_same(self, shard: Shard, manifest: Manifest) -> None:
        unit = next(unit for unit in manifest.units if unit.name == shard.unit)
        entry = next(each for each in unit.shards if each.split == shard.split)
        try:
            found = {each.name: each.files for each in self.receipt(shard.unit).shards}
            files = found[shard.name]
            mask = files.mask.checksum if files.mask else None
            if (files.bin.checksum, files.idx.checksum, mask) == (entry.bin, entry.idx, entry.mask):
                return
        except (OSError, StoreError, KeyError):
            pass  # of a unit that is being built anew
        known = read_forgotten(self.layout)
        if known is not None and len(known.steps) > len(manifest.forgotten):
            raise StoreError(
                f"documents of {str(self.path)!r} were forgotten since it was opened: this process"
                " would go on with a part of what it was",
                hint="open it again: Store(path)",
            )
        raise StoreError(
            f"{str(self.path)!r} was built anew since it was opened: '{shard.name}.bin' has other"
            " documents than the ones that were to be read, or none yet",
            hint="open it again, after the build has ended",
        )

    def take_manifest(self, manifest: Manifest) -> None:
        """Read the files of a manifest that is known: of a store that has none yet."""

    def snapshots(self) -> list[Snapshot]:
        """What the store was before it grew, oldest first."""
        return list_snapshots(self.layout)

    def at_snapshot(self, asked: SnapshotName) -> StoreFiles:
        """The same store as it was."""
        return StoreFiles(self.layout.root, snapshot=asked)

    def _shard_file(self, shard: str, kind: str) -> Path:
        if (prefix := self._moved.get(shard)) is not None:
            return self.layout.retired / f"{prefix}{shard}.{kind}"
        return self.layout.shard_file(shard, kind)

    def index(self, shard: str) -> Index:
        return read_index(self._shard_file(shard, "idx"))

    def prepare_indexes(self, shards: Sequence[str]) -> None:
        """Download indexes that will be asked for, all at once; nothing where they are mapped."""

    def tokens(self, shard: str, *, dtype: TokenDtype) -> TokenArray:
        """The ids of a shard; where they cannot be mapped, they are read when it is sliced."""
        return view_values(map_file(self._shard_file(shard, "bin")), dtype=dtype)

    def mask(self, shard: str) -> NDArray[np.uint8]:
        """Which tokens of a shard count; a remote one is read when it is sliced."""
        return view_values(map_file(self._shard_file(shard, "mask")), dtype=MASK_DTYPE)

    def track_file(self, shard: str, track: Track, *, size: int) -> TrackFile:
        """Where the values of a local shard, `size` bytes, are; StoreError for a remote one."""
        return TrackFile(self._shard_file(shard, track), 0, size)

    def track_offset(self, shard: str, track: Track) -> int:  # noqa: ARG002
        """Byte of the first value in a local file, without looking at it: asked of all shards."""
        return 0

    def receipt(self, unit: str) -> Receipt:
        if unit in self._moved:
            path = self._shard_file(unit, "json")
            return Receipt.from_bytes(path.read_bytes(), path=path)
        return read_receipt(self.layout, unit)

    def rejects(self, unit: str) -> Iterator[bytes]:
        """The lines of a unit's rejects."""
        path = self.layout.rejects_file(unit)
        with (self._shard_file(unit, "jsonl") if unit in self._moved else path).open("rb") as lines:
            yield from lines

    def tokenizer(self) -> Path:
        """A folder with the tokenizer's files."""
        return self.layout.tokenizer

    def close(self) -> None:
        """Give back what reading took; maps go with their last view."""


def open_files(
    path: PathInput,
    *,
    cache: PathInput | None,
    cache_bytes: int | None,
    snapshot: SnapshotName | None = None,
) -> StoreFiles:
    """The files of the store or view at a path or URL; a local one needs no cache."""
    root = local_path(path)
    if root is not None and root.is_file():
        from tokenmill.store.views import open_view

        if snapshot is not None:
            raise UsageError(
                f"snapshot={snapshot!r} says nothing of the view {str(root)!r}: it is of what its"
                " store held when the view was made",
                hint="leave it out",
            )
        return open_view(root.absolute(), cache=cache, cache_bytes=cache_bytes)
    if root is not None:
        return StoreFiles(root.absolute(), snapshot=snapshot)
    # Imported here: a local store needs none of it.
    from tokenmill.store.remote import RemoteFiles

    return RemoteFiles(os.fspath(path), cache=cache, cache_bytes=cache_bytes, snapshot=snapshot)


# Two or three maps each; Linux allows a process 65,530 maps unless told otherwise.
MAX_MAPPED_SHARDS = 8192
CACHED_RECEIPTS = 64
# Documents are iterated over in runs of about this size: remote ones come a run at a time.
RUN_BYTES = 8 << 20
PREPARED_SHARDS = 64


class Shard(NamedTuple):
    """A shard of an open store."""

    name: str
    unit: str
    split: str
    documents: int
    tokens: int
    first_document: int  # number of its first document in the store, as it was opened
    first_token: int  # tokens of the shards before it


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedShard:
    """The contents of a shard, as read-only views."""

    # Of a remote store: an array as far as its length and slices go, which are read then.
    tokens: TokenArray
    index: Index
    # 1 for each token that counts for the loss, else 0; None where the store has no masks.
    mask: NDArray[np.uint8] | None = None
    maps: tuple[FileMap, ...] = ()  # of the files that are mapped

    def require_whole(self) -> None:
        """StoreError if one of its files was cut off since it was mapped."""
        for each in self.maps:
            each.require_whole()

    def track(self, track: Track) -> NDArray[Any]:
        """The values of a file that has one for every token."""
        if track == "bin":
            return self.tokens
        assert self.mask is not None
        return self.mask

    def document_mask(self, number: int) -> NDArray[np.uint8] | None:
        """Which tokens of one document count; None where the store has no masks."""
        return None if self.mask is None else self.mask[self._place(number)]

    def document(self, number: int) -> TokenArray:
        """The tokens of one document."""
        return self.tokens[self._place(number)]

    def _place(self, number: int) -> slice:
        first = int(self.index.offsets[number]) // self.index.dtype.itemsize
        return slice(first, first + int(self.index.lengths[number]))

    def documents(self) -> Iterator[TokenArray]:
        """The tokens of every document, in order."""
        size, offsets, lengths = self.index.dtype.itemsize, self.index.offsets, self.index.lengths
        for first, last, begin, end in self._runs():
            run = self.tokens[begin:end]
            for number in range(first, last):
                start = int(offsets[number]) // size - begin
                yield run[start : start + int(lengths[number])]

    def mask_runs(self) -> Iterator[tuple[NDArray[np.uint8], Ints]]:
        """The masks of some documents back to back, and their lengths; until all were there."""
        assert self.mask is not None
        for first, last, begin, end in self._runs():
            yield self.mask[begin:end], self.index.lengths[first:last].astype(np.int64)

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Documents some at a time: the first, the one after the last, and so of their tokens."""
        size, offsets, lengths = self.index.dtype.itemsize, self.index.offsets, self.index.lengths
        first = 0
        while first < len(offsets):
            self.require_whole()
            base = int(offsets[first])
            last = max(first + 1, bisect_left(offsets, base + RUN_BYTES, first))
            end = int(offsets[last - 1]) + int(lengths[last - 1]) * size
            yield first, last, base // size, end // size
            first = last


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """Where a document comes from.

    `unit` is the position of its unit in the file, `row` that of its row in the file, counted from
    0. `line` is counted from 1, and None where blank lines hide it. A row that was too long for one
    document became several `pieces`, and this is the one of that number.
    """

    path: str
    unit: int
    row_in_unit: int
    row: int
    line: int | None
    piece: int = 0
    pieces: int = 1


class RejectedRow(Fact, frozen=True, kw_only=True):
    """A row that is not in the store, and why."""

    unit: str
    file: str
    row: Count
    offset: Count | None
    reason: str
    detail: str


class Pair(NamedTuple):
    """A prompt with two answers, as ids."""

    prompt_ids: TokenArray
    chosen_ids: TokenArray
    rejected_ids: TokenArray


class Store(Shown):
    """The documents of one split of a store, or of all (`split=None`), with their text.

    >>> store = tokenmill.Store("store")
    >>> store[0], store.decode(0), store.source(0)
    >>> tokenmill.Store("s3://bucket/store", cache="/local/cache", cache_bytes=200 * 10**9)

    The path may be a URL (`s3://`, `gs://`, `hf://`, `https://`). What is read is then kept in
    memory, and with `cache` in that folder too, up to `cache_bytes` (10 GB unless given). A store
    on a local disk needs neither. The path may also be that of a view (`tokenmill select`). A store
    that grew can be opened as it was: `snapshot` is a number, or the first digits of a fingerprint,
    as `tokenmill inspect` lists them.

    `path` is the folder, or the URL without anything secret in it. `eos_id` and `bos_id` end and
    begin every document, where the build put them. With `has_mask` every document has a mask, which
    says which of its tokens count for the loss.

    Promised to stay: `len`, `[k]`, `[a:b]`, iteration, `head`, `to_pandas`, `decode`, `mask`,
    `source`, `lengths`, `rejects`, `reject_counts`, `close`, `path`, `split`, `num_documents`,
    `num_tokens`, `num_counted`, `num_silent`, `has_mask`, `dtype`, `vocab_size`, `eos_id`,
    `bos_id`, `tokenizer_dir`, `content` and `open_foreign`. The rest is for tokenmill itself.
    """

    @abridged
    def __init__(
        self,
        path: PathInput,
        *,
        split: str | None = "train",
        snapshot: SnapshotName | None = None,
        cache: PathInput | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        files = open_files(path, cache=cache, cache_bytes=cache_bytes, snapshot=snapshot)
        self._open(files, split)

    @classmethod
    @abridged
    def open_foreign(
        cls,
        path: PathInput,
        *,
        format: str | None = None,  # noqa: A002 (its name everywhere)
        tokenizer: PathInput | None = None,
        split: str | None = "train",
        dtype: str | None = None,
        split_at_eos: bool = False,
        eos: str | None = None,
    ) -> Self:
        """Read other projects' token files in place, without importing them.

        For megatron, datatrove, olmo, nanogpt and llmc; a path is a file, a prefix or a folder.
        `tokenizer` is needed for text, and for `split_at_eos`. `dtype` is for files that do not
        say it. Splits go by names: val or test where a file's name says so, else train.

        >>> tokenmill.Store.open_foreign("data/wiki_text_document")
        >>> tokenmill.Loader(tokenmill.Store.open_foreign("fineweb10B/"), seq_len=1024, ...)
        """
        from tokenmill.interop.in_place import open_in_place

        files = open_in_place(
            path,
            format_name=format,
            tokenizer=tokenizer,
            dtype=dtype,
            split_at_eos=split_at_eos,
            eos=eos,
        )
        return cls.of_files(files, split=split)

    @classmethod
    def of_files(
        cls, files: StoreFiles, *, split: str | None, manifest: Manifest | None = None
    ) -> Self:
        """A store whose files are not a folder that a build made, or open already."""
        store = cls.__new__(cls)
        store._open(files, split, manifest=manifest)
        return store

    def of_split(self, split: str | None) -> Self:
        """The same files for another split; the manifest, which may be large, is not read again."""
        return self.of_files(self.files, split=split, manifest=self.manifest)

    def snapshots(self) -> list[Snapshot]:
        """What the store was before it grew, oldest first."""
        return self.files.snapshots()

    def as_it_was(self, content: str) -> Self | None:
        """The same split of the snapshot in which it held this `content`; None where none did."""
        for snapshot in reversed(self.snapshots()):
            with contextlib.suppress(StoreError):
                found = self.of_files(self.files.at_snapshot(snapshot.name), split=self.split)
                if found.content == content:
                    return found
        return None

    def forgotten_since(self, content: str) -> str | None:
        """What was forgotten since this held `content`, in words; None where it never did."""
        return describe_forgotten(self.manifest, [content])

    def number_of(self, document: int, of: Store) -> int | None:
        """The number here of a document of another state of this store; None where it is not."""
        if of.content == self.content:
            return document
        position, local = of.locate(document)
        name, entry = of.shards[position].name, next(islice(of.entries(), position, None))
        for mine, own in zip(self.shards, self.entries(), strict=True):
            if (mine.name, own) == (name, entry):
                return mine.first_document + local
        # Its unit was cut in another place.
        source = of.source(document)
        found = [
            number
            for place, each in enumerate(self.shards)
            if source.path in (members := self._members(each.unit))
            for number in self.documents_of_row(place, members.index(source.path), source.row)
        ]
        return found[source.piece] if found else None

    def entries(self) -> Iterator[ShardEntry]:
        """What the manifest says of each of the shards."""
        return (entry for _, entry in self.manifest.shards(split=self.split))

    def _members(self, unit: str) -> tuple[str, ...]:
        """The files that a unit was read from."""
        found = self.receipt(unit).unit
        return found.members or (found.path,)

    def documents_of_row(self, shard: int, member: int, row: int) -> Iterator[int]:
        """The documents of a shard that a row of a file became, found by bisection.

        The file is the one of this place among those of the shard's unit.
        """
        members = self._members(self.shards[shard].unit)

        def place(document: int) -> tuple[int, int]:
            source = self.source(document)
            return members.index(source.path), source.row

        first = self.shards[shard].first_document
        numbers = range(first, first + self.shards[shard].documents)
        at = bisect_left(numbers, (member, row), key=place)
        while at < len(numbers) and place(numbers[at]) == (member, row):
            yield numbers[at]
            at += 1

    def _open(
        self, files: StoreFiles, split: str | None, *, manifest: Manifest | None = None
    ) -> None:
        self.files = files
        self.split = split
        self.manifest: Manifest = manifest or files.read_manifest()
        self.shards: tuple[Shard, ...] = tuple(self._list_shards())
        self._starts = [shard.first_document for shard in self.shards]
        identity = self.manifest.identity
        self.path = files.path  # of a remote store the URL, without anything secret in it
        self.dtype: TokenDtype = identity.dtype
        self.has_mask = identity.mask  # says of every token whether it counts for the loss
        self.vocab_size = identity.tokenizer.vocab_size
        # Ids that end and begin every document, where the build put them.
        self.eos_id, self.bos_id = identity.eos_id, identity.bos_id
        self.num_documents = sum(shard.documents for shard in self.shards)
        self.num_tokens = sum(shard.tokens for shard in self.shards)
        self.is_remote = files.is_remote
        # Which documents of another store these are; None where they are all of this one.
        self.view = cast("ViewFiles", files) if hasattr(files, "base_files") else None
        # A folder for plans of rows, for who must leave the store and the user's cache as they are.
        self.keep_plans: Path | None = None
        # Reads pieces of many shards at once, where they are not mapped.
        is_alone = files.is_remote and self.view is None
        self.remote = cast("RemoteFiles", files) if is_alone else None
        # Shards that may stay mapped; none of a remote store, whose files bound their memory.
        mapped = max_mapped_shards(files=3 if self.has_mask else 2)
        self.max_mapped = 0 if self.is_remote else mapped
        if self.view is not None:
            self.max_mapped = self.view.most_indexes
        # Caches of this store, not of the class, and without a reference to it: they go with it.
        self._map = functools.lru_cache(self.max_mapped)(
            functools.partial(_map_shard, files, self.shards, self.dtype, self.has_mask)
        )
        self.receipt = functools.lru_cache(CACHED_RECEIPTS)(files.receipt)

    def _list_shards(self) -> Iterator[Shard]:
        splits = self.manifest.splits
        if self.split is not None and splits and self.split not in splits:
            raise StoreError(
                f"{str(self.files.path)!r} has no split {self.split!r}",
                hint=f"open one it has: {', '.join(map(repr, splits))}, or split=None for all",
            )
        first = token = 0
        for unit, entry in self.manifest.shards(split=self.split):
            yield Shard(
                name=shard_name(unit.name, split=entry.split),
                unit=unit.name,
                split=entry.split,
                documents=entry.documents,
                tokens=entry.tokens,
                first_document=first,
                first_token=token,
            )
            first, token = first + entry.documents, token + entry.tokens

    @property
    def layout(self) -> StoreLayout:
        """The paths of a local store; StoreError for a remote one."""
        return self.files.layout

    @property
    def num_counted(self) -> int:
        """Tokens of this split that count for the loss: all of them where there is no mask."""
        return self._mask_counts[0] if self.has_mask else self.num_tokens

    @property
    def num_silent(self) -> int:
        """Documents of this split of which no token counts, by their masks."""
        return self._mask_counts[1] if self.has_mask else 0

    @lazy
    def _mask_counts(self) -> tuple[int, int]:
        """Tokens that count, and documents of which none does; read where no build counted them."""
        counted = silent = 0
        for position, (_, entry) in enumerate(self.manifest.shards(split=self.split)):
            if entry.counted != UNCOUNTED:
                counted, silent = counted + entry.counted, silent + entry.silent
                continue
            for mask, lengths in self.map_shard(position).mask_runs():
                counts = counted_by_document(mask, lengths)
                counted += int(counts.sum())
                silent += int(np.count_nonzero(counts == 0))
        return counted, silent

    def track_dtype(self, track: Track) -> TokenDtype | MaskDtype:
        """Of the values in a file that has one for every token."""
        return self.dtype if track == "bin" else MASK_DTYPE

    @property
    def tokenizer_dir(self) -> Path:
        """The copy of the tokenizer's files; those of a remote store are downloaded."""
        return self.files.tokenizer()

    @lazy
    def content(self) -> str:
        """Fingerprint of the documents of this split, in their order, and of their masks."""
        return self._content()

    def _content(self) -> str:
        if self.view is not None:
            return self.view.content(self.split)
        return content_fingerprint(self.manifest, split=self.split)

    def content_of(self, shards: int | None) -> str:
        """The same of so many of its first shards; None: of all of them."""
        if shards is None:
            return self.content
        return content_fingerprint(self.manifest, split=self.split, shards=shards)

    def __len__(self) -> int:
        return self.num_documents

    @overload
    def __getitem__(self, number: SupportsIndex) -> TokenArray: ...
    @overload
    def __getitem__(self, number: slice) -> list[TokenArray]: ...
    def __getitem__(self, number: SupportsIndex | slice) -> TokenArray | list[TokenArray]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self.num_documents))]
        shard, local = self.locate(number)
        return self.map_shard(shard).document(local)

    @abridged
    def head(self, documents: int = 5, *, text: bool = True) -> Head:
        """The first documents, each as a dict: its number, text, tokens, source, row, split and
        annotations. A notebook draws them as a table."""
        from tokenmill.store.documents import Head, columns_of

        first = range(min(max(documents, 0), self.num_documents))
        return Head(self, columns_of(self, first, text=text))

    @abridged
    def to_pandas(
        self, documents: Iterable[int] | slice | None = None, *, text: bool = True
    ) -> DataFrame:
        """A pandas.DataFrame of documents, of all unless some are named, by their numbers.

        >>> store.to_pandas(slice(1000))

        Its columns are text, tokens (how many), source, row, split, and every annotation.
        """
        from tokenmill.store.documents import as_frame

        chosen = slice(None) if documents is None else documents
        if isinstance(chosen, slice):
            chosen = range(*chosen.indices(self.num_documents))
        return as_frame(self, list(map(operator.index, chosen)), text=text)

    def __iter__(self) -> Iterator[TokenArray]:
        for shard in range(len(self.shards)):
            yield from self.map_shard(shard).documents()

    def mask(self, number: SupportsIndex) -> NDArray[np.uint8] | None:
        """1 for each token of a document that counts, else 0; None where there are no masks."""
        shard, local = self.locate(number)
        return self.map_shard(shard).document_mask(local)

    @property
    def has_pairs(self) -> bool:
        """Whether documents 2k and 2k + 1 are a pair: with a chosen and with a rejected answer."""
        return self.manifest.identity.has_pairs

    @property
    def num_pairs(self) -> int:
        return self.num_documents // 2 if self.has_pairs else 0

    def pair(self, number: int) -> Pair:
        """A prompt with its chosen and its rejected answer."""
        if not 0 <= number < self.num_pairs:
            raise IndexError(f"there is no pair {number}: {self!r} has {self.num_pairs}")
        chosen, rejected = self[2 * number], self[2 * number + 1]
        mask = self.mask(2 * number)
        assert mask is not None
        size = int(mask.argmax())
        return Pair(chosen[:size], chosen[size:], rejected[size:])

    def refuse_pairs(self, what: str) -> None:
        """Raise for a store of pairs: what takes all documents would learn rejected answers."""
        if self.has_pairs:
            raise UsageError(
                f"{str(self.path)!r} holds pairs of chosen and rejected answers, and {what} would "
                "take both alike: a model would learn what was rejected",
                hint="take them as pairs: tokenmill.PairLoader(store, ...), store.pair(0), or "
                "tokenmill.hf.as_dataset(store, trainer='dpo') for TRL",
            )

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
        """The contents of a shard, by its position in `shards`; none of its files was cut off."""
        mapped = self._map(shard)
        mapped.require_whole()
        return mapped

    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every document: 4 bytes each, in memory."""
        lengths = np.empty(self.num_documents, np.int32)
        for position, shard in enumerate(self.shards):
            if position % PREPARED_SHARDS == 0:
                soon = self.shards[position : position + PREPARED_SHARDS]
                self.files.prepare_indexes([each.name for each in soon])
            last = shard.first_document + shard.documents
            lengths[shard.first_document : last] = self.map_shard(position).index.lengths
        return lengths

    def row_lengths(self, shard: int) -> Ints:
        """Tokens of every row of a shard, by its position: rows in several pieces are joined."""
        lengths = self.map_shard(shard).index.lengths
        has_pieces = self.manifest.totals.pieces > 0
        return row_lengths(lengths, self._facts(self.shards[shard]).pieces if has_pieces else ())

    def largest_id(self) -> int | None:
        """The largest id in any document, by the receipts; None where there are none.

        Of a view: in any of its store.
        """
        if self.view is not None:
            return self.base.largest_id()
        if "in_place" in self.manifest.identity.config:
            return None
        return max((self._facts(shard).max_id for shard in self.shards), default=0)

    def facts_of(self, shard: int) -> tuple[Receipt, ShardFacts]:
        """What the receipt of a shard's unit says, and what it says of the shard."""
        receipt = self.receipt(self.shards[shard].unit)
        return receipt, self._facts(self.shards[shard])

    def _facts(self, shard: Shard) -> ShardFacts:
        receipt = self.receipt(shard.unit)
        for facts in receipt.shards:
            if (facts.name, facts.documents) == (shard.name, shard.documents):
                return facts
        raise StoreError(
            f"the receipt of {shard.unit!r} in {str(self.path)!r} does not know its shard"
            f" {shard.name!r}: it is not the one that the manifest was made from",
            hint=f"see what is damaged with: tokenmill verify {shlex.quote(str(self.path))}",
        )

    def row_starts(self, shard: int) -> Ints | None:
        """The first document of each row of a shard; None where every document is a row."""
        if self.view is not None:
            return self.view.row_starts(self.shards[shard].name)
        if not self.manifest.totals.pieces:
            return None
        facts = self._facts(self.shards[shard])
        return row_starts(facts.documents, facts.pieces) if facts.pieces else None

    def source(self, number: SupportsIndex) -> SourceRow:
        """Where a document comes from."""
        if self.view is not None:
            base, number = self.in_base(number)
            return base.source(number)
        position, local = self.locate(number)
        shard = self.shards[position]
        receipt, facts = self.receipt(shard.unit), self._facts(shard)
        row, piece, pieces = place_of(facts.rows, facts.pieces, document=local)
        path, (rows_before, lines_before) = receipt.unit.path, self.rows_before[shard.unit]
        in_file, in_lines = rows_before + row, lines_before + row
        if receipt.unit.members:
            path, in_file = receipt.file_of(row)
            in_lines = in_file
        has_blank_lines = receipt.source.num_lines != receipt.counts.rows
        return SourceRow(
            path=path,
            unit=receipt.unit.index,
            row_in_unit=row,
            row=in_file,
            line=None if has_blank_lines else in_lines + 1,
            piece=piece,
            pieces=pieces,
        )

    @abridged
    def select(self, where: str, *, out: PathInput | None = None) -> Self:
        """A view of the documents of all splits of which a condition holds, opened as this is.

        >>> code = store.select("source like '%code%' and tokens < 8192")

        It may be used at once; with `out` it is written to a file too, which opens as a store does.
        """
        from tokenmill.selection import select_documents

        return self._viewed(select_documents(self.of_split(None), where)[0], out)

    @abridged
    def without(self, documents: Iterable[int], *, out: PathInput | None = None) -> Self:
        """A view of all but some documents, by their numbers here; other splits stay whole."""
        from tokenmill.selection import without

        return self._viewed(without(self, documents), out)

    def _viewed(self, view: ViewFiles, out: PathInput | None) -> Self:
        if self.split is not None and self.split not in view.facts.splits:
            raise UsageError(
                f"no document of the split {self.split!r} of {str(self.path)!r} would be left",
                hint="for a view of other splits alone, open the store with split=None",
            )
        if out is None:
            return self.of_files(view, split=self.split)
        from tokenmill.store.views import save_view

        return type(self)(save_view(view, out), split=self.split)

    def told(self) -> dict[str, Any]:
        """Where this is, as plain values; of a view in no file, of what and how it was made."""
        told: dict[str, Any] = {"store": str(self.path), "split": self.split}
        if self.view is None or self.view.is_saved:
            return told
        origin = self.view.origin
        assert origin.contents is not None
        content = origin.contents[self.split]
        return {**told, "store": origin.path, "content": content, "made": [*origin.steps]}

    @property
    def base(self) -> Store:
        """The store that this is a view of, or this one."""
        return self if self.view is None else self.view.base(self.split)

    def in_base(self, number: SupportsIndex) -> tuple[Store, int]:
        """The base, and a document's number there."""
        position, local = self.locate(number)
        if self.view is None:
            return self, self._starts[position] + local
        wanted = np.array([self._starts[position] + local], np.int64)
        found = self.view.runs(self.split).of_store(wanted)
        return self.base, int(found[0])

    def numbers_of(self, other: Store, document: int) -> list[int]:
        """The numbers here of a document of another store, of which this is a view, or which is a
        view of this; or which are views of one store."""
        if self.content == other.content:
            return [document]
        base, in_base = other.in_base(document)
        is_ours = self.base.content == base.content or self.base.path == base.path
        if not is_ours or self.split != other.split:
            return []
        number = self.base.number_of(in_base, base)
        if number is None:
            return []
        return [number] if self.view is None else [*self.view.numbers_of(number, split=self.split)]

    @lazy
    def rows_before(self) -> dict[str, tuple[int, int]]:
        """Unit -> rows and lines of its file that come before it."""
        before: dict[str, tuple[int, int]] = {}
        passed = [(0, 0)] * len(self.manifest.sources)
        for unit in self.manifest.units:
            rows, lines = before[unit.name] = passed[unit.source]
            passed[unit.source] = (rows + unit.rows, lines + unit.lines)
        return before

    def rejects(self) -> Iterator[RejectedRow]:
        """The rows of all splits that could not be used and are listed, in order."""
        return (found for found in self._rejects() if isinstance(found, RejectedRow))

    def reject_counts(self) -> Counter[str]:
        """Reason -> rows of all splits that could not be used, those that are not listed too."""
        counts: Counter[str] = Counter()
        for found in self._rejects():
            counts.update([found.reason] if isinstance(found, RejectedRow) else found)
        return counts

    def _rejects(self) -> Iterator[RejectedRow | dict[str, int]]:
        """The lines of all units' rejects."""
        for unit in self.manifest.units:
            for line in () if unit.rejects is None else self.files.rejects(unit.name):
                try:
                    if more := unlisted_rejects(line):
                        yield more
                        continue
                    members = json.loads(line)
                    if isinstance(members, dict):
                        members["unit"] = unit.name
                    row = read_fact(members, RejectedRow, where="row")
                except (ValueError, RecursionError) as error:
                    path = str(self.path)
                    raise StoreError(
                        f"the rejects of the unit {unit.name!r} of {path!r} were changed: {error}",
                        hint=f"see what is damaged with: tokenmill verify {shlex.quote(path)}",
                    ) from error
                yield row

    def decode(self, number: SupportsIndex) -> str:
        """The text of a document, without the tokens that the build put around it."""
        ids = self[number]
        # A piece of a row, or what is left of one, has not both of its ends.
        if self.bos_id is not None and len(ids) and ids[0] == self.bos_id:
            ids = ids[1:]
        if self.eos_id is not None and len(ids) and ids[-1] == self.eos_id:
            ids = ids[:-1]
        return self.reference.decode(ids)

    @lazy
    def reference(self) -> Engine:
        """The reference engine of the tokenizer that is kept in the store."""
        from tokenmill.engines.load import load_reference

        identity = self.manifest.identity
        return load_reference(
            identity.tokenizer.kind, self.tokenizer_dir, special_tokens=identity.special_tokens
        )

    def close(self) -> None:
        """Unmap all shards and end background reads; views that were handed out stay valid."""
        self._map.cache_clear()
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> tuple[StoreFiles, str | None, str]:
        return self.files, self.split, self.content

    def __setstate__(self, state: tuple[StoreFiles, str | None, str]) -> None:
        files, split, content = state
        self._open(files, split)
        if self._content() == content:
            return
        # It grew since, and whoever opened it goes on with what it was.
        as_it_was = self.as_it_was(content)
        if as_it_was is None:
            if (what := self.forgotten_since(content)) is not None:
                raise StoreError(
                    f"{str(self.path)!r} is not what was opened: {what}",
                    hint="start the program again, on the store as it is now",
                )
            raise StoreError(
                f"{str(self.path)!r} was built anew since it was opened: this process would read "
                "other documents than the one that opened it",
                hint="start the program again, after the build has ended",
            )
        self._open(as_it_was.files, split, manifest=as_it_was.manifest)

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}, split={self.split!r}): {self.num_documents:,} documents,"
            f" {self.num_tokens:,} tokens"
        )


def _map_shard(
    files: StoreFiles, shards: Sequence[Shard], dtype: TokenDtype, has_mask: bool, position: int
) -> MappedShard:
    shard = shards[position]
    with files.as_opened(shard):
        return _map_files(files, shard, dtype, has_mask=has_mask)


def _map_files(
    files: StoreFiles, shard: Shard, dtype: TokenDtype, *, has_mask: bool
) -> MappedShard:
    index = files.index(shard.name)
    if index.dtype != dtype or index.bin_bytes != shard.tokens * dtype.itemsize:
        raise StoreError(
            f"the index '{shard.name}.idx' of {str(files.path)!r} is of another shard: it is for"
            f" {index.bin_bytes:,} bytes of {index.dtype.name}",
            hint=f"see what is damaged with: tokenmill verify {shlex.quote(str(files.path))}",
        )
    tokens = files.tokens(shard.name, dtype=dtype)
    mask = files.mask(shard.name) if has_mask else None
    for kind, values in (("bin", tokens), ("mask", mask)):
        if values is not None and len(values) != shard.tokens:
            size = values.dtype.itemsize
            raise StoreError(
                f"'{shard.name}.{kind}' of {str(files.path)!r} has {len(values) * size:,} bytes"
                f" instead of {shard.tokens * size:,}: it was changed after it was opened",
                hint="copy the file again, or run the build again: it rewrites what is missing",
            )
    views = (tokens, index.offsets) if mask is None else (tokens, index.offsets, mask)
    maps = tuple(each for view in views if (each := map_of(view)) is not None)
    return MappedShard(tokens=tokens, index=index, mask=mask, maps=maps)


def max_mapped_shards(*, files: int = 2) -> int:
    """Local shards, of so many files each, that a process may keep mapped."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if sys.version_info >= (3, 13) or soft == resource.RLIM_INFINITY:
        return MAX_MAPPED_SHARDS
    # A descriptor to a file, and half of the limit is left to the rest of the process.
    return max(8, min(MAX_MAPPED_SHARDS, soft // (2 * files)))
