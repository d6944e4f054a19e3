from __future__ import annotations

import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest

from tokenmill.diagnosis.ways import (
    WAYS,
    Rounds,
    Stopwatch,
    WayJob,
    run_way,
    take_sample,
    thin,
)
from tokenmill.monitor import tree_bytes

if TYPE_CHECKING:
    from pathlib import Path


def job(folder: Path, **changes: object) -> WayJob:
    values = {
        "way": "one-by-one",
        "folder": str(folder),
        "tokenizer": "bytes",
        "kind": "bytes",
        "workers": 1,
        "batch": 4,
        "seconds": 0.05,
        "seq_len": 32,
    }
    return WayJob(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "hello"}\n')
    take_sample([source], folder=tmp_path, most_bytes=1000)
    return tmp_path


def test_one_document_is_enough_to_measure_on(folder: Path) -> None:
    result = run_way(job(folder))
    assert result.problem is None
    assert result.tokens == 5 * result.documents > 0
    assert result.sample_ms is not None


def test_a_way_that_fails_tells_why_and_is_no_error(folder: Path) -> None:
    result = run_way(job(folder, tokenizer="absent/tokenizer.json", kind="huggingface"))
    assert "absent/tokenizer.json" in str(result.problem)
    assert (result.tokens, result.tokens_per_second) == (0, 0.0)
    assert "there is no store" in str(run_way(job(folder, way="loader")).problem).lower()


def test_a_process_that_is_killed_is_a_way_that_failed(folder: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_way, job(folder, seconds=60.0))
        end = time.monotonic() + 30
        while not (found := _measuring()):
            assert time.monotonic() < end
            time.sleep(0.05)
        found[0].kill()
        assert running.result(30).problem == "its process ended with exit code -9"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process that is stopped")
@pytest.mark.parametrize("way", ["pool", "dataloader"])
def test_workers_of_a_way_end_with_it_also_when_they_are_stopped(
    way: str, folder: Path, bpe_tokenizer_dir: Path
) -> None:
    told = {"tokenizer": str(bpe_tokenizer_dir), "kind": "huggingface", "workers": 2}
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_way, job(folder, way=way, seconds=60.0, **told))
        workers: list[psutil.Process] = []
        end = time.monotonic() + 60
        while len(workers) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
            children = [child for each in _measuring() for child in each.children()]
            workers = [each for each in children if _has_tokenizer(each)]
        for worker in workers:
            worker.suspend()
        _measuring()[0].kill()
        _, alive = psutil.wait_procs(workers, timeout=3)
        for worker in alive:
            worker.kill()
        assert "exit code -9" in str(running.result(30).problem)
    assert not alive


def _has_tokenizer(process: psutil.Process) -> bool:
    """Whether a worker has begun: it loads its tokenizer by itself."""
    return any("/tokenizers/" in each.path for each in process.memory_maps())


def _measuring() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if "tokenmill.diagnosis.ways" in " ".join(each.cmdline())]


def test_a_mistake_of_ours_in_a_way_is_told_too(folder: Path) -> None:
    assert "TypeError" in str(run_way(job(folder, seconds="soon")).problem)


def test_memory_of_a_process_and_its_children_is_added_up() -> None:
    code = (
        "import subprocess, sys; own = bytearray(50_000_000); "
        "subprocess.run([sys.executable, '-c', 'b = bytearray(70_000_000); input()'])"
    )
    process = psutil.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 30
        while tree_bytes(process) < 120_000_000:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.stdin.close()
        process.wait(30)


def test_fewer_points_keep_the_peak() -> None:
    points = [(float(second), second % 997) for second in range(5000)]
    kept = thin(points)
    assert len(kept) <= 240
    assert max(size for _, size in kept) == 996
    assert [second for second, _ in kept] == sorted(second for second, _ in kept)
    assert thin([]) == ()


def test_rounds_deal_all_documents_again_and_again() -> None:
    rounds = Rounds(["a", "\u00e9", "c"], batch=2, seconds=0.01)
    groups = list(rounds.groups())
    assert groups[:3] == [["a", "\u00e9"], ["c", "a"], ["\u00e9", "c"]]
    assert rounds.documents == 2 * len(groups)
    dealt = [text for group in groups for text in group]
    assert rounds.text_bytes == sum(len(text.encode()) for text in dealt)


def test_a_stopwatch_tells_own_work_from_that_of_others() -> None:
    # Its parent ends at once, so that it is no child of this process.
    code = "import os; print(os.getpid(), flush=True)\nwhile os.times().user < 60: pass"
    start = f"{shlex.join([sys.executable, '-c', code])} & sleep 0"
    with subprocess.Popen(["/bin/sh", "-c", start], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        other = psutil.Process(int(shell.stdout.readline()))
        assert shell.wait(30) == 0
        try:
            watch = Stopwatch()
            own, others = time.process_time(), other.cpu_times().user
            end = time.monotonic() + 60
            while time.process_time() < own + 0.3 or other.cpu_times().user < others + 0.5:
                assert time.monotonic() < end
            span = watch.stop()
            own = time.process_time() - own
        finally:
            other.kill()
    assert span["seconds"] >= 0.25
    assert own - 0.1 <= span["cpu_cores"] * span["seconds"] <= own + 0.1
    assert span["other_cores"] * span["seconds"] >= 0.4


def test_every_way_has_a_function() -> None:
    assert len({way.measure for way in WAYS.values()}) == len(WAYS)
