"""Special tokens are found where the tokenizer itself would find them."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.supervised.chat import PLAIN, SWALLOWED, ChatSpecials, SpecialToken

names = st.lists(st.text("<|ab>", min_size=1, max_size=5), min_size=1, max_size=6, unique=True)


@given(names, st.text("<|ab> ", max_size=30))
def test_the_leftmost_is_found_and_of_these_the_longest(tokens: list[str], text: str) -> None:
    special = ChatSpecials({name: SpecialToken(number) for number, name in enumerate(tokens)})
    longest_first = sorted(tokens, key=len, reverse=True)
    expected = [
        (match.start(), match.end(), tokens.index(match[0]))
        for match in re.finditer("|".join(map(re.escape, longest_first)), text)
    ]
    assert [(one.start, one.end, one.id) for one in special.find(text)] == expected
    strings, kinds = special.cut(text, text)
    assert "".join(strings) == text
    ends = list(itertools.accumulate(map(len, strings)))
    found = zip(ends, strings, kinds, strict=True)
    cut = [(end - len(name), end, kind) for end, name, kind in found if kind != PLAIN]
    assert cut == expected


@given(st.text("<|ab> \n", max_size=30))
def test_cutting_one_by_one_and_by_a_pattern_is_the_same(text: str) -> None:
    tokens = {"<|a|>": SpecialToken(1), "<|": SpecialToken(2), "b>": SpecialToken(3)}
    others = {"<|ab": SpecialToken(4), "ab": SpecialToken(5)}
    plain = ChatSpecials(tokens, others)
    careful = ChatSpecials(tokens | {"never": SpecialToken(9, lstrip=True)}, others)
    strings, kinds = careful.cut(text, text)
    assert "".join(strings) == text
    specials = [kind for kind in kinds if kind >= 0]
    # Added tokens that are not special stay in their stretch here, and are cut out there.
    assert specials == [kind for kind in plain.cut(text, text).kinds if 0 <= kind < 4]
    assert "".join(plain.cut(text, text).strings) == text


def test_white_space_beside_a_token_goes_with_it_where_the_token_says_so() -> None:
    special = ChatSpecials(
        {"<l>": SpecialToken(1, lstrip=True), "<r>": SpecialToken(2, rstrip=True)}
    )
    found = special.find("a \n<l> b<r>\t\nc <r> <l>")
    assert [(one.start, one.end) for one in found] == [(1, 6), (8, 13), (15, 19), (19, 22)]
    assert [(one.own_start, one.own_end) for one in found] == [(3, 6), (8, 11), (15, 18), (19, 22)]
    strings, kinds = special.cut("a \n<l> b", "a \n<l> b")
    assert strings == ["a", " \n", "<l>", "", " b"]
    assert kinds == [PLAIN, SWALLOWED, 1, SWALLOWED, PLAIN]


def test_a_message_that_only_looks_like_a_token_stays_in_its_stretch() -> None:
    special = ChatSpecials({"<s>": SpecialToken(1)})
    strings, kinds = special.cut("<s>a<s>b", "<s>a\ue000s>b")
    assert strings == ["", "<s>", "a<s>b"]
    assert kinds == [PLAIN, 1, PLAIN]
