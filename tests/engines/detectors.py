"""Tokenizers that show where text was split: each border between two characters changes an id.

Their merges join a context character with any first or last byte of a longer character. So if an
engine splits between the two, the merge cannot happen and the ids show it. Real vocabularies hide
nearly all such differences, which is why sweeping with one of them proves little.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from tokenmill.engines import base
from tokenmill.engines.gigatoken import KNOWN_SPLITS

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXTS = b"aA1 !\n'/"
FIRST_BYTES = range(0xC2, 0xF5)
LAST_BYTES = range(0x80, 0xC0)
SPLIT_TEMPLATE = (
    "a{c}a {c}a {c}{c} 1{c}1 !{c}! A{c}A {c}A {c}A{c}a\n{c}\n{c}'{c}/{c} {c} 1{c}a{c}1a!{c}1!a{c}!"
)
NFC_TEMPLATE = "a{c}\u0301a {c}\u0327\u0301 \u1100{c}{c} e\u0323{c}\u0302 \u0bc6{c}a"


def pattern_sets() -> list[tuple[str, ...]]:
    """The split patterns to sweep: all that the fast engine may be used with."""
    return sorted(KNOWN_SPLITS)


def byte_level_json(
    merges: Sequence[tuple[bytes, bytes]] = (),
    *,
    pre_tokenizer: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A byte-level tokenizer.json with the given merges; `changes` replace top-level entries."""
    vocab = {base.BYTE_TO_CHAR[byte]: byte for byte in range(256)}
    pairs = []
    for left, right in merges:
        pair = [base.from_bytes(left), base.from_bytes(right)]
        if "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab)
            pairs.append(pair)
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer
        or {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": to_bytes(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": pairs,
        },
    }
    return content | changes


def to_bytes(*, use_regex: bool, add_prefix_space: bool = False) -> dict[str, Any]:
    """A ByteLevel step."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def split_sequence(patterns: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    """A pre-tokenizer that splits by the patterns and then goes to bytes."""
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        | changes
        for p in patterns
    ]
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [*splits, last]}


def detector_json(patterns: tuple[str, ...], *, nfc: bool = False) -> dict[str, Any]:
    """A tokenizer.json that shows every border that the patterns make."""
    merges = [(bytes([last]), bytes([first])) for last in LAST_BYTES for first in FIRST_BYTES]
    for context in CONTEXTS:
        merges += [(bytes([context]), bytes([first])) for first in FIRST_BYTES]
        merges += [(bytes([last]), bytes([context])) for last in LAST_BYTES]
        merges += [(bytes([context]), bytes([other])) for other in CONTEXTS]
    return byte_level_json(
        merges,
        pre_tokenizer=split_sequence(patterns),
        normalizer={"type": "NFC"} if nfc else None,
    )


# One of each class that a split pattern can name, and what its own letters are.
ATOMS = (
    *(" ", "\n", "\r", "\t", "\u00a0", "\u2003", "\u0085", "\u2028"),
    *("a", "A", "s", "\u01c5", "\u02b0", "\u4e2d", "\u3042", "1", "\u00b2"),
    *("!", "'", "/", "_", "\u0301", "\U0001f600"),
)


def piece_json(
    patterns: tuple[str, ...], *, length: int, atoms: Sequence[str] = ATOMS
) -> tuple[dict[str, Any], list[str]]:
    """A tokenizer.json whose ids are the pieces of a split, and every text of up to `length` atoms.

    Each of the texts is a token and no merge is needed to make it, so a piece is one id.
    """
    texts = [
        "".join(row)
        for count in range(1, length + 1)
        for row in itertools.product(atoms, repeat=count)
    ]
    content = byte_level_json(pre_tokenizer=split_sequence(patterns))
    vocab = content["model"]["vocab"]
    for text in texts:
        vocab.setdefault(base.from_bytes(text.encode()), len(vocab))
    content["model"]["ignore_merges"] = True
    return content, texts


def disagreements(content: dict[str, Any], points: list[int], template: str) -> list[int]:
    """Code points on which gigatoken and tokenizers differ, put into the template."""
    import gigatoken
    import tokenizers

    data = json.dumps(content)
    fast = gigatoken.Tokenizer.from_json(data)
    reference = tokenizers.Tokenizer.from_str(data)
    found = []
    for start in range(0, len(points), 20_000):
        chunk = points[start : start + 20_000]
        texts = [template.replace("{c}", chr(point)) for point in chunk]
        ours = fast.encode_batch(texts, parallel=False).to_list()
        theirs = reference.encode_batch_fast(texts, add_special_tokens=False)
        found += [p for p, a, b in zip(chunk, ours, theirs, strict=True) if a != b.ids]
    return found
