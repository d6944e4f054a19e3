"""Text as hypothesis makes it for engines: every plane, and the places where tokenizers part."""

from __future__ import annotations

from hypothesis import strategies as st

_SNIPPETS = [
    *("don't", " I'LL", "'s", "we've", " 12345", "1234567", "x = 1\n", "\r\n\r\n", "   ", "\t\t "),
    *("e\u0301", "a\u0328\u0301", "\u1100\u1161\u11a8", "\u0915\u093c", "\u0344", "\u212b"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "1\ufe0f\u20e3"),
    *("\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628\u0627", "\u200f", "\u202e"),
    *("\u4f60\u597d\uff0c", "\u3053\u3093", "\uc548\ub155", "\U00020000", "\u9fff"),
    *("\x00", "\x1f", "\x7f", "\x85", "\u00a0", "\u2028", "\u3000", "\ufeff", "\ufffd"),
    *("<|endoftext|>", "<|pad|>", "<s>", "</s>", "<unk>", "[SEP]", "<|end_of_text|>", "<0x0A>"),
    *("\u2581", "\u2581\u2581x", "\u0120y", "<|endof", "text|>", "<|endoftext|"),
    # Characters on which the engines' Unicode tables differ.
    *("\u088f", "\u1ad0\u0327", "\U00010940", "\u20c1", "\U000323b0", "\u0897\u0327", "\U00011dd0"),
]
_characters = st.characters(exclude_categories=["Cs"])
_runs = st.builds(lambda c, n: c * n, _characters, st.integers(1, 300))
documents = st.lists(
    st.one_of(st.sampled_from(_SNIPPETS), st.text(_characters, max_size=12), _runs), max_size=8
).map("".join)
batches = st.lists(documents, min_size=1, max_size=6)
