"""CSV and TSV: quoted text, and malformed rows that cost themselves alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sources.reading import Reading, compress, read

from tokenmill.errors import SourceError
from tokenmill.sources.base import SourceOptions


def read_csv(folder: Path, data: bytes, name: str = "a.csv", **options: object) -> Reading:
    (folder / name).write_bytes(data)
    return read(folder / name, SourceOptions(**options))  # type: ignore[arg-type]


def test_quotes_line_ends_and_marks_are_understood(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfid,text\r\n1,"a, ""b""\nc"\r\n2,NULL\r\n3,\r\n4,12\r\n'
    assert read_csv(tmp_path, data).documents == ['a, "b"\nc', "NULL", "", "12"]


def test_tabs_separate_a_tsv_file_also_when_compressed(tmp_path: Path) -> None:
    data = compress(b"text\tid\na,b\t1\n", "gz")
    assert read_csv(tmp_path, data, "a.tsv.gz").documents == ["a,b"]


def test_malformed_rows_are_rejected_in_their_place(tmp_path: Path) -> None:
    data = b"id,text\n9\n1,a\n2,b,c\n3\n4,d\n5,e,f\n"
    got = read_csv(tmp_path, data)
    assert got.texts == [(1, "a"), (4, "d")]
    assert got.rejects == [(i, "malformed-row") for i in (0, 2, 3, 5)]
    assert got.details[1].detail == "3 values instead of 2"


def test_a_text_that_is_not_utf8_or_too_large_is_rejected(tmp_path: Path) -> None:
    got = read_csv(tmp_path, b"id,text\n1,\xff\n2,ok\n3,toolong\n", max_document_bytes=5)
    assert (got.texts, got.rejects) == ([(1, "ok")], [(0, "invalid-utf8"), (2, "too-large")])


def test_a_missing_column_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no column 'text'; its columns are: id, body"):
        read_csv(tmp_path, b"id,body\n1,a\n")


def test_an_empty_file_and_a_header_alone_have_no_rows(tmp_path: Path) -> None:
    assert read_csv(tmp_path, b"").num_rows == 0
    assert read_csv(tmp_path, b"id,text\n").num_rows == 0


def test_a_row_larger_than_a_block_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="larger than what is read in one go"):
        read_csv(tmp_path, b'id,text\n1,"' + b"x" * 200_000 + b'"\n2,a\n', batch_bytes=1)


def test_a_truncated_compressed_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a\.csv"):
        read_csv(tmp_path, compress(b"text\n" + b"a\n" * 99999, "gz")[:-9], "a.csv.gz")


def test_the_digest_covers_every_byte(tmp_path: Path) -> None:
    digests = {
        read_csv(tmp_path, data).ends[0].digest
        for data in (b"id,text\n1,a\n", b"id,text\n2,a\n", b"id,text\n1,b\n", b"id,text\n1,a")
    }
    assert len(digests) == 4


ROWS = st.sampled_from(["1,a", "2", "3,a,c", '4,"\na"', "5,\u00e9a", "6,\udcffa"])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=40),
    # So long that some forty of them are several blocks of the reader.
    length=st.sampled_from([1, 10_000]),
)
@example(rows=["1,a"] * 6 + ["6,\udcffa"] + ["1,a"] * 6, length=10_000)
def test_rows_keep_their_numbers_across_blocks(rows: list[str], length: int) -> None:
    rows = [row.replace("a", "a" * length) for row in rows]
    data = "\n".join(["id,text", *rows, ""]).encode(errors="surrogateescape")
    with tempfile.TemporaryDirectory() as folder:
        got = read_csv(Path(folder), data, batch_bytes=1)
    texts = {row: row[2:].strip('"') for row in rows if row[0] in "145"}
    assert got.texts == [(i, texts[row]) for i, row in enumerate(rows) if row in texts]
    assert got.num_rows == len(rows)
