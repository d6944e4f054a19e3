"""Rows in, framed ids, rejects and counts out: one encoder for `build`, `plan` and `verify`.

    rows  ->  render (rows of several fields)  ->  encode, check  ->  fit to the longest length

The ids are a function of the rows and of who the store is. How rows were cut into batches leaves no
trace in them.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tokenmill.engines.base import SpecialTokens, UnencodableError, taken_from
from tokenmill.engines.load import files_of, load_engine, load_unproved
from tokenmill.engines.pieces import PieceCutter, encode_pieces, find_cutter
from tokenmill.engines.unknown import UnknownText
from tokenmill.options import RowShape
from tokenmill.records import Reject, RejectReason, TextBatch, TokenBatch, lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.engines.parity import CheckedEngine, Sample
    from tokenmill.engines.unknown import Lost
    from tokenmill.store.facts import StoreIdentity
    from tokenmill.store.format import Ints
    from tokenmill.supervised.shaper import Shaper

T = TypeVar("T")
Frame = tuple[int | None, int | None]  # BOS and EOS; None where there is none


# -------------------------------------------------------------------------------------------------
# Puts documents back to back as a shard holds them: BOS, ids, EOS, in the shard's width.
#
# A loss mask goes the same way, without BOS and EOS: its rows are framed where it is made.
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
    values: NDArray[Any],
    offsets: Ints,
    *,
    documents: Ints,
    dtype: np.dtype[Any],
    scratch: Scratch,
    frame: Frame = (None, None),
) -> tuple[NDArray[Any], Ints]:
    """Values of the chosen documents, framed, and the length of each.

    They are valid until the scratch is used again.
    """
    (bos_id, eos_id), whole = frame, np.diff(offsets)
    takes_all = len(documents) == len(whole)
    chosen = whole if takes_all else whole[documents]
    extra = (bos_id is not None) + (eos_id is not None)
    lengths = chosen + extra
    if extra == 0 and takes_all:
        return values.astype(dtype), lengths
    ends = np.cumsum(lengths)
    framed = scratch.take(int(ends[-1]) if len(ends) else 0, dtype)
    starts = ends - lengths
    inner = starts + (bos_id is not None)
    if not len(chosen) or chosen.mean() >= _SHORT_TOKENS:
        sources = offsets[documents].tolist()
        for source, target, length in zip(sources, inner.tolist(), chosen.tolist(), strict=True):
            framed[target : target + length] = values[source : source + length]
    else:
        # +1 where a document's values start, -1 after them: the running sum is 1 on values.
        steps = np.zeros(len(framed) + 1, np.int8)
        np.add.at(steps, inner, 1)
        np.add.at(steps, inner + chosen, -1)
        if not takes_all:
            kept = np.zeros(len(whole), np.bool_)
            kept[documents] = True
            values = values[np.repeat(kept, whole)]
        framed[np.cumsum(steps[:-1], dtype=np.int8).view(np.bool_)] = values
    if bos_id is not None:
        framed[starts] = bos_id
    if eos_id is not None:
        framed[ends - 1] = eos_id
    return framed, lengths


# -------------------------------------------------------------------------------------------------
# Rows by their length: what is over the longest length allowed is cut off, rejected or cut up.
#
# Lengths are those of documents as a store holds them, BOS and EOS counted. Cutting up changes no
# token: the pieces of a row, one after the other, are the row. So only the first of them begins
# with the BOS, and only the last ends with the EOS.


class Fitted(NamedTuple):
    """The rows of a batch that are kept, framed, none of them cut up yet."""

    tokens: TokenBatch
    kept: Ints  # their places in the batch
    reasons: Mapping[int, tuple[RejectReason, str]]  # why the others are not kept, by place


def fit_rows(shape: RowShape, tokens: TokenBatch, frame: Frame) -> Fitted:
    """The rows that are kept; those with masks are framed already, others are framed here."""
    if shape.has_pairs:
        from tokenmill.supervised.pairs import fit_sides

        return Fitted(*fit_sides(shape, tokens))
    if not shape.has_mask:
        tokens = _framed(tokens, frame)
    limit = shape.max_length
    reasons: dict[int, tuple[RejectReason, str]] = {}
    if limit is not None and shape.too_long == "reject":
        for place in np.flatnonzero(tokens.lengths > limit).tolist():
            what = f"{int(tokens.lengths[place]):,} tokens; the limit is {limit:,}"
            reasons[place] = (RejectReason.TOO_LONG, what)
    elif limit is not None and shape.too_long == "truncate" and (tokens.lengths > limit).any():
        kept = _places(tokens) < limit
        mask = None if tokens.mask is None else tokens.mask[kept]
        tokens = TokenBatch(tokens.ids[kept], _offsets(np.minimum(tokens.lengths, limit)), mask)
    if tokens.mask is not None:
        within = "" if limit is None else f" within {limit:,} tokens"
        what = f"no token of it would be trained on{within}"
        # The first token of a document is never a label.
        places = _places(tokens)
        labels = np.where((places if limit is None else places % limit) == 0, 0, tokens.mask)
        counted = _offsets(labels)
        found = counted[tokens.offsets[1:]] - counted[tokens.offsets[:-1]]
        for place in np.flatnonzero((found == 0) & (tokens.lengths > 0)).tolist():
            reasons.setdefault(place, (RejectReason.NOTHING_TO_TRAIN, what))
    is_kept = np.ones(len(tokens), bool)
    if reasons:
        is_kept[list(reasons)] = False
        inside = np.repeat(is_kept, tokens.lengths)
        mask = None if tokens.mask is None else tokens.mask[inside]
        tokens = TokenBatch(tokens.ids[inside], _offsets(tokens.lengths[is_kept]), mask)
    return Fitted(tokens, np.flatnonzero(is_kept), reasons)


def cut_lengths(lengths: Ints, limit: int) -> tuple[Ints, Ints]:
    """Lengths of all pieces of rows, none over the limit, and how many pieces each row has."""
    counts = -(-lengths // limit)
    ends = np.cumsum(counts)
    pieces = np.full(int(ends[-1]) if len(ends) else 0, limit, np.int64)
    pieces[ends - 1] = lengths - (counts - 1) * limit
    return pieces, counts


def _framed(tokens: TokenBatch, frame: Frame) -> TokenBatch:
    """The rows with their boundary tokens; those without a token get none."""
    filled, dtype = np.flatnonzero(tokens.lengths), np.dtype(np.uint32)
    lengths = np.zeros(len(tokens), np.int64)
    ids, lengths[filled] = frame_documents(
        tokens.ids, tokens.offsets, documents=filled, dtype=dtype, frame=frame, scratch=Scratch()
    )
    return TokenBatch(ids, _offsets(lengths))


def _places(tokens: TokenBatch) -> Ints:
    """Of each token, its place in its document."""
    return np.arange(len(tokens.ids)) - np.repeat(tokens.offsets[:-1], tokens.lengths)


def _offsets(lengths: NDArray[Any]) -> Ints:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


class StageClock(defaultdict[str, float]):
    """Seconds spent in each stage; a stage is timed by one thread at a time."""

    def __init__(self) -> None:
        super().__init__(float)

    def timed(self, stage: str, call: Callable[..., T], *arguments: Any) -> T:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self[stage] += time.perf_counter() - start


# -------------------------------------------------------------------------------------------------
# The encoder. What it needs to know of a store is in the store's identity.


class EngineDisagreesError(Exception):
    """The sample of a unit differs from the reference; caught where the unit is done again."""


@dataclass(kw_only=True, slots=True)
class Encoding:
    """How the rows of one unit are encoded, and what their check has found so far."""

    by_reference: bool = False
    sample: Sample | None = None  # chooses what the reference encodes again; None checks nothing
    rejects_uncut: bool = True  # whether a document is rejected that is too large and cannot be cut
    between_pieces: Callable[[], None] = lambda: None  # called while a long document is encoded
    keeps_texts: bool = True  # whether anyone asks for the texts of rendered rows
    # Called for each row on which the reference fails; it may raise.
    on_failure: Callable[[str], None] = lambda _: None
    clock: StageClock = field(default_factory=StageClock)
    checked_documents: int = 0  # up to and including one that differs
    checked_bytes: int = 0
    mismatches: int = 0
    routed_documents: int = 0
    # Of the documents so far, the largest limit for documents that one of them needs.
    largest_bytes: int = 0
    # What the tokenizer does not know of them, and how often it is there.
    unknown_text: Counter[str] = field(default_factory=Counter)


class Made(NamedTuple):
    """What rows became."""

    tokens: TokenBatch
    rows: Ints
    texts: TextBatch  # what their split follows from; none where there is only one
    sizes: Ints  # bytes of the text of each
    rejects: tuple[Reject, ...]
    lost: Lost | None = None  # what of the text of each is unknown; None where nothing is


# A document that the tokenizer lets be cut may be so many times as large as one that is encoded
# whole. A reference takes 160 bytes for each byte of the latter; in pieces 8 are enough: two copies
# of the text, and ids that are there as they are found and as they are written.
LONG_FACTOR = 20
# Documents up to this size are taken under any budget.
LEAST_WHOLE_BYTES = 256 << 10
# Bytes of pieces that are encoded at a time: a fast engine may give all of them to the reference.
_AT_A_TIME = 256 << 10


class RowEncoder:
    """Makes documents of the rows of a store, by one engine.

    Documents of more than `whole_bytes` are encoded in pieces.
    """

    def __init__(self, engine: CheckedEngine, identity: StoreIdentity, *, whole_bytes: int) -> None:
        self.engine = engine
        self._whole_bytes = whole_bytes
        self.shape = RowShape.of_identity(identity.config) or RowShape()
        self._frame = identity.bos_id, identity.eos_id
        self.shaper: Shaper | None = None
        self._fits = self.shape.has_mask or self.shape.max_length is not None
        # BOS and EOS that rows still get; none where measuring them took these into account.
        self.frame_left: Frame = (None, None) if self._fits else self._frame
        self._reject_special = identity.special_tokens == "reject"
        self.unknown = UnknownText.of(engine.info, engine.reference)
        if self.shape.has_fields or self.shape.fim:
            from tokenmill.supervised.shaper import Shaper

            bos, eos = self._frame
            rejects = self._reject_special
            self.shaper = Shaper(self.shape, engine, bos=bos, eos=eos, reject_special=rejects)

    def encode(self, texts: TextBatch, rows: Ints, encoding: Encoding) -> Made:
        """The rows that can be used, and why the others cannot."""
        make = self._plain if self.shaper is None else self._shaped
        made = make(texts, rows, encoding)
        if not self._fits:
            return made._replace(lost=self._lost(made, encoding))
        fitted = fit_rows(self.shape, made.tokens, self._frame)
        lost = self._lost(made, encoding, among=fitted.kept)
        rejects = tuple(
            Reject(int(made.rows[place]), *why) for place, why in fitted.reasons.items()
        )
        texts = made.texts.take(fitted.kept) if rejects and len(made.texts) else made.texts
        rows, sizes = made.rows[fitted.kept], made.sizes[fitted.kept]
        return Made(fitted.tokens, rows, texts, sizes, (*made.rejects, *rejects), lost)

    def _lost(self, made: Made, encoding: Encoding, among: Ints | None = None) -> Lost | None:
        """What of rows is unknown, before any of them is cut off."""
        if self.unknown is None or not len(made.rows):
            return None
        find = functools.partial(self.unknown.find, among=among)
        found = encoding.unknown_text
        return encoding.clock.timed("encode", find, made.texts, made.tokens, found)

    def framed(self, made: Made) -> TokenBatch:
        """The rows as a store holds them, before any of them is cut up."""
        return made.tokens if self._fits else _framed(made.tokens, self._frame)

    def _plain(self, texts: TextBatch, rows: Ints, encoding: Encoding) -> Made:
        found: tuple[Reject, ...] = ()
        if self._reject_special and len(texts):
            is_special = self.engine.find_special(texts)
            why = "the text contains the string of a special token"
            found = tuple(
                Reject(int(row), RejectReason.SPECIAL_TOKEN, why) for row in rows[is_special]
            )
            if found:
                kept = np.flatnonzero(~is_special)
                texts, rows = texts.take(kept), rows[kept]
        if uncut := self._uncut(texts, rows, encoding):
            found += tuple(uncut.values())
            kept = np.array([at for at in range(len(rows)) if at not in uncut], np.int64)
            texts, rows = texts.take(kept), rows[kept]
        while True:
            try:
                tokens = self._ids(texts, encoding) if len(texts) else TokenBatch.from_lists([])
                return Made(tokens, rows, texts, np.diff(texts.offsets), found)
            except UnencodableError as error:
                failed = error.documents
            found += tuple(_unencodable(int(rows[at]), failed[at], encoding) for at in failed)
            kept = np.array([at for at in range(len(rows)) if at not in failed], np.int64)
            texts, rows = texts.take(kept), rows[kept]

    def _uncut(self, texts: TextBatch, rows: Ints, encoding: Encoding) -> dict[int, Reject]:
        """Documents that would have to be cut and cannot be, by their places."""
        rejects: dict[int, Reject] = {}
        lengths, limit = texts.lengths, self._whole_bytes
        for at in np.flatnonzero(lengths > LEAST_WHOLE_BYTES).tolist():
            size = largest = int(lengths[at])
            if size > limit:
                largest = max(self._pieces(texts, at))
            need = max(size, LONG_FACTOR * largest)
            if largest <= limit or not encoding.rejects_uncut:
                encoding.largest_bytes = max(encoding.largest_bytes, need)
                continue
            why = f"{size:,} bytes, {largest:,} of them without a place where this tokenizer lets "
            why += f"a document be cut; the limit for those is {limit:,}"
            rejects[at] = Reject(int(rows[at]), RejectReason.TOO_LARGE, why, size=need)
        return rejects

    @lazy
    def _cutter(self) -> PieceCutter | None:
        """Asked for when a document is long: to find it, the tokenizer's files are read again."""
        return find_cutter(files_of(self.engine.info))

    def _pieces(self, texts: TextBatch, at: int) -> list[int]:
        """Bytes of the pieces of a document."""
        data = texts.data[texts.offsets[at] : texts.offsets[at + 1]]
        return [len(data)] if self._cutter is None else self._cutter.sizes(data.data)

    def _shaped(self, texts: TextBatch, rows: Ints, encoding: Encoding) -> Made:
        before = copy.deepcopy(encoding.sample)
        counts = encoding.checked_documents, encoding.checked_bytes, encoding.routed_documents
        try:
            return self._shaped_together(texts, rows, encoding)
        except UnencodableError:
            encoding.sample = before
            encoding.checked_documents, encoding.checked_bytes, encoding.routed_documents = counts
        # Which row a piece of text is of is the shaper's own affair: each row is tried alone.
        kept, found = list[int](), list[Reject]()
        for at, row in enumerate(rows.tolist()):
            alone = TextBatch(texts.data, texts.offsets[at : at + 2])
            try:
                trial = Encoding(by_reference=encoding.by_reference)
                self._shaped_together(alone, rows[at : at + 1], trial)
                kept.append(at)
            except UnencodableError as error:
                found.append(_unencodable(row, error.documents.popitem()[1], encoding))
        made = self._shaped_together(texts.take(kept), rows[kept], encoding)
        return made._replace(rejects=(*made.rejects, *found))

    def _shaped_together(self, texts: TextBatch, rows: Ints, encoding: Encoding) -> Made:
        assert self.shaper is not None
        timed = encoding.clock.timed
        shaped = timed("render", self.shaper.shape, texts, rows)
        tokens = self.shaper.encode(shaped, lambda pieces: self._ids(pieces, encoding))
        joined = timed("render", self.shaper.assemble, shaped, tokens)
        keeps_texts = encoding.keeps_texts or self.unknown is not None
        kept = shaped.texts if keeps_texts else TextBatch.from_texts([])
        return Made(joined, shaped.rows, kept, shaped.texts.lengths, shaped.rejects)

    def _ids(self, texts: TextBatch, encoding: Encoding) -> TokenBatch:
        timed = encoding.clock.timed
        if encoding.by_reference:
            return timed("encode", self._encode, texts, self.engine.reference.encode, encoding)
        routed = self.engine.routed_documents
        tokens = timed("encode", self._encode, texts, self.engine.encode, encoding)
        encoding.routed_documents += min(self.engine.routed_documents - routed, len(texts))
        if encoding.sample is not None:
            checked = timed("check", self.engine.check_sample, texts, tokens, encoding.sample)
            encoding.checked_documents += checked.num_documents
            encoding.checked_bytes += checked.num_bytes
            encoding.mismatches += len(checked.mismatches)
            if checked.mismatches:
                raise EngineDisagreesError
        return tokens

    def _encode(
        self,
        texts: TextBatch,
        encode: Callable[[TextBatch], TokenBatch],
        encoding: Encoding,
    ) -> TokenBatch:
        """Ids of documents, those that are long in pieces."""
        is_long = texts.lengths > self._whole_bytes
        if not is_long.any() or self._cutter is None:
            return encode(texts)
        others = np.flatnonzero(~is_long)
        with taken_from(others):
            rest = iter(encode(texts.take(others)) if len(others) else ())

        def encode_some(pieces: TextBatch) -> TokenBatch:
            encoding.between_pieces()
            return encode(pieces)

        found = []
        for at in range(len(texts)):
            if not is_long[at]:
                found.append(next(rest))
                continue
            data = texts.data[texts.offsets[at] : texts.offsets[at + 1]]
            sizes, left_out = self._pieces(texts, at), self._cutter.left_out
            try:
                some = functools.partial(encode_pieces, data, sizes, left_out=left_out)
                found.append(some(encode=encode_some, most_bytes=_AT_A_TIME))
            except UnencodableError as error:
                why = next(iter(error.documents.values()))
                raise UnencodableError({at: why}, engine=error.engine) from error
        if len(found) == 1:
            return TokenBatch(found[0], np.array([0, len(found[0])]))
        return TokenBatch.from_lists(found)


def load_encoder(
    tokenizer: TokenizerInfo,
    identity: StoreIdentity,
    *,
    choice: str,
    whole_bytes: int,
    prove_later: Callable[[Callable[[], bool]], None] | None = None,
) -> RowEncoder:
    """The encoder of a store, by an engine that is loaded for it.

    `prove_later` is given what tells whether the engines that were loaded ahead agree, if any were.
    """
    policy = SpecialTokens(identity.special_tokens)
    engine = None
    if prove_later is not None:
        ahead = load_unproved(tokenizer, choice=choice, special_tokens=policy)
        if ahead is not None:
            engine, agree = ahead
            prove_later(agree)
    if engine is None:
        engine = load_engine(tokenizer, choice=choice, special_tokens=policy)
    return RowEncoder(engine, identity, whole_bytes=whole_bytes)


def _unencodable(row: int, reason: str, encoding: Encoding) -> Reject:
    encoding.on_failure(reason)
    return Reject(row, RejectReason.CANNOT_ENCODE, reason)
