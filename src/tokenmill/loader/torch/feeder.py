"""Batches on the device before they are asked for.

    loader (thread: narrow arrays) -> lane (pinned) -> copy stream (widens) -> consumer's stream

One thread reads ahead by `depth` parcels of up to 16 steps. It holds neither the feeder
nor its iterator, so that both can be dropped at any time and take the thread with them. What counts
as consumed is what was handed out: the loader stands at the step after the last batch taken,
however far the thread is.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from tokenmill.errors import UsageError
from tokenmill.loader.loader import ReadAhead
from tokenmill.loader.torch.tensors import DEFAULT_FIELDS, Form, TensorBatch, share, unstacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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


def parcels(loader: Loader, form: Form, *, first: int) -> Iterator[Parcel]:
    """From a step on, until the steps end."""
    for chunk in loader.chunks(first):
        has_mask = chunk.mask is not None
        place, most = 0, max(1, min(MOST_STEPS, MOST_TOKENS // max(1, chunk.step_tokens)))
        for batches in form.alike(chunk.batches(), most=most):
            end = place + len(batches)
            arrays = form.stacked(batches, has_mask=has_mask)
            if form.has_ids:
                arrays["tokens"] = chunk.tokens[place:end]
            if form.has_labels and chunk.mask is not None:
                arrays["mask"] = chunk.mask[place:end]
            yield Parcel(chunk.steps[place:end], batches[0].seq_len, arrays)
            place = end


# -------------------------------------------------------------------------------------------------
# How arrays get to the device: pinned memory that is used again and again, and one copy stream.
#
# The thread waits until the lane's last copy is done, writes, copies, makes tensors and seals them;
# the consumer's stream waits for the seal, and the host never does. Stream order alone does not
# protect pinned memory: the host could rewrite what a copy still reads.


def send(form: Form, parcel: Parcel, lane: CudaLane | None) -> Sent:
    """The batches of a parcel, last first, and what to wait for before they are used.

    Without a lane the consumer reads the arrays where they are.
    """
    tensors = form.tensors(share(parcel.arrays) if lane is None else lane.send(parcel.arrays))
    seal = None if lane is None else lane.seal()
    steps = zip(parcel.steps, unstacked(tensors), strict=True)
    batches = [TensorBatch(made, step=step, max_seqlen=parcel.seq_len) for step, made in steps]
    return batches[::-1], seal


@contextlib.contextmanager
def _on_stream(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """For the thread: its work is queued on the copy stream."""
    if stream is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


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


Sent: TypeAlias = tuple[list[TensorBatch], CudaSeal | None]
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
        # One for all epochs: each would leave the allocator's cached blocks behind with it.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._form = form
        self._kept: Tensors | None = {} if reuse_buffers else None
        # Its iterator holds what reads ahead: where that is dropped, the thread must end.
        self._ahead: Callable[[], ReadAhead[Sent] | None] = _nothing
        self._next_step = _STALE
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
        ahead = self._ahead()
        return 0 if ahead is None else ahead.num_ready

    def _start(self) -> ReadAhead[Sent]:
        self._next_step = self.loader.step
        lanes = [
            None if self._stream is None else CudaLane(self.device, self._stream)
            for _ in range(self.depth)
        ]
        made = parcels(self.loader, self._form, first=self._next_step)
        ahead = ReadAhead(
            map(partial(send, self._form), made, cycle(lanes)),
            depth=self.depth,
            name="tokenmill feeder",
            within=partial(_on_stream, self.device, self._stream),
        )
        self._ahead = weakref.ref(ahead)
        return ahead

    def _follow(self, ahead: ReadAhead[Sent]) -> Iterator[TensorBatch]:
        batches: list[TensorBatch] = []
        seal: CudaSeal | None = None
        try:
            while True:
                if ahead.is_closed:
                    raise UsageError(
                        "the feeder was closed, or iterated anew, while this iterator was in use",
                        hint="iterate over the feeder again: it goes on where it was",
                    )
                if self._next_step != self.loader.step:
                    # The loader was moved, by load_state_dict or seek: what was read is of no use.
                    ahead.close()
                    ahead, batches = self._start(), []
                asked = time.perf_counter()
                if not batches:
                    batches, seal = next(ahead, ([], None))
                batch = batches.pop() if batches else None
                if batch is not None and seal is not None:
                    seal.open(batch.values())
                self.last_wait_seconds = time.perf_counter() - asked
                self.wait_seconds += self.last_wait_seconds
                if batch is None:
                    self._has_ended = True
                    return
                self._next_step += 1
                self.loader.seek(self._next_step)
                if self._kept is not None:
                    batch.update(_copied(batch, self._kept))
                yield batch
                del batch
        finally:
            ahead.close()

    def state_dict(self) -> dict[str, object]:
        """The loader's state: all batches handed out so far come before it."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a state; an iterator in use follows."""
        self.loader.load_state_dict(state)
        self._has_ended = False
        self._next_step = _STALE  # the step may be the same, and its rows others

    def close(self) -> None:
        """End the thread, if one is running; the feeder can be iterated again."""
        if (ahead := self._ahead()) is not None:
            ahead.close()

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


def _nothing() -> None:
    return None


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the feeder has no way to the device {str(found)!r}, only to the CPU and to CUDA",
            hint='use device="cpu" and move the batches with batch.to(...)',
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device={str(device)!r}, and torch {torch.__version__} finds no CUDA device",
            hint='use device="cpu", or device=None for whatever there is',
        )
    # "cuda" alone would mean another device in a thread that makes another one current.
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found
