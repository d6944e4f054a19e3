"""Batches of pairs: prompts with chosen and with rejected answers, for preference training.

    store of pairs -> PairLoader -> PairBatch: chosen sides first, rejected ones after them

A pair stays together: order, batches and ranks are of pairs. Labels stand where their tokens do,
-100 for prompts and padding, as in TRL's batches: models of transformers shift them themselves.
"""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreError, UsageError, abridged
from tokenmill.loader.batch import IGNORED, check_pad_id
from tokenmill.loader.mixture import Epochs, Era, open_split
from tokenmill.loader.order import check_shuffle, exact_weight, ordered_rows
from tokenmill.store.facts import read_fact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.mixture import StoreInput
    from tokenmill.store.reader import Store

_STATE = ("version", "store", "pairs_a_step", "seq_len", "seed", "shuffle")


@dataclass(frozen=True, slots=True, eq=False)
class PairBatch:
    """Pairs for one step on one rank: rows 0 to n - 1 are chosen, rows n to 2n - 1 rejected."""

    step: int
    pairs: NDArray[np.int64]
    """The number of each pair in its store, as it was in that epoch: `store.pair(number)`."""
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

    @abridged
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
        self._eras: tuple[Era, ...] = ()  # what the store held before it grew
        self._held: dict[str, Store] = {}
        self._max_epochs = epochs
        if not self.store.num_pairs or self.num_steps == 0:
            raise UsageError(
                f"{self.store.num_pairs:,} pairs make no batch of {self.pairs_a_step:,}",
                hint="use a smaller batch_size, or more epochs",
            )
        self._step = 0

    @property
    def _epochs(self) -> Epochs:
        """How many pairs which epochs have."""
        return self._epochs_of(self._eras, self.store)

    @staticmethod
    def _epochs_of(eras: Sequence[Era], now: Store) -> Epochs:
        before = [(era.until, era.extents[0][1], number) for number, era in enumerate(eras)]
        return Epochs(before, now.num_pairs)

    def _store_in(self, era: int | None) -> Store:
        if era is None:
            return self.store
        content = self._eras[era].content
        found = self._held.get(content) or self.store.as_it_was(content)
        if found is None:
            raise UsageError(
                f"{str(self.store.path)!r} does not keep what it held until epoch"
                f" {self._eras[era].until} of this run",
                hint="give a copy of the store that has its snapshots",
            )
        self._held[content] = found
        return found

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None is endless."""
        if self._max_epochs is None:
            return None
        return self._epochs.index(exact_weight(self._max_epochs)) // self.pairs_a_step

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
        found: list[tuple[Store, int]] = []
        for part, indices in self._epochs.within(range(first, first + self.batch_size)):
            store = self._store_in(part.era)
            numbers, _ = ordered_rows(
                np.array(indices) + part.shift,
                shuffle=self.shuffle,
                seed=self.seed,
                source="pairs",
                num_rows=part.rows,
                seq_len=self.seq_len,
            )
            found += [(store, number) for number in numbers.tolist()]
        pairs = np.array([number for _, number in found], np.int64)
        shape = 2 * self.batch_size, self.seq_len
        ids, inside, counts = (np.full(shape, fill, np.int64) for fill in (self.pad_id, 0, 0))
        for place, (store, pair) in enumerate(found):
            for side in (0, 1):
                row = place + side * self.batch_size
                document = store[2 * pair + side][: self.seq_len]
                mask = store.mask(2 * pair + side)
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
        grown = [era.to_json() for era in self._eras]
        return {
            "version": 2 if grown else 1,
            **({"grown": json.loads(json.dumps(grown))} if grown else {}),
            "store": self.store.content,
            "pairs_a_step": self.pairs_a_step,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved place, with any number of ranks that divides the same batch.

        Where the store grew since, the running epoch ends as it would have.
        """
        saved = state.get("store")
        before = self.store.as_it_was(saved) if isinstance(saved, str) else None
        own = {**self.state_dict(), "version": 2 if "grown" in state else 1}
        if before is not None:
            own["store"] = saved
        what = self.store.forgotten_since(saved) if isinstance(saved, str) else None
        if what is not None:
            raise UsageError(
                f"the state was saved when {str(self.store.path)!r} held more: {what}; the order of"
                " pairs is another one without them",
                hint="go on with the weights alone, and begin the data anew: without"
                " load_state_dict",
            )
        for name in _STATE:
            if state.get(name) != own[name]:
                raise UsageError(
                    f"the state has {name}={state.get(name)!r}, and this loader {own[name]!r}: it "
                    "would go on at another place of another order",
                    hint="make the loader as the one that was saved",
                )
        step = operator.index(state["step"])
        try:
            eras = read_fact(state.get("grown", ()), tuple[Era, ...], where="grown")
        except ValueError as error:
            raise UsageError(f"the state was not saved by a PairLoader: {error}") from error
        if before is not None:
            drawn = step * self.pairs_a_step
            until = ceil(self._epochs_of(eras, before).reached(drawn))
            if until > (eras[-1].until if eras else 0):
                extents = ((self.seq_len, before.num_pairs, None),)
                eras = (*eras, Era(content=before.content, until=until, extents=extents))
        self._eras, self._step = eras, step
