"""What is known of documents beside their tokens, as columns: where they come from, how long, more.

    document   number in its split            tokens    of its row, all pieces together
    split      train, val, ...                counted   of those, what counts for the loss
    source     path of the file it is from    row       number of its row in that file
    folder     the folder of that file        and every annotation, by its name

Columns are made shard by shard, so memory does not grow with the store. A row that became several
documents is one text: each of them has the values of the row.
"""

from __future__ import annotations

import os
import posixpath
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.store.annotations import (
    SUFFIX,
    Annotation,
    Labels,
    Numbers,
    find_annotations,
    open_annotation,
)
from tokenmill.store.format import counted_by_document
from tokenmill.where import FLAG, NUMBER, TEXT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenmill.store.annotations import Column
    from tokenmill.store.facts import ShardFacts
    from tokenmill.store.format import Ints
    from tokenmill.store.reader import Store


class Documents:
    """The columns of a store or view that was opened with all splits."""

    def __init__(self, store: Store) -> None:
        assert store.split is None
        self.store = store
        self._base = store if store.view is None else store.view.base(None)
        self._annotations: dict[str, Annotation] = {}
        splits = store.manifest.splits
        self._first = {
            shard.name: shard.first_document
            for split in splits
            for shard in store.of_split(split).shards
        }

    @property
    def names(self) -> list[str]:
        """The columns that there are."""
        return [*COLUMNS, *self._files]

    def column(self, number: int, name: str) -> Column:
        """A column, by its name, of the documents of a shard."""
        if name in COLUMNS:
            return COLUMNS[name](self, number)
        shard = self._base.shards[self._number_in_base(number)]
        whole = self.annotation(name).column
        here = whole.of(slice(shard.first_document, shard.first_document + shard.documents))
        view = self.store.view
        return here if view is None else here.of(view.numbers(self.store.shards[number].name))

    @property
    def shown(self) -> str:
        return str(self.store.path)

    def kind(self, name: str) -> str:
        """What a column holds, in the words of conditions."""
        if name in COLUMNS:
            return TEXT if name in ("split", "source", "folder") else NUMBER
        return {"text": TEXT, "flag": FLAG}.get(self.annotation(name).facts.type, NUMBER)

    @cached_property
    def _files(self) -> dict[str, Path]:
        files = self._base.files
        paths = find_annotations(files.layout) if isinstance(files.path, os.PathLike) else ()
        return {path.name.removesuffix(SUFFIX): path for path in paths}

    def annotation(self, name: str) -> Annotation:
        """An annotation of the store, by its name; UsageError names those there are."""
        if name not in self._files:
            known = ", ".join(self.names)
            raise UsageError(
                f"{str(self.store.path)!r} has no column {name!r}; there are: {known}",
                hint="give the documents one with: tokenmill annotate STORE TABLE --key ...",
            )
        if name not in self._annotations:
            found = open_annotation(self._files[name], self._base.manifest)
            self._annotations[name] = found
        return self._annotations[name]

    def _number_in_base(self, number: int) -> int:
        view = self.store.view
        return number if view is None else int(view.table["shard"][number])

    def _document(self, number: int) -> Column:
        shard = self.store.shards[number]
        first = self._first[shard.name]
        return Numbers(np.arange(first, first + shard.documents))

    def _split(self, number: int) -> Column:
        shard = self.store.shards[number]
        return Labels((shard.split,), np.zeros(shard.documents, np.int64))

    def _source(self, number: int) -> Column:
        paths, places, _ = self._origins(number)
        return Labels(tuple(paths), places)

    def _folder(self, number: int) -> Column:
        paths, places, _ = self._origins(number)
        folders = [posixpath.dirname(path) or "." for path in paths]
        names = list(dict.fromkeys(folders))
        return Labels(tuple(names), np.array([names.index(each) for each in folders])[places])

    def _row(self, number: int) -> Column:
        return Numbers(self._origins(number)[2])

    def _tokens(self, number: int) -> Column:
        lengths = self.store.map_shard(number).index.lengths
        return Numbers(self._of_rows(number, lengths.astype(np.int64)))

    def _counted(self, number: int) -> Column:
        if not self.store.has_mask:
            return self._tokens(number)
        parts = [counted_by_document(*run) for run in self.store.map_shard(number).mask_runs()]
        return Numbers(self._of_rows(number, np.concatenate([np.zeros(0, np.int64), *parts])))

    def _of_rows(self, number: int, values: Ints) -> Ints:
        """For each document the sum of its row."""
        starts = self.store.row_starts(number)
        if starts is None:
            return values
        sums = np.add.reduceat(values, starts)
        return np.repeat(sums, np.diff(starts, append=len(values)))

    def _origins(self, number: int) -> tuple[list[str], Ints, Ints]:
        """Paths of files; and of each document which of them it is from, and its row there."""
        view = self.store.view
        receipt, facts = self._base.facts_of(self._number_in_base(number))
        rows = rows_of(facts)
        if view is not None:
            rows = rows[view.numbers(self.store.shards[number].name)]
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
