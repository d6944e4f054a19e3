"""What a store holds, for a person who wants to look before training on it.

    Store -> inspect -> Inspection -> the command line draws it, --json prints it

Joins the store with the tokenizer that it carries. Lengths are exact, from every index. Token
counts read at most `COUNTED_TOKENS` ids, spread evenly over the store: `tokens_counted` tells how
many. What cannot be had back from ids is seen on a few documents, those with which units begin: to
read others, all before them would have to be read.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.builder.verify import source_texts
from tokenmill.errors import SourceError, UsageError
from tokenmill.files import is_remote
from tokenmill.markup import Told
from tokenmill.options import InspectOptions, RowShape, with_options
from tokenmill.sources.discovery import source_file
from tokenmill.store.documents import Documents, Group, Grouping
from tokenmill.store.facts import bytes_per_token
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine
    from tokenmill.store.facts import (
        BoundaryToken,
        Counts,
        EngineEntry,
        ForgottenReason,
        SourceEntry,
        SplitTotals,
        UnknownFacts,
    )
    from tokenmill.store.format import Ints
    from tokenmill.store.views import Gone
    from tokenmill.supervised.fim import Fim, FimParts, FimTokens

PERCENTILES = (1, 10, 50, 90, 99)
TOP_TOKENS = 20
COUNTED_TOKENS = 200_000_000  # a few seconds of counting
CHUNK_TOKENS = 1 << 22
# Longer documents are kept one by one; for the others a table of counts is exact and small.
LONG_TOKENS = 1 << 20
FIM_DOCUMENTS = 100_000  # looked at for how many were reordered, spread evenly


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBin:
    """Documents with low <= tokens < high."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens per document, the tokens at its boundaries counted."""

    shortest: int
    longest: int
    mean: float
    percentiles: Mapping[int, int]
    histogram: tuple[LengthBin, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCount:
    id: int
    text: str
    count: int
    share: float  # of the tokens that were counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token of a document, as it is there."""

    id: int
    text: str
    counts: bool | None  # whether it counts for the loss; None where the store has no masks


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskTotals:
    """What the masks of the split that is looked at say."""

    tokens: int
    counted: int  # tokens that count for the loss
    silent: int  # documents of which no token counts: nothing is learned from them


@dataclass(frozen=True, kw_only=True, slots=True)
class FimTotals:
    """Documents that were reordered for fill-in-the-middle, among those that were looked at."""

    style: str
    documents: int
    reordered: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LossExample:
    """The first place where a document is not what its source says."""

    path: str
    row: int
    source: str  # what is there, and a little around it
    decoded: str  # what its ids say


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What came of documents that were decoded and compared with their source."""

    documents: int
    same: int
    lost: Mapping[str, int]  # what was lost, such as line breaks -> in how many documents
    example: LossExample | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentView:
    """One document, its tokens and where it came from."""

    number: int
    split: str
    tokens: tuple[Token, ...]
    text: str
    path: str
    row: int  # of its file, counted from 0
    line: int | None
    piece: int  # which document of that row, counted from 0, where the row became several
    pieces: int
    fim: FimParts | None = None  # of one that was reordered for fill-in-the-middle
    answer: str | None = None  # "chosen" or "rejected", of a document of a pair


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotTotals:
    """What a store was before it grew."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewOf:
    """Of a view: its store, and what is not in it."""

    store: str
    documents: int  # of the store
    tokens: int
    gone: tuple[Gone, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection(Told):
    """Everything that `tokenmill inspect` shows.

    `snapshots` are what the store was before it grew, oldest first; `forgotten` says how many
    documents were taken out of it, time after time, and why.

    `split` is the one looked at; None means all of them. `totals` is always the whole store.
    `rejects` counts rows by reason. `lengths` is None where there is no document, `mask` where the
    store has no masks, `recovery` where no text could be compared: sources that are gone, changed
    or in a bucket, rows of several fields, and reordered ones. `ids_seen` are the different ids
    among the `tokens_counted`. `columns` are annotations, `groups` those of the column that was
    asked for, the one with most tokens first.
    """

    store: str
    created_by: str
    split: str | None
    totals: Counts
    splits: Mapping[str, SplitTotals]
    dtype: str
    tokenizer_kind: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos: BoundaryToken | None
    bos: BoundaryToken | None
    special_tokens: str
    config: Mapping[str, object]
    engines: tuple[EngineEntry, ...]
    sources: tuple[SourceEntry, ...]
    rejects: Mapping[str, int]
    lengths: Lengths | None
    top_tokens: tuple[TokenCount, ...]
    tokens_counted: int
    ids_seen: int
    unknown: UnknownFacts | None = None
    mask: MaskTotals | None = None
    fim: FimTotals | None = None
    document: DocumentView | None = None
    recovery: Recovery | None = None
    view: ViewOf | None = None
    columns: tuple[str, ...] = ()
    groups: tuple[Group, ...] | None = None
    snapshots: tuple[SnapshotTotals, ...] = ()
    forgotten: tuple[ForgottenReason, ...] = ()

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text for each token; None where that is not known."""
        return bytes_per_token(self.totals, self.config)


@with_options(InspectOptions)
def inspect(asked: InspectOptions) -> Inspection:
    """Totals, lengths, frequent tokens and policies of a store; with `doc`, one document of it."""
    store, doc = Store(asked.path, split=asked.split, snapshot=asked.snapshot), asked.doc
    engine = store.reference
    identity = store.manifest.identity
    counts, mask = count_ids(store), None
    if store.has_mask:
        counted, silent = store.num_counted, store.num_silent
        mask = MaskTotals(tokens=store.num_tokens, counted=counted, silent=silent)
    return Inspection(
        store=str(store.path) if store.is_remote else str(asked.path),
        created_by=identity.created_by,
        split=asked.split,
        totals=store.manifest.totals,
        splits=store.manifest.splits,
        dtype=store.dtype.name,
        tokenizer_kind=identity.tokenizer.kind,
        tokenizer_fingerprint=identity.tokenizer.fingerprint,
        vocab_size=store.vocab_size,
        eos=identity.eos,
        bos=identity.bos,
        special_tokens=identity.special_tokens,
        config=identity.config,
        engines=store.manifest.engines,
        sources=store.manifest.sources,
        rejects=dict(store.reject_counts().most_common()),
        lengths=measure_lengths(
            store.map_shard(shard).index.lengths for shard in range(len(store.shards))
        ),
        top_tokens=_most_frequent(counts, engine=engine),
        tokens_counted=int(counts.sum()),
        ids_seen=int(np.count_nonzero(counts)),
        unknown=store.manifest.unknown,
        mask=mask,
        fim=_fim_totals(store),
        document=None if doc is None else _view_document(store, number=doc, engine=engine),
        recovery=None if doc is not None else compare_texts(store, most=asked.sample),
        view=_view_of(store),
        columns=tuple(Documents(store.of_split(None)).annotations),
        groups=None if asked.by is None else tuple(Grouping(store, asked.by).groups),
        snapshots=tuple(_snapshots(store)),
        forgotten=tuple(each for step in store.manifest.forgotten for each in step.reasons),
    )


def _view_of(store: Store) -> ViewOf | None:
    if store.view is None:
        return None
    base = store.base.of_split(None)
    return ViewOf(
        store=str(base.path),
        documents=base.num_documents,
        tokens=base.num_tokens,
        gone=store.view.facts.gone,
    )


def _snapshots(store: Store) -> Iterator[SnapshotTotals]:
    for each in store.snapshots():
        totals = store.files.at_snapshot(each.name).read_manifest().totals
        yield SnapshotTotals(name=each.name, documents=totals.documents, tokens=totals.tokens)


# -------------------------------------------------------------------------------------------------
# What normalization takes away.

_COMPARED_UNITS = 8
_COMPARED_TOKENS = 1 << 16  # of one document: longer ones are left out
_AROUND = 24  # characters before and after a difference that are shown
_SPACES = re.compile(r"[^\S\n\r]{2,}")


def compare_texts(store: Store, *, most: int) -> Recovery | None:
    """Decode documents with which units begin, and compare them with the text in their source.

    None where there is none to compare.
    """
    # As they stand there: what a manifest says may be new.
    config = store.manifest.identity.config
    has_fields = config.get("format", "text") != "text" or config.get("template") is not None
    if most < 1 or has_fields or config.get("import") is not None or config.get("fim"):
        return None
    shards = [shard for shard in store.shards if shard.documents]
    step = max(1, len(shards) // _COMPARED_UNITS)
    result, lost = _Compared(), Counter[str]()
    for shard in shards[::step][:_COMPARED_UNITS]:
        few = min(shard.documents, -(-most // _COMPARED_UNITS) if len(shards) > 1 else most)
        documents = range(shard.first_document, shard.first_document + few)
        for number, text in _texts_of(store, shard.unit, documents).items():
            _compare(store, number, text.decode(), result, lost)
    if not result.documents:
        return None
    return Recovery(
        documents=result.documents,
        same=result.same,
        lost=dict(lost.most_common()),
        example=result.example,
    )


@dataclass(slots=True)
class _Compared:
    documents: int = 0
    same: int = 0
    example: LossExample | None = None


def _texts_of(store: Store, unit: str, documents: range) -> dict[int, bytes]:
    """Text of documents that are one row each, and not cut off; none where it cannot be had."""
    receipt, config = store.receipt(unit), store.manifest.identity.config
    limit = config.get("max_length") if config.get("too_long") == "truncate" else None
    most = min(limit - 1, _COMPARED_TOKENS) if isinstance(limit, int) else _COMPARED_TOKENS
    chosen = [
        number
        for number in documents
        if len(store[number]) <= most and store.source(number).pieces == 1
    ]
    try:
        paths = receipt.unit.members or (receipt.unit.path,)
        if any(map(is_remote, paths)) or not chosen:
            return {}
        file = source_file(receipt.unit.path, members=receipt.unit.members)
        # What comes before would have to be decompressed.
        if file.compression is not None and receipt.unit.index:
            return {}
        return source_texts(store, receipt, chosen)
    except (SourceError, UsageError):
        return {}


def _compare(store: Store, number: int, text: str, result: _Compared, lost: Counter[str]) -> None:
    identity, ids = store.manifest.identity, store[number]
    if identity.eos_id is not None and len(ids) and ids[-1] == identity.eos_id:
        ids = ids[:-1]
    if identity.bos_id is not None and len(ids) and ids[0] == identity.bos_id:
        ids = ids[1:]
    unknown = store.manifest.unknown
    has_unknown = unknown is not None and unknown.id is not None and unknown.id in ids
    decoded = store.reference.decode(ids)
    result.documents += 1
    if decoded == text:
        result.same += 1
        return
    lost.update(losses(text, decoded, has_unknown=bool(has_unknown)))
    if result.example is None:
        if text.strip() != decoded.strip():  # else it is all that there is
            text, decoded = text.strip(), decoded.strip()
        pairs = enumerate(zip(text, decoded, strict=False))
        shorter = min(len(text), len(decoded))
        at = next((place for place, (one, other) in pairs if one != other), shorter)
        origin, here = store.source(number), slice(max(0, at - _AROUND), at + _AROUND)
        result.example = LossExample(
            path=origin.path, row=origin.row, source=text[here], decoded=decoded[here]
        )


def losses(text: str, decoded: str, *, has_unknown: bool = False) -> list[str]:
    """What of a text is not in what its ids say."""
    counts: dict[str, Callable[[str], int]] = {
        "line breaks": lambda given: given.count("\n") + given.count("\r"),
        "runs of spaces": lambda given: len(_SPACES.findall(given)),
        "space at the ends": lambda given: len(given) - len(given.strip()),
    }
    if not has_unknown:  # else they may be what is unknown
        counts["capital letters"] = lambda given: sum(map(str.isupper, given))
        counts["accents"] = lambda given: sum(
            unicodedata.combining(each) > 0 for each in unicodedata.normalize("NFD", given)
        )
        counts["wide and other forms of characters"] = lambda given: sum(map(_is_form, given))
    found = ["unknown characters"] if has_unknown else []
    found += [name for name, count in counts.items() if count(text) > count(decoded)]
    if not found:
        composed, spaced = (
            [change(each) for each in (text, decoded)] for change in (_composed, _without_spaces)
        )
        if composed[0] == composed[1]:
            return ["how accents are composed"]
        found.append("where spaces are" if spaced[0] == spaced[1] else "other characters")
    return found


def _is_form(character: str) -> bool:
    """Whether it is another form of characters, such as a wide letter or a ligature."""
    normal = unicodedata.normalize("NFC", character)
    is_other = unicodedata.normalize("NFKC", character) != normal
    return is_other and not character.isspace()


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _view_document(store: Store, *, number: int, engine: Engine) -> DocumentView:
    if not 0 <= number < len(store):
        where = repr(str(store.path)) if store.split is None else f"the split {store.split!r}"
        problem = f"there is no document {number:,}: {where} has {len(store):,}, counted from 0"
        hint = f"use a number from 0 to {len(store) - 1:,}" if len(store) else None
        raise UsageError(problem, hint=hint)
    source = store.source(number)
    shard, _ = store.locate(number)
    ids, mask = store[number], store.mask(number)
    counts = [None] * len(ids) if mask is None else [bool(value) for value in mask]
    return DocumentView(
        number=number,
        split=store.shards[shard].split,
        tokens=tuple(
            Token(id=one, text=token_text(engine, one), counts=does_count)
            for one, does_count in zip(ids.tolist(), counts, strict=True)
        ),
        text=engine.decode(ids),
        path=source.path,
        row=source.row,
        line=source.line,
        piece=source.piece,
        pieces=source.pieces,
        fim=_fim_parts(store, ids.tolist(), engine=engine),
        answer=("chosen", "rejected")[source.piece] if store.has_pairs else None,
    )


def _fim_of(store: Store) -> tuple[Fim, FimTokens] | None:
    identity = store.manifest.identity
    # Looked at first: other words of a manifest may be new.
    shape = RowShape.of_identity(identity.config) if identity.config.get("fim") else None
    if shape is None:
        return None
    from tokenmill.engines.base import SpecialTokens
    from tokenmill.engines.load import describe, find_tokenizer
    from tokenmill.supervised.fim import Fim, fim_tokens

    policy = SpecialTokens(identity.special_tokens)
    return Fim(shape), fim_tokens(describe(find_tokenizer(str(store.tokenizer_dir)), policy=policy))


def _fim_totals(store: Store) -> FimTotals | None:
    """How many documents begin as reordered ones do, of as many as are soon looked at."""
    found = _fim_of(store)
    if found is None:
        return None
    first, place = found[1].ids[0], int(store.manifest.identity.bos is not None)
    every = max(1, len(store) // FIM_DOCUMENTS)
    numbers = range(0, len(store), every)
    begin = (store[number][place : place + 1].tolist() for number in numbers)
    reordered = sum(ids == [first] for ids in begin)
    return FimTotals(style=found[1].style, documents=len(numbers), reordered=reordered)


def _fim_parts(store: Store, ids: list[int], *, engine: Engine) -> FimParts | None:
    found, identity = _fim_of(store), store.manifest.identity
    if found is None:
        return None
    from tokenmill.supervised.fim import parts_of

    eos, bos = (None if each is None else each.id for each in (identity.eos, identity.bos))
    start = int(bos is not None and ids[:1] == [bos])
    end = len(ids) - int(eos is not None and ids[-1:] == [eos])
    parts = parts_of(ids[start:end], found[1], found[0], engine.decode)
    if parts is None or not start:
        return parts
    moved = {name: (a + 1, b + 1) for name, (a, b) in parts.tokens.items()}
    return replace(parts, tokens=moved)


def measure_lengths(
    parts: Iterable[NDArray[np.int32]], *, long_tokens: int = LONG_TOKENS
) -> Lengths | None:
    """Facts of the lengths in all parts, exact, in memory that does not grow with their number."""
    short = np.zeros(long_tokens, np.int64)
    long: list[int] = []
    for lengths in parts:
        short += np.bincount(lengths[lengths < long_tokens], minlength=long_tokens)
        long += lengths[lengths >= long_tokens].tolist()
    present = np.flatnonzero(short)
    values = np.concatenate((present, np.sort(np.array(long, np.int64))))
    documents = np.concatenate((short[present], np.ones(len(long), np.int64)))
    if not len(values):
        return None
    ends = np.cumsum(documents)
    total = int(ends[-1])
    ranks = [min(total * p // 100, total - 1) for p in PERCENTILES]
    found = values[np.searchsorted(ends, ranks, side="right")].tolist()
    return Lengths(
        shortest=int(values[0]),
        longest=int(values[-1]),
        mean=float(values @ documents) / total,
        percentiles=dict(zip(PERCENTILES, found, strict=True)),
        histogram=tuple(_bins(values, documents)),
    )


def _bins(values: Ints, documents: Ints) -> Iterator[LengthBin]:
    """One bin for each power of two from the shortest to the longest, empty ones between too."""
    exponents = np.frexp(values.astype(np.float64))[1]
    for exponent in range(int(exponents[0]), int(exponents[-1]) + 1):
        inside = exponents == exponent
        low, high = 1 << (exponent - 1) if exponent else 0, 1 << exponent
        number, tokens = int(documents[inside].sum()), int(values[inside] @ documents[inside])
        yield LengthBin(low=low, high=high, documents=number, tokens=tokens)


def count_ids(
    store: Store, *, most_tokens: int = COUNTED_TOKENS, chunk_tokens: int = CHUNK_TOKENS
) -> Ints:
    """How often each id is in the store, from every n-th chunk where it is large."""
    every = max(1, -(-store.num_tokens // most_tokens))
    counts = np.zeros(store.vocab_size, np.int64)
    number = 0
    for position, shard in enumerate(store.shards):
        chunks = -(-shard.tokens // chunk_tokens)
        # A shard of which nothing is counted is not even opened.
        for chunk in range(-number % every, chunks, every):
            first = chunk * chunk_tokens
            ids = store.map_shard(position).tokens[first : first + chunk_tokens]
            counts += np.bincount(ids, minlength=len(counts))
        number += chunks
    return counts


def _most_frequent(counts: Ints, *, engine: Engine) -> tuple[TokenCount, ...]:
    total = int(counts.sum())
    largest = np.argsort(counts, kind="stable")[::-1][:TOP_TOKENS]
    found = []
    for token in largest[counts[largest] > 0].tolist():
        number, text = int(counts[token]), token_text(engine, token)
        found.append(TokenCount(id=token, text=text, count=number, share=number / total))
    return tuple(found)


def token_text(engine: Engine, token: int) -> str:
    """The text of one token; bytes that are no character by themselves as \\x escapes."""
    return engine.token_bytes(token).decode("utf-8", "backslashreplace")
