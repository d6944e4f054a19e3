"""The thread of a feeder: it sends the next steps by free lanes, until nobody wants any more.

    free lanes -> thread (reads, sends, makes tensors) -> parcels -> consumer -> free lanes

The thread holds nothing of its consumer. A producer that is closed, dropped, or left over when the
interpreter exits tells its thread to stop and waits for it, within bounds.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import UsageError
from tokenmill.loader.torch.tensors import TensorBatch, unstacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.loader.torch.parcel import Feed
    from tokenmill.loader.torch.staging import Lane, Link, Seal
    from tokenmill.loader.torch.tensors import Tensors

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


def _produce(channel: _Channel, link: Link, feed: Feed, *, first: int) -> None:
    """Body of the thread: uses free lanes until it is stopped or the steps end."""
    parcels = feed.parcels(first)
    try:
        with link.active():
            while (lane := channel.free.get()) is not None and not channel.is_stopped:
                parcel = next(parcels, None)
                if parcel is None:
                    channel.ready.put(None)
                    break
                tensors = feed.tensors(lane.send(parcel.arrays), parcel.shape)
                seq_len = parcel.shape[-1]
                channel.ready.put(Ready(parcel.steps, seq_len, tensors, lane, lane.seal()))
                # The next wait must not keep these batches alive.
                del lane, parcel, tensors
    except BaseException as error:  # the border of a thread: the consumer raises it
        channel.ready.put(error)
    finally:
        parcels.close()


class Producer:
    """Reads ahead from one step on, until it is closed or dropped."""

    def __init__(self, link: Link, feed: Feed, *, first: int, depth: int) -> None:
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
