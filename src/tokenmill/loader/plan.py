"""Which rows make up which step: the stages of a mixture strung together, from any position.

    Mixture + rows per epoch of its layouts + rows per global batch -> Plan -> StageRun of a step

A source counts its rows on and on: `index // rows_per_epoch` is the epoch, the rest the row. Where
a stage keeps seq_len, sources go on where they were. Where it changes, the rows are others: every
source begins a fresh pass, at the first epoch number that no pass before has used. Every stage
begins a round of its own, so shares are exact to a row within a stage.
A `Position` says how far a run has come without saying anything about batches, so a run may go on
from it with another batch size, at exactly the next row.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StateError, UsageError
from tokenmill.loader import order
from tokenmill.loader.mixture import row_parts, rows_of_batch
from tokenmill.loader.order import MixtureSchedule
from tokenmill.store.facts import brief
from tokenmill.store.layout import checksum_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.loader.mixture import Extent, FullStage, Mixture


MAX_NUMBER = 2**53
"""Rows that a state may speak of: more than any run has, and far from where int64 ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What was drawn with one seq_len, before a stage changed it; per source."""

    seq_len: int
    rows: tuple[int, ...]
    rows_per_epoch: tuple[int, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "seq_len": self.seq_len,
            "rows": [*self.rows],
            "rows_per_epoch": [*self.rows_per_epoch],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a run has come: plain integers, the same on every rank and for every batch size."""

    stage: int
    row: int
    """Rows drawn in this stage."""
    drawn: tuple[int, ...]
    """Rows drawn from each source in this pass before this stage."""
    past: tuple[Pass, ...] = ()
    """Passes with another seq_len, oldest first."""

    @classmethod
    def start(cls, num_sources: int) -> Position:
        """Where a run begins."""
        return cls(stage=0, row=0, drawn=(0,) * num_sources)

    def first_epochs(self) -> tuple[int, ...]:
        """Epoch number at which each source begins this pass."""
        return tuple(
            sum(-(-done.rows[i] // done.rows_per_epoch[i]) for done in self.past)
            for i in range(len(self.drawn))
        )

    def past_epochs(self) -> tuple[Fraction, ...]:
        """Epochs seen of each source in the passes before."""
        return tuple(
            sum((Fraction(done.rows[i], done.rows_per_epoch[i]) for done in self.past), Fraction(0))
            for i in range(len(self.drawn))
        )

    def to_json(self) -> dict[str, object]:
        """For a state dict."""
        return {
            "stage": self.stage,
            "row": self.row,
            "drawn": [*self.drawn],
            "past": [done.to_json() for done in self.past],
        }

    @classmethod
    def from_json(cls, members: object, *, num_sources: int) -> Position:
        """The inverse of `to_json`; UsageError where the state is not one of so many sources."""
        state = _members(members, {"stage", "row", "drawn", "past"})
        past = state["past"]
        if not isinstance(past, list | tuple):
            raise _damaged(f"past={brief(past)}")
        return cls(
            stage=_number(state["stage"]),
            row=_number(state["row"]),
            drawn=_numbers(state["drawn"], num_sources),
            past=tuple(_pass(item, num_sources) for item in past),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a run has drawn from one source."""

    name: str
    rows: int
    tokens: int
    """Rows * seq_len."""
    epochs: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageRun:
    """A stage as this run goes through it."""

    number: int
    seq_len: int
    batch_rows: int
    """Rows of a global batch."""
    first_step: int
    num_steps: int | None
    """None is endless. The last step of the last stage may have fewer rows than the others."""
    first_row: int
    """Row of the stage at which `first_step` begins: above 0 where the run was resumed inside."""
    num_rows: int | None
    """Rows of the stage, those before `first_row` included; None is endless."""
    start: Position
    """Where the stage begins."""
    schedule: MixtureSchedule
    rows_per_epoch: NDArray[np.int64]

    def rows(self, step: int) -> range:
        """Rows of the stage that make up a step."""
        first = self.first_row + (step - self.first_step) * self.batch_rows
        last = first + self.batch_rows
        return range(first, last if self.num_rows is None else min(last, self.num_rows))

    def position(self, row: int) -> Position:
        """The position before a row of the stage is drawn."""
        return replace(self.start, row=row)

    def drawn(self, row: int) -> tuple[int, ...]:
        """Rows drawn from each source in this pass, before a row of the stage."""
        counts = self.schedule.counts(row)
        pairs = zip(self.start.drawn, self.schedule.first, counts, strict=True)
        return tuple(drawn + count - first for drawn, first, count in pairs)


class Plan:
    """The steps of a run, from a position on; any step in O(number of stages).

    `measure(seq_len)` gives the extent of every source; it is asked only for the stages that a
    step needs.

    >>> plan = Plan(mixture, seq_len=2048, batch_rows=64, measure=measure)
    >>> run = plan.stage_of(step)
    >>> source, index = run.schedule.locate(np.array(run.rows(step)))
    >>> state = plan.position(step + 1).to_json()
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seq_len: int,
        batch_rows: int,
        measure: Callable[[int], Sequence[Extent]],
        origin: Position | None = None,
        origin_step: int = 0,
    ) -> None:
        self.mixture = mixture
        self.seq_len = seq_len
        self.batch_rows = batch_rows
        self.origin = Position.start(len(mixture.sources)) if origin is None else origin
        self.origin_step = origin_step
        self._measure = measure
        self._extents: dict[int, tuple[Extent, ...]] = {}
        self._check()
        # Grows when a step asks for it, and is replaced as a whole: readers may be threads.
        self._runs: tuple[StageRun, ...] = ()

    def _check(self) -> None:
        stages = self.mixture.stages
        if self.origin.stage >= len(stages):
            raise StateError(
                f"the state is of stage {self.origin.stage}, and the mixture has {len(stages)}",
                hint="resume with the stages of the run that was saved",
            )
        for stage in stages:
            rows_of_batch(
                self.batch_rows, seq_len=self.seq_len, stage_seq_len=stage.seq_len or self.seq_len
            )

    @property
    def num_steps(self) -> int | None:
        """Number of the step after the last one; None is endless."""
        if self.mixture.stages[-1].tokens is None and None in self.mixture.max_epochs:
            weights = zip(self.mixture.stages[-1].weights, self.mixture.max_epochs, strict=True)
            if any(weight > 0 and cap is None for weight, cap in weights):
                return None
        last = self._reach_last()
        return None if last.num_steps is None else last.first_step + last.num_steps

    @property
    def last_step_rows(self) -> int | None:
        """Rows of the last step: fewer than its batch where sources were used up; None: endless."""
        steps = self.num_steps
        if steps is None or steps == self.origin_step:
            return None
        return len(self.stage_of(steps - 1).rows(steps - 1))

    def stage_of(self, step: int) -> StageRun:
        """The stage that a step belongs to; IndexError past the end."""
        run = self.find(step)
        if run is None:
            raise IndexError(f"step {step:,} of a run of {self.num_steps} steps")
        return run

    def position(self, step: int) -> Position:
        """How far the run has come before a step; also for the step after the last."""
        run = self.find(step)
        if run is not None:
            return run.position(run.rows(step).start)
        last = self._reach_last()
        if step != self.num_steps:
            raise IndexError(f"step {step:,} of a run of {self.num_steps} steps")
        assert last.num_rows is not None
        return last.position(last.num_rows)

    def seen(self, step: int) -> tuple[Seen, ...]:
        """What was drawn from each source before a step."""
        position = self.position(step)
        run = next(run for run in self._runs if run.number == position.stage)
        drawn = run.drawn(position.row)
        past = position.past_epochs()
        seen = []
        for i, name in enumerate(self.mixture.names):
            rows = drawn[i] + sum(done.rows[i] for done in position.past)
            tokens = sum(done.rows[i] * done.seq_len for done in position.past)
            seen.append(
                Seen(
                    name=name,
                    rows=rows,
                    tokens=tokens + drawn[i] * run.seq_len,
                    epochs=float(past[i] + Fraction(drawn[i], int(run.rows_per_epoch[i]))),
                )
            )
        return tuple(seen)

    def find(self, step: int) -> StageRun | None:
        """The stage that a step belongs to; None past the end."""
        if step < self.origin_step:
            raise IndexError(
                f"step {step:,} lies before step {self.origin_step:,}, where this run was resumed"
            )
        number = 0
        while (run := self._run(number)) is not None:
            if run.num_steps is None or step < run.first_step + run.num_steps:
                return run
            number += 1
        return None

    def _reach_last(self) -> StageRun:
        last = self._run(len(self.mixture.stages) - 1 - self.origin.stage)
        assert last is not None
        return last

    def _run(self, number: int) -> StageRun | None:
        """The stage so many stages after that of the origin."""
        runs = self._runs
        if number + self.origin.stage >= len(self.mixture.stages):
            return None
        while len(runs) <= number:
            runs = (*runs, self._next_run(runs[-1] if runs else None))
            self._runs = runs
        return runs[number]

    def _next_run(self, before: StageRun | None) -> StageRun:
        if before is None:
            return self._enter(self.origin, step=self.origin_step)
        assert before.num_steps is not None
        assert before.num_rows is not None
        number = before.number + 1
        drawn = before.drawn(before.num_rows)
        start = replace(before.start, stage=number, row=0, drawn=drawn)
        if self._seq_len(number) != before.seq_len:
            done = Pass(
                seq_len=before.seq_len,
                rows=drawn,
                rows_per_epoch=tuple(before.rows_per_epoch.tolist()),
            )
            start = replace(start, drawn=(0,) * len(drawn), past=(*start.past, done))
        return self._enter(start, step=before.first_step + before.num_steps)

    def _enter(self, position: Position, *, step: int) -> StageRun:
        """The stage of a position, with `step` beginning there."""
        stage = self.mixture.stages[position.stage]
        seq_len = self._seq_len(position.stage)
        batch_rows = rows_of_batch(self.batch_rows, seq_len=self.seq_len, stage_seq_len=seq_len)
        extents = self._extent(seq_len)
        schedule = self._schedule(stage, position, extents)
        if schedule.num_rows is not None and position.row > schedule.num_rows:
            raise UsageError(
                f"the state has drawn {position.row:,} rows of stage {position.stage}, in which"
                f" max_epochs leaves {schedule.num_rows:,}",
                hint="resume with the max_epochs of the run that was saved",
            )
        is_last = position.stage == len(self.mixture.stages) - 1
        wanted = None if stage.tokens is None else -(-stage.tokens // seq_len)
        rows = _rows_in_batches(
            wanted,
            schedule.num_rows,
            first=position.row,
            batch_rows=batch_rows,
            keep_partial=is_last,
        )
        return StageRun(
            number=position.stage,
            seq_len=seq_len,
            batch_rows=batch_rows,
            first_step=step,
            num_steps=None if rows is None else -(-rows // batch_rows),
            first_row=position.row,
            num_rows=None if rows is None else position.row + rows,
            start=replace(position, row=0),
            schedule=schedule,
            rows_per_epoch=np.array([extent.rows for extent in extents], np.int64),
        )

    def _schedule(
        self, stage: FullStage, position: Position, extents: Sequence[Extent]
    ) -> MixtureSchedule:
        bases = [
            epoch * extent.rows
            for epoch, extent in zip(position.first_epochs(), extents, strict=True)
        ]
        limits = [
            None if cap is None else base + max(0, math.floor((cap - past) * extent.rows))
            for cap, past, base, extent in zip(
                self.mixture.max_epochs, position.past_epochs(), bases, extents, strict=True
            )
        ]
        first = [base + drawn for base, drawn in zip(bases, position.drawn, strict=True)]
        return MixtureSchedule(row_parts(stage.weights, extents), first=first, limits=limits)

    def _seq_len(self, number: int) -> int:
        return self.mixture.stages[number].seq_len or self.seq_len

    def _extent(self, seq_len: int) -> tuple[Extent, ...]:
        if seq_len not in self._extents:
            extents = tuple(self._measure(seq_len))
            for source, extent in zip(self.mixture.sources, extents, strict=True):
                if not extent.rows:
                    raise UsageError(
                        f"the source {source.name!r} ({source.store.path}) has no row of"
                        f" {seq_len:,} tokens",
                        hint="leave it out of the mixture",
                    )
            self._extents[seq_len] = extents
        return self._extents[seq_len]


def _rows_in_batches(
    wanted: int | None, available: int | None, *, first: int, batch_rows: int, keep_partial: bool
) -> int | None:
    """Rows that a stage still draws: whole batches until `wanted` is reached or rows run out.

    Rows left over by the last whole batch stay for the next stage; in the last stage they make a
    batch of their own.
    """
    needed = None
    if wanted is not None:
        needed = -(-max(0, wanted - first) // batch_rows) * batch_rows
    if available is None:
        return needed
    left = max(0, available - first)
    if not keep_partial:
        left -= left % batch_rows
    return left if needed is None else min(needed, left)


def _members(value: object, names: set[str]) -> Mapping[str, object]:
    if not isinstance(value, dict) or set(value) != names:
        raise _damaged(brief(value))
    return value


def _pass(value: object, num_sources: int) -> Pass:
    members = _members(value, {"seq_len", "rows", "rows_per_epoch"})
    per_epoch = _numbers(members["rows_per_epoch"], num_sources)
    seq_len = _number(members["seq_len"])
    if 0 in per_epoch or not seq_len:
        raise _damaged(brief(value))
    rows = _numbers(members["rows"], num_sources)
    return Pass(seq_len=seq_len, rows=rows, rows_per_epoch=per_epoch)


def _numbers(value: object, count: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) != count:
        raise _damaged(f"{brief(value)} for {count} sources")
    return tuple(map(_number, value))


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise _damaged(brief(value))
    return value


def _damaged(what: str) -> StateError:
    return StateError(
        f"the loader's state holds {what}, which no tokenmill loader saves",
        hint="resume from a state that state_dict() gave, with the same sources",
    )


# -------------------------------------------------------------------------------------------------
# What a loader saves: a few integers and fingerprints, the same on every rank.
#
# A state says how far a run has come, and everything that this position depends on: sources,
# packing, sequence length, order. A state of anything else is refused, with the reason; continuing
# would feed rows twice, or never, without a word. Batch size, ranks, workers and the form of the
# batches are no part of it: they may change from one run to the next.

STATE_VERSION = 1
_MEMBERS = {
    "version",
    "order",
    "seed",
    "shuffle",
    "packing",
    "seq_len",
    "mixture",
    "stores",
    "layouts",
    "step",
    "position",
    "seen",
    "checksum",
}
_ANEW = "resume with what the run was begun with, or begin anew without load_state_dict"


def make_state(
    facts: Mapping[str, object], *, step: int, position: Position, seen: Mapping[str, object]
) -> dict[str, Any]:
    """A state dict of plain values: it survives JSON, pickle and torch.save."""
    state = {
        "version": STATE_VERSION,
        "order": order.VERSION,
        **facts,
        "step": step,
        "position": position.to_json(),
        "seen": dict(seen),
    }
    return {**state, "checksum": _checksum(state)}


def stage_of(state: object) -> int:
    """The stage that a state is in, as far as it can be told before it is checked."""
    position = state.get("position") if isinstance(state, dict) else None
    stage = position.get("stage") if isinstance(position, dict) else None
    return max(0, stage) if isinstance(stage, int) else 0


def check_state(
    state: object, facts: Mapping[str, object], *, num_sources: int
) -> tuple[int, Position]:
    """Step and position of a state; StateError says what is not as it was saved."""
    if not isinstance(state, dict):
        raise StateError(
            f"{brief(state)} is no state of a loader", hint="give what state_dict() gave"
        )
    for name, known in (("version", STATE_VERSION), ("order", order.VERSION)):
        if name in state and state[name] != known:
            raise StateError(
                f"the state has {name} {brief(state[name])}, and this release reads {name} {known}",
                hint="resume with the release of tokenmill that saved it",
            )
    if set(state) != _MEMBERS:
        names = sorted(map(brief, set(state) - _MEMBERS)) + sorted(_MEMBERS - set(state))
        odd = ", ".join(names)[:200]
        raise StateError(
            f"the state is not one that a loader saved: {odd} is missing or unknown",
            hint="give what state_dict() gave, whole",
        )
    _check_sum(state)
    for name, ours in facts.items():
        _compare(name, state[name], ours)
    step = state["step"]
    if type(step) is not int or not 0 <= step < MAX_NUMBER:
        raise StateError(f"the state has step {brief(step)}", hint="give what state_dict() gave")
    return step, Position.from_json(state["position"], num_sources=num_sources)


def _check_sum(state: dict[str, Any]) -> None:
    members = {name: value for name, value in state.items() if name != "checksum"}
    try:
        found = _checksum(members)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"the state holds what no loader saves: {error}", hint="give what state_dict() gave"
        ) from error
    if found != state["checksum"]:
        raise StateError(
            "the state was changed after it was saved: its checksum does not hold",
            hint="resume from another checkpoint; loader.seek(step) goes to any step by its number",
        )


def _compare(name: str, saved: object, ours: object) -> None:
    if _canonical(saved) == _canonical(ours):
        return
    if name == "stores":
        raise StateError(_other_stores(saved, ours), hint=_ANEW)
    if name == "layouts":
        raise StateError(
            "the state was saved by a release that cut rows by other rules",
            hint="resume with the release of tokenmill that saved it",
        )
    raise StateError(
        f"the state was saved with {name}={brief(saved)}, and this loader has"
        f" {name}={brief(ours)}: the rows would be others",
        hint=_ANEW,
    )


def _other_stores(saved: object, ours: object) -> str:
    if not isinstance(saved, dict) or not isinstance(ours, dict) or set(saved) != set(ours):
        return f"the state is of the sources {brief(saved)}, and this loader has {brief(ours)}"
    names = [repr(name) for name in ours if saved[name] != ours[name]]
    which = "the store" if names == ["''"] else f"the source {', '.join(names)}"
    return (
        f"{which} does not hold what it held when the state was saved (other text, tokenizer,"
        " split or order of shards): its rows are others"
    )


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(members: Mapping[str, object]) -> str:
    return checksum_of(_canonical(members).encode())
