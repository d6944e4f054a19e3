"""What is known of documents beside their tokens, as columns: where they come from, how long, more.

    document   number in its split            tokens    of its row, all pieces together
    split      train, val, ...                counted   of those, what counts for the loss
    source     path of the file it is from    row       number of its row in that file
    folder     the folder of that file        and every annotation, by its name

Columns are made shard by shard, so memory does not grow with the store. A row that became several
documents is one text: each of them has the values of the row.

The documents that have one value of a column are a group, and a view by themselves: what is shown
by source or language, and mixed by it. As a table for people (`Store.head`, `Store.to_pandas`) a
line is one document, a piece of a row by itself. This is the home of pandas.
"""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError, importing
from tokenmill.markup import Told
from tokenmill.store.annotations import (
    SUFFIX,
    Annotation,
    Labels,
    Numbers,
    find_annotations,
    open_annotation,
)
from tokenmill.store.format import counted_by_document, numbers_of_runs
from tokenmill.store.reader import Store
from tokenmill.store.views import Choice
from tokenmill.where import FLAG, NUMBER, TEXT
from tokenmill.words import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.store.annotations import Column
    from tokenmill.store.facts import ShardFacts
    from tokenmill.store.format import Ints


class Documents:
    """The columns of a store or view that was opened with all splits."""

    def __init__(self, store: Store) -> None:
        assert store.split is None
        self.store = store
        self._base = store.base
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
        return [*COLUMNS, *self.annotations]

    @property
    def annotations(self) -> list[str]:
        """Those of them that were given to the documents."""
        return [*self._files]

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
    rows = numbers_of_runs(facts.rows)
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


# -------------------------------------------------------------------------------------------------
# Groups: the documents of a split that have one value of a column.

GROUPED = ("source", "folder", "split")  # and annotations, unless they are fractions
NO_VALUE = "null"  # as conditions call it
MOST_GROUPS = 1 << 20
MOST_VIEWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The documents of a split that have one value of a column."""

    name: str
    documents: int
    tokens: int
    share: float
    """Of the tokens of the split."""


class Grouping:
    """The documents of a store's split, or of all, by the value of a column that they have.

    Rows are whole: of a row that became several documents, the first one's value is taken.
    """

    def __init__(self, store: Store, by: str) -> None:
        self.store, self.by = store, by
        self._whole = store if store.split is None else store.of_split(None)
        documents = Documents(self._whole)
        self._require(documents)
        numbers: dict[str, int] = {}
        counts, tokens = np.zeros((2, 0), np.int64)
        # Of each shard, the group of each document.
        self._places: dict[int, NDArray[np.integer]] = {}
        for number, shard in enumerate(self._whole.shards):
            if store.split not in (None, shard.split) or not shard.documents:
                continue
            names, places = _named(documents.column(number, by))
            known = len(numbers)
            own = np.array([numbers.setdefault(name, len(numbers)) for name in names])
            if len(numbers) > MOST_GROUPS:
                raise self._many(len(numbers), MOST_GROUPS)
            counts, tokens = (np.pad(a, (0, len(numbers) - known)) for a in (counts, tokens))
            starts = self._whole.row_starts(number)
            if starts is not None:
                places = np.repeat(places[starts], np.diff(starts, append=len(places)))
            lengths = self._whole.map_shard(number).index.lengths
            sums = np.bincount(places, weights=lengths, minlength=len(own))
            np.add.at(counts, own, np.bincount(places, minlength=len(own)))
            np.add.at(tokens, own, sums.astype(np.int64))
            self._places[number] = own[places].astype(np.min_scalar_type(len(numbers)))
        self._numbers = numbers
        total = max(1, int(tokens.sum()))
        self.groups = sorted(
            (
                Group(name=name, documents=documents, tokens=size, share=size / total)
                for name, documents, size in zip(
                    numbers, counts.tolist(), tokens.tolist(), strict=True
                )
                if documents
            ),
            key=lambda group: (-group.tokens, group.name),
        )

    def _require(self, documents: Documents) -> None:
        """UsageError for a column that makes no groups."""
        named = [name for name in documents.names if name in GROUPED or name not in COLUMNS]
        if self.by in named and not _is_number(documents, self.by):
            return
        if self.by in documents.names:
            named = [name for name in named if not _is_number(documents, name)]
            raise UsageError(
                f"the column {self.by!r} holds a number for each document, and documents are not"
                " grouped by that",
                hint=f"columns that name groups: {', '.join(named)}; tokenmill select cuts by a"
                " number, and tokenmill annotate gives documents a name for it",
            )
        raise UsageError(
            f"{documents.shown!r} has no column {self.by!r} to group documents by; there are:"
            f" {', '.join(named)}",
            hint="give the documents one with: tokenmill annotate STORE TABLE --key ...",
        )

    def _many(self, found: int, most: int) -> UsageError:
        return UsageError(
            f"{str(self.store.path)!r} has {found:,} groups by {self.by}, and {most:,} are the most"
            " that there may be",
            hint="group by folder, or annotate the documents with fewer names",
        )

    def sums(self, values: Ints) -> dict[str, int]:
        """What the documents of each group have together, of a value for each of the split."""
        found, at = np.zeros(len(self._numbers), np.int64), 0
        for _, places in sorted(self._places.items()):
            np.add.at(found, places, values[at : at + len(places)])
            at += len(places)
        return dict(zip(self._numbers, found.tolist(), strict=True))

    def views(self) -> dict[str, Store]:
        """A view for each group that has tokens, the one with most tokens first."""
        groups = [group for group in self.groups if group.tokens]
        if len(groups) > MOST_VIEWS:
            raise self._many(len(groups), MOST_VIEWS)
        found: dict[str, Store] = {}
        base: Any = None
        for group in groups:
            choice, wanted = Choice(self._whole), self._numbers[group.name]
            for number, places in self._places.items():
                if (kept := places == wanted).any():
                    choice.keep(number, kept)
            step = {"verb": "group", "by": self.by, "name": group.name, "split": self.store.split}
            view = choice.view(step)
            # One open store for all of them: each would map all its shards again.
            view.base = base = base or view.base
            found[group.name] = Store.of_files(view, split=self.store.split)
        return found


def _is_number(documents: Documents, name: str) -> bool:
    return name not in COLUMNS and documents.annotation(name).facts.type == "number"


def _named(column: Column) -> tuple[list[str], Ints]:
    """The different values of a column that are there, as text, and which each document has."""
    if isinstance(column, Labels):
        held = np.flatnonzero(np.bincount(column.places + 1))
        table = np.zeros(len(column.texts) + 1, np.int64)
        table[held] = np.arange(len(held))
        names = [column.texts[place - 1] if place else NO_VALUE for place in held.tolist()]
        found = table[column.places + 1]
    else:
        values, found = np.unique(column.values, return_inverse=True)
        is_flag = column.values.dtype == np.uint8
        names = [("false", "true")[v] if is_flag else str(v) for v in values.tolist()]
        if column.missing:
            assert column.given is not None
            names.append(NO_VALUE)
            found[~column.given] = len(values)
    return names, found


# -------------------------------------------------------------------------------------------------
# Documents as a table.


class Head(Told, list[dict[str, Any]]):
    """Some documents of a store, each as its columns by their names; a notebook draws a table."""

    def __init__(self, store: Store, columns: dict[str, Column | list[str]]) -> None:
        self.names = list(columns)
        self.title = f"{count(store.num_documents, 'document')} in {str(store.path)!r}"
        values = (_as_list(column) for column in columns.values())
        super().__init__(
            dict(zip(columns, line, strict=True)) for line in zip(*values, strict=True)
        )
        self.title += f", the first {len(self)}"

    __repr__ = Told.__str__


def _as_list(column: Column | list[str]) -> list[Any]:
    if isinstance(column, list):
        return column
    if isinstance(column, Labels):
        return [None if place < 0 else column.texts[place] for place in column.places.tolist()]
    values = column.values.astype(np.bool_) if column.values.dtype == np.uint8 else column.values
    given = [True] * len(values) if column.given is None else column.given.tolist()
    return [
        each if is_given else None for each, is_given in zip(values.tolist(), given, strict=True)
    ]


def columns_of(
    store: Store, numbers: Sequence[int], *, text: bool = True
) -> dict[str, Column | list[str]]:
    """What there is to say of some documents, by their numbers in the store's split."""
    places = [store.locate(number) for number in numbers]
    found: dict[str, Column | list[str]] = {"document": Numbers(np.array(numbers, np.int64))}
    if text:
        found["text"] = [store.decode(number) for number in numbers]
    whole = store if store.split is None else store.of_split(None)
    documents = Documents(whole)
    shards = {shard.name: number for number, shard in enumerate(whole.shards)}
    names = ("tokens", "source", "row", "split", *documents.annotations)
    values: dict[str, list[Any]] = {name: [None] * len(numbers) for name in names}
    of_shard: dict[int, list[int]] = {}
    for place, (shard, _) in enumerate(places):
        of_shard.setdefault(shard, []).append(place)
    for shard, lines in of_shard.items():
        local = np.array([places[line][1] for line in lines])
        lengths = store.map_shard(shard).index.lengths[local]
        for name in names:
            column: Column = Numbers(lengths)
            if name != "tokens":
                column = documents.column(shards[store.shards[shard].name], name).of(local)
            for line, value in zip(lines, _as_list(column), strict=True):
                values[name][line] = value
    return {**found, **values}


def as_frame(store: Store, numbers: Sequence[int], *, text: bool) -> Any:
    """The same as a pandas.DataFrame; what has no value is <NA>."""
    with importing("pandas", extra="pandas", purpose="to_pandas"):
        import pandas
    columns = {name: _as_list(each) for name, each in columns_of(store, numbers, text=text).items()}
    frame = pandas.DataFrame(columns)
    lacking = [name for name, values in columns.items() if None in values]
    frame[lacking] = frame[lacking].convert_dtypes()
    return frame.set_index("document")
