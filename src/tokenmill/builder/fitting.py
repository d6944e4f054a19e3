"""Rows by their length: what is over the longest length allowed is cut off, rejected or cut up.

    rows, framed -> fit -> rows to keep -> cut_lengths -> documents

Lengths are those of documents as a store holds them, BOS and EOS counted. Cutting up changes no
token: the pieces of a row, one behind the other, are the row. So only the first of them begins with
the BOS, and only the last ends with the EOS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.builder.framing import Scratch, frame_documents
from tokenmill.records import RejectReason, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tokenmill.config import RowShape


@dataclass(frozen=True, slots=True)
class Fitted:
    """The rows of a batch that are kept, framed, none of them cut up yet."""

    tokens: TokenBatch
    kept: NDArray[np.int64]
    """Their places in the batch."""
    reasons: Mapping[int, tuple[RejectReason, str]]
    """Why the others are not kept, by place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """Measures rows."""

    shape: RowShape
    bos_id: int | None
    eos_id: int | None

    @classmethod
    def of(
        cls, shape: RowShape | None, *, bos_id: int | None, eos_id: int | None
    ) -> Fitting | None:
        """None where rows are taken as they are, and framed where they are written."""
        if shape is None or not (shape.has_mask or shape.max_length):
            return None
        return cls(shape=shape, bos_id=bos_id, eos_id=eos_id)

    def fit(self, tokens: TokenBatch) -> Fitted:
        """The rows that are kept; those with masks are framed already, others are framed here."""
        if not self.shape.has_mask:
            tokens = _framed(tokens, bos_id=self.bos_id, eos_id=self.eos_id)
        limit = self.shape.max_length
        reasons: dict[int, tuple[RejectReason, str]] = {}
        if limit is not None and self.shape.too_long == "reject":
            for place in np.flatnonzero(tokens.lengths > limit).tolist():
                what = f"{int(tokens.lengths[place]):,} tokens; the limit is {limit:,}"
                reasons[place] = (RejectReason.TOO_LONG, what)
        elif limit is not None and self.shape.too_long == "truncate":
            tokens = _truncated(tokens, limit)
        if tokens.mask is not None:
            for place in _without_target(tokens, tokens.mask, limit):
                reasons.setdefault(place, (RejectReason.NOTHING_TO_TRAIN, _untrained(limit)))
        return _without(tokens, reasons)


def cut_lengths(
    lengths: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths of all pieces of rows, none over the limit, and how many pieces each row has."""
    counts = -(-lengths // limit)
    ends = np.cumsum(counts)
    pieces = np.full(int(ends[-1]) if len(ends) else 0, limit, np.int64)
    pieces[ends - 1] = lengths - (counts - 1) * limit
    return pieces, counts


def _framed(tokens: TokenBatch, *, bos_id: int | None, eos_id: int | None) -> TokenBatch:
    """The rows with their border tokens; those without a token get none."""
    filled = np.flatnonzero(tokens.lengths)
    lengths = np.zeros(len(tokens), np.int64)
    ids, lengths[filled] = frame_documents(
        tokens,
        documents=filled,
        dtype=np.dtype(np.uint32),
        bos_id=bos_id,
        eos_id=eos_id,
        scratch=Scratch(),
    )
    return TokenBatch(ids, _offsets(lengths))


def _truncated(tokens: TokenBatch, limit: int) -> TokenBatch:
    lengths = tokens.lengths
    if not (lengths > limit).any():
        return tokens
    kept = np.arange(len(tokens.ids)) - np.repeat(tokens.offsets[:-1], lengths) < limit
    mask = None if tokens.mask is None else tokens.mask[kept]
    return TokenBatch(tokens.ids[kept], _offsets(np.minimum(lengths, limit)), mask)


def _without_target(tokens: TokenBatch, mask: NDArray[np.uint8], limit: int | None) -> list[int]:
    """Rows of which no token can be a label that counts: the first of a document never is one."""
    lengths = tokens.lengths
    labels = mask.astype(np.int64)
    if limit is None:
        labels[tokens.offsets[:-1][lengths > 0]] = 0
    else:
        places = np.arange(len(mask)) - np.repeat(tokens.offsets[:-1], lengths)
        labels[places % limit == 0] = 0
    counted = np.concatenate(([0], np.cumsum(labels)))
    found = counted[tokens.offsets[1:]] - counted[tokens.offsets[:-1]]
    rows: list[int] = np.flatnonzero((found == 0) & (lengths > 0)).tolist()
    return rows


def _untrained(limit: int | None) -> str:
    within = "" if limit is None else f" within {limit:,} tokens"
    return f"no token of it would be trained on{within}"


def _without(tokens: TokenBatch, reasons: dict[int, tuple[RejectReason, str]]) -> Fitted:
    if not reasons:
        return Fitted(tokens, np.arange(len(tokens)), reasons)
    is_kept = np.ones(len(tokens), bool)
    is_kept[list(reasons)] = False
    inside = np.repeat(is_kept, tokens.lengths)
    mask = None if tokens.mask is None else tokens.mask[inside]
    batch = TokenBatch(tokens.ids[inside], _offsets(tokens.lengths[is_kept]), mask)
    return Fitted(batch, np.flatnonzero(is_kept), reasons)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths)))
