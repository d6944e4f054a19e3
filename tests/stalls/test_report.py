"""The report: words that fit the numbers, and JSON that gives the same report again."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING

import pytest
from tests.stalls.clocks import Clock

from tokenmill import StallMeter
from tokenmill.errors import UsageError
from tokenmill.stalls import DeviceGap, StallReport

if TYPE_CHECKING:
    from collections.abc import Iterator


def measured(*, wait: float, work: float, steps: int = 101, stall: float = 0.0) -> StallReport:
    """A run of equal steps; step 50 waits longer by `stall`."""
    clock = Clock()
    meter = StallMeter(clock=clock)

    def batches() -> Iterator[int]:
        for number in range(steps):
            clock.pass_by(wait + (stall if number == 50 else 0))
            yield number

    for _ in meter.watch(batches()):
        clock.pass_by(work)
    return meter.report()


GAP = DeviceGap(steps=99, seconds=0.5, share=0.25, p50_ms=5.0, p99_ms=9.5, max_ms=12.0)


def test_a_starved_loop_is_told_by_how_much_and_what_to_do() -> None:
    text = measured(wait=0.043, work=0.057).describe()

    assert text.splitlines()[0] == (
        "your loop waits 43% of its time for data: without that it would be 1.75 times as fast"
    )
    assert re.search(r"median 4[23]\.\d ms, 90% below 4[23]\.\d ms, .*longest 43\.0 ms", text)
    assert "steps        101 in " in text
    assert "first batch  after 43.0 ms, counted nowhere else" in text
    assert "tokenmill diagnose DATA --tokenizer TOKENIZER" in text


def test_a_fed_loop_is_told_so_and_nothing_else() -> None:
    text = measured(wait=0.00002, work=0.01).describe()

    assert "your loop waits 0.2% of its time for data: it is not starved" in text
    assert "tokenmill diagnose" not in text


def test_a_single_long_wait_is_pointed_at() -> None:
    text = measured(wait=0.00001, work=0.1, steps=20_001, stall=2.5).describe()

    assert "it is not starved" in text
    assert "one wait stands out: step 50 waited 2.5 s, as long as 25 steps take" in text


def test_the_device_has_the_last_word() -> None:
    report = measured(wait=0.09, work=0.01)
    idle = dataclasses.replace(report, device_gap=GAP)
    busy = dataclasses.replace(report, device_gap=dataclasses.replace(GAP, share=0.0004))

    assert idle.describe().splitlines()[0] == (
        "your loop waits 90% of its time for data, and the device stands idle for 25% of its own: "
        "without that it would be 1.33 times as fast"
    )
    assert "device idle  500 ms in all: median 5.0 ms, 99% below 9.5 ms" in idle.describe()
    assert "the device stands idle for 0.04% of its own: it is not starved" in busy.describe()


def test_little_is_said_about_little() -> None:
    assert StallMeter().report().describe().startswith("nothing was measured")
    assert measured(wait=1.0, work=1.0, steps=1).describe().startswith("one batch only")


@pytest.mark.parametrize("gap", [None, GAP])
def test_a_report_survives_json(gap: DeviceGap | None) -> None:
    report = dataclasses.replace(measured(wait=0.01, work=0.02, stall=0.5), device_gap=gap)
    text = json.dumps(report.as_json(), allow_nan=False)

    assert StallReport.from_json(json.loads(text)) == report


@pytest.mark.parametrize("members", [{}, {"schema": "tokenmill.stalls/1"}, {"schema": "other"}])
def test_other_json_is_refused(members: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"no report of a StallMeter.*meter\.report\(\)"):
        StallReport.from_json(members)
