"""Chats as most trainers prepare them: `apply_chat_template` of transformers, row by row.

In the time: reading the lines, rendering, encoding, and the assistant's mask; each row's ids and
mask are kept as lists, as a map over a dataset hands them on. Not in it: imports, loading the
tokenizer, writing anything. With several processes, the lines are handed out in chunks to a pool
that is up before the clock starts.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

CHUNK_ROWS = 200
_STATE: dict[str, Any] = {}


def _load(tokenizer: str, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    _STATE["tokenizer"] = make(
        tokenizer_file=str(Path(tokenizer) / "tokenizer.json"), chat_template=template
    )
    _rows([json.dumps({"messages": [{"role": "assistant", "content": "warm up"}]})])


def _rows(lines: list[str]) -> list[tuple[list[int], list[int]]]:
    apply = _STATE["tokenizer"].apply_chat_template
    out = []
    for line in lines:
        made = apply(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        out.append((made["input_ids"], made["assistant_masks"]))
    return out


def _timed(job: dict[str, Any]) -> tuple[float, list[tuple[list[int], list[int]]]]:
    workers = job["workers"]
    if workers == 1:
        _load(job["tokenizer"], job["template"])
        start = time.perf_counter()
        with open(job["file"]) as file:
            rows = _rows(list(file))
        return time.perf_counter() - start, rows
    with multiprocessing.get_context("spawn").Pool(
        workers, _load, (job["tokenizer"], job["template"])
    ) as pool:
        pool.map(len, ["x"] * workers, chunksize=1)
        start = time.perf_counter()
        with open(job["file"]) as file:
            lines = list(file)
        chunks = [lines[i : i + CHUNK_ROWS] for i in range(0, len(lines), CHUNK_ROWS)]
        rows = [row for chunk in pool.imap(_rows, chunks) for row in chunk]
        return time.perf_counter() - start, rows


def main() -> None:
    """Measure one job and say what it took and what came out."""
    job = json.loads(sys.argv[1])
    seconds, rows = _timed(job)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    tokens = sum(len(ids) for ids, _ in rows)
    print(json.dumps({"seconds": seconds, "rows": len(rows), "tokens": tokens, "digest": digest}))


if __name__ == "__main__":
    main()
