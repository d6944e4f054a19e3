"""How a contender that feeds tokens is told what to do, how it is timed, and how it answers.

    prepare    write the tokens in the contender's own format, by its own writer; not timed
    rate       read batches for some seconds
    advance    read to the middle of an epoch, keep the state and what the next batches are
    resume     in a fresh process: restore that state, time the first batch, compare the batches

Every contender is a `Feeder`; the loop that reads it is the same for all and is here. It counts
the places of `inputs`, rows times seq_len, and nothing else. What makes it fair:

- A contender hands out inputs and labels, as views of one row of seq_len + 1 tokens where it has
  such rows. Ids may stay as narrow as the contender gives them; nobody is made to widen them.
- The loop reads for a while before the clock starts: files are mapped, workers are up.
- The clock stands between the last batch of an epoch and the first of the next. An epoch of this
  size takes a second or less; restarting workers or drawing a new order would count for far more
  than it does in an epoch of days. Who has no such pause has nothing taken off.
- Before the clock starts, rows of the first batch are looked up in the token file: a contender that
  hands out anything else is not measured.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import pickle
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

COMPARED_BATCHES = 8
LOOKED_UP_ROWS = 4
LOOKED_UP_TOKENS = 8
"""Few, because Megatron-core's rows go from one document to another that does not follow it."""

Pair: TypeAlias = tuple[Any, Any]
"""Inputs and labels of a batch, each (rows, seq_len), numpy or torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedJob:
    """What a contender is asked for."""

    action: str
    tokens: str
    """Path of the token pair without its suffix: one `.bin` and one `.idx` with all documents."""
    store: str
    """The store tokenmill reads; its tokens are those of the pair."""
    folder: str
    """The contender's own: what `prepare` writes, and the state between `advance` and `resume`."""
    mode: str
    workers: int
    seq_len: int
    batch_size: int
    eos_id: int
    vocab_size: int
    warm_seconds: float
    seconds: float


class Feeder(Protocol):
    """An open contender."""

    def epoch(self) -> Iterator[Pair]:
        """Batches of an epoch, or without end; goes on where `restore` said."""
        ...

    def state(self) -> Any:
        """What `restore` needs, after some batches of the first epoch."""
        ...

    def restore(self, state: Any) -> None:
        """Go on, in a fresh feeder, after the batch that was the last one before `state`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What was read, and in which time."""

    tokens: int
    seconds: float
    dtype: str
    padding_share: float
    """Places of the rows that hold no token; they are counted as the others are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """How a restore went."""

    open_seconds: float
    """Until the feeder is made; imports are not counted."""
    first_batch_seconds: float
    """From the restore until the first batch is there."""
    exact: bool
    """The batches after it are those of the run that was not interrupted."""


class Reader:
    """Reads a feeder, epoch after epoch, with a clock that stands between them."""

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder
        self._batches: Iterator[Pair] = iter(())

    def start(self) -> Pair:
        """Begin an epoch; its first batch."""
        self._batches = iter(self._feeder.epoch())
        return next(self._batches)

    def read(self, seconds: float) -> tuple[int, float]:
        """Tokens read, and the seconds that took: at least those asked for."""
        tokens, spent = 0, 0.0
        while True:
            begin = end = time.perf_counter()
            for inputs, _ in self._batches:
                rows, columns = inputs.shape
                tokens += rows * columns
                end = time.perf_counter()
                if spent + end - begin >= seconds:
                    return tokens, spent + end - begin
            spent += end - begin
            self.start()


def run(
    open_feeder: Callable[[FeedJob], Feeder], prepare: Callable[[FeedJob], None] | None = None
) -> None:
    """Do what the first argument says and print the answer as the last line."""
    job = FeedJob(**json.loads(sys.argv[1]))
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    if job.action == "prepare":
        if prepare is not None:
            prepare(job)
        report: dict[str, Any] = {}
    elif job.action == "rate":
        report = asdict(measure_rate(open_feeder(job), job))
    elif job.action == "advance":
        advance(open_feeder(job), job)
        report = {}
    else:
        report = asdict(measure_resume(open_feeder, job))
    print(json.dumps(report), flush=True)


def measure_rate(feeder: Feeder, job: FeedJob) -> Rate:
    """Look at the first batch, read until warm, then read with the clock running."""
    reader = Reader(feeder)
    first = reader.start()
    require_tokens_of(job, first)
    reader.read(job.warm_seconds)
    tokens, seconds = reader.read(job.seconds)
    dtype = str(first[0].dtype).removeprefix("torch.")
    # Only tokenmill has packings that pad.
    padding_share = getattr(feeder, "padding_share", 0.0)
    return Rate(tokens=tokens, seconds=seconds, dtype=dtype, padding_share=padding_share)


def advance(feeder: Feeder, job: FeedJob) -> None:
    """Read to the middle of the first epoch; keep the state and digests of the next batches."""
    batches = iter(feeder.epoch())
    for _ in range(middle(job)):
        next(batches)
    state = feeder.state()
    following = [digest(next(batches)) for _ in range(COMPARED_BATCHES)]
    _state_file(job).write_bytes(pickle.dumps((state, following)))


def measure_resume(open_feeder: Callable[[FeedJob], Feeder], job: FeedJob) -> Resume:
    """Restore what `advance` kept, and compare what follows."""
    state, following = pickle.loads(_state_file(job).read_bytes())
    begin = time.perf_counter()
    feeder = open_feeder(job)
    opened = time.perf_counter()
    feeder.restore(state)
    batches = iter(feeder.epoch())
    first = next(batches, None)
    end = time.perf_counter()
    if first is None:
        raise ValueError("nothing is left of the epoch after the restore")
    # A state that lost rows may end the epoch early: then they are not all the same either.
    found = [
        digest(pair)
        for pair in itertools.chain([first], itertools.islice(batches, len(following) - 1))
    ]
    return Resume(
        open_seconds=opened - begin, first_batch_seconds=end - opened, exact=found == following
    )


def middle(job: FeedJob) -> int:
    """Batches in half an epoch."""
    return num_tokens(job) // job.seq_len // job.batch_size // 2


def digest(pair: Pair) -> str:
    """Of the ids of a batch, whatever their width and library."""
    content = hashlib.blake2b(digest_size=16)
    for part in pair:
        content.update(np.asarray(part).astype(np.int64).tobytes())
    return content.hexdigest()


def require_tokens_of(job: FeedJob, pair: Pair) -> None:
    """Raise unless rows begin with tokens of the file, and labels are the inputs' next tokens."""
    inputs, labels = (np.asarray(part)[:LOOKED_UP_ROWS] for part in pair)
    with open(f"{job.tokens}.bin", "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for row in inputs[:, :LOOKED_UP_TOKENS]:
        if data.find(row.astype("<u2").tobytes()) < 0:
            raise ValueError(f"{row.tolist()} is not in the token file: this is other work")
    if inputs.shape[1] != job.seq_len or not np.array_equal(inputs[:, 1:], labels[:, :-1]):
        raise ValueError("labels are not the next tokens: this is other work")


def token_file(job: FeedJob) -> NDArray[np.uint16]:
    """All tokens, mapped."""
    return np.memmap(f"{job.tokens}.bin", dtype=np.uint16, mode="r")


def num_tokens(job: FeedJob) -> int:
    """Tokens in the file."""
    return Path(f"{job.tokens}.bin").stat().st_size // 2


def documents(job: FeedJob) -> Iterator[NDArray[np.uint16]]:
    """The tokens of each document."""
    index = Path(f"{job.tokens}.idx").read_bytes()
    (count,) = struct.unpack_from("<Q", index, 18)
    ends = np.cumsum(np.frombuffer(index, "<i4", count, 34), dtype=np.int64)
    tokens = token_file(job)
    first = 0
    for last in ends.tolist():
        yield np.asarray(tokens[first:last])
        first = last


def rows(job: FeedJob) -> NDArray[np.uint16]:
    """The stream cut into rows of seq_len + 1 tokens, as most peers want it; a rest is left."""
    length = job.seq_len + 1
    tokens = token_file(job)
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _state_file(job: FeedJob) -> Path:
    return Path(job.folder) / f"state-{job.mode}-{job.workers}.pickle"
