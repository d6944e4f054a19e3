"""Foreign files, read where they lie: the loader gives the same batches as over the store."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.stores import EOS, NARROW, WIDE, bytes_store, ids_of, random_shards, write_store

import tokenmill
from tokenmill.errors import StateError, StoreError, UsageError
from tokenmill.store import stream as stream_module
from tokenmill.store.stream import MappedTokens, TokenStream

if TYPE_CHECKING:
    from pathlib import Path

BORDERED = ("megatron", "datatrove", "olmo")


def files_of(tmp_path: Path, to: str, *, vocab_size: int = NARROW, **options: Any) -> Path:
    write_store(tmp_path / "store", random_shards(3, documents=30), vocab_size=vocab_size)
    tokenmill.export_store(tmp_path / "store", to=to, out=tmp_path / to, workers=1, **options)
    return tmp_path / to


def batches(source: Any, **options: Any) -> list[tuple[Any, ...]]:
    loader = tokenmill.Loader(source, seq_len=32, batch_size=4, epochs=2, pad_id=0, **options)
    return [
        (batch.input_ids.tolist(), batch.labels.tolist(), batch.doc_ids.tolist())
        for batch in loader
    ]


@pytest.mark.parametrize("to", BORDERED)
@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_the_loader_gives_the_same_batches(
    tmp_path: Path, to: str, vocab_size: int, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    path = files_of(tmp_path, to, vocab_size=vocab_size)
    before = sorted(path.rglob("*"))
    dtype = "uint32" if (to, vocab_size) == ("olmo", WIDE) else None
    foreign = tokenmill.Store.open_foreign(path, dtype=dtype)
    assert batches(foreign, packing=packing) == batches(tmp_path / "store", packing=packing)
    assert sorted(path.rglob("*")) == before, "something was written beside foreign files"


def test_merged_and_single_prefixes_give_the_same_rows(tmp_path: Path) -> None:
    write_store(tmp_path / "store", random_shards(3, documents=30))
    tokenmill.export_store(tmp_path / "store", to="megatron", out=tmp_path / "out", merge=True)
    foreign = tokenmill.Store.open_foreign(tmp_path / "out" / "train_text_document")
    assert batches(foreign) == batches(tmp_path / "store")


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
def test_tokens_behind_a_header_are_mapped(
    tmp_path: Path, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm.c's header is a quarter of a page; the first token is not where a map can begin."""
    path = files_of(tmp_path, "llmc", vocab_size=vocab_size, file_tokens=800)
    stream = np.concatenate([*tokenmill.Store(tmp_path / "store")])
    shifted = np.concatenate([stream[-1:], stream[:-1]])
    foreign = tokenmill.Store.open_foreign(path)
    assert np.array_equal(np.concatenate(ids_of(foreign)), shifted)
    starts = np.array([0, 700, 795, 1500, len(stream) - 40])
    lengths = np.full(5, 30)
    expected = np.concatenate([shifted[start : start + 30] for start in starts])
    mapped = TokenStream(foreign)
    assert np.array_equal(mapped.read(starts, lengths, pad=0), expected)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no range of addresses")

    monkeypatch.setattr(stream_module, "ReservedTokens", refuse)
    other = TokenStream(foreign)
    assert isinstance(other._source, MappedTokens)
    assert np.array_equal(other.read(starts, lengths, pad=0), expected)


def test_documents_without_borders_are_cut_at_eos_if_asked(tmp_path: Path) -> None:
    store = bytes_store(tmp_path / "in", [f"document {number}" for number in range(40)])
    tokenmill.export_store(store, to="nanogpt", out=tmp_path / "nanogpt")
    tokenmill.export_store(store, to="llmc", out=tmp_path / "llmc")
    expected = ids_of(tokenmill.Store(store))
    whole = tokenmill.Store.open_foreign(tmp_path / "nanogpt")
    assert len(whole) == 1
    cut = tokenmill.Store.open_foreign(tmp_path / "nanogpt", tokenizer="bytes", split_at_eos=True)
    assert ids_of(cut) == expected
    assert cut.decode(7) == "document 7"
    front = tokenmill.Store.open_foreign(tmp_path / "llmc", tokenizer="bytes", split_at_eos=True)
    assert ids_of(front) == [[EOS, *document[:-1]] for document in expected]
    assert front.decode(7) == "document 7"
    assert (front.bos_id, front.eos_id) == (EOS, None)
    with pytest.raises(UsageError, match="no tokenizer names one"):
        tokenmill.Store.open_foreign(tmp_path / "nanogpt", split_at_eos=True)


def test_a_state_is_of_these_files_alone(tmp_path: Path) -> None:
    path = files_of(tmp_path, "datatrove")
    loader = tokenmill.Loader(tokenmill.Store.open_foreign(path), seq_len=16, batch_size=2)
    first = [batch.input_ids.tolist() for batch, _ in zip(loader, range(9), strict=False)]
    loader = tokenmill.Loader(tokenmill.Store.open_foreign(path), seq_len=16, batch_size=2)
    for _ in zip(range(4), loader, strict=False):
        pass
    state = loader.state_dict()
    again = tokenmill.Loader(tokenmill.Store.open_foreign(path), seq_len=16, batch_size=2)
    again.load_state_dict(state)
    assert next(iter(again)).input_ids.tolist() == first[4]
    token_file = path / "train" / "00001_unshuffled.ds"
    data = bytearray(token_file.read_bytes())
    data[0] ^= 1
    token_file.unlink()
    token_file.write_bytes(data)
    other = tokenmill.Loader(tokenmill.Store.open_foreign(path), seq_len=16, batch_size=2)
    with pytest.raises(StateError):
        other.load_state_dict(state)


def test_splits_come_from_names(tmp_path: Path) -> None:
    store = bytes_store(tmp_path / "in", [f"document {n}" for n in range(60)], val=0.3)
    for to in ("megatron", "datatrove", "olmo", "nanogpt", "llmc"):
        tokenmill.export_store(store, to=to, out=tmp_path / to)
        for split in ("train", "val"):
            foreign = tokenmill.Store.open_foreign(tmp_path / to, split=split)
            assert foreign.num_tokens == tokenmill.Store(store, split=split).num_tokens
        everything = tokenmill.Store.open_foreign(tmp_path / to, split=None)
        assert everything.num_tokens == tokenmill.Store(store, split=None).num_tokens


def test_an_open_one_can_be_sent_to_another_process(tmp_path: Path) -> None:
    foreign = tokenmill.Store.open_foreign(files_of(tmp_path, "olmo"))
    again = pickle.loads(pickle.dumps(foreign))
    assert again.content == foreign.content
    assert ids_of(again) == ids_of(foreign)


def test_what_nobody_knows_is_said_so(tmp_path: Path) -> None:
    foreign = tokenmill.Store.open_foreign(files_of(tmp_path, "megatron"))
    with pytest.raises(StoreError, match="does not say where its documents come from"):
        foreign.source(0)
    with pytest.raises(UsageError, match="opened without a tokenizer"):
        foreign.decode(0)
    with pytest.raises(StoreError, match="is not a store"):
        _ = foreign.layout
    assert list(foreign.rejects()) == []


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = files_of(tmp_path, "olmo")
    foreign = tokenmill.Store.open_foreign(path)
    victim = path / "train" / "part-00000.npy"
    data = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(data[:-2])
    with pytest.raises(StoreError, match="instead of"):
        batches(foreign)


def test_the_only_split_of_some_files_is_not_taken_for_another(tmp_path: Path) -> None:
    path = tmp_path / "val.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    with pytest.raises(StoreError, match="has no split 'train'") as caught:
        tokenmill.Store.open_foreign(path, format="nanogpt")
    assert "'val'" in str(caught.value.hint)
    assert tokenmill.Store.open_foreign(path, format="nanogpt", split="val").num_tokens == 100
