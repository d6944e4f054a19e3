from __future__ import annotations

from tests import pages

from tokenmill.cli.main import app


def test_the_page_is_what_the_commands_say_of_themselves() -> None:
    assert pages.commands_page() == pages.COMMANDS.read_text(), "run: python -m tests.pages"


def test_every_command_is_on_the_page_and_teaches_by_example() -> None:
    page = pages.commands_page()
    names = [command.name for command in app.registered_commands]
    assert len(names) >= 6
    for name in names:
        section = page.split(f"## tokenmill {name}\n")[1].split("\n## ")[0]
        assert f"tokenmill {name}" in section.split("Example")[1]
