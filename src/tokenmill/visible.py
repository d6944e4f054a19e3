"""Strings of others made visible: what a file, a server or a store says cannot act on a terminal.

Control characters, marks that turn the direction of writing and halves of surrogate pairs become
escapes such as `\\x1b`, as repr() writes them; all other characters of all languages stay.
"""

from __future__ import annotations

import re
from typing import TextIO, cast

LONGEST_LINE = 2000
"""Characters of a line of which names are a part; of a longer one the middle is left out."""
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """The text as one line, cut in the middle where it is very long."""
    line = visible_lines(text).replace("\n", "\\n").replace("\t", "\\t")
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2 - 20  # room for the note, so that what was cut is not cut again
    return f"{line[:half]} [{len(line) - 2 * half:,} characters left out] {line[-half:]}"


def visible_lines(text: str) -> str:
    """The text with its ends of lines and its tabs."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ReaderLeftError(BrokenPipeError):
    """Who read our output (head, less) has left. It has no errno, at which typer would exit."""


class VisibleStream:
    """A stream of text to which no control character comes but ends of lines and tabs."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        try:
            self.unguarded.write(visible_lines(text))
        except BrokenPipeError as error:
            raise ReaderLeftError from error
        return len(text)

    def flush(self) -> None:
        try:
            self.unguarded.flush()
        except BrokenPipeError as error:
            raise ReaderLeftError from error

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.unguarded, name)


def guarded(stream: TextIO) -> TextIO:
    """The stream with a guard, whoever writes to it, warnings and tracebacks too."""
    return cast("TextIO", VisibleStream(stream))
