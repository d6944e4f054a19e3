"""MosaicML's MDSWriter, with rows as llm-foundry writes them, and its LocalDataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.contenders.feeding_mosaicml import import_streaming
from benchmarks.contenders.interop import InteropJob, rows, run

if TYPE_CHECKING:
    from pathlib import Path

streaming = import_streaming()


def write(job: InteropJob, out: Path) -> int:
    found = rows(job)
    columns = {"tokens": "ndarray:int32"}
    with streaming.MDSWriter(out=str(out), columns=columns, hashes=["xxh3_128"]) as writer:
        for row in found:
            writer.write({"tokens": row.astype(np.int32)})
    return found.size


def read(job: InteropJob, made: Path, out: Path) -> int:  # noqa: ARG001
    dataset = streaming.LocalDataset(local=str(made))
    return sum(len(dataset[number]["tokens"]) for number in range(len(dataset)))


if __name__ == "__main__":
    run(write, read)
