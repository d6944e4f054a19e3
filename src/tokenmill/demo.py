"""The whole of tokenmill once, on text that every Python installation has.

    collect -> train -> build -> build again -> verify -> look inside -> feed -> compare

`demo_steps` yields what it is about to do (`Heading`) and what came of it: a result, a sentence, or
rows of facts, so that the command line can tell the story while it happens. The peers in the
comparison stop after a few seconds each; a rate needs no more, and documents are in shuffled order
so that any part is like the whole.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tokenmill.builder.run import build
from tokenmill.builder.verify import VerifyReport, verify
from tokenmill.engines.load import load_engine
from tokenmill.engines.references import train_bpe
from tokenmill.errors import UsageError
from tokenmill.inspection import Inspection, inspect
from tokenmill.loader.loader import Loader
from tokenmill.options import unheard
from tokenmill.records import TextBatch
from tokenmill.store.facts import read_manifest
from tokenmill.store.layout import StoreLayout
from tokenmill.words import compact, count, duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenmill.builder.progress import BuildResult

CORPUS_BYTES = 32_000_000
TRAINING_BYTES = 4_000_000
VOCAB_SIZE = 8192
PEER_SECONDS = 5.0
FEED_SEQ_LEN, FEED_BATCH, FEED_RANKS, FEED_SECONDS = 1024, 16, 4, 1.0
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
HEADINGS = {
    "Collect documents": "Every source file of Python's standard library becomes one JSON line.",
    "Train a tokenizer": "A small byte-level BPE, so that the demo needs no download. Use your"
    " own later.",
    "Build the store": "Worker processes read, encode, check against the reference tokenizer, and"
    " commit.",
    "Run the same command again": "That is how a build resumes after a crash. Here nothing is left,"
    " and it says so.",
    "Verify it": "Every checksum, every index and every id; then documents are encoded again.",
    "Look inside": "What will a model see? Lengths, frequent tokens, one document with token"
    " boundaries.",
    "Feed a model": "Rows are cut, packed and shuffled as they are read. A run is resumed on other"
    " ranks.",
    "Compare": "The same text with the tokenizers package as it is mostly used, {seconds:.0f}"
    " seconds each.",
}


class Heading(NamedTuple):
    """What comes next, and why."""

    number: int
    title: str
    why: str


class Timed(NamedTuple):
    """What a way did, and how long it took."""

    text_bytes: int
    tokens: int
    seconds: float


class Comparison(NamedTuple):
    """The ways side by side; the first is what the others are compared with."""

    ways: dict[str, Timed]


class Finished(NamedTuple):
    """The end, and what to try with what is left on disk."""

    text: str
    commands: tuple[str, ...]


Step: TypeAlias = (
    "Heading | str | list[tuple[str, str]] | BuildResult | VerifyReport | Inspection | Comparison"
    " | Finished"
)


def demo_steps(
    out: Path, *, corpus_bytes: int = CORPUS_BYTES, peer_seconds: float = PEER_SECONDS
) -> Iterator[Step]:
    """Run the demo; the store ends up in `out`, its input and tokenizer in a folder beside it."""
    inputs = out.with_name(f"{out.name}-input")
    corpus, tokenizer = inputs / "corpus.jsonl", inputs / "tokenizer"
    started = time.perf_counter()
    _check_place(out, corpus=corpus)

    def results() -> Iterator[Step]:
        texts, unreadable = collect_texts(corpus_bytes)
        inputs.mkdir(parents=True, exist_ok=True)
        with corpus.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        size = format_size(sum(len(text.encode()) for text in texts))
        left_out = f" ({count(unreadable)} are not UTF-8 and stay out)" if unreadable else ""
        yield f"{count(len(texts), 'document')}, {size} of text{left_out}: {corpus}"
        yield _train(texts, folder=tokenizer)
        result = build(corpus, tokenizer=tokenizer, out=out, val=0.01, on_progress=unheard)
        yield result
        again = build(corpus, tokenizer=tokenizer, out=out, val=0.01, on_progress=unheard)
        state = "nothing to do" if again.nothing_to_do else "NOT ALL OF THEM: this is a bug"
        kept = f"{count(again.units_resumed, 'unit')} found complete, {state}"
        yield f"{kept}: {duration(again.seconds)}"
        yield verify(out, on_progress=unheard)
        yield inspect(out, split="train", doc=0)
        yield _feed(out)
        yield _compare(texts, tokenizer=tokenizer, result=result, seconds=peer_seconds)

    found = results()
    for number, (title, why) in enumerate(HEADINGS.items(), start=1):
        yield Heading(number, title, why.format(seconds=peer_seconds))
        yield next(found)
    store, text, model = (shlex.quote(str(path)) for path in (out, corpus, tokenizer))
    program = _program()
    yield Finished(
        f"\nDone in {duration(time.perf_counter() - started)}. The store is in {store}. Try:",
        (
            f"{program} inspect {store}",
            f"{program} inspect {store} --doc 7",
            f"{program} layout {store} --seq-len 2048",
            f"{program} plan {text} -t {model}",
            f"{program} build {text} -t {model} -o my-store",
        ),
    )


def _program() -> str:
    """What starts tokenmill in this shell: its name alone only where that finds this very one."""
    own = Path(sys.argv[0])
    if own.name != "tokenmill":  # python -m tokenmill, or a program of one's own
        return f"{shlex.quote(sys.executable)} -m tokenmill"
    found = shutil.which("tokenmill")
    is_found = found is not None and Path(found).resolve() == own.resolve()
    return "tokenmill" if is_found else shlex.quote(str(own))


def _check_place(out: Path, *, corpus: Path) -> None:
    """Remove the store of an earlier demo, so that this one has something to do; never another."""
    hint = "choose another folder: tokenmill demo --out another-folder"
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the demo cannot be written to {str(out)!r}: its name is not UTF-8, and the package"
            " that trains the tokenizer knows no other names",
            hint=hint,
        ) from error
    if not StoreLayout(out).manifest.exists():
        return
    sources = [source.path for source in read_manifest(out).sources]
    if sources != [corpus.as_posix()]:
        raise UsageError(
            f"{str(out)!r} holds a store that is not the demo's: it was built from {sources[:3]}",
            hint=hint,
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


def _train(texts: Sequence[str], *, folder: Path) -> str:
    """Train a tokenizer on the first documents, as many as make some megabytes."""
    started = time.perf_counter()
    ends = np.cumsum([len(text.encode()) for text in texts])
    last = min(int(np.searchsorted(ends, TRAINING_BYTES)), len(texts) - 1)
    train_bpe(texts[: last + 1], vocab_size=VOCAB_SIZE, folder=folder)
    learned = f"{count(VOCAB_SIZE)} tokens learned from {format_size(int(ends[last]))}"
    return f"{learned} in {duration(time.perf_counter() - started)}: {folder}"


def _feed(store: Path) -> list[tuple[str, str]]:
    """Read batches for a second, as a training loop would; then go on elsewhere."""
    how: dict[str, Any] = {"split": "train", "seq_len": FEED_SEQ_LEN, "packing": "best-fit"}
    started = time.perf_counter()
    run = Loader(store, batch_size=FEED_BATCH, **how)
    batches = iter(run)
    next(batches).input_ids.sum()
    first = time.perf_counter()
    while time.perf_counter() < first + FEED_SECONDS:
        batch = next(batches)
        _ = batch.input_ids, batch.labels
    seconds, steps, state = time.perf_counter() - first, run.step - 1, run.state_dict()
    parts = []
    for rank in range(FEED_RANKS):
        size = FEED_BATCH // FEED_RANKS
        loader = Loader(store, batch_size=size, rank=rank, world_size=FEED_RANKS, **how)
        loader.load_state_dict(state)
        parts.append(next(iter(loader)).tokens)
    is_same = (next(batches).tokens == np.concatenate(parts)).all()
    again = "exactly the rows that came next" if is_same else "OTHER ROWS: this is a bug"
    rows = f"{count(run.layouts()[0].num_rows)} of {count(FEED_SEQ_LEN)} tokens"
    speed = compact(steps * FEED_BATCH * FEED_SEQ_LEN / seconds)
    return [
        ("rows", f"{rows}: whole documents, packed"),
        ("first batch", f"{duration(first - started)} after opening, plan included"),
        ("rate", f"{speed} tokens/s, shuffled, in one thread"),
        ("resumed", f"after step {count(steps)}, on {FEED_RANKS} ranks: {again}"),
    ]


def _compare(
    texts: Sequence[str], *, tokenizer: Path, result: BuildResult, seconds: float
) -> Comparison:
    """Time the usual ways on the same text and put the build beside them."""
    built, ways = result.built, {}
    # With one thread `encode` is called, as a data loader does in `__getitem__`, with more of them
    # `encode_batch`, which uses every core.
    for name, batch in (("one by one", 1), ("in batches", 256)):
        engine = load_engine(tokenizer, choice="tokenizers", threads=batch).reference
        text_bytes = tokens = 0
        started = time.perf_counter()
        for first in range(0, len(texts), batch):
            group = TextBatch.from_texts(texts[first : first + batch])
            tokens += len(engine.encode(group).ids)
            text_bytes += len(group.data)
            if time.perf_counter() - started > seconds:
                break
        taken = time.perf_counter() - started
        ways[f"tokenizers, {name}"] = Timed(text_bytes, tokens, taken)
    for name, taken in (("start-up counted", result.seconds), ("at work", result.working_seconds)):
        ways[f"tokenmill build, {name}"] = Timed(built.text_bytes, built.tokens, taken)
    return Comparison(ways)
