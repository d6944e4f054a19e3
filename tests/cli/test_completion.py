"""Tab in real shells, in a terminal of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import sys
import termios
from pathlib import Path

import pytest

from tokenmill.cli.options import TAB_ENTRIES, complete_store

SHELLS = ["bash", pytest.param("zsh", marks=pytest.mark.slow)]
SHELLS += [pytest.param("fish", marks=pytest.mark.slow)]
INTERACTIVE = {"bash": ["bash", "--norc", "-i"], "zsh": ["zsh", "-i"], "fish": ["fish", "-i"]}
LINE = r"<([^<>\n]*)>\r"
START_OF_LINE, END_OF_LINE = "\x01", "\x05"


class Shell:
    """An interactive shell in a folder that is also its home."""

    def __init__(self, name: str, home: Path) -> None:
        (home / ".zshrc").touch()  # a first zsh without one asks questions
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": programs, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(home)
            os.execvpe(INTERACTIVE[name][0], INTERACTIVE[name], environment)
        # A line that is typed shall not be broken.
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 400, 0, 0))

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)

    def type(self, keys: str, *, until: str) -> str:
        """Send keys; all that the terminal shows up to a pattern."""
        os.write(self.terminal, keys.encode())
        shown = ""
        while not re.search(until, shown):
            shown += os.read(self.terminal, 1 << 16).decode(errors="replace")
        return shown

    def run(self, command: str) -> str:
        """Run a command; what it printed."""
        shown = self.type(f"{command}; echo e''nd\n", until=r"\nend\r")
        return shown.replace("\r", "\n")

    def completed(self, line: str, *, until: str) -> str:
        """The line when Tab has added `until` to it, as the shell would take it."""
        self.type(f"{line}\t", until=until)
        shown = self.type(f"{START_OF_LINE}echo '<{END_OF_LINE}>'\n", until=LINE)
        return str(re.findall(LINE, shown)[-1]).strip()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SHELLS)
def test_tab_completes_commands_flags_stores_and_formats_once_it_is_installed(
    name: str, tmp_path: Path
) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    make_stores(tmp_path, "mystore", "stores/web")
    with Shell(name, tmp_path) as shell:
        assert f"completion for {name} is in " in shell.run("tokenmill --install-completion")
        assert "_TOKENMILL_COMPLETE" in shell.run("tokenmill --show-completion")
    with Shell(name, tmp_path) as shell:
        if name == "bash":  # which --norc keeps from it
            shell.run("source ~/.bashrc")
        assert shell.completed("tokenmill exp", until="export") == "tokenmill export"
        assert shell.completed("tokenmill export my", until="mystore") == "tokenmill export mystore"
        line = "tokenmill verify stor"
        assert shell.completed(line, until="web") == "tokenmill verify stores/web"
        line = "tokenmill export mystore --to meg"
        assert shell.completed(line, until="megatron") == f"{line}atron"
        line = "tokenmill build corpus --max-rej"
        assert shell.completed(line, until="max-rejects") == f"{line}ects"


def make_stores(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "tokenmill.json").touch()


def completed(folder: Path, typed: str) -> list[str]:
    with contextlib.chdir(folder):
        return complete_store(typed)


def test_stores_are_found_below_what_is_typed_and_what_is_in_a_store_is_not(tmp_path: Path) -> None:
    make_stores(tmp_path, "one", "one/inner", "a/b/two", "a/b/c/too-deep", ".hidden/three")
    (tmp_path / "a" / "code.view").touch()
    (tmp_path / "a" / "text.txt").touch()

    assert completed(tmp_path, "") == ["a/b/two", "a/code.view", "one"]
    assert completed(tmp_path, "a/b/") == ["a/b/c/too-deep", "a/b/two"]
    assert completed(tmp_path, "a/co") == ["a/code.view"]
    assert completed(tmp_path, f"{tmp_path}/o") == [f"{tmp_path}/one"]
    assert completed(tmp_path, "absent/x") == completed(tmp_path, "a/t") == []


def test_a_shell_is_told_no_name_that_it_would_act_on(tmp_path: Path) -> None:
    make_stores(tmp_path, "good", "bad/$(touch acted)", "worse\n")

    assert completed(tmp_path, "g") == ["good"]
    assert completed(tmp_path, "b") == completed(tmp_path, "w") == completed(tmp_path, "") == []


def test_a_folder_of_very_many_things_is_left_to_the_shell(tmp_path: Path) -> None:
    make_stores(tmp_path, "store")
    for number in range(TAB_ENTRIES):
        (tmp_path / f"file-{number}").touch()

    assert completed(tmp_path, "") == []
    (tmp_path / "file-0").unlink()
    assert completed(tmp_path, "") == ["store"]
