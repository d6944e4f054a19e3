"""Groups of text files: every file in one group, and a new file changes one group."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.sources.base import SourceFile, SourceOptions
from tokenmill.sources.discovery import FIRST_GROUP, group_texts


def text_file(name: str, size: int = 10) -> SourceFile:
    return SourceFile(path=name, format="text", compression=None, size=size, version="1")


def groups_of(names: list[str], *, unit_bytes: int = 1 << 20) -> dict[str, tuple[str, ...]]:
    files = [text_file(name) for name in sorted(names)]
    groups = list(group_texts(files, SourceOptions(unit_bytes=unit_bytes)))
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
    assert next(iter(before)) == FIRST_GROUP


def test_a_group_ends_when_it_has_the_bytes_of_a_unit() -> None:
    groups = groups_of(NAMES[:100], unit_bytes=50)
    assert max(len(members) for members in groups.values()) == 5
    assert len(groups) >= 20


def test_a_large_file_is_a_group_of_its_own() -> None:
    files = [text_file("a"), text_file("b", 5000), text_file("c")]
    groups = list(group_texts(files, SourceOptions(unit_bytes=1000)))
    assert [[member.path for member in group.members] for group in groups] == [["a"], ["b"], ["c"]]
    assert [group.size for group in groups] == [10, 5000, 10]


def test_the_version_of_a_group_follows_its_members() -> None:
    def version(*files: SourceFile) -> str:
        (group,) = group_texts(files, SourceOptions())
        return group.version

    versions = [
        version(text_file("a"), text_file("b")),
        version(text_file("a"), text_file("b", 11)),
        version(text_file("a"), text_file("c")),
        version(text_file("a")),
    ]
    assert len(set(versions)) == 4
    assert version(text_file("a")) == versions[3]
