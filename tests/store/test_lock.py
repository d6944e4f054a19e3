from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tokenmill.errors import StoreError, StoreLockedError
from tokenmill.store import layout as store_layout
from tokenmill.store.check import check_store
from tokenmill.store.layout import StoreLayout, StoreLock, TurnLock, WorkerLock

from .samples import SampleStore, SampleUnit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import sys, time
from pathlib import Path
from tokenmill.store.layout import StoreLayout
from tokenmill.store.layout import StoreLock, TurnLock, WorkerLock
layout = StoreLayout(Path(sys.argv[1]))
kinds = {"build": StoreLock, "turn": TurnLock}
lock = kinds[sys.argv[2]](layout) if sys.argv[2] in kinds else WorkerLock(layout, token=sys.argv[2])
print("asks", flush=True)
with lock:
    print("has it", getattr(lock, "token", ""), flush=True)
    sys.stdin.readline()
time.sleep(600)
"""


@contextlib.contextmanager
def asker(root: Path, *, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process that asks for a lock, and gives it back when it is sent a line."""
    command = [sys.executable, "-c", HOLD, str(root), kind]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert line(process) == "asks"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def holder(root: Path, *, kind: str = "build") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds a lock, and the token of that."""
    with asker(root, kind=kind) as process:
        says = line(process)
        assert says.startswith("has it")
        yield process, says.removeprefix("has it").strip()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    polls = Polls()
    monkeypatch.setattr(
        store_layout, "time", SimpleNamespace(sleep=polls.sleep, monotonic=time.monotonic)
    )
    return polls


@dataclass
class Polls:
    """Asks in vain; at the third, the process that has the lock is told to give it back."""

    of: subprocess.Popen[str] | None = None
    count: int = 0

    def sleep(self, seconds: float) -> None:
        self.count += 1
        if self.count == 3 and self.of is not None:
            assert self.of.stdin is not None
            self.of.stdin.write("\n")
            self.of.stdin.flush()
        time.sleep(seconds)


def test_a_second_build_is_refused_and_told_who_builds(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    with holder(tmp_path) as (process, _):
        with pytest.raises(StoreLockedError, match=f"process {process.pid} on") as caught:
            StoreLock(layout).acquire()
        assert "--out" in str(caught.value.hint)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with StoreLock(layout):
            pass


def test_two_locks_in_one_process_exclude_each_other_until_released(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path / "new")
    with StoreLock(layout), pytest.raises(StoreLockedError, match=str(os.getpid())):
        StoreLock(layout).acquire()
    with StoreLock(layout):
        pass


def test_workers_share_their_lock_and_the_next_build_waits_for_the_last_of_them(
    tmp_path: Path, polls: Polls
) -> None:
    layout = StoreLayout(tmp_path)
    with holder(tmp_path) as (build, token):
        with holder(tmp_path, kind=token), holder(tmp_path, kind=token):
            build.kill()
            build.wait()
            with pytest.raises(StoreLockedError, match=r"still write .* after 0\.1 s"):
                StoreLock(layout, worker_wait_seconds=0.1).acquire()
        with holder(tmp_path, kind=last_token(layout)) as (polls.of, _):
            polls.count = 0
            with StoreLock(layout, worker_wait_seconds=60):
                assert polls.count >= 3


def test_a_turn_is_waited_for_until_the_other_process_ends(tmp_path: Path, polls: Polls) -> None:
    layout = StoreLayout(tmp_path)
    with contextlib.ExitStack() as stack:
        with TurnLock(layout):
            process = stack.enter_context(asker(tmp_path, kind="turn"))
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 0.2)[0] == []
        assert line(process) == "has it"
    with holder(tmp_path, kind="turn") as (polls.of, _), TurnLock(layout):
        assert polls.count >= 3


def last_token(layout: StoreLayout) -> str:
    with StoreLock(layout) as lock:
        return lock.token


def test_a_worker_of_a_build_that_is_gone_is_refused(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    with StoreLock(layout) as first, WorkerLock(layout, token=first.token):
        pass
    with StoreLock(layout) as second:
        with pytest.raises(StoreLockedError, match="no longer has"):
            WorkerLock(layout, token=first.token).acquire()
        with WorkerLock(layout, token=second.token):
            pass


def test_lock_files_are_no_part_of_the_store(tmp_path: Path) -> None:
    layout = SampleStore(units=[SampleUnit(path="a", rows=[("train", "x")])]).write(tmp_path)
    with StoreLock(layout) as lock, WorkerLock(layout, token=lock.token):
        assert layout.lock.exists()
        assert layout.worker_lock.exists()
        report = check_store(tmp_path)
    assert report.is_sound
    assert report.notes == ()


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="cannot be locked"):
            StoreLock(StoreLayout(tmp_path)).acquire()
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("parts", [False, True])
def test_a_folder_that_cannot_be_made_is_told(parts: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"the folder '.*file/store' cannot be made: ") as caught:
        StoreLock(StoreLayout(tmp_path / "file" / "store"), parts=parts).acquire()
    assert "--out" in (caught.value.hint or "")
