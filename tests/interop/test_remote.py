"""Stores behind a URL are exported as local ones are; other projects' files stay local."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.interop.stores import tree
from tests.store.s3_server import BUCKET, s3_session, upload

import tokenmill
from tokenmill.errors import StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS = ("megatron", "datatrove", "olmo", "nanogpt", "llmc", "mds", "litdata", "arrow", "parquet")
ROW_FORMATS = ("pt", "npz")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A store with masks and two splits, in a folder and in a bucket."""
    root = tmp_path_factory.mktemp("remote")
    rows = [{"prompt": f"say {i}", "completion": "yes " * (i % 30 + 1)} for i in range(200)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"tokenizer": "bytes", "format": "prompt-completion", "val": 0.2}
    options |= {"serial": True, "unit_bytes": 3000}
    tokenmill.build(root / "rows.jsonl", out=root / "store", **options)
    with s3_session():
        yield root / "store", upload(root / "store", prefix="store")


@pytest.mark.parametrize("to", [*FORMATS, *ROW_FORMATS])
def test_a_store_in_a_bucket_is_exported_as_a_local_one(
    place: tuple[Path, str], tmp_path: Path, to: str
) -> None:
    found = {}
    for number, store in enumerate(map(str, place)):
        out = tmp_path / f"{number}"
        seq_len = 32 if to in ROW_FORMATS else None
        result = tokenmill.export_store(store, to=to, out=out, seq_len=seq_len)
        assert result.documents > 0
        found[number] = tree(out)
        for name in ("data-args.txt", "data-args.json"):  # they name the folder
            found[number].pop(name, None)
    assert found[0] == found[1] != {}


def test_links_to_a_bucket_and_a_store_that_is_not_there_are_refused(
    place: tuple[Path, str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="not in a local file"):
        tokenmill.export_store(place[1], to="megatron", out=tmp_path / "linked", link=True)
    with pytest.raises(StoreError, match="there is no store at"):
        tokenmill.export_store(f"s3://{BUCKET}/none", to="megatron", out=tmp_path / "none")


def test_an_address_is_no_folder_for_other_projects_files(
    place: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"s3://{BUCKET}/elsewhere"
    tokenmill.export_store(place[0], to="megatron", out="megatron", split="train")
    before = {*Path().iterdir()}
    for call in (
        lambda: tokenmill.export_store(place[0], to="megatron", out=url),
        lambda: tokenmill.import_store("megatron", out=url, tokenizer="bytes"),
        lambda: tokenmill.import_store(url, out="imported", tokenizer="bytes"),
        lambda: tokenmill.convert("megatron", to="olmo", out=url),
        lambda: tokenmill.convert(url, to="olmo", out="converted"),
        lambda: tokenmill.Store.open_foreign(url),
    ):
        with pytest.raises(UsageError, match="'s3://bucket/elsewhere' is an address"):
            call()
    assert {*Path().iterdir()} == before
