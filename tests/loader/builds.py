"""Real builds that go on when they may, for the tests of what reads a store meanwhile."""

from __future__ import annotations

import gzip
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.builder.run import make_run
from tokenmill.options import BuildOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNIT_BYTES = 50_000


def make_texts(folder: Path) -> Path:
    """Three files, of which one is a stream: 1.2 MB, 27 units, seven windows of runs."""
    folder.mkdir(exist_ok=True)
    words = np.random.default_rng(7).integers(0, 10_000, (3, 400, 100))
    for number, file in enumerate(words):
        lines = [json.dumps({"text": " ".join(map(str, row.tolist()))}) + "\n" for row in file]
        data = "".join(lines).encode()
        name = f"{number}.jsonl"
        if number == 1:
            name, data = f"{name}.gz", gzip.compress(data)
        (folder / name).write_bytes(data)
    return folder


def options(texts: Path | list[str], out: Path | str, **changes: Any) -> BuildOptions:
    said = {
        "tokenizer": "bytes",
        "unit_bytes": UNIT_BYTES,
        "serial": True,
        "followed": True,
        **changes,
    }
    return BuildOptions(texts, out=out, **said)


class Build(threading.Thread):
    """A real build that waits after each unit until it may go on."""

    def __init__(self, asked: BuildOptions) -> None:
        super().__init__(daemon=True)
        self.gate = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.ends_with: BaseException | None = None
        self.made = make_run(asked)
        self.made.on_unit = self.wait

    def wait(self, _: object) -> None:
        self.gate.acquire()
        if self.ends_with is not None:
            raise self.ends_with

    def run(self) -> None:
        try:
            self.made.run()
        except BaseException as error:  # shown by the test, in its own thread
            self.error = error

    def let(self, units: int) -> None:
        for _ in range(units):
            self.gate.release()


@contextmanager
def building(asked: BuildOptions, *, units: int) -> Iterator[Build]:
    """A build after so many units, which comes to its end with the context."""
    build = Build(asked)
    build.let(units)
    build.start()
    try:
        yield build
    finally:
        build.let(1000)
        build.join(60)
