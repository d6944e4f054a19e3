"""The `tiktoken` package: the reference for rank files; exports its own encodings as such.

Under `text` a special token's string is ordinary characters (`encode_ordinary`), under `parse` it
is the special token. tiktoken has no normalization; a publisher whose code normalizes first
(Qwen) says so in the definition, and it is done here with Python's own tables, as that code does
it.
"""

from __future__ import annotations

import base64
import bisect
import json
import os
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines.base import SpecialTokens, encode_all, failure_of
from tokenmill.engines.locate import SIDECAR_SUFFIX
from tokenmill.engines.rank_files import RankDefinition
from tokenmill.errors import MissingExtraError, TokenizerError
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.rank_files import RankFile
    from tokenmill.records import TextBatch

_END_OF_TEXT = "<|endoftext|>"


class TiktokenEngine:
    """Encodes with the `tiktoken` package."""

    name = "tiktoken"

    def __init__(self, ranks: RankFile, *, special_tokens: SpecialTokens, threads: int = 1) -> None:
        tiktoken = _tiktoken(f"encoding with {str(ranks.path)!r}")
        self.version: str = str(tiktoken.__version__)
        self._parse = special_tokens is SpecialTokens.PARSE
        self._threads = threads
        self._normalization: Any = ranks.definition.normalization
        try:
            self._encoding = tiktoken.Encoding(
                ranks.path.name,
                pat_str=ranks.definition.pattern,
                mergeable_ranks=dict(ranks.ranks),
                special_tokens=dict(ranks.definition.special_tokens),
            )
        except BaseException as error:
            raise TokenizerError(
                f"the tiktoken package {self.version} cannot use {str(ranks.path)!r}: "
                f"{failure_of(error)}",
                hint=f"check the pattern in {ranks.path.name}{SIDECAR_SUFFIX}",
            ) from error

    def encode(self, texts: TextBatch) -> TokenBatch:
        strings = texts.texts()
        if self._normalization:
            strings = [unicodedata.normalize(self._normalization, text) for text in strings]
        return TokenBatch.from_lists(encode_all(self._encode_texts, strings, engine=self.name))

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        if self._threads > 1 and len(texts) > 1:
            return self._encode_threaded(texts)
        return [self._encode_text(text) for text in texts]

    def _encode_text(self, text: str) -> list[int]:
        if self._parse:
            ids: list[int] = self._encoding.encode(text, allowed_special="all")
        else:
            ids = self._encoding.encode_ordinary(text)
        return ids

    def _encode_threaded(self, texts: list[str]) -> list[list[int]]:
        documents: list[list[int]]
        if self._parse:
            documents = self._encoding.encode_batch(
                texts, num_threads=self._threads, allowed_special="all"
            )
        else:
            documents = self._encoding.encode_ordinary_batch(texts, num_threads=self._threads)
        return documents

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters that each token of the text stands for, as [start, end)."""
        normalized = text
        if self._normalization:
            normalized = unicodedata.normalize(self._normalization, text)
        places = self._places(text)
        found, position = [], 0
        (tokens,) = encode_all(self._encode_texts, [normalized], engine=self.name)
        for token in tokens:
            end = position + len(self.token_bytes(token))
            first = bisect.bisect_right(places, position) - 1
            found.append((first, bisect.bisect_left(places, end)))
            position = end
        return found

    def _places(self, text: str) -> list[int]:
        """Where each character, and the end, stands in the bytes of the normalized text.

        A character and the marks behind it are normalized together and share one place.
        """
        places: list[int] = []
        position, start = 0, 0
        for index in range(1, len(text) + 1):
            if index < len(text) and _joins(text[index]):
                continue
            places += [position] * (index - start)
            cluster = text[start:index]
            if self._normalization:
                cluster = unicodedata.normalize(self._normalization, cluster)
            position += len(cluster.encode())
            start = index
        return [*places, position]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return str(self._encoding.decode(np.asarray(ids).tolist(), errors="replace"))

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return bytes(self._encoding.decode_single_token_bytes(token_id))
        except KeyError:
            return b""

    def recycle(self) -> bool:
        return False


def _joins(character: str) -> bool:
    """Whether the character may become one with the character in front of it."""
    return unicodedata.category(character)[0] == "M" or 0x1160 <= ord(character) <= 0x11FF


def export_encoding(name: str) -> Path:
    """Write an encoding registered with tiktoken as a rank file and its definition."""
    tiktoken = _tiktoken(f"the encoding {name!r}")
    try:
        encoding = tiktoken.get_encoding(name)
    except ValueError as error:
        known = ", ".join(tiktoken.list_encoding_names())
        raise TokenizerError(
            f"tiktoken has no encoding {name!r}; it has: {known}", hint="use one of these names"
        ) from error
    except OSError as error:
        raise TokenizerError(
            f"tiktoken could not fetch the encoding {name!r}: {error}",
            hint="check the network, or give the rank file: --tokenizer path/to/file.tiktoken",
        ) from error
    special = dict(encoding._special_tokens)
    definition = RankDefinition(
        pattern=encoding._pat_str,
        special_tokens=special,
        # tiktoken itself knows one end of text by this name (`Encoding.eot_token`).
        eos_token=_END_OF_TEXT if _END_OF_TEXT in special else None,
    )
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "tokenmill" / "tiktoken" / f"{name}.tiktoken"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, lines)
    _write(path.with_name(path.name + SIDECAR_SUFFIX), json.dumps(definition.canonical()).encode())
    return path


def _write(path: Path, data: bytes) -> None:
    # Another process may be reading or writing the same file: a rename is never seen half done.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def _tiktoken(purpose: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise MissingExtraError("tiktoken", extra="tiktoken", purpose=purpose) from error
    return tiktoken
