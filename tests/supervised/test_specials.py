"""Special tokens are found where the tokenizer itself would find them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.supervised.specials import SpecialToken, SpecialTokens

names = st.lists(st.text("<|ab>", min_size=1, max_size=5), min_size=1, max_size=6, unique=True)


@given(names, st.text("<|ab> ", max_size=30))
def test_the_leftmost_is_found_and_of_these_the_longest(tokens: list[str], text: str) -> None:
    special = SpecialTokens({name: SpecialToken(number) for number, name in enumerate(tokens)})
    longest_first = sorted(tokens, key=len, reverse=True)
    expected = [
        (match.start(), match.end(), tokens.index(match[0]))
        for match in re.finditer("|".join(map(re.escape, longest_first)), text)
    ]
    assert [(one.start, one.end, one.id) for one in special.find(text)] == expected


def test_white_space_beside_a_token_goes_with_it_where_the_token_says_so() -> None:
    special = SpecialTokens(
        {"<l>": SpecialToken(1, lstrip=True), "<r>": SpecialToken(2, rstrip=True)}
    )
    found = special.find("a \n<l> b<r>\t\nc <r> <l>")
    assert [(one.start, one.end) for one in found] == [(1, 6), (8, 13), (15, 19), (19, 22)]
    assert [(one.own_start, one.own_end) for one in found] == [(3, 6), (8, 11), (15, 18), (19, 22)]
