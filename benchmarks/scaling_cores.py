"""Measures builds of one corpus with 1, 2, 4, ... workers, up to the cores of this machine.

    python -m benchmarks.scaling_cores            writes results/scaling_cores.json
    python -m benchmarks.scaling_cores --quick    a trial; prints its table
    python -m benchmarks.scaling_cores --few      few compressed files alone; prints their table

The corpus is larger than the start-up of sixteen workers can hide, and is cut into far more units
than there are workers, so that the last ones do not wait for one unit; the compressed one has as
many files as it takes for each worker to decompress its own. The store is removed after each build;
files that were read before are in the system's cache, as they are for every number of workers.
Rounds go through all numbers of workers in turn, so that a slow minute of the machine hits all of
them.

Half as much text in one and in three compressed files, with one worker and with all, cut into units
as a user's would be: workers share these, and no build is faster than its files are decompressed,
each by one thread. That rate is measured too, alone in this process.

At the end one build with all workers stands beside as many parts, each a program of its own with
one worker: those are timed from the first start to the last exit, as a user would.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path
from typing import Any

import tokenmill
from benchmarks import (
    RESULTS,
    ROOT,
    WORK,
    corpora,
    machine,
    render,
    scaling_table,
    vocabularies,
)
from tokenmill.runners.local import physical_cores
from tokenmill.sources.base import open_decompressed
from tokenmill.sources.discovery import source_file

CORPUS_MEGABYTES = 1600
QUICK_MEGABYTES = 60
NUM_FILES = 64
FORMATS = ("jsonl", "jsonl.zst")
SHARED = (("jsonl.zst", 1), ("jsonl.zst", 3), ("jsonl.gz", 1))  # few files, for all workers
ROUNDS = 3
UNIT_BYTES = "8MB"
MEMORY_PER_WORKER = 2_000_000_000
PROGRAM = """
import sys, tokenmill
files, tokenizer, out, memory, workers, part = sys.argv[1:]
tokenmill.build(files.split("|"), tokenizer=tokenizer, out=out, memory=int(memory),
                workers=int(workers), unit_bytes="{unit_bytes}", part=part or None)
"""


def worker_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    counts = [1 << k for k in range(most.bit_length())]
    return sorted({*(count for count in counts if count <= most), most})


def build(
    files: list[Path],
    tokenizer: Path,
    out: Path,
    *,
    workers: int,
    unit_bytes: str | None = UNIT_BYTES,
) -> dict[str, Any]:
    """One build into a fresh folder."""
    shutil.rmtree(out, ignore_errors=True)
    result = tokenmill.build(
        files,
        tokenizer=tokenizer,
        out=out,
        workers=workers,
        memory=MEMORY_PER_WORKER * workers,
        unit_bytes=unit_bytes,
    )
    shutil.rmtree(out)
    _tell(f"{len(files)} {files[0].name}, {workers} workers: {result.working_seconds:.2f} s")
    return {
        "text_bytes": result.totals.text_bytes,
        "tokens": result.totals.tokens,
        "engine": result.engine,
        "working_seconds": round(result.working_seconds, 3),
        "startup_seconds": round(result.startup_seconds, 3),
    }


def decompress(file: Path, package: str) -> float:
    """Bytes of text that a second gives, by the package that a build would use."""
    stream, size = open_decompressed(source_file(str(file))), 0
    buffer, begin = memoryview(bytearray(8 << 20)), time.perf_counter()
    while count := stream.readinto(buffer):
        size += count
    rate = size / (time.perf_counter() - begin)
    stream.close()
    _tell(f"{file.name} by {package}: {rate / 1e6:,.0f} MB/s")
    return rate


def compare_packages(files: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """How fast one file of each compression is decompressed; gz by Python's own package too."""
    cases = [("jsonl.zst", "pyarrow"), ("jsonl.gz", "zlib")]
    if importlib.util.find_spec("zlib_ng") is not None:
        cases.insert(1, ("jsonl.gz", "zlib-ng"))
    rates: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for kind, package in cases:
            hidden = {"zlib_ng": None} if package == "zlib" else {}
            with unittest.mock.patch.dict(sys.modules, hidden):
                rates[kind, package].append(round(decompress(files[kind], package)))
    return [
        {"format": kind, "package": package, "bytes_per_second": found}
        for (kind, package), found in rates.items()
    ]


def compare_parts(files: list[Path], tokenizer: Path, out: Path, count: int) -> dict[str, float]:
    """Seconds of one program with so many workers, of so many parts at once, and of `finish`."""
    names = "|".join(map(str, files))

    def start(workers: int, part: str) -> subprocess.Popen[bytes]:
        program = PROGRAM.format(unit_bytes=UNIT_BYTES)
        memory = str(MEMORY_PER_WORKER * workers)
        values = [names, str(tokenizer), str(out), memory, str(workers), part]
        return subprocess.Popen([sys.executable, "-c", program, *values], cwd=ROOT)

    seconds = {}
    shutil.rmtree(out, ignore_errors=True)
    seconds["build"] = _timed(lambda: [start(count, "")])
    shutil.rmtree(out)
    parts = [f"{number}/{count}" for number in range(1, count + 1)]
    seconds["parts"] = _timed(lambda: [start(1, part) for part in parts])
    begin = time.perf_counter()
    tokenmill.finish(out)
    seconds["finish"] = time.perf_counter() - begin
    shutil.rmtree(out)
    _tell(f"parts: {seconds}")
    return {name: round(value, 3) for name, value in seconds.items()}


def _timed(start: Any) -> float:
    begin = time.perf_counter()
    codes = [program.wait() for program in start()]
    if any(codes):
        raise RuntimeError(f"programs failed: {codes}")
    return time.perf_counter() - begin


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, *, megabytes: int, rounds: int) -> dict[str, Any]:
    """Rows, one for each format and number of workers, and what they have in common."""
    name, tokenizer = _names(options)
    corpus = corpora.prepare(
        name,
        num_bytes=megabytes * corpora.MEGABYTE,
        num_files=NUM_FILES,
        formats=FORMATS,
        source=options.corpus,
    )
    counts, out = worker_counts(options.workers), options.folder / "scaling-cores-store"
    cases = [(kind, count) for kind in FORMATS for count in counts]
    builds: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    parts = []
    for _ in range(rounds):
        for kind, count in cases:
            builds[kind, count].append(build(corpus.files(kind), tokenizer, out, workers=count))
        parts.append(compare_parts(corpus.files("jsonl"), tokenizer, out, counts[-1]))
    rows = [_row(found, kind, workers) for (kind, workers), found in builds.items()]
    return {
        "corpus": name,
        "tokenizer": tokenizer.name,
        "engine": builds["jsonl", counts[0]][0]["engine"],
        "files": NUM_FILES,
        "input_bytes": corpus.input_bytes,
        "rounds": rounds,
        "measurements": rows,
        **measure_few(options, name, tokenizer, megabytes=megabytes // 2, rounds=rounds),
        "parts": {"count": counts[-1], "seconds": parts},
    }


def measure_few(
    options: argparse.Namespace, name: str, tokenizer: Path, *, megabytes: int, rounds: int
) -> dict[str, Any]:
    """Few compressed files with one worker and with all, and how fast they are decompressed."""
    out = options.folder / "scaling-cores-store"
    files = {
        (kind, number, workers): _few_files(options, name, megabytes, number).files(kind)
        for kind, number in SHARED
        for workers in (1, options.workers)
    }
    builds: dict[tuple[str, int, int], list[dict[str, Any]]] = {case: [] for case in files}
    for _ in range(rounds):
        for case, paths in files.items():
            made = build(paths, tokenizer, out, workers=case[-1], unit_bytes=None)
            builds[case].append(made)
    rows = [
        _row(found, kind, workers) | {"files": number}
        for (kind, number, workers), found in builds.items()
    ]
    alone = {kind: paths[0] for (kind, number, _), paths in files.items() if number == 1}
    return {"shared": rows, "decompressing": compare_packages(alone, rounds)}


def _row(builds: list[dict[str, Any]], kind: str, workers: int) -> dict[str, Any]:
    return {
        "format": kind,
        "workers": workers,
        "text_bytes": builds[0]["text_bytes"],
        "tokens": builds[0]["tokens"],
        "working_seconds": [each["working_seconds"] for each in builds],
        "startup_seconds": [each["startup_seconds"] for each in builds],
    }


def _few_files(
    options: argparse.Namespace, name: str, megabytes: int, number: int
) -> corpora.Corpus:
    kinds = tuple(kind for kind, files in SHARED if files == number)
    size = megabytes * corpora.MEGABYTE
    return corpora.prepare(
        name, num_bytes=size, num_files=number, formats=kinds, source=options.corpus
    )


def _names(options: argparse.Namespace) -> tuple[str, Path]:
    """The corpus and the tokenizer."""
    tokenizer = options.tokenizer or next(iter(vocabularies.prepare().values()))
    if options.corpus is None:
        return corpora.available()[0], tokenizer
    return options.corpus.name.partition(".")[0], tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a trial with little text")
    parser.add_argument("--few", action="store_true", help="only few compressed files")
    parser.add_argument("--workers", type=int, default=physical_cores(), help="the most of them")
    parser.add_argument("--corpus", type=Path, help="JSON Lines with a field text, .zst")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--megabytes", type=int, help="of JSON Lines, made by repeating the corpus")
    parser.add_argument("--folder", type=Path, default=WORK, help="where the stores are written")
    parser.add_argument("--commit", help="where this is a copy without its history")
    parser.add_argument("--json", type=Path, default=RESULTS / "scaling_cores.json")
    options = parser.parse_args()
    megabytes = options.megabytes or (QUICK_MEGABYTES if options.quick else CORPUS_MEGABYTES)
    rounds = 1 if options.quick else ROUNDS
    if options.few:
        few = measure_few(options, *_names(options), megabytes=megabytes // 2, rounds=rounds)
        print("\n".join(scaling_table.shared_body(few["shared"], few["decompressing"])))
        return
    results = machine.origin(commit=options.commit) | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        **measure(options, megabytes=megabytes, rounds=rounds),
    }
    if not options.quick:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(render.cores_section(results))


if __name__ == "__main__":
    main()
