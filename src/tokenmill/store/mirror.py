"""A build into a store behind a URL: it works in a local folder that mirrors the small files.

    the folder    manifest, receipts, tokenizer, log: what plans and decides;
                  units while they are made, and until they are sent
    the store     gets every change at once and in the same order: files, then their receipt

An object store has no rename and no locks, and needs neither. An object is seen when it is whole,
and the receipt, a small object that is sent last, commits. Two builds of one command at once send
equal bytes under equal names. So a build removes nothing there that no receipt claims: it may be
what another one has just sent, and the unit's next builder sends the same over it.

The folder lies where temporary files lie (`TMPDIR`). It holds no more than two units of each
worker, and goes with the build; one that a killed build left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from tokenmill import remote
from tokenmill.errors import BuildError, StoreError, StoreLockedError, UsageError
from tokenmill.remote import Failure, RemoteError
from tokenmill.store.blocks import store_error
from tokenmill.store.durable import RESUME_HINT
from tokenmill.store.layout import RECEIPT_FILE, StoreLayout
from tokenmill.store.lock import StoreLock
from tokenmill.store.place import refuse_other_things

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_READ_ONLY = {
    "http": "copy the store to the server after the build",
    "https": "copy the store to the server after the build",
    "hf": "build into a local folder, then: hf upload REPOSITORY FOLDER --repo-type dataset",
}
_BATCH_FILES = 256
_ABANDONED_SECONDS = 60
"""A build takes its lock a moment after it made its folder."""


class Mirror:
    """The store behind a URL that a local folder mirrors."""

    def __init__(self, root: Path, url: str, *, owned: bool) -> None:
        self.root = root
        self.url = url.rstrip("/")
        self._sizes: dict[str, dict[str, int | None]] = {}
        self._remove_folder = weakref.finalize(self, _drop_folder, root, os.getpid())
        if not owned:
            self._remove_folder.detach()

    def shown(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        url = remote.shown(self.url)
        return url if name == "." else remote.join(url, name)

    def begin(self) -> None:
        """List the store once, and bring its manifest, receipts, tokenizer and log."""
        layout = StoreLayout(self.root)
        try:
            found = self._list(".")
            refuse_other_things(found, shown=remote.shown(self.url))
            wanted = [path for path in (layout.manifest, layout.runs) if path.name in found]
            for folder in (layout.tokenizer, layout.parts, layout.shards, layout.rejects):
                names = self._list(folder.name) if folder.name in found else ()
                wanted += [folder / name for name in names if _is_small(folder, layout, name)]
            self.bring(wanted)
        except RemoteError as error:
            raise store_error(error) from None

    def _list(self, folder: str) -> dict[str, int | None]:
        url = self.url if folder == "." else remote.join(self.url, folder)
        found = remote.list_folder(url) or {}
        self._sizes[folder] = found
        return found

    def bring(self, paths: Sequence[Path]) -> None:
        missing = [path for path in paths if not path.exists()]
        for first in range(0, len(missing), _BATCH_FILES):
            batch = missing[first : first + _BATCH_FILES]
            try:
                answers = remote.read_many([self._address(path) for path in batch])
            except RemoteError as error:
                raise store_error(error) from None
            for path, data in zip(batch, answers, strict=True):
                if data is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)

    @contextlib.contextmanager
    def borrow(self, paths: Sequence[Path]) -> Iterator[None]:
        try:
            for path in paths:
                self._download(path)
            yield
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _download(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            remote.download(self._address(path), path)
        except RemoteError as error:
            path.unlink(missing_ok=True)
            if error.failure is not Failure.MISSING:
                raise store_error(error) from None

    def size(self, path: str) -> int | None:
        folder, name = path.rsplit("/", 2)[1:]
        return self._sizes.get(folder, {}).get(name)

    def put(self, path: Path) -> None:
        with self._told(path):
            remote.upload(path, self._address(path))

    def take(self, staged: Path, path: Path) -> None:
        # From where it lies: in the folder, another worker of this unit might have it under hand.
        with self._told(path):
            remote.upload(staged, self._address(path))
        staged.unlink()

    def remove(self, paths: Sequence[Path]) -> None:
        if paths:
            with self._told(paths[0]):
                remote.remove([self._address(path) for path in paths])

    def elsewhere(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if self.size(path.as_posix()) is not None]

    def close(self) -> None:
        self._remove_folder()

    def _address(self, path: Path) -> str:
        return remote.join(self.url, path.relative_to(self.root).as_posix())

    @contextlib.contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        """A file that the store does not take is an error of the build, in our words."""
        try:
            yield
        except RemoteError as error:
            raise BuildError(
                f"cannot write {self.shown(path)!r}: {error.reason}; finished units are kept",
                hint=f"{error.hint}, then {RESUME_HINT}",
            ) from None


def open_mirror(url: str, *, to_write: bool = True) -> StoreLayout:
    """A new folder for a build into the store behind a URL, or for a look at it."""
    if to_write:
        _refuse_read_only(url)
    prefix = f"tokenmill-{xxhash.xxh3_64_hexdigest(url.rstrip('/').encode())}-"
    _remove_abandoned(prefix)
    root = Path(tempfile.mkdtemp(prefix=prefix))
    return StoreLayout(root, upstream=Mirror(root, url, owned=True))


def join_mirror(root: Path, url: str, *, token: str) -> StoreLayout:
    """The folder of a build for one of its workers; on another machine, one of its own."""
    if root.is_dir():
        return StoreLayout(root, upstream=Mirror(root, url, owned=False))
    layout = open_mirror(url)
    layout.lock.write_text(json.dumps({"token": token}))
    return layout


def _is_small(folder: Path, layout: StoreLayout, name: str) -> bool:
    """Whether a build reads the file; of units, those are the receipts."""
    return folder in (layout.tokenizer, layout.parts) or bool(RECEIPT_FILE.fullmatch(name))


def _refuse_read_only(url: str) -> None:
    scheme = url.partition("://")[0].lower()
    if scheme in _READ_ONLY:
        raise UsageError(
            f"a build cannot write to {remote.shown(url)!r}: {scheme}:// is for reading",
            hint=f"use a local folder or an object store such as s3://; {_READ_ONLY[scheme]}",
        )


def _remove_abandoned(prefix: str) -> None:
    """Remove folders of builds into the same store that were killed on this machine."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, StoreError, StoreLockedError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                with StoreLock(StoreLayout(folder), worker_wait_seconds=0):
                    shutil.rmtree(folder, ignore_errors=True)


def _drop_folder(root: Path, process: int) -> None:
    if os.getpid() == process:  # a fork must not remove what its parent still uses
        shutil.rmtree(root, ignore_errors=True)
