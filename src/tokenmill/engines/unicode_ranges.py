"""Code points on which the engines differ, found by `tests/engines/sweep_unicode.py`.

gigatoken 0.10 knows Unicode 17. tokenizers 0.21 to 0.23 and tiktoken 0.9 to 0.14 split by Unicode
16, and the NFC of tokenizers 0.2x is that of Unicode 9. tokenizers 1.0 knows Unicode 17 too. Text
with any of these code points is given to the reference engine (see `prescan`). tokenizers 0.20
knows an older Unicode and differs in thousands of further characters: it gets no fast engine
beside it.

They were found by encoding every code point in contexts that show each border, with every split
pattern that gigatoken implements. CONTESTED_LETTERS concern them all, CONTESTED_MARKS those that
name \\p{M}, CONTESTED_SYMBOLS those that name \\p{S} or \\p{P}. CONTESTED_NFC holds the combining
marks since Unicode 10 and the parts of the compositions since then.
"""

from __future__ import annotations

CONTESTED_LETTERS = """
88f c5c cdc a7ce-a7cf a7d2 a7d4 a7f1 10940-10959 10ec5-10ec7 11db0-11ddb 11de0-11de9 16ea0-16eb8
16ebb-16ed3 16ff2-16ff6 187f8-187ff 18d09-18d1e 18d80-18df2 1e6c0-1e6de 1e6e0-1e6e2 1e6e4-1e6e5
1e6e7-1e6ed 1e6f0-1e6f4 1e6fe-1e6ff 2b73a-2b73f 2cea2-2cead 323b0-33479
"""

CONTESTED_MARKS = """
1acf-1add 1ae0-1aeb 10efa-10efb 11b60-11b67 1e6e3 1e6e6 1e6ee-1e6ef 1e6f5
"""

CONTESTED_SYMBOLS = """
20c1 2b96 fbc3-fbd2 fd90-fd91 fdc8-fdce 10ed0-10ed8 1ccfa-1ccfc 1ceba-1ced0 1cee0-1cef0 1f6d8
1f777-1f77a 1f8d0-1f8d8 1fa54-1fa57 1fa8a 1fa8e 1fac8 1facd 1faea 1faef 1fbfa
"""

CONTESTED_NFC = """
7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1ace 1df6-1dfa a82c 105c9 105d2 105da 105e4
10d24-10d27 10d69-10d6d 10eab-10eac 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b 11382-11385
1138b 1138e 11390-11391 113b8 113bb 113c2 113c5 113c7-113c9 113ce-113d0 1145e 11839-1183a 11930
11935 11938 1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42
1611e-16129 1612f 16d63 16d67-16d6a 16ff0-16ff1 1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef
1e5ee-1e5ef
"""

SWEPT = {
    "gigatoken": ((0, 10), (0, 10)),
    "tokenizers": ((0, 21), (1, 0)),
    "tiktoken": ((0, 9), (0, 14)),
}
"""Oldest and newest version (major, minor) for which the ranges are known to be complete."""


def parse_ranges(text: str) -> list[tuple[int, int]]:
    """First and last code point of each range, ascending."""
    pairs = [entry.split("-") for entry in text.split()]
    return sorted((int(pair[0], 16), int(pair[-1], 16)) for pair in pairs)


def version_tuple(version: str) -> tuple[int, int]:
    """Major and minor number of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
