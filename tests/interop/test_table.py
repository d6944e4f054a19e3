"""The page about formats says what the formats say about themselves."""

from __future__ import annotations

from pathlib import Path

from tokenmill.cli.formats import FormatChoice
from tokenmill.interop.base import NAMES, get_format
from tokenmill.interop.table import fill

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert fill(page) == page, "run: python -m tokenmill.interop.table"


def test_the_command_line_knows_every_format() -> None:
    assert tuple(FormatChoice) == NAMES
    for name in NAMES:
        about = get_format(name).about
        assert about.name == name
        assert about.title
        assert about.read_by
