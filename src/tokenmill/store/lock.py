"""Two locks keep two builds from writing into one store.

`StoreLock` is the build's own, exclusive. Parts of one build work at the same time: they share that
lock as `PartLock`, so that parts and whole builds keep each other out, and parts do not.
`WorkerLock` is held, shared, by every process that writes units: a build that was killed may leave
workers behind, and the next build waits until they are gone. All are locks of the operating system
on files that stay: they vanish with their process, however it ends, and a leftover file means
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError, StoreLockedError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from tokenmill.store.layout import StoreLayout

WORKER_WAIT_SECONDS = 10.0
POLL_SECONDS = 0.02
PARTS_TOKEN = "parts"
"""Names all parts of a build to their workers: a part may take over what another one left."""
_HELD_BY_ANOTHER = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}


class _FileLock(ABC):
    """A lock of the operating system on a file, which ends with the process that holds it."""

    def __init__(self) -> None:
        self._file: int | None = None

    def acquire(self) -> None:
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    @abstractmethod
    def _take(self) -> None: ...

    def release(self) -> None:
        """Give the lock back; harmless where it is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StoreLock(_FileLock):
    """The right to build into a store; StoreLockedError where another build has it."""

    def __init__(
        self, layout: StoreLayout, *, worker_wait_seconds: float = WORKER_WAIT_SECONDS
    ) -> None:
        super().__init__()
        self._layout = layout
        self._worker_wait_seconds = worker_wait_seconds
        self.token = secrets.token_hex(8)
        """Names this build to its workers; see WorkerLock."""

    def _take(self) -> None:
        """Take the lock, and wait until no worker of an earlier build is left."""
        self._file = _open_build_lock(self._layout, shared=False)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "token": self.token}
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, json.dumps(holder).encode())
        _wait_for_workers(self._layout, seconds=self._worker_wait_seconds)


class PartLock(_FileLock):
    """The right to build a part of a store, shared by all parts; refused while a build has it."""

    token = PARTS_TOKEN

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__()
        self._layout = layout

    def _take(self) -> None:
        """Take the lock; every part writes the same bytes into it, so none disturbs another."""
        self._file = _open_build_lock(self._layout, shared=True)
        holder = json.dumps({"token": self.token}).encode()
        os.write(self._file, holder)
        os.ftruncate(self._file, len(holder))


class WorkerLock(_FileLock):
    """Says that a process writes units for the build that has the given token.

    A worker that starts late, after its build was killed and another one began, is refused: the new
    build has already looked for workers and would not wait for this one.
    """

    def __init__(self, layout: StoreLayout, *, token: str) -> None:
        super().__init__()
        self._layout = layout
        self._token = token

    def _take(self) -> None:
        path = self._layout.worker_lock
        self._file = _open(path)
        _lock_within(self._file, shared=True, path=path, seconds=WORKER_WAIT_SECONDS)
        if _read_holder(self._layout.lock).get("token") != self._token:
            raise StoreLockedError(
                f"the build that started this worker no longer has {str(self._layout.root)!r}"
            )


class TurnLock(_FileLock):
    """A turn that one process of a build has at a time, waited for as long as it takes.

    Workers take turns at documents so large that memory has room for one of them.
    """

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__()
        self._path = layout.turn_lock

    def _take(self) -> None:
        self._file = _open(self._path)
        while not _try_lock(self._file, shared=False, path=self._path):
            time.sleep(POLL_SECONDS)


def _open_build_lock(layout: StoreLayout, *, shared: bool) -> int:
    _make_folder(layout.root)
    layout.require_inside(to_write=True)
    file = _open(layout.lock)
    try:
        if not _try_lock(file, shared=shared, path=layout.lock):
            raise _locked(layout, _read_holder(layout.lock))
    except BaseException:
        os.close(file)
        raise
    return file


def _wait_for_workers(layout: StoreLayout, *, seconds: float) -> None:
    file = _open(layout.worker_lock)
    try:
        _lock_within(file, shared=False, path=layout.worker_lock, seconds=seconds)
    finally:
        os.close(file)


def _lock_within(file: int, *, shared: bool, path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _try_lock(file, shared=shared, path=path):
        if time.monotonic() > deadline:
            raise StoreLockedError(
                f"processes of an earlier build still write into {str(path.parent)!r} after"
                f" {seconds:g} s",
                hint="wait until they have ended, or end them, then run the same command again",
            )
        time.sleep(POLL_SECONDS)


def _locked(layout: StoreLayout, holder: dict[str, object]) -> StoreLockedError:
    if holder.get("token") == PARTS_TOKEN:
        return StoreLockedError(
            f"parts of a build are at work in {str(layout.root)!r}; what they have not committed "
            "would be lost",
            hint="wait until they have ended, then run the same command again",
        )
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    return StoreLockedError(
        f"{who} is building into {str(layout.root)!r}; two builds at once would undo each other",
        hint="wait until it has ended, or give another folder with --out",
    )


def _read_holder(path: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(path.read_bytes())
        if isinstance(holder, dict):
            return holder
    return {}


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the folder {str(path)!r} cannot be made: {error.strerror or error}",
            hint="give another --out, in a folder that you may write to",
        ) from error


def _open(path: Path) -> int:
    # The file is written to: through a link that would be another file.
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _unlockable(path, error) from error


def _unlockable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{str(path)!r} cannot be locked: {error.strerror or error}",
        hint="give a folder on a file system that you may write to and that has file locks",
    )


def _try_lock(file: int, *, shared: bool, path: Path) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        raise _unlockable(path, error) from error
    return True
