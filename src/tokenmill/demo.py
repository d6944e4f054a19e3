"""The whole of tokenmill once, on text that every Python installation has.

    collect -> train -> build -> build again -> verify -> look inside -> feed -> compare

`demo_steps` yields what it is about to do (`Heading`) and what came of it, so that the command line
can tell the story while it happens. The peers in the comparison stop after a few seconds each; a
rate needs no more, and documents are in shuffled order so that any part is like the whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenmill.builder.run import build
from tokenmill.builder.verify import verify
from tokenmill.engines.huggingface import (
    EncodingTime,
    encode_in_batches,
    encode_one_by_one,
    train_bpe,
)
from tokenmill.errors import UsageError
from tokenmill.inspection import inspect
from tokenmill.loader.loader import Loader
from tokenmill.store.facts import read_manifest
from tokenmill.store.layout import StoreLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.builder.progress import BuildResult
    from tokenmill.builder.verify import VerifyReport
    from tokenmill.inspection import Inspection
    from tokenmill.store.facts import Counts

CORPUS_BYTES = 32_000_000
TRAINING_BYTES = 4_000_000
VOCAB_SIZE = 8192
PEER_SECONDS = 5.0
FEED_SEQ_LEN, FEED_BATCH, FEED_RANKS, FEED_SECONDS = 1024, 16, 4, 1.0
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """What comes next, and why."""

    number: int
    title: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The documents, as a JSON Lines file."""

    path: str
    documents: int
    text_bytes: int
    unreadable: int
    """Source files that are not UTF-8, left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The tokenizer that was trained."""

    folder: str
    vocab_size: int
    text_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The ways side by side; the first is what the others are compared with."""

    ways: dict[str, EncodingTime]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """The same build once more, with nothing left to do."""

    result: BuildResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Fed:
    """What a training loop would get out of the store."""

    seq_len: int
    batch_size: int
    rows: int
    """Of an epoch."""
    first_batch_seconds: float
    steps: int
    seconds: float
    ranks: int
    """Ranks on which the run was resumed."""
    is_same: bool
    """Whether they went on with exactly the rows that the run would have had next."""

    @property
    def tokens_per_second(self) -> float:
        return self.steps * self.batch_size * self.seq_len / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The end, and what is left on disk."""

    store: str
    corpus: str
    tokenizer: str
    seconds: float


Step: TypeAlias = (
    "Heading | Corpus | Trained | BuildResult | Rebuilt | VerifyReport | Inspection | Fed"
    " | Comparison | Finished"
)


HEADINGS = (
    (
        "Collect documents",
        "Every source file of Python's standard library becomes one JSON line.",
    ),
    (
        "Train a tokenizer",
        "A small byte-level BPE, so that the demo needs no download. Bring your own later.",
    ),
    (
        "Build the store",
        "Worker processes read, encode, check against the reference tokenizer, and commit.",
    ),
    (
        "Run the same command again",
        "That is how a build resumes after a crash. Here nothing is left, and it says so.",
    ),
    ("Verify it", "Every checksum, every index and every id; then documents are encoded again."),
    (
        "Look inside",
        "What will a model see? Lengths, frequent tokens, one document with token borders.",
    ),
    (
        "Feed a model",
        "Rows are cut, packed and shuffled as they are read. A run is resumed on other ranks.",
    ),
    (
        "Compare",
        (
            "The same text with the tokenizers package as it is mostly used, "
            "{seconds:.0f} seconds each."
        ),
    ),
)


def demo_steps(
    out: Path, *, corpus_bytes: int = CORPUS_BYTES, peer_seconds: float = PEER_SECONDS
) -> Iterator[Step]:
    """Run the demo; the store ends up in `out`, its input and tokenizer in a folder beside it."""
    inputs = out.with_name(f"{out.name}-input")
    corpus_path, tokenizer = inputs / "corpus.jsonl", inputs / "tokenizer"
    started = time.perf_counter()
    _clear_old_demo(out, corpus=corpus_path)
    headings = (
        Heading(number=number, title=title, why=why.format(seconds=peer_seconds))
        for number, (title, why) in enumerate(HEADINGS, start=1)
    )
    yield next(headings)
    texts, unreadable = collect_texts(corpus_bytes)
    yield write_corpus(texts, path=corpus_path, unreadable=unreadable)
    yield next(headings)
    yield train(texts, folder=tokenizer)
    yield next(headings)
    result = build(corpus_path, tokenizer=tokenizer, out=out, val=0.01)
    yield result
    yield next(headings)
    yield Rebuilt(result=build(corpus_path, tokenizer=tokenizer, out=out, val=0.01))
    yield next(headings)
    yield verify(out)
    yield next(headings)
    yield inspect(out, split="train", doc=0)
    yield next(headings)
    yield feed(out)
    yield next(headings)
    yield compare(texts, tokenizer=tokenizer, result=result, seconds=peer_seconds)
    yield Finished(
        store=str(out),
        corpus=str(corpus_path),
        tokenizer=str(tokenizer),
        seconds=time.perf_counter() - started,
    )


def _clear_old_demo(out: Path, *, corpus: Path) -> None:
    """Remove the store of an earlier demo, so that this one has something to do; never another."""
    if not StoreLayout(out).manifest.exists():
        return
    sources = [source.path for source in read_manifest(out).sources]
    if sources != [corpus.as_posix()]:
        raise UsageError(
            f"{str(out)!r} holds a store that is not the demo's: it was built from {sources[:3]}",
            hint="choose another folder: tokenmill demo --out another-folder",
        )
    shutil.rmtree(out)


def collect_texts(most_bytes: int) -> tuple[list[str], int]:
    """Source files of the standard library, shuffled but fixed, and how many are not UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path for path in root.rglob("*.py") if not NOT_STDLIB & set(path.relative_to(root).parts)
    ]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    texts: list[str] = []
    unreadable = num_bytes = 0
    for path in paths:
        try:
            texts.append(path.read_bytes().decode())
        except (UnicodeDecodeError, OSError):
            unreadable += 1
            continue
        num_bytes += len(texts[-1])
        if num_bytes >= most_bytes:
            break
    return texts, unreadable


def write_corpus(texts: Sequence[str], *, path: Path, unreadable: int) -> Corpus:
    """Write one JSON object per document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return Corpus(
        path=str(path),
        documents=len(texts),
        text_bytes=sum(len(text.encode()) for text in texts),
        unreadable=unreadable,
    )


def train(texts: Sequence[str], *, folder: Path) -> Trained:
    """Train a tokenizer on the first documents, as many as make some megabytes."""
    started = time.perf_counter()
    sample: list[str] = []
    num_bytes = 0
    for text in texts:
        sample.append(text)
        num_bytes += len(text.encode())
        if num_bytes >= TRAINING_BYTES:
            break
    train_bpe(sample, vocab_size=VOCAB_SIZE, folder=folder)
    return Trained(
        folder=str(folder),
        vocab_size=VOCAB_SIZE,
        text_bytes=num_bytes,
        seconds=time.perf_counter() - started,
    )


def feed(store: Path) -> Fed:
    """Read batches for a second, as a training loop would; then go on elsewhere."""
    started = time.perf_counter()
    run = Loader(
        store, split="train", seq_len=FEED_SEQ_LEN, batch_size=FEED_BATCH, packing="best-fit"
    )
    batches = iter(run)
    next(batches).input_ids.sum()
    first = time.perf_counter()
    while time.perf_counter() < first + FEED_SECONDS:
        batch = next(batches)
        _ = batch.input_ids, batch.labels
    seconds, steps, state = time.perf_counter() - first, run.step - 1, run.state_dict()
    return Fed(
        seq_len=FEED_SEQ_LEN,
        batch_size=FEED_BATCH,
        rows=run.layouts()[0].num_rows,
        first_batch_seconds=first - started,
        steps=steps,
        seconds=seconds,
        ranks=FEED_RANKS,
        is_same=bool((next(batches).tokens == _resumed(store, state)).all()),
    )


def _resumed(store: Path, state: dict[str, object]) -> NDArray[np.integer]:
    """The rows of the next step, dealt to several ranks."""
    parts = []
    for rank in range(FEED_RANKS):
        loader = Loader(
            store,
            split="train",
            seq_len=FEED_SEQ_LEN,
            batch_size=FEED_BATCH // FEED_RANKS,
            packing="best-fit",
            rank=rank,
            world_size=FEED_RANKS,
        )
        loader.load_state_dict(state)
        parts.append(next(iter(loader)).tokens)
    return np.concatenate(parts)


def compare(
    texts: Sequence[str], *, tokenizer: Path, result: BuildResult, seconds: float
) -> Comparison:
    """Time the usual ways on the same text and put the build beside them."""
    built = result.built
    timed = {
        "tokenizers, one by one": encode_one_by_one(texts, folder=tokenizer, seconds=seconds),
        "tokenizers, in batches": encode_in_batches(texts, folder=tokenizer, seconds=seconds),
        "tokenmill build, start-up counted": _timed(built, result.seconds),
        "tokenmill build, at work": _timed(built, result.working_seconds),
    }
    return Comparison(ways=timed)


def _timed(built: Counts, seconds: float) -> EncodingTime:
    return EncodingTime(
        documents=built.documents,
        text_bytes=built.text_bytes,
        tokens=built.tokens,
        seconds=seconds,
    )
