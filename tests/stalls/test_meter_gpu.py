"""The device's gaps on a real device: a late batch shows, a batch that is there does not.

Run by hand, on a machine that has one: python -m pytest -m gpu tests/stalls
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
import torch
from tests.stalls.test_examples import EXAMPLES
from tests.stalls.test_script import WATCHED, run

from tokenmill import StallMeter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORK_CYCLES = 10_000_000
"""Some milliseconds of device time: far longer than the host needs to launch it."""
SLEEP = 0.05
STEPS = 40


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """In the loops below, whatever waits for the device is an error."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    yield
    torch.cuda.set_sync_debug_mode("default")


def batches(*, sleep: float) -> Iterator[torch.Tensor]:
    cached = torch.ones(1024, device="cuda")
    for _ in range(STEPS):
        if sleep:
            time.sleep(sleep)
        yield cached


def train(*, sleep: float) -> StallMeter:
    torch.cuda.set_sync_debug_mode("error")
    with StallMeter() as meter:
        for batch in meter.watch(batches(sleep=sleep)):
            torch.cuda._sleep(WORK_CYCLES)
            batch.mul_(1.0)
            meter.report()  # in the loop, too, it may not wait
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return meter


def work_ms() -> float:
    """What a step takes the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(WORK_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def test_a_sleeping_loader_shows_as_idle_time_of_the_device() -> None:
    gap = train(sleep=SLEEP).report().device_gap
    idle_ms = 1000 * SLEEP - work_ms()  # the device works while the loader sleeps, then stops

    assert idle_ms > 20
    assert gap is not None
    assert gap.steps == STEPS - 1
    assert 0.8 * idle_ms < gap.p50_ms < 2 * idle_ms
    assert gap.share > 0.4


def test_a_cached_batch_shows_about_none() -> None:
    gap = train(sleep=0.0).report().device_gap

    assert gap is not None
    assert gap.steps == STEPS - 1
    assert gap.p50_ms < 0.1
    assert gap.share < 0.02


def test_a_host_that_waits_while_the_device_works_costs_nothing() -> None:
    seconds = work_ms() / 4000
    report = train(sleep=seconds).report()

    assert report.wait_share > 0.5
    assert report.device_gap is not None
    assert report.device_gap.share < 0.05


def test_the_account_of_a_script_names_the_line_that_waits_for_the_device(tmp_path: Path) -> None:
    script, path = EXAMPLES / "slow_loop.py", tmp_path / "account.json"
    arguments = ("--steps", "5-25", "--json", path, script, "--steps", "30")
    done = run(*WATCHED, *arguments, cwd=EXAMPLES.parent)

    assert done.returncode == 0, done.stderr
    account = json.loads(path.read_text())
    parts = {part["letter"]: part for part in account["parts"]}
    waits = {line["text"]: line for line in parts["W"]["lines"]}
    assert waits["total += loss.item()"]["calls"] == account["steps"], done.stderr
    assert account["replay_error"] < 0.1
    idle = sum(account["device_idle"].values())
    assert account["device_busy_seconds"] + idle == pytest.approx(account["seconds"])
    assert any("loss.item()" in each["text"] for each in account["advice"])


def test_another_current_device_or_stream_does_not_make_the_loop_fail() -> None:
    meter = StallMeter()
    stream = torch.cuda.Stream()
    for number, _ in enumerate(meter.watch(batches(sleep=0.0))):
        with torch.cuda.stream(stream if number % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(WORK_CYCLES // 10)
    assert meter.report().steps == STEPS
