"""OLMo-core's own functions that read dolma's token files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from olmo_core.data.utils import (
    iter_document_indices,
    load_array_slice_into_tensor,
    write_document_indices,
)


def read(path: str, dtype: str) -> list[list[int]]:
    """The documents of a file, borders taken from its .csv.gz."""
    kind = np.dtype(dtype).type
    indices = iter_document_indices(path, use_array_if_local=False, dtype=kind)
    return [
        load_array_slice_into_tensor(path, start, end, kind).tolist() if end > start else []
        for start, end in indices
    ]


def write(path: str, documents: list[list[int]], eos: int, dtype: str) -> None:
    """A file as dolma leaves it, and OLMo-core's own .csv.gz for it."""
    np.array([token for document in documents for token in document], dtype).tofile(path)
    write_document_indices(Path(path), dtype=np.dtype(dtype).type, eos_token_id=eos)


def both(
    ours: str, theirs: str, documents: list[list[int]], eos: int, dtype: str
) -> list[list[int]]:
    """Write some and read some: starting takes seconds."""
    write(theirs, documents, eos, dtype)
    return read(ours, dtype)


def each(jobs: list[list[Any]]) -> list[list[list[int]]]:
    """Several in one process."""
    return [both(*job) for job in jobs]


if __name__ == "__main__":
    functions = {"each": each}
    name, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(functions[name](*arguments)))
