"""What is known of documents beside their tokens, as columns: where they come from, how long, more.

    document   number in its split            tokens    of its row, all pieces together
    split      train, val, ...                counted   of those, what counts for the loss
    source     path of the file it is from    row       number of its row in that file
    folder     the folder of that file

Columns are made shard by shard, so memory does not grow with the store. A row that became several
documents is one text: each of them has the values of the row.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tokenmill.store.format import counted_by_document

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenmill.store.facts import ShardFacts
    from tokenmill.store.format import Ints
    from tokenmill.store.reader import Store


class Labels(NamedTuple):
    """A column of few different values: those, and which of them each document has."""

    values: list[str]
    places: Ints


Column: TypeAlias = "Ints | Labels"


class Documents:
    """The columns of a store or view that was opened with all splits."""

    def __init__(self, store: Store) -> None:
        assert store.split is None
        self._store = store
        self._base = store if store.view is None else store.view.base(None)
        splits = store.manifest.splits
        self._first = {
            shard.name: shard.first_document
            for split in splits
            for shard in store.of_split(split).shards
        }

    def column(self, number: int, name: str) -> Column:
        """A column, by its name, of the documents of a shard."""
        return COLUMNS[name](self, number)

    def _document(self, number: int) -> Column:
        shard = self._store.shards[number]
        first = self._first[shard.name]
        return np.arange(first, first + shard.documents)

    def _split(self, number: int) -> Column:
        shard = self._store.shards[number]
        return Labels([shard.split], np.zeros(shard.documents, np.int64))

    def _source(self, number: int) -> Column:
        paths, places, _ = self._origins(number)
        return Labels(paths, places)

    def _folder(self, number: int) -> Column:
        paths, places, _ = self._origins(number)
        folders = [posixpath.dirname(path) or "." for path in paths]
        names = list(dict.fromkeys(folders))
        return Labels(names, np.array([names.index(each) for each in folders])[places])

    def _row(self, number: int) -> Column:
        return self._origins(number)[2]

    def _tokens(self, number: int) -> Column:
        return self._of_rows(number, self._store.map_shard(number).index.lengths.astype(np.int64))

    def _counted(self, number: int) -> Column:
        if not self._store.has_mask:
            return self._tokens(number)
        parts = [counted_by_document(*run) for run in self._store.map_shard(number).mask_runs()]
        return self._of_rows(number, np.concatenate([np.zeros(0, np.int64), *parts]))

    def _of_rows(self, number: int, values: Ints) -> Ints:
        """For each document the sum of its row."""
        starts = self._store.row_starts(number)
        if starts is None:
            return values
        sums = np.add.reduceat(values, starts)
        return np.repeat(sums, np.diff(starts, append=len(values)))

    def _origins(self, number: int) -> tuple[list[str], Ints, Ints]:
        """Paths of files; and of each document which of them it is from, and its row there."""
        view, base_number = self._store.view, number
        if view is not None:
            base_number = int(view.table["shard"][number])
        receipt, facts = self._base.facts_of(base_number)
        rows = rows_of(facts)
        if view is not None:
            rows = rows[view.numbers(self._store.shards[number].name)]
        if not receipt.unit.members:
            before, _ = self._base.rows_before[receipt.unit.name]
            return [receipt.unit.path], np.zeros_like(rows), rows + before
        ends = np.cumsum(receipt.source.member_rows or [1] * len(receipt.unit.members))
        places = ends.searchsorted(rows, side="right")
        return [*receipt.unit.members], places, rows - np.append(0, ends)[places]


def rows_of(facts: ShardFacts) -> Ints:
    """The row of its unit that each document of a shard is of."""
    skips, takes = np.array(facts.rows[0::2], np.int64), np.array(facts.rows[1::2], np.int64)
    rows = np.arange(int(takes.sum())) + np.repeat(np.cumsum(skips), takes)
    if not facts.pieces:
        return rows
    whole, counts = np.array(facts.pieces[0::2], np.int64), np.array(facts.pieces[1::2], np.int64)
    times = np.ones(len(rows), np.int64)
    times[np.cumsum(whole + 1) - 1] = counts
    return np.repeat(rows, times)


COLUMNS: dict[str, Callable[[Documents, int], Column]] = {
    "document": Documents._document,
    "split": Documents._split,
    "source": Documents._source,
    "folder": Documents._folder,
    "row": Documents._row,
    "tokens": Documents._tokens,
    "counted": Documents._counted,
}
