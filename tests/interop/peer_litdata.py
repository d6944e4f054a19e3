"""LitData's own BinaryWriter, and StreamingDataset with a TokensLoader."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataset, TokensLoader
from litdata.streaming.writer import BinaryWriter


def read(folder: str, block_size: int) -> dict[str, Any]:
    """Blocks in order, and their type."""
    dataset = StreamingDataset(folder, item_loader=TokensLoader(block_size=block_size))
    blocks = [dataset[number] for number in range(len(dataset))]
    kinds = sorted({str(block.dtype) for block in blocks})
    return {"blocks": [np.asarray(block).tolist() for block in blocks], "types": kinds}


def write(folder: str, documents: list[list[int]], kind: str, options: dict[str, Any]) -> None:
    """Chunks of documents: as tensors of int32 or int64, or as arrays of uint16."""
    writer = BinaryWriter(folder, item_loader=TokensLoader(block_size=8), **options)
    for number, document in enumerate(documents):
        array = np.array(document, kind)
        writer[number] = array if kind == "uint16" else torch.from_numpy(array)
    writer.done()
    writer.merge(1)


def write_other(folder: str) -> None:
    """Chunks that are not tokens."""
    writer = BinaryWriter(folder, chunk_bytes=100)
    for number in range(3):
        writer[number] = {"text": "some", "number": number}
    writer.done()
    writer.merge(1)


if __name__ == "__main__":
    functions: dict[str, Any] = {"read": read, "write": write, "write_other": write_other}
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        print("\n> " + json.dumps(functions[function](*arguments)), flush=True)
