"""Measures builds of one corpus with 1, 2, 4, ... workers, up to the cores of this machine.

    python -m benchmarks.scaling_cores            writes results/scaling_cores.json
    python -m benchmarks.scaling_cores --quick    a trial; prints its table

The corpus is larger than the start-up of sixteen workers can hide, and is cut into far more units
than there are workers, so that the last ones do not wait for one unit. The store is removed after
each build; files that were read before are in the system's cache, as they are for every number of
workers. Rounds go through all numbers of workers in turn, so that a slow minute of the machine
hits all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import tokenmill
from benchmarks import RESULTS, WORK, corpora, machine, render, vocabularies
from tokenmill.runners.cores import physical_cores

FOLDER = WORK / "scaling-cores"
CORPUS_MEGABYTES = 8000
QUICK_MEGABYTES = 60
NUM_FILES = 16
ROUNDS = 3
UNIT_BYTES = "16MB"


def worker_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    counts = [1 << k for k in range(most.bit_length())]
    return sorted({*(count for count in counts if count <= most), most})


def build(files: list[str], tokenizer: Path, *, workers: int, memory: str) -> dict[str, Any]:
    """One build into a fresh folder."""
    out = FOLDER / "store"
    shutil.rmtree(out, ignore_errors=True)
    result = tokenmill.build(
        files, tokenizer=tokenizer, out=out, workers=workers, memory=memory, unit_bytes=UNIT_BYTES
    )
    shutil.rmtree(out)
    print(f"{workers} workers: {result.working_seconds:.2f} s", file=sys.stderr, flush=True)
    return {
        "text_bytes": result.totals.text_bytes,
        "tokens": result.totals.tokens,
        "engine": result.engine,
        "working_seconds": result.working_seconds,
        "startup_seconds": result.startup_seconds,
    }


def measure(counts: list[int], *, megabytes: int, rounds: int, memory: str) -> dict[str, Any]:
    """Rows, one for each number of workers, and what they have in common."""
    name, (tokenizer, folder) = corpora.available()[0], next(iter(vocabularies.prepare().items()))
    corpus = corpora.prepare(
        name, num_bytes=megabytes * corpora.MEGABYTE, num_files=NUM_FILES, formats=("jsonl",)
    )
    files = [str(path) for path in corpus.files("jsonl")]
    builds: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            builds[count].append(build(files, folder, workers=count, memory=memory))
    rows = [
        {
            "workers": count,
            "text_bytes": found[0]["text_bytes"],
            "tokens": found[0]["tokens"],
            "working_seconds": [round(each["working_seconds"], 3) for each in found],
            "startup_seconds": [round(each["startup_seconds"], 3) for each in found],
        }
        for count, found in builds.items()
    ]
    return {
        "corpus": name,
        "tokenizer": tokenizer,
        "engine": builds[counts[0]][0]["engine"],
        "files": len(files),
        "input_bytes": corpus.input_bytes["jsonl"],
        "rounds": rounds,
        "measurements": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a trial with little text")
    parser.add_argument("--workers", type=int, default=physical_cores(), help="the most of them")
    parser.add_argument("--memory", default="24GB", help="budget of each build")
    parser.add_argument("--megabytes", type=int, help="of JSON Lines")
    parser.add_argument("--commit", help="where this is a copy without its history")
    parser.add_argument("--results", type=Path, default=RESULTS / "scaling_cores.json")
    options = parser.parse_args()
    megabytes = options.megabytes or (QUICK_MEGABYTES if options.quick else CORPUS_MEGABYTES)
    rounds = 1 if options.quick else ROUNDS
    counts = worker_counts(options.workers)
    results = machine.origin(commit=options.commit) | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        **measure(counts, megabytes=megabytes, rounds=rounds, memory=options.memory),
    }
    if not options.quick:
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    print(render.cores_section(results))


if __name__ == "__main__":
    main()
