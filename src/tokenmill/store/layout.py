"""The folder of a store: the names in it, files that survive a crash, locks, and its mirror.

A unit's name comes from its file's path and its index in that file, never from its place in a plan:
files added later leave the old names, and so the old shards, as they are.

A file is written under a temporary name, synced and renamed, and its folder is synced: a rename is
atomic, but it is on the disk only after that; a crash may undo it although later files survived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
import unicodedata
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

import xxhash

from tokenmill import files
from tokenmill.errors import BuildError, StoreError, StoreLockedError, UsageError
from tokenmill.files import Failure, PathInput, RemoteError

RESUME_HINT = "run the same command again: it resumes after the last finished unit"
TRAIN = "train"
SLUG_CHARACTERS = 40
COMPRESSION_SUFFIX = re.compile(r"\.(gz|zst|bz2|xz)$", re.IGNORECASE)

_PREFIX = r"[A-Za-z0-9_-]{1,40}-[0-9a-f]{16}"
_UNIT = rf"{_PREFIX}-[0-9]{{5,}}"
_SPLIT = r"[a-z][a-z0-9_]{0,31}"
UNIT_PREFIX = re.compile(_PREFIX)
SPLIT_NAME = re.compile(_SPLIT)
SHARD_FILE = re.compile(rf"(?P<unit>{_UNIT})(-(?P<split>{_SPLIT}))?\.(?P<kind>bin|idx|mask)")
RECEIPT_FILE = re.compile(rf"(?P<unit>{_UNIT})\.json")
REJECTS_FILE = re.compile(rf"(?P<unit>{_UNIT})\.jsonl")
_UNSAFE = re.compile(r'[\x00-\x1f/\\:*?"<>|]')


class Upstream:
    """The store that a local folder is worked on for; this one is the folder itself.

    Everything that plans, commits and assembles works on a folder. What it changes there it also
    tells the upstream, in the same order, so the rules of `write` hold for both.
    """

    url: str | None = None  # with all that is in it; None where the folder is the store

    def shown(self, path: Path) -> str:
        """What a path of the folder is called in messages."""
        return str(path)

    def begin(self) -> None:
        """Download what a build must know of the store; StoreError where it cannot be had."""

    def download(self, paths: Sequence[Path]) -> None:
        """Download files that are in the store and not in the folder."""

    def borrow(self, paths: Sequence[Path]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Have files of any size in the folder until the context ends, if the store has them."""
        return contextlib.nullcontext()

    def size(self, path: str) -> int | None:
        """Bytes of a file of the store; None if it is not there."""
        try:
            return os.stat(path).st_size  # noqa: PTH116 (a path object costs more than the call)
        except OSError:
            return None

    def put(self, path: Path) -> None:
        """Make a file of the folder a file of the store."""

    def take(self, staged: Path, path: Path) -> None:
        """Make a staged file, which goes from its place, the file `path` of the store."""
        staged.replace(path)

    def keep(self, path: Path, kept: Path, *, tmp: Path) -> None:
        """Have a file of the store under a second name too, on the disk as it is."""
        with contextlib.suppress(FileExistsError):
            try:
                os.link(path, kept)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                tmp.mkdir(parents=True, exist_ok=True)
                staged = tmp / f"{kept.name}-{os.getpid()}-{secrets.token_hex(4)}"
                shutil.copyfile(path, staged)
                with staged.open("rb") as file:
                    os.fsync(file.fileno())
                staged.replace(kept)

    def names(self, folder: Path) -> list[str]:
        """What is in a folder of the store; nothing in one that is not there."""
        try:
            return os.listdir(folder)  # noqa: PTH208 (names alone)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, paths: Sequence[Path]) -> None:
        """Take files away from the store; those that are not there are no error."""

    def close(self) -> None:
        """Give back what the folder needed of this machine."""


class _Below:
    """The path of a name in a store's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layout: StoreLayout, owner: object) -> Path:
        return layout.root / self.name


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The paths of a store."""

    root: Path
    # Folder in tmp/ that is this writer's alone; parts that work at once have one each.
    corner: str = ""
    upstream: Upstream = field(default=Upstream(), compare=False, repr=False)

    manifest = _Below("tokenmill.json")
    building = _Below("building.json")  # what a build that goes on will make
    forgotten = _Below("forgotten.json")  # rows that were taken out, and that no build makes again
    forgetting = _Below("forgetting")  # shards without them, until they are in place
    runs = _Below("runs.jsonl")
    tokenizer = _Below("tokenizer")
    shards = _Below("shards")
    rejects = _Below("rejects")
    layouts = _Below("layouts")
    annotations = _Below("annotations")
    snapshots = _Below("snapshots")  # manifests of the store before it grew
    retired = _Below("retired")  # units that those need and that are cut in another place since
    parts = _Below("parts")  # what the parts of a build say of themselves, until it is finished
    lock = _Below(".lock")
    worker_lock = _Below(".lock-workers")
    turn_lock = _Below(".lock-large")

    @property
    def name(self) -> str:
        """The store as it may be shown: its folder, or its URL."""
        return self.upstream.shown(self.root)

    @property
    def tmp(self) -> Path:
        return self.root / "tmp" / self.corner

    @property
    def rows(self) -> Path:
        """Where rows of a Python program are while they are built; gone when the build ends."""
        return self.root / ".rows"

    @property
    def locks(self) -> tuple[Path, ...]:
        """Files that are locked, not read: no part of what a store holds."""
        return self.lock, self.worker_lock, self.turn_lock

    def receipt(self, unit: str) -> Path:
        return self.shards / f"{unit}.json"

    def shard_file(self, shard: str, kind: str) -> Path:
        """The file of a shard: kind is bin, idx or mask."""
        return self.shards / f"{shard}.{kind}"

    def rejects_file(self, unit: str) -> Path:
        return self.rejects / f"{unit}.jsonl"

    def size(self, folder: str, name: str) -> int | None:
        """Bytes of a file of the store; None if it is not there."""
        return self.upstream.size(f"{self.root}/{folder}/{name}")

    def require_inside(self, *, to_write: bool = False) -> None:
        """StoreError for a file or folder of the store that is a link out of the store's folder.

        Of shards and rejects only if `to_write`: who reads looks at all that the manifest names.
        """
        folders = [self.tokenizer, self.layouts, self.parts, self.snapshots]
        folders += [self.retired, self.shards, self.rejects, self.forgetting, self.annotations]
        files = (self.manifest, self.building, self.forgotten, self.runs)
        known = {path.name for path in (*files, *self.locks, *folders)} | {"tmp"}
        for folder in (self.root, *(folders if to_write else folders[:4])):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for link in sorted((e for e in entries if e.is_symlink()), key=lambda e: e.name):
                    if folder == self.root and link.name not in known:
                        continue
                    if not is_inside(link.path, root=self.root):
                        raise StoreError(
                            f"{link.path!r} is a link that leaves the store; what it leads to is "
                            "neither read nor written",
                            hint="put the file itself in its place, or copy the store again",
                        )

    def create(self) -> None:
        """Make the folders that every build needs."""
        if not (self.shards.is_dir() and self.rejects.is_dir()):
            self.shards.mkdir(parents=True, exist_ok=True)
            self.rejects.mkdir(exist_ok=True)
            sync_folder(self.root)

    def remove_empty_tmp(self) -> None:
        """Remove tmp/ where nothing is left in it: a finished store has none."""
        with contextlib.suppress(OSError):
            self.tmp.rmdir()
            if self.corner:
                self.tmp.parent.rmdir()


def is_inside(path: str, *, root: Path) -> bool:
    """Whether a path, links followed, is in a folder."""
    # Not Path.resolve(), which raises on links that lead to each other.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


@functools.lru_cache(1024)
def unit_prefix(path: str) -> str:
    """What the names of a file's units begin with: its own name, and a hash of its whole path."""
    name = COMPRESSION_SUFFIX.sub("", path.rstrip("/").rpartition("/")[2])
    stem = name.rpartition(".")[0] or name
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", plain).strip("-")[:SLUG_CHARACTERS].rstrip("-")
    # Paths may hold lone surrogates (bytes that are no UTF-8), which strict encoding would refuse.
    digest = xxhash.xxh3_64_hexdigest(path.encode("utf-8", "surrogatepass"))
    return f"{slug or 'file'}-{digest}"


def unit_name(path: str, *, index: int) -> str:
    """The name of a unit: its file's prefix and its position in the file."""
    return f"{unit_prefix(path)}-{index:05d}"


def shard_name(unit: str, *, split: str) -> str:
    """The name of a unit's shard of one split."""
    return unit if split == TRAIN else f"{unit}-{split}"


def is_plain_name(name: str) -> bool:
    """Whether a name stays inside the folder it is put into, on every system."""
    return 0 < len(name) <= 200 and name not in {".", ".."} and not _UNSAFE.search(name)


# -------------------------------------------------------------------------------------------------
# Files that survive a crash.


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


def write_error(
    error: OSError,
    *,
    path: Path,
    needed: str = "",
    kept: str = "finished units are kept",
    again: str = RESUME_HINT,
) -> BuildError:
    """The BuildError for a write that failed: what, where, and how much space is left."""
    space = ""
    for folder in path.parents:
        with contextlib.suppress(OSError):
            space = f", {shutil.disk_usage(folder).free / 1e6:,.1f} MB free there"
            break
    remedy = "make space, then " if error.errno in {errno.ENOSPC, errno.EDQUOT} else ""
    return BuildError(
        f"cannot write {str(path)!r}: {error.strerror or error}{space}{needed}; {kept}",
        hint=remedy + again,
    )


# -------------------------------------------------------------------------------------------------
# Sealed JSON: an object, one member to a line, whose last member `"checksum":"0123..."` seals it.
#
# The checksum is xxh3-128 of the file's bytes from its first up to, not including, the quote that
# opens `"checksum"`. Bytes are hashed as they are, not as they parse: a changed blank breaks the
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
        body += _dumps(name) + b":"
        if isinstance(value, Iterator) or (
            isinstance(value, (list, tuple)) and value and isinstance(value[0], (dict, list))
        ):
            opening = b"[\n"
            for item in value:
                body += opening + _dumps(item)
                opening = b",\n"
            body += b"[]" if opening == b"[\n" else b"\n]"
        else:
            body += _dumps(value)
        body += b",\n"
    return _with_tail(body)


def seal_line(members: Mapping[str, Json]) -> bytes:
    """A sealed object on one line, for logs."""
    items = (_dumps(name) + b":" + _dumps(value) + b"," for name, value in members.items())
    return _with_tail(bytearray(b"{" + b"".join(items)))


def _with_tail(body: bytearray) -> bytes:
    return bytes(body + f'"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode("ascii"))


def _dumps(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def seal_of(data: bytes) -> str:
    """The checksum that a sealed file ends with."""
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    assert tail is not None  # it was read before
    return tail[1].decode()


def check_seal(data: bytes, *, path: Path | str) -> bytes:
    """The bytes before the checksum; StoreError if any bit differs from what was sealed."""
    body, tail = data[:-_TAIL_BYTES], _TAIL.fullmatch(data[-_TAIL_BYTES:])
    if tail is None:
        raise _damaged(path, "does not end with its checksum: it is cut off, or was edited")
    sealed, found = tail[1].decode(), checksum_of(body)
    if sealed != found:
        raise _damaged(path, f"was changed: its checksum is {found}, not the {sealed} it says")
    return body


def unseal(data: bytes, *, path: Path | str) -> dict[str, Json]:
    """The members without the checksum; StoreError if any bit differs from what was sealed."""
    check_seal(data, path=path)
    try:
        members = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise _damaged(path, "is not a JSON object")
    del members["checksum"]
    return members


def _damaged(path: Path | str, problem: str) -> StoreError:
    return StoreError(
        f"{str(path)!r} {problem}; nothing it says can be trusted",
        hint="restore the file, or run the build again with the same command",
    )


# -------------------------------------------------------------------------------------------------
# Two locks keep two builds from writing into one store.
#
# `StoreLock` is the build's own, exclusive. Parts of one build work at the same time: they share
# that lock, so that parts and whole builds keep each other out, and parts do not. `WorkerLock` is
# held, shared, by every process that writes units: a build that was killed may leave workers, and
# the next build waits until they are gone. All are locks of the operating system on files that
# stay: they vanish with their process, however it ends, and a leftover file means nothing.

WORKER_WAIT_SECONDS = 10.0
POLL_SECONDS = 0.02
GLANCE_SECONDS = 0.2
PARTS_TOKEN = "parts"  # names all parts of a build: a part may take over what another one left
_HELD_BY_ANOTHER = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}


class FileLock:
    """A lock of the operating system on a file, which ends with the process that holds it."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        self._file: int | None = None

    def acquire(self) -> None:
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        raise NotImplementedError

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


class TurnLock(FileLock):
    """A turn that one process of a build has at a time, waited for as long as it takes.

    Workers take turns at documents so large that memory has room for one of them.
    """

    def _take(self) -> None:
        path = self._layout.turn_lock
        self._file = _open_lock(path)
        _lock_within(self._file, path, shared=False, seconds=float("inf"))


class StoreLock(FileLock):
    """The right to build into a store, or, shared by all `parts`, to build a part of it.

    StoreLockedError where another build has it. `token` names this build to its workers.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        parts: bool = False,
        memory_bytes: int | None = None,
        worker_wait_seconds: float = WORKER_WAIT_SECONDS,
    ) -> None:
        super().__init__(layout)
        self._parts = parts
        self._memory_bytes = memory_bytes
        self._worker_wait_seconds = worker_wait_seconds
        self.token = PARTS_TOKEN if parts else secrets.token_hex(8)

    def _take(self) -> None:
        """Take the lock; a whole build waits until no worker of an earlier one is left."""
        layout = self._layout
        try:
            layout.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the folder {str(layout.root)!r} cannot be made: {error.strerror or error}",
                hint="give another --out, in a folder that you may write to",
            ) from error
        layout.require_inside(to_write=True)
        self._file = _open_lock(layout.lock)
        # A reader that looks whether anybody builds has the lock for a moment.
        deadline = time.monotonic() + GLANCE_SECONDS
        while not _try_lock(self._file, layout.lock, shared=self._parts):
            if time.monotonic() > deadline:
                raise _locked(layout)
            time.sleep(POLL_SECONDS)
        # Every part writes the same bytes, so none disturbs another.
        who: dict[str, object] = {"pid": os.getpid(), "host": socket.gethostname()}
        if self._memory_bytes is not None:
            who["memory_bytes"] = self._memory_bytes
        holder = json.dumps({**({} if self._parts else who), "token": self.token}).encode()
        os.pwrite(self._file, holder, 0)
        os.ftruncate(self._file, len(holder))
        if not self._parts:
            workers = _open_lock(layout.worker_lock)
            try:
                seconds = self._worker_wait_seconds
                _lock_within(workers, layout.worker_lock, shared=False, seconds=seconds)
            finally:
                os.close(workers)


def is_locked(layout: StoreLayout) -> bool | None:
    """Whether a build, or a part of one, is at work here; None for a reader who may not know."""
    try:
        file = os.open(layout.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return not _try_lock(file, layout.lock, shared=False)
    finally:
        os.close(file)


class WorkerLock(FileLock):
    """Says that a process writes units for the build that has the given token.

    A worker that starts late, after its build was killed and another one began, is refused: the new
    build has already looked for workers and would not wait for this one.
    """

    def __init__(self, layout: StoreLayout, *, token: str) -> None:
        super().__init__(layout)
        self._token = token

    def _take(self) -> None:
        path = self._layout.worker_lock
        self._file = _open_lock(path)
        _lock_within(self._file, path, shared=True, seconds=WORKER_WAIT_SECONDS)
        if lock_holder(self._layout).get("token") != self._token:
            raise StoreLockedError(
                f"the build that started this worker no longer has {str(self._layout.root)!r}"
            )


def _open_lock(path: Path) -> int:
    # The file is written to: through a link that would be another file.
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _unlockable(path, error) from error


def _try_lock(file: int, path: Path, *, shared: bool) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        raise _unlockable(path, error) from error
    return True


def _lock_within(file: int, path: Path, *, shared: bool, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _try_lock(file, path, shared=shared):
        if time.monotonic() > deadline:
            raise StoreLockedError(
                f"processes of an earlier build still write into {str(path.parent)!r} after"
                f" {seconds:g} s",
                hint="wait until they have ended, or end them, then run the same command again",
            )
        time.sleep(POLL_SECONDS)


def _unlockable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{str(path)!r} cannot be locked: {error.strerror or error}",
        hint="give a folder on a file system that you may write to and that has file locks",
    )


def lock_holder(layout: StoreLayout) -> dict[str, object]:
    """What the build that has the lock says of itself."""
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(layout.lock.read_bytes())
        if isinstance(holder, dict):
            return holder
    return {}


def _locked(layout: StoreLayout) -> StoreLockedError:
    holder = lock_holder(layout)
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


# -------------------------------------------------------------------------------------------------
# Where a build works: in the store's folder, or in one that mirrors a store at a URL.
#
#     the folder    manifest, receipts, tokenizer, log: what plans and decides;
#                   units while they are made, and until they are sent
#     the store     gets every change at once and in the same order: files, then their receipt
#
# An object store has no rename and no locks, and needs neither. An object is seen when it is
# whole, and the receipt, a small object that is sent last, commits. Two builds of one command at
# once send equal bytes under equal names. So a build removes nothing there that no receipt claims:
# it may be what another one has just sent, and the unit's next builder sends the same over it.
#
# The folder is where temporary files are (`TMPDIR`). It holds no more than two units of each
# worker, and goes with the build; one that a killed build left is removed by the next one.

# A build that began has left at least one of these.
_MARKS = {"shards", "tokenmill.json", "building.json", "tokenizer", "parts", ".lock"}
_READ_ONLY = {
    "http": "copy the store to the server after the build",
    "https": "copy the store to the server after the build",
    "hf": "build into a local folder, then: hf upload REPOSITORY FOLDER --repo-type dataset",
}
_BATCH_FILES = 256
_ABANDONED_SECONDS = 60  # a build takes its lock a moment after it made its folder


def open_layout(out: PathInput) -> StoreLayout:
    """The folder in which a build into a path or URL works."""
    root = files.local_path(out)
    if root is not None:
        return StoreLayout(root)
    url = os.fspath(out)
    scheme = url.partition("://")[0].lower()
    if scheme in _READ_ONLY:
        raise UsageError(
            f"a build cannot write to {files.shown(url)!r}: {scheme}:// is for reading",
            hint=f"use a local folder or an object store such as s3://; {_READ_ONLY[scheme]}",
        )
    return _open_mirror(url)


def visit_layout(path: PathInput) -> StoreLayout:
    """The folder of a finished store; of one at a URL, what is borrowed of it."""
    root = files.local_path(path)
    return _open_mirror(os.fspath(path)) if root is None else StoreLayout(root.absolute())


def join_layout(root: str, *, url: str | None, token: str, corner: str = "") -> StoreLayout:
    """The folder of a build for one of its workers; on another machine, a mirror of its own."""
    layout = StoreLayout(Path(root), corner=corner)
    if url is None:
        return layout
    if layout.root.is_dir():
        return dataclasses.replace(layout, upstream=Mirror(layout.root, url, owned=False))
    layout = dataclasses.replace(_open_mirror(url), corner=corner)
    layout.lock.write_text(json.dumps({"token": token}))
    return layout


def _open_mirror(url: str) -> StoreLayout:
    prefix = f"tokenmill-{xxhash.xxh3_64_hexdigest(url.rstrip('/').encode())}-"
    # Folders of builds into the same store that were killed on this machine go first.
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, StoreError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                with StoreLock(StoreLayout(folder), worker_wait_seconds=0):
                    shutil.rmtree(folder, ignore_errors=True)
    root = Path(tempfile.mkdtemp(prefix=prefix))
    return StoreLayout(root, upstream=Mirror(root, url, owned=True))


def refuse_other_folder(root: Path) -> None:
    """UsageError or StoreError for what is no place for a store."""
    try:
        # Listed at once: another part of the same build may make it between two questions.
        names = {entry.name for entry in root.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        what = f"{str(root)!r} is a file; a store is a folder"
        raise UsageError(what, hint="choose another --out") from None
    _refuse_other_things(names, shown=str(root))


def _refuse_other_things(names: Collection[str], *, shown: str) -> None:
    """StoreError for a folder with other things in it: a build would mix with them."""
    if names and _MARKS.isdisjoint(names):
        raise StoreError(
            f"the folder {shown!r} holds other things ({min(names)!r}, ...) and no "
            "store; a build would mix with them",
            hint="choose a new or empty folder with --out",
        )


def remove_folder(path: Path, process: int) -> None:
    if os.getpid() == process:  # a fork must not remove what its parent still uses
        shutil.rmtree(path, ignore_errors=True)


class Mirror(Upstream):
    """The store at a URL that a local folder mirrors."""

    def __init__(self, root: Path, url: str, *, owned: bool) -> None:
        self.root = root
        self.url: str = url.rstrip("/")
        self._sizes: dict[str, dict[str, int | None]] = {}
        self._remove_folder = weakref.finalize(self, remove_folder, root, os.getpid())
        if not owned:
            self._remove_folder.detach()

    def shown(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        url = files.shown(self.url)
        return url if name == "." else files.join(url, name)

    def begin(self) -> None:
        """List the store once, and download its manifest, receipts, tokenizer and log."""
        layout = StoreLayout(self.root)
        with store_errors():
            found = self._sizes["."] = files.list_folder(self.url) or {}
            _refuse_other_things(found, shown=files.shown(self.url))
            known = (layout.manifest, layout.building, layout.forgotten, layout.runs)
            wanted = [path for path in known if path.name in found]
            small = layout.tokenizer, layout.parts, layout.snapshots
            for folder in (*small, layout.retired, layout.shards, layout.rejects):
                if folder.name in found:
                    names = files.list_folder(files.join(self.url, folder.name)) or {}
                    self._sizes[folder.name] = names
                    is_small = folder in small
                    wanted += [folder / n for n in names if is_small or RECEIPT_FILE.fullmatch(n)]
        self.download(wanted)

    def keep(self, path: Path, kept: Path, *, tmp: Path) -> None:  # noqa: ARG002
        with self._told(kept):
            files.copy(self._address(path), self._address(kept))
        size = self.size(str(path))
        self._sizes.setdefault(kept.parent.name, {})[kept.name] = size

    def names(self, folder: Path) -> list[str]:
        return [*self._sizes.get(folder.name, ())]

    def download(self, paths: Sequence[Path]) -> None:
        missing = [path for path in paths if not path.exists()]
        for first in range(0, len(missing), _BATCH_FILES):
            batch = missing[first : first + _BATCH_FILES]
            with store_errors():
                answers = files.read_many([self._address(path) for path in batch])
            for path, data in zip(batch, answers, strict=True):
                if data is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)

    @contextlib.contextmanager
    def borrow(self, paths: Sequence[Path]) -> Iterator[None]:
        try:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                with store_errors():
                    try:
                        files.download(self._address(path), path)
                    except RemoteError as error:
                        path.unlink(missing_ok=True)
                        if error.failure is not Failure.MISSING:
                            raise
            yield
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def size(self, path: str) -> int | None:
        folder, name = path.rsplit("/", 2)[1:]
        return self._sizes.get(folder, {}).get(name)

    def put(self, path: Path) -> None:
        with self._told(path):
            files.upload(path, self._address(path))

    def take(self, staged: Path, path: Path) -> None:
        # From where it is: in the folder, another worker of this unit might have it under hand.
        with self._told(path):
            files.upload(staged, self._address(path))
        staged.unlink()

    def remove(self, paths: Sequence[Path]) -> None:
        if paths:
            with self._told(paths[0]):
                files.remove([self._address(path) for path in paths])

    def close(self) -> None:
        self._remove_folder()

    def _address(self, path: Path) -> str:
        return files.join(self.url, path.relative_to(self.root).as_posix())

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


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """A file of a store that a server did not give us is a StoreError."""
    try:
        yield
    except RemoteError as error:
        lost = error.failure is Failure.MISSING
        raise StoreError(
            f"{error.url!r} cannot be read: {error.reason}",
            hint="copy the store to the server again, with all its files" if lost else error.hint,
        ) from None


def no_store(shown: str) -> StoreError:
    """The error for an address without a manifest."""
    return StoreError(
        f"there is no store at {shown!r}: it has no tokenmill.json",
        hint="check the address; a store has this file once its build has finished",
    )
