from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builder.stores import begin_older_store, tree

import tokenmill
from tokenmill.errors import StoreError
from tokenmill.records import TextBatch, in_validation


def test_the_split_of_a_text_is_fixed_for_ever() -> None:
    texts = TextBatch.from_texts([f"document {n}" for n in range(40)])
    chosen = np.flatnonzero(in_validation(texts, 0.2)).tolist()
    # If this list changes, documents of existing stores move between splits.
    assert chosen == [0, 7, 11, 12, 18, 19, 21, 23, 33, 34, 37, 38]


def test_the_share_is_about_the_one_asked_for() -> None:
    texts = TextBatch.from_texts([f"text number {n}" for n in range(20_000)])
    share = in_validation(texts, 0.05).mean()
    assert 0.04 < share < 0.06


@given(st.lists(st.text(max_size=20), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_equal_texts_share_a_split_wherever_they_stand(texts: list[str], fraction: float) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    together = in_validation(TextBatch.from_texts(texts), fraction).tolist()
    alone = [bool(in_validation(TextBatch.from_texts([text]), fraction)[0]) for text in texts]
    assert together == alone


# -------------------------------------------------------------------------------------------------
# Splits by the names of files.

FILES = {"train": 50, "validation": 10, "test": 10}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset as the hub has it."""
    monkeypatch.chdir(tmp_path)
    folder = Path("data")
    folder.mkdir()
    for split, rows in FILES.items():
        texts = [f"{split} {number}" for number in range(rows)]
        pq.write_table(pa.table({"text": texts}), folder / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text("# A dataset")
    (folder / "LICENSE").write_text("free")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"x": 1}}, indent=2))
    return folder


def build(source: object = "data", out: str = "store", **options: object) -> tokenmill.BuildResult:
    given: dict[str, Any] = {"tokenizer": "bytes", "serial": True, **options}
    return tokenmill.build(source, out=out, **given)  # type: ignore[arg-type]


def texts_of(split: str, out: str = "store") -> set[str]:
    with tokenmill.Store(out, split=split) as store:
        return {store.decode(number).split()[0] for number in range(len(store))}


@pytest.mark.usefixtures("repository")
def test_the_folder_of_a_dataset_keeps_its_splits_and_none_of_its_papers() -> None:
    result = build()
    assert {name: split.documents for name, split in result.splits.items()} == {
        "train": 50,
        "val": 10,
        "test": 10,
    }
    assert (texts_of("train"), texts_of("val")) == ({"train"}, {"validation"})
    assert sorted(path for path, _ in result.skipped_files) == [
        "data/LICENSE",
        "data/README.md",
        "data/dataset_infos.json",
    ]
    assert not result.warnings
    assert build().nothing_to_do
    assert tokenmill.verify("store").ok


@pytest.mark.usefixtures("repository")
def test_a_share_for_validation_is_drawn_from_what_is_for_training() -> None:
    splits = build(val=0.4).splits
    assert splits["test"].documents == 10
    assert 10 < splits["val"].documents < 50
    assert texts_of("val") == {"train", "validation"}
    assert texts_of("test") == {"test"}


@pytest.mark.usefixtures("repository")
def test_names_can_be_told_to_tell_nothing() -> None:
    result = build(split_by_name=False)
    assert {name: split.documents for name, split in result.splits.items()} == {"train": 70}
    assert not result.warnings
    with pytest.raises(StoreError, match="split_by_name None -> True") as caught:
        build()
    assert "--no-split-by-name" in str(caught.value.hint)


@pytest.mark.usefixtures("repository")
def test_one_split_alone_is_for_training_and_a_warning_says_so() -> None:
    only = "data/validation-*.parquet"
    result = build(only, out="alone")
    assert set(result.splits) == {"train"}
    assert "all files are called val" in result.warnings[0]
    assert set(build(only, out="said", split_by_name=True).splits) == {"val"}
    # A store of training files does not take validation files in silence, whatever is said later.
    train = "data/train-*.parquet"
    assert not build(train, out="train").warnings
    with pytest.raises(StoreError, match="split_by_name None -> True"):
        build([train, only], out="train")
    assert build([train, only], out="train", split_by_name=False).splits["train"].documents == 60


@pytest.mark.usefixtures("repository")
def test_a_store_of_several_splits_keeps_them_when_files_are_gone() -> None:
    build()
    result = build("data/train-*.parquet", prune=True)
    assert (set(result.splits), result.units_resumed) == ({"train"}, 1)
    assert set(build().splits) == {"train", "val", "test"}


@pytest.mark.usefixtures("repository")
def test_an_older_store_keeps_its_meaning_and_says_so() -> None:
    build(out="new")
    begin_older_store(Path("store"), like=Path("new"))
    Path("data/dataset_infos.json").unlink()
    result = build()
    assert {name: split.documents for name, split in result.splits.items()} == {"train": 72}
    assert "the store was begun before names told splits" in result.warnings[0]
    assert build().nothing_to_do
    with pytest.raises(StoreError, match="of another build"):
        build(split_by_name=True)
    assert set(build(split_by_name=True, rebuild=True).splits) == {"train", "val", "test"}
    assert tree(Path("store")) == tree(Path("new"))


@pytest.mark.usefixtures("repository")
def test_parts_agree_about_splits_and_globs() -> None:
    build(exclude="test-*", out="whole")
    for part in ("1/3", "2/3", "3/3"):
        build(exclude=["test-*"], part=part)
    tokenmill.finish("store")
    assert tree(Path("store")) == tree(Path("whole"))
    assert set(tokenmill.inspect("store").splits) == {"train", "val"}
