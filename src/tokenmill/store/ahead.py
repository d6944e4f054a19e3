"""Reads pieces in the background, so that they are here when they are asked for.

    begin(pieces) -> a job in a thread: BlockReader.read -> take(piece), once

Pieces are known by their place alone, so a later read may group them as it likes. What nobody takes
is dropped when newer pieces need the room. The threads know the reader, never the store: so a store
that goes out of use takes its threads along.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from tokenmill.errors import TokenmillError
from tokenmill.remote import StoppedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.store.blocks import BlockReader, Piece

AHEAD_BYTES = 256 << 20
THREADS = 2
"""One batch of requests each: the next one begins while the last one comes in."""


class ReadAhead:
    """Pieces that were begun and not yet taken."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._jobs: OrderedDict[Piece, tuple[Future[list[memoryview]], int]] = OrderedDict()
        self._bytes = 0
        self._threads: _Threads | None = None

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin to read pieces that will be asked for."""
        if self._process != os.getpid():  # the threads are those of the process that forked us
            self._begin_anew()
        with self._lock:
            new = [piece for piece in dict.fromkeys(pieces) if piece not in self._jobs]
            size = sum(map(_size, new))
            if not new or size > AHEAD_BYTES:
                return
            if self._threads is None:
                self._threads = _Threads(self)
            job = self._threads.submit(self._reader, new)
            self._jobs.update({piece: (job, place) for place, piece in enumerate(new)})
            self._bytes += size
            while self._bytes > AHEAD_BYTES:
                dropped, _ = self._jobs.popitem(last=False)
                self._bytes -= _size(dropped)

    def take(self, piece: Piece) -> Taken | None:
        """A piece that was begun, for the only time; None where it was not."""
        if self._process != os.getpid():
            self._begin_anew()
        with self._lock:
            found = self._jobs.pop(piece, None)
            if found is None:
                return None
            self._bytes -= _size(piece)
        return Taken(*found)

    def close(self) -> None:
        """End the threads, and forget what they brought."""
        threads, ours = self._threads, self._process == os.getpid()
        self._begin_anew()
        if threads is not None and ours:
            threads.end()


class Taken:
    """A piece that comes."""

    def __init__(self, job: Future[list[memoryview]], place: int) -> None:
        self._job = job
        self._place = place

    def wait(self) -> memoryview | None:
        """Its bytes; None where they could not be read, and asking for them will tell why."""
        try:
            return self._job.result()[self._place]
        except (TokenmillError, StoppedError, CancelledError):
            return None


class _Threads:
    """Threads that end when they are told to, or when their owner is gone."""

    def __init__(self, owner: ReadAhead) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-ahead")
        self._stop = threading.Event()
        self.end = weakref.finalize(owner, _end, self._pool, self._stop, os.getpid())

    def submit(self, reader: BlockReader, pieces: list[Piece]) -> Future[list[memoryview]]:
        return self._pool.submit(reader.read, pieces, stop=self._stop)


def _end(pool: ThreadPoolExecutor, stop: threading.Event, process: int) -> None:
    if os.getpid() != process:
        return  # a fork has none of the threads, and perhaps a lock that nobody will give back
    stop.set()
    # Rubbish is collected by any thread: by one of these too, and that one cannot wait for itself.
    own = threading.current_thread().name.startswith("tokenmill-ahead")
    pool.shutdown(wait=not own, cancel_futures=True)


def _size(piece: Piece) -> int:
    return piece[2] - piece[1]
