"""What the page shows of what is going on: trainings by their metrics, builds by their receipts.

Both are read from the files that they write anyway, each time that the page asks, so what is shown
may be running or over. A file that did not change is not read again.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.diagnosis.page import thinned
from tokenmill.diagnosis.values import METRICS, RunMetrics, read_run
from tokenmill.errors import StoreError, UsageError
from tokenmill.monitor import Timeline, read_timeline
from tokenmill.store.facts import Counts, read_receipt
from tokenmill.store.layout import StoreLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEW_RECEIPTS = 400  # read for one answer: a store may have thousands when it is first looked at
SHOWN_REJECTS = 30
_STAGED = re.compile(r"(?P<unit>.+)-\d+-[0-9a-f]{8}\Z")
# What of a time line is drawn: title, factor, lines by the names of their values.
LINES: tuple[tuple[str, float, dict[str, str]], ...] = (
    ("Text read, MB/s", 1e-6, {"text": "input_bytes_per_second"}),
    ("Tokens per second", 1.0, {"tokens": "tokens_per_second"}),
    ("Memory, GB", 1e-9, {"the build": "memory_bytes", "all programs": "machine_memory_bytes"}),
    ("Cores in use", 1.0, {"the build": "build_cores", "all programs": "machine_cores"}),
)


class ShownRun:
    """A training, by its metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.file = path / METRICS if path.is_dir() else path
        self.name = (path if path.is_dir() else path.parent).resolve().name
        self._known: tuple[tuple[int, int], RunMetrics] | None = None

    def _read(self) -> RunMetrics:
        stat = self.file.stat()
        facts = stat.st_size, stat.st_mtime_ns
        if self._known is None or self._known[0] != facts:
            self._known = facts, read_run(self.file)
        return self._known[1]

    def run(self) -> dict[str, Any]:
        """Every number of its lines as a line over steps, of at most some hundred points."""
        found = self._read()
        names = dict.fromkeys(
            name for line in found.lines for name, value in line.items() if _is_number(value)
        )
        names.pop("step", None)
        lines = {
            name: [[*column] for column in zip(*points, strict=True)]
            for name in names
            if (points := thinned(found.series(name), np.mean))
        }
        return {
            "name": self.name,
            "lines": lines,
            "last": {
                name: value
                for line in found.lines
                for name, value in line.items()
                if _is_number(value)
            },
            "bad_lines": found.bad_lines,
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class ShownBuild:
    """A build, by the folder that it writes, or by the time line of `--monitor`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        self._units: dict[str, tuple[Counts, int]] = {}  # what a unit counts, and its time

    def build(self) -> dict[str, Any]:
        """How far it is; lines over time where there is a time line."""
        if self.path.is_file():
            return {"name": self.name, **_lines_of(read_timeline(self.path))}
        return {"name": self.name, **self._state()}

    def _state(self) -> dict[str, Any]:
        """What is committed, what is worked on, and the newest rows that were rejected."""
        layout = StoreLayout(self.path)
        receipts = {
            path.stem: stat.st_mtime_ns
            for path in layout.shards.glob("*.json")
            if (stat := _stat_of(path)) is not None
        }
        new = [
            name
            for name, time in receipts.items()
            if name not in self._units or self._units[name][1] != time
        ]
        for name in new[:NEW_RECEIPTS]:
            try:
                self._units[name] = read_receipt(layout, name).counts, receipts[name]
            except StoreError:  # it was taken away just now
                receipts.pop(name)
        counts = sum((counts for counts, _ in self._units.values()), Counts.of())
        working = {
            found["unit"]
            for path in layout.root.glob("tmp/**/*")
            if (found := _STAGED.fullmatch(path.name)) and path.is_dir()
        }
        units = [
            {
                "name": name,
                "state": "rejects" if self._units[name][0].rejected else "done",
                "tokens": self._units[name][0].tokens,
                "rejected": self._units[name][0].rejected,
            }
            for name in sorted(receipts)
            if name in self._units
        ]
        units += [{"name": name, "state": "working"} for name in sorted(working - receipts.keys())]
        return {
            "units": units,
            "unread": len(new[NEW_RECEIPTS:]),
            "totals": counts.to_json(),
            "last": max(receipts.values(), default=0) / 1e9,
            "is_done": layout.manifest.is_file(),
            "reasons": dict(self._reasons(layout)),
            "rejects": [*self._rejects(layout)],
        }

    def _newest(self, layout: StoreLayout) -> list[Path]:
        """Files of rejected rows, the newest first."""
        found = [
            (stat.st_mtime_ns, path)
            for path in layout.rejects.glob("*.jsonl")
            if (stat := _stat_of(path)) is not None
        ]
        return [path for _, path in sorted(found, reverse=True)]

    def _rejects(self, layout: StoreLayout) -> Iterator[dict[str, Any]]:
        left = SHOWN_REJECTS
        for path in self._newest(layout):
            for line in path.read_bytes().splitlines()[:left]:
                if isinstance(row := json.loads(line), dict) and "reason" in row:
                    left -= 1
                    yield row
            if left <= 0:
                return

    def _reasons(self, layout: StoreLayout) -> Counter[str]:
        """Reasons of the rows in the newest files."""
        found = Counter[str]()
        for path in self._newest(layout)[:50]:
            for line in path.read_bytes().splitlines():
                row = json.loads(line)
                found.update([row["reason"]] if "reason" in row else row.get("more", {}))
        return found


def _stat_of(path: Path) -> Any:
    """None for a file that was taken away just now."""
    try:
        return path.stat()
    except OSError:
        return None


def _lines_of(timeline: Timeline) -> dict[str, Any]:
    """The lines of a time line, runs one after the other."""
    charts = []
    segments = [segment for segment in timeline.segments if len(segment)]
    offsets = np.cumsum([0.0, *(segment.length_seconds for segment in segments)])
    last = timeline.segments[-1]
    budget = last.header.get("build", {}).get("resources", {}).get("memory_bytes")
    for title, factor, names in LINES:
        lines = []
        for name, value in names.items():
            points = [
                (float(at) + offset, float(number) * factor)
                for segment, offset in zip(segments, offsets.tolist(), strict=False)
                for at, number in zip(segment.seconds, getattr(segment, value), strict=True)
            ]
            x, y = zip(*thinned(points, np.mean), strict=True) if points else ((), ())
            lines.append({"name": name, "x": x, "y": y})
        charts.append({"title": title, "lines": lines})
    return {
        "charts": charts,
        "seconds": timeline.seconds,
        "outcome": None if last.summary is None else str(last.summary.get("outcome")),
        "phase": last.phases[-1] if len(last) else "starting",
        "budget": budget if isinstance(budget, int) else None,
        "runs": len(timeline.segments),
    }


def is_timeline(path: Path) -> bool:
    """Whether a file is the time line of a build."""
    try:
        read_timeline(path)
    except UsageError:
        return False
    return True
