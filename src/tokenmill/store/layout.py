"""Where everything lies in a store's folder, and how units and shards are named.

A unit's name comes from its file's path and its index in that file, never from its place in a plan:
files added later leave the old names, and so the old shards, as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import tempfile
import time
import unicodedata
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import xxhash

from tokenmill import files as files_module
from tokenmill.errors import BuildError, StoreError, StoreLockedError, UsageError
from tokenmill.files import Failure, RemoteError
from tokenmill.store.blocks import store_error
from tokenmill.store.durable import RESUME_HINT, sync_folder
from tokenmill.store.lock import StoreLock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager


# -------------------------------------------------------------------------------------------------
# Where the store is that a build's folder stands for: in the folder itself, or behind a URL.
#
#   | StoreLayout.upstream: Itself (here)  |  Mirror (mirror.py)
#
# Everything that plans, commits and assembles works on a folder. What it changes there it also
# tells the upstream, in the same order, so the rules of `commit` hold for both.


class Upstream(Protocol):
    """A store that a local folder is worked on for; paths are those of the folder."""

    @property
    def url(self) -> str | None:
        """The address, with all that is in it; None where the folder is the store."""

    def shown(self, path: Path) -> str:
        """What a path of the folder is called in messages."""

    def begin(self) -> None:
        """Bring what a build must know of the store; StoreError where it cannot be had."""

    def bring(self, paths: Sequence[Path]) -> None:
        """Bring files that are in the store and not in the folder."""

    def borrow(self, paths: Sequence[Path]) -> AbstractContextManager[None]:
        """Have files of any size in the folder for a while, as far as the store has them."""

    def size(self, path: str) -> int | None:
        """Bytes of a file of the store; None if it is not there."""

    def put(self, path: Path) -> None:
        """Make a file of the folder a file of the store."""

    def take(self, staged: Path, path: Path) -> None:
        """Make a staged file, which goes from its place, the file `path` of the store."""

    def remove(self, paths: Sequence[Path]) -> None:
        """Take files away from the store; those that are not there are no error."""

    def elsewhere(self, paths: Sequence[Path]) -> list[Path]:
        """Those of the paths that the store has and a look into the folder would not show."""

    def close(self) -> None:
        """Give back what the folder needed of this machine."""


class Itself:
    """The folder is the store: whatever was done in it is done."""

    url = None

    def shown(self, path: Path) -> str:
        return str(path)

    def begin(self) -> None: ...

    def bring(self, paths: Sequence[Path]) -> None: ...

    def borrow(self, paths: Sequence[Path]) -> AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def size(self, path: str) -> int | None:
        try:
            return os.stat(path).st_size  # noqa: PTH116 (a path object costs more than the call)
        except OSError:
            return None

    def put(self, path: Path) -> None: ...

    def take(self, staged: Path, path: Path) -> None:
        staged.replace(path)

    def remove(self, paths: Sequence[Path]) -> None: ...

    def elsewhere(self, paths: Sequence[Path]) -> list[Path]:  # noqa: ARG002
        return []

    def close(self) -> None: ...


ITSELF = Itself()


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


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The paths of a store."""

    root: Path
    corner: str = ""
    """Folder in tmp/ that is this writer's alone; parts that work at once have one each."""
    upstream: Upstream = field(default=ITSELF, compare=False, repr=False)
    """Where the store is, if the folder only mirrors one behind a URL."""

    @property
    def name(self) -> str:
        """The store as it may be shown: its folder, or its URL."""
        return self.upstream.shown(self.root)

    @property
    def manifest(self) -> Path:
        return self.root / "tokenmill.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def rejects(self) -> Path:
        return self.root / "rejects"

    @property
    def layouts(self) -> Path:
        return self.root / "layouts"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp" / self.corner

    @property
    def parts(self) -> Path:
        """What the parts of a build say of themselves, until it is finished."""
        return self.root / "parts"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def worker_lock(self) -> Path:
        return self.root / ".lock-workers"

    @property
    def turn_lock(self) -> Path:
        return self.root / ".lock-large"

    @property
    def locks(self) -> tuple[Path, ...]:
        """Files that are locked, not read: no part of what a store holds."""
        return self.lock, self.worker_lock, self.turn_lock

    @property
    def runs(self) -> Path:
        return self.root / "runs.jsonl"

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
        names = {each.name for each in (self.manifest, self.runs, *self.locks)}
        folders = [self.tokenizer, self.layouts, self.parts, self.shards, self.rejects]
        names |= {"tmp", *(folder.name for folder in folders)}
        looked_at = folders if to_write else folders[:3]
        for folder, known in ((self.root, names), *((each, None) for each in looked_at)):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                links = [
                    e for e in entries if e.is_symlink() and (known is None or e.name in known)
                ]
                for link in sorted(links, key=lambda each: each.name):
                    if not is_inside(link.path, root=self.root):
                        raise StoreError(
                            f"{link.path!r} is a link that leaves the store; what it leads to is "
                            "neither read nor written",
                            hint="put the file itself in its place, or copy the store again",
                        )

    def create(self) -> None:
        """Make the folders that every build needs."""
        if self.shards.is_dir() and self.rejects.is_dir():
            return
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
    """Whether a path, links followed, lies in a folder."""
    # Not Path.resolve(), which raises on links that lead to each other.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


@functools.lru_cache(1024)
def unit_prefix(path: str) -> str:
    """What the names of a file's units begin with: its own name, and a hash of its whole path."""
    # Paths may hold lone surrogates (bytes that are no UTF-8), which strict encoding would refuse.
    digest = xxhash.xxh3_64_hexdigest(path.encode("utf-8", "surrogatepass"))
    return f"{_slug(path)}-{digest}"


def unit_name(path: str, *, index: int) -> str:
    """The name of a unit: its file's prefix and its position in the file."""
    return f"{unit_prefix(path)}-{index:05d}"


def _slug(path: str) -> str:
    name = COMPRESSION_SUFFIX.sub("", path.rstrip("/").rpartition("/")[2])
    stem = name.rpartition(".")[0] or name
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", plain).strip("-")[:SLUG_CHARACTERS].rstrip("-")
    return slug or "file"


def shard_name(unit: str, *, split: str) -> str:
    """The name of a unit's shard of one split."""
    return unit if split == TRAIN else f"{unit}-{split}"


def is_plain_name(name: str) -> bool:
    """Whether a name stays inside the folder it is put into, on every system."""
    return 0 < len(name) <= 200 and name not in {".", ".."} and not _UNSAFE.search(name)


# -------------------------------------------------------------------------------------------------
# Where a build works: in the store's folder, or in one that mirrors a store behind a URL.
#
# A local build never imports the mirror, nor anything of the network.

_MARKS = {"shards", "tokenmill.json", "tokenizer", "parts", ".lock"}
"""A build that began has left at least one of these."""


def open_layout(out: str | os.PathLike[str]) -> StoreLayout:
    """The folder in which a build into a path or URL works."""
    text = os.fspath(out)
    if ":/" in text:
        from tokenmill import files

        if files.is_remote(text):
            return open_mirror(text)
        text = files.normalise(text)
    return StoreLayout(Path(text))


def visit_layout(path: str | os.PathLike[str]) -> StoreLayout:
    """The folder of a finished store; of one behind a URL, what is borrowed of it."""
    text = os.fspath(path)
    if ":/" in text:
        from tokenmill import files

        if files.is_remote(text):
            return open_mirror(text, to_write=False)
        text = files.normalise(text)
    return StoreLayout(Path(text).absolute())


def join_layout(root: str, *, url: str | None, token: str, corner: str = "") -> StoreLayout:
    """The same folder for a worker of that build."""
    if url is None:
        return StoreLayout(Path(root), corner=corner)

    return dataclasses.replace(join_mirror(Path(root), url, token=token), corner=corner)


def refuse_other_folder(root: Path) -> None:
    """UsageError or StoreError for what is no place for a store."""
    if root.is_dir():
        refuse_other_things({entry.name for entry in root.iterdir()}, shown=str(root))
    elif root.exists():
        raise UsageError(
            f"{str(root)!r} is a file; a store is a folder", hint="choose another --out"
        )


def refuse_other_things(names: Collection[str], *, shown: str) -> None:
    """StoreError for a folder with other things in it: a build would mix with them."""
    if names and _MARKS.isdisjoint(names):
        raise StoreError(
            f"the folder {shown!r} holds other things ({min(names)!r}, ...) and no "
            "store; a build would mix with them",
            hint="choose a new or empty folder with --out",
        )


# -------------------------------------------------------------------------------------------------
# A build into a store behind a URL: it works in a local folder that mirrors the small files.
#
#   | the folder    manifest, receipts, tokenizer, log: what plans and decides;
#   |               units while they are made, and until they are sent
#   | the store     gets every change at once and in the same order: files, then their receipt
#
# An object store has no rename and no locks, and needs neither. An object is seen when it is
# whole, and the receipt, a small object that is sent last, commits. Two builds of one command at
# once send equal bytes under equal names. So a build removes nothing there that no receipt claims:
# it may be what another one has just sent, and the unit's next builder sends the same over it.
#
# The folder lies where temporary files lie (`TMPDIR`). It holds no more than two units of each
# worker, and goes with the build; one that a killed build left is removed by the next one.

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
        url = files_module.shown(self.url)
        return url if name == "." else files_module.join(url, name)

    def begin(self) -> None:
        """List the store once, and bring its manifest, receipts, tokenizer and log."""
        layout = StoreLayout(self.root)
        try:
            found = self._list(".")
            refuse_other_things(found, shown=files_module.shown(self.url))
            wanted = [path for path in (layout.manifest, layout.runs) if path.name in found]
            for folder in (layout.tokenizer, layout.parts, layout.shards, layout.rejects):
                names = self._list(folder.name) if folder.name in found else ()
                wanted += [folder / name for name in names if _is_small(folder, layout, name)]
            self.bring(wanted)
        except RemoteError as error:
            raise store_error(error) from None

    def _list(self, folder: str) -> dict[str, int | None]:
        url = self.url if folder == "." else files_module.join(self.url, folder)
        found = files_module.list_folder(url) or {}
        self._sizes[folder] = found
        return found

    def bring(self, paths: Sequence[Path]) -> None:
        missing = [path for path in paths if not path.exists()]
        for first in range(0, len(missing), _BATCH_FILES):
            batch = missing[first : first + _BATCH_FILES]
            try:
                answers = files_module.read_many([self._address(path) for path in batch])
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
            files_module.download(self._address(path), path)
        except RemoteError as error:
            path.unlink(missing_ok=True)
            if error.failure is not Failure.MISSING:
                raise store_error(error) from None

    def size(self, path: str) -> int | None:
        folder, name = path.rsplit("/", 2)[1:]
        return self._sizes.get(folder, {}).get(name)

    def put(self, path: Path) -> None:
        with self._told(path):
            files_module.upload(path, self._address(path))

    def take(self, staged: Path, path: Path) -> None:
        # From where it lies: in the folder, another worker of this unit might have it under hand.
        with self._told(path):
            files_module.upload(staged, self._address(path))
        staged.unlink()

    def remove(self, paths: Sequence[Path]) -> None:
        if paths:
            with self._told(paths[0]):
                files_module.remove([self._address(path) for path in paths])

    def elsewhere(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if self.size(path.as_posix()) is not None]

    def close(self) -> None:
        self._remove_folder()

    def _address(self, path: Path) -> str:
        return files_module.join(self.url, path.relative_to(self.root).as_posix())

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
            f"a build cannot write to {files_module.shown(url)!r}: {scheme}:// is for reading",
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
