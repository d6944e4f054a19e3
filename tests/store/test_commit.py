from __future__ import annotations

import os
import shutil
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tokenmill.errors import BuildError, StoreError
from tokenmill.store.check import check_store
from tokenmill.store.facts import Claim, Receipt, facts_of, find_receipt, read_receipt
from tokenmill.store.layout import StoreLayout
from tokenmill.store.write import sweep

from .samples import SampleStore, SampleUnit, tree, unit_facts, write_unit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD = SampleUnit(
    path="data/a.jsonl", rows=[("train", "old text"), ("val", "gone"), ("reject", "bad")]
)
NEW = SampleUnit(path="data/a.jsonl", rows=[("train", "new!text"), ("train", "longer than before")])
OTHER = SampleUnit(path="data/b.jsonl", rows=[("train", "other"), ("reject", "x")])
NAME = unit_facts(NEW).name

DISK_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def run_and_die(work: Callable[[], object], *, root: Path, at_event: int) -> bool:
    """Do `work` in a child killed before its n-th step on the disk; False if it ended before."""
    child = os.fork()
    if child == 0:
        left = at_event

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in DISK_EVENTS and str(root) in str(arguments[0]):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        try:
            sys.addaudithook(count)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def check_invariants(layout: StoreLayout) -> None:
    """What must hold at every moment: no claim without the bytes it claims."""
    for path in layout.shards.glob("*.json") if layout.shards.is_dir() else ():
        receipt = read_receipt(layout, path.stem)
        for name, facts in receipt.files.items():
            found = facts_of((layout.shards / name).read_bytes())
            assert (found.bytes, found.checksum) == (facts.bytes, facts.checksum)
        if receipt.rejects is not None:
            rejects = layout.rejects_file(path.stem).read_bytes()
            assert facts_of(rejects).checksum == receipt.rejects.checksum
    if layout.manifest.exists():
        assert check_store(layout.root).is_sound


def receipts(layout: StoreLayout) -> list[Receipt]:
    found = [find_receipt(layout, unit_facts(unit).name) for unit in (OTHER, NEW)]
    return [receipt for receipt in found if receipt is not None]


def claims(found: list[Receipt]) -> dict[str, Claim]:
    return {receipt.unit.name: receipt.claim for receipt in found}


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked child")


@needs_fork
@pytest.mark.parametrize(
    "has_mask",
    [pytest.param(False, id="tokens", marks=pytest.mark.slow), pytest.param(True, id="and masks")],
)
@pytest.mark.parametrize("is_rebuilt", [False, True], ids=["a new unit", "a unit that is replaced"])
def test_a_commit_killed_at_any_step_leaves_a_whole_unit_or_none(
    tmp_path: Path, is_rebuilt: bool, has_mask: bool
) -> None:
    whole = StoreLayout(tmp_path / "whole")
    write_unit(whole, OTHER, has_mask=has_mask)
    write_unit(whole, NEW, has_mask=has_mask)

    def write_new(layout: StoreLayout) -> None:
        write_unit(layout, NEW, has_mask=has_mask)

    at_event, outcomes = 0, set()
    while True:
        root = tmp_path / f"killed-{at_event}"
        units = [OTHER, OLD] if is_rebuilt else [OTHER]
        layout = SampleStore(units=units, has_mask=has_mask).write(root)
        old = find_receipt(layout, NAME)
        killed = run_and_die(partial(write_new, layout), root=root, at_event=at_event)
        check_invariants(layout)
        found = find_receipt(layout, NAME)
        outcomes.add("none" if found is None else "old" if found == old else "new")

        # The next run: sweep, build what is missing.
        sweep(layout, claims(receipts(layout)))
        check_invariants(layout)
        write_new(layout)
        layout.manifest.unlink(missing_ok=True)
        assert tree(root) == tree(whole.root)
        if not killed:
            break
        at_event += 1
    assert at_event > 10
    assert outcomes == ({"none", "old", "new"} if is_rebuilt else {"none", "new"})


@needs_fork
def test_a_manifest_killed_at_any_step_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    store = SampleStore(units=[OTHER, NEW])
    at_event = 0
    while True:
        root = tmp_path / str(at_event)
        SampleStore(units=[OTHER]).write(root)
        write_unit(StoreLayout(root), NEW)
        killed = run_and_die(lambda: store.write(root), root=root, at_event=at_event)  # noqa: B023
        check_invariants(StoreLayout(root))
        if not killed:
            break
        at_event += 7  # its units are committed again first, and each store has many files to check
    assert at_event > 20


def test_a_rebuilt_unit_keeps_no_file_of_its_earlier_version(tmp_path: Path) -> None:
    layout = SampleStore(units=[OTHER, OLD]).write(tmp_path)
    assert layout.shard_file(f"{NAME}-val", "bin").exists()
    write_unit(layout, NEW)
    assert {path.name for path in layout.shards.iterdir() if NAME in path.name} == {
        f"{NAME}.bin",
        f"{NAME}.idx",
        f"{NAME}.json",
    }
    assert not layout.rejects_file(NAME).exists()
    assert not layout.manifest.exists(), "it described the bytes that were replaced"


def test_a_unit_whose_receipt_is_damaged_is_replaced_as_a_whole(tmp_path: Path) -> None:
    layout = SampleStore(units=[OTHER, OLD]).write(tmp_path)
    layout.receipt(NAME).write_bytes(b"{}")
    assert find_receipt(layout, NAME) is None
    write_unit(layout, NEW)
    assert find_receipt(layout, NAME) is not None
    assert not layout.shard_file(f"{NAME}-val", "bin").exists()
    assert layout.shard_file(unit_facts(OTHER).name, "bin").exists()


def test_a_unit_with_a_lost_or_cut_file_must_be_built_again(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    receipt = write_unit(layout, OLD)
    paths = [layout.shards / name for name in receipt.files] + [layout.rejects_file(NAME)]
    assert len(paths) == 5
    for path in paths:
        data = path.read_bytes()
        assert find_receipt(layout, NAME) == receipt
        path.write_bytes(data[:-1])
        assert find_receipt(layout, NAME) is None
        path.unlink()
        assert find_receipt(layout, NAME) is None
        path.write_bytes(data)


def test_sweep_removes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    layout = SampleStore(units=[OTHER, NEW]).write(tmp_path)
    before = tree(tmp_path)
    (layout.tmp / "some-unit-123-abc").mkdir(parents=True)
    (layout.tmp / "some-unit-123-abc" / "x.bin").write_bytes(b"x")
    orphan = unit_facts(SampleUnit(path="lost")).name
    leftovers = [
        layout.shard_file(orphan, "bin"),
        layout.shard_file(f"{orphan}-val", "idx"),
        layout.rejects_file(orphan),
    ]
    foreign = [layout.shards / "notes.txt", layout.shards / ".DS_Store", layout.root / "mine.bin"]
    for path in leftovers + foreign:
        path.write_bytes(b"x")
    assert sorted(sweep(layout, claims(receipts(layout)))) == sorted(leftovers)
    for path in foreign:
        assert path.read_bytes() == b"x"
        path.unlink()
    assert tree(tmp_path) == before, "a manifest that claims nothing of it stays"
    assert not layout.tmp.exists()


def test_sweep_takes_the_manifest_away_with_the_first_unit_it_removes(tmp_path: Path) -> None:
    layout = SampleStore(units=[OTHER, NEW]).write(tmp_path)
    sweep(layout, claims([read_receipt(layout, unit_facts(OTHER).name)]))
    assert not layout.manifest.exists()
    with pytest.raises(StoreError, match="cannot be read"):
        read_receipt(layout, NAME)
    assert not layout.shard_file(NAME, "bin").exists()
    assert layout.rejects_file(unit_facts(OTHER).name).exists()


def test_sweep_of_a_folder_without_a_store_does_nothing(tmp_path: Path) -> None:
    assert sweep(StoreLayout(tmp_path / "new"), {}) == []


def commit_beside(
    layout: StoreLayout, *, at_event: int, other: Callable[[], object], unit: SampleUnit = NEW
) -> bool:
    """Commit a unit, and at the n-th step on the disk do something else; False if it never came."""
    left, came = at_event, False

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left, came
        if event in DISK_EVENTS and not came and str(layout.root) in str(arguments[0]):
            if left == 0:
                came = True
                other()
            left -= 1

    HOOKS.append(count)
    try:
        write_unit(layout, unit)
    finally:
        HOOKS.remove(count)
    return came


HOOKS: list[Callable[[str, tuple[object, ...]], None]] = []


@pytest.fixture(scope="module", autouse=True)
def _hooked() -> None:
    """An audit hook cannot be taken away; this one calls those that are wanted at the moment."""
    sys.addaudithook(lambda event, arguments: [hook(event, arguments) for hook in [*HOOKS]])


def test_two_workers_that_commit_one_unit_at_once_both_succeed(tmp_path: Path) -> None:
    whole = SampleStore(units=[NEW]).write(tmp_path / "whole")
    expected = {name: data for name, data in tree(whole.root).items() if name.startswith("shards/")}
    for step in range(200):
        layout = StoreLayout(tmp_path / f"{step}")
        came = commit_beside(layout, at_event=step, other=partial(write_unit, layout, NEW))
        check_invariants(layout)
        found = {name: data for name, data in tree(layout.root).items() if "shards/" in name}
        assert found == expected
        if not came:
            assert step > 10
            return
    raise AssertionError("a commit has no end")


def test_a_unit_that_is_there_is_left_alone_with_the_manifest_that_claims_it(
    tmp_path: Path,
) -> None:
    layout = SampleStore(units=[NEW, OTHER]).write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in layout.shards.iterdir()}
    write_unit(layout, NEW)
    assert {path: path.stat().st_mtime_ns for path in layout.shards.iterdir()} == before
    assert check_store(tmp_path).is_sound


def test_a_commit_that_fails_does_not_take_away_what_another_worker_committed(
    tmp_path: Path,
) -> None:
    layout = StoreLayout(tmp_path / "store")

    def interfere() -> None:
        write_unit(layout, NEW)
        shutil.rmtree(layout.tmp)  # and with it what the first one was about to move

    failed = 0
    for step in range(200):
        shutil.rmtree(layout.root, ignore_errors=True)
        try:
            if not commit_beside(layout, at_event=step, other=interfere):
                break
        except BuildError:
            failed += 1
        check_invariants(layout)
        assert find_receipt(layout, NAME) is not None
    assert failed > 3
