"""Batches of pairs: prompts with chosen and with rejected answers, for preference training.

    store of pairs -> PairLoader -> PairBatch: chosen sides first, rejected ones after them

A pair stays together: order, batches and ranks are of pairs. Labels stand where their tokens do,
-100 for prompts and padding, as in TRL's batches: models of transformers shift them themselves.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreError, UsageError
from tokenmill.loader.batch import IGNORED, check_pad_id
from tokenmill.loader.mixture import open_split
from tokenmill.loader.order import check_shuffle, ordered_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from tokenmill.loader.mixture import StoreInput

_STATE = ("version", "store", "pairs_a_step", "seq_len", "seed", "shuffle")


@dataclass(frozen=True, slots=True, eq=False)
class PairBatch:
    """Pairs for one step on one rank: rows 0 to n - 1 are chosen, rows n to 2n - 1 rejected."""

    step: int
    pairs: NDArray[np.int64]
    """The number of each pair in its store: `store.pair(number)`."""
    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    completion_mask: NDArray[np.int64]
    """1 for the tokens of answers."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The ids of answers in their places, -100 elsewhere."""
        return np.where(self.completion_mask == 1, self.input_ids, IGNORED)


class PairLoader:
    """Batches of pairs, without end unless `epochs` says so; a batch is a function of its step.

    >>> loader = tokenmill.PairLoader("pairs", split="train", seq_len=1024, batch_size=8)
    >>> for batch in loader:
    ...     batch.input_ids[:8], batch.input_ids[8:]      # chosen, rejected

    `batch_size` is that of this rank, in pairs. A side of more than `seq_len` tokens keeps its
    first ones. Pairs that do not fill the last batch of a run that ends are left out of it.
    """

    def __init__(
        self,
        store: StoreInput,
        *,
        seq_len: int,
        batch_size: int,
        shuffle: bool | str = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: float | None = None,
        pad_id: int | None = None,
        split: str | None = None,
    ) -> None:
        self.store = open_split(store, split)
        if not self.store.has_pairs:
            raise UsageError(
                f"{str(self.store.path)!r} holds no pairs of a chosen and a rejected answer",
                hint="use tokenmill.Loader, or: tokenmill build FILE --format preference",
            )
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
            if value < 1:
                raise UsageError(f"{name}={value!r} is less than 1", hint=f"use {name}=8, or so")
        if not 0 <= rank < world_size:
            problem = f"rank={rank!r} is not one of {world_size} ranks, counted from 0"
            raise UsageError(problem, hint=f"use a rank from 0 to {world_size - 1}")
        self.seq_len, self.batch_size = seq_len, batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.shuffle, self.pad_id = check_shuffle(shuffle), check_pad_id(self.store, pad_id)
        self.num_steps: int | None = None
        if epochs is not None:
            self.num_steps = int(epochs * self.store.num_pairs) // self.pairs_a_step
        if not self.store.num_pairs or self.num_steps == 0:
            raise UsageError(
                f"{self.store.num_pairs:,} pairs make no batch of {self.pairs_a_step:,}",
                hint="use a smaller batch_size, or more epochs",
            )
        self._step = 0

    @property
    def pairs_a_step(self) -> int:
        """Pairs of all ranks together."""
        return self.batch_size * self.world_size

    def __iter__(self) -> Iterator[PairBatch]:
        while self.num_steps is None or self._step < self.num_steps:
            batch = self.batch(self._step)
            self._step += 1
            yield batch

    def batch(self, step: int) -> PairBatch:
        """The batch of a step on this rank."""
        first = step * self.pairs_a_step + self.rank * self.batch_size
        pairs, _ = ordered_rows(
            np.arange(first, first + self.batch_size),
            shuffle=self.shuffle,
            seed=self.seed,
            source="pairs",
            num_rows=self.store.num_pairs,
            seq_len=self.seq_len,
        )
        shape = 2 * self.batch_size, self.seq_len
        ids, inside, counts = (np.full(shape, fill, np.int64) for fill in (self.pad_id, 0, 0))
        for place, pair in enumerate(pairs.tolist()):
            for side in (0, 1):
                row = place + side * self.batch_size
                document = self.store[2 * pair + side][: self.seq_len]
                mask = self.store.mask(2 * pair + side)
                assert mask is not None
                ids[row, : len(document)] = document
                inside[row, : len(document)] = 1
                counts[row, : len(document)] = mask[: self.seq_len]
        if not (is_whole := counts.any(axis=1)).all():
            pair = int(pairs[int(np.argmin(is_whole)) % self.batch_size])
            raise StoreError(
                f"pair {pair} has no token of its answer within seq_len={self.seq_len:,}: its "
                "prompt alone is as long, and nothing could be learned from it",
                hint=f"build with --max-length {self.seq_len} --too-long truncate, which rejects "
                "such rows, or use a larger seq_len",
            )
        return PairBatch(step, pairs, ids, inside, counts)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; the same on every rank."""
        return {
            "version": 1,
            "store": self.store.content,
            "pairs_a_step": self.pairs_a_step,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved place, with any number of ranks that divides the same batch."""
        own = self.state_dict()
        for name in _STATE:
            if state.get(name) != own[name]:
                raise UsageError(
                    f"the state has {name}={state.get(name)!r}, and this loader {own[name]!r}: it "
                    "would go on at another place of another order",
                    hint="make the loader as the one that was saved",
                )
        self._step = operator.index(state["step"])
