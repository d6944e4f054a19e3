"""What the page shows of what is going on: trainings by their metrics, builds by their receipts.

Both are read from the files that they write anyway, each time that the page asks, so what is shown
may be running or over. A file that did not change is not read again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
from array import array
from collections import Counter, deque
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from tokenmill.diagnosis.page import KEPT_POINTS, thinned
from tokenmill.diagnosis.values import METRICS, read_run
from tokenmill.errors import StoreError, UsageError
from tokenmill.monitor import Timeline, cpu_seconds, read_timeline, rss_bytes, tree
from tokenmill.store.facts import (
    Building,
    Counts,
    ManifestAssembler,
    facts_of,
    find_receipt,
    read_receipt,
)
from tokenmill.store.layout import StoreLayout, is_locked, lock_holder
from tokenmill.store.reader import Store, open_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

READ_SECONDS, READ_BYTES = 0.08, 200_000  # of metrics for one answer, and at a time
NEW_RECEIPTS = 400  # read for one answer: a store may have thousands when it is first looked at
SHOWN_REJECTS = 30
SQUARES = 2000  # of the map of units
URGENCY = ("failed", "working", "rejects", "waiting", "done")
LOOKS, LEAST_SECONDS = 1200, 0.3
SPEED_BINS, RECENT_SECONDS = 120, 30.0
_STAGED = re.compile(r"(?P<unit>.+)-\d+-[0-9a-f]{8}\Z")
MEMORY, CORES = "Memory, GB", "Cores in use"
# What of a time line is drawn: title, factor, lines by the names of their values.
LINES: tuple[tuple[str, float, dict[str, str]], ...] = (
    ("Text read, MB/s", 1e-6, {"text": "input_bytes_per_second"}),
    ("Tokens per second", 1.0, {"tokens": "tokens_per_second"}),
    (MEMORY, 1e-9, {"the build": "memory_bytes", "all programs": "machine_memory_bytes"}),
    (CORES, 1.0, {"the build": "build_cores", "all programs": "machine_cores"}),
)


class ShownRun:
    """A training, by its metrics.jsonl: what was written since the last look is read, no more."""

    def __init__(self, path: Path) -> None:
        self.file = path / METRICS if path.is_dir() else path
        self.name = (path if path.is_dir() else path.parent).resolve().name
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._read = 0  # bytes: whole lines
        self._newest = b""  # of them, by which a file is known that was written anew
        self._columns: dict[str, tuple[array[float], array[float]]] = {}  # steps, and values there
        self._last: dict[str, float] = {}
        self._bad_lines = 0

    def run(self) -> dict[str, Any]:
        """Every number of its lines as a line over steps, of at most some hundred points."""
        unread = self._read_on()
        if not self._columns and not unread:
            read_run(self.file)  # says what is wrong with it
        return {
            "name": self.name,
            "lines": {name: _thin(*column) for name, column in self._columns.items()},
            "last": self._last,
            "bad_lines": self._bad_lines,
            "unread": unread,
        }

    def _read_on(self) -> int:
        """Read what is new, for as long as an answer may take; how many bytes are left."""
        until = monotonic() + READ_SECONDS
        with contextlib.suppress(OSError), self.file.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self._read - len(self._newest))
            if file.read(len(self._newest)) != self._newest:
                self._begin_anew()
                file.seek(0)
            while monotonic() < until and (lines := file.readlines(READ_BYTES)):
                if not lines[-1].endswith(b"\n"):
                    del lines[-1]  # of which the rest is not there yet
                if not lines:
                    return 0
                self._read += sum(map(len, lines))
                self._newest = lines[-1]
                for line in lines:
                    self._take(line)
            return size - self._read
        return 0

    def _take(self, row: bytes) -> None:
        try:
            line = json.loads(row)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            self._bad_lines += bool(row.strip())
            return
        numbers = {name: value for name, value in line.items() if _is_number(value)}
        self._last |= numbers
        step = numbers.pop("step", None)
        if step is None:
            return
        for name, value in numbers.items():
            steps, values = self._columns.setdefault(name, (array("d"), array("d")))
            steps.append(step)
            values.append(value)


def _thin(steps: array[float], values: array[float]) -> list[list[float]]:
    """Of each range its first step and the mean."""
    x, y = np.array(steps), np.array(values)
    begins = np.arange(0, len(x), -(-len(x) // KEPT_POINTS))
    means = np.add.reduceat(y, begins) / np.diff(np.append(begins, len(x)))
    return [x[begins].tolist(), means.tolist()]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class ShownBuild:
    """A build, by the folder that it writes, or by the time line of `--monitor`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        self._units: dict[str, tuple[Counts, float]] = {}  # what a unit counts, and when it came
        self._plan: tuple[bytes, Building | None] = b"", None
        self._looks: deque[tuple[float, float, float]] = deque(maxlen=LOOKS)
        self._spent: tuple[float, float] | None = None

    def build(self) -> dict[str, Any]:
        """How far it is; lines over time where there is a time line."""
        if self.path.is_file():
            return {"name": self.name, **_lines_of(read_timeline(self.path))}
        return {"name": self.name, **self._state()}

    def so_far(self) -> Store | None:
        """A store of what is committed: of each input file the units up to the first gap."""
        layout, building = StoreLayout(self.path.absolute()), self._building()
        if building is None:
            return None
        units = ManifestAssembler(building.identity)
        for source in building.sources:
            for number in range(source.units if source.units is not None else 1 << 30):
                receipt = find_receipt(layout, f"{source.prefix}-{number:05d}")
                if receipt is None or receipt.config != building.identity.fingerprint:
                    break
                units.add(receipt, file=facts_of(receipt.to_bytes()))
        if not units.units:
            return None
        files = open_files(layout.root, cache=None, cache_bytes=None)
        manifest = units.manifest()
        files.take_manifest(manifest)
        return Store.of_files(files, split=None, manifest=manifest)

    def _building(self) -> Building | None:
        """What will be made, as far as the build has said it."""
        path = StoreLayout(self.path).building
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if data != self._plan[0]:
            with contextlib.suppress(StoreError):  # of another version of tokenmill
                self._plan = data, Building.from_bytes(data, path=str(path))
                self._units.clear()
        return self._plan[1]

    def _state(self) -> dict[str, Any]:
        """What is committed, what is worked on, and the newest rows that were rejected."""
        layout, building = StoreLayout(self.path), self._building()
        is_done, is_at_work = layout.manifest.is_file(), is_locked(layout)
        unread = self._read_receipts(layout)
        counts = sum((counts for counts, _ in self._units.values()), Counts.of())
        staged = {
            found["unit"]
            for path in layout.root.glob("tmp/**/*")
            if (found := _STAGED.fullmatch(path.name)) and path.is_dir()
        } - self._units.keys()
        planned = [
            f"{source.prefix}-{number:05d}"
            for source in (building.sources if building else ())
            for number in range(source.units or 0)
        ]
        # Where nobody builds any more, what was in work is lost, and made again by the next one.
        lost = is_at_work is False and not is_done
        states = dict.fromkeys(planned, "waiting")
        for name in sorted(self._units):
            states[name] = "rejects" if self._units[name][0].rejected else "done"
        states |= dict.fromkeys(sorted(staged), "failed" if lost else "working")
        times = sorted((came, counts.input_bytes) for counts, came in self._units.values())
        last = times[-1][0] if times else 0.0
        size = sum(source.size for source in building.sources) if building else None
        return {
            "units": self._squares(states),
            "numbers": Counter(states.values()),
            "unread": unread,
            "is_planned": building is not None
            and all(source.units is not None for source in building.sources),
            "input_bytes": size,
            "totals": counts.to_json(),
            "last": last,
            "is_done": is_done,
            "is_at_work": is_at_work,
            "failed": None if building is None or is_at_work else building.failed,
            "reasons": dict(self._reasons(layout)),
            "rejects": [*self._rejects(layout)],
            **self._drawn(layout, times, at_work=bool(is_at_work)),
        }

    def _drawn(
        self, layout: StoreLayout, times: list[tuple[float, int]], *, at_work: bool
    ) -> dict[str, Any]:
        """Lines over seconds: speed by what was committed, memory and cores by what is seen."""
        speed, load = _speed(times), self._load(layout, at_work=at_work)
        return {**load, **speed, "charts": [*speed["charts"], *load["charts"]]}

    def _read_receipts(self, layout: StoreLayout) -> int:
        """Read what is new, some at a time; how many are left."""
        new = {}
        with contextlib.suppress(OSError), os.scandir(layout.shards) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and entry.name[:-5] not in self._units:
                    with contextlib.suppress(OSError):
                        new[entry.name[:-5]] = entry.stat().st_mtime
        for name, came in [*new.items()][:NEW_RECEIPTS]:
            with contextlib.suppress(StoreError):  # it was taken away just now
                self._units[name] = read_receipt(layout, name).counts, came
        return max(0, len(new) - NEW_RECEIPTS)

    def _squares(self, states: dict[str, str]) -> list[dict[str, Any]]:
        """Units as they are drawn; of very many some together, as the most urgent of them is."""
        names = [*states]
        step = max(1, -(-len(names) // SQUARES))
        squares = []
        for first in range(0, len(names), step):
            part = names[first : first + step]
            known = [self._units[name][0] for name in part if name in self._units]
            squares.append(
                {
                    "name": part[0],
                    "units": len(part),
                    "state": min((states[name] for name in part), key=URGENCY.index),
                    "tokens": sum(counts.tokens for counts in known),
                    "rejected": sum(counts.rejected for counts in known),
                }
            )
        return squares

    def _load(self, layout: StoreLayout, *, at_work: bool) -> dict[str, Any]:
        """Memory and cores of a build on this machine, at each moment that somebody looked."""
        holder = lock_holder(layout)
        pid, budget = holder.get("pid"), holder.get("memory_bytes")
        is_here = at_work and isinstance(pid, int) and holder.get("host") == socket.gethostname()
        if is_here and isinstance(pid, int):
            with contextlib.suppress(psutil.Error):
                processes = tree(psutil.Process(pid))
                now, spent = monotonic(), cpu_seconds(processes)
                if self._spent is not None and now - self._spent[0] >= LEAST_SECONDS:
                    at, before = self._spent
                    cores = max(0.0, spent - before) / (now - at)
                    self._looks.append((time(), sum(map(rss_bytes, processes)), cores))
                if self._spent is None or now - self._spent[0] >= LEAST_SECONDS:
                    self._spent = now, spent
        if not self._looks:
            return {"charts": [], "budget": budget if at_work else None}
        at, memory, cores = np.array(self._looks).T
        x = (at - at[0]).tolist()
        lines = [{"name": "its processes", "x": x, "y": (memory / 1e9).tolist()}]
        if isinstance(budget, int):
            lines.append(_budget_line(x, budget))
        own = [{"name": "its processes", "x": x, "y": cores.tolist()}]
        charts = [{"title": MEMORY, "lines": lines}, {"title": CORES, "lines": own}]
        return {"charts": charts, "budget": budget if at_work else None}

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


def _speed(times: list[tuple[float, int]]) -> dict[str, Any]:
    """Input a second, by when units came: over all the time, and lately."""
    if len(times) < 2 or times[-1][0] <= times[0][0]:
        return {"bytes_per_second": None, "charts": []}
    # What the first units are of was read before they came.
    at, size = np.array(times[1:]).T
    at = at - times[0][0]
    bins = max(1, min(SPEED_BINS, len(at) // 4))
    sums, edges = np.histogram(at, bins=bins, range=(0.0, float(at[-1])), weights=size)
    width = float(edges[1])
    recent = at > at[-1] - max(RECENT_SECONDS, width)
    span = min(float(at[-1]), max(RECENT_SECONDS, width))
    line = {"name": "input", "x": edges[1:].tolist(), "y": (sums / width / 1e6).tolist()}
    return {
        "bytes_per_second": float(size[recent].sum()) / span,
        "charts": [{"title": "Input, MB/s", "lines": [line]}] if bins > 2 else [],
    }


def _budget_line(x: Sequence[float], budget: int) -> dict[str, Any]:
    return {"name": "budget", "x": [x[0], x[-1]], "y": [budget / 1e9] * 2, "dash": True}


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
        seen = [at for line in lines for at in line["x"]]
        if value == "machine_memory_bytes" and isinstance(budget, int) and seen:
            lines.append(_budget_line((min(seen), max(seen)), budget))
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
