"""What a feeder's thread sends at a time: the arrays of a few consecutive steps.

    Loader.chunks -> Parcel (arrays of up to 16 steps) -> device -> tensors of all these steps

Python's lock is why steps travel together: each call of the thread takes it from the training loop
for some tens of microseconds, and a parcel needs no more calls than a step. The first parcels hold
1, 2, 4, ... steps, as the loader's chunks do, so that the first batch does not wait for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from tokenmill.loader.chunk import Chunk
    from tokenmill.loader.layouts.base import Layout
    from tokenmill.loader.loader import Loader
    from tokenmill.loader.torch.tensors import Arrays, Form, Tensors

MOST_STEPS = 16
MOST_TOKENS = 1 << 18
"""Of a parcel with more than one step: it is some megabytes, of which several are on their way."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The arrays of some steps, as they travel."""

    steps: range
    shape: tuple[int, int, int]
    """Steps, rows, and tokens of a row: that of `input_ids`."""
    arrays: Arrays


class Tokens(Protocol):
    """How tokens get to the device."""

    @property
    def layouts(self) -> Callable[[int], Sequence[Layout]] | None:
        """What the host reads rows of a length with; None is the loader's own."""
        ...

    def has_mask(self, chunk: Chunk) -> bool:
        """Whether it is known on the device which tokens of a chunk count."""
        ...

    def arrays(self, chunk: Chunk, *, first: int, last: int, form: Form) -> Arrays:
        """What travels for the tokens of some steps of a chunk, and for their masks."""
        ...

    def on_device(self, sent: Tensors, shape: tuple[int, int, int], *, form: Form) -> Tensors:
        """`tokens` and `mask`, (steps, rows, seq_len + 1), as far as they are wanted."""
        ...


class StreamedTokens:
    """They are read from the store, and sent."""

    layouts = None

    def has_mask(self, chunk: Chunk) -> bool:
        return chunk.mask is not None

    def arrays(self, chunk: Chunk, *, first: int, last: int, form: Form) -> Arrays:
        arrays: Arrays = {}
        if form.has_ids:
            arrays["tokens"] = chunk.tokens[first:last]
        if form.has_labels and chunk.mask is not None:
            arrays["mask"] = chunk.mask[first:last]
        return arrays

    def on_device(
        self,
        sent: Tensors,  # noqa: ARG002 (they are in it)
        shape: tuple[int, int, int],  # noqa: ARG002 (they have it)
        *,
        form: Form,  # noqa: ARG002
    ) -> Tensors:
        return {}


@dataclass(frozen=True, slots=True)
class Feed:
    """Where parcels come from, and what is made of them on the device."""

    loader: Loader
    form: Form
    tokens: Tokens

    def parcels(self, first: int) -> Generator[Parcel]:
        """From a step on, until the steps end."""
        for chunk in self.loader.chunks(first, layouts=self.tokens.layouts):
            has_mask = self.tokens.has_mask(chunk)
            place, most = 0, max(1, min(MOST_STEPS, MOST_TOKENS // max(1, chunk.step_tokens)))
            for batches in self.form.alike(chunk.batches(), most=most):
                end = place + len(batches)
                arrays = self.form.stacked(batches, has_mask=has_mask)
                arrays |= self.tokens.arrays(chunk, first=place, last=end, form=self.form)
                shape = (len(batches), len(batches[0].tokens), batches[0].seq_len)
                yield Parcel(chunk.steps[place:end], shape, arrays)
                place = end

    def tensors(self, sent: Tensors, shape: tuple[int, int, int]) -> Tensors:
        """The fields of all steps of a parcel, of what was sent."""
        sent |= self.tokens.on_device(sent, shape, form=self.form)
        return self.form.tensors(sent)
