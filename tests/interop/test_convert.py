"""From any format to any other, without a store in between where ids can be mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.interop.stores import BOOKS, EOS, flat, ids_of, random_shards, tree, write_store

import tokenmill
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

BORDERED = ("megatron", "datatrove", "olmo")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    write_store(root / "store", random_shards(2, documents=25))
    for to in (*BORDERED, "nanogpt", "llmc"):
        tokenmill.export_store(root / "store", to=to, out=root / to, workers=1)
    return root


@pytest.mark.parametrize("to", BORDERED)
@pytest.mark.parametrize("source", BORDERED)
def test_documents_survive(exports: Path, tmp_path: Path, source: str, to: str) -> None:
    tokenmill.convert(exports / source, to=to, out=tmp_path / "out", workers=1)
    found = tokenmill.Store.open_foreign(tmp_path / "out")
    assert ids_of(found) == flat(random_shards(2, documents=25))
    again = tokenmill.convert(exports / source, to=to, out=tmp_path / "out", workers=1)
    assert again.nothing_to_do


def test_the_same_bytes_as_from_the_store(exports: Path, tmp_path: Path) -> None:
    for source in BORDERED:
        tokenmill.convert(exports / source, to="olmo", out=tmp_path / source, workers=2)
        assert tree(tmp_path / source) == tree(exports / "olmo")


def test_ids_can_be_linked_from_one_format_to_another(exports: Path, tmp_path: Path) -> None:
    result = tokenmill.convert(exports / "olmo", to="megatron", out=tmp_path / "out", link=True)
    assert result.linked_bytes == result.tokens * 2
    assert (tmp_path / "out" / "train_00000_text_document.bin").samefile(
        exports / "olmo" / "train" / "part-00000.npy"
    )
    # Behind a header they are not a file of their own.
    with pytest.raises(UsageError, match="not in a local file of their own"):
        tokenmill.convert(exports / "llmc", to="megatron", out=tmp_path / "no", link=True)


def test_from_llmc_back_to_documents(exports: Path, tmp_path: Path) -> None:
    tokenmill.convert(
        exports / "llmc",
        to="datatrove",
        out=tmp_path / "out",
        tokenizer="bytes",
        split_at_eos=True,
    )
    found = ids_of(tokenmill.Store.open_foreign(tmp_path / "out"))
    assert found == [[EOS, *document[:-1]] for document in flat(random_shards(2, documents=25))]


def test_documents_go_on_from_file_to_file(exports: Path, tmp_path: Path) -> None:
    tokenmill.export_store(
        exports / "store", to="llmc", out=tmp_path / "small", file_tokens=97, workers=1
    )
    assert len([*(tmp_path / "small").glob("*.bin")]) > 9
    tokenmill.convert(
        tmp_path / "small",
        to="megatron",
        out=tmp_path / "out",
        tokenizer="bytes",
        split_at_eos=True,
        merge=True,
    )
    found = ids_of(tokenmill.Store.open_foreign(tmp_path / "out"))
    assert found == [[EOS, *document[:-1]] for document in flat(random_shards(2, documents=25))]


@pytest.mark.parametrize("through", ["mds", "litdata", "arrow", "parquet"])
def test_through_a_format_that_cannot_be_mapped(
    exports: Path, tmp_path: Path, through: str
) -> None:
    tokenmill.convert(exports / "megatron", to=through, out=tmp_path / "between", workers=1)
    options: dict[str, Any] = {"format": through, "dtype": "uint16", "workers": 1}
    result = tokenmill.convert(tmp_path / "between", to="olmo", out=tmp_path / "out", **options)
    assert ids_of(tokenmill.Store.open_foreign(tmp_path / "out")) == flat(
        random_shards(2, documents=25)
    )
    assert not [*(tmp_path / "out").rglob("tokenmill.json")]
    assert not result.nothing_to_do
    again = tokenmill.convert(tmp_path / "between", to="olmo", out=tmp_path / "out", **options)
    assert again.nothing_to_do


def test_a_store_that_another_conversion_left_is_removed(exports: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokenmill.export_store(exports / "store", to="arrow", out=tmp_path / "arrow", workers=1)
    tokenmill.import_store(
        exports / "megatron", tokenizer="bytes", out=out / BOOKS / "convert" / "store"
    )
    tokenmill.convert(tmp_path / "arrow", to="olmo", out=out, dtype="uint16", workers=1)
    assert ids_of(tokenmill.Store.open_foreign(out)) == flat(random_shards(2, documents=25))
    assert not [*out.rglob("tokenmill.json")]
