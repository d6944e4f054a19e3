"""How arrays get to the device: pinned memory that is used again and again, and one copy stream.

    producer thread:   wait until the lane's last copy is done, write, copy, make tensors, seal
    consumer:          its stream waits for the seal; the host never does

A lane is the place of one parcel on its way: pinned memory, from which fresh tensors are filled.
Stream order alone does not protect pinned memory: the host could rewrite what a copy still reads.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tokenmill.errors import UsageError
from tokenmill.loader.torch.tensors import share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from tokenmill.loader.torch.tensors import Arrays, Tensors


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


class Link(Protocol):
    """The way to one device."""

    def active(self) -> contextlib.AbstractContextManager[object]:
        """For the producer's thread: its work is queued on the copy stream."""
        ...

    def lane(self) -> Lane: ...


def link_to(device: torch.device) -> Link:
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
