"""Groups of small files: which there are, and that their rows are those of the files."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.reading import Reading, compress, read

from tokenmill.errors import SourceError
from tokenmill.sources.base import SourceFile, SourceOptions, open_source, plan_units
from tokenmill.sources.discovery import MANY_FILES, discover, group_files, make_group, source_file


def text_file(name: str, size: int = 10) -> SourceFile:
    return SourceFile(path=name, format="text", compression=None, size=size, version="1")


def jsonl_file(name: str, size: int = 10, compression: str | None = None) -> SourceFile:
    return SourceFile(path=name, format="jsonl", compression=compression, size=size, version="1")


def cut(files: list[SourceFile], **options: int) -> list[list[str]]:
    """The files of each unit's source, and those that are no group by their own path."""
    found = group_files(sorted(files, key=lambda file: file.path), SourceOptions(**options))  # type: ignore[arg-type]
    return [[member.path for member in file.members] or [file.path] for file in found]


def groups_of(names: list[str], *, unit_bytes: int = 1 << 20) -> dict[str, tuple[str, ...]]:
    files = [text_file(name) for name in sorted(names)]
    groups = list(group_files(files, SourceOptions(unit_bytes=unit_bytes)))
    assert len({group.path for group in groups}) == len(groups)
    return {group.path: tuple(member.path for member in group.members) for group in groups}


NAMES = [f"src/module_{i:05d}.py" for i in range(3000)]


def test_every_file_is_in_one_group_in_order() -> None:
    groups = groups_of(NAMES)
    assert [name for members in groups.values() for name in members] == NAMES
    assert 5 < len(groups) < 40


@settings(max_examples=60, deadline=None)
@given(number=st.integers(0, 2999), suffix=st.text("abc", min_size=1, max_size=3))
def test_a_new_file_changes_only_the_group_it_falls_into(number: int, suffix: str) -> None:
    before = groups_of(NAMES)
    new = f"src/module_{number:05d}{suffix}.py"
    after = groups_of([*NAMES, new])
    changed = {path for path in before if before[path] != after.get(path)}
    added = set(after) - set(before)
    # One group grew; or, if the new name ends a group, one group became two.
    assert len(changed) == 1
    assert len(added) <= 1
    assert set(before) <= set(after)


def test_a_file_that_sorts_first_or_last_keeps_the_name_of_its_group() -> None:
    before = groups_of(NAMES)
    for name in ("a_first.py", "z_last.py"):
        assert list(groups_of([*NAMES, name])) == list(before)
    assert next(iter(before)) == "group//first"


def test_a_group_ends_when_it_has_the_bytes_of_a_unit() -> None:
    groups = groups_of(NAMES[:100], unit_bytes=50)
    assert max(len(members) for members in groups.values()) == 5
    assert len(groups) >= 20


def test_a_large_file_is_a_group_of_its_own() -> None:
    files = [text_file("a"), text_file("b", 5000), text_file("c")]
    groups = list(group_files(files, SourceOptions(unit_bytes=1000)))
    assert [[member.path for member in group.members] for group in groups] == [["a"], ["b"], ["c"]]
    assert [group.size for group in groups] == [10, 5000, 10]


def test_the_version_of_a_group_follows_its_members() -> None:
    def version(*files: SourceFile) -> str:
        (group,) = group_files(files, SourceOptions())
        return group.version

    versions = [
        version(text_file("a"), text_file("b")),
        version(text_file("a"), text_file("b", 11)),
        version(text_file("a"), text_file("c")),
        version(text_file("a")),
    ]
    assert len(set(versions)) == 4
    assert version(text_file("a")) == versions[3]


def test_many_small_files_of_any_format_are_in_groups_and_few_are_not() -> None:
    many = [jsonl_file(f"{number:03d}.jsonl") for number in range(MANY_FILES)]
    names = [file.path for file in many]
    assert cut(many, unit_bytes=1000)[0][:9] == names[:9]
    assert [*chain(*cut(many, unit_bytes=1000))] == names
    assert cut(many[1:], unit_bytes=1000) == [[name] for name in names[1:]]
    # What is small follows from the unit; of a compressed file, from the text in it.
    assert cut(many, unit_bytes=40) == [[name] for name in names]
    packed = [
        jsonl_file(f"{number:03d}.jsonl.gz", compression="gz") for number in range(MANY_FILES)
    ]
    assert max(map(len, cut(packed, unit_bytes=164))) == 5
    assert max(map(len, cut(packed, unit_bytes=160))) == 1


def test_files_of_all_kinds_stay_in_the_order_of_their_paths() -> None:
    many = [jsonl_file(f"{number:03d}.jsonl") for number in range(MANY_FILES)]
    texts = [text_file(f"{number:03d}.txt") for number in range(MANY_FILES)]
    large = [jsonl_file("017.large.jsonl", 5000), text_file("031.large.txt", 5000)]
    files = [*many, *texts, *large]
    found = cut(files, unit_bytes=1000)
    assert [*chain(*found)] == sorted(file.path for file in files)
    assert ["017.large.jsonl"] in found
    assert ["031.large.txt"] in found
    assert len(found) < 12
    # A few others break the groups of texts.
    found = cut([*many[:2], *texts], unit_bytes=10_000)
    assert [unit for unit in found if unit[0].endswith("jsonl")] == [["000.jsonl"], ["001.jsonl"]]
    assert [*chain(*found)] == sorted(file.path for file in [*many[:2], *texts])


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, 2999),
    size=st.sampled_from([10, 100, 10_000]),
    unit_bytes=st.sampled_from([500, 2000, 1 << 20]),
)
def test_a_new_file_changes_few_of_the_groups_of_files_of_many_rows(
    number: int, size: int, unit_bytes: int
) -> None:
    def groups(files: list[SourceFile]) -> dict[str, object]:
        options = SourceOptions(unit_bytes=unit_bytes)
        found = group_files(sorted(files, key=lambda file: file.path), options)
        return {file.path: file for file in found}

    files = [jsonl_file(name) for name in NAMES]
    before = groups(files)
    after = groups([*files, jsonl_file(f"src/module_{number:05d}x.py", size)])
    # Sizes end groups too: then the next file whose name ends one in both cases is awaited.
    assert len({name for name in before if before[name] != after.get(name)}) <= (
        1 if unit_bytes == 1 << 20 else 20
    )


# -------------------------------------------------------------------------------------------------
# Reading.


def write_file(path: Path, texts: list[str]) -> None:
    """A file of the format that its name says."""
    kind = path.name.partition(".")[2]
    table = pa.table({"text": texts})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    elif kind == "arrow":
        pa.feather.write_feather(table, path)
    elif kind == "csv":
        path.write_text("id,text\n" + "".join(f"1,{text}\n" for text in texts))
    elif kind == "txt":
        path.write_text("".join(texts))
    else:
        data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(compress(data, kind.rpartition(".")[2]) if "." in kind else data)


KINDS = ["parquet", "arrow", "csv", "jsonl", "jsonl.gz", "jsonl.zst", "txt"]


def write_many(folder: Path, kinds: list[str], count: int = 140) -> dict[str, list[str]]:
    """Many small files, of these kinds in turn: name -> texts."""
    folder.mkdir(exist_ok=True)
    made: dict[str, list[str]] = {}
    for number in range(count):
        path = folder / f"{number:03d}.{kinds[number % len(kinds)]}"
        texts = [f"{number} {row} {'x' * (number % 30)}" for row in range(number % 5)]
        texts = ["".join(texts)] if path.suffix == ".txt" else texts
        write_file(path, texts)
        made[path.name] = texts
    return made


def read_groups(folder: Path, **options: object) -> list[Reading]:
    chosen = SourceOptions(**options)  # type: ignore[arg-type]
    with contextlib.chdir(folder):
        return [read(file, chosen) for file in discover([Path()], chosen).files]


def one_group(folder: Path) -> SourceFile:
    """All files of a folder as one group, wherever their names end one."""
    return make_group("group//first", [source_file(str(path)) for path in sorted(folder.iterdir())])


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids="-".join)
@pytest.mark.parametrize("batch_bytes", [1, 300, 1 << 20])
def test_the_rows_of_a_group_are_those_of_its_files(
    tmp_path: Path, kinds: list[str], batch_bytes: int
) -> None:
    made = write_many(tmp_path / "in", kinds)
    got = read_groups(tmp_path / "in", unit_bytes=1 << 20, batch_bytes=batch_bytes)
    assert 1 <= len(got) < 6
    assert [text for each in got for text in each.documents] == [*chain(*made.values())]
    rows = [end.member_rows for each in got for end in each.ends]
    if kinds == ["txt"]:
        assert set(rows) == {()}
    else:
        assert [*chain(*rows)] == [len(texts) for texts in made.values()]
    if batch_bytes == 1 << 20:
        assert {each.num_batches for each in got} == {1}


def test_a_group_reads_what_its_files_read_alone(tmp_path: Path) -> None:
    """Rejects with their places, sizes, digests: whatever one file has."""
    folder = tmp_path / "in"
    write_many(folder, ["jsonl", "csv"], 80)
    (folder / "040.jsonl").write_bytes(b'{"text": "a"}\n\n{bad\n{"text": "\xff"}\n{"text": null}\n')
    (folder / "041.csv").write_bytes(b"id,text\n1,fine\n1,2,3\n1,\xff\n")
    with contextlib.chdir(folder):
        options, group = SourceOptions(), one_group(Path())
        alone = {member.path: read(member, options) for member in group.members}
        got = read(group, options)
    expected = [
        each._replace(path=path, row_in_file=each.row, row=0)
        for path, file in alone.items()
        for each in file.details
    ]
    assert len(expected) == 5
    assert [each._replace(row=0) for each in got.details] == expected
    assert [got.rejects[k][0] - got.details[k].row for k in range(5)] == [0] * 5
    assert got.num_rows == sum(file.num_rows for file in alone.values())
    assert got.num_bytes == sum(file.num_bytes for file in alone.values())
    assert got.ends[0].num_lines == sum(file.ends[0].num_lines for file in alone.values())
    assert got.ends[0].num_lines == got.num_rows + 1
    known = [place for place in got.places if place >= 0]
    assert known == [place for file in alone.values() for place in file.places]


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_of_a_group_covers_the_names_and_contents_of_its_files(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "in"
    write_many(folder, [kind], MANY_FILES)

    def digest() -> str:
        with contextlib.chdir(folder):
            return read(one_group(Path()), SourceOptions()).ends[0].digest

    digests = [digest()]
    write_file(folder / f"007.{kind}", ["other"])
    digests.append(digest())
    (folder / f"009.{kind}").rename(folder / f"009x.{kind}")
    digests.append(digest())
    assert len(set(digests)) == 3
    os.utime(folder / f"011.{kind}", ns=(1, 1))
    assert digest() == digests[2]


def test_damage_in_a_file_of_a_group_is_told_as_that_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_many(folder, ["parquet", "jsonl.gz"], 80)

    def problem() -> str:
        with pytest.raises(SourceError) as caught:
            read_groups(folder, unit_bytes=1 << 20)
        return str(caught.value)

    good = (folder / "041.jsonl.gz").read_bytes()
    (folder / "041.jsonl.gz").write_bytes(good[:-9])
    assert "'041.jsonl.gz'" in problem()
    (folder / "041.jsonl.gz").write_bytes(b"")
    assert "'041.jsonl.gz': an empty file is not a complete gz file" in problem()
    (folder / "041.jsonl.gz").write_bytes(gzip.compress(b""))
    good = (folder / "040.parquet").read_bytes()
    (folder / "040.parquet").write_bytes(good[:-20])
    assert "'040.parquet' cannot be read as what its name says" in problem()
    pq.write_table(pa.table({"body": ["a"]}), folder / "040.parquet")
    assert "'040.parquet' has no column 'text'; its columns are: body" in problem()
    pq.write_table(pa.table({"text": [1]}), folder / "040.parquet")
    assert "column 'text' of '040.parquet' is of type int64" in problem()
    (folder / "040.parquet").write_bytes(good)
    assert read_groups(folder, unit_bytes=1 << 20)


def test_a_field_that_no_file_has_is_told_before_a_row_is_read(tmp_path: Path) -> None:
    write_many(tmp_path / "in", ["parquet"], MANY_FILES)
    options, group = SourceOptions(text_field="body"), one_group(tmp_path / "in")
    with pytest.raises(SourceError, match=r"000\.parquet' has no column 'body'"):
        next(plan_units(group, options))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_group_that_changes_after_planning_is_an_error(
    tmp_path: Path, kind: str
) -> None:
    write_many(tmp_path / "in", [kind], MANY_FILES)
    with contextlib.chdir(tmp_path / "in"):
        group = one_group(Path())
        write_file(Path(f"040.{kind}"), ["other", "rows"])
        with pytest.raises(SourceError, match=f"'040.{kind}' changed while it was in use"):
            read(group, SourceOptions())


@pytest.mark.parametrize("kind", ["arrow", "jsonl"])
def test_a_file_of_a_group_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, kind: str
) -> None:
    write_many(tmp_path / "in", [kind], MANY_FILES)
    options = SourceOptions(batch_bytes=1)
    with contextlib.chdir(tmp_path / "in"):
        group = one_group(Path())
        (unit,) = plan_units(group, options)
        rows = open_source(group, options).read(unit)
        # A batch of a file that has more of them, or is not known to be at its end.
        while next(rows).files[-1][1] != f"004.{kind}":
            pass
        with Path(f"004.{kind}").open("r+b") as file:
            file.write(b"#")
        with pytest.raises(SourceError, match=f"'004.{kind}' changed while it was in use"):
            list(rows)


def test_a_group_is_found_again_by_its_members(tmp_path: Path) -> None:
    write_many(tmp_path / "in", KINDS)
    for file in discover([tmp_path / "in"], SourceOptions(unit_bytes=1000)).files:
        members = [member.path for member in file.members]
        assert source_file(file.path, members=members) == file
