"""A build from a web server, with workers: the same documents as from the disk."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest
from tests.builder.stores import byte_ids, documents, make_texts, write_jsonl
from tests.web import serve

import tokenmill
from tokenmill.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_build_over_http_reads_what_lies_on_the_server_and_resumes(
    name: str, tmp_path: Path
) -> None:
    texts = make_texts(400)
    web = tmp_path / "web"
    web.mkdir()
    data = write_jsonl(tmp_path / "raw", texts).read_bytes()
    (web / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    out = tmp_path / "store"
    with serve(web) as server:
        url = f"{server.address}/{name}"
        first = tokenmill.build(
            url, tokenizer="bytes", out=out, workers=2, memory="2GB", unit_bytes=10_000
        )
        assert documents(out) == byte_ids(texts)
        assert first.units_built > 5
        assert server.log
        again = tokenmill.build(
            url, tokenizer="bytes", out=out, workers=2, memory="2GB", unit_bytes=10_000
        )
        assert again.nothing_to_do
        with tokenmill.Store(out) as store:
            assert store.source(7).path == url


def test_keys_in_the_address_of_an_input_get_nowhere(tmp_path: Path) -> None:
    web, out = tmp_path / "web", tmp_path / "store"
    web.mkdir()
    write_jsonl(web / "a.jsonl", [*make_texts(300), b"{bad"])
    options: dict[str, Any] = {"tokenizer": "bytes", "out": out, "memory": "1GB"}
    with serve(web) as server:
        url = f"{server.address}/a.jsonl"
        built = tokenmill.build(f"{url}?X-Amz-Signature=hunter3", **options, workers=1)
        assert server.log
        assert tokenmill.build(f"{url}?X-Amz-Signature=hunter4", **options).nothing_to_do
        with pytest.raises(SourceError, match="after its '\\?'") as caught:
            tokenmill.build([f"{url}?a=hunter5", f"{url}?b=hunter6"], **options)
    assert documents(out) == byte_ids(make_texts(300))
    with tokenmill.Store(out) as store:
        assert store.source(7).path == f"{server.address}/a.jsonl"
    for path in out.rglob("*"):
        assert path.is_dir() or b"hunter" not in path.read_bytes(), path
    assert "hunter" not in f"{built}{caught.value}"


def test_a_server_that_goes_away_is_an_error_with_the_address(tmp_path: Path) -> None:
    web = tmp_path / "web"
    web.mkdir()
    write_jsonl(web / "a.jsonl", make_texts(10))
    with serve(web) as server:
        url = f"{server.address}/a.jsonl"
    with pytest.raises(SourceError, match=r"a\.jsonl"):
        tokenmill.build(url, tokenizer="bytes", out=tmp_path / "store", memory="1GB", serial=True)
