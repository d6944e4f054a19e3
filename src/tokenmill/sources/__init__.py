"""Raw text in: from the inputs that a user names to rows of text.

    discover(inputs, options) -> Discovery    the files, and those left out with the reason
    format_of(file) -> SourceFormat           how a file is cut into units and opened
    source_file(path) -> SourceFile           one file that is known already, as it is now

`base` has the contract. To add a format, write its SourceFormat and an entry of `FORMATS`. What
reads a format is imported only when a file of it is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.sources.base import SourceFile, SourceFormat

COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFormat:
    """A format as the rest of tokenmill knows it, without importing what reads it."""

    reader: str
    """Module within `sources` and class of its SourceFormat."""
    title: str
    suffixes: tuple[str, ...] = ()
    """Suffixes that messages name, and others that mean it too."""
    more_suffixes: tuple[str, ...] = ()
    has_fields: bool
    """Whether a row has fields, or is one text."""
    rows_are_lines: bool = False
    in_bytes: bool = False
    """Whether a unit's range is counted in bytes of text, of which each row takes one at least."""
    holds_one_batch: bool = False
    """Whether a plain file is read with no more memory than a batch of rows takes."""
    compresses_itself: bool = False
    """Whether its content is compressed already, so that it is not read inside gz and the like."""


FORMATS = {
    "jsonl": InputFormat(
        reader="lines:JsonlFormat",
        title="JSON Lines",
        suffixes=(".jsonl",),
        more_suffixes=(".ndjson", ".json"),
        has_fields=True,
        rows_are_lines=True,
        in_bytes=True,
        holds_one_batch=True,
    ),
    "parquet": InputFormat(
        reader="tables:ParquetFormat",
        title="Parquet",
        suffixes=(".parquet",),
        has_fields=True,
        compresses_itself=True,
    ),
    "arrow": InputFormat(
        reader="tables:ArrowFormat",
        title="Arrow",
        suffixes=(".arrow", ".feather"),
        has_fields=True,
        compresses_itself=True,
    ),
    "csv": InputFormat(
        reader="csv:CsvFormat",
        title="CSV",
        suffixes=(".csv", ".tsv"),
        has_fields=True,
        in_bytes=True,
    ),
    "text": InputFormat(
        reader="lines:TextFormat",
        title="text",
        suffixes=(".txt", ".md"),
        more_suffixes=(
            *(".text", ".rst", ".py", ".c", ".h", ".cpp", ".java", ".js"),
            *(".ts", ".go", ".rs", ".html", ".xml", ".yaml", ".toml"),
        ),
        has_fields=False,
        in_bytes=True,
        holds_one_batch=True,
    ),
    "text-group": InputFormat(reader="lines:TextGroupFormat", title="text", has_fields=False),
}
"""Every format by the name that a store records; in the order in which messages name them."""


def format_of(file: SourceFile) -> SourceFormat:
    """The format that reads the file."""
    module, _, name = FORMATS[file.format].reader.partition(":")
    reader: SourceFormat = getattr(import_module(f"tokenmill.sources.{module}"), name)()
    return reader
