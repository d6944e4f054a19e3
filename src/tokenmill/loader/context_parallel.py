"""Cuts the rows of a batch for context parallelism: every peer holds a part of each row.

Peers of one group pass the same `rank` to the loader, get the same rows, and cut them here. With
causal attention the later tokens cost more, so `zigzag` gives each peer one early and one late
chunk (ring attention's balanced order):

    size=2, rows of 8        rank 0: 0 1 6 7      rank 1: 2 3 4 5

Labels are next tokens already, so `input_ids`, `labels`, `position_ids`, `doc_ids` and `loss_mask`
are cut alike. `cu_seqlens` counts whole rows and cannot be cut.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class ContextOrder(StrEnum):
    """Which chunks of a row a peer takes."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"


class _Rows(Protocol):
    """What numpy arrays and torch tensors have in common, as far as types can tell."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Rows = TypeVar("Rows", bound=_Rows)


def slice_row(array: Rows, *, rank: int, size: int, order: str = "zigzag") -> Rows:
    """What peer `rank` of `size` holds of each row; rows lie along the last axis.

    >>> slice_row(batch.input_ids, rank=0, size=2)
    """
    if size < 1 or not 0 <= rank < size:
        raise UsageError(
            f"rank {rank} of {size} context-parallel peers does not exist",
            hint=f"use a rank from 0 to {max(size, 1) - 1}",
        )
    if order not in tuple(ContextOrder):
        raise UsageError(
            f"order={order!r} is not known", hint='use order="zigzag" or order="contiguous"'
        )
    num_chunks = size if order == ContextOrder.CONTIGUOUS else 2 * size
    *lead, seq_len = array.shape
    if seq_len % num_chunks:
        raise UsageError(
            f"rows of {seq_len} tokens cannot be cut into {num_chunks} equal chunks"
            f" for {size} context-parallel peers",
            hint=f"use a seq_len that is a multiple of {num_chunks}",
        )
    rows: Any = array
    chunks = rows.reshape(*lead, num_chunks, seq_len // num_chunks)
    last = rank if order == ContextOrder.CONTIGUOUS else num_chunks - 1 - rank
    # A plain slice picks both chunks: a list of two would be copied to the device, and waited for.
    taken: Rows = chunks[..., rank : last + 1 : max(1, last - rank), :].reshape(*lead, -1)
    # Neighbouring chunks come as a view; of a tensor, many want to take a view in turn.
    contiguous: Callable[[], Rows] | None = getattr(taken, "contiguous", None)
    return taken if contiguous is None else contiguous()
