"""Programs that know nothing of it run as they do without, and the account names their lines."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tokenmill.stalls.watch import Reader

if TYPE_CHECKING:
    from pathlib import Path

WATCHED = ("-m", "tokenmill.stalls")


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


PROGRAM = """
import multiprocessing, os, pickle, sys
import beside
class Thing: pass
if __name__ == "__main__":
    print(sys.argv, sys.path[0], __file__, __name__, __spec__, beside.NAME)
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    print(__builtins__, __package__, __doc__, __loader__.name)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(len, [[1, 2]]))
    sys.stdout.flush()
    def end():
        {end}
    end()
"""
ENDS = [
    "pass",
    "sys.exit(3)",
    "sys.exit('what it says')",
    "raise ValueError('its own')",
    "raise KeyboardInterrupt",
    "os._exit(5)",
]


@pytest.mark.parametrize("end", ENDS)
def test_a_program_sees_and_does_what_it_does_by_itself(end: str, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "beside.py").write_text("NAME = 'found beside the script'")
    (folder / "train.py").write_text(PROGRAM.replace("{end}", end))
    arguments = ("code/train.py", "--steps", "7", "-m", "--json=x")

    plain = run(*arguments, cwd=tmp_path)
    watched = run(*WATCHED, "--steps", "2-3", *arguments, cwd=tmp_path)

    assert "found beside the script" in plain.stdout
    assert watched.stdout == plain.stdout
    assert watched.returncode == plain.returncode
    assert watched.stderr.endswith(plain.stderr)
    assert ("no step seen" in watched.stderr) == ("_exit" not in end)


def test_a_module_runs_as_with_m(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "tool.py").write_text("import sys; print(sys.argv, __name__, __spec__.name)")
    plain = run("-m", "package.tool", "--a", cwd=tmp_path)
    watched = run(*WATCHED, "-m", "package.tool", "--a", cwd=tmp_path)

    assert plain.returncode == 0
    assert watched.stdout == plain.stdout


def test_a_script_that_is_not_there_and_steps_that_are_none(tmp_path: Path) -> None:
    missing = run(*WATCHED, "nothing.py", cwd=tmp_path)
    assert missing.returncode == 2
    assert "there is no script 'nothing.py'" in missing.stderr
    (tmp_path / "a.py").write_text("")
    wrong = run(*WATCHED, "--steps", "9-3", "a.py", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "'9-3' is no range of steps" in wrong.stderr


def lines_of(account: dict[str, Any], letter: str) -> dict[str, str]:
    parts = [part for part in account["parts"] if part["letter"] == letter]
    return {line["what"]: line["text"] for part in parts for line in part["lines"]}


LOOP = """
import sys
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
workers = int(sys.argv[1])
def collate(rows):
    for _ in range(30_000):
        pass
    return torch.stack(rows)
if __name__ == "__main__":
    rows = [torch.ones(4)] * 40
    for batch in DataLoader(rows, batch_size=4, collate_fn=collate, num_workers=workers):
        model(batch).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_a_run_that_ends_before_the_window_is_told_of_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    done = run(*WATCHED, "--steps", "50-60", "--json", "a.json", "train.py", "0", cwd=tmp_path)

    account = json.loads((tmp_path / "a.json").read_text())
    assert account["steps"] == 9
    assert "steps 50 to 60: there were 10 only" in done.stderr
    assert "collate" in lines_of(account, "D")


@pytest.mark.slow
def test_waits_for_workers_are_waits_for_data_and_said_to_be_all_that_is_seen(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(LOOP.replace("30_000", "1_000_000"))
    done = run(*WATCHED, "--steps", "1-9", "--json", "a.json", "train.py", "1", cwd=tmp_path)

    account = json.loads((tmp_path / "a.json").read_text())
    (data,) = [part for part in account["parts"] if part["letter"] == "D"]
    assert "the loader's workers" in [line["where"] for line in data["lines"]], done.stderr
    assert "what workers do in their own processes" in done.stderr
    assert "more workers" in done.stderr


def test_what_is_called_tells_whether_a_line_encodes() -> None:
    from tokenizers import Tokenizer, models

    class Holder:
        tokenizer = Tokenizer(models.BPE())

        @property
        def trap(self) -> Any:
            raise AssertionError("looked up, so its code ran")

    reader, holder = Reader(), Holder()
    encode = holder.tokenizer.encode
    tokenize_rows = len

    place = reader.place(sys._getframe()); holder.tokenizer.encode("")  # fmt: skip  # noqa: E702
    assert place.is_tokenizing
    place = reader.place(sys._getframe()); encode("")  # fmt: skip  # noqa: E702
    assert place.is_tokenizing
    place = reader.place(sys._getframe()); tokenize_rows("")  # fmt: skip  # noqa: E702
    assert not place.is_tokenizing
    assert place.file == __file__
    assert place.function == "test_what_is_called_tells_whether_a_line_encodes"
    place = reader.place(sys._getframe()); holder or holder.trap.encode()  # fmt: skip  # noqa: E702
    assert not place.is_tokenizing
