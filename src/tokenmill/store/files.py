"""Where the files of an open store are: in a local folder, mapped, or behind a URL.

    Store -> StoreFiles: LocalFiles (here)  |  RemoteFiles (remote.py)  |  other projects' files
                                                                           (interop/in_place.py)

A local store never imports the remote one, nor fsspec.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenmill.store.format import MASK_DTYPE, map_file, read_index, view_tokens, view_values
from tokenmill.store.layout import StoreLayout
from tokenmill.store.manifest import read_manifest
from tokenmill.store.presence import require_files
from tokenmill.store.receipt import read_receipt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.store.format import Index, TokenArray, TokenDtype
    from tokenmill.store.manifest import Manifest
    from tokenmill.store.receipt import Receipt
    from tokenmill.store.remote import RemoteTokens
    from tokenmill.store.spans import Track


class TrackFile(NamedTuple):
    """Where the tokens of a shard, or its mask, lie on a local disk."""

    path: Path
    offset: int
    """Byte of its first value: 0 in a store's own files."""
    size: int
    """Bytes that the whole file must have."""


class StoreFiles(Protocol):
    """What an open store needs of its files; pickled, it opens the same files again."""

    @property
    def path(self) -> Path | str:
        """The folder, or the URL as it may be shown."""

    @property
    def layout(self) -> StoreLayout:
        """The paths of a local store; StoreError for another."""

    def read_manifest(self) -> Manifest:
        """Read the manifest, and see that the files it names are there."""

    def index(self, shard: str) -> Index: ...

    def prepare_indexes(self, shards: Sequence[str]) -> None:
        """Bring indexes that will be asked for, all at once; nothing where they are mapped."""

    def tokens(self, shard: str, *, dtype: TokenDtype) -> TokenArray:
        """The ids of a shard; where they cannot be mapped, they are read when it is sliced."""

    def mask(self, shard: str) -> NDArray[np.uint8]:
        """Which tokens of a shard count; a remote one is read when it is sliced."""

    def track_file(self, shard: str, track: Track, *, size: int) -> TrackFile:
        """Where the values of a local shard, `size` bytes, lie; StoreError for a remote one."""

    def track_offset(self, shard: str, track: Track) -> int:
        """Byte of the first value in a local file, without looking at it: asked of all shards."""

    def open_tokens(self, shards: Sequence[str]) -> RemoteTokens | None:
        """How to read pieces of many shards at once; None where they are mapped."""

    def receipt(self, unit: str) -> Receipt: ...

    def rejects(self, unit: str) -> Iterator[bytes]:
        """The lines of a unit's rejects."""

    def tokenizer(self) -> Path:
        """A folder with the tokenizer's files."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files of a store in a local folder."""

    path: Path

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(self.path)

    def read_manifest(self) -> Manifest:
        manifest = read_manifest(self.path)
        require_files(self.layout, manifest)
        return manifest

    def index(self, shard: str) -> Index:
        return read_index(self.layout.shard_file(shard, "idx"))

    def prepare_indexes(self, shards: Sequence[str]) -> None:
        """Nothing to do: they are mapped."""

    def tokens(self, shard: str, *, dtype: TokenDtype) -> TokenArray:
        return view_tokens(map_file(self.layout.shard_file(shard, "bin")), dtype=dtype)

    def mask(self, shard: str) -> NDArray[np.uint8]:
        return view_values(map_file(self.layout.shard_file(shard, "mask")), dtype=MASK_DTYPE)

    def track_file(self, shard: str, track: Track, *, size: int) -> TrackFile:
        return TrackFile(self.layout.shard_file(shard, track), 0, size)

    def track_offset(self, shard: str, track: Track) -> int:  # noqa: ARG002
        return 0

    def open_tokens(self, shards: Sequence[str]) -> None:  # noqa: ARG002
        return None

    def receipt(self, unit: str) -> Receipt:
        return read_receipt(self.layout, unit)

    def rejects(self, unit: str) -> Iterator[bytes]:
        with self.layout.rejects_file(unit).open("rb") as lines:
            yield from lines

    def tokenizer(self) -> Path:
        return self.layout.tokenizer

    def close(self) -> None:
        """Nothing to do: maps go with their last view."""


def open_files(
    path: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None, cache_bytes: int | None
) -> StoreFiles:
    """The files of the store at a path or URL; a local one needs no cache."""
    text = os.fspath(path)
    if ":/" in text:
        # Imported here: a local store needs none of it.
        from tokenmill import paths
        from tokenmill.store.remote import RemoteFiles

        if paths.is_remote(text):
            return RemoteFiles(text, cache=cache, cache_bytes=cache_bytes)
        text = paths.normalise(text)
    return LocalFiles(Path(text).absolute())
