"""A fast engine held to its reference: the only form in which the rest of tokenmill sees one.

Agreement is kept on four levels. `coverage` decides by the tokenizer's settings; `check_probes`
by fixed texts when the engine is loaded; `encode` gives documents with contested characters to
the reference (see `prescan`); `check_sample` encodes a small part of the real text again. What to
do on a mismatch is the caller's decision: the build redoes the unit with `.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.engines.base import UnencodableError
from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine, TokenizerInfo
    from tokenmill.engines.prescan import Prescan
    from tokenmill.engines.special_text import SpecialText

SAMPLE_SHARE = 4096
"""One byte in so many is encoded again by the reference: 2% of the time if 80 times slower."""
SAMPLE_BYTES = 2048
"""So much of any text; a quarter of it again each time that it has grown to twice its size."""
PIECE_BYTES = 1024
"""A longer document is checked by pieces of at most this, encoded by both engines."""
TAIL_BYTES = 256

_SIGNS = np.full(256, 6, np.uint8)
"""Class of a byte: space, line break, other whitespace, letter, digit, other ASCII, the rest."""
for _byte in range(128):
    _is = chr(_byte)
    _tests = (_is == " ", _is in "\n\r", _is.isspace(), _is.isalpha(), _is.isdigit(), True)
    _SIGNS[_byte] = _tests.index(True)
_EMPTY = 7
_LOOKED_AT = 8
NUM_ENDINGS = 64


def ending_kinds(texts: TextBatch) -> NDArray[np.uint8]:
    """How each document ends: the class of its last byte, and which whitespace stands there."""
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
            low, high = map(int, texts.offsets[index : index + 2])
            size = high - low
            start = max(0, size - TAIL_BYTES)
            found.add((index, *_whole_characters(texts.data[low:high], start, size)))
        return sorted(found)

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
            start, stop = _whole_characters(texts.data[low:high], start, stop)
            yield index, start, stop
            self._chosen += stop - start
            doubled = max(0, 4 * self._chosen // SAMPLE_BYTES - 3)
            spread = SAMPLE_BYTES * ((1 << min(doubled, 64)) - 1)
            behind = begin + low - int(texts.offsets[0]) + stop
            self._due = max(behind, min(spread, self._chosen * SAMPLE_SHARE))

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

    num_documents: int
    """Of a sample: up to and including the first on which they disagree."""
    num_bytes: int
    mismatches: tuple[Mismatch, ...]


class CheckedEngine:
    """An engine to encode with, and the reference it must agree with."""

    def __init__(
        self,
        reference: Engine,
        *,
        info: TokenizerInfo,
        special_text: SpecialText,
        fast: Engine | None = None,
        prescan: Prescan | None = None,
        contested_text: SpecialText | None = None,
        probes: Sequence[str] = (),
        refusal: str | None = None,
    ) -> None:
        self.reference = reference
        self.fast = fast
        self.info = info
        self.refusal = refusal
        """Why there is no fast engine, where there is none."""
        self.routed_documents = 0
        """Documents that `encode` gave to the reference, so far."""
        self._prescan = prescan
        self._contested_text = contested_text
        self._probes = probes
        self._special_text = special_text

    @property
    def engine(self) -> Engine:
        """The engine that encodes most documents."""
        return self.fast or self.reference

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def version(self) -> str:
        return self.engine.version

    def encode(self, texts: TextBatch) -> TokenBatch:
        """Ids of each document, equal to the reference's."""
        if self.fast is None:
            return self.reference.encode(texts)
        tokens = self.fast.encode(texts)
        contested = self._contested(texts)
        if not len(contested):
            return tokens
        try:
            by_reference = self.reference.encode(texts.take(contested))
        except UnencodableError as error:
            failed = {int(contested[place]): why for place, why in error.documents.items()}
            raise UnencodableError(failed, engine=self.reference.name) from error
        self.routed_documents += len(contested)
        return _replace(tokens, contested, by_reference)

    def _contested(self, texts: TextBatch) -> NDArray[np.int64]:
        """Positions of the documents that only the reference may encode."""
        found = self._prescan.find(texts) if self._prescan else np.empty(0, np.int64)
        if self._contested_text:
            found = np.union1d(found, np.flatnonzero(self._contested_text.find(texts)))
        return found

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids, by the reference."""
        return self.reference.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id stands for."""
        return self.engine.token_bytes(token_id)

    def recycle(self) -> bool:
        """Give the fast engine's cached memory back; False where there is none."""
        return self.fast.recycle() if self.fast else False

    def find_special(self, texts: TextBatch) -> NDArray[np.bool_]:
        """For each document, whether it holds the string of a special token."""
        return self._special_text.find(texts)

    def check_probes(self) -> SampleResult:
        """Encode the fixed probe texts with both engines."""
        if self.fast is None:
            return SampleResult(num_documents=0, num_bytes=0, mismatches=())
        texts = TextBatch.from_texts(self._probes)
        return SampleResult(
            num_documents=len(texts),
            num_bytes=texts.num_bytes,
            mismatches=tuple(found for _, found in self._compare(texts, self.encode(texts))),
        )

    def check_sample(self, texts: TextBatch, tokens: TokenBatch, sample: Sample) -> SampleResult:
        """Encode again by the reference what the sample chooses of `texts`.

        `tokens` are the ids that were found for them. A short document is compared whole with its
        ids; a piece of a longer one is encoded by both engines. A mismatch ends the check.
        """
        pieces = sample.choose(texts) if self.fast is not None else []
        if not pieces:
            return SampleResult(num_documents=0, num_bytes=0, mismatches=())
        cut = TextBatch.from_texts(
            texts.bytes_at(index)[start:stop] for index, start, stop in pieces
        )
        sizes = texts.lengths
        parts = [i for i, (index, *_) in enumerate(pieces) if sizes[index] > cut.lengths[i]]
        found = [tokens[index] for index, *_ in pieces]
        # Each call of the fast engine costs a millisecond, whatever it is given.
        encoded = self.encode(cut.take(parts)) if parts else TokenBatch.from_lists([])
        for place, part in enumerate(parts):
            found[part] = encoded[place]
        differing = self._compare(cut, TokenBatch.from_lists(found))
        if not differing:
            return SampleResult(num_documents=len(pieces), num_bytes=cut.num_bytes, mismatches=())
        first, mismatch = differing[0]
        return SampleResult(
            num_documents=first + 1,
            num_bytes=int(cut.offsets[first + 1]),
            mismatches=(mismatch,),
        )

    def _compare(self, texts: TextBatch, found: TokenBatch) -> list[tuple[int, Mismatch]]:
        """Positions at which `found` is not what the reference finds, and what was found there."""
        failed: dict[int, str] = {}
        try:
            expected = self.reference.encode(texts)
        except UnencodableError as error:
            failed = error.documents
            good = [index for index in range(len(texts)) if index not in failed]
            ids = dict(zip(good, _documents(self.reference.encode(texts.take(good))), strict=True))
            expected = TokenBatch.from_lists([ids.get(index, ()) for index in range(len(texts))])
        return [
            (
                index,
                Mismatch(
                    text=texts.text_at(index),
                    found=tuple(found[index].tolist()),
                    expected=tuple(expected[index].tolist()),
                ),
            )
            for index in range(len(texts))
            if index in failed or not np.array_equal(found[index], expected[index])
        ]


def _documents(tokens: TokenBatch) -> list[NDArray[np.uint32]]:
    return [tokens[index] for index in range(len(tokens))]


def _whole_characters(data: NDArray[np.uint8], start: int, stop: int) -> tuple[int, int]:
    """The same range, or one a little longer, cut between characters."""
    while start and data[start] & 0xC0 == 0x80:
        start -= 1
    while stop < len(data) and data[stop] & 0xC0 == 0x80:
        stop += 1
    return start, stop


def _replace(
    tokens: TokenBatch, indices: Sequence[int] | NDArray[np.int64], other: TokenBatch
) -> TokenBatch:
    """`tokens` with the documents at `indices` (ascending) taken from `other`."""
    lengths = tokens.lengths
    lengths[indices] = other.lengths
    offsets = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    parts = []
    done = 0
    for position, index in enumerate(indices):
        parts += [tokens.ids[tokens.offsets[done] : tokens.offsets[index]], other[position]]
        done = int(index) + 1
    parts.append(tokens.ids[tokens.offsets[done] :])
    return TokenBatch(np.concatenate(parts), offsets)
