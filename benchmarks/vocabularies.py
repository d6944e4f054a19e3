"""The tokenizers that are measured with: folders with a `tokenizer.json` and its metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import SHARED, WORK, corpora
from tokenmill.engines.references import train_bpe

if TYPE_CHECKING:
    from pathlib import Path

_SHARED_NAMES = ("gpt2", "qwen3")
_OTHER_NAMES = ("llama3_1",)


def prepare() -> dict[str, Path]:
    """Name -> folder of each tokenizer; one is trained on the spot where this machine has none."""
    return _shared(_SHARED_NAMES) or _trained(16)


def prepare_others() -> dict[str, Path]:
    """Those that no other table has."""
    return _shared(_OTHER_NAMES) | _trained(48)


def _shared(names: tuple[str, ...]) -> dict[str, Path]:
    folders = {name: SHARED / "tokenizers" / name for name in names}
    return {name: path for name, path in folders.items() if (path / "tokenizer.json").exists()}


def _trained(thousands: int) -> dict[str, Path]:
    name = f"bpe-{thousands}k"
    folder = WORK / "tokenizers" / name
    if not (folder / "tokenizer.json").exists():
        lines = corpora.base_lines(corpora.available()[0])
        texts = (json.loads(line)["text"] for line in lines)
        train_bpe(texts, vocab_size=1000 * thousands, folder=folder)
    return {name: folder}
