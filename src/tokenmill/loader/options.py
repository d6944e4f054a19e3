"""What a loader is told, checked: every error says which value is wrong and what would do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.store.format import MAX_DOCUMENT_TOKENS

if TYPE_CHECKING:
    from tokenmill.loader.order import Shuffle
    from tokenmill.loader.packing import Layout
    from tokenmill.store.reader import Store

_Choice = TypeVar("_Choice", bound=StrEnum)


class Last(StrEnum):
    """What becomes of the rows that do not fill the last batch of a run that ends."""

    PAD = "pad"
    """Filled up with rows of padding, whose labels do not count."""
    KEEP = "keep"
    """A smaller batch; with several ranks the last ones may have no row at all."""
    DROP = "drop"
    """Left out."""


class Boundaries(StrEnum):
    """What becomes of the label that is the first token of another document."""

    KEEP = "keep"
    MASK = "mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """Everything a loader is told but its source; each has its place in `Loader`'s signature."""

    seq_len: int
    batch_size: int
    packing: type[Layout]
    boundaries: Boundaries
    shuffle: Shuffle
    seed: int
    rank: int
    world_size: int
    last: Last
    dtype: np.dtype[np.integer] | None
    pad_id: int
    prefetch: int
    cu_seqlens_capacity: int | None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "world_size"):
            require_number(name, getattr(self, name), at_least=1)
        if self.seq_len >= MAX_DOCUMENT_TOKENS:
            raise UsageError(
                f"seq_len={self.seq_len:,} is more than any document can have",
                hint="give what your model takes, like seq_len=2048",
            )
        require_number("prefetch", self.prefetch, at_least=0)
        if self.cu_seqlens_capacity is not None:
            require_number("cu_seqlens_capacity", self.cu_seqlens_capacity, at_least=2)
        if type(self.seed) is not int:
            raise UsageError(f"seed={self.seed!r} is not a whole number", hint="use one: seed=0")
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank={self.rank!r} is not one of the {self.world_size} ranks",
                hint=f"ranks count from 0 to world_size - 1 = {self.world_size - 1}",
            )


def check_pad_id(store: Store, pad_id: int | None) -> int:
    """The id of padding: any will do, since its labels never count; the end of text by default."""
    if pad_id is None:
        return store.eos_id or 0
    if type(pad_id) is not int or not 0 <= pad_id < store.vocab_size:
        raise UsageError(
            f"pad_id={pad_id!r} is not an id of the vocabulary of {store.vocab_size:,}",
            hint="leave it out: padding never counts, and the end of text does for it",
        )
    return pad_id


def id_dtype(name: object) -> np.dtype[np.integer] | None:
    known: dict[object, np.dtype[np.integer] | None] = {
        "int64": np.dtype(np.int64),
        "int32": np.dtype(np.int32),
        "stored": None,
    }
    if not isinstance(name, str) or name not in known:
        raise UsageError(
            f"dtype={name!r} is not known",
            hint='use "int64", "int32" or "stored" (narrow ids, labels as views)',
        )
    return known[name]


def choice(kind: type[_Choice], name: str, value: object) -> _Choice:
    try:
        return kind(str(value))
    except ValueError:
        raise UsageError(
            f"{name}={value!r} is not known",
            hint=f"use one of: {', '.join(map(repr, map(str, kind)))}",
        ) from None


def require_number(name: str, value: object, *, at_least: int) -> None:
    if type(value) is not int or value < at_least:
        raise UsageError(
            f"{name}={value!r} is not a whole number of {at_least} or more",
            hint=f"give one, like {name}={max(at_least, 8)}",
        )
