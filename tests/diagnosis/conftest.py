"""One real diagnosis for all tests that look at what comes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.once import once

import tokenmill

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.diagnosis.values import Diagnosis

SECONDS = 0.1


@dataclass(frozen=True)
class Case:
    """A diagnosis and what it was made of."""

    corpus: Path
    texts: list[str]
    tokenizer: Path
    report: Path
    steps: list[tuple[int, int, str]]
    found: Diagnosis


def paragraphs(texts: list[str]) -> list[str]:
    """Documents of about a kilobyte."""
    return [text[at : at + 1000] for text in texts for at in range(0, len(text), 1000)]


@pytest.fixture(scope="session")
def case(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str], bpe_tokenizer_dir: Path
) -> Case:
    """Every way, the sweep and the report, on real text with a real tokenizer."""
    return once(
        tmp_path_factory,
        "diagnosis",
        lambda folder: diagnose(folder, paragraphs(training_texts)[:152], bpe_tokenizer_dir),
    )


def diagnose(folder: Path, texts: list[str], tokenizer: Path) -> Case:
    corpus, report = folder / "my corpus.jsonl", folder / "report.html"
    corpus.write_text("".join(json.dumps({"body": text}) + "\n" for text in ["", *texts]))
    steps: list[tuple[int, int, str]] = []
    found = tokenmill.diagnose(
        corpus,
        tokenizer=tokenizer,
        text_field="body",
        model="small",
        seconds=SECONDS,
        workers=2,
        sweep=True,
        report=report,
        on_step=lambda *step: steps.append(step),
    )
    return Case(corpus, texts, tokenizer, report, steps, found)
