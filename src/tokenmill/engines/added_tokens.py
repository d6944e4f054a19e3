"""Added tokens of a tokenizer.json: which the fast engine gets, and when it would match wrongly.

`tokenizers` finds added tokens in two passes (those marked `normalized` after the others) and,
under the policy `text`, lets a special token's match use up its characters before it is passed
over. gigatoken finds all of its tokens in one pass. The two agree as long as tokens of different
kinds cannot touch the same characters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.engines.base import SpecialTokens

if TYPE_CHECKING:
    from collections.abc import Collection

_MOST_COMPARED = 1 << 24


def kept_tokens(content: dict[str, Any], policy: SpecialTokens) -> list[dict[str, Any]]:
    """Added tokens that are recognised in text: all of them, or under `text` those not special."""
    added = content.get("added_tokens") or []
    if policy is SpecialTokens.PARSE:
        return list(added)
    return [token for token in added if not token.get("special")]


def refuse_added_tokens(content: dict[str, Any], policy: SpecialTokens) -> str | None:
    """Why the added tokens keep the fast engine from this tokenizer, or None."""
    vocab = content["model"]["vocab"]
    kept = kept_tokens(content, policy)
    contents = [token["content"] for token in content.get("added_tokens") or []]
    if len(set(contents)) != len(contents):
        return "an added token is listed twice"
    if sum(len(text) ** 2 for text in contents) > _MOST_COMPARED:
        return "its added tokens are too long to be compared with each other"
    for token in kept:
        text = token["content"]
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                return f"its added token {text!r} has {flag}, which is not covered"
        if not text:
            return "it has an empty added token"
        if vocab.get(text, token["id"]) != token["id"]:
            return f"its added token {text!r} has another id in the vocabulary"
        if token.get("normalized") and content.get("normalizer"):
            normalizer = content["normalizer"]
            if normalizer["type"] != "Sequence" or normalizer.get("normalizers"):
                return f"its added token {text!r} is matched in normalized text"
    return None


def contested_strings(content: dict[str, Any], policy: SpecialTokens) -> tuple[str, ...]:
    """Added tokens whose presence in a document calls for the reference engine.

    They can share characters with a token of another kind, and only a text that holds one of them
    can show the difference.
    """
    kept = kept_tokens(content, policy)
    kept_texts = {token["content"] for token in kept}
    added = [token["content"] for token in content.get("added_tokens") or []]
    dropped = [text for text in added if text not in kept_texts]
    normalized = [token["content"] for token in kept if token.get("normalized")]
    plain = [token["content"] for token in kept if not token.get("normalized")]
    return tuple(overlapping(dropped, plain + normalized) + overlapping(normalized, plain))


def overlapping(tokens: Collection[str], others: Collection[str]) -> list[str]:
    """Those of `tokens` that can share characters with one of `others` in some text."""
    starts = {other[:i] for other in others for i in range(1, len(other) + 1)}
    ends = {other[i:] for other in others for i in range(len(other))}
    insides = "\0".join(others)
    whole = set(others)
    found = []
    for token in tokens:
        borders = range(1, len(token) + 1)
        if (
            any(token[-i:] in starts or token[:i] in ends for i in borders)
            or token in insides
            or any(token[i:j] in whole for i in range(len(token)) for j in borders)
        ):
            found.append(token)
    return found
