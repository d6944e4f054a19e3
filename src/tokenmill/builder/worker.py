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
import functools
import gc
import math
import os
import threading
import time
from collections import Counter, deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import psutil

from tokenmill import words
from tokenmill.builder import encode, plan
from tokenmill.engines.base import TokenizerKind, UnencodableError
from tokenmill.engines.parity import Sample
from tokenmill.errors import (
    MemoryBudgetError,
    SourceError,
    TokenizerError,
    TooManyRejectsError,
    UnknownTextError,
)
from tokenmill.files import is_remote
from tokenmill.records import (
    VAL,
    Reject,
    RejectReason,
    RowBatch,
    TextBatch,
    TokenBatch,
    cut_ranges,
    in_validation,
)
from tokenmill.runners.local import FoundTask, answer_apart
from tokenmill.sources.base import (
    SMALLEST_UNIT_BYTES,
    Source,
    SourceFile,
    Unit,
    UnitCopy,
    UnitEnd,
    open_source,
    plan_units,
    text_size,
)
from tokenmill.store.facts import (
    Bounds,
    Counts,
    EngineFacts,
    ForgottenUnit,
    SourceFacts,
    UnitFacts,
    UnknownFacts,
)
from tokenmill.store.format import numbers_of_runs
from tokenmill.store.layout import (
    TRAIN,
    StoreLayout,
    TurnLock,
    WorkerLock,
    join_layout,
    unit_name,
    unit_prefix,
)
from tokenmill.store.write import UnitWriter
from tokenmill.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.runners.local import Report
    from tokenmill.store.format import Ints


# -------------------------------------------------------------------------------------------------
# What the workers of a build tell its driver: small values, nothing else.


class EngineReport(NamedTuple):
    """Which engine a worker uses, sent when it is ready."""

    name: str
    reference: str
    note: str | None
    # Whether it agrees with the reference; else that is still being loaded, or compared with it.
    is_proved: bool = True


class ProgressReport(NamedTuple):
    """What was done of a unit so far."""

    unit: str
    input_bytes: int
    documents: int
    tokens: int
    rejected: int


class UnitReport(NamedTuple):
    """A unit is committed."""

    unit: str
    pid: int
    counts: Counts
    engine: EngineFacts
    stage_seconds: dict[str, float]
    checked_bytes: int = 0
    lost_breaks: str | None = None  # text with line breaks that does not come back with them


# -------------------------------------------------------------------------------------------------
# Threads around the encoder: one writes after it and, for remote files, one reads ahead of it.
#
# The calls that take the time (reading, encoding, hashing, writing, fsync) release the GIL, so
# they really overlap. Two calls wait at most: that bounds memory, and more would not be faster.
# A local file is read and parsed by the encoder's own thread: the kernel reads ahead by itself,
# there is a worker for every core already, and a batch that one core has parsed is best encoded by
# that core (with a thread of its own, builds from warm files were slower).

T = TypeVar("T")

_AHEAD = 2
_END: Any = object()


def read_ahead(items: Iterable[T], *, clock: encode.StageClock) -> Generator[T]:
    """The items, each fetched by a thread while the caller works on those before.

    Time that the caller had to wait is counted as `wait`. Closing the iterator stops the thread
    before it returns, so the source can be used again at once.
    """
    source = iter(items)
    pool = ThreadPoolExecutor(1, "tokenmill-read-ahead")
    try:
        pending = deque(pool.submit(next, source, _END) for _ in range(_AHEAD))
        while (item := clock.timed("wait", pending.popleft().result)) is not _END:
            pending.append(pool.submit(next, source, _END))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


class UnitWrites:
    """Calls of one unit, one after the other on a thread that all units share.

    At most two wait for it. The first error of a call is raised by a later `submit`, or where the
    calls are waited for, and the calls after it are dropped.
    """

    def __init__(self, thread: Executor, clock: encode.StageClock) -> None:
        self._thread, self._clock = thread, clock
        self._pending: deque[Future[None]] = deque()
        self._is_over = False

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._pending.append(self._thread.submit(self._run, call, arguments))
        if len(self._pending) > _AHEAD:
            self._clock.timed("wait", self._pending.popleft().result)

    def drain(self) -> None:
        """Wait until all calls are done, as the encoder does: its time is counted."""
        while self._pending:
            self._clock.timed("wait", self._pending.popleft().result)

    def finish(self) -> None:
        """Wait until all calls are done, while the next unit is read and encoded."""
        for each in self._pending:
            each.result()

    def stop(self) -> None:
        """Wait until no call is running, and drop those that have not begun."""
        self._is_over = True
        wait(self._pending)

    def _run(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._is_over:
            return
        try:
            self._clock.timed("write", call, *arguments)
        except BaseException:
            self._is_over = True
            raise


# -------------------------------------------------------------------------------------------------
# One pass over a unit with one engine, into one writer.

_SHOWN_REJECTS = 3
_MOST_FAILURES = 20
_REPORT_SECONDS = 0.2
# A reference engine takes about a tenth of a second for so much text.
REFERENCE_BYTES = 256 << 10


@dataclass(kw_only=True, slots=True)
class UnitPass:
    """What became of a unit so far."""

    worker: BuildWorker
    unit: Unit
    row_limit: int | None
    report: Report
    by_reference: bool
    forgotten: Mapping[str, Ints] = field(
        default_factory=dict
    )  # file -> rows of it; '': of the unit
    counts: Counter[str] = field(default_factory=Counter)  # by the names of Counts
    largest_row_bytes: int = 0
    smallest_too_large_bytes: int | None = None
    first_rejects: list[Reject] = field(default_factory=list)
    writer: UnitWriter = field(init=False)
    encoding: encode.Encoding = field(init=False)
    writes: UnitWrites = field(init=False)
    _turn: TurnLock | None = None
    _turn_lock: threading.Lock = field(default_factory=threading.Lock)
    _failures: int = 0
    _told_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        file, unit, identity = self.unit.file, self.unit, self.worker.settings.identity
        members = tuple(member.path for member in file.members)
        facts = UnitFacts.of(
            file.path, index=unit.index, start=unit.start, end=unit.end, members=members
        )
        vocab_size = identity.tokenizer.vocab_size
        self.writer = UnitWriter(self.worker.layout, facts, vocab_size=vocab_size)
        self.encoding = encode.Encoding(
            by_reference=self.by_reference,
            sample=Sample(),
            between_pieces=self.worker.mind_memory,
            keeps_texts=self.worker.settings.options.val > 0,
            on_failure=self._on_failure,
        )
        self.writes = UnitWrites(self.worker.write_thread, self.encoding.clock)

    def abort(self) -> None:
        """Remove what was written of the unit."""
        self.writes.stop()
        self.writer.abort()

    def run(self, source: Source) -> UnitEnd:
        """Read and encode all rows of the unit; the last ones may still be written."""
        clock = self.encoding.clock
        source.before_large = self._begin_turn
        batches = self._timed_batches(source)
        if any(is_remote(each.path) for each in self.unit.file.members or (self.unit.file,)):
            batches = read_ahead(batches, clock=clock)
        portions: Iterator[RowBatch] = batches
        batch_bytes = self.worker.settings.source.batch_bytes
        # Text that a worker may encode without asking; the reference needs more memory for it.
        most = 2 * batch_bytes
        if self.by_reference:
            most = max(
                batch_bytes * plan.BATCH_FACTOR // plan.LARGE_DOCUMENT_FACTOR, REFERENCE_BYTES
            )
            # In small parts, so that one can see it move.
            portions = (part for batch in batches for part in split_batch(batch, REFERENCE_BYTES))
        try:
            for batch in portions:
                if batch.texts.num_bytes > most:
                    self._begin_turn()
                if self._turn is not None:
                    plan.release_free_memory()
                self._take(batch)
                if self._turn is not None:
                    self.writes.drain()
                    self._end_turn()
                self._check_early()
                self._check_unknown_early()
                if time.monotonic() - self._told_at >= _REPORT_SECONDS:
                    self.tell()
                self.worker.mind_memory()
            end = source.end()
            self._check_rejects(end)
            self._check_unknown(None)
        except BaseException:
            self.abort()
            raise
        finally:
            batches.close()
            self._end_turn()
            source.before_large = None
        self.tell()
        return end

    def _begin_turn(self) -> None:
        """Wait until no other worker has a large document, from its reading to its writing."""
        with self._turn_lock:  # a thread that reads ahead may ask too
            if self._turn is None:
                turn = TurnLock(self.worker.layout)
                turn.acquire()
                self._turn, self.worker.has_turn = turn, True

    def _end_turn(self) -> None:
        with self._turn_lock:
            turn, self._turn = self._turn, None
            self.worker.has_turn = False
        if turn is not None:
            turn.release()

    @property
    def unknown(self) -> UnknownFacts | None:
        """What the tokenizer does not know of the text; None where it knows everything."""
        has_unknown = self.counts["unknown_ids"] or self.counts["lost_bytes"]
        return self._unknown_facts() if has_unknown else None

    def require_as_it_was(self, each: ForgottenUnit, end: UnitEnd) -> None:
        """SourceError where rows were left out that may not be those that were forgotten."""
        unit, wanted = self.unit, each.unit
        members = tuple(member.path for member in unit.file.members)
        is_same = (wanted.path, wanted.index, wanted.members) == (
            unit.file.path,
            unit.index,
            members,
        )
        if is_same and each.source.digest not in ("", end.digest):
            self.abort()
            raise SourceError(
                f"{unit.file.title} changed since rows of it were forgotten: which they are now is"
                " not known",
                hint="remove them from the file, and say so: --forgotten removed",
            )

    def tell(self) -> None:
        """Report what was done so far."""
        self._told_at = time.monotonic()
        name = unit_name(self.unit.file.path, index=self.unit.index)
        done = (self.counts[each] for each in ("input_bytes", "documents", "tokens", "rejected"))
        self.report(ProgressReport(name, *done))

    def _timed_batches(self, source: Source) -> Generator[RowBatch]:
        """The unit's batches; what the source did not spend on reading, it spent on parsing."""
        batches, clock = iter(source.read(self.unit)), self.encoding.clock
        while True:
            began, had_read = time.perf_counter(), source.read_seconds
            batch = next(batches, None)
            reading = source.read_seconds - had_read
            clock["read"] += reading
            clock["parse"] += time.perf_counter() - began - reading
            if batch is None:
                return
            yield batch

    def _take(self, batch: RowBatch) -> None:
        counts = self.counts
        texts, rows, rejects = batch.texts, batch.rows, batch.rejects
        if self.row_limit is not None and counts["rows"] + batch.num_rows > self.row_limit:
            kept = int(np.searchsorted(rows, self.row_limit))
            texts, rows = TextBatch(texts.data, texts.offsets[: kept + 1]), rows[:kept]
            rejects = tuple(reject for reject in rejects if reject.row < self.row_limit)
        left_out, undecided = batch.left_out, batch.undecided
        if self.row_limit is not None:
            left_out, undecided = (each[each < self.row_limit] for each in (left_out, undecided))
        counts["rows"] += batch.num_rows
        counts["input_bytes"] += batch.num_bytes
        counts["skipped"] += batch.num_rows - len(rows) - len(rejects) - len(left_out)
        counts["filtered"] += len(left_out)
        counts["undecided"] += len(undecided)
        self.largest_row_bytes = max(self.largest_row_bytes, batch.largest_row_bytes)
        made = self.worker.encoder.encode(texts, rows, self.encoding)
        self.largest_row_bytes = max(self.largest_row_bytes, self.encoding.largest_bytes)
        places = [-1] * len(batch.rows) if batch.places is None else batch.places
        at = np.searchsorted(batch.rows, [reject.row for reject in made.rejects])
        rejects += tuple(
            reject._replace(offset=None if places[place] < 0 else int(places[place]))
            for place, reject in zip(at, made.rejects, strict=True)
        )
        if rejects and batch.files:
            counts_in_file = self.worker.settings.source.in_order
            origins = [batch.file_of(reject.row) for reject in rejects]
            rejects = tuple(
                reject._replace(path=path, row_in_file=row if counts_in_file else None)
                for reject, (path, row) in zip(rejects, origins, strict=True)
            )
        if rejects:
            # By row, or the file of rejects would tell how the unit was cut into batches.
            rejects = tuple(sorted(rejects, key=lambda reject: reject.row))
            self._count_rejects(rejects)
            self.writes.submit(self.writer.rejects, rejects)
        self.worker.look_at_breaks(made.texts)
        counts["text_bytes"] += int(made.sizes.sum())
        if made.lost is not None:
            counts["lost_characters"] += int(made.lost.characters.sum())
            counts["lost_bytes"] += int(made.lost.num_bytes.sum())
        if len(made.rows):
            gone = self._forgotten_rows(batch)
            self.writes.submit(self._write, made.texts, made.tokens, made.rows, gone)

    def _forgotten_rows(self, batch: RowBatch) -> Ints:
        """Rows of the unit that were forgotten; of a group, of the files that have rows here."""
        own = [self.forgotten.get("", np.zeros(0, np.int64))]
        own += [first + self.forgotten[p] for first, p in batch.files if p in self.forgotten]
        return np.concatenate(own)

    def _write(
        self, texts: TextBatch, tokens: TokenBatch, rows: NDArray[np.int64], gone: Ints
    ) -> None:
        counts, identity = self.counts, self.worker.settings.identity
        finder = self.worker.encoder.unknown
        unknown_id = None if finder is None else finder.unknown.id
        vocab_size, val = identity.tokenizer.vocab_size, self.worker.settings.options.val
        if len(tokens.ids) and (largest := int(tokens.ids.max())) >= vocab_size:
            # Narrowing would turn it into another, valid id.
            raise AssertionError(f"id {largest} of a vocabulary of {vocab_size}")
        filled = tokens.lengths > 0
        counts["empty"] += int(len(filled) - np.count_nonzero(filled))
        is_gone = filled & np.isin(rows, gone)
        filled &= ~is_gone
        told = self.unit.file.split or TRAIN
        chosen: dict[str | None, NDArray[np.bool_]] = {told: filled}
        if val > 0 and told == TRAIN:
            held_out = in_validation(texts, val)
            chosen = {TRAIN: filled & ~held_out, VAL: filled & held_out}
        chosen[None] = is_gone
        for split, is_chosen in chosen.items():
            documents = np.flatnonzero(is_chosen)
            if not len(documents):
                continue
            frame = functools.partial(
                encode.frame_documents, offsets=tokens.offsets, documents=documents
            )
            left, scratch = self.worker.encoder.frame_left, self.worker.scratch
            ids, lengths = frame(tokens.ids, dtype=identity.dtype, frame=left, scratch=scratch)
            if split is None:
                counts["forgotten"] += len(documents)
                counts["forgotten_tokens"] += len(ids)
                continue
            mask, of_mask = None, self.worker.mask_scratch
            if tokens.mask is not None:
                # Rows with a mask are framed where it is made.
                mask, _ = frame(tokens.mask, dtype=np.dtype(np.uint8), scratch=of_mask)
            of_rows, limit = rows[documents], self.worker.encoder.shape.piece_tokens
            if self.worker.encoder.shape.has_pairs:
                from tokenmill.supervised.pairs import side_lengths

                assert mask is not None
                counts["split_rows"] += len(lengths)
                counts["pieces"] += 2 * len(lengths)
                lengths, of_rows = side_lengths(mask, lengths), np.repeat(of_rows, 2)
            if limit is not None and lengths.max() > limit:
                lengths, pieces = encode.cut_lengths(lengths, limit)
                of_rows = np.repeat(of_rows, pieces)
                counts["split_rows"] += int(np.count_nonzero(pieces > 1))
                counts["pieces"] += int(pieces[pieces > 1].sum())
            self.writer.append(split, ids, lengths=lengths, rows=of_rows, mask=mask)
            counts["documents"] += len(lengths)
            counts["tokens"] += len(ids)
            if unknown_id is not None:
                counts["unknown_ids"] += int(np.count_nonzero(ids == unknown_id))

    def _on_failure(self, reason: str) -> None:
        """A row on which the reference fails: too many of them end the build."""
        self._failures += 1
        used = self.counts["rows"] - self.counts["skipped"]
        if self._failures > max(_MOST_FAILURES, self.worker.settings.options.max_rejects * used):
            # Each costs as long as the package cares to try: not to be gone through to the end.
            raise TokenizerError(
                f"{self.worker.engine.reference.name} fails on text after text with this "
                f"tokenizer, {self._failures} so far in one unit: {reason}",
                hint="look at the patterns in the tokenizer: one that goes back and forth over a "
                "text fails on long runs; or accept the loss with --max-rejects 1",
            )

    def _count_rejects(self, rejects: tuple[Reject, ...]) -> None:
        self.counts["rejected"] += len(rejects)
        shown = self.first_rejects
        kinds = {reject[1:3] for reject in shown}
        for reject in rejects if len(shown) < _SHOWN_REJECTS else ():
            if len(shown) < _SHOWN_REJECTS and reject[1:3] not in kinds:
                shown.append(reject)
                kinds.add(reject[1:3])
        known = self.smallest_too_large_bytes
        sizes = [reject.size for reject in rejects if reject.size is not None]
        self.smallest_too_large_bytes = min(
            sizes + ([] if known is None else [known]), default=None
        )

    def _check_early(self) -> None:
        """Refuse the unit as soon as no number of good rows could get it below the threshold."""
        unit, counts, end = self.unit, self.counts, self._end()
        if not unit.file.traits.in_bytes or end is None:
            return
        # A row takes a byte at least.
        left = max(0, end - unit.start - counts["input_bytes"])
        most = counts["rows"] - counts["skipped"] + left
        if self.row_limit is not None:
            most = min(most, self.row_limit)
        if left and counts["rejected"] > self._most_rejects(most):
            self._check_rejects(None)

    def _end(self) -> int | None:
        """Where the unit ends, in bytes of a file that is read by them; None if nobody knows."""
        unit = self.unit
        if unit.end is None and unit.file.compression is None:
            return unit.file.size
        return unit.end

    def _stands_for(self) -> int:
        """How many units this one is in place of, of an input that is not small."""
        if not self._is_small():
            return 1
        file, least, end = self.unit.file, self.worker.settings.source.least_unit_bytes, self._end()
        if file.traits.in_bytes and not file.members and end is not None:  # the last may be short
            least = min(least, max(1, end - self.unit.start))
        return max(1, self._usual_bytes() // least)

    def _is_small(self) -> bool:
        """Whether the input is, so that all of it is looked at in the end."""
        source = self.worker.settings.source
        return source.unit_bytes is None and source.least_unit_bytes < SMALLEST_UNIT_BYTES

    def _usual_bytes(self) -> int:
        """Text of what a unit of a small input stands for, about."""
        file = self.unit.file
        return SMALLEST_UNIT_BYTES if file.members else min(SMALLEST_UNIT_BYTES, text_size(file))

    def _most_rejects(self, rows: int) -> float:
        """What so many rows may lose: a unit of a small input stands for a larger one."""
        return self.worker.settings.options.max_rejects * rows * self._stands_for()

    def _check_unknown_early(self) -> None:
        """The same of text that the tokenizer does not know: no other text could make it little."""
        unit, counts, end = self.unit, self.counts, self._end()
        # Text is no longer than its file, but where it is rendered: that is checked at the end.
        is_plain = unit.file.traits.in_bytes and self.worker.encoder.shaper is None
        if counts["lost_bytes"] and is_plain and end is not None:
            self._check_unknown(max(0, end - unit.start - counts["input_bytes"]))

    def _check_unknown(self, left: int | None) -> None:
        """Refuse a unit with too much unknown text; `left` bytes of it are not yet seen."""
        counts, options, unit = self.counts, self.worker.settings.options, self.unit
        lost, text = counts["lost_bytes"], counts["text_bytes"]
        text_of_all = self._stands_for() * (text + (left or 0))
        if self._is_small():
            text_of_all = max(text_of_all, self._usual_bytes())
        if lost <= options.max_unknown * text_of_all:
            return
        begun = "" if left is None else f"the first {format_size(counts['input_bytes'])} of "
        what = f"of {begun}{unit.title}"
        told = Counts.of(
            text_bytes=text, lost_bytes=lost, lost_characters=counts["lost_characters"]
        )
        raise refuse_unknown(self._unknown_facts(), told, what, options.max_unknown)

    def _unknown_facts(self) -> UnknownFacts:
        finder = self.worker.encoder.unknown
        assert finder is not None
        unknown = finder.unknown
        if self.counts["forgotten"]:  # examples may be of what was forgotten
            return UnknownFacts.of(unknown.token, unknown.id, {})
        return UnknownFacts.of(unknown.token, unknown.id, self.encoding.unknown_text)

    def _check_rejects(self, end: UnitEnd | None) -> None:
        unit, rejected = self.unit, self.counts["rejected"]
        max_rejects = self.worker.settings.options.max_rejects
        used = self.counts["rows"] - self.counts["skipped"]
        if rejected <= self._most_rejects(used):
            return
        # Only the lines before the first unit are known to be none, and blank ones are no rows.
        tells_lines = unit.file.traits.rows_are_lines and unit.index == 0
        tells_lines = tells_lines and end is not None and end.num_lines == self.counts["rows"]
        examples = "; ".join(_describe(each, unit, tells_lines) for each in self.first_rejects)
        hint = self._room_hint()
        at_fault, shaper = "--text-field", self.worker.encoder.shaper
        is_missing = self.first_rejects[0].reason is RejectReason.MISSING_FIELD
        if shaper is not None:
            at_fault = shaper.naming_options if is_missing else "the options of --format"
        elif is_missing:
            at_fault += " (for chats, and questions with answers, --format)"
        raise TooManyRejectsError(
            f"{rejected:,} of {'' if end else 'the first '}{used:,} rows in "
            f"{unit.title} were rejected, more than the threshold of "
            f"{max_rejects:.2%}; so many bad rows usually mean a wrong "
            f"option or a damaged file; the first: {examples}",
            hint=hint
            + (
                f"look at those rows in the input, then correct {at_fault} or the "
                f"input, or accept the loss with --max-rejects {enough_share(rejected, used)}"
            ),
        )

    def _room_hint(self) -> str:
        """What would do for rows that are too large, where the first is one."""
        settings, sizes = self.worker.settings, [each.size for each in self.first_rejects]
        if self.first_rejects[0].reason is not RejectReason.TOO_LARGE or None in sizes:
            return ""
        most = max(size for size in sizes if size is not None)
        if settings.source.fields:
            most *= encode.LONG_FACTOR
        hint = f"allow larger rows with --memory {plan.budget_for_document(most)}, "
        file = self.unit.file
        if any(each.format == "text" for each in file.members or (file,)):
            hint += "cut the files into documents with --separator, such as --separator '\\n\\n', "
        return hint + "or "


def _rows_of(unit: Unit, forgotten: Iterable[ForgottenUnit]) -> dict[str, Ints]:
    """The rows of a unit that were forgotten: of a group by the file and the row in it."""
    found: dict[str, list[int]] = {}
    for each in forgotten:
        rows, own = numbers_of_runs(each.rows).tolist(), each.unit
        if own.path == unit.file.path and not own.members:
            found.setdefault("", []).extend(rows if own.index == unit.index else ())
            continue
        # It was in a group, or is in one now: then files are read whole, before and now.
        for row in rows:
            path, in_file = each.file_of(row) if own.members else (own.path, row)
            if path == unit.file.path:
                path = "" if (unit.start, unit.end) == (0, None) else path
            found.setdefault(path, []).append(in_file)
    return {path: np.array(rows, np.int64) for path, rows in found.items()}


def split_batch(batch: RowBatch, most_bytes: int) -> Iterator[RowBatch]:
    """The batch as consecutive ones of at most `most_bytes` of text, or of one document."""
    left, lowest = batch.num_bytes, -1.0
    for first, last in cut_ranges(batch.texts.offsets, most_bytes):
        is_end = last == len(batch.texts)
        # Rejects are between rows with text: each goes with the part before whose end it is.
        highest = math.inf if is_end else int(batch.rows[last])
        rejects = tuple(reject for reject in batch.rejects if lowest < reject.row < highest)
        left_out, undecided = (
            rows[(rows > lowest) & (rows < highest)] for rows in (batch.left_out, batch.undecided)
        )
        texts = TextBatch(batch.texts.data, batch.texts.offsets[first : last + 1])
        num_bytes = left if is_end else texts.num_bytes
        yield dataclasses.replace(
            batch,
            texts=texts,
            rows=batch.rows[first:last],
            rejects=rejects,
            left_out=left_out,
            undecided=undecided,
            num_rows=len(texts) + len(rejects) + len(left_out),
            num_bytes=num_bytes,
            places=None if batch.places is None else batch.places[first:last],
        )
        left, lowest = left - num_bytes, highest
    if not len(batch.texts):
        yield batch


def _describe(reject: Reject, unit: Unit, tells_lines: bool) -> str:
    row = reject.row if reject.row_in_file is None else reject.row_in_file
    place = f"row {row}" if reject.offset is None else f"byte {reject.offset:,}"
    if tells_lines:
        place = f"line {reject.row + 1:,}"
    file = reject.path or unit.file.path
    return f"{reject.reason} at {place} of {file!r}: {reject.detail}"


def refuse_unknown(
    unknown: UnknownFacts, counts: Counts, what: str, most: float
) -> UnknownTextError:
    """The error for text of which the tokenizer does not know enough."""
    lost, text = counts.lost_bytes, counts.text_bytes
    became = "was left out" if unknown.id is None else f"became {unknown.token!r}"
    characters = words.count(counts.lost_characters, "character")
    return UnknownTextError(
        f"{words.small_share(lost, text)} of the text {what}, {characters}, is unknown to this "
        f"tokenizer and {became}, more than the threshold of {most:.2%}; a model learns nothing "
        f"from it; most often: {words.examples(unknown.examples)}",
        hint="use a tokenizer that knows every text (byte-level, or with byte fallback) or one "
        "trained on text like this, or accept the loss with --max-unknown "
        f"{enough_share(lost, text)}",
    )


def enough_share(part: int, whole: int) -> str:
    """The smallest round share of a whole that lets so much of it go."""
    digits = 2
    while 2 * part * 10**digits < whole:
        digits += 1
    share = -(-part * 10**digits // whole)
    if share / 10**digits * whole < part:  # 0.29 of 100 is a little less than 29
        share += 1
    return f"{share / 10**digits:.{digits}f}"


# -------------------------------------------------------------------------------------------------
# The worker: loads the engine once, then turns one task after the other into units.
#
# A stream that several workers share is decompressed by one of them, on a thread beside its own
# units. It copies the records of one unit after the other into files in the store's tmp/, so many
# at a time, and each becomes a task for whoever is free. The copy saves time and decides nothing:
# where there is none, the worker that has the unit decompresses the stream up to it.

_POLL_SECONDS = 0.01
_LOOKED_AT_BYTES, _LOOKED_AT_BREAKS, _AROUND_BREAK = 1 << 18, 16, 24


def _size(path: str | Path) -> int | None:
    with suppress(OSError):
        return os.stat(path).st_size  # noqa: PTH116
    return None


def _needed(copies: list[Path], *, most: int) -> list[Path]:
    """Those of the copies whose units are not committed; waits until they are no more than that."""
    while len(copies) > most:
        copies = [path for path in copies if _size(path)]
        if len(copies) > most:
            time.sleep(_POLL_SECONDS)
    return copies


@dataclass(kw_only=True, slots=True)
class WorkerStart:
    """What makes a worker in its process.

    `store` is the folder in which the build works, `url` where the store is if that folder only
    mirrors it, `corner` the folder in the store's tmp/ for this run alone, and `token` names the
    build that has the store's lock. `tokenizer` is the copy in the store, as the driver described
    it.
    """

    settings: plan.BuildSettings
    store: str
    url: str | None
    corner: str
    token: str
    tokenizer: TokenizerInfo
    # What workers share that are forked from the process in which it was prepared.
    encoder: encode.RowEncoder | None = None
    # Whether what its engine makes may be used; waits until that is known. None where it may.
    is_proved: Callable[[], bool] | None = None

    def prepare(self) -> None:
        """Load the engine, of the files that the driver has put in place.

        Engines that were loaded ahead are compared while the first units are being encoded.
        """

        def prove_later(agree: Callable[[], bool]) -> None:
            self.is_proved = answer_apart(agree)

        layout = StoreLayout(Path(self.store))
        self.encoder = self.load_encoder(layout, prove_later)
        # What answers here answers each worker anew.
        getattr(self.encoder.engine.reference, "hang_up", lambda: None)()

    def load_encoder(
        self,
        layout: StoreLayout,
        prove_later: Callable[[Callable[[], bool]], None] | None = None,
    ) -> encode.RowEncoder:
        files = {name: layout.tokenizer / name for name in self.tokenizer.files}
        # A worker on another machine downloads them first.
        layout.upstream.download(list(files.values()))
        tokenizer = dataclasses.replace(self.tokenizer, files=files)
        identity, choice = self.settings.identity, self.settings.options.engine
        # Rows of several fields are never cut.
        source = self.settings.source
        whole = source.max_document_bytes // (1 if source.fields else encode.LONG_FACTOR)
        return encode.load_encoder(
            tokenizer, identity, choice=choice, whole_bytes=whole, prove_later=prove_later
        )

    def __call__(self) -> BuildWorker:
        return BuildWorker(self)


class BuildWorker:
    """Builds units until there are no more tasks."""

    def __init__(self, start: WorkerStart) -> None:
        settings, token = start.settings, start.token
        self.settings = settings
        self.layout = join_layout(start.store, url=start.url, token=token, corner=start.corner)
        self._lock = WorkerLock(self.layout, token=token)
        self._lock.acquire()
        self._start = start
        self._use(start.encoder or start.load_encoder(self.layout))
        self.scratch, self.mask_scratch = encode.Scratch(), encode.Scratch()
        self.write_thread = ThreadPoolExecutor(1, "tokenmill-write")
        self._committer = ThreadPoolExecutor(1, "tokenmill-commit")
        self._copier = ThreadPoolExecutor(1, "tokenmill-copy")
        self._is_copying = False
        self._pending: Future[None] | None = None
        self._source: Source | None = None
        self._file: SourceFile | None = None
        self._kept_free = 0  # what a reader may take at any moment
        # Text whose line breaks are lost; "" where they are not, None before one was looked at.
        self._lost_breaks: str | None = None
        kind = self.engine.info.kind
        if self.encoder.unknown is None and kind is not TokenizerKind.SENTENCEPIECE:
            self._lost_breaks = ""  # a tokenizer of bytes has one for line breaks too
        self.has_turn = False  # at a large document
        self._process = psutil.Process()
        # What is alive now stays alive: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        self._unlimit: Callable[[], None] = lambda: None
        if not settings.options.serial:  # else this process is the user's own
            self._unlimit = plan.limit_memory(settings.memory.hard_bytes)

    def _use(self, encoder: encode.RowEncoder) -> None:
        self.encoder, self.engine = encoder, encoder.engine

    def _is_proved(self) -> bool:
        return self._start.is_proved is None or self._start.is_proved()

    def ready(self) -> EngineReport:
        names = self.engine.name, self.engine.reference.name
        return EngineReport(*names, self.engine.refusal, self._start.is_proved is None)

    def work(self, task: plan.Task, report: Report) -> Future[None] | None:
        """Build the units of the task; done when the last of them is committed."""
        if task.ahead is not None:
            return self._copier.submit(self._copy_units, task, task.ahead, report)
        try:
            with self._reading(task) as source:
                for unit in task.units(source, plan_units(task.file, self.settings.source)):
                    self._build(source, unit, task, report)
        except BaseException as error:
            # The driver ends everything when it hears of this; wait for the unit before.
            if self._pending is not None:
                wait([self._pending])
            self._explain(error, task.file)
            raise
        return self._pending

    def _explain(self, error: BaseException, file: SourceFile) -> None:
        """Raise what is to be told instead of an error that is about memory."""
        if isinstance(error, MemoryError):
            raise self._out_of_memory(file) from None
        if isinstance(error, MemoryBudgetError) and error.short_bytes is not None:
            enough = plan.budget_with(self.settings.memory, error.short_bytes)
            error.hint = f"allow more with --memory {enough}{self._or_fewer()}"

    def close(self) -> None:
        self._copier.shutdown(wait=True)
        self._committer.shutdown(wait=True)
        self.write_thread.shutdown(wait=True)
        if self._source is not None:
            self._source.close()
        self._lock.release()
        self.layout.upstream.close()
        self._unlimit()

    def mind_memory(self) -> None:
        """Have the engine drop its caches where this process has come to the end of its share."""
        room = self.settings.source.room_bytes if self._is_copying else self._kept_free
        limit = self.settings.memory.worker_bytes - room
        if self._process.memory_info().rss > limit:
            self.engine.recycle()
            plan.release_free_memory()

    def look_at_breaks(self, texts: TextBatch) -> None:
        """See once whether a line break of the text is there when its ids are decoded."""
        if self._lost_breaks is not None or not texts.num_bytes:
            return
        data, first = texts.data[texts.offsets[0] : texts.offsets[-1]], int(texts.offsets[0])
        places = np.flatnonzero(data[:_LOOKED_AT_BYTES] == ord("\n"))[:_LOOKED_AT_BREAKS]
        for place in (places + first).tolist():
            at = int(np.searchsorted(texts.offsets, place, side="right")) - 1
            low, high = texts.offsets[at : at + 2].tolist()
            near = slice(max(low, place - _AROUND_BREAK), min(high, place + _AROUND_BREAK))
            text = texts.data[near].tobytes().decode(errors="ignore").strip()
            if "\n" not in text:
                continue
            with suppress(UnencodableError):
                ids = self.engine.reference.encode(TextBatch.from_texts([text])).ids
                decoded = self.engine.reference.decode(ids)
                is_lost = decoded.count("\n") < text.count("\n")
                self._lost_breaks = text if is_lost else ""
                return

    def _out_of_memory(self, file: SourceFile) -> MemoryBudgetError:
        budget = self.settings.memory.budget
        return MemoryBudgetError(
            f"a worker came to the end of its share of the memory, {format_size(budget)} in all, "
            f"while it worked on {file.title}: something in that file takes far more than its size",
            hint=f"allow more with --memory {-(-2 * budget // 10**8) * 100}MB{self._or_fewer()}, "
            "or leave the file out",
        )

    def _or_fewer(self) -> str:
        return " or fewer --workers" if self.settings.memory.workers > 1 else ""

    def _copy_units(self, task: plan.Task, ahead: int, report: Report) -> None:
        """Decompress a stream once for all workers, and tell of each unit when there is a copy.

        Whoever takes the place of a worker that was killed goes through the stream again, and finds
        the copies that were made.
        """
        from tokenmill.sources.lines import RecordSource

        folder = self.layout.tmp / f"{unit_prefix(task.file.path)}-copies"
        copies: list[Path] = []
        self._is_copying = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with closing(RecordSource(task.file, self.settings.source)) as source:
                for unit in task.units(source, plan_units(task.file, self.settings.source)):
                    path, staged = folder / str(unit.index), folder / "staged"
                    copies = _needed(copies, most=ahead - 1)
                    is_there = path.exists()
                    copy = source.copy(unit, os.devnull if is_there else str(staged))
                    if copy is not None and not is_there:
                        staged.rename(path)
                    if copy is not None:
                        copies.append(path)
                        copy = dataclasses.replace(copy, path=str(path))
                    limits = {k: rows for k, rows in task.row_limits.items() if k == unit.index}
                    found = plan.Task(
                        file=task.file,
                        first=unit.index,
                        row_limits=limits,
                        copy=copy,
                        forgotten=task.forgotten,
                        place=task.place,
                    )
                    report(FoundTask(unit_name(task.file.path, index=unit.index), found))
        except BaseException as error:
            _needed(copies, most=0)  # the units before the one that cannot be read are built
            self._explain(error, task.file)
            raise
        finally:
            self._is_copying = False

    @contextmanager
    def _reading(self, task: plan.Task) -> Iterator[Source]:
        """What the units of the task are read from: the copy that was made, or the file."""
        copy = task.copy
        # A worker that was killed may have committed the unit, and then have dropped its copy.
        if copy is None or _size(copy.path) != copy.num_bytes:
            yield self._open(task.file)
            return
        from tokenmill.sources.lines import CopySource

        self._kept_free = 0
        with closing(CopySource(task.file, self.settings.source, copy)) as source:
            yield source

    def _open(self, file: SourceFile) -> Source:
        """The file's source; it stays open, since the next task is mostly of the same file."""
        if self._source is None or self._file != file:
            if self._source is not None:
                self._source.close()
                self._source = None
            # A line or a record is held once, as part of a batch.
            is_plain = file.traits.has_records and file.compression is None
            self._kept_free = 0 if is_plain else self.settings.source.room_bytes
            self._source = open_source(file, self.settings.source)
            self._file = file
        return self._source

    def _build(self, source: Source, unit: Unit, task: plan.Task, report: Report) -> None:
        row_limit = task.row_limits.get(unit.index)
        begin = functools.partial(
            UnitPass,
            worker=self,
            unit=unit,
            row_limit=row_limit,
            report=report,
            forgotten=_rows_of(unit, task.forgotten),
        )
        # Nothing to disagree with where the reference is the engine.
        made, differs = begin(by_reference=self.engine.fast is None), False
        try:
            end = made.run(source)
        except BaseException as error:
            differs = isinstance(error, encode.EngineDisagreesError)
            if not differs and self._is_proved():
                raise
        if not self._is_proved():
            # Nothing of what the engine made is used, nor what went wrong with it.
            made.abort()
            self._start.is_proved = None
            self._use(self._start.load_encoder(self.layout))
            report(self.ready())
            self._build(source, unit, task, report)
            return
        if differs:
            found, made = made.encoding, begin(by_reference=True)
            made.tell()  # it begins again
            end = made.run(source)
            made.encoding.checked_documents = found.checked_documents
            made.encoding.checked_bytes = found.checked_bytes
            made.encoding.mismatches = 1
        # At most one unit is being committed; an error of the one before is raised here.
        if self._pending is not None:
            made.encoding.clock.timed("wait", self._pending.result)
        for each in task.forgotten:
            made.require_as_it_was(each, end)
        self._pending = self._committer.submit(self._commit, made, end, task.copy)

    def _commit(self, made: UnitPass, end: UnitEnd, copy: UnitCopy | None) -> None:
        file, encoding, reference = made.unit.file, made.encoding, self.engine.reference
        used = reference if encoding.by_reference else self.engine.engine
        try:
            made.writes.finish()
            start = time.perf_counter()
            if made.counts["forgotten"] and not made.counts["documents"]:
                end = dataclasses.replace(end, digest="")  # it would be of forgotten texts alone
            engine = EngineFacts(
                name=used.name,
                version=used.version,
                reference=reference.name,
                reference_version=reference.version,
                checked_documents=encoding.checked_documents,
                mismatches=encoding.mismatches,
                redone=used is not self.engine.engine,
                routed_documents=encoding.routed_documents,
            )
            receipt = made.writer.commit(
                source=SourceFacts(size=file.size, version=file.version, **dataclasses.asdict(end)),
                config=self.settings.identity.fingerprint,
                counts=Counts.of(**made.counts),
                bounds=Bounds(
                    largest_row_bytes=made.largest_row_bytes,
                    smallest_too_large_bytes=made.smallest_too_large_bytes,
                ),
                engine=engine,
                unknown=made.unknown,
            )
        except BaseException as error:
            made.abort()
            self._explain(error, file)
            raise
        if copy is not None:
            # Nobody needs it any more; that there was one is still seen.
            with suppress(OSError):
                os.truncate(copy.path, 0)
        encoding.clock["write"] += time.perf_counter() - start
        what = receipt.unit.name, os.getpid(), receipt.counts, engine, dict(encoding.clock)
        broken = self._lost_breaks or None
        made.report(UnitReport(*what, encoding.checked_bytes, lost_breaks=broken))
