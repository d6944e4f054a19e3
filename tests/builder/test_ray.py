"""Builds on a Ray cluster of several nodes that lose nodes, workers and drivers: the same bytes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builder.stores import make_texts, tree, write_jsonl
from tests.builder.test_unknown import english, japanese, train_english
from tests.once import once
from tests.runners.jobs import Worker
from tests.store.s3_server import BUCKET, Refusal, remote_tree, s3_session

import tokenmill
from tokenmill.errors import DEBUG, BuildError, TooManyRejectsError, UnknownTextError
from tokenmill.loader.loader import Loader
from tokenmill.runners.local import TaskDone, TaskReport, WorkerLost, WorkerUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenmill.builder.progress import BuildResult, Progress
    from tokenmill.runners.local import Event
    from tokenmill.runners.ray import RayCluster

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

OPTIONS: dict[str, Any] = {
    "tokenizer": "bytes",
    "unit_bytes": 3000,
    "val": 0.2,
    "max_rejects": 1.0,
    "memory": "1GB",
}
ROWS: dict[str, Any] = {"seq_len": 64, "batch_size": 4}
ANSWERS: dict[str, Any] = {
    **OPTIONS,
    "inputs": "answers.jsonl",
    "format": "prompt-completion",
    "max_length": 100,
}
DRIVER = f"""
import sys, tokenmill
tokenmill.build("in", out=sys.argv[1], runner="ray", address=sys.argv[2], **{OPTIONS!r})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input of more than fifty units, and the stores of local builds."""
    root = tmp_path_factory.mktemp("ray")
    (root / "in").mkdir()
    for number in range(6):
        texts = [*make_texts(200, seed=number), b"{bad", ""]
        write_jsonl(root / "in" / f"{number}.jsonl", texts)
    for number in range(80):  # in groups
        write_jsonl(root / "in" / f"small-{number}.jsonl", [f"small {number}", b"{bad"])
    rows = [{"prompt": f"say {k}", "completion": text} for k, text in enumerate(make_texts(90))]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with in_folder(root):
        built = tokenmill.build("in", out="local", serial=True, **OPTIONS)
        tokenmill.build(**ANSWERS, out="answers", serial=True)
    assert built.units_total > 50
    return root


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    """A head that works, beside a bucket that all its nodes know; tests add and remove others."""
    from ray.cluster_utils import Cluster

    # A node that is gone is missed after two seconds instead of half a minute.
    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    with s3_session() as server:
        found = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": health}
        )
        found.s3 = server
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def connection(cluster: Any) -> Iterator[None]:
    """A connection that the caller has made, and keeps: builds use it, and share its workers."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    assert ray.is_initialized()
    ray.shutdown()


@pytest.fixture
def session(connection: None) -> RayCluster:
    from tokenmill.runners.ray import RayCluster

    return RayCluster(None, local_cpus=1)


class in_folder:  # noqa: N801 (used like a function)
    """Work in a folder for a while; names in a store are relative to it."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, Path.cwd()

    def __enter__(self) -> None:
        os.chdir(self._path)

    def __exit__(self, *_: object) -> None:
        os.chdir(self._before)


def build(
    folder: Path, out: str, on_progress: Callable[[Progress], None] | None = None
) -> BuildResult:
    with in_folder(folder):
        return tokenmill.build("in", out=out, runner="ray", on_progress=on_progress, **OPTIONS)


class AtUnit:
    """Does something once, as soon as so many units are committed."""

    def __init__(self, units: int, act: Callable[[Progress], None]) -> None:
        self.units, self.act, self.done = units, act, False
        self.places: list[str] = []

    def __call__(self, progress: Progress) -> None:
        if progress.place is not None:
            self.places.append(progress.place)
        if not self.done and progress.units_done >= self.units:
            self.done = True
            self.act(progress)


def receipts(folder: Path, out: str) -> int:
    return len(list((folder / out / "shards").glob("*.json")))


@pytest.mark.slow
def test_a_lost_worker_and_a_lost_node_cost_nothing_but_time(
    folder: Path, cluster: Any, connection: None
) -> None:
    node = cluster.add_node(num_cpus=2)
    # What the memory killer of the system does to a process.
    kill = AtUnit(4, lambda progress: os.kill(progress.workers[0].pid, signal.SIGKILL))
    lose = AtUnit(12, lambda _: cluster.remove_node(node, allow_graceful=False))

    def watch(progress: Progress) -> None:
        kill(progress)
        lose(progress)

    result = build(folder, "lost", watch)
    assert kill.done
    assert lose.done
    assert any(place.startswith("2 nodes, 4 CPUs, ") for place in lose.places)
    assert result.units_built == result.units_total > 50
    assert tree(folder / "lost") == tree(folder / "local")


@pytest.mark.slow
def test_a_build_on_a_cluster_is_followed(folder: Path, connection: None) -> None:
    """Rows in the order of the text, from the first unit on, whichever worker is done first."""
    read: list[Any] = []
    first, store = threading.Event(), folder / "followed"

    def follow() -> None:
        loader = Loader(store, split="train", follow=True, shuffle=False, epochs=1, **ROWS)
        for batch in loader:
            read.append(batch.input_ids.copy())
            first.set()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    seen: list[bool] = []
    build(folder, "followed", AtUnit(30, lambda _: seen.append(first.wait(20))))
    reader.join(60)
    assert not reader.is_alive()
    assert seen == [True], "before the end"
    finished = Loader(store, split="train", shuffle=False, epochs=1, **ROWS)
    assert np.array_equal(np.concatenate(read), np.concatenate([b.input_ids for b in finished]))


@pytest.mark.slow
def test_a_worker_that_dies_in_the_middle_of_its_task_is_told_of(
    session: RayCluster, tmp_path: Path
) -> None:
    task = ("die when told", str(tmp_path / "die"))
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, WorkerUsage):  # the driver has heard of the attempt
            (tmp_path / "die").touch()

    run(session, [task], on_event)
    assert [event.task for event in events if isinstance(event, WorkerLost)] == [task]
    assert [event.task for event in events if isinstance(event, TaskDone)] == [task]


@pytest.mark.slow
def test_what_a_worker_prints_cannot_act_on_a_terminal(session: RayCluster, cluster: Any) -> None:
    """It is kept in Ray's logs, and shown to drivers that connected with `log_to_driver`."""
    run(session, [("print", "\x1b]0;taken\x07 by a worker")], lambda _: None)
    logs = [
        path.read_bytes() for path in Path(cluster.head_node.get_logs_dir_path()).rglob("*.out")
    ]
    said = b"".join(logs)
    assert b"\\x1b]0;taken\\x07 by a worker" in said
    assert b"\x1b]0;taken" not in said


@pytest.mark.slow
def test_a_worker_that_stands_still_is_overtaken_by_a_copy_of_its_task(
    folder: Path, connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.runners.ray.COPY_SECONDS", 1.0)
    stopped: list[int] = []

    def stop(progress: Progress) -> None:
        stopped.append(progress.workers[-1].pid)
        os.kill(stopped[0], signal.SIGSTOP)

    result = build(folder, "straggler", AtUnit(6, stop))
    assert stopped
    # Older versions of Ray leave it standing, with the CPU that it had.
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped[0], signal.SIGKILL)
    assert result.units_built == result.units_total
    assert tree(folder / "straggler") == tree(folder / "local")


@pytest.mark.slow
def test_a_driver_that_is_killed_is_started_again_and_resumes(
    folder: Path, cluster: Any, connection: None
) -> None:
    command = [sys.executable, "-c", DRIVER, "driver-lost", cluster.address]
    driver = subprocess.Popen(command, cwd=folder)
    started = time.monotonic()
    while receipts(folder, "driver-lost") < 5:
        assert driver.poll() is None, "it ended before it could be killed"
        assert time.monotonic() - started < 120
        time.sleep(0.005)
    driver.kill()
    driver.wait()
    result = build(folder, "driver-lost")
    assert result.units_resumed >= 5
    assert tree(folder / "driver-lost") == tree(folder / "local")


@pytest.mark.slow
def test_prompts_with_completions_go_to_a_bucket_that_falters(
    folder: Path, cluster: Any, connection: None
) -> None:
    out = f"s3://{BUCKET}/answers/store"
    kinds = {"503": ".bin", "500": ".mask", "cut": ".idx", "lost": "00001.json"}
    cluster.s3.refusals = [Refusal(kind, match, times=1) for kind, match in kinds.items()]
    with in_folder(folder):
        result = tokenmill.build(**ANSWERS, out=out, runner="ray")
        expected = tree(folder / "answers")
        assert sum(name.endswith(".mask") for name in expected) > 3
        assert remote_tree(out) == expected
        assert not any(refusal.times for refusal in cluster.s3.refusals), "every fault was met"
        again = tokenmill.build(**ANSWERS, out="answers")
        assert again.nothing_to_do
        assert result.lengths == again.lengths


@pytest.mark.slow
def test_unknown_text_is_refused_and_counted_as_on_one_machine(
    connection: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = once(tmp_path_factory, "spm-english", train_english)
    write_jsonl(tmp_path / "a.jsonl", english(50))
    write_jsonl(tmp_path / "b.jsonl", japanese(50))
    options: dict[str, Any] = {"tokenizer": model, "memory": "1GB"}
    with in_folder(tmp_path):
        said = []
        for out, runner in (("store", "ray"), ("local", "local")):
            with pytest.raises(UnknownTextError, match=r"of the text of .*'b\.jsonl'") as caught:
                tokenmill.build(["a.jsonl", "b.jsonl"], out=out, runner=runner, **options)
            said.append(caught.value.message)
            # The refused unit at least was not built.
            result = tokenmill.build(
                ["a.jsonl", "b.jsonl"], out=out, runner=runner, max_unknown=0.9, **options
            )
            assert result.units_built >= 1
            assert result.totals is not None
            assert result.totals.lost_characters == len("".join(japanese(50)))
        assert said[0] == said[1]
    assert tree(tmp_path / "store") == tree(tmp_path / "local")


def run(
    session: RayCluster, tasks: list[tuple[str, Any]], on_event: Callable[[Event], None]
) -> None:
    from tokenmill.runners.ray import RayRunner

    runner = RayRunner(session, num_workers=2, copy_seconds=1.0)
    runner.run(functools.partial(Worker, "hello"), tasks, on_event=on_event)


@pytest.mark.slow
def test_tasks_that_hang_are_copied_and_those_that_kill_every_worker_are_an_error(
    session: RayCluster, tmp_path: Path
) -> None:
    tasks = [("hang once", str(tmp_path / "hung")), *(("square", n) for n in range(20))]
    events: list[Event] = []
    run(session, tasks, events.append)
    done = {event.task: event.result for event in events if isinstance(event, TaskDone)}
    assert set(done) == set(tasks)
    assert done["square", 4] == 16
    reports = [event.value for event in events if isinstance(event, TaskReport)]
    assert sorted(reports) == [("squaring", n) for n in range(20)]
    with pytest.raises(BuildError, match="workers of the cluster were lost one after the other"):
        run(session, [("die", None), ("square", 1)], events.append)


@pytest.mark.slow
def test_a_session_of_the_caller_is_used_and_an_error_is_that_of_the_build(
    folder: Path, connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_folder(folder):
        for _ in range(2):  # the workers of the first build must not keep out the second
            tokenmill.build("in/0.jsonl", out="session", runner="ray", **OPTIONS)
            (folder / "session/tokenmill.json").unlink()
            next((folder / "session/shards").glob("*.json")).unlink()
        Path("bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
        strict = {**OPTIONS, "max_rejects": 0.0}
        monkeypatch.setenv(DEBUG, "1")
        with pytest.raises(TooManyRejectsError, match=r"1 of 2 rows in 'bad\.jsonl'") as caught:
            tokenmill.build("bad.jsonl", out="bad", runner="ray", **strict)
        assert "on the Ray cluster" in caught.value.__notes__[0]
        assert not Path("bad/tokenmill.json").exists()


@pytest.mark.slow
def test_without_an_address_a_cluster_is_started_and_ended_on_this_machine(folder: Path) -> None:
    program = DRIVER.replace("address=sys.argv[2], ", "workers=2, ")
    subprocess.run([sys.executable, "-c", program, "alone"], cwd=folder, check=True, timeout=120)
    assert tree(folder / "alone") == tree(folder / "local")


def test_a_cluster_that_is_not_there_is_one_sentence_and_nothing_is_written(folder: Path) -> None:
    program = "import tokenmill.cli.main as cli; cli.run()"
    command = [sys.executable, "-c", program, "build", "in", "-t", "bytes", "-o", "none"]
    command += ["--runner", "ray", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no Ray cluster to work on at '127.0.0.1:1'")
    assert "ray start --head" in done.stderr
    assert not (folder / "none").exists()
