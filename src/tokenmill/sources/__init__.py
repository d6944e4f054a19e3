"""Raw text in: from the inputs that a user names to rows of text.

    discover(inputs, options) -> Discovery    the files, and those left out with the reason
    format_of(file) -> SourceFormat           how a file is cut into units and opened
    source_file(path) -> SourceFile           one file that is known already, as it lies now

`base` has the contract. A format's module is imported only when a file of it is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.sources.base import unit_bytes_for
from tokenmill.sources.discovery import Discovery, Skipped, discover, source_file

if TYPE_CHECKING:
    from tokenmill.sources.base import SourceFile, SourceFormat

__all__ = ["Discovery", "Skipped", "discover", "format_of", "source_file", "unit_bytes_for"]


def format_of(file: SourceFile) -> SourceFormat:
    """The format that reads the file."""
    match file.format:
        case "jsonl":
            from tokenmill.sources.lines import JsonlFormat

            return JsonlFormat()
        case "parquet":
            from tokenmill.sources.tables import ParquetFormat

            return ParquetFormat()
        case "arrow":
            from tokenmill.sources.tables import ArrowFormat

            return ArrowFormat()
        case "csv":
            from tokenmill.sources.csv import CsvFormat

            return CsvFormat()
        case "text":
            from tokenmill.sources.lines import TextFormat

            return TextFormat()
        case "text-group":
            from tokenmill.sources.lines import TextGroupFormat

            return TextGroupFormat()
    raise AssertionError(f"no such format: {file.format!r}")
