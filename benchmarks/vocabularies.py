"""The tokenizers that are measured with: folders with a `tokenizer.json` and its metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import SHARED, WORK, corpora

if TYPE_CHECKING:
    from pathlib import Path

_SHARED_NAMES = ("gpt2", "qwen3")
_TRAINED_SIZE = 16_000
_EOS = "<|endoftext|>"


def prepare() -> dict[str, Path]:
    """Name -> folder of each tokenizer; one is trained on the spot where this machine has none."""
    folders = {name: SHARED / "tokenizers" / name for name in _SHARED_NAMES}
    found = {n: path for n, path in folders.items() if (path / "tokenizer.json").exists()}
    return found or {"bpe-16k": _trained()}


def _trained() -> Path:
    folder = WORK / "tokenizers" / "bpe-16k"
    if not (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=_TRAINED_SIZE,
            special_tokens=[_EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        lines = corpora.base_lines(corpora.available()[0])
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _EOS}))
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder
