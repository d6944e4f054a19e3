"""Measures how long a store takes until its first batch, and what memory it costs: `make bench`.

    python -m benchmarks.startup            a billion and a trillion tokens; writes startup.json
    python -m benchmarks.startup --quick    a trial with small stores; prints its table

The stores are hollow (see hollow.py): two terabytes of tokens that take no space. Files that were
just written are known to the system: folders, receipts and indices are in its caches, as they are
when a run is restarted. Each measurement is a fresh process; imports are not counted.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT, WORK, machine, measure, render
from benchmarks.command import run_command
from benchmarks.hollow import Hollow, write_hollow

if TYPE_CHECKING:
    from pathlib import Path

SEQ_LEN = 2048
BATCH_SIZE = 16
FOLDER = WORK / "startup"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    """For times; memory is looked at once."""
    batches: int
    """Read before memory is looked at."""
    stores: tuple[Hollow, ...]


FULL = Size(
    rounds=3,
    batches=1000,
    stores=(
        # 690 tokens to a document, as in FineWeb.
        Hollow(shards=16, shard_tokens=62_500_000, shard_documents=90_580),
        # 20,000 tokens to a document: so the 10,000 indices take 1 GB, not 29.
        Hollow(shards=10_000, shard_tokens=100_000_000, shard_documents=5_000),
    ),
)
QUICK = Size(
    rounds=1,
    batches=20,
    stores=(Hollow(shards=3, shard_tokens=1_000_000, shard_documents=1_449),),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table."""

    contender: str
    module: str
    path: Path
    store: Hollow

    def call(self, action: str, size: Size) -> dict[str, Any]:
        """One fresh process; its report."""
        job = {
            "action": action,
            "path": str(self.path),
            "state": str(FOLDER / "state.pickle"),
            "seq_len": SEQ_LEN,
            "batch_size": BATCH_SIZE,
            "middle": self.store.tokens // SEQ_LEN // BATCH_SIZE // 2,
            "batches": size.batches,
        }
        return measure.run(self.module, job)


def measure_case(case: Case, size: Size) -> dict[str, Any]:
    """All rounds of one row, or the reason for having none."""
    _say(f"{case.contender}: {case.store.tokens:,} tokens in {case.store.shards:,} shards")
    row: dict[str, Any] = {
        "contender": case.contender,
        "tokens": case.store.tokens,
        "shards": case.store.shards,
        "documents": case.store.shards * case.store.shard_documents,
        "error": None,
    }
    try:
        case.call("keep", size)
        reports = [case.call(name, size) for name in ("open", "resume") for _ in range(size.rounds)]
        for report in reports:
            for name, seconds in report.items():
                row.setdefault(name, []).append(round(seconds, 5))
        row |= case.call("memory", size)
    except measure.ContenderError as error:
        row["error"] = str(error).replace(str(ROOT), "")
        _say(f"  {row['error']}")
    return row


def make_cases(store: Hollow) -> list[Case]:
    """Write a store, and one file with as many tokens, for scale."""
    root, file = FOLDER / "store", FOLDER / "tokens.bin"
    write_hollow(root, store)
    file.touch()
    os.truncate(file, 2 * store.tokens)
    whole = Hollow(shards=1, shard_tokens=store.tokens, shard_documents=0)
    return [
        Case(contender="tokenmill", module="startup_tokenmill", path=root, store=store),
        Case(contender="memmap, as in nanoGPT", module="startup_memmap", path=file, store=whole),
    ]


def measure_stores(size: Size) -> list[dict[str, Any]]:
    """The rows of all stores, which are made one after the other and removed again."""
    rows = []
    for store in size.stores:
        try:
            rows += [measure_case(case, size) for case in make_cases(store)]
        finally:
            shutil.rmtree(FOLDER, ignore_errors=True)
    return rows


def run(size: Size) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": size.rounds,
        "batches": size.batches,
        "seq_len": SEQ_LEN,
        "batch_size": BATCH_SIZE,
        "measurements": measure_stores(size),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    run_command(
        "startup",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.startup_section,
    )


if __name__ == "__main__":
    main()
