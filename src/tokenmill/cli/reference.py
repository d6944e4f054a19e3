"""Writes docs/cli.md from the commands' own help.

    python -m tokenmill.cli.reference > docs/cli.md

A test compares the file with what this prints, so the page cannot say what the command does not.
"""

from __future__ import annotations

from typing import Any

import typer.main

from tokenmill.cli.main import app

WIDTH = 80
INTRODUCTION = """\
# The command line

This page is the commands' own help, written by `python -m tokenmill.cli.reference > docs/cli.md`.

Results go to stdout, progress and errors to stderr. `--json` prints one object and nothing else on
stdout. An error is a line `error: ...` and mostly a line `hint: ...` that says what to do.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | it failed, or `verify` found a fault |
| 2 | the command was not understood, or asks for something impossible |
| 130 | stopped by Ctrl-C |
| 143 | stopped by SIGTERM |

Colours are left out where `NO_COLOR` is set or the output is not a terminal.
"""


def reference() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    pages = [INTRODUCTION, _section("tokenmill", group, parent=None)]
    parent = group.context_class(group, info_name="tokenmill")
    pages += [_section(name, command, parent=parent) for name, command in group.commands.items()]
    return "\n".join(pages)


def _section(name: str, command: Any, *, parent: Any) -> str:
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=WIDTH, **command.context_settings
    )
    return f"## {context.command_path}\n\n```text\n{command.get_help(context).strip()}\n```\n"


if __name__ == "__main__":
    print(reference(), end="")
