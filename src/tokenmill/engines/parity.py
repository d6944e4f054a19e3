"""A fast engine held to its reference: the only form in which the rest of tokenmill sees one.

Agreement is kept on four levels. `coverage` decides by the tokenizer's settings; `check_probes`
by fixed texts when the engine is loaded; `encode` gives documents with contested characters to
the reference (see `prescan`); `check_sample` encodes a small part of the real text again. What to
do on a mismatch is the caller's decision: the build redoes the unit with `.reference`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.records import TextBatch, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tokenmill.engines.base import Engine, TokenizerInfo
    from tokenmill.engines.prescan import Prescan
    from tokenmill.engines.special_text import SpecialText

SAMPLE_SHARE = 4096
"""One byte in so many is encoded again by the reference: 2% of the time if 80 times slower."""
SAMPLE_FLOOR_BYTES = 2048
SLICE_BYTES = 4096
"""A longer document is checked by a slice of at most this, encoded by both engines."""


PLACE_BYTES = 8 << 20
PIECE_BYTES = 1024
"""What a build encodes again of each PLACE_BYTES of text: 2% of the time if 80 times slower."""


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
        self.routed_documents += len(contested)
        return _replace(tokens, contested, self.reference.encode(texts.take(contested)))

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
        return self._compare(texts, self.encode(texts))

    def check_sample(
        self,
        texts: TextBatch,
        tokens: TokenBatch,
        *,
        seed: int | str,
        budget_bytes: int | None = None,
    ) -> SampleResult:
        """Encode a small, reproducible part of `texts` again by the reference.

        `tokens` are the ids that were found for `texts`. A document up to SLICE_BYTES is compared
        whole with its ids; of a longer one a slice is encoded by both engines.
        """
        if self.fast is None or not texts.num_bytes:
            return SampleResult(num_documents=0, num_bytes=0, mismatches=())
        if budget_bytes is None:
            budget_bytes = max(SAMPLE_FLOOR_BYTES, texts.num_bytes // SAMPLE_SHARE)
        whole, slices = _choose(texts, random.Random(seed), budget_bytes)
        found = TokenBatch.from_lists([tokens[index] for index in whole])
        one = self._compare(texts.take(whole), found)
        # Each call of the fast engine costs a millisecond, whatever it is given.
        cut = TextBatch.from_texts(slices)
        other = self._compare(cut, self.encode(cut) if slices else TokenBatch.from_lists([]))
        return SampleResult(
            num_documents=one.num_documents + other.num_documents,
            num_bytes=one.num_bytes + other.num_bytes,
            mismatches=one.mismatches + other.mismatches,
        )

    def check_places(
        self, texts: TextBatch, tokens: TokenBatch, *, first_byte: int
    ) -> SampleResult:
        """Encode again by the reference what stands at every PLACE_BYTES-th byte of a unit.

        `first_byte` is how much of the unit's text lies before `texts`. The places, and so the
        result, do not depend on how the unit is cut into batches; a mismatch ends the check.
        """
        checked = num_bytes = 0
        for index, piece in _pieces_at_places(texts, first_byte):
            # Not all in one call: a mismatch must be found after the same number of pieces.
            alone = TextBatch.from_texts([piece])
            whole = len(piece) == texts.offsets[index + 1] - texts.offsets[index]
            found = TokenBatch.from_lists([tokens[index]]) if whole else self.encode(alone)
            result = self._compare(alone, found)
            checked += 1
            num_bytes += len(piece)
            if result.mismatches:
                return SampleResult(
                    num_documents=checked, num_bytes=num_bytes, mismatches=result.mismatches
                )
        return SampleResult(num_documents=checked, num_bytes=num_bytes, mismatches=())

    def _compare(self, texts: TextBatch, found: TokenBatch) -> SampleResult:
        expected = self.reference.encode(texts)
        mismatches = tuple(
            Mismatch(
                text=texts.text_at(index),
                found=tuple(found[index].tolist()),
                expected=tuple(expected[index].tolist()),
            )
            for index in range(len(texts))
            if not np.array_equal(found[index], expected[index])
        )
        return SampleResult(
            num_documents=len(texts), num_bytes=texts.num_bytes, mismatches=mismatches
        )


def _pieces_at_places(texts: TextBatch, first_byte: int) -> Iterator[tuple[int, bytes]]:
    """Documents at the places, whole if they are short, with their position in the batch."""
    start = int(texts.offsets[0])
    for place in range(
        -(-first_byte // PLACE_BYTES) * PLACE_BYTES, first_byte + texts.num_bytes, PLACE_BYTES
    ):
        position = start + place - first_byte
        index = int(np.searchsorted(texts.offsets, position, side="right")) - 1
        low, high = int(texts.offsets[index]), int(texts.offsets[index + 1])
        if high - low <= PIECE_BYTES:
            yield index, texts.bytes_at(index)
        else:
            yield index, _slice(texts.data[low:high], position - low, PIECE_BYTES)


def _choose(
    texts: TextBatch, dice: random.Random, budget_bytes: int
) -> tuple[list[int], list[bytes]]:
    """Short documents by position, and slices of long ones, until the budget is used up.

    A place in the bytes is drawn, not a document, so that long documents are not overlooked.
    """
    whole: list[int] = []
    slices: list[bytes] = []
    first, last = int(texts.offsets[0]), int(texts.offsets[-1])
    seen: set[int] = set()
    # A unit of a few tiny documents runs out of new ones before the budget: hence the bound.
    for _ in range(64):
        if budget_bytes <= 0:
            break
        place = dice.randrange(first, last)
        index = int(np.searchsorted(texts.offsets, place, side="right")) - 1
        if index in seen:
            continue
        start, stop = int(texts.offsets[index]), int(texts.offsets[index + 1])
        if stop - start <= SLICE_BYTES:
            seen.add(index)
            whole.append(index)
            budget_bytes -= stop - start
        else:
            piece = _slice(texts.data[start:stop], place - start, min(budget_bytes, SLICE_BYTES))
            slices.append(piece)
            budget_bytes -= max(1, len(piece))
    return whole, slices


def _slice(data: NDArray[np.uint8], start: int, num_bytes: int) -> bytes:
    """About `num_bytes` from `start` on, cut at borders of characters."""
    stop = min(len(data), start + num_bytes)
    while start and data[start] & 0xC0 == 0x80:
        start -= 1
    while stop < len(data) and data[stop] & 0xC0 == 0x80:
        stop += 1
    return data[start:stop].tobytes()


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
