"""The verb `layout`: what each packing would do with a store, before anyone trains on it.

    Store -> one Account per packing -> LayoutReport -> the command line draws it

Only `best-fit` needs more than a pass over the lengths: its plan is made if there is none yet, and
kept for the training to come. Where a store has masks, they are read too: to count targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import UsageError
from tokenmill.loader.layouts.best_fit import BestFitLayout
from tokenmill.loader.layouts.packings import Packing, make_layout
from tokenmill.store.format import MAX_DOCUMENT_TOKENS
from tokenmill.store.reader import Store
from tokenmill.store.stream import TokenStream

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tokenmill.loader.layouts.base import Account

    OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutReport:
    """What the packings make of a store."""

    store: str
    split: str | None
    """None means all of them."""
    seq_len: int
    documents: int
    tokens: int
    counted: int | None
    """Tokens that count by their masks; None where the store has none."""
    accounts: tuple[Account, ...]
    batch_size: int | None = None
    """Rows of a global batch: those of all ranks together."""

    def steps(self, account: Account) -> int | None:
        """Batches of one epoch, the last one full or not; None where no size was given."""
        return None if self.batch_size is None else -(-account.rows // self.batch_size)


def layout(
    store: str | os.PathLike[str] | Store,
    *,
    seq_len: int,
    split: str | None = "train",
    packings: Sequence[str] | None = None,
    batch_size: int | None = None,
    on_progress: OnProgress | None = None,
) -> LayoutReport:
    """Account for every token of a split under each packing; an open store has its split already.

    `on_progress` gets the documents that are planned and those in all, where a plan must be made.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value is not None and not 0 < value < MAX_DOCUMENT_TOKENS:
            raise UsageError(f"{name} {value:,} is not from 1 to {MAX_DOCUMENT_TOKENS - 1:,}")
    chosen = Packing if packings is None else dict.fromkeys(map(Packing.of, packings))
    opened = store if isinstance(store, Store) else Store(store, split=split)
    stream = TokenStream(opened)
    return LayoutReport(
        store=str(opened.path if opened.is_remote or isinstance(store, Store) else store),
        split=opened.split,
        seq_len=seq_len,
        documents=opened.num_documents,
        tokens=opened.num_tokens,
        counted=opened.num_counted if opened.has_mask else None,
        accounts=tuple(
            _account(packing, stream, seq_len=seq_len, on_progress=on_progress)
            for packing in chosen
        ),
        batch_size=batch_size,
    )


def _account(
    packing: Packing, stream: TokenStream, *, seq_len: int, on_progress: OnProgress | None
) -> Account:
    if packing is Packing.BEST_FIT:
        return BestFitLayout(stream, seq_len=seq_len, progress=on_progress).account()
    return make_layout(packing, stream, seq_len=seq_len).account()
