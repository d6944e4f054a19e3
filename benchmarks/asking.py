"""What views and questions cost: speed and opening of views, `trace`, and `grep` beside ripgrep.

    python -m benchmarks.asking            writes results/asking.json
    python -m benchmarks.asking --feeding  reads views again, and leaves the other results
    python -m benchmarks.asking --quick    a trial with little of everything; prints its tables

ripgrep searches the JSON Lines that the store was built of. It is found as `rg`; where it is not
installed (on Debian and Ubuntu: apt-get install ripgrep) its column is empty. Large stores are
hollow (see hollow.py): their documents are real, their tokens are not, and nobody reads them here.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import tokenmill
from benchmarks import RESULTS, WORK, corpora, machine, vocabularies
from benchmarks.command import run_command
from benchmarks.hollow import Hollow, write_hollow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tokenmill import Store

FOLDER = WORK / "asking"
ROWS: dict[str, Any] = {"seq_len": 2048, "batch_size": 16}
PACKINGS = ("concat", "best-fit")
SHUFFLES = ("full", "block", "nearby")
# Two that are there, one rarely and one everywhere, and one that is not.
TEXTS = ("Array.prototype.map()", "function", "no document has this text")
SPLIT_RANKS = 8
TURNS = 3  # of feeding in a round: other programs of the machine slow some of them
OPENED = """
import json, sys, time
import numpy
from tokenmill.loader.loader import Loader
from tokenmill.store.reader import Store
began = time.perf_counter()
view = Store(sys.argv[1], split="train")
opened = time.perf_counter()
next(iter(Loader(view, seq_len=2048, batch_size=16))).input_ids
fed = time.perf_counter()
print(json.dumps({"open": opened - began, "first_batch": fed - began, "documents": len(view)}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    seconds: float
    """Of each round of feeding."""
    text_bytes: int
    many: Hollow
    """Of many documents."""
    large: Hollow
    """Of many tokens."""
    traced: int
    """Documents."""


FULL = Size(
    rounds=7,
    seconds=1.0,
    text_bytes=400_000_000,
    many=Hollow(shards=1000, shard_tokens=40_000_000, shard_documents=100_000),
    large=Hollow(shards=10_000, shard_tokens=100_000_000, shard_documents=5_000),
    traced=500,
)
QUICK = Size(
    rounds=2,
    seconds=0.1,
    text_bytes=5_000_000,
    many=Hollow(shards=4, shard_tokens=400_000, shard_documents=1000),
    large=Hollow(shards=10, shard_tokens=1_000_000, shard_documents=500),
    traced=20,
)


def half_of(store: Store, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers of half of the documents, drawn by chance."""
    return np.sort(rng.permutation(len(store))[: len(store) // 2])


# -------------------------------------------------------------------------------------------------
# A store of real text: how fast a view of half of it is read, and texts are found.


def tokens_per_second(loader: tokenmill.Loader, seconds: float) -> float:
    """Inputs and labels, as arrays in the user's hands."""
    batches, tokens, began = iter(loader), 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        batch = next(batches)
        tokens += batch.input_ids.size
        _ = batch.labels
    return tokens / spent


def measure_feeding(store: Store, size: Size) -> list[dict[str, Any]]:
    """The store and its views take turns."""
    gone = {
        "half, by chance": half_of(store, np.random.default_rng(0)),
        "every second one": np.arange(0, len(store), 2),
    }
    read = {name: store.without(each) for name, each in gone.items()}
    found = []
    for packing in PACKINGS:
        rates: dict[str, list[float]] = {name: [] for name in ("store", *read)}
        for _ in range(1 + TURNS * size.rounds):
            for name, opened in {"store": store, **read}.items():
                loader = tokenmill.Loader(opened, packing=packing, prefetch=0, **ROWS)
                rates[name].append(tokens_per_second(loader, size.seconds))
        medians = {name: statistics.median(each[1:]) for name, each in rates.items()}
        for name, view in read.items():
            turns = zip(rates[name][1:], rates["store"][1:], strict=True)
            row = {"packing": packing, "kept": name, "documents": len(view)}
            row |= {"store": medians["store"], "view": medians[name]}
            found.append(row | {"share": statistics.median(mine / all_ for mine, all_ in turns)})
    return found


def clocked(call: Callable[[], object], rounds: int) -> float:
    """The median of some calls, after one that does not count."""
    seconds = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def measure_grep(path: Path, corpus: corpora.Corpus, size: Size) -> list[dict[str, Any]]:
    """Rates are those of the text, for both."""
    files, found = [*map(str, corpus.files("jsonl"))], list[dict[str, Any]]()
    store, ripgrep = tokenmill.Store(path, split=None), shutil.which("rg")
    for text in TEXTS:
        row: dict[str, Any] = {"text": text}
        result = tokenmill.grep(store, text, limit=0)
        row |= {"documents": result.num_documents, "matches": result.num_matches}
        row["tokenmill"] = clocked(lambda: tokenmill.grep(store, text, limit=0), size.rounds)  # noqa: B023
        command = [sys.executable, "-m", "tokenmill", "grep", str(path), text, "--limit", "0", "-q"]
        row["tokenmill_command"] = clocked(lambda: _run(command), 3)  # noqa: B023
        if ripgrep is not None:
            counted = [ripgrep, "--count-matches", "--no-filename", "-F", text, *files]
            row["ripgrep"] = clocked(lambda: _run(counted), size.rounds)  # noqa: B023
            row["ripgrep_matches"] = sum(map(int, _run(counted).split()))
        found.append(row)
    return found


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


# -------------------------------------------------------------------------------------------------
# Hollow stores: how soon a view is open, and where documents are shown.


def measure_opening(size: Size) -> list[dict[str, Any]]:
    """Views without one document in a hundred, and without every second one, by chance."""
    root, found = FOLDER / "many", []
    write_hollow(root, size.many)
    store = tokenmill.Store(root, split="train")
    for share in (0.01, 0.5):
        gone = np.flatnonzero(np.random.default_rng(1).random(len(store)) < share)
        view = FOLDER / "some.view"
        began = time.perf_counter()
        store.without(gone, out=view)
        row: dict[str, Any] = {"gone": len(gone), "bytes": view.stat().st_size, "rounds": []}
        row["made"] = time.perf_counter() - began
        for _ in range(size.rounds):
            row["rounds"].append(json.loads(_run([sys.executable, "-c", OPENED, str(view)])))
        found.append(row)
        view.unlink()
    shutil.rmtree(root)
    return found


def measure_trace(size: Size) -> list[dict[str, Any]]:
    """Of documents by chance: their first showing, and all of an epoch."""
    root, found = FOLDER / "large", []
    write_hollow(root, size.large)
    store = tokenmill.Store(root, split="train")
    documents = np.random.default_rng(2).integers(0, len(store), size.traced).tolist()
    for packing in ("concat", "pad"):
        for shuffle in SHUFFLES:
            loader = tokenmill.Loader(
                store, packing=packing, shuffle=shuffle, world_size=SPLIT_RANKS, epochs=1, **ROWS
            )
            times, showings = [], 0
            for document in documents:
                began = time.perf_counter()
                showings += len([*loader.trace(document)])
                times.append(time.perf_counter() - began)
            found.append(
                {
                    "packing": packing,
                    "shuffle": shuffle,
                    "showings": showings / len(documents),
                    "median": statistics.median(times),
                    "p99": float(np.quantile(times, 0.99)),
                    "first": times[0],
                }
            )
    shutil.rmtree(root)
    return found


def build_store(size: Size) -> tuple[corpora.Corpus, str, Path]:
    """Real text, the tokenizer's kind, and a store of both."""
    name = corpora.available()[0]
    corpus = corpora.prepare(name, num_bytes=size.text_bytes, num_files=4, formats=("jsonl",))
    kind, tokenizer = next(iter(vocabularies.prepare().items()))
    tokenmill.build(corpus.files("jsonl"), tokenizer=tokenizer, out=FOLDER / "store")
    return corpus, kind, FOLDER / "store"


def fed(store: Store, size: Size) -> dict[str, Any]:
    """The rates of views, and when and of which commit they were measured."""
    origin = machine.origin()
    made = f"{origin['date']}, commit {origin['commit']}, by `{origin['command']}`"
    return {"feeding": measure_feeding(store, size), "feeding_made": made}


def feed_again() -> None:
    """Measure the reading of views alone, into the results that are there."""
    target = RESULTS / "asking.json"
    results = json.loads(target.read_text())
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        _, _, path = build_store(FULL)
        store = tokenmill.Store(path, split="train")
        if (len(store), store.num_tokens) != (results["documents"], results["tokens"]):
            raise SystemExit("the store is not that of the other results: measure all of them")
        results |= fed(store, FULL)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    target.write_text(json.dumps(results, indent=1) + "\n")


def run(size: Size) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        corpus, kind, path = build_store(size)
        store = tokenmill.Store(path, split="train")
        found: dict[str, Any] = {
            "text": corpus.name,
            "tokenizer": kind,
            "text_bytes": corpus.text_bytes,
            "input_bytes": corpus.input_bytes["jsonl"],
            "documents": len(store),
            "tokens": store.num_tokens,
            "ripgrep": next(iter(_run(["rg", "--version"]).splitlines()))
            if shutil.which("rg")
            else None,
        }
        print("grep", file=sys.stderr, flush=True)
        found["grep"] = measure_grep(path, corpus, size)
        print("views", file=sys.stderr, flush=True)
        found |= fed(store, size)
        found["opening"] = measure_opening(size)
        print("trace", file=sys.stderr, flush=True)
        found["trace"] = measure_trace(size)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": size.rounds,
        "many_documents": size.many.shards * size.many.shard_documents,
        "large_tokens": size.large.tokens,
        "large_documents": size.large.shards * size.large.shard_documents,
        "ranks": SPLIT_RANKS,
        **found,
    }


# -------------------------------------------------------------------------------------------------
# The tables.


def asking_body(results: Mapping[str, Any]) -> str:
    """The tables of results/asking.json."""
    source = f"{results['text_bytes'] / 1e6:,.0f} MB of text ({results['text']}"
    held = f"{results['documents']:,} documents, {results['tokens']:,} tokens"
    text = f"{source}, {results['tokenizer']}): {held}."
    feeding = [
        "| packing | documents kept | the store | the view | view / store |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["feeding"]:
        rates = [f"{row[name] / 1e6:,.0f} million tokens/s" for name in ("store", "view")]
        share = f"{row['share']:.2f}"
        feeding.append(f"| {' | '.join([row['packing'], row['kept'], *rates, share])} |")
    opening = [
        "| documents gone | the file | open | first batch in hand |",
        "| --- | --- | --- | --- |",
    ]
    for row in results["opening"]:
        times = []
        for name in ("open", "first_batch"):
            values = [1e3 * each[name] for each in row["rounds"]]
            times.append(f"{statistics.median(values):,.1f} ({max(values):,.1f} at most) ms")
        size = f"{row['bytes'] / 1e6:,.1f} MB"
        opening.append(f"| {' | '.join([format(row['gone'], ','), size, *times])} |")
    trace = [
        "| packing | shuffle | showings of a document | median | slowest of a hundred |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["trace"]:
        times = [f"{1e3 * row[name]:.2f} ms" for name in ("median", "p99")]
        cells = [row["packing"], row["shuffle"], f"{row['showings']:.1f}", *times]
        trace.append(f"| {' | '.join(cells)} |")
    grep = [
        "| text | matches | tokenmill.grep | whole command | ripgrep, whole command |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["grep"]:
        cells = [f"`{row['text']}`", f"{row['matches']:,}"]
        cells += [
            _rate(results["text_bytes"], row.get(name))
            for name in ("tokenmill", "tokenmill_command")
        ]
        cells.append(_rate(results["input_bytes"], row.get("ripgrep")))
        grep.append(f"| {' | '.join(cells)} |")
    many, large = results["many_documents"], results["large_tokens"]
    return "\n\n".join(
        [
            "### Reading a view of half of the documents",
            text,
            f"Made: {results['feeding_made']}.",
            "\n".join(feeding),
            f"### Opening a view of {many:,} documents",
            "\n".join(opening),
            f"### `trace` in a store of {large:,} tokens",
            f"{results['large_documents']:,} documents, {results['ranks']} ranks, one epoch.",
            "\n".join(trace),
            "### `grep` beside ripgrep",
            f"{text} {results['ripgrep'] or 'ripgrep was not installed'}.",
            "\n".join(grep),
        ]
    )


def _rate(num_bytes: int, seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s, {num_bytes / seconds / 1e9:.2f} GB/s"


def main() -> None:
    from benchmarks import render  # which has the tables of this module

    if sys.argv[1:] == ["--feeding"]:
        feed_again()
        return
    run_command(
        "asking",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.asking_section,
    )


if __name__ == "__main__":
    main()
