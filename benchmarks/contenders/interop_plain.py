"""What people write themselves: a few lines of pyarrow, torch or numpy.

Documents or rows are collected as a list of arrays, a thousand at a time, and handed over.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.contenders.interop import InteropJob, documents, rows, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AT_ONCE = 1000
CHUNK_ROWS = 8192


def write_parquet(job: InteropJob, out: Path) -> int:
    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    tokens = 0
    with pq.ParquetWriter(out / "tokens.parquet", schema, compression="zstd") as writer:
        found = documents(job)
        while batch := [*itertools.islice(found, AT_ONCE)]:
            writer.write_table(pa.table({"input_ids": batch}, schema=schema))
            tokens += sum(map(len, batch))
    return tokens


def read_parquet(made: Path) -> int:
    file = pq.ParquetFile(made / "tokens.parquet")
    batches = file.iter_batches(AT_ONCE)
    return sum(len(batch.column(0).flatten().to_numpy()) for batch in batches)


def write_pt(job: InteropJob, out: Path) -> int:
    found = rows(job)
    for number, first in enumerate(range(0, len(found), CHUNK_ROWS)):
        chunk = [
            torch.from_numpy(row.astype(np.int32)) for row in found[first : first + CHUNK_ROWS]
        ]
        torch.save({"input_ids": torch.stack(chunk)}, out / f"chunk_{number:06d}.pt")
    return found.size


def read_pt(made: Path) -> int:
    files = sorted(made.glob("*.pt"))
    return sum(torch.load(file, weights_only=True)["input_ids"].numel() for file in files)


def write_npz(job: InteropJob, out: Path) -> int:
    found = rows(job, more=1).astype(np.int32)
    mask = np.ones((len(found), job.seq_len), np.bool_)
    np.savez(out / "train.npz", input=found[:, :-1], target=found[:, 1:], mask=mask)
    return len(found) * job.seq_len


def read_npz(made: Path) -> int:
    with np.load(made / "train.npz") as found:
        arrays = {name: found[name] for name in ("input", "target", "mask")}
    return int(arrays["input"].size)


WRITERS: dict[str, Callable[[InteropJob, Path], int]] = {
    "parquet": write_parquet,
    "pt": write_pt,
    "npz": write_npz,
}
READERS: dict[str, Callable[[Path], int]] = {
    "parquet": read_parquet,
    "pt": read_pt,
    "npz": read_npz,
}


def write(job: InteropJob, out: Path) -> int:
    out.mkdir()
    return WRITERS[job.format](job, out)


def read(job: InteropJob, made: Path, out: Path) -> int:  # noqa: ARG001
    return READERS[job.format](made)


if __name__ == "__main__":
    run(write, read)
