"""Writes the table of docs/formats.md from what the formats say about themselves.

    python -m tokenmill.interop.table     puts it between the marks in docs/formats.md

A test compares the page with what this makes, so it cannot say what the code does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.interop.base import NAMES, get_format
from tokenmill.interop.raw import RawFormat

if TYPE_CHECKING:
    from tokenmill.interop.base import Setting

BEGIN, END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"


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


def fill(page: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{format_table()}\nSettings:\n\n{settings_table()}\n{END}{after}"


def main() -> None:
    path = Path("docs/formats.md")
    path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main()
