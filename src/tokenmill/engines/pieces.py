"""Long documents in pieces: cut where the tokenizer's settings prove that nothing reaches over.

    document -> places to cut -> pieces, a few at a time -> an engine -> ids, back to back

A reference engine may take 160 bytes of memory for each byte of a document. Where a document may be
cut follows from the tokenizer alone, not from the engine: what is read, and what is rejected, must
not depend on the engine. Whatever the rules here do not name is not cut.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.engines import gigatoken, words
from tokenmill.engines.base import TokenizerKind, nested_steps
from tokenmill.engines.references import ModelType, RankFile, SentencePieceModel
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch, TokenBatch, cut_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tokenmill.engines.load import TokenizerFiles
    from tokenmill.engines.words import Cutting

PIECE_BYTES = 64 << 10
# A word next to a cut is looked at whole; with a longer one there is no cut.
_LONGEST_WORD = 1 << 10

# Between a letter and whitespace. Of the patterns below, no alternative has whitespace after a
# letter, nor looks at what comes after a letter, and none looks back: so a match ends there, and
# what is matched before and after is the same without the other side. NFC changes neither: a space
# and a line break compose with nothing. The letters are those that every version of Unicode has: of
# ASCII, the first half of Cyrillic, U+5000 to U+8FFF of the Chinese characters, and U+B000 to
# U+CFFF of the Korean syllables.
_AFTER_LETTER = re.compile(
    rb"(?:[A-Za-z]|[\xd0\xd1][\x80-\xbf]|[\xe5-\xe8\xeb\xec][\x80-\xbf]{2})(?=[ \n])"
)
_ANYWHERE = re.compile(rb"(?=[\x00-\x7f\xc0-\xff])")


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceCutter:
    """Where documents may be cut."""

    pattern: re.Pattern[bytes]  # a cut may be where a match ends
    cutting: Cutting | None = None  # of words, which have a say in it

    @property
    def left_out(self) -> int:
        """Bytes in front of each piece but the first that the tokenizer puts there by itself."""
        return (self.cutting.left_out or 0) if self.cutting else 0

    def sizes(self, text: memoryview, *, piece_bytes: int = PIECE_BYTES) -> list[int]:
        """Bytes of the pieces of a document, each as small as can be from `piece_bytes` on."""
        places = [0]
        while len(text) - places[-1] > piece_bytes:
            found = next(self._cuts(text, places[-1] + piece_bytes), None)
            if found is None:
                break
            places.append(found)
        return [b - a for a, b in itertools.pairwise([*places, len(text)])]

    def _cuts(self, text: memoryview, start: int) -> Iterator[int]:
        """Places from `start` on."""
        for match in self.pattern.finditer(text, start):
            if start < match.end() < len(text) and self._is_safe(text, match.end()):
                yield match.end()

    def _is_safe(self, text: memoryview, place: int) -> bool:
        """Whether the words before and after the place can be encoded apart from their document."""
        if self.cutting is None:
            return True
        spaces = self.cutting.spaces
        before = bytes(text[max(0, place - _LONGEST_WORD) : place])
        after = bytes(text[place : place + _LONGEST_WORD]).lstrip(spaces)
        words_before = re.split(rb"[%s]" % spaces, before)
        words_after = re.split(rb"[%s]" % spaces, after)
        # Each must be there whole, and the one after may not be empty.
        is_whole = len(words_before) > 1 or place <= _LONGEST_WORD
        is_whole &= len(words_after) > 1 or place + _LONGEST_WORD >= len(text)
        beside = [words_before[-1], words_after[0]]
        return is_whole and bool(beside[1]) and not self.cutting.find_delicate(beside).any()


def find_cutter(tokenizer: TokenizerFiles) -> PieceCutter | None:
    """Where documents may be cut for this tokenizer; None where nothing is proved."""
    if tokenizer.kind is TokenizerKind.BYTES:
        return PieceCutter(pattern=_ANYWHERE)
    content = tokenizer.parsed
    if isinstance(content, RankFile):
        definition = content.definition
        is_known = definition.pattern in gigatoken.RANK_PATTERNS
        is_known = is_known and definition.normalization in (None, "NFC")
        is_whole = not any(map(_AFTER_LETTER.search, map(str.encode, definition.special_tokens)))
        return PieceCutter(pattern=_AFTER_LETTER) if is_known and is_whole else None
    if isinstance(content, dict) and _splits_after_letters(content):
        return PieceCutter(pattern=_AFTER_LETTER)
    if isinstance(content, SentencePieceModel) and content.model_type is not ModelType.BPE:
        return None  # scores are added up along a document
    try:
        cutting = words.cutting_of(tokenizer)
    except TokenizerError:
        return None
    spaces = cutting.spaces
    return PieceCutter(pattern=re.compile(rb"[^%s](?=[%s])" % (spaces, spaces)), cutting=cutting)


def _splits_after_letters(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json splits a text by patterns that end a match after a letter."""
    model, normalizer = content["model"], content.get("normalizer")
    if model.get("type", "BPE") != "BPE" or model.get("dropout"):
        return False
    steps = [step["type"] for step in nested_steps(normalizer) if step["type"] != "Sequence"]
    if steps not in ([], ["NFC"]):
        return False
    for token in content.get("added_tokens") or []:
        if any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip")):
            return False
        if _AFTER_LETTER.search(token["content"].encode()):
            return False
    first = content.get("pre_tokenizer") or {}
    *splits, last = first.get("pretokenizers") or [first]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return False
    if not splits:
        return bool(last.get("use_regex", True))
    if last.get("use_regex", True) or any(split.get("type") != "Split" for split in splits):
        return False
    patterns = tuple((split.get("pattern") or {}).get("Regex", "") for split in splits)
    for split in splits:
        keeps_matches = split.get("behavior") == "Removed" and split.get("invert")
        if split.get("behavior") != "Isolated" and not (
            keeps_matches and len(splits) == 1 and patterns[0] in gigatoken.COMPLETE
        ):
            return False
    is_single = len(patterns) == 1 and patterns[0] in gigatoken.COMPLETE
    return is_single or patterns in gigatoken.KNOWN_SPLITS


def encode_pieces(
    text: NDArray[np.uint8],
    sizes: list[int],
    *,
    left_out: int,
    encode: Callable[[TextBatch], TokenBatch],
    most_bytes: int,
) -> NDArray[np.uint32]:
    """Ids of a document, of which at most so many bytes are encoded at a time, or one piece."""
    offsets = np.append(0, np.cumsum(sizes))
    ids, filled = np.empty(len(text) // 2 + 1, np.uint32), 0
    for first, last in cut_ranges(offsets, most_bytes):
        bounds = offsets[first : last + 1].tolist()
        pieces = [
            text[a + (left_out if a else 0) : b].tobytes() for a, b in itertools.pairwise(bounds)
        ]
        found = encode(TextBatch.from_texts(pieces)).ids
        if filled + len(found) > len(ids):
            # In place where the system can: of a large block there should never be two.
            ids.resize(max(filled + len(found), len(ids) * 3 // 2), refcheck=False)
        ids[filled : filled + len(found)] = found
        filled += len(found)
    ids.resize(filled, refcheck=False)
    return ids
