"""What we write, read by Megatron-core, datatrove and OLMo-core; what they write, read by us."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.interop import peers
from tests.interop.stores import (
    EOS,
    WIDE,
    bytes_store,
    flat,
    ids_of,
    import_ids,
    random_shards,
    write_store,
)

import tokenmill
from tokenmill.interop.indexed import for_people

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.stores import Documents

SHARDS = [*random_shards(2, documents=20), [[1, 2, EOS], [], [EOS], [5]]]


def test_megatron(tmp_path: Path) -> None:
    """One process for all of it, which takes seconds to start."""
    prefixes, writes, expected = [], [], []
    for vocab_size, dtype in ((60_000, "uint16"), (WIDE, "int32")):
        store = tmp_path / f"store-{dtype}"
        write_store(store, SHARDS, vocab_size=vocab_size)
        for merge in (False, True):
            out = tmp_path / f"out-{dtype}-{merge}"
            tokenmill.export_store(store, to="megatron", out=out, workers=1, merge=merge)
            documents = [flat(SHARDS)] if merge else SHARDS
            names = sorted(path.with_suffix("") for path in out.glob("*.bin"))
            prefixes += list(map(str, names))
            expected += [{"documents": each, "dtype": dtype} for each in documents]
        # The same documents, one sequence each, by its own builder.
        whole = [[document] for document in flat(SHARDS)]
        writes.append((str(tmp_path / f"theirs-{dtype}"), whole, dtype))
    # Documents of several sequences, and of none.
    sentences = [[[1, 2], [3]], [], [[4], [], [5, 6]]]
    writes.append((str(tmp_path / "sentences"), sentences, "int32"))
    splits = bytes_store(tmp_path / "in", [f"document {n}" for n in range(60)], val=0.3)
    tokenmill.export_store(splits, to="megatron", out=tmp_path / "two words")
    arguments = [
        tmp_path / "out-int32-False" / "data-args.txt",
        tmp_path / "out-int32-True" / "data-args.txt",
        tmp_path / "two words" / "data-args.json",
    ]
    feeds, fed = write_feeds(tmp_path)
    example = ["feed_megatron.py", feeds[1][0], str(EOS), str(WIDE)]
    found, blends, rows, printed = peers.run(
        "megatron", "each", prefixes, writes, arguments, feeds, example
    )
    assert re.fullmatch(r"100 rows: [\d,]+ labels count, in [\d,]+ parts of documents\n", printed)
    for answers, documents, masks in zip(rows, *fed, strict=True):
        compare_rows(answers, documents, masks, folder=tmp_path)
    assert found == expected
    shards = [str(tmp_path / "out-int32-False" / f"train_{n:05d}_text_document") for n in range(3)]
    assert blends[0] == [[shards, [sum(map(len, shard)) for shard in SHARDS]]]
    assert blends[1] == [[[str(tmp_path / "out-int32-True" / "train_text_document")], None]]
    train, valid = (
        str(tmp_path / "two words" / f"{split}_00000_text_document") for split in ("train", "val")
    )
    assert blends[2] == [[[train], None], [[valid], None], None]
    for dtype in ("uint16", "int32"):
        for kind in ("bin", "idx"):
            ours = tmp_path / f"out-{dtype}-True" / f"train_text_document.{kind}"
            assert ours.read_bytes() == (tmp_path / f"theirs-{dtype}.{kind}").read_bytes()
        foreign = tokenmill.Store.open_foreign(tmp_path / f"theirs-{dtype}")
        assert foreign.dtype.name == dtype
        assert ids_of(foreign) == flat(SHARDS)
    import_ids(tmp_path / "sentences", tmp_path / "back", format_name=None, vocab_size=WIDE)
    assert ids_of(tokenmill.Store(tmp_path / "back")) == [[1, 2, 3], [], [4, 5, 6]]
    assert ids_of(tokenmill.Store.open_foreign(tmp_path / "sentences")) == [
        [1, 2, 3],
        [],
        [4, 5, 6],
    ]


ROW = 16


def write_feeds(folder: Path) -> tuple[list[Any], Any]:
    """Exports to be fed to Megatron-LM: one whose documents end in the end-of-text, and one of two
    pairs with masks, whose documents end in nothing."""
    ended = [document for document in flat(SHARDS) if document[-1:] == [EOS]]
    endless = [document[:-1] for document in ended if len(document) > 1]
    masks = [[int(token % 3 > 0) for token in document] for document in endless]
    write_store(folder / "ended", [ended])
    write_store(folder / "endless", [endless[:20], endless[20:]], masks=[masks[:20], masks[20:]])
    feeds = []
    for name in ("ended", "endless"):
        result = tokenmill.export_store(folder / name, to="megatron", out=folder / "feed" / name)
        said = any("examples/feed_megatron.py" in note for note in result.notes)
        assert said == (name == "endless")
        feeds.append((str(folder / "feed" / name), EOS, 60_000, ROW, 100))
    parts = [ended], [endless[:20], endless[20:]]
    return feeds, (parts, [[None], [masks[:20], masks[20:]]])


def compare_rows(answers: Any, parts: Any, masks: Any, *, folder: Path) -> None:
    """Rows of Megatron-LM are those of the loader over the documents in the order it has them."""
    for (prefix, (ours, theirs)), documents, counts in zip(
        sorted(answers.items()), parts, masks, strict=True
    ):
        assert ours["order"] == theirs["order"] != sorted(ours["order"])
        ordered = [documents[number] for number in ours["order"]]
        marks = None if counts is None else [[counts[number] for number in ours["order"]]]
        out = folder / "again" / prefix.replace("/", "-")
        store = write_store(out, [ordered], masks=marks)
        order: Any = {"epochs": 1, "shuffle": False, "boundaries": "mask"}
        loader = tokenmill.Loader(store, seq_len=ROW, batch_size=1, **order)
        # Its last row is filled up; theirs are full.
        assert len(loader) - len(ours["rows"]) in (0, 1)
        for number, (row, batch) in enumerate(zip(ours["rows"], loader, strict=False)):
            assert row["tokens"] == batch.input_ids[0].tolist()
            assert np.equal(row["loss_mask"], batch.loss_mask[0]).all()
            counted = np.flatnonzero(batch.loss_mask[0])
            assert np.array(row["labels"])[counted].tolist() == batch.labels[0, counted].tolist()
            assert row["position_ids"] == batch.position_ids[0].tolist()
            one = batch.doc_ids[0]
            seen = np.tri(ROW, dtype=bool) & (one[:, None] == one)
            assert np.array_equal(row["attention_mask"][0], ~seen)
            if counts is None:
                assert row == theirs["rows"][number]


def positions(documents: Documents, row: int, length: int) -> list[int]:
    """Place of each token of a row in its document, as far as the row has it."""
    begins = {0}
    for document in documents:
        begins.add(max(begins) + len(document))
    found: list[int] = []
    for place in range(row * length, (row + 1) * length):
        found.append(0 if place in begins or not found else found[-1] + 1)
    return found


SIZES = {2: 60_000, 4: WIDE}
"""Bytes of an id -> a vocabulary that takes them."""


def test_datatrove(tmp_path: Path) -> None:
    # Its reader of positions stumbles over documents without tokens.
    documents = [document for document in flat(SHARDS) if document]
    jobs = []
    for size, vocab_size in SIZES.items():
        store, out = tmp_path / f"store-{size}", tmp_path / f"out-{size}"
        write_store(store, [documents], vocab_size=vocab_size)
        tokenmill.export_store(store, to="datatrove", out=out)
        jobs.append([out / "train", 9, size, tmp_path / f"theirs-{size}", documents])
    numbers = [0, 1, 9, 10, 99, 100, 999, 1000, 1234, 99_999, 10**6, 123_456_789, 10**13]
    *answers, people = peers.run("datatrove", "each", jobs, numbers)
    assert [for_people(number) for number in numbers] == people
    stream = np.array([token for document in documents for token in document])
    rows = len(stream) // 10
    for size, found in zip(SIZES, answers, strict=True):
        assert found["rows"] == stream[: rows * 10].reshape(rows, 10).tolist()
        assert found["positions"] == [positions(documents, row, 10) for row in range(rows)]
        assert found["ends"] == [np.cumsum([len(document) for document in documents]).tolist()]
        assert found["token_size"] == size
        check_theirs(tmp_path, documents, size=size)


def check_theirs(tmp_path: Path, documents: Documents, *, size: int) -> None:
    """What datatrove wrote: read by us, and the same bytes as ours but for a name."""
    theirs, back = tmp_path / f"theirs-{size}", tmp_path / f"back-{size}"
    result = import_ids(theirs, back, format_name=None, vocab_size=SIZES[size])
    assert result.has_mask
    assert ids_of(tokenmill.Store(back)) == documents
    assert ids_of(tokenmill.Store.open_foreign(theirs)) == documents
    ours = tmp_path / f"out-{size}" / "train" / "00000_unshuffled.ds"
    for kind in ("", ".index"):
        data = (theirs / f"00000_tokens.ds{kind}").read_bytes()
        assert ours.with_name(ours.name + kind).read_bytes() == data
    lines = (theirs / "00000_tokens.ds.metadata").read_text().split("\n")
    assert ours.with_name(f"{ours.name}.metadata").read_text().split("\n")[1:] == lines[1:]


@pytest.mark.slow
def test_olmo(tmp_path: Path) -> None:
    documents = flat(random_shards(1, documents=30))
    jobs: list[list[Any]] = []
    for size, vocab_size in SIZES.items():
        store, out = tmp_path / f"store-{size}", tmp_path / f"out-{size}"
        write_store(store, [documents], vocab_size=vocab_size)
        tokenmill.export_store(store, to="olmo", out=out)
        ours, theirs = out / "train" / "part-00000.npy", tmp_path / f"theirs-{size}.npy"
        jobs.append([ours, theirs, documents, EOS, f"uint{8 * size}"])
    assert peers.run("olmo", "each", jobs) == [documents, documents]
    for _, theirs, _, _, dtype in jobs:
        assert ids_of(tokenmill.Store.open_foreign(theirs, dtype=dtype)) == documents
        back = tmp_path / f"back-{dtype}"
        import_ids(theirs, back, format_name=None, vocab_size=WIDE, dtype=dtype)
        assert ids_of(tokenmill.Store(back)) == documents


def test_llmc_as_its_dataloader_checks_it(tmp_path: Path) -> None:
    """llm.c has no package: these are the conditions under which its loader stops the program."""
    for vocab_size, magic, version, width in (
        (60_000, 20240520, 1, 2),
        (WIDE, 20240801, 7, 4),
    ):
        write_store(tmp_path / f"store-{width}", SHARDS, vocab_size=vocab_size)
        out = tmp_path / f"out-{width}"
        tokenmill.export_store(tmp_path / f"store-{width}", to="llmc", out=out, file_tokens=300)
        for path in out.glob("*.bin"):
            data = path.read_bytes()
            head = struct.unpack("<256i", data[:1024])
            assert head[:2] == (magic, version)
            assert len(data) == 1024 + head[2] * width
            assert not any(head[3:])
        first = np.fromfile(out / "tokens_train_000000.bin", f"<u{width}", offset=1024)
        assert first[0] == EOS
