"""The verb `verify`: is every byte of a store what it was, and are its ids the reference's?

The first question needs the store alone (`store/check.py`). For the second, documents are drawn at
random, their text is read again from the source files and encoded by the reference engine. A source
that is gone or has changed cannot answer; its documents are counted as unavailable, never as good.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.builder.encode import Encoding, load_encoder
from tokenmill.builder.plan import default_budget, max_document_bytes, whole_bytes
from tokenmill.builder.run import source_options
from tokenmill.engines import REFERENCES, load
from tokenmill.engines.base import TokenizerKind
from tokenmill.engines.parity import ending_kinds
from tokenmill.errors import SourceError
from tokenmill.markup import Told
from tokenmill.options import RowShape, VerifyOptions, with_options
from tokenmill.records import RejectReason, TextBatch, TokenBatch
from tokenmill.sources.base import Unit, open_source
from tokenmill.sources.discovery import source_file
from tokenmill.sources.objects import OF_PYTHON
from tokenmill.store.check import Finding, check_store
from tokenmill.store.reader import Store
from tokenmill.supervised.chat import with_template

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.store.facts import Counts, Receipt, UnknownFacts


class Remaker:
    """Makes rows of a store anew from what their source gives, by the reference engine alone.

    As the store's build made them, before any of them was cut up.
    """

    def __init__(self, store: Store) -> None:
        identity = store.manifest.identity
        kind, policy = load.known_policy(identity.tokenizer.kind, identity.special_tokens)
        # The byte tokenizer has no files to be found.
        files = load.find_tokenizer(
            kind if kind is TokenizerKind.BYTES else str(store.tokenizer_dir)
        )
        template = store.tokenizer_dir / load.CHAT_TEMPLATE
        if template.is_file():
            files = with_template(files, str(template))
        info = load.describe(files, policy=policy)
        self._encoder = load_encoder(
            info, identity, choice=REFERENCES[kind], whole_bytes=whole_bytes(default_budget())
        )
        reference = self._encoder.engine.reference
        self.reference = f"{reference.name} {reference.version}"
        self.token_bytes = reference.token_bytes
        self.shape = self._encoder.shape

    def remake(self, texts: TextBatch) -> tuple[TokenBatch, dict[int, str]]:
        """The rows, framed; without tokens if rejected. And those on which the reference fails."""
        encoding = Encoding(by_reference=True, rejects_uncut=False)
        made = self._encoder.encode(texts, np.arange(len(texts)), encoding)
        lengths = np.zeros(len(texts), np.int64)
        tokens = self._encoder.framed(made)
        lengths[made.rows] = tokens.lengths
        failed = [each for each in made.rejects if each.reason is RejectReason.CANNOT_ENCODE]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return TokenBatch(tokens.ids, offsets, tokens.mask), {e.row: e.detail for e in failed}


# A document is found by reading its unit, so the sample is drawn from a few units.
_MOST_UNITS = 16
# So many times as many documents as are drawn are looked at for how they end.
_LOOKED_AT = 16
_LAST_IDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport(Told):
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
    unknown: UnknownFacts | None
    """What became of text that the tokenizer does not know; None where the store tells of none."""
    totals: Counts | None
    """What the store says of itself; None where it cannot be read."""

    @property
    def ok(self) -> bool:
        return not self.findings


@with_options(VerifyOptions)
def verify(asked: VerifyOptions) -> VerifyReport:
    """Check every byte of a store, and encode `sample` random documents again.

    All of a store at a URL is downloaded for it, a few units at a time.
    """
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    checked = check_store(asked.store, on_progress=asked.on_progress)
    again, manifest = _Reencoding(), checked.manifest
    if not checked.findings and asked.sample >= 1:
        with Store(asked.store, split=None) as opened:
            imported = opened.manifest.identity.config.get("import")
            if imported is not None:
                what = f"was imported from {imported}: there is no text to encode again"
                again.notes.append(Finding("tokenmill.json", what))
            elif len(opened):
                _reencode(opened, again, sample=asked.sample, seed=seed)
    return VerifyReport(
        findings=(*checked.findings, *again.findings),
        notes=(*checked.notes, *again.notes),
        files=checked.files,
        bytes=checked.bytes,
        documents_reencoded=again.compared,
        documents_unavailable=again.unavailable,
        mismatches=len(again.findings),
        reference=again.reference,
        seed=seed,
        unknown=None if manifest is None else manifest.unknown,
        totals=None if manifest is None else manifest.totals,
    )


@dataclass(slots=True)
class _Reencoding:
    """Running count of documents encoded again."""

    compared: int = 0
    unavailable: int = 0
    reference: str | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)


def _reencode(store: Store, result: _Reencoding, *, sample: int, seed: int) -> None:
    remaker = Remaker(store)
    result.reference = remaker.reference
    for unit_name, documents in _draw(store, remaker, sample=sample, seed=seed).items():
        receipt = store.receipt(unit_name)
        try:
            texts = source_texts(store, receipt, documents)
        except SourceError as error:
            result.unavailable += len(documents)
            result.notes.append(Finding(receipt.unit.path, error.message))
            continue
        if texts:
            _compare(store, remaker, texts, result)


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
    # How each document ends, by its last ids.
    eos = store.manifest.identity.eos_id
    tails = (store[document][-_LAST_IDS:].tolist() for document in pool)
    texts = [b"".join(remaker.token_bytes(i) for i in tail if i != eos) for tail in tails]
    kinds = ending_kinds(TextBatch.from_texts(texts)).tolist()
    for document, kind in zip(pool, kinds, strict=True):
        rank[document] = seen[kind]
        seen[kind] += 1
    by_kind = sorted(pool, key=rank.__getitem__)[: -(-sample // 2)]
    drawn = set(by_kind)
    others = [document for document in pool if document not in drawn]
    by_unit: dict[str, list[int]] = defaultdict(list)
    for document in sorted((by_kind + others)[:sample]):
        by_unit[store.shards[store.locate(document)[0]].unit].append(document)
    return by_unit


def source_texts(store: Store, receipt: Receipt, documents: list[int]) -> dict[int, bytes]:
    """Text of the documents, read from their source."""
    if receipt.unit.path.startswith(OF_PYTHON):
        raise SourceError("was rows of a Python program, which no file holds")
    file = source_file(receipt.unit.path, members=receipt.unit.members)
    if (file.size, file.version) != (receipt.source.size, receipt.source.version):
        raise SourceError(f"{file.title}: not what was built from, but changed since")
    config = store.manifest.identity.config
    largest = max(max_document_bytes(default_budget()), receipt.bounds.largest_row_bytes)
    options = source_options(config, RowShape.of_identity(config), max_document_bytes=largest)
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


def _compare(store: Store, remaker: Remaker, texts: dict[int, bytes], result: _Reencoding) -> None:
    """Compare ids, and masks where there are any, with those of the store."""
    tokens, failed = remaker.remake(TextBatch.from_texts(texts.values()))
    limit = remaker.shape.piece_tokens
    for place, document in enumerate(texts):
        if place in failed:
            result.unavailable += 1
            what = f"document {document} cannot be compared: {remaker.reference} fails on its text"
            result.notes.append(Finding("tokenmill.json", f"{what}: {failed[place]}"))
            continue
        # Where its tokens are in those of its row, and how many such pieces the row has.
        origin, pieces = store.source(document), 1
        first, last = tokens.offsets[place : place + 2].tolist()
        if remaker.shape.has_pairs:
            from tokenmill.supervised.pairs import side_lengths

            assert tokens.mask is not None
            if first < last:
                of_row = np.array([last - first])
                middle = first + int(side_lengths(tokens.mask[first:last], of_row)[0])
                first, last = ((first, middle), (middle, last))[origin.piece % 2]
            pieces = 2
        elif limit is not None:
            pieces = -((first - last) // limit)
            first += origin.piece * limit
            last = min(first + limit, last)
        ids, found, mask = tokens.ids[first:last], store[document], store.mask(document)
        difference: tuple[str, str] | None = None
        if not np.array_equal(found, ids):
            what = f"has {len(found)} ids that differ from the {len(ids)} of {remaker.reference}"
            difference = "bin", what
        elif tokens.mask is not None and (
            mask is None or not np.array_equal(mask, tokens.mask[first:last])
        ):
            difference = "mask", "counts other tokens than its source row says"
        elif pieces != origin.pieces:
            difference = "bin", "is one of other pieces than its source row has"
        result.compared += 1
        if difference is not None:
            name = f"shards/{store.shards[store.locate(document)[0]].name}.{difference[0]}"
            result.findings.append(Finding(name, f"document {document} {difference[1]}"))
