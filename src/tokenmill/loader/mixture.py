"""Several stores with weights, in stages: what a user says about a mixture, checked and complete.

    Mixture (names, stores, weights) + Stage ... -> plan.Plan (rows of every step)

Weights are shares of tokens. A stage says how long they hold; what it leaves out stays as in the
stage before. Which row comes when is decided in schedule.py, and plan.py strings stages together:
nothing here reads a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.errors import UsageError
from tokenmill.loader.order import exact, exact_weight, weights_to_parts
from tokenmill.store.reader import Store

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tokenmill.loader.order import Weight

EXAMPLE = '{"web": ("stores/web", 0.7), "code": ("stores/code", 0.3)}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stretch of training; what is not given stays as in the stage before.

    >>> Stage(tokens=1_000_000_000, weights={"web": 0.4, "code": 0.6}, seq_len=8192)
    """

    tokens: int | None = None
    """How long it lasts, as rows * seq_len; it ends with the batch that reaches them.
    None is endless, for the last stage only."""
    weights: Mapping[str, Weight] | None = None
    """Share of the tokens of every source, by its name; 0 leaves it out."""
    seq_len: int | None = None
    """Tokens of a row; a batch keeps its tokens, so its rows become fewer or more."""

    def __post_init__(self) -> None:
        _check_count("tokens", self.tokens, example="1_000_000_000")
        _check_count("seq_len", self.seq_len, example="8192")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """A store in a mixture."""

    name: str
    store: Store
    weight: Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class FullStage:
    """A stage with nothing left out, in the order of the sources."""

    tokens: int | None
    weights: tuple[Weight, ...]
    seq_len: int | None
    """None: as the loader was told."""


class Extent(NamedTuple):
    """One epoch of a source in one layout."""

    rows: int
    tokens: int | None = None
    """Tokens that are in its rows; None where all rows are full (`concat`)."""


class Mixture:
    """Stores to draw from, their shares of the tokens, and how those change over the run.

    >>> Mixture(
    ...     {"web": ("stores/web", 0.7), "code": ("stores/code", 0.3)},
    ...     stages=[Stage(tokens=10**10), Stage(weights={"web": 0.4, "code": 0.6}, seq_len=8192)],
    ...     max_epochs={"code": 4},
    ... )

    Without stages the weights hold for ever. `max_epochs` caps how often a source is seen over the
    whole run (for all, or by name; 1.5 is fine): then the others share its part.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Store | str | os.PathLike[str], Weight]],
        *,
        stages: Sequence[Stage] = (),
        max_epochs: float | Mapping[str, float] | None = None,
        split: str | None = None,
    ) -> None:
        _check_sources(sources)
        opened = tuple(
            MixtureSource(name=name, store=_open(store, split), weight=weight)
            for name, (store, weight) in sources.items()
        )
        self._fill_in(opened, tuple(stages), max_epochs)

    @classmethod
    def of(
        cls,
        store: Store | str | os.PathLike[str],
        *,
        max_epochs: float | None = None,
        split: str | None = None,
    ) -> Mixture:
        """A single store: one source with the name ''."""
        mixture = cls.__new__(cls)
        source = MixtureSource(name="", store=_open(store, split), weight=1)
        mixture._fill_in((source,), (), max_epochs)
        return mixture

    def _fill_in(
        self,
        sources: tuple[MixtureSource, ...],
        stages: tuple[Stage, ...],
        max_epochs: float | Mapping[str, float] | None,
    ) -> None:
        _check_stores(sources)
        self.sources = sources
        self.names = tuple(source.name for source in sources)
        self.stores = tuple(source.store for source in sources)
        self.stages = _full_stages(sources, stages)
        self.max_epochs = _caps(self.names, max_epochs)

    def facts(self, stage: int) -> dict[str, object]:
        """What must be equal for a position in this stage to mean the same rows, as plain values.

        Stages before and after it are not part of it: a run may go on with another plan.
        """
        return {
            "sources": [*self.names],
            "weights": [*weights_to_parts(self.stages[stage].weights)],
            # Of one source they say when the run ends, not which rows it has until then.
            "max_epochs": [None if cap is None else str(cap) for cap in self.max_epochs]
            if len(self.sources) > 1
            else [],
        }

    def expected_epochs(self) -> tuple[float, ...]:
        """Epochs of each source in the stages that end, were all rows full."""
        sizes = [source.store.num_tokens for source in self.sources]
        seen = [Fraction(0)] * len(sizes)
        for stage in self.stages:
            if stage.tokens is not None:
                parts = weights_to_parts(stage.weights)
                _pour(stage.tokens, parts, sizes=sizes, caps=self.max_epochs, seen=seen)
        return tuple(map(float, seen))

    def describe(self) -> str:
        """A line for the whole, one for each source, one for each stage."""
        lines = [f"mixture of {_count(len(self.sources), 'source')}"]
        lines += _source_lines(self)
        lines += [_stage_line(number, stage) for number, stage in enumerate(self.stages)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.describe()}>"


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


def _check_count(name: str, value: int | None, *, example: str) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(
            f"{name}={value!r} of a stage is not a whole number above 0",
            hint=f"write it out, like {name}={example}, or leave it out",
        )


def _check_sources(sources: object) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError(
            f"a mixture of {sources!r} has no sources by name", hint=f"give some: {EXAMPLE}"
        )
    for name, value in sources.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UsageError(
                f"{name!r} cannot be the name of a source: it stands in reports and in saved state",
                hint='use a plain word, like "web"',
            )
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(
                f"source {name!r} is {value!r}, not a store and its weight",
                hint=f"write {EXAMPLE}",
            )


def _open(store: Store | str | os.PathLike[str], split: str | None) -> Store:
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


def _check_stores(sources: Sequence[MixtureSource]) -> None:
    first = sources[0]
    for source in sources:
        if not source.store.num_tokens:
            raise UsageError(
                f"the store {str(source.store.path)!r} has no tokens in its split"
                f" {source.store.split!r}: there is nothing to draw from it",
                hint="leave it out, or open another split",
            )
        _check_alike(first, source)


def _check_alike(first: MixtureSource, other: MixtureSource) -> None:
    """Rows of all sources are fed to one model: their ids must mean the same."""
    both = f"{first.name!r} ({first.store.path}) and {other.name!r} ({other.store.path})"
    one, two = first.store.manifest.identity, other.store.manifest.identity
    if (one.tokenizer.fingerprint, one.dtype) != (two.tokenizer.fingerprint, two.dtype):
        raise UsageError(
            f"the sources {both} were made with different tokenizers, {one.tokenizer.kind} of"
            f" {one.tokenizer.vocab_size:,} ids and {two.tokenizer.kind} of"
            f" {two.tokenizer.vocab_size:,}: an id of one is other text in the other",
            hint="build both with one tokenizer",
        )
    if first.store.eos_id != other.store.eos_id:
        raise UsageError(
            f"documents of the sources {both} end differently, with the ids"
            f" {first.store.eos_id} and {other.store.eos_id}: a model would learn two ends of text",
            hint="build both with the same --eos",
        )


def _full_stages(
    sources: Sequence[MixtureSource], stages: Sequence[Stage]
) -> tuple[FullStage, ...]:
    weights = tuple(source.weight for source in sources)
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
        if stage.weights is not None:
            names = [source.name for source in sources]
            weights = _weights_by_name(names, stage.weights, number=number)
        seq_len = stage.seq_len or seq_len
        full.append(FullStage(tokens=stage.tokens, weights=weights, seq_len=seq_len))
    return tuple(full)


def _weights_by_name(
    names: Sequence[str], weights: Mapping[str, Weight], *, number: int
) -> tuple[Weight, ...]:
    where = f"the weights of stage {number}"
    _check_names(weights, names, where=where)
    missing = [name for name in names if name not in weights]
    if missing:
        raise UsageError(
            f"{where} leave out {_quoted(missing)}",
            hint=f"give every source a weight, 0 for none: {_example_weights(names, weights)}",
        )
    ordered = tuple(weights[name] for name in names)
    weights_to_parts(ordered)
    return ordered


def _check_names(given: object, names: Sequence[str], *, where: str) -> None:
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} are {given!r}, not numbers by name", hint="use a dict")
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UsageError(
            f"{where} name {_quoted(unknown)}, which the mixture does not have",
            hint=f"its sources are {_quoted(names)}",
        )


def _caps(
    names: Sequence[str], max_epochs: float | Mapping[str, float] | None
) -> tuple[Fraction | None, ...]:
    if isinstance(max_epochs, Mapping):
        _check_names(max_epochs, names, where="max_epochs")
        return tuple(_cap(max_epochs.get(name)) for name in names)
    return (_cap(max_epochs),) * len(names)


def _cap(epochs: float | None) -> Fraction | None:
    if epochs is None:
        return None
    cap = exact(epochs)
    if cap is None or cap <= 0:
        raise UsageError(
            f"max_epochs={epochs!r} is not a finite number above 0",
            hint="give one, like 4 or 1.5, or None for no cap; a weight of 0 leaves a source out",
        )
    return cap


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


def _source_lines(mixture: Mixture) -> list[str]:
    sizes = [f"{source.store.num_tokens:,} tokens" for source in mixture.sources]
    names = [repr(name) for name in mixture.names]
    size_width, name_width = max(map(len, sizes)), max(map(len, names))
    expected = mixture.expected_epochs()
    has_end = any(stage.tokens is not None for stage in mixture.stages)
    lines = []
    for number, cap in enumerate(mixture.max_epochs):
        weights = [str(stage.weights[number]) for stage in mixture.stages]
        facts = [f"weight {', then '.join(weight for weight, _ in groupby(weights))}"]
        if cap is not None:
            facts.append(f"at most {float(cap):g} epochs")
        if has_end:
            facts.append(f"{expected[number]:.2f} epochs in the stages that end")
        start = f"  {names[number]:<{name_width}}  {sizes[number]:>{size_width}}"
        lines.append(f"{start}  {', '.join(facts)}")
    return lines


def _stage_line(number: int, stage: FullStage) -> str:
    length = "endless" if stage.tokens is None else f"{stage.tokens:,} tokens"
    rows = "" if stage.seq_len is None else f", rows of {stage.seq_len:,}"
    return f"  stage {number}: {length}{rows}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _example_weights(names: Sequence[str], weights: Mapping[str, Weight]) -> str:
    return "{" + ", ".join(f'"{name}": {weights.get(name, 0)}' for name in names) + "}"
