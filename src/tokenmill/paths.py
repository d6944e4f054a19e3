"""Files wherever they lie: names, sizes, versions and bytes of local and remote inputs.

Local paths go through `os` and `open` alone; anything with a scheme (`s3://`, `gs://`, `hf://`,
`https://`) goes through `remote`, which imports fsspec only then. `file://` names a local file and
is treated as one.

A path is kept as the user named it, because it is the identity of what is built from it: it is
cleaned ("./a//b" becomes "a/b") but never made absolute, and ".." stays, since it may cross a link.
"""

# Paths are identities here, so they stay strings; pathlib would rewrite them.
# ruff: noqa: PTH112, PTH116, PTH118, PTH207

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat as filestat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tokenmill.errors import SourceError
from tokenmill.remote import (
    RemoteError,
    RemoteFile,
    filesystem,
    persistently,
    refuse_secrets,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
STORE_MARKS = frozenset({"tokenmill.json", ".lock-workers"})
"""A folder with one of these is a store: it may lie in an input folder, and is never input."""
_REMOTE_BLOCK_BYTES = 4 << 20
# What fsspec's filesystems call the value that changes with the content, best first.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "blob_id",
    "Content-MD5",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
)


@dataclass(frozen=True, slots=True)
class Match:
    """A file that an input stands for."""

    path: str
    named: bool
    """The input names this file or its suffix, so it must be usable; folders do not."""


@dataclass(frozen=True, slots=True)
class FileStat:
    size: int
    version: str
    """Changes when the file changes: modification time in ns, or what the remote system gives."""
    key: tuple[object, ...]
    """Equal for two names of one file."""
    changed: int = 0
    """When anything about the file was last changed, in ns, which no program can set back; 0 where
    nothing tells."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether the path is read through fsspec; UsageError for an address with a password in it."""
    text = os.fspath(path)
    refuse_secrets(text)
    return bool(_SCHEME.match(text)) and not text.lower().startswith("file://")


def normalise(path: str | os.PathLike[str]) -> str:
    """The path as an identity: POSIX separators, no "." and no empty parts."""
    text = os.fspath(path)
    if is_remote(text):
        return text
    if text.lower().startswith("file://"):
        # Imported here: it brings ssl and the mail package, a third of opening a small store.
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        text = url2pathname(urlsplit(text).path)
    if os.name == "nt":
        text = text.replace("\\", "/")
    root = "/" if text.startswith("/") else ""
    return root + "/".join(part for part in text.split("/") if part not in ("", ".")) or "."


def expand(inputs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """All files that the inputs stand for, each once, sorted."""
    return sorted({found.path for each in inputs for found in matches(each)})


def matches(name: str | os.PathLike[str]) -> list[Match]:
    """The files that one input stands for: itself, a folder's content, or what a glob matches."""
    path = normalise(name)
    found = list(_remote_matches(path) if is_remote(path) else _local_matches(path))
    if not found:
        raise SourceError(
            f"input {shown(os.fspath(name))!r} matches no file",
            hint="check the path; a glob looks like 'data/**/*.jsonl', quotes included",
        )
    return sorted(found, key=lambda match: match.path)


def stat(path: str, *, fresh: bool = False) -> FileStat:
    """Size and version of a file; `fresh` asks a remote system again instead of a listing."""
    try:
        if is_remote(path):
            return _remote_stat(path, fresh=fresh)
        facts = os.stat(path)
        _refuse_special(facts)
    except OSError as error:
        raise unreadable(path, error) from error
    key = (facts.st_dev, facts.st_ino)
    # On Windows the same member is the time at which a file was made.
    changed = 0 if os.name == "nt" else facts.st_ctime_ns
    return FileStat(facts.st_size, str(facts.st_mtime_ns), key, changed)


def open_binary(path: str) -> BinaryIO:
    """Open for unbuffered, seekable reading; every later read error is an OSError."""
    try:
        if not is_remote(path):
            return cast("BinaryIO", open(path, "rb", buffering=0, opener=_open_file))
        fs, name = filesystem(path)
        file = persistently(path, lambda: fs.open(name, "rb", block_size=_REMOTE_BLOCK_BYTES))
        return cast("BinaryIO", RemoteFile(file, url=path))
    except OSError as error:
        raise unreadable(path, error) from error


def _open_file(path: str, flags: int) -> int:
    # A pipe may have taken the place of the file that was found; opening one waits for a writer.
    found = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _refuse_special(os.fstat(found))
    except OSError:
        os.close(found)
        raise
    return found


def _refuse_special(facts: os.stat_result) -> None:
    """Raise for what has no end or would be waited for: pipes, sockets, devices."""
    if not filestat.S_ISREG(facts.st_mode):
        kinds = {
            filestat.S_IFIFO: "a pipe",
            filestat.S_IFSOCK: "a socket",
            filestat.S_IFDIR: "a folder",
        }
        kind = kinds.get(filestat.S_IFMT(facts.st_mode), "a device")
        raise OSError(f"it is {kind}, and only files are read")


def unreadable(path: str, error: Exception) -> SourceError:
    """The error for a file that the system does not give us."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return SourceError(
        f"cannot read {shown(path)!r}: {reason}",
        hint=error.hint
        if isinstance(error, RemoteError)
        else "check that the file is there, complete and readable, then run the same command again",
    )


def _local_matches(path: str) -> Iterator[Match]:
    if os.path.isdir(path):
        yield from (Match(found, False) for found in _walk(path))
    elif os.path.lexists(path):
        yield Match(path, True)
    elif glob.has_magic(path):
        suffix = _literal_suffix(path)
        for found in _glob(path):
            if os.path.isdir(found):
                yield from (Match(normalise(inner), False) for inner in _walk(found))
            else:
                yield Match(normalise(found), bool(suffix) and found.endswith(suffix))


def _literal_suffix(pattern: str) -> str:
    """ ".txt" of "a/*.txt"; empty where the pattern ends in a wildcard or has no suffix."""
    tail = re.split(r"[*?\]]", pattern)[-1]
    return tail if "." in tail and "/" not in tail else ""


def _walk(folder: str) -> Iterator[str]:
    """Files below a folder, no hidden ones, no stores; what links lead to twice counts once."""
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        raise unreadable(error.filename or folder, error)

    for parent, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        facts = os.stat(parent)
        if (facts.st_dev, facts.st_ino) in seen:
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        if not STORE_MARKS.isdisjoint(files):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            normalise(os.path.join(parent, name))
            for name in sorted(files)
            if not name.startswith(".")
        )


def _glob(pattern: str) -> Iterator[str]:
    # glob.glob follows links round and round below "**", so these are matched on our own walk.
    if "**" not in pattern:
        yield from sorted(glob.glob(pattern))
        return
    base = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    root = base or ("/" if pattern.startswith("/") else ".")
    rule = re.compile(_pattern_rule(pattern))
    if os.path.isdir(root):
        yield from (found for found in _walk(root) if rule.fullmatch(found))


def _pattern_rule(pattern: str) -> str:
    parts = pattern.split("/")
    rules = []
    for part, last in zip(parts, [False] * (len(parts) - 1) + [True], strict=True):
        if part == "**":
            rules.append(".*" if last else "(?:[^/]+/)*")
        else:
            rules.append(_part_rule(part) + ("" if last else "/"))
    return "".join(rules)


def _part_rule(part: str) -> str:
    """One component of a glob as a regular expression; in fnmatch's own "*" crosses folders."""
    wild = {"*": "[^/]*", "?": "[^/]"}
    pieces = re.findall(r"\[!?\]?[^\]]*\]|.", part, re.DOTALL)
    return "".join(
        "[" + re.sub(r"^!", "^", piece[1:-1]).replace("\\", "\\\\") + "]"
        if len(piece) > 1
        else wild.get(piece, re.escape(piece))
        for piece in pieces
    )


def _remote_matches(path: str) -> list[Match]:
    if path.lower().startswith(("http://", "https://")):
        # A web address is one file: "?" starts a query there, and servers do not list folders.
        return [Match(path, True)]
    try:
        fs, name = filesystem(path)

        def listing() -> list[Match]:
            fs.invalidate_cache(name)
            return _remote_listing(fs, name, path) or _nothing_there(fs, name)

        return persistently(path, listing)
    except OSError as error:
        raise unreadable(path, error) from error


def _remote_listing(fs: Any, name: str, path: str) -> list[Match]:
    if glob.has_magic(name):
        suffix = _literal_suffix(path)
        found = [each for each in fs.glob(name) if fs.isfile(each)]
    elif fs.isdir(name):
        suffix = ""
        found = fs.find(name)
    else:
        return [Match(path, True)] if fs.exists(name) else []
    return [
        Match(fs.unstrip_protocol(each), bool(suffix) and each.endswith(suffix))
        for each in found
        if not _hidden(each, below=name)
    ]


def _nothing_there(fs: Any, name: str) -> list[Match]:
    """No match: for want of files, or because the server refused? fsspec hides the difference."""
    base = re.split(r"[*?\[]", name, maxsplit=1)[0]
    folder = base.rpartition("/")[0] if base != name else name
    with contextlib.suppress(FileNotFoundError):
        fs.info(folder)
    return []


def _hidden(found: str, *, below: str) -> bool:
    known = len(below.split("*", 1)[0].rstrip("/").split("/"))
    return any(part.startswith(".") for part in found.split("/")[known - 1 :])


def _remote_stat(path: str, *, fresh: bool) -> FileStat:
    fs, name = filesystem(path)

    def ask() -> dict[str, Any]:
        if fresh:
            fs.invalidate_cache()
        facts: dict[str, Any] = fs.info(name)
        return facts

    facts = persistently(path, ask)
    size = facts.get("size")
    if size is None:
        raise OSError("the server does not tell the size of the file")
    version = next((str(facts[key]) for key in _VERSION_KEYS if facts.get(key)), f"size-{size}")
    return FileStat(int(size), version, (path,))
