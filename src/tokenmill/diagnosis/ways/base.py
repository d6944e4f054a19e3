"""What a way is told and what it tells, and the clocks that all of them share."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import psutil

from tokenmill.diagnosis.sample import load_sample
from tokenmill.engines.load import REFERENCES, load_engine
from tokenmill.records import TextBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine

CHUNK = 8
"""Samples asked for at once, beside single ones."""
_FEWEST_CALLS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a way is told."""

    way: str
    folder: str
    """Where the sample lies, and where a store may be written."""
    tokenizer: str
    kind: str
    """Of the tokenizer: decides the reference engine."""
    workers: int
    batch: int
    seconds: float
    seq_len: int

    def texts(self) -> list[str]:
        return load_sample(Path(self.folder))

    def load(self, *, threads: int = 1) -> CheckedEngine:
        choice = REFERENCES[next(kind for kind in REFERENCES if kind == self.kind)]
        return load_engine(self.tokenizer, choice=choice, threads=threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a way tells."""

    engine: str
    documents: int
    text_bytes: int
    tokens: int
    seconds: float
    cpu_seconds: float
    other_cpu_seconds: float
    """What other programs took of the machine meanwhile."""
    workers: int
    startup_seconds: float = 0.0
    sample_ms: float | None = None
    chunk_ms: float | None = None
    compared_documents: int = 0
    differing_documents: int = 0
    note: str | None = None


class Rounds:
    """Deals out the sample again and again until the time is up, and counts what it dealt."""

    def __init__(self, texts: Sequence[str], *, batch: int, seconds: float) -> None:
        self._texts = texts
        self._batch = batch
        self._end = time.perf_counter() + seconds
        self.documents = 0
        self.text_bytes = 0

    def groups(self) -> Iterator[list[str]]:
        texts = itertools.cycle(self._texts)
        while True:
            group = list(itertools.islice(texts, self._batch))
            self.documents += len(group)
            self.text_bytes += sum(len(text.encode()) for text in group)
            yield group
            if time.perf_counter() >= self._end:
                return

    def singles(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.groups())


def measure_calls(
    job: Job, engine: Engine, encode: Callable[[list[str]], int], *, startup_seconds: float
) -> Measured:
    """Time a way that is one function, which takes texts and says how many tokens they are."""
    texts = job.texts()
    encode(texts[:CHUNK])
    sample_ms, chunk_ms = latencies(encode, texts, seconds=job.seconds / 4)
    rounds = Rounds(texts, batch=job.batch, seconds=job.seconds)
    watch = Stopwatch()
    tokens = sum(map(encode, rounds.groups()))
    return Measured(
        engine=engine.name,
        documents=rounds.documents,
        text_bytes=rounds.text_bytes,
        tokens=tokens,
        **watch.stop(),
        workers=1,
        startup_seconds=startup_seconds,
        sample_ms=sample_ms,
        chunk_ms=chunk_ms,
    )


def latencies(
    encode: Callable[[list[str]], int], texts: Sequence[str], *, seconds: float
) -> tuple[float, float]:
    """Median milliseconds of a call with one text, and of a call with a chunk of them."""
    one = _median_ms(encode, texts, size=1, seconds=seconds / 2)
    return one, _median_ms(encode, texts, size=CHUNK, seconds=seconds / 2)


def _median_ms(
    encode: Callable[[list[str]], int], texts: Sequence[str], *, size: int, seconds: float
) -> float:
    taken: list[float] = []
    for group in Rounds(texts, batch=size, seconds=seconds).groups():
        started = time.perf_counter()
        encode(group)
        taken.append(time.perf_counter() - started)
    while len(taken) < _FEWEST_CALLS:
        started = time.perf_counter()
        encode(list(itertools.islice(itertools.cycle(texts), size)))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1000


class Span(TypedDict):
    """What a stretch of time took."""

    seconds: float
    cpu_seconds: float
    other_cpu_seconds: float


class Stopwatch:
    """Clocks of the wall, of this process tree, and of the machine; runs from the beginning."""

    def __init__(self) -> None:
        self._busy, self._cpu = _busy_seconds(), tree_cpu_seconds()
        self._started = time.perf_counter()

    def stop(self) -> Span:
        seconds = time.perf_counter() - self._started
        cpu = tree_cpu_seconds() - self._cpu
        others = max(0.0, _busy_seconds() - self._busy - cpu)
        return Span(seconds=seconds, cpu_seconds=cpu, other_cpu_seconds=others)


def _busy_seconds() -> float:
    """CPU seconds of everything on this machine; what a host took from a virtual one counts."""
    times: dict[str, float] = psutil.cpu_times()._asdict()
    # Time of guests is counted in user time already.
    return sum(v for k, v in times.items() if k not in ("idle", "iowait", "guest", "guest_nice"))


def tree_cpu_seconds() -> float:
    """CPU seconds so far of this process, its children that live, and those that ended."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue  # it ended just now; its parent has counted it
    return total


def encode_one(engine: Engine, text: str) -> NDArray[np.uint32]:
    """Ids of one text."""
    return engine.encode(TextBatch.from_texts([text])).ids
