"""Measures builds of one corpus with 1, 2, 4, ... workers, up to the cores of this machine.

    python -m benchmarks.scaling_cores            writes results/scaling_cores.json
    python -m benchmarks.scaling_cores --quick    a trial; prints its table

The corpus is larger than the start-up of sixteen workers can hide, and is cut into far more units
than there are workers, so that the last ones do not wait for one unit; the compressed one has as
many files as it takes, since a stream is for one worker. The store is removed after each build;
files that were read before are in the system's cache, as they are for every number of workers.
Rounds go through all numbers of workers in turn, so that a slow minute of the machine hits all of
them.

At the end one build with all workers stands beside as many parts, each a program of its own with
one worker: those are timed from the first start to the last exit, as a user would.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tokenmill
from benchmarks import RESULTS, ROOT, WORK, corpora, machine, render, vocabularies
from tokenmill.runners.local import physical_cores

CORPUS_MEGABYTES = 1600
QUICK_MEGABYTES = 60
NUM_FILES = 64
FORMATS = ("jsonl", "jsonl.zst")
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


def build(files: list[Path], tokenizer: Path, out: Path, *, workers: int) -> dict[str, Any]:
    """One build into a fresh folder."""
    shutil.rmtree(out, ignore_errors=True)
    result = tokenmill.build(
        files,
        tokenizer=tokenizer,
        out=out,
        workers=workers,
        memory=MEMORY_PER_WORKER * workers,
        unit_bytes=UNIT_BYTES,
    )
    shutil.rmtree(out)
    _tell(f"{files[0].name}, {workers} workers: {result.working_seconds:.2f} s")
    return {
        "text_bytes": result.totals.text_bytes,
        "tokens": result.totals.tokens,
        "engine": result.engine,
        "working_seconds": round(result.working_seconds, 3),
        "startup_seconds": round(result.startup_seconds, 3),
    }


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
    name, tokenizer, corpus = _prepare(options, megabytes)
    counts, out = worker_counts(options.workers), options.folder / "scaling-cores-store"
    cases = [(kind, count) for kind in FORMATS for count in counts]
    builds: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    parts = []
    for _ in range(rounds):
        for kind, count in cases:
            builds[kind, count].append(build(corpus.files(kind), tokenizer, out, workers=count))
        parts.append(compare_parts(corpus.files("jsonl"), tokenizer, out, counts[-1]))
    rows = [
        {
            "format": kind,
            "workers": count,
            "text_bytes": found[0]["text_bytes"],
            "tokens": found[0]["tokens"],
            "working_seconds": [each["working_seconds"] for each in found],
            "startup_seconds": [each["startup_seconds"] for each in found],
        }
        for (kind, count), found in builds.items()
    ]
    return {
        "corpus": name,
        "tokenizer": tokenizer.name,
        "engine": builds["jsonl", counts[0]][0]["engine"],
        "files": NUM_FILES,
        "input_bytes": corpus.input_bytes,
        "rounds": rounds,
        "measurements": rows,
        "parts": {"count": counts[-1], "seconds": parts},
    }


def _prepare(options: argparse.Namespace, megabytes: int) -> tuple[str, Path, corpora.Corpus]:
    if options.corpus is None:
        name = corpora.available()[0]
    else:
        name = options.corpus.name.partition(".")[0]
    tokenizer = options.tokenizer or next(iter(vocabularies.prepare().values()))
    corpus = corpora.prepare(
        name,
        num_bytes=megabytes * corpora.MEGABYTE,
        num_files=NUM_FILES,
        formats=FORMATS,
        source=options.corpus,
    )
    return name, tokenizer, corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a trial with little text")
    parser.add_argument("--workers", type=int, default=physical_cores(), help="the most of them")
    parser.add_argument("--corpus", type=Path, help="JSON Lines with a field text, .zst")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--megabytes", type=int, help="of JSON Lines, made by repeating the corpus")
    parser.add_argument("--folder", type=Path, default=WORK, help="where the stores are written")
    parser.add_argument("--commit", help="where this is a copy without its history")
    parser.add_argument("--json", type=Path, default=RESULTS / "scaling_cores.json")
    options = parser.parse_args()
    megabytes = options.megabytes or (QUICK_MEGABYTES if options.quick else CORPUS_MEGABYTES)
    results = machine.origin(commit=options.commit) | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        **measure(options, megabytes=megabytes, rounds=1 if options.quick else ROUNDS),
    }
    if not options.quick:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(render.cores_section(results))


if __name__ == "__main__":
    main()
