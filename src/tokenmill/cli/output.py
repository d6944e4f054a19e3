"""Where results go: one JSON object for programs, or a console for people.

All text passes a guard on its way out (`tokenmill.visible`): names in it were chosen by others, who
made the files. Escapes that colour a line or redraw a bar are ours and written around the guard.
rich is imported when a console is made, not before: see `cli/main.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.visible import guarded, visible_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from rich.console import Console
    from rich.live import Live


WIDTH_OF_A_PIPE = 100  # columns of a table that is written to a file or a pipe


def plain(value: object) -> object:
    """A value of the library as JSON has it: dataclasses, facts and mappings become objects."""
    if not isinstance(value, type) and hasattr(value, "__struct_fields__"):  # a fact of the store
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
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


def guard_streams() -> None:
    """Let nothing reach stdout and stderr that acts on a terminal, whoever writes it."""
    for stream in (sys.stdout, sys.stderr):
        # Else a terminal that knows ASCII alone would end the command at the first other letter.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for escapes of our own."""
    found: TextIO = getattr(stream, "unguarded", stream)
    return found


def make_console(*, stderr: bool = False) -> Console:
    """A console that colours only terminals and only where NO_COLOR is not set.

    Brackets are brackets to it: rich's markup would let a name choose colours and links.
    """
    from rich.console import Console
    from rich.segment import Segment

    if TYPE_CHECKING:
        from collections.abc import Iterable

        from rich.console import ConsoleOptions, RenderableType

    class GuardedConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                seen = text if control else visible_lines(text)
                yield Segment(seen, style, control)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else WIDTH_OF_A_PIPE
    return GuardedConsole(
        file=unguarded(stream), width=width, markup=False, highlight=False, emoji=False
    )


@contextlib.contextmanager
def live_display(console: Console) -> Iterator[Live]:
    """What is redrawn in place and removed at the end; lines on stderr go above it."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        # rich has put a stream of its own there, which would obey the escapes in a warning.
        sys.stderr = guarded(sys.stderr)
        yield live
