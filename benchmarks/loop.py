"""Measures what a text costs in one's own loop, beside the package's own call: `make bench`.

    python -m benchmarks.loop            five rounds; writes results/loop.json
    python -m benchmarks.loop --quick    a trial with few texts; prints its table

The package's plain call for one text, and tokenmill's for one, eight and sixty-four, take turns in
one process. Counted is the time of the processor, of all threads. Every round but the first finds
caches warm, and the fastest round counts, for all of them alike: a machine that does other work
makes times longer, never shorter.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from typing import TYPE_CHECKING, Any

from benchmarks import WORK, corpora, machine, render, vocabularies
from benchmarks.command import run_command
from tokenmill import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CALLS = (1, 8, 64)
SHORT, PAGE = 60, 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    texts: dict[int, int]
    """So many of each length."""
    vocab_size: int


FULL = Size(rounds=5, texts={SHORT: 6400, PAGE: 256}, vocab_size=16_000)
QUICK = Size(rounds=1, texts={SHORT: 128, PAGE: 64}, vocab_size=1000)


def make_tokenizers(size: Size, text: str) -> dict[str, Path]:
    """A byte-level BPE, and SentencePiece models trained with the package's defaults."""
    import sentencepiece

    name, folder = next(iter(vocabularies.prepare().items()))
    found = {name: folder}
    for kind in ("unigram", "bpe"):
        path = WORK / "tokenizers" / f"sentencepiece-{kind}-{size.vocab_size}.model"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text[:6_000_000].splitlines()),
                model_prefix=str(path.with_suffix("")),
                vocab_size=size.vocab_size,
                model_type=kind,
                hard_vocab_limit=False,
                minloglevel=2,
            )
        found[f"SentencePiece {kind}"] = path
    return found


def plain_call(path: Path) -> Callable[[str], list[int]]:
    """Ids of one text by the package itself, as its users call it."""
    if path.is_dir():
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    import sentencepiece

    encode: Callable[[str], list[int]] = sentencepiece.SentencePieceProcessor(
        model_file=str(path)
    ).encode
    return encode


def _each(call: Callable[[Any], Any], arguments: list[Any]) -> list[Any]:
    return list(map(call, arguments))


def measure_tokenizer(name: str, path: Path, text: str, size: Size) -> list[dict[str, Any]]:
    """One row for each length of texts."""
    plain, own = plain_call(path), load_tokenizer(path)
    rows = []
    for length, count in size.texts.items():
        texts = [text[length * k : length * (k + 1)] for k in range(count)]
        ways: dict[str, partial[list[Any]]] = {"plain": partial(_each, plain, texts)}
        for number in CALLS:
            chunks = [texts[k : k + number] for k in range(0, count, number)]
            is_one = number == 1
            ways[str(number)] = partial(
                _each, own.encode if is_one else own.encode_batch, texts if is_one else chunks
            )
        best = dict.fromkeys(ways, float("inf"))
        for _, (way, run) in product(range(size.rounds), ways.items()):
            started = time.process_time()
            found = run()
            best[way] = min(best[way], (time.process_time() - started) / count * 1e6)
            if way == "plain":
                expected = found
            elif [ids.tolist() for ids in (found if way == "1" else chain(*found))] != expected:
                raise AssertionError(f"{name}: other ids than the package's")
        row = {"tokenizer": name, "engine": own.engine, "characters": length, "texts": count}
        rows.append(row | {"microseconds": {way: round(each, 2) for way, each in best.items()}})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def run(size: Size) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    lines = islice(corpora.base_lines(corpora.available()[0]), 3000)
    text = "\n".join(json.loads(line)["text"] for line in lines)
    made = make_tokenizers(size, text)
    rows = [measure_tokenizer(name, path, text, size) for name, path in made.items()]
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": size.rounds,
        "corpus": corpora.available()[0],
        "measurements": [row for some in rows for row in some],
    }


def main() -> None:
    run_command(
        "loop",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.loop_section,
    )


if __name__ == "__main__":
    main()
