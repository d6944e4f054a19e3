"""The loader: an endless, exact, resumable stream of batches from stores.

    Plan (which rows make a step) -> ordered_rows (shuffled) -> Layout (pieces of the stores)
        -> Window (many steps, found) -> chunk (the tokens of some) -> Batch

Everything about a batch follows from the number of its step; nothing is remembered between steps
but that number. A global batch is `batch_size * world_size` rows, of which rank r takes the r-th
`batch_size`; so ranks, workers and prefetching change who reads a row, never which rows there are.
"""

from __future__ import annotations

import copy
import operator
import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil, expm1, inf
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypeVar, cast

import numpy as np

from tokenmill.errors import StateError, UsageError, abridged
from tokenmill.loader.batch import (
    LABELS,
    NO_ROW,
    RowOrigin,
    Window,
    batches_of,
    check_pad_id,
)
from tokenmill.loader.mixture import (
    FOLLOWED_VERSION,
    Era,
    Extent,
    Mixture,
    Plan,
    Update,
    check_state,
    make_state,
    rows_of_batch,
)
from tokenmill.loader.order import (
    NearbyWindows,
    check_shuffle,
    dealt,
    exact_weight,
    ordered_rows,
    places_of_rows,
)
from tokenmill.loader.packing import find_packing, pairs_of_rows
from tokenmill.markup import Shown
from tokenmill.store.following import Follower
from tokenmill.store.format import MAX_DOCUMENT_TOKENS
from tokenmill.store.stream import TokenStream, distinct, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tokenmill.files import PathInput
    from tokenmill.loader.batch import Batch, Chunk
    from tokenmill.loader.mixture import Epochs, SavedState, StageRun, StoreInput
    from tokenmill.loader.order import Ints
    from tokenmill.loader.packing import Layout
    from tokenmill.store.reader import Store


# -------------------------------------------------------------------------------------------------
# Reads ahead in a thread, where that pays: items are made while others are being used.
#
# Handing an item from thread to thread costs some 50 microseconds, more than it takes to make one
# from memory. So items are made where they are used until making them turns out slow, as it does
# when the disk or the network has to be waited for.
#
# The thread holds no reference to the iterator that the user has, so an abandoned one is collected
# and its thread ends; so does the thread of one that is closed, that raised, or that outlives the
# program.

T = TypeVar("T")
SLOW_ITEMS = 3  # so many slow items in a row make a thread worth its cost
JOIN_SECONDS = 10.0  # a read of a remote store may be under way when the reader is told to stop


def read_ahead_when_slow(
    items: Iterator[T], *, depth: int, name: str, slow_seconds: Callable[[T], float]
) -> Iterator[T]:
    """The items; after some that took longer than `slow_seconds` the others are made in a thread.

    The first item is not judged by: it pays for whatever has to be set up. One slow item says
    little either: the machine may have been busy with something else.
    """
    num_slow, is_judged = 0, False
    started = perf_counter()
    for item in items:
        is_slow = is_judged and perf_counter() - started > slow_seconds(item)
        num_slow, is_judged = num_slow + 1 if is_slow else 0, True
        yield item
        if num_slow == SLOW_ITEMS:
            break
        started = perf_counter()
    else:
        return
    ahead = ReadAhead(items, depth=depth, name=name)
    try:
        yield from ahead
    finally:
        ahead.close()


class ReadAhead(Generic[T]):
    """An iterator whose items are made in a thread, at most `depth` ahead.

    `within` makes the context that the thread works in.
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        depth: int,
        name: str,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        room: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            room.put(None)
        self._room = room
        self._ready: SimpleQueue[T | BaseException] = SimpleQueue()
        self._process = os.getpid()
        stopped = threading.Event()
        thread = threading.Thread(
            target=_produce,
            args=(items, room, self._ready, stopped, within, _ends()),
            name=name,
            # Interpreter exit joins other threads before anything could tell them to stop.
            daemon=True,
        )
        thread.start()
        # Also called at interpreter exit.
        self._close = weakref.finalize(
            self, _close, room, self._ready, stopped, thread, self._process
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._process:
            raise UsageError(
                "this process was forked while it was iterating: the thread that reads ahead was"
                " left behind by fork",
                hint="begin to iterate in the process that uses the batches",
            )
        if self.is_closed:
            raise StopIteration
        item = self._ready.get()
        if not isinstance(item, BaseException):
            self._room.put(None)
            return item
        self._ready.put(StopIteration())
        try:
            raise item
        finally:
            del item  # its traceback holds this frame

    @property
    def num_ready(self) -> int:
        """Items that wait to be taken."""
        return 0 if self.is_closed else self._ready.qsize()

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    def close(self) -> None:
        """End the thread and wait for it."""
        self._close()


def _produce(
    items: Iterator[T],
    room: SimpleQueue[None],
    ready: SimpleQueue[T | BaseException],
    stopped: threading.Event,
    within: Callable[[], AbstractContextManager[object]],
    ends: tuple[threading.Event, ...],
) -> None:
    _THREAD.ends = (*ends, stopped)
    try:
        with within():
            while True:
                room.get()
                if stopped.is_set():
                    return
                # No name for the item: it is the consumer's alone while this waits for room.
                ready.put(next(items))
    except BaseException as error:  # also StopIteration: the consumer raises it again
        ready.put(error)


_THREAD = threading.local()


def _ends() -> tuple[threading.Event, ...]:
    """What tells this thread to end, and those that wait for it."""
    return getattr(_THREAD, "ends", ())


def is_stopped() -> bool:
    """Whether nobody wants any more what this thread makes: for who waits long in it."""
    return any(each.is_set() for each in _ends())


def _close(
    room: SimpleQueue[None],
    ready: SimpleQueue[Any],
    stopped: threading.Event,
    thread: threading.Thread,
    process: int,
) -> None:
    if os.getpid() != process:
        return
    stopped.set()
    room.put(None)
    ready.put(StopIteration())
    # The garbage collector may call this from any thread. A program may end just before this one
    # begins, which then finds that it is stopped.
    if thread is not threading.current_thread() and thread.ident is not None:
        thread.join(JOIN_SECONDS)


# Tokens read in one go, 0.5 or 1 MB: enough to make what a read costs beside copying small, and
# little enough to stay in a core's cache on its way.
CHUNK_TOKENS = 1 << 18
# Rows whose order is computed in one go: for one batch it costs as much as for a hundred.
DRAW_ROWS = 4096
MOST_DRAWN = 1 << 18  # rows of those that were drawn, told in one go
# Pieces of rows found in one go, about: enough to make what finding costs small, and little enough
# to take a fraction of a millisecond.
WINDOW_PIECES = 1 << 13
# Of the entries of cu_seqlens that an average batch needs, to have them in one size mostly; and of
# that, the other sizes, in doublings from the last on.
ROOM_OF_AVERAGE = 1.1
ROOMS = (0.75, 1, 1.25, 1.5, 2)
SLOW_READ_SECONDS = 2e-3
SLOW_READ_SECONDS_PER_BYTE = 2e-9
CHOICES: dict[str, tuple[str | None, ...]] = {
    "boundaries": ("keep", "mask"),
    "last": ("pad", "keep", "drop"),
    "labels": LABELS,
    "balance": (None, "attention"),
}
DTYPES: dict[str, np.dtype[np.integer] | None] = {
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "stored": None,
}

# Steps of a window that are read in one go: the places of the first, and after the last.
_Part: TypeAlias = tuple[Window, int, int]
# What a user may say of attention windows: from which token of the run on, how many tokens.
Schedule: TypeAlias = "int | Sequence[tuple[float, int | None]] | None"


class Loader(Shown):
    """Batches of rows from a store or a mixture, without end unless `epochs` says so.

    >>> loader = tokenmill.Loader("my-store", split="train", seq_len=2048, batch_size=16)
    >>> for batch in loader:
    ...     batch.input_ids, batch.labels

    Iterating again goes on where the last iteration stopped. `batch_size` is that of this rank.
    `boundaries="mask"` leaves out the label that is the first token of another document. `last`
    says what becomes of rows that do not fill the last batch of a run that ends: filled up with
    rows of padding, whose labels do not count ("pad"), a smaller batch, with which the last of
    several ranks may have no row at all ("keep"), or left out ("drop"). `labels="same"` is for
    models that shift labels by themselves, as those of transformers do: a row is `seq_len` tokens,
    all of them inputs.

    `balance="attention"` deals the rows of a global batch so that attention within documents is
    about equally much work on every rank; with `accumulate=N`, the rows of N steps that your loop
    adds up to one update. `window` cuts what attention stays within (`cu_seqlens`): so many tokens,
    or a schedule `[(0, 1024), (2e9, 4096), (4e9, None)]` over the tokens of the run.

    `follow=True` reads a store whose build goes on, here or on other machines: a batch is made as
    soon as the build has committed what is in it, and is the one that a loader with the same order
    (`shuffle="nearby"`, or False) makes of the finished store. Where that has to be waited for,
    `on_wait` is told when it begins and ends. A build that fails is a BuildError.
    """

    @abridged
    def __init__(
        self,
        source: StoreInput | Mixture | Follower,
        *,
        seq_len: int,
        batch_size: int,
        packing: str = "concat",
        boundaries: str = "keep",
        labels: str = "next",
        shuffle: bool | str = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: float | None = None,
        last: str = "pad",
        dtype: str = "int64",
        pad_id: int | None = None,
        prefetch: int = 2,
        cu_seqlens_capacity: int | Sequence[int] | None = None,
        split: str | None = None,
        balance: str | None = None,
        accumulate: int = 1,
        window: Schedule = None,
        follow: bool = False,
        on_wait: Callable[[bool], None] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "on_wait")}
        self._given = given if follow else None  # to follow from here on in another process
        self.follower: Follower | None = None
        self.build_wait_seconds = 0.0
        """How long iterations have waited for a build that is followed."""
        if follow:
            shuffle = "nearby" if shuffle is True else shuffle
            check_followed(source, packing=packing, shuffle=shuffle, epochs=epochs)
            found = source
            if not isinstance(found, Follower):
                found = Follower(cast("PathInput", source), split=split, on_wait=on_wait)
            given |= {"source": found.path, "split": found.split}
            self.follower, source, split = found, found.current, None
        self.mixture = _mixture(cast("StoreInput", source), epochs=epochs, split=split)
        self.packing = find_packing(packing)
        self.shuffle = check_shuffle(shuffle)
        self.pad_id = check_pad_id(self.mixture.stores[0], pad_id)
        self.seq_len, self.batch_size, self.world_size = seq_len, batch_size, world_size
        self.boundaries, self.last, self.prefetch = boundaries, last, prefetch
        self.labels = labels
        self.seed, self.rank = seed, rank
        self.balance, self.accumulate = balance, accumulate
        self.window = _reaches(window)
        self.cu_seqlens_capacity = None
        if cu_seqlens_capacity is not None:
            self.cu_seqlens_capacity = _capacities(cu_seqlens_capacity)
        self._check(dtype)
        self.dtype = DTYPES[dtype]  # of input_ids and labels; None: as they are stored
        self._is_remote = any(store.is_remote for store in self.mixture.stores)
        # Documents per token, of the store where they are shortest.
        self._density = max(self._densities())
        self._lay_out = self._made_layouts()
        self._set_grown(((),) * len(self.mixture.names))
        for stage in self.mixture.stages:
            rows_of_batch(batch_size, seq_len=seq_len, stage_seq_len=stage.seq_len or seq_len)
        self._plan = self._first_plan = self._make_plan()
        self._step = 0
        self._has_ended = False
        if epochs is not None and not self._plan.is_open and not self.num_steps:
            raise UsageError(
                f"epochs={epochs!r} of {self.layouts()[0].num_rows:,} rows make no batch of"
                f" {batch_size * world_size:,} with last={last!r}",
                hint='use a smaller batch, or last="pad"',
            )

    def _check(self, dtype: object) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise UsageError(
                    f"{name}={value!r} is not known",
                    hint=f"use one of: {', '.join(map(repr, known))}",
                )
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UsageError(
                f"dtype={dtype!r} is not known",
                hint='use "int64", "int32" or "stored" (narrow ids, labels as views)',
            )
        require_number("seq_len", self.seq_len, at_least=2 if self.labels == "same" else 1)
        for name in ("batch_size", "world_size", "accumulate"):
            require_number(name, getattr(self, name), at_least=1)
        require_number("prefetch", self.prefetch, at_least=0)
        if self.accumulate > 1 and self.balance is None:
            raise UsageError(
                f"accumulate={self.accumulate} says over which steps cost is balanced, and nothing"
                " is without balance=",
                hint='give balance="attention" too, or leave it out',
            )
        if self.seq_len >= MAX_DOCUMENT_TOKENS:
            raise UsageError(
                f"seq_len={self.seq_len:,} is more than any document can have",
                hint="give what your model takes, like seq_len=2048",
            )
        if type(self.seed) is not int:
            raise UsageError(f"seed={self.seed!r} is not a whole number", hint="use one: seed=0")
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank={self.rank!r} is not one of the {self.world_size} ranks",
                hint=f"ranks count from 0 to world_size - 1 = {self.world_size - 1}",
            )

    def _made_layouts(self) -> Callable[[int], tuple[Layout, ...]]:
        is_full, fewer = self.shuffle == "full", int(self.labels == "same")
        streams = tuple(open_stream(store, scattered=is_full) for store in self.mixture.stores)
        # Not a method: a plan that held its loader would keep the maps of one that was dropped.
        return partial(_lay_out, self.packing, streams, {}, fewer)

    def _densities(self) -> list[float]:
        """Documents per token of each store; a store that is followed tells by its first shard,
        which its loader sees before and after the build."""
        if self.shuffle == "nearby":
            firsts = [next(s for s in store.shards if s.tokens) for store in self.mixture.stores]
            return [shard.documents / shard.tokens for shard in firsts]
        return [store.num_documents / store.num_tokens for store in self.mixture.stores]

    def _make_plan(self, **origin: Any) -> Plan:
        is_open = self.follower is not None and not self.follower.is_finished
        return Plan(
            self.mixture,
            seq_len=self.seq_len,
            batch_rows=self.batch_size * self.world_size,
            measure=None if is_open else partial(_measure, self._lay_out),
            **{"grown": self._grown, **origin},
        )

    # A store that grew since a state was saved: rows of earlier epochs are of what it held then.
    #
    # To whom reads rows, what a source held before is one more source, whose number comes after
    # those of the mixture.

    def _set_grown(self, grown: tuple[tuple[Era, ...], ...]) -> None:
        self._grown = grown
        eras = [(source, era) for source, each in enumerate(grown) for era in range(len(each))]
        first = len(self.mixture.names)
        self._eras = dict(zip(eras, range(first, first + len(eras)), strict=True))
        # The last is the source of a row of padding.
        self._sources = np.array([*range(first), *(source for source, _ in eras), NO_ROW], np.int64)
        self._earlier: dict[int, Store] = {}
        self._earlier_layouts: dict[tuple[int, int], Layout] = {}

    def sources_of(self, numbers: Ints) -> Ints:
        """The sources of the mixture that rows are of, whenever they were added."""
        found: Ints = self._sources[numbers] if self._eras else numbers
        return found

    def layout_of(self, number: int, seq_len: int) -> Layout:
        """The layout of a source, or of what one held before it grew."""
        if number < len(self.mixture.names):
            return self.layouts(seq_len)[number]
        key = number, seq_len
        if key not in self._earlier_layouts:
            stream = open_stream(self._store_of(number), scattered=self.shuffle == "full")
            fewer = int(self.labels == "same")
            self._earlier_layouts[key] = self.packing(stream, seq_len=seq_len - fewer)
        return self._earlier_layouts[key]

    def _store_of(self, number: int) -> Store:
        """What a source held before it grew; StateError where that is not kept any more."""
        if number not in self._earlier:
            source, era = next(key for key, value in self._eras.items() if value == number)
            store, told = self.mixture.stores[source], self._grown[source][era]
            found = store.as_it_was(told.content)
            if found is None:
                raise StateError(
                    f"{str(store.path)!r} does not keep what it held until epoch {told.until} of"
                    " this run: it was pruned, or text was changed or dropped since",
                    hint="what comes after that epoch can be read without it; for what was before,"
                    " give a copy of the store that has its snapshots",
                )
            self._earlier[number] = found
        return self._earlier[number]

    def growth(self) -> list[Growth]:
        """Sources that have grown since a state was saved, and whose new documents are to come."""
        found, run = [], self._plan.find(self._step)
        for source, eras in enumerate(self._grown if run is not None else ()):
            assert run is not None
            last = run.epochs[source].ranges[-1]
            row = run.rows(self._step).start
            if not eras or last.start < run.schedule.counts(row)[source]:
                continue
            (begins,) = run.schedule.rows_at(source, np.array([last.start])).tolist()
            is_drawn = begins >= 0 and (run.num_rows is None or begins < run.num_rows)
            store, before = (
                self.mixture.stores[source],
                self._store_of(max(value for (of, _), value in self._eras.items() if of == source)),
            )
            found.append(
                Growth(
                    source=self.mixture.names[source],
                    documents=store.num_documents,
                    documents_before=before.num_documents,
                    epoch=last.first,
                    step=run.first_step + (begins - run.first_row) // run.batch_rows
                    if is_drawn
                    else None,
                )
            )
        return found

    def _eras_since(self, saved: SavedState, contents: Mapping[str, str]) -> None:
        """Take over what a state says of what sources held; those that grew since it was saved
        end the epochs that they are in with what they held then."""
        self._set_grown(saved.grown)
        stores = list(self.mixture.stores)
        for place, name in enumerate(self.mixture.names):
            if stores[place].content != contents[name]:
                found = stores[place].as_it_was(contents[name])
                assert found is not None  # check_state has seen it
                stores[place] = found
        if stores == [*self.mixture.stores]:
            return
        if self.follower is not None and not self.follower.is_finished:
            raise StateError(
                f"{self.follower.name!r} is being added to, and the state is of what it held",
                hint="resume without follow=True, on what it held, or when the build has ended",
            )
        before = copy.copy(self)
        before.mixture = self.mixture.with_stores(stores)
        before._lay_out = before._made_layouts()
        step, update = saved.step, saved.update
        first = step if update is None else step - update.steps
        plan = before._make_plan(origin=saved.position, origin_step=first)
        # An update that has begun is dealt as a whole.
        end = first if update is None else first - update.before + update.accumulate
        run = plan.find(first)
        if run is None:
            return
        row = run.first_row + (end - first) * run.batch_rows
        counts = run.schedule.counts(row if run.num_rows is None else min(row, run.num_rows))
        lengths = dict.fromkeys(
            stage.seq_len or self.seq_len
            for stage in self.mixture.stages[: saved.position.stage + 1]
        )
        measured = {seq_len: _measure(before._lay_out, seq_len) for seq_len in lengths}
        grown = []
        for place, eras in enumerate(saved.grown):
            epochs = run.epochs[place]
            until = ceil(epochs.reached(counts[place]))
            if end > run.first_step or run.first_row:
                # The shares of a stage that has begun are those of what was held at its begin.
                begun = epochs.reached(run.schedule.first[place])
                until = max(until, int(begun) + bool(run.schedule.parts[place]))
            is_new = stores[place] is not self.mixture.stores[place]
            if is_new and until > (eras[-1].until if eras else 0):
                extents = tuple((length, *found[place]) for length, found in measured.items())
                content = stores[place].content
                eras = (*eras, Era(content=content, until=until, extents=extents))
            grown.append(eras)
        self._set_grown(tuple(grown))

    # A store that is being built.

    def _reach(self, plan: Plan, step: int) -> tuple[Plan, int | None]:
        """The plan, its end known if the build has ended; and before which step all rows are there.

        Waits until those of a step are. Rows are there for all ranks alike, or for none: each step
        is known as a whole, and so is each update whose rows are dealt together.
        """
        follower = self.follower
        if follower is None or not plan.is_open:
            return plan, None
        run = plan.find(step)
        assert run is not None

        def known(store: Store) -> int:
            if store is not self.mixture.stores[0]:
                self._grow(store)
            layout = self.layouts(run.seq_len)[0]
            rows = layout.num_whole
            if self.shuffle == "nearby":
                rows = NearbyWindows.of(run.seq_len).whole(rows)
            steps = run.first_step + max(0, rows - run.first_row) // run.batch_rows
            return steps - max(0, steps - plan.update_step) % self.accumulate

        if not follower.wait_for(lambda store: known(store) > step, stopped=is_stopped):
            return plan, step
        if not follower.is_finished:
            return plan, known(follower.current)
        self._grow(follower.current)
        return plan.with_end(partial(_measure, self._lay_out)), None

    def _grow(self, store: Store) -> None:
        """Go on with a store that has more of the same; what was read of it stays as it is."""
        assert self.follower is not None
        with self.follower.lock:
            if store is self.mixture.stores[0]:
                return
            self.mixture = self.mixture.with_stores([store])
            self._lay_out = self._made_layouts()
            if self.follower.is_finished:
                measure = partial(_measure, self._lay_out)
                is_first = self._plan is self._first_plan
                self._first_plan = self._first_plan.with_end(measure)
                self._plan = self._first_plan if is_first else self._plan.with_end(measure)

    def __getstate__(self) -> dict[str, Any]:
        if self._plan.is_open:
            return {"given": self._given, "state": self.state_dict()}
        return self.__dict__ | {"follower": None, "_given": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "given" in state:
            self.__init__(**state["given"])  # type: ignore[misc]
            self.load_state_dict(state["state"])
        else:
            self.__dict__.update(state)

    def layouts(self, seq_len: int | None = None) -> tuple[Layout, ...]:
        """The layout of each source, for rows of `seq_len` (None: as the loader was told).

        A layout's own `seq_len` is one less than its rows have tokens, whatever the labels.
        """
        return self._lay_out(self.seq_len if seq_len is None else seq_len)

    # Where the run is.

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._step

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None is endless, or not known before a build has ended."""
        steps = None if self._plan.is_open else self._plan.num_steps
        if steps is None or self.last != "drop" or steps == self._plan.origin_step:
            return steps
        return steps if self._find(self._plan, steps - 1) is not None else steps - 1

    def __len__(self) -> int:
        steps = self.num_steps
        if self._plan.is_open:
            raise TypeError("the build that this loader follows goes on: it has no length yet")
        if steps is None:
            raise TypeError("this loader never ends, so it has no length; give it epochs=1 for one")
        return steps

    def seek(self, step: int) -> None:
        """Go to any step: the next batch is that of `step`."""
        steps = self.num_steps
        if type(step) is not int or step < 0 or (steps is not None and step > steps):
            raise UsageError(f"there is no step {step!r} in a run of {_number(steps)} steps")
        if step < self._plan.origin_step:
            self._plan = self._first_plan
        self._step, self._has_ended = step, False

    def state_dict(self) -> dict[str, Any]:
        """How far the run has come; the same on every rank."""
        plan, step = self._plan, self._step
        followed = self._shards_before(plan, step) if plan.is_open else None
        if not (step - plan.update_step) % self.accumulate or plan.find(step) is None:
            return make_state(plan, step, self._facts, followed=followed)
        # Inside an update: which of its rows were taken, the dealing alone says.
        first = self._update_of(plan, step).start
        before = (first - plan.update_step) % self.accumulate
        update = self._dealing.but(steps=step - first, before=before)
        return make_state(plan, step, self._facts, followed=followed, update=update)

    def _shards_before(self, plan: Plan, step: int) -> int:
        """Shards of a store that is being built, on which the rows before a step depend."""
        row, seq_len = plan.position(step).row, self.seq_len
        if row and self.shuffle == "nearby":
            row = NearbyWindows.of(seq_len).end_of(row - 1)
        return self.layouts()[0].shards_of(row) if row else 0

    def recipe(self) -> dict[str, Any]:
        """What this loader was opened with, as plain values: with a state, all that `tokenmill
        trace` and `tokenmill ledger` have to know of a run."""
        mixture = self.mixture
        stages = [
            {"tokens": stage.tokens, "weights": [*map(str, weights)], "seq_len": stage.seq_len}
            for stage in mixture.stages
            for weights in [map(exact_weight, stage.weights)]
        ]
        names = ("seq_len", "batch_size", "world_size", "labels", "shuffle", "seed", "last")
        sources = zip(mixture.names, mixture.stores, strict=True)
        return {
            "sources": {name: store.told() for name, store in sources},
            "stages": stages,
            "max_epochs": [None if cap is None else str(cap) for cap in mixture.max_epochs],
            "packing": self.packing.name,
            **{name: getattr(self, name) for name in names},
            "balance": self.balance,
            "accumulate": self.accumulate,
            "window": [[*part] for part in self.window],
        }

    @abridged
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was called; StateError for a state of something else.

        A state that was saved while a build was followed is one of the finished store too. Of a
        store that grew since, the running epoch ends as it would have; the next one has what was
        added. `growth()` says when.
        """
        self._refuse_forgotten(state)
        saved = check_state(state, self._facts, names=self.mixture.names)
        step, position, update, _ = saved
        now, before = step, 0
        if update is not None:
            if update.but(steps=0, before=0) != self._dealing:
                done = update.before + update.steps
                raise StateError(
                    f"the state was saved inside an update, after {done:,} of its"
                    f" {update.accumulate:,} steps of {update.batch_size:,} rows on"
                    f" {update.world_size:,} ranks; dealt in another way, rows would come twice, or"
                    " never",
                    hint="resume with the same batch_size, world_size, accumulate, balance and"
                    " window, or from a state that was saved after the last step of an update",
                )
            step, before = step - update.steps, update.before
        contents = state["stores"] if state["version"] != FOLLOWED_VERSION else None
        had_grown = any(self._grown)
        if contents is not None:
            self._eras_since(saved, contents)
        else:
            self._set_grown(saved.grown)
        if had_grown or any(self._grown):
            self._first_plan = self._make_plan()
        try:
            is_ours = self._first_plan.position(step) == position
            is_ours &= step % self.accumulate == before
        except IndexError:
            is_ours = False
        # A run that was begun with another batch size has its steps counted from here on.
        self._plan = (
            self._first_plan
            if is_ours
            else self._make_plan(origin=position, origin_step=step, update_step=step - before)
        )
        self._step, self._has_ended = now, False

    def _refuse_forgotten(self, state: object) -> None:
        """StateError for a state of what a store held before documents of it were forgotten."""
        stores = state.get("stores") if isinstance(state, dict) else None
        for name, store in zip(self.mixture.names, self.mixture.stores, strict=True):
            saved = stores.get(name) if isinstance(stores, dict) else None
            if isinstance(saved, str) and (what := store.forgotten_since(saved)) is not None:
                raise StateError(
                    f"the state was saved when {str(store.path)!r} held more: {what}; the order of"
                    " rows is another one without them, and some would come twice, or never",
                    hint="go on with the weights alone, and begin the data anew: without"
                    " load_state_dict, or from another seed",
                )

    @property
    def _dealing(self) -> Update:
        """What says how rows of several steps are dealt."""
        return Update(
            steps=0,
            before=0,
            accumulate=self.accumulate,
            batch_size=self.batch_size,
            world_size=self.world_size,
            window=self.window,
        )

    def _update_of(self, plan: Plan, step: int) -> range:
        """The steps whose rows are dealt together with those of a step: one, unless `accumulate`.

        They are of one stage, whole, and none comes before the run was begun or resumed.
        """
        run = plan.find(step) if self.accumulate > 1 else None
        if run is None or len(run.rows(step)) < run.batch_rows:
            return range(step, step + 1)
        first = step - (step - plan.update_step) % self.accumulate
        end = first + self.accumulate
        if run.num_rows is not None:
            end = min(end, run.first_step + (run.num_rows - run.first_row) // run.batch_rows)
        return range(max(first, run.first_step), end)

    def window_at(self, step: int) -> int | None:
        """Tokens of the attention window in a step; None where there is none."""
        run = self._find(self._plan, step)
        if run is None:
            raise IndexError(f"step {step:,} of a run of {_number(self.num_steps)} steps")
        found = self._reaches_of(run, np.array([step]))
        return None if found is None or found[0] >= run.seq_len else int(found[0])

    def _reaches_of(self, run: StageRun, steps: Ints) -> Ints | None:
        """Tokens of the attention window in each of some steps of a stage; None: no window."""
        if not self.window:
            return None
        begins = np.array([tokens for tokens, _ in self.window], np.int64)
        reaches = [run.seq_len if reach is None else reach for _, reach in self.window]
        found = np.minimum(np.array(reaches, np.int64), run.seq_len)
        return found[begins.searchsorted(run.tokens_before(steps), side="right") - 1]

    def _facts(
        self, stage: int, followed: int | None = None, saved: object = None
    ) -> dict[str, object]:
        """What a position in a stage depends on, as plain values.

        While a build is followed, of its store those shards alone that were read from. Of a store
        that grew, what it held when a state was `saved`.
        """
        stage = min(stage, len(self.mixture.stages) - 1)
        seq_len = self.mixture.stages[stage].seq_len or self.seq_len
        if self.follower is not None and followed:
            self.follower.wait_for(lambda store: len(store.shards) >= followed, stopped=is_stopped)
            self._grow(self.follower.current)
        sources = zip(self.mixture.names, self.mixture.stores, strict=True)
        contents = {name: store.content_of(followed) for name, store in sources}
        if isinstance(saved, dict) and followed is None and saved.keys() == contents.keys():
            for name, store in zip(self.mixture.names, self.mixture.stores, strict=True):
                asked = saved[name]
                if isinstance(asked, str) and asked != contents[name] and store.as_it_was(asked):
                    contents[name] = asked
        layouts = zip(self.layouts(seq_len), contents.values(), strict=True)
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "packing": self.packing.name,
            "seq_len": seq_len,
            "mixture": self.mixture.facts(stage),
            "stores": contents,
            "layouts": [layout.fingerprint_of(content) for layout, content in layouts],
        }

    # Batches.

    def __iter__(self) -> Iterator[Batch]:
        if self._has_ended:
            self.seek(0)
        waited = self.waited_for_build()
        for batch in self.batches():
            self.build_wait_seconds += self.waited_for_build() - waited
            self._step = batch.step + 1
            yield batch
            waited = self.waited_for_build()
        self._has_ended = True

    def waited_for_build(self) -> float:
        """Seconds so far, in whichever thread; what comes between two looks was waited then."""
        return 0.0 if self.follower is None else self.follower.waited_seconds

    def batches(self, first: int | None = None, *, stride: int = 1) -> Iterator[Batch]:
        """Batches of the steps first, first + stride, ...; the loader itself stays where it is."""
        for chunk in self.chunks(first, stride=stride):
            yield from batches_of(chunk)

    def chunks(self, first: int | None = None, *, stride: int = 1) -> Iterator[Chunk]:
        """The same batches as they are read, several steps at a time, few at first."""
        require_number("stride", stride, at_least=1)
        # The plan of now: a loader may be moved, or resumed, while an iteration goes on.
        parts = self._parts(self._plan, self._step if first is None else first, stride)
        announced = _announced(parts, ahead=int(self._is_remote))
        chunks = (window.read(first, last) for window, first, last in announced)
        if not self.prefetch:
            return chunks
        return read_ahead_when_slow(
            chunks, depth=self.prefetch, name="tokenmill loader", slow_seconds=_slow_seconds
        )

    def batch(self, step: int) -> Batch:
        """The batch of one step, whichever steps were read before."""
        return next(batches_of(self._window(step).read(0, 1)))

    def gather(self, steps: Sequence[int]) -> Batch:
        """The rows of any steps, all of one seq_len, as one batch."""
        drawn, place, seq_len = [], 0, self.seq_len
        reaches: Ints | None = None
        plan = self._reach(self._plan, max(steps))[0]
        while place < len(steps):
            first, end = steps[place], place + 1
            run = self._find(plan, first) if first >= 0 else None
            if run is None:
                raise IndexError(f"step {first:,} of a run of {_number(self.num_steps)} steps")
            seq_len = run.seq_len
            last = inf if run.end_step is None else run.end_step
            while end < len(steps) and steps[end] == first + end - place < last:
                if len(run.rows(steps[end])) < run.batch_rows:
                    break  # drawn alone
                end += 1
            here = range(first, first + end - place)
            drawn.append(self._draw(plan, run, here))
            if place == 0:
                reaches = self._reaches_of(run, np.array(here[:1]))
            place = end
        columns = (np.concatenate(part, axis=None)[None] for part in zip(*drawn, strict=True))
        here = range(steps[0], steps[0] + 1)
        window = Window(self, seq_len, here, *columns, reaches=reaches)
        return next(batches_of(window.read(0, 1)))

    def rows(self, step: int) -> list[RowOrigin]:
        """What made this rank's batch of a step: stores, documents, rows of the input files."""
        return list(self._window(step).origins(self.mixture.names))

    def seen(self, step: int) -> dict[str, dict[str, Any]]:
        """Rows, tokens (rows * seq_len) and epochs of each source on all ranks before a step."""
        return self._plan.seen(step)

    def trace(self, document: int, *, source: str | None = None) -> Iterator[Showing]:
        """Where a document is shown, from the first step of the run on, in the order of rows.

        It is the inverse of `rows`: on which step, rank and place of a batch which of its tokens
        are. Without end where the run has none. Of what was drawn before a resume with another
        batch size only the rows are known, and no steps. `source` is its name in a mixture.
        """
        if self._plan.is_open:
            raise UsageError(
                "where a document is shown is known when the build that is followed has ended",
                hint="trace it with a loader of the finished store",
            )
        names = self.mixture.names
        if (source is None and len(names) > 1) or source not in (None, *names):
            known = ", ".join(map(repr, names))
            what = "document numbers are those of one source" if source is None else "it has none"
            raise UsageError(
                f"source={source!r} does not say which store of the mixture: {what}",
                hint=f"say which: source=, one of {known}",
            )
        place = 0 if source is None else names.index(source)
        store = self.mixture.stores[place]
        number = operator.index(document)
        if not 0 <= number < store.num_documents:
            raise UsageError(
                f"there is no document {document!r} in {store!r}",
                hint=f"documents have the numbers 0 to {store.num_documents - 1:,}",
            )
        return _Tracer(self, self._plan, place).showings(number)

    def drawn(self, source: int) -> Iterator[Drawn]:
        """The rows of a source, by its place in the mixture, that the steps before the next had.

        Of all ranks. Rows of epochs that are over are told once, with how often they came.
        """
        plan, step = self._plan, self._step
        for seq_len, epochs, indices in plan.drawn_before(source):
            yield from self._drawn(source, seq_len, epochs, indices)
        for run in plan.runs():
            if run.first_step >= step:
                return
            is_here = run.end_step is None or step < run.end_step
            update = self._update_of(plan, step) if is_here else range(step, step + 1)
            ends = run.rows(update.start).start
            reached = (run.schedule.counts(row)[source] for row in (run.first_row, ends))
            yield from self._drawn(source, run.seq_len, run.epochs[source], range(*reached))
            if update.start < step:  # its rows are dealt together: so many of its steps were taken
                located, (table,) = self._deal(run, [update])
                taken = table[:, : step - update.start].ravel()
                numbers, rows, _ = (part[taken] for part in located)
                for number in distinct(numbers):
                    if self.sources_of(np.array([number]))[0] == source:
                        layout = self.layout_of(number, run.seq_len)
                        yield Drawn(layout, run.seq_len, rows[numbers == number], 1)

    def _drawn(self, source: int, seq_len: int, epochs: Epochs, indices: range) -> Iterator[Drawn]:
        for part, inside in epochs.within(indices):
            layout = self.layout_of(self._number(source, part.era), seq_len)
            first, last = inside.start + part.shift, inside.stop + part.shift
            begun, over = -(-first // part.rows) * part.rows, last // part.rows * part.rows
            whole = max(0, over - begun) // part.rows
            for low in range(0, part.rows if whole else 0, MOST_DRAWN):
                rows = np.arange(low, min(low + MOST_DRAWN, part.rows))
                yield Drawn(layout, seq_len, rows, whole)
            rest = [(first, begun), (over, last)] if whole else [(first, last)]
            for low, high in rest:
                for at in range(low, high, MOST_DRAWN):
                    rows, _ = ordered_rows(
                        np.arange(at, min(at + MOST_DRAWN, high)),
                        shuffle=self.shuffle,
                        seed=self.seed,
                        source=self.mixture.names[source],
                        num_rows=part.rows,
                        seq_len=seq_len,
                    )
                    yield Drawn(layout, seq_len, rows, 1)

    def _window(self, step: int) -> Window:
        plan = self._reach(self._plan, step)[0] if step >= 0 else self._plan
        run = self._find(plan, step) if step >= 0 else None
        if run is None:
            raise IndexError(f"step {step:,} of a run of {_number(self.num_steps)} steps")
        steps = range(step, step + 1)
        reaches = self._reaches_of(run, np.array(steps))
        return Window(self, run.seq_len, steps, *self._draw(plan, run, steps), reaches=reaches)

    def _find(self, plan: Plan, step: int) -> StageRun | None:
        """The stage of a step; None past the end, and for a last batch that is dropped."""
        run = plan.find(step)
        if run is None or self.last != "drop":
            return run
        return run if len(run.rows(step)) == run.batch_rows else None

    def _parts(self, plan: Plan, first: int, stride: int) -> Iterator[_Part | None]:
        """The run from a step on, one step first, then as many as are found and read in one go.

        None where what follows may have to be waited for.
        """
        size = 1
        while True:
            plan, known = self._reach(plan, first)
            run = self._find(plan, first)
            if run is None or (known is not None and known <= first):
                return  # at the end, or waiting for a build was ended
            rows = run.batch_rows // self.world_size
            chunk = max(1, CHUNK_TOKENS // (rows * run.seq_len))
            pieces = rows * (2 + run.seq_len * self._density)
            # Windows of whole chunks, as soon as they are longer than one.
            most = chunk * max(1, int(WINDOW_PIECES / pieces) // chunk)
            # Steps that are drawn together have one shape; and a source of a few rows has many
            # epochs in a draw, of which each has an order of its own.
            drawn_rows = min(DRAW_ROWS, 4 * int(run.rows_per_epoch.max()))
            num_steps = max(1, drawn_rows // rows)
            if self.balance is not None:  # rows of all ranks are looked at
                num_steps = max(self.accumulate, num_steps // self.world_size)
            end = first + stride * num_steps
            if run.num_rows is not None:
                full = run.first_step + (run.num_rows - run.first_row) // run.batch_rows
                end = min(end, max(full, first + 1))
            steps = range(first, end if known is None else min(end, known), stride)
            drawn, place = self._draw(plan, run, steps), 0
            reaches = self._reaches_of(run, np.array(steps))
            while place < len(steps):
                here = slice(place, place + size)
                window = Window(
                    self,
                    run.seq_len,
                    steps[here],
                    *(part[here] for part in drawn),
                    reaches=None if reaches is None else reaches[here],
                )
                place += size
                for begin in range(0, len(window.steps), chunk):
                    yield window, begin, min(begin + chunk, len(window.steps))
                size = min(2 * size, chunk if size < chunk else most)
            first += len(steps) * stride
            if known is not None:
                yield None

    def _draw(self, plan: Plan, run: StageRun, steps: range) -> tuple[Ints, ...]:
        """Source, row and epoch of each row of some steps of a stage, for this rank.

        A step that is not full is drawn alone.
        """
        if self.balance is not None and len(run.rows(steps[0])) == run.batch_rows:
            return self._draw_balanced(plan, run, steps)
        size = run.batch_rows // self.world_size
        first = run.first_row + (np.array(steps) - run.first_step) * run.batch_rows
        wanted = first[:, None] + (self.rank * size + np.arange(size))
        inside = wanted < (inf if run.num_rows is None else run.num_rows)
        if inside.all():
            return tuple(part.reshape(wanted.shape) for part in self._locate(run, wanted.ravel()))
        kept = int(inside[-1].sum()) if self.last == "keep" else size
        drawn = tuple(np.full(wanted.shape, NO_ROW, np.int64) for _ in range(3))
        for part, found in zip(drawn, self._locate(run, wanted[inside]), strict=True):
            part[inside] = found
        return tuple(part[:, :kept] for part in drawn)

    def _draw_balanced(self, plan: Plan, run: StageRun, steps: range) -> tuple[Ints, ...]:
        """The same, of the rows that this rank is dealt of each global batch, or of each update."""
        updates = list(dict.fromkeys(self._update_of(plan, step) for step in steps))
        located, tables = self._deal(run, updates)
        mine: dict[int, Ints] = {}
        for update, table in zip(updates, tables, strict=True):
            mine |= zip(update, table[self.rank], strict=True)
        places = np.stack([mine[step] for step in steps])
        return tuple(part[places] for part in located)

    def _deal(self, run: StageRun, updates: list[range]) -> tuple[tuple[Ints, ...], list[Ints]]:
        """All rows of some updates, and where in them those are that ranks are dealt.

        Of each update: (ranks, steps, rows of a batch). A rank has its dearest rows in the first
        step: steps are even too.
        """
        size = run.batch_rows // self.world_size
        every = np.concatenate([np.array(update) for update in updates])
        first = run.first_row + (every - run.first_step) * run.batch_rows
        wanted = (first[:, None] + np.arange(run.batch_rows)).ravel()
        located = self._locate(run, wanted)
        reaches = self._reaches_of(run, every)
        if reaches is not None:
            reaches = np.repeat(reaches, run.batch_rows)
        sources, rows, _ = located
        costs = self._costs(run, sources, rows, reaches)
        tables, begin = [], 0
        for update in updates:
            end = begin + len(update) * run.batch_rows
            places = begin + dealt(costs[begin:end], self.world_size)
            tables.append(np.sort(places.reshape(self.world_size, len(update), size), axis=2))
            begin = end
        return located, tables

    def _costs(self, run: StageRun, sources: Ints, rows: Ints, reaches: Ints | None) -> Ints:
        """Pairs of tokens that attention has to look at in rows of a stage."""
        costs = np.zeros_like(rows)
        for source in distinct(sources):
            here = sources == source
            reach = None if reaches is None else reaches[here]
            costs[here] = pairs_of_rows(
                self.layout_of(source, run.seq_len), rows[here], seq_len=run.seq_len, reach=reach
            )
        return costs

    def _locate(self, run: StageRun, wanted: Ints) -> tuple[Ints, ...]:
        """Source, row and epoch of rows of a stage."""
        sources, indices = run.schedule.locate(wanted)
        rows, epochs = np.empty_like(indices), np.empty_like(indices)
        is_one = len(self.mixture.names) == 1
        for source in [0] if is_one else distinct(sources):
            ranges = run.epochs[source].ranges
            here = slice(None) if is_one else sources == source
            for part in ranges:
                if len(ranges) > 1:
                    here = (self.sources_of(sources) == source) & (indices >= part.start)
                rows[here], epochs[here] = ordered_rows(
                    indices[here] + part.shift,
                    shuffle=self.shuffle,
                    seed=self.seed,
                    source=self.mixture.names[source],
                    num_rows=part.rows,
                    seq_len=run.seq_len,
                )
                if len(ranges) > 1:
                    sources[here] = self._number(source, part.era)
        return sources, rows, epochs

    def _number(self, source: int, era: int | None) -> int:
        """Of what a source holds, or held in an era."""
        return source if era is None else self._eras[source, era]

    def cu_seqlens_sizes(self, seq_len: int | None = None) -> tuple[int, ...]:
        """The entries that `cu_seqlens` may have: a batch has the fewest of these that do.

        As many as an average batch needs, somewhat more or less, and so on up to what no batch can
        exceed. Most batches have one of the first two or three: a model is compiled for few.
        """
        seq_len = self.seq_len if seq_len is None else seq_len
        rows = self.batch_size * self.seq_len // seq_len
        most = _quadrupled(rows * self.packing.most_pieces(seq_len) + 1)
        if self.cu_seqlens_capacity is not None:
            return self.cu_seqlens_capacity
        found = {
            _quadrupled(int(ROOM_OF_AVERAGE * rows * usual * share) + 1)
            for usual in self._documents_of_row(seq_len)
            for share in ROOMS
        }
        while (size := max(found)) < most:
            found.add(2 * size)
        return tuple(sorted({min(size, most) for size in found}))

    def _documents_of_row(self, seq_len: int) -> set[float]:
        """On average, with one that goes on from the row before; of the stage with the most.

        With attention windows, for each of them, with the parts that it makes of documents.
        """
        densities, average = self._densities(), 0.0
        for stage in self.mixture.stages:
            shares = [float(exact_weight(weight)) for weight in stage.weights]
            pairs = zip(shares, densities, strict=True)
            average = max(average, sum(part * density for part, density in pairs) / sum(shares))
        usual = {1 + seq_len * average}
        if not self.window:
            return usual
        # Documents of random lengths have so many whole windows.
        reaches = {seq_len if reach is None else min(reach, seq_len) for _, reach in self.window}
        return {
            each * (1 + 1 / expm1(min(700.0, reach * average)))
            for each in usual
            for reach in reaches
        }

    def __repr__(self) -> str:
        return (
            f"Loader({', '.join(str(store.path) for store in self.mixture.stores)}):"
            f" rows of {self.seq_len:,} ({self.packing.name}), batch {self.batch_size} on each of"
            f" {self.world_size} ranks, step {self._step:,} of {_number(self.num_steps)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Showing:
    """A part of a document in a row of a batch; see `Loader.trace`."""

    step: int | None
    """None, and so the rank and the place in the batch, where it was before a resume with another
    batch size."""
    rank: int | None
    place: int | None
    """Of the row in the batch of its rank."""
    at: int
    """Where the part begins in the row."""
    first_token: int
    """Where it begins in the document."""
    tokens: int
    epoch: int
    row: int
    """Number in the layout."""
    seq_len: int


class Drawn(NamedTuple):
    """Rows that steps had; see `Loader.drawn`."""

    layout: Layout  # whose store is the source's, or what that was before it grew
    seq_len: int
    rows: Ints
    times: int


class Growth(NamedTuple):
    """A store that grew while a run went on; see `Loader.growth`."""

    source: str  # its name in a mixture; '' for a single store
    documents: int
    documents_before: int
    epoch: int  # the first that has what was added
    step: int | None  # of the loader, in which that epoch begins; None: not before the stage ends

    def describe(self, micro_batches: int = 1) -> str:
        """A line of it, for a run whose steps are so many of the loader's."""
        which = f"the source {self.source!r}" if self.source else "the store"
        when = "" if self.step is None else f", in step {self.step // micro_batches:,}"
        return (
            f"{which} grew by {self.documents - self.documents_before:,} documents since the state"
            f" was saved: they come with epoch {self.epoch}{when}; until then rows are of the"
            f" {self.documents_before:,} that were there"
        )


class _Tracer:
    """Finds where the documents of one source are shown: layout, order and schedule, inverted."""

    def __init__(self, loader: Loader, plan: Plan, source: int) -> None:
        self._loader, self._plan, self._source = loader, plan, source
        self._table: tuple[range, Ints] = range(0), np.zeros((0, 0, 0), np.int64)

    def showings(self, document: int) -> Iterator[Showing]:
        source = self._source
        # Before this plan begins: row by row, whatever the batches were.
        for seq_len, epochs, indices in self._plan.drawn_before(source):
            for index, epoch, held in self._occurrences(document, seq_len, epochs, indices):
                del index
                yield Showing(step=None, rank=None, place=None, epoch=epoch, **held)
        for run in self._plan.runs():
            indices = run.indices(source)
            if run.schedule.parts[source] and indices.stop > indices.start:
                found = self._occurrences(document, run.seq_len, run.epochs[source], indices)
                for index, epoch, held in found:
                    row = int(run.schedule.rows_at(source, np.array([index]))[0])
                    place = self._place(run, row)
                    if place is not None:
                        step, rank, at = place
                        yield Showing(step=step, rank=rank, place=at, epoch=epoch, **held)

    def _occurrences(
        self, document: int, seq_len: int, epochs: Epochs, indices: range
    ) -> Iterator[tuple[int, int, dict[str, int]]]:
        """Each time that a row which holds it is drawn among some of a source's rows."""
        loader, source = self._loader, self._source
        now = loader.mixture.stores[source]
        for part, inside in epochs.within(indices):
            layout = loader.layout_of(loader._number(source, part.era), seq_len)
            number = layout.stream.store.number_of(document, now)
            if number is None:  # it was added later
                continue
            held = layout.holding(number)
            if not len(held.rows):
                continue
            first, last = inside.start + part.shift, inside.stop + part.shift
            for epoch in range(first // part.rows, -(-last // part.rows)):
                places = epoch * part.rows + places_of_rows(
                    held.rows,
                    epoch,
                    shuffle=loader.shuffle,
                    seed=loader.seed,
                    source=loader.mixture.names[source],
                    num_rows=part.rows,
                    seq_len=seq_len,
                )
                for piece in np.argsort(places).tolist():
                    if (index := int(places[piece]) - part.shift) in inside:
                        yield (
                            index,
                            epoch,
                            {
                                "at": int(held.at[piece]),
                                "first_token": int(held.first[piece]),
                                "tokens": int(held.tokens[piece]),
                                "row": int(held.rows[piece]),
                                "seq_len": seq_len,
                            },
                        )

    def _place(self, run: StageRun, row: int) -> tuple[int, int, int] | None:
        """Step, rank and place in its batch of a row of a stage; None where it is in none."""
        if row < run.first_row or (run.num_rows is not None and row >= run.num_rows):
            return None
        loader, plan = self._loader, self._plan
        step, slot = divmod(row - run.first_row, run.batch_rows)
        step += run.first_step
        size = run.batch_rows // loader.world_size
        is_full = len(run.rows(step)) == run.batch_rows
        if not is_full and loader.last == "drop":
            return None
        if loader.balance is None or not is_full:
            return step, *divmod(slot, size)
        if step not in self._table[0]:
            update = loader._update_of(plan, step)
            _, (table,) = loader._deal(run, [update])
            self._table = update, table
        update, table = self._table
        slot += (step - update.start) * run.batch_rows
        ((rank, nth, at),) = np.argwhere(table == slot).tolist()
        return update[nth], rank, at


def check_followed(
    source: object, *, packing: str, shuffle: bool | str, epochs: float | None
) -> None:
    """UsageError for what cannot be had of a store that may still be built, or is none."""
    if not isinstance(source, str | os.PathLike | Follower):
        raise UsageError(
            f"follow=True is for the path of a store, and this is {source!r}",
            hint="give the path; what is open or a mixture is read as it was when it was opened",
        )
    if packing == "best-fit":
        raise UsageError(
            "packing='best-fit' plans rows over a million documents at once: not while a store is"
            " built",
            hint='use packing="concat" or "pad" with follow=True, or wait for the end of the build',
        )
    if check_shuffle(shuffle) not in ("nearby", "none"):
        raise UsageError(
            f"shuffle={shuffle!r} draws rows from the whole store, which is not there yet",
            hint='use shuffle="nearby" with follow=True, or wait for the end of the build',
        )
    if epochs is not None and epochs < 1:
        raise UsageError(
            f"epochs={epochs!r} is a part of a store whose size is not known yet",
            hint="leave it out with follow=True, or give 1 or more",
        )


def _capacities(given: object) -> tuple[int, ...]:
    """The sizes of cu_seqlens that a user chose."""
    sizes = tuple(given) if isinstance(given, list | tuple) and given else (given,)
    for size in sizes:
        require_number("cu_seqlens_capacity", size, at_least=2)
    return tuple(sorted(set(sizes)))


def _reaches(given: Schedule) -> tuple[tuple[int, int | None], ...]:
    """Attention windows: from which token of the run on, and how many tokens; UsageError."""
    if given is None:
        return ()
    pairs = [(0, given)] if isinstance(given, int) else given
    found = []
    try:
        for tokens, reach in pairs:
            if tokens != int(tokens) or (
                reach is not None and (type(reach) is not int or reach < 1)
            ):
                raise ValueError
            found.append((int(tokens), reach))
    except (TypeError, ValueError, OverflowError):
        found = []
    begins = [tokens for tokens, _ in found]
    if not found or begins[0] or begins != sorted(set(begins)):
        raise UsageError(
            f"window={given!r} is no attention window: from which token of the run on it holds, and"
            " of how many tokens it is, from 0 on, in order",
            hint="write window=1024, or window=[(0, 1024), (2e9, 4096), (4e9, None)]; None is no"
            " limit",
        )
    return tuple(found)


def _quadrupled(entries: int) -> int:
    """A multiple of four: what follows in memory is aligned as kernels like it."""
    return -(-entries // 4) * 4


def require_number(name: str, value: object, *, at_least: int) -> None:
    if type(value) is not int or value < at_least:
        raise UsageError(
            f"{name}={value!r} is not a whole number of {at_least} or more",
            hint=f"give one, like {name}={max(at_least, 8)}",
        )


def _announced(parts: Iterator[_Part | None], *, ahead: int) -> Iterator[_Part]:
    """The parts; while one is read, so many that follow are on their way over the network."""
    waiting: list[_Part] = []
    for part in parts:
        if part is not None:
            waiting.append(part)
            if ahead:
                part[0].read_ahead(*part[1:])
        while len(waiting) > (0 if part is None else ahead):
            yield waiting.pop(0)
    yield from waiting


def _number(steps: int | None) -> str:
    return "endless" if steps is None else f"{steps:,}"


def _slow_seconds(chunk: Chunk) -> float:
    """Longer than reading it from memory takes, on any machine."""
    _, _, tokens, mask = chunk
    num_bytes = tokens.nbytes + (0 if mask is None else mask.nbytes)
    return SLOW_READ_SECONDS + num_bytes * SLOW_READ_SECONDS_PER_BYTE


def _lay_out(
    packing: type[Layout],
    streams: Sequence[TokenStream],
    made: dict[int, tuple[Layout, ...]],
    fewer: int,
    seq_len: int,
) -> tuple[Layout, ...]:
    """Layouts, whose rows have one token more than their own `seq_len`, `fewer` or not."""
    if seq_len not in made:
        made[seq_len] = tuple(packing(stream, seq_len=seq_len - fewer) for stream in streams)
    return made[seq_len]


def _measure(lay_out: Callable[[int], tuple[Layout, ...]], seq_len: int) -> list[Extent]:
    """Rows of each source; tokens too where the shares of a mixture depend on them."""
    layouts = lay_out(seq_len)
    if layouts[0].back_to_back or len(layouts) == 1:
        return [Extent(rows=layout.num_rows) for layout in layouts]
    return [Extent(rows=layout.num_rows, tokens=layout.used) for layout in layouts]


def _mixture(source: StoreInput | Mixture, *, epochs: float | None, split: str | None) -> Mixture:
    if not isinstance(source, Mixture):
        if epochs is not None and not (isinstance(epochs, int | float) and 0 < epochs < inf):
            raise UsageError(
                f"epochs={epochs!r} is not a number above 0",
                hint="give one, like 1 or 2.5, or leave it out for no end",
            )
        return Mixture.of(source, max_epochs=epochs, split=split)
    if split is not None:
        raise UsageError(
            f"split={split!r} says nothing of a mixture: its stores are open already",
            hint="say it to the mixture: Mixture(..., split=...)",
        )
    if epochs is not None:
        raise UsageError(
            f"epochs={epochs!r} says nothing of a mixture: its sources end at different times",
            hint="cap them with Mixture(..., max_epochs=...), or end it with Stage(tokens=...)",
        )
    return source
