from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tokenmill.errors import StoreError, StoreLockedError
from tokenmill.store.check import check_store
from tokenmill.store.layout import StoreLayout
from tokenmill.store.lock import PartLock, StoreLock, TurnLock, WorkerLock

from .samples import SampleStore, SampleUnit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import sys, time
from pathlib import Path
from tokenmill.store.layout import StoreLayout
from tokenmill.store.lock import StoreLock, TurnLock, WorkerLock
layout = StoreLayout(Path(sys.argv[1]))
kinds = {"build": StoreLock, "turn": TurnLock}
lock = kinds[sys.argv[2]](layout) if sys.argv[2] in kinds else WorkerLock(layout, token=sys.argv[2])
with lock:
    print(getattr(lock, "token", ""), flush=True)
    time.sleep(float(sys.argv[3]))
time.sleep(600)
"""


@contextlib.contextmanager
def holder(
    root: Path, *, kind: str = "build", seconds: float = 600, prints: bool = True
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds a lock; yields it and what it printed."""
    command = [sys.executable, "-c", HOLD, str(root), kind, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip() if prints else ""
        finally:
            process.kill()


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
    tmp_path: Path,
) -> None:
    layout = StoreLayout(tmp_path)
    with holder(tmp_path) as (build, token):
        with holder(tmp_path, kind=token), holder(tmp_path, kind=token, seconds=0.8):
            build.kill()
            build.wait()
            with pytest.raises(StoreLockedError, match=r"still write .* after 0\.1 s"):
                StoreLock(layout, worker_wait_seconds=0.1).acquire()
        started = time.monotonic()
        with holder(tmp_path, kind=last_token(layout), seconds=0.5):
            with StoreLock(layout):
                waited = time.monotonic() - started
            assert waited >= 0.4


def test_a_turn_is_waited_for_until_the_other_process_ends(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    with TurnLock(layout), holder(tmp_path, kind="turn", prints=False) as (process, _):
        time.sleep(0.3)
        assert process.poll() is None
    with holder(tmp_path, kind="turn", seconds=0.4):
        started = time.monotonic()
        with TurnLock(layout):
            assert time.monotonic() - started >= 0.2


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


@pytest.mark.parametrize("lock", [StoreLock, PartLock])
def test_a_folder_that_cannot_be_made_is_told(
    lock: type[StoreLock | PartLock], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"the folder '.*file/store' cannot be made: ") as caught:
        lock(StoreLayout(tmp_path / "file" / "store")).acquire()
    assert "--out" in (caught.value.hint or "")
