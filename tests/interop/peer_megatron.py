"""Megatron-core's own IndexedDataset and its builder, its GPTDataset, and ours in its place."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split, get_blend_from_list

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import feed_megatron  # type: ignore[import-not-found]  # of examples/


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


def feed(export: str, end_id: int, vocab_size: int, seq_len: int, rows: int) -> Any:
    """For each pair of an export: in which order documents are read, and the rows that are cut
    from them, as the dataset of examples/feed_megatron.py and as GPTDataset itself give them."""
    many = feed_megatron.open_dataset(
        export, end_id=end_id, vocab_size=vocab_size, seq_len=seq_len, rows=rows
    )
    answers = {}
    for ours in getattr(many, "datasets", [many]):
        config = dataclasses.replace(ours.config, eod_mask_loss=True)
        theirs = GPTDataset(
            ours.dataset, ours.dataset_path, ours.indices, ours.num_samples, Split.train, config
        )
        answers[ours.dataset_path] = [
            {
                "order": dataset.document_index.tolist(),
                "rows": [
                    {name: value.tolist() for name, value in dataset[number].items()}
                    for number in np.argsort(dataset.shuffle_index).tolist()
                ],
            }
            for dataset in (ours, theirs)
        ]
    return answers


def run_example(name: str, *arguments: str) -> str:
    """What it prints, run as a script."""
    before, sys.argv = sys.argv, [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(Path(feed_megatron.__file__).with_name(name)), run_name="__main__")
    sys.argv = before
    return printed.getvalue()


def each(
    prefixes: list[str],
    writes: list[tuple[str, list[list[list[int]]], str]],
    arguments: list[str],
    feeds: list[tuple[str, int, int, int, int]],
    example: list[str],
) -> list[Any]:
    """Write some, read some, take up files of arguments, feed: starting takes seconds."""
    for one in writes:
        write(*one)
    fed = [feed(*one) for one in feeds]
    return [read(prefixes), [blends(file) for file in arguments], fed, run_example(*example)]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    functions = {"each": each}
    name, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(functions[name](*arguments)))
