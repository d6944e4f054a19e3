"""What a store says of itself: the receipt of each unit, and the manifest of all of them.

    UnitWriter -> Receipt, one for each unit -> ManifestAssembler -> Manifest

A receipt is the small sealed JSON that says a unit is complete, for all of its splits and its
rejects, and is renamed into place last: files that no receipt claims are leftovers. Both are made
of facts: small frozen values, read and written as JSON.

A fact is a struct of msgspec, whose home this is: a member that is missing, of another type or
unknown is an error, never a default, and numbers are counts: never negative, never floats. Only
what a later format version added has a default, and is left out of the JSON where it has it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import re
import shlex
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import msgspec

from tokenmill.errors import StoreError
from tokenmill.options import CHAT_PREFERENCE, PREFERENCE
from tokenmill.store.format import TokenDtype, check_runs, index_bytes, split_counts, token_dtype
from tokenmill.store.layout import (
    SPLIT_NAME,
    UNIT_PREFIX,
    Json,
    StoreLayout,
    check_seal,
    checksum_of,
    is_plain_name,
    replace_file,
    seal,
    seal_line,
    shard_name,
    sync_folder,
    unit_name,
    unit_prefix,
    unseal,
)
from tokenmill.words import slice_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

# Format versions of files: the lowest that can say what a file has to say, so that an older
# tokenmill reads all that it can.
FORMAT_VERSION = 1
MASK_VERSION = 2
PIECES_VERSION = 3  # rows in several pieces
UNLISTED_VERSION = 4  # rejected rows that are counted and not listed
GROUPS_VERSION = 5  # units of several files, of any number of rows each
UNKNOWN_VERSION = 6  # text that the tokenizer does not know
FILTERED_VERSION = 7  # rows that a condition left out
PAIRS_VERSION = 8  # rows of two sides, of which one is not to be learned: manifests alone
FORGOTTEN_VERSION = 9  # documents that were forgotten
LATEST_VERSION = FORGOTTEN_VERSION
_BRIEF_CHARACTERS = 200

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
# 32 hexadecimal digits of xxh3-128.
Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]

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


_HEAD = re.compile(rb'\{\n"format_version":([%d-%d]),\n' % (FORMAT_VERSION, LATEST_VERSION))


class FormatVersionError(StoreError):
    """A file of the store has a format version that this tokenmill does not read."""


class SealedFact(Fact, frozen=True, kw_only=True):
    """A fact that is a file: sealed, and with a format version."""

    kind: ClassVar[str]
    remedy: ClassVar[str]

    @property
    def version(self) -> int:
        """Its format version."""
        return FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """Its file."""
        return seal({"format_version": self.version, **self.to_json()})

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path | str) -> Self:
        """Read its file; StoreError names it where anything is wrong."""
        body = check_seal(data, path=path)
        found, head = None, _HEAD.match(body)
        if head is not None and body.endswith(b",\n"):
            # In the form that tokenmill writes. All else, and what is wrong, takes twice as long.
            with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                version = int(head[1])
                found = msgspec.json.decode(b"{%b}" % body[head.end() : -2], type=cls)
        try:
            if found is None:
                members = unseal(data, path=path)
                version = check_version(members, path=path)
                found = read_fact(members, cls, where=cls.kind)
            if version != found.version:
                raise ValueError(f"its format version is {version}, and its members are another's")
            found.check_path(str(path))
        except ValueError as error:
            raise not_ours(cls.kind, path, error, hint=cls.remedy) from error
        return found

    def check_path(self, path: str) -> None:
        """ValueError for a file with another's name."""


def not_ours(kind: str, path: Path | str, error: Exception, *, hint: str | None) -> StoreError:
    """The error for a file that is sealed, and no fact."""
    return StoreError(f"{str(path)!r} is not a {kind} that tokenmill wrote: {error}", hint=hint)


def version_of(counts: Counts, *, masks: bool) -> int:
    """The format version of a file that speaks of so much."""
    if counts.forgotten:
        return FORGOTTEN_VERSION
    if counts.filtered:
        return FILTERED_VERSION
    if counts.has_unknown:
        return UNKNOWN_VERSION
    if counts.unlisted:
        return UNLISTED_VERSION
    if counts.pieces:
        return PIECES_VERSION
    return MASK_VERSION if masks else FORMAT_VERSION


def check_version(members: dict[str, Json], *, path: Path | str) -> int:
    """Take the version out of the members; FormatVersionError where we do not read it."""
    version, writer = members.pop("format_version", None), members.get("created_by")
    if type(version) is int and FORMAT_VERSION <= version <= LATEST_VERSION:
        return version
    newer = type(version) is int and version > LATEST_VERSION
    raise FormatVersionError(
        f"{str(path)!r} has the format version {brief(version)}"
        + (f", written by {brief(writer)}" if isinstance(writer, str) else "")
        + f"; this tokenmill reads the versions {FORMAT_VERSION} to {LATEST_VERSION}",
        hint="read it with a newer tokenmill: pip install --upgrade tokenmill"
        if newer
        else "build the store again with this tokenmill",
    )


# -------------------------------------------------------------------------------------------------
# What a receipt is made of.


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
    end: Count | None  # None means to the end of the file
    members: tuple[str, ...]  # of a unit that is a group of files: their paths

    @classmethod
    def of(
        cls, path: str, *, index: int, start: int, end: int | None, members: tuple[str, ...] = ()
    ) -> UnitFacts:
        """The facts of a unit, its name worked out."""
        name = unit_name(path, index=index)
        return cls(name=name, path=path, index=index, start=start, end=end, members=members)

    @property
    def title(self) -> str:
        """What messages call it."""
        return slice_of(self.members or (self.path,), self.start, self.end, "range")

    def __post_init__(self) -> None:
        if self.name != unit_name(self.path, index=self.index):
            raise ValueError(f"unit {self.name!r} is not named after {self.path!r}, {self.index}")


class SourceFacts(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """The input file as it was when the unit was read."""

    size: Count
    version: str
    digest: str  # xxh3-128 of the input bytes of the unit
    is_last: bool
    num_lines: Count
    member_rows: tuple[Count, ...] = ()  # of each file of a group; none where all have one row

    def __post_init__(self) -> None:
        if self.member_rows and set(self.member_rows) == {1}:
            raise ValueError("files of one row each have their rows listed")


class Counts(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """Every row of a unit, accounted for; they add up over units."""

    rows: Count
    documents: Count
    empty: Count
    rejected: Count
    skipped: Count  # left out by a limit
    input_bytes: Count
    text_bytes: Count  # UTF-8 of the documents written
    tokens: Count
    split_rows: Count = 0  # rows that became several documents
    pieces: Count = 0  # documents that those became
    unlisted: Count = 0  # rejected rows that are counted by reason, and not listed one by one
    unknown_ids: Count = 0  # tokens that say "unknown", such as <unk>
    lost_characters: Count = 0  # of the documents' text, that the tokenizer does not know
    lost_bytes: Count = 0  # their UTF-8, out of `text_bytes`
    filtered: Count = 0  # rows that a condition left out
    undecided: Count = 0  # of those: it was not false either, since a value was missing
    # Rows whose documents were taken out of the store, and their tokens; what is said above of
    # text and its bytes is of them too, and what is said of documents and tokens is not.
    forgotten: Count = 0
    forgotten_tokens: Count = 0

    def __post_init__(self) -> None:
        used = self.documents + self.empty + self.rejected + self.skipped + self.filtered
        used += self.forgotten
        if self.rows != used - self.pieces + self.split_rows:
            pieces = f", {self.pieces} of them of {self.split_rows} rows," if self.pieces else ""
            raise ValueError(
                f"{self.rows} rows are not {self.documents} documents{pieces} + {self.empty} empty"
                f" + {self.rejected} rejected + {self.skipped} skipped"
                + (f" + {self.filtered} left out by a condition" if self.filtered else "")
                + (f" + {self.forgotten} forgotten" if self.forgotten else "")
            )
        if self.forgotten_tokens and not self.forgotten:
            raise ValueError(f"{self.forgotten_tokens} tokens of no rows were forgotten")
        if self.undecided > self.filtered:
            raise ValueError(f"{self.undecided} of {self.filtered} rows left out are undecided")
        if bool(self.pieces) != bool(self.split_rows):
            raise ValueError(f"{self.pieces} documents are not pieces of {self.split_rows} rows")
        if self.unlisted > self.rejected:
            raise ValueError(f"{self.unlisted} of {self.rejected} rejected rows are not listed")
        if self.unknown_ids > self.tokens:
            raise ValueError(f"{self.unknown_ids} of {self.tokens} tokens are unknown")
        if not self.lost_characters <= self.lost_bytes <= self.text_bytes:
            raise ValueError(
                f"{self.lost_characters} characters, {self.lost_bytes} bytes of them, of"
                f" {self.text_bytes} bytes of text are unknown"
            )

    @property
    def has_unknown(self) -> bool:
        """Whether there is anything that the tokenizer does not know."""
        return bool(self.unknown_ids or self.lost_bytes)

    @property
    def is_much_unknown(self) -> bool:
        """Whether it is more than should go without a word."""
        return self.lost_bytes > UNKNOWN_SHARE * self.text_bytes

    @classmethod
    def of(cls, **given: int) -> Counts:
        """Those given, and 0 of everything else."""
        return cls(**{name: given.pop(name, 0) for name in COUNTS}, **given)

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in COUNTS})


def bytes_per_token(totals: Counts, config: Mapping[str, object]) -> float | None:
    """UTF-8 bytes of text for each token of a store of this configuration.

    None where that is not known: where rows were cut off, only a part of their text was written,
    and whoever imported tokens has not seen any text. Of all text that became tokens, forgotten
    since or not.
    """
    is_cut = config.get("max_length") is not None and config.get("too_long") == "truncate"
    tokens = totals.tokens + totals.forgotten_tokens
    if not tokens or not totals.text_bytes or is_cut:
        return None
    return totals.text_bytes / tokens


COUNTS = Counts.__struct_fields__


# More of a text than this should not be unknown without a word.
UNKNOWN_SHARE = 0.001
_MOST_EXAMPLES = 16


class UnknownFacts(Fact, frozen=True, kw_only=True):
    """What became of text that the tokenizer does not know, and which text that was."""

    token: str | None  # null where it left out such text
    id: Count | None
    examples: tuple[tuple[str, Count], ...]  # what is there most often, and how often

    @classmethod
    def of(cls, token: str | None, number: int | None, found: Mapping[str, int]) -> UnknownFacts:
        """Those of so many of each."""
        ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
        return cls(token=token, id=number, examples=tuple(ranked[:_MOST_EXAMPLES]))


class Bounds(Fact, frozen=True, kw_only=True):
    """Which limits on a document's size give this very unit: resume with another budget."""

    largest_row_bytes: Count
    smallest_too_large_bytes: Count | None  # None where no document was too large


class EngineNames(Fact, frozen=True, kw_only=True):
    name: str
    version: str
    reference: str
    reference_version: str


class EngineFacts(EngineNames, frozen=True, kw_only=True):
    """Who made the ids, and how they were checked."""

    checked_documents: Count
    mismatches: Count
    redone: bool  # the unit was encoded again by the reference after a mismatch
    routed_documents: Count  # given to the reference from the start


class MaskFacts(FileFacts, frozen=True, kw_only=True):
    """The file that says which tokens of a shard count for the loss."""

    counted: Count  # tokens that count
    silent: Count  # documents of which no token counts


class ShardFiles(Fact, frozen=True, kw_only=True, omit_defaults=True):
    bin: FileFacts
    idx: FileFacts
    mask: MaskFacts | msgspec.UnsetType = msgspec.UNSET  # null is no value for it


class ShardFacts(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """The documents of a unit that belong to one split."""

    name: str
    split: str
    documents: Count
    tokens: Count
    max_id: Count
    rows: tuple[Count, ...]  # run lengths over the unit's rows: see format.RowRuns
    pieces: tuple[Count, ...] = ()  # which of its rows became several documents
    files: ShardFiles

    def __post_init__(self) -> None:
        mask = self.mask
        if mask is None:
            return
        if mask.bytes != self.tokens or mask.counted > self.tokens or mask.silent > self.documents:
            raise ValueError(
                f"a mask of {mask.bytes} bytes, with {mask.counted} tokens in it and {mask.silent}"
                f" documents without, is not of {self.tokens} tokens in {self.documents} documents"
            )

    @property
    def mask(self) -> MaskFacts | None:
        return None if self.files.mask is msgspec.UNSET else self.files.mask


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


class Claim(NamedTuple):
    """What a build must keep in mind of a unit that is complete: it may have a million of them."""

    splits: tuple[str, ...]
    mask: bool
    rejects: bool
    is_last: bool  # nothing of the unit's file comes after it


_claim = functools.cache(Claim)  # most units of a store share one


class Receipt(SealedFact, frozen=True, kw_only=True, omit_defaults=True):
    """A unit that is complete."""

    kind: ClassVar[str] = "receipt"
    remedy: ClassVar[str] = "remove it and run the build again with the same command"

    unit: UnitFacts
    source: SourceFacts
    config: str  # fingerprint of everything in the configuration that decides the bytes
    counts: Counts
    bounds: Bounds
    engine: EngineFacts
    shards: tuple[ShardFacts, ...]
    rejects: RejectsFacts | None
    unknown: UnknownFacts | msgspec.UnsetType = msgspec.UNSET  # only where there is any

    def __post_init__(self) -> None:
        for shard in self.shards:
            if not SPLIT_NAME.fullmatch(shard.split):
                raise ValueError(f"split {shard.split!r} is not lower-case letters, digits and _")
            if shard.name != shard_name(self.unit.name, split=shard.split):
                raise ValueError(f"shard {shard.name!r} is not named after its unit and split")
            rows, pieces = self.counts.rows, shard.pieces
            check_runs(shard.rows, documents=shard.documents, rows=rows, pieces=pieces)
        files, file_rows = len(self.unit.members), self.source.member_rows
        if file_rows and (len(file_rows), sum(file_rows)) != (files, self.counts.rows):
            raise ValueError(
                f"{sum(file_rows)} rows of {len(file_rows)} grouped files are not"
                f" {self.counts.rows} rows of {files}"
            )
        if files and not file_rows and files < self.counts.rows:
            raise ValueError(f"{self.counts.rows} rows of {files} grouped files")
        if len({shard.split for shard in self.shards}) != len(self.shards):
            raise ValueError("two shards of one unit have the same split")
        if len({shard.mask is None for shard in self.shards}) > 1:
            raise ValueError("some shards of one unit have a mask, others have none")
        if isinstance(self.unknown, UnknownFacts) != self.counts.has_unknown:
            raise ValueError("what is unknown is counted and not named, or named and not counted")
        split = [split_counts(shard.pieces) for shard in self.shards]
        found = {
            "split rows": (sum(rows for rows, _ in split), self.counts.split_rows),
            "pieces": (sum(pieces for _, pieces in split), self.counts.pieces),
            "documents": (sum(shard.documents for shard in self.shards), self.counts.documents),
            "tokens": (sum(shard.tokens for shard in self.shards), self.counts.tokens),
            "rejected": (0 if self.rejects is None else self.rejects.rows, self.counts.rejected),
        }
        for name, (files, counted) in found.items():
            if files != counted:
                raise ValueError(f"the unit's files have {files} {name}, its counts say {counted}")

    @property
    def has_mask(self) -> bool:
        """Whether its shards have masks; a unit without shards has none."""
        return any(shard.mask is not None for shard in self.shards)

    @property
    def version(self) -> int:
        least = GROUPS_VERSION if self.source.member_rows else FORMAT_VERSION
        return max(least, version_of(self.counts, masks=self.has_mask))

    def file_of(self, row: int) -> tuple[str, int]:
        """The file of a row of a unit that is a group, and the row's number in that file."""
        return _file_of(self.unit, self.source, row)

    @property
    def files(self) -> dict[str, FileFacts]:
        """Files in `shards/` that this receipt claims, itself left out."""
        return {
            f"{shard.name}.{kind}": found
            for shard in self.shards
            for kind in ShardFiles.__struct_fields__
            if isinstance(found := getattr(shard.files, kind), FileFacts)
        }

    def without(
        self, shards: tuple[ShardFacts, ...], *, rows: int, tokens: int, unknown_ids: int
    ) -> Receipt:
        """The same with these shards, from which so many rows were taken.

        What is said of the text of all rows stays, but for its hash, where it would be that of
        forgotten texts alone, and for examples, which may be of them.
        """
        split = [split_counts(shard.pieces) for shard in shards]
        counts = self.counts.but(
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            split_rows=sum(rows for rows, _ in split),
            pieces=sum(pieces for _, pieces in split),
            unknown_ids=self.counts.unknown_ids - unknown_ids,
            forgotten=self.counts.forgotten + rows,
            forgotten_tokens=self.counts.forgotten_tokens + tokens,
        )
        unknown: UnknownFacts | msgspec.UnsetType = msgspec.UNSET
        if counts.has_unknown:
            assert isinstance(self.unknown, UnknownFacts)
            unknown = self.unknown.but(examples=())
        source = self.source if shards else self.source.but(digest="")
        return self.but(shards=shards, counts=counts, unknown=unknown, source=source)

    @property
    def claim(self) -> Claim:
        """What it claims, and no more."""
        splits = tuple(shard.split for shard in self.shards)
        return _claim(splits, self.has_mask, self.rejects is not None, self.source.is_last)

    def check_path(self, path: str) -> None:
        if not path.endswith(f"{self.unit.name}.json"):
            raise ValueError(f"it is of the unit {self.unit.name!r}")


def _file_of(unit: UnitFacts, source: SourceFacts, row: int) -> tuple[str, int]:
    members = unit.members
    ends = [*itertools.accumulate(source.member_rows or [1] * len(members))]
    place = bisect.bisect_right(ends, row)
    return members[place], row - (ends[place - 1] if place else 0)


def read_receipt(layout: StoreLayout, unit: str) -> Receipt:
    """The receipt of a unit; StoreError where it is missing or damaged."""
    return Receipt.from_bytes(read_receipt_bytes(layout, unit), path=_path(layout, unit))


def _path(layout: StoreLayout, unit: str) -> str:
    """`layout.receipt`, without the path object: making those takes as long as reading the file."""
    return f"{layout.root}/shards/{unit}.json"


def read_receipt_bytes(layout: StoreLayout, unit: str) -> bytes:
    """The bytes of a unit's receipt; StoreError where it cannot be read."""
    try:
        with open(_path(layout, unit), "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise StoreError(
            f"the receipt {layout.upstream.shown(layout.receipt(unit))!r} cannot be read:"
            f" {error.strerror or error}",
            hint="run the build again with the same command: it rewrites the unit",
        ) from error


def find_receipt(layout: StoreLayout, unit: str) -> Receipt | None:
    """The receipt of a unit that is complete; None where the unit must be built (again).

    Sizes of the files are checked, their bytes are not: that is what `check_store` is for.
    """
    try:
        receipt = read_receipt(layout, unit)
    except FormatVersionError:
        raise
    except StoreError:
        return None
    sizes = [("shards", name, facts.bytes) for name, facts in receipt.files.items()]
    if receipt.rejects is not None:
        sizes.append(("rejects", f"{unit}.jsonl", receipt.rejects.bytes))
    return receipt if all(layout.size(f, name) == size for f, name, size in sizes) else None


def rewrite_receipt(layout: StoreLayout, receipt: Receipt) -> None:
    """Replace a receipt whose unit kept its bytes (a source that was touched, not changed)."""
    replace_file(layout, layout.receipt(receipt.unit.name), receipt.to_bytes())


# -------------------------------------------------------------------------------------------------
# The manifest `tokenmill.json`: what a reader must never guess, sealed, and written last.
#
# It is a function of the input and the configuration, byte for byte: no date, no host, no
# duration, nothing that depends on the number of workers or on an interruption. `runs.jsonl` keeps
# those.


class TokenizerFacts(Fact, frozen=True, kw_only=True):
    """Which tokenizer made the ids."""

    kind: str
    fingerprint: str
    vocab_size: Count
    files: dict[str, FileFacts]  # by their names in tokenizer/

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_plain_name(name):
                raise ValueError(f"tokenizer file {name!r} is not a plain name in tokenizer/")


class BoundaryToken(Fact, frozen=True, kw_only=True):
    """A token that the build put at the start or the end of every document."""

    token: str
    id: Count
    position: str  # start or end

    def __post_init__(self) -> None:
        if self.position not in {"start", "end"}:
            raise ValueError(f"{self.position!r} is not a position: start or end")


class StoreIdentity(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """How text became ids: everything about a store that does not follow from its receipts."""

    created_by: str  # tokenmill and its version
    tokenizer: TokenizerFacts
    eos: BoundaryToken | None
    bos: BoundaryToken | None
    special_tokens: str  # what was done with those inside documents: text, parse or reject
    mask: bool = False  # every shard has a mask, which says which tokens count for the loss
    config: dict[str, Any]  # everything that decides the bytes
    fingerprint: str  # of `config`; every receipt names it

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

    @property
    def has_pairs(self) -> bool:
        """Whether two documents after each other are a pair: a chosen and a rejected answer."""
        return self.config.get("format") in (PREFERENCE, CHAT_PREFERENCE)


def config_fingerprint(**content: Any) -> str:
    """sha256 of all that decides the bytes of a store."""
    content["format_version"] = FORMAT_VERSION
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


class SourceEntry(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """An input file."""

    path: str
    prefix: str  # unit k of the file is named `{prefix}-{k:05d}`
    size: Count
    version: str
    units: Count
    rows: Count
    # Where the tokenizer does not know all of its text: how much it has, and what of it is unknown.
    text_bytes: Count = 0
    unknown_ids: Count = 0
    lost_characters: Count = 0
    lost_bytes: Count = 0

    def __post_init__(self) -> None:
        if not UNIT_PREFIX.fullmatch(self.prefix):
            raise ValueError(f"{self.prefix!r} cannot begin the name of a unit")


# Entries that a large store has thousands of are named tuples, and arrays in JSON: a manifest of
# 10,000 units then opens five times as fast as with dataclasses and objects.

# What a mask counts where nobody wrote it down: other projects' files, read in place.
UNCOUNTED = -1


class ShardEntry(NamedTuple):
    """A shard, as far as a reader needs it; sizes of its files follow from its counts."""

    split: str
    documents: Count
    tokens: Count
    bin: str
    idx: str
    mask: str | None = None  # None where the store has no masks
    counted: int = 0  # tokens that count, by the mask
    silent: int = 0  # documents of which no token counts, by the mask

    @property
    def idx_bytes(self) -> int:
        return index_bytes(self.documents)

    def bin_bytes(self, dtype: TokenDtype) -> int:
        return self.tokens * dtype.itemsize

    def to_json(self) -> list[Json]:
        return [*self[: _shard_width(mask=self.mask is not None)]]


def _shard_width(*, mask: bool) -> int:
    return 8 if mask else 5


class RejectsEntry(NamedTuple):
    """The file of a unit's rejected rows."""

    rows: Count
    bytes: Count
    checksum: str


class UnitEntry(NamedTuple):
    """A unit: its place in the input, and its files."""

    name: str
    source: Count  # position in `sources`
    rows: Count
    lines: Count
    receipt_bytes: Count
    receipt: str
    rejects: RejectsEntry | None
    shards: tuple[ShardEntry, ...]

    def to_json(self) -> Json:
        rejects: Json = None if self.rejects is None else [*self.rejects]
        return [*self[2:6], rejects, [shard.to_json() for shard in self.shards]]


UnitRow: TypeAlias = tuple[Count, Count, Count, str, RejectsEntry | None, tuple[ShardEntry, ...]]


def _columns(*, mask: bool) -> dict[str, Json]:
    """What the values in the arrays are; a manifest says it too."""
    shard = ShardEntry._fields[: _shard_width(mask=mask)]
    return {
        "unit": [*UnitEntry._fields[2:]],
        "rejects": [*RejectsEntry._fields],
        "shard": [*shard],
    }


class ForgottenReason(Fact, frozen=True, kw_only=True):
    """How many documents were forgotten for one reason."""

    reason: str
    documents: Count
    tokens: Count


class ForgottenStep(Fact, frozen=True, kw_only=True):
    """One time that documents were taken out of a store: how many, why, and of which state of it.

    Which they were is not said.
    """

    manifest: Checksum  # the seal of the manifest that was: each is chained to the one before
    contents: dict[str, Checksum]  # `Store.content` of its splits
    reasons: tuple[ForgottenReason, ...]

    @property
    def documents(self) -> int:
        return sum(each.documents for each in self.reasons)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.reasons)


class EngineEntry(EngineNames, frozen=True, kw_only=True):
    """What one engine did, over all units."""

    units: Count
    checked_documents: Count
    mismatches: Count
    redone_units: Count
    routed_documents: Count


class SplitTotals(Fact, frozen=True, kw_only=True):
    documents: Count
    tokens: Count
    shards: Count


def split_totals(shards: Iterable[ShardEntry]) -> dict[str, SplitTotals]:
    """Totals of every split that has a shard, by name."""
    sums: dict[str, list[int]] = {}
    for shard in shards:
        total = sums.setdefault(shard.split, [0, 0, 0])
        total[0] += shard.documents
        total[1] += shard.tokens
        total[2] += 1
    return {
        split: SplitTotals(documents=documents, tokens=tokens, shards=count)
        for split, (documents, tokens, count) in sorted(sums.items())
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A complete store."""

    identity: StoreIdentity
    totals: Counts
    splits: Mapping[str, SplitTotals]
    engines: tuple[EngineEntry, ...]
    sources: tuple[SourceEntry, ...]
    units: tuple[UnitEntry, ...]  # in the order of the plan: file by file, and along each file
    unknown: UnknownFacts | None = None
    forgotten: tuple[ForgottenStep, ...] = ()  # documents that were taken out, time after time

    def __post_init__(self) -> None:
        if (self.unknown is not None) != self.totals.has_unknown:
            raise ValueError("what is unknown is counted and not named, or named and not counted")
        if len({source.prefix for source in self.sources}) != len(self.sources):
            raise ValueError("two sources have the same prefix")
        if not all(map(SPLIT_NAME.fullmatch, self.splits)):
            raise ValueError(f"splits {list(self.splits)} are not plain names")
        if dict(self.splits) != split_totals(shard for _, shard in self.shards()):
            raise ValueError("the totals of the splits are not those of their shards")
        if sum(split.tokens for split in self.splits.values()) != self.totals.tokens:
            raise ValueError("the totals are not those of the shards")

    @property
    def version(self) -> int:
        """Its format version."""
        if self.forgotten:
            return FORGOTTEN_VERSION
        if self.identity.has_pairs:
            return PAIRS_VERSION
        return version_of(self.totals, masks=self.identity.mask)

    def shards(self, *, split: str | None = None) -> Iterator[tuple[UnitEntry, ShardEntry]]:
        """The shards of a split (None: of all), in order, with their units."""
        for unit in self.units:
            for shard in unit.shards:
                if split is None or shard.split == split:
                    yield unit, shard

    def to_bytes(self) -> bytes:
        """The manifest's file."""
        identity = self.identity
        members: dict[str, Json | Iterator[Json]] = {
            "format_version": self.version,
            "created_by": identity.created_by,
            "dtype": identity.dtype.name,
            **identity.to_json(),
            "totals": self.totals.to_json(),
            **({} if self.unknown is None else {"unknown": self.unknown.to_json()}),
            "splits": {name: self.splits[name].to_json() for name in sorted(self.splits)},
            "engines": [engine.to_json() for engine in self.engines],
            "sources": [source.to_json() for source in self.sources],
            **(
                {"forgotten": [each.to_json() for each in self.forgotten]} if self.forgotten else {}
            ),
            "columns": _columns(mask=identity.mask),
            "units": (unit.to_json() for unit in self.units),
        }
        return seal(members)

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path | str) -> Manifest:
        """Read a manifest's file; StoreError names it where anything is wrong."""
        members: dict[str, Any] = unseal(data, path=path)
        version = check_version(members, path=path)
        hint = "run the build again with the same command: it writes the manifest anew"
        try:
            manifest = cls._of_members(members)
            if version != manifest.version:
                raise ValueError(f"its format version is {version}, and its members are another's")
        except ValueError as error:
            raise not_ours("manifest", path, error, hint=hint) from error
        return manifest

    @classmethod
    def _of_members(cls, members: dict[str, Any]) -> Manifest:
        if members.get("mask", True) is False:
            raise ValueError("mask is false; a store without masks says nothing of them")
        own = {
            name: members.pop(name) for name in StoreIdentity.__struct_fields__ if name in members
        }
        identity = read_fact(own, StoreIdentity, where="manifest")
        found = read_fact(members, _ManifestMembers, where="manifest")
        if found.columns != _columns(mask=identity.mask):
            raise ValueError("columns are not those of this format version")
        width = _shard_width(mask=identity.mask)
        if any(len(shard) != width for unit in members["units"] for shard in unit[-1]):
            raise ValueError("a shard does not have the columns of this format version")
        if identity.mask and any(shard.mask is None for unit in found.units for shard in unit[-1]):
            raise ValueError("a shard of a store with masks has none")
        if len(found.units) != sum(source.units for source in found.sources):
            raise ValueError(f"there are {len(found.units)} units, not those that the sources say")
        if found.dtype != identity.dtype.name:
            raise ValueError(f"dtype {found.dtype!r} is not that of the vocabulary")
        rows = iter(found.units)
        units = [
            UnitEntry(f"{source.prefix}-{index:05d}", number, *row)
            for number, source in enumerate(found.sources)
            for index, row in enumerate(itertools.islice(rows, source.units))
        ]
        same = {name: getattr(found, name) for name in ("totals", "splits", "engines", "sources")}
        unknown = found.unknown if isinstance(found.unknown, UnknownFacts) else None
        if found.forgotten == ():
            raise ValueError("it has a list of what was forgotten, and nothing is in it")
        forgotten = found.forgotten if isinstance(found.forgotten, tuple) else ()
        return cls(
            identity=identity, units=tuple(units), unknown=unknown, forgotten=forgotten, **same
        )


def content_fingerprint(manifest: Manifest, *, split: str | None, shards: int | None = None) -> str:
    """Checksum of the counts and checksums of a split's shards (None: of all), in order.

    `shards` are as many as the first to take.
    """
    lines = [
        f"{shard.documents},{shard.tokens},{shard.bin},{shard.idx}"
        + ("\n" if shard.mask is None else f",{shard.mask}\n")
        for _, shard in itertools.islice(manifest.shards(split=split), shards)
    ]
    # Names that a changed manifest has for checksums need not even be text.
    return checksum_of("".join(lines).encode("utf-8", "surrogatepass"))


def contents_of(manifest: Manifest) -> dict[str, str]:
    """The fingerprint of what each split holds."""
    return {name: content_fingerprint(manifest, split=name) for name in manifest.splits}


class _ManifestMembers(Fact, frozen=True, kw_only=True):
    dtype: str
    totals: Counts
    splits: dict[str, SplitTotals]
    engines: tuple[EngineEntry, ...]
    sources: tuple[SourceEntry, ...]
    columns: dict[str, list[str]]
    units: list[UnitRow]
    unknown: UnknownFacts | msgspec.UnsetType = msgspec.UNSET
    forgotten: tuple[ForgottenStep, ...] | msgspec.UnsetType = msgspec.UNSET


def read_manifest(root: Path) -> Manifest:
    """The manifest of the store in a folder; StoreError where there is none or it is damaged."""
    path = StoreLayout(root).manifest
    StoreLayout(root).require_inside()
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise _no_manifest(root) from error
    except NotADirectoryError as error:
        raise StoreError(
            f"{str(root)!r} is a file, such as a view, and this is of the folder of a store",
            hint="give the store itself; `tokenmill inspect VIEW` names that of a view",
        ) from error
    except OSError as error:
        raise StoreError(
            f"the manifest {str(path)!r} cannot be read: {error.strerror or error}",
            hint="check the path and its permissions",
        ) from error
    return Manifest.from_bytes(data, path=path)


def known_manifest(layout: StoreLayout) -> Manifest | None:
    """The manifest of a store that is complete."""
    if layout.manifest.exists():
        with contextlib.suppress(StoreError):
            return read_manifest(layout.root)
    return None


def write_manifest(layout: StoreLayout, manifest: Manifest) -> None:
    """Put the manifest in place, which makes the store complete."""
    replace_file(layout, layout.manifest, manifest.to_bytes())
    layout.remove_empty_tmp()


def _no_manifest(root: Path) -> StoreError:
    layout = StoreLayout(root)
    what = f"the store {str(root)!r} has no tokenmill.json: "
    if layout.forgetting.is_dir():
        what += "documents are being taken out of it, or that was interrupted"
        hint = f"wait until it has ended, or end it: tokenmill forget {shlex.quote(str(root))}"
    elif layout.parts.is_dir():
        what += "built in parts, and not finished"
        hint = f"when all parts are built: tokenmill finish {shlex.quote(str(root))}"
    elif layout.shards.is_dir():
        what += "its build has not finished"
        hint = "run the build again with the same command: it resumes"
    elif root.is_dir():
        what = f"{str(root)!r} is not a store: it has no tokenmill.json"
        hint = "make one with: tokenmill build INPUT --tokenizer TOKENIZER --out STORE"
    else:
        what, hint = f"there is no store at {str(root)!r}", "check the path"
    return StoreError(what, hint=hint)


# -------------------------------------------------------------------------------------------------
# A manifest out of receipts, one at a time and in the order of the plan: the build does this at its
# end; `check_store` does it again and compares.

_BATCH_UNITS = 256  # receipts that are asked for at once where the store is at a URL


class Tally:
    """What units hold together: numbers that grow, as there may be millions."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTS, 0)
        self._engines: dict[tuple[str, str, str, str], list[int]] = {}
        self._shards: list[ShardEntry] = []
        self._unknown: UnknownFacts | None = None
        self._examples: Counter[str] = Counter()

    def add(self, receipt: Receipt) -> tuple[ShardEntry, ...]:
        """Add a unit; returns its shards as a manifest has them."""
        for name in COUNTS:
            self._counts[name] += getattr(receipt.counts, name)
        if isinstance(receipt.unknown, UnknownFacts):
            self._unknown = receipt.unknown
            self._examples.update(dict(receipt.unknown.examples))
        made = receipt.engine
        key = made.name, made.version, made.reference, made.reference_version
        did = 1, made.checked_documents, made.mismatches, made.redone, made.routed_documents
        old = self._engines.get(key, [0] * len(did))
        self._engines[key] = [before + more for before, more in zip(old, did, strict=True)]
        shards = tuple(map(_shard_entry, receipt.shards))
        self._shards += shards
        return shards

    @property
    def totals(self) -> Counts:
        return Counts(**self._counts)

    @property
    def unknown(self) -> UnknownFacts | None:
        last = self._unknown
        return None if last is None else UnknownFacts.of(last.token, last.id, self._examples)

    @property
    def splits(self) -> dict[str, SplitTotals]:
        return split_totals(self._shards)

    @property
    def engines(self) -> tuple[EngineEntry, ...]:
        names = EngineEntry.__struct_fields__
        found = (dict(zip(names, [*k, *n], strict=True)) for k, n in sorted(self._engines.items()))
        return tuple(read_fact(members, EngineEntry, where="engine") for members in found)


def _shard_entry(shard: ShardFacts) -> ShardEntry:
    files, mask = shard.files, shard.mask
    checksums = files.bin.checksum, files.idx.checksum
    entry = ShardEntry(shard.split, shard.documents, shard.tokens, *checksums)
    if mask is None:
        return entry
    return entry._replace(mask=mask.checksum, counted=mask.counted, silent=mask.silent)


def tally_units(layout: StoreLayout, units: Iterable[str]) -> Tally:
    """What the named units hold, wherever they are in their files."""
    tally = Tally()
    for unit in units:
        tally.add(read_receipt(layout, unit))
    return tally


class ManifestAssembler:
    """Takes receipts, unit by unit and file by file, and keeps only their entries."""

    def __init__(
        self, identity: StoreIdentity, *, forgotten: tuple[ForgottenStep, ...] = ()
    ) -> None:
        self._identity = identity
        self._forgotten = forgotten
        self._tally = Tally()
        self._sources: list[SourceEntry] = []
        self._units: list[UnitEntry] = []
        self._text_bytes = 0  # of the last source

    def add(self, receipt: Receipt, *, file: FileFacts) -> UnitEntry:
        """Add the next unit; `file` is its receipt's own file."""
        self._check(receipt)
        self._add_source(receipt)  # may refuse the unit, so it goes before the rest
        found = receipt.rejects
        rejects = None if found is None else RejectsEntry(*msgspec.structs.astuple(found))
        unit = UnitEntry(
            name=receipt.unit.name,
            source=len(self._sources) - 1,
            rows=receipt.counts.rows,
            lines=receipt.source.num_lines,
            receipt_bytes=file.bytes,
            receipt=file.checksum,
            rejects=rejects,
            shards=self._tally.add(receipt),
        )
        self._units.append(unit)
        return unit

    @property
    def units(self) -> Sequence[UnitEntry]:
        """Those that were added."""
        return self._units

    def manifest(self) -> Manifest:
        """The manifest of all units added; StoreError where their receipts do not go together."""
        try:
            return Manifest(
                identity=self._identity,
                totals=self._tally.totals,
                splits=self._tally.splits,
                engines=self._tally.engines,
                sources=tuple(self._sources),
                units=tuple(self._units),
                unknown=self._tally.unknown,
                forgotten=self._forgotten,
            )
        except ValueError as error:
            raise StoreError(
                f"the receipts of {len(self._units):,} units do not go together: {error}",
                hint="see which are damaged with: tokenmill verify STORE",
            ) from error

    def _check(self, receipt: Receipt) -> None:
        identity, unit = self._identity, receipt.unit
        if receipt.config != identity.fingerprint:
            raise StoreError(
                f"{unit.title} ({unit.name}) was built with the configuration {receipt.config!r},"
                f" the store has {identity.fingerprint!r}; mixing them would silently corrupt"
                " training",
                hint="run the build again with the same command, or build into a new folder",
            )
        for shard in receipt.shards:
            width = shard.files.bin.bytes - shard.tokens * identity.dtype.itemsize
            if shard.max_id >= identity.tokenizer.vocab_size or width != 0:
                raise StoreError(
                    f"shard {shard.name!r} does not hold {identity.dtype.name} ids"
                    f" under {identity.tokenizer.vocab_size}",
                    hint="run the build again with the same command",
                )
            if (shard.mask is not None) != identity.mask:
                has, wants = ("a mask", "none") if shard.mask else ("no mask", "one")
                raise StoreError(
                    f"shard {shard.name!r} has {has}, the store has {wants} for every shard",
                    hint="build into a new folder",
                )

    def _add_source(self, receipt: Receipt) -> None:
        unit, facts = receipt.unit, receipt.source
        is_known = bool(self._sources) and self._sources[-1].path == unit.path
        new = SourceEntry(
            path=unit.path,
            prefix=unit_prefix(unit.path),
            size=facts.size,
            version=facts.version,
            units=0,
            rows=0,
        )
        last = self._sources[-1] if is_known else new
        if (last.size, last.version) != (facts.size, facts.version):
            raise StoreError(
                f"{unit.title} and what is before it were read from two versions of the file;"
                " together they would be neither",
                hint="run the build again with the same command",
            )
        if unit.index != last.units:
            raise StoreError(
                f"{unit.title} is number {unit.index} of its units and follows {last.units} others:"
                " a receipt is missing, or is of another unit",
                hint="run the build again with the same command",
            )
        counts = receipt.counts
        self._text_bytes = counts.text_bytes + (self._text_bytes if is_known else 0)
        grown = last.but(
            units=last.units + 1,
            rows=last.rows + counts.rows,
            unknown_ids=last.unknown_ids + counts.unknown_ids,
            lost_characters=last.lost_characters + counts.lost_characters,
            lost_bytes=last.lost_bytes + counts.lost_bytes,
        )
        if grown.unknown_ids or grown.lost_bytes:
            grown = grown.but(text_bytes=self._text_bytes)
        self._sources[len(self._sources) - is_known :] = [grown]


def assemble_manifest(
    layout: StoreLayout, identity: StoreIdentity, *, units: Iterable[str]
) -> Manifest:
    """The manifest of the named units, whose receipts are read one after the other."""
    known = read_forgotten(layout)
    assembler = ManifestAssembler(identity, forgotten=() if known is None else known.steps)
    remaining = iter(units)
    while batch := list(itertools.islice(remaining, _BATCH_UNITS)):
        if layout.upstream.url is not None:
            layout.upstream.download([layout.receipt(unit) for unit in batch])
        for unit in batch:
            data = read_receipt_bytes(layout, unit)
            assembler.add(Receipt.from_bytes(data, path=_path(layout, unit)), file=facts_of(data))
    return assembler.manifest()


# -------------------------------------------------------------------------------------------------
# What the parts of a build leave for the one who finishes it: `parts/00003-of-00064.json`.
#
# A record repeats what was asked for, so that parts with other options are noticed and `finish`
# can plan the units again; it never says which units are complete, the receipts do. Records are
# removed when the manifest is written: a finished store does not show how it was made.

RECORD_FILE = re.compile(r"[0-9]{5,}-of-[0-9]{5,}\.json")


class PartRecord(SealedFact, frozen=True, kw_only=True):
    """One part of a build."""

    kind: ClassVar[str] = "record"
    remedy: ClassVar[str] = (
        "delete it and run its part again: that takes a moment where the units are complete"
    )
    part: Count
    parts: Count
    fingerprint: str  # of the configuration, as the receipts carry it
    config: dict[str, Any]  # every option that decides the bytes, the limit included
    inputs: tuple[str, ...] | None  # as named; None where they hold a key that may not be kept
    max_document_bytes: Count
    runs: tuple[dict[str, Any], ...]  # for `runs.jsonl`; empty while the part has not ended

    @property
    def name(self) -> str:
        return f"{self.part:05d}-of-{self.parts:05d}.json"


def write_record(layout: StoreLayout, record: PartRecord) -> None:
    """Put the record in place of the one that an earlier run of this part left."""
    layout.parts.mkdir(exist_ok=True)
    replace_file(layout, layout.parts / record.name, record.to_bytes())


def read_records(layout: StoreLayout) -> list[PartRecord]:
    """The records of all parts that were started, part by part."""
    if not layout.parts.is_dir():
        return []
    layout.require_inside()
    found = sorted(path for path in layout.parts.iterdir() if RECORD_FILE.fullmatch(path.name))
    records = [PartRecord.from_bytes(path.read_bytes(), path=path) for path in found]
    for path, record in zip(found, records, strict=True):
        try:
            record.to_bytes()  # what is read must be writable again: JSON knows numbers without end
        except ValueError as error:
            raise StoreError(
                f"the record {str(path)!r} holds what no build writes: {error}",
                hint=PartRecord.remedy,
            ) from error
    return records


def remove_records(layout: StoreLayout) -> None:
    """Forget the parts, after the manifest is written."""
    found = [*layout.parts.iterdir()] if layout.parts.is_dir() else []
    shutil.rmtree(layout.parts, ignore_errors=True)
    layout.upstream.remove(found)


# -------------------------------------------------------------------------------------------------
# `building.json`: what a build will make, from before its first unit until its manifest is there.
#
# It is for those who read the store meanwhile (see following.py): with it a receipt says that the
# next unit is there, and nothing else has to be told. A build itself never reads it.


class PlannedSource(Fact, frozen=True, kw_only=True):
    """An input file of a build that goes on."""

    path: str
    prefix: str  # unit k of the file is named `{prefix}-{k:05d}`
    size: Count
    version: str
    units: Count | None  # None: the receipt of its last unit says that it is the last

    def __post_init__(self) -> None:
        if not UNIT_PREFIX.fullmatch(self.prefix):
            raise ValueError(f"{self.prefix!r} cannot begin the name of a unit")

    @classmethod
    def of(cls, path: str, *, size: int, version: str, units: int | None) -> PlannedSource:
        """With the prefix that its path has."""
        prefix = unit_prefix(path)
        return cls(path=path, prefix=prefix, size=size, version=version, units=units)


class Building(SealedFact, frozen=True, kw_only=True, omit_defaults=True):
    """What a build that goes on will make: `building.json`."""

    kind: ClassVar[str] = "plan of a build"
    remedy: ClassVar[str] = "run the build again with the same command: it writes the file anew"
    identity: StoreIdentity
    sources: tuple[PlannedSource, ...]  # in the order of the manifest to come
    failed: str | None = None  # why the build has ended without a manifest, if it could say so


def write_building(layout: StoreLayout, building: Building) -> None:
    """Say what will be built, before the first unit."""
    replace_file(layout, layout.building, building.to_bytes())
    layout.remove_empty_tmp()


def remove_building(layout: StoreLayout) -> None:
    """After the manifest, which says all of it."""
    if layout.building.exists():
        layout.building.unlink(missing_ok=True)
        sync_folder(layout.root)
    layout.upstream.remove([layout.building])


# -------------------------------------------------------------------------------------------------
# `forgotten.json`: which rows of the sources were taken out of a store, so that no build makes
# them again. It is written before the first shard changes, and no build removes it.
#
# Of a document it has the place alone: the file, what the file was, and the number of the row. No
# hash of a text or of its tokens is kept: whoever has the text could ask by it whether it was here.


class ForgottenUnit(Fact, frozen=True, kw_only=True):
    """Rows of a unit that were forgotten, and what it was read from."""

    unit: UnitFacts
    source: SourceFacts
    rows: tuple[Count, ...]  # run lengths over the unit's rows, as in a receipt

    @property
    def num_rows(self) -> int:
        return sum(self.rows[1::2])

    def file_of(self, row: int) -> tuple[str, int]:
        """The file of a row of a unit that is a group, and the row's number in that file."""
        return _file_of(self.unit, self.source, row)

    def __post_init__(self) -> None:
        check_runs(self.rows, documents=self.num_rows, rows=sum(self.rows))
        if not self.rows:
            raise ValueError(f"no row of the unit {self.unit.name!r} was forgotten")


class Forgetting(Fact, frozen=True, kw_only=True):
    """What has begun and is not finished: all that is needed to go on with it."""

    request: str  # digest of what was asked for
    documents: tuple[Count, ...]  # run lengths over all documents of the store as it was
    units: tuple[str, ...]  # that are written anew
    snapshots: tuple[str, ...]  # that go
    annotations: tuple[str, ...]  # that are written anew
    stale: tuple[str, ...]  # annotations of another state of the store, which go
    plans: tuple[str, ...]  # first digits of the contents whose plans go, in the user's cache too
    linked: tuple[str, ...]  # files that have names outside the store too


class Forgotten(SealedFact, frozen=True, kw_only=True):
    """The file."""

    kind: ClassVar[str] = "list of what was forgotten"
    remedy: ClassVar[str] = (
        "restore the file: without it, a build would make again what was forgotten"
    )
    steps: tuple[ForgottenStep, ...]
    units: tuple[ForgottenUnit, ...]
    pending: Forgetting | None


def write_forgotten(layout: StoreLayout, forgotten: Forgotten) -> None:
    """Put the list in place of the one that was."""
    replace_file(layout, layout.forgotten, forgotten.to_bytes())


def read_forgotten(layout: StoreLayout) -> Forgotten | None:
    """What was forgotten; None where nothing was. StoreError where that cannot be read."""
    try:
        data = layout.forgotten.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        message = f"{str(layout.forgotten)!r} cannot be read: {error.strerror or error}"
        raise StoreError(message, hint=Forgotten.remedy) from error
    return Forgotten.from_bytes(data, path=layout.forgotten)


def describe_forgotten(manifest: Manifest, contents: Iterable[str]) -> str | None:
    """What was taken out of a store since its splits held this, in words; None if they never did.

    What went later than that counts, be it of these splits or others.
    """
    wanted = set(contents)
    for number, step in enumerate(manifest.forgotten):
        if wanted and wanted <= set(step.contents.values()):
            count = sum(each.documents for each in manifest.forgotten[number:])
            return f"{count:,} documents were forgotten since (tokenmill forget)"
    return None


# -------------------------------------------------------------------------------------------------
# `runs.jsonl`: a log of the builds that made a store, one sealed line each.
#
# Dates, hosts, seconds and peak memory go here and nowhere else, because they differ from run to
# run; the log is no part of the store's identity, and a store without it is complete.


def append_runs(layout: StoreLayout, runs: Sequence[Mapping[str, Json]]) -> None:
    """Add lines; the file is replaced as a whole, so that a crash cannot leave half a line."""
    try:
        old = layout.runs.read_bytes()
    except FileNotFoundError:
        old = b""
    except OSError as error:
        message = f"{str(layout.runs)!r} cannot be read: {error.strerror or error}"
        raise StoreError(message) from error
    replace_file(layout, layout.runs, old + b"".join(map(seal_line, runs)))
    layout.remove_empty_tmp()
