"""Megatron-core's IndexedDatasetBuilder and IndexedDataset."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from benchmarks.contenders.interop import InteropJob, documents, run

if TYPE_CHECKING:
    from pathlib import Path


def write(job: InteropJob, out: Path) -> int:
    out.mkdir()
    builder = IndexedDatasetBuilder(str(out / "tokens.bin"), dtype=np.uint16)
    tokens = 0
    for ids in documents(job):
        builder.add_document(torch.from_numpy(ids.astype(np.int32)), [len(ids)])
        tokens += len(ids)
    builder.finalize(str(out / "tokens.idx"))
    return tokens


def read(job: InteropJob, made: Path, out: Path) -> int:  # noqa: ARG001
    dataset = IndexedDataset(str(made / "tokens"), mmap=True)
    return sum(len(np.array(dataset[number])) for number in range(len(dataset)))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    run(write, read)
