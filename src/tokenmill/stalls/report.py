"""What a StallMeter found: numbers for programs, and the same in words for people."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = "tokenmill.stalls/1"
FINE_SHARE = 0.01
"""Up to here a loop is not called starved: a better feed could not make it a hundredth faster."""
SHOWN_WAITS = 5
FAR_ABOVE = 20
"""A longest wait so many times the usual step is worth a sentence of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGap:
    """How long the CUDA device had nothing of the loop to do between steps (see device.py)."""

    steps: int
    """Steps whose events were read: the last few may still be on their way."""
    seconds: float
    share: float
    """Of the device's own time over these steps."""
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReport:
    """How long a loop has waited for its data. Steps are counted from 0."""

    steps: int
    """Batches that were handed out."""
    wall_seconds: float
    """Time in the loop, waiting and working, from the first batch on."""
    wait_seconds: float
    wait_share: float
    """Part of the wall time: 0 is never, 1 is always."""
    p50_ms: float
    """Percentiles are right to within one percent of themselves."""
    p90_ms: float
    p99_ms: float
    max_ms: float
    slowest: list[tuple[int, float]]
    """(step, milliseconds) of the longest waits, longest first."""
    first_wait_ms: float
    """The wait for the first batch. It is start-up, and in none of the other numbers."""
    device_gap: DeviceGap | None
    """None where the loop does not use CUDA."""
    waits_ms: list[tuple[int, float]]
    """For plots: (step, milliseconds), every wait of a short run. A long one is cut into at most
    2,048 equal stretches, and the longest wait of each is here."""

    @property
    def starved_share(self) -> float:
        """What a better feed could save: the device's idle time where it is known, else the waits.

        A loop on CUDA may wait as long as its device is busy: that costs nothing.
        """
        return self.wait_share if self.device_gap is None else self.device_gap.share

    @property
    def possible_speedup(self) -> float:
        """How many times as fast the loop would be if it never had to wait."""
        return 1 / max(1 - self.starved_share, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """For json.dumps; `from_json` reads it back."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> StallReport:
        """The report that `as_json` was made from."""
        names = [field.name for field in dataclasses.fields(cls)]
        if members.get("schema") != SCHEMA or any(name not in members for name in names):
            raise UsageError(
                f"this is no report of a StallMeter (its schema is {members.get('schema')!r}, "
                f"expected {SCHEMA!r})",
                hint="write one with: json.dump(meter.report().as_json(), file)",
            )
        values = {name: members[name] for name in names}
        gap = values["device_gap"]
        values["device_gap"] = None if gap is None else DeviceGap(**gap)
        for name in ("slowest", "waits_ms"):
            values[name] = [(int(step), float(ms)) for step, ms in values[name]]
        return cls(**values)

    def describe(self) -> str:
        """The report in plain words, and what to do about it."""
        if not self.steps:
            return "nothing was measured: the loop has not been handed a batch yet"
        lines = [self._verdict(), "", *_aligned(self._rows())]
        if advice := self._advice():
            lines += ["", *advice]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.steps == 1:
            return "one batch only: there is no wait yet but that for the first one"
        waits = f"your loop waits {_percent(self.wait_share)} of its time for data"
        if self.device_gap is not None:
            idle = f"the device stands idle for {_percent(self.device_gap.share)} of its own"
            waits = f"{waits}, and {idle}"
        if self.starved_share <= FINE_SHARE:
            return f"{waits}: it is not starved"
        times = self.possible_speedup
        faster = f"{times:.2f} times" if times < 100 else "more than 100 times"
        return f"{waits}: without that it would be {faster} as fast"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("steps", f"{self.steps:,} in {_seconds(self.wall_seconds)}")]
        rows.append(("first batch", f"after {_duration(self.first_wait_ms)}, counted nowhere else"))
        if self.steps > 1:
            spread = (
                f"median {_duration(self.p50_ms)}, 90% below {_duration(self.p90_ms)}, "
                f"99% below {_duration(self.p99_ms)}, longest {_duration(self.max_ms)}"
            )
            rows.append(("waits", f"{_seconds(self.wait_seconds)} in all: {spread}"))
            shown = self.slowest[:SHOWN_WAITS]
            rows.append(("slowest", ", ".join(f"step {n:,}: {_duration(ms)}" for n, ms in shown)))
        if (gap := self.device_gap) is not None:
            spread = f"median {_duration(gap.p50_ms)}, 99% below {_duration(gap.p99_ms)}"
            longest = f"longest {_duration(gap.max_ms)} (of {gap.steps:,} steps)"
            rows.append(("device idle", f"{_seconds(gap.seconds)} in all: {spread}, {longest}"))
        return rows

    def _advice(self) -> list[str]:
        if self.steps == 1:
            return []
        if self.starved_share > FINE_SHARE:
            return [
                "what your text, tokenizer and machine can feed, each way, and what to change:",
                "    tokenmill diagnose DATA --tokenizer TOKENIZER",
                "or tokenize once, before you train, and never in the loop again:",
                "    tokenmill build DATA --tokenizer TOKENIZER --out STORE",
            ]
        if self.max_ms > FAR_ABOVE * self._step_ms:
            step, ms = self.slowest[0]
            steps = f"as long as {ms / self._step_ms:,.0f} steps take"
            return [
                f"one wait stands out: step {step:,} waited {_duration(ms)}, {steps};",
                "a new epoch, a new file or a slow disk looks like that",
            ]
        return []

    @property
    def _step_ms(self) -> float:
        """A usual step: what the loop's own work takes."""
        return 1000 * max(self.wall_seconds - self.wait_seconds, 1e-9) / self.steps


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _percent(share: float) -> str:
    """'43%', '2.1%', '0.03%': two digits that count."""
    percent = 100 * share
    digits = 0 if percent >= 9.95 or not percent else 1 if percent >= 0.095 else 2
    return "under 0.01%" if 0 < percent < 0.005 else f"{percent:.{digits}f}%"


def _duration(milliseconds: float) -> str:
    """'3.2 us', '41 ms', '1.3 s'."""
    for limit, scale, unit in ((0.9995, 1000, "us"), (999.5, 1, "ms")):
        if milliseconds < limit:
            return f"{_three_digits(milliseconds * scale)} {unit}"
    return f"{_three_digits(milliseconds / 1000)} s"


def _three_digits(number: float) -> str:
    return f"{number:,.{0 if number >= 99.5 else 1}f}"


def _seconds(seconds: float) -> str:
    return _duration(1000 * seconds)
