"""Prints the code points on which gigatoken and the installed `tokenizers` disagree.

    python -m tests.engines.sweep_unicode

Its output is what the tables of `tokenmill/engines/gigatoken.py` must hold at least; run
it when either package is updated. Takes some minutes. CONTESTED_NFC holds more than is printed: the
parts of compositions, which show only in pairs, were added from the Unicode Character Database.
"""

from __future__ import annotations

from tests.engines.detectors import (
    NFC_TEMPLATE,
    SPLIT_TEMPLATE,
    detector_json,
    disagreements,
    pattern_sets,
)

# Unassigned planes, private use and the insides of huge uniform blocks are sampled.
SAMPLED = [
    (0x3400, 0x4DB0, 13),
    (0x4E10, 0x9F90, 13),
    (0xAC00, 0xD7A0, 13),
    (0xE000, 0xF900, 17),
    (0x40000, 0xE0000, 97),
    (0xE0200, 0x110000, 97),
]


def code_points() -> list[int]:
    """Every code point above ASCII but surrogates, sampled where a block is uniform."""
    points = []
    for point in range(0x80, 0x110000):
        step = next((step for low, high, step in SAMPLED if low <= point < high), 1)
        if point % step == 0 and not 0xD800 <= point < 0xE000:
            points.append(point)
    return points


def ranges_text(points: list[int]) -> str:
    """Code points as hexadecimal ranges."""
    ranges: list[list[int]] = []
    for point in sorted(set(points)):
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return " ".join(f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in ranges)


def main() -> None:
    points = code_points()
    for patterns in pattern_sets():
        found = disagreements(detector_json(patterns), points, SPLIT_TEMPLATE)
        print(f"{patterns[-1][:60]!r}: {len(found)} code points\n{ranges_text(found)}\n")
    nfc = detector_json(pattern_sets()[0], nfc=True)
    print(f"NFC:\n{ranges_text(disagreements(nfc, points, NFC_TEMPLATE))}")


if __name__ == "__main__":
    main()
