"""What a source of text is to the rest of tokenmill: files, the units they are cut into, and rows.

    discover(inputs) -> SourceFile...   names, sizes, versions; nothing is read
    plan_units(file) -> Unit...         cut by the file and the options alone
    open_source(file) -> Source         reads the rows of a unit in bounded batches

A unit is worked on in one go and becomes one receipt. Which worker reads it, and when, never
changes what it holds. A *stream* (a compressed file, text with a separator that cannot be found
from the middle) has units too, but their number is known only at its end: unit k owns the rows
that start in [k * unit_bytes, (k + 1) * unit_bytes) of the decompressed bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tokenmill.config import format_size
from tokenmill.errors import MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.records import RowBatch

MEGABYTE = 1 << 20
LARGEST_BATCH_ROWS = 1 << 16
"""What is kept for a row (its place, its length, why it is rejected) may be more than its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """How text is read. All of it is part of the configuration that a store records."""

    text_field: str = "text"
    """Column or JSON key that holds the text; dots reach into nested objects (`data.text`)."""
    fields: tuple[str, ...] = ()
    """Fields of a row that has several: its text is then a JSON object that holds them. Empty
    where a row is one text."""
    needs_all_fields: bool = True
    """Whether a table must have all of them, or one at least."""
    separator: str | None = None
    """Splits a text file into documents; None makes each text file one document."""
    unit_bytes: int | None = None
    """Bytes of text in a unit; None chooses by the file's size (see `unit_bytes_for`)."""
    batch_bytes: int = 8 * MEGABYTE
    """Input read in one go. Bounds memory; never changes the result."""
    room_bytes: int = 1 << 30
    """What a reader may hold at once of what a file cannot be read without: a page of Parquet, a
    batch of Arrow, the window of a decompressor. A file that needs more is an error."""
    max_document_bytes: int = 64 * MEGABYTE
    """A row whose text is larger is rejected. Follows from the memory budget."""


def check_room(needs: int, what: str, *, path: str, room: int) -> None:
    """Refuse what a reader would have to hold at once and has no room for."""
    if needs > room:
        error = MemoryBudgetError(
            f"{path!r} has {what}, and reading it takes {format_size(needs)} of memory at once; a "
            f"worker of this build has room for {format_size(room)}",
            hint="allow more with --memory, or write the file again in smaller parts",
        )
        error.short_bytes = needs - room
        raise error


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One input file (or one group of small text files) as it was found."""

    path: str
    """As the user named it, normalised, with / between folders: the file's identity."""
    format: str
    """jsonl, parquet, arrow, text, csv, or text-group."""
    compression: str | None
    """gz, zst, bz2, xz or None."""
    size: int
    version: str
    """Changes when the file changes: modification time, or what a remote system gives (ETag)."""
    members: tuple[SourceFile, ...] = ()
    """Files of a text-group, in order; path, size and version of the group follow from them."""
    address: str | None = field(default=None, compare=False, repr=False)
    """Where it is read from, if that holds more than its path does: a password, a signature. The
    path is written into the store and shown; this never is."""

    changed: int = field(default=0, compare=False, repr=False)
    """When anything about it was last changed, in ns; never written into a store."""

    @property
    def location(self) -> str:
        """What opens the file."""
        return self.address or self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A slice of a source file: bytes of text, or row groups, or a whole file."""

    file: SourceFile
    index: int
    """Position among the units of its file; with the path it is the unit's identity."""
    start: int
    """First byte (JSON Lines, text) or first row group / record batch (Parquet, Arrow)."""
    end: int | None
    """One past the last; None means to the end of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitEnd:
    """What is known about a unit after its last row."""

    digest: str
    """xxh3-128 of what the unit covers, so that a touched but equal file is recognised."""
    num_lines: int
    """Lines passed, blank ones too, so that later units know their line numbers; or rows."""
    is_last: bool
    """Nothing of the file lies behind this unit."""


class Source(Protocol):
    """An open source file. Units may be read in any order; ascending order is cheap for streams."""

    @property
    def read_seconds(self) -> float:
        """Time spent on getting bytes so far; 0 where a library reads and decodes in one go."""

    def read(self, unit: Unit) -> Iterator[RowBatch]:
        """Rows of the unit in batches of about `batch_bytes`; SourceError if it cannot be read."""

    def end(self) -> UnitEnd:
        """Facts about the unit read last; valid after its iterator is exhausted."""

    def exists(self, unit: Unit) -> bool:
        """For streams: whether the stream reaches the unit. Always true elsewhere."""

    def count_rows(self, unit: Unit) -> int:
        """Rows in the unit, without building text where the format allows it."""

    def digest(self, unit: Unit) -> str:
        """The unit's digest alone, as fast as the bytes can be read."""

    def close(self) -> None: ...


class SourceFormat(Protocol):
    """One file format: how it is cut and opened. Registered in `sources/__init__.py`."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:
        """Whether the number of units is known only at the end of the file."""

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        """The units of the file; of a stream without end, for `Source.exists` to end it."""

    def open(self, file: SourceFile, options: SourceOptions) -> Source: ...
