from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.runners.jobs import Finder, Placed, Start, Worker

from tokenmill.errors import BuildError
from tokenmill.runners.local import (
    Event,
    ForkServer,
    LocalRunner,
    SerialRunner,
    TaskDone,
    TaskReport,
    WorkerLost,
    WorkerReady,
    server_ahead,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = str(Path(__file__).parents[2])
START = functools.partial(Worker, "hello")
FORKS = [pytest.param(True, marks=pytest.mark.skipif(not ForkServer.is_possible, reason="Linux"))]
each_way = pytest.mark.parametrize("forks", [False, *FORKS], ids=["fresh", "forked"])
forked = pytest.mark.parametrize("forks", FORKS, ids=["forked"])


def run(runner: LocalRunner | SerialRunner, tasks: Sequence[tuple[str, Any]]) -> list[Event]:
    events: list[Event] = []
    runner.run(START, tasks, on_event=events.append)
    return events


def results(events: list[Event]) -> dict[Any, Any]:
    return {event.task: event.result for event in events if isinstance(event, TaskDone)}


@pytest.mark.parametrize("runner", [SerialRunner(), LocalRunner(1, forks=False), LocalRunner(3)])
def test_every_task_is_done_once_and_reports_arrive(runner: LocalRunner | SerialRunner) -> None:
    tasks = [("square", n) for n in range(20)] + [("later", 0.01)]
    events = run(runner, tasks)
    assert results(events) == {task: task[1] ** 2 for task in tasks[:-1]} | {("later", 0.01): 0.01}
    assert sum(isinstance(event, TaskDone) for event in events) == 21
    reports = [event.value for event in events if isinstance(event, TaskReport)]
    assert sorted(reports) == [("squaring", n) for n in range(20)]
    ready = [event for event in events if isinstance(event, WorkerReady)]
    assert [event.value for event in ready] == ["hello"] * runner.num_workers


def test_a_worker_gets_its_next_task_while_a_future_settles() -> None:
    # The future opens first and ends last: the second task ran while it was open.
    events = run(LocalRunner(1), [("later", 1.0), ("square", 2)])
    order = [event.task for event in events if isinstance(event, TaskDone)]
    assert order == [("square", 2), ("later", 1.0)]


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_fresh_processes_that_were_started_ahead_get_the_work_or_end() -> None:
    before = children()  # other tests may have left some for all to use
    runner = LocalRunner(3, forks=False)
    runner.start_ahead(9, ["no.such.module", "tests.runners.jobs"])
    ahead = children() - before
    events = run(runner, [("square", 2), ("square", 3)])
    assert results(events) == {("square", 2): 4, ("square", 3): 9}
    used = {event.pid for event in events if isinstance(event, WorkerReady)}
    assert len(used) == 2
    assert used < {each.pid for each in ahead}
    assert not psutil.wait_procs(ahead, timeout=60)[1]


@each_way
def test_what_was_started_ahead_ends_without_work(forks: bool) -> None:
    before = children()
    runner = LocalRunner(3, forks=forks)
    runner.start_ahead(1, ["no.such.module"])
    runner.start_ahead(0, [])
    (unused,) = children() - before
    runner.close()
    assert not psutil.wait_procs([unused], timeout=60)[1]
    assert results(run(runner, [("square", 4)])) == {("square", 4): 16}
    assert children() <= before


def test_tasks_that_a_task_finds_are_done_by_all_workers() -> None:
    found = tuple(("sleep", 0.2 + n / 1000) for n in range(6))
    events = run(LocalRunner(3), [Finder("find", (found, None))])
    done = [event for event in events if isinstance(event, TaskDone)]
    assert {event.task for event in done} == {*found, Finder("find", (found, None))}
    assert len(done) == 7
    assert len({event.worker for event in done}) == 3


def test_of_the_tasks_that_wait_the_one_of_the_smallest_place_goes_first() -> None:
    # While the first is worked on the others are found, however soon it is given out.
    found = (Placed("sleep", 0.4, 0), *(Placed("square", place, place) for place in (3, 1, 2)))
    events = run(LocalRunner(1), [Finder("find", (found, None))])
    done = [event.task for event in events if isinstance(event, TaskDone)]
    places = [task.place for task in done if isinstance(task, Placed)]
    assert places == [0, 1, 2, 3]


def test_tasks_found_again_after_a_death_are_done_once_and_those_of_the_dead_again(
    tmp_path: Path,
) -> None:
    deaths = [str(tmp_path / name) for name in "abc"]
    found = (("square", 1), ("die once", deaths[0]), ("square", 2), ("die once", deaths[1]))
    tasks = [Finder("find", (found, deaths[2])), ("square", 3)]
    events = run(LocalRunner(2), tasks)
    done = [event.task for event in events if isinstance(event, TaskDone)]
    assert len(done) == 6
    assert sorted(map(str, done)) == sorted(map(str, [*tasks, *found]))
    assert len({event.reason for event in events if isinstance(event, WorkerLost)}) == 1


def ready_values(forks: bool, how: str) -> tuple[list[int | None], set[int]]:
    events: list[Event] = []
    tasks = [("sleep", 0.1), ("sleep", 0.2), ("sleep", 0.3)]
    LocalRunner(3, forks=forks).run(Start(how), tasks, on_event=events.append)
    ready = [event for event in events if isinstance(event, WorkerReady)]
    return [event.value for event in ready], {event.pid for event in ready}


@forked
def test_workers_are_forked_from_one_process_that_was_prepared_once(forks: bool) -> None:
    prepared_in, workers = ready_values(forks, "well")
    assert len(workers) == 3
    assert len(set(prepared_in)) == 1
    assert prepared_in[0] not in {None, *workers}


@forked
def test_one_worker_alone_is_the_process_that_was_prepared(forks: bool, tmp_path: Path) -> None:
    events: list[Event] = []
    tasks = [("square", 2), ("die once", str(tmp_path / "a")), ("square", 3)]
    LocalRunner(1, forks=forks).run(Start("well"), tasks, on_event=events.append)
    assert set(results(events)) == set(tasks)
    first, second = (event for event in events if isinstance(event, WorkerReady))
    assert first.value == first.pid
    assert second.value is None
    assert [event.reason for event in events if isinstance(event, WorkerLost)] == [
        "killed by signal 9"
    ]


@forked
def test_no_worker_is_forked_from_a_process_with_threads(forks: bool) -> None:
    prepared_in, workers = ready_values(forks, "with a thread")
    assert prepared_in == [None] * 3
    assert len(workers) == 3


@each_way
def test_what_cannot_be_prepared_is_the_error_of_a_worker(forks: bool) -> None:
    with pytest.raises(ValueError, match="cannot be prepared") as caught:
        ready_values(forks, "fails")
    assert "in worker" in caught.value.__notes__[0]


@forked
def test_the_work_goes_on_where_the_process_that_forks_is_killed(
    forks: bool, tmp_path: Path
) -> None:
    tasks = [("kill parent once", str(tmp_path / "a")), ("sleep", 0.5), ("square", 2)]
    events: list[Event] = []
    LocalRunner(2, forks=forks).run(START, tasks, on_event=events.append)
    assert set(results(events)) == set(tasks)
    lost = [event.reason for event in events if isinstance(event, WorkerLost)]
    assert set(lost) == {"killed by signal 9"}


@forked
def test_a_server_that_was_started_before_its_runner_is_used_or_ended(forks: bool) -> None:
    before = children()
    with server_ahead(["tests.runners.jobs"], {}):
        (server,) = children() - before
        runner = LocalRunner(1, forks=forks)
        runner.start_ahead(1, [])
        assert children() - before == {server}
        assert results(run(runner, [("square", 4)])) == {("square", 4): 16}
    with server_ahead([], {}):
        assert len(children() - before) == 1
    assert children() <= before


@each_way
def test_a_worker_that_dies_is_replaced_and_its_task_done_again(
    forks: bool, tmp_path: Path
) -> None:
    tasks = [("square", 1), ("die once", str(tmp_path / "a")), ("die once", str(tmp_path / "b"))]
    events = run(LocalRunner(2, forks=forks), [*tasks, ("square", 2)])
    assert set(results(events)) == {*tasks, ("square", 2)}
    lost = [event for event in events if isinstance(event, WorkerLost)]
    assert {event.task for event in lost} >= {tasks[1], tasks[2]}
    assert {event.reason for event in lost} == {"killed by signal 9"}


@each_way
def test_a_task_that_kills_every_worker_is_an_error(forks: bool) -> None:
    with pytest.raises(BuildError, match="3 workers died one after the other"):
        run(LocalRunner(2, forks=forks), [("die", None), *[("square", n) for n in range(5)]])


@each_way
def test_a_worker_that_ends_itself_in_native_code_is_an_error_at_once(forks: bool) -> None:
    lost: list[Event] = []
    tasks = [("abort", None), ("square", 1)]
    with pytest.raises(BuildError, match="a worker ended itself") as caught:
        LocalRunner(1, forks=forks).run(START, tasks, on_event=lost.append)
    assert "--memory" in (caught.value.hint or "")
    assert not any(isinstance(event, WorkerLost) for event in lost)


@each_way
def test_an_error_in_a_task_is_raised_with_its_type_and_trace(forks: bool) -> None:
    with pytest.raises(ValueError, match="no good") as caught:
        run(LocalRunner(2, forks=forks), [("sleep", 0.01), ("fail", "no good")])
    assert "in worker" in caught.value.__notes__[0]
    assert "jobs.py" in caught.value.__notes__[0]


@each_way
def test_no_process_is_left_after_an_error(forks: bool) -> None:
    before = children()
    with pytest.raises(ValueError, match="stop"):
        run(LocalRunner(2, forks=forks), [("sleep", 30), ("fail", "stop")])
    assert children() <= before


@each_way
def test_prints_of_a_worker_do_not_break_the_messages(
    forks: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    events = run(LocalRunner(1, forks=forks), [("print", "noise"), ("square", 3)])
    assert results(events)["square", 3] == 9
    assert "noise" in capfd.readouterr().err


def test_a_script_needs_no_main_guard_and_no_importable_main(tmp_path: Path) -> None:
    script = tmp_path / "random.py"  # also shadows a standard module, if the path were wrong
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.remove({str(tmp_path)!r})
            sys.path.append({ROOT!r})
            from tests.runners.jobs import Finder, Placed, Worker
            from tokenmill.runners.local import LocalRunner, TaskDone
            done = []
            LocalRunner(2).run(Worker, [("square", 4)],
                               on_event=lambda e: isinstance(e, TaskDone) and done.append(e.result))
            print(done)
            """
        )
    )
    found = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (found.stdout.strip(), found.returncode) == ("[16]", 0), found.stderr


@each_way
@pytest.mark.parametrize("is_stopped", [False, True])
def test_workers_end_when_the_driver_is_killed(
    is_stopped: bool, forks: bool, tmp_path: Path
) -> None:
    if is_stopped and sys.platform != "linux":
        pytest.skip("only Linux ends a process that is stopped with its parent")
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.append({ROOT!r})
            from tests.runners.jobs import Finder, Placed, Worker
            from tokenmill.runners.local import LocalRunner, WorkerReady
            def say(event):
                if isinstance(event, WorkerReady):
                    print(event.pid, flush=True)
            LocalRunner(2, forks={forks}).run(Worker, [("sleep", 60)] * 2, on_event=say)
            """
        )
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    workers = [psutil.Process(int(driver.stdout.readline())) for _ in range(2)]
    if is_stopped:
        for worker in workers:
            worker.suspend()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
