from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tokenmill.errors import StoreError
from tokenmill.store.layout import StoreLayout
from tokenmill.store.reader import RejectedRow, SourceRow, Store

from .samples import GOLDEN, SampleStore, SampleUnit

if TYPE_CHECKING:
    from pathlib import Path


TRAIN = ["It was a bright cold day.", "na\u00efve caf\u00e9 \u2603", "\U0001f600", "x"]
VAL = ["held out", "only held out"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return GOLDEN.write(tmp_path / "store").root


def texts(store: Store) -> list[str]:
    return [store.decode(k) for k in range(len(store))]


def test_documents_of_a_split_come_in_order(root: Path) -> None:
    assert texts(Store(root)) == TRAIN
    assert texts(Store(str(root), split="val")) == VAL
    every = Store(root, split=None)
    assert texts(every) == [*TRAIN[:3], *VAL, TRAIN[3]]
    assert [document.tolist() for document in every] == [every[k].tolist() for k in range(6)]


def test_a_store_knows_what_a_reader_must_never_guess(root: Path) -> None:
    store = Store(root)
    assert (len(store), store.num_documents, store.num_tokens) == (4, 4, 50)
    assert (store.dtype.name, store.vocab_size, store.eos_id, store.bos_id) == (
        "uint16",
        257,
        256,
        None,
    )
    assert store.lengths().tolist() == [len(text.encode()) + 1 for text in TRAIN]
    assert store.lengths().dtype == np.int32
    assert store.tokenizer_dir == root / "tokenizer"
    assert [(s.split, s.documents, s.first_document) for s in store.shards] == [
        ("train", 3, 0),
        ("train", 1, 3),
    ]
    assert "4 documents, 50 tokens" in repr(store)


def test_documents_are_read_only_views(root: Path) -> None:
    document = Store(root)[0]
    assert document.dtype == np.uint16
    assert not document.flags.writeable
    assert not document.flags.owndata
    assert document[-1] == 256


def test_indices_count_from_both_ends_and_end_where_the_store_ends(root: Path) -> None:
    store = Store(root)
    assert store[-1].tolist() == store[3].tolist() == [ord("x"), 256]
    assert store[np.int64(1)].tolist() == store[-3].tolist()
    assert (store.locate(2), store.locate(3), store.locate(-1)) == ((0, 2), (1, 0), (1, 0))
    for outside in (4, -5):
        with pytest.raises(IndexError, match=f"document {outside} of a store of 4"):
            store[outside]
    with pytest.raises(TypeError):
        store[0.5]  # type: ignore[call-overload]


def test_a_document_knows_the_row_and_line_it_came_from(root: Path) -> None:
    every = Store(root, split=None)
    first, second = "corpus/first part.jsonl", "s3://bucket/data.jsonl.zst"
    # The first unit has a blank line somewhere, so the lines of its rows are not known.
    assert [every.source(k) for k in range(6)] == [
        SourceRow(path=first, unit=0, row_in_unit=0, row=0, line=None),
        SourceRow(path=first, unit=0, row_in_unit=2, row=2, line=None),
        SourceRow(path=first, unit=0, row_in_unit=5, row=5, line=None),
        SourceRow(path=first, unit=0, row_in_unit=3, row=3, line=None),
        SourceRow(path=first, unit=1, row_in_unit=0, row=6, line=8),
        SourceRow(path=second, unit=0, row_in_unit=0, row=0, line=1),
    ]
    assert Store(root, split="val").source(1) == every.source(4)


def test_a_document_of_a_group_of_files_knows_its_own_file(tmp_path: Path) -> None:
    rows = [("train", "a"), ("reject", "b"), ("train", "c")]
    unit = SampleUnit(path="group", rows=rows, members=("x/a.txt", "x/b.txt", "x/c.txt"))
    SampleStore(units=[unit]).write(tmp_path)
    assert Store(tmp_path).source(1) == SourceRow(
        path="x/c.txt", unit=0, row_in_unit=2, row=0, line=1
    )


def test_rejected_rows_are_listed_with_their_reasons(root: Path) -> None:
    rejects = list(Store(root).rejects())
    assert [(row.row, row.offset, row.reason) for row in rejects] == [
        (1, 7, "invalid-json"),
        (1, 7, "invalid-json"),
        (2, 14, "invalid-json"),
    ]
    assert isinstance(rejects[0], RejectedRow)
    assert rejects[2].detail == "cannot use '\\ud800'"
    assert {row.file for row in rejects} == {"corpus/first part.jsonl"}


def test_every_missing_or_truncated_file_is_caught_at_opening_by_name(tmp_path: Path) -> None:
    store = SampleStore(units=GOLDEN.units, tokenizer_files={"tokenizer.json": b"{}"})
    layout = store.write(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1 + 4 + 2 * 4 + 2 + 1
    for path in files:
        data = path.read_bytes()
        for damaged in (None, data[:-1], data + b"x", b""):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(StoreError) as caught:
                Store(layout.root)
            assert path.name in caught.value.message
            assert caught.value.hint is not None
            path.unlink(missing_ok=True)
            path.write_bytes(data)
    assert len(Store(layout.root)) == 4


def test_a_missing_folder_is_reported_as_its_files(root: Path) -> None:
    for path in (root / "rejects").iterdir():
        path.unlink()
    (root / "rejects").rmdir()
    with pytest.raises(StoreError, match=r"rejects.* is missing .and 1 more files"):
        Store(root)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
def test_links_may_stay_inside_the_store_and_not_leave_it(root: Path, tmp_path: Path) -> None:
    shard = next((root / "shards").glob("*.bin"))
    inside, outside = root / "shards" / "moved", tmp_path / "outside.bin"
    shard.rename(inside)
    shard.symlink_to(inside)
    assert len(Store(root)) == 4
    inside.rename(outside)
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(StoreError, match="is a link that leaves the store") as caught:
        Store(root)
    assert shard.name in caught.value.message
    shard.unlink()
    outside.rename(shard)
    (root / "shards").rename(tmp_path / "elsewhere")
    (root / "shards").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="shards' is a link that leaves the store"):
        Store(root)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
def test_the_store_itself_may_be_reached_through_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert len(Store(tmp_path / "link")) == 4


def test_an_unknown_split_lists_the_known_ones(root: Path) -> None:
    with pytest.raises(StoreError, match="no split 'test'") as caught:
        Store(root, split="test")
    assert "'train', 'val'" in str(caught.value.hint)


def test_an_empty_store_opens(tmp_path: Path) -> None:
    SampleStore(units=[SampleUnit(path="nothing")]).write(tmp_path)
    store = Store(tmp_path)
    assert (len(store), list(store), store.lengths().tolist()) == (0, [], [])
    with pytest.raises(IndexError):
        store[0]


def test_an_index_of_the_right_size_for_another_bin_is_refused(tmp_path: Path) -> None:
    rows = [("train", "abc"), ("train", "d")]
    layout = SampleStore(
        units=[SampleUnit(path="a", rows=rows), SampleUnit(path="b", rows=[("train", "x")] * 2)]
    ).write(tmp_path)
    first, second = sorted(layout.shards.glob("*.idx"))
    first.write_bytes(second.read_bytes())
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="is of another shard"):
        store[0]


def test_a_pickled_store_opens_again_with_its_split_and_decodes(root: Path) -> None:
    store = Store(root, split="val")
    assert store.decode(0) == VAL[0]
    again = pickle.loads(pickle.dumps(store))
    assert texts(again) == VAL
    assert len(pickle.dumps(store)) < 1000, "the manifest is read again, not sent along"


def test_views_outlive_the_store_they_came_from(root: Path) -> None:
    with Store(root) as store:
        document = store[0]
    store.close()
    assert document.tolist() == [*TRAIN[0].encode(), 256]
    assert store[0].tolist() == document.tolist(), "a closed store opens its shards again"


MANY_SHARDS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tokenmill.store.reader import Store
store = Store(sys.argv[1])
views = 0
for k in list(range(len(store))) * 2:
    views += int(store[k][0] == 97 + k % 26)
assert views == 2 * len(store) == 160, views
assert "pyarrow" not in sys.modules
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such limits")
def test_more_shards_than_file_descriptors_can_be_read(tmp_path: Path) -> None:
    rows = [[("train", chr(97 + k % 26))] for k in range(80)]
    units = [SampleUnit(path=f"f{k:03d}", rows=rows[k]) for k in range(80)]
    SampleStore(units=units).write(tmp_path)
    subprocess.run([sys.executable, "-c", MANY_SHARDS, str(tmp_path)], check=True)


def test_of_a_store_of_many_units_a_lost_file_is_missed_and_a_cut_one_refused_when_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.store.reader.MANY_UNITS", 1)
    layout = StoreLayout(root)
    name = Store(root).shards[0].name
    path = layout.shard_file(name, "bin")
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(StoreError, match="bytes instead of"):
        Store(root)[0]
    path.unlink()
    with pytest.raises(StoreError, match="is missing"):
        Store(root)
    path.symlink_to("/etc/hostname")
    with pytest.raises(StoreError, match="is a link that leaves the store"):
        Store(root)
