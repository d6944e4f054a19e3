"""Remote files: read over a real web server, by ranges, with the same rows as local ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.sources.reading import compress, read
from tests.web import serve

from tokenmill.errors import SourceError
from tokenmill.sources.base import SourceOptions, open_source
from tokenmill.sources.discovery import discover

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [f"document {i}" for i in range(2000)]
LINES = b"".join(b'{"text": "%s"}\n' % text.encode() for text in TEXTS)


def write_all(folder: Path) -> list[str]:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(compress(LINES, "gz") * 2)
    pq.write_table(pa.table({"text": TEXTS}), folder / "c.parquet", row_group_size=100)
    with pa.ipc.new_stream(folder / "d.arrow", pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": TEXTS}), max_chunksize=100)
    (folder / "e.txt").write_bytes(b"one document")
    (folder / "f.csv").write_bytes(b"text\n" + "\n".join(TEXTS).encode())
    return ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.arrow", "e.txt", "f.csv"]


@pytest.mark.parametrize("number", range(6))
def test_every_format_reads_the_same_rows_over_http(tmp_path: Path, number: int) -> None:
    name = write_all(tmp_path)[number]
    options = SourceOptions(unit_bytes=5000, batch_bytes=3000)
    (local,) = discover([tmp_path / name], options).files
    expected = read(local, options)
    assert expected.num_rows in (1, 2000, 4000)
    with serve(tmp_path) as server:
        (file,) = discover([f"{server.address}/{name}"], options).files
        got = read(file, options)
    assert got.texts == expected.texts
    assert any("bytes=" in line for line in server.log)
    assert file.size == local.size


def test_a_remote_file_that_changes_is_noticed_by_its_etag(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with serve(tmp_path) as server:
        (file,) = discover([f"{server.address}/a.jsonl"], SourceOptions()).files
        (tmp_path / "a.jsonl").write_bytes(LINES.replace(b"document", b"DOCUMENT"))
        with pytest.raises(SourceError, match="changed while"):
            open_source(file, SourceOptions())


def test_a_missing_remote_file_is_named(tmp_path: Path) -> None:
    with serve(tmp_path) as server, pytest.raises(SourceError, match=r"none\.jsonl"):
        discover([f"{server.address}/none.jsonl"], SourceOptions())


def test_a_server_that_is_gone_is_an_error_with_the_address(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with serve(tmp_path) as server:
        (file,) = discover([f"{server.address}/a.jsonl"], SourceOptions()).files
    with pytest.raises(SourceError, match=r"a\.jsonl"):
        read(file, SourceOptions())


def test_a_file_url_is_the_local_file(tmp_path: Path) -> None:
    path = tmp_path / "with space.jsonl"
    path.write_bytes(LINES)
    (file,) = discover([path.as_uri()], SourceOptions()).files
    assert file.path == path.as_posix()
    assert read(file, SourceOptions()).documents == TEXTS


def test_other_filesystems_are_listed_and_searched(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("data/a.jsonl", "data/sub/b.jsonl", "data/.hidden.jsonl", "data/c.png"):
        memory.pipe(f"/sources-test/{name}", LINES if name.endswith("jsonl") else b"\0")
    root = "memory://sources-test"
    found = discover([f"{root}/data"], SourceOptions())
    assert [f.path for f in found.files] == [
        "memory:///sources-test/data/a.jsonl",
        "memory:///sources-test/data/sub/b.jsonl",
    ]
    assert [skip.reason for skip in found.skipped] == ["binary content"]
    starred = discover([f"{root}/data/**/*.jsonl"], SourceOptions())
    assert [f.path.rpartition("/")[2] for f in starred.files][-1:] == ["b.jsonl"]
    assert read(found.files[1], SourceOptions()).documents == TEXTS
    with pytest.raises(SourceError, match="matches no file"):
        discover([f"{root}/nothing"], SourceOptions())
