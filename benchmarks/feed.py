"""Measures tokenmill's loader beside one numpy gather and beside its peers: `make bench`.

    python -m benchmarks.feed            everything; writes results/feed.json
    python -m benchmarks.feed --quick    a trial on a little text, one round; prints its tables

All read the same tokens: text of corpora.py, built into a store of 16 shards and into one of a
single shard. The single shard's two files are what the peers are given; each writes them in its own
format, with its own writer, before anything is timed. Every measurement is a fresh process, and the
contenders take turns (A B C, A B C, ...), so that a machine that slows down slows all of them. What
is timed, and why that is fair, is said in contenders/feeding.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tokenmill
from benchmarks import ROOT, WORK, corpora, environments, machine, measure, render
from benchmarks import vocabularies as tokenizers
from benchmarks.command import run_command
from benchmarks.feeders import CONTENDERS, Contender

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ONE_SHARD, MANY_SHARDS = 1, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    num_bytes: int
    """JSON Lines; 225 MB of English are 67 million tokens of gpt2."""
    seconds: float
    warm_seconds: float
    seq_len: int = 2048
    batch_size: int = 16


FULL = Size(rounds=3, num_bytes=225_000_000, seconds=3.0, warm_seconds=0.7)
QUICK = Size(rounds=1, num_bytes=8_000_000, seconds=0.3, warm_seconds=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What all contenders read."""

    folder: Path
    corpus: str
    tokenizer: str
    documents: int
    tokens: int
    vocab_size: int
    eos_id: int

    def store(self, shards: int) -> Path:
        return self.folder / f"store-{shards}"

    @property
    def pair(self) -> Path:
        """The files of the single shard, without their suffixes."""
        [path] = self.store(ONE_SHARD).glob("shards/*.bin")
        return path.with_suffix("")


def prepare_tokens(size: Size) -> Tokens:
    """Two stores with the same tokens; the build finds out by itself what is there already."""
    name = corpora.available()[0]
    tokenizer, tokenizer_folder = next(iter(tokenizers.prepare().items()))
    corpus = corpora.prepare(
        name, num_bytes=size.num_bytes, num_files=MANY_SHARDS, formats=("jsonl",)
    )
    folder = WORK / "feed" / f"{name}-{size.num_bytes}"
    inputs = {MANY_SHARDS: corpus.files("jsonl"), ONE_SHARD: [_joined(corpus, folder)]}
    for shards, files in inputs.items():
        out = folder / f"store-{shards}"
        # One unit, and so one shard, to a file.
        tokenmill.build(files, tokenizer=tokenizer_folder, out=out, unit_bytes="10GB")
    store = tokenmill.Store(folder / f"store-{ONE_SHARD}")
    assert store.eos_id is not None
    return Tokens(
        folder=folder,
        corpus=name,
        tokenizer=tokenizer,
        documents=store.num_documents,
        tokens=store.num_tokens,
        vocab_size=store.vocab_size,
        eos_id=store.eos_id,
    )


def _joined(corpus: corpora.Corpus, folder: Path) -> Path:
    path = folder / "all.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as target:
            for part in corpus.files("jsonl"):
                target.write(part.read_bytes())
        partial.rename(path)
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The tokens, and how long they are read."""

    size: Size
    tokens: Tokens

    def call(self, contender: Contender, action: str) -> dict[str, Any]:
        """One fresh process; its report."""
        job = {
            "action": action,
            "tokens": str(self.tokens.pair),
            "store": str(self.tokens.store(contender.shards)),
            "folder": str(self.folder(contender)),
            "mode": contender.mode,
            "workers": contender.workers,
            "seq_len": self.size.seq_len,
            "batch_size": self.size.batch_size,
            "eos_id": self.tokens.eos_id,
            "vocab_size": self.tokens.vocab_size,
            "warm_seconds": self.size.warm_seconds,
            "seconds": self.size.seconds,
        }
        name = contender.environment
        python = environments.prepare(name) if name else None
        return measure.run(contender.module, job, python=python)

    def folder(self, contender: Contender) -> Path:
        return self.tokens.folder / contender.module

    def prepare(self, contender: Contender) -> None:
        """Have the contender write its format, unless it did so with these files and versions."""
        if not contender.prepares:
            return
        stamp = self.folder(contender) / "stamp"
        wanted = self._stamp(contender)
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(self.folder(contender), ignore_errors=True)
            self.call(contender, "prepare")
            stamp.write_text(wanted)

    def _stamp(self, contender: Contender) -> str:
        made_by = (
            ROOT / "benchmarks" / "contenders" / f"{contender.module}.py",
            ROOT / "benchmarks" / "peers" / f"{contender.environment}.txt",
            self.tokens.store(ONE_SHARD) / "tokenmill.json",
        )
        return hashlib.sha256(b"".join(path.read_bytes() for path in made_by)).hexdigest()

    def measure_rate(self, contender: Contender, row: dict[str, Any]) -> None:
        report = self.call(contender, "rate")
        row["tokens"].append(report["tokens"])
        row["seconds"].append(round(report["seconds"], 4))
        row["dtype"] = report["dtype"]
        row["padding_share"] = round(report["padding_share"], 4)

    def measure_resume(self, contender: Contender, found: dict[str, Any]) -> None:
        """Read to the middle once; go on from there in one fresh process per round."""
        self.call(contender, "advance")
        reports = [self.call(contender, "resume") for _ in range(self.size.rounds)]
        for name in ("open_seconds", "first_batch_seconds"):
            found[name] = [round(report[name], 5) for report in reports]
        found["exact"] = all(report["exact"] for report in reports)


def measure_all(bench: Bench, contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """A row of numbers, or a reason for having none, per contender."""
    rows = [_empty_row(contender) for contender in contenders]
    pairs = list(zip(contenders, rows, strict=True))
    for contender, row in pairs:
        with _reason_in(row, f"prepare {contender.name}"):
            bench.prepare(contender)
    fill_page_cache(bench.tokens.folder)
    for _ in range(bench.size.rounds):
        for contender, row in pairs:
            if row["error"] is None:
                with _reason_in(row, f"rate {contender.name}, {contender.workers} workers"):
                    bench.measure_rate(contender, row)
    for contender, row in pairs:
        if row["error"] is None and contender.resumes:
            row["resume"] = {"error": None}
            with _reason_in(row["resume"], f"resume {contender.name}"):
                bench.measure_resume(contender, row["resume"])
    return rows


@contextlib.contextmanager
def _reason_in(row: dict[str, Any], what: str) -> Iterator[None]:
    """Say what is done; a contender that fails stays in the table with its reason."""
    _say(what)
    try:
        yield
    except (environments.NotInstalledError, measure.ContenderError) as error:
        row["error"] = str(error).replace(str(ROOT), "")
        _say(f"  {row['error']}")


def _empty_row(contender: Contender) -> dict[str, Any]:
    return {
        "contender": contender.name,
        "role": contender.role,
        "workers": contender.workers,
        "error": None,
        "tokens": [],
        "seconds": [],
        "dtype": None,
        "padding_share": 0.0,
        "resume": None,
    }


def fill_page_cache(folder: Path) -> None:
    """Read every file once, so that all contenders find their input in memory."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".jsonl":
            with path.open("rb") as stream:
                while stream.read(1 << 22):
                    pass


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(size: Size, contenders: Sequence[Contender] = CONTENDERS) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    tokens = prepare_tokens(size)
    results = machine.origin() | {
        "machine": machine.describe(),
        "rounds": size.rounds,
        "seconds": size.seconds,
        "seq_len": size.seq_len,
        "batch_size": size.batch_size,
        "corpus": tokens.corpus,
        "tokenizer": tokens.tokenizer,
        "documents": tokens.documents,
        "tokens": tokens.tokens,
        "measurements": measure_all(Bench(size=size, tokens=tokens), contenders),
        "versions": machine.versions(),
    }
    used = {contender.environment for contender in contenders}
    results["peer_versions"] = environments.peer_versions(used)
    return results


def main() -> None:
    run_command(
        "feed",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.feed_section,
    )


if __name__ == "__main__":
    main()
