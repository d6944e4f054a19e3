"""`best-fit`: whole documents share rows so that almost nothing is padding.

    lengths -> packing -> a plan beside the store, made once -> pieces of any rows

A document that does not fit a row is split into full rows and a rest that is packed like any other;
nothing is dropped. Rows come in the order of their first documents, so that reading them in order
reads the store almost in order.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.account import masked_targets
from tokenmill.loader.layouts.base import PADDING, Account, Pieces
from tokenmill.loader.layouts.packing import length_blocks, pack
from tokenmill.store.plans import (
    MAX_ITEM_TOKENS,
    MAX_STREAM_TOKENS,
    PLAN_VERSION,
    PlanKey,
    PlanTally,
    open_plan,
    unpack_items,
)
from tokenmill.store.sealed import checksum_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tokenmill.store.plans import PlanWriter
    from tokenmill.store.reader import Store
    from tokenmill.store.stream import TokenStream

PACKING = "best-fit"


class BestFitLayout:
    """A store, cut into rows of whole documents; `progress` gets documents planned and in all."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        seq_len: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        _check_limits(stream.store, seq_len=seq_len)
        self.stream = stream
        self.seq_len = seq_len
        key = PlanKey(packing=PACKING, seq_len=seq_len, content=stream.store.content)
        plan = open_plan(
            stream.store,
            key,
            make=lambda writer: _plan(writer, stream.store, seq_len=seq_len, progress=progress),
        )
        self.num_rows = plan.facts.rows
        self._plan = plan
        self._items = plan.items
        self._row_starts = plan.row_starts

    @property
    def fingerprint(self) -> str:
        """Equal for two layouts only if their rows are equal."""
        rule = f"{PACKING} {PLAN_VERSION} {self.seq_len} {self.stream.store.content}"
        return checksum_of(rule.encode("ascii"))

    def pieces(self, rows: NDArray[np.int64]) -> Pieces:
        """What to read for these rows: one piece for each document in them, then padding."""
        self._plan.require_whole()
        first = self._row_starts[rows]
        # One place more than items, for the padding; what is gathered into it is overwritten.
        counts = self._row_starts[rows + 1] - first + 1
        if counts.min(initial=1) < 1 or counts.max(initial=1) > self.seq_len + 2:
            raise self._damaged()
        ends = np.cumsum(counts)
        begins = ends - counts
        wanted = np.repeat(first - begins, counts)
        wanted += np.arange(len(wanted))
        starts, lengths = unpack_items(self._items.take(wanted, mode="clip"))
        last = ends - 1
        starts[last] = PADDING
        lengths[last] = 0
        room = self.seq_len + 1 - np.add.reduceat(lengths, begins) if len(rows) else last
        if room.min(initial=0) < 0:
            raise self._damaged()
        lengths[last] = room
        if room.all():
            return Pieces(starts, lengths)
        filled = lengths > 0
        return Pieces(starts[filled], lengths[filled])

    def segments(self, rows: NDArray[np.int64]) -> Pieces:
        """The same: a piece is of one document."""
        return self.pieces(rows)

    @property
    def used(self) -> int:
        """Tokens of the store that stand in a row: all."""
        return self._plan.facts.used

    def account(self) -> Account:
        """Where the tokens go, as it was counted when the rows were planned; reads all masks."""
        facts = self._plan.facts
        counted = {field.name: getattr(facts, field.name) for field in fields(Account)}
        if self.stream.has_mask:
            # The plan knows of lengths alone. No document is cut off: all its tokens but the first
            # are labels somewhere.
            counted["targets"] = masked_targets(self.stream.store)
        return Account(**counted)

    def _damaged(self) -> StoreError:
        return StoreError(
            f"the plan {str(self._plan.path)!r} has a row of more than {self.seq_len + 1:,} tokens:"
            " it was changed after it was made",
            hint="delete the file: it is made again when it is needed",
        )

    def __reduce__(self) -> tuple[object, ...]:
        # The plan stays on the disk: another process maps it for itself.
        return _reopen, (self.stream, self.seq_len)


def _reopen(stream: TokenStream, seq_len: int) -> BestFitLayout:
    return BestFitLayout(stream, seq_len=seq_len)


def _check_limits(store: Store, *, seq_len: int) -> None:
    if not 0 < seq_len < MAX_ITEM_TOKENS:
        raise UsageError(
            f"seq_len {seq_len:,} is not from 1 to {MAX_ITEM_TOKENS - 1:,}, which is what a plan of"
            " best-fit rows can hold",
            hint="choose another seq_len, or packing='concat'",
        )
    if store.num_tokens > MAX_STREAM_TOKENS:
        raise UsageError(
            f"{store!r} has more than the {MAX_STREAM_TOKENS:,} tokens that a plan of best-fit rows"
            " can point into",
            hint="train on it with packing='concat', or divide it into several stores",
        )


def _plan(
    writer: PlanWriter,
    store: Store,
    *,
    seq_len: int,
    progress: Callable[[int, int], None] | None,
) -> PlanTally:
    """Write all rows; returns what they account for."""
    documents = tokens = pieces = split = 0
    for rows in pack(length_blocks(store), seq_len=seq_len):
        writer.add(rows.items, row_starts=rows.row_starts)
        documents += rows.documents
        tokens += rows.tokens
        pieces += len(rows.items)
        split += rows.split_documents
        if progress is not None:
            progress(documents, store.num_documents)
    return PlanTally(
        documents=store.num_documents,
        tokens=tokens,
        used=tokens,
        dropped=0,
        repeated=pieces - documents,
        split_documents=split,
        cut_documents=0,
        targets=tokens - documents,
    )
