"""Where results go: one JSON object for programs, or a console for people.

rich is imported when a console is made, not before: see `cli/main.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_A_PIPE = 100
"""Columns of a table that is written to a file or a pipe."""


def plain(value: object) -> object:
    """A value of the library as JSON has it: dataclasses and mappings become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def print_json(value: object, **derived: object) -> None:
    """Print one JSON object on stdout: the value's fields, then what follows from them."""
    fields = plain(value)
    assert isinstance(fields, dict)
    print(json.dumps({**fields, **{name: plain(item) for name, item in derived.items()}}, indent=2))


def make_console(*, stderr: bool = False) -> Console:
    """A console that colours only terminals and only where NO_COLOR is not set."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else WIDTH_OF_A_PIPE
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)
