"""Questions and answers as a script prepares them: two calls of the package a row, one process.

In the time: reading the lines, encoding, ids and labels of all rows as three arrays on the disk.
With its start-up: imports and loading the tokenizer too.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


def _load(tokenizer: str) -> tuple[Callable[[str], list[int]], int]:
    """What encodes a text, and the id of the end of text."""
    if tokenizer.endswith(".model"):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
        return processor.encode, processor.eos_id()
    import tokenizers

    folder = Path(tokenizer)
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    eos = config["eos_token"]
    id_ = loaded.token_to_id(eos["content"] if isinstance(eos, dict) else eos)
    assert id_ is not None
    return lambda text: loaded.encode(text, add_special_tokens=False).ids, id_


def main() -> None:
    """Measure one job and say what it took and what came out."""
    job = json.loads(sys.argv[1])
    began = time.perf_counter()
    encode, eos = _load(job["tokenizer"])
    start = time.perf_counter()
    ids: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    with open(job["file"]) as file:
        for line in file:
            row = json.loads(line)
            prompt, answer = encode(row["question"]), encode(" " + row["answer"])
            ids += prompt + answer + [eos]
            labels += [-100] * len(prompt) + answer + [eos]
            lengths.append(len(prompt) + len(answer) + 1)
    arrays = {"ids": ids, "labels": labels, "lengths": lengths}
    for name, values in arrays.items():
        np.save(f"{job['out']}-{name}.npy", np.array(values, np.int32))
    end = time.perf_counter()
    found, at = [], 0
    for length in lengths[: job["compared_rows"]]:
        found.append(ids[at : at + length])
        at += length
    report = {
        "seconds": end - start,
        "whole_seconds": end - began,
        "rows": len(lengths),
        "tokens": len(ids),
        "digest": hashlib.sha256(json.dumps(found).encode()).hexdigest(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
