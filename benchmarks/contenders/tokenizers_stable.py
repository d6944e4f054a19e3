"""What people write first: read JSON Lines, encode with tokenizers, keep the ids. Nothing is
written to disk.

In the time: reading, json.loads, encoding, taking `ids`. Not in it: imports, loading of the
tokenizer. The batch modes use all cores by tokenizers' own threads; the loop uses one, as its
callers do.

    mode loop        encode(text) for each document
    mode batch       encode_batch
    mode batch-fast  encode_batch_fast, which leaves out the character positions
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tokenizers import Tokenizer

from benchmarks.contenders.protocol import Report, answer, read_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH_DOCUMENTS = 1000

Encode: TypeAlias = "Callable[[list[str]], list[list[int]]]"


def read_texts(files: list[str]) -> Iterator[str]:
    for path in files:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                yield json.loads(line)["text"]


def encoder(tokenizer: Tokenizer, mode: str) -> Encode:
    if mode == "loop":
        return lambda texts: [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
    call = tokenizer.encode_batch_fast if mode == "batch-fast" else tokenizer.encode_batch
    return lambda texts: [encoding.ids for encoding in call(texts, add_special_tokens=False)]


def main() -> None:
    job = read_job()
    encode = encoder(Tokenizer.from_file(str(Path(job.tokenizer) / "tokenizer.json")), job.mode)
    documents = tokens = 0
    begin = time.perf_counter()
    texts = read_texts(job.files)
    while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
        documents += len(batch)
        tokens += sum(map(len, encode(batch)))
    answer(Report(seconds=time.perf_counter() - begin, documents=documents, tokens=tokens))


if __name__ == "__main__":
    main()
