"""Text that is tokenized while a run trains: the rows of the store, and no other."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from tests.trainer.runs import COMMAND, SEQ_LEN

import tokenmill
from tokenmill.engines.references import train_bpe
from tokenmill.errors import SourceError, UsageError
from tokenmill.trainer.feeds import TextFeeder
from tokenmill.trainer.loop import settle
from tokenmill.trainer.options import TrainOptions, open_splits

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [f"the document {n} says " + "so " * (n * 7 % 90) + f"and ends with {n}" for n in range(90)]
FLAGS = f"--model tiny --seq-len {SEQ_LEN} --batch-tokens {4 * SEQ_LEN} --device cpu".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text in two files, and stores of it by two tokenizers."""
    folder = tmp_path_factory.mktemp("feeds")
    for name, texts in {"a.jsonl": TEXTS[:60], "b.jsonl": TEXTS[60:]}.items():
        lines = [json.dumps({"body": text}) + "\n" for text in [*texts, ""]]
        (folder / name).write_text("".join(lines))
    train_bpe(TEXTS, vocab_size=320, folder=folder / "bpe")
    for name in ("bytes", "bpe"):
        tokenizer = folder / "bpe" if name == "bpe" else name
        files = [folder / "a.jsonl", folder / "b.jsonl"]
        how: dict[str, Any] = {"out": folder / f"{name}-store", "val": 0.2, "text_field": "body"}
        tokenmill.build(files, tokenizer=tokenizer, unit_bytes=2000, **how)
    return folder


def feeder_of(store: tokenmill.Store, **said: Any) -> TextFeeder:
    usual = {"model": "tiny", "seq_len": SEQ_LEN, "micro_batch": 3, "accumulate": 1}
    options = {**usual, "device": "cpu", **said}
    setup = settle(TrainOptions(store, **options), vocab_size=store.vocab_size)
    return TextFeeder(store, setup)


@pytest.mark.parametrize(
    "said",
    [{"feed": "encode"}, {"feed": "encode_batch"}, {"feed": "workers", "feed_workers": 1}],
    ids=["encode", "encode_batch", "workers"],
)
@pytest.mark.parametrize("boundaries", ["keep", "mask"])
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_rows_are_those_of_the_store_in_its_order(
    place: Path, name: str, said: dict[str, Any], boundaries: str
) -> None:
    store, _ = open_splits(place / f"{name}-store")
    loader = tokenmill.Loader(
        store, seq_len=SEQ_LEN, batch_size=3, shuffle=False, boundaries=boundaries, epochs=1
    )
    steps = len(loader) - 1  # the last one has padding
    assert steps > 10
    with feeder_of(store, boundaries=boundaries, **said) as feeder:
        for made, batch in itertools.islice(zip(feeder, loader, strict=False), steps):
            assert made.input_ids.dtype == made.labels.dtype == torch.int64
            assert np.array_equal(made.input_ids, batch.input_ids)
            assert np.array_equal(made.labels, batch.labels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("said", [{"feed": "encode"}, {"feed": "workers", "feed_workers": 1}])
def test_they_come_to_the_device_while_it_works(place: Path, said: dict[str, Any]) -> None:
    store, _ = open_splits(place / "bpe-store")
    loader = tokenmill.Loader(store, seq_len=SEQ_LEN, batch_size=3, shuffle=False, epochs=1)
    weight = torch.randn(4096, 4096, device="cuda")
    with feeder_of(store, device="cuda", **said) as feeder:
        for made, batch in itertools.islice(zip(feeder, loader, strict=False), 20):
            assert made.input_ids.device.type == "cuda"
            for _ in range(4):
                weight = torch.mm(weight, weight).tanh()
            assert np.array_equal(made.input_ids.cpu(), batch.input_ids)
            assert np.array_equal(made.labels.cpu(), batch.labels)


def test_after_the_last_text_the_first_comes_again(place: Path) -> None:
    store, _ = open_splits(place / "bytes-store")
    with feeder_of(store, feed="encode") as feeder:
        batches = itertools.islice(feeder, 2 * store.num_tokens // (3 * SEQ_LEN))
        ids = torch.cat([batch.input_ids.flatten() for batch in batches]).tolist()
    whole = [token for document in store for token in document.tolist()]
    assert len(ids) > len(whole) + 1000
    assert ids == (whole + whole)[: len(ids)]


def test_workers_share_the_documents_of_the_split_train(place: Path) -> None:
    store, val = open_splits(place / "bytes-store")
    assert val is not None
    before = set(psutil.Process().children(recursive=True))
    with feeder_of(store, feed="workers", feed_workers=2) as feeder:
        steps = 3 * store.num_tokens // (3 * SEQ_LEN)
        rows: list[list[int]] = [[], []]
        for number, batch in enumerate(itertools.islice(feeder, steps)):
            ids, labels = batch.input_ids.flatten().tolist(), batch.labels.flatten().tolist()
            assert ids[1:] == labels[:-1]
            rows[number % 2] += ids  # a DataLoader takes its workers by turns
        children = set(psutil.Process().children(recursive=True)) - before
        # What multiprocessing keeps for the whole program is no worker.
        workers = [each for each in children if "resource_tracker" not in " ".join(each.cmdline())]
        assert workers
    assert not psutil.wait_procs(workers, timeout=30)[1]
    text = [bytes(ids).decode() for ids in ([i if i < 256 else 0 for i in each] for each in rows)]
    found = [{part for part in each.split("\0")[:-1] if part in TEXTS} for each in text]
    assert not found[0] & found[1]
    assert found[0] | found[1] == {store.decode(k) for k in range(len(store))}
    assert not (found[0] | found[1]) & {val.decode(k) for k in range(len(val))}


def test_other_text_may_be_named(place: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "another text " * 30}) + "\n")
    store, _ = open_splits(place / "bytes-store")
    with feeder_of(store, feed="encode", text=tmp_path / "*.jsonl") as feeder:
        ids = next(iter(feeder)).input_ids.flatten().tolist()
    assert bytes(ids).decode() == ("another text " * 30)[: len(ids)]


def test_files_that_are_called_val_are_not_trained_on(tmp_path: Path) -> None:
    for name in ("train", "val"):
        lines = [json.dumps({"text": f"{name} {n} " * 20}) + "\n" for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    tokenmill.build(tmp_path, tokenizer="bytes", out=tmp_path / "store")
    store, val = open_splits(tmp_path / "store")
    assert val is not None
    for said in ({}, {"text": tmp_path / "*.jsonl"}):
        with feeder_of(store, feed="encode", **said) as feeder:
            batches = itertools.islice(feeder, 2 * store.num_tokens // (3 * SEQ_LEN))
            ids = torch.cat([batch.input_ids.flatten() for batch in batches]).tolist()
        text = bytes(token for token in ids if token < 256).decode()
        assert "train 19" in text
        assert "val" not in text


@pytest.mark.parametrize(
    "said",
    [
        {"feed": "encode"},
        pytest.param({"feed": "workers", "feed_workers": 2}, marks=pytest.mark.slow),
    ],
)
def test_rows_that_a_condition_left_out_are_not_trained_on(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    rows = [{"text": "rest" if n % 2 else f"text {n} " * 20, "n": n % 2} for n in range(900)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenmill.build(source, tokenizer="bytes", out=tmp_path / "store", where="n == 0")
    store, _ = open_splits(tmp_path / "store")
    for more in ({}, {"text": source}):
        with feeder_of(store, **said, **more) as feeder:
            batches = itertools.islice(feeder, 2 * store.num_tokens // (3 * SEQ_LEN))
            ids = torch.cat([batch.input_ids.flatten() for batch in batches]).tolist()
        text = bytes(token for token in ids if token < 256).decode()
        assert "text 898 " in text
        assert "rest" not in text


def test_stores_whose_rows_are_not_all_of_their_text_are_refused(tmp_path: Path) -> None:
    texts = [f"text {n} " * 20 + "<s>" * (n % 9 == 0) for n in range(40)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_bpe(texts, vocab_size=300, folder=tmp_path / "bpe")
    special = json.loads((tmp_path / "bpe/tokenizer.json").read_text())["added_tokens"][0]
    source.write_text(source.read_text().replace("<s>", special["content"]))
    tokenizer = tmp_path / "bpe"
    how: list[tuple[object, dict[str, Any], str]] = [
        (source, {"limit": 30}, "a limit left out 10 rows"),
        ([{"text": text} for text in texts], {}, "was rows of a Python program"),
        (source, {"special_tokens": "reject", "max_rejects": 1}, "special_tokens='reject'"),
    ]
    for number, (inputs, options, problem) in enumerate(how):
        out = tmp_path / str(number)
        tokenmill.build(inputs, tokenizer=tokenizer, out=out, **options)  # type: ignore[arg-type]
        with pytest.raises((UsageError, SourceError), match=problem):
            feeder_of(open_splits(out)[0], feed="encode")


def test_text_that_is_gone_or_another_is_named(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"text": "some text " * 40}) + "\n")
    tokenmill.build(path, tokenizer="bytes", out=tmp_path / "store")
    store, _ = open_splits(tmp_path / "store")
    path.write_text(json.dumps({"text": "longer text " * 40}) + "\n")
    with pytest.raises(SourceError, match="it had") as caught:
        feeder_of(store, feed="encode")
    assert "--text FILES" in str(caught.value.hint)
    path.unlink()
    with pytest.raises(SourceError, match=r"c\.jsonl.* cannot be read from here"):
        feeder_of(store, feed="encode")


def test_what_cannot_be_fed_in_the_loop_is_refused(place: Path, tmp_path: Path) -> None:
    said: list[tuple[dict[str, Any], str]] = [
        ({"feed": "encode", "packing": "best-fit"}, "packing='best-fit' cannot be had"),
        ({"feed": "workers", "attention": "documents"}, "attention='documents' cannot be had"),
        ({"feed": "encode", "resume": True}, "resume=True cannot be had"),
        ({"text": "a.jsonl"}, "no meaning with feed='store'"),
        ({"feed": "encode", "feed_workers": 2}, "no meaning with feed='encode'"),
        ({"feed": "pool"}, "feed='pool' is not known"),
    ]
    for options, problem in said:
        with pytest.raises(UsageError, match=problem):
            TrainOptions("store", **options)
    rows = [{"prompt": f"what is {n}?", "completion": f" it is {n}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how: dict[str, Any] = {"out": tmp_path / "store", "format": "prompt-completion"}
    tokenmill.build(tmp_path / "rows.jsonl", tokenizer="bytes", **how)
    with pytest.raises(UsageError, match="more than plain text"):
        feeder_of(open_splits(tmp_path / "store")[0], feed="encode")


def test_a_run_says_what_feeds_it_and_does_not_resume(place: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": "tiny", "seq_len": SEQ_LEN, "batch_tokens": 4 * SEQ_LEN}
    how |= {"device": "cpu", "steps": 4, "out": tmp_path / "run"}
    told: list[str | None] = []
    result = tokenmill.train(
        place / "bpe-store",
        feed="encode",
        on_progress=lambda seen: told.append(seen.message),
        **how,
    )
    assert result.wait_share is not None
    assert "fed by the text of 2 files, tokenized while training" in result.notes[-1]
    assert result.notes[-1] in told
    with pytest.raises(UsageError, match="tokenized its text while it trained"):
        tokenmill.train(place / "bpe-store", resume=True, **how)


@pytest.mark.slow
def test_an_interrupted_run_takes_its_workers_with_it(place: Path, tmp_path: Path) -> None:
    how = [*FLAGS, "--steps", "100000", "-o", str(tmp_path / "run"), "--log-every", "1"]
    how += ["--feed", "workers", "--feed-workers", "2"]
    command = [*COMMAND, str(place / "bytes-store"), *how]
    with subprocess.Popen(
        command, cwd=place, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "step 1/" in line)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them get it
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "go on with" not in rest
    assert not any(each.is_running() and each.status() != "zombie" for each in workers)
