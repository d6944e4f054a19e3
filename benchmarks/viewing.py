"""How long an answer of `tokenmill view` takes on a store of a billion tokens, and its memory.

    python -m benchmarks.viewing            a billion tokens; writes results/viewing.json
    python -m benchmarks.viewing --quick    a trial with a million; prints what it found

The store has the tokens of a small one again and again, written by the store's own writer, so that
texts, lengths and frequencies are real. The command is started as a user starts it, and asked for
what its pages ask, over HTTP. Memory is that of its process when all was asked: what is its own,
and with the pages of the mapped files, which the system takes back when it wants them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import psutil

import tokenmill
from benchmarks import RESULTS, WORK, corpora, machine, vocabularies
from tokenmill.store.facts import (
    Bounds,
    Building,
    Counts,
    PlannedSource,
    SourceFacts,
    UnitFacts,
    assemble_manifest,
    write_building,
    write_manifest,
)
from tokenmill.store.layout import TRAIN, StoreLayout
from tokenmill.store.write import UnitWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenmill import Store

SHARDS = 64
ROUNDS = 5
RUN_STEPS, UNITS = 100_000, 2_000
QUESTIONS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("overview", "overview", {}),
    ("how often tokens are there", "frequencies", {}),
    ("rejected rows", "rejects", {}),
    ("list of documents", "documents", {}),
    ("list from the middle on", "documents", {"first": "middle"}),
    ("list by length", "documents", {"least": 4000}),
    ("list by a condition", "documents", {"where": "tokens > 4000 and split == 'train'"}),
    ("list of a source", "documents", {"source": SHARDS // 2}),
    ("search of a text", "documents", {"text": "no document has this text"}),
    ("a document", "document", {"number": "middle"}),
    ("batch, concat", "batch", {"step": 100}),
    ("batch, pad", "batch", {"step": 100, "packing": "pad"}),
    ("batch, best-fit", "batch", {"step": 100, "packing": "best-fit"}),
    ("batch, balanced over 8 ranks", "batch", {"step": 100, "ranks": 8, "balance": "true"}),
    ("waste of each packing", "packings", {}),
    ("a run of 100,000 steps", "run", {}),
    ("a build of 2,000 units", "build", {}),
)


def make_store(root: Path, *, tokens: int) -> Store:
    """So many tokens, of a small store again and again."""
    shutil.rmtree(root, ignore_errors=True)
    tokenizer = next(iter(vocabularies.prepare().values()))
    corpus = corpora.prepare(
        corpora.available()[0], num_bytes=20_000_000, num_files=1, formats=("jsonl",)
    )
    small = root.with_name("small")
    shutil.rmtree(small, ignore_errors=True)
    tokenmill.build(corpus.files("jsonl"), tokenizer=tokenizer, out=small, serial=True)
    store = tokenmill.Store(small, split=None)
    layout = StoreLayout(root)
    layout.create()
    shutil.copytree(store.tokenizer_dir, layout.tokenizer, dirs_exist_ok=True)
    lengths, ids = store.lengths(), np.concatenate([*store])
    times = -(-tokens // (SHARDS * len(ids)))
    lengths, ids = np.tile(lengths, times), np.tile(ids, times)
    names = [_write_shard(layout, store, number, lengths, ids) for number in range(SHARDS)]
    identity = store.manifest.identity
    write_manifest(layout, assemble_manifest(layout, identity, units=names))
    return tokenmill.Store(root, split=None)


def make_build(root: Path, store: Store) -> Path:
    """A build that was stopped after so many units, as many as are to come."""
    layout, lengths = StoreLayout(root), store.lengths()[:1]
    layout.create()
    for number in range(UNITS):
        _write_shard(layout, store, number, lengths, store[0])
    sources = [
        PlannedSource.of(f"part-{number:03}.jsonl", size=4_000, version="1", units=2)
        for number in range(UNITS)
    ]
    write_building(layout, Building(identity=store.manifest.identity, sources=tuple(sources)))
    return root


def _write_shard(layout: StoreLayout, store: Store, number: int, lengths: Any, ids: Any) -> str:
    unit = UnitFacts.of(f"part-{number:03}.jsonl", index=0, start=0, end=None)
    with UnitWriter(layout, unit, vocab_size=store.vocab_size) as writer:
        writer.append(TRAIN, ids, lengths=lengths, rows=np.arange(len(lengths)))
        size = 4 * len(ids)
        sizes = {"input_bytes": size, "text_bytes": size, "tokens": len(ids)}
        rows = {"rows": len(lengths), "documents": len(lengths), "empty": 0, "rejected": 0}
        writer.commit(
            source=SourceFacts(
                size=size, version="1", digest="0" * 32, is_last=True, num_lines=len(lengths)
            ),
            config=store.manifest.identity.fingerprint,
            counts=Counts.of(**rows, **sizes),
            bounds=Bounds(largest_row_bytes=4 * int(lengths.max()), smallest_too_large_bytes=None),
            engine=store.receipt(store.shards[0].unit).engine,
        )
    return unit.name


@contextlib.contextmanager
def viewing(*paths: Path) -> Iterator[tuple[str, int, float]]:
    """The address of a viewer, its process, and how long it took to be there."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tokenmill", "view", *map(str, paths), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            yield address, process.pid, time.perf_counter() - began
        finally:
            process.terminate()


def ask(address: str, what: str, given: dict[str, object]) -> float:
    """Seconds until an answer is there."""
    parts = urlsplit(address)
    token = parts.query.partition("token=")[2]
    began = time.perf_counter()
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("GET", f"/api/{what}?{urlencode(given)}", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    assert answer.status == 200, body
    return time.perf_counter() - began


def write_run(folder: Path) -> Path:
    """The metrics of a long training."""
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, RUN_STEPS + 1):
            line = {"step": step, "loss": 2 + 9 / step, "tokens": 500_000 * step, "mfu": 0.5}
            file.write(json.dumps({**line, "tokens_per_second": 9e5, "wait_share": 1e-4}) + "\n")
    return folder


def measure(store: Store, path: Path) -> dict[str, Any]:
    """Times of the first and of later answers, and memory."""
    rows = []
    build = make_build(path.with_name("build"), store)
    with viewing(path, write_run(path.with_name("run")), build) as (address, pid, started):
        first = ask(address, "about", {})
        for name, what, given in QUESTIONS:
            given = {key: len(store) // 2 if is_ == "middle" else is_ for key, is_ in given.items()}
            times = [ask(address, what, given) for _ in range(1 + ROUNDS)]
            rows.append({"what": name, "first": times[0], "median": statistics.median(times[1:])})
        memory = psutil.Process(pid).memory_full_info()
    return {
        "start_seconds": started + first,
        "answers": rows,
        "own_bytes": memory.uss,
        "resident_bytes": memory.rss,
    }


def main() -> None:
    """Make the store, measure, and keep what was found."""
    tokens = 1_000_000 if "--quick" in sys.argv else 1_000_000_000
    path = WORK / "viewing" / "store"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        store = make_store(path, tokens=tokens)
        found = {
            **machine.origin(),
            "machine": machine.describe(),
            "versions": machine.versions(),
            "tokens": store.num_tokens,
            "documents": store.num_documents,
            "shards": len(store.shards),
            **measure(store, path),
        }
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
    for row in found["answers"]:
        print(f"{row['what']:<28} {1e3 * row['first']:7.1f} ms  {1e3 * row['median']:7.1f} ms")
    print(
        f"start {found['start_seconds']:.2f} s, memory {found['own_bytes'] / 1e6:.0f} MB of its own"
    )
    print(f"{found['resident_bytes'] / 1e6:.0f} MB with pages of files")
    if "--quick" not in sys.argv:
        (RESULTS / "viewing.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
