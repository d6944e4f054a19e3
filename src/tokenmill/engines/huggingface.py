"""The `tokenizers` package: the reference for every tokenizer.json. One adapter for 0.2x and 1.x.

The two generations share the name and little else: 0.2x sets the handling of special tokens on
the tokenizer and returns lists, 1.x takes it per call and returns arrays. Truncation, padding and
the post-processor's special tokens are off in both. Each encoded token costs the package about
100 bytes until its result is dropped, so a batch is encoded in slices.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines.base import (
    SpecialTokens,
    UnencodableError,
    encode_all,
    failure_of,
    json_token_bytes,
)
from tokenmill.engines.describe import read_tokenizer_json, vocabulary
from tokenmill.errors import TokenizerError
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from tokenmill.records import TextBatch


SLICE_BYTES = 1 << 20


class HuggingFaceEngine:
    """Encodes with the `tokenizers` package."""

    name = "tokenizers"

    def __init__(
        self,
        path: Path,
        *,
        special_tokens: SpecialTokens,
        threads: int = 1,
        content: str | None = None,
    ) -> None:
        """`content` is the tokenizer.json itself, where it is not to be the one at `path`."""
        import tokenizers

        # `encode_batch` starts a thread for every core, unless this variable, which a build sets
        # for its workers, says no. A library sets it for nobody else.
        self._one_by_one = threads == 1 and os.environ.get("TOKENIZERS_PARALLELISM") != "false"

        self.version: str = str(tokenizers.__version__).replace("-rc.", "rc")
        self._path = path
        self._as_text = special_tokens is not SpecialTokens.PARSE
        self._content: dict[str, Any] | None = None
        try:
            load = tokenizers.Tokenizer
            self._tokenizer: Any = (
                load.from_file(str(path)) if content is None else load.from_str(content)
            )
            self._old_api = hasattr(self._tokenizer, "encode_special_tokens")
            self._prepare()
            self._encode_texts(["probe"])
        except BaseException as error:  # the package raises bare Exception, or panics
            raise TokenizerError(
                f"the tokenizers package {self.version} cannot run {str(path)!r}: "
                f"{failure_of(error)}",
                hint="check the file, or try another version: pip install 'tokenizers<1'",
            ) from error

    def _prepare(self) -> None:
        if self._old_api:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = self._as_text

    def encode(self, texts: TextBatch) -> TokenBatch:
        parts: list[NDArray[np.uint32]] = []
        lengths = np.zeros(len(texts) + 1, np.int64)
        for start, stop in _slices(texts.offsets):
            window = type(texts)(texts.data, texts.offsets[start : stop + 1])
            try:
                found = encode_all(self._encode_texts, window.texts(), engine=self.name)
            except UnencodableError as error:
                moved = {start + place: why for place, why in error.documents.items()}
                raise UnencodableError(moved, engine=self.name) from error
            for index, ids in enumerate(found, start=start):
                parts.append(ids)
                lengths[index + 1] = len(ids)
        ids = np.concatenate(parts) if parts else np.empty(0, np.uint32)
        return TokenBatch(ids, np.cumsum(lengths))

    def _encode_texts(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        if not self._old_api:
            return [encoding.ids_array for encoding in self._encodings(texts)]
        # The fast variant leaves out offsets, which nobody here needs; old releases lack it.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        if self._one_by_one:
            encodings = self._encodings(texts)
        else:
            encodings = encode(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters that each token of the text stands for, as [start, end)."""
        (encoding,) = encode_all(self._encodings, [text], engine=self.name)
        return [(int(start), int(end)) for start, end in encoding.offsets]

    def _encodings(self, texts: list[str]) -> list[Any]:
        """What the package says of each text, with offsets."""
        if self._old_api:
            return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        encodings: list[Any] = self._tokenizer.encode_batch(
            texts,
            add_special_tokens=False,
            encode_special_tokens=self._as_text,
            padding=None,
            truncation=None,
        )
        return encodings

    def added_token_id(self, content: str) -> int | None:
        """The id that the package gives to an added token, which need not be the file's."""
        if self._old_api:
            found: int | None = self._tokenizer.token_to_id(content)
            return found
        ids = self._tokenizer.encode(content, add_special_tokens=False).ids
        return int(ids[0]) if len(ids) == 1 else None

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        if self._content is None:
            self._content = read_tokenizer_json(self._path)
            added = {t["content"]: t["id"] for t in self._content.get("added_tokens") or []}
            vocab = vocabulary(self._content)
            self._added = {index: text for text, index in added.items()}
            self._pieces = {index: text for text, index in vocab.items()}
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        return json_token_bytes(self._content, self._pieces.get(token_id, ""))

    def recycle(self) -> bool:
        return False


def _slices(offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of documents of at most SLICE_BYTES, or single larger ones."""
    num_documents = len(offsets) - 1
    slices = []
    start = 0
    while start < num_documents:
        stop = int(np.searchsorted(offsets, offsets[start] + SLICE_BYTES, side="right")) - 1
        # Empty documents at the end share an offset; searchsorted may point behind the last one.
        stop = min(max(stop, start + 1), num_documents)
        slices.append((start, stop))
        start = stop
    return slices


# -------------------------------------------------------------------------------------------------
# The `tokenizers` package as most people use it: train, encode one by one, encode in batches.
#
# For the demo and for comparisons; a build never comes here. Functions return counts, not ids,
# since a comparison needs nothing else and lists of ids would cost more memory than the text.

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
