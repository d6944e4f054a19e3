"""The folder of blocks: bounded, shared by processes, and never a source of wrong bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.store import blocks as blocks_module
from tokenmill.store.blocks import (
    BLOCK_BYTES,
    HEADER,
    WAYS,
    BlockFile,
    BlockFolder,
    BlockRange,
    FileExtent,
    RecentlyUsed,
    block_of,
)

SLOT_BYTES = BLOCK_BYTES + HEADER.size


def file_of(num_blocks: int, *, name: str = "shards/a.bin", content: str = "c1") -> BlockFile:
    return BlockFile(name=name, size=num_blocks * BLOCK_BYTES - 7, content=content, first_block=0)


def block(number: int, **changes: str) -> FileExtent:
    return block_of(file_of(200, **changes), number)


def data_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK_BYTES // 4)


def open_folder(path: Path, *, slots: int, store: str = "s3://bucket/store") -> BlockFolder:
    return BlockFolder(path, limit_bytes=slots * SLOT_BYTES, store=store, versions={})


def slots_in(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.block"))


def bytes_in(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def test_a_block_is_read_as_it_was_put(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=16)
    assert folder.get(block(3)) is None
    folder.put(block(3), data_of(3))
    assert folder.get(block(3)) == data_of(3)
    assert open_folder(tmp_path, slots=16).get(block(3)) == data_of(3)
    last = block(199)
    folder.put(last, data_of(9)[: last.size])
    assert folder.get(last) == data_of(9)[:-7]


def test_another_store_file_content_or_place_is_another_block(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=8)
    folder.put(block(3), data_of(3))
    for other in (block(3, content="c2"), block(3, name="shards/b.bin"), block(4)):
        assert folder.get(other) is None
    assert open_folder(tmp_path, slots=8, store="s3://bucket/other").get(block(3)) is None


def test_the_folder_never_outgrows_its_limit(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=20)
    for number in range(60):
        folder.put(block(number), data_of(number))
        assert bytes_in(tmp_path) <= 20 * SLOT_BYTES
    kept = [number for number in range(60) if folder.get(block(number)) == data_of(number)]
    assert kept == list(range(44, 60)), "two sets of eight, and the last ones in each"


def test_what_fits_the_limit_is_kept_whole(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=48)
    assert folder.capacity_blocks == 48
    for number in range(48):
        folder.put(block(number), data_of(number))
    assert all(folder.get(block(number)) == data_of(number) for number in range(48))


def test_the_block_that_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=WAYS)
    for number in range(WAYS):
        folder.put(block(number), data_of(number))
        time.sleep(0.01)
    assert folder.get(block(0)) is not None
    folder.put(block(100), data_of(100))
    here = {number for number in (*range(WAYS), 100) if folder.get(block(number)) is not None}
    assert here == {0, 2, 3, 4, 5, 6, 7, 100}


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "empty", "header", "other slot"])
def test_a_damaged_block_is_one_that_is_not_there(tmp_path: Path, damage: str) -> None:
    folder = open_folder(tmp_path, slots=8)
    folder.put(block(1), data_of(1))
    (slot,) = slots_in(tmp_path)
    found = bytearray(slot.read_bytes())
    if damage in ("bit", "header"):
        found[5000 if damage == "bit" else 9] ^= 1
    others = {"cut": found[:-1], "longer": found + b"x", "empty": bytearray()}
    slot.write_bytes(others.get(damage, found))
    if damage == "other slot":
        folder.put(block(2), data_of(2))
        _, other = slots_in(tmp_path)
        slot.write_bytes(other.read_bytes())
    assert folder.get(block(1)) is None
    assert wanted(folder, 1, (10, 20)) is None
    folder.put(block(1), data_of(1))
    assert folder.get(block(1)) == data_of(1), "and it is repaired"


def wanted(folder: BlockFolder, number: int, *spans: tuple[int, int]) -> list[bytes] | None:
    one = block(number)
    one.parts.extend(
        BlockRange(first=one.first + first, last=one.first + last, place=0) for first, last in spans
    )
    return folder.get_parts(one)


def test_parts_of_a_block_are_read_alone_once_it_was_checked(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=8)
    folder.put(block(7), data_of(7))
    spans = ((0, 4), (4096, 4106))
    expected = [data_of(7)[first:last] for first, last in spans]
    assert wanted(folder, 7, *spans) == expected
    assert wanted(folder, 7, *spans) == expected
    (slot,) = slots_in(tmp_path)
    os.truncate(slot, 3000)
    assert wanted(folder, 7, *spans) is None
    folder.put(block(7), data_of(7))
    assert wanted(folder, 7, *spans) == expected
    for number in range(100, 100 + WAYS):
        folder.put(block(number), data_of(number))
    assert wanted(folder, 7, *spans) is None, "its slot was given to another block"


def test_a_block_that_was_replaced_is_checked_again(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=8)
    folder.put(block(7), data_of(7))
    assert wanted(folder, 7, (0, 4)) == [data_of(7)[:4]]
    (slot,) = slots_in(tmp_path)
    damaged = bytearray(slot.read_bytes())
    damaged[HEADER.size] ^= 1
    (tmp_path / "new").write_bytes(damaged)
    (tmp_path / "new").replace(slot)
    assert wanted(folder, 7, (0, 4)) is None


def test_a_lower_limit_gives_the_space_back(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=64)
    for number in range(64):
        folder.put(block(number), data_of(number))
    open_folder(tmp_path, slots=8)
    assert bytes_in(tmp_path) <= 8 * SLOT_BYTES


def test_only_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    open_folder(tmp_path, slots=8)
    temporary = tmp_path / "tmp"
    old, fresh = temporary / f"1-{'0' * 16}.tmp", temporary / f"2-{'0' * 16}.tmp"
    others = [temporary / "notes.txt", tmp_path / "notes.txt"]
    for path in (old, fresh, *others):
        path.write_bytes(b"x")
    before = time.time() - blocks_module.STALE_SECONDS - 5
    for path in (old, *others):
        os.utime(path, (before, before))
    open_folder(tmp_path, slots=8)
    assert not old.exists()
    assert all(path.exists() for path in (fresh, *others))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"cache folder .*file") as caught:
        open_folder(tmp_path / "file", slots=8)
    assert "leave cache= out" in str(caught.value.hint)
    with pytest.raises(UsageError, match="cache_bytes=1,000 is less than one block"):
        BlockFolder(tmp_path / "x", limit_bytes=1000, store="s", versions={})


def test_a_folder_that_was_emptied_fills_again(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "cache", slots=8)
    folder.put(block(1), data_of(1))
    shutil.rmtree(tmp_path / "cache")
    assert folder.get(block(1)) is None
    folder.put(block(1), data_of(1))
    assert folder.get(block(1)) == data_of(1)


def test_a_folder_that_cannot_be_written_any_more_is_a_warning(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, slots=8)
    folder.put(block(1), data_of(1))
    (tmp_path / "tmp").rmdir()
    (tmp_path / "tmp").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="cannot be written.* goes on without it"):
        folder.put(block(2), data_of(2))
    folder.put(block(2), data_of(2))
    assert folder.get(block(1)) == data_of(1)
    assert folder.get(block(2)) is None


# Each process puts and gets the same blocks in its own order, in a folder that holds a few of them.
HAMMER = """
import random, sys
from pathlib import Path
from tests.store.test_block_cache import block, data_of, open_folder
folder, dice, hits = open_folder(Path(sys.argv[1]), slots=16), random.Random(int(sys.argv[2])), 0
print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    number = dice.randrange(40)
    found = folder.get(block(number))
    assert found in (None, data_of(number)), number
    hits += found is not None
    if found is None:
        folder.put(block(number), data_of(number))
print(hits)
"""


def start(path: Path, seed: int, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HAMMER, str(path), str(seed), str(rounds)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)


def output_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with process.stdout as lines:
        return lines.readline()


def test_processes_share_a_folder_and_none_reads_wrong_bytes(tmp_path: Path) -> None:
    processes = [start(tmp_path, seed, rounds=300) for seed in range(3)]
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, sum(_size(each) for each in slots_in(tmp_path)))
        time.sleep(0.01)
    most = max(most, bytes_in(tmp_path))
    for process in processes:
        out, _ = process.communicate()
        assert process.returncode == 0
        assert int(out.split()[-1]) > 20, "blocks that other processes put were used"
    assert 8 * SLOT_BYTES < most <= 16 * SLOT_BYTES
    assert not list((tmp_path / "tmp").iterdir())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_killed_process_leaves_whole_blocks_and_at_most_temporary_files(tmp_path: Path) -> None:
    for seed in range(3):
        process = start(tmp_path, seed, rounds=10**6)
        assert output_of(process) == "ready\n"
        while len(slots_in(tmp_path)) < 5 + seed:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
        process.wait()
    assert len(slots_in(tmp_path)) > 4
    assert all(path.stat().st_size == SLOT_BYTES for path in slots_in(tmp_path))
    assert len(list((tmp_path / "tmp").iterdir())) <= 3
    folder = open_folder(tmp_path, slots=16)
    found = [folder.get(block(number)) for number in range(40)]
    assert sum(data is not None for data in found) > 4
    assert all(data in (None, data_of(number)) for number, data in enumerate(found))


def test_what_is_in_memory_is_bounded_by_its_bytes_and_by_last_use() -> None:
    recent: RecentlyUsed[int, bytes] = RecentlyUsed(100)
    for number in range(10):
        recent.put(number, b"x" * 30, size=30)
        recent.get(0)
    assert [number for number in range(10) if recent.get(number)] == [0, 8, 9]
    recent.put(9, b"y", size=1)
    recent.put(10, b"z" * 39, size=39)
    assert [number for number in range(11) if recent.get(number)] == [0, 8, 9, 10]
    recent.drop(8)
    assert recent.get(8) is None
