"""Tokens that lie on the device already: only the pieces of the rows travel.

The host never reads a token. What is beside the ids (positions, masks) is made and sent as it is
for tokens that travel, so that the tensors of both are the same.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.loader.batch import NO_ROW
from tokenmill.loader.layouts.base import PADDING, Pieces
from tokenmill.loader.layouts.packings import make_layout
from tokenmill.loader.torch.pool import TokenPool
from tokenmill.store.spans import distinct
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

    from tokenmill.loader.batch import Draw
    from tokenmill.loader.chunk import Chunk
    from tokenmill.loader.layouts.base import Layout
    from tokenmill.loader.loader import Loader
    from tokenmill.loader.torch.tensors import Arrays, Form, Tensors
    from tokenmill.store.format import TokenArray
    from tokenmill.store.reader import Store
    from tokenmill.store.spans import Spans


class _UnreadStream(TokenStream):
    """Knows where documents are; its tokens are on the device, and nobody looks at them here.

    Nor at its masks: here it has none.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.has_mask = False

    def read_ahead(self, spans: Spans) -> None:
        """Nothing is to be brought."""

    def read_spans(self, spans: Spans, *, pad: int | None) -> TokenArray:  # noqa: ARG002
        return np.empty(int((spans.lasts - spans.firsts).sum()), self.dtype)


class ResidentTokens:
    """Rows are gathered on the device, from all tokens of the loader's stores."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader = loader
        stages = loader.mixture.stages
        longest = max(stage.seq_len or loader.options.seq_len for stage in stages)
        self._pool = TokenPool(
            [layout.stream for layout in loader.layouts()],
            pad_id=loader.options.pad_id,
            pad_tokens=longest + 1,
            device=device,
        )
        self.layouts: Callable[[int], Sequence[Layout]] = cache(self._make_layouts)
        self._capacity = 1

    def _make_layouts(self, seq_len: int) -> tuple[Layout, ...]:
        """The loader's layouts, with tokens that are not read."""
        return tuple(
            make_layout(self._loader.options.packing, _UnreadStream(store), seq_len=seq_len)
            for store in self._loader.mixture.stores
        )

    def has_mask(self, chunk: Chunk) -> bool:  # noqa: ARG002 (all of them, or none)
        return self._pool.has_mask

    def arrays(self, chunk: Chunk, *, first: int, last: int, form: Form) -> Arrays:
        """For `TokenPool.find`, at a length that changes at most a few times in a run."""
        if not (form.has_ids or (form.has_labels and self._pool.has_mask)):
            return {}
        draw = chunk.draw.part(first, last)
        pieces, sources = cut_rows(draw, self.layouts(draw.seq_len))
        while self._capacity < len(pieces.lengths):
            self._capacity *= 2
        found = np.cumsum(pieces.lengths)
        starts = np.where(
            pieces.starts == PADDING, self._pool.padding, pieces.starts + self._pool.bases[sources]
        )
        num_places = draw.rows.size * (draw.seq_len + 1)
        ends, shifts = np.full(self._capacity, num_places), np.zeros(self._capacity, np.int64)
        ends[: len(found)] = found
        np.subtract(starts, found - pieces.lengths, out=shifts[: len(found)])
        return {"ends": ends, "shifts": shifts}

    def on_device(self, sent: Tensors, shape: tuple[int, int, int], *, form: Form) -> Tensors:
        if "ends" not in sent:
            return {}
        steps, rows, seq_len = shape
        shape = steps, rows, seq_len + 1
        found = self._pool.find(sent["ends"], sent["shifts"], num_places=math.prod(shape))
        made: Tensors = {}
        if form.has_ids:
            made["tokens"] = self._pool.gather(found).view(shape)
        if form.has_labels and self._pool.has_mask:
            made["mask"] = self._pool.gather_mask(found).view(shape)
        return made


def cut_rows(draw: Draw, layouts: Sequence[Layout]) -> tuple[Pieces, NDArray[np.int64]]:
    """The pieces of all rows, in the order of the rows, and the source of each piece."""
    rows, sources = draw.rows.ravel(), draw.sources.ravel()
    is_empty = rows == NO_ROW
    present = distinct(sources[~is_empty])
    if len(present) == 1 and not is_empty.any():
        pieces = layouts[present[0]].pieces(rows)
        return pieces, np.full(len(pieces.starts), present[0])
    places = [np.flatnonzero(is_empty)]
    size = draw.seq_len + 1
    parts = [Pieces(np.full(len(places[0]), PADDING), np.full(len(places[0]), size))]
    owners = [np.zeros(len(places[0]), np.int64)]
    for source in present:
        here = np.flatnonzero((sources == source) & ~is_empty)
        pieces = layouts[source].pieces(rows[here])
        first = np.cumsum(pieces.lengths) - pieces.lengths
        places.append(here[first // size])
        parts.append(pieces)
        owners.append(np.full(len(first), source))
    order = np.argsort(np.concatenate(places), kind="stable")
    joined = Pieces(
        np.concatenate([part.starts for part in parts])[order],
        np.concatenate([part.lengths for part in parts])[order],
    )
    return joined, np.concatenate(owners)[order]
