"""Batches on the device before they are asked for.

    loader (thread: narrow arrays) -> lane (pinned) -> copy stream (widens) -> consumer's stream

One thread reads ahead by `depth` parcels of up to 16 steps (parcel.py). It holds neither the feeder
nor its iterator, so that both can be dropped at any time and take the thread with them. What counts
as consumed is what was handed out: the loader stands at the step after the last batch taken,
however far the thread is.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tokenmill.errors import UsageError
from tokenmill.loader.torch.tensors import DEFAULT_FIELDS, Form, TensorBatch, share, unstacked

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.loader import Loader
    from tokenmill.loader.torch.tensors import Arrays, Tensors


# -------------------------------------------------------------------------------------------------
# What a feeder's thread sends at a time: the arrays of a few consecutive steps.
#
#   | Loader.chunks -> Parcel (arrays of up to 16 steps) -> device -> tensors of all these steps
#
# Python's lock is why steps travel together: each call of the thread takes it from the training
# loop for some tens of microseconds, and a parcel needs no more calls than a step. The first
# parcels hold 1, 2, 4, ... steps, as the loader's chunks do, so that the first batch does not wait
# for others.

MOST_STEPS = 16
MOST_TOKENS = 1 << 18
"""Of a parcel with more than one step: it is some megabytes, of which several are on their way."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The arrays of some steps, as they travel."""

    steps: range
    seq_len: int
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class Feed:
    """Where parcels come from, and what is made of them on the device."""

    loader: Loader
    form: Form

    def parcels(self, first: int) -> Generator[Parcel]:
        """From a step on, until the steps end."""
        for chunk in self.loader.chunks(first):
            has_mask = chunk.mask is not None
            place, most = 0, max(1, min(MOST_STEPS, MOST_TOKENS // max(1, chunk.step_tokens)))
            for batches in self.form.alike(chunk.batches(), most=most):
                end = place + len(batches)
                arrays = self.form.stacked(batches, has_mask=has_mask)
                if self.form.has_ids:
                    arrays["tokens"] = chunk.tokens[place:end]
                if self.form.has_labels and chunk.mask is not None:
                    arrays["mask"] = chunk.mask[place:end]
                yield Parcel(chunk.steps[place:end], batches[0].seq_len, arrays)
                place = end


# -------------------------------------------------------------------------------------------------
# The thread of a feeder: it sends the next steps by free lanes, until nobody wants any more.
#
#   | free lanes -> thread (reads, sends, makes tensors) -> parcels -> consumer -> free lanes
#
# The thread holds nothing of its consumer. A producer that is closed, dropped, or left over when
# the interpreter exits tells its thread to stop and waits for it, within bounds.

JOIN_SECONDS = 10.0
"""How long is waited for the thread, which may be inside a slow read, when it was told to stop."""
_PROBE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Ready:
    """A parcel that the thread has sent."""

    steps: range
    seq_len: int
    tensors: Tensors
    lane: Lane
    seal: Seal

    def batches(self) -> list[TensorBatch]:
        """Those of all steps."""
        tensors = zip(self.steps, unstacked(self.tensors), strict=True)
        return [TensorBatch(made, step=step, max_seqlen=self.seq_len) for step, made in tensors]


class _Channel:
    """What thread and consumer share."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.free: queue.SimpleQueue[Lane | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[Ready | BaseException | None] = queue.SimpleQueue()
        self.is_stopped = False
        for lane in lanes:
            self.free.put(lane)


def _produce(channel: _Channel, link: CopyLink, feed: Feed, *, first: int) -> None:
    """Body of the thread: uses free lanes until it is stopped or the steps end."""
    parcels = feed.parcels(first)
    try:
        with link.active():
            while (lane := channel.free.get()) is not None and not channel.is_stopped:
                parcel = next(parcels, None)
                if parcel is None:
                    channel.ready.put(None)
                    break
                tensors = feed.form.tensors(lane.send(parcel.arrays))
                seq_len = parcel.seq_len
                channel.ready.put(Ready(parcel.steps, seq_len, tensors, lane, lane.seal()))
                # The next wait must not keep these batches alive.
                del lane, parcel, tensors
    except BaseException as error:  # the border of a thread: the consumer raises it
        channel.ready.put(error)
    finally:
        parcels.close()


class Producer:
    """Reads ahead from one step on, until it is closed or dropped."""

    def __init__(self, link: CopyLink, feed: Feed, *, first: int, depth: int) -> None:
        self.step = first
        """The step that comes next."""
        self._seal: Seal | None = None
        self._batches: list[TensorBatch] = []
        """The rest of the parcel that was taken last, in reverse."""
        self._channel = _Channel([link.lane() for _ in range(depth)])
        self._thread = threading.Thread(
            target=_produce,
            args=(self._channel, link, feed),
            kwargs={"first": first},
            name="tokenmill feeder",
            # Interpreter exit joins other threads before anything could tell them to stop.
            daemon=True,
        )
        self._thread.start()
        # Also called at interpreter exit.
        self._finalizer = weakref.finalize(self, _stop, self._channel, self._thread, os.getpid())

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    def take(self) -> TensorBatch | None:
        """The next batch, None after the last; what the thread raised is raised here."""
        if not self._batches and not self._take_parcel():
            return None
        assert self._seal is not None
        batch = self._batches.pop()
        self._seal.open(batch.values())
        self.step += 1
        return batch

    def _take_parcel(self) -> bool:
        ready = self._wait()
        if ready is None:
            return False
        self._seal = ready.seal
        self._batches = ready.batches()[::-1]
        self._channel.free.put(ready.lane)
        return True

    def _wait(self) -> Ready | None:
        while True:
            try:
                item = self._channel.ready.get(timeout=_PROBE_SECONDS)
            except queue.Empty:
                self._probe()
                continue
            if not isinstance(item, BaseException):
                return item
            try:
                raise item
            finally:
                del item  # its traceback holds this frame

    def _probe(self) -> None:
        if not self._thread.is_alive() and self._channel.ready.empty():
            raise UsageError(
                "the feeder's thread is gone: this process was forked while it was iterating",
                hint="begin to iterate in the process that uses the batches",
            )

    @property
    def num_ready(self) -> int:
        """Parcels that wait to be taken."""
        return self._channel.ready.qsize()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._finalizer()


def _stop(channel: _Channel, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return
    channel.is_stopped = True
    channel.free.put(None)
    # The garbage collector may call this from any thread, this one included.
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)


# -------------------------------------------------------------------------------------------------
# How arrays get to the device: pinned memory that is used again and again, and one copy stream.
#
#   | producer thread:   wait until the lane's last copy is done, write, copy, make tensors, seal
#   | consumer:          its stream waits for the seal; the host never does
#
# A lane is the place of one parcel on its way: pinned memory, from which fresh tensors are filled.
# Stream order alone does not protect pinned memory: the host could rewrite what a copy still
# reads.


class Seal(Protocol):
    """Stands for all that a consumer has to wait for."""

    def open(self, tensors: Iterable[torch.Tensor]) -> None:
        """From here on the consumer's stream may use these tensors of the producer's stream."""
        ...


class Lane(Protocol):
    """The way of one parcel to the device."""

    def send(self, arrays: Arrays) -> Tensors:
        """The arrays on the device, in fresh tensors."""
        ...

    def seal(self) -> Seal:
        """All that the consumer has to wait for has been queued."""
        ...


class CopyLink(Protocol):
    """The way to one device."""

    def active(self) -> contextlib.AbstractContextManager[object]:
        """For the producer's thread: its work is queued on the copy stream."""
        ...

    def lane(self) -> Lane: ...


def link_to(device: torch.device) -> CopyLink:
    """The way to a device."""
    if device.type == "cpu":
        return HostLink()
    if device.type == "cuda":
        return CudaLink(device)
    raise UsageError(
        f"the feeder has no way to the device {str(device)!r}, only to the CPU and to CUDA",
        hint='use device="cpu" and move the batches with batch.to(...)',
    )


class HostLane:
    """The consumer reads the arrays where they are."""

    def send(self, arrays: Arrays) -> Tensors:
        return share(arrays)

    def seal(self) -> HostLane:
        return self

    def open(self, tensors: Iterable[torch.Tensor]) -> None:
        pass


class HostLink:
    """To the CPU: nothing is copied."""

    def active(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def lane(self) -> HostLane:
        return HostLane()


class CudaLink:
    """To a CUDA device, by a stream that lives as long as the link.

    A stream for every epoch would leave the allocator's cached blocks behind with each.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def active(self) -> contextlib.AbstractContextManager[object]:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self.stream))
        return stack

    def lane(self) -> CudaLane:
        return CudaLane(self.device, self.stream)


class CudaLane:
    """Pinned memory by name: allocated once, and again only for arrays of another shape."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._pinned: Tensors = {}
        self._sealed: torch.cuda.Event | None = None

    def send(self, arrays: Arrays) -> Tensors:
        if self._sealed is not None:
            self._sealed.synchronize()
        return {name: self._copy(name, array) for name, array in arrays.items()}

    def _copy(self, name: str, array: NDArray[np.generic]) -> torch.Tensor:
        room = self._room(name, array)
        np.copyto(room.numpy(), array)
        return room.to(self._device, non_blocking=True)

    def _room(self, name: str, array: NDArray[np.generic]) -> torch.Tensor:
        dtype = torch.from_numpy(array[:0]).dtype
        kept = self._pinned.get(name)
        if (
            kept is None
            or kept.dtype != dtype
            or kept.shape[1:] != array.shape[1:]
            or len(kept) < len(array)
        ):
            kept = self._pinned[name] = torch.empty(array.shape, dtype=dtype, pin_memory=True)
        return kept[: len(array)]

    def seal(self) -> CudaSeal:
        # Blocking: the producer sleeps for the copy instead of spinning on a core.
        self._sealed = torch.cuda.Event(blocking=True)
        self._sealed.record(self._stream)
        return CudaSeal(self._sealed, self._device)


class CudaSeal:
    """An event of the copy stream, and the stream that has waited for it."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device
        self._opened_on: torch.cuda.Stream | None = None

    def open(self, tensors: Iterable[torch.Tensor]) -> None:
        current = torch.cuda.current_stream(self._device)
        # Once for all steps of a parcel, unless the consumer goes over to another stream.
        if current == self._opened_on:
            return
        current.wait_event(self._event)
        for tensor in tensors:
            # They belong to the copy stream; without this their memory could be given out again
            # while the consumer's stream still has to read it.
            tensor.record_stream(current)
        self._opened_on = current


_STALE = -1
"""No step: makes an iterator begin anew."""


class DeviceFeeder:
    """Iterates over a loader's steps, as tensors on a device.

    >>> with DeviceFeeder(loader, device="cuda") as feeder:
    ...     for batch in feeder:
    ...         loss = model(batch.input_ids, batch.labels)

    Iterating goes on at `loader.step`, and begins anew after the last step, as the loader's own
    iteration does; `state_dict()` says what has been consumed. Batches are yours to keep; one that
    is kept also keeps the memory of those that were sent with it, half a million tokens at most.

    With `reuse_buffers=True` every batch lies in the same tensors instead, as CUDA graphs need it:
    it is valid until the next one is asked for, on the stream that is current then. (Capture with
    capture_error_mode="thread_local": the feeder's thread uses CUDA meanwhile.)
    """

    def __init__(
        self,
        loader: Loader,
        *,
        device: torch.device | str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        dtype: torch.dtype = torch.int64,
        depth: int = 3,
        reuse_buffers: bool = False,
    ) -> None:
        if depth < 1:
            raise UsageError(f"depth={depth} leaves no batch to read ahead", hint="use depth=3")
        form = Form.of(fields, dtype=dtype)
        self.loader = loader
        self.device = _device(device)
        self.depth = depth
        self.wait_seconds = 0.0
        """How long consumers have waited for batches, in all."""
        self.last_wait_seconds = 0.0
        """How long the last batch was waited for."""
        self._link = link_to(self.device)
        self._feed = Feed(loader, form)
        self._kept: Tensors | None = {} if reuse_buffers else None
        # Its iterator holds the producer: where that is dropped, the thread must end.
        self._producer: Callable[[], Producer | None] = _no_producer
        self._has_ended = False

    def __iter__(self) -> Iterator[TensorBatch]:
        self.close()
        if self._has_ended and self.loader.step == self.loader.num_steps:
            self.loader.seek(0)
        self._has_ended = False
        # Reading ahead begins now, not when the first batch is asked for.
        return self._follow(self._start())

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def num_ready(self) -> int:
        """Parcels of steps that wait to be taken: `depth` where the thread keeps up."""
        producer = self._producer()
        return 0 if producer is None else producer.num_ready

    def _start(self) -> Producer:
        producer = Producer(self._link, self._feed, first=self.loader.step, depth=self.depth)
        self._producer = weakref.ref(producer)
        return producer

    def _follow(self, producer: Producer) -> Iterator[TensorBatch]:
        try:
            while True:
                if producer.is_closed:
                    raise UsageError(
                        "the feeder was closed, or iterated anew, while this iterator was in use",
                        hint="iterate over the feeder again: it goes on where it was",
                    )
                if producer.step != self.loader.step:
                    # The loader was moved, by load_state_dict or seek: what was read is of no use.
                    producer.close()
                    producer = self._start()
                batch = self._take(producer)
                if batch is None:
                    self._has_ended = True
                    return
                yield batch
                del batch
        finally:
            producer.close()

    def _take(self, producer: Producer) -> TensorBatch | None:
        asked = time.perf_counter()
        batch = producer.take()
        self.last_wait_seconds = time.perf_counter() - asked
        self.wait_seconds += self.last_wait_seconds
        if batch is None:
            return None
        self.loader.seek(producer.step)
        if self._kept is not None:
            batch.update(_copied(batch, self._kept))
        return batch

    def state_dict(self) -> dict[str, object]:
        """The loader's state: all batches handed out so far are behind it."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a state; an iterator in use follows."""
        self.loader.load_state_dict(state)
        self._has_ended = False
        if (producer := self._producer()) is not None:
            producer.step = _STALE  # the step may be the same, and its rows others

    def close(self) -> None:
        """End the thread, if one is running; the feeder can be iterated again."""
        if (producer := self._producer()) is not None:
            producer.close()

    def __enter__(self) -> DeviceFeeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copied(tensors: Tensors, kept: Tensors) -> Tensors:
    """The tensors in those that are kept, where they have the right shape."""
    for name, tensor in tensors.items():
        if name not in kept or kept[name].shape != tensor.shape:
            kept[name] = torch.empty_like(tensor)
        kept[name].copy_(tensor)
    return kept


def _no_producer() -> None:
    return None


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device={str(device)!r}, and torch {torch.__version__} finds no CUDA device",
            hint='use device="cpu", or device=None for whatever there is',
        )
    # "cuda" alone would mean another device in a thread that makes another one current.
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found
