"""The worker side of the local runner: what a worker process runs.

A fresh interpreter started by name, not by `multiprocessing`: a user's script needs no `if __name__
== "__main__"` guard, and nothing of the parent (threads, locks, thread pools) is inherited.
Messages come on standard input and go to what was standard output; prints of libraries go to
standard error.

A worker never outlives its driver: the system ends it with its parent (on Linux), and the thread
that reads standard input ends the process when that closes, however the driver died.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import signal
import sys
import threading
import traceback
from concurrent.futures import Future
from typing import IO, Any

from tokenmill.runners.base import Job, resolve
from tokenmill.runners.frames import read_frame, write_frame
from tokenmill.visible import guarded

_PR_SET_PDEATHSIG = 1


def _receive(pipe: IO[bytes], inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(read_frame(pipe))
    except (EOFError, OSError):
        os._exit(0)


def _serve(job: Job, inbox: queue.SimpleQueue[Any], outbox: IO[bytes]) -> None:
    lock = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with lock:
            write_frame(outbox, (kind, value))

    def fail(error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        try:
            send("error", (error, trace))
        except Exception:  # an error that cannot be pickled still has its words
            send("error", (RuntimeError(f"{type(error).__name__}: {error}"), trace))

    def settle(number: int, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            send("done", (number, future.result()))
        else:
            fail(error)

    try:
        worker = resolve(job.function)(job.payload)
        send("ready", worker.ready())
        while (message := inbox.get()) is not None:
            number, task = message
            outcome = worker.work(task, lambda value: send("report", value))
            if isinstance(outcome, Future):
                outcome.add_done_callback(functools.partial(settle, number))
            else:
                send("done", (number, outcome))
            send("free", None)
        worker.close()
    except BaseException as error:  # the border of the process: everything is told to the driver
        fail(error)


def end_with_parent() -> None:
    """Have the system end this process when the thread that started it ends; only Linux can.

    Unlike a thread that waits for that, it also ends a process that is stopped, or in native code.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serve the driver at the other end of standard input until it is done or gone."""
    end_with_parent()
    # Ctrl-C goes to the whole group of processes; the driver alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outbox = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)
    job: Job = read_frame(sys.stdin.buffer)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, inbox), daemon=True).start()
    _serve(job, inbox, outbox)
    # Not sys.exit: joining would wait for library threads, and the reader still blocks on its pipe.
    os._exit(0)
