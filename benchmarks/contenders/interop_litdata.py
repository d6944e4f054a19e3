"""LitData's BinaryWriter for a TokensLoader, documents as items, and its StreamingDataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from litdata import StreamingDataset, TokensLoader
from litdata.streaming.writer import BinaryWriter

from benchmarks.contenders.interop import InteropJob, documents, run

if TYPE_CHECKING:
    from pathlib import Path


def write(job: InteropJob, out: Path) -> int:
    loader = TokensLoader(block_size=job.seq_len + 1)
    writer = BinaryWriter(str(out), chunk_bytes=64 << 20, item_loader=loader)
    tokens = 0
    for number, ids in enumerate(documents(job)):
        writer[number] = torch.from_numpy(ids.astype(np.int32))
        tokens += len(ids)
    writer.done()
    writer.merge(1)
    return tokens


def read(job: InteropJob, made: Path, out: Path) -> int:  # noqa: ARG001
    loader = TokensLoader(block_size=job.seq_len + 1)
    return sum(len(block) for block in StreamingDataset(str(made), item_loader=loader))


if __name__ == "__main__":
    run(write, read)
