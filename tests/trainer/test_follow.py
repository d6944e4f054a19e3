"""Training while the store is built: the same losses, through waits, failures and kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.loader.builds import building, make_texts, options
from tests.store.s3_server import BUCKET, s3_session
from tests.trainer.runs import COMMAND, losses, train_command

import tokenmill
from tokenmill.builder.run import make_run
from tokenmill.errors import BuildError, SourceError, StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.loader.builds import Build

    from tokenmill.trainer.options import TrainProgress

# The first window of rows has 8 steps.
TINY: dict[str, Any] = {
    "model": "tiny",
    "seq_len": 32,
    "batch_tokens": 1 << 14,
    "micro_batch": 256,
    "steps": 10,
    "log_every": 1,
    "eval_every": 4,
    "eval_rows": 512,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, their store, and a run on it when it was finished."""
    folder = tmp_path_factory.mktemp("place")
    make_run(options(make_texts(folder / "texts"), folder / "store", val=0.2)).run()
    tokenmill.train(folder / "store", follow=True, out=folder / "run", **TINY)
    return folder


@pytest.mark.slow
def test_a_run_that_catches_up_with_the_build_waits_and_says_so(
    place: Path, tmp_path: Path
) -> None:
    waits: list[TrainProgress] = []

    def go_on(build: Build, progress: TrainProgress) -> None:
        if progress.phase == "waiting":
            waits.append(progress)
            build.let(3)

    with building(options(place / "texts", tmp_path / "store", val=0.2), units=3) as build:
        result = tokenmill.train(
            tmp_path / "store",
            follow=True,
            out=tmp_path / "run",
            on_progress=lambda progress: go_on(build, progress),
            **TINY,
        )
        assert not (tmp_path / "store/tokenmill.json").exists(), "trained before the end"
    assert [waits[0].step, waits[0].built] == [8, "32.7% built"]
    assert losses(tmp_path / "run") == losses(place / "run")
    assert 0.4 < result.build_wait_seconds < result.seconds


def test_a_build_that_fails_ends_the_run_with_a_checkpoint(place: Path, tmp_path: Path) -> None:
    asked = options(place / "texts", tmp_path / "store", val=0.2)

    def go_on(build: Build, progress: TrainProgress) -> None:
        if progress.phase == "waiting":
            build.ends_with = BuildError("the disk is full")
            build.let(1)

    with (
        building(asked, units=3) as build,
        pytest.raises(BuildError, match="the disk is full; the training ended") as error,
    ):
        tokenmill.train(
            tmp_path / "store",
            follow=True,
            out=tmp_path / "run",
            on_progress=lambda progress: go_on(build, progress),
            **TINY,
        )
    assert "after 8 steps, which are kept in" in str(error.value)
    assert "run the build again" in str(error.value.hint)
    make_run(asked).run()
    resume: dict[str, Any] = {"follow": True, "resume": True, "out": tmp_path / "run"}
    assert tokenmill.train(tmp_path / "store", **resume, **TINY).resumed_from == 8
    assert losses(tmp_path / "run") == losses(place / "run")


def test_what_needs_the_whole_store_is_refused_before_anything_waits(tmp_path: Path) -> None:
    for said, problem in (
        ({"packing": "best-fit"}, "a million documents at once"),
        ({"shuffle": "full"}, "draws rows from the whole store"),
        ({"feed": "encode"}, "reads the text of a store that is finished"),
    ):
        with pytest.raises(UsageError, match=problem):
            tokenmill.train(tmp_path / "none", follow=True, **{**TINY, **said})


# Text instead of a store: the build is beside the run.
QUICK = {**TINY, "batch_tokens": 1 << 11, "micro_batch": 64, "eval_rows": 64, "steps": 20}


def files_of(store: Path) -> dict[str, bytes]:
    """All that a build of the same input and options has to have."""
    found = [*store.glob("shards/*"), store / "tokenmill.json"]
    return {str(path.relative_to(store)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text whose build takes some seconds, its store, and a run on that."""
    folder = tmp_path_factory.mktemp("long")
    lines = "".join(json.dumps({"text": f"row {n * 7919 % 10007}"}) + "\n" for n in range(50_000))
    with (folder / "long.jsonl").open("w") as file:
        file.writelines([lines] * 24)
    tokenmill.build(folder / "long.jsonl", tokenizer="bytes", out=folder / "store")
    tokenmill.train(folder / "store", follow=True, out=folder / "run", **QUICK)
    return folder


def raw_flags(text: Path, **changes: Any) -> list[str]:
    said = {**QUICK, "save_every": 1, **changes}
    named = [
        (f"--{name.replace('_', '-')}", str(said[name])) for name in said if name[:6] != "eval_r"
    ]
    return [str(text), "-t", "bytes", *(each for pair in named for each in pair)]


def wait_for(found: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return value


def builder_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    return next(iter(psutil.Process(process.pid).children()), None)


def test_text_is_trained_on_while_its_store_is_built(place: Path, tmp_path: Path) -> None:
    told: list[TrainProgress] = []
    result = tokenmill.train(
        [place / "texts"],
        tokenizer="bytes",
        val=0.2,
        out=tmp_path / "run",
        on_progress=told.append,
        **QUICK,
    )
    make_run(options(place / "texts", tmp_path / "store", val=0.2, unit_bytes=None)).run()
    assert result.store == str(tmp_path / "run/store")
    assert files_of(tmp_path / "run/store") == files_of(tmp_path / "store")
    assert result.val_loss is not None
    tokenmill.train(tmp_path / "store", follow=True, out=tmp_path / "after", **QUICK)
    assert losses(tmp_path / "run") == losses(tmp_path / "after")
    assert "beside the training" in str(told[0].message)
    assert not (tmp_path / "run/store/building.json").exists()

    again: dict[str, Any] = {"tokenizer": "bytes", "val": 0.2, "out": tmp_path / "run"}
    with pytest.raises(UsageError, match="holds a run already, at step 20"):
        tokenmill.train(place / "texts", **again, **QUICK)
    longer = {**QUICK, "steps": 22}
    result = tokenmill.train(place / "texts", resume=True, **again, **longer)
    assert (result.resumed_from, result.store) == (20, str(tmp_path / "run/store"))
    with pytest.raises(StoreError, match="has 3 units of another build") as error:
        tokenmill.train(place / "texts", resume=True, **{**again, "val": 0.1}, **longer)
    assert "--store" in str(error.value.hint)


def test_both_sides_may_be_killed_and_the_same_command_goes_on(
    long_text: Path, tmp_path: Path
) -> None:
    command = [*raw_flags(long_text / "long.jsonl"), "--out", "run", "--resume"]
    store = tmp_path / "run/store"
    start: dict[str, Any] = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, *command], **start) as process:
        wait_for(lambda: [*store.glob("shards/*.json")], process)
        builder = builder_of(process)
        assert builder is not None
        builder.kill()
        assert not (store / "tokenmill.json").exists(), "in the middle of it"
        again = wait_for(lambda: builder_of(process), process)
        wait_for(lambda: [*(tmp_path / "run").glob("checkpoints/step-*")], process)
        process.kill()
        assert "died (killed by signal 9); it is started again" in process.communicate()[1]
    psutil.wait_procs([again], timeout=10)
    assert not again.is_running(), "a build never outlives its run"
    done = train_command(*command, "--json", folder=tmp_path)
    result = json.loads(done.stdout)
    assert 0 < result["resumed_from"] <= 20
    assert losses(tmp_path / "run") == losses(long_text / "run")
    assert files_of(store) == files_of(long_text / "store")


def test_ctrl_c_ends_both(long_text: Path, tmp_path: Path) -> None:
    command = raw_flags(long_text / "long.jsonl", steps=100_000)
    process = subprocess.Popen(
        [*COMMAND, *command, "--store", "here", "--out", "run"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: [*(tmp_path / "here").glob("shards/*.json")], process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    assert all(child.nice() >= 10 for child in children), "they give way to the trainer"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped: the steps that were made are kept in" in err
    assert "and so are the units of its store" in err
    assert not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.slow  # the build may fail before there is a step to keep, on a busy machine
def test_a_build_that_fails_beside_its_run_ends_it_with_a_checkpoint_and_the_reason(
    place: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "in"
    texts.mkdir()
    shutil.copy(place / "texts/0.jsonl", texts)
    (texts / "9.jsonl").write_text("no json\n" * 10_000)
    said: dict[str, Any] = {"tokenizer": "bytes", "out": tmp_path / "run"}
    told: list[TrainProgress] = []
    with pytest.raises(BuildError, match="were rejected, more than the threshold") as error:
        tokenmill.train(texts, on_progress=told.append, **said, **{**TINY, "steps": 200})
    assert "; the training ended with it after " in str(error.value)
    assert "which are kept in" in str(error.value)
    assert any("the build failed: " in str(each.message) for each in told)
    made = max(losses(tmp_path / "run"))
    (texts / "9.jsonl").unlink()
    result = tokenmill.train(texts, resume=True, **said, **{**TINY, "steps": made + 1})
    assert result.resumed_from == made


def test_what_cannot_be_built_is_an_error_before_torch_is_loaded(
    place: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"none\.jsonl"):
        tokenmill.train(tmp_path / "none.jsonl", tokenizer="bytes", out=tmp_path / "run", **TINY)
    assert not (tmp_path / "run/checkpoints").exists()
    for inputs, said, problem in (
        (place / "store", {"val": 0.1}, "val=0.1 is for a store that is built of text"),
        (place / "store", {"store": "there"}, "store='there' is for a store that is built of text"),
        (["a", "b"], {}, "2 inputs are given, and a run is trained on one store"),
        ("a", {"tokenizer": "bytes", "val": 2.0}, "is not a share of the documents"),
        ("a", {"tokenizer": "bytes", "packing": "best-fit"}, "a million documents at once"),
        (tokenmill.Store(place / "store"), {"tokenizer": "bytes"}, "is for text, and this is a"),
    ):
        with pytest.raises(UsageError, match=problem):
            tokenmill.train(inputs, out=tmp_path / "run", **{**TINY, **said})


@pytest.mark.slow
def test_two_ranks_train_on_text_as_one_does(place: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "-m", "tokenmill", "train"]
    flags = [*raw_flags(place / "texts", **TINY), "--val", "0.2", "--micro-batch", "128"]
    for left in range(2):  # the second time with a store that an earlier build has left
        if left:
            shutil.rmtree(tmp_path / "two/checkpoints")
        train_command(*flags, "--out", "two", folder=tmp_path, launcher=launcher)
        assert losses(tmp_path / "two") == pytest.approx(losses(place / "run"), rel=1e-4)


@pytest.mark.slow
def test_the_store_of_text_may_be_built_into_a_bucket(place: Path, tmp_path: Path) -> None:
    with s3_session():
        out = f"s3://{BUCKET}/beside/store"
        said: dict[str, Any] = {"tokenizer": "bytes", "val": 0.2, "store": out, **TINY}
        result = tokenmill.train(place / "texts", out=tmp_path / "run", **said)
        assert result.store == out
        assert losses(tmp_path / "run") == losses(place / "run")
