"""A build over a finished store keeps what the store was; `prune` takes it away."""

from __future__ import annotations

import os
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builder.stores import HISTORY, documents, make_texts, tree, write_jsonl
from tests.store.test_commit import needs_fork, run_and_die

import tokenmill
from tokenmill.errors import StoreError
from tokenmill.store.check import check_store
from tokenmill.store.layout import StoreLayout
from tokenmill.store.snapshots import list_snapshots

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill import BuildResult


def build(folder: Path, out: Path, **options: object) -> BuildResult:
    how = {
        "tokenizer": "bytes",
        "workers": 1,
        "unit_bytes": 6000,
        "val": 0.2,
        "max_rejects": 1.0,
    } | options
    return tokenmill.build(folder, out=out, **how)  # type: ignore[arg-type]


def as_it_was(root: Path, snapshot: int | str) -> list[list[int]]:
    return [each.tolist() for each in tokenmill.Store(root, split=None, snapshot=snapshot)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "b.jsonl", [*make_texts(40, seed=1), b"{bad"])
    return tmp_path / "in"


def test_a_store_that_grew_is_the_store_of_one_build_and_opens_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert build(folder, out).snapshot is None
    before, shards = documents(out, split=None), tree(out, history=True)
    write_jsonl(folder / "a.jsonl", make_texts(30, seed=2))
    name = build(folder, out).snapshot
    write_jsonl(folder / "c.jsonl", make_texts(10, seed=3))
    os.utime(folder / "b.jsonl", ns=(1, 1))  # touched: its receipt is written anew
    between = documents(out, split=None)
    assert build(folder, out).snapshot != name
    build(folder, tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")
    assert len(between) == len(before) + 30
    assert tree(out, history=True)[f"snapshots/{name}.json"] == shards["tokenmill.json"]

    assert name is not None
    for snapshot in (1, "1", name, name.partition("-")[2], name.partition("-")[2][:6]):
        assert as_it_was(out, snapshot) == before
    assert as_it_was(out, 2) == between
    now = tokenmill.Store(out, split=None)
    with tokenmill.Store(out, split=None, snapshot=1) as old:
        assert len(list(old.rejects())) == 1
        assert old.source(0).path == str(folder / "b.jsonl")
        assert now.as_it_was(old.content).content == old.content  # type: ignore[union-attr]
    assert as_it_was(out, now.content) == documents(out, split=None)
    assert now.as_it_was("0" * 32) is None
    totals = tokenmill.inspect(out, sample=0).snapshots
    assert [each.documents for each in totals] == [len(before), len(between)]
    report = check_store(out)
    assert (report.findings, report.notes) == ((), ())

    for snapshot in (7, "no", "ffff0000"):
        with pytest.raises(StoreError, match=r"has no snapshots .*") as caught:
            tokenmill.Store(out, snapshot=snapshot)
        assert name in str(caught.value.hint)


def test_nothing_is_kept_of_a_store_that_did_not_grow(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(folder, out)
    whole = tree(out, history=True)
    build(folder, out)
    os.utime(folder / "b.jsonl", ns=(1, 1))
    build(folder, out)
    (out / "shards" / next(path.name for path in (out / "shards").iterdir())).unlink()
    assert build(folder, out).snapshot is None
    assert tree(out, history=True).keys() == whole.keys()


def test_what_is_cut_anew_is_kept_until_prune_and_what_was_changed_is_not(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    how = {"unit_bytes": None}
    for number in range(70):  # so many that they are put into groups
        write_jsonl(folder / f"small-{number:03d}.jsonl", make_texts(2, seed=number + 10))
    build(folder, out, **how)
    before = documents(out, split=None)
    write_jsonl(folder / "small-0005.jsonl", make_texts(2, seed=5))
    assert build(folder, out, **how).snapshot is not None
    assert list((out / "retired").glob("*.bin")), "the group is another one now"
    assert as_it_was(out, 1) == before
    old = tokenmill.Store(out, split=None, snapshot=1)
    assert [old.source(k) for k in range(len(old))]
    assert len(list(old.rejects())) == 1
    report = check_store(out)
    assert (report.findings, report.notes) == ((), ())
    build(folder, tmp_path / "whole", **how)
    assert tree(out).keys() == tree(tmp_path / "whole").keys()
    assert documents(out, split=None) == documents(tmp_path / "whole", split=None)

    damaged = next((out / "retired").glob("*.bin"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + b"\xff")
    assert [each.file for each in check_store(out).findings] == [f"retired/{damaged.name}"]
    damaged.write_bytes(data)

    shutil.copytree(out, tmp_path / "pruned")
    promised = tokenmill.prune(tmp_path / "pruned", dry_run=True)
    assert tree(tmp_path / "pruned", history=True) == tree(out, history=True)
    kept = {
        name: data for name, data in tree(out, history=True).items() if name.startswith(HISTORY)
    }
    assert (promised.files, promised.bytes) == (len(kept), sum(map(len, kept.values())))
    assert tokenmill.prune(tmp_path / "pruned").bytes == promised.bytes
    assert tree(tmp_path / "pruned", history=True) == tree(out)
    assert tokenmill.prune(tmp_path / "pruned").files == 0

    write_jsonl(folder / "small-003.jsonl", make_texts(3, seed=99))
    assert build(folder, out, **how).snapshot is None, "text that was changed is kept nowhere"
    assert not [name for name in tree(out, history=True) if name.startswith(HISTORY)]


def test_a_dropped_file_takes_the_snapshots_that_had_it_along(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(folder, out)
    write_jsonl(folder / "a.jsonl", make_texts(30, seed=2))
    build(folder, out)
    write_jsonl(folder / "c.jsonl", make_texts(10, seed=3))
    assert build(folder, out).snapshot
    (folder / "c.jsonl").unlink()
    build(folder, out, prune=True)
    assert [each.number for each in list_snapshots(StoreLayout(out))] == [1]
    (folder / "b.jsonl").unlink()
    assert build(folder, out, prune=True).snapshot is None


@needs_fork
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_growing_killed_at_any_step_leaves_the_old_store_or_the_new(
    folder: Path, tmp_path: Path, stride: int
) -> None:
    """And what the store was can be opened whenever the new one can."""
    how = {"unit_bytes": None}
    for number in range(64):
        write_jsonl(folder / f"{number:03d}.jsonl", [f"{number}"])
    build(folder, tmp_path / "old", **how)
    before = documents(tmp_path / "old", split=None)
    write_jsonl(folder / "0005.jsonl", ["new"])
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    build(folder, tmp_path / "new", **how)
    whole, after = tree(tmp_path / "new", history=True), documents(tmp_path / "new", split=None)
    assert any(name.startswith("retired/") for name in whole)
    at_event, outcomes = 0, set()
    while True:
        root = tmp_path / f"killed-{at_event}"
        shutil.copytree(tmp_path / "old", root)
        killed = run_and_die(lambda: build(folder, root, **how), root=root, at_event=at_event)  # noqa: B023
        try:
            found = documents(root, split=None)
        except StoreError:
            found = []
        assert found in ([], before, after)
        outcomes.add("no store" if not found else "old" if found == before else "new")
        if found == after:
            assert as_it_was(root, 1) == before
        build(folder, root, **how)
        assert tree(root, history=True) == whole
        shutil.rmtree(root)
        if not killed:
            break
        at_event += stride
    assert at_event > 40
    assert outcomes == {"no store", "old", "new"} or stride > 1


def test_a_process_that_gets_an_open_store_reads_what_it_was_when_it_was_opened(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build(folder, out)
    opened = tokenmill.Store(out)
    sent = pickle.dumps(opened)
    write_jsonl(folder / "a.jsonl", make_texts(30, seed=2))
    build(folder, out)
    got = pickle.loads(sent)
    assert got.content == opened.content
    assert [each.tolist() for each in got] == [each.tolist() for each in opened]
    assert pickle.loads(pickle.dumps(got)).content == opened.content
    tokenmill.prune(out)
    with pytest.raises(StoreError, match="built anew since it was opened"):
        pickle.loads(sent)


@pytest.mark.parametrize("kind", ["documents", "rows", "a view"])
def test_a_store_that_is_built_anew_under_its_reader_is_refused_and_never_mixed(
    tmp_path: Path, kind: str
) -> None:
    """Every document of the new store has the length that the old one had."""
    text, out = tmp_path / "text.jsonl", tmp_path / "out"

    def write(word: str) -> None:
        write_jsonl(text, [f"{word} {number:03}" for number in range(900)])

    write("text")
    build(text, out, val=0.0)
    store = tokenmill.Store(out)
    assert len(store.shards) > 3
    read = store.without([1]) if kind == "a view" else store
    rows: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "shuffle": False, "prefetch": 0}
    batches = iter(tokenmill.Loader(read, **rows))
    first = next(batches).input_ids.copy()
    os.utime(text)
    build(text, out, val=0.0)  # writes receipts again, of the same shards
    assert np.array_equal(tokenmill.Loader(read, **rows).batch(0).input_ids, first)
    assert [*store][-1][0] == ord("t")
    again = tokenmill.Store(out)
    read = again.without([1]) if kind == "a view" else again
    batches = iter(tokenmill.Loader(read, **rows))
    assert np.array_equal(next(batches).input_ids, first)
    write("TEXT")
    build(text, out, val=0.0, rebuild=True)
    with pytest.raises(StoreError, match="was built anew since it was opened"):
        if kind == "documents":
            assert {int(document[0]) for document in again} == {ord("t")}
        for batch, _ in zip(batches, range(100), strict=False):
            assert not np.isin(batch.input_ids, [ord("T")]).any()
