"""Views by what is asked of documents: `select` by a condition, `ban` by ids and patterns, `dedup`.

    store -> columns, or texts, of a shard -> which documents stay -> Choice -> view

A store is looked at shard by shard, and what is remembered of a document is a bit. So memory does
not grow with it, but for what names many documents: ids, and the reasons why documents are gone.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tokenmill.errors import UsageError
from tokenmill.markup import Told
from tokenmill.options import (
    BanOptions,
    DedupOptions,
    ListedOptions,
    SelectOptions,
    as_list,
    with_options,
)
from tokenmill.search import Search
from tokenmill.sources.columns import verdicts
from tokenmill.store.annotations import Labels, Numbers
from tokenmill.store.documents import Documents
from tokenmill.store.reader import Store
from tokenmill.store.views import Choice, Gone, require_place, save_view
from tokenmill.where import KEPT, UNDECIDED, Condition, parse, unknown_column
from tokenmill.words import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.files import PathInput
    from tokenmill.store.annotations import Column
    from tokenmill.store.views import ViewFiles

BATCH_DOCUMENTS = 1 << 16
KEPT_KEYS = 1 << 22  # of documents, that are looked up at once
MOST_TIMES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewResult(Told):
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
    unknown: int
    """Lines of a list that no document has: they were passed over."""
    gone: tuple[Gone, ...]
    bytes: int
    """Of the file."""


@with_options(SelectOptions)
def select(asked: SelectOptions) -> ViewResult:
    """Write a view of the documents of which a condition holds."""
    require_place(asked.out)
    store = Store(asked.store, split=None)
    view, undecided = select_documents(store, asked.where, repeat=asked.repeat)
    return write(view, store, asked.out, undecided=undecided)


@with_options(BanOptions)
def ban(asked: BanOptions) -> ViewResult:
    """Write a view without documents that are listed, or that hold what is listed."""
    require_place(asked.out)
    store = Store(asked.store, split=None)
    choice, finder = Choice(store), finder_of(store, asked)
    for number, why in finder.found():
        choice.say(number, why < 0, reasons=finder.reasons, why=why)
    unknown = finder.require_use()
    named = {"ids": _shown_list(asked.ids), "match": _shown_list(asked.match)}
    given = {name: shown for name, shown in named.items() if shown}
    view = choice.view({"verb": "ban", **given, "key": asked.key})
    return write(view, store, asked.out, unknown=unknown)


def write(
    view: ViewFiles, store: Store, out: Any, *, undecided: int = 0, unknown: int = 0
) -> ViewResult:
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
        unknown=unknown,
        gone=view.facts.gone,
        bytes=path.stat().st_size,
    )


def select_documents(
    store: Store, where: str | None, *, repeat: str | None = None
) -> tuple[ViewFiles, int]:
    """A view of the documents of which a condition holds, and how many it says nothing of."""
    condition = None if where is None else parse(where)
    documents, choice, undecided = Documents(store), Choice(store), 0
    if condition is not None:
        require_columns(documents, condition)
    reasons = [f"not: {condition}"] if condition is not None else []
    reasons += [f"{repeat} is 0"] if repeat is not None else []
    for number, shard in enumerate(store.shards):
        why, times = np.full(shard.documents, -1), None
        if condition is not None:
            found = judged(documents, condition, number)
            undecided += int(np.count_nonzero(found == UNDECIDED))
            why[found != KEPT] = 0
        if repeat is not None:
            times = _times(documents, number, repeat)
            why[(why < 0) & (times == 0)] = len(reasons) - 1
        choice.say(number, why < 0, reasons=reasons, why=why, times=times)
    step = {"where": None if condition is None else str(condition), "repeat": repeat}
    given = {name: value for name, value in step.items() if value is not None}
    return choice.view({"verb": "select", **given}), undecided


def _times(documents: Documents, number: int, name: str) -> NDArray[np.int64]:
    """How often each document of a shard is to be there."""
    column = documents.column(number, name)
    values = column.values if isinstance(column, Numbers) else None
    if values is None or values.dtype.kind != "i" or column.missing:
        raise UsageError(
            f"the column {name!r} does not say of every document how often it is to be there",
            hint="a column of whole numbers, 0 or more, with none missing does",
        )
    if len(values) and not 0 <= values.min() <= values.max() <= MOST_TIMES:
        raise UsageError(
            f"the column {name!r} has numbers from {values.min()} to {values.max()}, and a"
            f" document is there 0 to {MOST_TIMES} times",
            hint="weights of a mixture say more than that: Mixture.from_store",
        )
    return values.astype(np.int64)


def without(store: Store, ids: Iterable[int], *, reason: str = "left out by number") -> ViewFiles:
    """A view without the documents of these numbers, of the split that the store is opened with."""
    numbers = np.unique(_whole_numbers(ids))
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


def _whole_numbers(ids: Iterable[int]) -> NDArray[np.int64]:
    """UsageError for what numpy would make numbers of: a mask, fractions, texts."""
    given = ids if isinstance(ids, np.ndarray) else np.array([*ids])
    if given.size and given.dtype.kind not in "iu":
        raise UsageError(
            f"documents are left out by their numbers, and this has {given.dtype} in it:"
            f" {given.ravel()[0].item()!r}",
            hint="give whole numbers; those of a mask are np.flatnonzero(mask)",
        )
    return given.astype(np.int64)


def made_again(store: Store, step: Mapping[str, Any]) -> Store:
    """A view that was never in a file, by what it says of how it was made."""
    if step["verb"] != "select":
        raise UsageError(
            f"a view of {str(store.path)!r} was made in Python with {step['verb']!r} and is in no"
            " file: which documents it had is not known",
            hint="write views that you train on to files: store.without(ids, out='kept.view')",
        )
    view, _ = select_documents(store.of_split(None), step.get("where"), repeat=step.get("repeat"))
    return Store.of_files(view, split=store.split)


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


# -------------------------------------------------------------------------------------------------
# What `ban` looks for: ids among the values of a column, or texts in documents.


class Finder(Protocol):
    """Finds the documents that are named."""

    reasons: list[str]

    def found(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Of each shard, for each document the number of the reason why it goes; -1: it stays."""

    def require_use(self) -> int:
        """How much of what was listed was not found; UsageError where all should have been."""


def finder_of(store: Store, asked: ListedOptions) -> Finder:
    """What finds the documents of a store that were named."""
    return _Patterns(store, asked) if asked.ids is None else _Ids(Documents(store), asked)


def look_up(
    keys_of: Callable[[int], Any], shards: int, wanted: Any
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Shard by shard, at which place of `wanted` the key of each document is; -1 for none."""
    waiting: list[Any] = []
    for number in range(shards):
        waiting.append(keys_of(number))
        is_last = number == shards - 1
        if is_last or sum(map(len, waiting)) >= KEPT_KEYS:
            places = pc.index_in(pa.concat_arrays(waiting), value_set=wanted).fill_null(-1)
            ends = np.cumsum([len(each) for each in waiting])[:-1]
            parts = np.split(places.to_numpy(zero_copy_only=False).astype(np.int64), ends)
            yield from enumerate(parts, number + 1 - len(waiting))
            waiting = []


def joined_keys(columns: Sequence[Any]) -> Any:
    """Keys as text, null where a part of one is."""
    texts = []
    for column in columns:
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if not (
            pa.types.is_integer(array.type)
            or pa.types.is_string(array.type)
            or pa.types.is_large_string(array.type)
            or pa.types.is_null(array.type)
        ):
            raise UsageError(
                f"a key is of type {array.type}, and not text or whole numbers: whether two are the"
                " same is not certain",
                hint="give it as text in both places",
            )
        texts.append(array.cast(pa.large_string()))
    if len(texts) == 1:
        return texts[0]
    return pc.binary_join_element_wise(*texts, pa.scalar(":", pa.large_string()))


def split_keys(key: str) -> list[str]:
    """The columns of a key, such as source,row."""
    return [*dict.fromkeys(each.strip() for each in key.split(","))]


def require_split(store: Store, keys: Sequence[str], split: str) -> None:
    """UsageError where documents are named by their numbers in a split that is not there."""
    if "document" in keys and split not in store.manifest.splits:
        known = ", ".join(store.manifest.splits)
        raise UsageError(
            f"{str(store.path)!r} has no split {split!r}, of whose documents numbers are given",
            hint=f"say of which they are: --split, one of {known}",
        )


def keys_of_shard(
    documents: Documents,
    number: int,
    keys: Sequence[str],
    *,
    split: str,
    field: Callable[[int, str], Any] | None = None,
) -> Any:
    """The keys of the documents of a shard; numbers of documents are those of a split."""
    shard = documents.store.shards[number]
    if "document" in keys and shard.split != split:
        return pa.nulls(shard.documents, pa.large_string())
    return joined_keys(
        [
            as_arrow(documents.column(number, key))
            if field is None or key in documents.names
            else field(number, key)
            for key in keys
        ]
    )


class _Ids:
    """Documents whose key is listed in a file."""

    def __init__(self, documents: Documents, asked: ListedOptions) -> None:
        self._documents, self._asked = documents, asked
        self._keys = split_keys(asked.key)
        require_split(documents.store, self._keys, asked.split)
        for key in self._keys:
            if key not in documents.names:
                documents.annotation(key)  # says which columns there are
        self._listed = [*dict.fromkeys(read_list(asked.ids))]
        self._is_found = np.zeros(len(self._listed), np.bool_)
        self.reasons = [f"its {asked.key} is listed in {_shown_list(asked.ids)}"]

    def found(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        documents = self._documents

        def keys(number: int) -> Any:
            return keys_of_shard(documents, number, self._keys, split=self._asked.split)

        wanted = pa.array(self._listed, pa.large_string())
        for number, places in look_up(keys, len(documents.store.shards), wanted):
            self._is_found[places[places >= 0]] = True
            yield number, np.where(places < 0, -1, 0)

    def require_use(self) -> int:
        unknown = [self._listed[place] for place in np.flatnonzero(~self._is_found).tolist()]
        return require_known(unknown, self._asked, f"the {self._asked.key} of no document")


class _Patterns:
    """Documents that hold a text of a list, or in which a regular expression finds something.

    A row that became several documents is one text, whose pieces go together.
    """

    def __init__(self, store: Store, asked: ListedOptions) -> None:
        self._store, self._asked = store, asked
        self._listed = [*dict.fromkeys(read_list(asked.match))]
        self._counts = np.zeros(len(self._listed), np.int64)
        how = "matches" if asked.regex else "holds"
        self.reasons = [f"it {how} {pattern!r}" for pattern in self._listed]
        self._rules = [_rule(pattern) for pattern in self._listed] if asked.regex else []

    def found(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        store = self._store
        held = [self._hits(place) for place in range(len(self._listed))] if not self._rules else []
        for number, shard in enumerate(store.shards):
            why = np.full(shard.documents, -1)
            for place, found in reversed([*enumerate(held)]):
                if (here := found.get(number)) is not None:
                    why[here] = place
                    self._counts[place] += len(here)
            starts = store.row_starts(number)
            for first, last in self._rows(number, starts):
                place = self._look(shard.first_document + first, shard.first_document + last)
                if place >= 0:
                    why[first] = place
                    self._counts[place] += 1
            yield number, why

    def _hits(self, place: int) -> dict[int, NDArray[np.int64]]:
        """Documents that hold a text within themselves, by shard."""
        found: dict[int, list[NDArray[np.int64]]] = {}
        for hits in Search(self._store, self._listed[place]).hits():
            if len(hits.documents):
                found.setdefault(hits.shard, []).append(np.unique(hits.documents))
        return {shard: np.concatenate(parts) for shard, parts in found.items()}

    def _rows(self, number: int, starts: NDArray[np.int64] | None) -> Iterator[tuple[int, int]]:
        """Rows whose text has to be made: all for expressions, else those of several pieces."""
        documents = self._store.shards[number].documents
        if starts is None:
            starts = np.arange(documents if self._rules else 0)
        ends = np.append(starts[1:], documents)[: len(starts)]
        for first, last in zip(starts.tolist(), ends.tolist(), strict=True):
            if self._rules or last > first + 1:
                yield first, last

    def _look(self, first: int, last: int) -> int:
        """The first pattern that is in the text of a row; -1 for none."""
        if self._store.has_pairs:
            texts = [self._store.decode(number) for number in range(first, last)]
        else:
            texts = [text_of(self._store, first, last)]
        for place, pattern in enumerate(self._listed):
            for text in texts:
                if self._rules[place].search(text) if self._rules else pattern in text:
                    return place
        return -1

    def require_use(self) -> int:
        unused = [self._listed[place] for place in np.flatnonzero(self._counts == 0).tolist()]
        return require_known(unused, self._asked, "in no document that is not gone already")


def text_of(store: Store, first: int, last: int) -> str:
    """The text of a row, which is that of its documents back to back."""
    return store.reference.decode(_of_text(store, [store[k] for k in range(first, last)]))


def _of_text(store: Store, documents: Sequence[Any]) -> Any:
    """The ids of a row, without what the build put around its text."""
    ids = documents[0] if len(documents) == 1 else np.concatenate(documents)
    if store.bos_id is not None and len(ids) and ids[0] == store.bos_id:
        ids = ids[1:]
    if store.eos_id is not None and len(ids) and ids[-1] == store.eos_id:
        ids = ids[:-1]
    return ids


def _rule(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is no regular expression: {error}",
            hint="correct it; without --regex, lines are texts as they stand",
        ) from error


def _shown_list(given: PathInput | Sequence[int | str] | None) -> str | None:
    is_path = given is None or isinstance(given, str | os.PathLike)
    return None if given is None else str(given) if is_path else "a list in Python"


def read_list(given: PathInput | Sequence[int | str] | None) -> list[str]:
    """The lines of a file, empty ones left out; or what a program listed."""
    if given is not None and not isinstance(given, str | os.PathLike):
        return _some([*map(str, given)], given)
    assert given is not None
    path = given
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the list {str(path)!r} cannot be read: {error}", hint="give a file of lines in UTF-8"
        ) from error
    found = [line for line in text.split("\n") if line.strip()]
    return _some([line.removesuffix("\r") for line in found], path)


def _some(found: list[str], given: PathInput | Sequence[int | str]) -> list[str]:
    if not found:
        raise UsageError(f"the list {_shown_list(given)!r} is empty", hint="write one to a line")
    return found


def require_known(unknown: Sequence[str], asked: ListedOptions, what: str) -> int:
    """How many things that were listed are not there; UsageError unless that is expected."""
    if unknown and asked.missing == "error":
        listed = asked.match if asked.ids is None else asked.ids
        shown = ", ".join(map(repr, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
        verb = "is" if len(unknown) == 1 else "are"
        raise UsageError(
            f"{count(len(unknown), 'line')} of {_shown_list(listed)!r} {verb} {what} of"
            f" {str(asked.store)!r}: {shown}; nothing was written",
            hint="correct the list or --key; where other stores have them: --missing count",
        )
    return len(unknown)


# -------------------------------------------------------------------------------------------------
# `dedup`: of rows with the same ids, which are those of the same text, the first one stays.
#
#   rows -> (hash of 128 bits, number) -> parts by the first bits of the hash, on disk where they
#   are many -> each part sorted -> the bits of rows that come again
#
# Ids without the tokens around a document are what is compared: encoding is a function of the text.

_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
_MOST_RECORDS = 1 << 22  # of a part: sorted in memory, 100 MB
_FLUSHED = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupResult(Told):
    """What is left of some stores when each text is kept once."""

    views: tuple[ViewResult, ...]
    """One for each store."""
    documents: int
    tokens: int
    of_documents: int
    of_tokens: int


@with_options(DedupOptions)
def dedup(asked: DedupOptions) -> DedupResult:
    """Write a view of each store in which every text is there once: in the first that has it."""
    stores = [Store(path, split=None) for path in as_list(asked.stores)]
    outs = _outs(asked, stores)
    first = stores[0].manifest.identity.tokenizer
    for store in stores[1:]:
        other = store.manifest.identity.tokenizer
        if other.fingerprint != first.fingerprint:
            raise UsageError(
                f"{str(stores[0].path)!r} and {str(store.path)!r} were made with different"
                f" tokenizers, {first.kind} of {first.vocab_size:,} ids and {other.kind} of"
                f" {other.vocab_size:,}: the same text has other ids",
                hint="build both with one tokenizer",
            )
    repeated, bases = _repeated(stores)
    made = []
    for store, base in zip(stores, bases, strict=True):
        choice, row = Choice(store), base
        for number, shard in enumerate(store.shards):
            starts = store.row_starts(number)
            starts = np.arange(shard.documents) if starts is None else starts
            sizes = np.diff(starts, append=shard.documents)
            again = repeated[row : row + len(starts)]
            row += len(starts)
            why = np.repeat(again, sizes).astype(np.int64) - 1
            choice.say(number, why < 0, reasons=_SAME[: 1 + (len(stores) > 1)], why=why)
        if row > base and repeated[base:row].all():
            raise UsageError(
                f"no document of {str(store.path)!r} would be left: each of its texts is in a store"
                " named before",
                hint="leave it out",
            )
        step = {"verb": "dedup", "stores": [str(each.path) for each in stores]}
        made.append(choice.view(step))
    outs[0].parent.mkdir(parents=True, exist_ok=True)
    # All of them, or none: of one store nothing may be left.
    views = [write(*each) for each in zip(made, stores, outs, strict=True)]
    names = ("documents", "tokens", "of_documents", "of_tokens")
    sums = {name: sum(getattr(view, name) for view in views) for name in names}
    return DedupResult(views=tuple(views), **sums)


_SAME = ["its text is an earlier document's", "its text is in a store named before"]


def _outs(asked: DedupOptions, stores: Sequence[Store]) -> list[Path]:
    """Where the views go: a file, or for several stores a folder with one for each."""
    out = Path(asked.out)
    if len(stores) == 1:
        return [require_place(out)]
    names = [Path(str(store.path)).stem for store in stores]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two of the stores are called {max(names, key=names.count)!r}, and so would two views",
            hint="name the stores in other ways, such as by a link",
        )
    if not out.is_dir():
        if out.exists():
            raise UsageError(
                f"{str(out)!r} is a file; for several stores, a folder with a view of each is"
                " written",
                hint="name a folder: --out unique",
            )
        return [out / f"{name}.view" for name in names]
    return [require_place(out / f"{name}.view") for name in names]


def _repeated(stores: Sequence[Store]) -> tuple[NDArray[np.uint8], list[int]]:
    """Of each row, whether its text came before: 1 in its store, 2 in another; and where the rows
    of each store begin."""
    total = sum(store.num_documents for store in stores)
    parts = -(-total // _MOST_RECORDS)
    bases = [0]
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        kept = _Parts(Path(folder), parts)
        for store in stores:
            for digests in _hashes(store):
                kept.add(digests)
            bases.append(kept.rows)
        repeated = np.zeros(bases[-1], np.uint8)
        for records in kept.parts():
            records.sort(order=("high", "low", "row"))
            same = (records["high"][1:] == records["high"][:-1]) & (
                records["low"][1:] == records["low"][:-1]
            )
            begins = np.flatnonzero(np.append(True, ~same)) if len(records) else np.zeros(0, int)
            firsts = np.repeat(records["row"][begins], np.diff(begins, append=len(records)))
            again = np.append(False, same)[: len(records)]
            rows, firsts = records["row"][again], firsts[again]
            ends = np.array(bases[1:])
            is_other = ends.searchsorted(rows, "right") != ends.searchsorted(firsts, "right")
            repeated[rows] = 1 + is_other
    return repeated, bases[:-1]


class _Parts:
    """Records by the first bits of their hash: in memory, or where there are many, in files."""

    def __init__(self, folder: Path, count: int) -> None:
        self._count = max(1, count)
        self._files = [folder / str(k) for k in range(self._count)] if count > 1 else []
        self.rows = 0
        self._held: list[NDArray[Any]] = []

    def add(self, digests: bytes) -> None:
        """Take the digests of some rows, which follow those taken before."""
        found = np.frombuffer(digests, "<u8").reshape(-1, 2)
        records = np.empty(len(found), _RECORD)
        records["high"], records["low"] = found[:, 0], found[:, 1]
        records["row"] = np.arange(self.rows, self.rows + len(found))
        self.rows += len(found)
        if not self._files:
            self._held.append(records)
            return
        places = (records["high"] % np.uint64(self._count)).astype(np.int64)
        order = np.argsort(places, kind="stable")
        ends = np.searchsorted(places[order], np.arange(self._count + 1))
        for path, first, last in zip(self._files, ends[:-1], ends[1:], strict=True):
            if first < last:
                with path.open("ab") as file:
                    file.write(records[order[first:last]].tobytes())

    def parts(self) -> Iterator[NDArray[Any]]:
        for path in self._files:
            yield np.fromfile(path, _RECORD) if path.exists() else np.empty(0, _RECORD)
            path.unlink(missing_ok=True)
        if not self._files:
            yield np.concatenate([np.empty(0, _RECORD), *self._held])


def _hashes(store: Store) -> Iterator[bytes]:
    """Digests of the texts of rows, many at a time."""
    for number, shard in enumerate(store.shards):
        starts = store.row_starts(number)
        begins = None if starts is None else set(starts.tolist())
        digests: list[bytes] = []
        row: list[Any] = []  # the documents of one
        for place, ids in enumerate(store.map_shard(number).documents()):
            if row and (begins is None or place in begins):
                digests.append(_digest(store, row))
                row = []
                if len(digests) == _FLUSHED:
                    yield b"".join(digests)
                    digests = []
            row.append(ids)
        if shard.documents:
            yield b"".join([*digests, _digest(store, row)])


def _digest(store: Store, row: Sequence[Any]) -> bytes:
    """Of the ids of a row, without what the build put around it."""
    if store.has_pairs:  # two texts
        both = b"".join(xxhash.xxh3_128_digest(ids.data) for ids in row)
        return xxhash.xxh3_128_digest(both)
    return xxhash.xxh3_128_digest(_of_text(store, row).data)
