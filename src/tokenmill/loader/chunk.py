"""Several steps' tokens read in one go: what batches are views of.

A read of one batch would spend more time on calls than on copying: 16 rows of 2,048 tokens are
copied in about 10 microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from tokenmill.loader.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from tokenmill.loader.batch import BatchFormat, Draw, FoundSteps, Tiling
    from tokenmill.store.format import TokenArray


class Chunk:
    """The tokens of some consecutive steps of a window."""

    def __init__(
        self,
        window: FoundSteps,
        first: int,
        tokens: TokenArray,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        self._window = window
        self._first = first
        self.tokens = tokens
        """(steps, rows, seq_len + 1), in the stored width."""
        self.mask = mask
        """Which of the tokens count; None where no store says so. Padding does not."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + (0 if self.mask is None else self.mask.nbytes)

    @property
    def step_tokens(self) -> int:
        """Inputs of a step."""
        _, rows, row_tokens = self.tokens.shape
        return int(rows * (row_tokens - 1))

    @property
    def draw(self) -> Draw:
        """The rows of these steps."""
        return self._window.draw.part(self._first, self._first + len(self))

    @property
    def steps(self) -> range:
        return self._window.draw.steps[self._first : self._first + len(self)]

    def batches(self) -> Iterator[Batch]:
        """The batch of each step."""
        window, places = self._window, range(self._first, self._first + len(self))
        masks = repeat(None) if self.mask is None else self.mask
        batches = map(Batch, repeat(window), places, self.steps, self.tokens, masks)
        if window.format.dtype is not None:
            return batches
        return map(Batch.keep_views, batches, self.tokens[..., :-1], self.tokens[..., 1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class OneStep:
    """What a batch needs after it was pickled."""

    draw: Draw
    format: BatchFormat
    has_padding: bool
    tokens: Tiling
    inputs: Tiling

    def is_padded(self, place: int) -> bool:  # noqa: ARG002 (there is one)
        return self.has_padding

    def token_borders(self, place: int) -> Tiling:  # noqa: ARG002
        return self.tokens

    def input_borders(self, place: int) -> Tiling:  # noqa: ARG002
        return self.inputs

    def only(self, place: int) -> OneStep:  # noqa: ARG002
        return self
