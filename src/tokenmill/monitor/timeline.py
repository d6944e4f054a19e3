"""A time line as arrays, for plots and programs.

Every run of a build is a segment. What was not known at a sample is NaN in its array. The last line
of a segment may be cut off, by a kill or a full disk, and is left out; any other line that is no
line of a time line means that the file is something else, or damaged, and is refused.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Lines = list[dict[str, Any]]

SCHEMA = "tokenmill.timeline/1"
_BEGINNING = b'{"kind":"'


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """One run of a build. Arrays have one value per sample; rates are since the one before."""

    header: Mapping[str, Any]
    """started, machine, build, and more."""
    summary: Mapping[str, Any] | None
    """None where the run was killed."""
    time: Floats
    """Seconds since 1970."""
    seconds: Floats
    """Since the run began."""
    cpu_percent: Floats
    """(samples, cores)."""
    processes: Floats
    memory_rss_bytes: Floats
    """Of the build's processes; pages that several of them share are counted more than once."""
    memory_pss_bytes: Floats
    """The same with shared pages divided among those that share them; NaN outside Linux."""
    machine_memory_bytes: Floats
    """In use, by whomever."""
    disk_read_bytes_per_second: Floats
    """All disks, all programs."""
    disk_write_bytes_per_second: Floats
    build_read_bytes_per_second: Floats
    """The build's own processes, from the disk: what is in the page cache is not read again."""
    build_write_bytes_per_second: Floats
    input_bytes: Floats
    """Worked on so far in this run, decompressed."""
    tokens: Floats
    input_bytes_per_second: Floats
    tokens_per_second: Floats
    phases: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def memory_bytes(self) -> Floats:
        """PSS where it is known, else RSS."""
        pss = self.memory_pss_bytes
        return np.where(np.isnan(pss), self.memory_rss_bytes, pss)

    @property
    def length_seconds(self) -> float:
        """How long the run took, or lived."""
        if self.summary is not None:
            return float(self.summary["seconds"])
        return float(self.seconds[-1]) if len(self) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """All runs in one file, oldest first."""

    path: str
    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        """Of all runs, without the time between them."""
        return sum(segment.length_seconds for segment in self.segments)


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Read what `tokenmill build --monitor FILE` wrote, or is writing."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(
            f"the time line {str(path)!r} cannot be read: {error.strerror or error}",
            hint="write one with: tokenmill build ... --monitor timeline.jsonl",
        ) from error
    runs: list[Lines] = []
    cut: int | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        members = _parse(line)
        is_header = members is not None and members.get("schema") == SCHEMA
        if cut is not None and not is_header:
            raise _not_a_timeline(path, cut)
        if members is None and _is_begun(line):
            cut = number
        elif members is None or (not runs and not is_header):
            raise _not_a_timeline(path, number)
        elif is_header:
            cut = None
            runs.append([members])
        else:
            runs[-1].append(members)
    if not runs:
        raise _not_a_timeline(path, 1)
    return Timeline(path=str(path), segments=tuple(_segment(run) for run in runs))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        members = json.loads(line)
    except ValueError:
        return None
    return members if isinstance(members, dict) and "kind" in members else None


def _is_begun(line: bytes) -> bool:
    """Whether this may be the beginning of a line of ours."""
    length = min(len(line), len(_BEGINNING))
    return line[:length] == _BEGINNING[:length]


def _not_a_timeline(path: Path, number: int) -> UsageError:
    return UsageError(
        f"line {number:,} of {str(path)!r} is no line of a time line; it is another kind of file, "
        "or was changed",
        hint="name the file that was written by: tokenmill build ... --monitor FILE",
    )


def _segment(lines: Lines) -> Segment:
    samples = [line for line in lines if line["kind"] == "sample"]
    summaries = [line for line in lines if line["kind"] == "summary"]
    cores = [sample.get("cpu_percent") or [] for sample in samples]
    widest = max(map(len, cores), default=int(lines[0]["machine"]["cores"] or 0))
    # A core may be switched off, or on, while the build runs.
    percents = [[*map(_number, row), *[np.nan] * (widest - len(row))] for row in cores]

    def column(name: str) -> Floats:
        return np.array([_number(sample.get(name)) for sample in samples], dtype=np.float64)

    # Every other array is named as its member in the file.
    arrays = [field.name for field in dataclasses.fields(Segment) if field.type == "Floats"]
    plain = [name for name in arrays if name != "cpu_percent"]
    return Segment(
        header=lines[0],
        summary=summaries[-1] if summaries else None,
        cpu_percent=np.array(percents, dtype=np.float64).reshape(len(samples), widest),
        phases=tuple(str(sample.get("phase")) for sample in samples),
        **{name: column(name) for name in plain},
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
