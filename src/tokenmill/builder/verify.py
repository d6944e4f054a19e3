"""The verb `verify`: is every byte of a store what it was, and are its ids the reference's?

The first question needs the store alone (`store/check.py`). For the second, documents are drawn at
random, their text is read again from the source files and encoded by the reference engine. A source
that is gone or has changed cannot answer; its documents are counted as unavailable, never as good.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.builder.encode import Encoding, RowEncoder
from tokenmill.builder.plan import default_budget, max_document_bytes
from tokenmill.builder.run import fields_of
from tokenmill.engines import REFERENCES
from tokenmill.engines.base import TokenizerKind
from tokenmill.engines.describe import describe
from tokenmill.engines.load import known_policy, load_engine
from tokenmill.engines.locate import CHAT_TEMPLATE, find_tokenizer
from tokenmill.engines.parity import ending_kinds
from tokenmill.errors import SourceError
from tokenmill.options import RowShape
from tokenmill.records import RejectReason, TextBatch, TokenBatch
from tokenmill.sources.base import SourceFile, SourceOptions, Unit, open_source
from tokenmill.sources.discovery import source_file
from tokenmill.store.check import CheckReport, Finding, check_store
from tokenmill.store.reader import Store
from tokenmill.supervised.templates import with_template

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from tokenmill.store.facts import Receipt


# -------------------------------------------------------------------------------------------------
# Rows of a store made anew, from what their source gives, by the reference engine alone.


class Remaker:
    """Makes rows as the store's build made them, before any of them was cut up."""

    def __init__(self, store: Store) -> None:
        identity = store.manifest.identity
        kind, policy = known_policy(identity.tokenizer.kind, identity.special_tokens)
        # The byte tokenizer has no files to be found.
        files = find_tokenizer(kind if kind is TokenizerKind.BYTES else str(store.tokenizer_dir))
        template = store.tokenizer_dir / CHAT_TEMPLATE
        if template.is_file():
            files = with_template(files, str(template))
        info = describe(files, policy=policy)
        engine = load_engine(info, choice=REFERENCES[kind], special_tokens=policy)
        self.reference = f"{engine.reference.name} {engine.reference.version}"
        self.token_bytes = engine.reference.token_bytes
        self._encoder = RowEncoder(engine, identity)
        self.shape = self._encoder.shape

    def remake(self, texts: TextBatch) -> tuple[TokenBatch, dict[int, str]]:
        """The rows, framed; without tokens if rejected. And those on which the reference fails."""
        made = self._encoder.encode(texts, np.arange(len(texts)), Encoding(by_reference=True))
        lengths = np.zeros(len(texts), np.int64)
        tokens = self._encoder.framed(made)
        lengths[made.rows] = tokens.lengths
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        failed = {
            each.row: each.detail
            for each in made.rejects
            if each.reason is RejectReason.CANNOT_ENCODE
        }
        return TokenBatch(tokens.ids, offsets, tokens.mask), failed


_MOST_UNITS = 16
"""A document is found by reading its unit, so the sample is drawn from a few units."""
_LOOKED_AT = 16
"""So many times as many documents as are drawn are looked at for how they end."""
_LAST_IDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What a verification found."""

    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    files: int
    bytes: int
    documents_reencoded: int
    documents_unavailable: int
    """Drawn, but their source is gone or has changed, or the reference fails on them."""
    mismatches: int
    """Documents whose ids are not the reference's."""
    reference: str | None
    seed: int

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(
    store: str | os.PathLike[str],
    *,
    sample: int = 100,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every byte of a store, and encode `sample` random documents again.

    All of a store at a URL is downloaded for it, a few units at a time.
    """
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    checked = check_store(store, on_progress=on_progress)
    if checked.findings or sample < 1:
        return _report(checked, _Reencoding(), seed=seed)
    with Store(store, split=None) as opened:
        reencoding = _Reencoding()
        imported = opened.manifest.identity.config.get("import")
        if imported is not None:
            what = f"was imported from {imported}: there is no text to encode again"
            reencoding.notes.append(Finding("tokenmill.json", what))
        elif len(opened):
            reencoding = _reencode(opened, sample=sample, seed=seed)
    return _report(checked, reencoding, seed=seed)


def _report(checked: CheckReport, reencoding: _Reencoding, *, seed: int) -> VerifyReport:
    return VerifyReport(
        findings=(*checked.findings, *reencoding.findings),
        notes=(*checked.notes, *reencoding.notes),
        files=checked.files,
        bytes=checked.bytes,
        documents_reencoded=reencoding.compared,
        documents_unavailable=reencoding.unavailable,
        mismatches=reencoding.mismatches,
        reference=reencoding.reference,
        seed=seed,
    )


class _Reencoding:
    """Running count of documents encoded again."""

    def __init__(self) -> None:
        self.compared = 0
        self.unavailable = 0
        self.mismatches = 0
        self.reference: str | None = None
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []


def _reencode(store: Store, *, sample: int, seed: int) -> _Reencoding:
    remaker = Remaker(store)
    result = _Reencoding()
    result.reference = remaker.reference
    for unit_name, documents in _draw(store, remaker, sample=sample, seed=seed).items():
        receipt = store.receipt(unit_name)
        try:
            texts = _texts(store, receipt, documents)
        except SourceError as error:
            result.unavailable += len(documents)
            result.notes.append(Finding(receipt.unit.path, error.message))
            continue
        _compare(store, remaker, texts, result)
    return result


def _draw(store: Store, remaker: Remaker, *, sample: int, seed: int) -> Mapping[str, list[int]]:
    """Random documents, by unit, of as few units as hold enough of them.

    Half of them are drawn by how they end: where engines part, it is often there.
    """
    dice = random.Random(seed)
    shards = [shard for shard in store.shards if shard.documents]
    # A random order in which large shards tend to come first, as if drawn by their documents.
    shards.sort(key=lambda shard: dice.random() ** (1 / shard.documents), reverse=True)
    pool: list[int] = []
    for place, shard in enumerate(shards):
        if place >= _MOST_UNITS and len(pool) >= sample:
            break
        few = min(shard.documents, _LOOKED_AT * sample)
        pool += dice.sample(
            range(shard.first_document, shard.first_document + shard.documents), few
        )
    dice.shuffle(pool)
    pool = pool[: _LOOKED_AT * sample]
    seen: Counter[int] = Counter()
    rank: dict[int, int] = {}
    for document, kind in zip(pool, _endings(store, remaker, pool), strict=True):
        rank[document] = seen[kind]
        seen[kind] += 1
    by_kind = sorted(pool, key=rank.__getitem__)[: -(-sample // 2)]
    drawn = set(by_kind)
    others = [document for document in pool if document not in drawn]
    by_unit: dict[str, list[int]] = defaultdict(list)
    for document in sorted((by_kind + others)[:sample]):
        by_unit[store.shards[store.locate(document)[0]].unit].append(document)
    return by_unit


def _endings(store: Store, remaker: Remaker, documents: list[int]) -> list[int]:
    """How each document ends, by its last ids."""
    eos = store.manifest.identity.eos_id
    tails = (store[document][-_LAST_IDS:].tolist() for document in documents)
    texts = [b"".join(remaker.token_bytes(i) for i in tail if i != eos) for tail in tails]
    kinds: list[int] = ending_kinds(TextBatch.from_texts(texts)).tolist()
    return kinds


def _texts(store: Store, receipt: Receipt, documents: list[int]) -> dict[int, bytes]:
    """Text of the documents, read from their source."""
    file = source_file(receipt.unit.path, members=receipt.unit.members)
    _check_same(file, receipt)
    config = store.manifest.identity.config
    separator = config.get("separator")
    fields, needs_all = fields_of(RowShape.of_identity(config))
    options = SourceOptions(
        text_field=str(config["text_field"]),
        fields=fields,
        needs_all_fields=needs_all,
        separator=None if separator is None else str(separator),
        max_document_bytes=max(
            max_document_bytes(default_budget()), receipt.bounds.largest_row_bytes
        ),
    )
    wanted: dict[int, list[int]] = defaultdict(list)
    for document in documents:
        wanted[store.source(document).row_in_unit].append(document)
    unit = Unit(file=file, index=receipt.unit.index, start=receipt.unit.start, end=receipt.unit.end)
    texts: dict[int, bytes] = {}
    with closing(open_source(file, options)) as source:
        for batch in source.read(unit):
            for row in sorted(wanted.keys() & set(batch.rows.tolist())):
                place = int(np.searchsorted(batch.rows, row))
                texts |= dict.fromkeys(wanted[row], batch.texts.bytes_at(place))
            if len(texts) == len(documents):
                break
    return texts


def _check_same(file: SourceFile, receipt: Receipt) -> None:
    found = (file.size, file.version)
    if found != (receipt.source.size, receipt.source.version):
        raise SourceError(f"{file.path!r} is not the file that was built from: it has changed")


def _compare(store: Store, remaker: Remaker, texts: dict[int, bytes], result: _Reencoding) -> None:
    """Compare ids, and masks where there are any, with those of the store."""
    if not texts:
        return
    tokens, failed = remaker.remake(TextBatch.from_texts(texts.values()))
    for place, document in enumerate(texts):
        if place in failed:
            result.unavailable += 1
            what = f"document {document} cannot be compared: {remaker.reference} fails on its text"
            result.notes.append(Finding("tokenmill.json", f"{what}: {failed[place]}"))
            continue
        row = int(tokens.offsets[place]), int(tokens.offsets[place + 1])
        own, pieces = _own_piece(store, document, row, limit=remaker.shape.piece_tokens)
        mask = None if tokens.mask is None else tokens.mask[own]
        difference = _difference(store, document, tokens.ids[own], mask, remaker.reference)
        if difference is None and pieces != store.source(document).pieces:
            difference = (
                "bin",
                f"document {document} is one of other pieces than its source row has",
            )
        result.compared += 1
        if difference is not None:
            name = store.shards[store.locate(document)[0]].name
            result.mismatches += 1
            result.findings.append(Finding(f"shards/{name}.{difference[0]}", difference[1]))


def _own_piece(
    store: Store, document: int, row: tuple[int, int], *, limit: int | None
) -> tuple[slice, int]:
    """Where the tokens of a document stand in those of its row, and how many such pieces it has."""
    first, last = row
    if limit is None:
        return slice(first, last), 1
    begin = first + store.source(document).piece * limit
    return slice(begin, min(begin + limit, last)), -((first - last) // limit)


def _difference(
    store: Store,
    document: int,
    ids: NDArray[np.uint32],
    expected: NDArray[np.uint8] | None,
    reference: str,
) -> tuple[str, str] | None:
    """Which file of its shard a document differs in, and how."""
    found = store[document]
    if not np.array_equal(found, ids):
        return "bin", (
            f"document {document} has {len(found)} ids that differ from the {len(ids)} of"
            f" {reference}"
        )
    mask = store.mask(document)
    if expected is not None and (mask is None or not np.array_equal(mask, expected)):
        return "mask", f"document {document} counts other tokens than its source row says"
    return None
