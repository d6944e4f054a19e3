"""Raw text in: from the inputs that a user names to rows of text.

    discover(inputs, options) -> Discovery    the files, and those left out with the reason
    format_of(file) -> SourceFormat           how a file is cut into units and opened
    source_file(path) -> SourceFile           one file that is known already, as it lies now

`base` has the contract. A format's module is imported only when a file of it is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.sources.discovery import Discovery, Skipped, discover, source_file
from tokenmill.sources.units import unit_bytes_for

if TYPE_CHECKING:
    from tokenmill.sources.base import SourceFile, SourceFormat

__all__ = ["Discovery", "Skipped", "discover", "format_of", "source_file", "unit_bytes_for"]


def format_of(file: SourceFile) -> SourceFormat:
    """The format that reads the file."""
    match file.format:
        case "jsonl":
            from tokenmill.sources.formats import JsonlFormat

            return JsonlFormat()
        case "parquet":
            from tokenmill.sources.parquet import ParquetFormat

            return ParquetFormat()
        case "arrow":
            from tokenmill.sources.arrow import ArrowFormat

            return ArrowFormat()
        case "csv":
            from tokenmill.sources.csv import CsvFormat

            return CsvFormat()
        case "text":
            from tokenmill.sources.formats import TextFormat

            return TextFormat()
        case "text-group":
            from tokenmill.sources.formats import TextGroupFormat

            return TextGroupFormat()
    raise AssertionError(f"no such format: {file.format!r}")
