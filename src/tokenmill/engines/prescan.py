"""Finds the documents that hold a code point on which the engines' Unicode tables differ.

Runs over every batch, so it must cost next to nothing. A search for each byte that can open a
contested character, by the C library's own search, passes over nearly all text; where such a byte
occurs, the byte after it is looked at; only what is left is decoded. In a script that is full of
such bytes, vectorised comparisons take over. The text must be valid UTF-8.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.engines.unicode_ranges import (
    CONTESTED_LETTERS,
    CONTESTED_MARKS,
    CONTESTED_NFC,
    CONTESTED_SYMBOLS,
    SWEPT,
    parse_ranges,
    version_tuple,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.records import TextBatch

_CHUNK = 1 << 18
"""Bytes looked at in one go: small enough to stay in the cache between one byte and the next."""
_MANY = 128
"""With more finds in a chunk than this, comparing all of it is cheaper than following them."""


class Prescan:
    """Looks for code points of given ranges in UTF-8 text."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        ordered = sorted(ranges)
        self._starts = np.array([first for first, _ in ordered], np.int64)
        self._ends = np.array([last for _, last in ordered], np.int64)
        self._seconds = _openings(ordered)

    def find(self, texts: TextBatch) -> NDArray[np.int64]:
        """Positions of the documents that hold such a code point, ascending."""
        first, last = int(texts.offsets[0]), int(texts.offsets[-1])
        data = texts.data[first:last]
        suspects: list[NDArray[np.int64]] = [
            np.asarray(found, np.int64) + start
            for start in range(0, len(data), _CHUNK)
            for found in self._suspects(data[start : start + _CHUNK + 1])
        ]
        if not suspects:
            return np.empty(0, np.int64)
        positions = np.concatenate(suspects)
        points = _decode(data, positions)
        row = np.searchsorted(self._starts, points, side="right") - 1
        hits = positions[(row >= 0) & (points <= self._ends[row])]
        # side="right" passes over empty documents that start at the same place.
        return np.unique(np.searchsorted(texts.offsets, hits + first, side="right") - 1)

    def _suspects(self, window: NDArray[np.uint8]) -> Iterator[list[int] | NDArray[np.int64]]:
        """Positions of bytes that open a character near a contested one."""
        raw = window.tobytes()
        for lead, seconds in self._seconds.items():
            found: list[int] = []
            position = raw.find(lead)
            for _ in range(_MANY):
                if position < 0:
                    break
                if raw[position + 1 : position + 2] in seconds:
                    found.append(position)
                position = raw.find(lead, position + 1)
            if position >= 0:
                yield _compare(window, lead, seconds)
            elif found:
                yield found


def _compare(
    window: NDArray[np.uint8], lead: bytes, seconds: frozenset[bytes]
) -> NDArray[np.int64]:
    after = window[1:]
    near = np.zeros(len(after), bool)
    for second in seconds:
        near |= after == second[0]
    near &= window[:-1] == lead[0]
    return np.flatnonzero(near)


def contested_ranges(
    *, patterns: str, normalizes: bool, engines: Sequence[tuple[str, str]]
) -> list[tuple[int, int]] | None:
    """Code points that the named engines (name, version) may treat differently; None if not known.

    `patterns` is the text of the split patterns. A version newer than those swept may know
    characters that none of them knew, so everything that this Python does not know either is
    contested then. An older version is unknown ground.
    """
    ranges = parse_ranges(CONTESTED_LETTERS)
    if r"\p{M}" in patterns or r"\p{S}" in patterns:
        ranges += parse_ranges(CONTESTED_MARKS)
    if r"\p{S}" in patterns:
        ranges += parse_ranges(CONTESTED_SYMBOLS)
    if normalizes:
        ranges += parse_ranges(CONTESTED_MARKS) + parse_ranges(CONTESTED_NFC)
    versions = [(SWEPT[name], version_tuple(version)) for name, version in engines if name in SWEPT]
    if any(version < oldest for (oldest, _), version in versions):
        return None
    if any(version > newest for (_, newest), version in versions):
        ranges += _unassigned()
    return sorted(set(ranges))


def _decode(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Code points of the characters of two to four bytes that open at `positions`."""
    limit = len(data) - 1
    b0, b1, b2, b3 = (data[np.minimum(positions + i, limit)].astype(np.int64) for i in range(4))
    b1, b2, b3 = b1 & 0x3F, b2 & 0x3F, b3 & 0x3F
    points: NDArray[np.int64] = np.select(
        [b0 < 0xE0, b0 < 0xF0],
        [(b0 & 0x1F) << 6 | b1, (b0 & 0x0F) << 12 | b1 << 6 | b2],
        (b0 & 0x07) << 18 | b1 << 12 | b2 << 6 | b3,
    )
    return points


def _unassigned() -> list[tuple[int, int]]:
    points = [p for p in range(0x80, 0x110000) if unicodedata.category(chr(p)) == "Cn"]
    starts = [p for p, before in zip(points, [-1, *points], strict=False) if p != before + 1]
    ends = [p for p, after in zip(points, [*points[1:], -1], strict=True) if p != after - 1]
    return list(zip(starts, ends, strict=True))


def _openings(ranges: Iterable[tuple[int, int]]) -> dict[bytes, frozenset[bytes]]:
    """First byte -> second bytes of the characters in the ranges."""
    openings: dict[bytes, set[bytes]] = {}
    for first, last in ranges:
        # 64 code points share all bytes but the last; of two bytes the last is the second.
        step = 1 if first < 0x800 else 64
        for point in (*range(first, last + 1, step), last):
            encoded = chr(point).encode(errors="surrogatepass")
            openings.setdefault(encoded[:1], set()).add(encoded[1:2])
    return {lead: frozenset(seconds) for lead, seconds in openings.items()}
