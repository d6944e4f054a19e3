"""gigatoken, the fast engine for byte-level and SentencePiece BPE; the home of awkward too.

Text goes in and ids come out as awkward arrays over our own buffers, without a copy. Three
hazards of gigatoken 0.10 are handled here: it recognises special tokens in text whatever one
asks, so under `text` it is given a tokenizer without them; its caches grow without bound, so
`recycle` builds it anew; its thread pool hangs in a forked child, so one thread means
`parallel=False`.
"""

from __future__ import annotations

import codecs
import gc
import json
import re
import sys
import unicodedata
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain, pairwise, repeat
from operator import add, contains
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.engines import base, references
from tokenmill.engines.base import Coverage, Engine, SpecialTokens, TokenizerKind, failure_of
from tokenmill.engines.parity import Prescan, SpecialText, decoded, in_contexts, spanning_tokens
from tokenmill.engines.references import ModelType, PieceType, RankFile, SentencePieceModel
from tokenmill.errors import TokenizerError
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenmill.engines.load import TokenizerFiles


# Added tokens of a tokenizer.json: which the fast engine gets, and when it would match wrongly.
#
# `tokenizers` finds added tokens in two passes (those marked `normalized` after the others) and,
# under the policy `text`, lets a special token's match use up its characters before it is passed
# over. gigatoken finds all of its tokens in one pass. The two agree as long as tokens of different
# kinds cannot touch the same characters.

AddedTokens = list[dict[str, Any]]
_MOST_COMPARED = 1 << 24


def kept_tokens(added: AddedTokens | None, policy: SpecialTokens) -> AddedTokens:
    """Added tokens that are recognised in text: all of them, or under `text` those not special."""
    takes_all = policy is SpecialTokens.PARSE
    return [token for token in added or [] if takes_all or not token.get("special")]


def refuse_added_tokens(content: dict[str, Any], policy: SpecialTokens) -> str | None:
    """Why the added tokens keep the fast engine from this tokenizer, or None."""
    vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
    contents = [token["content"] for token in added]
    if len(set(contents)) != len(contents):
        return "an added token is listed twice"
    if sum(len(text) ** 2 for text in contents) > _MOST_COMPARED:
        return "its added tokens are too long to be compared with each other"
    for token in kept_tokens(added, policy):
        text = token["content"]
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                return f"its added token {text!r} has {flag}, which is not covered"
        if not text:
            return "it has an empty added token"
        if vocab.get(text, token["id"]) != token["id"]:
            return f"its added token {text!r} has another id in the vocabulary"
        normalizer = content.get("normalizer")
        if token.get("normalized") and normalizer and not _is_empty_sequence(normalizer):
            return f"its added token {text!r} is matched in normalized text"
    return None


def contested_strings(content: dict[str, Any], policy: SpecialTokens) -> tuple[str, ...]:
    """Added tokens whose presence in a document calls for the reference engine.

    They can share characters with a token of another kind, and only a text that holds one of them
    can show the difference.
    """
    added = content.get("added_tokens") or []
    kept = kept_tokens(added, policy)
    kept_texts = {token["content"] for token in kept}
    dropped = [token["content"] for token in added if token["content"] not in kept_texts]
    normalized = [token["content"] for token in kept if token.get("normalized")]
    plain = [token["content"] for token in kept if not token.get("normalized")]
    return tuple(overlapping(dropped, plain + normalized) + overlapping(normalized, plain))


def overlapping(tokens: Collection[str], others: Collection[str]) -> list[str]:
    """Those of `tokens` that can share characters with one of `others` in some text."""
    if not others:
        return []
    starts = {other[:i] for other in others for i in range(1, len(other) + 1)}
    ends = {other[i:] for other in others for i in range(len(other))}
    insides = "\0".join(others)
    whole = set(others)
    sizes = {len(other) for other in others}

    def overlaps(token: str) -> bool:
        return (
            any(token[-i:] in starts or token[:i] in ends for i in range(1, len(token) + 1))
            or token in insides
            or any(token[i : i + size] in whole for i in range(len(token)) for size in sizes)
        )

    return list(filter(overlaps, tokens))


_COLON = re.compile(rb"\s*:\s*")


def find_member(data: bytes, key: str) -> tuple[Any, int, int] | None:
    """A member of a tokenizer.json, and where it begins and ends if it is a list or an object.

    None where only parsing all of it tells: there is no such key, or a vocabulary holds the word.
    """
    name, places, at = f'"{key}"'.encode(), list[int](), -1
    # Twenty times as fast as looking for the pattern.
    while (at := data.find(name, at + 1)) >= 0:
        places += [match.end() for match in [_COLON.match(data, at + len(name))] if match]
    if len(places) != 1:
        return None
    value, end = _value_at(data, places[0])
    return value, places[0], end


def replace_member(data: bytes, key: str, change: Callable[[Any], Any]) -> bytes:
    """A tokenizer.json with another value of one of its members.

    What is around the member is not parsed where that can be helped: parsing and writing 11 MB of
    JSON would double the time that it takes to load.
    """
    found = find_member(data, key)
    if found is not None and isinstance(found[0], list | dict):
        value, start, end = found
        return data[:start] + json.dumps(change(value)).encode() + data[end:]
    content = json.loads(data)
    content[key] = change(content.get(key))
    return json.dumps(content, ensure_ascii=False).encode()


def _value_at(data: bytes, start: int) -> tuple[Any, int]:
    """The list or object that begins there, and where it ends; else anything."""
    size = 1 << 16
    while True:
        # The characters that are whole; the last one may be cut.
        text, _ = codecs.utf_8_decode(data[start : start + size])
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            if start + size > len(data):
                raise
            size *= 8
        else:
            return value, start + len(text[:end].encode())


# The rules under which the fast engine may run a tokenizer. Whatever they do not name is refused.
#
# gigatoken reads a part of a tokenizer.json and passes over the rest in silence, so loading
# without an error proves nothing. A tokenizer is covered only if every setting that can change an
# id has a value that gigatoken is known to honour. The tests build tokenizers that need these
# refusals.
#
# Covered tokenizers are still held to the reference engine by probes and samples (see `parity`).

ENGINE = "gigatoken"
_SPACE = "\u2581"
# Split patterns that gigatoken implements, as published tokenizer.json files spell them. It also
# claims the possessive spelling of cl100k, but to Oniguruma, which tokenizers 0.2x uses, {1,3}+ is
# a repetition without limit: there the two differ.
_DEEPSEEK_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
)
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_PLAIN = references.LLAMA3_PATTERN.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|")
_QWEN35 = references.QWEN_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
_QWEN35 = _QWEN35.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_NEMOTRON = references.O200K_PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")
_NEMOTRON = _NEMOTRON.replace("{1,3}", "")
_ALIKE = (references.O200K_PATTERN, references.LLAMA3_PATTERN, references.QWEN_PATTERN)
_SINGLE = (*_ALIKE, _GPT2_PATTERN, _CL100K_PLAIN, _QWEN35, _NEMOTRON)
KNOWN_SPLITS = {_DEEPSEEK_PATTERNS, *((pattern,) for pattern in _SINGLE)}
# Other spellings of these splits -> the one that gigatoken is given.
# - It reads cl100k's plain spelling as tiktoken's, with whitespace that ends a text in one piece.
#   Llama 3's makes the pieces of the plain one: \s* leaves it one line break, the last of a run, so
#   that there is none for + to go on with.
# - tiktoken's spelling of GPT-2's split, which converters copy: no quantifier that it makes
#   possessive is followed by what could take back; \s++$ matches where \s+(?!\S) would match the
#   same, since $, which is the end of a line to Oniguruma, comes after all whitespace there; and
#   where \s alone is reached, one whitespace character is left.
# - The first spelling of that split: no two of its contractions begin alike, so order is nothing.
# '[sS] for (?i:'s) is not among them: the latter takes U+017F too.
SPELLINGS = {
    _CL100K_PLAIN: references.LLAMA3_PATTERN,
    references.R50K_PATTERN: _GPT2_PATTERN,
    _GPT2_PATTERN.replace("'(?:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d"): _GPT2_PATTERN,
}
# Patterns that leave no character of any text unmatched. A character is a letter, a number,
# whitespace or none of these, and each of these patterns has for each kind an alternative that
# matches one such character whatever is before and after it: \p{L}+ after something optional (in
# o200k every letter is in one of the two classes, each of which may stand alone), \p{N}, a class of
# all that is \s, \p{L} or \p{N} negated, and \s+ or \s. Where \p{M} is left out of the negated
# class, it is with the letters. So a match begins where the one before it ended, and there is
# nothing between matches that a Split which keeps the matches alone (Removed, inverted) would drop.
COMPLETE = {*_SINGLE, *SPELLINGS}
# Patterns of rank files -> the spelling of the same split that gigatoken knows.
RANK_PATTERNS = {pattern: pattern for pattern in _ALIKE}
RANK_PATTERNS[references.R50K_PATTERN] = _GPT2_PATTERN
RANK_PATTERNS[references.CL100K_PATTERN] = references.CL100K_PATTERN + "+"


def cover_json(content: dict[str, Any], policy: SpecialTokens) -> Coverage:
    """Coverage of a tokenizer.json under a policy for special tokens."""
    model: dict[str, Any] = content["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model["vocab"], dict):
        kind = model.get("type", "not BPE")
        return _refused(f"its model is {kind}, and gigatoken runs BPE alone")
    fallback = bool(model.get("byte_fallback"))
    shape = _refuse_sentencepiece_shape if fallback else _refuse_byte_level_shape
    refusal = _refuse_model(model) or shape(content) or refuse_added_tokens(content, policy)
    if refusal:
        return _refused(refusal)
    merges = _Merges.of(model)
    if isinstance(merges, str):
        return _refused(merges)
    kept = kept_tokens(content.get("added_tokens"), policy)
    splits = (content.get("pre_tokenizer") or {}).get("pretokenizers") or []
    patterns = [split["pattern"].get("Regex", "") for split in splits if "pattern" in split]
    return Coverage(
        engine=ENGINE,
        patterns="\n".join(patterns),
        normalizes=_is_nfc(content.get("normalizer")),
        probes=(
            *merges.tied_texts(model),
            *_spanning_texts(model),
            *(token["content"] for token in kept),
        ),
        contested=contested_strings(content, policy),
    )


def cover_sentencepiece(model: SentencePieceModel) -> Coverage:
    """Coverage of a SentencePiece model."""
    kinds = Counter(kind for _, kind in model.pieces)
    checks = [
        (model.model_type is not ModelType.BPE, f"it is a {model.model_type.name.lower()} model"),
        (not model.byte_fallback, "it has no byte fallback"),
        (bool(model.charsmap), "it normalizes text by a table of its own"),
        (model.removes_extra_whitespace, "it removes extra whitespace"),
        (not model.escapes_whitespace, "it does not escape whitespace"),
        (model.whitespace_is_suffix, "it treats whitespace as a suffix"),
        (kinds[PieceType.USER_DEFINED], "it has user-defined symbols"),
        (kinds[PieceType.UNUSED], "it has unused pieces"),
        (kinds[PieceType.BYTE] != 256, "it lacks byte pieces"),
    ]
    for refused, reason in checks:
        if refused:
            return _refused(f"{reason}, and gigatoken is not known to treat that exactly")
    pieces = {"vocab": dict.fromkeys(text for text, _ in model.pieces), "byte_fallback": True}
    return Coverage(engine=ENGINE, probes=_spanning_texts(pieces))


def cover_ranks(ranks: RankFile, policy: SpecialTokens) -> Coverage:
    """Coverage of a tiktoken rank file under a policy for special tokens."""
    definition = ranks.definition
    if form := definition.normalization:
        return _refused(f"it normalizes to {form} first, and gigatoken would not")
    if definition.pattern not in RANK_PATTERNS:
        return _refused("gigatoken does not implement its split pattern")
    if any(bytes([byte]) not in ranks.ranks for byte in range(256)):
        return _refused("its ranks lack single bytes")
    if set(definition.special_tokens.values()) & set(ranks.ranks.values()):
        return _refused("a special token has the id of a rank")
    special = sorted(definition.special_tokens)
    if policy is SpecialTokens.PARSE and any(
        longer.startswith(shorter) for shorter, longer in pairwise(special)
    ):
        # tiktoken takes either of the two, gigatoken the longer one.
        return _refused("a special token opens with another one")
    codes = np.frombuffer(b"".join(ranks.ranks), np.uint8)
    return Coverage(
        engine=ENGINE,
        patterns=definition.pattern,
        probes=in_contexts(spanning_tokens(ranks.ranks, codes)),
    )


def _refused(reason: str) -> Coverage:
    return Coverage(engine=ENGINE, refusal=reason)


def _refuse_model(model: dict[str, Any]) -> str | None:
    if model.get("dropout"):
        return f"its model drops merges at random (dropout {model['dropout']})"
    for setting in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting):
            return f"its model has a {setting} ({model[setting]!r})"
    ids = model["vocab"].values()
    if max(ids, default=0) > 4 * len(ids) + 65_536:
        return "its ids have large gaps, for which gigatoken would take memory"
    if len(set(ids)) != len(ids):
        return "two entries of its vocabulary share an id"
    return None


def _refuse_byte_level_shape(content: dict[str, Any]) -> str | None:
    normalizer = content.get("normalizer")
    if normalizer is not None and not _is_nfc(normalizer) and not _is_empty_sequence(normalizer):
        return f"its normalizer is {normalizer.get('type')}, and only NFC is covered"
    vocab = content["model"]["vocab"]
    if any(base.BYTE_TO_CHAR[byte] not in vocab for byte in base.UTF8_BYTES):
        return "its vocabulary lacks single bytes"
    # All at once first: one look at a megabyte is far cheaper than 150,000 at its pieces.
    if not base.is_written("".join(vocab)):
        literal = [piece.encode() for piece in vocab if not base.is_written(piece)]
        if any(base.from_bytes(piece) in vocab for piece in literal):
            return "two entries of its vocabulary stand for the same bytes"
    return _refuse_split(content.get("pre_tokenizer"))


def _refuse_split(pre_tokenizer: dict[str, Any] | None) -> str | None:
    if pre_tokenizer is None:
        return "it has no pre-tokenizer, where gigatoken would split as GPT-2 does"
    if pre_tokenizer["type"] == "ByteLevel":
        if not pre_tokenizer.get("use_regex", True):
            return "its ByteLevel does not split, where gigatoken would split as GPT-2 does"
        return None
    if pre_tokenizer["type"] != "Sequence":
        return f"its pre-tokenizer is {pre_tokenizer['type']}, which is not covered"
    *splits, last = pre_tokenizer["pretokenizers"] or [{}]
    is_plain = not last.get("use_regex", True) and not last.get("add_prefix_space")
    if last.get("type") != "ByteLevel" or not is_plain:
        return "its pre-tokenizer sequence does not end in a plain ByteLevel"
    for split in splits:
        kind = split.get("type")
        if kind != "Split":
            return f"its pre-tokenizer sequence holds {kind}, which gigatoken passes over"
        # To isolate is to keep matches and what is between them, so that it may be inverted.
        keeps_matches = split.get("behavior") == "Removed" and split.get("invert")
        if split.get("behavior") != "Isolated" and not (
            keeps_matches and split["pattern"].get("Regex") in COMPLETE
        ):
            return "a Split does not isolate or drops text, which gigatoken passes over"
    patterns = tuple(split["pattern"].get("Regex", "") for split in splits)
    known = tuple(SPELLINGS.get(pattern, pattern) for pattern in patterns) in KNOWN_SPLITS
    return None if known else "gigatoken does not implement its split pattern"


def _respelled(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A covered sequence of splits as gigatoken knows it."""
    if not pre_tokenizer or "pretokenizers" not in pre_tokenizer:
        return pre_tokenizer
    steps = []
    for step in pre_tokenizer["pretokenizers"]:
        if step["type"] == "Split":
            pattern = step["pattern"]["Regex"]
            pattern = {"Regex": SPELLINGS.get(pattern, pattern)}
            step |= {"pattern": pattern, "behavior": "Isolated", "invert": False}
        steps.append(step)
    return pre_tokenizer | {"pretokenizers": steps}


def _refuse_sentencepiece_shape(content: dict[str, Any]) -> str | None:
    model = content["model"]
    if any(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256)):
        return "its vocabulary lacks byte pieces"
    if model.get("ignore_merges"):
        return "it has byte fallback and ignores merges"
    steps = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = steps["normalizers"] if steps["type"] == "Sequence" else [steps]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    if steps not in ([prepend, replace], [replace]):
        return "its normalizer is not the one that turns spaces into U+2581"
    found = content.get("pre_tokenizer")
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    if found is not None and found != split | {"invert": False}:
        return f"its pre-tokenizer is {found['type']}, which is not covered with byte fallback"
    return None


@dataclass(kw_only=True, slots=True)
class _Merges:
    """The merges of a BPE model: two tokens, one after the other, make one."""

    parts: list[str]  # both tokens of the first merge, of the second, ...
    made: list[str]
    pairs: NDArray[np.int64]  # both ids in one number, sorted
    is_tied: NDArray[np.bool_]  # whether another merge makes the same token

    @classmethod
    def of(cls, model: dict[str, Any]) -> _Merges | str:
        """Those of a model whose ids differ, or why they are not covered."""
        merges, ids = model["merges"], model["vocab"]
        if merges and isinstance(merges[0], str):
            # Older files write merges as one string with a space between.
            is_whole = all(map(contains, merges, repeat(" ")))
            parts = " ".join(merges).split(" ")
        else:
            is_whole = {*map(len, merges)} <= {2}
            parts = list(chain.from_iterable(merges))
        if not is_whole or len(parts) != 2 * len(merges):
            return "a merge is not of two tokens"
        made = list(map(add, parts[::2], parts[1::2]))
        try:
            count = len(parts) + len(made)
            found = np.fromiter(map(ids.__getitem__, chain(parts, made)), np.int64, count)
        except KeyError:
            return (
                "a merge names a token that is not in the vocabulary, which gigatoken passes over"
            )
        results = found[len(parts) :]
        pairs = np.sort(found[: len(parts) : 2] << 32 | found[1 : len(parts) : 2])
        is_tied = np.bincount(results)[results] > 1
        if is_tied.any() and not np.diff(pairs).all():
            return "a merge is listed twice"
        return cls(parts=parts, made=made, pairs=pairs, is_tied=is_tied)

    def tied_texts(self, model: dict[str, Any]) -> list[str]:
        """Texts in which two merges into one token compete.

        gigatoken ranks a merge by the token it makes, `tokenizers` by its place in the list. They
        can part only where one token comes from two merges, (x, y) and (y, z), and x, y, z are in a
        row.
        """
        rows, others, ids = list[str](), list[int](), model["vocab"]
        if not self.is_tied.any():
            return []
        begins = np.fromiter(map(str.startswith, self.made, self.parts[1::2]), bool)
        for at in np.flatnonzero(self.is_tied & begins).tolist():
            x, y = self.parts[2 * at : 2 * at + 2]
            rows.append(x + self.made[at])
            others.append(ids[y] << 32 | ids.get(self.made[at][len(y) :], -1))
        places = np.searchsorted(self.pairs[:-1], others)
        is_row = self.pairs[places] == others
        ordered = sorted({rows[at] for at in np.flatnonzero(is_row)})
        is_text = bool(model.get("byte_fallback"))
        return list(decoded(ordered if is_text else map(base.to_bytes, ordered)))


def _spanning_texts(model: dict[str, Any]) -> tuple[str, ...]:
    """Texts that show a split between any two classes which a token of the vocabulary joins."""
    vocab = model["vocab"]
    if not model.get("byte_fallback"):
        tokens = spanning_tokens(vocab, base.codes_of(vocab))
        return in_contexts(map(base.to_bytes, tokens))
    points = np.frombuffer("".join(vocab).encode("utf-32-le", "surrogatepass"), np.uint32)
    codes = np.where(points == ord(_SPACE), ord(" "), np.minimum(points, 0xFF)).astype(np.uint8)
    return in_contexts(token.replace(_SPACE, " ") for token in spanning_tokens(vocab, codes))


def _is_nfc(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    inner = normalizer.get("normalizers") if normalizer["type"] == "Sequence" else [normalizer]
    return [step["type"] for step in inner or []] == ["NFC"]


def _is_empty_sequence(normalizer: dict[str, Any]) -> bool:
    return normalizer["type"] == "Sequence" and not normalizer.get("normalizers")


# Code points on which the engines differ, found by `tests/engines/sweep_unicode.py`.
#
# gigatoken 0.10 knows Unicode 17. tokenizers 0.21 to 0.23 and tiktoken 0.9 to 0.14 split by
# Unicode 16, and the NFC of tokenizers 0.2x is that of Unicode 9. tokenizers 1.0 knows Unicode 17
# too. Text with any of these code points is given to the reference engine (see `contested`).
# tokenizers 0.20 knows an older Unicode and differs in thousands of further characters: it gets no
# fast engine beside it.
#
# They were found by encoding every code point in contexts that show each boundary, with every split
# pattern that gigatoken implements. CONTESTED_LETTERS concern them all, CONTESTED_MARKS those that
# name \p{M}, CONTESTED_SYMBOLS those that name \p{S} or \p{P}. CONTESTED_NFC holds the combining
# marks since Unicode 10 and the parts of the compositions since then.

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

# Oldest and newest version (major, minor) for which the ranges are known to be complete.
SWEPT = {
    "gigatoken": ((0, 10), (0, 10)),
    "tokenizers": ((0, 21), (1, 0)),
    "tiktoken": ((0, 9), (0, 14)),
}


def contested_ranges(
    *, patterns: str, normalizes: bool, engines: Sequence[tuple[str, str]]
) -> list[tuple[int, int]] | None:
    """Code points that the named engines (name, version) may treat differently; None if not known.

    `patterns` is the text of the split patterns. A version newer than those swept may know
    characters that none of them knew, so everything that this Python does not know either is
    contested then. An older version is unknown ground.
    """
    text = CONTESTED_LETTERS
    if r"\p{M}" in patterns or r"\p{S}" in patterns or normalizes:
        text += CONTESTED_MARKS
    if r"\p{S}" in patterns:
        text += CONTESTED_SYMBOLS
    if normalizes:
        text += CONTESTED_NFC
    pairs = [entry.split("-") for entry in text.split()]
    ranges = {(int(pair[0], 16), int(pair[-1], 16)) for pair in pairs}
    for name, number in engines:
        if name in SWEPT:
            oldest, newest = SWEPT[name]
            major, minor = map(int, number.split(".")[:2])
            if (major, minor) < oldest:
                return None
            if (major, minor) > newest:
                every = range(0x80, 0x110000)
                points = np.array([p for p in every if unicodedata.category(chr(p)) == "Cn"])
                runs = np.split(points, np.flatnonzero(np.diff(points) != 1) + 1)
                ranges |= {(int(run[0]), int(run[-1])) for run in runs}
    return sorted(ranges)


# The functions of a `FastEngine`, and the engine.


def covers(tokenizer: TokenizerFiles, policy: SpecialTokens) -> Coverage:
    """Coverage by the rules above for what the tokenizer's files hold."""
    content = tokenizer.parsed
    if isinstance(content, RankFile):
        return cover_ranks(content, policy)
    if isinstance(content, SentencePieceModel):
        return cover_sentencepiece(content)
    return cover_json(content, policy)


def contested(
    tokenizer: TokenizerFiles, coverage: Coverage, reference: Engine
) -> Callable[[TextBatch], NDArray[np.int64]]:
    """Finds documents with contested code points, or with one of the contested strings."""
    ranges = contested_ranges(
        patterns=coverage.patterns,
        normalizes=coverage.normalizes,
        engines=[(reference.name, reference.version), (ENGINE, version(ENGINE))],
    )
    if ranges is None:
        raise TokenizerError(f"{reference.name} {reference.version} was never compared with it")
    # A SentencePiece model carries its own tables; no engine adds Unicode tables to it.
    prescan = None if tokenizer.kind is TokenizerKind.SENTENCEPIECE else Prescan(ranges)
    strings = SpecialText(coverage.contested) if coverage.contested else None

    def find(texts: TextBatch) -> NDArray[np.int64]:
        found = prescan.find(texts) if prescan else np.empty(0, np.int64)
        if strings is not None:
            found = np.union1d(found, np.flatnonzero(strings.find(texts)))
        return found

    return find


def build(
    tokenizer: TokenizerFiles,
    coverage: Coverage,  # noqa: ARG001 (what it says is in the tokenizer)
    *,
    reference: Engine,  # noqa: ARG001 (it encodes all by itself)
    policy: SpecialTokens,
    threads: int,
) -> GigatokenEngine:
    """The engine for what `covers` accepts: all of it as a tokenizer.json."""
    if tokenizer.kind is TokenizerKind.HUGGINGFACE:
        data = tokenizer.path.read_bytes()
        ready = _ahead.pop((xxhash.xxh3_128_hexdigest(data), policy), None)
        content, loaded = ready or (_as_understood(data, policy), None)
        return GigatokenEngine(content, threads=threads, loaded=loaded)
    if tokenizer.kind is TokenizerKind.SENTENCEPIECE:
        import gigatoken._load.sentencepiece as loading

        text = loading.sentencepiece_to_tokenizer_json(tokenizer.path.read_bytes())
        policy = SpecialTokens.TEXT  # control symbols stay text
    else:
        text = json.dumps(_ranks_as_json(tokenizer.parsed), ensure_ascii=False)
    data = replace_member(text.encode(), "added_tokens", partial(kept_tokens, policy=policy))
    return GigatokenEngine(data, threads=threads)


# What was loaded before it was known that it is covered: file and policy -> what `build` would give
# to gigatoken, and what that made of it.
_ahead: dict[tuple[str, SpecialTokens], tuple[bytes, Any]] = {}


def load_ahead(path: Path, policy: SpecialTokens) -> None:
    """Load a tokenizer.json that `build` will be asked for, unless it turns out not to be covered.

    The file must be known to do no harm.
    """
    data = path.read_bytes()
    content = _as_understood(data, policy)
    _ahead[xxhash.xxh3_128_hexdigest(data), policy] = content, _load(content)


def import_for_batches(text_bytes: int, workers: int) -> None:
    """Import what batches need, once for all workers, if each will get more than it does alone."""
    if text_bytes > workers * GigatokenEngine.alone_bytes:
        import awkward  # noqa: F401


def _as_understood(data: bytes, policy: SpecialTokens) -> bytes:
    """A covered tokenizer.json as gigatoken is to read it."""
    data = data.removeprefix(codecs.BOM_UTF8)
    if b'"pretokenizers"' in data:
        data = replace_member(data, "pre_tokenizer", _respelled)
    return replace_member(data, "added_tokens", partial(kept_tokens, policy=policy))


def _ranks_as_json(ranks: RankFile) -> dict[str, Any]:
    """A rank file as a tokenizer.json, with its pattern as gigatoken spells it.

    gigatoken's own loader of rank files derives one merge for each token and panics where it finds
    none, as in Llama 3. tiktoken joins any two neighbours whose joined bytes have a rank, and
    takes a piece that has a rank as it is: that is said here.
    """
    vocab = {base.from_bytes(token): rank for token, rank in ranks.ranks.items()}
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(vocab, key=vocab.__getitem__)
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]
    added = [
        {"id": index, "content": text, "special": True, "normalized": False}
        for text, index in ranks.definition.special_tokens.items()
    ]
    pattern = {"Regex": RANK_PATTERNS[ranks.definition.pattern]}
    steps = [
        {"type": "Split", "pattern": pattern, "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]
    return {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }


@contextmanager
def _encoding(texts: TextBatch) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise TokenizerError(
            f"gigatoken cannot encode {texts.num_bytes:,} bytes of text: {failure_of(error)}",
            hint="use the reference engine: --engine tokenizers, sentencepiece or tiktoken",
        ) from error


def _load(content: bytes) -> Any:
    import gigatoken

    try:
        return gigatoken.Tokenizer.from_json(content)
    except BaseException as error:
        reason = failure_of(error)
    raise TokenizerError(
        f"gigatoken cannot load this tokenizer: {reason}",
        hint="use the reference engine: --engine auto",
    )


class GigatokenEngine:
    """Encodes with gigatoken a tokenizer.json that `build` made for it."""

    name = ENGINE
    few_bytes = 1 << 18
    # So much is encoded text by text, which holds the interpreter's lock, before awkward is
    # imported for batches: that takes as long as most of a short build.
    alone_bytes = 16 << 20

    def __init__(self, content: bytes, *, threads: int = 1, loaded: Any = None) -> None:
        """`loaded` is what gigatoken has made of the content already."""
        self.version = version(ENGINE)
        self._content = content
        # None lets gigatoken stay on one thread where it finds itself in a child process.
        self._parallel = None if threads > 1 else False
        self._alone_left = self.alone_bytes if threads == 1 else -1
        self._tokenizer = loaded or _load(content)
        self._vocab: dict[int, bytes] | None = None

    def encode_one(self, text: str) -> NDArray[np.uint32]:
        """Ids of one text: microseconds, where each call for a batch takes a millisecond."""
        ids: NDArray[np.uint32] = self._tokenizer.encode(text)
        return ids

    def encode(self, texts: TextBatch) -> TokenBatch:
        if not len(texts):
            return TokenBatch(np.empty(0, np.uint32), np.zeros(1, np.int64))
        if self._alone_left >= texts.num_bytes and "awkward" not in sys.modules:
            self._alone_left -= texts.num_bytes
            return self._one_by_one(texts)
        import awkward

        first = int(texts.offsets[0])
        content = awkward.contents.NumpyArray(
            texts.data[first : texts.offsets[-1]], parameters={"__array__": "char"}
        )
        offsets = texts.offsets - first if first else texts.offsets
        strings = awkward.contents.ListOffsetArray(
            awkward.index.Index64(offsets), content, parameters={"__array__": "string"}
        )
        with _encoding(texts):
            encoded = self._tokenizer.encode_batch(awkward.Array(strings), parallel=self._parallel)
        layout = encoded.layout
        return TokenBatch(
            np.asarray(layout.content.data, np.uint32), np.asarray(layout.offsets.data, np.int64)
        )

    def _one_by_one(self, texts: TextBatch) -> TokenBatch:
        with _encoding(texts):
            return TokenBatch.from_lists(
                [self._tokenizer.encode(texts.bytes_at(index)) for index in range(len(texts))]
            )

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        data: bytes = self._tokenizer.decode(np.asarray(ids, np.uint32))
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if self._vocab is None:
            self._vocab = dict(self._tokenizer.vocab)
        return self._vocab.get(token_id, b"")

    def recycle(self) -> bool:
        """Drop the tokenizer with its caches, hand the memory back, build it again."""
        self._tokenizer = self._vocab = None
        gc.collect()
        base.trim_heap()
        self._tokenizer = _load(self._content)
        return True
