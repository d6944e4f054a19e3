from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.loader.stores import numbered_store
from tests.store.samples import SampleStore, SampleUnit

from tokenmill.errors import StoreError
from tokenmill.files import cache_folder
from tokenmill.loader.packing import BestFitLayout
from tokenmill.store.check import Finding, check_store
from tokenmill.store.layout import checksum_of, seal, unseal
from tokenmill.store.plans import (
    HEADER_BYTES,
    PLAN_VERSION,
    PlanFacts,
    PlanKey,
    PlanTally,
    PlanWriter,
    check_plan,
    open_plan,
    read_plan,
)
from tokenmill.store.reader import Store
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [[3, 5, 2], [], [11, 1, 4, 30, 9]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return numbered_store(tmp_path / "store", LENGTHS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, which no test but those about it may fill."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKENMILL_CACHE", str(folder))
    return folder


def lay_out(store: Store, *, seq_len: int = 4) -> BestFitLayout:
    return BestFitLayout(TokenStream(store), seq_len=seq_len)


def plan_path(store: Store, *, seq_len: int = 4) -> Path:
    key = PlanKey(packing="best-fit", seq_len=seq_len, content=store.content)
    return store.layout.layouts / key.file_name


def lay_out_path(store: Store) -> Path:
    lay_out(store)
    return plan_path(store)


def rows_of(layout: BestFitLayout) -> list[list[int]]:
    return [part.tolist() for part in layout.pieces(np.arange(layout.num_rows))]


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << (place % 8)
    return bytes(changed)


def test_a_plan_lies_beside_the_store_and_is_not_made_again(store: Store, cache: Path) -> None:
    made = lay_out(store)
    path = plan_path(store)
    assert [*store.layout.layouts.iterdir()] == [path]
    assert path.name == f"best-fit-4-{store.content[:16]}.plan"
    assert not store.layout.tmp.exists()
    assert not cache.exists()
    written = path.stat()
    assert rows_of(lay_out(store)) == rows_of(made)
    assert path.stat() == written


def test_the_bytes_of_a_plan_never_change(store: Store) -> None:
    data = lay_out_path(store).read_bytes()
    assert len(data) == HEADER_BYTES + 8 * 18 + 8 * (15 + 1)
    assert checksum_of(data) == "e9b1397ff4059a9e94a840354590fc01"


def test_the_file_is_what_the_format_says(store: Store) -> None:
    layout = lay_out(store)
    data = plan_path(store).read_bytes()
    header = unseal(data[:HEADER_BYTES].rstrip(b"\0"), path=plan_path(store))
    assert header["plan_version"] == PLAN_VERSION
    assert header["content"] == store.content
    assert header["arrays"] == checksum_of(data[HEADER_BYTES:])
    num_rows, num_items = header["rows"], header["items"]
    assert isinstance(num_rows, int)
    assert isinstance(num_items, int)
    items = np.frombuffer(data, "<u8", num_items, HEADER_BYTES).tolist()
    row_starts = np.frombuffer(data, "<i8", num_rows + 1, HEADER_BYTES + 8 * num_items).tolist()
    assert len(data) == HEADER_BYTES + 8 * len(items) + 8 * len(row_starts)
    row = 2
    starts, lengths = layout.pieces(np.array([row]))
    filled = starts >= 0
    assert [item >> 21 for item in items[row_starts[row] : row_starts[row + 1]]] == (
        starts[filled].tolist()
    )
    assert [item % 2**21 for item in items[row_starts[row] : row_starts[row + 1]]] == (
        lengths[filled].tolist()
    )
    assert row_starts[-1] == len(items)


def test_every_changed_byte_is_found(store: Store) -> None:
    path = lay_out_path(store)
    data = path.read_bytes()
    assert check_plan(path).rows == 15
    for place in [*range(800), *range(HEADER_BYTES - 8, len(data))]:
        path.write_bytes(flipped(data, place))
        with pytest.raises(StoreError):
            check_plan(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: flipped(data, 40),
        lambda data: flipped(data, HEADER_BYTES - 1),
        lambda data: data[:-8],
        lambda data: data + bytes(8),
        lambda data: data[:100],
        lambda _: b"",
    ],
    ids=["header", "behind the header", "cut off", "longer", "no arrays", "empty"],
)
def test_a_plan_that_is_seen_to_be_damaged_is_written_anew(store: Store, damage: object) -> None:
    rows = rows_of(lay_out(store))
    path = plan_path(store)
    data = path.read_bytes()
    path.write_bytes(damage(data))  # type: ignore[operator]
    assert rows_of(lay_out(store)) == rows
    assert path.read_bytes() == data


def test_a_plan_of_another_version_is_written_anew_and_noted_by_a_check(store: Store) -> None:
    path = lay_out_path(store)
    data = path.read_bytes()
    header = unseal(data[:HEADER_BYTES].rstrip(b"\0"), path=path)
    newer = seal({**header, "plan_version": PLAN_VERSION + 1}).ljust(HEADER_BYTES, b"\0")
    path.write_bytes(newer + data[HEADER_BYTES:])
    report = check_store(store.path)
    note = Finding(f"layouts/{path.name}", "is of another version of tokenmill; can be deleted")
    assert (report.findings, report.notes) == ((), (note,))
    lay_out(store)
    assert path.read_bytes() == data


def test_a_plan_of_another_content_is_not_used(tmp_path: Path, store: Store) -> None:
    other = numbered_store(tmp_path / "other", [[3, 5, 2, 11, 1, 4, 30, 10]])
    lay_out(other)
    store.layout.layouts.mkdir()
    shutil.copy(plan_path(other), plan_path(store))
    assert lay_out(store).account().tokens == store.num_tokens == other.num_tokens - 1


def test_a_store_that_grew_gets_a_new_plan_and_the_old_one_is_noted(store: Store) -> None:
    lay_out(store)
    old = plan_path(store)
    grown = numbered_store(store.layout.root, [*LENGTHS, [6, 7]])
    lay_out(grown)
    assert {path.name for path in store.layout.layouts.iterdir()} == {
        old.name,
        plan_path(grown).name,
    }
    report = check_store(store.path)
    note = Finding(
        f"layouts/{old.name}", "is for an earlier state of this store, or a view; can be deleted"
    )
    assert (report.findings, report.notes) == ((), (note,))


def test_a_check_reads_plans_and_finds_what_opening_does_not_see(store: Store) -> None:
    lay_out(store)
    lay_out(store, seq_len=7)
    before = check_store(store.path)
    assert (before.findings, before.notes) == ((), ())
    path = plan_path(store)
    data = path.read_bytes()
    path.write_bytes(flipped(data, len(data) - 20))
    (store.layout.layouts / "notes.txt").touch()
    report = check_store(store.path)
    assert [finding.file for finding in report.findings] == [f"layouts/{path.name}"]
    assert "was changed" in report.findings[0].problem
    assert "delete it" in report.findings[0].problem
    assert report.notes == (Finding("layouts/notes.txt", "is no part of the store"),)
    assert (report.files, report.bytes) == (before.files, before.bytes)


def test_the_plans_of_two_splits_are_two_files_and_both_are_current(tmp_path: Path) -> None:
    rows = [("train", "abcd"), ("val", "efg"), ("train", "hij"), ("val", "klmnop")]
    layout = SampleStore(units=[SampleUnit(path="a", rows=rows)]).write(tmp_path / "splits")
    splits = ("train", "val", None)
    for split in splits:
        lay_out(Store(layout.root, split=split))
    assert len([*layout.layouts.iterdir()]) == len(splits)
    report = check_store(layout.root)
    assert (report.findings, report.notes) == ((), ())


def test_splits_of_equal_content_share_a_plan(tmp_path: Path) -> None:
    rows = [("train", "abcd"), ("val", "abcd")]
    layout = SampleStore(units=[SampleUnit(path="a", rows=rows)]).write(tmp_path / "splits")
    train, val = (Store(layout.root, split=split) for split in ("train", "val"))
    assert train.content == val.content
    assert rows_of(lay_out(train)) == rows_of(lay_out(val))
    assert len([*layout.layouts.iterdir()]) == 1


def test_content_is_that_of_the_shards_in_their_order(tmp_path: Path, store: Store) -> None:
    same = numbered_store(tmp_path / "same", LENGTHS)
    other = numbered_store(tmp_path / "other", [[3, 5, 3], [], [10, 1, 4, 30, 9]])
    lines = [
        f"{shard.documents},{shard.tokens},{shard.bin},{shard.idx}\n"
        for unit in store.manifest.units
        for shard in unit.shards
    ]
    assert len(lines) == 2
    assert store.content == same.content == checksum_of("".join(lines).encode())
    assert other.content != store.content


@pytest.mark.parametrize("blocked", ["tmp", "layouts"])
def test_a_store_that_cannot_be_written_keeps_its_plan_in_the_cache(
    store: Store, cache: Path, blocked: str
) -> None:
    rows = rows_of(lay_out(store))
    data = plan_path(store).read_bytes()
    shutil.rmtree(store.layout.layouts)
    (store.layout.root / blocked).write_text("a file is in the way")
    assert rows_of(lay_out(store)) == rows
    kept = cache / "layouts" / plan_path(store).name
    assert kept.read_bytes() == data
    assert [*cache.iterdir()] == [kept.parent]
    written = kept.stat()
    lay_out(store)
    assert kept.stat() == written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_store_keeps_its_plan_in_the_cache(store: Store, cache: Path) -> None:
    store.layout.root.chmod(0o555)
    try:
        lay_out(store)
    finally:
        store.layout.root.chmod(0o755)
    assert (cache / "layouts" / plan_path(store).name).exists()


def test_a_plan_that_can_be_kept_nowhere_is_an_error_that_says_what_to_do(
    store: Store, cache: Path
) -> None:
    store.layout.tmp.write_text("a file is in the way")
    cache.write_text("here too")
    with pytest.raises(StoreError, match="TOKENMILL_CACHE") as caught:
        lay_out(store)
    assert str(store.path) in caught.value.message
    assert str(cache) in caught.value.message


def test_the_cache_is_the_users_own_unless_told_otherwise(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("TOKENMILL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() in {
        tmp_path / ".cache" / "tokenmill",
        tmp_path / "Library" / "Caches" / "tokenmill",
    }


def test_a_plan_that_could_not_be_finished_leaves_nothing_behind(store: Store) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt(f"{done} of {total}")

    with pytest.raises(KeyboardInterrupt, match="8 of 8"):
        BestFitLayout(TokenStream(store), seq_len=4, progress=stop)
    assert not store.layout.tmp.exists()
    assert [*store.layout.layouts.iterdir()] == []


PLAN_IT = """
import sys
from tokenmill.loader.packing import BestFitLayout
from tokenmill.store.reader import Store
from tokenmill.store.stream import TokenStream
stream = TokenStream(Store(sys.argv[1]))
sys.stdin.readline()
for seq_len in range(1, 40):
    print(BestFitLayout(stream, seq_len=seq_len).num_rows)
"""


def test_processes_that_plan_at_once_do_not_disturb_each_other(store: Store) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAN_IT, str(store.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=100)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert printed[0] == printed[1] == printed[2]
    assert len(printed[0]) == len([*store.layout.layouts.iterdir()]) == 39
    assert not store.layout.tmp.exists()
    assert check_store(store.path).is_sound


def test_rows_may_be_added_a_few_at_a_time(store: Store) -> None:
    made = check_plan(lay_out_path(store))
    tally = PlanTally(**{field.name: getattr(made, field.name) for field in fields(PlanTally)})
    key = PlanKey(packing="best-fit", seq_len=4, content=store.content)
    whole = read_plan(plan_path(store), key=key)
    written = plan_path(store).read_bytes()

    def make(writer: PlanWriter) -> PlanTally:
        for first, last in itertools.pairwise([0, 4, 5, 11, made.rows]):
            starts = whole.row_starts[first : last + 1]
            items = whole.items[starts[0] : starts[-1]]
            writer.add(items, row_starts=starts[:-1] - starts[0])
        return tally

    plan_path(store).unlink()
    open_plan(store, key, make=make)
    assert plan_path(store).read_bytes() == written


def test_others_may_remove_the_folder_of_temporary_files_while_it_is_empty(store: Store) -> None:
    key = PlanKey(packing="best-fit", seq_len=4, content=store.content)
    done = threading.Event()

    def remove() -> None:
        while not done.wait(0.0005):
            store.layout.remove_empty_tmp()

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(300):
            with PlanWriter(store.layout, key):
                assert len([*store.layout.tmp.iterdir()]) == 2
    finally:
        done.set()
        thread.join()


def test_opening_a_plan_of_a_billion_rows_reads_its_header_alone(store: Store) -> None:
    path = lay_out_path(store)
    facts = check_plan(path)
    rows = 10**9
    many = facts.but(rows=rows, items=rows, padding=5 * rows - facts.used - facts.repeated)
    with path.open("r+b") as file:
        file.write(many.to_bytes())
        file.truncate(many.file_bytes)
    key = PlanKey(packing="best-fit", seq_len=4, content=store.content)
    plan = read_plan(path, key=key)
    assert len(plan.items) == rows
    assert plan.row_starts[rows] == 0


@pytest.mark.parametrize(
    "wrong", [{"capacity": 4}, {"used": 1}, {"padding": 1}, {"rows": -1}, {"content": "x"}]
)
def test_a_header_that_contradicts_itself_is_refused(store: Store, wrong: dict[str, int]) -> None:
    path = lay_out_path(store)
    header = unseal(path.read_bytes()[:HEADER_BYTES].rstrip(b"\0"), path=path)
    with pytest.raises(StoreError, match="not a plan"):
        PlanFacts.from_bytes(seal({**header, **wrong}), path=path)
