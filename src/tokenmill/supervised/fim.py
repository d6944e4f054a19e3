"""Fill-in-the-middle: documents in three parts, reordered so that a model learns to fill a gap.

    a b c  ->  PREFIX a SUFFIX c MIDDLE b          (psm)
    a b c  ->  PREFIX SUFFIX c MIDDLE a b          (spm)

Which documents, in which order and where they are cut follows from a seed and the document's text
alone, so that no machine, worker or resumed build can tell another story. Cuts are between
characters, anywhere, also within words: the ids are those of the reordered text, in which the
tokenizer finds its own three tokens. In spm prefix and middle are one text without a seam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from tokenmill.errors import TokenizerError
from tokenmill.supervised.chat import PLAIN, PieceCut
from tokenmill.supervised.rows import RowText

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenmill.engines.base import TokenizerInfo
    from tokenmill.options import RowShape

PSM, SPM = "psm", "spm"
# The names of the tokens before the prefix, the suffix and the middle.
STYLES: dict[str, tuple[str, str, str]] = {
    "StarCoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "Qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "DeepSeek": (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),
    "CodeLlama": ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
}
_BITS = 32


class FimTokens(NamedTuple):
    """A tokenizer's own tokens for it: names, and ids."""

    style: str
    names: tuple[str, str, str]
    ids: tuple[int, int, int]


def fim_tokens(info: TokenizerInfo) -> FimTokens:
    """Those among special and added tokens, by name; refused where they are not all there."""
    known = {**info.other_tokens, **info.special_tokens}
    best: tuple[str, list[str]] = ("", [])
    for style, names in STYLES.items():
        ids = [known[name] for name in names if name in known]
        if len(ids) == len(names):
            return FimTokens(style, names, (ids[0], ids[1], ids[2]))
        if ids and not best[1]:
            best = style, [name for name in names if name not in known]
    style, missing = best
    if missing:
        what = f"has tokens of {style}'s style for it, but not {', '.join(missing)}"
    else:
        sought = [" ".join(names) for names in dict.fromkeys(STYLES.values())]
        what = f"has none of the tokens for it that are known: {', '.join(sought)}"
    raise TokenizerError(
        f"fill-in-the-middle needs three tokens, and this tokenizer {what}; without them a model "
        "could not tell the parts of a document",
        hint="use a tokenizer for code that has them, or leave --fim out",
    )


@dataclass(frozen=True, slots=True)
class Spans:
    """How a document is cut: the middle is characters [start, end)."""

    order: str
    start: int
    end: int


class Fim:
    """Draws documents and cuts them."""

    def __init__(self, shape: RowShape) -> None:
        self._most, self._most_spm = (
            round(share * (1 << _BITS)) for share in (shape.fim, shape.fim_spm)
        )
        self._seed = shape.fim_seed

    def spans(self, data: bytes) -> Spans | None:
        """How a document of this UTF-8 is cut; None where it stays as it is."""
        drawn = xxhash.xxh3_128_intdigest(data, self._seed)
        numbers = [drawn >> _BITS * place & (1 << _BITS) - 1 for place in range(4)]
        if not data or numbers[0] >= self._most:
            return None
        places = 1 + len(data.decode())
        start, end = sorted(number * places >> _BITS for number in numbers[2:])
        return Spans(SPM if numbers[1] < self._most_spm else PSM, start, end)


def reordered(text: str, spans: Spans, tokens: FimTokens) -> RowText:
    """A text with its tokens, cut at them."""
    before, middle, after = tokens.names
    parts = text[: spans.start], text[spans.start : spans.end], text[spans.end :]
    strings: Sequence[str]
    if spans.order == PSM:
        strings = (before, parts[0], middle, parts[2], after, parts[1])
    else:
        strings = (before, "", middle, parts[2], after, parts[0] + parts[1])
    kinds = [kind for token in tokens.ids for kind in (token, PLAIN)]
    return RowText("".join(strings), (), PieceCut(list(strings), kinds))


@dataclass(frozen=True, slots=True)
class FimParts:
    """The parts of a stored document that was reordered."""

    tokens: dict[str, tuple[int, int]]  # by name: which tokens
    # How its text was cut; None where ids do not tell, as of a piece of a document.
    spans: Spans | None
    num_characters: int


def parts_of(
    ids: Sequence[int], tokens: FimTokens, fim: Fim, decode: Callable[[Sequence[int]], str]
) -> FimParts | None:
    """The parts of a document without its boundary tokens; None for one that has none."""
    places = [ids.index(token) if token in ids else -1 for token in tokens.ids]
    if -1 in places or places != sorted(places) or places[0]:
        return None
    bounds = [(place + 1, end) for place, end in zip(places, [*places[1:], len(ids)], strict=True)]
    first, last, said = (decode(ids[start:end]) for start, end in bounds)
    # What comes last is the middle, or the prefix and the middle: the draw tells.
    for order, text in ((PSM, first + said + last), (SPM, said + last)):
        spans = fim.spans(text.encode("utf-8", "replace"))
        if spans is None or spans.order != order:
            continue
        is_so = (len(first), len(last)) == (spans.start, len(text) - spans.end)
        if order == SPM and not first and len(last) == len(text) - spans.end:
            named = {"suffix": bounds[1], "prefix and middle": bounds[2]}
            return FimParts(named, spans, len(text))
        if order == PSM and is_so:
            named = dict(zip(("prefix", "suffix", "middle"), bounds, strict=True))
            return FimParts(named, spans, len(text))
    names = tokens.names
    return FimParts({f"after {name}": at for name, at in zip(names, bounds, strict=True)}, None, 0)
