"""Fixed texts on which a fast engine must agree with its reference before it may touch a document.

They are the places where tokenizers part: borders between classes of characters, runs of
whitespace, contractions, digits, combining marks in every order, emoji sequences, every plane of
Unicode, strings of this tokenizer's own special tokens, and tokens of its vocabulary: a text split
in the wrong place has wrong ids only if there is a token that reaches over that place. They cost a
reference engine about a tenth of a second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, AnyStr

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray

_TEXTS = (
    "",
    " ",
    "Hello, world! It's 2024-01-31; we'll pay $1,234.56 (plus 7%).",
    (
        "don't DON'T I'll I'LL we've WE'VE you're YOU'RE he'd HE'D I'm I'M 'tis 's'S 'LL's"
        " \u2019s \u2019S 'x ''s"
    ),
    (
        "0 1 12 123 1234 12345 123456 1234567 1.5e-10 \u0661\u0662\u0663\u0664 \u00b2\u00b3\u00bd"
        " \u2160\u2161 \u4e00\u4e8c"
    ),
    "def f(x):\n    if x:\n\t\treturn x  # ok\r\n\r\n\n\n    \n  \t y\n",
    "line\rline\r\nline\u2028line\u2029line\u0085line\x0bline\x0cline",
    "a  b   c    d     e\u00a0f\u00a0\u00a0g\u3000h\u2003 i \u200b j\ufeffk",
    "  leading and trailing  ",
    "\ttabs\t\tand\t \t mixed \n \n\n  \n",
    (
        "camelCase PascalCase SCREAMING_SNAKE snake_case kebab-case X1y2Z3 \u01c5\u01c8 \u00dcBER"
        " \u00df\u1e9e"
    ),
    (
        "e\u0301 \u00e9 a\u0328\u0301 a\u0301\u0328 \u1ea5 o\u0302\u0301 \u212b \u2126 \uac00"
        " \u1100\u1161\u11a8 \u0958 \u0915\u093c"
    ),
    (
        "\u0301start n\u0303\u0303\u0303\u0303 Z\u0351\u036b\u0343\u036a\u0302 \u0344 \u0340"
        " \u1e9b\u0323"
    ),
    (
        "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
        " \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f 1\ufe0f\u20e3"
        " \U0001f3f4\U000e0067\U000e0062\U000e007f"
    ),
    (
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u0645\u0631\u062d\u0628\u0627"
        " \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u200f(\u0661)\u200e \u202babc\u202c"
        " \u06f1\u06f2"
    ),
    (
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f\u4e16\u754c"
        " \u30c6\u30b9\u30c8 \uc548\ub155\ud558\uc138\uc694 \uff21\uff22\uff23\uff11\uff12"
        " \u9fa6\u9fff\u3400 \U00020000\U0002a6d6"
    ),
    (
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947"
        " \u0c28\u0c2e\u0c38\u0c4d\u0c15\u0c3e\u0c30\u0c02 \u10d2\u10d0\u10db\u10d0\u10e0 \u1c92"
        " \u13a0\uab70 \ua9b2\ua9bf"
    ),
    "\x00\x01\x02\x1f\x7f\x80\x9f \ufffd \ufffe \uffff \U0001ffff \U0010ffff \ue000",
    (
        "$\u20ac\u00a3\u00a5\u20b9 \u2200x\u2208\u2115: x\u00b2\u22650 \u2192 \u222b\u2211\u221a"
        " \u00a9\u2122 \u2026\u2014\u2013 \u00ab\u00bb\u201e\u201c '\"`"
    ),
    (
        "http://example.org/a?b=c&d=%20#e user@host C:\\dir\\file.txt /usr/bin/env </p><br/>"
        " {{x}} [[y]] ---- ==== ////"
    ),
    (
        "<|endoftext|> <s></s> [INST] <pad> <unk> [CLS] <0x0A> <|im_start|>system \u2581\u2581x"
        " \u0120y"
    ),
)
_RUN_CHARACTERS = "aA1!_- \n\t\r\u00a0\u00e9\u0301\u0627\u4e2d\u3042\ud55c\u2581\U0001f600"
_RUN_LENGTHS = (*range(2, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 1000)
_PLANE_STRIDE = 331
_MAX_TOKENS = 64
_MAX_KINDS = 400
_CONTEXTS = ("{}", "a{}", "{}a", "1{}1", " {}", "{} ", "\n{}", "{}\n", "!{}!")
_LITERAL = " \n\r'/"


def _class_of(character: str) -> int:
    """A sign for the class of an ASCII character; one for all others together."""
    if character in _LITERAL or character > "\x7f":
        return ord(min(character, "\x80"))
    classes = {"a": character.islower(), "A": character.isupper(), "1": character.isdigit()}
    named = [sign for sign, is_of in classes.items() if is_of]
    return ord(named[0] if named else "\t" if character.isspace() else "!")


_CLASSES = np.array([_class_of(chr(byte)) for byte in range(256)], np.uint8)


def probe_texts(own_tokens: Iterable[str] = (), *, derived: Iterable[str] = ()) -> list[str]:
    """All probes; `own_tokens` are strings of special and added tokens of the tokenizer at hand."""
    texts = list(_TEXTS)
    texts += [character * length for character in _RUN_CHARACTERS for length in _RUN_LENGTHS]
    texts += [f"x{character * length} y" for character in _RUN_CHARACTERS for length in (3, 20)]
    # Every plane: a stride that is prime meets every block in time and every row of 64.
    for point in range(0x80, 0x110000, _PLANE_STRIDE):
        if not 0xD800 <= point < 0xE000:
            character = chr(point)
            texts.append(f"a{character}b {character}{character} 1{character}\u0301!{character}")
    for token in list(own_tokens)[:_MAX_TOKENS]:
        texts += [
            token,
            f"a{token}b",
            f" {token} {token}\n",
            token[:-1],
            token + token,
            token.upper(),
        ]
    texts += derived
    return texts


def spanning_tokens(tokens: Collection[AnyStr], codes: NDArray[np.uint8]) -> list[AnyStr]:
    """A token for each sequence of classes of characters that a vocabulary has a token for.

    `codes` are the bytes, or as many signs for them, of all tokens back to back.
    """
    signs = _CLASSES[codes].tobytes()
    kinds: dict[bytes, AnyStr] = {}
    start = 0
    for token in tokens:
        end = start + len(token)
        kinds.setdefault(signs[start:end], token)
        start = end
    # How long a run is matters little, and is what most of them differ in.
    short: dict[bytes, AnyStr] = {}
    for kind, token in kinds.items():
        short.setdefault(re.sub(rb"(.)\1+", rb"\1\1", kind, flags=re.DOTALL), token)
    return [short[kind] for kind in sorted(short, key=len)[:_MAX_KINDS]]


def in_contexts(texts: Iterable[bytes | str | None]) -> tuple[str, ...]:
    """The texts alone, and where other characters are before and behind them."""
    made: list[str] = []
    for text in texts:
        try:
            text = text.decode() if isinstance(text, bytes) else text or ""
        except UnicodeDecodeError:
            continue
        made += [context.format(text) for context in _CONTEXTS]
    return tuple(made)
