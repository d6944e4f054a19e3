"""How a finished unit becomes part of a store, and how what a crash left behind is removed.

The order is what makes it safe. At every moment, and after a crash at any moment:

    a manifest is there   =>  every receipt it names is there
    a receipt is there    =>  every file it names is there, with the bytes it names

So whoever claims goes first when something is taken away (manifest, then receipt, then files), and
last when something is put in place (files, then receipt). Each step is on the disk before the next
begins.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from tokenmill.errors import StoreError
from tokenmill.store.durable import sync_folder, write_error, write_synced
from tokenmill.store.layout import RECEIPT_FILE, REJECTS_FILE, SHARD_FILE
from tokenmill.store.receipt import read_receipt

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable
    from pathlib import Path

    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.receipt import Receipt


def publish(layout: StoreLayout, receipt: Receipt, *, staging: Path) -> None:
    """Move a unit's synced files from `staging` into the store; its receipt goes last."""
    unit = receipt.unit.name
    staged_receipt = staging / f"{unit}.json"
    write_synced(staged_receipt, receipt.to_bytes())
    layout.create()
    _retire(layout, unit)
    try:
        for name in receipt.files:
            (staging / name).replace(layout.shards / name)
        if receipt.rejects is not None:
            (staging / f"{unit}.jsonl").replace(layout.rejects_file(unit))
            sync_folder(layout.rejects)
        sync_folder(layout.shards)
        staged_receipt.replace(layout.receipt(unit))
        sync_folder(layout.shards)
    except OSError:
        _withdraw(layout, receipt)
        raise
    staging.rmdir()


def _retire(layout: StoreLayout, unit: str) -> None:
    """Remove an earlier version of the unit, files that the new one will not have included."""
    if not layout.receipt(unit).exists():
        return
    remove_manifest(layout)
    files = _files_of(layout, unit)
    layout.receipt(unit).unlink(missing_ok=True)
    sync_folder(layout.shards)
    for path in files:
        path.unlink(missing_ok=True)


def _files_of(layout: StoreLayout, unit: str) -> list[Path]:
    try:
        names: Iterable[str] = read_receipt(layout, unit).files
    except StoreError:  # damaged: the folder itself must say which files are the unit's
        listed = [path.name for path in layout.shards.iterdir()]
        names = [name for name in listed if _unit_of(SHARD_FILE, name) == unit]
    return [*(layout.shards / name for name in names), layout.rejects_file(unit)]


def _withdraw(layout: StoreLayout, receipt: Receipt) -> None:
    """Take back what `publish` had moved. A broken disk may refuse that too; `sweep` ends it."""
    unit = receipt.unit.name
    with contextlib.suppress(OSError):
        layout.receipt(unit).unlink(missing_ok=True)
        for path in (*(layout.shards / name for name in receipt.files), layout.rejects_file(unit)):
            path.unlink(missing_ok=True)


def remove_manifest(layout: StoreLayout) -> None:
    """Take the manifest away, before anything that it claims is changed."""
    if layout.manifest.exists():
        layout.manifest.unlink(missing_ok=True)
        sync_folder(layout.root)


def sweep(layout: StoreLayout, receipts: Iterable[Receipt]) -> list[Path]:
    """Remove temporary files, and units and files that none of `receipts` claims; returns them.

    The caller holds the store's lock. Files whose names are not of a store's making are left alone.
    """
    kept_shards: set[str] = set()
    kept_rejects: set[str] = set()
    for receipt in receipts:
        unit = receipt.unit.name
        kept_shards |= {f"{unit}.json", *receipt.files}
        if receipt.rejects is not None:
            kept_rejects.add(f"{unit}.jsonl")
    try:
        shutil.rmtree(layout.tmp, ignore_errors=True)
        retired = _unclaimed(layout.shards, RECEIPT_FILE, kept_shards)
        if retired:
            remove_manifest(layout)
            _remove(retired)
        orphans = _unclaimed(layout.shards, SHARD_FILE, kept_shards)
        orphans += _unclaimed(layout.rejects, REJECTS_FILE, kept_rejects)
        _remove(orphans)
    except OSError as error:
        raise write_error(error, path=layout.shards) from error
    return retired + orphans


def _unclaimed(folder: Path, pattern: re.Pattern[str], kept: set[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name not in kept and pattern.fullmatch(p.name))


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)


def _unit_of(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.fullmatch(name)
    return None if match is None else match["unit"]
