"""Megatron-core's own IndexedDataset and its builder."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list


def read(prefixes: list[str]) -> list[dict[str, Any]]:
    """Documents and type of every prefix, sequences of a document joined."""
    found = []
    for prefix in prefixes:
        dataset = IndexedDataset(prefix, mmap=True)
        borders = dataset.document_indices.tolist()
        documents = [
            [token for number in range(first, last) for token in dataset[number].tolist()]
            for first, last in itertools.pairwise(borders)
        ]
        found.append({"documents": documents, "dtype": np.dtype(dataset.index.dtype).name})
    return found


def write(prefix: str, documents: list[list[list[int]]], dtype: str) -> None:
    """Documents of sequences, as preprocess_data.py writes them."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        tokens = [token for sequence in document for token in sequence]
        lengths = [len(sequence) for sequence in document]
        builder.add_document(torch.IntTensor(tokens), lengths)
    builder.finalize(f"{prefix}.idx")


def blends(file: str) -> list[list[Any] | None]:
    """Prefixes and weights of a list, or of train, valid and test of a .json.

    Megatron-LM's training code, which is not in the package, opens the files like this.
    """
    text = Path(file).read_text()
    if not file.endswith(".json"):
        return [get_blend_from_list(text.split())]
    named = json.loads(text)
    return [get_blend_from_list(named[split]) for split in ("train", "valid", "test")]


def both(
    prefixes: list[str],
    writes: list[tuple[str, list[list[list[int]]], str]],
    arguments: list[str],
) -> list[Any]:
    """Write some, read some, and take up files of arguments: starting takes seconds."""
    for each in writes:
        write(*each)
    return [read(prefixes), [blends(file) for file in arguments]]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    functions = {"both": both}
    name, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(functions[name](*arguments)))
