"""Files of tensors and of numpy arrays, against torch and numpy themselves."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.interop.rows import (
    LENGTHS,
    back,
    concatenated,
    documents,
    documents_of,
    import_bytes,
    small_store,
)
from tests.store.samples import EOS

import tokenmill
from tokenmill.errors import MissingExtraError, SourceError, UsageError
from tokenmill.interop import base, tensors
from tokenmill.interop.export import export_store
from tokenmill.loader.loader import Loader

if TYPE_CHECKING:
    from pathlib import Path


class Attack:
    """What a pickle may hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(("ids", "kind"), [("int32", torch.int32), ("uint16", torch.uint16)])
def test_torch_loads_rows_without_running_anything(
    tmp_path: Path, ids: str, kind: torch.dtype
) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    out = tmp_path / "ours"
    export_store(store.path, to="pt", out=out, seq_len=64, file_tokens=6_400, ids=ids)

    facts = json.loads((out / "metadata.json").read_text())
    chunks = [torch.load(out / each["file"], weights_only=True) for each in facts["chunks"]]
    assert [each["file"] for each in facts["chunks"]][:2] == ["chunk_000000.pt", "chunk_000001.pt"]
    assert {chunk["input_ids"].dtype for chunk in chunks} == {kind}
    assert [each["rows"] for each in facts["chunks"]] == [len(c["input_ids"]) for c in chunks]
    rows = concatenated(store, 64)
    assert [row for chunk in chunks for row in chunk["input_ids"].tolist()] == rows
    assert (facts["rows"], facts["seq_len"]) == (len(rows), 64)
    lacking = len(rows) * 64 - store.num_tokens
    assert facts["padding"] == lacking > 0
    assert facts["columns"] == ["input_ids", "attention_mask"]
    assert sum(int(chunk["attention_mask"].sum()) for chunk in chunks) == store.num_tokens
    tokenizer = store.manifest.identity.tokenizer
    assert facts["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    assert facts["tokenizer"]["kind"] == "bytes"


def test_ids_are_not_imported_under_another_tokenizer(
    tmp_path: Path, bpe_tokenizer_dir: Path
) -> None:
    store = small_store(tmp_path / "store", [[5, 70, 3]])
    export_store(store.path, to="pt", out=tmp_path / "ours", seq_len=16)
    with pytest.raises(UsageError, match="they would be another text"):
        tokenmill.import_(tmp_path / "ours", tokenizer=bpe_tokenizer_dir, out=tmp_path / "back")
    assert not (tmp_path / "back").exists()
    (tmp_path / "ours/metadata.json").write_text("{}")
    tokenmill.import_(tmp_path / "ours", tokenizer=bpe_tokenizer_dir, out=tmp_path / "back")


def test_labels_and_masks_stand_beside_rows(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store", [[5, 70, 3]])
    out, columns = tmp_path / "ours", "labels,attention_mask"
    export_store(store.path, to="pt", out=out, seq_len=64, packing="pad", columns=columns)

    chunk = torch.load(out / "chunk_000000.pt", weights_only=True, mmap=True)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in chunk.values())
    assert chunk["attention_mask"].sum(dim=1).tolist() == [5, 64, 3]
    real = chunk["attention_mask"].bool()
    assert (chunk["labels"][real] == chunk["input_ids"][real]).all()
    assert (chunk["labels"][~real] == -100).all()
    assert back(out, tmp_path / "back") == [document[:64] for document in documents(store)]


def test_rows_of_any_shape_are_read(tmp_path: Path) -> None:
    rows = torch.tensor(documents_of([8, 8, 8]))
    ragged = documents_of([3, 9])
    torch.save(rows, tmp_path / "bare.pt")
    torch.save({"ids": rows.to(torch.uint16)}, tmp_path / "named.pt")
    torch.save([torch.tensor(row) for row in ragged], tmp_path / "list.pt")

    assert back(tmp_path / "bare.pt", tmp_path / "1") == rows.tolist()
    assert back(tmp_path / "named.pt", tmp_path / "2") == rows.tolist()
    assert back(tmp_path / "list.pt", tmp_path / "3") == ragged


def test_what_would_execute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"input_ids": Attack()}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match="holds more than tensors"):
        import_bytes(tmp_path / "a.pt", tmp_path / "back")
    np.save(tmp_path / "a.npy", np.array([Attack()], object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", input_ids=np.array([Attack()], object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(SourceError, match="which is a pickle"):
            import_bytes(tmp_path / name, tmp_path / "back")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "back").exists()
    with pytest.raises(FileExistsError):  # the attack works where it is let
        pickle.loads(pickle.dumps(Attack()))
        pickle.loads(pickle.dumps(Attack()))


@pytest.mark.parametrize("value", [torch.tensor([[0.5]]), torch.zeros(2, 2, 2), "text", {"a": 1}])
def test_tensors_that_are_not_ids_are_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "a.pt")

    with pytest.raises(SourceError, match=r"a\.pt"):
        import_bytes(tmp_path / "a.pt", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("kind", ["npz", "npy"])
@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
def test_numpy_loads_what_the_loader_would_feed(tmp_path: Path, kind: str, packing: str) -> None:
    store = small_store(tmp_path / "store", [[5, 0, 1, 300, 7], [700, 2], [40, 40, 40, 1]])
    out = tmp_path / "ours"
    export_store(store.path, to="npz", out=out, seq_len=64, packing=packing, kind=kind)

    if kind == "npz":
        found = dict(np.load(out / "train.npz", allow_pickle=False))
    else:
        names = ("input", "target", "mask")
        found = {name: np.load(out / f"train_{name}.npy", mmap_mode="r") for name in names}
    loader = Loader(store, seq_len=64, batch_size=1, packing=packing, shuffle=False, epochs=1)
    batches = [*loader]
    assert len(batches) == len(found["input"]) > 1
    for row, batch in enumerate(batches):
        counts = batch.loss_mask[0]
        assert np.array_equal(found["input"][row], batch.input_ids[0])
        assert np.array_equal(found["mask"][row], counts)
        assert np.array_equal(found["target"][row][counts], batch.labels[0][counts])
    assert found["input"].dtype == np.int32


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_rows_of_numpy_come_back(tmp_path: Path, kind: str) -> None:
    store = small_store(tmp_path / "store", [[5, 300, 7], [70, 2], [40, 40, 25]])
    export_store(store.path, to="npz", out=tmp_path / "ours", seq_len=64, kind=kind)
    rows = concatenated(store, 65, overlap=1)
    lacking = (len(rows) * 64 + 1) - store.num_tokens
    assert lacking > 0

    wanted = [*rows[:-1], rows[-1][:-lacking]]
    assert back(tmp_path / "ours", tmp_path / "back") == wanted
    joined = back(tmp_path / "ours", tmp_path / "joined", split_at_eos=True)
    assert joined == documents(store)


def test_arrays_of_ids_are_read(tmp_path: Path) -> None:
    rows = documents_of([8, 8, 8])
    np.save(tmp_path / "rows.npy", np.array(rows, np.uint16))
    np.save(tmp_path / "stream.npy", np.array(rows, np.int64).reshape(-1))
    np.savez_compressed(tmp_path / "packed.npz", tokens=np.array(rows), other=np.array(["x"]))

    assert back(tmp_path / "rows.npy", tmp_path / "1") == rows
    assert back(tmp_path / "stream.npy", tmp_path / "2", split_at_eos=True) == rows
    assert back(tmp_path / "packed.npz", tmp_path / "3") == rows


@pytest.mark.parametrize("to", ["npz", "pt"])
@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_an_error_that_leaves_nothing(
    tmp_path: Path, to: str, kept: float
) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to=to, out=tmp_path / "ours", seq_len=64)
    name = {"npz": "train.npz", "pt": "chunk_000000.pt"}[to]
    path = tmp_path / "ours" / name
    data = path.read_bytes()
    path.write_bytes(data[: int(kept if kept > 1 else kept * len(data))])

    with pytest.raises(SourceError, match=name):
        import_bytes(tmp_path / "ours", tmp_path / "back", format=to)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_a_changed_byte_of_an_archive_is_found(tmp_path: Path, packed: bool) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to="npz", out=tmp_path / "ours", seq_len=64)
    path = tmp_path / "ours" / "train.npz"
    if packed:
        np.savez_compressed(path, **np.load(path))
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)

    with pytest.raises(SourceError, match=r"checksum|CRC|decompressing"):
        import_bytes(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_parts_of_arrays_are_read_side_by_side(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    for name, workers in (("one", 1), ("two", 3)):
        export_store(
            store.path, to="npz", out=tmp_path / name, seq_len=64, kind=kind, workers=workers
        )
    for path in sorted((tmp_path / "one").glob("*.np?")):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        assert kind == "npy" or zipfile.ZipFile(path).testzip() is None

    expected = back(tmp_path / "one", tmp_path / "back-one")
    monkeypatch.setattr(base, "IMPORT_PART_BYTES", 10_000)
    result = import_bytes(tmp_path / "two", tmp_path / "back-two", workers=3)
    assert result.parts > 5
    assert documents(tokenmill.Store(tmp_path / "back-two")) == expected


def test_headers_of_an_archive_say_sizes_and_checksums(tmp_path: Path) -> None:
    # Readers that go from header to header, as those in C++ do, need them there.
    store = small_store(tmp_path / "store", LENGTHS)
    export_store(store.path, to="npz", out=tmp_path / "out", seq_len=64)
    path = tmp_path / "out" / "train.npz"
    data = path.read_bytes()
    for info in zipfile.ZipFile(path).infolist():
        flags, checksum = struct.unpack_from("<6xH6xI", data, info.header_offset)
        assert not flags & 8
        assert checksum == info.CRC


@pytest.mark.parametrize("purpose", ["writing", "reading"])
def test_files_of_tensors_need_torch(
    tmp_path: Path, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_store(tmp_path / "store", [[5]])
    torch.save(torch.ones(1, 1, dtype=torch.int32), tmp_path / "a.pt")
    monkeypatch.setattr(tensors, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=f"{purpose} .pt files"):
        if purpose == "writing":
            export_store(store.path, to="pt", out=tmp_path / "out", seq_len=64)
        else:
            import_bytes(tmp_path / "a.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_targets_that_are_other_texts_are_refused(tmp_path: Path) -> None:
    rows = np.arange(40).reshape(4, 10)
    inputs, targets = rows[:, :-1], rows[:, 1:] * 2
    everything = np.ones((4, 9), np.bool_)
    np.savez(tmp_path / "a.npz", input=inputs, target=targets, mask=everything)
    with pytest.raises(SourceError, match="not its 'input' shifted by one"):
        import_bytes(tmp_path / "a.npz", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    alone = back(tmp_path / "a.npz", tmp_path / "back", column="input")
    assert alone == rows[:, :-1].tolist()
    # Targets that do not count may be anything.
    np.savez(tmp_path / "b.npz", input=inputs, target=targets, mask=~everything)
    assert len(back(tmp_path / "b.npz", tmp_path / "back-b")) == 4


@pytest.mark.parametrize("to", ["npz", "pt"])
def test_the_same_rows_make_the_same_archive(tmp_path: Path, to: str) -> None:
    store = small_store(tmp_path / "store", LENGTHS)
    for name in ("one", "two"):
        export_store(store.path, to=to, out=tmp_path / name, seq_len=64)

    file = {"npz": "train.npz", "pt": "chunk_000000.pt"}[to]
    one, two = (tmp_path / name / file for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert zipfile.ZipFile(one).testzip() is None


@pytest.mark.parametrize("to", ["npz", "pt"])
def test_formats_of_rows_ask_for_their_length(tmp_path: Path, to: str) -> None:
    store = small_store(tmp_path / "store", [[3]])

    with pytest.raises(UsageError, match="seq_len="):
        export_store(store.path, to=to, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from tests.loader.stores import write_store

    store = write_store(tmp_path / "store", [[[70_000, EOS]]], vocab_size=100_000)
    with pytest.raises(UsageError, match="do not fit uint16"):
        export_store(store.path, to="npz", out=tmp_path / "out", seq_len=8, ids="uint16")
    assert not (tmp_path / "out").exists()
