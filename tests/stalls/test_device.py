"""The device's gaps on a made-up device, whose truth is known to the last digit."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.stalls.clocks import Clock, Device

from tokenmill import StallMeter
from tokenmill.stalls.meter import DeviceClock

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Device:
    """CUDA in use, as the meter sees it."""
    found = Device(clock)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=found))
    return found


def batches(clock: Clock, *, wait: float, steps: int) -> Iterator[int]:
    for number in range(steps):
        clock.pass_by(wait)
        yield number


def train(meter: StallMeter, device: Device, *, wait: float, work: float, steps: int) -> None:
    """Steps that take the device `work` seconds and the host a millisecond to launch."""
    for _ in meter.watch(batches(device.clock, wait=wait, steps=steps)):
        device.launch(work)
        device.clock.pass_by(0.001)


def finish(device: Device) -> None:
    device.clock.now = max(device.clock.now, device.free_at)


def test_a_late_host_leaves_the_device_idle(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    train(meter, device, wait=0.05, work=0.02, steps=200)
    finish(device)
    gap = meter.report().device_gap

    assert gap is not None
    # Of each 51 ms the device works 20 and has nothing to do for 31, all of it in the wait.
    assert gap.steps == 199
    assert np.isclose(gap.share, 31 / 51)
    assert np.isclose([gap.p50_ms, gap.p99_ms, gap.max_ms], 31, rtol=0.01).all()
    assert np.isclose(gap.seconds, 199 * 0.031)


def test_a_host_that_runs_ahead_waits_at_no_cost(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    train(meter, device, wait=0.01, work=0.02, steps=40)
    finish(device)
    report = meter.report()

    assert report.wait_share > 0.9
    assert report.device_gap is not None
    assert report.device_gap.share == pytest.approx(0, abs=1e-9)
    assert report.device_gap.steps == 39
    assert "it is not starved" in report.describe()


def test_idle_time_inside_a_step_is_no_gap(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    for _ in meter.watch(range(20)):
        device.launch(0.001)
        clock.pass_by(0.1)  # a host that launches too slowly
        device.launch(0.001)
    finish(device)
    gap = meter.report().device_gap

    assert gap is not None
    assert gap.share == pytest.approx(0, abs=1e-9)


def test_nothing_is_read_before_it_is_done(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    train(meter, device, wait=0.0, work=10.0, steps=5)
    assert meter.report().device_gap is None  # the made-up events would fail if they were read

    finish(device)
    gap = meter.report().device_gap
    assert gap is not None
    assert gap.steps == 4


def test_a_host_far_ahead_takes_few_events(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    train(meter, device, wait=0.0, work=10.0, steps=5000)
    assert len(device.events) < 200
    finish(device)
    train(meter, device, wait=1.0, work=0.5, steps=100)
    finish(device)
    gap = meter.report().device_gap

    assert len(device.events) < 300
    assert gap is not None
    assert gap.steps > 150
    assert gap.max_ms == pytest.approx(1000, rel=0.01)


def test_events_are_used_again(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    train(meter, device, wait=0.01, work=0.005, steps=1000)
    assert len(device.events) < 10


def test_start_up_and_pauses_are_no_gaps_but_the_next_epochs_first_wait_is(
    clock: Clock, device: Device
) -> None:
    meter = StallMeter(clock=clock)
    clock.pass_by(3)
    for wait in (7.0, 0.5):
        train(meter, device, wait=wait, work=wait, steps=1)
        clock.pass_by(1000)  # evaluation
    finish(device)
    gap = meter.report().device_gap

    assert gap is not None
    assert gap.steps == 1
    assert gap.max_ms == pytest.approx(500)
    # The thousand seconds are no part of the device's time either: this gap is all there is.
    assert gap.share == pytest.approx(1)


def test_cuda_that_is_first_used_in_the_loop_is_found(clock: Clock, device: Device) -> None:
    device.is_initialized_now = False
    meter = StallMeter(clock=clock)
    for number in meter.watch(batches(clock, wait=0.5, steps=6)):
        device.is_initialized_now = number >= 2
        device.launch(0.1)
    finish(device)
    gap = meter.report().device_gap

    assert gap is not None
    assert gap.steps == 3


def test_a_graph_that_is_being_captured_is_left_alone(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    for number in meter.watch(batches(clock, wait=0.5, steps=9)):
        device.is_capturing = 2 <= number < 5  # the made-up event refuses to be recorded then
        device.launch(0.1)
    finish(device)
    gap = meter.report().device_gap

    assert gap is not None
    assert gap.steps == 4, "two before, two behind the first whose beginning was seen"


@pytest.mark.parametrize(("work", "every_step"), [(0.01, False), (1.0, True)])
def test_short_steps_are_not_all_measured_but_those_that_are_tell_the_share(
    clock: Clock, device: Device, work: float, every_step: bool
) -> None:
    device.call_seconds = 20e-6
    meter = StallMeter(clock=clock)
    steps = 5000
    train(meter, device, wait=2 * work, work=work, steps=steps)
    finish(device)
    gap = meter.report().device_gap

    assert gap is not None
    assert np.isclose(gap.share, 0.5, atol=0.06)
    if every_step:
        assert gap.steps == steps - 1
    else:
        events = 3 * gap.steps * device.call_seconds
        assert 0.8 * 0.0003 < events / (steps * 2 * work) < 2 * 0.0003


def test_a_failing_device_does_not_make_the_meter_fail(clock: Clock, device: Device) -> None:
    meter = StallMeter(clock=clock)
    for number in meter.watch(batches(clock, wait=0.5, steps=9)):
        device.breaks = number == 4
        device.launch(0.1)
    finish(device)
    report = meter.report()

    assert report.steps == 9
    assert report.device_gap is not None
    assert report.device_gap.steps == 4


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), SimpleNamespace(cuda=Device(Clock()))])
def test_without_cuda_in_use_there_is_no_device(
    torch: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(cuda := getattr(torch, "cuda", None), Device):
        cuda.is_initialized_now = False
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert DeviceClock.find(Clock()) is None
