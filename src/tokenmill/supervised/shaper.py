"""Batches of rows in, batches of ids and masks out: the one thing the build needs to know.

shaped = shaper.shape(texts, rows)            rows as JSON -> plain texts, rejects
tokens = shaper.encode(shaped, encode)        by the engine, all plain texts in one call
documents = shaper.assemble(shaped, tokens)   ids and masks, row by row
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.engines.base import Engine, SpecialTokens, TokenizerInfo, nested_steps
from tokenmill.engines.references import HuggingFaceEngine
from tokenmill.errors import SourceError, UsageError
from tokenmill.records import Reject, RejectReason, TextBatch, TokenBatch, lazy
from tokenmill.sources.base import FORMATS, SourceFile
from tokenmill.supervised.chat import PLAIN, ChatMaker
from tokenmill.supervised.rows import Range, RowError, RowText, encoded, parse_row, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.parity import CheckedEngine
    from tokenmill.options import RowShape


# Small templates: `{title}\n\n{body}` makes one text of several fields. A name in braces is a field
# (dots reach into nested objects), a double brace is a brace, and all else means itself. There is
# nothing more to it on purpose: no conversions, no formats.
#
# Prompt and completion are one text and are encoded as one, so that there is no seam between them
# that the tokenizer would not make. A token that has characters of both belongs to the prompt: the
# model is given it, and is not asked for it. Spaces are the exception: most tokenizers make the
# space before a word a part of its token, and after "Answer: " no first word would ever be learned.

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
FieldTemplate = tuple[tuple[bool, str], ...]  # (True, field) or (False, text)


def parse_template(template: str) -> FieldTemplate:
    """Take a template apart; UsageError where a brace has no partner or names nothing."""
    pieces: list[tuple[bool, str]] = []
    why = None
    for match in _PART.finditer(template):
        text = match[0]
        if match[1] is not None:
            pieces.append((True, match[1].strip()))
        elif text in ("{", "}"):
            why = why or f"{text!r} at character {match.start()} has no partner"
        else:
            pieces.append((False, text[0] if text in ("{{", "}}") else text))
    if (True, "") in pieces:
        why = why or "a pair of braces names no field"
    if not any(is_field for is_field, _ in pieces):
        why = why or "it names no field, so every row would become the same text"
    if why:
        raise UsageError(
            f"the template {template!r} cannot be used: {why}",
            hint="write fields in braces, such as '{title}\\n\\n{body}'; "
            "a brace itself is {{ or }}",
        )
    return tuple(pieces)


def field_template(shape: RowShape) -> FieldTemplate:
    """The template of a shape; without one, the prompt and then the completion."""
    if shape.template is None:
        return (True, shape.prompt_field), (True, shape.completion_field)
    template = parse_template(shape.template)
    completion = (True, shape.completion_field)
    if shape.format == "prompt-completion" and completion not in template:
        named = [text for is_field, text in template if is_field]
        raise UsageError(
            f"the template {shape.template!r} does not name the field "
            f"{shape.completion_field!r}, with which the completion begins",
            hint=f"name it with --completion-field, such as: --completion-field {named[-1]}",
        )
    return template


def field_maker(
    shape: RowShape, *, bos: int | None, eos: int | None
) -> Callable[[dict[str, Any]], RowText]:
    """Makes the text of a row: a template filled with its fields, and the completion's range."""
    template = field_template(shape)
    # Everything from the completion on is what the model is to say.
    has_completion = shape.format == "prompt-completion"
    first = template.index((True, shape.completion_field)) if has_completion else 0

    def make(row: dict[str, Any]) -> RowText:
        parts = [text_of(row, text) if is_field else text for is_field, text in template]
        text = "".join(parts)
        if not text or not has_completion:
            return RowText(text)
        boundary = sum(map(len, parts[:first]))
        if boundary == len(text):
            # The end token alone could be learned; an answer that is missing is far more likely.
            raise RowError(RejectReason.NOTHING_TO_TRAIN, "the completion is empty")
        return RowText(text, [(boundary, len(text))], before=bos, after=eos)

    return make


def load_inner(info: TokenizerInfo) -> Engine | None:
    """An engine for text that does not open its row, where that makes a difference.

    Some tokenizers put a space in front of a text, but only where it is the beginning of everything
    (`Metaspace` with the scheme `first`). A chat is cut at its special tokens, so all texts but the
    first must be encoded by the same tokenizer without that space.
    """
    if not info.spaces_beginnings:
        return None
    path = info.files["tokenizer.json"]
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    for step in nested_steps(content["pre_tokenizer"]):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    return HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT, content=json.dumps(content))


# A batch of rows as pieces: plain texts to encode, and special tokens between them.
#
#     rows -> RowPieces.add ... -> plain_texts (a TextBatch) -> an engine -> ids -> put_together
#
# All plain texts of a batch are encoded by one call, and nothing but lists grows while rows come
# in: what is found out about each piece is found out for all of them at once. The loss mask is
# given in characters of a row's text; most pieces are in it wholly or not at all, and for the
# others `TextBoundaries` finds the token.


class _Layout(NamedTuple):
    """Pieces of all rows that have a token, as columns."""

    ids: NDArray[np.int64]  # special token's id, or PLAIN
    counts: NDArray[np.bool_]  # whether all of it is in the loss mask
    partial: NDArray[np.int64]  # plain texts of which a part is in the loss mask
    strings: list[str]
    starts: NDArray[np.int64]  # where they begin in the text of all rows
    opens: NDArray[np.bool_]  # whether it is the beginning of its row's text
    row_ends: NDArray[np.int64]  # of each row: pieces so far


class RowPieces:
    """The rows of a batch, taken apart.

    With `touching_counts` a token is in the loss mask that only touches a range of it, else one
    that begins in it.
    """

    def __init__(self, *, touching_counts: bool) -> None:
        self._touching = touching_counts
        self._strings: list[str] = []
        self._kinds: list[int] = []
        # Of each row: pieces so far, and characters before it.
        self._row_ends: list[int] = []
        self._row_starts: list[int] = []
        # Characters that count, of all rows together.
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._length = 0

    def add(self, row: RowText) -> None:
        """Take in a row; nothing is kept of one that cannot be encoded."""
        encoded(row.text)
        strings, kinds = self._strings, self._kinds
        base = self._length
        self._row_starts.append(base)
        length = len(row.text)
        for low, high in row.ranges:
            self._lows.append(base + low)
            self._highs.append(base + high)
        if row.before is not None:
            strings.append("")
            kinds.append(row.before)
        if row.cut is None:
            strings.append(row.text)
            kinds.append(PLAIN)
        else:
            strings += row.cut.strings
            kinds += row.cut.kinds
        if row.after is not None:
            # One character more, in the loss mask if the text has one that is.
            strings.append(" ")
            kinds.append(row.after)
            if row.ranges:
                self._lows.append(base + length)
                self._highs.append(base + length + 1)
            length += 1
        self._length = base + length
        self._row_ends.append(len(kinds))

    def plain_texts(self) -> TextBatch:
        """What is to be encoded, in order."""
        is_text = (self._layout.ids == PLAIN).tolist()
        pairs = zip(self._layout.strings, is_text, strict=True)
        return TextBatch.from_texts([string.encode() for string, wanted in pairs if wanted])

    def opening(self) -> NDArray[np.bool_]:
        """Of each plain text: whether its row begins with it."""
        opens: NDArray[np.bool_] = self._layout.opens[self._layout.ids == PLAIN]
        return opens

    def put_together(
        self,
        tokens: TokenBatch,
        boundaries: TextBoundaries | None,
        inner_boundaries: TextBoundaries | None,
    ) -> tuple[TokenBatch, NDArray[np.uint8]]:
        """Ids of the rows, special tokens in their places, and their loss mask.

        `inner_boundaries` are for plain texts that do not open their row.
        """
        layout = self._layout
        is_special = layout.ids != PLAIN
        lengths = np.ones(len(layout.ids), np.int64)
        lengths[~is_special] = tokens.lengths
        ends = np.append(0, np.cumsum(lengths))
        ids = np.empty(int(ends[-1]), np.uint32)
        from_text = np.ones(len(ids), bool)
        from_text[ends[:-1][is_special]] = False
        ids[from_text] = tokens.ids
        ids[~from_text] = layout.ids[is_special]
        mask = np.repeat(layout.counts.astype(np.uint8), lengths)
        partial = layout.partial
        firsts = np.searchsorted(self._highs, layout.starts[partial], side="right")
        if len(partial) and boundaries is not None and not self._touching:
            # Completions reach to the end of their text: all of them are looked for together.
            starts = layout.starts[partial]
            sizes = np.fromiter((len(layout.strings[piece]) for piece in partial), np.int64)
            alike = layout.opens[partial] & (np.array(self._highs)[firsts] >= starts + sizes)
            places = (np.array(self._lows)[firsts] - starts)[alike]
            texts = [layout.strings[piece] for piece in partial[alike].tolist()]
            lows, highs = ends[partial[alike]], ends[partial[alike] + 1]
            found = boundaries.beginnings(texts, places.tolist(), ids, lows, highs)
            for low, first, high in zip(lows.tolist(), found, highs.tolist(), strict=True):
                mask[low + first : high] = 1
            partial, firsts = partial[~alike], firsts[~alike]
        for piece, number in zip(partial.tolist(), firsts.tolist(), strict=True):
            text, start = layout.strings[piece], int(layout.starts[piece])
            low, own = int(ends[piece]), ids[ends[piece] : ends[piece + 1]]
            finder = boundaries if layout.opens[piece] else inner_boundaries
            assert finder is not None, "a part counts of a row that has no mask"
            while number < len(self._lows) and self._lows[number] < start + len(text):
                begin, end = self._lows[number] - start, self._highs[number] - start
                first, last = finder.tokens_in(
                    text, own, max(begin, 0), min(end, len(text)), touching=self._touching
                )
                mask[low + first : low + last] = 1
                number += 1
        return TokenBatch(ids, np.concatenate(([0], ends[layout.row_ends]))), mask

    @lazy
    def _layout(self) -> _Layout:
        """The pieces as columns; asked for when all rows are there."""
        kinds = np.array(self._kinds, np.int64)
        lengths = np.fromiter(map(len, self._strings), np.int64, count=len(self._strings))
        ends = np.cumsum(lengths)
        starts = ends - lengths
        is_plain = kinds == PLAIN
        kept = (kinds >= 0) | (is_plain & (lengths > 0))
        per_row = np.diff(np.array(self._row_ends, np.int64), prepend=0)
        opens = starts == np.repeat(np.array(self._row_starts, np.int64), per_row)
        # Of each piece: whether a range has a character of it, and whether one has all.
        touched = whole = np.zeros(len(starts), bool)
        if self._lows:
            lows, highs = np.array(self._lows, np.int64), np.array(self._highs, np.int64)
            first = np.minimum(np.searchsorted(highs, starts, side="right"), len(highs) - 1)
            low, high = lows[first], highs[first]
            touched, whole = (low < ends) & (high > starts), (low <= starts) & (high >= ends)
        pairs = zip(self._strings, kept.tolist(), strict=True)
        return _Layout(
            ids=kinds[kept],
            counts=np.where(is_plain, whole, touched)[kept],
            partial=np.flatnonzero((touched & ~whole & is_plain)[kept]),
            strings=[string for string, keep in pairs if keep],
            starts=starts[kept],
            opens=opens[kept],
            row_ends=np.concatenate(([0], np.cumsum(kept)))[self._row_ends],
        )


# Which tokens of a text are for a range of its characters.
#
# Fast engines give ids and no offsets. But tokens are bytes back to back: as long as the bytes of
# the first tokens are the first bytes of the text, the sum of their lengths is a place in it, and
# only the tokens in front of a boundary need a look. Where they are not (the tokenizer normalizes,
# or has a token for the unknown) the reference engine is asked for its offsets.

#
# `beginnings` does the same for a batch of prompts with their completions: all bytes of all tokens
# are compared with all texts at once. There the unknown has a place too: SentencePiece has one
# token for characters in a row that no piece has, so that they are one byte on both sides. And it
# may make a space of a line break, which is as long. What still differs is looked at alone.

_LONG_TOKEN = 64
# Stand for unknown characters in a row and between texts: bytes that UTF-8 does not have.
_UNKNOWN, _UNKNOWN_BYTE = "\udcff", b"\xff"
_BETWEEN, _BETWEEN_BYTE = "\udcfe", b"\xfe"
_IS_BREAK = np.isin(np.arange(256), list(b"\t\n\r"))
_MOST_HEADERS = 1024


class _Located(NamedTuple):
    """The first tokens of a text, up to one that ends after a place, in bytes or characters."""

    spans: list[Range]
    place: int
    content: bytes | str

    def holding(self) -> int:
        """The first token that ends after the place."""
        return bisect.bisect_right(self.spans, self.place, key=lambda span: span[1])

    def beginning(self) -> int:
        """The first token that begins at the place or after it."""
        return bisect.bisect_left(self.spans, self.place, key=lambda span: span[0])


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers start, start + 1, ... of each, `count` of them, back to back."""
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.repeat(starts - ends + counts, counts)
    return numbers + np.arange(len(numbers))


class TextBoundaries:
    """Finds tokens by characters."""

    def __init__(self, engine: CheckedEngine | Engine, reference: Engine) -> None:
        self._reference: Any = reference
        self._engine = engine
        self._bytes: dict[int, bytes] = {}
        # Ids of texts in front of a boundary: headers of answers are always the same.
        self._headers: dict[str, list[int]] = {}
        self._prefixed = self._added_before("a"), self._added_before(" a")
        self._front = tuple(" " * number for number in self._prefixed)
        # The text that was asked about last, its bytes, and the tokens of it that are known.
        self._text, self._data, self._spans = "", b"", list[Range]()
        self._offsets: list[Range] = []
        # Bytes of tokens back to back, and of each id where they begin and how many they are.
        self._pieces = bytearray()
        self._at, self._sizes = np.empty(0, np.int64), np.empty(0, np.int64)
        self._has_unknown = hasattr(reference, "is_unknown")
        # Which characters are unknown, of those that were asked about.
        self._characters: dict[str, bool] = {}
        self._unknown: re.Pattern[str] | None = None

    def tokens_in(
        self, text: str, ids: NDArray[np.uint32], start: int, end: int, *, touching: bool
    ) -> Range:
        """The tokens [first, last) of text[start:end].

        With `touching`, every token that has a character of it. Else those that begin in it, and
        one that crosses its start with spaces alone: the space before a word is part of its token.
        """
        first = self._first(text, ids, start, touching=touching) if start else 0
        last = len(ids) if end == len(text) else self._locate(text, ids, end).beginning()
        return first, last

    def _first(self, text: str, ids: NDArray[np.uint32], start: int, *, touching: bool) -> int:
        header = text[:start]
        known = self._headers.get(header)
        if known is not None:
            # Does the text begin with the known ids, and go on with the bytes of the next one?
            some = ids[: len(known) + 1].tolist()
            after = self._bytes.get(some[-1]) if len(some) > len(known) else None
            rest = text[start : start + len(after)] if after else ""
            if after and some[:-1] == known and rest.encode().startswith(after):
                return len(known)
        located = self._locate(text, ids, start)
        spans, place, content = located
        token = located.holding()
        ends_here = isinstance(content, bytes) and token < len(spans) and spans[token][0] == place
        if ends_here and len(header) <= _LONG_TOKEN and len(self._headers) < _MOST_HEADERS:
            self._headers[header] = ids[:token].tolist()
        if touching:
            return token
        first = located.beginning()
        if first and spans[first - 1][1] > place:
            before = content[max(spans[first - 1][0], 0) : place]
            first -= all(each in (ord(" "), " ") for each in before)
        return first

    def _locate(self, text: str, ids: NDArray[np.uint32], place: int) -> _Located:
        """The tokens up to a place; those before the last place of the same text are known."""
        if text is not self._text:
            self._text, self._data, self._spans, self._offsets = text, text.encode(), [], []
        target = len(text[:place].encode())
        if not self._offsets and self._follows(ids, target):
            return _Located(self._spans, target, self._data)
        self._offsets = self._offsets or self._reference.offsets(text)
        return _Located(self._offsets, place, text)

    def _follows(self, ids: NDArray[np.uint32], target: int) -> bool:
        """Go on until a token ends after the target; whether the tokens are the text's bytes."""
        spans, pieces, known = self._spans, [], self._bytes
        begin = position = spans[-1][1] if spans else -self._prefixed[self._data.startswith(b" ")]
        # Nearly every token has a byte at least.
        for token in ids[len(spans) :][: max(target - position, 0) + _LONG_TOKEN].tolist():
            if position > target:
                break
            piece = known.get(token)
            if piece is None:
                piece = known[token] = self._engine.token_bytes(token)
            pieces.append(piece)
            spans.append((position, position + len(piece)))
            position += len(piece)
        return self._data.startswith(b"".join(pieces)[max(-begin, 0) :], max(begin, 0))

    def beginnings(
        self,
        texts: list[str],
        places: list[int],
        ids: NDArray[np.uint32],
        lows: NDArray[np.int64],
        highs: NDArray[np.int64],
    ) -> list[int]:
        """The first token of each text[place:], as `tokens_in` finds it without `touching`.

        The tokens of a text are ids[low:high].
        """
        if not texts:
            return []
        found = self._match(texts, places, ids, lows, highs)
        missing = np.flatnonzero(found < 0)
        if len(missing) and self._learn("".join(texts[index] for index in missing)):
            some = [texts[index] for index in missing], [places[index] for index in missing]
            found[missing] = self._match(*some, ids, lows[missing], highs[missing])
        for index in np.flatnonzero(found < 0).tolist():
            own = ids[lows[index] : highs[index]]
            found[index] = self._first(texts[index], own, places[index], touching=False)
        firsts: list[int] = found.tolist()
        return firsts

    def _learn(self, text: str) -> bool:
        """Find out which characters are unknown; whether any is that was not known to be."""
        if not self._has_unknown:
            return False
        new = set(text) - self._characters.keys()
        self._characters |= {each: self._reference.is_unknown(each) for each in new}
        unknown = "".join(each for each, is_so in self._characters.items() if is_so)
        self._unknown = re.compile(f"[{re.escape(unknown)}]+") if unknown else None
        return any(self._characters[each] for each in new)

    def _match(
        self,
        texts: list[str],
        places: list[int],
        ids: NDArray[np.uint32],
        lows: NDArray[np.int64],
        highs: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """The same where the tokens are the text's bytes, else -1."""
        halves = list[str]()
        for text, place in zip(texts, places, strict=True):
            if self._has_unknown and text[0].isspace():
                halves += "", ""  # left out by the package, or not: to be looked at alone
            else:
                halves += self._front[text.startswith(" ")] + text[:place], text[place:]
        joined = _BETWEEN.join(halves)
        if self._unknown is not None:
            joined = self._unknown.sub(_UNKNOWN, joined)
        parts = joined.encode(errors="surrogateescape").split(_BETWEEN_BYTE)
        found = np.full(len(texts), -1, np.int64)
        before, after = np.fromiter(map(len, parts), np.int64, count=len(parts)).reshape(-1, 2).T
        sizes = before + after
        # Of texts that have as many bytes as their tokens, all tokens.
        counts = highs - lows
        chosen = ids[_ranges(lows, counts)]
        lengths = self._lengths_of(chosen)
        ends = np.append(0, np.cumsum(lengths))[np.append(0, np.cumsum(counts))]
        fits = (np.diff(ends) == sizes) & (sizes > 0)
        if not fits.any():
            return found
        chosen, lengths = (each[np.repeat(fits, counts)] for each in (chosen, lengths))
        data = np.frombuffer(b"".join(itertools.compress(parts, np.repeat(fits, 2))), np.uint8)
        own = np.frombuffer(self._pieces, np.uint8)[_ranges(self._at[chosen], lengths)]
        differs = own != data
        if self._has_unknown:
            differs &= (own != ord(" ")) | ~_IS_BREAK[data]
        begins = np.append(0, np.cumsum(sizes[fits]))
        is_same = np.ones(len(begins) - 1, bool)
        is_same[np.searchsorted(begins, np.flatnonzero(differs), side="right") - 1] = False
        # The first token that begins at the place or after it, or crosses it with spaces alone.
        marks = begins[:-1] + before[fits]
        token_ends = np.cumsum(lengths)
        token_starts = token_ends - lengths
        first = np.searchsorted(token_starts, marks)
        others = np.append(0, np.cumsum(data != ord(" ")))
        last = np.maximum(first - 1, 0)
        from_spaces = others[marks] == others[token_starts[last]]
        first -= (first > 0) & (token_ends[last] > marks) & from_spaces
        first -= np.append(0, np.cumsum(counts[fits]))[:-1]
        found[fits] = np.where(is_same, first, -1)
        return found

    def _lengths_of(self, ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Bytes of each token, which are in `_pieces` from then on."""
        short = int(ids.max(initial=0)) + 1 - len(self._at)
        if short > 0:
            self._at = np.append(self._at, np.full(short, -1, np.int64))
            self._sizes = np.append(self._sizes, np.zeros(short, np.int64))
        unknown_id = self._reference.unknown_id if self._has_unknown else None
        for token in set(ids[self._at[ids] < 0].tolist()):
            piece = _UNKNOWN_BYTE if token == unknown_id else self._engine.token_bytes(token)
            self._at[token], self._sizes[token] = len(self._pieces), len(piece)
            self._pieces += piece
        lengths: NDArray[np.int64] = self._sizes[ids]
        return lengths

    def _added_before(self, text: str) -> int:
        """Bytes that the tokenizer puts in front of a text: one for SentencePiece's first space."""
        ids = self._reference.encode(TextBatch.from_texts([text])).ids.tolist()
        joined = b"".join(self._engine.token_bytes(token) for token in ids)
        return int(joined == b" " + text.encode())


@dataclass(frozen=True, slots=True)
class Shaped:
    """Rows of a batch, ready to be encoded."""

    pieces: RowPieces
    rows: NDArray[np.int64]
    texts: list[str]  # what each row became, from which its split follows
    rejects: tuple[Reject, ...]


class Shaper:
    """Makes documents of rows, by one maker."""

    def __init__(
        self,
        shape: RowShape,
        engine: CheckedEngine,
        *,
        bos: int | None = None,
        eos: int | None = None,
        reject_special: bool = False,
    ) -> None:
        """`bos` and `eos` frame a prompt and its completion; a chat has what its template says."""
        self._shape = shape
        specials = "|".join(map(re.escape, engine.info.special_tokens)) or "(?!)"
        self._refused = re.compile(specials) if reject_special else None
        self._inner: Engine | None = None
        self._make: Callable[[dict[str, Any]], RowText]
        if shape.format != "chat":
            self._make = field_maker(shape, bos=bos, eos=eos)
        else:
            self._make = ChatMaker(engine.info, shape)
            self._inner = load_inner(engine.info)
        # Texts without a mask have no boundaries to find.
        self._boundaries = TextBoundaries(engine, engine.reference) if shape.has_mask else None
        self._inner_boundaries = self._boundaries
        if self._inner is not None:
            self._inner_boundaries = TextBoundaries(self._inner, self._inner)

    @property
    def naming_options(self) -> str:
        """The options by which a user says which fields a row has."""
        if self._shape.template is not None:
            return "the names in --template"
        named = {"chat": "--messages-field"}
        return named.get(self._shape.format, "--prompt-field and --completion-field")

    def shape(self, texts: TextBatch, rows: NDArray[np.int64]) -> Shaped:
        """Read and render the rows; those that cannot be used come back as rejects."""
        pieces = RowPieces(touching_counts=self._shape.format == "chat")
        kept: list[int] = []
        made: list[str] = []
        rejects: list[Reject] = []
        data = texts.data[texts.offsets[0] : texts.offsets[-1]].tobytes()
        bounds = (texts.offsets - texts.offsets[0]).tolist()
        for row, (start, end) in zip(rows.tolist(), itertools.pairwise(bounds), strict=True):
            try:
                text = self._make(parse_row(data[start:end]))
                if self._refused is not None and self._refused.search(text.text):
                    why = "the text contains the string of a special token"
                    raise RowError(RejectReason.SPECIAL_TOKEN, why)
                pieces.add(text)
            except RowError as error:
                rejects.append(Reject(row, error.reason, error.detail))
            else:
                kept.append(row)
                made.append(text.text)
        rows = np.array(kept, np.int64)
        return Shaped(pieces, rows, made, tuple(rejects))

    def encode(self, shaped: Shaped, encode: Callable[[TextBatch], TokenBatch]) -> TokenBatch:
        """Ids of all plain texts of the rows."""
        plain_texts = shaped.pieces.plain_texts()
        if not len(plain_texts):
            return TokenBatch.from_lists([])
        if self._inner is None or (opens := shaped.pieces.opening()).all():
            return encode(plain_texts)
        parts = iter(encode(plain_texts.take(np.flatnonzero(opens))))
        inner = iter(self._inner.encode(plain_texts.take(np.flatnonzero(~opens))))
        return TokenBatch.from_lists([next(parts if opens_row else inner) for opens_row in opens])

    def assemble(self, shaped: Shaped, tokens: TokenBatch) -> TokenBatch:
        """The rows, whole, with their loss masks; rows of one text have none."""
        joined, mask = shaped.pieces.put_together(tokens, self._boundaries, self._inner_boundaries)
        return TokenBatch(joined.ids, joined.offsets, mask if self._shape.has_mask else None)


def needed_fields(shape: RowShape | None) -> tuple[tuple[str, ...], bool]:
    """The fields to read, and whether all of them must be there; none for one text per row."""
    if shape is None or not shape.has_fields:
        return (), True
    if shape.format == "chat":
        return shape.chat_fields, False
    named = [text for is_field, text in field_template(shape) if is_field]
    return tuple(dict.fromkeys(named)), True


def refuse_plain_text(files: Sequence[SourceFile], shape: RowShape | None) -> None:
    """Raise for text files, which have no fields."""
    if shape is None or not shape.has_fields:
        return
    titles = [form.title for form in FORMATS.values() if form.has_fields]
    for file in files:
        if not file.traits.has_fields:
            path = file.members[0].path if file.members else file.path
            raise SourceError(
                f"{path!r} is a {file.traits.title} file, and rows of the format "
                f"{shape.format!r} have fields",
                hint=f"name {', '.join(titles[:-1])} or {titles[-1]} files, such as: data/*.jsonl",
            )
