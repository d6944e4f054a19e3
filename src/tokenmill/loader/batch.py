"""One batch, as arrays: the fields are computed from tokens and borders when they are first used.

    rows of L + 1 tokens     t0 t1 t2 | u0 u1 . .      | a new document begins   . padding
    input_ids                t0 t1 t2   u0 u1 .
    labels                   t1 t2 u0   u1 -  -        - ignored: -100, as what a mask leaves out
    position_ids              0  1  2    0  1 0
    doc_ids                   0  0  0    1  1 -1
    cu_seqlens                0 3 5 6 6 6              ends, over all rows; the last one repeated

Shapes stay the same from batch to batch, so that a compiled model is not compiled again. They
change with a stage's seq_len, in a last batch that is kept short, and where borders outgrow their
room.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from tokenmill.lazy import lazy

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from tokenmill.store.format import TokenArray

NO_ROW = -1
"""Number of a row that is all padding: it fills the last batch up."""
IGNORED = -100
"""Label that losses leave out, as PyTorch's cross entropy does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFormat:
    """What the fields of a loader's batches look like."""

    dtype: np.dtype[np.integer] | None
    """Of input_ids and labels; None is the stored width, and both are views of `tokens`."""
    mask_borders: bool
    capacity: int
    """Entries of cu_seqlens; doubled until it fits for a batch with more documents."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows of some steps on one rank; the arrays are (steps, rows of a batch)."""

    steps: range
    seq_len: int
    sources: NDArray[np.int64]
    """Place of each row's source in the mixture."""
    rows: NDArray[np.int64]
    """Number in the layout of the source, or `NO_ROW`."""
    epochs: NDArray[np.int64]
    only: int | None = None
    """The source of all rows, where it is known that there is one, and no row is padding."""

    def part(self, first: int, last: int) -> Draw:
        """Some of the steps, by their places."""
        here = slice(first, last)
        return Draw(
            self.steps[here],
            self.seq_len,
            self.sources[here],
            self.rows[here],
            self.epochs[here],
            self.only,
        )


class Tiling(NamedTuple):
    """Stretches that fill rows one after the other, each of one document or padding."""

    starts: NDArray[np.int64]
    """Place in the flattened rows."""
    lengths: NDArray[np.int64]
    is_padding: NDArray[np.bool_]

    def part(self, first: int, last: int, *, base: int) -> Tiling:
        """Some of the stretches, with places counted from `base`."""
        here = slice(first, last)
        return Tiling(self.starts[here] - base, self.lengths[here], self.is_padding[here])


class FoundSteps(Protocol):
    """What a batch is a part of: several steps whose rows were found at once."""

    @property
    def draw(self) -> Draw: ...

    @property
    def format(self) -> BatchFormat: ...

    def is_padded(self, place: int) -> bool:
        """Whether a step has padding."""
        ...

    def token_borders(self, place: int) -> Tiling:
        """Documents in the rows of one step, with all their `seq_len + 1` tokens."""
        ...

    def input_borders(self, place: int) -> Tiling:
        """Documents in the rows of one step, without the last token of each row."""
        ...

    def only(self, place: int) -> FoundSteps:
        """One of the steps, without the others and without the store."""
        ...


@lru_cache(maxsize=8)
def _ramp(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


class Batch:
    """Rows for one step on one rank.

    With ids in their stored width there is no room for -100: `loss_mask` alone says what counts.
    """

    def __init__(
        self,
        found: FoundSteps,
        place: int,
        step: int,
        tokens: TokenArray,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        self._found = found
        self._place = place
        self.step = step
        self.tokens = tokens
        """(rows, seq_len + 1), in the stored width."""
        self.mask = mask
        """(rows, seq_len + 1): which tokens count by the masks of their stores, padding not; None
        where no store has a mask."""

    def keep_views(self, input_ids: TokenArray, labels: TokenArray) -> Self:
        """Views that were made for many batches at once: making them for one costs 2 us."""
        self.__dict__["input_ids"], self.__dict__["labels"] = input_ids, labels
        return self

    @property
    def sources(self) -> NDArray[np.int64]:
        """Source of each row, by its place in the mixture."""
        found: NDArray[np.int64] = self._found.draw.sources[self._place]
        return found

    @property
    def rows(self) -> NDArray[np.int64]:
        """Number of each row in the layout of its source; -1 for a row of padding."""
        found: NDArray[np.int64] = self._found.draw.rows[self._place]
        return found

    @property
    def epochs(self) -> NDArray[np.int64]:
        """Epoch of its source that each row belongs to."""
        found: NDArray[np.int64] = self._found.draw.epochs[self._place]
        return found

    @property
    def seq_len(self) -> int:
        return int(self.tokens.shape[1]) - 1

    @property
    def max_seqlen(self) -> int:
        """Longest document a row can hold: a constant, as compiled kernels want it."""
        return self.seq_len

    @lazy
    def input_ids(self) -> NDArray[np.integer]:
        """(rows, seq_len)."""
        inputs = self.tokens[:, :-1]
        return (
            inputs if self._found.format.dtype is None else inputs.astype(self._found.format.dtype)
        )

    @lazy
    def labels(self) -> NDArray[np.integer]:
        """(rows, seq_len): the next token of each input; -100 where it must not count."""
        labels = self.tokens[:, 1:]
        if self._found.format.dtype is None:
            return labels
        wide = labels.astype(self._found.format.dtype)
        if not self.all_count:
            wide[~self.loss_mask] = IGNORED
        return wide

    @property
    def all_count(self) -> bool:
        """Whether nothing is masked for sure; told without looking at any border."""
        is_padded = self._found.is_padded(self._place)
        return self.mask is None and not (is_padded or self.masks_borders)

    @property
    def masks_borders(self) -> bool:
        """Whether the label at the end of a document does not count if it is of the next one."""
        return self._found.format.mask_borders

    @lazy
    def loss_mask(self) -> NDArray[np.bool_]:
        """(rows, seq_len): whether each label counts."""
        if self.all_count:
            return np.ones(self._shape, np.bool_)
        if self.mask is not None and not self.masks_borders:
            return np.ascontiguousarray(self.mask[:, 1:])
        _, lengths, is_padding = self._found.token_borders(self._place)
        counts = np.repeat(~is_padding, lengths) if self.mask is None else self.mask.flatten()
        if self.masks_borders:
            counts[np.cumsum(lengths[:-1])] = False
        return np.ascontiguousarray(counts.reshape(self.tokens.shape)[:, 1:])

    @lazy
    def position_ids(self) -> NDArray[np.int32]:
        """(rows, seq_len): place of each token in its document, as far as the row has it."""
        starts, lengths, _ = self._borders
        begins = np.repeat(starts.astype(np.int32), lengths)
        return np.subtract(_ramp(self._num_inputs), begins, out=begins).reshape(self._shape)

    @lazy
    def doc_ids(self) -> NDArray[np.int32]:
        """(rows, seq_len): number of each token's document in its row; -1 for padding."""
        starts, lengths, is_padding = self._borders
        begins_row = starts % self.seq_len == 0
        numbers = np.arange(len(starts), dtype=np.int32)
        numbers -= np.maximum.accumulate(np.where(begins_row, numbers, 0))
        numbers[is_padding] = -1
        return np.repeat(numbers, lengths).reshape(self._shape)

    @lazy
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where documents begin in the flattened rows, 0 first, then the number of tokens."""
        starts, _, _ = self._borders
        capacity = self._found.format.capacity
        while capacity < len(starts) + 1:
            capacity *= 2
        ends = np.full(capacity, self._num_inputs, np.int32)
        ends[: len(starts)] = starts
        return ends

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.tokens), self.seq_len

    @property
    def _num_inputs(self) -> int:
        return len(self.tokens) * self.seq_len

    @lazy
    def _borders(self) -> Tiling:
        return self._found.input_borders(self._place)

    def __getstate__(self) -> dict[str, object]:
        # The other steps that were read with this one stay behind.
        return {**self.__dict__, "_found": self._found.only(self._place), "_place": 0}

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, rows={len(self.tokens)}, seq_len={self.seq_len})"
