"""Decides what a build has to do: which units are complete, which are to be built, which go.

Resume is nothing but this: plan the units again and keep those whose receipt still holds. A receipt
holds if its configuration, its slice and its source file are the ones of the plan. A file that was
only touched is recognised by its bytes, and so is one with its old size and time that was changed
after the receipt was written (docs/decisions/0016). What the files do not say is never taken from
an earlier run.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from tokenmill.errors import StoreError, UsageError
from tokenmill.sources import format_of
from tokenmill.store.layout import RECEIPT_FILE, unit_name, unit_prefix
from tokenmill.store.receipts import find_receipt, read_receipt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tokenmill.sources.base import Source, SourceFile, SourceOptions, Unit
    from tokenmill.store.layout import StoreLayout
    from tokenmill.store.receipts import Claim, Receipt


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Units of one file for one worker: a single one, or every n-th of a stream until it ends."""

    file: SourceFile
    first: int
    step: int | None
    """None: the one unit `first`. Else first, first + step, ... as far as the stream goes."""
    done: frozenset[int] = frozenset()
    """Units of the stream that are complete already."""
    row_limits: Mapping[int, int] = field(default_factory=dict)
    """Unit -> rows of it that lie before the limit; units without an entry are taken whole."""
    last: int | None = None
    """Last unit of the stream that the limit reaches."""

    def __str__(self) -> str:
        unit = f"unit {self.first}" if self.step is None else "its units"
        return f"{unit} of {self.file.path}"


@dataclass(kw_only=True, slots=True)
class WorkPlan:
    """The units of a build, sorted into complete ones and work."""

    files: tuple[SourceFile, ...]
    tasks: list[Task] = field(default_factory=list)
    done: dict[str, Claim] = field(default_factory=dict)
    """Unit name -> what its receipt, which holds, claims."""
    touched: list[tuple[str, SourceFile]] = field(default_factory=list)
    """Units whose file has a new version but the same bytes: their receipts are written anew."""
    planned: set[str] = field(default_factory=set)
    """Names of all units that the plan knows."""
    stale: list[str] = field(default_factory=list)
    """Units in the store that are not in the plan although their file is an input."""
    foreign: list[str] = field(default_factory=list)
    """Input files of units in the store that are no inputs now."""
    foreign_units: list[str] = field(default_factory=list)
    rebuilt: int = 0
    """Units of the store whose receipt does not hold any more."""
    other_config: int = 0
    """Units of the store that were built with another configuration."""
    bytes_to_do: int = 0
    """Input of the tasks; an estimate where it is compressed."""
    units_to_do: int | None = 0
    """None where a compressed file hides it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRules:
    """What a receipt is held against."""

    options: SourceOptions
    config: str
    limit: int | None
    workers: int
    verify_sources: bool = False
    """Hold the bytes of every source against its receipt, whatever its size and time say."""
    part: BuildPart | None = None
    """Plan the work of this part alone; what the others have is neither looked at nor touched."""

    def has(self, name: str) -> bool:
        """Whether the unit, or the stream, of this name is to be planned."""
        return self.part is None or self.part.has(name)


def plan_work(layout: StoreLayout, files: Sequence[SourceFile], *, rules: PlanRules) -> WorkPlan:
    """Compare the units of the input with the receipts of the store."""
    plan = WorkPlan(files=tuple(files))
    existing = _units_in_store(layout)
    last_units = _last_units(existing)
    rows_left = rules.limit
    # A stream is shared by several workers only where there are not enough files for them, since
    # each of them decompresses all of it.
    lanes = max(1, rules.workers // max(1, _files_to_share(files, rules)))
    for file in files:
        if rows_left == 0:
            break
        planner = _FilePlanner(
            layout=layout,
            file=file,
            rules=rules,
            plan=plan,
            rows_left=rows_left,
            existing=existing,
            last_units=last_units,
        )
        try:
            planner.run(lanes)
        finally:
            planner.close()
        rows_left = planner.rows_left
    if rules.part is None:
        _find_leftovers(plan, layout, existing)
    return plan


def _files_to_share(files: Sequence[SourceFile], rules: PlanRules) -> int:
    """Files among which the workers are divided: streams of other parts are left out."""
    return sum(
        not format_of(file).is_stream(file, rules.options) or rules.has(unit_prefix(file.path))
        for file in files
    )


@dataclass(kw_only=True, slots=True)
class _FilePlanner:
    layout: StoreLayout
    file: SourceFile
    rules: PlanRules
    plan: WorkPlan
    rows_left: int | None
    existing: set[str]
    last_units: Mapping[str, int]
    """Prefix of a file's units -> the highest index that the store has."""
    _source: Source | None = None

    def run(self, lanes: int) -> None:
        form = format_of(self.file)
        if form.is_stream(self.file, self.rules.options):
            self._plan_stream(lanes)
        else:
            self._plan_units()

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def source(self) -> Source:
        """The open file: only a limit or a touched file needs it while planning."""
        if self._source is None:
            self._source = format_of(self.file).open(self.file, self.rules.options)
        return self._source

    def _plan_units(self) -> None:
        units = list(format_of(self.file).plan(self.file, self.rules.options))
        size = estimated_text_bytes(self.file)
        for place, unit in enumerate(units):
            if self.rows_left == 0:
                return
            row_limit = self._take_rows(unit)
            name = unit_name(self.file.path, index=unit.index)
            if not self.rules.has(name) or self._keep_if_complete(name, unit, row_limit):
                continue
            limits = {} if row_limit is None else {unit.index: row_limit}
            task = Task(file=self.file, first=unit.index, step=None, row_limits=limits)
            self.plan.tasks.append(task)
            share = size * (place + 1) // len(units) - size * place // len(units)
            self.plan.bytes_to_do += share
            if self.plan.units_to_do is not None:
                self.plan.units_to_do += 1

    def _plan_stream(self, lanes: int) -> None:
        """A stream's end is known only if this limit or an earlier run reached it."""
        complete: set[int] = set()
        limits: dict[int, int] = {}
        last: int | None = None
        is_mine = self.rules.has(unit_prefix(self.file.path))
        if not is_mine and self.rows_left is None:
            return
        for unit in self._known_units():
            if self.rows_left == 0:
                break
            row_limit = self._take_rows(unit)
            if row_limit is not None:
                limits[unit.index] = row_limit
            name = unit_name(self.file.path, index=unit.index)
            if is_mine and self._keep_if_complete(name, unit, row_limit):
                complete.add(unit.index)
            if self.rows_left == 0 or self._ends_stream(unit):
                last = unit.index
                break
        if not is_mine or (last is not None and complete >= set(range(last + 1))):
            return
        self.plan.units_to_do = None
        self.plan.bytes_to_do += estimated_text_bytes(self.file)
        for lane in range(lanes):
            self.plan.tasks.append(
                Task(
                    file=self.file,
                    first=lane,
                    step=lanes,
                    done=frozenset(complete),
                    row_limits=limits,
                    last=last,
                )
            )

    def _known_units(self) -> Iterator[Unit]:
        """Units of the stream: with a limit as many as exist, else those that the store has."""
        units = format_of(self.file).plan(self.file, self.rules.options)
        if self.rows_left is not None:
            return itertools.takewhile(lambda unit: self.source().exists(unit), units)
        last = self.last_units.get(unit_prefix(self.file.path), -1)
        return itertools.islice(units, last + 1)

    def _ends_stream(self, unit: Unit) -> bool:
        claim = self.plan.done.get(unit_name(self.file.path, index=unit.index))
        return claim is not None and claim.is_last

    def _take_rows(self, unit: Unit) -> int | None:
        """How many rows of the unit lie before the limit; None if it is taken whole."""
        if self.rows_left is None:
            return None
        found = find_receipt(self.layout, unit_name(self.file.path, index=unit.index))
        if found is not None and self._is_same_slice(found, unit) and self._is_same(found):
            rows = found.counts.rows
        else:
            rows = self.source().count_rows(unit)
        taken = min(rows, self.rows_left)
        self.rows_left -= taken
        return taken if taken < rows else None

    def _keep_if_complete(self, name: str, unit: Unit, row_limit: int | None) -> bool:
        self.plan.planned.add(name)
        if name not in self.existing:
            return False
        found = find_receipt(self.layout, name)
        if found is not None and found.config != self.rules.config:
            self.plan.other_config += 1
        elif found is not None and self._still_holds(name, found, unit, row_limit):
            self.plan.done[name] = found.claim
            return True
        self.plan.rebuilt += 1
        return False

    def _still_holds(self, name: str, found: Receipt, unit: Unit, row_limit: int | None) -> bool:
        if not (self._is_same_slice(found, unit) and self._fits_limits(found, row_limit)):
            return False
        if self._is_same(found):
            return True
        source = found.source
        if source.size != self.file.size or self.source().digest(unit) != source.digest:
            return False
        if source.version != self.file.version or self._changed_since(found):
            self.plan.touched.append((name, self.file))
        return True

    def _is_same(self, found: Receipt) -> bool:
        """Whether the file need not be read to know that it is the one of the receipt."""
        facts = (found.source.size, found.source.version) == (self.file.size, self.file.version)
        return facts and not self.rules.verify_sources and not self._changed_since(found)

    def _changed_since(self, found: Receipt) -> bool:
        # Sizes and times can be put back as they were; when that was done cannot.
        receipt = f"{self.layout.root}/shards/{found.unit.name}.json"
        return self.file.changed >= os.stat(receipt).st_mtime_ns  # noqa: PTH116 (a path object takes longer)

    @staticmethod
    def _is_same_slice(found: Receipt, unit: Unit) -> bool:
        return (found.unit.start, found.unit.end) == (unit.start, unit.end)

    def _fits_limits(self, found: Receipt, row_limit: int | None) -> bool:
        """Whether the unit comes out the same under today's limits on rows and document sizes."""
        largest, bounds = self.rules.options.max_document_bytes, found.bounds
        smallest = bounds.smallest_too_large_bytes
        if bounds.largest_row_bytes > largest or (smallest is not None and smallest <= largest):
            return False
        rows = found.counts.rows
        return rows - found.counts.skipped == (rows if row_limit is None else row_limit)


def _units_in_store(layout: StoreLayout) -> set[str]:
    """Names of the units that have a receipt."""
    try:
        names = os.listdir(layout.shards)  # noqa: PTH208 (names alone: there may be millions)
    except FileNotFoundError:
        return set()
    return {match["unit"] for name in names if (match := RECEIPT_FILE.fullmatch(name))}


def _last_units(names: set[str]) -> dict[str, int]:
    """Prefix of a file's units -> the highest index among these."""
    last: dict[str, int] = {}
    for name in names:
        prefix, _, index = name.rpartition("-")
        last[prefix] = max(last.get(prefix, -1), int(index))
    return last


def _find_leftovers(plan: WorkPlan, layout: StoreLayout, existing: set[str]) -> None:
    """Units of the store that the plan does not have: of input files, and of other files."""
    inputs = {member.path for file in plan.files for member in (file, *file.members)}
    foreign = set()
    for name in sorted(existing - plan.planned):
        try:
            unit = read_receipt(layout, name).unit
        except StoreError:
            plan.stale.append(name)
            continue
        strangers = [path for path in unit.members or (unit.path,) if path not in inputs]
        if strangers and len(strangers) == len(unit.members or (unit.path,)):
            plan.foreign_units.append(name)
            foreign.update(strangers)
        else:
            plan.stale.append(name)
    plan.foreign.extend(sorted(foreign))


def estimated_text_bytes(file: SourceFile) -> int:
    """Bytes of text to expect from a file; text compresses about four to one."""
    return file.size * (4 if file.compression else 1)


# -------------------------------------------------------------------------------------------------
# Parts of a build: which units a part has, found from their names alone.
#
#   | part_of(unit) = hash of its name, modulo the number of parts
#
# So parts need not know of each other, a unit keeps its part when files are added, and every part
# may be run again. Units of a stream (a compressed file) stay together and go by the name of their
# file: reading the last of them means decompressing all the others.

_PART = re.compile(r"([0-9]+)/([0-9]+)")
_SHOWN = 3
"""Units that an error names; a count stands for the others."""


@dataclass(frozen=True, slots=True)
class BuildPart:
    """Part `number` of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def has(self, name: str) -> bool:
        """Whether the unit, or the stream, of this name is this part's."""
        return part_of(name, self.of) == self.number


def parse_part(text: str) -> BuildPart:
    """Part(3, 64) of '3/64'."""
    match = _PART.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a part of a build",
            hint="write its number and the number of parts: 3/64 is the third of 64",
        )
    part = BuildPart(int(match[1]), int(match[2]))
    if part.of == 0:
        raise UsageError(f"part {text!r}: no parts make no build", hint="use 1/1 or more parts")
    if not 1 <= part.number <= part.of:
        raise UsageError(
            f"part {text!r} does not exist: parts are counted from 1",
            hint=f"use 1/{part.of} to {part.of}/{part.of}",
        )
    return part


def part_of(name: str, parts: int) -> int:
    """Which of the parts has the unit, or the stream, of this name; from 1."""
    return xxhash.xxh3_64_intdigest(name.encode()) % parts + 1


def part_of_task(task: Task, parts: int) -> int:
    """Which of the parts has the units of a task."""
    if task.step is None:
        return part_of(unit_name(task.file.path, index=task.first), parts)
    return part_of(unit_prefix(task.file.path), parts)


def describe_missing(tasks: Iterable[Task], parts: int) -> tuple[str, list[int]]:
    """Units that are not there, in words, and the parts that have them."""
    by_part: dict[int, list[str]] = {}
    seen: set[str] = set()
    for task in tasks:
        if (name := str(task)) not in seen:  # a stream may be shared by several tasks
            seen.add(name)
            by_part.setdefault(part_of_task(task, parts), []).append(name)
    named = [f"{name} (part {part}/{parts})" for part in sorted(by_part) for name in by_part[part]]
    more = f" and {len(named) - _SHOWN:,} more" if named[_SHOWN:] else ""
    return ", ".join(named[:_SHOWN]) + more, sorted(by_part)
