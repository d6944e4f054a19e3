"""Batches on the device before they are asked for.

    loader (thread: narrow arrays) -> lane (pinned) -> copy stream (widens) -> consumer's stream

One thread reads ahead by `depth` parcels of up to 16 steps (parcel.py). It holds neither the feeder
nor its iterator, so that both can be dropped at any time and take the thread with them. What counts
as consumed is what was handed out: the loader stands at the step after the last batch taken,
however far the thread is.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

import torch

from tokenmill.errors import UsageError
from tokenmill.loader.torch.parcel import Feed, StreamedTokens
from tokenmill.loader.torch.producer import Producer
from tokenmill.loader.torch.resident import ResidentTokens
from tokenmill.loader.torch.staging import link_to
from tokenmill.loader.torch.tensors import DEFAULT_FIELDS, Form, TensorBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenmill.loader.loader import Loader
    from tokenmill.loader.torch.tensors import Tensors

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
    capture_error_mode="thread_local": the feeder's thread uses CUDA meanwhile.) With
    `resident=True` all tokens of the stores are kept on the device, and rows are gathered there.
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
        resident: bool = False,
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
        with self._link.active():
            tokens = ResidentTokens(loader, self.device) if resident else StreamedTokens()
        self._feed = Feed(loader, form, tokens)
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
