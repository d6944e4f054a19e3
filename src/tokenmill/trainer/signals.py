"""Ctrl-C and SIGTERM end a run after the step, not in it."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers that a signal came; a second one acts at once."""

    def __init__(self, on_request: Callable[[], None] | None = None) -> None:
        self.signal: int | None = None
        self._on_request = on_request
        self._before: dict[int, object] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """While the block runs. Only the main thread can listen; elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
            for number in SIGNALS:
                signal.signal(number, self._note)
        try:
            yield self
        finally:
            self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        if self._on_request is not None:
            self._on_request()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def pass_on(self) -> None:
        """Do now what the signal would have done without us."""
        if self.signal is not None:
            signal.raise_signal(self.signal)
