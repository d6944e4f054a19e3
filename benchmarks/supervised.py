"""Measures how fast chats, questions and answers become ids and masks, beside the usual ways.

    python -m benchmarks.supervised            three rounds; writes results/supervised.json
    python -m benchmarks.supervised --quick    a trial with few rows; prints its table

The chats are made of the paragraphs of a corpus: one to three questions, each with an answer of one
to three paragraphs, so that lengths and code in them are those of real texts. The template marks
answers by generation blocks, since the usual way has masks only then. tokenmill gets more rows, for
a run that is long enough to time; the first ones are those of the others, and ids and masks of
these are compared.

Questions and answers are short puzzles, with words of the corpus in them and an arrow that the
SentencePiece models, trained on them with the package's defaults, do not know. The usual way is a
script that calls the package twice a row; one worker is measured beside it.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks import WORK, corpora, machine, measure, render, vocabularies
from benchmarks.command import run_command
from benchmarks.supervised_table import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = WORK / "supervised"
SHORTEST_PARAGRAPH, LONGEST_PARAGRAPH = 20, 2000
TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content ~ '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int
    rows: int
    """For the usual way."""
    own_rows: int
    puzzles: int


FULL = Size(rounds=3, rows=4000, own_rows=120_000, puzzles=100_000)
QUICK = Size(rounds=1, rows=200, own_rows=2000, puzzles=4000)


def make_chats(count: int) -> Iterator[dict[str, Any]]:
    """Conversations made of a corpus; always the same ones."""
    dice = random.Random(0)
    paragraphs = itertools.chain.from_iterable(_paragraphs() for _ in itertools.count())
    for _ in range(count):
        messages = []
        for _ in range(dice.choice((1, 1, 2, 3))):
            messages.append({"role": "user", "content": next(paragraphs)})
            answer = "\n\n".join(itertools.islice(paragraphs, dice.choice((1, 2, 3))))
            messages.append({"role": "assistant", "content": answer})
        yield {"messages": messages}


def _paragraphs() -> Iterator[str]:
    for line in corpora.base_lines(corpora.available()[0]):
        for paragraph in json.loads(line)["text"].split("\n\n"):
            if len(paragraph) >= SHORTEST_PARAGRAPH:
                yield paragraph[:LONGEST_PARAGRAPH]


def write_chats(path: Path, count: int) -> int:
    """Write so many chats; returns the bytes of their messages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    with path.open("w") as file:
        for row in make_chats(count):
            num_bytes += sum(len(message["content"].encode()) for message in row["messages"])
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return num_bytes


def chat_tokenizer() -> tuple[str, Path]:
    """A tokenizer that has the special tokens of the template."""
    name, folder = next(reversed(vocabularies.prepare().items()))
    content = json.loads((folder / "tokenizer.json").read_text())
    known = {token["content"] for token in content["added_tokens"]}
    if {"<|im_start|>", "<|im_end|>"} <= known:
        return name, folder
    target = WORK / "tokenizers" / f"{name}-chat"
    target.mkdir(parents=True, exist_ok=True)
    last = max([*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])])
    for number, token in enumerate(("<|im_start|>", "<|im_end|>"), start=last + 1):
        content["added_tokens"].append(
            {"id": number, "content": token, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        )
    (target / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(folder / "tokenizer_config.json", target)
    return f"{name}-chat", target


def measure_all(size: Size) -> list[dict[str, Any]]:
    """All contenders in turns, round by round, so that a slow minute hits them alike."""
    name, tokenizer = chat_tokenizer()
    shutil.rmtree(FOLDER, ignore_errors=True)
    few, many = FOLDER / "few.jsonl", FOLDER / "many.jsonl"
    text_bytes = {few: write_chats(few, size.rows), many: write_chats(many, size.own_rows)}
    cores = psutil.cpu_count(logical=False) or 1
    usual = "apply_chat_template, row by row"
    contenders = {
        usual: ("chat_template_rows", few, 1),
        f"{usual}, {cores} processes": ("chat_template_rows", few, cores),
        OWN: ("rows_tokenmill", many, cores),
    }
    rows: dict[str, dict[str, Any]] = {}
    for number in range(size.rounds):
        for contender, (module, file, workers) in contenders.items():
            _say(f"round {number + 1}: {contender}")
            job = {
                "file": str(file),
                "tokenizer": str(tokenizer),
                "template": TEMPLATE,
                "options": {"format": "chat"},
                "workers": workers,
                "out": str(FOLDER / f"store-{number}"),
                "compared_rows": size.rows,
                "compares_masks": True,
            }
            report = measure.run(module, job)
            row = rows.setdefault(
                contender,
                {
                    "contender": contender,
                    "tokenizer": name,
                    "workers": workers,
                    "rows": report["rows"],
                    "tokens": report["tokens"],
                    "rejected": report.get("rejected", 0),
                    "text_bytes": text_bytes[file],
                    "digest": report["digest"],
                    "seconds": [],
                    "whole_seconds": [],
                },
            )
            row["seconds"].append(round(report["seconds"], 4))
            row["whole_seconds"].append(round(report.get("whole_seconds", report["seconds"]), 4))
    shutil.rmtree(FOLDER, ignore_errors=True)
    return list(rows.values())


def make_puzzles(count: int) -> Iterator[dict[str, str]]:
    """Short questions with answers; always the same ones."""
    dice = random.Random(0)
    lines = itertools.islice(corpora.base_lines(corpora.available()[0]), 2000)
    words = [
        word for line in lines for word in re.findall(r"[A-Za-z]{3,}", json.loads(line)["text"])
    ]
    for number in range(count):
        if number % 4 == 0:
            a, b, word = dice.randrange(1000), dice.randrange(1000), dice.choice(words)
            question = f"Tom has {a} {word} and buys {b} more. How many are there now?"
            answer = f"{a} + {b} = {a + b}"
        elif number % 4 == 1:
            some = dice.sample(words, 4)
            question = f"Which of these words comes first in the alphabet: {', '.join(some)}?"
            answer = min(some)
        elif number % 4 == 2:
            first, step = dice.randrange(100), dice.randrange(1, 20)
            known = ", ".join(str(first + step * each) for each in range(5))
            question = f"What is the next number: {known} \u2192 ?"
            answer = f"The difference is {step}, so \u2192 {first + step * 5}"
        else:
            word = dice.choice(words)
            question, answer = f"Spell the word {word!r} backwards.", " ".join(reversed(word))
        yield {"question": question, "answer": answer}


def puzzle_tokenizers(puzzles: list[dict[str, str]]) -> dict[str, Path]:
    """Name -> tokenizer: SentencePiece with the package's defaults, and byte-level BPE."""
    import sentencepiece

    found = {}
    for kind in ("unigram", "bpe"):
        texts = (text.replace("\u2192", "") for row in puzzles for text in row.values())
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts,
            model_prefix=str(FOLDER / kind),
            model_type=kind,
            vocab_size=4000,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        found[f"SentencePiece {kind}"] = FOLDER / f"{kind}.model"
    name, folder = next(iter(vocabularies.prepare().items()))
    return found | {name: folder}


def measure_puzzles(size: Size) -> list[dict[str, Any]]:
    """The script and one worker in turns, for each tokenizer."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    puzzles = list(make_puzzles(size.puzzles))
    file = FOLDER / "puzzles.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in puzzles))
    options = {"format": "prompt-completion", "template": "{question} {answer}"}
    rows = []
    for name, tokenizer in puzzle_tokenizers(puzzles).items():
        found: dict[str, list[dict[str, Any]]] = {"puzzle_rows": [], "rows_tokenmill": []}
        for number, module in itertools.product(range(size.rounds), found):
            _say(f"round {number + 1}: {module}, {name}")
            job = {
                "file": str(file),
                "tokenizer": str(tokenizer),
                "options": options | {"completion_field": "answer"},
                "workers": 1,
                "out": str(FOLDER / f"puzzles-{number}"),
                "compared_rows": size.puzzles,
                # A space that is a token by itself is in front of the answer, or in it.
                "compares_masks": False,
            }
            found[module].append(measure.run(module, job))
            shutil.rmtree(FOLDER / f"puzzles-{number}", ignore_errors=True)
        row: dict[str, Any] = {"tokenizer": name, "rows": size.puzzles}
        for key, reports in zip(("script", "own"), found.values(), strict=True):
            row[key] = {
                which: [round(report[which], 4) for report in reports]
                for which in ("seconds", "whole_seconds")
            }
        digests = {report["digest"] for reports in found.values() for report in reports}
        rows.append(row | {"is_equal": len(digests) == 1})
    shutil.rmtree(FOLDER, ignore_errors=True)
    return rows


def run(size: Size) -> dict[str, Any]:
    """The measurements and everything a reader needs to judge them."""
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": size.rounds,
        "compared_rows": size.rows,
        "corpus": corpora.available()[0],
        "measurements": measure_all(size),
        "puzzles": measure_puzzles(size),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    run_command(
        "supervised",
        about=__doc__,
        run=lambda quick: run(QUICK if quick else FULL),
        section=render.supervised_section,
    )


if __name__ == "__main__":
    main()
