"""Arrow files, streams and Feather: units of record batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.feather
import pytest
from tests.sources.reading import read

from tokenmill.errors import SourceError
from tokenmill.sources.base import SourceOptions, open_source, plan_units
from tokenmill.sources.discovery import source_file

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [f"document {i}" for i in range(100)]


def write(path: Path, column: Any, *, stream: bool, name: str = "text") -> Path:
    table = pa.table({"id": pa.array(range(len(column))), name: column})
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return path


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_files_and_streams_are_read_in_units(tmp_path: Path, stream: bool, kind: Any) -> None:
    path = write(tmp_path / "a.arrow", pa.array(TEXTS, kind), stream=stream)
    got = read(path, SourceOptions(unit_bytes=1000, batch_bytes=30))
    assert got.texts == list(enumerate(TEXTS))
    assert len(got.ends) > 2
    assert [end.is_last for end in got.ends] == [False] * (len(got.ends) - 1) + [True]


@pytest.mark.parametrize("stream", [True, False])
def test_units_may_be_read_in_any_order(tmp_path: Path, stream: bool) -> None:
    file = source_file(str(write(tmp_path / "a.arrow", pa.array(TEXTS), stream=stream)))
    options = SourceOptions(unit_bytes=1000)
    units = list(plan_units(file, options))
    source = open_source(file, options)
    texts = [
        text for u in reversed(units) for b in source.read(u) for text in reversed(b.texts.texts())
    ]
    assert sorted(texts) == sorted(TEXTS)
    first = next(source.read(units[1])).texts.texts()
    assert next(source.read(units[1])).texts.texts() == first
    source.close()


@pytest.mark.parametrize("codec", ["lz4", "zstd", "uncompressed"])
def test_feather_files_are_read(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.feather"
    pyarrow.feather.write_feather(pa.table({"text": TEXTS}), path, compression=codec)
    assert read(path, SourceOptions()).documents == TEXTS


@pytest.mark.parametrize("stream", [True, False])
def test_nulls_are_rejected_and_structs_are_entered(tmp_path: Path, stream: bool) -> None:
    column = pa.array([{"text": "a"}, None, {"text": None}], pa.struct([("text", pa.string())]))
    path = write(tmp_path / "a.arrow", column, stream=stream, name="data")
    got = read(path, SourceOptions(text_field="data.text"))
    assert (got.documents, got.rejects) == (["a"], [(1, "null-text"), (2, "null-text")])


@pytest.mark.parametrize("stream", [True, False])
def test_a_missing_column_is_refused_while_planning(tmp_path: Path, stream: bool) -> None:
    path = write(tmp_path / "a.arrow", pa.array(TEXTS), stream=stream, name="content")
    file = source_file(str(path))
    with pytest.raises(SourceError, match="its columns are: id, content"):
        list(plan_units(file, SourceOptions()))


@pytest.mark.parametrize("stream", [True, False])
def test_a_truncated_file_is_an_error(tmp_path: Path, stream: bool) -> None:
    path = write(tmp_path / "a.arrow", pa.array(TEXTS), stream=stream)
    whole = path.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"a\.arrow"):
            read(path, SourceOptions())


def test_a_table_without_rows_has_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.array([], pa.string()), stream=False)
    assert read(path, SourceOptions()).num_rows == 0
