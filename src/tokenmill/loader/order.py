"""Which row comes when: a function of (seed, epoch, index), computed for any index at once.

    index (0, 1, 2 ...)  ->  epoch, index in the epoch  ->  row

The full shuffle is a keyed permutation of 0..n-1: a Feistel network on the next power of two,
walked until it lands below n. It keeps no table, so that an epoch of any size starts at once, and
it is made of 64-bit integers alone, so that it is the same on every machine. What a seed gives must
never change, since runs are resumed by it: a change of anything here is a new `VERSION`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.store.spans import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
ROUNDS = 6
MIN_BITS = 6
"""Smaller networks shuffle badly; walking down from 64 to a few rows costs nothing to speak of."""
RUN_TOKENS = 1 << 17
"""Block shuffle reads stretches of so many tokens: 256 KiB or 512 KiB in one go."""
WINDOW_RUNS = 256
"""Block shuffle mixes the rows of so many stretches: about 33 million tokens."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Shuffle(StrEnum):
    """How the rows of an epoch are ordered."""

    FULL = "full"
    BLOCK = "block"
    NONE = "none"

    @classmethod
    def of(cls, value: object) -> Shuffle:
        """What a user may say: True, False, or a name."""
        if isinstance(value, bool):
            return cls.FULL if value else cls.NONE
        try:
            return cls(str(value))
        except ValueError:
            raise UsageError(
                f"shuffle={value!r} is not known",
                hint='use shuffle=True (any row may come next), "block" (slow disks) or False',
            ) from None


class Permutation:
    """A permutation of 0..size-1 that is a function of its key.

    >>> Permutation(5, key="seed 0")(np.arange(5))
    array([...])
    """

    def __init__(self, size: int, *, key: str) -> None:
        self.size = size
        bits = max(MIN_BITS, (size - 1).bit_length())
        self._right_bits = np.uint64(bits // 2)
        self._left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._right_mask = np.uint64((1 << (bits // 2)) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each index goes; all must be below the size."""
        return self._walk(indices, range(ROUNDS))

    def inverse(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index that goes to each value."""
        return self._walk(values, range(ROUNDS - 1, -1, -1))

    def _walk(self, indices: NDArray[np.int64], rounds: range) -> NDArray[np.int64]:
        if self.size == 1:
            return np.zeros_like(indices)
        found = self._network(indices.astype(np.uint64), rounds)
        size = np.uint64(self.size)
        while (outside := found >= size).any():
            found[outside] = self._network(found[outside], rounds)
        return found.astype(np.int64)

    def _network(self, values: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        left, right = values >> self._right_bits, values & self._right_mask
        for number in rounds:
            key = self._keys[number]
            if number % 2:
                right ^= _mix(left, key) & self._right_mask
            else:
                left ^= _mix(right, key) & self._left_mask
        left <<= self._right_bits
        left |= right
        return left


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = values + key
    mixed *= _MULTIPLIER
    mixed ^= mixed >> _HALF
    mixed *= _MIXER
    mixed >>= _HALF
    return mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The rows of one source, epoch after epoch without end."""

    shuffle: Shuffle
    seed: int
    source: str
    """Sources of a mixture have orders of their own."""
    num_rows: int
    seq_len: int
    run_tokens: int = RUN_TOKENS
    window_runs: int = WINDOW_RUNS

    def rows(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row at each index of the endless order, and the epoch it belongs to."""
        first, last = int(indices.min(initial=0)), int(indices.max(initial=0))
        if (epoch := last // self.num_rows) == first // self.num_rows:  # so it nearly always is
            places = indices - epoch * self.num_rows
            return self._epoch_rows(places, epoch), np.full_like(places, epoch)
        epochs, places = np.divmod(indices, self.num_rows)
        rows = np.empty_like(places)
        for epoch in distinct(epochs):
            here = epochs == epoch
            rows[here] = self._epoch_rows(places[here], epoch)
        return rows, epochs

    def _epoch_rows(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        if self.shuffle is Shuffle.NONE:
            return places
        if self.shuffle is Shuffle.FULL:
            return Permutation(self.num_rows, key=self._key(epoch))(places)
        return self._block_rows(places, epoch)

    def _key(self, epoch: int, *parts: object) -> str:
        facts = ("tokenmill order", VERSION, self.seed, epoch, *parts, self.source)
        return "\n".join(map(str, facts))

    def _block_rows(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Runs of rows in a shuffled order; the rows of each window of runs shuffled.

        The last run is short unless it divides evenly. Places behind it are moved up by what it
        lacks, so that place // run is the number of a run; inside its window likewise.
        """
        run = max(1, self.run_tokens // self.seq_len)
        num_runs = -(-self.num_rows // run)
        lacking = num_runs * run - self.num_rows
        runs = Permutation(num_runs, key=self._key(epoch, "runs"))
        short = int(runs.inverse(np.array([num_runs - 1], np.int64))[0])
        end_of_short = short * run + run - lacking
        window = self.window_runs * run
        moved = places + np.where(places >= end_of_short, lacking, 0)
        rows = np.empty_like(places)
        for number in distinct(moved // window):
            here = moved // window == number
            first = number * window
            holds_short = first <= short * run < first + window
            size = min(window, num_runs * run - first) - (lacking if holds_short else 0)
            before = lacking if first > short * run else 0
            inner = Permutation(size, key=self._key(epoch, "window", number))
            mixed = inner(places[here] - (first - before)) + first
            if holds_short:
                mixed += np.where(mixed >= end_of_short, lacking, 0)
            rows[here] = runs(mixed // run) * run + mixed % run
        return rows
