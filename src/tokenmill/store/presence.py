"""Whether every file that a manifest names is there, inside the folder, with its size.

This is what opening a store checks: one listing per folder, no file is read. A file that was cut
off, lost in a copy, or replaced by a link to somewhere else is found here, by name. Of a store of
many thousand shards the names alone are looked at, since asking for 30,000 sizes takes a tenth of a
second and more; sizes are compared again anyway whenever a shard is mapped.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.errors import StoreError
from tokenmill.store.layout import is_inside, shard_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.manifest import Manifest


MANY_UNITS = 4096
_ANY = -1
"""Size of a file that was not asked for its size."""


class Problem(NamedTuple):
    """One file that is not as the manifest says."""

    path: Path
    problem: str


def require_files(layout: StoreLayout, manifest: Manifest) -> None:
    """Raise StoreError, which names the first file, unless every file is there with its size."""
    problems = list(find_problems(layout, manifest, sizes=len(manifest.units) <= MANY_UNITS))
    if problems:
        path, problem = problems[0]
        raise incomplete(path, problem, others=len(problems) - 1)


def incomplete(path: Path | str, problem: str, *, others: int) -> StoreError:
    """The error for a store of which a file is not as the manifest says."""
    more = f" (and {others} more files)" if others else ""
    return StoreError(
        f"{str(path)!r} {problem}{more}; the store is incomplete",
        hint="copy the store again with all its files, or run its build again: it repairs it",
    )


def find_problems(
    layout: StoreLayout, manifest: Manifest, *, sizes: bool = True
) -> Iterator[Problem]:
    """Files that are missing, of another size if `sizes`, or links that leave the store."""
    for folder, expected in expected_files(layout, manifest).items():
        if not expected:
            continue
        if not is_inside(str(folder), root=layout.root):
            yield Problem(folder, "is a link that leaves the store")
            continue
        files = _sizes(folder, root=layout.root, ask=sizes)
        for name, size in expected.items():
            found = files.get(name)
            if found not in (size, _ANY):
                yield Problem(folder / name, size_problem(found, size))


def expected_files(layout: StoreLayout, manifest: Manifest) -> dict[Path, dict[str, int]]:
    """Folder -> name -> bytes of every file that the manifest claims."""
    return {layout.root / folder: sizes for folder, sizes in expected_sizes(manifest).items()}


def expected_sizes(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Folder, relative to the store -> name -> bytes of every file that the manifest claims."""
    dtype = manifest.identity.dtype
    shards: dict[str, int] = {}
    rejects: dict[str, int] = {}
    for unit in manifest.units:
        shards[f"{unit.name}.json"] = unit.receipt_bytes
        if unit.rejects is not None:
            rejects[f"{unit.name}.jsonl"] = unit.rejects.bytes
        for shard in unit.shards:
            name = shard_name(unit.name, split=shard.split)
            shards[f"{name}.bin"] = shard.bin_bytes(dtype)
            shards[f"{name}.idx"] = shard.idx_bytes
            if shard.mask is not None:
                shards[f"{name}.mask"] = shard.tokens
    tokenizer = {name: facts.bytes for name, facts in manifest.identity.tokenizer.files.items()}
    return {"shards": shards, "rejects": rejects, "tokenizer": tokenizer}


def _sizes(folder: Path, *, root: Path, ask: bool) -> dict[str, int | str]:
    """Name -> bytes, or what is wrong with the file; plain files are not asked unless `ask`."""
    found: dict[str, int | str] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                # Plain files first, and here: a large store has 100,000 of them.
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size if ask else _ANY
                else:
                    found[entry.name] = _size_of_other(entry, root=root)
    except OSError:
        return found  # a missing folder: every file in it is reported as missing
    return found


def _size_of_other(entry: os.DirEntry[str], *, root: Path) -> int | str:
    if entry.is_symlink() and not is_inside(entry.path, root=root):
        return "is a link that leaves the store"
    try:
        return entry.stat().st_size if entry.is_file() else "is not a file"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def size_problem(found: int | str | None, size: int) -> str:
    """What is wrong with a file that has not this size; text is what is wrong already."""
    if found is None:
        return "is missing"
    return found if isinstance(found, str) else f"has {found:,} bytes instead of {size:,}"
