"""Hugging Face datasets' ArrowWriter, which all its ways of making a dataset end in, and a Dataset
read back as numpy, a thousand documents at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import datasets
from datasets.arrow_writer import ArrowWriter

from benchmarks.contenders.interop import InteropJob, documents, run

if TYPE_CHECKING:
    from pathlib import Path


def write(job: InteropJob, out: Path) -> int:
    out.mkdir()
    tokens = 0
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    with ArrowWriter(path=str(out / "data.arrow"), features=features) as writer:
        for ids in documents(job):
            writer.write({"input_ids": ids})
            tokens += len(ids)
        writer.finalize()
    return tokens


def read(job: InteropJob, made: Path, out: Path) -> int:  # noqa: ARG001
    dataset = datasets.Dataset.from_file(str(made / "data.arrow")).with_format("numpy")
    return sum(len(ids) for batch in dataset.iter(1000) for ids in batch["input_ids"])


if __name__ == "__main__":
    run(write, read)
