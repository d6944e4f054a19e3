"""LitData chunks, against LitData's own reader and writer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.interop.kept_peers import ask
from tests.interop.rows import (
    LENGTHS,
    back,
    concatenated,
    documents,
    documents_of,
    import_bytes,
    small_store,
    stream,
)

from tokenmill.errors import SourceError, UsageError
from tokenmill.interop.export import export_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("ids", "kind"), [("int32", "torch.int32"), ("uint16", "uint16")])
def test_litdata_reads_rows_as_blocks(tmp_path: Path, ids: str, kind: str) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to="litdata", out=tmp_path / "ours", seq_len=64, ids=ids)

    found = ask("litdata", "read", tmp_path / "ours", 65)
    rows = concatenated(store, 65, overlap=1)
    lacking = len(rows) * 64 + 1 - store.num_tokens
    # The last row is not filled up, so that no padding is trained on.
    assert lacking > 0
    assert found == {"blocks": rows[:-1], "types": [kind]}
    wanted = [*rows[:-1], rows[-1][:-lacking]]
    assert back(tmp_path / "ours", tmp_path / "back") == wanted


def test_litdata_reads_documents_as_one_stream(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to="litdata", out=tmp_path / "ours")

    found = ask("litdata", "read", tmp_path / "ours", 100)["blocks"]
    tokens = stream(store)
    assert [token for block in found for token in block] == tokens[: len(tokens) // 100 * 100]


@pytest.mark.parametrize("kind", ["int32", "uint16"])
def test_litdata_writes_the_same_bytes(tmp_path: Path, kind: str) -> None:
    store = small_store(tmp_path / "store", [[5, 1, 300, 7], [700, 2], [40, 40, 40, 1]])
    size = 1_000
    export_store(store.path, to="litdata", out=tmp_path / "ours", chunk_bytes=size, ids=kind)
    options = {"chunk_bytes": size}
    ask("litdata", "write", tmp_path / "theirs", documents(store), kind, options)

    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    chunks = sorted(path.name for path in theirs.glob("*.bin"))
    assert len(chunks) > 1
    assert chunks == sorted(path.name for path in ours.glob("*.bin"))
    for name in chunks:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    facts = [json.loads((folder / "index.json").read_text()) for folder in (ours, theirs)]
    version, time = (index.pop("updated_at") for index in facts)
    assert type(version) is type(time)
    assert facts[0] == facts[1]

    def exported(name: str, last: int) -> Any:
        other = small_store(tmp_path / f"{name} store", [[5, 1, 300, 7], [700, 2], [last]])
        export_store(other.path, to="litdata", out=tmp_path / name, ids=kind)
        return json.loads((tmp_path / name / "index.json").read_text())["updated_at"]

    assert exported("a", 40) == exported("b", 40) != exported("c", 41), "caches are named by it"
    assert float(version) != float(exported("d", 40))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("int32", {"chunk_bytes": 5_000}),
        ("int64", {"chunk_size": 400}),
        ("uint16", {"chunk_bytes": 5_000}),
        ("int32", {"chunk_bytes": 5_000, "compression": "zstd", "compression_level": "chunk"}),
    ],
)
def test_what_litdata_writes_is_read(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    made = documents_of([3, 300, 1, 70, 2000, 5])
    ask("litdata", "write", tmp_path / "theirs", made, kind, options)

    assert back(tmp_path / "theirs", tmp_path / "store") == made


def test_chunks_that_are_not_tokens_are_refused(tmp_path: Path) -> None:
    ask("litdata", "write_other", tmp_path / "theirs")

    with pytest.raises(SourceError, match="not tokens"):
        import_bytes(tmp_path / "theirs", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (0, 9, "says that it has 9 items"),
        (4, 1, "offsets that do not run"),
        (8, 200, "offsets that do not run|not whole ids"),
    ],
)
def test_a_damaged_header_is_an_error(tmp_path: Path, place: int, value: int, match: str) -> None:
    store = small_store(tmp_path / "store", [[5, 7]])
    export_store(store.path, to="litdata", out=tmp_path / "ours")
    chunk = tmp_path / "ours" / "chunk-0-0.bin"
    data = bytearray(chunk.read_bytes())
    data[place] = value
    chunk.write_bytes(data)

    with pytest.raises(SourceError, match=match):
        import_bytes(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_truncated_chunk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to="litdata", out=tmp_path / "ours")
    chunk = tmp_path / "ours" / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes()[:-4])

    with pytest.raises(SourceError, match=r"chunk-0-0\.bin.* bytes, and its index says"):
        import_bytes(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_chunks_stay_below_four_gigabytes(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[3]])

    with pytest.raises(UsageError, match="32 bits"):
        export_store(store.path, to="litdata", out=tmp_path / "out", chunk_bytes=1 << 32)
