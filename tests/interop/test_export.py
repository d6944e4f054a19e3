"""An export commits part by part: resumed, killed, linked or parallel, the bytes are the same."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.disks import file_size_limit, small_disk
from tests.interop.stores import (
    BOOKS,
    EOS,
    bytes_store,
    end_in_the_middle,
    random_shards,
    tree,
    write_store,
)

import tokenmill
from tokenmill.errors import BuildError, StoreError, StoreLockedError, UsageError

RAW = ("megatron", "datatrove", "olmo", "nanogpt", "llmc")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export") / "store"
    write_store(root, random_shards(5, documents=40))
    return root


@pytest.mark.parametrize("to", RAW)
def test_a_second_run_has_nothing_to_do(store: Path, tmp_path: Path, to: str) -> None:
    first = tokenmill.export_store(store, to=to, out=tmp_path / "out", workers=1)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    before = {path: path.stat().st_ino for path in files if path.name != ".lock"}
    again = tokenmill.export_store(store, to=to, out=tmp_path / "out", workers=1)
    assert not first.nothing_to_do
    assert again.nothing_to_do
    assert again.notes == first.notes
    assert again.parts_resumed == again.parts == first.parts
    assert {path: path.stat().st_ino for path in before} == before


def test_a_full_disk_keeps_the_finished_files_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write_store(tmp_path / "store", random_shards(5, documents=800))
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, size="192k"):
        with pytest.raises(BuildError, match="No space left on device") as caught:
            tokenmill.export(tmp_path / "store", to="datatrove", out=disk / "out")
        assert f"cannot write '{disk}/out/train/0000" in caught.value.message
        assert re.search(r"MB free there, and about [\d.]+ kB is left", caught.value.message)
        assert "make space, then run the same command again" in str(caught.value.hint)
        kept = [*(disk / "out").rglob("*.ds")]
        assert kept, "the test should fill the disk in the middle"
        assert not [*(disk / "out" / BOOKS).glob("tmp/*")]
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        result = tokenmill.export(tmp_path / "store", to="datatrove", out=disk / "out")
        assert result.parts_resumed == len(kept)
        tokenmill.export(tmp_path / "store", to="datatrove", out=tmp_path / "whole")
        assert tree(disk / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("to", ["megatron", "llmc", "mds", "arrow", "npz", "pt"])
def test_a_write_that_fails_leaves_no_file_and_says_which_and_how_to_go_on(
    tmp_path: Path, to: str
) -> None:
    write_store(tmp_path / "store", random_shards(1, documents=1500))
    rows = {"seq_len": 64} if to in ("npz", "pt") else {}
    out = tmp_path / "out"
    with file_size_limit(20_000), pytest.raises(BuildError) as caught:
        tokenmill.export(tmp_path / "store", to=to, out=out, **rows)
    assert f"cannot write '{out}/" in caught.value.message
    assert "File too large" in caught.value.message
    assert "is left to write; files that are finished are kept" in caught.value.message
    assert str(caught.value.hint).startswith("run the same command again")
    assert not [path for path in out.rglob("*") if path.is_file() and BOOKS not in path.parts]
    assert tokenmill.export(tmp_path / "store", to=to, out=out, **rows).parts_resumed == 0


def test_workers_change_no_byte(store: Path, tmp_path: Path) -> None:
    for to in ("megatron", "llmc"):
        few: dict[str, Any] = {"file_tokens": 700} if to == "llmc" else {}
        one = tokenmill.export_store(store, to=to, out=tmp_path / f"{to}-1", workers=1, **few)
        two = tokenmill.export_store(store, to=to, out=tmp_path / f"{to}-2", workers=2, **few)
        assert (one.workers, two.workers) == (1, 2)
        trees = [tree(tmp_path / f"{to}-{number}") for number in (1, 2)]
        for found in trees:
            found.pop("data-args.txt", None)  # it names the folder
        assert trees[0] == trees[1]


def test_what_is_missing_is_made_again(store: Path, tmp_path: Path) -> None:
    tokenmill.export_store(store, to="datatrove", out=tmp_path / "out", workers=1)
    whole = tree(tmp_path / "out")
    (tmp_path / "out" / "train" / "00001_unshuffled.ds.index").unlink()
    (tmp_path / "out" / "train" / "00003_unshuffled.ds").write_bytes(b"cut off")
    result = tokenmill.export_store(store, to="datatrove", out=tmp_path / "out", workers=1)
    assert (result.parts, result.parts_resumed) == (5, 3)
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("to", ["nanogpt", "mds"])
def test_a_file_of_another_size_is_made_again(store: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    few: dict[str, Any] = {"file_tokens": 700} if to == "mds" else {}
    first = tokenmill.export_store(store, to=to, out=out, workers=1, **few)
    whole = tree(out)
    name = "train.bin" if to == "nanogpt" else "shard.00001.mds"
    (out / name).write_bytes(whole[name][:-2])
    result = tokenmill.export_store(store, to=to, out=out, workers=1, **few)
    assert result.parts_resumed == result.parts - 1
    assert result.notes == first.notes
    assert tree(out) == whole


def test_an_export_that_is_made_again_has_no_index(tmp_path: Path) -> None:
    write_store(tmp_path / "store", random_shards(2, documents=9))
    out = tmp_path / "out"
    tokenmill.export_store(tmp_path / "store", to="megatron", out=out, workers=1)
    (out / "train_00001_text_document.bin").unlink()
    victim = sorted((tmp_path / "store" / "shards").glob("*.bin"))[1]
    data = victim.read_bytes()
    victim.write_bytes(bytes(len(data)))
    with pytest.raises(StoreError, match="was changed"):
        tokenmill.export_store(tmp_path / "store", to="megatron", out=out, workers=1)
    assert not (out / "data-args.txt").exists()
    # What was cut off meanwhile is not taken for whole because nobody came to it.
    (out / "train_00000_text_document.idx").write_bytes(b"cut off")
    victim.write_bytes(data)
    result = tokenmill.export_store(tmp_path / "store", to="megatron", out=out, workers=1)
    assert (result.parts, result.parts_resumed) == (2, 0)
    assert (out / "data-args.txt").exists()


def test_two_at_once_are_refused(store: Path, tmp_path: Path) -> None:
    def export_too(done: int, total: int) -> None:
        with pytest.raises(StoreLockedError):
            tokenmill.export_store(store, to="olmo", out=tmp_path / "out", workers=1)
        refused.append(done)

    refused: list[int] = []
    tokenmill.export_store(
        store, to="olmo", out=tmp_path / "out", workers=1, on_progress=export_too
    )
    assert refused
    assert len(tree(tmp_path / "out")) == 10


def test_an_export_that_came_to_nothing_is_not_in_the_way(store: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "store", random_shards(1, documents=3))
    [victim] = (tmp_path / "store" / "shards").glob("*.bin")
    victim.write_bytes(bytes(victim.stat().st_size))
    with pytest.raises(StoreError, match="was changed"):
        tokenmill.export_store(tmp_path / "store", to="megatron", out=tmp_path / "out")
    tokenmill.export_store(store, to="olmo", out=tmp_path / "out", workers=1)
    assert len(tree(tmp_path / "out")) == 10


def test_other_things_in_the_folder_are_left_alone(store: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other things"):
        tokenmill.export_store(store, to="olmo", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    tokenmill.export_store(store, to="olmo", out=tmp_path / "out", workers=1)
    (tmp_path / "out" / "train" / "part-00009.npy").write_text("mine")
    with pytest.raises(UsageError, match="part-00009"):
        tokenmill.export_store(store, to="olmo", out=tmp_path / "out", workers=1)
    with pytest.raises(UsageError, match="is a file"):
        tokenmill.export_store(store, to="olmo", out=tmp_path / "notes.txt")


def test_another_export_is_not_written_over(store: Path, tmp_path: Path) -> None:
    tokenmill.export_store(store, to="llmc", out=tmp_path / "out", workers=1)
    before = tree(tmp_path / "out")
    with pytest.raises(UsageError, match="another export"):
        tokenmill.export_store(store, to="llmc", out=tmp_path / "out", file_tokens=500)
    write_store(tmp_path / "other", random_shards(1, documents=3, seed=9))
    with pytest.raises(UsageError, match="another export: its content"):
        tokenmill.export_store(tmp_path / "other", to="llmc", out=tmp_path / "out")
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("to", ["megatron", "datatrove", "olmo"])
def test_links_are_the_stores_own_files(store: Path, tmp_path: Path, to: str) -> None:
    copied = tokenmill.export_store(store, to=to, out=tmp_path / "copy", workers=1)
    linked = tokenmill.export_store(store, to=to, out=tmp_path / "link", workers=1, link=True)
    assert copied.linked_bytes == 0
    assert linked.linked_bytes == linked.tokens * 2
    own = {path.stat().st_ino for path in (store / "shards").glob("*.bin")}
    found = {path.stat().st_ino for path in (tmp_path / "link").rglob("*") if path.is_file()}
    assert own <= found
    assert not own & {path.stat().st_ino for path in (tmp_path / "copy").rglob("*")}
    trees = [tree(tmp_path / "copy"), tree(tmp_path / "link")]
    for each in trees:
        each.pop("data-args.txt", None)
    assert trees[0] == trees[1]
    assert tokenmill.verify(store, sample=0).ok


def test_one_shard_can_be_linked_for_nanogpt_and_five_cannot(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="5 shards"):
        tokenmill.export_store(store, to="nanogpt", out=tmp_path / "no", link=True)
    write_store(tmp_path / "store", random_shards(1, documents=3))
    tokenmill.export_store(tmp_path / "store", to="nanogpt", out=tmp_path / "out", link=True)
    [own] = (tmp_path / "store" / "shards").glob("*.bin")
    assert (tmp_path / "out" / "train.bin").samefile(own)


def test_links_across_file_systems_fail_unless_copies_will_do(tmp_path: Path, store: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == store.stat().st_dev:
        pytest.skip("there is no second file system here")
    out = other / f"tokenmill-test-{os.getpid()}"
    try:
        with pytest.raises(UsageError, match="two file systems"):
            tokenmill.export_store(store, to="olmo", out=out, link=True)
        assert tree(out) == {}
        result = tokenmill.export_store(store, to="olmo", out=out, link="if-possible")
        assert result.linked_bytes == 0
        assert len(tree(out)) == 10
    finally:
        import shutil

        shutil.rmtree(out, ignore_errors=True)


def test_a_damaged_shard_is_not_exported(tmp_path: Path) -> None:
    write_store(tmp_path / "store", random_shards(2, documents=9))
    victim = sorted((tmp_path / "store" / "shards").glob("*.bin"))[1]
    data = bytearray(victim.read_bytes())
    data[5] ^= 1
    victim.write_bytes(data)
    for to in ("megatron", "nanogpt"):
        with pytest.raises(StoreError, match="was changed"):
            tokenmill.export_store(tmp_path / "store", to=to, out=tmp_path / to, workers=1)
        assert len([name for name in tree(tmp_path / to) if name.endswith(".bin")]) < 2


def test_splits_become_files_of_their_own(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(60)]
    store = bytes_store(tmp_path / "in", texts, val=0.3)
    tokenmill.export_store(store, to="nanogpt", out=tmp_path / "out")
    for split in ("train", "val"):
        expected = np.concatenate([*tokenmill.Store(store, split=split)])
        assert np.array_equal(np.fromfile(tmp_path / "out" / f"{split}.bin", "<u2"), expected)
    only = tokenmill.export_store(store, to="megatron", out=tmp_path / "only", split="val")
    assert list(only.splits) == ["val"]
    assert sorted(tree(tmp_path / "only")) == [
        "data-args.txt",
        "val_00000_text_document.bin",
        "val_00000_text_document.idx",
    ]
    # llm.c's scripts hold the first file out.
    tokenmill.export_store(store, to="llmc", out=tmp_path / "llmc")
    assert sorted(tree(tmp_path / "llmc")) == ["tokens_train_000001.bin", "tokens_val_000000.bin"]


def test_a_file_of_arguments_names_every_pair_with_its_tokens(store: Path, tmp_path: Path) -> None:
    result = tokenmill.export_store(store, to="megatron", out=tmp_path / "out")
    file = tmp_path / "out" / "data-args.txt"
    assert result.notes == (f"give Megatron-LM: --data-args-path {file}",)
    words = file.read_text().split()
    weights, prefixes = words[::2], words[1::2]
    assert [Path(f"{prefix}.bin").stat().st_size // 2 for prefix in prefixes] == [
        int(weight) for weight in weights
    ]


def test_a_file_of_arguments_has_the_splits_as_megatron_names_them(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(60)]
    store = bytes_store(tmp_path / "in", texts, val=0.3)
    # Of a list that is cut at white space such a folder would be two words.
    out = tmp_path / "two words"
    result = tokenmill.export_store(store, to="megatron", out=out)
    assert result.notes == (
        f"give Megatron-LM: --per-split-data-args-path '{out / 'data-args.json'}'",
    )
    train, valid = (str(out / f"{split}_00000_text_document") for split in ("train", "val"))
    found = json.loads((out / "data-args.json").read_text())
    assert found == {"train": [train], "valid": [valid], "test": None}
    only = tmp_path / "one split"
    tokenmill.export_store(store, to="megatron", out=only, split="val")
    found = json.loads((only / "data-args.json").read_text())
    valid = str(only / "val_00000_text_document")
    assert found == {"train": None, "valid": [valid], "test": None}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"to": "nope"}, "no format 'nope'"),
        ({"to": "megatron", "seq_len": 8}, "not rows"),
        ({"to": "llmc", "link": True}, "cannot be links"),
        ({"to": "llmc", "link": "sometimes"}, "link='sometimes'"),
        ({"to": "megatron", "colour": "red"}, "no setting 'colour'"),
        ({"to": "megatron", "merge": "perhaps"}, "merge='perhaps'"),
        ({"to": "megatron", "merge": True, "link": True}, "cannot be a link"),
        ({"to": "llmc", "file_tokens": 0}, "file_tokens=0"),
        ({"to": "llmc", "file_tokens": 2**31}, "31 bits"),
        ({"to": "olmo", "workers": 0}, "workers=0"),
        ({"to": "olmo", "split": "test"}, "no split 'test'"),
    ],
)
def test_what_cannot_be_is_refused(
    store: Path, tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    with pytest.raises((UsageError, StoreError), match=problem):
        tokenmill.export_store(store, out=tmp_path / "out", **options)
    assert not tree(tmp_path / "out")


def test_wide_ids_are_refused_by_nanogpt(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [[[1, EOS]]], vocab_size=100_000)
    with pytest.raises(UsageError, match="ids of 2 bytes"):
        tokenmill.export_store(tmp_path / "store", to="nanogpt", out=tmp_path / "out")


COMMAND = """
import sys, tokenmill
to, out, merge = sys.argv[1:]
more = {"merge": True} if merge else {}
tokenmill.export_store("store", to=to, out=out, workers=2, **more)
"""


@pytest.mark.parametrize(
    ("merge", "end"),
    [("", signal.SIGKILL), ("merge", signal.SIGKILL), ("", signal.SIGINT)],
)
def test_ended_in_the_middle_it_resumes(tmp_path: Path, merge: str, end: signal.Signals) -> None:
    # Shards large enough for the end to come in time.
    body = np.random.default_rng(1).integers(0, 250, 300_000).tolist()
    write_store(tmp_path / "store", [[[number, *body]] for number in range(16)])
    tokenmill.export_store(
        tmp_path / "store", to="megatron", out=tmp_path / "whole", merge=bool(merge)
    )
    whole = tree(tmp_path / "whole")
    out = tmp_path / "out"
    seen = (out / BOOKS / "tmp", "*.bin", 1) if merge else (out, "*.idx", 3)
    end_in_the_middle(COMMAND, "megatron", "out", merge, folder=tmp_path, seen=seen, end=end)
    assert end is signal.SIGKILL or not (out / BOOKS / "tmp").exists()
    assert not (out / "data-args.txt").exists(), "the export was over before it was killed"
    kept = len([each for each in out.glob("*.idx") if each.with_suffix(".bin").exists()])
    # Whatever has its name is whole.
    for name, data in tree(tmp_path / "out").items():
        assert data == whole[name]
    result = tokenmill.export_store(
        tmp_path / "store", to="megatron", out=tmp_path / "out", workers=2, merge=bool(merge)
    )
    assert result.parts_resumed == kept
    done = tree(tmp_path / "out")
    assert done.pop("data-args.txt").decode() == whole["data-args.txt"].decode().replace(
        str(tmp_path / "whole"), str(tmp_path / "out")
    )
    assert done == {name: data for name, data in whole.items() if name != "data-args.txt"}
    assert sorted(path.name for path in (tmp_path / "out" / BOOKS).iterdir()) == [
        ".lock",
        ".lock-workers",
        "export.json",
    ]


def _note(amounts: list[int], done: int, total: int) -> None:
    assert total == 12_000_000
    amounts.append(done)


def test_progress_tells_of_parts_in_the_middle(tmp_path: Path) -> None:
    body = np.random.default_rng(1).integers(0, 250, 6_000_000).tolist()
    write_store(tmp_path / "store", [[body], [body]])
    for to, workers in (("megatron", 1), ("arrow", 2)):
        amounts: list[int] = []
        result = tokenmill.export_store(
            tmp_path / "store",
            to=to,
            out=tmp_path / to,
            workers=workers,
            on_progress=partial(_note, amounts),
        )
        assert amounts[-1] == result.tokens == 12_000_000
        assert any(amount % 6_000_000 for amount in amounts)
        assert amounts == sorted(amounts)


def test_an_error_in_one_part_ends_the_others(tmp_path: Path) -> None:
    write_store(tmp_path / "store", random_shards(40, documents=9))
    victim = sorted((tmp_path / "store" / "shards").glob("*.bin"))[3]
    victim.write_bytes(bytes(victim.stat().st_size))
    with pytest.raises(StoreError, match="was changed"):
        tokenmill.export_store(tmp_path / "store", to="megatron", out=tmp_path / "out", workers=2)
    assert not (tmp_path / "out" / BOOKS / "tmp").exists()
    assert len([*(tmp_path / "out").glob("*.bin")]) < 39
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("part")]
