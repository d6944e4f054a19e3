"""The ways people get tokens into a training loop.

    one-by-one   the tokenizer is called for each sample, in the loop
    batched      the same with many samples in a call, which lets the package use every core
    joined       many samples joined into one long string, encoded, and split again
    pool         a multiprocessing.Pool whose workers tokenize, fed by `imap`
    dataloader   a torch DataLoader whose workers tokenize
    build        `tokenmill build`: the cost, paid once
    loader       `tokenmill.Loader` on the store that it made

A way runs in a process of its own (`run_job`) that knows nothing but its job. All but
the last two run the reference engine of the tokenizer, the package that people would call
themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from tokenmill.builder.run import build
from tokenmill.diagnosis.values import SampleFacts, WayResult
from tokenmill.engines import REFERENCES
from tokenmill.engines.load import load_engine
from tokenmill.errors import SourceError, TokenmillError, UsageError
from tokenmill.files import shown
from tokenmill.loader.loader import Loader
from tokenmill.monitor import tree, tree_bytes, tree_cpu_seconds
from tokenmill.records import RowBatch, TextBatch
from tokenmill.runners.local import end_with_parent
from tokenmill.sources.base import SourceFile, SourceOptions, open_source, plan_units, text_size
from tokenmill.sources.discovery import discover
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.synchronize import Barrier

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.loader.batch import Batch

    Ids = NDArray[np.uint32]
    Encode = Callable[[list[str]], int]


# -------------------------------------------------------------------------------------------------
# A bounded part of the user's own text, read as a build reads it, kept for the ways to share.
#
# Some documents of some files, spread over the input. They are written to a working folder twice:
# as flat arrays, which a way maps at once, and as JSON Lines, which the build reads.

SAMPLED_FILES = 8
BATCH_BYTES = 1 << 20
_DATA, _OFFSETS, LINES = "sample.bin", "offsets.npy", "sample.jsonl"


def take_sample(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    folder: Path,
    most_bytes: int,
    text_field: str = "text",
    separator: str | None = None,
) -> SampleFacts:
    """Read the sample and keep it in the folder."""
    if most_bytes < 1:
        raise UsageError("a sample of no bytes measures nothing", hint="use --sample-mb 32")
    options = SourceOptions(text_field=text_field, separator=separator, batch_bytes=BATCH_BYTES)
    files = discover(inputs, options).files
    chosen = files[:: max(1, len(files) // SAMPLED_FILES)][:SAMPLED_FILES]
    documents: list[bytes] = []
    rejected = 0
    for file in chosen:
        room = max(1, most_bytes // len(chosen))
        for batch in _batches(file, options):
            rejected += len(batch.rejects)
            for index in range(len(batch.texts)):
                if room > 0 and (document := batch.texts.bytes_at(index)):
                    documents.append(document)
                    room -= len(document)
            if room <= 0:
                break
    if not documents:
        names = ", ".join(repr(shown(str(each))) for each in inputs[:3])
        more = " ..." if len(inputs) > 3 else ""
        why = f"{rejected:,} rows cannot be used, and no other" if rejected else "no row"
        problem = f"there is no text to measure in {names}{more}: {why} has text in it"
        hint = f"check the file; the text is looked for under --text-field {text_field}"
        raise SourceError(problem, hint=hint)
    kept = TextBatch.from_texts(documents)
    kept.data.tofile(folder / _DATA)
    np.save(folder / _OFFSETS, kept.offsets)
    with (folder / LINES).open("w", encoding="utf-8", newline="\n") as lines:
        for document in documents:
            lines.write(json.dumps({"text": document.decode()}, ensure_ascii=False) + "\n")
    return SampleFacts(
        files=sum(len(file.members) or 1 for file in files),
        input_bytes=sum(file.size for file in files),
        documents=len(documents),
        text_bytes=sum(map(len, documents)),
        rejected=rejected,
        largest_document_bytes=max(map(len, documents)),
        estimated_text_bytes=sum(text_size(file) for file in files),
    )


def _batches(file: SourceFile, options: SourceOptions) -> Iterator[RowBatch]:
    with contextlib.closing(open_source(file, options)) as source:
        for unit in plan_units(file, options):
            if not source.exists(unit):
                return
            yield from source.read(unit)


def load_sample(folder: Path) -> list[str]:
    """The documents of a sample that was kept."""
    offsets = np.load(folder / _OFFSETS)
    return TextBatch(np.fromfile(folder / _DATA, np.uint8), offsets).texts()


# -------------------------------------------------------------------------------------------------
# What a way is told, and the clocks that all of them share.

CHUNK = 8  # samples asked for at once, beside single ones
_FEWEST_CALLS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class WayJob:
    """What a way is told."""

    way: str
    folder: str  # where the sample is, and where a store may be written
    tokenizer: str
    kind: str  # of the tokenizer: decides the reference engine
    workers: int
    batch: int
    seconds: float
    seq_len: int

    def texts(self) -> list[str]:
        return load_sample(Path(self.folder))

    def load(self, *, threads: int = 1) -> CheckedEngine:
        # A way has a process of its own, with as many threads as it is to be measured with.
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        return load_engine(self.tokenizer, choice=REFERENCES[self.kind], threads=threads)

    def result(self, **found: Any) -> WayResult:
        """What the way tells, beside what was known of it before."""
        way = WAYS[self.way]
        known = {"title": way.title, "in_loop": way.in_loop, "feeds": way.feeds, "workers": 1}
        known["engine"] = REFERENCES[self.kind]
        return WayResult(key=self.way, batch=self.batch, **{**known, **found})

    def failed(self, problem: str) -> WayResult:
        return self.result(engine="", workers=self.workers, problem=problem)


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


def measure_calls(
    job: WayJob,
    encode: Encode,
    *,
    started: float,
    all_of: Callable[[Iterator[list[str]]], int] | None = None,
    **known: Any,
) -> WayResult:
    """Time a way that is one function, which takes texts and says how many tokens they are.

    `all_of` is how the way takes everything, where that is not group by group.
    """
    startup = time.perf_counter() - started
    texts = job.texts()
    encode(texts[:CHUNK])
    sample_ms, chunk_ms = latencies(encode, texts, seconds=job.seconds / 4)
    rounds = Rounds(texts, batch=job.batch, seconds=job.seconds)
    watch = Stopwatch()
    tokens = sum(map(encode, rounds.groups())) if all_of is None else all_of(rounds.groups())
    return job.result(
        documents=rounds.documents,
        text_bytes=rounds.text_bytes,
        tokens=tokens,
        **watch.stop(),
        sample_ms=sample_ms,
        chunk_ms=chunk_ms,
        startup_seconds=startup,
        **known,
    )


def latencies(encode: Encode, texts: Sequence[str], *, seconds: float) -> list[float]:
    """Median milliseconds of a call with one text, and of a call with a chunk of them."""
    medians = []
    for size in (1, CHUNK):
        taken: list[float] = []
        dealt, end = itertools.cycle(texts), time.perf_counter() + seconds / 2
        while len(taken) < _FEWEST_CALLS or time.perf_counter() < end:
            group = list(itertools.islice(dealt, size))
            started = time.perf_counter()
            encode(group)
            taken.append(time.perf_counter() - started)
        medians.append(statistics.median(taken) * 1000)
    return medians


class Stopwatch:
    """Clocks of the wall, of this process tree, and of the machine; runs from the beginning."""

    def __init__(self) -> None:
        self._busy, self._cpu = _busy_seconds(), tree_cpu_seconds()
        self._started = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Seconds and cores, as `WayResult` has them."""
        seconds = time.perf_counter() - self._started
        cpu = tree_cpu_seconds() - self._cpu
        others = max(0.0, _busy_seconds() - self._busy - cpu)
        long = max(seconds, 1e-9)
        return {"seconds": seconds, "cpu_cores": cpu / long, "other_cores": others / long}


def _busy_seconds() -> float:
    """CPU seconds of everything on this machine; what a host took from a virtual one counts."""
    times: dict[str, float] = psutil.cpu_times()._asdict()
    # Time of guests is counted in user time already.
    return sum(v for k, v in times.items() if k not in ("idle", "iowait", "guest", "guest_nice"))


def encode_one(engine: Engine, text: str) -> Ids:
    """Ids of one text."""
    return engine.encode(TextBatch.from_texts([text])).ids


# -------------------------------------------------------------------------------------------------
# In the loop: one by one, in batches, joined.


def measure_plain(job: WayJob, *, at_once: bool) -> WayResult:
    """A call for each sample, or one for all that are asked for."""
    started = time.perf_counter()
    threads = job.workers if at_once else 1
    engine = job.load(threads=threads).reference

    def encode(texts: list[str]) -> int:
        calls = [texts] if at_once else [[text] for text in texts]
        return sum(len(engine.encode(TextBatch.from_texts(call)).ids) for call in calls)

    return measure_calls(job, encode, started=started, workers=threads)


# Joining saves calls, and it changes tokens: a merge does not stop at the boundary of two
# documents, and what a tokenizer does only at the beginning of a text happens once. So the ids are
# compared with those of each document by itself, and the difference is counted.
#
# The ids are split by the bytes that each stands for. Where a tokenizer changes the text (lower
# case, normal forms), these do not add up to it, and the boundaries are lost.

SEPARATOR = "\n\n"
COMPARED_DOCUMENTS = 512
COMPARED_BYTES = 1_000_000
LOST = "where documents begin is lost: this tokenizer changes the text, so ids cannot be split"


def measure_joined(job: WayJob) -> WayResult:
    started = time.perf_counter()
    checked = job.load()
    engine = checked.reference
    sizes = token_sizes(engine, checked.info.vocab_size)

    def encode(texts: list[str]) -> int:
        ids = encode_one(engine, SEPARATOR.join(texts))
        parts = split_ids(ids, texts, sizes)
        return len(ids) if parts is None else sum(map(len, parts))

    measured = measure_calls(job, encode, started=started)
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


def split_ids(ids: Ids, texts: Sequence[str], sizes: NDArray[np.int64]) -> list[Ids] | None:
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
        parts = split_ids(encode_one(engine, SEPARATOR.join(group)), group, sizes)
        if parts is None:
            return 0, 0
        for text, part in zip(group, parts, strict=True):
            differing += not np.array_equal(encode_one(engine, text), part)
            num_bytes += len(text.encode())
        compared += len(group)
        if num_bytes > COMPARED_BYTES:
            break
    return compared, differing


# -------------------------------------------------------------------------------------------------
# Beside the loop: workers that tokenize.
#
# Workers of the pool are spawned, not forked: a tokenizer that has started threads must not be
# forked. The clock starts when all of them have their tokenizer.

READY_SECONDS = 120.0
ENDLESS = 1 << 40

_engine: Engine | None = None


def measure_pool(job: WayJob) -> WayResult:
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(job.workers + 1)
    with context.Pool(job.workers, initializer=_prepare, initargs=(job, ready)) as pool:
        ready.wait(READY_SECONDS)

        def encode(group: list[str]) -> int:
            return sum(map(len, pool.map(_encode, group, chunksize=1)))

        def encode_all(groups: Iterator[list[str]]) -> int:
            singles = itertools.chain.from_iterable(groups)
            return sum(map(len, pool.imap(_encode, singles, chunksize=job.batch)))

        return measure_calls(job, encode, all_of=encode_all, started=started, workers=job.workers)


def _prepare(job: WayJob, ready: Barrier) -> None:
    global _engine
    end_with_parent()
    _engine = job.load().reference
    ready.wait(READY_SECONDS)


def _encode(text: str) -> Ids:
    assert _engine is not None
    return encode_one(_engine, text)


@dataclass(slots=True)
class Tokenizing:
    """The sample's documents again and again, tokenized where a DataLoader asks for them."""

    job: WayJob
    texts: list[str]
    engine: Engine | None = None

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        import torch

        if self.engine is None:
            self.engine = self.job.load().reference
        ids = encode_one(self.engine, self.texts[index % len(self.texts)])
        return torch.from_numpy(ids.astype("int64"))


def measure_dataloader(job: WayJob) -> WayResult:
    """What a sample of one costs is not asked: the workers make batches."""
    from torch.utils.data import DataLoader

    texts = job.texts()
    sizes = [len(text.encode()) for text in texts]
    started = time.perf_counter()
    dataset: Any = Tokenizing(job, texts)
    how: Any = {"num_workers": job.workers, "sampler": range(ENDLESS), "collate_fn": list}
    how["worker_init_fn"] = end_with_parent
    batches = iter(DataLoader(dataset, batch_size=CHUNK, **how))
    # The first batch of each worker waits for its tokenizer; by default two more follow it.
    early = job.workers * 3
    for _ in range(early):
        next(batches)
    begun = time.perf_counter()
    watch, tokens, taken = Stopwatch(), 0, 0
    while time.perf_counter() - begun < job.seconds:
        tokens += sum(map(len, next(batches)))
        taken += 1
    span = watch.stop()
    timed = itertools.islice(itertools.cycle(sizes), early * CHUNK, (early + taken) * CHUNK)
    return job.result(
        documents=taken * CHUNK,
        text_bytes=sum(timed),
        tokens=tokens,
        **span,
        workers=job.workers,
        startup_seconds=begun - started,
        chunk_ms=span["seconds"] * 1000 / taken,
        note="batches of 8 samples, made ahead by the workers",
    )


# -------------------------------------------------------------------------------------------------
# Once, before training: `tokenmill build` on the sample, and `tokenmill.Loader` on its store.
#
# No end tokens are added, so that all ways make the same tokens of the same text. The store is
# small and was just written, so it is in the system's cache; a large one on a slow disk is read at
# the speed of the disk.

UNITS_PER_WORKER = 4
SMALLEST_UNIT = 1 << 20
SHORT_SECONDS = 0.2


def store_path(folder: str | Path, *, workers: int) -> Path:
    """Where the store of a build with so many workers is."""
    return Path(folder) / f"store-{workers}"


def measure_build(job: WayJob) -> WayResult:
    """Build, and take the time at work; where the text is too short for that, the whole time."""
    lines = Path(job.folder) / LINES
    unit_bytes = max(SMALLEST_UNIT, lines.stat().st_size // (UNITS_PER_WORKER * job.workers))
    watch = Stopwatch()
    result = build(
        lines,
        tokenizer=job.tokenizer,
        out=store_path(job.folder, workers=job.workers),
        eos=False,
        workers=job.workers,
        unit_bytes=unit_bytes,
    )
    # Cores are taken over the whole build, for the part of it that is measured.
    span = watch.stop()
    startup, note = result.startup_seconds, None
    if result.working_seconds < SHORT_SECONDS:
        startup = 0.0
        note = "the sample is so small that most of the time is start-up: a larger input is faster"
    return job.result(
        engine=result.engine,
        documents=result.built.documents,
        text_bytes=result.built.text_bytes,
        tokens=result.built.tokens,
        **{**span, "seconds": result.seconds if note else result.working_seconds},
        workers=result.workers,
        startup_seconds=startup,
        note=note,
    )


def measure_loader(job: WayJob) -> WayResult:
    """Batches of 8 rows, inputs and labels; a sample is a row of tokens here, not a document."""
    started = time.perf_counter()
    store = Store(store_path(job.folder, workers=job.workers))
    # Shorter rows for a small sample: padding is read faster than tokens.
    seq_len = min(job.seq_len, max(store.num_tokens // CHUNK, 1))
    many, one = (iter(Loader(store, seq_len=seq_len, batch_size=size)) for size in (CHUNK, 1))
    tokens, _ = _take(many), _take(one)
    startup = time.perf_counter() - started

    def take(texts: list[str]) -> int:
        return _take(one if len(texts) == 1 else many)

    sample_ms, chunk_ms = latencies(take, [""] * CHUNK, seconds=job.seconds / 4)
    watch, begun, steps = Stopwatch(), time.perf_counter(), 0
    while time.perf_counter() - begun < job.seconds:
        _take(many)
        steps += 1
    return job.result(
        engine="none: ids are read",
        tokens=steps * tokens,
        **watch.stop(),
        startup_seconds=startup,
        sample_ms=sample_ms,
        chunk_ms=chunk_ms,
        note=f"a sample is a row of {seq_len:,} tokens; the store is in the system's cache",
    )


def _take(batches: Iterator[Batch]) -> int:
    batch = next(batches)
    _ = batch.labels
    return int(batch.input_ids.size)


# -------------------------------------------------------------------------------------------------
# All of them, and the process in which one runs: told its job by a file, tells its result in
# another. A fresh interpreter each time, so that caches, threads and memory are the way's own. An
# error is a result too: the other ways can still be measured.


class Way(NamedTuple):
    """What is known of a way before it runs."""

    title: str
    measure: Callable[[WayJob], WayResult]
    in_loop: bool = False
    feeds: bool = True


WAYS = {
    "one-by-one": Way("one sample at a time", partial(measure_plain, at_once=False), in_loop=True),
    "batched": Way("in batches", partial(measure_plain, at_once=True), in_loop=True),
    "joined": Way("joined and split again", measure_joined, in_loop=True),
    "pool": Way("process pool", measure_pool),
    "dataloader": Way("DataLoader workers", measure_dataloader),
    "build": Way("tokenmill build, once", measure_build, feeds=False),
    "loader": Way("tokenmill Loader", measure_loader),
}


def run_job() -> None:
    """Carry out the job in the file that is named last on the command line."""
    end_with_parent()
    told, answer = (Path(name) for name in sys.argv[-2:])
    job = WayJob(**json.loads(told.read_text()))
    try:
        result = WAYS[job.way].measure(job)
    except TokenmillError as error:
        result = job.failed(str(error))
    except Exception as error:  # a process boundary: the caller gets words, stderr the traceback
        traceback.print_exc()
        result = job.failed(f"{type(error).__name__}: {error}")
    answer.write_text(json.dumps(dataclasses.asdict(result)))


# -------------------------------------------------------------------------------------------------
# The other side: starts that process and watches the memory of it and its children from outside.
#
# Memory is the sum of resident sets: a page that two processes share counts twice, as it does in
# the budget of a build. Looking takes time as well, on machines with thousands of processes most of
# all, so the pause between two looks is long beside the look.

LOOK_SECONDS = 0.05
LOOK_SHARE = 0.03  # most of the time that looking may take
LATEST_SECONDS = 300.0
KEPT_POINTS = 240
# As the build starts its workers: the child sees the modules that this process sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tokenmill.diagnosis.ways import run_job; run_job()"
)


def run_way(job: WayJob) -> WayResult:
    """Carry out the job; what goes wrong in it is told by the result."""
    with tempfile.TemporaryDirectory(dir=job.folder) as folder, tempfile.TemporaryFile() as err:
        told, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        told.write_text(json.dumps(dataclasses.asdict(job)))
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(told), str(answer)]
        nothing = subprocess.DEVNULL
        process = psutil.Popen(command, stdin=nothing, stdout=nothing, stderr=err)
        try:
            memory = _watch(process)
        finally:
            if process.poll() is None:
                for member in reversed(tree(process)):
                    with contextlib.suppress(psutil.Error):
                        member.kill()
            process.wait()
        if answer.exists():
            result = WayResult(**json.loads(answer.read_text()))
        else:
            err.seek(0)
            lines = err.read().decode("utf-8", errors="replace").strip().splitlines()
            said = f": {lines[-1]}" if lines else ""
            result = job.failed(f"its process ended with exit code {process.returncode}{said}")
    peak = max((num_bytes for _, num_bytes in memory), default=0)
    return dataclasses.replace(result, peak_memory_bytes=peak, memory=thin(memory))


def _watch(process: psutil.Popen) -> list[tuple[float, int]]:
    """Memory over time until the process ends."""
    started = time.monotonic()
    memory: list[tuple[float, int]] = []
    while process.poll() is None and time.monotonic() - started < LATEST_SECONDS:
        look = time.monotonic()
        memory.append((look - started, tree_bytes(process)))
        time.sleep(max(LOOK_SECONDS, (time.monotonic() - look) / LOOK_SHARE))
    return memory


def thin(points: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """At most so many points, the largest of each range, so that no peak is lost."""
    step = -(-len(points) // KEPT_POINTS) or 1
    return tuple(
        max(points[first : first + step], key=lambda point: point[1])
        for first in range(0, len(points), step)
    )
