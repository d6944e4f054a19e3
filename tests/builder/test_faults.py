"""Full disks, dying workers, failing sources, two builds at once: clear words, and nothing lost."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.builder.stores import byte_ids, documents, make_texts, tree, write_jsonl

import tokenmill
from tokenmill.errors import BuildError, SourceError, StoreLockedError

if TYPE_CHECKING:
    from tokenmill.builder.progress import BuildResult, Progress


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build(inputs: object, out: str = "store", **options: object) -> BuildResult:
    settings: dict[str, object] = {"tokenizer": "bytes", "memory": "2GB"}
    if "serial" not in options:
        settings["workers"] = 2
    return tokenmill.build(inputs, out=out, **(settings | options))  # type: ignore[arg-type]


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small tmpfs needs root"
)
def test_a_full_disk_stops_the_build_and_the_same_command_finishes_it(tmp_path: Path) -> None:
    write_jsonl(Path("a.jsonl"), make_texts(8000))
    build("a.jsonl", "whole", unit_bytes=50_000, serial=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        with pytest.raises(BuildError, match="No space left on device") as caught:
            build("a.jsonl", "disk/store", unit_bytes=50_000)
        assert "run the same command again" in str(caught.value.hint)
        kept = list(Path("disk/store/shards").glob("*.json"))
        assert kept, "the test should fill the disk in the middle"
        assert not Path("disk/store/tmp").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        result = build("a.jsonl", "disk/store", unit_bytes=50_000)
        assert result.units_resumed >= len(kept) - 1
        assert tree(Path("disk/store")) == tree(Path("whole"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_worker_that_dies_is_replaced_and_the_store_is_the_same() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(6000))
    build("a.jsonl", "whole", unit_bytes=20_000, serial=True)
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        if progress.workers and progress.documents and not killed:
            killed.append(progress.workers[0].pid)
            psutil.Process(killed[0]).kill()

    result = build("a.jsonl", unit_bytes=20_000, on_progress=kill_once)
    assert killed
    assert any("killed by signal 9" in warning for warning in result.warnings)
    assert tree(Path("store")) == tree(Path("whole"))


def test_a_cut_off_compressed_file_fails_by_name_and_is_resumed_when_it_is_whole() -> None:
    texts = make_texts(600)
    data = gzip.compress(write_jsonl(Path("raw"), texts).read_bytes())
    Path("a.jsonl.gz").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz"):
        build("a.jsonl.gz", unit_bytes=4000)
    assert not Path("store/tokenmill.json").exists()
    Path("a.jsonl.gz").write_bytes(data)
    build("a.jsonl.gz", unit_bytes=4000, serial=True)
    assert documents(Path("store")) == byte_ids(texts)


def test_what_is_before_the_damage_in_a_compressed_file_that_workers_share_is_built() -> None:
    data = write_jsonl(Path("raw"), make_texts(600) * 40).read_bytes()
    Path("a.jsonl.gz").write_bytes(gzip.compress(data)[:-3])
    with pytest.raises(SourceError, match=r"cannot read 'a\.jsonl\.gz'.*[Tt]runcated"):
        build("a.jsonl.gz", unit_bytes=400_000, workers=2, memory="2GB")
    # Only the last unit reaches the damage.
    assert len([*Path("store/shards").glob("*.json")]) == len(data) // 400_000
    assert not Path("store/tmp").exists()


def test_workers_that_die_while_they_share_a_compressed_file_are_replaced() -> None:
    data = write_jsonl(Path("raw"), make_texts(9000)).read_bytes()
    Path("a.jsonl.gz").write_bytes(gzip.compress(data))
    build("a.jsonl.gz", "whole", unit_bytes=20_000, serial=True)
    killed: list[int] = []

    def kill_some(progress: Progress) -> None:
        # First the one that decompresses: its task is the first. A third could lose a unit thrice.
        pids = {worker.number: worker.pid for worker in progress.workers}
        pid = pids.get(len(killed))
        if pid and progress.units_done > 10 * len(killed) and len(killed) < 2:
            killed.append(pid)
            psutil.Process(pid).kill()

    result = build("a.jsonl.gz", unit_bytes=20_000, workers=3, memory="3GB", on_progress=kill_some)
    assert len(killed) == 2
    assert any("'a.jsonl.gz' is built again" in warning for warning in result.warnings)
    assert tree(Path("store")) == tree(Path("whole"))


def test_a_source_that_vanishes_during_the_build_is_an_error_by_name() -> None:
    for number in range(30):
        write_jsonl(Path(f"{number:02d}.jsonl"), make_texts(300, seed=number))
    files = sorted(map(str, Path().glob("*.jsonl")))

    def remove(progress: Progress) -> None:
        if progress.phase in ("starting", "building"):  # it is planned
            Path(files[-1]).unlink(missing_ok=True)

    with pytest.raises(SourceError, match=r"29\.jsonl"):
        build(files, workers=1, on_progress=remove)
    write_jsonl(Path(files[-1]), make_texts(300, seed=29))
    result = build(files, serial=True)
    assert result.units_resumed > 0
    build(files, "fresh", serial=True)
    assert tree(Path("fresh")) == tree(Path("store"))


def test_a_second_build_on_the_same_store_is_refused_while_the_first_goes_on() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(4000))
    refused: list[StoreLockedError] = []

    def interfere() -> None:
        with pytest.raises(StoreLockedError) as caught:
            build("a.jsonl", unit_bytes=20_000, serial=True)
        refused.append(caught.value)

    rivals: list[threading.Thread] = []

    def start_rival(progress: Progress) -> None:
        if progress.phase in ("starting", "building") and not rivals:
            rivals.append(threading.Thread(target=interfere))
            rivals[0].start()
            rivals[0].join()  # the build waits for it, however fast it is

    build("a.jsonl", unit_bytes=20_000, on_progress=start_rival)
    assert str(os.getpid()) in refused[0].message
    assert build("a.jsonl", unit_bytes=20_000, serial=True).nothing_to_do


@pytest.mark.parametrize(
    "signal_number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_driver_leaves_no_process_and_a_store_that_resumes(
    signal_number: signal.Signals, tmp_path: Path
) -> None:
    write_jsonl(Path("a.jsonl"), make_texts(6000))
    command = (
        "import tokenmill; tokenmill.build('a.jsonl', tokenizer='bytes', out='store', "
        "workers=2, memory='2GB', unit_bytes=10_000)"
    )
    driver = subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.DEVNULL)
    while not any(Path("store").glob("shards/*.json")):
        assert driver.poll() is None
        time.sleep(0.005)
    workers = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal_number)
    assert driver.wait(20) != 0
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert not Path("store/tokenmill.json").exists()
    build("a.jsonl", unit_bytes=10_000, serial=True)
    build("a.jsonl", "fresh", unit_bytes=10_000, serial=True)
    assert tree(Path("fresh")) == tree(Path("store"))


def test_a_damaged_receipt_or_a_missing_file_costs_its_unit_only() -> None:
    write_jsonl(Path("a.jsonl"), make_texts(400))
    build("a.jsonl", unit_bytes=4000, serial=True)
    before = tree(Path("store"))
    receipts = sorted(Path("store/shards").glob("*.json"))
    receipts[1].write_bytes(receipts[1].read_bytes()[:-10])
    receipts[2].with_suffix(".bin").unlink()
    result = build("a.jsonl", unit_bytes=4000, serial=True)
    assert result.units_built == 2
    assert tree(Path("store")) == before
