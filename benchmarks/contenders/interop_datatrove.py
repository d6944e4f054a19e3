"""datatrove's TokenizedFile, and its dataset, which reads windows of seq_len + 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datatrove.io import get_datafolder
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from datatrove.utils.dataset import DatatroveFolderDataset

from benchmarks.contenders.interop import InteropJob, documents, run

if TYPE_CHECKING:
    from pathlib import Path


def write(job: InteropJob, out: Path) -> int:
    file = TokenizedFile(
        get_datafolder(str(out)),
        "tokens.ds",
        tokenizer_name_or_path=job.tokenizer,
        save_final_metadata=True,
        token_size=2,
    )
    tokens = 0
    for ids in documents(job):
        # Lists are what its tokenizer gives it.
        file.write(ids.tolist(), None)
        tokens += len(ids)
    file.close()
    return tokens


def read(job: InteropJob, made: Path, out: Path) -> int:  # noqa: ARG001
    dataset = DatatroveFolderDataset(str(made), seq_len=job.seq_len, token_size=2)
    return sum(len(dataset[number]["input_ids"]) for number in range(len(dataset)))


if __name__ == "__main__":
    run(write, read)
