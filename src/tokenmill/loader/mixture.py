"""Several stores with weights, in stages, and which rows make up which step.

    Mixture (names, stores, weights) + Stage ... -> Plan (any step) -> StageRun (rows of a step)

Weights are shares of tokens. A stage says how long they hold; what it leaves out stays as in the
stage before. Which row comes when within a stage is decided in order.py: nothing here reads a
token.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import operator
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from glob import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tokenmill.errors import StateError, UsageError, abridged
from tokenmill.loader import order
from tokenmill.loader.order import ENDLESS, MixtureSchedule, exact, exact_weight, weights_to_parts
from tokenmill.markup import Shown
from tokenmill.store.documents import Grouping
from tokenmill.store.facts import Checksum, Count, Fact, brief, read_fact
from tokenmill.store.layout import checksum_of
from tokenmill.store.reader import Store
from tokenmill.words import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenmill.loader.order import Ints, Weight

StoreInput: TypeAlias = Store | str | os.PathLike[str]
MOST_NAMES = 20  # of groups, in an error
EXAMPLE = '{"web": ("stores/web", 0.7), "code": ("stores/code", 0.3)}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of training; what is not given stays as in the stage before.

    >>> Stage(tokens=1_000_000_000, weights={"web": 0.4, "code": 0.6}, seq_len=8192)
    """

    tokens: int | None = None
    """How long it lasts, as rows * seq_len; it ends with the batch that reaches them. None is
    endless, for the last stage only."""
    weights: Mapping[str, Weight] | None = None
    """Share of the tokens of every source, by its name; 0 leaves it out."""
    seq_len: int | None = None
    """Tokens of a row; a batch keeps its tokens, so its rows become fewer or more."""

    def __post_init__(self) -> None:
        for name, example in (("tokens", "1_000_000_000"), ("seq_len", "8192")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(
                    f"{name}={value!r} of a stage is not a whole number above 0",
                    hint=f"write it out, like {name}={example}, or leave it out",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class FullStage:
    """A stage with nothing left out, in the order of the sources."""

    tokens: int | None
    weights: tuple[Weight, ...]
    seq_len: int | None  # where it is None: as the loader was told


class Extent(NamedTuple):
    """One epoch of a source in one layout."""

    rows: int
    # Tokens that are in its rows; None where all rows are full (`concat`).
    tokens: int | None = None


class Mixture(Shown):
    """Stores to draw from, their shares of the tokens, and how those change over the run.

    >>> Mixture(
    ...     {"web": ("stores/web", 0.7), "code": ("stores/code", 0.3)},
    ...     stages=[Stage(tokens=10**10), Stage(weights={"web": 0.4, "code": 0.6}, seq_len=8192)],
    ...     max_epochs={"code": 4},
    ... )

    Without stages the weights hold for ever. `max_epochs` caps how often a source is seen over the
    whole run (for all, or by name; 1.5 is fine): then the others share its part.
    """

    @abridged
    def __init__(
        self,
        sources: Mapping[str, tuple[StoreInput, Weight]],
        *,
        stages: Sequence[Stage] = (),
        max_epochs: float | Mapping[str, float] | None = None,
        split: str | None = None,
    ) -> None:
        _check_sources(sources)
        self._fill_in(sources, tuple(stages), max_epochs, split)

    @classmethod
    def of(
        cls, store: StoreInput, *, max_epochs: float | None = None, split: str | None = None
    ) -> Mixture:
        """A single store: one source with the name ''."""
        mixture = cls.__new__(cls)
        mixture._fill_in({"": (store, 1)}, (), max_epochs, split)
        return mixture

    @classmethod
    @abridged
    def from_store(
        cls,
        store: StoreInput,
        *,
        by: str,
        weights: Mapping[str, Weight] | None = None,
        stages: Sequence[Stage] = (),
        max_epochs: float | Mapping[str, float] | None = None,
        split: str | None = None,
    ) -> Mixture:
        """The documents of one store or view, mixed by where they come from or what they are.

        >>> Mixture.from_store("store", by="source", weights={"wiki.jsonl": 0.3, "*": 0.7})
        >>> Mixture.from_store("store", by="lang", max_epochs=4)

        `by` is source, folder, or an annotation (`tokenmill inspect STORE --by ...` shows its
        groups). Without `weights` each group has the share of the tokens that it has in the store.
        A weight is for the group of that name, for those whose path ends so, or for all that a
        pattern with * matches and no name before it: among them it is shared out by their tokens.
        Every group must have one.
        """
        grouping = Grouping(open_split(store, split), by)
        groups = {group.name: group.tokens for group in grouping.groups if group.tokens}
        shares = groups if weights is None else _of_groups(weights, groups, by=by)
        stages = [
            stage
            if stage.weights is None
            else replace(stage, weights=_of_groups(stage.weights, groups, by=by))
            for stage in stages
        ]
        caps = max_epochs
        if isinstance(caps, Mapping):
            found = _matches(caps, [*groups], by=by)
            caps = {name: caps[key] for name, key in found.items() if key is not None}
        sources = {name: (view, shares[name]) for name, view in grouping.views().items()}
        return cls(sources, stages=stages, max_epochs=caps)

    def with_stores(self, stores: Sequence[Store]) -> Mixture:
        """The same of stores that have more, or less, of what they had."""
        mixture = copy.copy(self)
        mixture.stores = tuple(stores)
        return mixture

    def _fill_in(
        self,
        sources: Mapping[str, tuple[StoreInput, Weight]],
        stages: tuple[Stage, ...],
        max_epochs: float | Mapping[str, float] | None,
        split: str | None,
    ) -> None:
        self.names = tuple(sources)
        self.stores = tuple(open_split(store, split) for store, _ in sources.values())
        for store in self.stores:
            store.refuse_pairs("a loader")
        _check_stores(self.names, self.stores)
        weights = tuple(weight for _, weight in sources.values())
        self.stages = _full_stages(self.names, weights, stages)
        caps = max_epochs
        if not isinstance(caps, Mapping):
            caps = {} if caps is None else dict.fromkeys(self.names, caps)
        _check_names(caps, self.names, where="max_epochs")
        exact_caps = {name: exact(cap) for name, cap in caps.items() if cap is not None}
        for name, cap in exact_caps.items():
            if cap is None or cap <= 0:
                raise UsageError(
                    f"max_epochs={caps[name]!r} is not a finite number above 0",
                    hint="give one, like 4 or 1.5, or None for no cap; a weight of 0 leaves a"
                    " source out",
                )
        self.max_epochs = tuple(map(exact_caps.get, self.names))

    def facts(self, stage: int) -> dict[str, object]:
        """What must be equal for a position in this stage to mean the same rows, as plain values.

        Stages before and after it are not part of it: a run may go on with another plan.
        """
        return {
            "sources": [*self.names],
            "weights": [*weights_to_parts(self.stages[stage].weights)],
            # Of one source they say when the run ends, not which rows it has until then.
            "max_epochs": [None if cap is None else str(cap) for cap in self.max_epochs]
            if len(self.names) > 1
            else [],
        }

    def expected_epochs(self) -> tuple[float, ...]:
        """Epochs of each source in the stages that end, were all rows full."""
        sizes = [store.num_tokens for store in self.stores]
        seen = [Fraction(0)] * len(sizes)
        for stage in self.stages:
            if stage.tokens is not None:
                parts = weights_to_parts(stage.weights)
                _pour(stage.tokens, parts, sizes=sizes, caps=self.max_epochs, seen=seen)
        return tuple(map(float, seen))

    def describe(self) -> str:
        """A line for the whole, one for each source, one for each stage."""
        lines = [f"mixture of {count(len(self.names), 'source')}"]
        sizes = [f"{store.num_tokens:,} tokens" for store in self.stores]
        size_width = max(map(len, sizes))
        name_width = max(len(repr(name)) for name in self.names)
        expected = self.expected_epochs()
        for number, (name, cap) in enumerate(zip(self.names, self.max_epochs, strict=True)):
            weights = [str(stage.weights[number]) for stage in self.stages]
            facts = [f"weight {', then '.join(weight for weight, _ in itertools.groupby(weights))}"]
            if cap is not None:
                facts.append(f"at most {float(cap):g} epochs")
            if any(stage.tokens is not None for stage in self.stages):
                facts.append(f"{expected[number]:.2f} epochs in the stages that end")
            start = f"  {name!r:<{name_width}}  {sizes[number]:>{size_width}}"
            lines.append(f"{start}  {', '.join(facts)}")
        for number, stage in enumerate(self.stages):
            length = "endless" if stage.tokens is None else f"{stage.tokens:,} tokens"
            rows = "" if stage.seq_len is None else f", rows of {stage.seq_len:,}"
            lines.append(f"  stage {number}: {length}{rows}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.describe()}>"


def _of_groups(
    weights: Mapping[str, Weight], groups: Mapping[str, int], *, by: str
) -> dict[str, Weight]:
    """A weight for each group, whose tokens these are; UsageError where one has none."""
    found = _matches(weights, [*groups], by=by)
    given = {key: exact_weight(weight) for key, weight in weights.items()}
    if lacking := [name for name, key in found.items() if key is None]:
        raise UsageError(
            f"the weights leave out {_some(lacking)} of the column {by!r}",
            hint='give the others a weight together, 0 for none, like {..., "*": 0.1}',
        )
    whole = Counter[str | None]()
    for name, key in found.items():
        whole[key] += groups[name]
    return {
        name: given[key] * groups[name] / whole[key]
        for name, key in found.items()
        if key is not None
    }


def _matches(given: Mapping[str, Any], groups: Sequence[str], *, by: str) -> dict[str, str | None]:
    """Which of the given names each group goes by: its own, the end of its path, or a pattern."""
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise UsageError(f"{given!r} says nothing by name", hint='write {"web": 0.7, "*": 0.3}')
    found = {name: name if name in given else None for name in groups}
    rules = [(f"*/{escape(key)}", key) for key in given] + [(key, key) for key in given]
    for rule, key in rules:
        for name in groups:
            if found[name] is None and key not in found and fnmatchcase(name, rule):
                found[name] = key
    used = set(found.values())
    if unknown := [key for key in given if key not in used]:
        is_late = any(fnmatchcase(name, key) for name in groups for key in unknown)
        raise UsageError(
            f"{_quoted(unknown)} match nothing that names before leave of the column {by!r}"
            if is_late
            else f"no document has {_quoted(unknown)} in the column {by!r}",
            hint=f"its values, the largest first: {_some(groups)}",
        )
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return _quoted(names[:MOST_NAMES]) + more


def row_parts(weights: Sequence[Weight], extents: Sequence[Extent]) -> tuple[int, ...]:
    """Parts of a schedule of rows that gives each source its share of the tokens.

    Where rows are full in all sources, shares of rows are shares of tokens, and stay exact.
    """
    tokens = [extent.tokens for extent in extents if extent.tokens is not None]
    if not tokens:
        return weights_to_parts(weights)
    values = [exact_weight(weight) for weight in weights]
    filled = zip(values, extents, tokens, strict=True)
    return weights_to_parts([value * extent.rows / held for value, extent, held in filled])


def rows_of_batch(batch_size: int, *, seq_len: int, stage_seq_len: int) -> int:
    """Rows of a batch in a stage: as many tokens as `batch_size` rows of `seq_len`."""
    rows, left = divmod(batch_size * seq_len, stage_seq_len)
    if left or not rows:
        step = stage_seq_len // math.gcd(seq_len, stage_seq_len)
        larger = step * max(1, -(-batch_size // step))
        raise UsageError(
            f"a batch of {batch_size:,} rows of {seq_len:,} tokens is no whole number of rows of"
            f" {stage_seq_len:,}; a batch keeps its number of tokens when a stage changes seq_len",
            hint=f"make batch_size a multiple of {step:,}, like batch_size={larger}",
        )
    return rows


def _check_sources(sources: object) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError(
            f"a mixture of {sources!r} has no sources by name", hint=f"give some: {EXAMPLE}"
        )
    for name, value in sources.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UsageError(
                f"{name!r} cannot be the name of a source: it is in reports and in saved state",
                hint='use a plain word, like "web"',
            )
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(
                f"source {name!r} is {value!r}, not a store and its weight", hint=f"write {EXAMPLE}"
            )


def open_split(store: StoreInput, split: str | None) -> Store:
    """A store open with one split, or with all documents where that was said."""
    if not isinstance(store, Store):
        opened = Store(store, split=split)
        names = [*opened.manifest.splits]
        if split is not None or not names:
            return opened
        if len(names) == 1:
            return opened.of_split(names[0])
        raise UsageError(
            f"{str(opened.path)!r} has the splits {', '.join(map(repr, names))}, and none was asked"
            " for; all of them together would train on what is held out",
            hint='say split="train", or open what you want: tokenmill.Store(path, split="train"), '
            "with split=None for all documents",
        )
    if split is not None and split != store.split:
        raise UsageError(
            f"split={split!r} was asked for, and {store!r} is open with its split {store.split!r}",
            hint=f"open the other one: tokenmill.Store({str(store.path)!r}, split={split!r})",
        )
    return store


def _check_stores(names: Sequence[str], stores: Sequence[Store]) -> None:
    """Rows of all sources are fed to one model: their ids must mean the same."""
    first, one = stores[0], stores[0].manifest.identity
    for name, store in zip(names, stores, strict=True):
        if not store.num_tokens:
            raise UsageError(
                f"the store {str(store.path)!r} has no tokens"
                + (f" in its split {store.split!r}" if store.split else "")
                + ": there is nothing to draw from it",
                hint="leave it out, or open another split",
            )
        both = f"{names[0]!r} ({first.path}) and {name!r} ({store.path})"
        two = store.manifest.identity
        if (one.tokenizer.fingerprint, one.dtype) != (two.tokenizer.fingerprint, two.dtype):
            raise UsageError(
                f"the sources {both} were made with different tokenizers, {one.tokenizer.kind} of"
                f" {one.tokenizer.vocab_size:,} ids and {two.tokenizer.kind} of"
                f" {two.tokenizer.vocab_size:,}: an id of one is other text in the other",
                hint="build both with one tokenizer",
            )
        if first.eos_id != store.eos_id:
            raise UsageError(
                f"documents of the sources {both} end differently, with the ids {first.eos_id} and"
                f" {store.eos_id}: a model would learn two ends of text",
                hint="build both with the same --eos",
            )


def _full_stages(
    names: Sequence[str], weights: tuple[Weight, ...], stages: Sequence[Stage]
) -> tuple[FullStage, ...]:
    weights_to_parts(weights)
    seq_len: int | None = None
    full = []
    for number, stage in enumerate(stages or [Stage()]):
        if not isinstance(stage, Stage):
            raise UsageError(f"{stage!r} is not a stage", hint="write Stage(tokens=1_000_000)")
        if stage.tokens is None and number < len(stages) - 1:
            raise UsageError(
                f"stage {number} has no tokens, so it never ends and the next never begins",
                hint="say how long it lasts: Stage(tokens=1_000_000_000)",
            )
        if (given := stage.weights) is not None:
            where = f"the weights of stage {number}"
            _check_names(given, names, where=where)
            if missing := [name for name in names if name not in given]:
                example = ", ".join(f'"{name}": {given.get(name, 0)}' for name in names)
                raise UsageError(
                    f"{where} leave out {_quoted(missing)}",
                    hint=f"give every source a weight, 0 for none: {{{example}}}",
                )
            weights = tuple(given[name] for name in names)
            weights_to_parts(weights)
        seq_len = stage.seq_len or seq_len
        full.append(FullStage(tokens=stage.tokens, weights=weights, seq_len=seq_len))
    return tuple(full)


def _check_names(given: object, names: Sequence[str], *, where: str) -> None:
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} are {given!r}, not numbers by name", hint="use a dict")
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UsageError(
            f"{where} name {_quoted(unknown)}, which the mixture does not have",
            hint=f"its sources are {_quoted(names)}",
        )


def _pour(
    tokens: int,
    parts: Sequence[int],
    *,
    sizes: Sequence[int],
    caps: Sequence[Fraction | None],
    seen: list[Fraction],
) -> None:
    """Add to `seen` the epochs that a stage draws: sources with a cap fill up one by one."""
    left = Fraction(tokens)
    active = {i for i, part in enumerate(parts) if part}
    while left and active:
        total = sum(parts[i] for i in active)
        room = {
            i: (cap - seen[i]) * sizes[i] * total / parts[i]
            for i in active
            if (cap := caps[i]) is not None
        }
        amount = max(Fraction(0), min([left, *room.values()]))
        for i in active:
            seen[i] += amount * parts[i] / total / sizes[i]
        left -= amount
        active -= {i for i, most in room.items() if most <= amount}


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


# -------------------------------------------------------------------------------------------------
# Which rows make up which step: the stages of a mixture strung together, from any position.
#
# A source counts its rows on and on: `index // rows_per_epoch` is the epoch, the rest the row.
# Where a stage keeps seq_len, sources go on where they were. Where it changes, the rows are others:
# every source begins a fresh pass, at the first epoch number that no pass before has used. Every
# stage begins a round of its own, so shares are exact to a row within a stage. A `Position` says
# how far a run has come without saying anything about batches, so a run may go on from it with
# another batch size, at exactly the next row.

# Rows that a state may speak of: more than any run has, and far from where int64 ends.
MAX_NUMBER = 2**53


class Pass(Fact, frozen=True, kw_only=True):
    """What was drawn with one seq_len, before a stage changed it; per source."""

    seq_len: Count
    rows: tuple[Count, ...]
    rows_per_epoch: tuple[Count, ...]


class Position(Fact, frozen=True, kw_only=True):
    """How far a run has come: plain integers, the same on every rank and for every batch size."""

    stage: Count
    row: Count  # rows drawn in this stage
    drawn: tuple[Count, ...]  # rows drawn from each source in this pass before this stage
    past: tuple[Pass, ...]  # passes with another seq_len, oldest first

    def to_json(self) -> dict[str, Any]:
        """For a state dict, with lists as JSON has them."""
        members: dict[str, Any] = json.loads(json.dumps(super().to_json()))
        return members

    @classmethod
    def from_json(cls, members: object, *, num_sources: int) -> Position:
        """The inverse of `to_json`; StateError where the state is not one of so many sources."""
        try:
            found = read_fact(members, cls, where="position")
        except ValueError as error:
            raise _damaged(str(error)) from error
        per_source, above_0 = [found.drawn], [1]
        for done in found.past:
            per_source += [done.rows, done.rows_per_epoch]
            above_0 += [done.seq_len, *done.rows_per_epoch]
        most = max(found.stage, found.row, *above_0, *itertools.chain(*per_source))
        has_all = all(len(numbers) == num_sources for numbers in per_source)
        if not has_all or 0 in above_0 or most >= MAX_NUMBER:
            raise _damaged(f"{brief(members)} for {num_sources} sources")
        return found


def _damaged(what: str) -> StateError:
    return StateError(
        f"the loader's state holds what no tokenmill loader saves: {what}",
        hint="resume from a state that state_dict() gave, with the same sources",
    )


class Era(Fact, frozen=True, kw_only=True):
    """What a source held before it grew: its epochs had these rows until a certain one."""

    content: Checksum  # of its store
    until: Count  # the first epoch that has what was added
    # seq_len, rows and (where shares depend on them) tokens of an epoch; of stages up to then
    extents: tuple[tuple[Count, Count, Count | None], ...]

    def extent(self, seq_len: int) -> Extent | None:
        """One epoch of it; None for a seq_len that the run came to later."""
        found = (Extent(rows, tokens) for length, rows, tokens in self.extents if length == seq_len)
        return next(found, None)


class EpochRange(NamedTuple):
    """Epochs of a source that have equally many rows, from one on."""

    first: int
    start: int  # the row that begins it, as the source counts its rows
    rows: int
    era: int | None  # place among the source's eras; None: as it is now

    @property
    def shift(self) -> int:
        """To be added to a row of these epochs, to have it counted as if all had as many."""
        return self.first * self.rows - self.start


class Epochs:
    """Where the epochs of a source begin among its rows, which are counted on and on.

    >>> Epochs([(2, 10, 0)], 15).ranges      # two epochs of 10 rows, then 15 in each
    """

    def __init__(self, before: Sequence[tuple[int, int, int]], rows: int) -> None:
        """`before` are the ranges that end: before which epoch, rows of each, and which era."""
        first = start = 0
        self.ranges: list[EpochRange] = []
        for until, of_epoch, era in before:
            self.ranges.append(EpochRange(first, start, of_epoch, era))
            first, start = until, start + (until - first) * of_epoch
        self.ranges.append(EpochRange(first, start, rows, None))

    def index(self, epochs: Fraction) -> int:
        """Rows in so many epochs, rounded down."""
        found = next(each for each in reversed(self.ranges) if each.first <= epochs)
        return found.start + math.floor((epochs - found.first) * found.rows)

    def reached(self, index: int) -> Fraction:
        """Epochs in so many rows."""
        found = self.holding(index)
        return found.first + Fraction(index - found.start, found.rows)

    def holding(self, index: int) -> EpochRange:
        """The range that a row is in."""
        return next(each for each in reversed(self.ranges) if each.start <= index)

    def within(self, indices: range) -> Iterator[tuple[EpochRange, range]]:
        """Which of some rows are in each range."""
        ends = [each.start for each in self.ranges[1:]] + [max(indices.stop, 0)]
        for each, end in zip(self.ranges, ends, strict=True):
            low, high = max(indices.start, each.start), min(indices.stop, end)
            if low < high:
                yield each, range(low, high)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageRun:
    """A stage as this run goes through it."""

    start: Position  # where the stage begins
    seq_len: int
    batch_rows: int  # rows of a global batch
    first_step: int
    # Row of the stage at which `first_step` begins: above 0 where the run was resumed inside.
    first_row: int
    num_rows: int | None  # rows of the stage, those before `first_row` included; None is endless
    schedule: MixtureSchedule
    rows_per_epoch: Ints
    epochs: tuple[Epochs, ...]  # of each source

    @property
    def end_step(self) -> int | None:
        """The step after the last, which may have fewer rows than the others in the last stage."""
        if self.num_rows is None:
            return None
        return self.first_step - (self.first_row - self.num_rows) // self.batch_rows

    def rows(self, step: int) -> range:
        """Rows of the stage that make up a step."""
        first = self.first_row + (step - self.first_step) * self.batch_rows
        end = first + self.batch_rows if self.num_rows is None else self.num_rows
        return range(min(first, end), min(first + self.batch_rows, end))

    def indices(self, source: int) -> range:
        """Rows of a source that the stage draws from `first_row` on, as the source counts them."""
        schedule = self.schedule
        reached = schedule.counts(self.first_row)[source]
        if self.num_rows is not None:
            return range(reached, schedule.counts(self.num_rows)[source])
        limit = schedule.limits[source]
        return range(reached, ENDLESS if limit is None else max(reached, limit))

    def tokens_before(self, steps: Ints) -> Ints:
        """Tokens (rows * seq_len) that the run has drawn before steps of this stage."""
        earlier = sum(done.seq_len * sum(done.rows) for done in self.start.past)
        rows = sum(self.start.drawn) + self.first_row + (steps - self.first_step) * self.batch_rows
        found: Ints = earlier + rows * self.seq_len
        return found

    def drawn(self, row: int) -> Pass:
        """What this pass has drawn before a row of the stage."""
        counts = zip(self.start.drawn, self.schedule.first, self.schedule.counts(row), strict=True)
        return Pass(
            seq_len=self.seq_len,
            rows=tuple(drawn + count - first for drawn, first, count in counts),
            rows_per_epoch=tuple(self.rows_per_epoch.tolist()),
        )


class Plan:
    """The steps of a run, from a position on; any step in O(number of stages).

    `measure(seq_len)` gives the extent of every source; it is asked only for the stages that a
    step needs. None: nobody knows yet, and the first epoch goes on until `with_end` is told.

    >>> plan = Plan(mixture, seq_len=2048, batch_rows=64, measure=measure)
    >>> run = plan.find(step)
    >>> source, index = run.schedule.locate(np.array(run.rows(step)))
    >>> state = plan.position(step + 1).to_json()
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seq_len: int,
        batch_rows: int,
        measure: Callable[[int], Sequence[Extent]] | None,
        origin: Position | None = None,
        origin_step: int = 0,
        update_step: int | None = None,
        grown: tuple[tuple[Era, ...], ...] = (),
    ) -> None:
        """`grown` are the eras of each source before it is what it is now."""
        self.mixture = mixture
        self.grown = grown or ((),) * len(mixture.names)
        # Where an update of several steps begins, or would have: the others follow from it.
        self.update_step = origin_step if update_step is None else update_step
        self.origin = origin or Position(stage=0, row=0, drawn=(0,) * len(mixture.names), past=())
        self.origin_step = origin_step
        self._measure = measure
        if self.origin.stage >= len(mixture.stages):
            raise StateError(
                f"the state is of stage {self.origin.stage}, and the mixture has"
                f" {len(mixture.stages)}",
                hint="resume with the stages of the run that was saved",
            )
        # Of each stage: tokens of a row, and rows of a batch, which keeps its tokens.
        lengths = [stage.seq_len or seq_len for stage in mixture.stages]
        self._shapes = [
            (length, rows_of_batch(batch_rows, seq_len=seq_len, stage_seq_len=length))
            for length in lengths
        ]
        # Grows when a step asks for it, and is replaced as a whole: readers may be threads.
        self._runs: tuple[StageRun, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether nobody knows yet how much there will be."""
        return self._measure is None

    def with_end(self, measure: Callable[[int], Sequence[Extent]]) -> Plan:
        """The same run, when it is known how much there is."""
        plan = copy.copy(self)
        plan._measure, plan._runs = measure, ()
        return plan

    @property
    def num_steps(self) -> int | None:
        """Number of the step after the last one; None is endless."""
        stage = self.mixture.stages[-1]
        caps = zip(stage.weights, self.mixture.max_epochs, strict=True)
        if stage.tokens is None and any(weight > 0 and cap is None for weight, cap in caps):
            return None
        return self._last().end_step

    def find(self, step: int) -> StageRun | None:
        """The stage that a step belongs to; None past the end."""
        if step < self.origin_step:
            raise IndexError(
                f"step {step:,} is before step {self.origin_step:,}, where this run was resumed"
            )
        for number in range(len(self.mixture.stages) - self.origin.stage):
            run = self._run(number)
            if run.end_step is None or step < run.end_step:
                return run
        return None

    def runs(self) -> Iterator[StageRun]:
        """The stages from the plan's origin on."""
        for number in range(len(self.mixture.stages) - self.origin.stage):
            yield self._run(number)

    def drawn_before(self, source: int) -> Iterator[tuple[int, Epochs, range]]:
        """Of each pass: `seq_len`, its epochs, and which rows of a source, as it counts them, were
        drawn before the plan's origin."""
        base = 0
        for done in (*self.origin.past, self._run(0).drawn(self.origin.row)):
            epochs = self._epochs(source, done.seq_len, done.rows_per_epoch[source])
            first = epochs.index(Fraction(base))
            rows = range(first, first + done.rows[source])
            yield done.seq_len, epochs, rows
            base = max(base, math.ceil(epochs.reached(rows.stop)))

    def _epochs(self, source: int, seq_len: int, rows: int) -> Epochs:
        """Those of a source in rows of `seq_len`, of which an epoch has so many now."""
        eras = ((number, era, era.extent(seq_len)) for number, era in enumerate(self.grown[source]))
        return Epochs([(e.until, x.rows, number) for number, e, x in eras if x is not None], rows)

    def _epochs_before(self, source: int, past: tuple[Pass, ...]) -> list[Fraction]:
        """Epochs of a source in each of some passes."""
        found: list[Fraction] = []
        for done in past:
            base = Fraction(sum(map(math.ceil, found)))
            epochs = self._epochs(source, done.seq_len, done.rows_per_epoch[source])
            found.append(epochs.reached(epochs.index(base) + done.rows[source]) - base)
        return found

    def position(self, step: int) -> Position:
        """How far the run has come before a step; also for the step after the last."""
        return self._reached(step)[1]

    def seen(self, step: int) -> dict[str, dict[str, Any]]:
        """Rows, tokens (rows * seq_len) and epochs drawn of each source before a step."""
        run, position = self._reached(step)
        passes = (*position.past, run.drawn(position.row))
        return {
            name: {
                "rows": sum(done.rows[i] for done in passes),
                "tokens": sum(done.rows[i] * done.seq_len for done in passes),
                "epochs": None if self.is_open else float(sum(self._epochs_before(i, passes))),
            }
            for i, name in enumerate(self.mixture.names)
        }

    def _reached(self, step: int) -> tuple[StageRun, Position]:
        run = self.find(step)
        if run is None and step == self.num_steps:
            run = self._last()
        if run is None:
            raise IndexError(f"step {step:,} of a run of {self.num_steps} steps")
        return run, run.start.but(row=run.rows(step).start)

    def _last(self) -> StageRun:
        return self._run(len(self.mixture.stages) - 1 - self.origin.stage)

    def _run(self, number: int) -> StageRun:
        """The stage so many stages after that of the origin."""
        runs = self._runs
        while len(runs) <= number:
            position, step = self.origin, self.origin_step
            if runs:
                before, ended = runs[-1], runs[-1].end_step
                assert before.num_rows is not None
                assert ended is not None
                done, step = before.drawn(before.num_rows), ended
                position = before.start.but(stage=before.start.stage + 1, drawn=done.rows)
                if self._shapes[position.stage][0] != before.seq_len:
                    past = (*position.past, done)
                    position = position.but(drawn=(0,) * len(done.rows), past=past)
            runs = self._runs = (*runs, self._enter(position, step=step))
        return runs[number]

    def _enter(self, position: Position, *, step: int) -> StageRun:
        """The stage of a position, with `step` beginning there."""
        stage, number = self.mixture.stages[position.stage], position.stage
        seq_len, batch_rows = self._shapes[number]
        unknown = [Extent(rows=MAX_NUMBER)] * len(self.mixture.names)
        extents = unknown if self._measure is None else self._measure(seq_len)
        numbered = enumerate(extent.rows for extent in extents)
        epochs = tuple(self._epochs(source, seq_len, rows) for source, rows in numbered)
        schedule = self._schedule(position, extents, epochs)
        if schedule.num_rows is not None and position.row > schedule.num_rows:
            raise UsageError(
                f"the state has drawn {position.row:,} rows of stage {number}, in which"
                f" max_epochs leaves {schedule.num_rows:,}",
                hint="resume with the max_epochs of the run that was saved",
            )
        # Whole batches until the stage's tokens are reached or rows run out. Rows left over by the
        # last whole batch stay for the next stage; in the last stage they make one more batch.
        limits = []
        if stage.tokens is not None:
            wanted = max(0, -(-stage.tokens // seq_len) - position.row)
            limits.append(-(-wanted // batch_rows) * batch_rows)
        if schedule.num_rows is not None:
            left = schedule.num_rows - position.row
            is_last = number == len(self.mixture.stages) - 1
            limits.append(left if is_last else left - left % batch_rows)
        return StageRun(
            start=position.but(row=0),
            seq_len=seq_len,
            batch_rows=batch_rows,
            first_step=step,
            first_row=position.row,
            num_rows=position.row + min(limits) if limits else None,
            schedule=schedule,
            rows_per_epoch=np.array([extent.rows for extent in extents], np.int64),
            epochs=epochs,
        )

    def _schedule(
        self, position: Position, extents: Sequence[Extent], epochs: Sequence[Epochs]
    ) -> MixtureSchedule:
        first: list[int] = []
        limits: list[int | None] = []
        held: list[Extent] = []  # when the stage begins: shares stay what they are until its end
        seq_len = self._shapes[position.stage][0]
        caps = zip(epochs, extents, position.drawn, self.mixture.max_epochs, strict=True)
        for source, (of_source, extent, drawn, cap) in enumerate(caps):
            if not extent.rows:
                raise UsageError(
                    f"the source {self.mixture.names[source]!r}"
                    f" ({self.mixture.stores[source].path}) has no row of {seq_len:,} tokens",
                    hint="leave it out of the mixture",
                )
            past = self._epochs_before(source, position.past)
            base = Fraction(sum(map(math.ceil, past)))
            first.append(of_source.index(base) + drawn)
            left = None if cap is None else max(Fraction(0), cap - sum(past))
            limits.append(None if left is None else of_source.index(base + left))
            era = of_source.holding(first[-1]).era
            then = extent if era is None else self.grown[source][era].extent(seq_len)
            assert then is not None
            held.append(then)
        weights = self.mixture.stages[position.stage].weights
        return MixtureSchedule(row_parts(weights, held), first=first, limits=limits)


# -------------------------------------------------------------------------------------------------
# What a loader saves: a few integers and fingerprints, the same on every rank.
#
# A state says how far a run has come, and everything that this position depends on: sources,
# packing, sequence length, order. A state of anything else is refused, with the reason; continuing
# would feed rows twice, or never, without a word. Batch size, ranks, workers and the form of the
# batches are no part of it: they may change from one run to the next.

#
# Where the rows of several steps are dealt together (`accumulate`), a state between them says at
# which of them, and how they were dealt; its position is where they begin, and its version is 2.
#
# A state that was saved while a store was built knows of it only what was read from: its first
# shards, `followed` of them, and its version is 3. It is a state of the finished store as well.
#
# Where a source has grown since the run began, a state says what it held until which epoch
# (`grown`), and its version is 4.

STATE_VERSION = 1
UPDATE_VERSION = 2
FOLLOWED_VERSION = 3
GROWN_VERSION = 4
_MEMBERS = {
    *("version", "order", "seed", "shuffle", "packing", "seq_len", "mixture", "stores", "layouts"),
    *("step", "position", "seen", "checksum"),
}
# What a position in a stage depends on; of a store that is followed, its first shards; of one that
# held something else when a state was saved, that, if it is still known.
Facts: TypeAlias = "Callable[[int, int | None, object], Mapping[str, object]]"
_ANEW = "resume with what the run was begun with, or begin anew without load_state_dict"


class Update(Fact, frozen=True, kw_only=True):
    """An update of several steps that has begun, and how rows were dealt in it."""

    steps: Count  # taken of those whose rows were dealt together
    before: Count  # steps of the update before those: of another stage
    accumulate: Count
    batch_size: Count
    world_size: Count
    window: tuple[tuple[Count, Count | None], ...]


def make_state(
    plan: Plan,
    step: int,
    facts: Facts,
    *,
    followed: int | None = None,
    update: Update | None = None,
) -> dict[str, Any]:
    """A state dict of plain values: it survives JSON, pickle and torch.save.

    `facts` are those that a position in a stage depends on, and on so many shards of a store that
    is `followed`; `update` is one that has begun.
    """
    position = plan.position(step if update is None else step - update.steps)
    more = {} if update is None else {"update": json.loads(json.dumps(update.to_json()))}
    version = STATE_VERSION if update is None else UPDATE_VERSION
    if followed is not None:
        more["followed"], version = followed, FOLLOWED_VERSION
    if any(plan.grown):
        names = zip(plan.mixture.names, plan.grown, strict=True)
        grown = {name: [era.to_json() for era in eras] for name, eras in names}
        more["grown"], version = json.loads(json.dumps(grown)), GROWN_VERSION
    state = {
        "version": version,
        **more,
        "order": order.VERSION,
        **facts(position.stage, followed, None),
        "step": step,
        "position": position.to_json(),
        "seen": plan.seen(step),
    }
    return {**state, "checksum": _checksum(state)}


class SavedState(NamedTuple):
    """What a state says of how far a run has come."""

    step: int
    position: Position
    update: Update | None  # one that has begun
    grown: tuple[tuple[Era, ...], ...]  # what each source held before


def check_state(state: object, facts: Facts, *, names: Sequence[str]) -> SavedState:
    """What a state of these sources says; StateError says what is not as it was saved."""
    if not isinstance(state, dict):
        raise StateError(
            f"{brief(state)} is no state of a loader", hint="give what state_dict() gave"
        )
    is_followed, has_grown = (
        state.get("version") == each for each in (FOLLOWED_VERSION, GROWN_VERSION)
    )
    has_update = state.get("version") == UPDATE_VERSION
    has_update |= (is_followed or has_grown) and "update" in state
    version = UPDATE_VERSION if has_update else STATE_VERSION
    version = FOLLOWED_VERSION if is_followed else GROWN_VERSION if has_grown else version
    for name, known in (("version", version), ("order", order.VERSION)):
        if name in state and state[name] != known:
            raise StateError(
                f"the state has {name} {brief(state[name])}, and this release reads {name} {known}"
                + (f" to {GROWN_VERSION}" if name == "version" else ""),
                hint="resume with the release of tokenmill that saved it",
            )
    members = _MEMBERS | {"update"} if has_update else _MEMBERS
    members = members | {"followed"} if is_followed else members
    members = members | {"grown"} if has_grown else members
    if set(state) != members:
        names = sorted(map(brief, set(state) - members)) + sorted(members - set(state))
        odd = ", ".join(names)[:200]
        raise StateError(
            f"the state is not one that a loader saved: {odd} is missing or unknown",
            hint="give what state_dict() gave, whole",
        )
    try:
        found = _checksum({name: state[name] for name in state if name != "checksum"})
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"the state holds what no loader saves: {error}", hint="give what state_dict() gave"
        ) from error
    if found != state["checksum"]:
        raise StateError(
            "the state was changed after it was saved: its checksum does not hold",
            hint="resume from another checkpoint; loader.seek(step) goes to any step by its number",
        )
    position, step = state["position"], state["step"]
    stage = position.get("stage") if isinstance(position, dict) else None
    followed = state["followed"] if is_followed else None
    if is_followed and (type(followed) is not int or not 0 <= followed < MAX_NUMBER):
        raise _damaged(f"followed is {brief(followed)}")
    begun_stage = max(0, stage) if isinstance(stage, int) else 0
    for name, ours in facts(begun_stage, followed, state["stores"]).items():
        if _canonical(state[name]) != _canonical(ours):
            raise _changed(name, state[name], ours)
    if type(step) is not int or not 0 <= step < MAX_NUMBER:
        raise StateError(f"the state has step {brief(step)}", hint="give what state_dict() gave")
    update = None
    if has_update:
        try:
            update = read_fact(state["update"], Update, where="update")
        except ValueError as error:
            raise _damaged(str(error)) from error
        begun = update.before + update.steps
        if not 0 < begun < update.accumulate or begun > step:
            raise _damaged(f"{begun:,} of {update.accumulate:,} steps before step {step:,}")
    grown: dict[str, tuple[Era, ...]] = dict.fromkeys(names, ())
    if has_grown:
        try:
            grown = read_fact(state["grown"], dict[str, tuple[Era, ...]], where="grown")
        except ValueError as error:
            raise _damaged(str(error)) from error
        if list(grown) != list(names) or not all(map(_is_in_order, grown.values())):
            raise _damaged(f"grown is {brief(state['grown'])}")
    reached = Position.from_json(position, num_sources=len(names))
    return SavedState(step, reached, update, tuple(grown.values()))


def _is_in_order(eras: Sequence[Era]) -> bool:
    """Whether each ends after the one before, and none has epochs without rows."""
    ends = [0, *(era.until for era in eras)]
    sizes = [size for era in eras for length, rows, _ in era.extents for size in (length, rows)]
    in_order = all(map(operator.lt, ends, ends[1:]))
    return in_order and all(0 < each < MAX_NUMBER for each in (*ends[1:], *sizes))


def _changed(name: str, saved: Any, ours: Any) -> StateError:
    hint = _ANEW
    what = (
        f"the state was saved with {name}={brief(saved)}, and this loader has"
        f" {name}={brief(ours)}: the rows would be others"
    )
    if name == "layouts":
        what = "the state was saved by a release that cut rows by other rules"
        hint = "resume with the release of tokenmill that saved it"
    elif name == "stores" and (not isinstance(saved, dict) or set(saved) != set(ours)):
        what = f"the state is of the sources {brief(saved)}, and this loader has {brief(ours)}"
    elif name == "stores":
        names = [repr(name) for name in ours if saved[name] != ours[name]]
        which = "the store" if names == ["''"] else f"the source {', '.join(names)}"
        what = (
            f"{which} does not hold what it held when the state was saved (other text, tokenizer,"
            " split or order of shards): its rows are others"
        )
        hint = (
            "a store that files were added to keeps what it was as a snapshot, until tokenmill"
            " prune or a build that changes or drops text: resume on a copy of the store as it was,"
            " or build it again, of the files of then, in another folder; or begin anew without"
            " load_state_dict"
        )
    return StateError(what, hint=hint)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(members: Mapping[str, object]) -> str:
    return checksum_of(_canonical(members).encode())
