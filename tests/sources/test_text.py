"""Plain text: whole files in groups, and documents between separators."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.reading import Reading, compress, read

from tokenmill.errors import SourceError
from tokenmill.sources.base import SourceOptions, is_stream, is_unbordered
from tokenmill.sources.discovery import discover, source_file


def read_text(folder: Path, data: bytes, separator: str, **options: object) -> Reading:
    path = folder / "a.txt"
    path.write_bytes(data)
    return read(path, SourceOptions(separator=separator, **options))  # type: ignore[arg-type]


def read_files(folder: Path, **options: object) -> Reading:
    settings = SourceOptions(**options)  # type: ignore[arg-type]
    # Names decide where groups end: those of temporary folders would once in a while.
    with contextlib.chdir(folder):
        (group,) = discover([Path()], settings).files
        return read(group, settings)


def test_each_file_is_one_document(tmp_path: Path) -> None:
    for name, text in [("b.txt", "two\n"), ("a.txt", "one"), ("c/d.md", ""), ("e.py", "x = 1\n")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    got = read_files(tmp_path, batch_bytes=4)
    assert got.documents == ["one", "two\n", "", "x = 1\n"]
    assert got.num_batches > 1


def test_a_byte_order_mark_is_not_part_of_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert read_files(tmp_path).documents == ["one"]
    assert read_text(tmp_path, b"\xef\xbb\xbfone\ntwo", "\n").documents == ["one", "two"]


def test_a_file_that_is_not_utf8_is_rejected_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_bytes(b"fine")
    got = read_files(tmp_path)
    assert got.texts == [(1, "fine")]
    assert got.rejects == [(0, "invalid-utf8")]
    assert got.details[0].path == "a.txt"


def test_a_file_over_the_limit_is_rejected_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 5000)
    (tmp_path / "b.txt.gz").write_bytes(compress(b"y" * 5000, "gz"))
    (tmp_path / "c.txt").write_bytes(b"z" * 100)
    got = read_files(tmp_path, max_document_bytes=100)
    assert got.documents == ["z" * 100]
    assert [(each.row, each.size) for each in got.details] == [(0, 5000), (1, 5000)]


def test_a_compressed_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(compress(b"one", "zst") + compress(b" two", "zst"))
    assert read_files(tmp_path).documents == ["one two"]


def test_the_digest_of_a_group_covers_names_and_content(tmp_path: Path) -> None:
    def digest() -> str:
        return read_files(tmp_path).ends[0].digest

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    digests = [digest()]
    (tmp_path / "b.txt").write_text("tw")
    digests.append(digest())
    (tmp_path / "a.txt").write_text("onet")
    digests.append(digest())
    (tmp_path / "a.txt").rename(tmp_path / "0.txt")
    digests.append(digest())
    assert len(set(digests)) == 4


def test_a_member_that_changes_after_planning_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (group,) = discover([tmp_path], SourceOptions()).files
    (tmp_path / "a.txt").write_text("other")
    with pytest.raises(SourceError, match="changed while"):
        read(group, SourceOptions())


def test_the_separator_is_not_part_of_a_document(tmp_path: Path) -> None:
    got = read_text(tmp_path, b"one<|end|>two<|end|><|end|>three<|end|>", "<|end|>")
    assert got.documents == ["one", "two", "", "three"]
    assert [end.num_lines for end in got.ends] == [4]


def test_text_after_the_last_separator_is_a_document(tmp_path: Path) -> None:
    assert read_text(tmp_path, b"a\nb", "\n").documents == ["a", "b"]
    assert read_text(tmp_path, b"", "\n").documents == []


def test_a_separator_that_overlaps_itself_is_found_from_the_front(tmp_path: Path) -> None:
    assert read_text(tmp_path, b"a\n\n\nb\n\n\n\nc", "\n\n").documents == ["a", "\nb", "", "c"]
    file = source_file(str(tmp_path / "a.txt"))
    assert is_stream(file, SourceOptions(separator="\n\n"))
    assert not is_stream(file, SourceOptions(separator="<|end|>"))
    assert [is_unbordered(s) for s in (b"\n", b"ab", b"aba", b"\r\n", b"aa")] == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_a_bad_piece_costs_itself_alone(tmp_path: Path) -> None:
    data = b"ok\n\xff\n" + b"x" * 50 + b"\nend"
    for batch_bytes in (3, 1000):
        got = read_text(tmp_path, data, "\n", batch_bytes=batch_bytes, max_document_bytes=20)
        assert got.texts == [(0, "ok"), (3, "end")]
        assert [(each.row, each.reason, each.offset) for each in got.details] == [
            (1, "invalid-utf8", 3),
            (2, "too-large", 5),
        ]
        assert got.details[1].size == 50


@pytest.mark.parametrize("batch_bytes", range(1, 60, 3))
def test_a_separator_on_the_border_of_two_reads_ends_a_large_piece(
    tmp_path: Path, batch_bytes: int
) -> None:
    for size in range(20, 40):
        data = b"x" * size + b"<|end|>" + b"ok"
        got = read_text(tmp_path, data, "<|end|>", batch_bytes=batch_bytes, max_document_bytes=10)
        assert (got.texts, got.details[0].size) == ([(1, "ok")], size)


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b"b", b"\n", b"ab", b"\xff", b"\xef\xbb\xbf"])).map(
        b"".join
    ),
    separator=st.sampled_from(["\n", "\n\n", "ab", "aba", "aab"]),
    unit_bytes=st.integers(1, 30),
    batch_bytes=st.integers(1, 30),
    kind=st.sampled_from([None, "gz"]),
)
def test_no_cut_changes_the_documents(
    data: bytes, separator: str, unit_bytes: int, batch_bytes: int, kind: str | None
) -> None:
    pieces = data.split(separator.encode())
    pieces = pieces if pieces[-1] else pieces[:-1]
    sizes = [len(piece) for piece in pieces]
    if pieces:
        pieces[0] = pieces[0].removeprefix(b"\xef\xbb\xbf")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.txt" if kind is None else "a.txt.gz")
        path.write_bytes(data if kind is None else compress(data, kind))
        options = SourceOptions(
            separator=separator,
            unit_bytes=unit_bytes,
            batch_bytes=batch_bytes,
            max_document_bytes=7,
        )
        got = read(path, options)
    assert got.num_rows == len(pieces)
    fits = [
        (i, piece.decode())
        for i, (piece, size) in enumerate(zip(pieces, sizes, strict=True))
        if size <= 7 and b"\xff" not in piece
    ]
    assert got.texts == fits
