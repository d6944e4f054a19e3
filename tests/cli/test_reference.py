from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tokenmill.cli.main import app
from tokenmill.cli.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_what_the_commands_say_of_themselves() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli.reference"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == PAGE.read_text(), "run: python -m tokenmill.cli.reference > docs/cli.md"


def test_every_command_is_on_the_page_and_teaches_by_example() -> None:
    page = reference()
    names = [command.name for command in app.registered_commands]
    assert len(names) >= 6
    for name in names:
        section = page.split(f"## tokenmill {name}\n")[1].split("\n## ")[0]
        assert f"tokenmill {name}" in section.split("Example")[1]
