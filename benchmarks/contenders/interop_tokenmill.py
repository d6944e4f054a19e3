"""tokenmill: `export_store`, then `import_store` of what it made: checked, with receipts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import tokenmill
from benchmarks.contenders.interop import InteropJob, run
from tokenmill.interop.export import export_store
from tokenmill.interop.imports import import_store

if TYPE_CHECKING:
    from pathlib import Path

ROWS = ("mds", "pt", "npz")
"""What is written as rows; the other formats hold documents."""


def write(job: InteropJob, out: Path) -> int:
    seq_len = job.seq_len if job.format in ROWS else None
    workers = job.workers or None
    export_store(job.store, to=job.format, out=out, seq_len=seq_len, workers=workers)
    return tokenmill.Store(job.store).num_tokens


def read(job: InteropJob, made: Path, out: Path) -> int:
    return import_store(
        made,
        tokenizer=job.tokenizer,
        out=out,
        format=job.format,
        dtype="uint16" if job.format in ("nanogpt", "olmo") else None,
        workers=job.workers or None,
    ).tokens


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 - its import is in nobody's time, as far as it is in this process
    run(write, read)
