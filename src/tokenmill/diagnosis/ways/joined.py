"""Many samples joined into one long string, encoded in one call, and split again.

It saves calls, and it changes tokens: a merge does not stop at the border of two documents, and
what a tokenizer does only at the beginning of a text happens once. So the ids are compared with
those of each document by itself, and the difference is counted.

The ids are split by the bytes that each stands for. Where a tokenizer changes the text (lower case,
normal forms), these do not add up to it, and the borders are lost.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.diagnosis.ways.base import encode_one, measure_calls
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.diagnosis.ways.base import Job, Measured
    from tokenmill.engines.base import Engine

SEPARATOR = "\n\n"
COMPARED_DOCUMENTS = 512
COMPARED_BYTES = 1_000_000
LOST = "the borders of documents are lost: this tokenizer changes the text, so ids cannot be split"


def measure(job: Job) -> Measured:
    """Time it, and compare the ids."""
    started = time.perf_counter()
    checked = job.load()
    engine = checked.reference
    sizes = token_sizes(engine, checked.info.vocab_size)

    def encode(texts: list[str]) -> int:
        ids = _encode_joined(engine, texts)
        parts = split_ids(ids, texts, sizes)
        return len(ids) if parts is None else sum(map(len, parts))

    measured = measure_calls(job, engine, encode, startup_seconds=time.perf_counter() - started)
    compared, differing = compare(engine, job.texts(), sizes=sizes, batch=job.batch)
    return dataclasses.replace(
        measured,
        compared_documents=compared,
        differing_documents=differing,
        note=None if compared else LOST,
    )


def token_sizes(engine: Engine, vocab_size: int) -> NDArray[np.int64]:
    """Bytes that each id stands for."""
    return np.array([len(engine.token_bytes(token)) for token in range(vocab_size)], np.int64)


def split_ids(
    ids: NDArray[np.uint32], texts: Sequence[str], sizes: NDArray[np.int64]
) -> list[NDArray[np.uint32]] | None:
    """The ids of each text out of those of all, or None where their bytes do not add up.

    A token belongs to the text in which it begins; one that begins in a separator to none.
    """
    lengths = np.array([len(text.encode()) for text in texts], np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths + len(SEPARATOR))[:-1]))
    ends = np.cumsum(sizes[ids])
    # Some tokenizers put one space in front of the whole string.
    extra = int(ends[-1] if len(ends) else 0) - int(starts[-1] + lengths[-1])
    if extra not in (0, 1):
        return None
    begins = np.maximum(ends - sizes[ids] - extra, 0)
    first = np.searchsorted(begins, starts, side="left")
    last = np.searchsorted(begins, starts + lengths, side="left")
    return [ids[a:b] for a, b in zip(first, last, strict=True)]


def compare(
    engine: Engine, texts: Sequence[str], *, sizes: NDArray[np.int64], batch: int
) -> tuple[int, int]:
    """How many documents were compared, and how many got other ids than by themselves."""
    compared = differing = num_bytes = 0
    for first in range(0, min(len(texts), COMPARED_DOCUMENTS), batch):
        group = list(texts[first : first + batch])
        parts = split_ids(_encode_joined(engine, group), group, sizes)
        if parts is None:
            return 0, 0
        for text, part in zip(group, parts, strict=True):
            differing += not np.array_equal(encode_one(engine, text), part)
            num_bytes += len(text.encode())
        compared += len(group)
        if num_bytes > COMPARED_BYTES:
            break
    return compared, differing


def _encode_joined(engine: Engine, texts: Sequence[str]) -> NDArray[np.uint32]:
    return engine.encode(TextBatch.from_texts([SEPARATOR.join(texts)])).ids
