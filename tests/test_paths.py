"""Paths: names become files, each once, and no link can trap the search."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill import files as files_module
from tokenmill.errors import SourceError


def expand(inputs: list[str]) -> list[str]:
    return sorted({found.path for each in inputs for found in files_module.matches(each)})


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.txt", "b/c.txt", "b/d.jsonl", "b/e/f.txt", ".h/g.txt", "b/.i.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("./a//b", "a/b"),
        ("a/./b/", "a/b"),
        ("/a//b", "/a/b"),
        ("//a", "/a"),
        (".", "."),
        ("../a", "../a"),
        ("a/../b", "a/../b"),
        ("s3://bucket/a//b", "s3://bucket/a//b"),
        (Path("a") / "b", "a/b"),
    ],
)
def test_a_path_is_cleaned_and_keeps_its_identity(given: str | Path, kept: str) -> None:
    assert files_module.normalise(given) == kept


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a.txt", ["a.txt"]),
        ("*.txt", ["a.txt"]),
        ("*/*.txt", ["b/c.txt"]),
        ("**/*.txt", ["a.txt", "b/c.txt", "b/e/f.txt"]),
        ("b/**/*.txt", ["b/c.txt", "b/e/f.txt"]),
        ("b/**", ["b/c.txt", "b/d.jsonl", "b/e/f.txt"]),
        ("**/e/*", ["b/e/f.txt"]),
        ("b/[c-d].*", ["b/c.txt", "b/d.jsonl"]),
        ("**/[!a-d].txt", ["b/e/f.txt"]),
        ("**/?.jsonl", ["b/d.jsonl"]),
        ("b", ["b/c.txt", "b/d.jsonl", "b/e/f.txt"]),
        ("*", ["a.txt", "b/c.txt", "b/d.jsonl", "b/e/f.txt"]),
        (".", ["a.txt", "b/c.txt", "b/d.jsonl", "b/e/f.txt"]),
        ("./b//e/", ["b/e/f.txt"]),
    ],
)
def test_inputs_stand_for_files(tree: Path, pattern: str, found: list[str]) -> None:
    assert expand([pattern]) == found
    absolute = f"{tree.as_posix()}/{pattern}"
    assert expand([absolute]) == [f"{tree.as_posix()}/{each}" for each in found]


def test_only_a_literal_name_or_suffix_counts_as_named(tree: Path) -> None:
    named = {
        m.path: m.named for p in ("a.txt", "b/*.txt", "b/e/*") for m in files_module.matches(p)
    }
    assert named == {"a.txt": True, "b/c.txt": True, "b/e/f.txt": False}


def test_a_file_whose_name_looks_like_a_glob_is_itself(tree: Path) -> None:
    (tree / "x[1].txt").write_text("")
    assert expand(["x[1].txt"]) == ["x[1].txt"]


@pytest.mark.timeout(20)
def test_links_in_a_circle_are_followed_once(tree: Path) -> None:
    for name in ("b/loop", "b/again", "b/e/up"):
        (tree / name).symlink_to(tree, target_is_directory=True)
    (tree / "self").symlink_to("self")
    for pattern in (".", "**/*.txt", "b", "**"):
        found = expand([pattern])
        assert len(found) < 20
        assert sum(each.endswith("f.txt") for each in found) >= 1


def test_inputs_are_sorted_and_unique(tree: Path) -> None:
    assert expand(["b/c.txt", "a.txt", "b/*.txt", "./a.txt"]) == ["a.txt", "b/c.txt"]


def test_an_input_without_files_is_an_error_that_names_it(tree: Path) -> None:
    for name in ("none", "*.csv", "none/**/*.txt"):
        with pytest.raises(SourceError, match="matches no file") as caught:
            expand(["a.txt", name])
        assert repr(name) in caught.value.message


def test_size_and_version_follow_the_file(tree: Path) -> None:
    before = files_module.stat("a.txt")
    assert before.size == 5
    assert before.version == str((tree / "a.txt").stat().st_mtime_ns)
    os.utime("a.txt", ns=(1, 1))
    assert files_module.stat("a.txt").version == "1"


def test_files_that_cannot_be_read_are_named(tree: Path) -> None:
    for action in (files_module.stat, files_module.open_binary):
        with pytest.raises(SourceError, match=r"cannot read 'none\.txt'"):
            action("none.txt")


def test_opened_files_can_be_sought(tree: Path) -> None:
    with files_module.open_binary("b/c.txt") as file:
        file.seek(2)
        assert file.read() == b"c.txt"


@pytest.mark.parametrize(
    ("address", "package", "advice"),
    [
        ("s3://bucket/a.txt", "s3fs", "tokenmill[s3]"),
        ("gs://bucket/a.txt", "gcsfs", "pip install gcsfs"),
    ],
)
def test_a_missing_backend_is_named_with_the_line_that_installs_it(
    address: str, package: str, advice: str
) -> None:
    # In a process of its own: fsspec remembers a backend that it has found once.
    code = (
        "import sys; from tokenmill import files\n"
        "from tokenmill.errors import MissingExtraError\n"
        f"sys.modules[{package!r}] = None\n"
        f"try: files.matches({address!r})\n"
        "except MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert repr(package) in done.stdout
    assert advice in done.stdout


def test_an_unknown_scheme_is_an_error() -> None:
    with pytest.raises(SourceError, match="nosuch"):
        expand(["nosuch://a/b.txt"])


def test_local_files_do_not_load_the_remote_layer(tree: Path) -> None:
    code = (
        "import sys; from tokenmill import files; files.matches('.'); files.stat('a.txt');"
        "files.open_binary('a.txt').close(); assert 'fsspec' not in sys.modules, 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
