"""The page about formats says what the formats say about themselves."""

from __future__ import annotations

import subprocess
import sys

from tests import pages

import tokenmill
from tokenmill.interop.base import NAMES, get_format


def test_the_page_is_up_to_date() -> None:
    assert pages.formats_page() == pages.FORMATS.read_text(), "run: python -m tests.pages"


def test_every_format_describes_itself() -> None:
    for name in NAMES:
        about = get_format(name).about
        assert about.name == name
        assert about.title
        assert about.read_by


def test_the_command_line_offers_what_is_registered() -> None:
    for command, flag in (("export", "--to"), ("import", "--from"), ("convert", "--to")):
        more = ["-t", "bytes"] if command == "import" else []
        done = subprocess.run(
            [sys.executable, "-m", "tokenmill", command, "x", flag, "nope", "-o", "y", *more],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert all(repr(each) in done.stderr for each in NAMES)


def test_names_of_formats_cost_no_numpy() -> None:
    code = "import sys, tokenmill.interop.base; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_old_names_are_the_new_ones() -> None:
    assert tokenmill.export_store is tokenmill.export
    assert tokenmill.import_store is tokenmill.import_
