"""Numbers of a step, read without waiting for the device.

    device: row of numbers --copy--> pinned memory, [event]        the host goes on
    steps later:                     the event has passed: read

Nothing here makes the host wait. A reading that is not there yet is taken at the next look; only
`drain`, at the end of a run or before a checkpoint, waits. Time between two marks is the device's
own: the host is ahead of it by a step or two.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    Mark = torch.cuda.Event | float

SLOTS = 8
"""Readings that may be under way."""


class Row(NamedTuple):
    """What a step leaves on the device, in this order."""

    loss: float
    """Mean over the tokens that count, of all ranks."""
    tokens: float
    """That count."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    stop: float
    """How many ranks were asked to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The numbers of one step, on the host."""

    step: int
    row: Row
    steps: int
    """That were made since the mark before."""
    seconds: float
    """That they took, on the device."""


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    slot: int
    start: Mark
    end: Mark
    steps: int


class LateReader:
    """Brings rows of numbers to the host, when they have arrived."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._slots = [
            torch.zeros(len(Row._fields), pin_memory=self._is_cuda) for _ in range(SLOTS)
        ]
        # Views that are made once: reading them later needs no tensor.
        self._views: list[NDArray[np.float32]] = [slot.numpy() for slot in self._slots]
        self._next = 0
        self._pending: deque[_Pending] = deque()
        self._start: Mark | None = None
        self._start_step = 0

    def begin(self, step: int) -> None:
        """Measure time from here on: what came before was no part of the steps."""
        self._start, self._start_step = self._mark(), step

    def send(self, step: int, row: torch.Tensor) -> None:
        """Start bringing the row of a step to the host."""
        slot = self._next
        self._next = (slot + 1) % SLOTS
        self._slots[slot].copy_(row, non_blocking=True)
        end = self._mark()
        start = end if self._start is None else self._start
        self._pending.append(_Pending(step, slot, start, end, step - self._start_step))
        self._start, self._start_step = end, step

    def read(self, *, wait: bool = False) -> Iterator[Reading]:
        """What has arrived; with `wait`, all that was sent."""
        # A slot that is about to be used again has to be read first.
        while self._pending:
            oldest = self._pending[0]
            if self._is_cuda and not oldest.end.query():  # type: ignore[union-attr]
                if not wait and len(self._pending) < SLOTS:
                    return
                oldest.end.synchronize()  # type: ignore[union-attr]
            self._pending.popleft()
            yield Reading(
                step=oldest.step,
                row=Row(*(float(number) for number in self._views[oldest.slot])),
                steps=oldest.steps,
                seconds=self._between(oldest.start, oldest.end),
            )

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Mark, end: Mark) -> float:
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float)
            assert isinstance(end, float)
            return end - start
        return start.elapsed_time(end) / 1000 if start is not end else 0.0
