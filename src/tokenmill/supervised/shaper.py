"""Batches of rows in, batches of ids and masks out: the one thing the build needs to know.

shaped = shaper.shape(texts, rows)            rows as JSON -> plain texts, rejects
tokens = shaper.encode(shaped, encode)        by the engine, all plain texts in one call
documents = shaper.assemble(shaped, tokens)   ids and masks, row by row

Rows of fields are columns all the way: no row of them is a Python object. Chats are rendered one by
one.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tokenmill.engines.base import Engine, SpecialTokens, TokenizerInfo, nested_steps
from tokenmill.engines.parity import SpecialText
from tokenmill.engines.references import HuggingFaceEngine
from tokenmill.errors import UsageError
from tokenmill.records import Reject, RejectReason, TextBatch, TokenBatch, lazy
from tokenmill.sources.columns import flat_array, is_utf8, text_batch
from tokenmill.sources.lines import FieldReader
from tokenmill.supervised.chat import PLAIN, ChatMaker, PieceCut
from tokenmill.supervised.fim import Fim, FimTokens, fim_tokens, reordered
from tokenmill.supervised.pairs import join_sides, read_sides
from tokenmill.supervised.rows import (
    MOST_NESTED,
    Range,
    RowError,
    RowText,
    encoded,
    parse_row,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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


# The fields of a batch of rows are read at once, as the texts of JSON Lines are (see
# `sources.lines`): by the part in C, which leaves rows in doubt to Python. Or by Arrow: each row
# begins and ends with a brace, line breaks are between rows, and there are as many values as rows.
# Where Arrow refuses them they are halved until few are left, which Python reads one by one. It
# also reads those on which the two might not agree: fields that are no strings, numbers of too many
# digits, deep nesting, and infinities that only Arrow knows.

_FEW_ROWS = 64
_LONG_ROW = 4096  # bytes: Python has no numbers of more than 4,300 digits
_ODD_NUMBERS, _AFTER_NUMBERS = (b"Inf", b"-NaN"), b" \t\r\n,]}"
_OPEN, _CLOSE, _LIST, _NEWLINE, _RETURN = b"{}[\n\r"
_NO_TEXTS = pa.nulls(0, pa.large_binary())


class FieldMaker:
    """Makes texts of rows: a template filled with their fields, and where completions begin."""

    def __init__(
        self, shape: RowShape, *, bos: int | None, eos: int | None, refused: Collection[str]
    ) -> None:
        """A text with one of the strings that are `refused` is rejected."""
        self._template = field_template(shape)
        self._bos, self._eos = bos, eos
        self._refused = SpecialText(refused)
        self._is_refused = re.compile(
            "|".join(map(re.escape, filter(None, refused))) or "(?!)"
        ).search
        # Everything from the completion on is what the model is to say.
        self._first: int | None = None
        if shape.format == "prompt-completion":
            self._first = self._template.index((True, shape.completion_field))
        fields = dict.fromkeys(text for is_field, text in self._template if is_field)
        self._reader = FieldReader.of(self._template, first=self._first)
        # Names with dots have rules of their own.
        self._schema: Any = None
        if not any("." in field for field in fields):
            self._schema = pa.schema([(field, pa.large_string()) for field in fields])

    def make(
        self, rows: TextBatch
    ) -> tuple[FieldTexts, TextBatch, NDArray[np.int64], dict[int, RowError]]:
        """Rows that can be used, their texts, which ones these are, and why others cannot."""
        read = self._by_arrow if self._reader is None else self._by_reader
        numbers, texts, places = read(rows)
        batch, wrong = text_batch(texts), dict[int, RowError]()
        for place in np.flatnonzero(self._refused.find(batch)).tolist():
            wrong[place] = _holds_special()
        if self._first is not None:
            for place in np.flatnonzero((places == batch.lengths) & (places > 0)).tolist():
                wrong[place] = _no_completion()
        refused = {int(numbers[place]): why for place, why in wrong.items()}
        if len(numbers) < len(rows) or refused:
            kept = np.setdiff1d(np.arange(len(numbers)), list(wrong))
            alone, found = list[int](), list[tuple[bytes, int]]()
            for number in np.setdiff1d(np.arange(len(rows)), numbers).tolist():
                try:
                    found.append(self._by_python(rows.bytes_at(number)))
                    alone.append(number)
                except RowError as error:
                    refused[number] = error
            others = pa.array([text for text, _ in found], pa.large_binary())
            numbers = np.append(numbers[kept], np.array(alone, np.int64))
            places = np.append(places[kept], np.array([place for _, place in found], np.int64))
            order = np.argsort(numbers)
            texts = pa.concat_arrays([texts.take(pa.array(kept)), others]).take(pa.array(order))
            batch, numbers, places = text_batch(texts), numbers[order], places[order]
        if self._first is None:
            return FieldTexts(batch), batch, numbers, refused
        return FieldTexts(batch, places, self._bos, self._eos), batch, numbers, refused

    def _by_python(self, line: bytes) -> tuple[bytes, int]:
        """The text of a row, and how many bytes are before its completion."""
        row = parse_row(line)
        parts = [text_of(row, text) if is_field else text for is_field, text in self._template]
        text, before = "".join(parts), "".join(parts[: self._first])
        if self._first is not None and text and len(before) == len(text):
            raise _no_completion()
        if self._is_refused(text):
            raise _holds_special()
        return encoded(text), len(before.encode())

    def _by_reader(self, rows: TextBatch) -> tuple[NDArray[np.int64], Any, NDArray[np.int64]]:
        """The same as by Arrow."""
        assert self._reader is not None
        if not is_utf8(rows.data.data[rows.offsets[0] : rows.offsets[-1]]):
            return np.empty(0, np.int64), _NO_TEXTS, np.empty(0, np.int64)
        found = self._reader.read(rows.data, rows.offsets[:-1], rows.offsets[1:])
        is_read, ends = found.is_read, found.texts.offsets
        # What was not read is empty: without its end the others are as they were.
        texts = TextBatch(found.texts.data, np.append(0, ends[1:][is_read]))
        texts = flat_array(texts).view(pa.large_binary())
        return np.flatnonzero(is_read), texts, found.places[is_read]

    def _by_arrow(self, rows: TextBatch) -> tuple[NDArray[np.int64], Any, NDArray[np.int64]]:
        """Numbers, texts and bytes before the completion of rows that Arrow reads."""
        numbers, lines = _plain_rows(rows) if self._schema else (np.empty(0, np.int64), rows)
        read, table = self._table(lines) if len(numbers) else (numbers, None)
        if table is None:
            return np.empty(0, np.int64), _NO_TEXTS, np.empty(0, np.int64)
        numbers = numbers[read]
        if any(column.null_count for column in table.columns):
            is_whole = functools.reduce(pc.and_, map(pc.is_valid, table.columns))
            numbers, table = numbers[is_whole.to_numpy()], table.filter(is_whole)
        parts = [
            _single(table.column(text)) if is_field else pa.scalar(text, pa.large_string())
            for is_field, text in self._template
        ]
        places = np.zeros(len(numbers), np.int64)
        for (is_field, text), part in zip(self._template[: self._first], parts, strict=False):
            places += text_batch(part).lengths if is_field else len(text.encode())
        nothing = pa.scalar("", pa.large_string())
        texts = pc.binary_join_element_wise(*parts, nothing)
        return numbers, texts.view(pa.large_binary()), places

    def _table(self, lines: TextBatch) -> tuple[NDArray[np.int64], Any]:
        """The fields of rows as columns, and which rows those are."""
        low, high = int(lines.offsets[0]), int(lines.offsets[-1])
        try:
            table = pj.read_json(
                pa.BufferReader(pa.py_buffer(lines.data[low:high])),
                read_options=pj.ReadOptions(use_threads=False, block_size=high - low + 1),
                parse_options=pj.ParseOptions(
                    explicit_schema=self._schema, unexpected_field_behavior="ignore"
                ),
            )
        except MemoryError:
            raise
        except pa.ArrowException:
            table = None
        if table is not None and table.num_rows == len(lines):
            return np.arange(len(lines)), table
        if len(lines) <= _FEW_ROWS:
            return np.empty(0, np.int64), self._schema.empty_table()
        middle = len(lines) // 2
        first, one = self._table(TextBatch(lines.data, lines.offsets[: middle + 1]))
        second, other = self._table(TextBatch(lines.data, lines.offsets[middle:]))
        return np.append(first, second + middle), pa.concat_tables([one, other])


def _single(column: Any) -> Any:
    # combine_chunks() would copy even a single chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _no_completion() -> RowError:
    # The end token alone could be learned; an answer that is missing is far more likely.
    return RowError(RejectReason.NOTHING_TO_TRAIN, "the completion is empty")


def _holds_special() -> RowError:
    why = "the text contains the string of a special token"
    return RowError(RejectReason.SPECIAL_TOKEN, why)


def _plain_rows(rows: TextBatch) -> tuple[NDArray[np.int64], TextBatch]:
    """Rows that Arrow may read, and each of them with a line break at its end."""
    data = rows.data[rows.offsets[0] : rows.offsets[-1]]
    offsets = rows.offsets - rows.offsets[0]
    raw = data.tobytes()
    if len(raw) <= 2 or not is_utf8(raw):
        return np.empty(0, np.int64), rows
    lengths = rows.lengths
    is_plain = (lengths > 2) & (lengths <= _LONG_ROW)
    firsts, lasts = np.minimum(offsets[:-1], len(data) - 1), np.maximum(offsets[1:] - 1, 2)
    ends_line = data[lasts] == _NEWLINE
    for space in (_NEWLINE, _RETURN):
        lasts = lasts - (data[lasts] == space)
    is_plain &= (data[firsts] == _OPEN) & (data[lasts] == _CLOSE)
    is_bracket = (data == _OPEN) | (data == _LIST)
    if np.count_nonzero(is_bracket) >= np.count_nonzero(is_plain) + MOST_NESTED:
        counts = np.diff(np.searchsorted(np.flatnonzero(is_bracket), offsets))
        is_plain &= counts <= MOST_NESTED
    for number in _ODD_NUMBERS:
        at = raw.find(number)
        while at >= 0:
            if raw[at + len(number) : at + len(number) + 1] in _AFTER_NUMBERS:
                is_plain[np.searchsorted(offsets, at, side="right") - 1] = False
            at = raw.find(number, at + 1)
    numbers = np.flatnonzero(is_plain)
    if len(numbers) == len(rows) and ends_line[:-1].all():
        return numbers, rows
    lines = [raw[a:b] + b"\n" for a, b in zip(offsets[numbers], offsets[numbers + 1], strict=True)]
    return numbers, TextBatch.from_texts(lines)


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

    A token is in the loss mask that only touches a range of it.
    """

    def __init__(self) -> None:
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
        for low, high in row.ranges:
            self._lows.append(base + low)
            self._highs.append(base + high)
        strings += row.cut.strings
        kinds += row.cut.kinds
        self._length = base + len(row.text)
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
        for piece, number in zip(partial.tolist(), firsts.tolist(), strict=True):
            text, start = layout.strings[piece], int(layout.starts[piece])
            low, own = int(ends[piece]), ids[ends[piece] : ends[piece + 1]]
            finder = boundaries if layout.opens[piece] else inner_boundaries
            assert finder is not None, "a part counts of a row that has no mask"
            while number < len(self._lows) and self._lows[number] < start + len(text):
                begin, end = self._lows[number] - start, self._highs[number] - start
                first, last = finder.tokens_in(
                    text, own, max(begin, 0), min(end, len(text)), touching=True
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


@dataclass(frozen=True, slots=True)
class FieldTexts:
    """Rows that are one text each."""

    texts: TextBatch
    # Bytes in front of each completion; None where there is none.
    places: NDArray[np.int64] | None = None
    # Around texts that are not empty; the first does not count, the last does.
    before: int | None = None
    after: int | None = None

    def plain_texts(self) -> TextBatch:
        """What is to be encoded, in order."""
        is_empty = self.texts.lengths == 0
        texts, marks = self.texts, self.places
        if is_empty.any():
            texts = texts.take(np.flatnonzero(~is_empty))
            marks = None if marks is None else marks[~is_empty]
        return replace(texts, marks=marks)

    def opening(self) -> NDArray[np.bool_]:
        """Of each plain text: whether its row begins with it."""
        return np.ones(int(np.count_nonzero(self.texts.lengths)), bool)

    def put_together(
        self,
        tokens: TokenBatch,
        boundaries: TextBoundaries | None,
        inner_boundaries: TextBoundaries | None,  # noqa: ARG002
    ) -> tuple[TokenBatch, NDArray[np.uint8]]:
        """Ids of the rows, framed, and their loss mask."""
        filled = self.texts.lengths > 0
        has_before, has_after = self.before is not None, self.after is not None
        lengths = tokens.lengths + has_before + has_after
        ends = np.cumsum(lengths)
        ids = np.empty(int(ends[-1]) if len(ends) else 0, np.uint32)
        from_text = np.ones(len(ids), bool)
        if self.before is not None:
            from_text[ends - lengths] = False
            ids[ends - lengths] = self.before
        if self.after is not None:
            from_text[ends - 1] = False
            ids[ends - 1] = self.after
        ids[from_text] = tokens.ids
        of_rows = np.zeros(len(filled), np.int64)
        of_rows[filled] = lengths
        joined = TokenBatch(ids, np.append(0, np.cumsum(of_rows)))
        if self.places is None or boundaries is None:
            return joined, np.zeros(len(ids), np.uint8)
        first = boundaries.beginnings(self.plain_texts(), self.places[filled], tokens) + has_before
        counts = np.stack([first, lengths - first], axis=1).ravel()
        return joined, np.repeat(np.tile(np.array([0, 1], np.uint8), len(lengths)), counts)


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
# Stand for unknown characters in a row, and for no text: bytes that UTF-8 does not have.
_UNKNOWN, _NEVER = b"\xff", b"\xfe"
_SPACE = ord(" ")
_IS_BREAK = np.isin(np.arange(256), list(b"\t\n\r"))
_MOST_HEADERS = 1024
# UTF-8 of white space, as little-endian numbers, by its length.
_SPACES: dict[int, list[int]] = {}
for _each in filter(str.isspace, map(chr, range(0x3001))):
    _SPACES.setdefault(len(_each.encode()), []).append(int.from_bytes(_each.encode(), "little"))


def _begins_with_space(data: NDArray[np.uint8], begins: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each text, whether it begins with white space; of short ones, whether it may."""
    found, code = np.zeros(len(begins), bool), np.zeros(len(begins), np.int64)
    for number, spaces in sorted(_SPACES.items()):
        at = np.minimum(begins + number - 1, len(data) - 1)
        code |= data[at].astype(np.int64) << 8 * (number - 1)
        found |= np.isin(code, spaces)
    return found


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


class TextBoundaries:
    """Finds tokens by characters."""

    def __init__(self, engine: CheckedEngine | Engine, reference: Engine) -> None:
        self._reference: Any = reference
        self._engine = engine
        self._bytes: dict[int, bytes] = {}
        # Ids of texts in front of a boundary: headers of answers are always the same.
        self._headers: dict[str, list[int]] = {}
        # The text that was asked about last, its bytes, and the tokens of it that are known.
        self._text, self._data, self._spans = "", b"", list[Range]()
        self._offsets: list[Range] = []
        # Bytes of the tokens that were met, as an array of Arrow's too, and the place of each id.
        self._pieces: list[bytes] = []
        self._table = pa.array([], pa.large_binary())
        self._places = np.empty(0, np.int64)
        self._has_unknown = hasattr(reference, "is_unknown")
        # Which characters are unknown, of those that were asked about, and UTF-8 of those that are.
        self._characters: dict[str, bool] = {}
        self._unknown: list[bytes] = []

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
        self, texts: TextBatch, places: NDArray[np.int64], tokens: TokenBatch
    ) -> NDArray[np.int64]:
        """The first token of each text from a place on, as `tokens_in` finds it without `touching`.

        Places are in bytes, and no text is empty.
        """
        known = tokens.ids_before
        found = self._match(texts, places, tokens) if known is None else known.copy()
        if known is not None and len(missing := np.flatnonzero(found < 0)):
            some = TokenBatch.from_lists([tokens[index] for index in missing])
            found[missing] = self._match(texts.take(missing), places[missing], some)
        missing = np.flatnonzero(found < 0)
        if len(missing) and self._learn(texts.take(missing)):
            some = TokenBatch.from_lists([tokens[index] for index in missing])
            found[missing] = self._match(texts.take(missing), places[missing], some)
        for index in np.flatnonzero(found < 0).tolist():
            data = texts.bytes_at(index)
            place = len(data[: places[index]].decode())
            found[index] = self._first(data.decode(), tokens[index], place, touching=False)
        return found

    def _learn(self, texts: TextBatch) -> bool:
        """Find out which characters are unknown; whether any is that was not known to be."""
        if not self._has_unknown:
            return False
        new = set().union(*texts.texts()) - self._characters.keys()
        self._characters |= {each: self._reference.is_unknown(each) for each in new}
        self._unknown = [each.encode() for each, is_so in self._characters.items() if is_so]
        return any(self._characters[each] for each in new)

    def _match(
        self, texts: TextBatch, places: NDArray[np.int64], tokens: TokenBatch
    ) -> NDArray[np.int64]:
        """The same where the tokens are the text's bytes, else -1."""
        found = np.where(places == 0, 0, -1)
        low, high = texts.offsets[0], texts.offsets[-1]
        data, begins = texts.data[low:high], texts.offsets - low
        usable = found < 0
        if self._has_unknown:
            usable &= ~_begins_with_space(data, begins[:-1])  # which may be left out, or not
        # The tokenizer puts a space in front of these texts, which is left out here.
        has_front = np.array(self._prefixed, bool)[(data[begins[:-1]] == _SPACE).astype(np.int64)]
        data, begins, marks = self._without_unknown(data, begins, begins[:-1] + places)
        sizes, before = np.diff(begins), marks - begins[:-1]
        # Of texts that have as many bytes as their tokens, all tokens.
        own = self._bytes_of(tokens, has_front)
        own_sizes = np.diff(own.offsets[tokens.offsets])
        usable &= own_sizes == sizes
        if not usable.any():
            return found
        own_data, bounds = own.data[: own.offsets[-1]], own.offsets
        if not usable.all():
            data, own_data = data[np.repeat(usable, sizes)], own_data[np.repeat(usable, own_sizes)]
            bounds = np.append(0, np.cumsum(own.lengths[np.repeat(usable, tokens.lengths)]))
        begins = np.append(0, np.cumsum(sizes[usable]))
        differs = np.flatnonzero(own_data != data)
        if self._has_unknown:
            differs = differs[(own_data[differs] != _SPACE) | ~_IS_BREAK[data[differs]]]
        is_same = np.ones(len(begins) - 1, bool)
        is_same[np.searchsorted(begins, differs, side="right") - 1] = False
        # The first token that begins at the place or after it, or crosses it with spaces alone.
        marks = begins[:-1] + before[usable]
        first = np.searchsorted(bounds[:-1], marks)
        crossing = np.flatnonzero(bounds[first] > marks)
        at = bounds[first[crossing] - 1]
        while len(crossing):
            is_space = data[at] == _SPACE
            crossing, at = crossing[is_space], at[is_space] + 1
            is_there = at == marks[crossing]
            first[crossing[is_there]] -= 1
            crossing, at = crossing[~is_there], at[~is_there]
        first -= np.append(0, np.cumsum(tokens.lengths[usable]))[:-1]
        found[usable] = np.where(is_same, first, -1)
        return found

    def _without_unknown(
        self, data: NDArray[np.uint8], begins: NDArray[np.int64], marks: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """The bytes with one in place of unknown characters in a row, and where texts begin then.

        The marks are such places too.
        """
        raw = data.tobytes() if self._unknown else b""
        codes = [code for code in self._unknown if code in raw]
        if not codes:
            return data, begins, marks
        # A table of bytes is several times as fast as one of numpy's.
        leads = bytes(byte in {code[0] for code in codes} for byte in range(256))
        may_be = np.flatnonzero(np.frombuffer(raw.translate(leads), bool))
        starts, ends = np.empty(0, np.int64), np.empty(0, np.int64)
        for code in codes:
            at = may_be
            for number, byte in enumerate(code):
                at = at[data[at + number] == byte]
            starts, ends = np.append(starts, at), np.append(ends, at + len(code))
        order = np.argsort(starts)
        starts, ends = starts[order], ends[order]
        goes_on = np.append(False, starts[1:] == ends[:-1])
        fixed = np.append(np.stack([begins[:-1], marks], axis=1), begins[-1])
        goes_on[goes_on] = fixed[np.searchsorted(fixed, starts[goes_on])] != starts[goes_on]
        starts, ends = starts[~goes_on], ends[np.append(~goes_on[1:], True)]
        others = zip([0, *ends.tolist()], [*starts.tolist(), len(raw)], strict=True)
        joined = _UNKNOWN.join([raw[a:b] for a, b in others])
        fewer = np.append(0, np.cumsum(ends - starts - 1))
        begins, marks = (each - fewer[np.searchsorted(starts, each)] for each in (begins, marks))
        return np.frombuffer(joined, np.uint8), begins, marks

    def _bytes_of(self, tokens: TokenBatch, has_front: NDArray[np.bool_]) -> TextBatch:
        """The bytes of each token, those of texts with a space in front without it."""
        ids = tokens.ids
        short = int(ids.max(initial=0)) + 1 - len(self._places)
        if short > 0:
            self._places = np.append(self._places, np.full(short, -1, np.int64))
        new = np.unique(ids[self._places[ids] < 0])
        if len(new):
            unknown = self._reference.unknown_id if self._has_unknown else None
            self._places[new] = len(self._pieces) + 2 * np.arange(len(new))
            for token in new.tolist():
                piece = _UNKNOWN if token == unknown else self._engine.token_bytes(token)
                # As it is, and without a space that must be in front.
                self._pieces += piece, piece[1:] if piece.startswith(b" ") else _NEVER
            self._table = pa.array(self._pieces, pa.large_binary())
        places = self._places[ids]
        places[tokens.offsets[:-1][has_front & (tokens.lengths > 0)]] += 1
        return text_batch(self._table.take(pa.array(places)))

    @lazy
    def _prefixed(self) -> tuple[int, int]:
        """Found out when rows are there: the reference may still be being loaded before."""
        return self._added_before("a"), self._added_before(" a")

    def _added_before(self, text: str) -> int:
        """Bytes that the tokenizer puts in front of a text: one for SentencePiece's first space."""
        ids = self._reference.encode(TextBatch.from_texts([text])).ids.tolist()
        joined = b"".join(self._engine.token_bytes(token) for token in ids)
        return int(joined == b" " + text.encode())


@dataclass(frozen=True, slots=True)
class Shaped:
    """Rows of a batch, ready to be encoded."""

    pieces: RowPieces | FieldTexts
    rows: NDArray[np.int64]
    texts: TextBatch  # what each row became, from which its split follows
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
        refused = list(engine.info.special_tokens) if reject_special else []
        self._inner: Engine | None = None
        self._fields: FieldMaker | None = None
        self._chats: ChatMaker | None = None
        self._fim: tuple[Fim, FimTokens] | None = None
        self._special = SpecialText(refused)
        if shape.is_chat:
            self._chats = ChatMaker(engine.info, shape)
        elif shape.has_fields and not shape.has_pairs:
            self._fields = FieldMaker(shape, bos=bos, eos=eos, refused=refused)
        if shape.fim:
            self._fim = Fim(shape), fim_tokens(engine.info)
        self._frame = bos, eos
        if shape.is_chat or shape.fim:
            self._inner = load_inner(engine.info)
        self._refused = re.compile("|".join(map(re.escape, refused))) if refused else None
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
        if self._shape.has_pairs:
            return "--prompt-field, --chosen-field and --rejected-field"
        named = {"chat": "--messages-field"}  # others have a prompt and a completion
        return named.get(self._shape.format, "--prompt-field and --completion-field")

    def shape(self, texts: TextBatch, rows: NDArray[np.int64]) -> Shaped:
        """Read and render the rows; those that cannot be used come back as rejects."""
        make: Any = self._plain
        if self._shape.has_pairs:
            make = self._pairs
        elif self._chats is not None:
            make = self._render
        elif self._fields is not None:
            make = self._fields.make
        pieces, made, kept, refused = make(texts)
        if self._fim is not None:
            pieces = self._reordered(made, *self._fim)
        rejects = tuple(
            Reject(int(rows[number]), why.reason, why.detail) for number, why in refused.items()
        )
        return Shaped(pieces, rows[kept], made, rejects)

    def _pairs(
        self, texts: TextBatch
    ) -> tuple[RowPieces, TextBatch, NDArray[np.int64], dict[int, RowError]]:
        """Of each row its prompt and both sides with it, taken apart."""
        pieces, kept, made = RowPieces(), list[int](), list[str]()
        refused: dict[int, RowError] = {}
        for number in range(len(texts)):
            try:
                row = parse_row(texts.bytes_at(number))
                sides = self._sides(row) if self._chats is None else self._chats.sides(row)
                if self._refused is not None and any(self._refused.search(s.text) for s in sides):
                    raise _holds_special()
                for side in sides:
                    encoded(side.text)
            except RowError as error:
                refused[number] = error
                continue
            for side in sides:
                pieces.add(side)
            kept.append(number)
            prompt, chosen, rejected = (side.text for side in sides)
            made.append(chosen + rejected.removeprefix(prompt))
        return pieces, TextBatch.from_texts(made), np.array(kept, np.int64), refused

    def _sides(self, row: dict[str, Any]) -> list[RowText]:
        """Texts of a pair, with their boundary tokens; a prompt has no end."""
        (bos, eos), sides = self._frame, []
        for number, text in enumerate(read_sides(row, self._shape)):
            ends = None if number == 0 else eos
            framed = [("", bos), (text, PLAIN), ("", ends)]
            cut = [(string, kind) for string, kind in framed if kind is not None]
            sides.append(RowText(text, (), PieceCut([s for s, _ in cut], [k for _, k in cut])))
        return sides

    def _plain(
        self, texts: TextBatch
    ) -> tuple[FieldTexts, TextBatch, NDArray[np.int64], dict[int, RowError]]:
        """Texts as they are, but for those with the string of a special token."""
        refused = {
            at: _holds_special() for at in np.flatnonzero(self._special.find(texts)).tolist()
        }
        kept = np.setdiff1d(np.arange(len(texts)), list(refused))
        texts = texts.take(kept) if refused else texts
        return FieldTexts(texts), texts, kept, refused

    def _reordered(self, texts: TextBatch, fim: Fim, tokens: FimTokens) -> RowPieces:
        """Texts of which some are cut in three and put together in another order."""
        pieces = RowPieces()
        for place in range(len(texts)):
            spans, text = fim.spans(texts.bytes_at(place)), texts.text_at(place)
            if spans is None:
                pieces.add(RowText(text, (), PieceCut([text], [PLAIN])))
            else:
                pieces.add(reordered(text, spans, tokens))
        return pieces

    def _render(
        self, texts: TextBatch
    ) -> tuple[RowPieces, TextBatch, NDArray[np.int64], dict[int, RowError]]:
        """Chats taken apart, their texts, which ones these are, and why others cannot be used."""
        assert self._chats is not None
        pieces, kept, made = RowPieces(), list[int](), list[str]()
        refused: dict[int, RowError] = {}
        for number in range(len(texts)):
            try:
                text = self._chats(parse_row(texts.bytes_at(number)))
                if self._refused is not None and self._refused.search(text.text):
                    raise _holds_special()
                pieces.add(text)
            except RowError as error:
                refused[number] = error
            else:
                kept.append(number)
                made.append(text.text)
        return pieces, TextBatch.from_texts(made), np.array(kept, np.int64), refused

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
        if self._shape.has_pairs:
            return join_sides(joined)
        return TokenBatch(joined.ids, joined.offsets, mask if self._shape.has_mask else None)
