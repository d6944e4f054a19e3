"""The formats whose units are ranges of bytes or groups of files: how they are cut, and opened.

Cutting needs nothing but sizes, so the parsers (and Arrow with them) are imported when a file is
opened: a build with nothing left to do never loads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.sources.base import Unit
from tokenmill.sources.blocks import is_unbordered
from tokenmill.sources.units import byte_units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.sources.base import Source, SourceFile, SourceOptions


class JsonlFormat:
    """JSON Lines, plain or compressed."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:  # noqa: ARG002
        return _is_record_stream(file, b"\n")

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        return byte_units(file, options, stream=self.is_stream(file, options))

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        from tokenmill.sources.jsonl import JsonlParser
        from tokenmill.sources.record_source import RecordSource

        return RecordSource(file, options, parser=JsonlParser(options))


class TextFormat:
    """Text files that a separator splits into documents."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:
        assert options.separator, "text without a separator comes in text-group files"
        return _is_record_stream(file, options.separator.encode())

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:
        return byte_units(file, options, stream=self.is_stream(file, options))

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        from tokenmill.sources.record_source import RecordSource
        from tokenmill.sources.text import TextParser

        return RecordSource(file, options, parser=TextParser(options))


class TextGroupFormat:
    """Files that are one document each, in groups."""

    def is_stream(self, file: SourceFile, options: SourceOptions) -> bool:  # noqa: ARG002
        return False

    def plan(self, file: SourceFile, options: SourceOptions) -> Iterator[Unit]:  # noqa: ARG002
        yield Unit(file=file, index=0, start=0, end=None)

    def open(self, file: SourceFile, options: SourceOptions) -> Source:
        from tokenmill.sources.text import TextGroupSource

        return TextGroupSource(file, options)


def _is_record_stream(file: SourceFile, separator: bytes) -> bool:
    """Whether the records can only be found from the front of the file."""
    return file.compression is not None or not is_unbordered(separator)
