"""How the token file of a raw format gets its bytes: linked, copied, or streamed.

A shard's ids are the same bytes in the store and in the formats; a store behind a URL, or one whose
files have a header, is streamed through its map.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.interop.base import Link, Part
from tokenmill.interop.parts import copy_into
from tokenmill.interop.reading import shard_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tokenmill.interop.base import ExportOptions
    from tokenmill.interop.parts import OutFile, PartFiles
    from tokenmill.store.reader import Store
    from tokenmill.store.sealed import Json


def shard_task(part: Part) -> int:
    """The shard that a part is of."""
    number = part.task["shard"]
    assert isinstance(number, int)
    return number


def token_parts(store: Store, split: str, name: str) -> list[Part]:
    """A part for each shard, all stretches of one shared file."""
    parts, offset = [], 0
    for number, shard in enumerate(store.shards):
        parts.append(
            Part(
                name=f"{split}-{number:05d}",
                split=split,
                tokens=shard.tokens,
                task={"shard": number, "file": name, "offset": offset},
            )
        )
        offset += shard.tokens * store.dtype.itemsize
    return parts


def put_tokens(
    store: Store, part: Part, out: PartFiles, *, name: str | None = None
) -> Mapping[str, Json]:
    """Make the token file of a part's shard, or its stretch of a shared file."""
    number = shard_task(part)
    source = local_tokens(store, number)
    if name is None:
        offset = part.task["offset"]
        assert isinstance(offset, int)
        file = out.stretch(str(part.task["file"]), offset=offset)
        if source is None:
            stream_tokens(store, number, file)
        else:
            copy_into(file, source, checksum=bin_checksum(store, number))
    elif source is not None:
        linked = out.link_or_copy(name, source, checksum=bin_checksum(store, number))
        return {"linked": linked}
    elif out.link_mode is Link.ALWAYS:
        raise UsageError(
            f"the tokens of {str(store.path)!r} are not in a local file of their own, which a link"
            " needs",
            hint="leave --link out",
        )
    else:
        stream_tokens(store, number, out.create(name))
    return {}


def local_tokens(store: Store, number: int) -> Path | None:
    """The file that holds the ids of a shard and nothing else, where there is one."""
    if store.is_remote:
        return None
    shard = store.shards[number]
    size = shard.tokens * store.dtype.itemsize
    file = store.files.track_file(shard.name, "bin", size=size)
    return file.path if file.offset == 0 else None


def bin_checksum(store: Store, number: int) -> str | None:
    """What the store says about the bytes of a shard; None where it is not its own."""
    if "in_place" in store.manifest.identity.config:
        return None
    return _checksums(store)[number]


@lru_cache(maxsize=4)
def _checksums(store: Store) -> list[str]:
    return [entry.bin for _, entry in store.manifest.shards(split=store.split)]


def stream_tokens(store: Store, number: int, file: OutFile) -> None:
    for block in shard_blocks(store, number):
        file.write(np.ascontiguousarray(block.ids).data)


def stream_mask(store: Store, number: int, file: OutFile) -> None:
    """A byte for each token of a shard; 1 for all where the shard has no mask."""
    for block in shard_blocks(store, number):
        mask: Any = np.ones(len(block.ids), np.uint8) if block.mask is None else block.mask
        file.write(np.ascontiguousarray(mask).data)


def one_link(stores: Mapping[str, Store], options: ExportOptions, *, what: str) -> None:
    """Refuse links where a file would be made of several shards."""
    for split, store in stores.items():
        if options.link is not Link.NEVER and len(store.shards) != 1:
            raise UsageError(
                f"the split {split!r} has {len(store.shards)} shards and {what} is one file, which"
                " cannot be a link to several",
                hint="leave --link out",
            )
