from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.store.layout import (
    RECEIPT_FILE,
    SHARD_FILE,
    is_plain_name,
    shard_name,
    unit_name,
    unit_prefix,
)


@pytest.mark.parametrize(
    ("path", "slug"),
    [
        ("data/part-00001.jsonl.zst", "part-00001"),
        ("data/part.v2.JSONL.GZ", "part-v2"),
        ("s3://bucket/caf\u00e9 menu.parquet", "cafe-menu"),
        ("data/\u4e2d\u6587.jsonl", "file"),
        ("README", "README"),
        (".hidden", "hidden"),
        ("folder/", "folder"),
        ("x" * 100 + ".txt", "x" * 40),
        ("../../etc/passwd", "passwd"),
        ("bad\udcff.txt", "bad"),
    ],
)
def test_a_unit_is_named_after_its_file_in_plain_ascii(path: str, slug: str) -> None:
    assert re.fullmatch(re.escape(slug) + r"-[0-9a-f]{16}-00007", unit_name(path, index=7))


def test_names_are_pinned_because_stores_on_disk_depend_on_them() -> None:
    assert unit_name("data/a.jsonl", index=3) == "a-9b8de8d2c4b14c0c-00003"
    assert unit_name("data/a.jsonl", index=1_234_567).endswith("-1234567")


@given(st.lists(st.text(), unique=True, min_size=2, max_size=5), st.integers(0, 10**7))
def test_different_paths_give_different_names_that_stay_in_their_folder(
    paths: list[str], index: int
) -> None:
    names = [unit_name(path, index=index) for path in paths]
    assert len(set(names)) == len(paths)
    for path, name in zip(paths, names, strict=True):
        assert name.startswith(unit_prefix(path))
        assert is_plain_name(name)
        assert RECEIPT_FILE.fullmatch(f"{name}.json")
        assert SHARD_FILE.fullmatch(f"{shard_name(name, split='val')}.idx")


def test_the_train_shard_has_the_name_of_its_unit_and_others_add_their_split() -> None:
    unit = unit_name("a.jsonl", index=0)
    assert shard_name(unit, split="train") == unit
    assert shard_name(unit, split="val") == f"{unit}-val"
    match = SHARD_FILE.fullmatch(f"{unit}-val.bin")
    assert match is not None
    assert match["unit"] == unit


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\\b", "C:a", "a\x00", "a\nb", "x" * 201, "a*", 'a"b']
)
def test_names_that_could_leave_the_folder_are_not_plain(name: str) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["tokenizer.json", "my ranks.tiktoken", "\u4e2d.model", "..a"])
def test_ordinary_file_names_are_plain(name: str) -> None:
    assert is_plain_name(name)
