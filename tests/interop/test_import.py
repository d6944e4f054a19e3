"""An import checks what files say, finds where the end-of-text stands, and leaves no half of it."""

from __future__ import annotations

import gzip
import pickle
import shutil
import signal
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop.stores import (
    EOS,
    bytes_store,
    end_in_the_middle,
    flat,
    ids_of,
    import_ids,
    random_shards,
    write_store,
)

import tokenmill
from tokenmill.errors import SourceError, StoreError, UsageError
from tokenmill.interop import base
from tokenmill.interop.base import (
    ImportOptions,
    Sure,
    candidates,
    detect_format,
    get_format,
    split_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RAW = ("megatron", "datatrove", "olmo", "nanogpt", "llmc")
TEXTS = [f"text number {number} \u6c34" for number in range(50)]


def export(tmp_path: Path, to: str, **options: Any) -> Path:
    """Files of a format, of two shards."""
    write_store(tmp_path / "store", random_shards(2, documents=20))
    tokenmill.export_store(tmp_path / "store", to=to, out=tmp_path / to, workers=1, **options)
    return tmp_path / to


@pytest.mark.parametrize("to", RAW)
def test_the_bytes_say_which_format_it_is(tmp_path: Path, to: str) -> None:
    path = export(tmp_path, to)
    assert detect_format(path).about.name == to
    found = candidates(path)
    certain = [name for name, each in found.items() if each.sure is Sure.CERTAIN]
    assert certain == ([] if to == "nanogpt" else [to])


def test_a_prefix_a_file_and_a_folder_name_the_same(tmp_path: Path) -> None:
    folder = export(tmp_path, "megatron")
    prefix = folder / "train_00000_text_document"
    for path in (prefix, prefix.with_suffix(".bin"), prefix.with_suffix(".idx")):
        assert detect_format(path).about.name == "megatron"
        assert len(tokenmill.Store.open_foreign(path)) == 20
    assert len(tokenmill.Store.open_foreign(folder)) == 40


def test_raw_ids_of_unknown_kind_are_asked_about(tmp_path: Path) -> None:
    (tmp_path / "tokens.dat").write_bytes(b"\1\0" * 9)
    with pytest.raises(UsageError, match="does not look like any format"):
        detect_format(tmp_path / "tokens.dat")
    with pytest.raises(SourceError, match="there is nothing at"):
        detect_format(tmp_path / "no" / "such")
    result = import_ids(tmp_path / "tokens.dat", tmp_path / "out", format_name="nanogpt")
    assert (result.documents, result.tokens, result.has_boundaries) == (1, 9, False)
    assert any("one document" in note for note in result.notes)


def test_an_imported_store_is_a_store(tmp_path: Path) -> None:
    store = bytes_store(tmp_path / "in", TEXTS, val=0.2)
    tokenmill.export_store(store, to="datatrove", out=tmp_path / "ds")
    result = tokenmill.import_store(tmp_path / "ds", tokenizer="bytes", out=tmp_path / "back")
    assert result.eos == "appended"
    assert result.format == "datatrove"
    for split in ("train", "val"):
        before = tokenmill.Store(store, split=split)
        after = tokenmill.Store(tmp_path / "back", split=split)
        assert ids_of(after) == ids_of(before)
        assert after.decode(3) == before.decode(3)
        assert after.eos_id == EOS
        assert after.source(3).line is None
    report = tokenmill.verify(tmp_path / "back")
    assert report.ok
    assert any("was imported from datatrove" in note.problem for note in report.notes)
    again = tokenmill.import_store(tmp_path / "ds", tokenizer="bytes", out=tmp_path / "back")
    assert again.nothing_to_do


def test_an_import_resumes_and_sees_changed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "IMPORT_PART_BYTES", 400)
    path = export(tmp_path, "megatron")
    first = import_ids(path, tmp_path / "back", format_name=None)
    assert first.parts > 4
    expected = ids_of(tokenmill.Store(tmp_path / "back"))
    assert expected == flat(random_shards(2, documents=20))
    victim = sorted((tmp_path / "back" / "shards").glob("*.json"))[1]
    victim.unlink()
    (tmp_path / "back" / "tokenmill.json").unlink()
    second = import_ids(path, tmp_path / "back", format_name=None)
    assert second.parts_resumed == first.parts - 1
    assert second.eos == "appended"
    assert ids_of(tokenmill.Store(tmp_path / "back")) == expected
    token_file = path / "train_00001_text_document.bin"
    data = np.fromfile(token_file, "<u2")
    data[0] = 7
    data.tofile(token_file)
    third = import_ids(path, tmp_path / "back", format_name=None)
    assert 0 < third.parts_resumed < third.parts
    assert ids_of(tokenmill.Store(tmp_path / "back"))[20][0] == 7


def test_workers_change_no_byte_of_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export(tmp_path, "datatrove")
    for workers in (1, 2):
        import_ids(path, tmp_path / str(workers), format_name=None, workers=workers)
    one, two = (tokenmill.Store(tmp_path / str(workers)) for workers in (1, 2))
    assert one.manifest.to_bytes() == two.manifest.to_bytes()


def test_another_store_is_not_written_over(tmp_path: Path) -> None:
    path = export(tmp_path, "olmo")
    import_ids(path, tmp_path / "back", format_name=None)
    before = tokenmill.Store(tmp_path / "back").content
    with pytest.raises(StoreError, match="holds another store"):
        import_ids(path, tmp_path / "back", format_name=None, vocab_size=50_000)
    with pytest.raises(StoreError, match="holds another store"):
        import_ids(path / "train" / "part-00000.npy", tmp_path / "back", format_name=None)
    assert tokenmill.Store(tmp_path / "back").content == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    with pytest.raises(StoreError, match="other things"):
        import_ids(path, tmp_path / "mine", format_name=None)


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [[[1, 2], [3, 500, 4]]])
    tokenmill.export_store(tmp_path / "store", to="megatron", out=tmp_path / "out")
    with pytest.raises(SourceError, match=r"document 1 .* has the id 500, .* 257 ids"):
        tokenmill.import_store(tmp_path / "out", tokenizer="bytes", out=tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(SourceError, match="ids from 1 to 500"):
        tokenmill.Store.open_foreign(tmp_path / "out", tokenizer="bytes")


@pytest.mark.parametrize(
    ("documents", "place"),
    [
        ([[1, 2, EOS], [EOS]], "appended"),
        ([[EOS, 1, 2], [EOS, 4]], "prepended"),
        ([[1, 2, EOS], [3]], "mixed"),
        ([[EOS, 1, 2], [3]], "mixed"),
        ([[1, 2], [3]], "none"),
        ([[1, EOS, 2], [3]], "none"),
        ([[1, EOS], [], [2, EOS]], "appended"),
    ],
)
def test_where_the_end_of_text_stands_is_found(
    tmp_path: Path, documents: list[list[int]], place: str
) -> None:
    write_store(tmp_path / "store", [documents])
    tokenmill.export_store(tmp_path / "store", to="megatron", out=tmp_path / "out")
    result = tokenmill.import_store(tmp_path / "out", tokenizer="bytes", out=tmp_path / "back")
    assert result.eos == place
    for opened in (
        tokenmill.Store(tmp_path / "back"),
        tokenmill.Store.open_foreign(tmp_path / "out", tokenizer="bytes"),
    ):
        assert opened.eos_id == (EOS if place == "appended" else None)
        assert opened.bos_id == (EOS if place == "prepended" else None)
        assert ids_of(opened) == documents


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-count]


def put(place: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + value + data[place + len(value) :]


def become(value: bytes) -> Callable[[bytes], bytes]:
    return lambda _: value


MEGATRON = "train_00000_text_document"
DAMAGE: list[tuple[str, str, Callable[[bytes], bytes], str]] = [
    ("megatron", f"{MEGATRON}.idx", cut(3), "cut off or damaged"),
    ("megatron", f"{MEGATRON}.idx", cut(10_000), "does not begin as an index"),
    ("megatron", f"{MEGATRON}.idx", put(0, b"X"), "does not begin as an index"),
    ("megatron", f"{MEGATRON}.idx", put(0, b"TNTIDX\0\0"), "does not begin as an index"),
    ("megatron", f"{MEGATRON}.idx", put(9, b"\2"), "index version 2"),
    ("megatron", f"{MEGATRON}.idx", put(17, b"\6"), "dtype code 6"),
    ("megatron", f"{MEGATRON}.idx", put(17, b"\4"), "not a multiple|offsets after sequence"),
    ("megatron", f"{MEGATRON}.idx", put(18, b"\xff" * 7), "cut off or damaged"),
    ("megatron", f"{MEGATRON}.idx", put(34, b"\xff\xff\xff\xff"), "negative length"),
    ("megatron", f"{MEGATRON}.idx", put(34 + 4 * 20 + 8, b"\x63"), "offsets after sequence"),
    ("megatron", f"{MEGATRON}.idx", put(34 + 12 * 20 + 8, b"\x63"), "does not rise"),
    ("megatron", f"{MEGATRON}.idx", lambda data: data + bytes(20), "multimodal"),
    ("megatron", f"{MEGATRON}.bin", cut(2), "documents end at token"),
    ("megatron", f"{MEGATRON}.bin", cut(1), "not a multiple of the 2"),
    ("datatrove", "train/00000_unshuffled.ds", cut(2), "documents end at token"),
    ("datatrove", "train/00000_unshuffled.ds.index", cut(3), "multiple of 8"),
    ("datatrove", "train/00000_unshuffled.ds.index", put(8, b"\0" * 8), "ends before it begins"),
    ("datatrove", "train/00000_unshuffled.ds.metadata", become(b"x|3\n"), "bytes of an id"),
    ("olmo", "train/part-00000.npy", cut(2), "documents end at token"),
    ("olmo", "train/part-00000.npy", put(0, b"\x93NUMPY"), "is a NumPy file"),
    ("olmo", "train/part-00000.csv.gz", cut(9), "not a whole .csv.gz"),
    ("olmo", "train/part-00000.csv.gz", become(b"hello"), "not a whole .csv.gz"),
    ("olmo", "train/part-00000.csv.gz", become(gzip.compress(b"0,5\n7,9\n")), "without a gap"),
    ("olmo", "train/part-00000.csv.gz", become(gzip.compress(b"a,b\n")), "not a whole"),
    ("llmc", "tokens_train_000000.bin", cut(2), "cut off or damaged"),
    ("llmc", "tokens_train_000000.bin", put(4, b"\5"), "version 5"),
    ("llmc", "tokens_train_000000.bin", put(0, b"\5"), "no magic number"),
    ("llmc", "tokens_train_000000.bin", put(8, b"\xff" * 4), "cut off or damaged"),
    ("nanogpt", "train.bin", cut(1), "not a multiple of the 2"),
]


@pytest.mark.parametrize(("to", "name", "damage", "problem"), DAMAGE)
def test_damaged_files_are_named_and_nothing_stays(
    tmp_path: Path, to: str, name: str, damage: Callable[[bytes], bytes], problem: str
) -> None:
    path = export(tmp_path, to)
    (path / name).write_bytes(damage((path / name).read_bytes()))
    with pytest.raises(SourceError, match=problem) as caught:
        import_ids(path, tmp_path / "back", format_name=to)
    assert name.rpartition("/")[2].partition(".")[0] in str(caught.value)
    assert caught.value.hint
    assert not (tmp_path / "back").exists()
    with pytest.raises((SourceError, UsageError), match=f"{problem}|int32 and uint16"):
        ids_of(tokenmill.Store.open_foreign(path, format=to))


def test_missing_sidecars_are_named(tmp_path: Path) -> None:
    for to, name in [
        ("datatrove", "train/00001_unshuffled.ds.index"),
        ("olmo", "train/part-00001.csv.gz"),
        ("megatron", "train_00001_text_document.bin"),
    ]:
        path = export(tmp_path / to, to)
        (path / name).unlink()
        with pytest.raises(SourceError, match="00001"):
            import_ids(path, tmp_path / "back", format_name=to)
        assert not (tmp_path / "back").exists()


def test_a_wrong_type_of_ids_is_noticed(tmp_path: Path) -> None:
    path = export(tmp_path, "olmo")
    with pytest.raises(SourceError, match="another type"):
        import_ids(path, tmp_path / "back", format_name="olmo", dtype="uint32")
    with pytest.raises(UsageError, match="dtype='float32'"):
        import_ids(path, tmp_path / "back", format_name="olmo", dtype="float32")
    # Pairs of narrow ids, read as wide ones, are far outside any vocabulary.
    np.full(1000, 200, "<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(SourceError, match="has the id 13,107,400"):
        import_ids(tmp_path / "train.bin", tmp_path / "back", format_name="nanogpt", dtype="uint32")
    assert not (tmp_path / "back").exists()


class Trap:
    """A pickle of this would create a file where it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


@pytest.mark.parametrize("to", RAW)
def test_a_pickle_is_never_loaded(tmp_path: Path, to: str) -> None:
    trap = pickle.dumps(Trap(str(tmp_path / "sprung")))
    path = export(tmp_path, to)
    for file in path.rglob("*"):
        if file.is_file() and ".tokenmill-export" not in file.parts:
            file.write_bytes(trap + b"." * (len(trap) % 2))
    with pytest.raises((SourceError, UsageError)):
        import_ids(path, tmp_path / "back", format_name=to, vocab_size=300)
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "back").exists()


def test_loss_masks_are_read_and_must_fit(tmp_path: Path) -> None:
    path = export(tmp_path, "datatrove")
    lengths = [[len(document) for document in shard] for shard in random_shards(2, documents=20)]
    masks = [np.concatenate([np.arange(n) % 2 for n in shard]) for shard in lengths]
    for number, mask in enumerate(masks):
        mask.astype(np.uint8).tofile(path / "train" / f"0000{number}_unshuffled.ds.loss")
    foreign = get_format("datatrove").open(path, ImportOptions())
    assert foreign.has_mask
    for part, mask in zip(foreign.parts, masks, strict=True):
        found = [block.mask for block in foreign.blocks(part)]
        assert np.array_equal(np.concatenate([each for each in found if each is not None]), mask)
    result = import_ids(path, tmp_path / "back", format_name=None)
    assert result.has_mask
    back = tokenmill.Store(tmp_path / "back")
    found_masks = [back.map_shard(number).mask for number in range(len(masks))]
    assert np.array_equal(
        np.concatenate([m for m in found_masks if m is not None]), np.concatenate(masks)
    )
    (path / "train" / "00001_unshuffled.ds.loss").write_bytes(b"\1")
    with pytest.raises(SourceError, match="1 bytes for"):
        import_ids(path, tmp_path / "no", format_name=None)


def test_documents_of_several_sequences_and_of_none(tmp_path: Path) -> None:
    """As Megatron-LM has them: sentences of a document, and documents that had no text."""
    lengths, documents = [3, 0, 2, 1], [0, 2, 2, 3, 4]
    tokens = np.arange(6, dtype="<i8")
    tokens.tofile(tmp_path / "x.bin")
    offsets = (np.cumsum(lengths) - lengths) * 8
    (tmp_path / "x.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 5, 4, 5)
        + np.array(lengths, "<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )
    import_ids(tmp_path / "x", tmp_path / "back", format_name=None)
    assert ids_of(tokenmill.Store(tmp_path / "back")) == [[0, 1, 2], [], [3, 4], [5]]
    # Ids of 8 bytes can be imported, which narrows them, and not be mapped as they are.
    with pytest.raises(UsageError, match="int64"):
        tokenmill.Store.open_foreign(tmp_path / "x")


IMPORT = """
import sys, tokenmill
tokenmill.import_store("pairs", tokenizer="bytes", out="out", format="megatron", workers=2)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_an_import_ended_in_the_middle_resumes(tmp_path: Path, end: signal.Signals) -> None:
    # Shards large enough for the end to come in time.
    body = np.random.default_rng(1).integers(0, 250, 300_000).tolist()
    write_store(tmp_path / "store", [[[number, *body]] for number in range(16)])
    tokenmill.export_store(tmp_path / "store", to="megatron", out=tmp_path / "pairs")
    whole = tokenmill.import_store(
        tmp_path / "pairs", tokenizer="bytes", out=tmp_path / "whole", format="megatron"
    )
    receipts = tmp_path / "out" / "shards"
    end_in_the_middle(IMPORT, folder=tmp_path, seen=(receipts, "*.json", 3), end=end)
    kept = len([*receipts.glob("*.json")])
    assert not (tmp_path / "out" / "tokenmill.json").exists(), "it was over before it was ended"
    result = tokenmill.import_store(
        tmp_path / "pairs", tokenizer="bytes", out=tmp_path / "out", format="megatron"
    )
    assert 3 <= result.parts_resumed == kept < result.parts == whole.parts
    for suffix in ("bin", "idx"):
        files = {path.name: path.read_bytes() for path in receipts.glob(f"*.{suffix}")}
        expected = (tmp_path / "whole" / "shards").glob(f"*.{suffix}")
        assert files == {path.name: path.read_bytes() for path in expected}
    assert tokenmill.verify(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("validation/index.json", "val"),
        ("validation-00000-of-00001.parquet", "val"),
        ("fineweb_val_000000.bin", "val"),
        ("VALID.bin", "val"),
        ("dev/", "val"),
        ("test_00000_text_document.bin", "test"),
        ("train/test-0.arrow", "train"),
        ("evaluation.bin", "train"),
        ("tests.npy", "train"),
        ("", "train"),
    ],
)
def test_names_of_files_say_the_split(name: str, split: str) -> None:
    assert split_of(name, ImportOptions()) == split
    assert split_of(name, ImportOptions(split="other")) == "other"


@pytest.mark.parametrize("to", ["mds", "litdata", "arrow", "olmo", "datatrove"])
def test_a_folder_called_validation_is_what_a_trainer_evaluates_on(tmp_path: Path, to: str) -> None:
    write_store(tmp_path / "store", random_shards(1, documents=9))
    out = tmp_path / "files" / "validation"
    tokenmill.export_store(tmp_path / "store", to=to, out=out, workers=1)
    if to in {"olmo", "datatrove"}:
        shutil.move(out / "train", tmp_path / "moved")
        shutil.rmtree(out)
        shutil.move(tmp_path / "moved", out)
    result = import_ids(tmp_path / "files", tmp_path / "back", format_name=to)
    assert list(result.splits) == ["val"]
