"""Writes the pages that say what the code says of itself: docs/cli.md, and the table of formats.

    python -m tests.pages             the pages
    python -m tests.pages picture     docs/viewer.png, what `tokenmill view` looks like

Tests compare the pages with what this makes, so they cannot say what the code does not. What other
pages say to type is found here too, and typed by tests.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer.main

import tokenmill
from tokenmill.cli.main import app
from tokenmill.engines.references import train_bpe
from tokenmill.interop.base import NAMES, get_format
from tokenmill.interop.raw import RawFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenmill.interop.base import Setting

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS, FORMATS = DOCS / "cli.md", DOCS / "formats.md"
PICTURE = DOCS / "viewer.png"
BEGIN, END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"
WIDTH = 80
INTRODUCTION = """\
# The command line

This page is the commands' own help, written by `python -m tests.pages`.

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


class Block(NamedTuple):
    """Something to type: a command, or lines of Python."""

    words: list[str]
    code: str = ""


def blocks(page: Path) -> Iterator[Block]:
    """What a page says to type, in its order."""
    text = page.read_text().replace(" \\\n", " ")
    shown = re.compile(r"^```(\w+)\n(.*?)^```|^    (\S[^\n]*)$", re.DOTALL | re.MULTILINE)
    for language, code, line in shown.findall(text):
        if language == "python":
            yield Block([], code)
        elif line:
            yield Block(shlex.split(line))


def commands_page() -> str:
    """docs/cli.md: the commands' own help."""
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


def format_table() -> str:
    """One row for each format."""
    rows = [
        "| `--to`, `--from` | what it is | read by | token files | in place | kept | lost |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in NAMES:
        format_ = get_format(name)
        about = format_.about
        tokens = "linked or copied" if about.linkable else "written"
        in_place = "yes" if isinstance(format_, RawFormat) else "no"
        cells = (f"`{name}`", about.title, about.read_by, tokens, in_place, about.kept, about.lost)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def settings_table() -> str:
    """One row for each setting, with all formats that have it."""
    found: dict[tuple[str, Setting], list[str]] = {}
    for name in NAMES:
        for setting, facts in get_format(name).about.settings.items():
            found.setdefault((setting, facts), []).append(f"`{name}`")
    rows = ["| `--set` | formats | default | meaning |", "| --- | --- | --- | --- |"]
    for (setting, facts), names in found.items():
        default = f"`{facts.default}`" if facts.default != "" else ""
        if isinstance(facts.default, bool):
            default = "yes" if facts.default else "no"
        rows.append(f"| `{setting}` | {', '.join(names)} | {default} | {facts.help} |")
    return "\n".join(rows) + "\n"


def formats_page() -> str:
    """docs/formats.md with its tables made anew."""
    before, _, rest = FORMATS.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{format_table()}\nSettings:\n\n{settings_table()}\n{END}{after}"


def picture(folder: Path) -> bytes:
    """A document of a store of this project's own pages, as the viewer shows it."""
    from PIL import Image
    from tests.browser import browser, tab
    from tests.viewer.conftest import started

    pages = [page.read_text() for page in sorted(DOCS.glob("*.md"))]
    train_bpe(pages, vocab_size=4000, folder=folder / "bpe")
    with contextlib.chdir(DOCS.parent):  # so that sources have the names that they have there
        how = {"tokenizer": folder / "bpe", "out": folder / "store", "val": 0.1, "serial": True}
        tokenmill.build(["docs", "src/tokenmill/viewer"], **how)  # type: ignore[arg-type]
    with started(folder / "store") as viewer, browser() as address, tab(address) as page:
        page.resize(width=1400, height=760)
        page.open(f"{viewer.address}#documents?split=train&n=0")
        page.wait("document.querySelectorAll('#tokens .t').length > 100")
        page.wait("document.querySelectorAll('.list li').length > 10")
        shot = Image.open(io.BytesIO(page.screenshot(whole=False)))
    small = io.BytesIO()
    shot.convert("RGB").quantize(200).save(small, "PNG", optimize=True)
    return small.getvalue()


if __name__ == "__main__" and "picture" in sys.argv:
    with tempfile.TemporaryDirectory() as made:
        PICTURE.write_bytes(picture(Path(made)))
elif __name__ == "__main__":
    COMMANDS.write_text(commands_page())
    FORMATS.write_text(formats_page())
