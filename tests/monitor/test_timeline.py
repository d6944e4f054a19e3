"""Reading time lines: whole ones, cut ones, several in one file, and files that are none."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tokenmill.errors import UsageError
from tokenmill.monitor import Recorder, read_timeline

WRITER = """
import sys, time
from tokenmill.monitor import Recorder
with Recorder(sys.argv[1], facts={"store": "here"}, interval_seconds=0.05) as recorder:
    for number in range(10_000):
        recorder.note(phase="building", input_bytes=1000 * number, tokens=10 * number)
        time.sleep(0.01)
"""


def write(path: Path, *, samples: int = 4, facts: dict[str, object] | None = None) -> None:
    """A run in which work is noted."""
    with Recorder(path, facts=facts, interval_seconds=0.05) as recorder:
        number = 0
        while recorder.num_samples < samples:
            number += 1
            recorder.note(phase="building", input_bytes=1000 * number, tokens=10 * number)
            time.sleep(0.005)


def await_samples(recorder: Recorder) -> None:
    """Until two more have begun and ended."""
    enough = recorder.num_samples + 3
    while recorder.num_samples < enough:
        time.sleep(0.01)


def test_cpu_of_the_own_processes_is_told_beside_that_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    # Another program, whose parent ends at once: it is no child of this process.
    burn = "import os; print(os.getpid(), flush=True)\nwhile os.times().user < 60: pass"
    start = f"{shlex.join([sys.executable, '-c', burn])} & sleep 0"
    with subprocess.Popen(["/bin/sh", "-c", start], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        other = psutil.Process(int(shell.stdout.readline()))
        assert shell.wait(30) == 0
        try:
            with Recorder(path, interval_seconds=0.05):
                used, others = time.process_time(), other.cpu_times().user
                while time.process_time() < used + 0.4 or other.cpu_times().user < others + 0.4:
                    pass
                used = time.process_time() - used
                others = other.cpu_times().user - others
        finally:
            other.kill()
    [segment] = read_timeline(path).segments
    spans = np.diff(segment.seconds, prepend=0.0)
    own = float(segment.build_cores @ spans)
    assert used - 0.1 <= own <= used + 0.2
    assert float(segment.machine_cores @ spans) >= own + others - 0.2


def test_a_time_line_of_before_has_no_cpu_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    write(path)
    path.write_text(re.sub(r'"build_cpu_percent":[\d.]+,', "", path.read_text()))
    [segment] = read_timeline(path).segments
    assert np.isnan(segment.build_cores).all()
    assert np.isfinite(segment.machine_cores).all()


def test_a_run_is_read_back_as_arrays(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    block = bytearray(os.urandom(1 << 20)) * 64
    write(path, facts={"store": "here", "inputs": 3})
    timeline = read_timeline(path)
    [segment] = timeline.segments

    assert len(segment) >= 3
    assert segment.header["build"] == {"store": "here", "inputs": 3}
    assert segment.cpu_percent.shape == (len(segment), segment.header["machine"]["cores"])
    assert np.all((segment.cpu_percent >= 0) & (segment.cpu_percent <= 100))
    assert np.all(np.diff(segment.seconds) > 0)
    assert np.all(segment.processes >= 1)
    assert np.all(segment.memory_rss_bytes >= len(block))
    assert np.all(segment.memory_bytes >= len(block))
    assert np.all(segment.machine_memory_bytes > len(block))
    assert np.all(np.diff(segment.tokens) >= 0)
    assert segment.tokens[-1] > 0
    # Ten tokens with every thousand bytes.
    assert np.allclose(segment.input_bytes, 100 * segment.tokens)
    rates = segment.tokens_per_second[1:]
    assert np.nanmax(rates) > 0
    assert np.allclose(segment.input_bytes_per_second[1:], 100 * rates, equal_nan=True)
    assert set(segment.phases) == {"building"}
    assert segment.summary is not None
    assert segment.summary["outcome"] == "done"
    assert segment.summary["samples"] == len(segment)
    assert segment.summary["peak_memory_bytes"] == np.max(segment.memory_bytes)
    assert timeline.seconds == segment.summary["seconds"] >= segment.seconds[-1]


@pytest.mark.slow
def test_children_are_part_of_the_build(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    code = "block = bytearray(b'x') * 80_000_000; print(flush=True); input()"
    with Recorder(path, interval_seconds=0.05) as recorder:
        await_samples(recorder)
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        await_samples(recorder)
        child.communicate(b"\n")
    [segment] = read_timeline(path).segments

    assert np.ptp(segment.processes) >= 1  # what an earlier test has left may end meanwhile
    assert np.ptp(segment.memory_rss_bytes) >= 80_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts of a process: Linux")
def test_what_the_build_writes_to_disk_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with Recorder(path, interval_seconds=0.05) as recorder:
        with (tmp_path / "block").open("wb") as file:
            file.write(os.urandom(20_000_000))
            file.flush()
            os.fsync(file.fileno())
        await_samples(recorder)
    [segment] = read_timeline(path).segments
    written = segment.build_write_bytes_per_second * np.diff(segment.seconds, prepend=0)
    if not np.nansum(written):
        pytest.skip("the temporary folder lies in memory")
    assert 19_000_000 < np.nansum(written) < 60_000_000


def test_a_run_that_is_killed_can_be_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with path.open("ab") as file:
        file.write(b'{"kind":"sample","time":17')  # what a kill at the wrong moment leaves

    [killed] = read_timeline(path).segments
    assert killed.summary is None
    assert len(killed) >= 3
    assert killed.length_seconds == killed.seconds[-1]

    write(path)
    first, second = read_timeline(path).segments
    assert len(first) == len(killed)
    assert second.summary is not None
    assert read_timeline(path).seconds == killed.length_seconds + second.length_seconds


def test_a_file_cut_anywhere_gives_the_samples_before_the_cut(tmp_path: Path) -> None:
    path, cut = tmp_path / "timeline.jsonl", tmp_path / "cut.jsonl"
    write(path)
    data = path.read_bytes()
    header = data.index(b"\n")
    for end in range(header, len(data), 37):
        cut.write_bytes(data[:end])
        [segment] = read_timeline(cut).segments
        whole = data[:end].split(b"\n")
        complete = whole if _is_json(whole[-1]) else whole[:-1]
        assert len(segment) == sum(b'"kind":"sample"' in line for line in complete)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_a_failure_is_told_and_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with pytest.raises(ZeroDivisionError), Recorder(path):
        1 / 0  # noqa: B018
    [segment] = read_timeline(path).segments
    assert segment.summary is not None
    assert segment.summary["outcome"] == "ZeroDivisionError"
    assert len(segment) == 1, "however short"


def test_a_run_killed_at_once_has_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with Recorder(path):
        pass
    header, _, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header)
    [segment] = read_timeline(path).segments
    assert segment.summary is None
    assert segment.cpu_percent.shape == (0, segment.header["machine"]["cores"])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", 1),
        (b'{"text": "a corpus"}\n', 1),
        (b"\x89PNG\r\n", 1),
        (b'{"kind":"sample","time":1}\n', 1),
        (b'HEADER\n{"kind":"sample","ti\n{"kind":"sample","time":1}\n', 2),
        (b"HEADER\nhello\n", 2),
        (b'HEADER\nhello\n{"kind":"sample","time":1}\n', 2),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "other.jsonl"
    write(path, samples=0)
    header = path.read_bytes().split(b"\n")[0]
    path.write_bytes(content.replace(b"HEADER", header))
    with pytest.raises(UsageError, match=f"line {line} of .* is no line of a time line.*monitor="):
        read_timeline(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: No such file.*monitor="):
        read_timeline(tmp_path / "none.jsonl")


def test_places_that_cannot_be_written_are_refused_at_once(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "precious"}\n')
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "none" / "t.jsonl", "cannot be written: No such file"),
        (tmp_path, "is no file"),
        (tmp_path / "pipe", "is no file"),
        (corpus / "t.jsonl", "Not a directory"),
        (corpus, "exists and is no time line; it would be damaged"),
    ):
        with pytest.raises(UsageError, match=f"{reason}.*monitor="), Recorder(path):
            pytest.fail("it began")
    assert corpus.read_text() == '{"text": "precious"}\n'


def test_an_interval_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="interval_seconds=0 is not a time"):
        Recorder(tmp_path / "t.jsonl", interval_seconds=0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with Recorder(path, interval_seconds=0.02) as recorder:
        # From here on every write goes to a device that is always full.
        full = os.open("/dev/full", os.O_WRONLY)
        assert recorder._file is not None
        os.dup2(full, recorder._file.fileno())
        os.close(full)
        while recorder.problem is None:
            time.sleep(0.01)
    assert recorder.problem == "No space left on device"
    [segment] = read_timeline(path).segments
    assert segment.summary is None
