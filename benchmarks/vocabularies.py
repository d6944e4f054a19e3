"""The tokenizers that are measured with: folders with a `tokenizer.json` and its metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import SHARED, WORK, corpora
from tokenmill.engines.references import train_bpe

if TYPE_CHECKING:
    from pathlib import Path

_SHARED_NAMES = ("gpt2", "qwen3")
_TRAINED_SIZE = 16_000


def prepare() -> dict[str, Path]:
    """Name -> folder of each tokenizer; one is trained on the spot where this machine has none."""
    folders = {name: SHARED / "tokenizers" / name for name in _SHARED_NAMES}
    found = {n: path for n, path in folders.items() if (path / "tokenizer.json").exists()}
    return found or {"bpe-16k": _trained()}


def _trained() -> Path:
    folder = WORK / "tokenizers" / "bpe-16k"
    if not (folder / "tokenizer.json").exists():
        lines = corpora.base_lines(corpora.available()[0])
        texts = (json.loads(line)["text"] for line in lines)
        train_bpe(texts, vocab_size=_TRAINED_SIZE, folder=folder)
    return folder
