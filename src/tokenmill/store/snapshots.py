"""Earlier states of a store that grew: the manifests that were, and what they need to be read.

    a build over a finished store: keep -> retire -> (the build) -> tidy
    Store(path, snapshot=1): open_snapshot -> its manifest, and where its files are

A snapshot is a manifest under another name, byte for byte. Its shards are those of the store
itself: growing adds units and changes none. Only where a unit is cut in another place since, as a
group of small files that one more file joined, the unit that was goes to `retired/`, under a name
that has its receipt's checksum. What was changed or dropped in the input is not kept: a snapshot
that needs it goes with it.

Snapshots are the history of a store and no part of what it is: one without them is the same store.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tokenmill.errors import StoreError
from tokenmill.options import PruneOptions, with_options
from tokenmill.store.facts import (
    Manifest,
    content_fingerprint,
    facts_of,
    find_receipt,
    known_manifest,
    read_manifest,
)
from tokenmill.store.layout import (
    StoreLock,
    Upstream,
    open_layout,
    replace_file,
    shard_name,
    sync_folder,
    write_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from tokenmill.store.facts import UnitEntry
    from tokenmill.store.layout import StoreLayout

SNAPSHOT_FILE = re.compile(r"(?P<number>[0-9]{4,})-(?P<content>[0-9a-f]{16})\.json")
_DIGITS = 16  # of checksums in names
_FEWEST_DIGITS = 4  # of a fingerprint that is asked for

# Unit or shard -> what precedes the names of its files in retired/; others are in their place.
Moved: TypeAlias = "Mapping[str, str]"
# A number, the name, or the first digits of the fingerprint of what it holds.
SnapshotName: TypeAlias = int | str


class Snapshot(NamedTuple):
    """An earlier state of a store, as its name tells it."""

    number: int
    content: str  # the first digits of the fingerprint of all that it holds

    @property
    def name(self) -> str:
        return f"{self.number:04d}-{self.content}"

    def is_called(self, asked: SnapshotName) -> bool:
        if isinstance(asked, int) or asked.isdecimal():
            if self.number == int(asked):
                return True
            asked = str(asked)
        is_long = len(asked) >= _FEWEST_DIGITS
        return asked == self.name or (is_long and self.content.startswith(asked[:_DIGITS]))


def snapshots_of(names: Iterable[str]) -> list[Snapshot]:
    """Those in a folder of such names, oldest first."""
    found = filter(None, map(SNAPSHOT_FILE.fullmatch, names))
    return sorted(Snapshot(int(match["number"]), match["content"]) for match in found)


def list_snapshots(layout: StoreLayout) -> list[Snapshot]:
    """Those of a store in a local folder, oldest first."""
    return snapshots_of(Upstream().names(layout.snapshots))


def choose(
    asked: SnapshotName, found: Collection[Snapshot], current: Callable[[], Manifest], shown: str
) -> Snapshot | None:
    """The snapshot that is meant; None for the store as it is now."""
    meant = [each for each in found if each.is_called(asked)]
    if len(meant) == 1:
        return meant[0]
    if not meant and isinstance(asked, str) and len(asked) >= _FEWEST_DIGITS:
        with contextlib.suppress(StoreError):  # its build may be under way
            if content_fingerprint(current(), split=None).startswith(asked):
                return None
    known = ", ".join(each.name for each in found)
    raise StoreError(
        f"{shown!r} has {len(meant) or 'no'} snapshots {asked!r}"
        + ("; one is a store that is read" if meant else ""),
        hint=f"it has {known}: give the number or the first digits of the fingerprint"
        if known
        else "a build that adds to a finished store keeps one; tokenmill prune, and a build that "
        "replaces what it holds, take them away",
    )


def open_snapshot(layout: StoreLayout, asked: SnapshotName) -> tuple[Manifest, Moved]:
    """The manifest of a snapshot in a local folder, and where its files are."""
    layout.require_inside()
    found = choose(
        asked, list_snapshots(layout), lambda: read_manifest(layout.root), str(layout.root)
    )
    if found is None:
        return read_manifest(layout.root), {}
    manifest = _read(layout, found)
    return manifest, moved_files(manifest, Upstream().names(layout.retired))


def _read(layout: StoreLayout, snapshot: Snapshot) -> Manifest:
    path = layout.snapshots / f"{snapshot.name}.json"
    try:
        return Manifest.from_bytes(path.read_bytes(), path=path)
    except OSError as error:
        raise StoreError(
            f"the snapshot {str(path)!r} cannot be read: {error.strerror or error}",
            hint="check the path and its permissions",
        ) from error


def moved_files(manifest: Manifest, retired: Iterable[str]) -> Moved:
    """Where the files of units and shards are, of those that are in retired/."""
    names = set(retired)
    moved = {}
    for unit in manifest.units if names else ():
        prefix = _prefix(unit)
        if f"{prefix}{unit.name}.json" in names:
            for shard in unit.shards:
                moved[shard_name(unit.name, split=shard.split)] = prefix
            moved[unit.name] = prefix
    return moved


def _prefix(unit: UnitEntry) -> str:
    return f"{unit.receipt[:_DIGITS]}-"


# -------------------------------------------------------------------------------------------------
# What a build does. Each step can be cut off and done again: a snapshot is listed only while all
# of its units are there, and what none of them needs goes at the end.


def keep(layout: StoreLayout) -> None:
    """Keep the manifest of a complete store, before anything is added to it."""
    manifest = known_manifest(layout)
    if manifest is None or not manifest.units:
        return
    found = list_snapshots(layout)
    content = content_fingerprint(manifest, split=None)[:_DIGITS]
    if all(each.content != content for each in found):
        snapshot = Snapshot(found[-1].number + 1 if found else 1, content)
        _make_folder(layout, layout.snapshots)
        path = layout.snapshots / f"{snapshot.name}.json"
        replace_file(layout, path, layout.manifest.read_bytes())


def drop_those_with(layout: StoreLayout, units: Iterable[str]) -> None:
    """Remove the snapshots that need units which are about to go, or be replaced by others.

    And those with units in retired/: the same text may be in them, cut in another place.
    """
    drop(layout, those_with(layout, units))


def those_with(layout: StoreLayout, units: Iterable[str]) -> list[str]:
    """Names of the snapshots that may have text of these units."""
    found = list_snapshots(layout)
    gone, names = {}, []
    for unit in units if found else ():
        if find_receipt(layout, unit) is not None:  # a damaged one comes back as it was
            gone[unit] = facts_of(layout.receipt(unit).read_bytes()).checksum
    retired = layout.upstream.names(layout.retired)
    for snapshot in found if gone else ():
        manifest = _read(layout, snapshot)
        needs_gone = any(gone.get(unit.name) == unit.receipt for unit in manifest.units)
        if needs_gone or moved_files(manifest, retired):
            names.append(snapshot.name)
    return names


def drop(layout: StoreLayout, names: Iterable[str]) -> None:
    """Remove snapshots; what they alone need goes with `tidy`."""
    for name in names:
        _remove(layout, [layout.snapshots / f"{name}.json"])


def retire(layout: StoreLayout, units: Iterable[str], *, moved: bool) -> None:
    """Keep units in retired/ too, for the snapshots; with `moved` they go from their place."""
    if not list_snapshots(layout):
        return
    for unit in units:
        receipt = find_receipt(layout, unit)
        if receipt is None:
            continue
        own = layout.receipt(unit)
        prefix = f"{facts_of(own.read_bytes()).checksum[:_DIGITS]}-"
        _make_folder(layout, layout.retired)
        files = [layout.shards / name for name in receipt.files]
        if receipt.rejects is not None:
            files.append(layout.rejects_file(unit))
        for path in (*files, own):  # the receipt last: it says that the others are there
            layout.upstream.keep(path, layout.retired / f"{prefix}{path.name}", tmp=layout.tmp)
        sync_folder(layout.retired)
        if moved:
            _remove(layout, [own])
            _remove(layout, files)


def tidy(layout: StoreLayout, manifest: Manifest) -> Snapshot | None:
    """Remove what a build left no use for; returns the snapshot of what was before it."""
    found, needed = list_snapshots(layout), set[str]()
    retired = layout.upstream.names(layout.retired) if found or layout.retired.is_dir() else []
    present = {unit.name: unit.receipt for unit in manifest.units}
    content = content_fingerprint(manifest, split=None)
    dropped = []
    for snapshot in found:
        old = _read(layout, snapshot)
        moved = moved_files(old, retired)
        is_whole = all(u.name in moved or present.get(u.name) == u.receipt for u in old.units)
        if is_whole and not content.startswith(snapshot.content):
            needed |= set(moved.values())
        else:
            dropped.append(snapshot)
    _remove(layout, [layout.snapshots / f"{each.name}.json" for each in dropped])
    left = [name for name in retired if f"{name.partition('-')[0]}-" not in needed]
    _remove(layout, [layout.retired / name for name in left])
    for folder in (layout.snapshots, layout.retired):
        with contextlib.suppress(OSError):
            folder.rmdir()
    kept = [each for each in found if each not in dropped]
    return kept[-1] if kept else None


def _make_folder(layout: StoreLayout, folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        sync_folder(layout.root)


def _remove(layout: StoreLayout, paths: Collection[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths if path.parent.is_dir()}:
        sync_folder(folder)
    layout.upstream.remove([*paths])


# -------------------------------------------------------------------------------------------------
# The verb `prune`.


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneResult:
    """What was removed, or would be."""

    store: str
    snapshots: tuple[str, ...]
    files: int
    bytes: int
    """Of files that only the snapshots needed: most of theirs are those of the store itself."""
    dry_run: bool


@with_options(PruneOptions)
def prune(asked: PruneOptions) -> PruneResult:
    """Remove the snapshots of a store that grew, and the shards that only they need."""
    layout = open_layout(asked.store)
    try:
        layout.upstream.begin()
        if not layout.manifest.exists():
            read_manifest(layout.root)  # says what is there instead
        with contextlib.nullcontext() if asked.dry_run else StoreLock(layout):
            found = list_snapshots(layout)
            paths = [layout.snapshots / f"{each.name}.json" for each in found]
            paths += [layout.retired / name for name in layout.upstream.names(layout.retired)]
            sizes = [layout.size(path.parent.name, path.name) or 0 for path in paths]
            if not asked.dry_run:
                _remove(layout, paths)
                for folder in (layout.snapshots, layout.retired):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
        return PruneResult(
            store=layout.name,
            snapshots=tuple(each.name for each in found),
            files=len(paths),
            bytes=sum(sizes),
            dry_run=asked.dry_run,
        )
    except OSError as error:
        raise write_error(error, path=layout.snapshots) from error
    finally:
        layout.upstream.close()
