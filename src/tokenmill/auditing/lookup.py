"""Where rows come from: the longest runs of tokens that they share with a store's documents.

A place is known by the tokens of a window, so what is shorter is found at the ends of documents
alone. Texts that are there several times are told apart by which was read less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.order import Ints
    from tokenmill.store.reader import Store

    Ids: TypeAlias = NDArray[np.int32]
    Bools: TypeAlias = NDArray[np.bool_]


WINDOW = 8  # tokens by which a place is recognised
CHANCE = 64  # tokens in which documents may begin alike
MOST_INDEXED = 8 << 20  # windows; of larger stores every second, third, ... is known
MOST_TOKENS = 200 << 20
MOST_ALIKE = 4096  # places that are compared, of those that begin alike


class Overlap(NamedTuple):
    """Tokens of a row that follow each other in the store."""

    at: int  # in the row
    place: int  # in the store
    length: int


def windows(ids: NDArray[Any], length: int = WINDOW) -> NDArray[np.uint64]:
    """A number for every `length` tokens in a row."""
    places = max(0, len(ids) - length + 1)
    found = np.zeros(places, np.uint64)
    for step in range(length):
        found *= np.uint64(0x9E3779B97F4A7C15)
        found += ids[step : step + places].astype(np.uint64) + np.uint64(1)
    found ^= found >> np.uint64(29)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    return found ^ (found >> np.uint64(32))


class Lookup:
    """The tokens of a store's split in memory, and how often each was read."""

    def __init__(self, store: Store) -> None:
        if store.num_tokens > MOST_TOKENS:
            raise UsageError(
                f"{store.path!s} has {store.num_tokens:,} tokens; rows are looked up in memory,"
                f" among at most {MOST_TOKENS:,}",
                hint="audit a loader of a part of the text, built with: tokenmill build ..."
                " --limit N",
            )
        lengths = store.lengths().astype(np.int64)
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        self.ids = np.empty(store.num_tokens, np.int32)
        for start, ids in zip(self.starts, store, strict=True):
            self.ids[start : start + len(ids)] = ids
        self.mask: Bools | None = None
        if store.has_mask:
            masks = [cast("Any", store.mask(number)) for number in range(len(store))]
            self.mask = np.concatenate([*masks, np.zeros(0)]).astype(bool)
        self.eos_id, self.bos_id = store.eos_id, store.bos_id
        self.times_read = np.zeros(len(self.ids), np.int32)
        self.was_label = np.zeros(len(self.ids), bool)
        self.after_row = np.zeros(len(self.ids) + 1, bool)  # a row ended before it
        keys = windows(self.ids)
        self.every = max(1, len(keys) // MOST_INDEXED)
        places = np.flatnonzero(keys % np.uint64(self.every) == 0)
        order = np.argsort(keys[places], kind="stable")
        self._places, self._keys = places[order], keys[places][order]
        self._edges: dict[tuple[str, int], tuple[NDArray[np.uint64], Ints]] = {}

    def find(self, ids: Ids) -> list[Overlap]:
        """The runs of a row, and that they were read."""
        keys = windows(ids)
        first = np.searchsorted(self._keys, keys, "left")
        last = np.searchsorted(self._keys, keys, "right")
        known = np.flatnonzero(last > first)
        runs: list[Overlap] = []
        done = seek = 0
        while (next_ := int(np.searchsorted(known, seek))) < len(known):
            at = int(known[next_])
            alike = self._longest(ids, at, self._places[first[at] : last[at]])
            best = int(alike[np.argmin(self.times_read[alike])])
            run = self._around(ids, at, best, done)
            if run.length < WINDOW:  # another text had the same number
                seek = at + 1
                continue
            before = self.starts[np.searchsorted(self.starts, run.place) :][:1]
            if run.at > done and len(before) and before[0] < run.place + min(WINDOW, run.length):
                # What is like the end of the document before it for a few tokens by chance.
                more = int(before[0]) - run.place
                run = Overlap(run.at + more, run.place + more, run.length - more)
                if run.length < WINDOW:
                    seek = at + 1
                    continue
            run = self._from_beginning(ids, runs, run)
            at = run.at + run.length
            if at < len(ids):
                # What is like the next document for a few tokens by chance.
                end = run.place + run.length
                past = end - int(np.append(0, self.ends)[np.searchsorted(self.ends, end, "right")])
                if past < min(WINDOW, run.length):
                    run = run._replace(length=run.length - past)
            done = seek = run.at + run.length
            runs.append(run)
        if self.every == 1:
            runs = list(self._with_short(ids, runs))
        for run in runs:
            self.times_read[run.place : run.place + run.length] += 1
        if runs and runs[-1].at + runs[-1].length == len(ids):
            self.after_row[runs[-1].place + runs[-1].length] = True
        return runs

    def _longest(self, ids: Ids, at: int, places: Ints) -> Ints:
        """Of places that begin alike, those that stay so longest."""
        if len(places) > MOST_ALIKE:
            least = np.argpartition(self.times_read[places], MOST_ALIKE)
            places = places[least[:MOST_ALIKE]]
        length = 4 * WINDOW
        while len(places) > 1:
            mine = ids[at : at + length]
            reach = np.minimum(places[:, None] + np.arange(len(mine)), len(self.ids) - 1)
            differs = self.ids[reach] != mine
            same = np.where(differs.any(axis=1), differs.argmax(axis=1), len(mine))
            places = places[same == same.max()]
            if same.max() < length:
                break
            length *= 4
        return places

    def _around(self, ids: Ids, at: int, place: int, least: int) -> Overlap:
        """What a row and the store have in common around a place of each."""
        after = min(len(ids) - at, len(self.ids) - place)
        other = np.flatnonzero(ids[at : at + after] != self.ids[place : place + after])
        length = int(other[0]) if len(other) else after
        room = min(at - least, place)
        before = ids[at - room : at] != self.ids[place - room : place]
        other = np.flatnonzero(before[::-1])
        more = int(other[0]) if len(other) else room
        return Overlap(at - more, place - more, length + more)

    def _from_beginning(self, ids: Ids, runs: list[Overlap], run: Overlap) -> Overlap:
        """The run from the beginning of its document on, if the one before has that by chance."""
        start = int(self.starts[self.document_at(run.place)])
        more = run.place - start
        if not runs or not 0 < more < CHANCE or runs[-1].at + runs[-1].length != run.at:
            return run
        before = runs[-1]
        if (
            more >= before.length
            or (ids[run.at - more : run.at] != self.ids[start : run.place]).any()
        ):
            return run
        runs[-1] = before._replace(length=before.length - more)
        return Overlap(run.at - more, start, run.length + more)

    def _with_short(self, ids: Ids, runs: Sequence[Overlap]) -> Iterator[Overlap]:
        """The runs, and documents or ends of documents that are shorter than a window."""
        done = 0
        for run in (*runs, Overlap(len(ids), 0, 0)):
            while done < run.at:
                found = self._short(ids, done, run.at)
                done += found.length or 1
                if found.length:
                    yield found
            if run.length:
                yield run
            done = max(done, run.at + run.length)

    def _short(self, ids: Ids, begin: int, end: int) -> Overlap:
        kinds = ["whole"] if begin else ["end", "whole"]
        if end == len(ids):
            kinds.append("begin")
        for length in range(min(WINDOW - 1, end - begin), 0, -1):
            key = windows(ids[begin : begin + length], length)
            for kind in kinds:
                if kind == "begin" and begin + length < end:
                    continue
                keys, places = self._edge(kind, length)
                first, last = (
                    np.searchsorted(keys, key[0], "left"),
                    np.searchsorted(keys, key[0], "right"),
                )
                if first < last:
                    alike = places[first:last]
                    return Overlap(begin, int(alike[np.argmin(self.times_read[alike])]), length)
        return Overlap(begin, 0, 0)

    def _edge(self, kind: str, length: int) -> tuple[NDArray[np.uint64], Ints]:
        """Numbers of the first or last tokens of documents, in order, and where they are."""
        if (kind, length) not in self._edges:
            sizes = self.ends - self.starts
            chosen = sizes == length if kind == "whole" else sizes >= length
            places = self.ends[chosen] - length if kind == "end" else self.starts[chosen]
            keys = windows(self.ids, length)[places] if len(places) else np.zeros(0, np.uint64)
            order = np.argsort(keys, kind="stable")
            self._edges[kind, length] = keys[order], places[order]
        return self._edges[kind, length]

    def copies(self) -> Iterator[tuple[Ints, Ints]]:
        """How often what begins at a place, or ends there, is in the store, and was read."""
        keys = windows(self.ids)
        if self.every > 1 or not len(keys):
            return
        _, kind, number = np.unique(keys, return_inverse=True, return_counts=True)
        for places in (slice(0, len(keys)), slice(WINDOW - 1, None)):
            total, times = np.ones(len(self.ids), np.int64), np.zeros(len(self.ids), np.int64)
            total[places] = number[kind]
            times[places] = np.bincount(kind, self.times_read[places])[kind]
            yield total, times

    def document_at(self, place: int) -> int:
        """Number of the document that holds a token."""
        return int(np.searchsorted(self.ends, place, "right"))

    def begins(self, runs: Sequence[Overlap], length: int) -> Bools:
        """Where documents, or parts of them, begin in a row."""
        found = np.zeros(length, bool)
        for run in runs:
            found[run.at] = True
            low, high = np.searchsorted(self.starts, (run.place, run.place + run.length))
            found[self.starts[low:high] - run.place + run.at] = True
        found[:1] = False
        return found
