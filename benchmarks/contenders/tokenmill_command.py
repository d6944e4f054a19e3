"""tokenmill as its users wait for it: the command, by the clock around it.

In the time: all of the command, from its start to the end of its process, so also imports, the last
unit, syncing, finishing, and the end of the workers. `startup_seconds` is what the same command
takes for the first line of the input.

    mode no-eos      for a tokenizer that names no end-of-text token
    mode no-c        as where nothing could be compiled: Arrow reads the lines
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contenders.protocol import Job, Report, answer, read_job


def run(job: Job, files: list[str]) -> tuple[float, dict[str, Any]]:
    """How long the command took, and what it said."""
    shutil.rmtree(job.out, ignore_errors=True)
    command = [sys.executable, "-m", "tokenmill", "build", *files, "--json", "--out", job.out]
    command += ["--tokenizer", job.tokenizer, "--workers", str(job.workers)]
    command += ["--memory", job.memory, *(["--no-eos"] if job.mode == "no-eos" else [])]
    environment = os.environ | ({"TOKENMILL_KERNEL": "0"} if job.mode == "no-c" else {})
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return time.perf_counter() - begin, json.loads(done.stdout)


def build(job: Job) -> Report:
    line = Path(f"{job.out}-line.jsonl")
    with Path(job.files[0]).open("rb") as lines:
        line.write_bytes(lines.readline())
    startup, _ = run(job, [str(line)])
    line.unlink()
    seconds, found = run(job, job.files)
    totals = found["totals"]
    return Report(
        seconds=seconds,
        startup_seconds=startup,
        documents=totals["documents"] + totals["empty"],
        # One end-of-text id follows each document; the other contenders write none.
        tokens=totals["tokens"] - (0 if job.mode == "no-eos" else totals["documents"]),
        peak_memory_bytes=found["peak_memory_bytes"],
        stage_seconds=found["stage_seconds"],
    )


if __name__ == "__main__":
    answer(build(read_job()))
