"""How a finished unit becomes part of a store, and how what a crash left behind is removed.

The order is what makes it safe. At every moment, and after a crash at any moment:

    a manifest is there   =>  every receipt it names is there
    a receipt is there    =>  every file it names is there, with the bytes it names

So whoever claims goes first when something is taken away (manifest, then receipt, then files), and
last when something is put in place (files, then receipt). Each step is on the disk before the next
begins.

Two workers may commit the same unit, at the same time even: a part that was started twice, a copy
of a slow task. Equal units have equal bytes, so the one that comes second finds its own receipt and
leaves everything as it is; if both are at it at once, they put the same bytes over each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from tokenmill.errors import BuildError, StoreError
from tokenmill.store.durable import sync_folder, write_error, write_synced
from tokenmill.store.layout import RECEIPT_FILE, REJECTS_FILE, SHARD_FILE, TRAIN
from tokenmill.store.receipt import find_receipt, read_receipt

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.receipt import Claim, Receipt


def publish(layout: StoreLayout, receipt: Receipt, *, staging: Path) -> None:
    """Move a unit's synced files from `staging` into the store; its receipt goes last."""
    unit = receipt.unit.name
    staged_receipt = staging / f"{unit}.json"
    write_synced(staged_receipt, receipt.to_bytes())
    layout.create()
    if _is_there(layout, receipt):
        shutil.rmtree(staging)
        return
    _retire(layout, receipt)
    is_placed = False
    try:
        for name in receipt.files:
            layout.upstream.take(staging / name, layout.shards / name)
        if receipt.rejects is not None:
            layout.upstream.take(staging / f"{unit}.jsonl", layout.rejects_file(unit))
            sync_folder(layout.rejects)
        sync_folder(layout.shards)
        staged_receipt.replace(layout.receipt(unit))
        is_placed = True
        sync_folder(layout.shards)
        layout.upstream.put(layout.receipt(unit))
    except (OSError, BuildError):
        if is_placed or not _is_there(layout, receipt):  # what another worker committed stays
            _withdraw(layout, receipt)
        raise
    staging.rmdir()


def _is_there(layout: StoreLayout, receipt: Receipt) -> bool:
    """Whether this very unit is part of the store already, with all its files."""
    unit = receipt.unit.name
    try:
        if layout.receipt(unit).read_bytes() != receipt.to_bytes():
            return False
    except OSError:
        return False
    return find_receipt(layout, unit) is not None


def _retire(layout: StoreLayout, receipt: Receipt) -> None:
    """Remove an earlier version of the unit; files that the new one has too are replaced later."""
    unit = receipt.unit.name
    if not layout.receipt(unit).exists():
        return
    remove_manifest(layout)
    files = _files_of(layout, unit)
    layout.receipt(unit).unlink(missing_ok=True)
    sync_folder(layout.shards)
    layout.upstream.remove([layout.receipt(unit)])
    replaced = {*receipt.files, *(() if receipt.rejects is None else (f"{unit}.jsonl",))}
    dropped = [path for path in files if path.name not in replaced]
    for path in dropped:
        path.unlink(missing_ok=True)
    layout.upstream.remove(dropped)


def _files_of(layout: StoreLayout, unit: str) -> list[Path]:
    try:
        names: Iterable[str] = read_receipt(layout, unit).files
    except StoreError:  # damaged: the folder itself must say which files are the unit's
        listed = [path.name for path in layout.shards.iterdir()]
        names = [name for name in listed if _unit_of(SHARD_FILE, name) == unit]
    return [*(layout.shards / name for name in names), layout.rejects_file(unit)]


def _claimed(layout: StoreLayout, receipt: Receipt) -> list[Path]:
    """The files that a receipt claims; a unit that rejects nothing has no file of rejects."""
    files = [layout.shards / name for name in receipt.files]
    return files if receipt.rejects is None else [*files, layout.rejects_file(receipt.unit.name)]


def _withdraw(layout: StoreLayout, receipt: Receipt) -> None:
    """Take back what `publish` had moved. A broken disk may refuse that too; `sweep` ends it."""
    unit = receipt.unit.name
    with contextlib.suppress(OSError):
        layout.receipt(unit).unlink(missing_ok=True)
        for path in _claimed(layout, receipt):
            path.unlink(missing_ok=True)


def remove_manifest(layout: StoreLayout) -> None:
    """Take the manifest away, before anything that it claims is changed."""
    if layout.manifest.exists():
        layout.manifest.unlink(missing_ok=True)
        sync_folder(layout.root)
        layout.upstream.remove([layout.manifest])


def sweep(layout: StoreLayout, claims: Mapping[str, Claim]) -> list[Path]:
    """Remove temporary files, and units and files that none of `claims` names; returns them.

    The caller holds the store's lock. Files whose names are not of a store's making are left alone.
    """

    def is_claimed(match: re.Match[str]) -> bool:
        claim = claims.get(match["unit"])
        if claim is None or (match["split"] or TRAIN) not in claim.splits:
            return False
        return claim.mask or match["kind"] != "mask"

    def has_rejects(match: re.Match[str]) -> bool:
        claim = claims.get(match["unit"])
        return claim is not None and claim.rejects

    try:
        shutil.rmtree(layout.tmp, ignore_errors=True)
        retired = _unclaimed(layout.shards, RECEIPT_FILE, lambda match: match["unit"] in claims)
        orphans: list[Path] = []
        if retired:
            remove_manifest(layout)
            orphans += layout.upstream.elsewhere(_files_of_all(layout, retired))
            _remove(layout, retired)
        orphans += _unclaimed(layout.shards, SHARD_FILE, is_claimed)
        orphans += _unclaimed(layout.rejects, REJECTS_FILE, has_rejects)
        _remove(layout, orphans)
    except OSError as error:
        raise write_error(error, path=layout.shards) from error
    return retired + orphans


def _unclaimed(
    folder: Path, pattern: re.Pattern[str], is_claimed: Callable[[re.Match[str]], bool]
) -> list[Path]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = ((entry.name, pattern.fullmatch(entry.name)) for entry in entries)
        return sorted(folder / name for name, match in found if match and not is_claimed(match))


def _files_of_all(layout: StoreLayout, receipts: list[Path]) -> list[Path]:
    return [path for receipt in receipts for path in _files_of(layout, receipt.stem)]


def _remove(layout: StoreLayout, paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
    layout.upstream.remove(paths)


def _unit_of(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.fullmatch(name)
    return None if match is None else match["unit"]
