"""A fast engine held to its reference: the only form in which the rest of tokenmill sees one.

Agreement is kept on four levels. `FastEngine.covers` decides by the tokenizer's settings;
`check_probes` by fixed texts when the engine is loaded; `encode` gives the documents that
`FastEngine.contested` finds to the reference; `check_sample` encodes a small part of the real
text again. What to do on a mismatch is the caller's decision: the build redoes the unit with
`.reference`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, AnyStr

import numpy as np

from tokenmill.engines.base import Engine, TokenizerInfo, UnencodableError, taken_from
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray


# One byte in so many is encoded again by the reference: 2% of the time if 80 times slower.
SAMPLE_SHARE = 4096
# So much of any text; a quarter of it again each time that it has grown to twice its size.
SAMPLE_BYTES = 1024
# A longer document is checked by pieces of at most this, encoded by both engines. Short ones: a
# unit's sample costs milliseconds, and more places find more than more bytes at each.
PIECE_BYTES = 512
TAIL_BYTES = 128


def _sign(byte: int) -> int:
    """Class of a byte: space, line break, other whitespace, letter, digit, other ASCII, rest."""
    c = chr(byte)
    tests = (c == " ", c in "\n\r", c.isspace(), c.isalpha(), c.isdigit(), True)
    return tests.index(True) if byte < 128 else 6


_SIGNS = np.array([_sign(byte) for byte in range(256)], np.uint8)
_SIGN_OF = {chr(byte): _sign(byte) for byte in range(128)}
_EMPTY, _LOOKED_AT, NUM_ENDINGS = 7, 8, 64


def ending_kinds(texts: TextBatch) -> NDArray[np.uint8]:
    """How each document ends: the class of its last byte, and which whitespace is there."""
    if not texts.num_bytes:
        return np.full(len(texts), _EMPTY * 8, np.uint8)
    first, last = texts.offsets[:-1], texts.offsets[1:] - 1
    signs = _SIGNS[texts.data[np.maximum(last, 0)]]
    kinds = np.where(last < first, _EMPTY, signs).astype(np.uint8) * 8
    is_space = (last >= first) & (signs <= 2)
    for back in range(1, _LOOKED_AT):
        if not is_space.any():
            break
        kinds |= np.where(is_space, 1 << signs, 0).astype(np.uint8)
        signs = _SIGNS[texts.data[np.maximum(last - back, 0)]]
        is_space &= (last - back >= first) & (signs <= 2)
    return kinds


def _ending_kind(text: str) -> int:
    """The same of one text that is not empty, far faster than for a batch of one."""
    kind = _SIGN_OF.get(text[-1], 6) * 8
    if kind <= 2 * 8:
        for character in text[:-_LOOKED_AT:-1]:
            sign = _SIGN_OF.get(character, 6)
            if sign > 2:
                break
            kind |= 1 << sign
    return kind


class Sample:
    """Chooses what is encoded again of a text that comes in batches.

    It follows from the documents alone, never from how they were cut into batches: places in the
    bytes, ever further apart, and documents of each kind of ending, the first and then each time
    that there are four times as many.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._chosen = 0
        self._due = 0
        self._endings = [0] * NUM_ENDINGS

    def choose(self, texts: TextBatch) -> list[tuple[int, int, int]]:
        """Position of a document, and where in it a piece begins and ends; in order."""
        found = set(self._at_places(texts))
        for index in self._by_ending(texts):
            size = int(texts.offsets[index + 1] - texts.offsets[index])
            found.add(_whole_chars(texts, index, max(0, size - TAIL_BYTES), size))
        return sorted(found)

    def passes(self, texts: Sequence[str]) -> bool:
        """Whether `choose` would choose nothing of a few texts; they count as seen then."""
        num_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
        if self._due < self._seen + num_bytes:
            return False
        counts: dict[int, int] = {}
        for text in filter(None, texts):
            kind = _ending_kind(text)
            number = counts[kind] = counts.get(kind, self._endings[kind]) + 1
            # 1, 4, 16, ... are due.
            if not number & (number - 1) and number.bit_length() & 1:
                return False
        for kind, number in counts.items():
            self._endings[kind] = number
        self._seen += num_bytes
        return True

    def _at_places(self, texts: TextBatch) -> Iterator[tuple[int, int, int]]:
        begin, end = self._seen, self._seen + texts.num_bytes
        self._seen = end
        while self._due < end:
            position = int(texts.offsets[0]) + self._due - begin
            index = int(np.searchsorted(texts.offsets, position, side="right")) - 1
            low, high = map(int, texts.offsets[index : index + 2])
            start, stop = 0, high - low
            if stop > PIECE_BYTES:
                start = position - low
                stop = min(stop, start + PIECE_BYTES)
            index, start, stop = _whole_chars(texts, index, start, stop)
            yield index, start, stop
            self._chosen += stop - start
            doubled = max(0, 4 * self._chosen // SAMPLE_BYTES - 3)
            spread = SAMPLE_BYTES * ((1 << min(doubled, 64)) - 1)
            after = begin + low - int(texts.offsets[0]) + stop
            self._due = max(after, min(spread, self._chosen * SAMPLE_SHARE))

    def _by_ending(self, texts: TextBatch) -> Iterator[int]:
        kinds = ending_kinds(texts)
        for kind in np.flatnonzero(np.bincount(kinds, minlength=NUM_ENDINGS)[: _EMPTY * 8]):
            places = np.flatnonzero(kinds == kind)
            before = self._endings[kind]
            self._endings[kind] += len(places)
            ordinal = 1
            while ordinal <= self._endings[kind]:
                if ordinal > before:
                    yield int(places[ordinal - before - 1])
                ordinal *= 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A text on which the two engines disagree."""

    text: str
    found: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    """What a check looked at, and where the engines disagreed."""

    num_documents: int = 0  # of a sample: up to and including the first on which they disagree
    num_bytes: int = 0
    mismatches: tuple[Mismatch, ...] = ()


@dataclass(eq=False, repr=False)
class CheckedEngine:
    """An engine to encode with, and the reference it must agree with."""

    reference: Engine
    _: KW_ONLY
    info: TokenizerInfo
    special_text: SpecialText
    fast: Engine | None = None
    contested: Callable[[TextBatch], NDArray[np.int64]] | None = None
    probes: Sequence[str] = ()
    # Why there is no fast engine, where there is none.
    refusal: str | None = None
    # Documents that `encode` gave to the reference, so far.
    routed_documents: int = 0

    def __post_init__(self) -> None:
        # The engine that encodes most documents.
        self.engine: Engine = self.fast or self.reference
        self.name, self.version = self.engine.name, self.engine.version
        # For each document, whether it holds the string of a special token.
        self.find_special = self.special_text.find

    def encode(self, texts: TextBatch) -> TokenBatch:
        """Ids of each document, equal to the reference's."""
        if self.fast is None:
            return self.reference.encode(texts)
        return self._settled(texts, self.fast.encode(texts))

    def _settled(self, texts: TextBatch, tokens: TokenBatch) -> TokenBatch:
        """The fast engine's ids of documents, those of contested ones by the reference."""
        contested = self.contested(texts) if self.contested else np.empty(0, np.int64)
        if not len(contested):
            return tokens
        with taken_from(contested):
            by_reference = self.reference.encode(texts.take(contested))
        self.routed_documents += len(contested)
        return replace_documents(tokens, contested, by_reference)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids, by the reference."""
        return self.reference.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id."""
        return self.engine.token_bytes(token_id)

    def recycle(self) -> bool:
        """Give the fast engine's cached memory back; False where there is none."""
        recycle = getattr(self.fast, "recycle", None)
        return recycle is not None and bool(recycle())

    def check_probes(self, by_fast: TokenBatch | None = None) -> SampleResult:
        """Encode the fixed probe texts with both engines; the fast one may have done so."""
        if self.fast is None:
            return SampleResult()
        texts = TextBatch.from_texts(self.probes)
        found = self.encode(texts) if by_fast is None else self._settled(texts, by_fast)
        return SampleResult(
            num_documents=len(texts),
            num_bytes=texts.num_bytes,
            mismatches=tuple(mismatch for _, mismatch in self._compare(texts, found)),
        )

    def check_sample(self, texts: TextBatch, tokens: TokenBatch, sample: Sample) -> SampleResult:
        """Encode again by the reference what the sample chooses of `texts`.

        `tokens` are the ids that were found for them. A short document is compared whole with its
        ids; a piece of a longer one is encoded by both engines. A mismatch ends the check.
        """
        pieces = sample.choose(texts) if self.fast is not None else []
        if not pieces:
            return SampleResult()
        # Not by `bytes_at`: a document may be far larger than a piece of it.
        begins = texts.offsets.tolist()
        cut = TextBatch.from_texts(
            texts.data[begins[at] + start : begins[at] + stop].tobytes()
            for at, start, stop in pieces
        )
        sizes = texts.lengths
        parts = [i for i, (at, *_) in enumerate(pieces) if sizes[at] > cut.lengths[i]]
        found = [tokens[index] for index, *_ in pieces]
        # Each call of the fast engine costs a millisecond, whatever it is given.
        encoded = self.encode(cut.take(parts)) if parts else TokenBatch.from_lists([])
        for place, part in enumerate(parts):
            found[part] = encoded[place]
        differing = self._compare(cut, TokenBatch.from_lists(found))[:1]
        checked = differing[0][0] + 1 if differing else len(pieces)
        return SampleResult(
            num_documents=checked,
            num_bytes=int(cut.offsets[checked]),
            mismatches=tuple(mismatch for _, mismatch in differing),
        )

    def _compare(self, texts: TextBatch, found: TokenBatch) -> list[tuple[int, Mismatch]]:
        """Positions at which `found` is not what the reference finds, and what was found there."""
        failed: dict[int, str] = {}
        try:
            expected = self.reference.encode(texts)
        except UnencodableError as error:
            failed = error.documents
            good = [index for index in range(len(texts)) if index not in failed]
            ids = dict(zip(good, self.reference.encode(texts.take(good)), strict=True))
            expected = TokenBatch.from_lists([ids.get(index, ()) for index in range(len(texts))])
        same = np.array_equal
        if not failed and same(found.offsets, expected.offsets) and same(found.ids, expected.ids):
            return []
        differing = []
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            if index in failed or not np.array_equal(one, other):
                ids_of = {"found": tuple(one.tolist()), "expected": tuple(other.tolist())}
                differing.append((index, Mismatch(text=texts.text_at(index), **ids_of)))
        return differing


def _whole_chars(texts: TextBatch, index: int, start: int, stop: int) -> tuple[int, int, int]:
    """The same range of a document, or one a little longer, cut between characters."""
    data = texts.data[texts.offsets[index] : texts.offsets[index + 1]]
    while start and data[start] & 0xC0 == 0x80:
        start -= 1
    while stop < len(data) and data[stop] & 0xC0 == 0x80:
        stop += 1
    return index, start, stop


def replace_documents(
    tokens: TokenBatch, indices: NDArray[np.int64], other: TokenBatch
) -> TokenBatch:
    """`tokens` with the documents at `indices` (ascending) taken from `other`."""
    lengths = tokens.lengths
    lengths[indices] = other.lengths
    parts = []
    done = 0
    for position, index in enumerate(indices):
        parts += [tokens.ids[tokens.offsets[done] : tokens.offsets[index]], other[position]]
        done = int(index) + 1
    parts.append(tokens.ids[tokens.offsets[done] :])
    return TokenBatch(np.concatenate(parts), np.append(0, np.cumsum(lengths)))


# Fixed texts on which a fast engine must agree with its reference before it may touch a document.
# They are the places where tokenizers part: boundaries between classes of characters, runs of
# whitespace, contractions, digits, combining marks in every order, emoji sequences, every plane of
# Unicode, strings of this tokenizer's own special tokens, and tokens of its vocabulary: a text
# split in the wrong place has wrong ids only if there is a token that reaches over that place.
# They cost a reference engine about a tenth of a second.

_TEXTS = (
    "",
    " ",
    "Hello, world! It's 2024-01-31; we'll pay $1,234.56 (plus 7%).",
    "don't DON'T I'll I'LL we've WE'VE you're YOU'RE he'd HE'D I'm I'M 'tis 's'S 'LL's",
    " \u2019s \u2019S 'x ''s",
    "0 1 12 123 1234 12345 123456 1234567 1.5e-10 \u0661\u0662\u0663\u0664 \u00b2\u00b3\u00bd",
    " \u2160\u2161 \u4e00\u4e8c",
    "def f(x):\n    if x:\n\t\treturn x  # ok\r\n\r\n\n\n    \n  \t y\n",
    "line\rline\r\nline\u2028line\u2029line\u0085line\x0bline\x0cline",
    "a  b   c    d     e\u00a0f\u00a0\u00a0g\u3000h\u2003 i \u200b j\ufeffk",
    "  leading and trailing  ",
    "\ttabs\t\tand\t \t mixed \n \n\n  \n",
    "camelCase PascalCase SCREAMING_SNAKE snake_case kebab-case X1y2Z3 \u01c5\u01c8 \u00dcBER",
    " \u00df\u1e9e",
    "e\u0301 \u00e9 a\u0328\u0301 a\u0301\u0328 \u1ea5 o\u0302\u0301 \u212b \u2126 \uac00",
    " \u1100\u1161\u11a8 \u0958 \u0915\u093c",
    "\u0301start n\u0303\u0303\u0303\u0303 Z\u0351\u036b\u0343\u036a\u0302 \u0344 \u0340",
    " \u1e9b\u0323",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    " \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f 1\ufe0f\u20e3",
    " \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u0645\u0631\u062d\u0628\u0627",
    " \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u200f(\u0661)\u200e \u202babc\u202c",
    " \u06f1\u06f2",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f\u4e16\u754c",
    " \u30c6\u30b9\u30c8 \uc548\ub155\ud558\uc138\uc694 \uff21\uff22\uff23\uff11\uff12",
    " \u9fa6\u9fff\u3400 \U00020000\U0002a6d6",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    " \u0c28\u0c2e\u0c38\u0c4d\u0c15\u0c3e\u0c30\u0c02 \u10d2\u10d0\u10db\u10d0\u10e0 \u1c92",
    " \u13a0\uab70 \ua9b2\ua9bf",
    "\x00\x01\x02\x1f\x7f\x80\x9f \ufffd \ufffe \uffff \U0001ffff \U0010ffff \ue000",
    "$\u20ac\u00a3\u00a5\u20b9 \u2200x\u2208\u2115: x\u00b2\u22650 \u2192 \u222b\u2211\u221a",
    " \u00a9\u2122 \u2026\u2014\u2013 \u00ab\u00bb\u201e\u201c '\"`",
    "http://example.org/a?b=c&d=%20#e user@host C:\\dir\\file.txt /usr/bin/env </p><br/>",
    " {{x}} [[y]] ---- ==== ////",
    "<|endoftext|> <s></s> [INST] <pad> <unk> [CLS] <0x0A> <|im_start|>system \u2581\u2581x",
    " \u0120y",
)
_RUN_CHARACTERS = "aA1!_- \n\t\r\u00a0\u00e9\u0301\u0627\u4e2d\u3042\ud55c\u2581\U0001f600"
_RUN_LENGTHS = (*range(2, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 1000)
_PLANE_STRIDE = 331
_MAX_TOKENS = 64
_MAX_KINDS = 400
_CONTEXTS = ("{}", "a{}", "{}a", "1{}1", " {}", "{} ", "\n{}", "{}\n", "!{}!")
_LITERAL = " \n\r'/"


def _class_of(byte: int) -> int:
    """A sign for the class of an ASCII character; one for all others together."""
    c = chr(byte)
    if c in _LITERAL or byte > 0x7F:
        return min(byte, 0x80)
    tests = {"a": c.islower(), "A": c.isupper(), "1": c.isdigit(), "\t": c.isspace()}
    return ord(next((sign for sign, is_of in tests.items() if is_of), "!"))


_CLASSES = np.array([_class_of(byte) for byte in range(256)], np.uint8)


def probe_texts(own_tokens: Iterable[str] = (), *, derived: Iterable[str] = ()) -> list[str]:
    """All probes; `own_tokens` are strings of special and added tokens of the tokenizer at hand."""
    texts = [*_TEXTS, "".join(_TEXTS)]
    texts += [character * length for character in _RUN_CHARACTERS for length in _RUN_LENGTHS]
    texts += [f"x{character * length} y" for character in _RUN_CHARACTERS for length in (3, 20)]
    # Every plane: a stride that is prime meets every block in time and every row of 64.
    for point in range(0x80, 0x110000, _PLANE_STRIDE):
        if not 0xD800 <= point < 0xE000:
            character = chr(point)
            texts.append(f"a{character}b {character}{character} 1{character}\u0301!{character}")
    for token in list(own_tokens)[:_MAX_TOKENS]:
        texts += [token, f"a{token}b", f" {token} {token}\n", token[:-1]]
        texts += [token + token, token.upper()]
    return [*texts, *derived]


def spanning_tokens(tokens: Collection[AnyStr], codes: NDArray[np.uint8]) -> list[AnyStr]:
    """A token for each sequence of classes of characters that a vocabulary has a token for.

    `codes` are the bytes, or as many signs for them, of all tokens back to back.
    """
    signs = _CLASSES[codes].tobytes()
    kinds: dict[bytes, AnyStr] = {}
    ends = [0, *itertools.accumulate(map(len, tokens))]
    for token, start, end in zip(tokens, ends, ends[1:], strict=False):
        kinds.setdefault(signs[start:end], token)
    # How long a run is matters little, and is what most of them differ in.
    short: dict[bytes, AnyStr] = {}
    for kind, token in kinds.items():
        short.setdefault(re.sub(rb"(.)\1+", rb"\1\1", kind, flags=re.DOTALL), token)
    return [short[kind] for kind in sorted(short, key=len)[:_MAX_KINDS]]


def decoded(texts: Iterable[bytes | str | None]) -> Iterator[str]:
    """The texts of those that are one."""
    for text in texts:
        with contextlib.suppress(UnicodeDecodeError):
            yield text.decode() if isinstance(text, bytes) else text or ""


def in_contexts(texts: Iterable[bytes | str | None]) -> tuple[str, ...]:
    """The texts alone, and where other characters are before and after them."""
    return tuple(context.format(text) for text in decoded(texts) for context in _CONTEXTS)


class SpecialText:
    """Finds documents that hold any of some strings, such as those that `reject` rejects."""

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        # re.escape also escapes characters that RE2, arrow's engine, wants left alone.
        escaped = [re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", token) for token in longest_first]
        self._pattern = "|".join(escaped)

    def find(self, texts: TextBatch) -> NDArray[np.bool_]:
        """For each document, whether it holds one of the strings."""
        if not self._pattern or not len(texts):
            return np.zeros(len(texts), bool)
        import pyarrow.compute

        # No copy: arrow reads our buffers as a column of its own.
        column = pyarrow.LargeStringArray.from_buffers(
            len(texts),
            pyarrow.py_buffer(np.ascontiguousarray(texts.offsets)),
            pyarrow.py_buffer(texts.data),
        )
        found = pyarrow.compute.match_substring_regex(column, self._pattern)
        return np.asarray(found.to_numpy(zero_copy_only=False), bool)


# Finds the documents that hold a code point on which the engines' Unicode tables differ.
#
# Runs over every batch, so it must cost next to nothing. A search for each byte that can open a
# contested character, by the C library's own search, passes over nearly all text; where such a
# byte occurs, the byte after it is looked at; only what is left is decoded. In a script that is
# full of such bytes, vectorised comparisons take over. The text must be valid UTF-8.

# Bytes looked at in one go: small enough to stay in the cache between one byte and the next.
_CHUNK = 1 << 18
# With more finds in a chunk than this, comparing all of it is cheaper than following them.
_MANY = 128


class Prescan:
    """Looks for code points of given ranges in UTF-8 text."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        ordered = sorted(ranges)
        self._starts = np.array([first for first, _ in ordered], np.int64)
        self._ends = np.array([last for _, last in ordered], np.int64)
        # First byte -> second bytes of the characters in the ranges.
        self._seconds: dict[bytes, set[bytes]] = {}
        for first, last in ordered:
            # 64 code points share all bytes but the last; of two bytes the last is the second.
            step = 1 if first < 0x800 else 64
            for point in (*range(first, last + 1, step), last):
                encoded = chr(point).encode(errors="surrogatepass")
                self._seconds.setdefault(encoded[:1], set()).add(encoded[1:2])

    def find(self, texts: TextBatch) -> NDArray[np.int64]:
        """Positions of the documents that hold such a code point, ascending."""
        first, last = int(texts.offsets[0]), int(texts.offsets[-1])
        data = texts.data[first:last]
        suspects: list[NDArray[np.int64]] = [
            np.asarray(found, np.int64) + start
            for start in range(0, len(data), _CHUNK)
            for found in self._suspects(data[start : start + _CHUNK + 1])
        ]
        if not suspects:
            return np.empty(0, np.int64)
        positions = np.concatenate(suspects)
        points = _decode(data, positions)
        row = np.searchsorted(self._starts, points, side="right") - 1
        hits = positions[(row >= 0) & (points <= self._ends[row])]
        # side="right" passes over empty documents that start at the same place.
        return np.unique(np.searchsorted(texts.offsets, hits + first, side="right") - 1)

    def _suspects(self, window: NDArray[np.uint8]) -> Iterator[list[int] | NDArray[np.int64]]:
        """Positions of bytes that open a character near a contested one."""
        raw = window.tobytes()
        for lead, seconds in self._seconds.items():
            found: list[int] = []
            position = raw.find(lead)
            for _ in range(_MANY):
                if position < 0:
                    break
                if raw[position + 1 : position + 2] in seconds:
                    found.append(position)
                position = raw.find(lead, position + 1)
            if position >= 0:
                places = np.flatnonzero(window[:-1] == lead[0])
                is_second = np.zeros(256, bool)
                is_second[[second[0] for second in seconds]] = True
                yield places[is_second[window[places + 1]]]
            elif found:
                yield found


def _decode(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Code points of the characters of two to four bytes that open at `positions`."""
    limit = len(data) - 1
    b0, b1, b2, b3 = (data[np.minimum(positions + i, limit)].astype(np.int64) for i in range(4))
    b1, b2, b3 = b1 & 0x3F, b2 & 0x3F, b3 & 0x3F
    points: NDArray[np.int64] = np.select(
        [b0 < 0xE0, b0 < 0xF0],
        [(b0 & 0x1F) << 6 | b1, (b0 & 0x0F) << 12 | b1 << 6 | b2],
        (b0 & 0x07) << 18 | b1 << 12 | b2 << 6 | b3,
    )
    return points
