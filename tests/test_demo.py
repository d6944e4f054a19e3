from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import tokenmill_here

import tokenmill
from tokenmill.builder.progress import BuildResult
from tokenmill.builder.verify import VerifyReport
from tokenmill.cli.show import tell
from tokenmill.demo import Comparison, Finished, Heading, Step, demo_steps
from tokenmill.errors import UsageError


def small_demo(out: Path) -> list[Step]:
    return list(demo_steps(out, corpus_bytes=300_000, peer_seconds=0.1))


def only(steps: list[Step], kind: type) -> Step:
    (found,) = [step for step in steps if isinstance(step, kind)]
    return found


def test_the_demo_builds_verifies_and_compares_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = small_demo(Path("demo-store"))
    built, verified, compared = (
        only(steps, kind) for kind in (BuildResult, VerifyReport, Comparison)
    )
    assert isinstance(built, BuildResult)
    assert isinstance(verified, VerifyReport)
    assert isinstance(compared, Comparison)
    lines = Path("demo-store-input/corpus.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert sum(len(text.encode()) for text in texts) == built.totals.text_bytes >= 300_000
    assert built.totals.documents + built.totals.empty == len(texts)
    assert verified.ok
    assert verified.documents_reencoded > 0
    assert len(compared.ways) == 4
    assert all(way.tokens > 0 and way.seconds > 0 for way in compared.ways.values())
    assert len(tokenmill.Store("demo-store", split=None)) == built.totals.documents

    for step in steps:
        tell(step)
    story = capsys.readouterr().out
    assert "bug" not in story
    for words in (
        "1. Collect documents",
        f"{len(texts):,} documents, ",
        f"{built.units_built} units found complete, nothing to do",
        "7. Feed a model",
        "exactly the rows that came next",
        "8. Compare",
        "times faster",
        "tokenmill inspect demo-store",
    ):
        assert words in story

    ended = only(steps, Finished)
    assert isinstance(ended, Finished)
    assert len(ended.commands) == 5
    program = f"{sys.executable} -m tokenmill "
    for command in ended.commands:  # as they are printed
        assert command.startswith(program)
        tokenmill_here(*shlex.split(command.removeprefix(program)), folder=tmp_path)
    subprocess.run(ended.commands[0], shell=True, capture_output=True, timeout=120, check=True)

    second = only(small_demo(Path("demo-store")), BuildResult)
    assert isinstance(second, BuildResult)
    assert not second.nothing_to_do
    assert second.totals == built.totals


def test_headings_are_numbered_and_say_why(tmp_path: Path) -> None:
    first = next(demo_steps(tmp_path / "demo"))
    assert isinstance(first, Heading)
    assert first.number == 1
    assert first.why


def test_a_store_of_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    out = tmp_path / "store"
    tokenmill.build(tmp_path / "mine.txt", tokenizer="bytes", out=out, serial=True)
    with pytest.raises(UsageError, match="not the demo's"):
        next(demo_steps(out))
    assert len(tokenmill.Store(out)) == 1


def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its name is not UTF-8"):
        next(demo_steps(tmp_path / "demo\udcff"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_command_tells_the_story_to_its_end(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tokenmill", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert (
        run.stdout.index("1. Collect")
        < run.stdout.index("7. Feed a model")
        < run.stdout.index("8. Compare")
        < run.stdout.index("Done in")
    )
