"""Parquet: units of row groups, one column, and clear words for files that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.sources.reading import read

from tokenmill.errors import SourceError
from tokenmill.sources.base import SourceOptions, plan_units
from tokenmill.sources.discovery import source_file

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, column: Any, *, rows: int = 10, name: str = "text", **kwargs: Any) -> Path:
    path = folder / "a.parquet"
    table = pa.table({"id": pa.array(range(len(column))), name: column})
    pq.write_table(table, path, row_group_size=rows, **kwargs)
    return path


TEXTS = [f"document {i} " + "\u00e9" * (i % 7) for i in range(95)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: Any) -> None:
    texts = pa.array([text.encode() for text in TEXTS]).cast(pa.string())
    column = texts.dictionary_encode() if pa.types.is_dictionary(kind) else texts.cast(kind)
    path = write(tmp_path, column)
    for batch_bytes in (1, 100, 1 << 20):
        got = read(path, SourceOptions(unit_bytes=500, batch_bytes=batch_bytes))
        assert got.texts == list(enumerate(TEXTS))
        assert len(got.ends) > 2
        assert [end.is_last for end in got.ends] == [False] * (len(got.ends) - 1) + [True]


def test_units_are_whole_row_groups_and_cover_the_file(tmp_path: Path) -> None:
    file = source_file(str(write(tmp_path, pa.array(TEXTS))))
    for unit_bytes in (1, 300, 1 << 30, None):
        units = list(plan_units(file, SourceOptions(unit_bytes=unit_bytes)))
        assert units[0].start == 0
        assert units[-1].end == 10
        assert [unit.start for unit in units[1:]] == [unit.end for unit in units[:-1]]
        assert [unit.index for unit in units] == list(range(len(units)))
    assert len(units) == 1


def test_null_and_invalid_and_large_rows_are_rejected(tmp_path: Path) -> None:
    column = pa.array([b"a", None, b"\xff", b"x" * 100, b"b"], pa.binary())
    got = read(write(tmp_path, column, rows=2), SourceOptions(max_document_bytes=50))
    assert got.texts == [(0, "a"), (4, "b")]
    assert got.rejects == [(1, "null-text"), (2, "invalid-utf8"), (3, "too-large")]
    assert got.details[2].size == 100


def test_a_string_column_that_is_not_utf8_is_caught(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff\xfe"], pa.binary())
    lying = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    got = read(write(tmp_path, lying), SourceOptions())
    assert got.rejects == [(1, "invalid-utf8")]


def test_a_dotted_field_reaches_into_structs(tmp_path: Path) -> None:
    rows = [{"text": "a", "x": 1}, None, {"text": None, "x": 2}, {"text": "b", "x": 3}]
    kind = pa.struct([("text", pa.string()), ("x", pa.int64())])
    path = write(tmp_path, pa.array(rows, kind), name="data")
    got = read(path, SourceOptions(text_field="data.text"))
    assert got.texts == [(0, "a"), (3, "b")]
    assert got.rejects == [(1, "null-text"), (2, "null-text")]


def test_a_column_with_a_dot_in_its_name_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, pa.array(["a"]), name="data.text")
    assert read(path, SourceOptions(text_field="data.text")).documents == ["a"]


def test_a_missing_column_is_named_together_with_those_that_exist(tmp_path: Path) -> None:
    file = source_file(str(write(tmp_path, pa.array(["a"]), name="content")))
    with pytest.raises(SourceError, match="no column 'text'; its columns are: id, content"):
        list(plan_units(file, SourceOptions()))


def test_a_column_of_another_type_is_refused_while_planning(tmp_path: Path) -> None:
    file = source_file(str(write(tmp_path, pa.array([1]))))
    with pytest.raises(SourceError, match="of type int64, not text"):
        list(plan_units(file, SourceOptions()))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, pa.array(TEXTS))
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[:-10], b"x" * 1000):
        path.write_bytes(data)
        file = source_file(str(path))
        with pytest.raises(SourceError, match=r"a\.parquet"):
            list(plan_units(file, SourceOptions()))


def test_damage_inside_a_page_is_an_error_and_not_a_short_file(tmp_path: Path) -> None:
    path = write(tmp_path, pa.array([text * 50 for text in TEXTS]), rows=1000, compression="zstd")
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 3 + 200] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet"):
        read(path, SourceOptions())


def test_a_file_without_rows_has_no_rows(tmp_path: Path) -> None:
    got = read(write(tmp_path, pa.array([], pa.string())), SourceOptions())
    assert (got.num_rows, got.ends[-1].is_last) == (0, True)


def test_the_digest_follows_the_text_and_not_the_encoding(tmp_path: Path) -> None:
    digests = []
    for texts, codec in [(TEXTS, "zstd"), (TEXTS, "none"), ([*TEXTS[:-1], "other"], "zstd")]:
        path = write(tmp_path, pa.array(texts), rows=50, compression=codec)
        ends = read(path, SourceOptions(unit_bytes=1)).ends
        digests.append([end.digest for end in ends])
    assert digests[0] == digests[1]
    assert digests[0][0] == digests[2][0]
    assert digests[0][1] != digests[2][1]


def test_digests_tell_where_one_document_ends(tmp_path: Path) -> None:
    columns = [["ab", "c"], ["a", "bc"], ["abc", ""], ["abc", None]]
    digests = {
        read(write(tmp_path, pa.array(column)), SourceOptions()).ends[0].digest
        for column in columns
    }
    assert len(digests) == 4


def test_long_rows_are_handed_on_in_batches(tmp_path: Path) -> None:
    texts = ["s"] * 500 + ["l" * 5000] * 50
    got = read(write(tmp_path, pa.array(texts), rows=1000), SourceOptions(batch_bytes=20_000))
    assert got.documents == texts
    assert got.num_batches > 10
