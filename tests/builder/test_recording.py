"""`build(monitor=FILE)`: a time line of a real build, and a store that is none the wiser."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.builder.stores import make_texts, tree, write_jsonl

import tokenmill
from tokenmill.errors import UsageError
from tokenmill.monitor import read_timeline

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = """
import sys, tokenmill
tokenmill.build("in", tokenizer="bytes", out=sys.argv[1], workers=2, memory="2GB", unit_bytes=4000,
                monitor=sys.argv[2] if sys.argv[2:] else None)
"""

LIMITED = """
import resource, shutil, sys, tokenmill
shutil.rmtree("store", ignore_errors=True)
if limit := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
result = tokenmill.build("in", tokenizer="bytes", out="store", serial=True,
                         monitor="timeline.jsonl")
print(result.warnings)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Enough input for a build that can be killed in its middle."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", make_texts(400, seed=number))
    return tmp_path


@pytest.mark.slow
def test_a_build_killed_and_run_again_has_two_segments_and_the_same_store(folder: Path) -> None:
    command = [sys.executable, "-c", COMMAND]
    process = subprocess.Popen([*command, "store", "timeline.jsonl"], cwd=folder)
    while process.poll() is None and not any((folder / "store").glob("shards/*.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [killed] = read_timeline(folder / "timeline.jsonl").segments
    assert killed.summary is None

    again = [*command, "store", "timeline.jsonl"]
    subprocess.run(again, cwd=folder, check=True, timeout=120)
    _, last = read_timeline(folder / "timeline.jsonl").segments
    assert last.summary is not None
    assert last.summary["outcome"] == "done"
    assert np.nanmax(last.processes) >= 2
    assert last.summary["phase"] == "done"
    assert last.summary["input_bytes"] > 0
    assert last.summary["tokens"] > 0
    assert last.header["build"]["inputs"] == 1
    assert last.header["build"]["resources"]["workers"] == 2

    subprocess.run([*command, "plain"], cwd=folder, check=True, timeout=120)
    assert tree(folder / "store") == tree(folder / "plain")


def test_progress_reaches_the_caller_too(folder: Path) -> None:
    told: list[str] = []
    tokenmill.build(
        folder / "in",
        tokenizer="bytes",
        out=folder / "store",
        serial=True,
        monitor=folder / "timeline.jsonl",
        on_progress=lambda progress: told.append(progress.phase),
    )
    assert told[-1] == "done"
    # There is nothing to do now; that is a run, too.
    result = tokenmill.build(
        folder / "in",
        tokenizer="bytes",
        out=folder / "store",
        serial=True,
        monitor=folder / "timeline.jsonl",
    )
    assert result.nothing_to_do
    assert len(read_timeline(folder / "timeline.jsonl").segments) == 2


def test_no_secret_of_an_input_is_written(folder: Path) -> None:
    secret = "https://user:opensesame@localhost:1/data.jsonl?X-Signature=hush"
    with pytest.raises(tokenmill.TokenmillError):
        tokenmill.build(
            secret, tokenizer="bytes", out=folder / "store", monitor=folder / "timeline.jsonl"
        )
    text = (folder / "timeline.jsonl").read_text()
    [segment] = read_timeline(folder / "timeline.jsonl").segments
    assert segment.summary is not None
    assert segment.summary["outcome"] != "done"
    assert "opensesame" not in text
    assert "hush" not in text
    assert str(folder) not in text


@pytest.mark.parametrize(
    ("monitor", "reason"),
    [
        ("store/timeline.jsonl", "would be in the store"),
        ("store", "would be in the store"),
        ("in/timeline.jsonl", "would be among the input"),
        ("in/0.jsonl", "would be among the input"),
        ("more/timeline.jsonl", "would be among the input"),
        ("none/timeline.jsonl", "cannot be written"),
    ],
)
def test_a_bad_place_is_refused_before_anything_is_built(
    folder: Path, monitor: str, reason: str
) -> None:
    before = tree(folder)
    inputs = [folder / "in", folder / "more" / "*.jsonl"]
    with pytest.raises(UsageError, match=reason):
        tokenmill.build(inputs, tokenizer="bytes", out=folder / "store", monitor=folder / monitor)
    assert tree(folder) == before


def test_a_time_line_that_breaks_off_is_a_warning(folder: Path) -> None:
    path = folder / "timeline.jsonl"
    subprocess.run([sys.executable, "-c", LIMITED, "0"], cwd=folder, check=True, timeout=120)
    header = path.read_bytes().splitlines(keepends=True)[0]
    # Larger than any file of the store, so that the limit is met here and nowhere else.
    path.write_bytes(header * (4_000_000 // len(header)))
    limit = path.stat().st_size + len(header) + 50
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit)],
        cwd=folder,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert "the time line 'timeline.jsonl' ends early" in done.stdout
    assert path.stat().st_size == limit
    assert tokenmill.verify(folder / "store").ok
    assert read_timeline(path).segments[-1].summary is None


def test_a_full_disk_is_an_error_at_the_start(folder: Path) -> None:
    path = folder / "timeline.jsonl"
    subprocess.run([sys.executable, "-c", LIMITED, "0"], cwd=folder, check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path.stat().st_size)],
        cwd=folder,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "UsageError: the time line 'timeline.jsonl' cannot be written: File too large" in (
        done.stderr
    )
