"""Hugging Face datasets: load_dataset("json"), map in processes, save_to_disk.

In the time: all three, as a user waits for all three. Not in it: imports, loading of the tokenizer.
The function uses encode_batch_fast with one thread per process, so that the processes share the
cores evenly. The cache is a fresh folder, or the second run would be a look-up.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.contenders.protocol import Job, Report, answer, read_job


def pretokenize(job: Job) -> Report:
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(Path(job.tokenizer) / "tokenizer.json"))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    begin = time.perf_counter()
    loaded: Any = datasets.load_dataset(
        "json", data_files=job.files, split="train", num_proc=job.workers
    )
    columns = loaded.column_names
    encoded = loaded.map(encode, batched=True, num_proc=job.workers, remove_columns=columns)
    encoded.save_to_disk(str(Path(job.out) / "saved"))
    seconds = time.perf_counter() - begin
    tokens = sum(len(chunk.flatten()) for chunk in encoded.data.column("input_ids").chunks)
    return Report(seconds=seconds, documents=len(encoded), tokens=tokens)


if __name__ == "__main__":
    job = read_job()
    os.environ["HF_HOME"] = str(Path(job.out) / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    answer(pretokenize(job))
