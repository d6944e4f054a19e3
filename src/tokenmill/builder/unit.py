"""Builds one unit: rows in, framed ids out, and a receipt's worth of facts.

    this thread                                         writer thread
    read, parse  ->  select  ->  encode, check    ->    frame, narrow, hash, write

The outcome is a function of the unit and the configuration. Batches, threads and the engine's speed
leave no trace in it: the sample that is checked is chosen by the text, and if it disagrees with the
reference engine the whole unit is read and encoded again by the reference.
"""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from tokenmill.builder.memory import BATCH_FACTOR, LARGE_DOCUMENT_FACTOR
from tokenmill.engines.base import UnencodableError
from tokenmill.engines.parity import Sample
from tokenmill.errors import TokenizerError, TooManyRejectsError
from tokenmill.files import is_remote
from tokenmill.records import Reject, RejectReason, RowBatch, TextBatch, TokenBatch
from tokenmill.store.layout import TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.options import RowShape
    from tokenmill.sources.base import Source, Unit, UnitEnd
    from tokenmill.store.write import UnitWriter
    from tokenmill.supervised.shaper import Shaper


# -------------------------------------------------------------------------------------------------
# Puts documents back to back as a shard holds them: BOS, ids, EOS, in the shard's width.
#
# A mask goes the same way. A BOS that is put in front does not count: nothing comes before it that
# could predict it. An EOS that is put behind counts if the token in front of it does: it is the
# end of what the model is to say, or of what it is told.
#
# One pass over the ids narrows and places them. Copying slice by slice is fastest for documents of
# more than about a hundred tokens; shorter ones go through a mask, whose cost does not grow with
# their number.

_SHORT_TOKENS = 96


class Scratch:
    """An array that is used again: a fresh one of megabytes costs a page fault per 4 KB of it."""

    def __init__(self) -> None:
        self._array: NDArray[Any] = np.empty(0, np.uint8)

    def take(self, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        num_bytes = length * dtype.itemsize
        if len(self._array) < num_bytes:
            self._array = np.empty(num_bytes + num_bytes // 4, np.uint8)
        return self._array[:num_bytes].view(dtype)


def frame_documents(
    tokens: TokenBatch,
    *,
    documents: NDArray[np.int64] | None,
    dtype: np.dtype[Any],
    bos_id: int | None,
    eos_id: int | None,
    scratch: Scratch,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Ids of the chosen documents (None: all), framed, and the length of each.

    The ids are valid until the scratch is used again.
    """
    column = _Column(tokens.ids, tokens.offsets, documents)
    return _frame(column, dtype=dtype, first=bos_id, last=eos_id, scratch=scratch)


def frame_mask(
    tokens: TokenBatch,
    *,
    documents: NDArray[np.int64] | None,
    has_bos: bool,
    has_eos: bool,
    scratch: Scratch,
) -> NDArray[np.uint8] | None:
    """What of the chosen documents counts, framed as they are; none of them may be empty.

    None where there is no mask. Valid until the scratch is used again.
    """
    if tokens.mask is None:
        return None
    framed, lengths = _frame(
        _Column(tokens.mask, tokens.offsets, documents),
        dtype=np.dtype(np.uint8),
        first=0 if has_bos else None,
        last=0 if has_eos else None,
        scratch=scratch,
    )
    if has_eos:
        ends = np.cumsum(lengths)
        framed[ends - 1] = framed[ends - 2]
    return framed


class _Column:
    """Values of documents back to back, and which of the documents are wanted."""

    def __init__(
        self,
        values: NDArray[Any],
        offsets: NDArray[np.int64],
        documents: NDArray[np.int64] | None,
    ) -> None:
        self.values = values
        self.offsets = offsets
        self.lengths = np.diff(offsets)
        self.documents = documents
        if documents is not None and len(documents) == len(self.lengths):
            self.documents = None
        self.chosen = self.lengths if self.documents is None else self.lengths[self.documents]
        """Lengths of those that are wanted."""


def _frame(
    column: _Column, *, dtype: np.dtype[Any], first: int | None, last: int | None, scratch: Scratch
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    extra = (first is not None) + (last is not None)
    framed_lengths = column.chosen + extra
    if extra == 0 and column.documents is None:
        return column.values.astype(dtype), framed_lengths
    ends = np.cumsum(framed_lengths)
    framed = scratch.take(int(ends[-1]) if len(ends) else 0, dtype)
    starts = ends - framed_lengths
    inner = starts + (first is not None)
    if len(column.chosen) and column.chosen.mean() < _SHORT_TOKENS:
        _place_masked(framed, column, inner=inner)
    else:
        _place_slices(framed, column, inner=inner)
    if first is not None:
        framed[starts] = first
    if last is not None:
        framed[ends - 1] = last
    return framed, framed_lengths


def _place_slices(framed: NDArray[Any], column: _Column, *, inner: NDArray[np.int64]) -> None:
    documents, values = column.documents, column.values
    sources = column.offsets[:-1] if documents is None else column.offsets[documents]
    for source, target, length in zip(
        sources.tolist(), inner.tolist(), column.chosen.tolist(), strict=True
    ):
        framed[target : target + length] = values[source : source + length]


def _place_masked(framed: NDArray[Any], column: _Column, *, inner: NDArray[np.int64]) -> None:
    # +1 where a document's values start, -1 behind them: the running sum is 1 on values, 0
    # elsewhere.
    steps = np.zeros(len(framed) + 1, np.int8)
    np.add.at(steps, inner, 1)
    np.add.at(steps, inner + column.chosen, -1)
    holds_values = np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)
    if column.documents is None:
        framed[holds_values] = column.values
        return
    kept = np.zeros(len(column.lengths), np.bool_)
    kept[column.documents] = True
    framed[holds_values] = column.values[np.repeat(kept, column.lengths)]


# -------------------------------------------------------------------------------------------------
# Rows by their length: what is over the longest length allowed is cut off, rejected or cut up.
#
#   | rows, framed -> fit -> rows to keep -> cut_lengths -> documents
#
# Lengths are those of documents as a store holds them, BOS and EOS counted. Cutting up changes no
# token: the pieces of a row, one behind the other, are the row. So only the first of them begins
# with the BOS, and only the last ends with the EOS.


@dataclass(frozen=True, slots=True)
class Fitted:
    """The rows of a batch that are kept, framed, none of them cut up yet."""

    tokens: TokenBatch
    kept: NDArray[np.int64]
    """Their places in the batch."""
    reasons: Mapping[int, tuple[RejectReason, str]]
    """Why the others are not kept, by place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """Measures rows."""

    shape: RowShape
    bos_id: int | None
    eos_id: int | None

    @classmethod
    def of(
        cls, shape: RowShape | None, *, bos_id: int | None, eos_id: int | None
    ) -> Fitting | None:
        """None where rows are taken as they are, and framed where they are written."""
        if shape is None or not (shape.has_mask or shape.max_length):
            return None
        return cls(shape=shape, bos_id=bos_id, eos_id=eos_id)

    def fit(self, tokens: TokenBatch) -> Fitted:
        """The rows that are kept; those with masks are framed already, others are framed here."""
        if not self.shape.has_mask:
            tokens = _framed(tokens, bos_id=self.bos_id, eos_id=self.eos_id)
        limit = self.shape.max_length
        reasons: dict[int, tuple[RejectReason, str]] = {}
        if limit is not None and self.shape.too_long == "reject":
            for place in np.flatnonzero(tokens.lengths > limit).tolist():
                what = f"{int(tokens.lengths[place]):,} tokens; the limit is {limit:,}"
                reasons[place] = (RejectReason.TOO_LONG, what)
        elif limit is not None and self.shape.too_long == "truncate":
            tokens = _truncated(tokens, limit)
        if tokens.mask is not None:
            for place in _without_target(tokens, tokens.mask, limit):
                reasons.setdefault(place, (RejectReason.NOTHING_TO_TRAIN, _untrained(limit)))
        return _without(tokens, reasons)


def cut_lengths(
    lengths: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths of all pieces of rows, none over the limit, and how many pieces each row has."""
    counts = -(-lengths // limit)
    ends = np.cumsum(counts)
    pieces = np.full(int(ends[-1]) if len(ends) else 0, limit, np.int64)
    pieces[ends - 1] = lengths - (counts - 1) * limit
    return pieces, counts


def _framed(tokens: TokenBatch, *, bos_id: int | None, eos_id: int | None) -> TokenBatch:
    """The rows with their border tokens; those without a token get none."""
    filled = np.flatnonzero(tokens.lengths)
    lengths = np.zeros(len(tokens), np.int64)
    ids, lengths[filled] = frame_documents(
        tokens,
        documents=filled,
        dtype=np.dtype(np.uint32),
        bos_id=bos_id,
        eos_id=eos_id,
        scratch=Scratch(),
    )
    return TokenBatch(ids, _offsets(lengths))


def _truncated(tokens: TokenBatch, limit: int) -> TokenBatch:
    lengths = tokens.lengths
    if not (lengths > limit).any():
        return tokens
    kept = np.arange(len(tokens.ids)) - np.repeat(tokens.offsets[:-1], lengths) < limit
    mask = None if tokens.mask is None else tokens.mask[kept]
    return TokenBatch(tokens.ids[kept], _offsets(np.minimum(lengths, limit)), mask)


def _without_target(tokens: TokenBatch, mask: NDArray[np.uint8], limit: int | None) -> list[int]:
    """Rows of which no token can be a label that counts: the first of a document never is one."""
    lengths = tokens.lengths
    labels = mask.astype(np.int64)
    if limit is None:
        labels[tokens.offsets[:-1][lengths > 0]] = 0
    else:
        places = np.arange(len(mask)) - np.repeat(tokens.offsets[:-1], lengths)
        labels[places % limit == 0] = 0
    counted = np.concatenate(([0], np.cumsum(labels)))
    found = counted[tokens.offsets[1:]] - counted[tokens.offsets[:-1]]
    rows: list[int] = np.flatnonzero((found == 0) & (lengths > 0)).tolist()
    return rows


def _untrained(limit: int | None) -> str:
    within = "" if limit is None else f" within {limit:,} tokens"
    return f"no token of it would be trained on{within}"


def _without(tokens: TokenBatch, reasons: dict[int, tuple[RejectReason, str]]) -> Fitted:
    if not reasons:
        return Fitted(tokens, np.arange(len(tokens)), reasons)
    is_kept = np.ones(len(tokens), bool)
    is_kept[list(reasons)] = False
    inside = np.repeat(is_kept, tokens.lengths)
    mask = None if tokens.mask is None else tokens.mask[inside]
    batch = TokenBatch(tokens.ids[inside], _offsets(tokens.lengths[is_kept]), mask)
    return Fitted(batch, np.flatnonzero(is_kept), reasons)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths)))


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


class StageClock:
    """Seconds spent in each stage; a stage is timed by one thread at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def timed(self, stage: str, call: Callable[..., T], *arguments: Any) -> T:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.add(stage, time.perf_counter() - start)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRules:
    """What a unit's documents become; the same for all units of a build."""

    vocab_size: int
    dtype: np.dtype[Any]
    bos_id: int | None
    eos_id: int | None
    """Both are None where `fitting` frames rows, or where their masks are made."""
    fitting: Fitting | None = None
    """What becomes of rows by their length; None takes them as they are."""
    val_fraction: float
    reject_special: bool
    max_reject_fraction: float
    batch_bytes: int
    """What a worker's memory has room for; more holds a large document and waits for its turn."""


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
    checked_documents: int = 0
    checked_bytes: int = 0
    mismatches: int = 0
    routed_documents: int = 0
    largest_row_bytes: int = 0
    smallest_too_large_bytes: int | None = None
    first_rejects: list[Reject] = field(default_factory=list)


class EngineDisagreesError(Exception):
    """The sample of a unit differs from the reference; caught where the unit is done again."""

    def __init__(self, checked_documents: int, checked_bytes: int) -> None:
        super().__init__(checked_documents, checked_bytes)
        self.checked_documents = checked_documents
        """Up to and including the one that differs."""
        self.checked_bytes = checked_bytes


class _Made(NamedTuple):
    """What rows became."""

    tokens: TokenBatch
    rows: NDArray[np.int64]
    texts: TextBatch
    """What their split follows from; none where there is only one."""
    sizes: NDArray[np.int64]
    """Bytes of the text of each."""
    rejects: tuple[Reject, ...]


@dataclass(kw_only=True, slots=True)
class UnitPass:
    """One pass over a unit with one engine, into one writer."""

    rules: UnitRules
    engine: CheckedEngine
    use_reference: bool
    writer: UnitWriter
    clock: StageClock
    on_batch: Callable[[UnitTally], None]
    """Called after each batch: progress is reported and memory watched from there."""
    large_turn: Callable[[], Any]
    """Makes a context that one worker at a time can hold, for large documents."""
    scratch: Scratch
    mask_scratch: Scratch = field(default_factory=Scratch)
    shaper: Shaper | None = None
    """Makes documents of rows that are more than one text."""
    tally: UnitTally = field(default_factory=UnitTally)
    sample: Sample = field(default_factory=Sample)
    _failures: int = 0

    def run(self, source: Source, unit: Unit, *, row_limit: int | None) -> UnitEnd:
        """Read, encode and write all rows of the unit; the writer is left uncommitted."""
        batches = self._timed_batches(source, unit)
        if is_remote(unit.file.path):
            batches = read_ahead(batches, clock=self.clock)
        try:
            with WriteBehind(self.clock) as behind:
                for batch in self._portions(batches):
                    if batch.texts.num_bytes > self._most_bytes():
                        with self.large_turn():
                            self._take(batch, unit, row_limit, behind)
                    else:
                        self._take(batch, unit, row_limit, behind)
                    self._check_early(unit, row_limit)
                    self.on_batch(self.tally)
        finally:
            batches.close()
        end = source.end()
        self._check_rejects(unit, end)
        return end

    def _most_bytes(self) -> int:
        """Text that a worker may encode without asking; the reference needs more memory for it."""
        if not self.use_reference:
            return 2 * self.rules.batch_bytes
        return max(self.rules.batch_bytes * BATCH_FACTOR // LARGE_DOCUMENT_FACTOR, REFERENCE_BYTES)

    def _portions(self, batches: Iterator[RowBatch]) -> Iterator[RowBatch]:
        """The batches; in small parts for the reference, so that one can see it move."""
        if not self.use_reference:
            return batches
        return (part for batch in batches for part in split_batch(batch, REFERENCE_BYTES))

    def _timed_batches(self, source: Source, unit: Unit) -> Generator[RowBatch]:
        """The unit's batches; what the source did not spend on reading, it spent on parsing."""
        batches = iter(source.read(unit))
        while True:
            began, had_read = time.perf_counter(), source.read_seconds
            batch = next(batches, None)
            reading = source.read_seconds - had_read
            self.clock.add("read", reading)
            self.clock.add("parse", time.perf_counter() - began - reading)
            if batch is None:
                return
            yield batch

    def _take(
        self, batch: RowBatch, unit: Unit, row_limit: int | None, behind: WriteBehind
    ) -> None:
        tally = self.tally
        texts, rows, rejects = _within_limit(batch, first_row=tally.rows, row_limit=row_limit)
        tally.rows += batch.num_rows
        tally.input_bytes += batch.num_bytes
        tally.largest_row_bytes = max(tally.largest_row_bytes, batch.largest_row_bytes)
        tally.skipped += batch.num_rows - len(rows) - len(rejects)
        if self.shaper is None:
            made = self._plain(texts, rows)
        else:
            made = self._shaped(self.shaper, texts, rows)
        if self.rules.fitting is not None:
            made = self._fitted(self.rules.fitting, made)
        found = (_placed(reject, batch, unit) for reject in made.rejects)
        self._put_rejects((*rejects, *found), behind)
        tally.text_bytes += int(made.sizes.sum())
        if len(made.rows):
            behind.submit(self._write, made.texts, made.tokens, made.rows)

    def _plain(self, texts: TextBatch, rows: NDArray[np.int64]) -> _Made:
        found: tuple[Reject, ...] = ()
        if self.rules.reject_special and len(texts):
            texts, rows, found = self._without_special(texts, rows)
        while True:
            try:
                tokens = self._encode(texts) if len(texts) else TokenBatch.from_lists([])
                return _Made(tokens, rows, texts, np.diff(texts.offsets), found)
            except UnencodableError as error:
                failed = error.documents
            found += tuple(self._unencodable(int(rows[at]), why) for at, why in failed.items())
            kept = np.array([at for at in range(len(rows)) if at not in failed], np.int64)
            texts, rows = texts.take(kept), rows[kept]

    def _unencodable(self, row: int, reason: str) -> Reject:
        """The reject of a row on which the reference fails."""
        self._failures += 1
        if self._failures > max(
            _MOST_FAILURES, self.rules.max_reject_fraction * (self.tally.rows - self.tally.skipped)
        ):
            # Each costs as long as the package cares to try: not to be gone through to the end.
            raise TokenizerError(
                f"{self.engine.reference.name} fails on text after text with this tokenizer, "
                f"{self._failures} so far in one unit: {reason}",
                hint="look at the patterns in the tokenizer: one that goes back and forth over a "
                "text fails on long runs; or accept the loss with --max-rejects 1",
            )
        return Reject(row, RejectReason.CANNOT_ENCODE, reason)

    def _shaped(self, shaper: Shaper, texts: TextBatch, rows: NDArray[np.int64]) -> _Made:
        tally, sample = self.tally, copy.deepcopy(self.sample)
        before = tally.checked_documents, tally.checked_bytes, tally.routed_documents
        try:
            return self._shaped_together(shaper, texts, rows)
        except UnencodableError as error:
            # Not the whole tally: the writer's thread counts in it too.
            tally.checked_documents, tally.checked_bytes, tally.routed_documents = before
            self.sample = sample
            if len(rows) == 1:
                reject = self._unencodable(int(rows[0]), error.documents.popitem()[1])
                none = np.empty(0, np.int64)
                empty = TokenBatch(none.astype(np.uint32), np.zeros(1, np.int64))
                return _Made(empty, none, TextBatch.from_texts([]), none, (reject,))
        # Which row a stretch of text is of is the shaper's own affair.
        alone = [TextBatch(texts.data, texts.offsets[at : at + 2]) for at in range(len(rows))]
        return _joined(
            [self._shaped(shaper, text, rows[at : at + 1]) for at, text in enumerate(alone)]
        )

    def _shaped_together(self, shaper: Shaper, texts: TextBatch, rows: NDArray[np.int64]) -> _Made:
        shaped = self.clock.timed("render", shaper.shape, texts, rows)
        tokens = shaper.encode(shaped, self._encode)
        joined = self.clock.timed("render", shaper.assemble, shaped, tokens)
        identities = shaped.texts if self.rules.val_fraction > 0 else ()
        sizes = np.array([len(text.encode()) for text in shaped.texts], np.int64)
        return _Made(joined, shaped.rows, TextBatch.from_texts(identities), sizes, shaped.rejects)

    def _fitted(self, fitting: Fitting, made: _Made) -> _Made:
        fitted = fitting.fit(made.tokens)
        rejects = tuple(
            Reject(int(made.rows[place]), reason, detail)
            for place, (reason, detail) in fitted.reasons.items()
        )
        texts = made.texts.take(fitted.kept) if rejects and len(made.texts) else made.texts
        rows, sizes = made.rows[fitted.kept], made.sizes[fitted.kept]
        return _Made(fitted.tokens, rows, texts, sizes, (*made.rejects, *rejects))

    def _put_rejects(self, rejects: tuple[Reject, ...], behind: WriteBehind) -> None:
        # By row, or the file of rejects would tell how the unit was cut into batches.
        rejects = tuple(sorted(rejects, key=lambda reject: reject.row))
        self._count_rejects(rejects)
        if rejects:
            behind.submit(self.writer.rejects, rejects)

    def _encode(self, texts: TextBatch) -> TokenBatch:
        if self.use_reference:
            return self.clock.timed("encode", self.engine.reference.encode, texts)
        routed = self.engine.routed_documents
        tokens = self.clock.timed("encode", self.engine.encode, texts)
        self.tally.routed_documents += self.engine.routed_documents - routed
        sample = self.clock.timed("check", self.engine.check_sample, texts, tokens, self.sample)
        self.tally.checked_documents += sample.num_documents
        self.tally.checked_bytes += sample.num_bytes
        self.tally.mismatches += len(sample.mismatches)
        if sample.mismatches:
            raise EngineDisagreesError(self.tally.checked_documents, self.tally.checked_bytes)
        return tokens

    def _write(self, texts: TextBatch, tokens: TokenBatch, rows: NDArray[np.int64]) -> None:
        tally = self.tally
        if len(tokens.ids) and (largest := int(tokens.ids.max())) >= self.rules.vocab_size:
            # Narrowing would turn it into another, valid id.
            raise AssertionError(f"id {largest} of a vocabulary of {self.rules.vocab_size}")
        filled = tokens.lengths > 0
        tally.empty += int(len(filled) - np.count_nonzero(filled))
        if self.rules.val_fraction > 0:
            held_out = in_validation(texts, self.rules.val_fraction)
            chosen = {TRAIN: filled & ~held_out, VAL: filled & held_out}
        else:
            chosen = {TRAIN: filled}
        for split, mask in chosen.items():
            documents = np.flatnonzero(mask)
            if not len(documents):
                continue
            ids, lengths = frame_documents(
                tokens,
                documents=documents,
                dtype=self.rules.dtype,
                bos_id=self.rules.bos_id,
                eos_id=self.rules.eos_id,
                scratch=self.scratch,
            )
            counts = frame_mask(
                tokens,
                documents=documents,
                has_bos=self.rules.bos_id is not None,
                has_eos=self.rules.eos_id is not None,
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
        fitting = self.rules.fitting
        limit = None if fitting is None else fitting.shape.piece_tokens
        if limit is None or lengths.max() <= limit:
            return lengths, rows
        lengths, counts = cut_lengths(lengths, limit)
        self.tally.split_rows += int(np.count_nonzero(counts > 1))
        self.tally.pieces += int(counts[counts > 1].sum())
        return lengths, np.repeat(rows, counts)

    def _without_special(
        self, texts: TextBatch, rows: NDArray[np.int64]
    ) -> tuple[TextBatch, NDArray[np.int64], tuple[Reject, ...]]:
        found = self.engine.find_special(texts)
        if not found.any():
            return texts, rows, ()
        rejects = tuple(
            Reject(
                row=int(row),
                reason=RejectReason.SPECIAL_TOKEN,
                detail="the text contains the string of a special token",
            )
            for row in rows[found]
        )
        kept = np.flatnonzero(~found)
        return texts.take(kept), rows[kept], rejects

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

    def _check_early(self, unit: Unit, row_limit: int | None) -> None:
        """Refuse the unit as soon as no number of good rows could bring it below the threshold."""
        end = unit.end
        if end is None and unit.file.compression is None:
            end = unit.file.size
        if not unit.file.traits.in_bytes or end is None:
            return
        # A row takes a byte at least.
        left = max(0, end - unit.start - self.tally.input_bytes)
        most = self.tally.rows - self.tally.skipped + left
        if row_limit is not None:
            most = min(most, row_limit)
        if left and self.tally.rejected > self.rules.max_reject_fraction * most:
            self._check_rejects(unit, None)

    def _check_rejects(self, unit: Unit, end: UnitEnd | None) -> None:
        used = self.tally.rows - self.tally.skipped
        if self.tally.rejected <= self.rules.max_reject_fraction * used:
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
            f"{self.rules.max_reject_fraction:.2%}; so many bad rows usually mean a wrong "
            f"option or a damaged file; the first: {examples}",
            hint=f"look at those rows in the input, then correct {self._options_at_fault()} or the "
            "input, or accept the loss with --max-rejects "
            f"{_enough_rejects(self.tally.rejected, used)}",
        )

    def _options_at_fault(self) -> str:
        if self.shaper is None:
            return "--text-field"
        is_missing = self.tally.first_rejects[0].reason is RejectReason.MISSING_FIELD
        return self.shaper.naming_options if is_missing else "the options of --format"


def _joined(made: list[_Made]) -> _Made:
    """What rows became, one after the other."""
    lengths = np.concatenate([each.tokens.lengths for each in made])
    masks = [each.tokens.mask for each in made if each.tokens.mask is not None]
    tokens = TokenBatch(
        np.concatenate([each.tokens.ids for each in made]),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.concatenate(masks) if masks else None,
    )
    return _Made(
        tokens,
        np.concatenate([each.rows for each in made]),
        TextBatch.from_texts(
            [each.texts.bytes_at(i) for each in made for i in range(len(each.texts))]
        ),
        np.concatenate([each.sizes for each in made]),
        tuple(reject for each in made for reject in each.rejects),
    )


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
