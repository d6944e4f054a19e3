"""Ctrl-C and SIGTERM: stop in order, then say what is safe and how to go on.

SIGTERM becomes an exception of its own kind that is also a KeyboardInterrupt, so that the library,
which knows only KeyboardInterrupt, ends its workers for both in the same way.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

LONGEST_COMMAND = 2000
"""A command that the shell expanded to more characters than this is not repeated in full."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


def raise_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated` in the main thread."""

    def handle(_signum: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)


@contextlib.contextmanager
def stoppable(what_is_safe: str, *, command: str | None = None) -> Iterator[None]:
    """Turn Ctrl-C or SIGTERM inside the block into a note on stderr and the exit code for it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        # A second Ctrl-C must not cut these lines off.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"stopped{' by SIGTERM' if terminated else ''}: {what_is_safe}", file=sys.stderr)
        if command is not None:
            print(f"to go on from there, run the same command again:\n  {command}", file=sys.stderr)
        raise typer.Exit(143 if terminated else 130) from stop


def same_command() -> str:
    """The command line of this process, as it can be pasted into a shell again."""
    program = Path(sys.argv[0])
    start = ["python", "-m", "tokenmill"] if program.name == "__main__.py" else [program.name]
    # What is behind the '?' of an address may be a signature.
    arguments = [re.sub(r"(https?://[^?#]*[?#]).*", r"\1...", each) for each in sys.argv[1:]]
    command = shlex.join([*start, *arguments])
    if len(command) <= LONGEST_COMMAND:
        return command
    return f"{shlex.join([*start, *arguments[:2]])} ... (the same command as before)"
