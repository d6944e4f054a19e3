"""Parts of a build: which units a part has, found from their names alone.

    part_of(unit) = hash of its name, modulo the number of parts

So parts need not know of each other, a unit keeps its part when files are added, and every part may
be run again. Units of a stream (a compressed file) stay together and go by the name of their file:
reading the last of them means decompressing all the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from tokenmill.errors import UsageError
from tokenmill.store.layout import unit_name, unit_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenmill.builder.plan import Task

_PART = re.compile(r"([0-9]+)/([0-9]+)")
_SHOWN = 3
"""Units that an error names; a count stands for the others."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `of`, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def has(self, name: str) -> bool:
        """Whether the unit, or the stream, of this name is this part's."""
        return part_of(name, self.of) == self.number


def parse_part(text: str) -> Part:
    """Part(3, 64) of '3/64'."""
    match = _PART.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a part of a build",
            hint="write its number and the number of parts: 3/64 is the third of 64",
        )
    part = Part(int(match[1]), int(match[2]))
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
