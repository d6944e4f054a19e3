"""The facts that receipts and manifests are made of: small frozen values, read and written as JSON.

Members are the fields, in their order. Those that are numbers are counts: never negative, never
floats.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from tokenmill.errors import StoreError
from tokenmill.store.durable import checksum_of
from tokenmill.store.format import index_bytes, token_dtype
from tokenmill.store.layout import UNIT_PREFIX, is_plain_name, unit_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from _typeshed import DataclassInstance

    from tokenmill.store.durable import Json
    from tokenmill.store.format import TokenDtype


# -------------------------------------------------------------------------------------------------
# The entries of a manifest: tokenizer, boundary tokens, and one line per source and unit.


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """Which tokenizer made the ids."""

    kind: str
    fingerprint: str
    vocab_size: int
    files: Mapping[str, FileFacts]
    """Name in `tokenizer/` -> size and checksum."""

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_plain_name(name):
                raise ValueError(f"tokenizer file {name!r} is not a plain name in tokenizer/")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryToken:
    """A token that the build put at the start or the end of every document."""

    token: str
    id: int
    position: str
    """`start` or `end`."""

    def __post_init__(self) -> None:
        if self.position not in {"start", "end"}:
            raise ValueError(f"{self.position!r} is not a position: start or end")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreIdentity:
    """How text became ids: everything about a store that does not follow from its receipts."""

    created_by: str
    """`tokenmill` and its version."""
    tokenizer: TokenizerFacts
    eos: BoundaryToken | None
    bos: BoundaryToken | None
    special_tokens: str
    """What was done with special tokens inside documents: text, parse or reject."""
    config: Mapping[str, Json]
    """Everything that decides the bytes."""
    fingerprint: str
    """Of `config`; every receipt names it."""
    mask: bool = False
    """Every shard has a mask, which says which tokens count for the loss."""

    def __post_init__(self) -> None:
        for token in (self.eos, self.bos):
            if token is not None and not 0 <= token.id < self.tokenizer.vocab_size:
                raise ValueError(f"the id {token.id} of {token.token!r} is not in the vocabulary")

    @property
    def dtype(self) -> TokenDtype:
        return token_dtype(self.tokenizer.vocab_size)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos is None else self.eos.id

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else self.bos.id


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """An input file."""

    path: str
    prefix: str
    """Unit k of the file is named `{prefix}-{k:05d}`."""
    size: int
    version: str
    units: int
    rows: int

    def __post_init__(self) -> None:
        if not UNIT_PREFIX.fullmatch(self.prefix):
            raise ValueError(f"{self.prefix!r} cannot begin the name of a unit")


# Entries that a large store has thousands of are named tuples, and arrays in JSON: a manifest of
# 10,000 units then opens five times as fast as with dataclasses and objects.


UNCOUNTED = -1
"""What a mask counts where nobody wrote it down: other projects' files, read in place."""


class ShardEntry(NamedTuple):
    """A shard, as far as a reader needs it; sizes of its files follow from its counts."""

    split: str
    documents: int
    tokens: int
    bin: Checksum
    idx: Checksum
    mask: Checksum | None = None
    """None where the store has no masks."""
    counted: int = 0
    """Tokens that count, by the mask."""
    silent: int = 0
    """Documents of which no token counts, by the mask."""

    @property
    def idx_bytes(self) -> int:
        return index_bytes(self.documents)

    def bin_bytes(self, dtype: TokenDtype) -> int:
        return self.tokens * dtype.itemsize

    def to_json(self) -> list[Json]:
        return [*self[: len(COLUMNS["shard"])]] if self.mask is None else [*self]


class RejectsEntry(NamedTuple):
    """The file of a unit's rejected rows."""

    rows: int
    bytes: int
    checksum: Checksum


class UnitEntry(NamedTuple):
    """A unit: its place in the input, and its files."""

    name: str
    source: int
    """Position in `sources`."""
    rows: int
    lines: int
    receipt_bytes: int
    receipt: Checksum
    rejects: RejectsEntry | None
    shards: tuple[ShardEntry, ...]

    def to_json(self) -> Json:
        rejects: Json = None if self.rejects is None else [*self.rejects]
        facts: list[Json] = [self.rows, self.lines, self.receipt_bytes, self.receipt]
        return [*facts, rejects, [shard.to_json() for shard in self.shards]]


COLUMNS: dict[str, list[str]] = {
    "unit": ["rows", "lines", "receipt_bytes", "receipt", "rejects", "shards"],
    "rejects": ["rows", "bytes", "checksum"],
    "shard": ["split", "documents", "tokens", "bin", "idx"],
}
"""What the numbers in the arrays are; a manifest says it too."""
MASK_COLUMNS = COLUMNS | {"shard": [*COLUMNS["shard"], "mask", "counted", "silent"]}
"""The same where the store has masks."""


_TYPES: dict[str, tuple[set[type], ...]] = {
    "unit": ({int}, {int}, {int}, {str}, {NoneType, list}, {list}),
    "rejects": ({int}, {int}, {str}),
    "shard": ({str}, {int}, {int}, {str}, {str}, {str}, {int}, {int}),
}
"""Without masks there are fewer columns."""


_SOURCE_TYPES: dict[str, set[type]] = {
    "path": {str},
    "prefix": {str},
    "size": {int},
    "version": {str},
    "units": {int},
    "rows": {int},
}


def source_entries(items: list[Any]) -> tuple[SourceEntry, ...]:
    """The input files, from their objects."""
    names = _SOURCE_TYPES.keys()
    if any(type(item) is not dict or item.keys() != names for item in items):
        raise ValueError(f"a source does not have the members {', '.join(names)}")
    rows = [list(item.values()) for item in items]
    if any([*item] != [*names] for item in items):
        raise ValueError(f"a source does not have its members in the order {', '.join(names)}")
    _check_columns(rows, _SOURCE_TYPES, kind="source")
    return tuple([SourceEntry(**item) for item in items])


def unit_entries(
    sources: Sequence[SourceEntry], items: list[Json], *, columns: Mapping[str, list[str]]
) -> Iterator[UnitEntry]:
    """The units of all sources, file by file, from their arrays."""
    if len(items) != sum(source.units for source in sources):
        raise ValueError(f"there are {len(items)} units, not those that the sources say")
    units = _table(items, "unit", columns)
    _table([unit[4] for unit in units if unit[4] is not None], "rejects", columns)
    _table([shard for unit in units for shard in unit[5]], "shard", columns)
    rest = iter(units)
    for number, source in enumerate(sources):
        for index, unit in enumerate(islice(rest, source.units)):
            rows, lines, size, receipt, rejects, shards = unit
            yield UnitEntry(
                name=f"{source.prefix}-{index:05d}",
                source=number,
                rows=rows,
                lines=lines,
                receipt_bytes=size,
                receipt=receipt,
                rejects=None if rejects is None else RejectsEntry._make(rejects),
                shards=tuple([ShardEntry(*shard) for shard in shards]),
            )


def _table(rows: list[Any], kind: str, columns: Mapping[str, list[str]]) -> list[list[Any]]:
    """Rows whose columns have the right types and no negative numbers.

    Checked column by column, which takes a tenth of the time that checking row by row would.
    """
    names = columns[kind]
    if rows and (set(map(type, rows)) != {list} or set(map(len, rows)) != {len(names)}):
        raise ValueError(f"a {kind} does not have the columns of this format version")
    _check_columns(rows, dict(zip(names, _TYPES[kind], strict=False)), kind=kind)
    return rows


def _check_columns(rows: list[list[Any]], types: Mapping[str, set[type]], *, kind: str) -> None:
    for (name, allowed), column in zip(types.items(), zip(*rows, strict=True), strict=False):
        if not allowed.issuperset(map(type, column)) or (int in allowed and min(column) < 0):
            raise ValueError(f"a {kind} has {name} that are not what stands there")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEntry:
    """What one engine did, over all units."""

    name: str
    version: str
    reference: str
    reference_version: str
    units: int = 0
    checked_documents: int = 0
    mismatches: int = 0
    redone_units: int = 0
    routed_documents: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTotals:
    documents: int = 0
    tokens: int = 0
    shards: int = 0


def split_totals(units: Iterable[UnitEntry]) -> dict[str, SplitTotals]:
    """Totals of every split that has a shard, by name."""
    sums: dict[str, list[int]] = {}
    for unit in units:
        for shard in unit.shards:
            total = sums.setdefault(shard.split, [0, 0, 0])
            total[0] += shard.documents
            total[1] += shard.tokens
            total[2] += 1
    return {
        split: SplitTotals(documents=documents, tokens=tokens, shards=shards)
        for split, (documents, tokens, shards) in sorted(sums.items())
    }


# -------------------------------------------------------------------------------------------------
# Members of a JSON object, taken with their types checked.
#
# Receipts and manifests are read through this: a member that is missing, of another type or
# unknown is an error, never a default. Errors are ValueErrors here; whoever knows the file's name
# turns them into StoreErrors.

FORMAT_VERSION = 1
MASK_VERSION = 2
"""Of files that speak of masks; all others stay what an older tokenmill reads."""
PIECES_VERSION = 3
"""Of files that speak of rows in several pieces."""
UNLISTED_VERSION = 4
"""Of files that speak of rejected rows that are counted and not listed."""
_BRIEF_CHARACTERS = 200
_CHECKSUM = re.compile(r"[0-9a-f]{32}")

Checksum: TypeAlias = str
"""32 hexadecimal digits of xxh3-128; a field annotated so has its form checked by `into`."""

_Flat = TypeVar("_Flat", bound="DataclassInstance")


def brief(value: object) -> str:
    """A value for a message: cut where it is long, since someone may have made it so."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, too deep
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _BRIEF_CHARACTERS else f"{text[:_BRIEF_CHARACTERS]}..."


class FormatVersionError(StoreError):
    """A file of the store has a format version that this tokenmill does not read."""


class Fields:
    """One JSON object; each `take` removes a member, `finish` complains about those left."""

    __slots__ = ("_left", "_where")

    def __init__(self, value: Json, *, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {brief(value)}, not an object")
        self._left = dict(value)
        self._where = where

    def take(self, name: str) -> Json:
        try:
            return self._left.pop(name)
        except KeyError:
            raise ValueError(f"{self._where} has no member {name!r}") from None

    def has(self, name: str) -> bool:
        """Whether the member is there."""
        return name in self._left

    def integer(self, name: str) -> int:
        """A whole number of 0 or more: a store counts, and counts nothing below 0."""
        value = self.take(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, value, "a number of 0 or more")
        return value

    def optional_integer(self, name: str) -> int | None:
        if self._left.get(name, 0) is not None:
            return self.integer(name)
        self.take(name)
        return None

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, value, "a string or null")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, values, "a list of strings")
        return tuple(value for value in values if isinstance(value, str))

    def checksum(self, name: str) -> str:
        value = self.text(name)
        if not _CHECKSUM.fullmatch(value):
            raise self._wrong(name, value, "32 hexadecimal digits")
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def items(self, name: str) -> list[Json]:
        value = self.take(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.items(name)
        if not all(type(value) is int for value in values):
            raise self._wrong(name, values, "a list of numbers")
        return tuple(value for value in values if isinstance(value, int))

    def mapping(self, name: str) -> dict[str, Json]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def child(self, name: str) -> Fields:
        return Fields(self.take(name), where=f"{self._where}.{name}")

    def optional_child(self, name: str) -> Fields | None:
        value = self.take(name)
        return None if value is None else Fields(value, where=f"{self._where}.{name}")

    def children(self, name: str) -> Iterator[Fields]:
        for number, item in enumerate(self.items(name)):
            yield Fields(item, where=f"{self._where}.{name}[{number}]")

    def into(self, cls: type[_Flat]) -> _Flat:
        """All members as a flat dataclass, each read as its field is annotated."""
        values: dict[str, Json | tuple[Json, ...]] = {}
        left = self._left
        for name, types, kind in _readers(cls):
            value = left.get(name)
            # There may be a million receipts to read, so what is plainly right is taken at once.
            if type(value) in types and (type(value) is not int or value >= 0) and name in left:
                values[name] = left.pop(name)
            else:
                values[name] = getattr(self, kind)(name)
        self.finish()
        return cls(**values)

    def finish(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left))[:_BRIEF_CHARACTERS]
            raise ValueError(f"{self._where} has unknown members: {names}")

    def _wrong(self, name: str, value: Json, expected: str) -> ValueError:
        return ValueError(f"{self._where}.{name} is {brief(value)}, not {expected}")


_READERS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "integer"),
    "int | None": ((int, NoneType), "optional_integer"),
    "str": ((str,), "text"),
    "bool": ((bool,), "boolean"),
    "Checksum": ((), "checksum"),
    "tuple[str, ...]": ((), "texts"),
}
"""Annotation -> types that need no second look, and the method that takes it with one."""


@functools.cache
def _readers(cls: type[DataclassInstance]) -> list[tuple[str, tuple[type, ...], str]]:
    # Annotations are strings here (postponed evaluation), so the alias Checksum is still visible.
    return [(field.name, *_READERS[str(field.type)]) for field in dataclasses.fields(cls)]


def version_of(*, masks: bool, pieces: bool, unlisted: bool) -> int:
    """The format version of a file: the lowest that can say what it has to say."""
    if unlisted:
        return UNLISTED_VERSION
    if pieces:
        return PIECES_VERSION
    return MASK_VERSION if masks else FORMAT_VERSION


def check_version(members: Mapping[str, Json], *, path: Path | str) -> None:
    """Raise FormatVersionError, which names the tokenmill to use, unless we read the version."""
    version = members.get("format_version")
    if type(version) is int and FORMAT_VERSION <= version <= UNLISTED_VERSION:
        return
    writer = members.get("created_by")
    newer = type(version) is int and version > UNLISTED_VERSION
    raise FormatVersionError(
        f"{str(path)!r} has the format version {brief(version)}"
        + (f", written by {brief(writer)}" if isinstance(writer, str) else "")
        + f"; this tokenmill reads the versions {FORMAT_VERSION} to {UNLISTED_VERSION}",
        hint="read it with a newer tokenmill: pip install --upgrade tokenmill"
        if newer
        else "build the store again with this tokenmill",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """Size and checksum of one file."""

    bytes: int
    checksum: Checksum


def facts_of(data: bytes) -> FileFacts:
    """Size and checksum of a file with these bytes."""
    return FileFacts(bytes=len(data), checksum=checksum_of(data))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFacts:
    """Which slice of which file the unit is."""

    name: str
    path: str
    index: int
    start: int
    end: int | None
    """None means to the end of the file."""
    members: tuple[str, ...] = ()
    """Where the unit is a group of files of one row each: their paths, row by row."""

    @classmethod
    def of(
        cls,
        path: str,
        *,
        index: int,
        start: int,
        end: int | None,
        members: tuple[str, ...] = (),
    ) -> UnitFacts:
        """The facts of a unit, its name worked out."""
        name = unit_name(path, index=index)
        return cls(name=name, path=path, index=index, start=start, end=end, members=members)

    def __post_init__(self) -> None:
        if self.name != unit_name(self.path, index=self.index):
            raise ValueError(f"unit {self.name!r} is not named after {self.path!r}, {self.index}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """The input file as it was when the unit was read."""

    size: int
    version: str
    digest: str
    """xxh3-128 of the input bytes of the unit."""
    is_last: bool
    num_lines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Every row of a unit, accounted for; they add up over units."""

    rows: int = 0
    documents: int = 0
    empty: int = 0
    rejected: int = 0
    skipped: int = 0
    """Left out by a limit."""
    input_bytes: int = 0
    text_bytes: int = 0
    """UTF-8 of the documents written."""
    tokens: int = 0
    split_rows: int = 0
    """Rows that became several documents."""
    pieces: int = 0
    """Documents that those became."""
    unlisted: int = 0
    """Rejected rows that are counted by reason, and not listed one by one."""

    def __post_init__(self) -> None:
        used = self.documents + self.empty + self.rejected + self.skipped
        if self.rows != used - self.pieces + self.split_rows:
            pieces = f", {self.pieces} of them of {self.split_rows} rows," if self.pieces else ""
            raise ValueError(
                f"{self.rows} rows are not {self.documents} documents{pieces} + {self.empty} empty"
                f" + {self.rejected} rejected + {self.skipped} skipped"
            )
        if self.unlisted > self.rejected:
            raise ValueError(f"{self.unlisted} of {self.rejected} rejected rows are not listed")

    def to_json(self) -> dict[str, Json]:
        """Its members; those of later format versions only where they say something."""
        members: dict[str, Json] = asdict(self)
        if not self.pieces:
            del members["split_rows"], members["pieces"]
        if not self.unlisted:
            del members["unlisted"]
        return members

    @classmethod
    def from_json(cls, source: Fields) -> Counts:
        """What `to_json` wrote."""
        names = COUNTS[:-3] + (COUNTS[-3:-1] if source.has("pieces") else ())
        names += COUNTS[-1:] if source.has("unlisted") else ()
        counts = cls(**{name: source.integer(name) for name in names})
        source.finish()
        return counts

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in COUNTS})


def bytes_per_token(totals: Counts, config: Mapping[str, object]) -> float | None:
    """UTF-8 bytes of text behind each token of a store of this configuration.

    None where that is not known: where rows were cut off, only a part of their text was written,
    and whoever imported tokens has not seen any text.
    """
    is_cut = config.get("max_length") is not None and config.get("too_long") == "truncate"
    if not totals.tokens or not totals.text_bytes or is_cut:
        return None
    return totals.text_bytes / totals.tokens


COUNTS = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Which limits on a document's size give this very unit: resume with another budget."""

    largest_row_bytes: int
    smallest_too_large_bytes: int | None
    """None where no document was too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """Who made the ids, and how they were checked."""

    name: str
    version: str
    reference: str
    reference_version: str
    checked_documents: int = 0
    mismatches: int = 0
    redone: bool = False
    """The unit was encoded again by the reference after a mismatch."""
    routed_documents: int = 0
    """Documents given to the reference from the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskFacts:
    """The file that says which tokens of a shard count for the loss."""

    bytes: int
    checksum: Checksum
    counted: int
    """Tokens that count."""
    silent: int
    """Documents of which no token counts."""

    @property
    def file(self) -> FileFacts:
        return FileFacts(bytes=self.bytes, checksum=self.checksum)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """The documents of a unit that belong to one split."""

    name: str
    split: str
    documents: int
    tokens: int
    max_id: int
    rows: tuple[int, ...]
    """Run lengths over the unit's rows; see rows.py."""
    pieces: tuple[int, ...] = ()
    """Which of its rows became several documents; see rows.py."""
    bin: FileFacts
    idx: FileFacts
    mask: MaskFacts | None = None

    def __post_init__(self) -> None:
        mask = self.mask
        if mask is None:
            return
        if mask.bytes != self.tokens or mask.counted > self.tokens or mask.silent > self.documents:
            raise ValueError(
                f"a mask of {mask.bytes} bytes, {mask.counted} tokens that count and {mask.silent}"
                f" silent documents is not of {self.tokens} tokens in {self.documents} documents"
            )

    @property
    def files(self) -> dict[str, FileFacts]:
        """File name -> facts."""
        files = {f"{self.name}.bin": self.bin, f"{self.name}.idx": self.idx}
        return files if self.mask is None else {**files, f"{self.name}.mask": self.mask.file}

    def to_json(self) -> Json:
        files: dict[str, Json] = {"bin": asdict(self.bin), "idx": asdict(self.idx)}
        if self.mask is not None:
            files["mask"] = asdict(self.mask)
        return {
            "name": self.name,
            "split": self.split,
            "documents": self.documents,
            "tokens": self.tokens,
            "max_id": self.max_id,
            "rows": list(self.rows),
            **({"pieces": list(self.pieces)} if self.pieces else {}),
            "files": files,
        }

    @classmethod
    def from_json(cls, source: Fields) -> ShardFacts:
        files = source.child("files")
        shard = cls(
            name=source.text("name"),
            split=source.text("split"),
            documents=source.integer("documents"),
            tokens=source.integer("tokens"),
            max_id=source.integer("max_id"),
            rows=source.integers("rows"),
            pieces=source.integers("pieces") if source.has("pieces") else (),
            bin=files.child("bin").into(FileFacts),
            idx=files.child("idx").into(FileFacts),
            mask=files.child("mask").into(MaskFacts) if files.has("mask") else None,
        )
        files.finish()
        source.finish()
        return shard


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectsFacts:
    """The file of a unit's rejected rows."""

    rows: int
    bytes: int
    checksum: Checksum


def unlisted_rejects(line: bytes) -> dict[str, int]:
    """Reason -> rows that are not listed, of the last line of a file of rejects; {} of a row's."""
    if not line.startswith(b'{"more":'):
        return {}
    try:
        source = Fields(json.loads(line), where="the last line")
    except RecursionError as error:
        raise ValueError(str(error)) from error
    counts = source.mapping("more")
    source.finish()
    reasons = Fields(counts, where="more")
    return {reason: reasons.integer(reason) for reason in counts}


# -------------------------------------------------------------------------------------------------
# Python's search for garbage, put off while a million small things are made that all stay.


@contextmanager
def without_collection() -> Iterator[None]:
    """Make many objects that stay: looking for garbage among them takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
