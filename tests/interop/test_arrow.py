"""Datasets on disk and Parquet files, against Hugging Face datasets' own readers and writers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.interop.kept_peers import ask
from tests.interop.rows import (
    LENGTHS,
    VOCAB_SIZE,
    back,
    concatenated,
    documents,
    documents_of,
    import_bytes,
    small_store,
)
from tests.store.samples import EOS, SampleStore, SampleUnit

import tokenmill
from tokenmill.errors import SourceError
from tokenmill.interop.export import export_store

if TYPE_CHECKING:
    from pathlib import Path


def two_splits(root: Path) -> Path:
    rows = [("train", "a" * 40), ("val", "bc"), ("train", "d" * 7), ("val", "e" * 100)]
    SampleStore(units=[SampleUnit(path="a.jsonl", rows=rows)]).write(root)
    return root


def test_datasets_opens_documents(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to="arrow", out=tmp_path / "ours", file_tokens=1_000)

    found = ask("datasets", "read", tmp_path / "ours")["train"]
    assert found["columns"] == {"input_ids": documents(store)}
    assert found["types"] == {"input_ids": "int32"}
    assert found["files"] > 1


def test_datasets_opens_rows_with_labels_and_masks(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    columns = "labels,attention_mask,loss_mask"
    export_store(store.path, to="arrow", out=tmp_path / "ours", seq_len=64, columns=columns)

    found = ask("datasets", "read", tmp_path / "ours")["train"]
    rows = concatenated(store, 64)
    lacking = len(rows) * 64 - store.num_tokens
    assert lacking
    assert found["columns"]["input_ids"] == rows
    real = [[1] * 64 for _ in rows[:-1]] + [[1] * (64 - lacking) + [0] * lacking]
    assert found["columns"]["attention_mask"] == found["columns"]["loss_mask"] == real
    labels = [*rows[:-1], rows[-1][: 64 - lacking] + [-100] * lacking]
    assert found["columns"]["labels"] == labels
    assert found["types"] == {
        "input_ids": "int32",
        "labels": "int64",
        "attention_mask": "int8",
        "loss_mask": "int8",
    }


@pytest.mark.parametrize("to", ["arrow", "parquet"])
def test_splits_are_a_dataset_dict(tmp_path: Path, to: str) -> None:
    root = two_splits(tmp_path / "store")
    export_store(root, to=to, out=tmp_path / "ours")

    if to == "arrow":
        found = ask("datasets", "read", tmp_path / "ours")
        names = {"train": "train", "val": "val"}
    else:
        found = ask("datasets", "read_parquet", tmp_path / "ours", tmp_path / "cache")
        names = {"train": "train", "val": "validation"}
    import_bytes(tmp_path / "ours", tmp_path / "back")
    for split, theirs in names.items():
        held = documents(tokenmill.Store(root, split=split))
        assert found[theirs]["columns"]["input_ids"] == held
        assert documents(tokenmill.Store(tmp_path / "back", split=split)) == held


@pytest.mark.parametrize("ids", ["int32", "uint16"])
def test_datasets_and_pyarrow_read_parquet(tmp_path: Path, ids: str) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    out = tmp_path / "ours"
    export_store(store.path, to="parquet", out=out, file_tokens=1_000, group_tokens=50, ids=ids)

    found = ask("datasets", "read_parquet", out, tmp_path / "cache")["train"]
    assert found["columns"]["input_ids"] == documents(store)
    assert found["columns"]["id"] == [*range(store.num_documents)]
    assert found["types"] == {"input_ids": ids}
    files = sorted(out.glob("*.parquet"))
    assert len(files) > 1
    metadata = [pq.ParquetFile(file).metadata for file in files]
    assert max(each.num_row_groups for each in metadata) > 1
    assert metadata[0].row_group(0).column(2).compression == "ZSTD"


def test_long_documents_are_cut_and_come_back_whole(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    result = export_store(
        store.path, to="parquet", out=tmp_path / "ours", row_tokens=64, group_tokens=100
    )

    table = pq.read_table(tmp_path / "ours")
    lengths = [len(row) for row in table["input_ids"].to_pylist()]
    assert max(lengths) == 64
    assert max(table["chunk_index"].to_pylist()) == -(-70_000 // 64) - 1
    assert any("were cut" in note for note in result.notes)
    assert back(tmp_path / "ours", tmp_path / "back") == documents(store)


@pytest.mark.parametrize("name", ["input_ids", "ids", "tokens"])
def test_what_datasets_writes_is_read(tmp_path: Path, name: str) -> None:
    made = documents_of([3, 300, 1, 0, 70])
    other = documents_of([9, 2])
    columns = {"train": {"text": ["x"] * 5, name: made}, "test": {"text": ["y"] * 2, name: other}}
    ask("datasets", "write", tmp_path / "disk", columns, 2)
    import_bytes(tmp_path / "disk", tmp_path / "store")

    assert documents(tokenmill.Store(tmp_path / "store")) == made
    assert documents(tokenmill.Store(tmp_path / "store", split="test")) == other
    ask("datasets", "write_parquet", tmp_path / "p" / "a.parquet", columns["train"])
    assert back(tmp_path / "p", tmp_path / "from-parquet") == made


def test_padding_goes_and_labels_are_a_mask(tmp_path: Path) -> None:
    columns = {
        "input_ids": [[1, 2, 3, EOS], [7, EOS, 0, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "labels": [[-100, -100, 3, EOS], [7, EOS, -100, -100]],
    }
    ask("datasets", "write", tmp_path / "disk", {"": columns}, 1)

    assert back(tmp_path / "disk", tmp_path / "store") == [[1, 2, 3, EOS], [7, EOS]]
    assert import_bytes(tmp_path / "disk", tmp_path / "store").has_mask


def test_labels_that_are_shifted_are_refused(tmp_path: Path) -> None:
    columns = {"input_ids": [[1, 2, 3]], "labels": [[2, 3, -100]]}
    ask("datasets", "write", tmp_path / "disk", {"": columns}, 1)

    with pytest.raises(SourceError, match="labels='no'"):
        import_bytes(tmp_path / "disk", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert back(tmp_path / "disk", tmp_path / "store", labels=False) == [[1, 2, 3]]


@pytest.mark.parametrize(
    "kind",
    [pa.large_list(pa.uint32()), pa.list_(pa.int64(), 4), pa.list_(pa.uint16())],
)
def test_lists_of_any_kind_are_read(tmp_path: Path, kind: Any) -> None:
    rows = [[1, 2, 3, EOS], [4, 5, 6, EOS], [7, 8, 9, EOS]]
    table = pa.table({"ids": pa.array(rows, kind)}).slice(1)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)

    assert back(tmp_path / "a.parquet", tmp_path / "one") == rows[1:]
    assert back(tmp_path / "a.arrow", tmp_path / "two") == rows[1:]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([[1.5]], "lists of double"),
        ([[1, None]], "some null"),
        ([[1], None], "rows without 'input_ids': null"),
        ([["a"]], "lists of string"),
        ([1], "no column that is known to hold ids"),
        ([[VOCAB_SIZE]], "has the id 257"),
        ([[-1]], "-1"),
    ],
)
def test_columns_that_are_not_ids_are_refused(tmp_path: Path, values: Any, match: str) -> None:
    pq.write_table(pa.table({"input_ids": values}), tmp_path / "a.parquet")

    with pytest.raises(SourceError, match=match):
        import_bytes(tmp_path / "a.parquet", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("to", "file"),
    [("arrow", "data-00000-of-00001.arrow"), ("parquet", "train-00000-of-00001.parquet")],
)
@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_a_truncated_file_is_an_error_that_leaves_nothing(
    tmp_path: Path, to: str, file: str, kept: float
) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to=to, out=tmp_path / "ours")
    path = tmp_path / "ours" / file
    data = path.read_bytes()
    path.write_bytes(data[: int(kept if kept > 1 else kept * len(data))])

    with pytest.raises(SourceError, match=file):
        import_bytes(tmp_path / "ours", tmp_path / "back", format=to)
    assert not (tmp_path / "back").exists()


def test_a_selection_of_rows_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[3]])
    export_store(store.path, to="arrow", out=tmp_path / "ours")
    path = tmp_path / "ours" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))

    with pytest.raises(SourceError, match="selection of rows"):
        import_bytes(tmp_path / "ours", tmp_path / "back")


def test_a_name_with_a_dot_is_a_name(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4]]
    table = pa.table({"text.ids": pa.array(rows, pa.list_(pa.int32())), "text": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")

    assert back(tmp_path / "a.parquet", tmp_path / "back", column="text.ids") == rows
