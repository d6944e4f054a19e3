from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tokenmill.errors import StoreError
from tokenmill.store.check import Finding, check_store
from tokenmill.store.facts import (
    ManifestAssembler,
    append_runs,
    facts_of,
    read_receipt,
    write_manifest,
)
from tokenmill.store.layout import seal

from .samples import GOLDEN, SampleStore, SampleUnit, unit_facts

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout

WITH_TOKENIZER = SampleStore(units=GOLDEN.units, tokenizer_files={"tokenizer.json": b'{"v": 1}\n'})


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    layout = WITH_TOKENIZER.write(tmp_path / "store")
    append_runs(layout, [{"date": "2024-01-01", "seconds": 3}])
    return layout


def test_a_whole_store_is_sound_and_every_byte_was_looked_at(layout: StoreLayout) -> None:
    seen: list[tuple[int, int]] = []
    report = check_store(layout.root, on_progress=lambda done, total: seen.append((done, total)))
    files = [path for path in layout.root.rglob("*") if path.is_file() and path != layout.runs]
    assert (report.findings, report.notes) == ((), ())
    assert report.files == len(files) == 16
    assert report.bytes == sum(path.stat().st_size for path in files)
    assert len(seen) == 4
    assert seen[-1] == (seen[-1][1], report.bytes - layout.manifest.stat().st_size)


TINY = SampleStore(
    units=[SampleUnit(path="a", rows=[("train", "abc"), ("val", "d"), ("reject", "e")])],
    tokenizer_files={"t": b"{}\n"},
)


def positions(size: int, *, every: int, rng: random.Random) -> list[tuple[int, int]]:
    """Every bit of a small file; of a larger one, a bit of every byte, or of fewer."""
    if size <= 62 // every:
        return [(place, bit) for place in range(size) for bit in range(8)]
    return [(place, rng.randrange(8)) for place in range(rng.randrange(every), size, every)]


@pytest.mark.parametrize(
    ("store", "every"),
    [
        pytest.param(TINY, 5, id="some of tiny"),
        pytest.param(TINY, 1, id="tiny", marks=pytest.mark.slow),
        pytest.param(WITH_TOKENIZER, 1, id="larger", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_of_any_file_is_found(tmp_path: Path, store: SampleStore, every: int) -> None:
    layout = store.write(tmp_path)
    append_runs(layout, [{"seconds": 3}])
    rng = random.Random(0)
    flips = 0
    for path in [path for path in layout.root.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        name = path.relative_to(layout.root).as_posix()
        for place, bit in positions(len(data), every=every, rng=rng):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            findings = check_store(layout.root).findings
            assert name in {finding.file for finding in findings}, (name, place, bit)
            flips += 1
        path.write_bytes(data)
    assert flips > 3000 // every
    assert check_store(layout.root).is_sound


def test_every_missing_or_cut_file_is_found_by_name(layout: StoreLayout) -> None:
    files = [p for p in layout.root.rglob("*") if p.is_file() and p != layout.manifest]
    for path in files:
        data = path.read_bytes()
        name = path.relative_to(layout.root).as_posix()
        for damaged in (None, data[:-1], data + b"\n", b""):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            found = {finding.file for finding in check_store(layout.root).findings}
            # The log is no part of the store: losing it, or a line of it, is no damage.
            assert (name in found) == (path != layout.runs or damaged not in (None, b""))
            path.unlink(missing_ok=True)
            path.write_bytes(data)
    assert check_store(layout.root).is_sound


def test_a_store_without_a_manifest_is_not_a_damaged_one(layout: StoreLayout) -> None:
    layout.manifest.unlink()
    with pytest.raises(StoreError, match="has not finished"):
        check_store(layout.root)


def test_other_files_are_noted_and_do_no_harm(layout: StoreLayout) -> None:
    extra = ["notes.md", "shards/x.bin", "rejects/x.jsonl", "tokenizer/extra.txt", "tmp/left"]
    layout.tmp.mkdir()
    for name in extra:
        (layout.root / name).write_bytes(b"x")
    report = check_store(layout.root)
    assert report.is_sound
    assert {note.file for note in report.notes} == set(extra)


def reseal(layout: StoreLayout, unit: str) -> None:
    """Make receipt, checksum and manifest agree with a unit's files again, as a forger would."""
    receipt = read_receipt(layout, unit)
    files = {name: facts_of((layout.shards / name).read_bytes()) for name in receipt.files}
    data = receipt.to_bytes().decode()
    for name, facts in receipt.files.items():
        data = data.replace(facts.checksum, files[name].checksum)
    if receipt.rejects is not None:
        rejects = facts_of(layout.rejects_file(unit).read_bytes())
        data = data.replace(receipt.rejects.checksum, rejects.checksum)
    members = json.loads(data)
    del members["checksum"]
    layout.receipt(unit).write_bytes(seal(members))
    assembler = ManifestAssembler(WITH_TOKENIZER.identity())
    for name in [unit_facts(sample).name for sample in GOLDEN.units]:
        receipt_bytes = layout.receipt(name).read_bytes()
        assembler.add(read_receipt(layout, name), file=facts_of(receipt_bytes))
    write_manifest(layout, assembler.manifest())


def test_an_id_outside_the_vocabulary_is_found_although_all_checksums_agree(
    layout: StoreLayout,
) -> None:
    unit = unit_facts(GOLDEN.units[0]).name
    path = layout.shard_file(unit, "bin")
    ids = np.fromfile(path, "<u2")
    ids[3] = 257
    ids.tofile(path)
    reseal(layout, unit)
    findings = check_store(layout.root).findings
    assert Finding(f"shards/{unit}.bin", "holds an id over 256") in findings


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (b'{"more":{"invalid-json":8}}\n', "has 1 lines and counts 8 more instead of 2"),
        (b'{"more":{"invalid-json":0}}\n', "has 1 lines and counts 0 more instead of 2"),
        (b'{"more":{"invalid-json":"}}\n', "was changed: "),
        (b'{"more":{"invalid-jso":-1}}\n', "was changed: the last line.more[...] is not a number"),
        (b'{"x":1,"y":{"invalid":111}}\n', "counts 0 rows, its receipt says 1"),
    ],
)
def test_wrong_counts_of_rejects_are_found_although_all_checksums_agree(
    tmp_path: Path, written: bytes, problem: str
) -> None:
    layout = replace(WITH_TOKENIZER, listed_rejects=1).write(tmp_path / "store")
    assert check_store(layout.root).is_sound
    unit = unit_facts(GOLDEN.units[1]).name
    path = layout.rejects_file(unit)
    data = path.read_bytes().replace(b'{"more":{"invalid-json":1}}\n', written)
    assert len(data) == path.stat().st_size
    path.write_bytes(data)
    reseal(layout, unit)
    (finding,) = check_store(layout.root).findings
    assert finding.file == f"rejects/{unit}.jsonl"
    assert finding.problem.startswith(problem)


def test_an_index_that_contradicts_itself_is_found_although_all_checksums_agree(
    layout: StoreLayout,
) -> None:
    unit = unit_facts(GOLDEN.units[0]).name
    path = layout.shard_file(unit, "idx")
    data = bytearray(path.read_bytes())
    data[34], data[38] = data[34] + 1, data[38] - 1  # lengths of two documents; the sum is the same
    path.write_bytes(data)
    reseal(layout, unit)
    (finding,) = check_store(layout.root).findings
    assert finding.file == f"shards/{unit}.idx"
    assert "that its lengths do not give" in finding.problem


def test_a_receipt_that_was_replaced_by_another_valid_one_is_found(tmp_path: Path) -> None:
    one = SampleStore(units=[SampleUnit(path="a", rows=[("train", "abc")])]).write(tmp_path / "1")
    two = SampleStore(units=[SampleUnit(path="a", rows=[("train", "abd")])]).write(tmp_path / "2")
    unit = unit_facts(SampleUnit(path="a")).name
    shutil.copy(two.receipt(unit), one.receipt(unit))
    problems = {finding.problem for finding in check_store(one.root).findings}
    assert "is not the receipt that the manifest was made from" in problems
    assert "units are not what the receipts say" in problems


def test_a_manifest_with_other_totals_than_its_receipts_is_found(layout: StoreLayout) -> None:
    members = json.loads(layout.manifest.read_bytes())
    del members["checksum"]
    members["totals"]["text_bytes"] += 1
    members["engines"][0]["mismatches"] += 1
    layout.manifest.write_bytes(seal(members))
    assert {finding.problem for finding in check_store(layout.root).findings} == {
        "totals are not what the receipts say",
        "engines are not what the receipts say",
    }
