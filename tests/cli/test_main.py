from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tokenmill import __version__

from .conftest import COMMAND

if TYPE_CHECKING:
    from .conftest import Cli

HEAVY = (
    "numpy",
    "pyarrow",
    "rich",
    "psutil",
    "gigatoken",
    "tokenizers",
    "awkward",
    "importlib.metadata",
)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, runpy; sys.argv = ['tokenmill', '--help']\n"
        "try: runpy.run_module('tokenmill', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('imported:', *sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, _, imported = run.stdout.partition("imported:")
    for name in ("build", "plan", "inspect", "verify", "demo", "version"):
        assert f"\n  {name} " in shown
    assert "typer" in imported.split()
    assert not set(HEAVY) & set(imported.split())


def test_no_command_at_all_shows_the_help(cli: Cli) -> None:
    assert cli().out == cli("--help").out


def test_the_version_is_told_in_one_line_and_with_the_engines_on_request(cli: Cli) -> None:
    assert cli("--version").out == f"tokenmill {__version__}\n"
    first, *others = cli("version").out.splitlines()
    assert first == f"tokenmill {__version__}"
    assert any(line.startswith("gigatoken ") for line in others)


def test_the_console_script_is_the_same_command(cli: Cli) -> None:
    script = Path(sys.executable).with_name("tokenmill")
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout == cli.apart("--help").out == cli("--help").out


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (("bild",), "no such command 'bild'", "see: tokenmill --help"),
        (("build", "x"), "missing option '--tokenizer'", "see: tokenmill build --help"),
        (("build", "x", "-t", "bytes", "-o", "s", "--nope"), "no such option: --nope", "see: "),
        (("build", "x", "-t", "bytes", "-o", "s", "--workers", "two"), "'--workers'", "see: "),
        (("build", "x", "--num_proc", "4"), "--num_proc", "here it is --workers"),
        (("build", "--input-dir", "x"), "--input-dir", "tokenmill build FOLDER"),
        (("build", "x", "--filter", "a > 1"), "--filter", "here it is --where"),
        (("build", "x", "--n_puzzles", "9"), "--n_puzzles", "here it is --limit"),
        (("train", "x", "--num_workers", "4"), "--num_workers", "from a store needs none"),
        (("train", "x", "--mixed_precision"), "--mixed_precision", "here it is --precision bf16"),
        (("train", "x", "--config", "large"), "--config", "here it is --model"),
        (("train", "x", "--chunk_size", "9"), "--chunk_size", "here it is --seq-len"),
        (("build", "x", "--config", "en"), "--config", "name the files of the subset"),
        (("build", "x", "--output-dir", "s"), "--output-dir", "here it is --out"),
        (("build", "x", "--batch-size", "9"), "--batch-size", "--memory bounds"),
        (("train", "x", "--batch-size", "9"), "--batch-size", "here it is --micro-batch"),
        (("export", "x", "--chunk-size", "9"), "--chunk-size", "here it is --file-tokens"),
        (("build", "x", "--config", "en"), "--config", "hf://datasets/OWNER/NAME/SUBSET/"),
        (("train", "--pretokenized", "x"), "--pretokenized", "tokenmill train STORE"),
        (("train", "x", "--use_8bit_optim"), "--use_8bit_optim", "--optimizer adamw8bit"),
        (("build", "x", "--use_8bit_optim"), "--use_8bit_optim", "tokenmill train has it: --opt"),
        (
            ("build", "x", "-t", "bytes", "-o", "s", "--engine", "fast"),
            "invalid value for '--engine': 'fast' is not one of",
            "see: ",
        ),
        (("build", "x", "-t", "bytes", "-o", "s", "--val", "3"), "val=3.0", "such as 0.01"),
        (("build", "x", "-t", "bytes", "-o", "s", "--memory", "lots"), "'lots'", "such as 4GB"),
        (
            ("build", "x", "-t", "bytes", "-o", "s", "--eos", "a", "--no-eos"),
            "exclude",
            "leave one",
        ),
        (("build", "x", "-t", "bytes", "-o", "s", "--separator", "\\q"), "\\q", "use \\n"),
    ],
)
def test_a_wrong_request_is_two_lines_and_exit_code_2(
    cli: Cli, args: tuple[str, ...], error: str, hint: str
) -> None:
    outcome = cli(*args, code=2)
    first, second = outcome.err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    assert error in first
    assert hint in second
    assert outcome.out == ""


def test_a_failure_is_exit_code_1_and_its_traceback_comes_only_with_debug(cli: Cli) -> None:
    args = ("build", "absent.jsonl", "-t", "bytes", "-o", "store")
    outcome = cli.apart(*args, code=1)
    assert outcome.err.startswith("error: ")
    assert "absent.jsonl" in outcome.err
    assert "Traceback" not in outcome.err
    assert "Traceback" in cli.apart(*args, "--debug", code=1).err


def test_a_reader_that_leaves_early_ends_the_command_quietly(cli: Cli, corpus: Path) -> None:
    cli("build", corpus, "-t", "bytes", "-o", "store", "--quiet")
    command = [*COMMAND, "grep", "store", "a", "--limit", "9999", "--json"]
    assert len(cli(*command[3:]).out) > 1 << 16, "it must not fit into the pipe"
    run = subprocess.run(
        f"{subprocess.list2cmdline(command)} | head -c 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        cwd=cli.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.stdout, run.stderr, run.returncode) == ("{", "", 141)


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "store"),
        ("inspect", "store", "--doc", "0", "--json"),
        ("inspect", "store", "--config"),
        ("plan", "corpus.jsonl", "-t", "bytes"),
        ("layout", "store", "--seq-len", "64"),
        ("build", "--help"),
    ],
)
def test_nobody_reads_and_the_command_ends_quietly(
    cli: Cli, corpus: Path, args: tuple[str, ...]
) -> None:
    cli("build", corpus.name, "-t", "bytes", "-o", "store", "--quiet")
    assert run_unread(cli, *args, stderr=subprocess.PIPE) == (141, b"")


def test_a_build_of_which_nobody_reads_anything_is_finished(cli: Cli, corpus: Path) -> None:
    args = ("build", corpus.name, "-t", "bytes", "-o", "store")
    assert run_unread(cli, *args, stderr=subprocess.STDOUT)[0] == 141
    assert cli(*args).out.startswith("nothing to do")


def run_unread(cli: Cli, *args: str, stderr: int) -> tuple[int, bytes | None]:
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen([*COMMAND, *args], cwd=cli.folder, stdout=write, stderr=stderr) as run:
        os.close(write)
        said = run.communicate()[1]
    return run.returncode, said


def test_a_command_ends_with_its_code_after_whatever_waits_for_the_end_of_the_process() -> None:
    program = (
        "import atexit, sys, threading, time, tokenmill.cli.main as cli\n"
        "class Heavy:\n"
        "    def __del__(self): print('taken apart', flush=True)\n"
        "kept = Heavy()\n"
        "thread = threading.Thread(target=lambda: (time.sleep(0.2), print('thread', end=' ')))\n"
        "def run():\n"
        "    atexit.register(print, 'handler', end=' ')\n"
        "    thread.start()\n"
        "    sys.exit(3)\n"
        "cli.run = run\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (3, "thread handler ")
