"""The packings by name."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from tokenmill.errors import UsageError
from tokenmill.loader.layouts.best_fit import BestFitLayout
from tokenmill.loader.layouts.concat import ConcatLayout
from tokenmill.loader.layouts.pad import PadLayout
from tokenmill.loader.plan import Extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenmill.loader.layouts.base import Layout
    from tokenmill.store.stream import TokenStream


class Packing(StrEnum):
    """How documents share rows."""

    CONCAT = "concat"
    BEST_FIT = "best-fit"
    PAD = "pad"

    @classmethod
    def of(cls, value: object) -> Packing:
        """The packing of a name; UsageError lists them all."""
        try:
            return cls(str(value))
        except ValueError:
            raise UsageError(
                f"there is no packing {value!r}",
                hint=f"use one of: {', '.join(map(repr, map(str, cls)))}",
            ) from None


class LayoutSet:
    """The layouts of several streams, for every sequence length that is asked for."""

    def __init__(self, packing: Packing, streams: Sequence[TokenStream]) -> None:
        self._packing = packing
        self._streams = streams
        self._made: dict[int, tuple[Layout, ...]] = {}

    def __call__(self, seq_len: int) -> tuple[Layout, ...]:
        """The layout of each stream."""
        if seq_len not in self._made:
            self._made[seq_len] = tuple(
                make_layout(self._packing, stream, seq_len=seq_len) for stream in self._streams
            )
        return self._made[seq_len]

    def measure(self, seq_len: int) -> list[Extent]:
        """Rows of each stream; tokens too where the shares of a mixture depend on them."""
        layouts = self(seq_len)
        if self._packing is Packing.CONCAT or len(layouts) == 1:
            return [Extent(rows=layout.num_rows) for layout in layouts]
        return [Extent(rows=layout.num_rows, tokens=layout.used) for layout in layouts]


def make_layout(packing: Packing, stream: TokenStream, *, seq_len: int) -> Layout:
    """A stream, cut into rows."""
    if packing is Packing.CONCAT:
        return ConcatLayout(stream, seq_len=seq_len)
    if packing is Packing.PAD:
        return PadLayout(stream, seq_len=seq_len)
    return BestFitLayout(stream, seq_len=seq_len)
