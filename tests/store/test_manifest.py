from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tokenmill.errors import StoreError
from tokenmill.store.facts import (
    Counts,
    FormatVersionError,
    Manifest,
    ManifestAssembler,
    Receipt,
    SplitTotals,
    TokenizerFacts,
    assemble_manifest,
    facts_of,
    read_manifest,
    read_receipt,
)
from tokenmill.store.layout import seal

from .samples import GOLDEN, SampleStore, SampleUnit, identity, unit_facts, write_unit

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return GOLDEN.write(tmp_path)


def names(store: SampleStore) -> list[str]:
    return [unit_facts(unit).name for unit in store.units]


def test_a_manifest_comes_back_from_its_file(layout: StoreLayout) -> None:
    manifest = read_manifest(layout.root)
    assert manifest == assemble_manifest(layout, GOLDEN.identity(), units=names(GOLDEN))
    assert manifest.to_bytes() == layout.manifest.read_bytes()
    assert not layout.tmp.exists()


def test_a_manifest_says_what_the_receipts_say(layout: StoreLayout) -> None:
    manifest = read_manifest(layout.root)
    assert manifest.totals.rows == 10
    assert (manifest.totals.documents, manifest.totals.empty, manifest.totals.rejected) == (6, 1, 3)
    assert manifest.splits == {
        "train": SplitTotals(documents=4, tokens=26 + 17 + 5 + 2, shards=2),
        "val": SplitTotals(documents=2, tokens=9 + 14, shards=2),
    }
    assert [(source.path, source.units, source.rows) for source in manifest.sources] == [
        ("corpus/first part.jsonl", 2, 9),
        ("corpus/empty.jsonl", 1, 0),
        ("s3://bucket/data.jsonl.zst", 1, 1),
    ]
    assert [unit.name for unit in manifest.units] == names(GOLDEN)
    (engine,) = manifest.engines
    assert (engine.name, engine.units) == ("bytes", 4)
    assert [shard.split for _, shard in manifest.shards()] == ["train", "val", "val", "train"]
    assert [unit.source for unit, _ in manifest.shards(split="train")] == [0, 2]


def rewritten(layout: StoreLayout, place: tuple[str | int, ...], value: Any) -> bytes:
    members = json.loads(layout.manifest.read_bytes())
    del members["checksum"]
    inner = members
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return seal(members)


CHANGES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("dtype",), "int32", "not that of the vocabulary"),
    (("tokenizer", "vocab_size"), 256, "id 256 of '<eos>' is not in the vocabulary"),
    (("tokenizer", "vocab_size"), 70_000, "not that of the vocabulary"),
    (("eos", "position"), "middle", "not a position"),
    (("splits", "val", "tokens"), 1, "totals of the splits"),
    (("totals", "tokens"), 1, "totals are not"),
    (("totals", "rows"), 1, "1 rows are not"),
    (("sources", 0, "units"), 1, "there are 4 units"),
    (("sources", 1, "prefix"), "first-part-0123456789abcdef/..", "cannot begin the name"),
    (("units", 0), [1, 2, 3], r"units\[0\] is \[1, 2, 3\], not a list of length 6"),
    (("units", 0), None, r"units\[0\] is None, not a list"),
    (("units", 0, 0), "1", r"units\[0\]\[0\] is '1', not a number"),
    (("units", 0, 0), True, r"units\[0\]\[0\] is True, not a number"),
    (("units", 0, 0), -1, r"units\[0\]\[0\] is -1, not a number"),
    (("units", 0, 5, 0, 1), -1, r"units\[0\]\[5\]\[0\]\[1\] is -1, not a number"),
    (("units", 0, 5, 0), {}, r"units\[0\]\[5\]\[0\] is {}, not a list"),
    (("units", 0, 4), [1, 2], r"units\[0\]\[4\] is \[1, 2\], not a list of length 3"),
    (("units", 0, 5, 0, 0), "../x", "totals of the splits"),
    (("columns", "shard"), ["split"], "columns are not"),
    (("surprise",), 1, "unknown members: surprise"),
]


@pytest.mark.parametrize(("place", "value", "complaint"), CHANGES)
def test_a_manifest_that_does_not_make_sense_is_refused_by_name(
    layout: StoreLayout, place: tuple[str | int, ...], value: Any, complaint: str
) -> None:
    data = rewritten(layout, place, value)
    with pytest.raises(StoreError, match=complaint) as caught:
        Manifest.from_bytes(data, path=layout.manifest)
    assert "tokenmill.json" in caught.value.message


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "C:x", "a\x00b"]
)
def test_a_manifest_cannot_point_outside_its_folder(layout: StoreLayout, name: str) -> None:
    data = rewritten(layout, ("tokenizer", "files"), {name: {"bytes": 1, "checksum": "0" * 32}})
    with pytest.raises(StoreError, match="not a plain name"):
        Manifest.from_bytes(data, path=layout.manifest)
    with pytest.raises(ValueError, match="not a plain name"):
        TokenizerFacts(kind="bytes", fingerprint="", vocab_size=1, files={name: facts_of(b"")})


@pytest.mark.parametrize("split", ["../x", "a/b", "Train", "", "a-b"])
def test_a_split_in_a_manifest_is_a_plain_name(layout: StoreLayout, split: str) -> None:
    members = json.loads(layout.manifest.read_bytes())
    del members["checksum"]
    members["splits"][split] = members["splits"].pop("val")
    for unit in members["units"]:
        for shard in unit[5]:
            shard[0] = split if shard[0] == "val" else shard[0]
    with pytest.raises(StoreError, match="not plain names"):
        Manifest.from_bytes(seal(members), path=layout.manifest)


def test_a_newer_manifest_is_refused_with_the_tokenmill_that_wrote_it(layout: StoreLayout) -> None:
    data = rewritten(layout, ("format_version",), 10)
    with pytest.raises(FormatVersionError, match=r"version 10, written by 'tokenmill 0\.1\.0'"):
        Manifest.from_bytes(data, path=layout.manifest)


def test_a_folder_without_a_manifest_says_what_it_is_instead(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        read_manifest(tmp_path / "missing")
    with pytest.raises(StoreError, match="is not a store"):
        read_manifest(tmp_path)
    layout = GOLDEN.write(tmp_path / "store")
    layout.manifest.unlink()
    with pytest.raises(StoreError, match="its build has not finished"):
        read_manifest(layout.root)
    layout.parts.mkdir()
    with pytest.raises(StoreError, match="built in parts, and not finished") as caught:
        read_manifest(layout.root)
    assert caught.value.hint == f"when all parts are built: tokenmill finish {layout.root}"


def add(assembler: ManifestAssembler, receipt: Receipt) -> None:
    assembler.add(receipt, file=facts_of(receipt.to_bytes()))


def test_units_of_another_configuration_or_another_version_of_a_file_are_not_mixed(
    layout: StoreLayout,
) -> None:
    first, second = (read_receipt(layout, name) for name in names(GOLDEN)[:2])
    assembler = ManifestAssembler(GOLDEN.identity())
    with pytest.raises(StoreError, match="mixing them would silently corrupt"):
        add(assembler, first.but(config="another"))
    add(assembler, first)
    with pytest.raises(StoreError, match="two versions of the file"):
        add(assembler, second.but(source=second.source.but(version="v2")))
    with pytest.raises(StoreError, match=r"'.*' is number 0 of its units and follows 1 others"):
        add(assembler, first)
    add(assembler, second)
    assert assembler.manifest().totals == first.counts + second.counts


def test_ids_outside_the_vocabulary_never_reach_a_manifest(layout: StoreLayout) -> None:
    receipt = write_unit(layout, SampleUnit(path="wide", rows=[("train", "x")]), vocab_size=70_000)
    with pytest.raises(StoreError, match="does not hold uint16 ids under 257"):
        add(ManifestAssembler(identity()), receipt)


def test_the_manifest_of_an_empty_input_has_no_splits(tmp_path: Path) -> None:
    layout = SampleStore(units=[SampleUnit(path="nothing")]).write(tmp_path)
    manifest = read_manifest(tmp_path)
    assert (manifest.splits, manifest.totals) == ({}, Counts.of())
    assert [path.suffix for path in layout.shards.iterdir()] == [".json"]
