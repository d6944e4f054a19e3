"""How soon a training on raw text makes its first step, with the store built beside it.

    python -m benchmarks.first_step            5 GB of JSON Lines; writes results/first_step.json
    python -m benchmarks.first_step --quick    a trial with 50 MB; prints its table

The text is that of a corpus again and again, with other words in every copy so that no cache knows
them, in a temporary folder that is removed. The clock runs from the start of the command to the
line of metrics that tells of a step; it is written in the step after. The command and all that it
starts have two cores. It is ended by Ctrl-C after some steps, which is timed too.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from benchmarks import corpora, machine, vocabularies
from benchmarks.command import run_command

if TYPE_CHECKING:
    from collections.abc import Mapping

FILES = 8
CORES = 2
TIMEOUT = 120.0
KINDS = {"JSON Lines": "jsonl", "JSON Lines, zstd": "jsonl.zst"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    input_bytes: int


FULL = Size(rounds=3, input_bytes=5_000_000_000)
QUICK = Size(rounds=1, input_bytes=50_000_000)


def write_text(folder: Path, size: Size) -> None:
    """Files of JSON Lines, and the same compressed."""
    base = b"".join(itertools.islice(corpora.base_lines(corpora.available()[0]), 20_000))
    copies = itertools.count()
    for number in range(FILES):
        path = folder / f"part-{number}.jsonl"
        left = size.input_bytes // FILES
        with path.open("wb") as plain, pa.CompressedOutputStream(f"{path}.zst", "zstd") as packed:
            while left > 0:
                other = base.replace(b" the ", b" the%d " % next(copies))
                other = other[: other.find(b"\n", left) + 1 or None]
                left -= plain.write(other)
                packed.write(other)


def first_steps(inputs: list[Path], folder: Path, tokenizer: Path) -> dict[str, float]:
    """Seconds until the first unit and the first step, and those that Ctrl-C takes."""
    run = folder / "run"
    command = [sys.executable, "-m", "tokenmill", "train", *map(str, inputs), "-t", str(tokenizer)]
    command += ["--model", "tiny", "--log-every", "1", "--save-every", "1", "--device", "cpu"]
    command += ["--out", str(run), "-q"]
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    found: dict[str, float] = {}
    began = time.perf_counter()
    with subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores)) as process:
        while process.poll() is None:
            now = time.perf_counter() - began
            if now > TIMEOUT:
                process.kill()
                raise TimeoutError(f"no step after {TIMEOUT:.0f} s")
            metrics = run / "metrics.jsonl"
            if "first_unit" not in found and next(run.glob("store/shards/*.json"), None):
                found["first_unit"] = now
            if metrics.exists() and metrics.stat().st_size:
                found["first_step"] = now
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stopped = time.perf_counter()
        process.wait()
    assert process.returncode == 130, process.returncode
    shutil.rmtree(run)
    return found | {"stop": time.perf_counter() - stopped}


def run(size: Size) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    kind, tokenizer = next(iter(vocabularies.prepare().items()))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, size)
        for what, suffix in KINDS.items():
            files = sorted(folder.glob(f"*.{suffix}"))
            rounds = [first_steps(files, folder, tokenizer) for _ in range(size.rounds)]
            input_bytes = sum(path.stat().st_size for path in files)
            rows.append({"input": what, "input_bytes": input_bytes, "rounds": rounds})
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "tokenizer": kind,
        "text_bytes": size.input_bytes,
        "cores": CORES,
        "measurements": rows,
    }


def first_step_body(results: Mapping[str, Any]) -> str:
    """The table of results/first_step.json."""
    size = f"{results['text_bytes'] / 1e9:.2f} GB of JSON Lines in {FILES} files"
    lines = [
        f"{size}, {results['tokenizer']}, {results['cores']} cores.",
        "",
        "| input | first unit | first step | Ctrl-C to the end |",
        "| --- | --- | --- | --- |",
    ]
    for row in results["measurements"]:
        cells = [f"{row['input']}, {row['input_bytes'] / 1e9:.2f} GB"]
        for name in ("first_unit", "first_step", "stop"):
            values = [each[name] for each in row["rounds"]]
            spread = f"{min(values):.1f} to {max(values):.1f}"
            cells.append(f"{statistics.median(values):.1f} ({spread}) s")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    from benchmarks import render  # which has the tables of this module

    run_command(
        "first_step",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.first_step_section,
    )


if __name__ == "__main__":
    main()
