"""The special tokens of a tokenizer as a chat needs them: where they stand, and what they swallow.

`tokenizers` looks for added tokens from the left and takes the longest one at each place, before
anything else is done with a text; some of them take the white space beside them too. The text
between two of them is then normalized, split and encoded by itself. That is why a text can be cut
at its special tokens without a seam.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.engines.base import TokenizerKind
from tokenmill.errors import TokenizerError
from tokenmill.supervised.pieces import STRETCH, SWALLOWED, Cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.engines.base import TokenizerInfo

# Unicode's White_Space, which is not quite Python's \s.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LEFT = re.compile(f"[{_SPACE}]*\\Z")
_RIGHT = re.compile(f"[{_SPACE}]*")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token's id, and whether it takes the white space beside it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Found(NamedTuple):
    """A special token in a text: its own string, and all that it takes with it."""

    start: int
    end: int
    id: int
    own_start: int
    own_end: int


class SpecialTokens:
    """Finds special tokens in a text as the tokenizer itself would."""

    def __init__(
        self, tokens: Mapping[str, SpecialToken], others: Mapping[str, SpecialToken] | None = None
    ) -> None:
        """`others` are added tokens that are not special, and may be in the way of one that is."""
        self.tokens = dict(tokens)
        others = {} if others is None else others
        self._pattern = re.compile(f"({_any_of(sorted({*tokens, *others})) or '(?!)'})")
        self._split = self._pattern.split
        self._strips = any(token.lstrip or token.rstrip for token in self.tokens.values())
        self._special_ids = {token.id for token in self.tokens.values()}
        plain = self.tokens | dict(others)
        self._ids = {name: token.id for name, token in plain.items()}
        self._is_plain = not any(token.lstrip or token.rstrip for token in plain.values())

    def cut(self, text: str, checked: str) -> Cut:
        """The text in pieces; `checked` is as long and has only the tokens that are meant."""
        if not self._is_plain:
            return self._cut_one_by_one(text, checked)
        # Added tokens that are not special are themselves wherever they stand.
        strings = self._split(checked)
        kinds = [STRETCH] * len(strings)
        ids = self._ids
        kinds[1::2] = [ids[name] for name in strings[1::2]]
        if text is not checked:
            strings = _slices(text, strings)
        return Cut(strings, kinds)

    def places(self, cut: Cut) -> list[tuple[int, int]]:
        """Where the special tokens of a text stand, and no other added ones."""
        found, start, special = [], 0, self._special_ids
        for string, kind in zip(cut.strings, cut.kinds, strict=True):
            end = start + len(string)
            if kind in special:
                found.append((start, end))
            start = end
        return found

    def _cut_one_by_one(self, text: str, checked: str) -> Cut:
        bounds: list[int] = [0]
        kinds: list[int] = []
        for one in self.find(checked):
            bounds += (one.start, one.own_start, one.own_end, one.end)
            kinds += (STRETCH, SWALLOWED, one.id, SWALLOWED)
        bounds.append(len(text))
        strings = [text[a:b] for a, b in itertools.pairwise(bounds)]
        return Cut(strings, [*kinds, STRETCH])

    def find(self, text: str) -> list[Found]:
        """The special tokens of the text, from left to right."""
        found: list[Found] = []
        tokens = self.tokens
        for match in self._pattern.finditer(text):
            token = tokens.get(match[0])
            if token is None:
                continue
            start, end = match.span()
            if self._strips:
                start, end = self._widened(text, start, end, token, found)
                if start >= end:
                    continue
            found.append(Found(start, end, token.id, *match.span()))
        return found

    def _widened(
        self, text: str, start: int, end: int, token: SpecialToken, found: list[Found]
    ) -> tuple[int, int]:
        floor = found[-1].end if found else 0
        if token.lstrip:
            space = _LEFT.search(text, floor, start)
            start = space.start() if space else start
        if token.rstrip:
            space = _RIGHT.match(text, end)
            end = space.end() if space else end
        return max(start, floor), end


def _slices(text: str, like: list[str]) -> list[str]:
    """The text in pieces as long as others."""
    slices, start = [], 0
    for other in like:
        slices.append(text[start : start + len(other)])
        start += len(other)
    return slices


def _any_of(names: list[str]) -> str:
    """A pattern for any of the names, the longest that fits first: shared beginnings once.

    The names are sorted. One by one they would all be tried at every `<` of a text.
    """
    branches = []
    for first, group in itertools.groupby(filter(None, names), key=lambda name: name[0]):
        rest = [name[1:] for name in group]
        inner = _any_of(rest)
        if inner:
            # A name that ends here is taken only where none that goes on does.
            inner = f"(?:{inner})?" if "" in rest else f"(?:{inner})"
        branches.append(re.escape(first) + inner)
    return "|".join(branches)


def special_tokens_of(info: TokenizerInfo) -> SpecialTokens:
    """The special tokens of a tokenizer; refused where a text cannot be cut at them."""
    if info.kind is not TokenizerKind.HUGGINGFACE:
        return SpecialTokens({name: SpecialToken(id_) for name, id_ in info.special_tokens.items()})
    added = info.added_tokens
    for token in added:
        if token.get("special"):
            _check(token, has_normalizer=info.has_normalizer)
    special: dict[str, SpecialToken] = {}
    others: dict[str, SpecialToken] = {}
    for token in added:
        strips = bool(token.get("lstrip")), bool(token.get("rstrip"))
        if token.get("special"):
            special[token["content"]] = SpecialToken(int(token["id"]), *strips)
        elif not token.get("normalized"):
            # One that is only found as a word by itself is left to the engine, as one that strips.
            strips = (True, True) if token.get("single_word") else strips
            others[token["content"]] = SpecialToken(int(token["id"]), *strips)
    for known in (special, others):
        known.pop("", None)
    return SpecialTokens(special, others)


def _check(token: Mapping[str, Any], *, has_normalizer: bool) -> None:
    refused = None
    if token.get("single_word"):
        refused = "is matched as a single word only"
    elif token.get("normalized") and has_normalizer:
        refused = "is looked for in normalized text"
    if refused:
        raise TokenizerError(
            f"the special token {token['content']!r} of this tokenizer {refused}; a chat is cut at "
            "its special tokens before it is normalized",
            hint='set "normalized" and "single_word" to false for it in tokenizer.json',
        )
