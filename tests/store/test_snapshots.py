"""The store in tests/golden/grown is one that grew, with a unit in retired/: it opens for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.store import snapshots
from tokenmill.store.check import check_store
from tokenmill.store.facts import assemble_manifest, write_manifest
from tokenmill.store.reader import Store
from tokenmill.store.write import remove_manifest

from .samples import SampleStore, SampleUnit, tree, unit_facts, write_unit
from .test_golden import GOLDEN_ROOTS

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout

GROUP = "group//first"
FIRST = SampleUnit(path="b.jsonl", rows=[("train", "stays"), ("val", "held out"), ("reject", "{")])
BEFORE = SampleUnit(
    path=GROUP, members=("x", "y"), rows=[("train", "one"), ("train", "two")], size=7
)
AFTER = SampleUnit(
    path=GROUP, members=("w", "x", "y"), rows=[("train", t) for t in ("new", "one", "two")], size=9
)


def write_golden(root: Path) -> StoreLayout:
    """What made the golden store: the steps of a build that adds a file to a group."""
    layout = SampleStore(units=[FIRST, BEFORE]).write(root)
    snapshots.keep(layout)
    remove_manifest(layout)
    snapshots.retire(layout, [unit_facts(BEFORE).name], moved=True)
    write_unit(layout, AFTER)
    names = [unit_facts(unit).name for unit in (FIRST, AFTER)]
    identity = SampleStore(units=[]).identity()
    write_manifest(layout, held := assemble_manifest(layout, identity, units=names))
    snapshots.tidy(layout, held)
    return layout


def texts(store: Store) -> list[str]:
    return [bytes(document[:-1].tolist()).decode() for document in store]


def test_the_golden_store_that_grew_opens_as_it_is_and_as_it_was() -> None:
    root = GOLDEN_ROOTS / "grown"
    assert texts(Store(root)) == ["stays", "new", "one", "two"]
    assert texts(Store(root, snapshot=1)) == ["stays", "one", "two"]
    assert texts(Store(root, split="val", snapshot=1)) == ["held out"]
    assert Store(root, snapshot=1).source(2).path == "y"
    report = check_store(root)
    assert (report.findings, report.notes) == ((), ())


def test_the_writer_still_makes_the_golden_bytes(tmp_path: Path) -> None:
    write_golden(tmp_path)
    assert tree(tmp_path) == tree(GOLDEN_ROOTS / "grown")
