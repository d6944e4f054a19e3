"""Which token ends a document, and which opens it: as asked for, or as the metadata name it.

Where neither says, that is an error with the candidates in it: a wrong eos trains a model that
never stops.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tokenmill.errors import TokenizerError

if TYPE_CHECKING:
    from tokenmill.engines.base import TokenizerInfo

_SHOWN = 12


def resolve_eos(info: TokenizerInfo, requested: str | None = None) -> tuple[str, int]:
    """Token and id that end a document; `requested` wins over the tokenizer's metadata."""
    return _resolve(info, requested, named=info.eos_token, name="eos")


def resolve_bos(info: TokenizerInfo, requested: str | None = None) -> tuple[str, int]:
    """Token and id that open a document; `requested` wins over the tokenizer's metadata."""
    return _resolve(info, requested, named=info.bos_token, name="bos")


def _resolve(
    info: TokenizerInfo, requested: str | None, *, named: str | None, name: str
) -> tuple[str, int]:
    tokens = {**info.other_tokens, **info.special_tokens}
    token = named if requested is None else requested
    if token is not None and token in tokens:
        return token, tokens[token]
    candidates = [
        *info.special_tokens,
        *(t for t in info.other_tokens if t not in info.special_tokens),
    ]
    if requested is not None:
        what = (
            f"the {name} token {requested!r} is not among this tokenizer's special or added tokens"
        )
    else:
        what = f"this tokenizer does not name its {name} token, and a wrong guess ruins a training"
    shown = ", ".join(candidates[:_SHOWN]) or "none"
    more = f" and {len(candidates) - _SHOWN} more" if len(candidates) > _SHOWN else ""
    raise TokenizerError(f"{what}; candidates: {shown}{more}", hint=_hint(name, candidates))


def _hint(name: str, candidates: list[str]) -> str:
    if name == "bos":
        return 'leave --bos out, or name it in tokenizer_config.json: {"bos_token": "..."}'
    if not candidates:
        return "use --no-eos"
    return f"use --eos {shlex.quote(candidates[0])} or --no-eos"
