"""The worker of a build: loads the engine once, then turns one task after the other into units.

It runs in a process of its own (or in the driver's, for debugging) and knows the store only as a
folder. Committing a unit waits for the disk; the next unit is read and encoded meanwhile.

    this thread                                         writer thread
    read, parse  ->  select  ->  encode, check    ->    frame, narrow, hash, write

What a unit becomes is a function of the unit and the configuration. Batches, threads and the
engine's speed leave no trace in it: the sample that is checked is chosen by the text, and if it
disagrees with the reference engine the whole unit is read and encoded again by the reference.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

from tokenmill.builder.encode import (
    Encoding,
    EngineDisagreesError,
    RowEncoder,
    Scratch,
    StageClock,
    cut_lengths,
    frame_documents,
)
from tokenmill.builder.plan import (
    BATCH_FACTOR,
    LARGE_DOCUMENT_FACTOR,
    MemoryGuard,
    budget_with,
    limit_memory,
    release_free_memory,
)
from tokenmill.engines.base import SpecialTokens
from tokenmill.engines.load import load_engine
from tokenmill.engines.parity import Sample
from tokenmill.errors import MemoryBudgetError, TokenizerError, TooManyRejectsError
from tokenmill.files import is_remote
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch, TokenBatch
from tokenmill.sources.base import (
    Source,
    SourceFile,
    SourceOptions,
    Unit,
    UnitEnd,
    open_source,
    plan_units,
)
from tokenmill.store.facts import Bounds, Counts, EngineFacts, SourceFacts, UnitFacts
from tokenmill.store.layout import TRAIN, TurnLock, WorkerLock, join_layout, unit_name
from tokenmill.store.write import UnitWriter
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from tokenmill.builder.plan import MemoryPlan, Task
    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.options import BuildOptions
    from tokenmill.runners.local import Report
    from tokenmill.store.facts import StoreIdentity
    from tokenmill.store.layout import StoreLayout


# -------------------------------------------------------------------------------------------------
# What the driver and the workers of a build tell each other: small values, nothing else.
#
# The driver knows the workers by these alone; it never loads an engine.


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """All that a worker must know; small enough to be sent to any machine."""

    store: str
    """The folder in which the build works."""
    url: str | None
    """Where the store is, if that folder only mirrors it."""
    corner: str
    """Folder in the store's tmp/ for this run alone, where other parts work at the same time."""
    lock_token: str
    """Names the build that has the store's lock."""
    identity: StoreIdentity
    options: BuildOptions
    """What was asked for, without the inputs and what cannot be sent."""
    source: SourceOptions
    tokenizer: TokenizerInfo
    """The copy in the store, described once by the driver."""
    memory: MemoryPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Which engine a worker uses, sent when it is ready."""

    name: str
    reference: str
    note: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """What was done since the last report."""

    unit: str
    input_bytes: int
    documents: int
    tokens: int
    rejected: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport:
    """A unit is committed."""

    unit: str
    pid: int
    counts: Counts
    engine: EngineFacts
    checked_bytes: int = 0
    stage_seconds: dict[str, float]


# -------------------------------------------------------------------------------------------------
# Which split a document belongs to: a hash of its text, so that it never moves.
#
# The text itself is the identity: a document keeps its split when its file is renamed, cut
# otherwise or grows, and two equal documents are never on both sides of the border between
# training and validation.

VAL = "val"

_SEED = 0x746F6B656E6D696C  # 'tokenmil': fixed for ever, or documents would move


def in_validation(texts: TextBatch, fraction: float) -> NDArray[np.bool_]:
    """True for the documents of the split `val`."""
    threshold = int(fraction * 2**64)
    data = np.ascontiguousarray(texts.data).data
    bounds = texts.offsets.tolist()
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter(
        (digest(data[start:end], _SEED) < threshold for start, end in itertools.pairwise(bounds)),
        np.bool_,
        count=len(texts),
    )


# -------------------------------------------------------------------------------------------------
# Threads around the encoder: one writes behind it and, for remote files, one reads ahead of it.
#
# The calls that take the time (reading, encoding, hashing, writing, fsync) release the GIL, so
# they really overlap. Queues hold one item each: that bounds memory, and more would not be faster.
# A local file is read and parsed by the encoder's own thread: the kernel reads ahead by itself,
# there is a worker for every core already, and a batch that one core has parsed is best encoded by
# that core (with a thread of its own, builds from warm files were slower).

T = TypeVar("T")

_END = object()


def read_ahead(items: Iterable[T], *, clock: StageClock) -> Generator[T]:
    """The items, each fetched by a thread while the caller works on the one before.

    Time that the caller had to wait is counted as `wait`. Closing the iterator stops the thread
    before it returns, so the source can be used again at once.
    """
    handover: queue.Queue[Any] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def offer(value: Any) -> bool:
        while not stopped.is_set():
            try:
                handover.put(value, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def fetch() -> None:
        try:
            for item in items:
                if not offer((item, None)):
                    return
            offer((_END, None))
        except BaseException as error:  # handed to the caller, who raises it
            offer((_END, error))

    thread = threading.Thread(target=fetch, name="tokenmill-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = clock.timed("wait", handover.get)
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()


class WriteBehind:
    """Runs calls one after the other on a thread of its own, at most two ahead of it.

    As a context manager it ends with all calls done; the first error of a call is raised by the
    next `submit` or at the end, and the calls behind it are dropped.
    """

    def __init__(self, clock: StageClock) -> None:
        self._clock = clock
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name="tokenmill-write-behind", daemon=True
        )

    def __enter__(self) -> WriteBehind:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._queue.put(_END)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._error is not None:
            raise self._error
        self._clock.timed("wait", self._queue.put, (call, arguments))

    def _run(self) -> None:
        while (entry := self._queue.get()) is not _END:
            if self._error is None:
                call, arguments = entry
                try:
                    self._clock.timed("write", call, *arguments)
                except BaseException as error:  # raised by the thread that submits
                    self._error = error
            # A batch must not stay alive while the thread waits for the next one.
            entry = call = arguments = None


_SHOWN_REJECTS = 3
_MOST_FAILURES = 20
REFERENCE_BYTES = 256 << 10
"""A reference engine takes about a tenth of a second for so much text."""


@dataclass(kw_only=True, slots=True)
class UnitTally:
    """What has been counted of a unit so far."""

    rows: int = 0
    documents: int = 0
    empty: int = 0
    rejected: int = 0
    skipped: int = 0
    input_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0
    split_rows: int = 0
    pieces: int = 0
    largest_row_bytes: int = 0
    smallest_too_large_bytes: int | None = None
    first_rejects: list[Reject] = field(default_factory=list)

    def counts(self) -> Counts:
        """What a receipt keeps of them."""
        names = [name for name in Counts.__struct_fields__ if hasattr(self, name)]
        return Counts(**{name: getattr(self, name) for name in names})


@dataclass(kw_only=True, slots=True)
class UnitPass:
    """One pass over a unit with one engine, into one writer."""

    settings: WorkerSettings
    encoder: RowEncoder
    unit: Unit
    row_limit: int | None
    writer: UnitWriter
    by_reference: bool
    on_batch: Callable[[UnitTally], None]
    """Called after each batch: progress is reported and memory watched from there."""
    large_turn: Callable[[], Any]
    """Makes a context that one worker at a time can hold, for large documents."""
    scratch: Scratch
    mask_scratch: Scratch = field(default_factory=Scratch)
    tally: UnitTally = field(default_factory=UnitTally)
    encoding: Encoding = field(init=False)
    _failures: int = 0

    def __post_init__(self) -> None:
        self.encoding = Encoding(
            by_reference=self.by_reference,
            sample=Sample(),
            keeps_texts=self.settings.options.val > 0,
            on_failure=self._on_failure,
        )

    def run(self, source: Source) -> UnitEnd:
        """Read, encode and write all rows of the unit; the writer is left uncommitted."""
        clock = self.encoding.clock
        batches = self._timed_batches(source)
        if is_remote(self.unit.file.path):
            batches = read_ahead(batches, clock=clock)
        try:
            with WriteBehind(clock) as behind:
                for batch in self._portions(batches):
                    if batch.texts.num_bytes > self._most_bytes():
                        with self.large_turn():
                            self._take(batch, behind)
                    else:
                        self._take(batch, behind)
                    self._check_early()
                    self.on_batch(self.tally)
        finally:
            batches.close()
        end = source.end()
        self._check_rejects(end)
        return end

    def _most_bytes(self) -> int:
        """Text that a worker may encode without asking; the reference needs more memory for it."""
        batch_bytes = self.settings.source.batch_bytes
        if not self.by_reference:
            return 2 * batch_bytes
        return max(batch_bytes * BATCH_FACTOR // LARGE_DOCUMENT_FACTOR, REFERENCE_BYTES)

    def _portions(self, batches: Iterator[RowBatch]) -> Iterator[RowBatch]:
        """The batches; in small parts for the reference, so that one can see it move."""
        if not self.by_reference:
            return batches
        return (part for batch in batches for part in split_batch(batch, REFERENCE_BYTES))

    def _timed_batches(self, source: Source) -> Generator[RowBatch]:
        """The unit's batches; what the source did not spend on reading, it spent on parsing."""
        batches, clock = iter(source.read(self.unit)), self.encoding.clock
        while True:
            began, had_read = time.perf_counter(), source.read_seconds
            batch = next(batches, None)
            reading = source.read_seconds - had_read
            clock.add("read", reading)
            clock.add("parse", time.perf_counter() - began - reading)
            if batch is None:
                return
            yield batch

    def _take(self, batch: RowBatch, behind: WriteBehind) -> None:
        tally = self.tally
        texts, rows, rejects = _within_limit(batch, first_row=tally.rows, row_limit=self.row_limit)
        tally.rows += batch.num_rows
        tally.input_bytes += batch.num_bytes
        tally.largest_row_bytes = max(tally.largest_row_bytes, batch.largest_row_bytes)
        tally.skipped += batch.num_rows - len(rows) - len(rejects)
        made = self.encoder.encode(texts, rows, self.encoding)
        found = (_placed(reject, batch, self.unit) for reject in made.rejects)
        self._put_rejects((*rejects, *found), behind)
        tally.text_bytes += int(made.sizes.sum())
        if len(made.rows):
            behind.submit(self._write, made.texts, made.tokens, made.rows)

    def _on_failure(self, reason: str) -> None:
        """A row on which the reference fails: too many of them end the build."""
        self._failures += 1
        used = self.tally.rows - self.tally.skipped
        if self._failures > max(_MOST_FAILURES, self.settings.options.max_rejects * used):
            # Each costs as long as the package cares to try: not to be gone through to the end.
            raise TokenizerError(
                f"{self.encoder.engine.reference.name} fails on text after text with this "
                f"tokenizer, {self._failures} so far in one unit: {reason}",
                hint="look at the patterns in the tokenizer: one that goes back and forth over a "
                "text fails on long runs; or accept the loss with --max-rejects 1",
            )

    def _put_rejects(self, rejects: tuple[Reject, ...], behind: WriteBehind) -> None:
        # By row, or the file of rejects would tell how the unit was cut into batches.
        rejects = tuple(sorted(rejects, key=lambda reject: reject.row))
        self._count_rejects(rejects)
        if rejects:
            behind.submit(self.writer.rejects, rejects)

    def _write(self, texts: TextBatch, tokens: TokenBatch, rows: NDArray[np.int64]) -> None:
        tally, identity, val = self.tally, self.settings.identity, self.settings.options.val
        vocab_size = identity.tokenizer.vocab_size
        if len(tokens.ids) and (largest := int(tokens.ids.max())) >= vocab_size:
            # Narrowing would turn it into another, valid id.
            raise AssertionError(f"id {largest} of a vocabulary of {vocab_size}")
        filled = tokens.lengths > 0
        tally.empty += int(len(filled) - np.count_nonzero(filled))
        if val > 0:
            held_out = in_validation(texts, val)
            chosen = {TRAIN: filled & ~held_out, VAL: filled & held_out}
        else:
            chosen = {TRAIN: filled}
        for split, mask in chosen.items():
            documents = np.flatnonzero(mask)
            if not len(documents):
                continue
            bos_id, eos_id = self.encoder.frame_ids
            ids, lengths = frame_documents(
                tokens.ids,
                tokens.offsets,
                documents=documents,
                dtype=identity.dtype,
                bos_id=bos_id,
                eos_id=eos_id,
                scratch=self.scratch,
            )
            counts = None
            if tokens.mask is not None:
                # Rows with a mask are framed where it is made.
                counts, _ = frame_documents(
                    tokens.mask,
                    tokens.offsets,
                    documents=documents,
                    dtype=np.dtype(np.uint8),
                    bos_id=None,
                    eos_id=None,
                    scratch=self.mask_scratch,
                )
            lengths, of_rows = self._cut(lengths, rows[documents])
            self.writer.append(split, ids, lengths=lengths, rows=of_rows, mask=counts)
            tally.documents += len(lengths)
            tally.tokens += len(ids)

    def _cut(
        self, lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths of documents and the rows that they are of, those too long in pieces."""
        limit = self.encoder.shape.piece_tokens
        if limit is None or lengths.max() <= limit:
            return lengths, rows
        lengths, counts = cut_lengths(lengths, limit)
        self.tally.split_rows += int(np.count_nonzero(counts > 1))
        self.tally.pieces += int(counts[counts > 1].sum())
        return lengths, np.repeat(rows, counts)

    def _count_rejects(self, rejects: tuple[Reject, ...]) -> None:
        self.tally.rejected += len(rejects)
        shown = self.tally.first_rejects
        kinds = {reject[1:3] for reject in shown}
        for reject in rejects if len(shown) < _SHOWN_REJECTS else ():
            if len(shown) < _SHOWN_REJECTS and reject[1:3] not in kinds:
                shown.append(reject)
                kinds.add(reject[1:3])
        sizes = [reject.size for reject in rejects if reject.size is not None]
        if sizes:
            known = self.tally.smallest_too_large_bytes
            self.tally.smallest_too_large_bytes = min(sizes if known is None else [known, *sizes])

    def _check_early(self) -> None:
        """Refuse the unit as soon as no number of good rows could bring it below the threshold."""
        unit = self.unit
        end = unit.end
        if end is None and unit.file.compression is None:
            end = unit.file.size
        if not unit.file.traits.in_bytes or end is None:
            return
        # A row takes a byte at least.
        left = max(0, end - unit.start - self.tally.input_bytes)
        most = self.tally.rows - self.tally.skipped + left
        if self.row_limit is not None:
            most = min(most, self.row_limit)
        if left and self.tally.rejected > self.settings.options.max_rejects * most:
            self._check_rejects(None)

    def _check_rejects(self, end: UnitEnd | None) -> None:
        unit, max_rejects = self.unit, self.settings.options.max_rejects
        used = self.tally.rows - self.tally.skipped
        if self.tally.rejected <= max_rejects * used:
            return
        # Only the lines before the first unit are known to be none, and blank ones are no rows.
        tells_lines = unit.file.traits.rows_are_lines and unit.index == 0
        tells_lines = tells_lines and end is not None and end.num_lines == self.tally.rows
        examples = "; ".join(
            _describe(reject, unit, tells_lines=tells_lines) for reject in self.tally.first_rejects
        )
        raise TooManyRejectsError(
            f"{self.tally.rejected:,} of {'' if end else 'the first '}{used:,} rows of "
            f"{unit.file.path!r} (unit {unit.index}) were rejected, more than the threshold of "
            f"{max_rejects:.2%}; so many bad rows usually mean a wrong "
            f"option or a damaged file; the first: {examples}",
            hint=f"look at those rows in the input, then correct {self._options_at_fault()} or the "
            "input, or accept the loss with --max-rejects "
            f"{_enough_rejects(self.tally.rejected, used)}",
        )

    def _options_at_fault(self) -> str:
        if self.encoder.shaper is None:
            return "--text-field"
        is_missing = self.tally.first_rejects[0].reason is RejectReason.MISSING_FIELD
        return self.encoder.shaper.naming_options if is_missing else "the options of --format"


def split_batch(batch: RowBatch, most_bytes: int) -> Iterator[RowBatch]:
    """The batch as consecutive ones of at most `most_bytes` of text, or of one document."""
    offsets = batch.texts.offsets
    first, left, lowest = 0, batch.num_bytes, -1
    while first < len(batch.texts):
        limit = int(offsets[first]) + most_bytes
        last = max(first + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
        is_end = last == len(batch.texts)
        # Rejects stand between rows with text: each goes with the part in front of which it ends.
        highest = None if is_end else int(batch.rows[last])
        rejects = tuple(
            reject
            for reject in batch.rejects
            if reject.row > lowest and (highest is None or reject.row < highest)
        )
        texts = TextBatch(batch.texts.data, offsets[first : last + 1])
        num_bytes = left if is_end else texts.num_bytes
        yield RowBatch(
            texts,
            batch.rows[first:last],
            rejects,
            num_rows=len(texts) + len(rejects),
            num_bytes=num_bytes,
            largest_row_bytes=batch.largest_row_bytes,
            places=None if batch.places is None else batch.places[first:last],
        )
        left -= num_bytes
        first, lowest = last, -1 if highest is None else highest
    if not len(batch.texts):
        yield batch


def _within_limit(
    batch: RowBatch, *, first_row: int, row_limit: int | None
) -> tuple[TextBatch, NDArray[np.int64], tuple[Reject, ...]]:
    """The part of a batch that lies before the limit."""
    if row_limit is None or first_row + batch.num_rows <= row_limit:
        return batch.texts, batch.rows, batch.rejects
    kept = int(np.searchsorted(batch.rows, row_limit))
    texts = TextBatch(batch.texts.data, batch.texts.offsets[: kept + 1])
    rejects = tuple(reject for reject in batch.rejects if reject.row < row_limit)
    return texts, batch.rows[:kept], rejects


def _placed(reject: Reject, batch: RowBatch, unit: Unit) -> Reject:
    """The reject with the place of its row in its file."""
    members = unit.file.members
    offset = None
    if batch.places is not None:
        offset = int(batch.places[np.searchsorted(batch.rows, reject.row)])
    path = members[reject.row].path if members else None
    return reject._replace(offset=offset, path=path)


def _describe(reject: Reject, unit: Unit, *, tells_lines: bool) -> str:
    place = f"row {reject.row}" if reject.offset is None else f"byte {reject.offset:,}"
    if tells_lines:
        place = f"line {reject.row + 1:,}"
    file = reject.path or unit.file.path
    return f"{reject.reason} at {place} of {file!r}: {reject.detail}"


def _enough_rejects(rejected: int, used: int) -> str:
    """The smallest round share of the rows that lets so many of them be rejected."""
    digits = 2
    while 2 * rejected * 10**digits < used:
        digits += 1
    share = -(-rejected * 10**digits // used)
    if share / 10**digits * used < rejected:  # 0.29 of 100 is a little less than 29
        share += 1
    return f"{share / 10**digits:.{digits}f}"


# -------------------------------------------------------------------------------------------------
# The worker: loads the engine once, then turns one task after the other into units.

_REPORT_SECONDS = 0.2


class BuildWorker:
    """Builds units until there are no more tasks."""

    def __init__(self, settings: WorkerSettings, *, engine: CheckedEngine | None = None) -> None:
        self._settings = settings
        self._layout = join_layout(
            settings.store, url=settings.url, token=settings.lock_token, corner=settings.corner
        )
        self._lock = WorkerLock(self._layout, token=settings.lock_token)
        self._lock.acquire()
        self._engine = engine or load_engine(
            _tokenizer_here(settings.tokenizer, self._layout),
            choice=settings.options.engine,
            special_tokens=SpecialTokens(settings.options.special_tokens),
        )
        self._encoder = RowEncoder(self._engine, settings.identity)
        self._guard = MemoryGuard(settings.memory.worker_bytes)
        self._committer = ThreadPoolExecutor(1, "tokenmill-commit")
        self._pending: Future[None] | None = None
        self._scratch = Scratch()
        self._source: Source | None = None
        self._file: SourceFile | None = None
        # What is alive now stays alive: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        self._unlimit: Callable[[], None] = lambda: None
        if not settings.options.serial:  # else this process is the user's own
            self._unlimit = limit_memory(settings.memory.hard_bytes)

    def ready(self) -> EngineReport:
        return EngineReport(
            name=self._engine.name,
            reference=self._engine.reference.name,
            note=self._engine.refusal,
        )

    def work(self, task: Task, report: Report) -> Future[None] | None:
        """Build the units of the task; done when the last of them is committed."""
        try:
            source = self._open(task.file)
            for unit in _units_of(task, source, self._settings.source):
                self._build(source, unit, task.row_limits.get(unit.index), report)
        except BaseException as error:
            # The driver ends everything when it hears of this; wait for the unit before.
            if self._pending is not None:
                wait([self._pending])
            if isinstance(error, MemoryError):
                raise self._out_of_memory(task.file.path) from None
            if isinstance(error, MemoryBudgetError) and error.short_bytes is not None:
                enough = budget_with(self._settings.memory, error.short_bytes)
                error.hint = f"allow more with --memory {enough}{self._or_fewer()}"
            raise
        return self._pending

    def close(self) -> None:
        self._committer.shutdown(wait=True)
        self._close_source()
        self._lock.release()
        self._layout.upstream.close()
        self._unlimit()

    def _out_of_memory(self, path: str) -> MemoryBudgetError:
        budget = self._settings.memory.budget
        return MemoryBudgetError(
            f"a worker came to the end of its share of the memory, {format_size(budget)} in all, "
            f"while it worked on {path!r}: something in that file takes far more than its size",
            hint=f"allow more with --memory {-(-2 * budget // 10**8) * 100}MB{self._or_fewer()}, "
            "or leave the file out",
        )

    def _or_fewer(self) -> str:
        return " or fewer --workers" if self._settings.memory.workers > 1 else ""

    def _open(self, file: SourceFile) -> Source:
        """The file's source; it stays open, since the next task is mostly of the same file."""
        if self._source is None or self._file != file:
            self._close_source()
            # A line or a record is held once, as part of a batch.
            is_plain = file.traits.has_records and file.compression is None
            self._guard.kept_free = 0 if is_plain else self._settings.source.room_bytes
            self._source = open_source(file, self._settings.source)
            self._file = file
        return self._source

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _build(self, source: Source, unit: Unit, row_limit: int | None, report: Report) -> None:
        progress = _ProgressMeter(unit_name(unit.file.path, index=unit.index), report)

        def attempt(by_reference: bool) -> tuple[UnitPass, UnitEnd]:
            made = self._begin(unit, row_limit, progress, by_reference=by_reference)
            try:
                end = made.run(source)
            except EngineDisagreesError:
                made.writer.abort()
                progress.restart()
                again, end = attempt(by_reference=True)
                again.encoding.checked_documents = made.encoding.checked_documents
                again.encoding.checked_bytes = made.encoding.checked_bytes
                again.encoding.mismatches = 1
                return again, end
            except BaseException:
                made.writer.abort()
                raise
            progress.finish(made.tally)
            return made, end

        # Nothing to disagree with where the reference is the engine.
        made, end = attempt(by_reference=self._engine.fast is None)
        # At most one unit is being committed; an error of the one before is raised here.
        if self._pending is not None:
            made.encoding.clock.timed("wait", self._pending.result)
        self._pending = self._committer.submit(self._commit, made, end, report)

    def _begin(
        self, unit: Unit, row_limit: int | None, progress: _ProgressMeter, *, by_reference: bool
    ) -> UnitPass:
        facts = UnitFacts.of(
            unit.file.path,
            index=unit.index,
            start=unit.start,
            end=unit.end,
            members=tuple(member.path for member in unit.file.members),
        )
        identity = self._settings.identity
        writer = UnitWriter(
            self._layout, facts, dtype=identity.dtype, vocab_size=identity.tokenizer.vocab_size
        )

        def on_batch(tally: UnitTally) -> None:
            progress.update(tally)
            self._mind_memory()

        return UnitPass(
            settings=self._settings,
            encoder=self._encoder,
            unit=unit,
            row_limit=row_limit,
            writer=writer,
            by_reference=by_reference,
            on_batch=on_batch,
            large_turn=lambda: TurnLock(self._layout),
            scratch=self._scratch,
        )

    def _commit(self, made: UnitPass, end: UnitEnd, report: Report) -> None:
        tally, file, clock = made.tally, made.unit.file, made.encoding.clock
        engine = self._engine_facts(made.encoding)
        try:
            start = time.perf_counter()
            receipt = made.writer.commit(
                source=SourceFacts(
                    size=file.size,
                    version=file.version,
                    digest=end.digest,
                    is_last=end.is_last,
                    num_lines=end.num_lines,
                ),
                config=self._settings.identity.fingerprint,
                counts=tally.counts(),
                bounds=Bounds(
                    largest_row_bytes=tally.largest_row_bytes,
                    smallest_too_large_bytes=tally.smallest_too_large_bytes,
                ),
                engine=engine,
            )
        except BaseException as error:
            made.writer.abort()
            if isinstance(error, MemoryError):
                raise self._out_of_memory(file.path) from None
            raise
        clock.add("write", time.perf_counter() - start)
        report(
            UnitReport(
                unit=receipt.unit.name,
                pid=os.getpid(),
                counts=receipt.counts,
                engine=engine,
                checked_bytes=made.encoding.checked_bytes,
                stage_seconds=clock.seconds,
            )
        )

    def _engine_facts(self, encoding: Encoding) -> EngineFacts:
        used, reference = self._engine.engine, self._engine.reference
        was_redone = encoding.by_reference and self._engine.fast is not None
        if was_redone:
            used = reference
        return EngineFacts(
            name=used.name,
            version=used.version,
            reference=reference.name,
            reference_version=reference.version,
            checked_documents=encoding.checked_documents,
            mismatches=encoding.mismatches,
            redone=was_redone,
            routed_documents=encoding.routed_documents,
        )

    def _mind_memory(self) -> None:
        if self._guard.is_over():
            self._engine.recycle()
            release_free_memory()


@dataclass(slots=True)
class _ProgressMeter:
    """Sends what was added since the last report, a few times a second."""

    unit: str
    report: Report
    _sent: UnitTally = field(default_factory=UnitTally)
    _last: float = field(default_factory=time.monotonic)

    def update(self, tally: UnitTally) -> None:
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self.finish(tally)

    def finish(self, tally: UnitTally) -> None:
        self._last = time.monotonic()
        self.report(
            ProgressReport(
                unit=self.unit,
                input_bytes=tally.input_bytes - self._sent.input_bytes,
                documents=tally.documents - self._sent.documents,
                tokens=tally.tokens - self._sent.tokens,
                rejected=tally.rejected - self._sent.rejected,
            )
        )
        self._sent = UnitTally(
            input_bytes=tally.input_bytes,
            documents=tally.documents,
            tokens=tally.tokens,
            rejected=tally.rejected,
        )

    def restart(self) -> None:
        """Take back what was reported: the unit begins again."""
        self.finish(UnitTally())


def _tokenizer_here(tokenizer: TokenizerInfo, layout: StoreLayout) -> TokenizerInfo:
    """The store's copy of the tokenizer; a worker on another machine brings it first."""
    files = {name: layout.tokenizer / name for name in tokenizer.files}
    layout.upstream.bring(list(files.values()))
    return dataclasses.replace(tokenizer, files=files)


def _units_of(task: Task, source: Source, options: SourceOptions) -> Iterator[Unit]:
    """The units that a task names."""
    for unit in plan_units(task.file, options):
        if task.step is None:
            if unit.index == task.first:
                yield unit
                return
            continue
        if task.last is not None and unit.index > task.last:
            return
        if unit.index < task.first or (unit.index - task.first) % task.step:
            continue
        if not source.exists(unit):
            return
        if unit.index not in task.done:
            yield unit
