"""datatrove: JsonlReader, then DocumentTokenizer, one task per worker, without its shuffle.

In the time: the executor's run, so also the start of its workers. Not in it: imports of the parent.
Only the first half of its usual recipe is run: the second, which merges the files of the tasks, is
left out.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.contenders.protocol import Job, Report, answer, read_job


def pretokenize(job: Job) -> Report:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    folder = Path(job.files[0]).parent
    out = Path(job.out)
    tokenizer = DocumentTokenizer(
        str(out / "tokens"),
        str(Path(job.tokenizer) / "tokenizer.json"),
        shuffle_documents=False,
    )
    executor: Any = LocalPipelineExecutor(
        pipeline=[JsonlReader(str(folder), glob_pattern="*.jsonl"), tokenizer],
        tasks=job.workers,
        workers=job.workers,
        logging_dir=str(out / "logs"),
    )
    begin = time.perf_counter()
    executor.run()
    seconds = time.perf_counter() - begin
    num_bytes = sum(path.stat().st_size for path in out.glob("tokens/*.ds"))
    documents = sum(path.stat().st_size // 8 for path in out.glob("tokens/*.ds.index"))
    return Report(seconds=seconds, documents=documents, tokens=num_bytes // tokenizer.token_size)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    answer(pretokenize(read_job()))
