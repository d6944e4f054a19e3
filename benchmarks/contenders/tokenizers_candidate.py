"""The release candidate of tokenizers on text that already is in memory as Python strings.

In the time: `encode_batch` on all cores and the ids as numpy arrays, in blocks, because a caller
who keeps every encoding of a large corpus runs out of memory. Not in it: reading, parsing, loading
of the tokenizer.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.contenders.protocol import Report, answer, read_job

BATCH_DOCUMENTS = 1000


def main() -> None:
    job = read_job()
    lines = (line for path in job.files for line in Path(path).read_bytes().splitlines())
    texts = [json.loads(line)["text"] for line in lines]
    tokenizer: Any = Tokenizer.from_file(str(Path(job.tokenizer) / "tokenizer.json"))
    tokens = 0
    begin = time.perf_counter()
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        batch = texts[first : first + BATCH_DOCUMENTS]
        encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
        tokens += sum(len(encoding.ids_array) for encoding in encodings)
    seconds = time.perf_counter() - begin
    answer(Report(seconds=seconds, documents=len(texts), tokens=tokens))


if __name__ == "__main__":
    main()
