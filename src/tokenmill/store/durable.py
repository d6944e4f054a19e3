"""Files that survive a crash: written under a temporary name, synced, renamed, folder synced.

A rename is atomic, but it is on the disk only after its folder has been synced; without that, a
crash may undo it although later files survived.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from tokenmill.errors import BuildError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout


RESUME_HINT = "run the same command again: it resumes after the last finished unit"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder last."""
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


# -------------------------------------------------------------------------------------------------
# Sealed JSON: a JSON object whose last member is a checksum of the bytes before it.
#
#   | {
#   | "format_version":1,
#   | "counts":{"rows":3},
#   | "checksum":"0123456789abcdef0123456789abcdef"}
#
# The checksum is xxh3-128 of the file's bytes from its first up to, not including, the quote that
# opens `"checksum"`. Bytes are hashed as they lie, not as they parse: a changed blank breaks the
# seal too, and another program can check it without a canonical form.

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_TAIL = re.compile(rb'"checksum":"([0-9a-f]{32})"\}\n')
_TAIL_BYTES = len(b'"checksum":""}\n') + 32


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum used throughout a store: xxh3-128 as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(members: Mapping[str, Json | Iterator[Json]]) -> bytes:
    """A sealed file: one member to a line, and the items of a list of objects or lists too.

    A list may be an iterator: of a million items, no more than one is then held beside the text.
    """
    body = bytearray(b"{\n")
    for name, value in members.items():
        body += f"{_dumps(name)}:".encode("ascii")
        _append(body, value)
        body += b",\n"
    return _with_tail(body)


def seal_line(members: Mapping[str, Json]) -> bytes:
    """A sealed object on one line, for logs."""
    line = "{" + "".join(f"{_dumps(name)}:{_dumps(value)}," for name, value in members.items())
    return _with_tail(bytearray(line.encode("ascii")))


def unseal(data: bytes, *, path: Path | str) -> dict[str, Json]:
    """The members without the checksum; StoreError if any bit differs from what was sealed."""
    body = memoryview(data)[:-_TAIL_BYTES]
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    if tail is None:
        raise _damaged(path, "does not end with its checksum: it is cut off, or was edited")
    sealed, found = tail.group(1).decode(), checksum_of(body)
    if sealed != found:
        raise _damaged(path, f"was changed: its checksum is {found}, not the {sealed} it says")
    try:
        members = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise _damaged(path, "is not a JSON object")
    del members["checksum"]
    return members


def _with_tail(body: bytearray) -> bytes:
    with memoryview(body) as view:
        checksum = checksum_of(view)
    body += f'"checksum":"{checksum}"}}\n'.encode("ascii")
    return bytes(body)


def _append(body: bytearray, value: Json | Iterator[Json]) -> None:
    if isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (dict, list))):
        body += _dumps(value).encode("ascii")
    elif isinstance(value, (list, tuple, Iterator)):
        opening = b"[\n"
        for item in value:
            body += opening + _dumps(item).encode("ascii")
            opening = b",\n"
        body += b"[]" if opening == b"[\n" else b"\n]"
    else:
        body += _dumps(value).encode("ascii")


def _dumps(value: Json) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _damaged(path: Path | str, problem: str) -> StoreError:
    return StoreError(
        f"{str(path)!r} {problem}; nothing it says can be trusted",
        hint="restore the file, or run the build again with the same command",
    )
