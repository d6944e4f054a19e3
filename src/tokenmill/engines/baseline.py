"""The `tokenizers` package as most people use it: train, encode one by one, encode in batches.

For the demo and for comparisons; a build never comes here. Functions return counts, not ids,
since a comparison needs nothing else and lists of ids would cost more memory than the text.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

EOS = "<|endoftext|>"
BATCH = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingTime:
    """How far a way of encoding came, and in what time."""

    documents: int
    text_bytes: int
    tokens: int
    seconds: float


def train_bpe(texts: Iterable[str], *, vocab_size: int, folder: Path) -> Path:
    """Train a byte-level BPE and write it as a tokenizer folder, with an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    # tokenizer.json does not say which special token ends a text; this file beside it does.
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def encode_one_by_one(texts: Sequence[str], *, folder: Path, seconds: float) -> EncodingTime:
    """Call `encode` for each text until the time is up, as a data loader does in `__getitem__`."""
    tokenizer = _load(folder)
    return _timed(
        ((text,) for text in texts),
        encode=lambda batch: len(tokenizer.encode(batch[0], add_special_tokens=False).ids),
        seconds=seconds,
    )


def encode_in_batches(texts: Sequence[str], *, folder: Path, seconds: float) -> EncodingTime:
    """Call `encode_batch`, which uses every core, until the time is up."""
    tokenizer = _load(folder)

    def encode(batch: Sequence[str]) -> int:
        encoded = tokenizer.encode_batch(list(batch), add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in encoded)

    batches = (texts[i : i + BATCH] for i in range(0, len(texts), BATCH))
    return _timed(batches, encode=encode, seconds=seconds)


def _load(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode("warm up: the first call starts threads and fills tables")
    return tokenizer


def _timed(
    batches: Iterator[Sequence[str]], *, encode: Callable[[Sequence[str]], int], seconds: float
) -> EncodingTime:
    documents = text_bytes = tokens = 0
    started = time.perf_counter()
    for batch in batches:
        tokens += encode(batch)
        documents += len(batch)
        text_bytes += sum(len(text.encode()) for text in batch)
        if time.perf_counter() - started > seconds:
            break
    return EncodingTime(
        documents=documents,
        text_bytes=text_bytes,
        tokens=tokens,
        seconds=time.perf_counter() - started,
    )
