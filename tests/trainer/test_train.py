"""Whole runs, as a user starts them: the function and the real command, killed and resumed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from tests.trainer.runs import (
    COMMAND,
    SEQ_LEN,
    VOCAB,
    counting_store,
    losses,
    metrics,
    train_command,
)

import tokenmill
from tokenmill import history
from tokenmill.errors import (
    DeviceMemoryError,
    MissingExtraError,
    StateError,
    StoreError,
    UsageError,
)
from tokenmill.trainer.model import EIGHT_BIT
from tokenmill.trainer.options import TrainingData, TrainOptions, open_splits
from tokenmill.trainer.run import run_training

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.trainer.options import TrainProgress

TINY: dict[str, Any] = {
    "model": "tiny",
    "seq_len": SEQ_LEN,
    "batch_tokens": 8 * SEQ_LEN,
    "steps": 12,
    "log_every": 1,
    "device": "cpu",
}
KEYS = {
    "step",
    "loss",
    "tokens",
    "tokens_per_second",
    "mfu",
    "wait_share",
    "wait_p50_ms",
    "wait_p99_ms",
    "memory_bytes",
    "seconds",
    "lr",
    "grad_norm",
}


def flags(steps: int = 400) -> list[str]:
    said = f"--model tiny --seq-len {SEQ_LEN} --batch-tokens 256 --steps {steps}"
    return [*shlex.split(said), "--device", "cpu", "--log-every", "1", "--quiet"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that has a split val, and one that has none."""
    folder = tmp_path_factory.mktemp("place")
    corpus = folder / "corpus.jsonl"
    texts = [" ".join(str(n + k) for k in range(n % 30 + 2)) for n in range(400)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenmill.build(corpus, tokenizer="bytes", out=folder / "store", val=0.1)
    counting_store(folder / "plain")
    return folder


def test_a_run_writes_what_it_promises(place: Path, tmp_path: Path) -> None:
    told: list[TrainProgress] = []
    out = tmp_path / "run"
    result = tokenmill.train(
        place / "store", out=out, on_progress=told.append, eval_every=6, save_every=5, **TINY
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert all(set(line) == KEYS for line in steps)
    assert [(line["step"], set(line)) for line in lines if "val_loss" in line] == [
        (6, {"step", "val_loss"}),
        (12, {"step", "val_loss"}),
    ]
    assert steps[-1]["loss"] == result.loss < steps[0]["loss"]
    assert steps[-1]["mfu"] is None  # nobody knows a CPU's peak
    assert result.tokens == steps[-1]["tokens"] == 12 * 8 * SEQ_LEN
    assert result.val_loss is not None
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000012"]
    assert result.checkpoint.name == "step-00000012"
    traced = tokenmill.trace(place / "store", state=out, doc=3)
    assert traced.micro_batches is not None
    assert traced.step == 12 * traced.micro_batches
    assert told[-1].step == 12
    assert [each.phase for each in told[:2]] == ["starting", "starting"]
    assert "tokens to train on" in str(told[0].message)  # before torch is there
    assert "training tiny" in str(told[1].message)


def test_a_view_is_trained_on_as_a_store_of_its_documents(tmp_path: Path) -> None:
    counting_store(tmp_path / "store", documents=60).without(
        [*range(40, 60)], out=tmp_path / "view"
    )
    counting_store(tmp_path / "alone", documents=40)
    said = {**TINY, "steps": 4}
    for name in ("view", "alone"):
        tokenmill.train(tmp_path / name, out=tmp_path / f"run-{name}", **said)
    assert losses(tmp_path / "run-view") == losses(tmp_path / "run-alone")


def test_what_was_seen_of_each_source_of_a_mixture_is_written_down(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"{k} words of a text"}) + "\n" for k in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    (tmp_path / "b.jsonl").write_text("".join(rows[:100]))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    tokenmill.build(files, tokenizer="bytes", out=tmp_path / "store", serial=True)
    said = {**TINY, "mixture": "source"}
    tokenmill.train(tmp_path / "store", out=tmp_path / "whole", **said)
    tokenmill.train(tmp_path / "store", out=tmp_path / "parts", **{**said, "steps": 5})
    tokenmill.train(tmp_path / "store", out=tmp_path / "parts", resume=True, **said)
    seen = {}
    for name in ("whole", "parts"):
        text = (tmp_path / name / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines() if '"loss"' in line]
        seen[name] = [{k: v for k, v in each.items() if "tokens/" in k} for each in lines]
        assert [sum(each.values()) for each in seen[name]] == [each["tokens"] for each in lines]
    assert len(seen["whole"]) == 12
    assert all(len(each) == 2 and 0 not in each.values() for each in seen["whole"][3:])
    assert seen["parts"] == seen["whole"]


def test_a_store_without_val_says_how_to_make_one_and_is_trained_on(
    place: Path, tmp_path: Path
) -> None:
    result = tokenmill.train(place / "plain", out=tmp_path / "run", **TINY)
    assert result.val_loss is None
    assert "--val 0.01" in result.notes[0]


@pytest.mark.parametrize(
    ("attention", "window"),
    # Of 256 tokens a step: another one from the fifth step on, and none from the ninth.
    [
        pytest.param("flash", None, marks=pytest.mark.slow),
        ("documents", None),
        ("documents", "0:3,1024:9,2048:all"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    place: Path, tmp_path: Path, attention: str, window: str | None
) -> None:
    said = {**TINY, "attention": attention, "packing": "best-fit", "save_every": 5}
    said["window"] = window
    # With one source: what it weighs changes nothing but how the rows are told apart.
    said["mixture"] = "source:*=1" if window else None
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tokenmill.train(place / "store", out=whole, **said)

    def interrupt(progress: TrainProgress) -> None:
        if progress.phase == "training" and progress.step >= 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tokenmill.train(place / "store", out=parts, on_progress=interrupt, **said)
    assert 7 <= max(losses(parts)) < 12
    again = tokenmill.train(place / "store", out=parts, resume=True, **said)
    assert again.resumed_from is not None
    assert losses(parts) == losses(whole)
    done = tokenmill.train(place / "store", out=parts, resume=True, **said)
    assert (done.steps, done.resumed_from) == (12, 12)


def test_an_attention_window_holds_from_its_token_on(place: Path, tmp_path: Path) -> None:
    """By what attention computes: fewer pairs of tokens while a window is short."""
    said = {**TINY, "attention": "documents", "steps": 6}
    found = {}
    for window in (None, "3", "0:3,512:9,1024:all"):
        out = tmp_path / f"run-{window}"
        told: list[str] = []
        tokenmill.train(
            place / "store",
            out=out,
            window=window,
            on_progress=lambda each, told=told: told.append(str(each.message)),  # type: ignore[misc]
            **said,
        )
        found[window] = losses(out)
        is_told = any("attention looks back 3 tokens" in message for message in told)
        assert is_told == (window is not None)
    plain, short, growing = found.values()
    # The loss of a step is made before its update.
    assert growing[1] == short[1] != plain[1]
    assert growing[2] == short[2]
    assert growing[3] != short[3]


def test_what_gives_a_run_its_meaning_may_not_change(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = {**TINY, "steps": 2, "out": out}
    tokenmill.train(place / "store", **said)
    with pytest.raises(UsageError, match="holds a run already, at step 2") as caught:
        tokenmill.train(place / "store", **said)
    assert "--resume" in str(caught.value.hint)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model": "mini"}, "model='tiny', and this command model='mini'"),
        ({"seq_len": 64, "batch_tokens": 512}, "seq_len=32"),
        ({"packing": "pad"}, "packing='concat'"),
        ({"seed": 1}, "seed=0"),
    ]
    for change, words in changes:
        with pytest.raises(UsageError, match=words):
            tokenmill.train(place / "store", resume=True, **{**said, **change})
    with pytest.raises(UsageError, match="vocab_size=257"):
        tokenmill.train(place / "plain", resume=True, **said)
    other = place / "other"
    tokenmill.build(place / "corpus.jsonl", tokenizer="bytes", out=other, limit=300, val=0.1)
    with pytest.raises(StateError, match="does not hold what it held"):
        tokenmill.train(other, resume=True, **said)
    with pytest.raises(UsageError, match="has made 2 steps already"):
        tokenmill.train(place / "store", resume=True, **{**said, "steps": 1})
    longer = tokenmill.train(place / "store", resume=True, **{**said, "steps": 3})
    assert (longer.steps, longer.resumed_from) == (3, 2)


@pytest.mark.slow
def test_a_run_on_a_store_that_grew_ends_its_epoch_first(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "store"
    corpus.mkdir()
    for number in range(66):  # small files, which are put into groups: one more cuts them anew
        (corpus / f"{number:02}.txt").write_text(" ".join(str(number + k) for k in range(9)))
    tokenmill.build(corpus, tokenizer="bytes", out=out)
    said: dict[str, Any] = {**TINY, "packing": "best-fit", "steps": 16}
    tokenmill.train(out, out=tmp_path / "run", **{**said, "steps": 3})
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    shutil.copytree(out, tmp_path / "old")
    for number in range(9):
        (corpus / f"{number:02}-more.txt").write_text(" ".join(str(k) for k in range(number, 30)))
    tokenmill.build(corpus, tokenizer="bytes", out=out)
    assert list((out / "retired").iterdir())
    tokenmill.train(tmp_path / "old", out=tmp_path / "other", resume=True, **said)
    told: list[TrainProgress] = []
    result = tokenmill.train(
        out, out=tmp_path / "run", resume=True, on_progress=told.append, **said
    )
    (note,) = (note for note in result.notes if "grew" in note)
    assert note in [each.message for each in told]
    run = history.read_run(tmp_path / "run")
    loader = history.open_loader(run, [tokenmill.Store(out)])
    assert run.micro_batches is not None
    end = next(k for k in range(99) if loader.batch(k).epochs.max() > 0) // run.micro_batches
    assert note.startswith("the store grew by 9 documents since the state was saved")
    assert f"they come with epoch 1, in step {end};" in note
    same = [
        losses(tmp_path / name)[step] for name in ("run", "other") for step in range(1, end + 1)
    ]
    assert end > 4
    assert same[:end] == same[end:]
    shown = [
        (step, place, part.at, part.tokens)
        for step in range(16 * run.micro_batches)
        for place, row in enumerate(loader.rows(step))
        for part in row.parts
        if part.source.path.endswith("/05.txt")
    ]
    traced = tokenmill.trace(out, state=tmp_path / "run", row=f"{corpus}/05.txt:0", limit=99)
    (found,) = traced.documents
    assert [(s.step, s.place, s.at, s.tokens) for s in found.shown] == shown
    assert shown
    assert found.coming[0].epoch == 1


def test_a_resumed_run_says_that_its_attention_windows_are_others(
    place: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"model": "tiny", "seq_len": SEQ_LEN, "batch_tokens": 4 * SEQ_LEN}
    how |= {"device": "cpu", "attention": "documents", "out": tmp_path, "compile": False}
    notes = [
        tokenmill.train(place / "store", steps=steps, window=window, resume=True, **how).notes
        for steps, window in ((2, "0:16"), (3, "0:16"), (4, None))
    ]
    said = "--window is not given from here on, and was 0:16 in the 3 steps before"
    assert [said in each for each in notes] == [False, False, True]


def test_kill_9_and_resume_give_the_same_losses(place: Path, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    args = [str(place / "store"), *flags(80), "--save-every", "20", "--out", str(killed)]
    process = subprocess.Popen([*COMMAND, *args])
    deadline = time.monotonic() + 100
    while not (killed / "checkpoints" / "step-00000020").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    lost = max(losses(killed))
    assert lost < 80
    # As a crash in the middle of writing would leave it.
    (killed / "checkpoints" / ".unfinished-step-00000099-aa").mkdir()
    said = {**TINY, "steps": 80, "save_every": 20}
    done = tokenmill.train(place / "store", out=killed, resume=True, **said)
    assert done.resumed_from in range(20, 80, 20)
    tokenmill.train(place / "store", out=whole, **said)
    assert losses(killed) == losses(whole)
    assert len(losses(killed)) == 80
    assert not list((killed / "checkpoints").glob(".unfinished*"))


def test_sigterm_ends_the_step_writes_a_checkpoint_and_says_how_to_go_on(
    place: Path, tmp_path: Path
) -> None:
    args = [str(place / "store"), *flags(100_000), "--out", "my run"]
    process = subprocess.Popen(
        [*COMMAND, *args],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "my run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (path.exists() and path.read_text().count("\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "")
    first, command = err.splitlines()
    assert first.startswith("stopped by SIGTERM: the steps that were made are kept in my run")
    assert shlex.split(command) == ["python", "-m", "tokenmill", "train", *args, "--resume"]
    [checkpoint] = (tmp_path / "my run" / "checkpoints").iterdir()
    assert json.loads((checkpoint / "checkpoint.json").read_text())["step"] == max(
        losses(path.parent)
    )


LONG_STEP = """
import torch
from tokenmill.trainer.run import StopRequest
matrix = torch.ones(20_000, 20_000)
with StopRequest(lambda: None):
    print("begun", flush=True)
    matrix @ matrix  # minutes, in which no handler of Python's runs
print("the step ended")
"""


def test_a_second_signal_ends_a_run_in_the_middle_of_a_step() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_STEP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.2)  # it is in the product by now; if not, the signals act all the sooner
    process.terminate()
    assert process.stderr is not None
    assert process.stderr.readline().startswith("stopping after this step")
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "")
    assert err == "ended in the middle of a step\n"


def test_what_cannot_fit_is_refused_before_the_first_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()._replace(available=8 << 30, total=25 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(DeviceMemoryError, match=r"needs about .* 8.6 GB free") as caught:
        tokenmill.train(
            place / "store", model="large", seq_len=32_768, out=tmp_path / "run", device="cpu"
        )
    expected = "no model that takes rows of 32,768 fits: use a shorter --seq-len"
    assert expected in str(caught.value.hint)
    with pytest.raises(DeviceMemoryError) as caught:
        tokenmill.train(place / "store", model="large", out=tmp_path / "run", device="cpu")
    assert "use --model small, which fits" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_a_long_step_is_told_before_it_begins(place: Path, tmp_path: Path) -> None:
    told: list[str] = []

    def stop(progress: TrainProgress) -> None:
        told.append(str(progress.message))
        if "a step will take about" in told[-1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenmill.train(
            place / "store",
            out=tmp_path / "run",
            on_progress=stop,
            **{**TINY, "batch_tokens": 1 << 40, "micro_batch": 8},
        )


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flash", "documents"])
def test_two_processes_make_the_steps_of_one(place: Path, tmp_path: Path, attention: str) -> None:
    common = [str(place / "store"), *flags(6), "--packing", "pad", "--boundaries", "mask"]
    common += ["--attention", attention]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "-m", "tokenmill", "train"]
    two = train_command(
        *common, "--micro-batch", "2", "--out", "two", "--json", folder=tmp_path, launcher=launcher
    )
    assert json.loads(two.stdout)["steps"] == 6
    said = {**TINY, "steps": 6, "packing": "pad", "boundaries": "mask", "attention": attention}
    tokenmill.train(place / "store", out=tmp_path / "one", **said)
    expected = losses(tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(expected, rel=1e-4)
    norms = [[line["grad_norm"] for line in metrics(tmp_path / run)] for run in ("one", "two")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    counts = [line["tokens"] for line in metrics(tmp_path / "two")]
    assert counts == [256 * step for step in range(1, 7)]
    rng = torch.load(
        tmp_path / "two" / "checkpoints" / "step-00000006" / "rng.pt", weights_only=True
    )
    assert len(rng) == 2  # of both ranks


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_missing_or_empty_store_says_how_to_build_one(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError) as caught:
        tokenmill.train(tmp_path / folder, **TINY)
    assert "tokenmill build" in str(caught.value.hint)
    assert f"--out {tmp_path / folder}" in str(caught.value.hint)
    (tmp_path / "text.jsonl").write_text('{"text": "some"}\n')
    with pytest.raises(StoreError, match="is a file, and no view") as caught:
        tokenmill.train(tmp_path / "text.jsonl", **TINY)
    assert "tokenmill train FILES -t TOKENIZER" in str(caught.value.hint)


def test_a_store_without_tokens_says_how_to_build_one(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    blank = tmp_path / "blank.jsonl"
    tokenmill.build(blank, tokenizer="bytes", out=tmp_path / "store", allow_empty=True)
    with pytest.raises(StoreError, match="no tokens to train on") as caught:
        tokenmill.train(tmp_path / "store", **TINY)
    assert "tokenmill build" in str(caught.value.hint)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(UsageError, match="no option momentum"):
        tokenmill.train("store", momentum=0.9)  # type: ignore[call-arg]


def test_a_missing_torch_is_one_sentence(place: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tokenmill.cli.main import run\n"
        f"sys.argv = ['tokenmill', 'train', {str(place / 'plain')!r}]\nrun()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: training needs the package 'torch', which is not installed",
        "hint: install it with: pip install 'tokenmill[torch]'",
    ]


@pytest.mark.parametrize(
    ("package", "change"),
    [("bitsandbytes", {"optimizer": "adamw8bit"}), ("tensorboard", {"tensorboard": True})],
)
def test_a_missing_package_is_one_sentence(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    change: dict[str, Any],
) -> None:
    for each in {package, "torchao"}:
        monkeypatch.setitem(sys.modules, each, None)
    with pytest.raises(MissingExtraError) as caught:
        tokenmill.train(place / "plain", out=tmp_path / "run", **{**TINY, **change})
    assert f"pip install 'tokenmill[{package}]'" in str(caught.value.hint)


def test_running_out_of_memory_is_no_bare_traceback(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of which one step would take petabytes; the feeder's first batch is what fails."""
    memory = psutil.virtual_memory()._replace(available=1 << 70, total=1 << 70)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    store, _ = open_splits(place / "plain")
    source = TrainingData(store, None)
    options = TrainOptions(
        place / "plain",
        model="tiny",
        seq_len=1024,
        micro_batch=1 << 40,
        accumulate=1,
        device="cpu",
        out=tmp_path / "run",
    )
    assert store.vocab_size == VOCAB
    with pytest.raises(DeviceMemoryError, match="out of memory on the CPU") as caught:
        run_training(source, options)
    assert f"--micro-batch {1 << 39} --accumulate 2" in str(caught.value.hint)


def test_tensorboard_files_are_written(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tokenmill.train(place / "plain", out=tmp_path / "run", tensorboard=True, **TINY)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


@pytest.mark.slow
@pytest.mark.parametrize("package", EIGHT_BIT)
def test_eight_bit_adamw_learns_and_resumes_with_the_package_that_it_began_with(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for each in EIGHT_BIT:
        pytest.importorskip(each)
    said = {**TINY, "optimizer": "adamw8bit", "steps": 6, "save_every": 3}
    store = place / "plain"
    with monkeypatch.context() as alone:
        for each in {*EIGHT_BIT} - {package}:
            alone.setitem(sys.modules, each, None)
        whole = tokenmill.train(store, out=tmp_path / "whole", **said)
        tokenmill.train(store, out=tmp_path / "parts", **{**said, "schedule": "wsd", "steps": 3})
    assert whole.loss < losses(tmp_path / "whole")[1]
    state = torch.load(
        tmp_path / "whole" / "checkpoints" / "step-00000006" / "optimizer.pt", weights_only=True
    )
    assert ("exp_avg" in state["state"][0]) == (package == "torchao")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000006")
    again = tokenmill.train(store, out=tmp_path / "again", resume=True, **said)
    assert again.resumed_from == 3
    assert again.loss == pytest.approx(whole.loss, rel=1e-5)
    with monkeypatch.context() as alone:
        alone.setitem(sys.modules, package, None)
        with pytest.raises(
            MissingExtraError, match=f"of this checkpoint needs the package '{package}'"
        ):
            tokenmill.train(store, out=tmp_path / "whole", resume=True, **{**said, "steps": 8})
    tokenmill.train(store, out=tmp_path / "whole", resume=True, **{**said, "steps": 8})
    assert sorted(losses(tmp_path / "whole")) == list(range(1, 9))
