"""The added tokens of a tokenizer.json, found in its text without parsing what is around them.

A worker needs nothing else of the file itself: parsing and writing 11 MB of JSON would double the
time it takes to start.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_KEY = re.compile(r'"added_tokens"\s*:\s*')


@dataclass(frozen=True, slots=True)
class AddedTokensText:
    """A tokenizer.json as text, and where its list of added tokens stands in it."""

    text: str
    tokens: list[dict[str, Any]]
    start: int
    end: int

    def with_tokens(self, tokens: list[dict[str, Any]]) -> str:
        """The same file with another list."""
        return self.text[: self.start] + json.dumps(tokens) + self.text[self.end :]


def find_added_tokens(text: str) -> AddedTokensText:
    """Find the list of added tokens; the file must be valid JSON."""
    places = [match.end() for match in _KEY.finditer(text)]
    if len(places) == 1:
        tokens, end = json.JSONDecoder().raw_decode(text, places[0])
        if isinstance(tokens, list) and all(isinstance(token, dict) for token in tokens):
            return AddedTokensText(text, tokens, places[0], end)
    # No such key, or a vocabulary that holds the word itself: only parsing tells.
    content = json.loads(text)
    tokens = content.pop("added_tokens", None) or []
    rest = json.dumps(content, ensure_ascii=False)
    opening = '{"added_tokens": '
    written = json.dumps(tokens)
    return AddedTokensText(
        opening + written + ", " + rest[1:], tokens, len(opening), len(opening) + len(written)
    )
