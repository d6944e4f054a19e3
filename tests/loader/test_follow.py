"""Loaders that read a store while it is built: the same batches, through kills of either side."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.loader.builds import building, make_texts, options
from tests.web import serve

from tokenmill.builder.run import finish, make_run
from tokenmill.errors import BuildError, StateError, StoreError, UsageError
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.stalls import StallMeter, StallReport
from tokenmill.store import following
from tokenmill.store.following import Follower
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.loader.batch import Batch

ROWS: dict[str, Any] = {"seq_len": 1024, "batch_size": 8}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("texts"))


def followed(loader: Loader) -> Follower:
    assert loader.follower is not None
    return loader.follower


def take(loader: Loader, count: int) -> list[Batch]:
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


def same(left: list[Batch], right: list[Batch]) -> bool:
    names = ("input_ids", "labels", "doc_ids", "cu_seqlens")
    return len(left) == len(right) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(left, right, strict=True)
        for name in names
    )


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"packing": "pad", "seq_len": 128, "shuffle": False},
        {"balance": "attention", "accumulate": 3, "batch_size": 4},
    ],
    ids=["concat", "pad", "balanced"],
)
def test_batches_are_those_of_the_finished_store_on_any_rank(
    texts: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    rows = {**ROWS, **said}
    ranks = [
        partial(Loader, tmp_path / "store", rank=rank, world_size=2, **rows) for rank in (0, 1)
    ]
    with building(options(texts, tmp_path / "store"), units=6) as build:
        loaders = [make(follow=True) for make in ranks]
        found = [take(loader, 6) for loader in loaders]
        states = [loader.state_dict() for loader in loaders]
        build.let(10)
        for batches, loader in zip(found, loaders, strict=True):
            batches += take(loader, 3)
        assert not followed(loaders[0]).is_finished, "all of this is read before the end"
        again = pickle.loads(pickle.dumps(loaders[1]))
        build.let(1000)
        tail = take(again, 20)
        for batches, loader in zip(found, loaders, strict=True):
            batches += take(loader, 100)
    assert states[0] == states[1]
    for batches, make, state in zip(found, ranks, states, strict=True):
        finished = make(shuffle=rows.get("shuffle", "nearby"))
        assert same(batches, take(finished, 109)), "into the second epoch"
        finished.load_state_dict(json.loads(json.dumps(state)))
        assert same(take(finished, 5), batches[6:11])
        assert finished.num_steps is None
    assert same(tail, found[1][9:29])


def test_a_state_goes_on_with_the_build_or_without_it(texts: Path, tmp_path: Path) -> None:
    follow = partial(Loader, tmp_path / "store", follow=True, epochs=1, **ROWS)
    with building(options(texts, tmp_path / "store"), units=12) as build:
        loader = follow()
        first = take(loader, 17)
        state = loader.state_dict()
        assert loader.num_steps is None
        with pytest.raises(TypeError, match="goes on: it has no length yet"):
            len(loader)
        with pytest.raises(UsageError, match="when the build that is followed has ended"):
            loader.trace(0)
        resumed = follow(batch_size=4)
        resumed.load_state_dict(state)
        build.let(1000)
        rest = [*resumed]
    whole = Loader(tmp_path / "store", shuffle="nearby", epochs=1, **ROWS)
    rows = np.concatenate([batch.input_ids for batch in whole])
    assert np.array_equal(np.concatenate([b.input_ids for b in (*first, *rest)])[: len(rows)], rows)
    assert follow().num_steps == len(whole), "a finished store is followed to its end at once"

    other = Loader(tmp_path / "store", shuffle="nearby", split="train", seed=1, **ROWS)
    with pytest.raises(StateError, match="seed=0"):
        other.load_state_dict(state)
    (texts.parent / "other.jsonl").write_text('{"text": "other"}\n' * 50_000)
    make_run(options([str(texts.parent / "other.jsonl")], tmp_path / "other")).run()
    with pytest.raises(StateError, match="does not hold what it held"):
        Loader(tmp_path / "other", shuffle="nearby", **ROWS).load_state_dict(state)


@pytest.mark.parametrize(
    "changes", [{"limit": 700}, {"val": 0.2}, {"where": "text like '%77%'"}], ids=str
)
def test_the_plan_is_that_of_the_manifest(
    texts: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """With a limit the last files have no units; of a split some units have no shard."""
    with building(options(texts, tmp_path / "store", **changes), units=2) as build:
        follower = Follower(tmp_path / "store", split="train")
        units = follower.current.manifest.units
        build.let(1000)
        assert follower.wait_for(lambda _: False)
    manifest = Store(tmp_path / "store").manifest
    assert manifest.units[: len(units)] == units
    assert follower.current.manifest == manifest
    assert not (tmp_path / "store/building.json").exists()
    if "val" in changes:
        with pytest.raises(UsageError, match="has several splits, and none was asked for"):
            Follower(tmp_path / "store", split=None)


def test_parts_are_followed_in_the_order_of_the_whole(texts: Path, tmp_path: Path) -> None:
    loader: list[Batch] = []
    ended = threading.Event()

    def read() -> None:
        follow = Loader(tmp_path / "store", follow=True, epochs=1, shuffle=False, **ROWS)
        loader.extend(follow)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    for part in (2, 1, 3):
        make_run(options(texts, tmp_path / "store", part=f"{part}/3")).run()
        assert not ended.is_set()
    finish(tmp_path / "store")
    assert ended.wait(20)
    assert same(loader, [*Loader(tmp_path / "store", epochs=1, shuffle=False, **ROWS)])


def test_a_store_at_a_url_is_followed(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "REMOTE_POLL_SECONDS", 0.05)
    with serve(tmp_path) as server:
        with building(options(texts, tmp_path / "store"), units=6) as build:
            loader = Loader(f"{server.address}/store", follow=True, **ROWS)
            found = take(loader, 10)
            build.let(5)
            found += take(loader, 10)
            assert not followed(loader).is_finished
            build.let(1000)
            found += take(loader, 60)
        assert same(found, take(Loader(tmp_path / "store", shuffle="nearby", **ROWS), 80))


KILLED = """
import sys, time, tokenmill
from tokenmill.builder.run import make_run
from tokenmill.options import BuildOptions
said = dict(tokenizer="bytes", unit_bytes=50_000, serial=True, followed=True)
run = make_run(BuildOptions(sys.argv[1], out=sys.argv[2], **said))
run.on_unit = lambda _: time.sleep(float(sys.argv[3]))
run.run()
"""


def test_a_build_that_is_killed_and_started_again_goes_on_under_its_reader(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    start = partial(subprocess.Popen, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-c", KILLED, str(texts), str(tmp_path / "store")]
    with start([*command, "0.1"]) as killed:
        meter = StallMeter()
        loader = Loader(tmp_path / "store", follow=True, on_wait=told.append, **ROWS)
        found = take(loader, 3)
        killed.send_signal(signal.SIGKILL)
    with start([*command, "0.03"]) as again:
        found += [batch for batch, _ in zip(meter.watch(loader), range(40), strict=False)]
    assert again.returncode == 0
    report = meter.report()
    assert 0 < report.build_wait_seconds <= report.wait_seconds
    assert "for the build  " in report.describe()
    assert "the loop is faster than the build that it follows" in report.describe()
    assert StallReport.from_json(json.loads(json.dumps(report.as_json()))) == report
    older = {**report.as_json()}
    del older["build_wait_seconds"]
    assert StallReport.from_json(older).build_wait_seconds == 0
    assert told[:2] == [True, False]
    assert followed(loader).waited_seconds > 0
    assert same(found, take(Loader(tmp_path / "store", shuffle="nearby", **ROWS), 43))

    # And one that nobody starts again: what was committed is read, then the error says so.
    monkeypatch.setattr(following, "PATIENCE_SECONDS", 0.3)
    with start([*command[:-1], str(tmp_path / "lost"), "0.1"]) as lost:
        loader = Loader(tmp_path / "lost", follow=True, **ROWS)
        batches = iter(loader)
        next(batches)
        lost.send_signal(signal.SIGKILL)
    with pytest.raises(BuildError, match=r"nothing has come of the build of .* it was ended, or"):
        list(zip(range(200), batches, strict=False))
    assert loader.step >= 16, "the first window, which was there"


def test_a_build_that_fails_is_an_error_with_its_reason(texts: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(texts, tmp_path / "in") / "9.jsonl"
    bad.write_text("no json\n" * 10_000)
    asked = options(tmp_path / "in", tmp_path / "store")
    with building(asked, units=1000) as build:
        loader = Loader(tmp_path / "store", follow=True, **ROWS)
        batches = iter(loader)
        found: list[Batch] = []
        with pytest.raises(BuildError, match=r"the build of .*store' failed: .* rejected") as error:
            found += batches
    assert isinstance(build.error, BuildError)
    assert "run the build again" in str(error.value)
    assert (tmp_path / "store/building.json").exists()
    state = loader.state_dict()
    bad.write_text('{"text": "mended"}\n' * 20_000)
    make_run(asked).run()
    mended = Loader(tmp_path / "store", shuffle="nearby", **ROWS)
    mended.load_state_dict(state)
    assert mended.step == loader.step == 48, "the whole windows of what was committed"


@pytest.mark.parametrize("changes", [{"eos": False, "rebuild": True}, {}], ids=["options", "input"])
def test_a_store_that_is_built_anew_under_its_reader_is_refused(
    texts: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with building(options(texts, tmp_path / "store"), units=6) as build:
        loader = Loader(tmp_path / "store", follow=True, **ROWS)
        take(loader, 3)
        build.made.on_unit = stop
    what = texts if changes else [str(texts / "2.jsonl")]
    make_run(options(what, tmp_path / "store", prune=True, **changes)).run()
    how = "with another tokenizer or other options" if changes else "of other input"
    with pytest.raises(StoreError, match=f"was built anew, {how}, while it was read"):
        take(loader, 100)


def test_what_cannot_be_followed_is_refused(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, problem in (
        ({"packing": "best-fit"}, "a million documents at once"),
        ({"shuffle": "full"}, "draws rows from the whole store"),
        ({"epochs": 0.5}, "whose size is not known yet"),
    ):
        with pytest.raises(UsageError, match=problem):
            Loader("store", follow=True, **ROWS, **said)
    make_run(options(texts, tmp_path / "store")).run()
    store = Store(tmp_path / "store")
    for source in (store, Mixture.of(store)):
        with pytest.raises(UsageError, match="follow=True is for the path of a store"):
            Loader(source, follow=True, **ROWS)
    store.without([0], out=tmp_path / "kept.view")
    with pytest.raises(UsageError, match="is a file, such as a view"):
        Loader(tmp_path / "kept.view", follow=True, **ROWS)
    monkeypatch.setattr(following, "START_SECONDS", 0.1)
    with pytest.raises(StoreError, match="no build of one has begun") as error:
        Loader(tmp_path / "none", follow=True, **ROWS)
    assert "tokenmill.build(" in str(error.value)


def test_a_loader_that_waits_is_closed_at_once(texts: Path, tmp_path: Path) -> None:
    with building(options(texts, tmp_path / "store"), units=6):
        loader = Loader(tmp_path / "store", follow=True, prefetch=2, **ROWS)
        batches = iter(loader)
        next(batches)
        threading.Timer(0.2, followed(loader).end_waiting).start()
        began = time.monotonic()
        assert len([*batches]) < 100
        assert time.monotonic() - began < 5


def test_the_streams_of_a_followed_build_are_worked_on_in_their_order(tmp_path: Path) -> None:
    """By all workers; else each of them would be at a stream of its own."""
    lines = b"".join(b'{"text": "row %d of many"}\n' % n for n in range(12_000))
    names = [str(tmp_path / f"{number}.jsonl.gz") for number in range(3)]
    for name in names:
        (tmp_path / name).write_bytes(gzip.compress(lines))
    for is_followed, places in ((True, [0, 1, 2]), (False, [0, 0, 0])):
        asked = options(names, tmp_path / "s", serial=False, workers=2, followed=is_followed)
        made = make_run(asked)
        tasks = made.prepare(made.discover()).plan.tasks
        assert [task.file.path for task in tasks] == names
        assert [task.place for task in tasks] == places
        assert all(task.finds_tasks is is_followed for task in tasks)
