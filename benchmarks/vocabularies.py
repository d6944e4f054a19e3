"""The tokenizers that are measured with: folders with a `tokenizer.json` and its metadata."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from benchmarks import SHARED, WORK, corpora
from tokenmill.engines.references import train_bpe

if TYPE_CHECKING:
    from pathlib import Path

_SHARED_NAMES = ("gpt2", "qwen3")
_OTHER_NAMES = ("llama3_1",)
# What ends a document in those that name the end of a turn in their files.
_ENDS = {"qwen3": "<|endoftext|>", "llama3_1": "<|end_of_text|>"}


def prepare() -> dict[str, Path]:
    """Name -> folder of each tokenizer; one is trained on the spot where this machine has none."""
    return shared(_SHARED_NAMES) or _trained(16)


def prepare_others() -> dict[str, Path]:
    """Those that no other table has."""
    return shared(_OTHER_NAMES) | _trained(48)


def shared(names: tuple[str, ...]) -> dict[str, Path]:
    """Those of the names that this machine has, with what ends a document as their end token."""
    folders = {name: SHARED / "tokenizers" / name for name in names}
    return {
        name: _with_end(path, _ENDS[name]) if name in _ENDS else path
        for name, path in folders.items()
        if (path / "tokenizer.json").exists()
    }


def _with_end(folder: Path, end: str) -> Path:
    target = WORK / "tokenizers" / folder.name
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": end}
    target.mkdir(parents=True, exist_ok=True)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    if not (target / "tokenizer.json").exists():
        shutil.copy(folder / "tokenizer.json", target)
    return target


def _trained(thousands: int) -> dict[str, Path]:
    name = f"bpe-{thousands}k"
    folder = WORK / "tokenizers" / name
    if not (folder / "tokenizer.json").exists():
        lines = corpora.base_lines(corpora.available()[0])
        texts = (json.loads(line)["text"] for line in lines)
        train_bpe(texts, vocab_size=1000 * thousands, folder=folder)
    return {name: folder}
