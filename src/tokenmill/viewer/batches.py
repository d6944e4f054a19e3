"""What the page shows of batches: the rows that a loader would draw, and what packings waste.

The rows are those of a real `Loader` with the options that the page was given. Plans of best-fit
rows are made in a temporary folder, which goes with the process.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.loader.batch import NO_ROW
from tokenmill.loader.loader import Loader
from tokenmill.loader.mixture import Mixture
from tokenmill.loader.packing import PADDING, causal_pairs, pack
from tokenmill.viewer.stores import spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.packing import Layout
    from tokenmill.store.reader import Store
    from tokenmill.viewer.stores import ShownStore

MOST_ROWS = 256  # of all ranks together
SAMPLE_DOCUMENTS, SAMPLE_SHARDS = 100_000, 64


class ShownBatches:
    """Batches of one store, or of several as a mixture."""

    def __init__(self, stores: Sequence[ShownStore]) -> None:
        self.stores = stores
        self._plans = tempfile.TemporaryDirectory(prefix="tokenmill-view-")
        self._loaders = lru_cache(4)(self._make_loaders)

    def forget(self) -> None:
        """What was opened of stores that may have grown since."""
        self._loaders.cache_clear()

    def batch(
        self,
        *,
        step: int = 0,
        seq_len: int = 2048,
        packing: str = "concat",
        shuffle: str = "full",
        ranks: int = 2,
        rows: int = 4,
        seed: int = 0,
        balance: bool = False,
        split: str = "train",
        weights: str = "1",
    ) -> dict[str, Any]:
        """The rows of a step on every rank; `weights` has a number for each store."""
        if not 0 < ranks * rows <= MOST_ROWS:
            problem = f"{ranks * rows:,} rows are not from 1 to {MOST_ROWS}, which can be shown"
            raise UsageError(problem, hint="choose fewer ranks, or fewer rows for each")
        loaders = self._loaders(
            seq_len, packing, shuffle, ranks, rows, seed, balance, split, weights
        )
        layouts = loaders[0].layouts()
        total = sum(layout.num_rows for layout in layouts)
        shown = [self._rank(loader, step) for loader in loaders]
        mean = sum(each["pairs"] for each in shown) / ranks or 1
        for each in shown:
            each["load"] = each["pairs"] / mean
        return {
            "step": step,
            "rows_of_epoch": total,
            "steps_of_epoch": -(-total // (ranks * rows)),
            "places": layouts[0].seq_len + 1,
            "ranks": shown,
        }

    def _make_loaders(
        self,
        seq_len: int,
        packing: str,
        shuffle: str,
        ranks: int,
        rows: int,
        seed: int,
        balance: bool,
        split: str,
        weights: str,
    ) -> list[Loader]:
        """A loader for each rank."""
        parts = _weights(weights, len(self.stores))
        opened = {
            shown.name: (self._opened(shown, split), part)
            for shown, part in zip(self.stores, parts, strict=True)
            if part
        }
        if len(opened) == 1:
            ((store, _),) = opened.values()
            mixture = Mixture.of(store)
        else:
            mixture = Mixture(opened)
        return [
            Loader(
                mixture,
                seq_len=seq_len,
                batch_size=rows,
                packing=packing,
                shuffle=shuffle,
                seed=seed,
                rank=rank,
                world_size=ranks,
                balance="attention" if balance else None,
                dtype="stored",
            )
            for rank in range(ranks)
        ]

    def _opened(self, shown: ShownStore, split: str) -> Store:
        store = shown.of(split)
        store.keep_plans = Path(self._plans.name)
        return store

    def _rank(self, loader: Loader, step: int) -> dict[str, Any]:
        """What one rank gets in a step."""
        if step < 0:
            raise UsageError(f"there is no step {step}")
        batch, layouts, names = loader.batch(step), loader.layouts(), loader.mixture.names
        stores = [shown.name for shown in self.stores]
        found, pairs = [], 0
        drawn = (each.ravel().tolist() for each in (batch.sources, batch.rows, batch.epochs))
        for source, row, epoch in zip(*drawn, strict=True):
            if row == NO_ROW:
                continue
            parts, work = _parts(layouts[source], row)
            pairs += work
            of = stores.index(names[source]) if names[source] else self._only(loader)
            found.append({"of": of, "row": row, "epoch": epoch, "parts": parts, "pairs": work})
        return {"rank": loader.rank, "rows": found, "pairs": pairs}

    def _only(self, loader: Loader) -> int:
        """The place of the store of a loader that has one."""
        paths = [str(shown.whole.path) for shown in self.stores]
        return paths.index(str(loader.mixture.stores[0].path))

    def packings(
        self, *, store: int = 0, seq_len: int = 2048, split: str = "train"
    ) -> dict[str, Any]:
        """What each packing wastes; computed on an even sample of the documents' lengths."""
        if not 0 < seq_len < 1 << 24:
            raise UsageError(f"seq_len={seq_len:,} is no length of a row")
        opened = self.stores[store].of(split)
        opened.refuse_pairs("a row")
        lengths = _sample(opened)
        tokens = int(lengths.sum(dtype=np.int64))
        found = {name: count(lengths, seq_len) for name, count in _WASTE.items()} if tokens else {}
        return {
            "packings": [
                {
                    "name": name,
                    "rows": round(rows * opened.num_tokens / tokens),
                    "padding": padding / max(1, rows * (seq_len + 1)),
                    "dropped": dropped / tokens,
                    "split": split_documents / len(lengths),
                }
                for name, (rows, padding, dropped, split_documents) in found.items()
            ],
            "documents": len(lengths),
            "of": opened.num_documents,
        }


def _weights(words: str, stores: int) -> list[float]:
    try:
        parts = [float(word) for word in words.split(",")]
    except ValueError as error:
        raise UsageError(f"the weights {words!r} are no numbers") from error
    parts += [0.0] * (stores - len(parts))
    if len(parts) != stores or min(parts) < 0 or not sum(parts):
        hint = "give a number of 0 or more for each store, such as 0.7 and 0.3"
        raise UsageError(f"the weights {words!r} are no shares of {stores} stores", hint=hint)
    return parts


def _parts(layout: Layout, row: int) -> tuple[list[list[int]], int]:
    """Document, its first token here, tokens and place of each part of a row; and its work.

    Padding has the document -1. The work is that of causal attention within documents.
    """
    starts, lengths = layout.segments(np.array([row], np.int64))
    at = np.cumsum(lengths) - lengths
    inputs = np.clip(layout.seq_len - at, 0, lengths)  # the last token of a row is a label alone
    parts = []
    for start, tokens, place in zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True):
        if start == PADDING:
            parts.append([-1, 0, tokens, place])
            continue
        number = layout.stream.document_at(start)
        first = start - layout.stream.document_span(number)[0]
        parts.append([number, first, tokens, place])
    return parts, int(causal_pairs(inputs[starts != PADDING]).sum())


def _sample(store: Store) -> NDArray[np.int32]:
    """Lengths of documents, of all where they are few."""
    chosen = spread(len(store.shards), SAMPLE_SHARDS)
    if store.num_documents <= SAMPLE_DOCUMENTS:
        chosen = range(len(store.shards))
    most = max(1, SAMPLE_DOCUMENTS // max(1, len(chosen)))
    store.files.prepare_indexes([store.shards[shard].name for shard in chosen])
    parts = [store.map_shard(shard).index.lengths for shard in chosen]
    if store.num_documents > SAMPLE_DOCUMENTS:
        parts = [part[:most] for part in parts]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


# Rows, places of padding, tokens that are dropped and documents that are split, of these lengths.
Waste = tuple[int, int, int, int]


def _concat(lengths: NDArray[np.int32], seq_len: int) -> Waste:
    ends = np.cumsum(lengths, dtype=np.int64)
    rows = max(1, -(-(int(ends[-1]) - 1) // seq_len))
    split = np.count_nonzero((ends - lengths) // seq_len < (ends - 2) // seq_len)
    return rows, rows * seq_len + 1 - int(ends[-1]), 0, int(split)


def _best_fit(lengths: NDArray[np.int32], seq_len: int) -> Waste:
    packed = [*pack([lengths], seq_len=seq_len)]
    rows = sum(len(each.row_starts) for each in packed)
    pieces = sum(len(each.items) - each.documents for each in packed)  # repeat a token each
    used = sum(each.tokens for each in packed) + pieces
    return rows, rows * (seq_len + 1) - used, 0, sum(each.split_documents for each in packed)


def _pad(lengths: NDArray[np.int32], seq_len: int) -> Waste:
    room = seq_len + 1 - lengths.astype(np.int64)
    padding, dropped = int(room[room > 0].sum()), -int(room[room < 0].sum())
    return len(lengths), padding, dropped, 0


_WASTE = {"concat": _concat, "best-fit": _best_fit, "pad": _pad}
