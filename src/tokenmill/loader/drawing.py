"""Draws the rows of steps: a plan's rows of a stage become rows of layouts, in their order.

Rows of many steps are drawn in one call: a draw of one batch costs as much as one of a hundred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.loader.batch import NO_ROW, Draw
from tokenmill.loader.options import Last
from tokenmill.loader.order import Order
from tokenmill.store.spans import distinct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.options import LoaderOptions
    from tokenmill.loader.plan import StageRun

DRAW_ROWS = 4096
"""Rows whose order is computed in one go."""
_ENDLESS = 1 << 62


class Drawer:
    """Draws the rows of one rank."""

    def __init__(self, options: LoaderOptions, *, names: Sequence[str]) -> None:
        self._options = options
        self._names = names

    def draw(self, run: StageRun, steps: range) -> Draw:
        """Rows of some steps of one stage; steps that are not full are drawn alone."""
        size = run.batch_rows // self._options.world_size
        first = run.first_row + (np.array(steps) - run.first_step) * run.batch_rows
        wanted = first[:, None] + (self._options.rank * size + np.arange(size))
        inside = wanted < (_ENDLESS if run.num_rows is None else run.num_rows)
        if inside.all():
            found = self._locate(run, wanted.ravel())
            sources, rows, epochs = (part.reshape(wanted.shape) for part in found)
            only = 0 if len(self._names) == 1 else None
            return Draw(steps, run.seq_len, sources, rows, epochs, only)
        sources, rows, epochs = (np.full(wanted.shape, NO_ROW, np.int64) for _ in range(3))
        sources[inside], rows[inside], epochs[inside] = self._locate(run, wanted[inside])
        kept = int(inside[-1].sum()) if self._options.last is Last.KEEP else size
        return Draw(steps, run.seq_len, sources[:, :kept], rows[:, :kept], epochs[:, :kept])

    def _locate(self, run: StageRun, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Source, row and epoch of rows of a stage."""
        sources, indices = run.schedule.locate(wanted)
        if len(self._names) == 1:
            return (sources, *self._order(run, 0).rows(indices))
        rows, epochs = np.empty_like(indices), np.empty_like(indices)
        for source in distinct(sources):
            here = sources == source
            rows[here], epochs[here] = self._order(run, source).rows(indices[here])
        return sources, rows, epochs

    def _order(self, run: StageRun, source: int) -> Order:
        return Order(
            shuffle=self._options.shuffle,
            seed=self._options.seed,
            source=self._names[source],
            num_rows=int(run.rows_per_epoch[source]),
            seq_len=run.seq_len,
        )

    def end_of_draw(self, run: StageRun, step: int, stride: int) -> int:
        """First step that is not drawn together with `step`: too far, or of another shape."""
        size = run.batch_rows // self._options.world_size
        # A source of a few rows has many epochs in a draw, and each has an order of its own.
        rows = min(DRAW_ROWS, 4 * int(run.rows_per_epoch.max()))
        ends = [step + stride * max(1, rows // size)]
        if run.num_steps is not None and run.num_rows is not None:
            ends.append(run.first_step + run.num_steps)
            full = run.first_step + (run.num_rows - run.first_row) // run.batch_rows
            if step < full:
                ends.append(full)
        return min(ends)
