"""The entries of a manifest: tokenizer, boundary tokens, and one line per source and unit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.store.format import index_bytes, token_dtype
from tokenmill.store.layout import UNIT_PREFIX, is_plain_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tokenmill.store.facts import FileFacts
    from tokenmill.store.fields import Checksum
    from tokenmill.store.format import TokenDtype
    from tokenmill.store.sealed import Json


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
