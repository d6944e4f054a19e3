"""Simulates a build of 10 PB in a million units, and measures what the driver pays for each.

    python -m benchmarks.scaling                  writes results/scaling.json (about half an hour)
    python -m benchmarks.scaling --units 20000    a trial; prints its table

The input is real to everything that plans: 10,000 JSON Lines files of 1 TB, each one hole in a
sparse file. The units are hollow: receipts are real, made by the store's own code, with shards that
are holes of the right sizes. So planning, resuming, sweeping and writing the manifest are the
build's own code on real files; only encoding is left out. Each step is a fresh process, whose
seconds and peak memory (resident set) are its own. What depends on a disk's sync (committing) and
on pipes (handing out tasks) is measured on fewer units, for each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS, ROOT, WORK, machine, render
from tokenmill.builder.progress import Monitor
from tokenmill.builder.run import make_run
from tokenmill.builder.worker import EngineReport, UnitReport
from tokenmill.options import BuildOptions
from tokenmill.runners.local import LocalRunner, TaskReport, WorkerReady
from tokenmill.sources.base import plan_units
from tokenmill.store.facts import (
    Bounds,
    Counts,
    EngineFacts,
    FileFacts,
    Receipt,
    ShardFacts,
    ShardFiles,
    SourceFacts,
    UnitFacts,
    read_manifest,
)
from tokenmill.store.format import index_bytes
from tokenmill.store.layout import TRAIN, StoreLayout, unit_name
from tokenmill.store.write import UnitWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenmill.builder.run import BuildRun
    from tokenmill.runners.local import Report
    from tokenmill.sources.base import Unit

FOLDER = WORK / "scaling"
UNIT_BYTES = 10 * 10**9
UNITS_PER_FILE = 100
UNITS = 1_000_000
UNIT_TOKENS = UNIT_BYTES // 4
UNIT_DOCUMENTS = UNIT_TOKENS // 690
COMMITS = 300
DISPATCHED = 5000
STEPS = ("plan", "receipts", "resume", "read", "monitor", "commit", "dispatch")
ENGINE = EngineFacts(
    name="hollow",
    version="0",
    reference="hollow",
    reference_version="0",
    checked_documents=0,
    mismatches=0,
    redone=False,
    routed_documents=0,
)
COUNTS = Counts.of(
    rows=UNIT_DOCUMENTS,
    documents=UNIT_DOCUMENTS,
    input_bytes=UNIT_BYTES,
    text_bytes=UNIT_BYTES,
    tokens=UNIT_TOKENS,
)


def make_input(units: int) -> None:
    """Files of 1 TB that take no space."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "in").mkdir(parents=True)
    for number in range(-(-units // UNITS_PER_FILE)):
        path = FOLDER / "in" / f"part-{number:06d}.jsonl"
        path.touch()
        os.truncate(path, UNITS_PER_FILE * UNIT_BYTES)


def the_run() -> BuildRun:
    options = BuildOptions(
        "in", tokenizer="bytes", out="store", unit_bytes=UNIT_BYTES, memory="4GB"
    )
    return make_run(options)


def plan() -> dict[str, Any]:
    """Discover the files and cut them into units, as the first run of a build does."""
    run = the_run()
    work = run.prepare(run.discover())
    return {"units": len(work.plan.tasks), "input_bytes": work.plan.bytes_to_do}


def receipts() -> dict[str, Any]:
    """Write a receipt and two holes for every unit; nothing is synced."""
    run, layout = the_run(), StoreLayout(Path("store"))
    work = run.prepare(run.discover())
    config = work.request.identity.fingerprint
    layout.create()
    count, size = 0, 0
    for file in work.plan.files:
        for unit in plan_units(file, work.settings.source):
            receipt = hollow_receipt(unit, config=config)
            for name, facts in receipt.files.items():
                descriptor = os.open(layout.shards / name, os.O_CREAT | os.O_WRONLY)
                os.ftruncate(descriptor, facts.bytes)
                os.close(descriptor)
            data = receipt.to_bytes()
            layout.receipt(receipt.unit.name).write_bytes(data)
            count, size = count + 1, size + len(data)
    return {"units": count, "receipt_bytes": size}


def hollow_receipt(unit: Unit, *, config: str) -> Receipt:
    """The receipt of a unit that nobody read."""
    name = unit_name(unit.file.path, index=unit.index)
    shard = ShardFacts(
        name=name,
        split=TRAIN,
        documents=UNIT_DOCUMENTS,
        tokens=UNIT_TOKENS,
        max_id=0,
        rows=(0, UNIT_DOCUMENTS),
        files=ShardFiles(
            bin=FileFacts(bytes=2 * UNIT_TOKENS, checksum=_checksum(name, "bin")),
            idx=FileFacts(bytes=index_bytes(UNIT_DOCUMENTS), checksum=_checksum(name, "idx")),
        ),
    )
    return Receipt(
        unit=UnitFacts.of(unit.file.path, index=unit.index, start=unit.start, end=unit.end),
        source=SourceFacts(
            size=unit.file.size,
            version=unit.file.version,
            digest="0" * 32,
            is_last=unit.end is None,
            num_lines=UNIT_DOCUMENTS,
        ),
        config=config,
        counts=COUNTS,
        bounds=Bounds(largest_row_bytes=0, smallest_too_large_bytes=None),
        engine=ENGINE,
        shards=(shard,),
        rejects=None,
    )


def _checksum(name: str, kind: str) -> str:
    """Different for every file, as real ones are: equal strings would share memory."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(f"{name}.{kind}".encode())


def resume() -> dict[str, Any]:
    """The last run of a build, all units complete: plan, sweep, and write the manifest."""
    result = the_run().run()
    size = Path("store/tokenmill.json").stat().st_size
    return {"units": result.units_resumed, "manifest_bytes": size}


def read() -> dict[str, Any]:
    """Read the manifest, as everyone does who opens the store."""
    return {"units": len(read_manifest(Path("store")).units)}


def monitor() -> dict[str, Any]:
    """Take in the report of every unit, as the driver does while workers build."""
    units = [unit_name(f"in/part-{k // 100:06d}.jsonl", index=k % 100) for k in range(_units())]
    watch = Monitor(budget=1, bytes_total=1, units_total=None, on_progress=None, num_workers=1)
    watch.on_event(
        WorkerReady(0, os.getpid(), EngineReport(name="hollow", reference="hollow", note=None))
    )
    start = time.perf_counter()
    for name in units:
        stages = {"read": 1.0, "parse": 1.0, "encode": 1.0, "write": 1.0}
        report = UnitReport(unit=name, pid=1, counts=COUNTS, engine=ENGINE, stage_seconds=stages)
        watch.on_event(TaskReport(0, report))
    return {"units": len(watch.units), "seconds": time.perf_counter() - start}


def commit() -> dict[str, Any]:
    """Commit small units as a worker does, every file and folder synced."""
    import numpy as np

    layout = StoreLayout(Path("commits"))
    ids, lengths = np.zeros(1000, np.uint16), np.full(10, 100)
    start = time.perf_counter()
    for index in range(COMMITS):
        facts = UnitFacts.of("a.jsonl", index=index, start=index, end=index + 1)
        writer = UnitWriter(layout, facts, vocab_size=257)
        writer.append(TRAIN, ids, lengths=lengths, rows=np.arange(10))
        writer.commit(
            source=SourceFacts(size=1, version="0", digest="0" * 32, is_last=False, num_lines=10),
            config="0",
            counts=Counts.of(rows=10, documents=10, tokens=1000),
            bounds=Bounds(largest_row_bytes=0, smallest_too_large_bytes=None),
            engine=ENGINE,
        )
    return {"units": COMMITS, "seconds": time.perf_counter() - start}


def dispatch() -> dict[str, Any]:
    """Hand out tasks that do nothing to two worker processes."""
    runner, times = LocalRunner(2), []
    # By the name that a worker finds it under: here it may be one of __main__.
    from benchmarks.scaling import Idler as Findable

    runner.run(Findable, range(DISPATCHED), on_event=lambda _: times.append(time.perf_counter()))
    return {"units": DISPATCHED, "seconds": times[-1] - times[1]}


class Idler:
    """A worker that reports as one that builds does, and does nothing else."""

    def ready(self) -> Any: ...

    def work(self, task: Any, report: Report) -> Any:  # noqa: ARG002
        report(UnitReport(unit="x" * 60, pid=1, counts=COUNTS, engine=ENGINE, stage_seconds={}))

    def close(self) -> None: ...


def _units() -> int:
    return UNITS_PER_FILE * len(os.listdir("in"))  # noqa: PTH208 (counted, not walked)


def carry_out(step: str) -> None:
    """One step in this process; prints its report."""
    os.chdir(FOLDER)
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "plan": plan,
        "receipts": receipts,
        "resume": resume,
        "read": read,
        "monitor": monitor,
        "commit": commit,
        "dispatch": dispatch,
    }
    gc.collect()
    start = time.perf_counter()
    report = steps[step]()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_memory_bytes": peak} | report))


def measure(units: int) -> Iterator[dict[str, Any]]:
    """The report of each step."""
    make_input(units)
    for step in STEPS:
        command = [sys.executable, "-m", "benchmarks.scaling", "--step", step]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        report = {"step": step} | json.loads(done.stdout)
        print(report, file=sys.stderr, flush=True)
        yield report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=UNITS)
    parser.add_argument("--step", choices=STEPS, help="one step, in this process")
    arguments = parser.parse_args()
    if arguments.step is not None:
        carry_out(arguments.step)
        return
    try:
        run(arguments.units)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)  # three million files: this takes minutes


def run(units: int) -> None:
    """Measure, keep the results if nothing was left out, and print their table."""
    results = machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "units": units,
        "unit_bytes": UNIT_BYTES,
        "measurements": list(measure(units)),
    }
    if units == UNITS:
        (RESULTS / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")
    print(render.scaling_section(results))


if __name__ == "__main__":
    main()
