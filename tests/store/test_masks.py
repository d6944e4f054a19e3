"""Masks: one byte for every token, written, committed, found damaged and read as the tokens are."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.stores import write_store
from tests.web import serve

from tokenmill import files as files_module
from tokenmill.errors import StoreError
from tokenmill.store import stream as stream_module
from tokenmill.store.check import check_store
from tokenmill.store.facts import (
    Manifest,
    ManifestAssembler,
    Receipt,
    facts_of,
    find_receipt,
    read_manifest,
    read_receipt,
)
from tokenmill.store.format import counted_by_document
from tokenmill.store.layout import StoreLayout, seal
from tokenmill.store.reader import Store
from tokenmill.store.stream import TokenStream
from tokenmill.store.write import BLOCK_TOKENS, sweep

from .samples import (
    GOLDEN,
    GOLDEN_MASKED,
    SampleUnit,
    commit_facts,
    identity,
    ids_of,
    mask_of,
    new_writer,
    tree,
    unit_facts,
    write_unit,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


UNIT = SampleUnit(path="a", rows=[("train", "abc")])


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return GOLDEN_MASKED.write(tmp_path / "store")


def masks_of(store: Store) -> list[list[int]]:
    found = [store.mask(number) for number in range(len(store))]
    return [mask.tolist() for mask in found if mask is not None]


def test_masks_come_back_for_every_split(layout: StoreLayout) -> None:
    for split in ("train", "val", None):
        store = Store(layout.root, split=split)
        assert store.has_mask
        assert masks_of(store) == [mask_of(document).tolist() for document in store]
        assert store.num_counted == sum(int(mask_of(document).sum()) for document in store)
        assert store.num_silent == sum(mask_of(document).max() == 0 for document in store)
    shard = store.map_shard(0)
    assert shard.mask is not None
    assert (shard.mask.dtype.name, len(shard.mask)) == ("uint8", len(shard.tokens))


def test_a_store_without_masks_is_what_it_was(tmp_path: Path, layout: StoreLayout) -> None:
    plain = GOLDEN.write(tmp_path / "plain")
    store = Store(plain.root)
    assert not store.has_mask
    assert store.mask(0) is store.map_shard(0).mask is None
    assert (store.num_counted, store.num_silent) == (store.num_tokens, 0)
    # The tokens of both are the same files; what speaks of masks has another version.
    masked, unmasked = tree(layout.root), tree(plain.root)
    assert {name for name in masked if name not in unmasked} == {
        f"{name[: -len('.bin')]}.mask" for name in masked if name.endswith(".bin")
    }
    assert all(masked[name] == unmasked[name] for name in masked if name.endswith((".bin", ".idx")))
    versions = {
        name: json.loads(data)["format_version"]
        for name, data in masked.items()
        if name.endswith(".json")
    }
    assert set(versions.values()) == {1, 2}
    assert {name for name, version in versions.items() if version == 1} == {
        f"shards/{unit_facts(GOLDEN.units[2]).name}.json"  # it has no shard, so no mask
    }


def test_the_content_of_a_store_changes_with_its_masks(tmp_path: Path) -> None:
    shards = [[[1, 2, 3]]]
    contents = {
        write_store(tmp_path / name, shards, masks=masks).content
        for name, masks in (("a", None), ("b", [[[1, 1, 1]]]), ("c", [[[0, 1, 1]]]))
    }
    assert len(contents) == 3


BAD_MASKS: list[tuple[NDArray[Any], str]] = [
    (np.ones(3, np.uint8), "3 entries of uint8 are no mask of 4 tokens"),
    (np.ones(5, np.bool_), "5 entries of bool are no mask of 4 tokens"),
    (np.ones(4, np.int64), "4 entries of int64"),
    (np.array([0, 1, 2, 1], np.uint8), "a mask holds 0 and 1, this one 2"),
]


@pytest.mark.parametrize(("mask", "complaint"), BAD_MASKS)
def test_what_is_no_mask_of_the_tokens_is_refused(
    tmp_path: Path, mask: NDArray[Any], complaint: str
) -> None:
    with (
        pytest.raises(ValueError, match=complaint),
        new_writer(StoreLayout(tmp_path), UNIT) as writer,
    ):
        writer.append("train", ids_of("abc"), lengths=np.array([4]), rows=np.array([0]), mask=mask)


@pytest.mark.parametrize("second", ["train", "val"])
def test_documents_of_a_unit_have_masks_all_or_none(tmp_path: Path, second: str) -> None:
    unit = SampleUnit(path="a", rows=[("train", "abc"), (second, "def")])
    ids, length = ids_of("abc"), np.array([4])
    with (
        pytest.raises(ValueError, match="have a mask, others have none"),
        new_writer(StoreLayout(tmp_path), unit) as writer,
    ):
        writer.append("train", ids, lengths=length, rows=np.array([0]), mask=mask_of(ids))
        writer.append(second, ids, lengths=length, rows=np.array([1]))
        writer.commit(**commit_facts(unit, texts=["abc", "def"]))  # type: ignore[arg-type]
    assert not tree(tmp_path)


def test_masks_larger_than_a_block_and_of_bools_are_written_whole(tmp_path: Path) -> None:
    dice = np.random.default_rng(1)
    sizes = np.array([BLOCK_TOKENS + 5, 3, 2 * BLOCK_TOKENS])
    mask = dice.random(int(sizes.sum())) < 0.3
    shards = [[np.zeros(size, np.int64).tolist() for size in sizes]]
    masks = [[part.tolist() for part in np.split(mask, np.cumsum(sizes)[:-1])]]
    store = write_store(tmp_path, shards, masks=masks)
    found = store.map_shard(0).mask
    assert found is not None
    assert np.array_equal(found, mask)
    assert store.num_counted == int(mask.sum())
    assert check_store(tmp_path).is_sound


@given(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=12))
def test_what_counts_is_counted_for_every_document(documents: list[list[int]]) -> None:
    mask = np.array([value for document in documents for value in document], np.uint8)
    lengths = np.array([len(document) for document in documents], np.int32)
    assert counted_by_document(mask, lengths).tolist() == [sum(one) for one in documents]


# What is wrong is found, and named.


def test_a_missing_or_cut_mask_is_named_at_opening_and_by_a_check(layout: StoreLayout) -> None:
    path = layout.shard_file(unit_facts(GOLDEN.units[0]).name, "mask")
    data = path.read_bytes()
    for damaged, problem in ((None, "is missing"), (data[:-1], "bytes instead of")):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(StoreError, match=problem) as caught:
            Store(layout.root)
        assert str(path) in caught.value.message
        (finding,) = {finding.file for finding in check_store(layout.root).findings}
        assert finding == f"shards/{path.name}"


def test_a_mask_that_is_cut_after_opening_is_refused_when_it_is_mapped(layout: StoreLayout) -> None:
    store = Store(layout.root)
    path = layout.shard_file(store.shards[0].name, "mask")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"\.mask' of .* it was changed after it was opened"):
        store.mask(0)
    stream = TokenStream(store)
    with pytest.raises(StoreError, match=r"\.mask"):
        stream.read_mask(stream.locate(np.array([0]), np.array([4])))


def test_every_flipped_bit_of_a_mask_is_found(layout: StoreLayout) -> None:
    path = layout.shard_file(unit_facts(GOLDEN.units[3]).name, "mask")
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            found = check_store(layout.root).findings
            assert {finding.file for finding in found} == {f"shards/{path.name}"}
            assert any("a mask holds 0 and 1" in one.problem for one in found) == (bit > 0)
    path.write_bytes(data)
    assert check_store(layout.root).is_sound


def resealed(layout: StoreLayout, unit: str, change: dict[str, int]) -> None:
    """Change what receipt and manifest say of a mask, and seal both again, as a forger would."""
    members = json.loads(layout.receipt(unit).read_bytes())
    del members["checksum"]
    members["shards"][0]["files"]["mask"] |= change
    layout.receipt(unit).write_bytes(seal(members))
    assembler = ManifestAssembler(GOLDEN_MASKED.identity())
    for name in [unit_facts(sample).name for sample in GOLDEN.units]:
        data = layout.receipt(name).read_bytes()
        assembler.add(read_receipt(layout, name), file=facts_of(data))
    layout.manifest.write_bytes(assembler.manifest().to_bytes())


@pytest.mark.parametrize("change", [{"counted": 1}, {"silent": 0}])
def test_counts_that_the_mask_does_not_give_are_found_although_all_seals_hold(
    layout: StoreLayout, change: dict[str, int]
) -> None:
    unit = unit_facts(GOLDEN.units[3]).name
    resealed(layout, unit, change)
    (finding,) = check_store(layout.root).findings
    assert finding.file == f"shards/{unit}.mask"
    assert "the manifest says" in finding.problem


@pytest.mark.parametrize("change", [{"bytes": 3}, {"counted": 3}, {"silent": 2}])
def test_a_receipt_whose_mask_cannot_be_is_refused(
    layout: StoreLayout, change: dict[str, int]
) -> None:
    unit = unit_facts(GOLDEN.units[3]).name
    with pytest.raises(StoreError, match="is not of 2 tokens in 1 documents"):
        resealed(layout, unit, change)


def test_shards_with_and_without_masks_never_stand_in_one_store(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    masked = write_unit(layout, UNIT, has_mask=True)
    unmasked = write_unit(layout, replace(UNIT, path="b"))
    for receipt, store, words in (
        (masked, identity(), "has a mask, the store has none"),
        (unmasked, identity(mask=True), "has no mask, the store has one"),
    ):
        with pytest.raises(StoreError, match=words):
            ManifestAssembler(store).add(receipt, file=facts_of(receipt.to_bytes()))


def test_a_manifest_says_masks_by_its_version(layout: StoreLayout) -> None:
    members = json.loads(layout.manifest.read_bytes())
    del members["checksum"]
    assert (members["format_version"], members["mask"]) == (2, True)
    for changes, complaint in (
        ({"mask": False}, "mask is false"),
        ({"format_version": 1}, "its members are another's"),
        ({"format_version": 3}, "its members are another's"),
    ):
        with pytest.raises(StoreError, match=complaint):
            Manifest.from_bytes(seal(members | changes), path=layout.manifest)
    del members["mask"]
    with pytest.raises(StoreError, match="columns are not those"):
        Manifest.from_bytes(seal(members), path=layout.manifest)
    manifest = read_manifest(layout.root)
    assert manifest.to_bytes() == layout.manifest.read_bytes()


def test_a_receipt_of_the_first_version_has_no_mask(layout: StoreLayout) -> None:
    path = layout.receipt(unit_facts(GOLDEN.units[0]).name)
    members = json.loads(path.read_bytes())
    del members["checksum"]
    with pytest.raises(StoreError, match="its members are another's"):
        Receipt.from_bytes(seal(members | {"format_version": 1}), path=path)
    del members["shards"][0]["files"]["mask"]
    with pytest.raises(StoreError, match="some shards of one unit have a mask"):
        Receipt.from_bytes(seal(members), path=path)


# A build.


def test_a_unit_whose_mask_is_lost_or_cut_must_be_built_again(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    name = write_unit(layout, UNIT, has_mask=True).unit.name
    assert find_receipt(layout, name) is not None
    path = layout.shard_file(name, "mask")
    path.write_bytes(path.read_bytes()[:-1])
    assert find_receipt(layout, name) is None
    path.unlink()
    assert find_receipt(layout, name) is None


def test_a_unit_built_again_without_masks_leaves_none_behind(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    write_unit(layout, UNIT, has_mask=True)
    receipt = write_unit(layout, UNIT)
    assert not [name for name in tree(tmp_path) if name.endswith(".mask")]
    stray = layout.shard_file(receipt.unit.name, "mask")
    stray.write_bytes(b"\1\1\1\1")
    assert sweep(layout, {receipt.unit.name: receipt.claim}) == [stray]


# Reading.


pieces = st.lists(st.tuples(st.integers(-1, 60), st.integers(1, 30)), min_size=1, max_size=12)


@pytest.mark.parametrize("reserved", [True, False])
def test_pieces_of_masks_are_those_of_the_tokens(
    tmp_path: Path, reserved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards: list[list[list[int]]] = [
        [[*range(20)], [20, 21]],
        [[]],
        [[*range(22, 60)], [60]],
        [[*range(61, 91)]],
    ]
    masks = [[[int(token % 3 == 0) for token in one] for one in shard] for shard in shards]
    masked = write_store(tmp_path / "masked", shards, masks=masks)
    plain = write_store(tmp_path / "plain", shards)
    if not reserved:
        monkeypatch.setattr(stream_module, "ReservedTokens", _refused)
    streams = {has_mask: TokenStream(store) for has_mask, store in ((True, masked), (False, plain))}

    @settings(deadline=None)
    @given(pieces)
    def check(wanted: list[tuple[int, int]]) -> None:
        starts, lengths = (np.array(column, np.int64) for column in zip(*wanted, strict=True))
        for has_mask, stream in streams.items():
            spans = stream.locate(starts, lengths)
            tokens = stream.read_spans(spans, pad=99)
            expected = (tokens != 99) & ((tokens % 3 == 0) | (not has_mask))
            assert np.array_equal(stream.read_mask(spans), expected)
        spans = streams[True].locate(starts, lengths)
        shards, firsts, lasts = spans
        found = set((lasts - firsts).tolist())
        if (shards >= 0).all() and len(found) == 1:
            equal = streams[True].read_mask(spans, length=found.pop())
            assert np.array_equal(equal, streams[True].read_mask(spans))

    check()


def _refused(*args: object, **options: object) -> None:
    raise OSError("no range of addresses is reserved here")


def test_masks_are_read_behind_a_url_and_in_other_processes(layout: StoreLayout) -> None:
    local = Store(layout.root, split=None)
    with serve(layout.root.parent) as server:
        with Store(f"{server.address}/store", split=None) as store:
            assert store.has_mask
            assert masks_of(store) == masks_of(local)
            stream, here = TokenStream(store), TokenStream(local)
            starts, lengths = np.array([0, -1, 30, 5]), np.array([50, 3, 20, 1])
            spans = stream.locate(starts, lengths)
            stream.read_ahead(spans)
            assert np.array_equal(stream.read_mask(spans), here.read_mask(spans))
            assert masks_of(pickle.loads(pickle.dumps(store))) == masks_of(local)
        assert server.asked(".mask")
    assert masks_of(pickle.loads(pickle.dumps(local))) == masks_of(local)


def test_a_cut_mask_behind_a_url_is_named(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "FIRST_PAUSE_SECONDS", 0.01)
    path = layout.shard_file(unit_facts(GOLDEN.units[0]).name, "mask")
    path.write_bytes(path.read_bytes()[:-1])
    with (
        serve(layout.root.parent) as server,
        Store(f"{server.address}/store") as store,
        pytest.raises(StoreError, match=r"\.mask"),
    ):
        store.mask(2)


def test_a_cache_never_gives_the_masks_of_an_earlier_store(tmp_path: Path) -> None:
    served, cache = tmp_path / "served", tmp_path / "cache"
    with serve(served) as server:
        for mask in ([1, 0, 1], [0, 1, 1], [1, 0, 1]):
            shutil.rmtree(served, ignore_errors=True)
            write_store(served / "store", [[[7, 8, 9]]], masks=[[mask]])
            for _ in range(2):
                with Store(f"{server.address}/store", cache=cache) as store:
                    assert masks_of(store) == [mask]
                    assert store[0].tolist() == [7, 8, 9]
