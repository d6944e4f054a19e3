"""What one entry of a tokenizer.json's vocabulary stands for, as bytes.

Only for showing tokens to people: a decoder may do more (join, strip, clean up) than one token
can show.
"""

from __future__ import annotations

import re
from typing import Any

from tokenmill.engines import byte_level

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def json_token_bytes(content: dict[str, Any], piece: str) -> bytes:
    """Bytes of a vocabulary entry of a tokenizer.json."""
    if _uses(content.get("pre_tokenizer"), "ByteLevel") or _uses(
        content.get("decoder"), "ByteLevel"
    ):
        data = byte_level.to_bytes(piece)
        return piece.encode() if data is None else data
    model = content["model"]
    if model.get("type") == "WordPiece":
        return piece.removeprefix(model.get("continuing_subword_prefix") or "##").encode()
    return spaced_piece_bytes(piece)


def spaced_piece_bytes(piece: str) -> bytes:
    """Bytes of a piece that writes spaces as U+2581 and lone bytes as <0xHH>."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _uses(step: dict[str, Any] | None, kind: str) -> bool:
    if step is None:
        return False
    members = (step.get("pretokenizers") or []) + (step.get("decoders") or [])
    return step.get("type") == kind or any(_uses(member, kind) for member in members)
