"""Files that survive a crash: written under a temporary name, synced, renamed, folder synced.

A rename is atomic, but it is on the disk only after its folder has been synced; without that, a
crash may undo it although later files survived.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from typing import TYPE_CHECKING

from tokenmill.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout

RESUME_HINT = "run the same command again: it resumes after the last finished unit"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder last. Windows has no such call, and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(layout: StoreLayout, path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a crash leaves the old file or the new one, whole."""
    staged = layout.tmp / f"{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        layout.tmp.mkdir(parents=True, exist_ok=True)
        write_synced(staged, data)
        staged.replace(path)
        sync_folder(path.parent)
        layout.upstream.put(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise write_error(error, path=path) from error


def write_error(error: OSError, *, path: Path) -> BuildError:
    """The BuildError for a write that failed: what, where, and how much space is left."""
    reason = error.strerror or str(error)
    free = _free_bytes(path)
    space = "" if free is None else f", {free / 1e6:,.1f} MB free there"
    remedy = "make space, then " if error.errno in _DISK_FULL else ""
    return BuildError(
        f"cannot write {str(path)!r}: {reason}{space}; finished units are kept",
        hint=remedy + RESUME_HINT,
    )


def _free_bytes(path: Path) -> int | None:
    for folder in path.parents:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
