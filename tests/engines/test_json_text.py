from __future__ import annotations

import json

import pytest

from tokenmill.engines.gigatoken import replace_member

TOKENS = [
    {"id": 1, "content": "<a>", "special": True},
    {"id": 2, "content": ']}, \u00e9"', "special": False},
]


@pytest.mark.parametrize(
    "content",
    [
        {"version": "1.0", "added_tokens": TOKENS, "model": {"vocab": {"x": 0}}},
        {"model": {"vocab": {"x": 0}}, "added_tokens": TOKENS},
        {"model": {"vocab": {'"added_tokens": [': 0, "added_tokens": 5}}, "added_tokens": TOKENS},
        {"added_tokens": [], "model": {}},
        {"model": {"vocab": {"added_tokens": 7}}},
        {"added_tokens": None, "model": {}},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_the_list_is_found_and_replaced_as_parsing_would(
    content: dict[str, object], indent: int | None
) -> None:
    found: list[object] = []

    def change(tokens: list[dict[str, object]] | None) -> list[dict[str, object]]:
        found.append(tokens)
        return [TOKENS[1]]

    text = json.dumps(content, indent=indent)
    replaced = json.loads(replace_member(text, "added_tokens", change))
    assert found == [content.get("added_tokens")]
    assert replaced == content | {"added_tokens": [TOKENS[1]]}
