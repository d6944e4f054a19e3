"""Training while the store is built: the same losses, through waits, failures and kills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.loader.builds import building, make_texts, options
from tests.trainer.runs import losses

import tokenmill
from tokenmill.builder.run import make_run
from tokenmill.errors import BuildError, UsageError

if TYPE_CHECKING:
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
