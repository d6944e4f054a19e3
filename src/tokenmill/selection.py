"""Views by what is asked of documents: `select` by a condition, `ban` by ids and patterns, `dedup`.

    store -> columns, or texts, of a shard -> which documents stay -> Choice -> view

A store is looked at shard by shard, and what is remembered of a document is a bit. So memory does
not grow with it, but for what names many documents: ids, and the reasons why documents are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tokenmill.errors import UsageError
from tokenmill.options import SelectOptions, with_options
from tokenmill.sources.columns import verdicts
from tokenmill.store.annotations import Labels
from tokenmill.store.documents import Documents
from tokenmill.store.reader import Store
from tokenmill.store.views import Choice, Gone, require_place, save_view
from tokenmill.where import KEPT, UNDECIDED, Condition, parse, unknown_column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from tokenmill.store.annotations import Column
    from tokenmill.store.views import ViewFiles

BATCH_DOCUMENTS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewResult:
    """What is in a view, and what is not."""

    out: str
    store: str
    documents: int
    tokens: int
    of_documents: int
    """Of the store, or of the view that this is made of."""
    of_tokens: int
    undecided: int
    """Documents of which the condition says nothing, since a value is missing: they are gone."""
    gone: tuple[Gone, ...]
    bytes: int
    """Of the file."""


@with_options(SelectOptions)
def select(asked: SelectOptions) -> ViewResult:
    """Write a view of the documents of which a condition holds."""
    require_place(asked.out)
    store = Store(asked.store, split=None)
    view, undecided = select_documents(store, asked.where)
    return write(view, store, asked.out, undecided=undecided)


def write(view: ViewFiles, store: Store, out: Any, *, undecided: int = 0) -> ViewResult:
    """Save a view, and say what is in it."""
    path = save_view(view, out)
    splits = view.facts.splits.values()
    return ViewResult(
        out=str(out),
        store=str(store.path),
        documents=sum(each.documents for each in splits),
        tokens=sum(each.tokens for each in splits),
        of_documents=store.num_documents,
        of_tokens=store.num_tokens,
        undecided=undecided,
        gone=view.facts.gone,
        bytes=path.stat().st_size,
    )


def select_documents(store: Store, where: str) -> tuple[ViewFiles, int]:
    """A view of the documents of which a condition holds, and how many it says nothing of."""
    condition = parse(where)
    documents = Documents(store)
    require_columns(documents, condition)
    choice, undecided = Choice(store), 0
    reason = f"not: {condition}"
    for number in range(len(store.shards)):
        found = judged(documents, condition, number)
        undecided += int(np.count_nonzero(found == UNDECIDED))
        choice.say(number, found == KEPT, reasons=[reason])
    return choice.view({"verb": "select", "where": str(condition)}), undecided


def without(store: Store, ids: Iterable[int], *, reason: str = "left out by number") -> ViewFiles:
    """A view without the documents of these numbers, of the split that the store is opened with."""
    numbers = np.unique(np.fromiter(ids, np.int64))
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < len(store):
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise UsageError(
            f"there is no document {wrong:,} in {store!r}",
            hint=f"documents have the numbers 0 to {len(store) - 1:,}",
        )
    whole = store.of_split(None)
    choice = Choice(whole)
    places = {shard.name: shard for shard in store.shards}
    for number, shard in enumerate(whole.shards):
        kept = np.ones(shard.documents, np.bool_)
        if (mine := places.get(shard.name)) is not None:
            first = mine.first_document
            low, high = numbers.searchsorted((first, first + shard.documents))
            kept[numbers[low:high] - first] = False
        choice.say(number, kept, reasons=[reason])
    return choice.view({"verb": "without", "documents": len(numbers), "split": store.split})


def require_columns(documents: Documents, condition: Condition) -> None:
    """UsageError for a column that is not there, or holds other than what is asked of it."""
    for name, kind in condition.columns.items():
        if name not in documents.names:
            problem, hint = unknown_column(name, documents.names)
            raise UsageError(f"{documents.shown!r} has {problem}", hint=hint)
        held = documents.kind(name)
        if kind not in (None, held):
            raise UsageError(
                f"the column {name!r} holds {held}, and the condition compares it with {kind}: no"
                " document would be kept",
                hint="text stands in single quotes, numbers without; a flag is compared with true"
                " or false",
            )


def judged(documents: Documents, condition: Condition, number: int) -> NDArray[np.int8]:
    """A verdict on each document of a shard."""
    count = documents.store.shards[number].documents
    whole = {name: documents.column(number, name) for name in condition.columns}
    parts = [np.zeros(0, np.int8)]
    for first in range(0, count, BATCH_DOCUMENTS):
        here = slice(first, min(first + BATCH_DOCUMENTS, count))
        arrays = {name: as_arrow(each.of(here)) for name, each in whole.items()}
        parts.append(verdicts(condition, arrays, here.stop - here.start))
    return np.concatenate(parts)


def as_arrow(column: Column) -> Any:
    """The column as Arrow has it."""
    if isinstance(column, Labels):
        places = pa.array(column.places, mask=column.places < 0)
        return pa.DictionaryArray.from_arrays(places, pa.array(column.texts, pa.string()))
    values = column.values
    values = values.astype(np.bool_) if values.dtype == np.uint8 else values
    return pa.array(values, mask=None if column.given is None else ~column.given)
