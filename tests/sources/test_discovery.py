"""Discovery: what inputs stand for, what is left out, and what is refused."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pytest
from tests.interop.kept_peers import ask
from tests.sources.reading import compress, read

import tokenmill
from tokenmill.errors import SourceError
from tokenmill.sources.base import (
    SourceOptions,
    least_unit_bytes,
    reader_modules,
    unit_bytes_for,
)
from tokenmill.sources.discovery import discover, source_file

MEGABYTE = 1 << 20
LINE = b'{"text": "a"}\n'


def paths_of(folder: Path, *inputs: str, separator: str | None = "\n") -> list[str]:
    named = [folder / each for each in inputs] or [folder]
    files = discover(named, SourceOptions(separator=separator)).files
    return [file.path.removeprefix(f"{folder.as_posix()}/") for file in files]


def make(folder: Path, **contents: bytes) -> None:
    for name, data in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_formats_and_compressions_follow_from_names(tmp_path: Path) -> None:
    names = {
        "a.jsonl": ("jsonl", None),
        "b.ndjson.gz": ("jsonl", "gz"),
        "c.json.zst": ("jsonl", "zst"),
        "d.parquet": ("parquet", None),
        "e.arrow": ("arrow", None),
        "f.feather": ("arrow", None),
        "g.txt.bz2": ("text", "bz2"),
        "h.csv": ("csv", None),
        "i.tsv.xz": ("csv", "xz"),
        "j.TEXT": ("text", None),
    }
    for name, (_, kind) in names.items():
        (tmp_path / name).write_bytes(compress(LINE, kind) if kind else LINE)
    files = discover([tmp_path], SourceOptions(separator="\n")).files
    found = {file.path.rpartition("/")[2]: (file.format, file.compression) for file in files}
    assert found == names


def test_a_folder_is_searched_through_and_hidden_files_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path, a_txt=b"a", b__c__d_txt=b"d", _hidden_txt=b"h", b___git__e_txt=b"e")
    assert (tmp_path / ".hidden.txt").exists()
    assert paths_of(tmp_path) == ["a.txt", "b/c/d.txt"]


def test_source_code_and_files_without_suffix_are_text(tmp_path: Path) -> None:
    make(tmp_path, main_py=b"x", Makefile=b"all:\n", odd_xyz=b"text", empty=b"")
    assert paths_of(tmp_path) == ["Makefile", "empty", "main.py", "odd.xyz"]


def test_binary_files_in_a_folder_are_skipped_and_reported(tmp_path: Path) -> None:
    make(tmp_path, a_txt=b"a", b_png=b"\x89PNG\0\0", c_bin=b"\xff\xfe\xfd", d_parquet_gz=b"x")
    (tmp_path / "e.txt").symlink_to(tmp_path / "nowhere")
    found = discover([tmp_path], SourceOptions())
    reasons = {skip.path.rpartition("/")[2]: skip.reason for skip in found.skipped}
    assert reasons == {
        "b.png": "binary content",
        "c.bin": "not UTF-8 text",
        "d.parquet.gz": "a parquet file inside gz",
        "e.txt": "cannot be found: a broken link",
    }
    assert [m.path.rpartition("/")[2] for m in found.files[0].members] == ["a.txt"]


def test_a_named_file_of_unknown_type_is_text_or_an_error(tmp_path: Path) -> None:
    make(tmp_path, a_xyz="\u65e5\u672c".encode() * 9000, b_xyz=b"\0\1", c_xyz=b"\xff")
    assert paths_of(tmp_path, "a.xyz") == ["a.xyz"]
    for name, reason in [("b.xyz", "binary"), ("c.xyz", "not UTF-8"), ("*.xyz", "cannot be used")]:
        with pytest.raises(SourceError, match=reason) as caught:
            paths_of(tmp_path, name)
        assert ".jsonl" in (caught.value.hint or "")


def test_a_json_array_is_an_error_when_named_and_skipped_in_a_folder(tmp_path: Path) -> None:
    make(tmp_path, a_json=b' \n[{"text": "a"}]', b_json=LINE)
    for name in ("a.json", "*.json"):
        with pytest.raises(SourceError, match="one JSON array") as caught:
            paths_of(tmp_path, name)
        assert "jq -c" in (caught.value.hint or "")
    assert paths_of(tmp_path) == ["b.json"]


def test_an_input_that_matches_nothing_is_named(tmp_path: Path) -> None:
    make(tmp_path, a_txt=b"a")
    (tmp_path / "empty").mkdir()
    for name in ("none.txt", "*.jsonl", "empty", "**/*.csv"):
        with pytest.raises(SourceError, match="matches no file"):
            discover([tmp_path / "a.txt", tmp_path / name], SourceOptions())


def test_inputs_without_any_text_say_what_was_passed_over(tmp_path: Path) -> None:
    make(tmp_path, a_bin=b"\0")
    with pytest.raises(SourceError, match=r"a\.bin: binary content"):
        discover([tmp_path], SourceOptions())
    with pytest.raises(SourceError, match="empty list"):
        discover([], SourceOptions())


def test_one_file_under_several_names_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, a_txt=b"a", b__c_txt=b"c")
    (tmp_path / "b" / "link.txt").symlink_to(tmp_path / "a.txt")
    monkeypatch.chdir(tmp_path)
    inputs = ["./a.txt", "a.txt", str(tmp_path / "a.txt"), ".", "b//", f"file://{tmp_path}/a.txt"]
    files = discover(inputs, SourceOptions(separator="\n")).files
    assert len(files) == 2
    assert [file.size for file in files] == [1, 1]


def test_the_order_of_inputs_does_not_matter(tmp_path: Path) -> None:
    make(tmp_path, a_txt=b"a", b_jsonl=LINE, c__d_txt=b"d")
    names = [tmp_path / name for name in ("a.txt", "b.jsonl", "c")]
    assert discover(names, SourceOptions()) == discover(names[::-1], SourceOptions())


def save_to_disk(folder: Path, texts: list[str]) -> None:
    """What `datasets.Dataset.save_to_disk` leaves."""
    folder.mkdir(parents=True)
    table = pa.table({"text": texts})
    for name in ("data-00000-of-00001.arrow", "cache-1234.arrow"):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))
    index = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(index, indent=2))


def test_a_saved_dataset_is_its_listed_arrow_files(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", ["a", "b"])
    found = discover([tmp_path / "set"], SourceOptions())
    assert [file.path.rpartition("/")[2] for file in found.files] == ["data-00000-of-00001.arrow"]
    assert read(found.files[0], SourceOptions()).documents == ["a", "b"]
    assert sorted(skip.path.rpartition("/")[2] for skip in found.skipped) == [
        "cache-1234.arrow",
        "dataset_info.json",
        "state.json",
    ]


def test_a_saved_dataset_dict_is_the_files_of_all_its_splits(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set" / "train", ["a"])
    save_to_disk(tmp_path / "set" / "test", ["b"])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert paths_of(tmp_path, "set") == [
        "set/test/data-00000-of-00001.arrow",
        "set/train/data-00000-of-00001.arrow",
    ]


def test_a_known_file_is_found_again_with_its_members(tmp_path: Path) -> None:
    make(tmp_path, a_txt=b"a", b_odd=b"b", c_jsonl_gz=compress(LINE, "gz"))
    for file in discover([tmp_path], SourceOptions()).files:
        again = source_file(file.path, members=[member.path for member in file.members])
        assert again == file


def test_the_modules_that_read_files_are_known_also_where_files_are_in_groups(
    tmp_path: Path,
) -> None:
    make(tmp_path, a_jsonl=LINE)
    assert reader_modules(discover([tmp_path], SourceOptions()).files) == [
        "tokenmill.sources.lines"
    ]
    make(tmp_path, **{f"f{i:02d}_csv": b"text\nx\n" for i in range(80)})
    found = reader_modules(discover([tmp_path], SourceOptions()).files)
    assert {"tokenmill.sources.csv", "tokenmill.sources.lines"} <= {*found}
    for name in found:
        import_module(name)


def test_the_unit_size_is_a_function_of_the_file_size_within_bounds() -> None:
    options = SourceOptions()
    assert unit_bytes_for(0, options) == 8 * MEGABYTE
    assert unit_bytes_for(32 * 8 * MEGABYTE + 1, options) == 8 * MEGABYTE + 1
    assert unit_bytes_for(32 * 100 * MEGABYTE, options) == 100 * MEGABYTE
    assert unit_bytes_for(1 << 50, options) == 256 * MEGABYTE
    assert unit_bytes_for(5, SourceOptions(least_unit_bytes=MEGABYTE)) == MEGABYTE
    assert unit_bytes_for(1 << 50, SourceOptions(unit_bytes=7, least_unit_bytes=MEGABYTE)) == 7


def test_the_least_unit_is_a_power_of_two_that_a_small_input_has_sixteen_or_thirty_two_of() -> None:
    sizes = (0, 1, 6, 8, 20, 63, 64, 127, 128, 255, 256, 10**6)
    found = [least_unit_bytes(size * MEGABYTE) >> 10 for size in sizes]
    assert found == [256, 256, 256, 512, 1024, 2048, 2048, 2048, 4096, 4096, 8192, 8192]
    before = [least_unit_bytes(size * MEGABYTE, in_order=False) >> 10 for size in sizes]
    assert before == [256, 256, 256, 512, 1024, 2048, 4096, 4096, 8192, 8192, 8192, 8192]


def test_small_texts_are_in_more_groups_where_the_input_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, **{f"f{i:02d}_txt": b"x" * 60_000 for i in range(20)})
    monkeypatch.chdir(tmp_path)  # names decide where groups end
    found = discover([Path()], SourceOptions())
    assert found.least_unit_bytes == MEGABYTE // 4
    assert [len(file.members) for file in found.files] == [5, 4, 5, 5, 1]
    # As a store of before has them, and back.
    (one,) = found.grouped(SourceOptions()).files
    assert {*one.members} == {member for file in found.files for member in file.members}
    assert discover([Path()], SourceOptions(unit_bytes=1 << 30)).files == (one,)


# -------------------------------------------------------------------------------------------------
# Splits by name, and text that is about data.

LAYOUTS = {
    "sharded": [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/validation-00000-of-00001.parquet",
        "data/test-00000-of-00001.parquet",
    ],
    "beside": ["train.jsonl", "dev.jsonl", "test.jsonl", "README.md"],
    "words": ["my-train-file.csv", "my_valid_1.csv", "0_eval.csv", "the.testing.2.csv"],
    "folders": ["train/a.jsonl", "train/b.jsonl", "validation/a.jsonl", "test/a.jsonl"],
    "split folders": ["en/train/x.csv", "en/dev/x.csv", "de/train/x.csv", "de/val-2/x.csv"],
    "folders first": ["train/test-0.jsonl", "val/train-0.jsonl"],
}
OURS = {"train": "train", "validation": "val", "test": "test"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_by_name_are_those_of_datasets(tmp_path: Path, layout: str) -> None:
    for name in LAYOUTS[layout]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b'{"text": "a"}\n')
    theirs = ask("datasets", "files_of_splits", tmp_path)
    found = discover([tmp_path], SourceOptions(by_name=True))
    ours: dict[str, list[str]] = {}
    for file in found.files:
        assert file.split is not None
        ours.setdefault(file.split, []).append(file.path)
    described = {str(tmp_path / "README.md")}  # which `load_dataset` sorts out later
    assert {split: sorted(paths) for split, paths in ours.items()} == {
        OURS[split]: sorted({*paths} - described) for split, paths in theirs.items()
    }
    assert len(ours) > 1


def splits_of(folder: Path, *inputs: str) -> dict[str, str | None]:
    named = [folder / each for each in inputs] or [folder]
    found = discover(named, SourceOptions(separator=None, by_name=True))
    members = [each for file in found.files for each in file.members or (file,)]
    return {each.path.removeprefix(f"{folder.as_posix()}/"): each.split for each in members}


def test_folders_that_are_named_one_by_one_tell_splits_too(tmp_path: Path) -> None:
    make(tmp_path, train__a_jsonl=LINE, val__a_jsonl=LINE, more__a_jsonl=LINE)
    expected = {"train/a.jsonl": "train", "val/a.jsonl": "val", "more/a.jsonl": None}
    assert splits_of(tmp_path, "train", "val", "more") == expected
    assert splits_of(tmp_path, "train/a.jsonl", "val/a.jsonl", "more/*.jsonl") == expected


def test_folders_above_the_input_tell_nothing(tmp_path: Path) -> None:
    make(tmp_path, dev__corpus__a_jsonl=LINE, dev__corpus__b_jsonl=LINE, data__c_jsonl=LINE)
    assert set(splits_of(tmp_path, "dev/corpus").values()) == {None}
    # Nor do folders in which inputs are, where nothing is for training.
    assert set(splits_of(tmp_path, "dev/corpus/*.jsonl", "data").values()) == {None}


def test_source_code_has_no_splits_and_texts_in_folders_of_splits_have(tmp_path: Path) -> None:
    make(tmp_path, src__x_py=b"x", src__val_py=b"x", test__x_py=b"x", dev__x_py=b"x")
    assert set(splits_of(tmp_path).values()) == {None}
    make(tmp_path / "imdb", train__pos__1_txt=b"x", test__neg__val_txt=b"x", more_txt=b"x")
    assert splits_of(tmp_path / "imdb") == {
        "train/pos/1.txt": "train",
        "test/neg/val.txt": "test",
        "more.txt": None,
    }


def test_small_files_of_different_splits_are_never_in_one_group(tmp_path: Path) -> None:
    for number in range(70):
        for split in ("train", "test"):
            make(tmp_path, **{f"{number:02}__{split}_jsonl": LINE})
    plain = discover([tmp_path], SourceOptions()).files
    found = discover([tmp_path], SourceOptions(by_name=True)).files
    assert all(file.split is None for file in plain)
    groups = [(file.split, {each.split for each in file.members}) for file in found]
    assert {split for split, _ in groups} == {"train", "test"}
    assert all(splits == {split} for split, splits in groups)
    assert sum(len(file.members) for file in found) == 140
    assert len({file.path for file in found}) == len(found) < 20


def test_text_beside_data_is_left_out_and_listed(tmp_path: Path) -> None:
    make(tmp_path, README_md=b"# x", LICENSE=b"x", load_py=b"x", notes_txt=b"x", data__a_jsonl=LINE)
    make(tmp_path, data__more_md=b"x", data__own_txt=b"x", docs__guide_md=b"x")
    infos = json.dumps({"default": {"description": "x"}})
    (tmp_path / "dataset_infos.json").write_text(infos)
    (tmp_path / "croissant.json").write_text(json.dumps({"a": {"b": 1}}, indent=2))
    found = discover([tmp_path], SourceOptions())
    paths = [each.path for file in found.files for each in file.members or (file,)]
    kept = ["data/a.jsonl", "data/own.txt", "docs/guide.md", "notes.txt"]
    assert [path.removeprefix(f"{tmp_path}/") for path in paths] == kept
    passed = {skip.path.rpartition("/")[2]: skip.reason for skip in found.not_read}
    assert passed["dataset_infos.json"] == "describes a dataset"
    assert passed["croissant.json"].startswith("it is one JSON object over several lines")
    reason = "text beside data files; to have it read, name it"
    assert {name for name, why in passed.items() if why == reason} == {
        "README.md",
        "LICENSE",
        "load.py",
        "more.md",
    }
    # An older store read them, and reads them still.
    before = discover([tmp_path], SourceOptions(reads_strays=True))
    assert sum(len(file.members) or 1 for file in before.files) == 10
    assert not before.not_read


def test_text_that_is_named_is_read_beside_data(tmp_path: Path) -> None:
    make(tmp_path, README_md=b"# x", a_jsonl=LINE)
    assert paths_of(tmp_path, "README.md", "a.jsonl", separator="|") == ["README.md", "a.jsonl"]
    assert paths_of(tmp_path, "*.md", "*.jsonl", separator="|") == ["README.md", "a.jsonl"]
    with pytest.raises(SourceError, match="over several lines") as caught:
        (tmp_path / "b.json").write_text('{\n "text": "a"\n}')
        paths_of(tmp_path, "b.json")
    assert f"jq -c '.' {tmp_path}/b.json > {tmp_path}/b.jsonl" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*.jsonl"], [], ["a.jsonl", "raw/b.jsonl", "raw/deep/c.jsonl"]),
        ([], ["raw/"], ["a.jsonl", "d.csv"]),
        ([], ["raw/*"], ["a.jsonl", "d.csv", "raw/deep/c.jsonl"]),
        ([], ["**/deep/**", "d.*"], ["a.jsonl", "raw/b.jsonl"]),
        (["a*", "c*"], ["a.*"], ["raw/deep/c.jsonl"]),
    ],
)
def test_globs_choose_among_the_files(
    tmp_path: Path, include: list[str], exclude: list[str], expected: list[str]
) -> None:
    make(tmp_path, a_jsonl=LINE, raw__b_jsonl=LINE, raw__deep__c_jsonl=LINE, d_csv=b"text\na\n")
    found = discover([tmp_path], SourceOptions(), include=include, exclude=exclude)
    assert [file.path.removeprefix(f"{tmp_path}/") for file in found.files] == expected
    assert len(found.files) + len(found.skipped) == 4
    with pytest.raises(SourceError, match=r"no usable text.*left out by exclude=") as caught:
        discover([tmp_path], SourceOptions(), exclude=["*"])
    assert "change --include and --exclude" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["one text\n" * 1000, "x" * 5000, "hello world"])
def test_a_text_for_a_file_is_told_how_texts_are_given(text: str) -> None:
    with pytest.raises(SourceError, match="matches no file") as caught:
        discover([text], SourceOptions())
    assert "texts are given as iter(texts)" in str(caught.value.hint)
    assert len(caught.value.message) < 200
    with pytest.raises(SourceError, match="matches no file"):
        tokenmill.build([text], tokenizer="bytes", out="store")
