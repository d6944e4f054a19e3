"""The table that byte-level vocabularies are written with: one printable character per byte.

GPT-2 introduced it, and every `ByteLevel` tokenizer.json since uses it. Bytes that print stand
for themselves; the 68 others (controls, space, 0x7f-0xa0, 0xad) are counted up from U+0100.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(0x100) if byte not in _PRINTABLE)

BYTE_TO_CHAR: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + position) for position, byte in enumerate(_OTHERS)
}
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}

# 0xc0, 0xc1 and 0xf5-0xff never occur in UTF-8, so a vocabulary may lack them.
UTF8_BYTES = tuple(byte for byte in range(0x100) if byte not in (0xC0, 0xC1) and byte < 0xF5)

_CODES = np.full(0x181, 0xFF, np.uint8)
for _char, _byte in CHAR_TO_BYTE.items():
    _CODES[ord(_char)] = _byte

_WRITTEN = re.compile(f"[{re.escape(''.join(CHAR_TO_BYTE))}]*")


def is_written(piece: str) -> bool:
    """Whether a vocabulary entry is written in the table throughout."""
    return _WRITTEN.fullmatch(piece) is not None


def to_bytes(piece: str) -> bytes | None:
    """Bytes of a byte-level vocabulary entry; None if it is not written in the table."""
    try:
        return bytes(CHAR_TO_BYTE[char] for char in piece)
    except KeyError:
        return None


def from_bytes(data: bytes) -> str:
    """A byte string as a byte-level vocabulary writes it."""
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


def codes_of(pieces: Iterable[str]) -> NDArray[np.uint8]:
    """The byte of each character of the entries, back to back; 0xff where it stands for none."""
    points = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32)
    codes: NDArray[np.uint8] = _CODES[np.minimum(points, len(_CODES) - 1)]
    return codes
