"""Where a build works: in the store's folder, or in one that mirrors a store behind a URL.

A local build never imports the mirror, nor anything of the network.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.store.layout import StoreLayout

if TYPE_CHECKING:
    from collections.abc import Collection

_MARKS = {"shards", "tokenmill.json", "tokenizer", "parts", ".lock"}
"""A build that began has left at least one of these."""


def open_layout(out: str | os.PathLike[str]) -> StoreLayout:
    """The folder in which a build into a path or URL works."""
    text = os.fspath(out)
    if ":/" in text:
        from tokenmill import paths
        from tokenmill.store.mirror import open_mirror

        if paths.is_remote(text):
            return open_mirror(text)
        text = paths.normalise(text)
    return StoreLayout(Path(text))


def visit_layout(path: str | os.PathLike[str]) -> StoreLayout:
    """The folder of a finished store; of one behind a URL, what is borrowed of it."""
    text = os.fspath(path)
    if ":/" in text:
        from tokenmill import paths
        from tokenmill.store.mirror import open_mirror

        if paths.is_remote(text):
            return open_mirror(text, to_write=False)
        text = paths.normalise(text)
    return StoreLayout(Path(text).absolute())


def join_layout(root: str, *, url: str | None, token: str, corner: str = "") -> StoreLayout:
    """The same folder for a worker of that build."""
    if url is None:
        return StoreLayout(Path(root), corner=corner)
    from tokenmill.store.mirror import join_mirror

    return dataclasses.replace(join_mirror(Path(root), url, token=token), corner=corner)


def refuse_other_things(names: Collection[str], *, shown: str) -> None:
    """StoreError for a folder with other things in it: a build would mix with them."""
    if names and _MARKS.isdisjoint(names):
        raise StoreError(
            f"the folder {shown!r} holds other things ({min(names)!r}, ...) and no "
            "store; a build would mix with them",
            hint="choose a new or empty folder with --out",
        )
