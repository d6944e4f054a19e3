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

    text = json.dumps(content, indent=indent, ensure_ascii=False)
    replaced = json.loads(replace_member(text.encode(), "added_tokens", change))
    assert found == [content.get("added_tokens")]
    assert replaced == content | {"added_tokens": [TOKENS[1]]}


def test_a_long_list_is_found_whole() -> None:
    # Characters of three bytes, so that one is cut wherever a part of the file ends.
    tokens = [{"id": index, "content": "\u4e2d" * 301} for index in range(700)]
    content = {"added_tokens": tokens, "model": {"vocab": {"x": 0}}}
    data = json.dumps(content, ensure_ascii=False).encode()
    replaced = json.loads(replace_member(data, "added_tokens", lambda found: found[-1:]))
    assert replaced == content | {"added_tokens": tokens[-1:]}
