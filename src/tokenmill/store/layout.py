"""Where everything lies in a store's folder, and how units and shards are named.

A unit's name comes from its file's path and its index in that file, never from its place in a plan:
files added later leave the old names, and so the old shards, as they are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tokenmill.errors import StoreError
from tokenmill.store.durable import sync_folder
from tokenmill.store.upstream import ITSELF, Upstream

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
