"""The stores in tests/golden were written by versions of the format, and open for ever.

v1 is a store without masks, v2 one with masks, v3 one with masks and rows in pieces, v4 one
with rejected rows that are not listed too, v5 one with a group of files too, v6 one with text
that the tokenizer does not know too, v8 one of pairs, v9 that of v6 from which documents were
forgotten. If this fails
because the writer's bytes changed, the format changed: give it a new version, keep reading these,
and add a golden store beside them. `write_golden` made them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import tokenmill
from tokenmill.store.check import check_store
from tokenmill.store.facts import UnknownFacts, append_runs, read_forgotten
from tokenmill.store.layout import StoreLayout
from tokenmill.store.reader import Store

from .samples import (
    GOLDEN,
    GOLDEN_FILTERED,
    GOLDEN_GROUPS,
    GOLDEN_MASKED,
    GOLDEN_PIECES,
    GOLDEN_UNKNOWN,
    GOLDEN_UNLISTED,
    SampleStore,
    tree,
)

GOLDEN_ROOTS = Path(__file__).parents[1] / "golden"
STORES = {
    "v1": GOLDEN,
    "v2": GOLDEN_MASKED,
    "v3": GOLDEN_PIECES,
    "v4": GOLDEN_UNLISTED,
    "v5": GOLDEN_GROUPS,
    "v6": GOLDEN_UNKNOWN,
}
versions = pytest.mark.parametrize("version", STORES)


def write_golden(root: Path, store: SampleStore) -> StoreLayout:
    """What made the golden stores."""
    layout = store.write(root)
    append_runs(layout, [{"date": "2024-01-01T00:00:00Z", "seconds": 0.5}])
    return layout


@versions
def test_a_golden_store_opens_and_is_sound(version: str) -> None:
    root = GOLDEN_ROOTS / version
    report = check_store(root)
    assert (report.findings, report.notes) == ((), ())
    assert report.files == {"v1": 15, "v2": 19, "v3": 19, "v4": 19, "v5": 18, "v6": 18}[version]
    assert StoreLayout(root).runs.read_bytes().count(b"\n") == 1


@versions
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", ["It was a bright cold day.", "na\u00efve caf\u00e9 \u2603", "\U0001f600", "x"]),
        ("val", ["held out", "only held out"]),
    ],
)
def test_a_golden_store_still_says_the_same(version: str, split: str, expected: list[str]) -> None:
    store = Store(GOLDEN_ROOTS / version, split=split)
    rows: dict[tuple[str, int], list[int]] = {}
    for number, document in enumerate(store):
        source = store.source(number)
        assert len(document) <= (STORES[version].piece_tokens or len(document))
        rows.setdefault((source.path, source.row), []).extend(document.tolist())
    if version == "v6":
        expected = [text.replace("\u2603", "\0") for text in expected]
    assert [bytes(row[:-1]).decode() for row in rows.values()] == expected
    assert {row[-1] for row in rows.values()} == {256}


def test_the_golden_pieces_still_say_the_same() -> None:
    store = Store(GOLDEN_ROOTS / "v3")
    places = [store.source(number) for number in range(len(store))]
    assert [(place.row, place.piece, place.pieces) for place in places] == [
        *((0, piece, 3) for piece in range(3)),
        *((2, piece, 2) for piece in range(2)),
        *((5, 0, 1), (0, 0, 1)),
    ]
    totals = store.manifest.totals
    assert (totals.rows, totals.documents, totals.split_rows, totals.pieces) == (10, 10, 3, 7)


@versions
def test_the_golden_rejects_still_say_the_same(version: str) -> None:
    store = Store(GOLDEN_ROOTS / version)
    is_cut = version in ("v4", "v5", "v6")
    assert [row.row for row in store.rejects()] == ([1, 1] if is_cut else [1, 1, 2])
    assert store.reject_counts() == {"invalid-json": 3}
    # A manifest does not speak of groups: only receipts have version 5.
    assert store.manifest.version == {"v5": 4}.get(version, int(version[1:]))
    totals = store.manifest.totals
    assert (totals.rejected, totals.unlisted) == (3, 1 if is_cut else 0)


def test_the_golden_group_still_says_the_same() -> None:
    store = Store(GOLDEN_ROOTS / "v5")
    source = store.source(len(store) - 1)
    place = source.path, source.unit, source.row_in_unit, source.row, source.line
    assert place == ("s3://bucket/data.jsonl.zst", 0, 0, 0, 1)
    receipts = [store.receipt(unit.name) for unit in store.manifest.units]
    assert [receipt.version for receipt in receipts] == [3, 4, 5]
    assert receipts[2].source.member_rows == (0, 1, 0)


def test_the_golden_unknown_text_still_says_the_same() -> None:
    for version in ("v1", "v5"):
        assert Store(GOLDEN_ROOTS / version).manifest.unknown is None
    store = Store(GOLDEN_ROOTS / "v6")
    manifest = store.manifest
    assert manifest.unknown == UnknownFacts.of("<unk>", 0, {"\u2603": 1})
    totals, source = manifest.totals, manifest.sources[0]
    assert (totals.unknown_ids, totals.lost_characters, totals.lost_bytes) == (1, 1, 3)
    assert (source.unknown_ids, source.lost_bytes, source.text_bytes) == (1, 3, 66)
    assert manifest.sources[1].text_bytes == 0
    receipts = [store.receipt(unit.name) for unit in manifest.units]
    assert [receipt.version for receipt in receipts] == [6, 4, 5]


def test_the_golden_masks_still_say_the_same() -> None:
    assert not Store(GOLDEN_ROOTS / "v1").has_mask
    for version in ("v2", "v3", "v4", "v5"):
        _check_masks(Store(GOLDEN_ROOTS / version))


def _check_masks(store: Store) -> None:
    assert store.has_mask
    for number, document in enumerate(store):
        mask = store.mask(number)
        assert mask is not None
        assert mask.tolist() == (document % 2).tolist()
    assert (store.num_counted, store.num_silent) == (21, 1)


@versions
def test_the_writer_still_makes_the_golden_bytes(tmp_path: Path, version: str) -> None:
    write_golden(tmp_path, STORES[version])
    assert tree(tmp_path) == tree(GOLDEN_ROOTS / version)


def test_the_golden_pairs_still_say_the_same() -> None:
    """v8 was built of three rows with bytes as the tokenizer, the second of them rejected."""
    root = GOLDEN_ROOTS / "v8"
    report = check_store(root)
    assert (report.findings, report.notes) == ((), ())
    store = Store(root)
    assert store.manifest.version == 8
    assert (store.num_documents, store.num_pairs) == (4, 2)
    pairs = [
        [bytes((ids % 256).tolist()).decode() for ids in store.pair(number)] for number in range(2)
    ]
    assert pairs == [["2+2 is ", "4\0", "5\0"], ["Say", " yes\0", " no\0"]]
    assert [store.source(number).row for number in range(4)] == [0, 0, 2, 2]
    assert store.reject_counts() == {"nothing-to-train-on": 1}


def test_the_golden_rows_that_were_left_out_still_are(tmp_path: Path) -> None:
    """v7 is the store of v1 with rows that a condition left out."""
    root = GOLDEN_ROOTS / "v7"
    report = check_store(root)
    assert (report.findings, report.notes) == ((), ())
    store = Store(root, split="train")
    totals = store.manifest.totals
    assert (totals.rows, totals.documents, totals.filtered, totals.undecided) == (13, 6, 3, 1)
    receipts = [store.receipt(unit.name) for unit in store.manifest.units]
    assert [receipt.version for receipt in receipts] == [1, 1, 1, 7]
    assert store.manifest.version == 7
    place = store.source(len(store) - 1)
    assert (place.path, place.row) == ("s3://bucket/data.jsonl.zst", 1)
    write_golden(tmp_path, GOLDEN_FILTERED)
    assert tree(tmp_path) == tree(root)


def write_forgotten_golden(root: Path) -> None:
    """What made v9: of the store of v6, a row in three pieces, and all of a split of a unit."""
    layout = write_golden(root, GOLDEN_UNKNOWN)
    rows = ["corpus/first part.jsonl:0", "corpus/first part.jsonl:6"]
    tokenmill.forget(root, ids=rows, key="source,row", reason="request 17")
    for lock in layout.locks:
        lock.unlink(missing_ok=True)


def test_the_golden_store_that_forgot_still_says_the_same(tmp_path: Path) -> None:
    root = GOLDEN_ROOTS / "v9"
    report = check_store(root)
    assert (report.findings, report.notes) == ((), ())
    store = Store(root, split="train")
    assert [store.source(number).row for number in range(len(store))] == [2, 2, 5, 0]
    totals = store.manifest.totals
    assert (totals.rows, totals.forgotten, totals.forgotten_tokens) == (10, 2, 40)
    assert store.manifest.version == 9
    receipts = [store.receipt(unit.name) for unit in store.manifest.units]
    assert [receipt.version for receipt in receipts] == [9, 9, 5]
    assert store.manifest.unknown == UnknownFacts.of("<unk>", 0, {})
    assert [len(receipt.source.digest) for receipt in receipts] == [32, 0, 32]
    known = read_forgotten(StoreLayout(root))
    assert known is not None
    assert known.steps == store.manifest.forgotten
    assert [(each.unit.index, each.rows) for each in known.units] == [(0, (0, 1)), (1, (0, 1))]
    write_forgotten_golden(tmp_path)
    assert tree(tmp_path) == tree(root)
