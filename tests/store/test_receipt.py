from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tokenmill.errors import StoreError
from tokenmill.store.facts import (
    Counts,
    FormatVersionError,
    Receipt,
    UnitFacts,
    find_receipt,
    read_receipt,
    rewrite_receipt,
)
from tokenmill.store.layout import StoreLayout, seal

from .samples import SampleUnit, tree, write_unit

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [("train", "abc"), ("val", "d"), ("reject", "e"), ("train", ""), ("train", "fg")]


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path)


@pytest.fixture
def receipt(layout: StoreLayout) -> Receipt:
    return write_unit(layout, SampleUnit(path="data/a.jsonl", rows=ROWS))


def test_a_receipt_comes_back_from_its_file(layout: StoreLayout, receipt: Receipt) -> None:
    assert read_receipt(layout, receipt.unit.name) == receipt
    assert receipt.to_bytes() == layout.receipt(receipt.unit.name).read_bytes()
    assert receipt.counts == Counts.of(
        rows=5, documents=3, empty=1, rejected=1, input_bytes=100, text_bytes=6, tokens=9
    )


def test_counts_must_balance_and_add_up() -> None:
    with pytest.raises(ValueError, match="4 rows are not 1 documents \\+ 1 empty \\+ 0 rejected"):
        Counts.of(rows=4, documents=1, empty=1, skipped=1)
    with pytest.raises(ValueError, match="2 documents are not pieces of 0 rows"):
        Counts.of(rows=1, documents=3, pieces=2)
    total = Counts.of(rows=3, documents=2, skipped=1, tokens=5) + Counts.of(rows=1, rejected=1)
    assert total == Counts.of(rows=4, documents=2, rejected=1, skipped=1, tokens=5)


def test_a_unit_must_be_named_after_its_file() -> None:
    unit = UnitFacts.of("data/a.jsonl", index=0, start=0, end=None)
    with pytest.raises(ValueError, match="not named after"):
        unit.but(path="data/b.jsonl")


CHANGES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("counts", "rows"), 6, "rows are not"),
    (("counts", "tokens"), 10, "9 tokens, its counts say 10"),
    (("counts", "rows"), -1, "not a number of 0 or more"),
    (("counts", "rows"), 5.0, "not a number of 0 or more"),
    (("counts", "rows"), True, "not a number of 0 or more"),
    (("unit", "path"), "elsewhere", "not named after"),
    (("unit", "name"), "../../etc/passwd", "not named after"),
    (("unit", "members"), ["one"], "5 rows of 1 grouped files"),
    (("unit", "members"), [1], r"unit.members\[0\] is 1, not a string"),
    (("source", "member_rows"), [2, 3], "5 rows of 2 grouped files are not 5 rows of 0"),
    (("source", "member_rows"), [1, 1], "files of one row each have their rows listed"),
    (("source", "member_rows"), [-1, 6], r"member_rows\[0\] is -1, not a number of 0 or more"),
    (("unit", "end"), "x", "not a number of 0 or more"),
    (("config",), None, "not a string"),
    (("source", "is_last"), 1, "not true or false"),
    (("shards", 0, "name"), "../evil", "not named after its unit"),
    (("shards", 1, "split"), "train", "not named after its unit"),
    (("shards", 1, "split"), "../val", "is not lower-case"),
    (("shards", 0, "rows"), [0, 3], "row runs"),
    (("shards", 0, "rows"), ["x"], r"rows\[0\] is 'x', not a number"),
    (("shards", 0, "files", "bin", "checksum"), "XYZ", "hexadecimal"),
    (("shards", 0, "files", "mask"), None, r"files.mask is None"),
    (("shards",), {}, "not a list"),
    (("rejects",), None, "0 rejected, its counts say 1"),
    (("engine", "surprise"), 1, "unknown members: surprise"),
    (("surprise",), 1, "unknown members: surprise"),
]


@pytest.mark.parametrize(("place", "value", "complaint"), CHANGES)
def test_a_receipt_that_does_not_make_sense_is_refused_by_name(
    layout: StoreLayout, receipt: Receipt, place: tuple[str | int, ...], value: Any, complaint: str
) -> None:
    members = json.loads(receipt.to_bytes())
    del members["checksum"]
    inner = members
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path = layout.receipt(receipt.unit.name)
    path.write_bytes(seal(members))
    with pytest.raises(StoreError, match=complaint) as caught:
        read_receipt(layout, receipt.unit.name)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("member", ["unit", "counts", "shards", "rejects", "config"])
def test_a_missing_member_is_no_default(receipt: Receipt, tmp_path: Path, member: str) -> None:
    members = json.loads(receipt.to_bytes())
    del members["checksum"], members[member]
    with pytest.raises(StoreError, match=f"no member '{member}'"):
        Receipt.from_bytes(seal(members), path=tmp_path)


def test_a_newer_format_is_refused_with_the_way_to_read_it_and_is_not_built_over(
    layout: StoreLayout, receipt: Receipt
) -> None:
    members = json.loads(receipt.to_bytes())
    del members["checksum"]
    layout.receipt(receipt.unit.name).write_bytes(seal(members | {"format_version": 10}))
    with pytest.raises(FormatVersionError, match=r"format version 10.*reads.*1 to 9") as caught:
        find_receipt(layout, receipt.unit.name)
    assert "pip install --upgrade tokenmill" in str(caught.value.hint)


def test_a_receipt_can_be_rewritten_without_touching_its_unit(
    layout: StoreLayout, receipt: Receipt
) -> None:
    before = tree(layout.root)
    touched = receipt.but(source=receipt.source.but(version="v2"))
    rewrite_receipt(layout, touched)
    assert find_receipt(layout, receipt.unit.name) == touched
    after = tree(layout.root)
    assert {name for name in after if after[name] != before[name]} == {
        f"shards/{receipt.unit.name}.json"
    }


@pytest.mark.parametrize(
    ("place", "member"),
    [
        (("unit",), "members"),
        (("source",), "is_last"),
        (("counts",), "empty"),
        (("bounds",), "smallest_too_large_bytes"),
        (("engine",), "redone"),
        (("shards", 0), "files"),
        (("shards", 0, "files", "idx"), "bytes"),
        (("rejects",), "rows"),
    ],
)
def test_a_missing_member_of_a_member_is_no_default(
    receipt: Receipt, tmp_path: Path, place: tuple[str | int, ...], member: str
) -> None:
    members = json.loads(receipt.to_bytes())
    del members["checksum"]
    inner = members
    for step in place:
        inner = inner[step]
    del inner[member]
    with pytest.raises(StoreError, match=f"{place[-1]}.* has no member '{member}'"):
        Receipt.from_bytes(seal(members), path=tmp_path)


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("rows", [ROWS, [("train", "abc")], [("reject", "e")], []])
def test_a_unit_without_all_its_files_is_not_found(
    layout: StoreLayout, rows: list[tuple[str, str]], has_mask: bool
) -> None:
    receipt = write_unit(layout, SampleUnit(path="data/a.jsonl", rows=rows), has_mask=has_mask)
    name = receipt.unit.name
    files = [layout.shards / file for file in receipt.files]
    files += [layout.receipt(name), *([layout.rejects_file(name)] if receipt.rejects else [])]
    for path in files:
        data = path.read_bytes()
        for broken in (data + b"x", data[:-1], None):
            path.unlink() if broken is None else path.write_bytes(broken)
            assert find_receipt(layout, name) is None
        path.write_bytes(data)
    assert find_receipt(layout, name) == receipt


def test_what_is_sealed_and_no_receipt_of_this_unit_is_not_found(
    layout: StoreLayout, receipt: Receipt
) -> None:
    path = layout.receipt(receipt.unit.name)
    whole = json.loads(path.read_bytes())
    del whole["checksum"]
    for member in ("unit", "source", "counts", "bounds", "shards", "rejects", "config"):
        path.write_bytes(seal({name: value for name, value in whole.items() if name != member}))
        assert find_receipt(layout, receipt.unit.name) is None
        path.write_bytes(seal(whole | {member: 5}))
        assert find_receipt(layout, receipt.unit.name) is None
    path.write_bytes(seal(whole))
    path.rename(layout.receipt("other-0123456789abcdef-00000"))
    assert find_receipt(layout, "other-0123456789abcdef-00000") is None
    path.write_bytes(seal(whole | {"format_version": 99}))
    with pytest.raises(FormatVersionError):
        find_receipt(layout, receipt.unit.name)


def test_a_file_whose_name_is_no_utf8_has_a_receipt(layout: StoreLayout) -> None:
    written = write_unit(layout, SampleUnit(path="data/\udcff.jsonl", rows=ROWS))
    assert read_receipt(layout, written.unit.name) == written
