"""The facts that receipts and manifests are made of: small frozen values, read and written as JSON.

A fact is a struct of msgspec, whose home this is: a member that is missing, of another type or
unknown is an error, never a default, and numbers are counts: never negative, never floats. Only
what a later format version added has a default, and is left out of the JSON where it has it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeAlias, TypeVar

import msgspec

from tokenmill.errors import StoreError
from tokenmill.store.format import index_bytes, token_dtype
from tokenmill.store.layout import UNIT_PREFIX, checksum_of, is_plain_name, unit_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tokenmill.store.format import TokenDtype
    from tokenmill.store.layout import Json


FORMAT_VERSION = 1
MASK_VERSION = 2
"""Of files that speak of masks; all others stay what an older tokenmill reads."""
PIECES_VERSION = 3
"""Of files that speak of rows in several pieces."""
UNLISTED_VERSION = 4
"""Of files that speak of rejected rows that are counted and not listed."""
_BRIEF_CHARACTERS = 200

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""32 hexadecimal digits of xxh3-128."""

_Read = TypeVar("_Read")


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object whose members are the fields, in their order."""

    def to_json(self) -> dict[str, Json]:
        members: dict[str, Json] = msgspec.to_builtins(self)
        return members

    def but(self, **changes: object) -> Self:
        """The same with other values, checked as all are."""
        return msgspec.structs.replace(self, **changes)


def read_fact(value: object, kind: type[_Read], *, where: str) -> _Read:
    """Parsed JSON as a fact, or as any type that is made of them.

    Errors are ValueErrors here; whoever knows the file's name turns them into StoreErrors.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error), value, where)) from error


_PROBLEM = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<place>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_EXPECTED = {
    "int": "a number of 0 or more",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def _explain(message: str, value: Any, where: str) -> str:
    """What msgspec found, with the member and its value."""
    found = _PROBLEM.fullmatch(message)
    assert found is not None
    problem, place = found["problem"], where + (found["place"] or "")
    if named := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", problem):
        name = named[2][:_BRIEF_CHARACTERS]
        if named[1] == "missing required":
            return f"{place} has no member {name!r}"
        return f"{place} has unknown members: {name}"
    if not (named := re.match(r"Expected `(\w+)( \| null)?`( matching)?", problem)):
        return problem  # what a fact itself found
    expected = _EXPECTED.get(named[1], named[1]) + (" or null" if named[2] else "")
    expected += length[0] if (length := re.search(r" of length \d+", problem)) else ""
    expected = "32 hexadecimal digits" if named[3] else expected
    for name, number in _STEP.findall(found["place"] or ""):
        if number == "...":  # in an object of any names: msgspec does not say which
            return f"{place} is not {expected}"
        value = value[name or int(number)]
    return f"{place} is {brief(value)}, not {expected}"


def brief(value: object) -> str:
    """A value for a message: cut where it is long, since someone may have made it so."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, too deep
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _BRIEF_CHARACTERS else f"{text[:_BRIEF_CHARACTERS]}..."


class FormatVersionError(StoreError):
    """A file of the store has a format version that this tokenmill does not read."""


# -------------------------------------------------------------------------------------------------
# The entries of a manifest: tokenizer, boundary tokens, and one line per source and unit.


class TokenizerFacts(Fact, frozen=True, kw_only=True):
    """Which tokenizer made the ids."""

    kind: str
    fingerprint: str
    vocab_size: Count
    files: dict[str, FileFacts]
    """Name in `tokenizer/` -> size and checksum."""

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_plain_name(name):
                raise ValueError(f"tokenizer file {name!r} is not a plain name in tokenizer/")


class BoundaryToken(Fact, frozen=True, kw_only=True):
    """A token that the build put at the start or the end of every document."""

    token: str
    id: Count
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


class SourceEntry(Fact, frozen=True, kw_only=True):
    """An input file."""

    path: str
    prefix: str
    """Unit k of the file is named `{prefix}-{k:05d}`."""
    size: Count
    version: str
    units: Count
    rows: Count

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
    documents: Count
    tokens: Count
    bin: str
    idx: str
    mask: str | None = None
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

    rows: Count
    bytes: Count
    checksum: str


class UnitEntry(NamedTuple):
    """A unit: its place in the input, and its files."""

    name: str
    source: Count
    """Position in `sources`."""
    rows: Count
    lines: Count
    receipt_bytes: Count
    receipt: str
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


UnitRow: TypeAlias = tuple[Count, Count, Count, str, RejectsEntry | None, tuple[ShardEntry, ...]]
"""The array of a unit: its columns."""


def unit_entries(sources: Iterable[SourceEntry], rows: Iterable[UnitRow]) -> tuple[UnitEntry, ...]:
    """The units of all sources, file by file."""
    rest = iter(rows)
    return tuple(
        [
            UnitEntry(f"{source.prefix}-{index:05d}", number, *row)
            for number, source in enumerate(sources)
            for index, row in enumerate(islice(rest, source.units))
        ]
    )


class EngineEntry(Fact, frozen=True, kw_only=True):
    """What one engine did, over all units."""

    name: str
    version: str
    reference: str
    reference_version: str
    units: Count
    checked_documents: Count
    mismatches: Count
    redone_units: Count
    routed_documents: Count


class SplitTotals(Fact, frozen=True, kw_only=True):
    documents: Count
    tokens: Count
    shards: Count


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


class FileFacts(Fact, frozen=True, kw_only=True):
    """Size and checksum of one file."""

    bytes: Count
    checksum: Checksum


def facts_of(data: bytes) -> FileFacts:
    """Size and checksum of a file with these bytes."""
    return FileFacts(bytes=len(data), checksum=checksum_of(data))


class UnitFacts(Fact, frozen=True, kw_only=True):
    """Which slice of which file the unit is."""

    name: str
    path: str
    index: Count
    start: Count
    end: Count | None
    """None means to the end of the file."""
    members: tuple[str, ...]
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


class SourceFacts(Fact, frozen=True, kw_only=True):
    """The input file as it was when the unit was read."""

    size: Count
    version: str
    digest: str
    """xxh3-128 of the input bytes of the unit."""
    is_last: bool
    num_lines: Count


class Counts(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """Every row of a unit, accounted for; they add up over units."""

    rows: Count
    documents: Count
    empty: Count
    rejected: Count
    skipped: Count
    """Left out by a limit."""
    input_bytes: Count
    text_bytes: Count
    """UTF-8 of the documents written."""
    tokens: Count
    split_rows: Count = 0
    """Rows that became several documents."""
    pieces: Count = 0
    """Documents that those became."""
    unlisted: Count = 0
    """Rejected rows that are counted by reason, and not listed one by one."""

    def __post_init__(self) -> None:
        used = self.documents + self.empty + self.rejected + self.skipped
        if self.rows != used - self.pieces + self.split_rows:
            pieces = f", {self.pieces} of them of {self.split_rows} rows," if self.pieces else ""
            raise ValueError(
                f"{self.rows} rows are not {self.documents} documents{pieces} + {self.empty} empty"
                f" + {self.rejected} rejected + {self.skipped} skipped"
            )
        if bool(self.pieces) != bool(self.split_rows):
            raise ValueError(f"{self.pieces} documents are not pieces of {self.split_rows} rows")
        if self.unlisted > self.rejected:
            raise ValueError(f"{self.unlisted} of {self.rejected} rejected rows are not listed")

    @classmethod
    def of(cls, **given: int) -> Counts:
        """Those given, and 0 of everything else."""
        return cls(**{name: given.pop(name, 0) for name in COUNTS}, **given)

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


COUNTS = Counts.__struct_fields__


class Bounds(Fact, frozen=True, kw_only=True):
    """Which limits on a document's size give this very unit: resume with another budget."""

    largest_row_bytes: Count
    smallest_too_large_bytes: Count | None
    """None where no document was too large."""


class EngineFacts(Fact, frozen=True, kw_only=True):
    """Who made the ids, and how they were checked."""

    name: str
    version: str
    reference: str
    reference_version: str
    checked_documents: Count
    mismatches: Count
    redone: bool
    """The unit was encoded again by the reference after a mismatch."""
    routed_documents: Count
    """Documents given to the reference from the start."""


class MaskFacts(Fact, frozen=True, kw_only=True):
    """The file that says which tokens of a shard count for the loss."""

    bytes: Count
    checksum: Checksum
    counted: Count
    """Tokens that count."""
    silent: Count
    """Documents of which no token counts."""

    @property
    def file(self) -> FileFacts:
        return FileFacts(bytes=self.bytes, checksum=self.checksum)


class ShardFiles(Fact, frozen=True, kw_only=True, omit_defaults=True):
    bin: FileFacts
    idx: FileFacts
    mask: MaskFacts | msgspec.UnsetType = msgspec.UNSET
    """Left out where there are no masks; null is no value for it."""


class ShardFacts(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """The documents of a unit that belong to one split."""

    name: str
    split: str
    documents: Count
    tokens: Count
    max_id: Count
    rows: tuple[Count, ...]
    """Run lengths over the unit's rows; see rows.py."""
    pieces: tuple[Count, ...] = ()
    """Which of its rows became several documents; see rows.py."""
    files: ShardFiles

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
    def mask(self) -> MaskFacts | None:
        return None if self.files.mask is msgspec.UNSET else self.files.mask

    @property
    def named_files(self) -> dict[str, FileFacts]:
        """File name -> facts."""
        files = {f"{self.name}.bin": self.files.bin, f"{self.name}.idx": self.files.idx}
        return files if self.mask is None else {**files, f"{self.name}.mask": self.mask.file}


class RejectsFacts(Fact, frozen=True, kw_only=True):
    """The file of a unit's rejected rows."""

    rows: Count
    bytes: Count
    checksum: Checksum


class _Unlisted(Fact, frozen=True, kw_only=True):
    more: dict[str, Count]


def unlisted_rejects(line: bytes) -> dict[str, int]:
    """Reason -> rows that are not listed, of the last line of a file of rejects; {} of a row's."""
    if not line.startswith(b'{"more":'):
        return {}
    try:
        last = read_fact(json.loads(line), _Unlisted, where="the last line")
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return last.more
