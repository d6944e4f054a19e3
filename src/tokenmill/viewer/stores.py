"""What the page shows of a store: its overview, its documents and their tokens, what was rejected.

    page.js -> server.py -> ShownStore -> Store

Every answer is a plain value for JSON, and none reads a whole store: lengths and frequencies come
from parts that are spread evenly over it, lists are filled until there are enough or `SECONDS` are
over. Whatever is a sample says so, with how much of the store it is of.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.builder.verify import source_texts
from tokenmill.engines.load import describe, find_tokenizer
from tokenmill.errors import SourceError, StoreError, UsageError
from tokenmill.files import is_remote
from tokenmill.inspection import count_ids, measure_lengths, token_text
from tokenmill.records import lazy
from tokenmill.sources.discovery import source_file
from tokenmill.store.documents import COLUMNS, Documents
from tokenmill.store.facts import bytes_per_token
from tokenmill.where import KEPT, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.store.annotations import AnnotationFacts
    from tokenmill.store.reader import RejectedRow, SourceRow, Store

SECONDS = 0.1  # after which an answer is what was found so far
LOOKED_SHARDS = 256
LOOKED_DOCUMENTS = 4_000_000
LOOKED_RECEIPTS = 64
COUNTED_TOKENS, COUNTED_CHUNK = 4_000_000, 1 << 16
TOP_TOKENS = 60
ZIPF_POINTS = 160
SHOWN_SOURCES = 500
PREVIEW_TOKENS = 64
PAGE_TOKENS = 2_000
SEARCHED_TOKENS = 1 << 18  # of one document: a longer one is searched up to here
RAW_BYTES, RAW_ROW_BYTES = 64_000, 2_000


def spread(number: int, most: int) -> range:
    """At most so many of the first `number` places, evenly spread."""
    return range(0, number, max(1, -(-number // most)))


class ShownStore:
    """A store as the page sees it."""

    def __init__(self, store: Store, *, name: str, so_far: bool = False) -> None:
        self.whole = store  # of all splits
        self.name = name
        self.state = store.content, not so_far
        self.of = lru_cache(8)(self._of)
        self.columns = Documents(store)
        self._kept = lru_cache(8)(self._judged)
        self._places = {shard.name: number for number, shard in enumerate(store.shards)}
        # Made while the page is on its way: loading a large tokenizer takes a second.
        threading.Thread(target=self._prepare, daemon=True).start()

    def _of(self, split: str | None) -> Store:
        return self.whole if split is None else self.whole.of_split(split)

    def _prepare(self) -> None:
        with contextlib.suppress(Exception):  # who asks for it is told
            _ = self.special

    def about(self) -> dict[str, Any]:
        """What the page must know before anything else."""
        manifest = self.whole.manifest
        return {
            "name": self.name,
            "path": str(self.whole.path),
            "so_far": not self.state[1],
            "splits": list(manifest.splits),
            "documents": self.whole.num_documents,
            "tokens": self.whole.num_tokens,
            "has_mask": self.whole.has_mask,
            "has_pairs": self.whole.has_pairs,
            "sources": [entry.path for entry in manifest.sources[:SHOWN_SOURCES]],
            "columns": self.columns.names,
        }

    # ---------------------------------------------------------------------------------------------
    # The overview.

    def overview(self) -> dict[str, Any]:
        """Totals, sources, lengths and whatever else says what the store is."""
        store, manifest = self.whole, self.whole.manifest
        identity, totals = manifest.identity, manifest.totals
        return {
            "totals": totals.to_json(),
            "bytes_per_token": bytes_per_token(totals, identity.config),
            "token_bytes": totals.tokens * store.dtype.itemsize,
            "splits": {name: each.to_json() for name, each in manifest.splits.items()},
            "sources": self._sources(),
            "lengths": self._lengths(),
            "columns": [fact.to_json() for fact in self._annotations()],
            "engines": [engine.to_json() for engine in manifest.engines],
            "unknown": None if manifest.unknown is None else manifest.unknown.to_json(),
            "identity": {
                "created by": identity.created_by,
                "tokenizer": identity.tokenizer.kind,
                "tokenizer fingerprint": identity.tokenizer.fingerprint,
                "vocabulary": identity.tokenizer.vocab_size,
                "ids": store.dtype.name,
                "end of document": _boundary(identity.eos),
                "beginning of document": _boundary(identity.bos),
                "special tokens in text": identity.special_tokens,
                "units": len(manifest.units),
                "shards": len(store.shards),
                "format version": manifest.version,
                "options fingerprint": identity.fingerprint,
                "content fingerprint": store.content,
            },
            "config": identity.config,
        }

    def _sources(self) -> dict[str, Any]:
        """The largest input files, with what of the store is theirs."""
        manifest = self.whole.manifest
        documents, tokens, rejected = np.zeros((3, len(manifest.sources)), np.int64)
        middle: dict[int, str] = {}  # a unit of each
        for unit in manifest.units:
            for shard in unit.shards:
                documents[unit.source] += shard.documents
                tokens[unit.source] += shard.tokens
            rejected[unit.source] += 0 if unit.rejects is None else unit.rejects.rows
            middle.setdefault(unit.source, unit.name)
        largest = np.argsort(-tokens, kind="stable")[:SHOWN_SOURCES].tolist()
        looked = set(largest[:LOOKED_RECEIPTS])
        rows = []
        for number in largest:
            entry = manifest.sources[number]
            counts = None
            if number in looked and number in middle:
                counts = self.whole.receipt(middle[number]).counts
            rows.append(
                {
                    "number": number,
                    "path": entry.path,
                    "bytes": entry.size,
                    "rows": entry.rows,
                    "documents": int(documents[number]),
                    "tokens": int(tokens[number]),
                    "rejected": int(rejected[number]),
                    "bytes_per_token": counts and bytes_per_token(counts, manifest.identity.config),
                    "is_sample": entry.units > 1,
                }
            )
        return {"rows": rows, "of": len(manifest.sources)}

    def _lengths(self) -> dict[str, Any] | None:
        """Tokens per document; of an even sample of a large store."""
        store = self.whole
        chosen = spread(len(store.shards), LOOKED_SHARDS)
        most = max(1, LOOKED_DOCUMENTS // max(1, len(chosen)))
        store.files.prepare_indexes([store.shards[shard].name for shard in chosen])
        parts = [store.map_shard(shard).index.lengths[:most] for shard in chosen]
        lengths = measure_lengths(parts, long_tokens=1 << 16)
        if lengths is None:
            return None
        return {**asdict(lengths), "documents": sum(map(len, parts)), "of": store.num_documents}

    def frequencies(self) -> dict[str, Any]:
        """How often tokens are there, most frequent first; of an even sample of a large store."""
        store = self.whole
        counts = count_ids(store, most_tokens=COUNTED_TOKENS, chunk_tokens=COUNTED_CHUNK)
        order = np.argsort(-counts, kind="stable")
        seen = int(np.count_nonzero(counts))
        ranks = np.unique(np.geomspace(1, max(seen, 1), ZIPF_POINTS).astype(np.int64))
        special = self.special
        top = [
            {
                "id": token,
                "text": token_text(store.reference, token),
                "count": int(counts[token]),
                "special": token in special,
            }
            for token in order[: min(TOP_TOKENS, seen)].tolist()
        ]
        return {
            "top": top,
            "ranks": ranks.tolist() if seen else [],
            "counts": counts[order[ranks - 1]].tolist() if seen else [],
            "seen": seen,
            "vocabulary": store.vocab_size,
            "tokens": int(counts.sum()),
            "of": store.num_tokens,
        }

    @lazy
    def special(self) -> frozenset[int]:
        """Ids of special tokens, for text that has them."""
        store, identity = self.whole, self.whole.manifest.identity
        _ = store.reference
        kind = identity.tokenizer.kind
        where = kind if kind == "bytes" else str(store.tokenizer_dir)
        known = describe(find_tokenizer(where), policy=None).special_tokens.values()
        ends = (identity.eos_id, identity.bos_id)
        return frozenset(known) | {each for each in ends if each is not None}

    # ---------------------------------------------------------------------------------------------
    # Documents: a list that is filled as far as it is asked for, and one of them.

    def documents(
        self,
        *,
        split: str | None = None,
        first: int = 0,
        source: int | None = None,
        least: int = 0,
        most: int | None = None,
        text: str | None = None,
        where: str | None = None,
        count: int = 50,
    ) -> dict[str, Any]:
        """Documents from a number on that are as asked for; `next` is where to go on."""
        store = self.of(split)
        if where is not None:
            # Imported here, and below: the page is there a tenth of a second earlier.
            from tokenmill.selection import require_columns

            require_columns(self.columns, parse(where))
        begin, end = (0, len(store)) if source is None else self._range(split, source)
        at, found, stop_at = max(first, begin), list[int](), perf_counter() + SECONDS
        wanted, count = None if text is None else text.casefold(), min(count, 200)
        while at < end and len(found) < count and perf_counter() < stop_at:
            shard, local = store.locate(at)
            facts = store.shards[shard]
            last = min(end, facts.first_document + facts.documents)
            lengths = store.map_shard(shard).index.lengths[local : local + last - at]
            fit = lengths >= least if most is None else (lengths >= least) & (lengths <= most)
            if where is not None:
                fit &= self._kept(where, facts.name)[local : local + last - at]
            after = last
            for number in (np.flatnonzero(fit) + at).tolist():
                if perf_counter() > stop_at and (found or number > first):
                    after = number
                    break
                if wanted is None or wanted in self._text(store, number).casefold():
                    found.append(number)
                    if len(found) == count:
                        after = number + 1
                        break
            at = after
        return {
            "documents": [self._line(store, number) for number in found],
            "next": at if at < end else None,
            "begin": begin,
            "end": end,
        }

    def _judged(self, where: str, shard: str) -> NDArray[np.bool_]:
        """Which documents of a shard a condition keeps."""
        from tokenmill.selection import judged

        kept: NDArray[np.bool_] = judged(self.columns, parse(where), self._places[shard]) == KEPT
        return kept

    def _annotations(self) -> list[AnnotationFacts]:
        """What documents were given beside what they are; not what is of another state of it."""
        found = []
        for name in self.columns.names:
            with contextlib.suppress(StoreError):
                found += [] if name in COLUMNS else [self.columns.annotation(name).facts]
        return found

    def _values(self, store: Store, number: int) -> dict[str, Any]:
        """What a document was given."""
        from tokenmill.selection import as_arrow

        shard, local = store.locate(number)
        place, found = self._places[store.shards[shard].name], {}
        for fact in self._annotations():
            column = self.columns.column(place, fact.name).of(slice(local, local + 1))
            (found[fact.name],) = as_arrow(column).to_pylist()
        return found

    def some(self, numbers: Sequence[int]) -> dict[str, Any]:
        """These documents as a list."""
        return {
            "documents": [self._line(self.whole, number) for number in numbers],
            "next": None,
            "begin": 0,
            "end": len(self.whole),
        }

    def _text(self, store: Store, number: int) -> str:
        return store.reference.decode(store[number][:SEARCHED_TOKENS])

    def _range(self, split: str | None, source: int) -> tuple[int, int]:
        """The documents of a source: units are in the order of their files."""
        store = self.of(split)
        units = (unit.source for unit, _ in store.manifest.shards(split=split))
        mine = [shard for shard, of in zip(store.shards, units, strict=True) if of == source]
        if not mine:
            return 0, 0
        return mine[0].first_document, mine[-1].first_document + mine[-1].documents

    def _line(self, store: Store, number: int) -> dict[str, Any]:
        """A document in a list."""
        ids = store[number]
        return {
            "number": number,
            "tokens": len(ids),
            "split": store.shards[store.locate(number)[0]].split,
            "text": self._shown_text(store, ids[:PREVIEW_TOKENS]),
            **_origin(store.source(number)),
        }

    def _shown_text(self, store: Store, ids: NDArray[np.integer]) -> str:
        """Without what a build puts around it, and halves of characters where it was cut."""
        begins = len(ids) > 0 and store.bos_id is not None and ids[0] == store.bos_id
        ends = len(ids) > 0 and store.eos_id is not None and ids[-1] == store.eos_id
        return store.reference.decode(ids[int(begins) : len(ids) - int(ends)]).strip("\ufffd")

    def document(
        self, *, number: int, split: str | None = None, first: int = 0, count: int = PAGE_TOKENS
    ) -> dict[str, Any]:
        """One document: its tokens from a place on, their text, and where it comes from."""
        store = self.of(split)
        if not 0 <= number < len(store):
            problem = f"there is no document {number:,}: {store!r} has {len(store):,}"
            raise UsageError(problem, hint="numbers are counted from 0")
        ids, mask = store[number], store.mask(number)
        part = slice(max(0, first), max(0, first) + min(count, 4 * PAGE_TOKENS))
        shown = ids[part].tolist()
        special = self.special & set(shown)
        return {
            **self._line(store, number),
            "of": len(store),
            "first": part.start,
            "ids": shown,
            "texts": [token_text(store.reference, each) for each in shown],
            "special": [place for place, each in enumerate(shown) if each in special],
            "counts": None if mask is None else mask[part].tolist(),
            "counted": None if mask is None else int(np.count_nonzero(mask)),
            "text": self._shown_text(store, ids[part]),
            "columns": self._values(store, number),
            "answer": ("chosen", "rejected")[number % 2] if store.has_pairs else None,
        }

    def row(self, *, number: int, split: str | None = None) -> dict[str, Any]:
        """The row that a document was made of, as its file has it today."""
        store = self.of(split)
        origin = store.source(number)
        receipt = store.receipt(store.shards[store.locate(number)[0]].unit)
        paths = receipt.unit.members or (receipt.unit.path,)
        try:
            if any(map(is_remote, paths)):
                raise SourceError(f"{origin.path!r} is not on this machine")
            file = source_file(receipt.unit.path, members=receipt.unit.members)
            if file.compression is not None and receipt.unit.index:
                raise SourceError(f"{origin.path!r} is compressed: all before it would be read")
            texts = source_texts(store, receipt, [number])
        except (SourceError, StoreError, UsageError) as error:
            return {"text": None, "why": error.message}
        if number not in texts:
            return {"text": None, "why": "its unit has no such row any more"}
        text = texts[number]
        return {
            "text": text[:RAW_BYTES].decode("utf-8", "replace"),
            "why": None,
            "bytes": len(text),
            "cut": len(text) > RAW_BYTES,
        }

    # ---------------------------------------------------------------------------------------------
    # Rows that are not in the store.

    def rejects(self, *, first: int = 0, count: int = 50) -> dict[str, Any]:
        """Rejected rows from one on, and how many there are for each reason, as far as seen."""
        reasons, stop_at, seen = Counter[str](), perf_counter() + SECONDS, 0
        rows: list[dict[str, Any]] = []
        for reject in self.whole.rejects():
            if first <= seen < first + count:
                rows.append(reject.to_json() | {"raw": self._raw(reject)})
            reasons[reject.reason] += 1
            seen += 1
            if perf_counter() > stop_at:
                break
        return {
            "rows": rows,
            "reasons": dict(reasons.most_common()),
            "seen": seen,
            "of": self.whole.manifest.totals.rejected,
            "unlisted": self.whole.manifest.totals.unlisted,
        }

    def _raw(self, reject: RejectedRow) -> str | None:
        """The beginning of a rejected row, where its file is here and as it was."""
        version = self._versions.get(reject.file)
        if version is None or reject.offset is None or is_remote(reject.file):
            return None
        with contextlib.suppress(OSError, SourceError, UsageError):
            file = source_file(reject.file)
            if file.version == version and file.compression is None and file.traits.rows_are_lines:
                with Path(reject.file).open("rb") as opened:
                    opened.seek(reject.offset)
                    return opened.readline(RAW_ROW_BYTES).decode("utf-8", "replace")
        return None

    @lazy
    def _versions(self) -> dict[str, str]:
        """Of the input files, by their paths: no other file is ever read."""
        return {entry.path: entry.version for entry in self.whole.manifest.sources}


def _boundary(token: Any) -> str | None:
    return None if token is None else f"{token.token} ({token.id})"


def _origin(source: SourceRow) -> dict[str, Any]:
    return {
        "path": source.path,
        "row": source.row,
        "line": source.line,
        "piece": source.piece if source.pieces > 1 else None,
        "pieces": source.pieces,
    }
