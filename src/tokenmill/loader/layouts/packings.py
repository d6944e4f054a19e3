"""The packings by name."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from tokenmill.errors import UsageError
from tokenmill.loader.layouts.best_fit import BestFitLayout
from tokenmill.loader.layouts.concat import ConcatLayout
from tokenmill.loader.layouts.pad import PadLayout

if TYPE_CHECKING:
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


def make_layout(packing: Packing, stream: TokenStream, *, seq_len: int) -> Layout:
    """A stream, cut into rows."""
    if packing is Packing.CONCAT:
        return ConcatLayout(stream, seq_len=seq_len)
    if packing is Packing.PAD:
        return PadLayout(stream, seq_len=seq_len)
    return BestFitLayout(stream, seq_len=seq_len)
