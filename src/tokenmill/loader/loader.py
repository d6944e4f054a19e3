"""The loader: an endless, exact, resumable stream of batches from stores.

    Plan (which rows make a step) -> Order (shuffled) -> Draw (row numbers) -> Layout (pieces)
        -> Window (many steps, found) -> Chunk (tokens of some) -> Batch

Everything about a batch follows from the number of its step; nothing is remembered between steps
but that number. A global batch is `batch_size * world_size` rows, of which rank r takes the r-th
`batch_size`; so ranks, workers and prefetching change who reads a row, never which rows there are.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.loader.batch import NO_ROW, Draw, RowOrigin, Window, trace
from tokenmill.loader.mixture import Extent, Mixture, rows_of_batch
from tokenmill.loader.options import (
    Boundaries,
    Last,
    LoaderOptions,
    check_pad_id,
    choice,
    id_dtype,
    require_number,
)
from tokenmill.loader.order import Order, Shuffle
from tokenmill.loader.packing import find_packing
from tokenmill.loader.plan import Plan, check_state, make_state, stage_of
from tokenmill.records import lazy
from tokenmill.store.stream import TokenStream, distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from tokenmill.loader.batch import Batch, Chunk
    from tokenmill.loader.packing import Layout
    from tokenmill.loader.plan import StageRun
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
SLOW_ITEMS = 3
"""So many slow items in a row make a thread worth its cost."""
JOIN_SECONDS = 10.0
"""A read of a remote store may be under way when the reader is told to stop."""


def read_ahead_when_slow(
    items: Iterator[T], *, depth: int, name: str, slow_seconds: Callable[[T], float]
) -> Iterator[T]:
    """The items; after some that took longer than `slow_seconds` the others are made in a thread.

    The first item is not judged by: it pays for whatever has to be set up. One slow item says
    little either: the machine may have been busy with something else.
    """
    for item in items:
        yield item
        break
    num_slow = 0
    started = perf_counter()
    for item in items:
        num_slow = num_slow + 1 if perf_counter() - started > slow_seconds(item) else 0
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
            args=(items, room, self._ready, stopped, within),
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
) -> None:
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


CHUNK_TOKENS = 1 << 18
"""Tokens read in one go, 0.5 or 1 MB: enough to make what a read costs beside copying small,
and little enough to stay in a core's cache on its way."""
DRAW_ROWS = 4096
"""Rows whose order is computed in one go: a draw of one batch costs as much as one of a hundred."""
_ENDLESS = 1 << 62
WINDOW_PIECES = 1 << 13
"""Pieces of rows found in one go, about: enough to make what finding costs small, and little enough
to take a fraction of a millisecond."""
SLOW_READ_SECONDS = 2e-3
SLOW_READ_SECONDS_PER_BYTE = 2e-9


class Loader:
    """Batches of rows from a store or a mixture, without end unless `epochs` says so.

    >>> loader = tokenmill.Loader("my-store", split="train", seq_len=2048, batch_size=16)
    >>> for batch in loader:
    ...     batch.input_ids, batch.labels

    Iterating again goes on where the last iteration stopped. `batch_size` is that of this rank.
    """

    def __init__(
        self,
        source: Store | Mixture | str | os.PathLike[str],
        *,
        seq_len: int,
        batch_size: int,
        packing: str = "concat",
        boundaries: str = "keep",
        shuffle: bool | str = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: float | None = None,
        last: str = "pad",
        dtype: str = "int64",
        pad_id: int | None = None,
        prefetch: int = 2,
        cu_seqlens_capacity: int | None = None,
        split: str | None = None,
    ) -> None:
        self.mixture = _mixture(source, epochs=epochs, split=split)
        store = self.mixture.stores[0]
        self.options = LoaderOptions(
            seq_len=seq_len,
            batch_size=batch_size,
            packing=find_packing(packing),
            boundaries=choice(Boundaries, "boundaries", boundaries),
            shuffle=Shuffle.of(shuffle),
            seed=seed,
            rank=rank,
            world_size=world_size,
            last=choice(Last, "last", last),
            dtype=id_dtype(dtype),
            pad_id=check_pad_id(store, pad_id),
            prefetch=prefetch,
            cu_seqlens_capacity=cu_seqlens_capacity,
        )
        self._streams = tuple(
            TokenStream(store, scattered=self.options.shuffle is Shuffle.FULL)
            for store in self.mixture.stores
        )
        # Not a method: a plan that held its loader would keep the maps of one that was dropped.
        self._lay_out = partial(_lay_out, self.options.packing, self._streams, {})
        for stage in self.mixture.stages:
            rows_of_batch(batch_size, seq_len=seq_len, stage_seq_len=stage.seq_len or seq_len)
        self._plan = self._first_plan = self._make_plan()
        self._step = 0
        self._has_ended = False
        if epochs is not None and not self.num_steps:
            raise UsageError(
                f"epochs={epochs!r} of {self.layouts()[0].num_rows:,} rows make no batch of"
                f" {batch_size * world_size:,} with last={last!r}",
                hint='use a smaller batch, or last="pad"',
            )

    def _make_plan(self, **origin: Any) -> Plan:
        return Plan(
            self.mixture,
            seq_len=self.options.seq_len,
            batch_rows=self.options.batch_size * self.options.world_size,
            measure=partial(_measure, self._lay_out),
            **origin,
        )

    def layouts(self, seq_len: int | None = None) -> tuple[Layout, ...]:
        """The layout of each source, for rows of `seq_len` (None: as the loader was told)."""
        return self._lay_out(self.options.seq_len if seq_len is None else seq_len)

    # Where the run is.

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._step

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None is endless."""
        steps = self._plan.num_steps
        if steps is None or self.options.last is not Last.DROP or steps == self._plan.origin_step:
            return steps
        full = self._plan.stage_of(steps - 1).batch_rows
        return steps if self._plan.last_step_rows == full else steps - 1

    def __len__(self) -> int:
        steps = self.num_steps
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
        seen = {
            seen.name: {"rows": seen.rows, "tokens": seen.tokens, "epochs": seen.epochs}
            for seen in self._plan.seen(self._step)
        }
        position = self._plan.position(self._step)
        return make_state(
            self._facts(position.stage), step=self._step, position=position, seen=seen
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was called; StateError for a state of something else."""
        step, position = check_state(
            state, self._facts(stage_of(state)), num_sources=len(self.mixture.sources)
        )
        try:
            is_ours = self._first_plan.position(step) == position
        except IndexError:
            is_ours = False
        # A run that was begun with another batch size has its steps counted from here on.
        self._plan = (
            self._first_plan if is_ours else self._make_plan(origin=position, origin_step=step)
        )
        self._step, self._has_ended = step, False

    def _facts(self, stage: int) -> dict[str, object]:
        """What a position depends on, as plain values."""
        stage = min(stage, len(self.mixture.stages) - 1)
        seq_len = self.mixture.stages[stage].seq_len or self.options.seq_len
        return {
            "seed": self.options.seed,
            "shuffle": str(self.options.shuffle),
            "packing": self.options.packing.name,
            "seq_len": seq_len,
            "mixture": self.mixture.facts(stage),
            "stores": {source.name: source.store.content for source in self.mixture.sources},
            "layouts": [layout.fingerprint for layout in self.layouts(seq_len)],
        }

    # Batches.

    def __iter__(self) -> Iterator[Batch]:
        if self._has_ended:
            self.seek(0)
        for batch in self.batches():
            self._step = batch.step + 1
            yield batch
        self._has_ended = True

    def batches(self, first: int | None = None, *, stride: int = 1) -> Iterator[Batch]:
        """Batches of the steps first, first + stride, ...; the loader itself stays where it is."""
        for chunk in self.chunks(first, stride=stride):
            yield from chunk.batches()

    def chunks(self, first: int | None = None, *, stride: int = 1) -> Iterator[Chunk]:
        """The same batches as they are read, several steps at a time, few at first."""
        parts = self._parts(self._step if first is None else first, stride)
        if any(store.is_remote for store in self.mixture.stores):
            parts = _announced(parts)
        chunks = (window.chunk(first, last) for window, first, last in parts)
        if not self.options.prefetch:
            return chunks
        return read_ahead_when_slow(
            chunks,
            depth=self.options.prefetch,
            name="tokenmill loader",
            slow_seconds=_slow_seconds,
        )

    def batch(self, step: int) -> Batch:
        """The batch of one step, whichever steps were read before."""
        return next(self._window(self.draw(step)).chunk(0, 1).batches())

    def draw(self, step: int) -> Draw:
        """Which rows this rank gets in one step."""
        run = self._find(self._plan, step) if step >= 0 else None
        if run is None:
            raise IndexError(f"step {step:,} of a run of {_number(self.num_steps)} steps")
        return self._draw(run, range(step, step + 1))

    def rows(self, step: int) -> list[RowOrigin]:
        """What made this rank's batch of a step: stores, documents, rows of the input files."""
        draw = self.draw(step)
        return trace(draw, layouts=self.layouts(draw.seq_len), names=self.mixture.names)

    def draws(self, first: int, *, stride: int = 1) -> Iterator[Draw]:
        """Which rows this rank gets from a step on, many steps at a time."""
        if stride != 1:
            require_number("stride", stride, at_least=1)
        # The plan of now: a loader may be moved, or resumed, while an iteration goes on.
        return self._draws(self._plan, first, stride)

    def _draws(self, plan: Plan, first: int, stride: int) -> Iterator[Draw]:
        while (run := self._find(plan, first)) is not None:
            steps = range(first, self._end_of_draw(run, first, stride), stride)
            yield self._draw(run, steps)
            first += len(steps) * stride

    def _draw(self, run: StageRun, steps: range) -> Draw:
        """Rows of some steps of one stage; steps that are not full are drawn alone."""
        size = run.batch_rows // self.options.world_size
        first = run.first_row + (np.array(steps) - run.first_step) * run.batch_rows
        wanted = first[:, None] + (self.options.rank * size + np.arange(size))
        inside = wanted < (_ENDLESS if run.num_rows is None else run.num_rows)
        if inside.all():
            found = self._locate(run, wanted.ravel())
            sources, rows, epochs = (part.reshape(wanted.shape) for part in found)
            only = 0 if len(self._streams) == 1 else None
            return Draw(steps, run.seq_len, sources, rows, epochs, only)
        sources, rows, epochs = (np.full(wanted.shape, NO_ROW, np.int64) for _ in range(3))
        sources[inside], rows[inside], epochs[inside] = self._locate(run, wanted[inside])
        kept = int(inside[-1].sum()) if self.options.last is Last.KEEP else size
        return Draw(steps, run.seq_len, sources[:, :kept], rows[:, :kept], epochs[:, :kept])

    def _locate(self, run: StageRun, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Source, row and epoch of rows of a stage."""
        sources, indices = run.schedule.locate(wanted)
        if len(self._streams) == 1:
            return (sources, *self._order(run, 0).rows(indices))
        rows, epochs = np.empty_like(indices), np.empty_like(indices)
        for source in distinct(sources):
            here = sources == source
            rows[here], epochs[here] = self._order(run, source).rows(indices[here])
        return sources, rows, epochs

    def _order(self, run: StageRun, source: int) -> Order:
        return Order(
            shuffle=self.options.shuffle,
            seed=self.options.seed,
            source=self.mixture.names[source],
            num_rows=int(run.rows_per_epoch[source]),
            seq_len=run.seq_len,
        )

    def _end_of_draw(self, run: StageRun, step: int, stride: int) -> int:
        """First step that is not drawn together with `step`: too far, or of another shape."""
        size = run.batch_rows // self.options.world_size
        # A source of a few rows has many epochs in a draw, and each has an order of its own.
        rows = min(DRAW_ROWS, 4 * int(run.rows_per_epoch.max()))
        ends = [step + stride * max(1, rows // size)]
        if run.num_steps is not None and run.num_rows is not None:
            ends.append(run.first_step + run.num_steps)
            full = run.first_step + (run.num_rows - run.first_row) // run.batch_rows
            if step < full:
                ends.append(full)
        return min(ends)

    def _parts(self, first: int, stride: int) -> Iterator[_Part]:
        """The run from a step on, one step first, then as many as are found and read in one go."""
        size = 1
        for draw in self.draws(first, stride=stride):
            most, place = self._chunk_steps(draw), 0
            while place < len(draw.steps):
                window = self._window(draw.part(place, place + size))
                place += size
                for begin in range(0, len(window), most):
                    yield window, begin, min(begin + most, len(window))
                # Windows of whole chunks, as soon as they are longer than one.
                size = min(2 * size, most if size < most else self._window_steps(draw))

    def _find(self, plan: Plan, step: int) -> StageRun | None:
        """The stage of a step; None past the end, and for a last batch that is dropped."""
        run = plan.find(step)
        if run is None or self.options.last is not Last.DROP:
            return run
        return run if len(run.rows(step)) == run.batch_rows else None

    def _window(self, draw: Draw) -> Window:
        return Window(
            draw,
            layouts=self.layouts(draw.seq_len),
            options=self.options,
            capacity=self.capacity(draw.seq_len),
        )

    def _chunk_steps(self, draw: Draw) -> int:
        return max(1, CHUNK_TOKENS // max(1, int(draw.rows.shape[1]) * draw.seq_len))

    def _window_steps(self, draw: Draw) -> int:
        """Whole chunks of about so many pieces as are found in one go; at least one."""
        pieces = int(draw.rows.shape[1]) * (2 + draw.seq_len * self._density)
        chunk = self._chunk_steps(draw)
        return chunk * max(1, int(WINDOW_PIECES / pieces) // chunk)

    @lazy
    def _density(self) -> float:
        """Documents per token, of the store where they are shortest."""
        return max(store.num_documents / store.num_tokens for store in self.mixture.stores)

    def capacity(self, seq_len: int) -> int:
        """Entries of cu_seqlens: as told, or twice the documents of an average batch, and some.

        The most documents of any batch are known only after looking at all of them. A batch with
        more than fit has a larger array: one more compilation, and no wrong border.
        """
        if self.options.cu_seqlens_capacity is not None:
            return self.options.cu_seqlens_capacity
        rows = self.options.batch_size * self.options.seq_len // seq_len
        expected = rows * (2 + seq_len * self._density)
        enough = 64 * (int(2 * expected) // 64 + 2)
        most = rows * self.options.packing.most_pieces(seq_len)
        return min(enough, most) + 1

    def __repr__(self) -> str:
        said = self.options
        return (
            f"Loader({', '.join(str(store.path) for store in self.mixture.stores)}):"
            f" rows of {said.seq_len:,} ({said.packing.name}), batch {said.batch_size} on each of"
            f" {said.world_size} ranks, step {self._step:,} of {_number(self.num_steps)}"
        )


_Part: TypeAlias = tuple[Window, int, int]
"""Steps of a window that are read in one go: the places of the first, and after the last."""


def _announced(parts: Iterator[_Part]) -> Iterator[_Part]:
    """The parts; while one is read, the next is on its way over the network."""
    waiting: list[_Part] = []
    for window, first, last in parts:
        window.read_ahead(first, last)
        waiting.append((window, first, last))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _number(steps: int | None) -> str:
    return "endless" if steps is None else f"{steps:,}"


def _slow_seconds(chunk: Chunk) -> float:
    """Longer than reading it from memory takes, on any machine."""
    return SLOW_READ_SECONDS + chunk.num_bytes * SLOW_READ_SECONDS_PER_BYTE


def _lay_out(
    packing: type[Layout],
    streams: Sequence[TokenStream],
    made: dict[int, tuple[Layout, ...]],
    seq_len: int,
) -> tuple[Layout, ...]:
    if seq_len not in made:
        made[seq_len] = tuple(packing(stream, seq_len=seq_len) for stream in streams)
    return made[seq_len]


def _measure(lay_out: Callable[[int], tuple[Layout, ...]], seq_len: int) -> list[Extent]:
    """Rows of each source; tokens too where the shares of a mixture depend on them."""
    layouts = lay_out(seq_len)
    if layouts[0].back_to_back or len(layouts) == 1:
        return [Extent(rows=layout.num_rows) for layout in layouts]
    return [Extent(rows=layout.num_rows, tokens=layout.used) for layout in layouts]


def _mixture(
    source: Store | Mixture | str | os.PathLike[str], *, epochs: float | None, split: str | None
) -> Mixture:
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
