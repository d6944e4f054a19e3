"""Threads that read ahead end with their iterator, however that ends."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.loader.stores import numbered_store

from tokenmill.errors import UsageError
from tokenmill.loader.loader import Loader, ReadAhead, read_ahead_when_slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "tokenmill" in thread.name]


def counting(limit: int) -> Iterator[int]:
    yield from range(limit)


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loader:
    """A loader that takes every read for a slow one."""
    monkeypatch.setattr("tokenmill.loader.loader.SLOW_READ_SECONDS", -1.0)
    store = numbered_store(tmp_path / "store", [[50, 40], [100]])
    return Loader(store, seq_len=4, batch_size=2, prefetch=2)


def test_items_come_in_order_and_the_thread_ends_with_them() -> None:
    assert list(ReadAhead(counting(100), depth=3, name="tokenmill test")) == list(range(100))
    assert not readers()


def test_at_most_so_many_items_are_made_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    ahead = ReadAhead(items(), depth=2, name="tokenmill test")
    assert next(ahead) == 0
    time.sleep(0.1)
    assert len(made) <= 3, "one taken, two waiting"
    ahead.close()


def test_an_error_in_the_thread_is_raised_where_items_are_taken() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    ahead = ReadAhead(items(), depth=2, name="tokenmill test")
    assert next(ahead) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()
    assert not readers()


def test_a_thread_is_begun_only_when_items_turn_out_slow() -> None:
    makers: list[str] = []

    def items() -> Iterator[int]:
        for number in range(10):
            makers.append(threading.current_thread().name)
            yield number

    def read(slow: range) -> list[int]:
        makers.clear()
        found = read_ahead_when_slow(
            items(),
            depth=2,
            name="tokenmill test",
            # However long it took: that is too long, or not.
            slow_seconds=lambda number: -1.0 if number in slow else math.inf,
        )
        return list(found)

    for slow in (range(1), range(0), range(3), range(8, 10), range(1, 9, 2)):
        assert read(slow) == list(range(10))
        assert set(makers) == {"MainThread"}
    assert read(slow=range(2, 5)) == list(range(10))
    assert makers == ["MainThread"] * 5 + ["tokenmill test"] * 5
    assert not readers()


def test_leaving_the_loop_ends_the_thread(loader: Loader) -> None:
    for batch in loader:
        if batch.step == 19:
            assert readers()
            break
    gc.collect()
    assert not readers()
    assert loader.step == 20


def test_an_exception_in_the_consumer_ends_the_thread(loader: Loader) -> None:
    def train() -> None:
        for batch in loader:
            if batch.step == 19:
                raise RuntimeError("loss is not a number")

    with pytest.raises(RuntimeError, match="loss"):
        train()
    gc.collect()
    assert not readers()


def test_an_abandoned_iterator_ends_its_thread(loader: Loader) -> None:
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    assert readers()
    del iterator
    gc.collect()
    assert not readers()


def test_an_iterator_carried_over_a_fork_says_so(loader: Loader) -> None:
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            list(iterator)
            message = "no error"
        except UsageError as error:
            message = str(error)
        os.write(write, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"left behind by fork" in os.read(read, 1000)
    os.close(read)
    os.close(write)
    next(iterator)


@pytest.mark.parametrize("how", ["end of the program", "Ctrl-C"])
def test_a_program_ends_with_iterators_open(loader: Loader, how: str) -> None:
    code = textwrap.dedent(
        f"""
        import sys, time, tokenmill
        import tokenmill.loader.loader as module
        module.SLOW_READ_SECONDS = -1.0
        loader = tokenmill.Loader({str(loader.mixture.stores[0].path)!r}, seq_len=4, batch_size=2)
        kept = iter(loader)
        for _ in range(20):
            next(kept)
        print("reading", flush=True)
        if {how == "Ctrl-C"}:
            for batch in loader:
                time.sleep(0.001)
        """
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "reading\n"
    if how == "Ctrl-C":
        program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=20)
    if how == "Ctrl-C":
        assert program.returncode in {-signal.SIGINT, 130}
        assert "KeyboardInterrupt" in errors
    else:
        assert (program.returncode, errors) == (0, "")


@pytest.mark.parametrize("when", ["a thread is reading", "at exit"])
def test_a_program_that_ends_while_it_reads_does_not_crash(loader: Loader, when: str) -> None:
    code = textwrap.dedent(
        f"""
        import atexit, threading, time, tokenmill
        loader = tokenmill.Loader({str(loader.mixture.stores[0].path)!r}, seq_len=4, batch_size=2)
        def read():
            for batch in loader:
                batch.position_ids
        if {when == "at exit"}:
            atexit.register(lambda: loader.batch(7).position_ids.sum())
        else:
            threading.Thread(target=read, daemon=True).start()
        loader.batch(0)
        time.sleep(0.2)
        """
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_fork_while_a_thread_looks_borders_up_does_not_hang(loader: Loader) -> None:
    stop = threading.Event()

    def look_up() -> None:
        for batch in loader.batches():
            if stop.is_set():
                return
            _ = batch.position_ids

    thread = threading.Thread(target=look_up)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                _ = loader.batch(3).position_ids
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
