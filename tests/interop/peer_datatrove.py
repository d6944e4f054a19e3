"""datatrove's own TokenizedFile, its dataset, and the reader of its merger."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import humanize
import numpy as np
from datatrove.io import get_datafolder
from datatrove.pipeline.tokens.merger import load_doc_ends
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from datatrove.utils.dataset import DatatroveFolderDataset


def read(folder: str, seq_len: int, token_size: int) -> dict[str, Any]:
    """Rows with positions as the dataset gives them, and the ends of documents file by file."""
    dataset = DatatroveFolderDataset(
        folder, seq_len=seq_len, token_size=token_size, return_positions=True
    )
    items = [dataset[number] for number in range(len(dataset))]
    files = sorted(Path(folder).glob("*.ds"))
    with files[0].with_name(f"{files[0].name}.metadata").open() as metadata:
        named_size = int(metadata.readline().strip().split("|")[-1])
    return {
        "rows": [item["input_ids"].tolist() for item in items],
        "positions": [item["positions"].tolist() for item in items],
        "ends": [_ends(path) for path in files],
        "token_size": named_size,
    }


def _ends(path: Path) -> list[int]:
    with path.with_name(f"{path.name}.index").open("rb") as file:
        ends: list[int] = np.asarray(load_doc_ends(file)).tolist()
        return ends


def write(folder: str, documents: list[list[int]], token_size: int) -> None:
    """A file with index, metadata and a loss mask that leaves the first token of each out."""
    file = TokenizedFile(
        get_datafolder(folder),
        "00000_tokens.ds",
        save_loss_metadata=True,
        tokenizer_name_or_path="some/tokenizer",
        save_final_metadata=True,
        token_size=token_size,
    )
    for document in documents:
        file.write(document, np.arange(len(document)) > 0)
    file.close()


def both(
    folder: str, seq_len: int, token_size: int, theirs: str, documents: list[list[int]]
) -> dict[str, Any]:
    """Write some and read some: starting takes seconds."""
    write(theirs, documents, token_size)
    return read(folder, seq_len, token_size)


def people(numbers: list[int]) -> list[str]:
    """Numbers as datatrove writes them into its metadata."""
    return [humanize.metric(number, unit="T") for number in numbers]


def each(jobs: list[list[Any]], numbers: list[int]) -> list[Any]:
    """Several in one process, and numbers for people at the end."""
    return [*(both(*job) for job in jobs), people(numbers)]


if __name__ == "__main__":
    functions = {"each": each}
    name, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(functions[name](*arguments)))
