"""A view: some documents of a store, by their numbers, in a small file of its own.

    head | table of shards | runs of each split | reasons of each split | sealed JSON

A view opens as a `Store`: what is here gives itself for the files of one (`ViewFiles`), whose
shards are the store's with documents left out. Nothing of the store is copied. Which documents are
kept is said as runs, and with each run how many documents and tokens come before it: so a place in
a view is found by bisection, in a mapped file, however many runs there are.

Runs are looked at when they are first needed, and their checksum before that. A view knows what its
store held when it was made, and is refused beside one that holds something else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shlex
import struct
import tempfile
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tokenmill._version import __version__
from tokenmill.errors import StoreError, UsageError
from tokenmill.files import local_path, shown
from tokenmill.store.facts import (
    Checksum,
    Count,
    Counts,
    Fact,
    Manifest,
    ShardEntry,
    contents_of,
    describe_forgotten,
    not_ours,
    read_fact,
    split_totals,
)
from tokenmill.store.format import (
    MASK_DTYPE,
    Index,
    LazyValues,
    counted_by_document,
    map_file,
)
from tokenmill.store.layout import checksum_of, seal, shard_name, sync_folder, unseal
from tokenmill.store.reader import Store, StoreFiles, open_files
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.files import PathInput
    from tokenmill.store.facts import Receipt
    from tokenmill.store.format import Ints, TokenArray, TokenDtype
    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.reader import Shard
    from tokenmill.store.snapshots import Snapshot

    Bools = NDArray[np.bool_]

VIEW_VERSION = 1
MAGIC = b"tokenmill view\n\0"
_HEAD = struct.Struct("<16sQQ")  # and where the JSON begins, and its bytes
_RUN_BYTES = 32
_REASON_BYTES = 24
# Indexes of shards that are made of a view's runs: 20 bytes for a document.
_KEPT_INDEX_BYTES = 64 << 20
_BLOCK_DOCUMENTS = 1 << 16
_MOST_MEMORY = 64 << 20  # of a view that is being made


class SplitFacts(Fact, frozen=True, kw_only=True):
    """The documents of a split that are in a view."""

    documents: Count
    tokens: Count
    runs: Count
    checksum: Checksum  # of its runs


class Gone(Fact, frozen=True, kw_only=True):
    """Documents of all splits that are not in a view, for one reason."""

    reason: str
    documents: Count
    tokens: Count


class ViewFacts(Fact, frozen=True, kw_only=True):
    """The JSON of a view."""

    created_by: str
    base: str  # path of the store from the view's folder, or a URL
    contents: dict[str, Checksum]  # `Store.content` of each split of the store
    made: tuple[dict[str, Any], ...]  # how, step by step
    gone: tuple[Gone, ...]
    splits: dict[str, SplitFacts]  # those of which a document is kept
    shards: Count
    table: Checksum
    reasons: Count  # runs of documents that are gone for one reason; 0 where there is one alone
    reasons_checksum: Checksum

    def to_bytes(self) -> bytes:
        return seal({"view_version": VIEW_VERSION, **self.to_json()})

    @property
    def sizes(self) -> list[int]:
        """Bytes of the table, of the runs of each split, and of the reasons."""
        runs = [_run_bytes(self.splits[name].runs) for name in sorted(self.splits)]
        return [self.shards * _TABLE.itemsize, *runs, self.reasons * _REASON_BYTES]

    @property
    def data_bytes(self) -> int:
        """Bytes before the JSON."""
        return _HEAD.size + sum(self.sizes)


# A shard of a view: which of the store's it is of, counted over all splits; which copy of those
# documents it has, where some are there several times; and what is in it.
_COLUMNS = ("shard", "copy", "runs", "documents", "tokens", "counted", "silent")
_TABLE = np.dtype([(name, "<i8") for name in _COLUMNS])


class Runs(NamedTuple):
    """The documents of a split that are in a view, as runs within shards, in the view's order."""

    firsts: Ints  # number of each run's first document, in the store's split
    bases: Ints  # its position in the stream of the store's split
    documents: Ints  # of the view before each run; and all of them
    positions: Ints  # tokens of the view before each run; and all of them

    def of_store(self, numbers: Ints) -> Ints:
        """The numbers that documents of the view have in the store."""
        runs = self.documents.searchsorted(numbers, side="right") - 1
        found: Ints = numbers - self.documents[runs] + self.firsts[runs]
        return found

    @classmethod
    def of(cls, data: NDArray[np.uint8], runs: int) -> Runs:
        """Views of an array of bytes."""
        values = data.view("<i8")
        ends = list(accumulate((0, runs, runs, runs + 1, runs + 1)))
        return cls(*(values[a:b] for a, b in pairwise(ends)))


class _Place(NamedTuple):
    """A shard of a view: where its documents are."""

    number: int  # of the store's shard, counted over all splits
    split: str
    runs: slice  # in those of its split
    begin: int  # its first token in the view's split
    tokens: int


class Origin(NamedTuple):
    """How a view that is in no file is made again: of a store or a view in a file, step by step."""

    path: str
    contents: dict[str | None, str] | None  # `Store.content` of its splits; None: nothing was done
    steps: tuple[dict[str, Any], ...]


class ViewFiles(StoreFiles):
    """What the files of a store would be, if it had the documents of a view and no others."""

    def __init__(
        self,
        base: StoreFiles,
        facts: ViewFacts,
        data: NDArray[np.uint8],
        *,
        path: Path | str | None = None,
        origin: Origin | None = None,
    ) -> None:
        """`data` is all but the JSON; `path` is that of a view which is in a file, `origin` what
        one that is in none was made of."""
        self.facts, self.data = facts, data
        self.is_saved = path is not None
        self.origin = origin or Origin(str(base.path if path is None else path), None, ())
        self.path = base.path if path is None else path
        self.is_remote = base.is_remote
        self.base_files, self._base_manifest = self._find_base(base)
        ends = list(accumulate(facts.sizes, initial=_HEAD.size))
        table, *runs, self._reasons = (data[a:b] for a, b in pairwise(ends))
        if checksum_of(table.data) != facts.table:
            raise self._damaged("the table of its shards was changed")
        self.table: NDArray[Any] = table.view(_TABLE)
        self._regions = dict(zip(sorted(facts.splits), runs, strict=True))
        largest = int(self.table["documents"].max(initial=1))
        self.most_indexes = max(1, _KEPT_INDEX_BYTES // (20 * largest))
        self.runs = lru_cache(maxsize=None)(self._read_runs)
        self.base = lru_cache(maxsize=None)(self._open_base)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_saved:
            return open_view, (self.path, self.base_files)
        make = partial(ViewFiles, origin=self.origin)
        return make, (self.base_files, self.facts, np.array(self.data))

    def _find_base(self, base: StoreFiles) -> tuple[StoreFiles, Manifest]:
        """The store as it was when the view was made: as it is, or a snapshot of one that grew."""
        manifest = base.read_manifest()
        found, wanted = contents_of(manifest), self.facts.contents
        if found == wanted:
            return base, manifest
        for snapshot in reversed(base.snapshots()):
            with contextlib.suppress(StoreError):
                earlier = base.at_snapshot(snapshot.name)
                manifest = earlier.read_manifest()
                if contents_of(manifest) == wanted:
                    return earlier, manifest
        if (what := describe_forgotten(base.read_manifest(), wanted.values())) is not None:
            raise StoreError(
                f"the view {str(self.path)!r} was made of the store {str(base.path)!r} as it was:"
                f" {what}, and the numbers in the view would be those of other documents",
                hint="make the view again, of the store as it is now, and remove this one",
            )
        names = sorted(found.keys() | wanted.keys())
        split = next(name for name in names if found.get(name) != wanted.get(name))
        raise StoreError(
            f"the view {str(self.path)!r} was made of another state of the store"
            f" {str(base.path)!r}: the split {split!r} does not hold what it held then, and the"
            " numbers in the view would be those of other documents",
            hint="make the view again, of the store as it is now",
        )

    def _damaged(self, problem: str) -> StoreError:
        return StoreError(
            f"the view {str(self.path)!r} is damaged: {problem}; other documents than those chosen"
            " would be read",
            hint="copy the file again, or make the view again",
        )

    # What is in it.

    def content(self, split: str | None) -> str:
        """`Store.content` of the view."""
        splits = sorted(self.facts.splits) if split is None else [split]
        found = ((self.facts.contents[name], self.facts.splits[name].checksum) for name in splits)
        return checksum_of("".join(f"view {of} {runs}\n" for of, runs in found).encode())

    def _open_base(self, split: str | None) -> Store:
        """The store that it is a view of."""
        return Store.of_files(self.base_files, split=split, manifest=self._base_manifest)

    def _read_runs(self, split: str | None) -> Runs:
        """The documents of a split, or of all in the order of `split=None`."""
        splits = [*self._base_manifest.splits]
        if split is None and len(splits) > 1:
            return self._join_runs()
        name = splits[0] if split is None else split
        data, facts = self._regions[name], self.facts.splits[name]
        if checksum_of(data.data) != facts.checksum:
            raise self._damaged(f"which documents of the split {name!r} it has was changed")
        return Runs.of(data, facts.runs)

    def _join_runs(self) -> Runs:
        """Runs of all splits, shard by shard: in memory, as no file has them in this order."""
        columns: list[list[Ints]] = [[], [], [], []]
        for place in self._places.values():
            runs, whole = self.runs(place.split), self.base(None).shards[place.number]
            of_split = self._shard_of_split(place)
            lasts = slice(place.runs.start, place.runs.stop + 1)
            found = (
                runs.firsts[place.runs] + (whole.first_document - of_split.first_document),
                runs.bases[place.runs] + (whole.first_token - of_split.first_token),
                np.diff(runs.documents[lasts]),
                np.diff(runs.positions[lasts]),
            )
            for column, part in zip(columns, found, strict=True):
                column.append(part)
        firsts, bases, documents, positions = (
            np.concatenate([np.zeros(0, np.int64), *column]) for column in columns
        )
        return Runs(firsts, bases, _running(documents), _running(positions))

    @cached_property
    def _by_name(self) -> dict[str, Shard]:
        splits = self._base_manifest.splits
        return {shard.name: shard for split in splits for shard in self.base(split).shards}

    def _shard_of_split(self, place: _Place) -> Shard:
        return self._by_name[self.base(None).shards[place.number].name]

    @cached_property
    def _places(self) -> dict[str, _Place]:
        """Where the documents of each shard are, by its name; in order."""
        places = {}
        runs, tokens = dict.fromkeys(self.facts.splits, 0), dict.fromkeys(self.facts.splits, 0)
        for row, (unit, entry) in zip(self.table.tolist(), self._listed(), strict=True):
            number, _, count, _, size, _, _ = row
            first, begin = runs[entry.split], tokens[entry.split]
            place = _Place(number, entry.split, slice(first, first + count), begin, size)
            places[shard_name(unit, split=entry.split)] = place
            runs[entry.split], tokens[entry.split] = first + count, begin + size
        return places

    def _listed(self) -> Iterator[tuple[str, ShardEntry]]:
        """Of each shard of the view, the name of its unit, and the store's entry."""
        entries = [*self._base_manifest.shards()]
        for number, copy in zip(
            self.table["shard"].tolist(), self.table["copy"].tolist(), strict=True
        ):
            unit, entry = entries[number]
            yield _copy_name(unit.name, copy), entry

    def numbers_of(self, document: int, *, split: str | None) -> Iterator[int]:
        """The numbers that a document of the store has in the view: several if it is repeated."""
        runs, first = self.runs(split), 0
        mine = [split in (None, place.split) for place in self._places.values()]
        table = self.table[np.array(mine, np.bool_)]
        for copy in range(int(table["copy"].max(initial=-1)) + 1):
            last = first + int(table["runs"][table["copy"] == copy].sum())
            at = first + int(runs.firsts[first:last].searchsorted(document, side="right")) - 1
            if at >= first:
                number = int(runs.documents[at]) + document - int(runs.firsts[at])
                if number < runs.documents[at + 1]:
                    yield number
            first = last

    def problems(self) -> Iterator[str]:
        """What is wrong with it, its checksums and the documents that it names looked at."""
        sums: dict[str, Ints] = {split: np.zeros(2, np.int64) for split in self.facts.splits}
        try:
            self.gone_runs()
            base = self.base(None)
            for row, (name, place) in zip(self.table, self._places.items(), strict=True):
                shard, runs = base.shards[place.number], self.runs(place.split)
                first = self._shard_of_split(place)
                begins = runs.firsts[place.runs] - first.first_document
                counts = np.diff(runs.documents[place.runs.start : place.runs.stop + 1])
                edges = np.stack((begins, begins + counts), axis=1)
                if (np.diff(edges.ravel(), prepend=0, append=shard.documents) < 0).any():
                    yield f"it names documents of {name!r} that are not there, or twice"
                    continue
                tokens = _token_edges(base, place.number, edges)
                sizes = np.diff(runs.positions[place.runs.start : place.runs.stop + 1])
                begin = runs.bases[place.runs] - first.first_token
                if (tokens != np.stack((begin, begin + sizes), axis=1)).any():
                    yield f"it has other places for the documents of {name!r} than its store"
                found = int(counts.sum()), int(sizes.sum())
                if found != (row["documents"], row["tokens"]):
                    yield f"its table has other numbers for {name!r} than its documents"
                sums[place.split] += found
        except StoreError as error:
            yield error.message
            return
        for split, facts in self.facts.splits.items():
            if sums[split].tolist() != [facts.documents, facts.tokens]:
                yield f"it has other documents of the split {split!r} than it says"

    def gone_runs(self) -> Ints:
        """Documents that are gone: first, last and reason of runs, in numbers of `split=None`."""
        if self.facts.reasons:
            if checksum_of(self._reasons.data) != self.facts.reasons_checksum:
                raise self._damaged("why documents are gone was changed")
            return self._reasons.view("<i8").reshape(-1, 3)
        kept = int(self.table["runs"][self.table["copy"] == 0].sum())
        runs, whole = self.runs(None), self.base(None).num_documents
        lasts = runs.firsts[:kept] + np.diff(runs.documents[: kept + 1])
        edges = np.stack((np.append(0, lasts), np.append(runs.firsts[:kept], whole)), axis=1)
        edges = edges[edges[:, 0] < edges[:, 1]]
        return np.column_stack((edges, np.zeros(len(edges), np.int64)))

    # What the files of a store are asked.

    @property
    def layout(self) -> StoreLayout:
        return self.base_files.layout

    @property
    def plan_folder(self) -> Path | None:
        return self.base_files.plan_folder

    def snapshots(self) -> list[Snapshot]:
        return []  # a view is of one state of its store

    def read_manifest(self) -> Manifest:
        """That of the store, with the counts of the view."""
        return self._manifest

    @cached_property
    def _manifest(self) -> Manifest:
        base = self._base_manifest
        shards: dict[str, list[ShardEntry]] = {unit.name: [] for unit in base.units}
        for row, (name, entry) in zip(self.table.tolist(), self._listed(), strict=True):
            _, _, _, documents, tokens, counted, silent = row
            kept = entry._replace(documents=documents, tokens=tokens)
            if entry.mask is not None:
                kept = kept._replace(counted=counted, silent=silent)
            shards.setdefault(name, []).append(kept)
        units = {unit.name: unit for unit in base.units}
        made = []
        for name, entries in shards.items():
            unit = units.get(name)
            if unit is None:  # another copy of some documents: its rows are counted already
                unit = units[name.partition(_COPY)[0]]
                unit = unit._replace(name=name, rows=0, lines=0, rejects=None)
            made.append(unit._replace(shards=tuple(entries)))
        splits = split_totals(entry for unit in made for entry in unit.shards)
        documents = sum(split.documents for split in splits.values())
        return Manifest(
            identity=base.identity,
            totals=Counts.of(
                rows=documents,
                documents=documents,
                tokens=sum(split.tokens for split in splits.values()),
            ),
            splits=splits,
            engines=base.engines,
            sources=base.sources,
            units=tuple(made),
        )

    def row_starts(self, shard: str) -> Ints | None:
        """`Store.row_starts` of a shard: rows are in a view whole, or not at all."""
        starts = self.base(None).row_starts(self._places[shard].number)
        if starts is None:
            return None
        rows = starts.searchsorted(self.numbers(shard), side="right")
        return np.flatnonzero(np.diff(rows, prepend=-1))

    def numbers(self, shard: str) -> Ints:
        """The documents of a shard, as their store's shard numbers them."""
        place = self._places[shard]
        runs, first = self.runs(place.split), self._shard_of_split(place).first_document
        counts = np.diff(runs.documents[place.runs.start : place.runs.stop + 1])
        ends = np.cumsum(counts)
        numbers: Ints = np.repeat(runs.firsts[place.runs] - first - (ends - counts), counts)
        numbers += np.arange(len(numbers))
        return numbers

    def index(self, shard: str) -> Index:
        """What the `.idx` of a shard would say, in memory."""
        place = self._places[shard]
        index = self.base(None).map_shard(place.number).index
        lengths = index.lengths[self.numbers(shard)]
        offsets = np.cumsum(lengths, dtype=np.int64)
        if offsets[-1:].sum() != place.tokens:
            raise self._damaged(f"its shard {shard!r} has {place.tokens:,} tokens by its table")
        offsets = (offsets - lengths) * index.dtype.itemsize
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
        return Index(dtype=index.dtype, lengths=lengths, offsets=offsets, documents=documents)

    def tokens(self, shard: str, *, dtype: TokenDtype) -> TokenArray:
        place = self._places[shard]

        def read(first: int, last: int) -> NDArray[Any]:
            return self._stream.read_spans(self._spans(place, first, last), pad=None)

        return cast("TokenArray", LazyValues(read, size=place.tokens, dtype=dtype))

    def mask(self, shard: str) -> NDArray[np.uint8]:
        place = self._places[shard]

        def read(first: int, last: int) -> NDArray[Any]:
            return self._stream.read_mask(self._spans(place, first, last)).view(np.uint8)

        return cast("NDArray[np.uint8]", LazyValues(read, size=place.tokens, dtype=MASK_DTYPE))

    def _spans(self, place: _Place, first: int, last: int) -> Ints:
        """Where some tokens of a shard are, as a stream of the whole store has it."""
        runs, first, last = self.runs(place.split), place.begin + first, place.begin + last
        begins = runs.positions[place.runs]
        low = int(begins.searchsorted(first, side="right")) - 1 + place.runs.start
        high = int(begins.searchsorted(last, side="left")) + place.runs.start
        starts = np.maximum(runs.positions[low:high], first)
        lengths = np.minimum(runs.positions[low + 1 : high + 1], last) - starts
        starts += runs.bases[low:high] - runs.positions[low:high]
        starts -= self._shard_of_split(place).first_token
        spans = np.stack((np.full_like(starts, place.number), starts, starts + lengths))
        return spans[:, lengths > 0]

    @cached_property
    def _stream(self) -> TokenStream:
        return TokenStream(self.base(None))

    def receipt(self, unit: str) -> Receipt:
        return self.base_files.receipt(unit.partition(_COPY)[0])

    def rejects(self, unit: str) -> Iterator[bytes]:
        return self.base_files.rejects(unit)

    def tokenizer(self) -> Path:
        return self.base_files.tokenizer()

    def close(self) -> None:
        self.__dict__.pop("_stream", None)
        self.runs.cache_clear()
        self.base.cache_clear()
        self.base_files.close()


_COPY = "+"  # between the name of a unit and the number of a copy


def _copy_name(unit: str, copy: int) -> str:
    return f"{unit}{_COPY}{copy}" if copy else unit


def _running(counts: Ints) -> Ints:
    """What comes before each, and all of them."""
    return np.append(0, np.cumsum(counts, dtype=np.int64))


# -------------------------------------------------------------------------------------------------
# Opening.


def open_view(
    path: Path, base: StoreFiles | None = None, *, cache: PathInput | None = None, **how: Any
) -> ViewFiles:
    """The files of a view; StoreError where it is damaged, or its store another than it was."""
    data = map_file(path)
    facts = read_facts(data, path=path)
    if base is None:
        where = base_of(facts, path=path)
        base = open_files(where, cache=cache, **how)
        if isinstance(base.path, Path) and not base.layout.manifest.exists():
            raise StoreError(
                f"{str(path)!r} is a view of the store {str(base.path)!r}, and there is none",
                hint="put the store there, or the view where that leads to its store",
            )
    values = np.frombuffer(data, np.uint8)[: facts.data_bytes]
    return ViewFiles(base, facts, values, path=path)


def base_of(facts: ViewFacts, *, path: Path) -> PathInput:
    """Where the store of a view is, which is itself at `path`."""
    return facts.base if local_path(facts.base) is None else path.parent / facts.base


def read_facts(data: mmap.mmap | bytes, *, path: Path) -> ViewFacts:
    """What a view says of itself, when its size is right and its JSON sealed."""
    begin = size = 0
    if len(data) >= _HEAD.size:
        magic, begin, size = _HEAD.unpack_from(data)
    if begin < _HEAD.size or magic != MAGIC:
        raise StoreError(
            f"{str(path)!r} is a file, and no view; a store is a folder",
            hint="give the folder that a build wrote, or a file of: tokenmill select",
        )
    if begin + size != len(data):
        raise StoreError(
            f"the view {str(path)!r} has {len(data):,} bytes instead of {begin + size:,}",
            hint="copy the file again, or make the view again",
        )
    members = unseal(bytes(data[begin:]), path=path)
    version = members.pop("view_version", None)
    if type(version) is not int or version != VIEW_VERSION:
        raise StoreError(
            f"{str(path)!r} is a view of version {version!r}; this tokenmill reads version"
            f" {VIEW_VERSION}",
            hint="read it with a newer tokenmill: pip install --upgrade tokenmill",
        )
    try:
        facts = read_fact(members, ViewFacts, where="view")
        if facts.data_bytes != begin:
            raise ValueError(f"it is for {facts.data_bytes:,} bytes of runs, not {begin:,}")
    except ValueError as error:
        raise not_ours("view", path, error, hint="make the view again") from error
    return facts


def save_view(view: ViewFiles, out: PathInput) -> Path:
    """Put a view into a file, whole or not at all; another view that is there is replaced."""
    path = require_place(out)
    base = view.base_files.path
    if isinstance(base, Path):
        relative = os.path.relpath(base, path.parent)
        base = relative if os.sep == "/" else Path(relative).as_posix()
    head = _HEAD.pack(MAGIC, view.facts.data_bytes, 0)
    sealed = view.facts.but(base=str(base)).to_bytes()
    head = _HEAD.pack(MAGIC, view.facts.data_bytes, len(sealed))
    staged = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with staged.open("xb") as file:
            for part in (head, view.data[_HEAD.size :].data, sealed):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise StoreError(
            f"the view {str(path)!r} cannot be written: {error.strerror or error}",
            hint="give another --out, in a folder that you may write to",
        ) from error
    return path


def require_place(out: PathInput) -> Path:
    """Where a view may be written; UsageError where something else is, or no folder."""
    path = local_path(out)
    if path is None:
        raise UsageError(
            f"a view cannot be written to {shown(os.fspath(out))!r}",
            hint="write it to a local file, such as --out kept.view, and copy it",
        )
    path = path.absolute()
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {str(path.parent)!r} for the view", hint=f"mkdir -p {path.parent}"
        )
    if path.is_dir():
        raise UsageError(
            f"{str(path)!r} is a folder; a view is a file", hint="name a file: --out kept.view"
        )
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(
                    f"{str(path)!r} is no view, and would be overwritten",
                    hint="name another file: --out kept.view",
                )
    return path


# -------------------------------------------------------------------------------------------------
# Making one: a bit for each document while it is decided, then the runs.
#
# Documents of one row (its pieces, or the two sides of a pair) are kept together or not at all: no
# text gives one without the other.


class Choice:
    """Which documents of a store, opened with all splits, shall be in a view, and why others not.

    It is said shard by shard. What is held of it is a bit for each document, and the reasons.
    """

    def __init__(self, store: Store) -> None:
        assert store.split is None
        self.store = store
        self.base = store.base
        self._kept: dict[tuple[int, int], NDArray[np.uint8]] = {}  # (copy, base's shard) -> bits
        earlier = () if store.view is None else store.view.facts.gone
        self._gone = {each.reason: [each.documents, each.tokens] for each in earlier}
        # Runs of documents that are gone now: first and last of all the base's, and the reason.
        self._runs: list[Ints] = [np.zeros((0, 3), np.int64)]

    @property
    def gone(self) -> tuple[Gone, ...]:
        """What is gone for which reason, also from a view that this is made of."""
        return tuple(
            Gone(reason=reason, documents=documents, tokens=tokens)
            for reason, (documents, tokens) in self._gone.items()
        )

    def say(
        self,
        number: int,
        kept: Bools,
        *,
        reasons: Sequence[str],
        why: NDArray[np.integer] | None = None,
        times: NDArray[np.integer] | None = None,
    ) -> None:
        """What becomes of the documents of a shard of the store.

        `why` has for each that is gone which of the reasons it is; `times` how often each is there.
        """
        place = _ShardPlace.of(self.store, number)
        shard = self.base.shards[place.number]
        lengths = place.of_documents(self.base.map_shard(place.number).index.lengths)
        cause = np.where(kept, -1, 0 if why is None else why)
        rows = self.store.row_starts(number)
        cause = of_rows(cause, rows)
        if rows is not None and times is not None and len(times):
            times = np.repeat(np.minimum.reduceat(times, rows), np.diff(rows, append=len(times)))
        kept = cause < 0
        if not place.copy:
            for which, reason in enumerate(reasons):
                here = cause == which
                tally = self._gone.setdefault(reason, [0, 0])
                tally[0] += int(np.count_nonzero(here))
                tally[1] += int(lengths[here].sum(dtype=np.int64))
            if len(reasons) > 1 or len(self._gone) > 1:
                named = np.array([[*self._gone].index(reason) for reason in reasons])
                of_base = np.full(shard.documents, -1)
                of_base[place.numbers] = np.where(kept, -1, named[np.maximum(cause, 0)])
                self._runs.append(_reason_runs(of_base, first=shard.first_document))
        if times is None:
            self._keep(place, kept, copy=place.copy)
        elif place.copy:
            raise UsageError(
                f"documents of {str(self.store.path)!r} are there several times already",
                hint="say how often in one view, made of the store itself",
            )
        else:
            for copy in range(int(times[kept].max(initial=0))):
                self._keep(place, kept & (times > copy), copy=copy)

    def keep(self, number: int, kept: Bools) -> None:
        """Documents of a shard of the store that are kept, without a word of why others are not."""
        place = _ShardPlace.of(self.store, number)
        self._keep(place, kept, copy=place.copy)

    def _keep(self, place: _ShardPlace, kept: Bools, *, copy: int) -> None:
        if kept.any():
            of_base = np.zeros(self.base.shards[place.number].documents, np.bool_)
            of_base[place.numbers] = kept
            self._kept[copy, place.number] = np.packbits(of_base)

    def view(self, step: Mapping[str, object]) -> ViewFiles:
        """The view, not yet in a file; `step` says how it was made.

        UsageError where no document is left.
        """
        base, order = self.base, sorted(self._kept)
        if not order:
            path = str(self.store.path)
            raise UsageError(
                f"no document of {path!r} would be left",
                hint=f"see what there is with: tokenmill inspect {shlex.quote(path)}",
            )
        splits = sorted({base.shards[number].split for _, number in order})
        keys = {s: [key for key in order if base.shards[key[1]].split == s] for s in splits}
        table = np.zeros(len(order), _TABLE)
        for row, (copy, number) in enumerate(order):
            edges = self._edges(copy, number)
            tokens = _token_edges(base, number, edges)
            sums = [len(edges), *(int((each[:, 1] - each[:, 0]).sum()) for each in (edges, tokens))]
            table[row] = (number, copy, *sums, *self._count(number, edges))
        counts = dict.fromkeys(splits, 0)
        for (_, number), runs in zip(order, table["runs"].tolist(), strict=True):
            counts[base.shards[number].split] += runs
        reasons = self._reasons()
        sizes = [table.nbytes, *map(_run_bytes, counts.values()), reasons.nbytes]
        data = _room(_HEAD.size + sum(sizes))
        ends = list(accumulate(sizes, initial=_HEAD.size))
        regions = [data[a:b] for a, b in pairwise(ends)]
        regions[0][:] = table.view(np.uint8)
        regions[-1][:] = reasons.view(np.uint8).ravel()
        facts = {}
        for split, region in zip(splits, regions[1:], strict=False):
            runs = Runs.of(region, counts[split])
            self._fill(runs, keys[split], base.of_split(split))
            facts[split] = SplitFacts(
                documents=int(runs.documents[-1]),
                tokens=int(runs.positions[-1]),
                runs=counts[split],
                checksum=checksum_of(region.data),
            )
        view = ViewFacts(
            created_by=f"tokenmill {__version__}",
            base="",
            contents=contents_of(base.manifest),
            made=(*(self.store.view.facts.made if self.store.view else ()), dict(step)),
            gone=self.gone,
            splits=facts,
            shards=len(table),
            table=checksum_of(regions[0].data),
            reasons=len(reasons),
            reasons_checksum=checksum_of(regions[-1].data),
        )
        return ViewFiles(base.files, view, data, origin=self._origin(view))

    def _origin(self, made: ViewFacts) -> Origin:
        store, view = self.store, self.store.view
        if view is not None and not view.is_saved:
            return view.origin._replace(steps=(*view.origin.steps, made.made[-1]))
        contents: dict[str | None, str] = {None: store.content}
        if view is None:
            contents.update(made.contents)
        else:
            contents.update((split, view.content(split)) for split in view.facts.splits)
        return Origin(str(store.path), contents, made.made[-1:])

    def _edges(self, copy: int, number: int) -> Ints:
        """Runs of documents in a shard: the first of each, and the one after the last."""
        documents = self.base.shards[number].documents
        return _edges_of(np.unpackbits(self._kept[copy, number], count=documents))

    def _count(self, number: int, edges: Ints) -> tuple[int, int]:
        """Tokens of the documents in runs that count, and documents of which none does."""
        counted = silent = 0
        shard = self.base.map_shard(number)
        for first, last in edges.tolist() if shard.mask is not None else ():
            for low in range(first, last, _BLOCK_DOCUMENTS):
                block = np.array([[low, min(low + _BLOCK_DOCUMENTS, last)]])
                ((begin, end),) = _token_edges(self.base, number, block).tolist()
                assert shard.mask is not None
                lengths = shard.index.lengths[low : min(low + _BLOCK_DOCUMENTS, last)]
                found = counted_by_document(shard.mask[begin:end], lengths)
                counted += int(found.sum())
                silent += int(np.count_nonzero(found == 0))
        return counted, silent

    def _fill(self, runs: Runs, keys: Sequence[tuple[int, int]], of_split: Store) -> None:
        shards, at = {shard.name: shard for shard in of_split.shards}, 0
        runs.documents[0] = runs.positions[0] = 0
        for copy, number in keys:
            edges, shard = self._edges(copy, number), shards[self.base.shards[number].name]
            tokens, here = _token_edges(self.base, number, edges), slice(at, at + len(edges))
            runs.firsts[here] = edges[:, 0] + shard.first_document
            runs.bases[here] = tokens[:, 0] + shard.first_token
            for column, found in ((runs.documents, edges), (runs.positions, tokens)):
                ends = np.cumsum(found[:, 1] - found[:, 0]) + column[at]
                column[at + 1 : at + 1 + len(edges)] = ends
            at += len(edges)

    def _reasons(self) -> Ints:
        """Runs of documents that are gone, with the number of the reason.

        None where there is one reason: whatever is gone is gone for that one.
        """
        earlier = self.store.view
        if len(self._gone) < 2:
            return np.zeros((0, 3), "<i8")
        parts = self._runs if earlier is None else [*self._runs, earlier.gone_runs()]
        found = np.concatenate(parts)
        return found[np.argsort(found[:, 0], kind="stable")].astype("<i8", copy=False)


def of_rows(cause: NDArray[Any], rows: Ints | None) -> NDArray[Any]:
    """Why documents go, -1 for those that stay, where all of a row go together."""
    if rows is None or not len(cause):
        return cause
    sizes = np.diff(rows, append=len(cause))
    found: NDArray[Any] = np.repeat(np.maximum.reduceat(cause, rows), sizes)
    return found


class _ShardPlace(NamedTuple):
    """A shard of a store, in the store that it is a view of, or is itself."""

    number: int
    copy: int
    numbers: Ints | slice  # its documents in that shard

    @classmethod
    def of(cls, store: Store, number: int) -> _ShardPlace:
        if store.view is None:
            return cls(number, 0, slice(None))
        of_base, copy = (int(store.view.table[name][number]) for name in ("shard", "copy"))
        return cls(of_base, copy, store.view.numbers(store.shards[number].name))

    def of_documents(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[self.numbers]


def _run_bytes(runs: int) -> int:
    return _RUN_BYTES * runs + 16


def _room(size: int) -> NDArray[np.uint8]:
    """So many bytes; in a file without a name where they are many."""
    if size < _MOST_MEMORY:
        return np.zeros(size, np.uint8)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def _edges_of(marks: NDArray[np.integer]) -> Ints:
    """Where runs of values other than 0 begin, and end."""
    steps = np.diff(marks.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(steps).reshape(-1, 2)


def _token_edges(store: Store, number: int, edges: Ints) -> Ints:
    """Tokens of a shard at which runs of its documents begin, and end."""
    index, size = store.map_shard(number).index, store.dtype.itemsize
    begins = index.offsets[edges[:, 0]] // size
    last = edges[:, 1] - 1
    ends = index.offsets[last] // size + index.lengths[last]
    return np.stack((begins, ends), axis=1)


def _reason_runs(reasons: NDArray[np.integer], *, first: int) -> Ints:
    """Runs of documents that are gone for one reason, of those of a shard; -1 is none."""
    begins = np.flatnonzero(np.diff(reasons, prepend=-2))
    lasts = np.append(begins[1:], len(reasons))
    found = np.stack((begins + first, lasts + first, reasons[begins]), axis=1)
    return found[found[:, 2] >= 0].astype(np.int64, copy=False)
