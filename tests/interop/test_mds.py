"""MDS, against MosaicML's own reader and writer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.kept_peers import ask
from tests.interop.rows import (
    LENGTHS,
    back,
    concatenated,
    documents,
    documents_of,
    import_bytes,
    small_store,
)
from tests.store.samples import tree

import tokenmill
from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.export import export_store
from tokenmill.loader.packing import BestFitLayout
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from pathlib import Path


def files_of(folder: Path) -> dict[str, bytes]:
    """What others see of an export."""
    return {name: data for name, data in tree(folder).items() if not name.startswith(".")}


@pytest.mark.parametrize("ids", ["int32", "uint16"])
def test_mosaicml_reads_documents_and_writes_the_same_bytes(tmp_path: Path, ids: str) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    limit = 100_000
    export_store(store.path, to="mds", out=tmp_path / "ours", ids=ids, size_limit=limit)
    held = [document for document in documents(store) if document]

    found = ask("mosaicml", "read", tmp_path / "ours")
    assert [sample["tokens"] for sample in found["samples"]] == held
    assert found["types"] == [ids]
    assert found["hashes"]
    assert all(found["hashes"])

    samples = [{"tokens": document} for document in held]
    options = {"hashes": ["xxh3_128"], "size_limit": limit}
    columns = {"tokens": f"ndarray:{ids}"}
    ask("mosaicml", "write", tmp_path / "theirs", columns, samples, options)
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    assert len(files_of(tmp_path / "ours")) > 2, "one shard would not show where it is cut"


def test_mosaicml_reads_rows_and_writes_the_same_bytes(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    plain: dict[str, Any] = {"size_limit": 20_000, "columns": "none"}
    export_store(store.path, to="mds", out=tmp_path / "ours", seq_len=64, **plain)
    rows = concatenated(store, 64)

    assert ask("mosaicml", "dataset", tmp_path / "ours") == rows
    options = {"hashes": ["xxh3_128"], "size_limit": 20_000}
    columns = {"tokens": "ndarray:int32"}
    samples = [{"tokens": row} for row in rows]
    ask("mosaicml", "write", tmp_path / "theirs", columns, samples, options)
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")


@pytest.mark.parametrize(("less", "samples"), [(0, 5), (1, 4)])
def test_shards_are_cut_to_the_byte_where_mosaicml_cuts(
    tmp_path: Path, less: int, samples: int
) -> None:
    store = small_store(tmp_path / "store", [[640]])
    export_store(store.path, to="mds", out=tmp_path / "any", seq_len=64, size_limit=1_111)
    data = np.fromfile(tmp_path / "any" / "shard.00000.mds", "<u4", 2)
    config_bytes = int(data[1]) - 4 - 4 * (int(data[0]) + 1)
    sample = 4 + 2 + 4 * 64
    limit = 8 + config_bytes + 5 * (sample + 4) - less
    assert 1_000 <= limit < 10_000, "a number of other digits makes the config longer"
    options = {"hashes": ["xxh3_128"], "size_limit": limit}
    export_store(store.path, to="mds", out=tmp_path / "ours", seq_len=64, size_limit=limit)
    rows = [{"tokens": row} for row in concatenated(store, 64)]
    ask("mosaicml", "write", tmp_path / "theirs", {"tokens": "ndarray:int32"}, rows, options)

    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    index = json.loads((tmp_path / "ours" / "index.json").read_text())
    assert index["shards"][0]["samples"] == samples


def test_masks_of_padding_stand_beside_packed_rows(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    out = tmp_path / "ours"
    export_store(store.path, to="mds", out=out, seq_len=64, packing="best-fit", columns="auto")

    samples = ask("mosaicml", "read", out)["samples"]
    real = sum(sum(sample["attention_mask"]) for sample in samples)
    assert {len(sample["tokens"]) for sample in samples} == {64}
    account = BestFitLayout(TokenStream(store), seq_len=63).account()
    assert real == account.used + account.repeated
    assert account.padding


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        ("ndarray:int32", {}),
        ("ndarray:uint16", {"compression": "zstd", "hashes": ["sha1", "xxh64"]}),
        ("ndarray:int64", {"compression": "gz"}),
        ("ndarray", {"hashes": ["md5"], "size_limit": 3_000}),
        ("bytes", {"size_limit": 3_000}),
    ],
)
def test_what_mosaicml_writes_is_read(
    tmp_path: Path, encoding: str, options: dict[str, Any]
) -> None:
    made = documents_of([3, 300, 1, 70, 2000])
    columns = {"tokens": encoding, "name": "str", "number": "int", "extra": "pkl"}
    samples = [
        {"tokens": ids, "name": "x" * number, "number": number, "extra": {"a": number}}
        for number, ids in enumerate(made)
    ]
    ask("mosaicml", "write", tmp_path / "theirs", columns, samples, options)

    assert back(tmp_path / "theirs", tmp_path / "store") == made


def test_rows_of_one_shape_are_read(tmp_path: Path) -> None:
    made = documents_of([64] * 10)
    samples = [{"tokens": row} for row in made]
    columns = {"tokens": "ndarray:uint16:64"}
    ask("mosaicml", "write", tmp_path / "theirs", columns, samples, {})

    assert back(tmp_path / "theirs", tmp_path / "store") == made


def test_splits_are_folders(tmp_path: Path) -> None:
    for split, lengths in {"train": [5, 9], "val": [7]}.items():
        samples = [{"tokens": ids} for ids in documents_of(lengths)]
        columns = {"tokens": "ndarray:int32"}
        ask("mosaicml", "write", tmp_path / "theirs" / split, columns, samples, {})
    import_bytes(tmp_path / "theirs", tmp_path / "store")

    assert documents(tokenmill.Store(tmp_path / "store", split="val")) == documents_of([7])
    assert documents(tokenmill.Store(tmp_path / "store")) == documents_of([5, 9])


def exported(tmp_path: Path) -> Path:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to="mds", out=tmp_path / "mds")
    return tmp_path / "mds"


def test_a_truncated_shard_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    shard = folder / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1])

    with pytest.raises(SourceError, match=r"shard\.00000\.mds.* bytes, and its index says"):
        import_bytes(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_changed_byte_is_found_by_its_hash(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    shard = folder / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    with pytest.raises(SourceError, match="another xxh3_128 than its index says"):
        import_bytes(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("place", [0, 4, 8, 40])
def test_a_damaged_header_is_an_error_without_hashes_too(tmp_path: Path, place: int) -> None:
    folder = exported(tmp_path)
    shard, index = folder / "shard.00000.mds", folder / "index.json"
    data = bytearray(shard.read_bytes())
    data[place + 2] ^= 0x55
    shard.write_bytes(data)
    facts = json.loads(index.read_text())
    facts["shards"][0]["raw_data"]["hashes"] = {}
    index.write_text(json.dumps(facts))

    with pytest.raises(SourceError, match=r"shard\.00000\.mds"):
        import_bytes(folder, tmp_path / "back")


def test_columns_that_are_not_ids_are_refused(tmp_path: Path) -> None:
    samples = [{"tokens": [1.5, 2.0]}]
    columns = {"tokens": "ndarray:float32"}
    ask("mosaicml", "write", tmp_path / "floats", columns, samples, {})
    with pytest.raises(SourceError, match="not whole numbers"):
        import_bytes(tmp_path / "floats", tmp_path / "back")

    ask("mosaicml", "write", tmp_path / "pickles", {"x": "pkl"}, [{"x": [1, 2]}], {})
    with pytest.raises(SourceError, match="no column that is known to hold ids"):
        import_bytes(tmp_path / "pickles", tmp_path / "back")
    with pytest.raises(SourceError, match="holds 'pkl' in its column 'x', not arrays of ids"):
        import_bytes(tmp_path / "pickles", tmp_path / "back", column="x")


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    index = folder / "index.json"
    index.write_text(index.read_text().replace("shard.00000.mds", "../mds/shard.00000.mds"))

    with pytest.raises(SourceError, match="not in its own folder"):
        import_bytes(folder, tmp_path / "back")


def test_a_size_that_offsets_cannot_hold_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[3]])

    with pytest.raises(UsageError, match="offsets in them are of 32 bits"):
        export_store(store.path, to="mds", out=tmp_path / "out", size_limit=1 << 32)
    assert not (tmp_path / "out").exists()


def test_rows_come_back_as_documents_when_they_are_cut_at_eos(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[5, 300, 7], [70, 2], [40, 40, 25]])
    assert store.num_tokens % 64, "the last row must be padded for this to show anything"
    export_store(store.path, to="mds", out=tmp_path / "mds", seq_len=64, columns="attention_mask")

    assert back(tmp_path / "mds", tmp_path / "back", split_at_eos=True) == documents(store)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    samples = [{"tokens": np.arange(300).tolist()}]
    ask("mosaicml", "write", tmp_path / "t", {"tokens": "ndarray:int32"}, samples, {})

    with pytest.raises(SourceError, match="has the id 257"):
        import_bytes(tmp_path / "t", tmp_path / "back")
    assert not (tmp_path / "back").exists()
