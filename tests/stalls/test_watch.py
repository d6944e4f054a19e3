"""A window over a loop: with a device that does as it is told, and what is left when it is over."""

from __future__ import annotations

import json
import sys
import time
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tokenmill import StallMeter
from tokenmill.errors import UsageError
from tokenmill.stalls.account import DATA, DEVICE, StepAccount
from tokenmill.stalls.watch import StepWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

ITEM = compile(
    """
time.sleep(0.005)
torch.called("kernel", "gemm", 0.005, correlation=number, stream=7)
torch.called("cuda_runtime", "cudaStreamSynchronize", 0.005)
if torch.mode:
    warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1)")
""",
    "/lib/site-packages/torch/x.py",
    "exec",
)


class Torch(types.ModuleType):
    """What `torch` is to the watch: a device that is slow, a profiler that saw it, a debug mode."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__("torch")
        self.fails = fails
        self.mode = 0
        self.events: list[dict[str, Any]] = []
        self.cuda = self.profiler = self.ProfilerActivity = self
        self.CUDA = "cuda"

    def is_initialized(self) -> bool:
        return True

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: int) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        self.mode = mode

    def profile(self, *, activities: list[str]) -> Torch:
        assert activities == ["cuda"]
        return self

    def start(self) -> None:
        if self.fails:
            raise RuntimeError("it is in use")

    def stop(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps({"traceEvents": self.events}))

    def called(self, kind: str, name: str, seconds: float, **named: int) -> None:
        """Something that took so long, and is over; the trace's clock is another one."""
        start = 1e6 * (time.perf_counter() - seconds) + 1e12
        event = {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": 1e6 * seconds, "tid": 5}
        self.events.append({**event, "args": named})

    def synchronize(self) -> None:
        self.called("cuda_runtime", "cudaDeviceSynchronize", 0.0)

    def launch(self, number: int) -> None:
        self.called("cuda_runtime", "cudaLaunchKernel", 1e-6, correlation=number)

    def item(self, number: int) -> None:
        """A wait, in code that is no user's; the line that calls it is."""
        exec(ITEM, {"torch": self, "number": number, "time": time, "warnings": warnings})


def account_of(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> StepAccount:
    monkeypatch.setitem(sys.modules, "torch", torch)
    watch = StepWatch(first=3, last=8)
    for number in range(1, 12):
        torch.launch(number)
        torch.item(number)
        watch.stepped(torch)
    return watch.finish()


def test_a_wait_for_the_device_is_found_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    account = account_of(Torch(), monkeypatch)

    assert (account.steps, account.first_step) == (5, 3)
    waits = {part.letter: part for part in account.parts}[DEVICE].lines
    first = max(waits, key=lambda each: each.seconds)
    assert "tests/stalls/test_watch.py:" in first.where
    assert first.text.startswith("exec(ITEM, ")
    assert first.calls == 5
    assert account.kernels == 11
    assert account.unseen == []
    assert "device busy" in account.describe()


def test_nothing_is_left_when_the_window_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval(), warnings.showwarning, list(warnings.filters)
    torch = Torch()
    account_of(torch, monkeypatch)

    assert torch.mode == 0
    assert (sys.getswitchinterval(), warnings.showwarning, list(warnings.filters)) == before


def test_a_program_that_forbids_waits_keeps_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch()
    torch.mode = 2
    monkeypatch.setattr(torch, "item", lambda _: torch.called("kernel", "gemm", 0.0, stream=7))
    account = account_of(torch, monkeypatch)

    assert torch.mode == 2
    assert account.steps == 5


def test_other_warnings_of_the_program_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = Torch()
    item = torch.item

    def warned(number: int) -> None:
        item(number)
        warnings.warn("its own", stacklevel=1)

    monkeypatch.setattr(torch, "item", warned)
    with pytest.warns(UserWarning, match="its own") as heard:
        account_of(torch, monkeypatch)
    assert {str(each.message) for each in heard} == {"its own"}


def test_a_profiler_that_is_in_use_is_said_and_lines_are_found_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = account_of(Torch(fails=True), monkeypatch)

    assert account.device_busy_seconds is None
    (unseen,) = account.unseen
    assert "could not be started: it is in use" in unseen
    waits = {part.letter: part for part in account.parts}[DEVICE].lines
    assert any(each.text.startswith("exec(ITEM, ") for each in waits)


def test_a_meter_gives_the_account_of_its_own_loop() -> None:
    def batches() -> Iterator[int]:
        for number in range(12):
            end = time.perf_counter() + 0.005
            while time.perf_counter() < end:
                pass
            yield number

    with StallMeter(account=(3, 8)) as meter:
        for _ in meter.watch(batches()):
            time.sleep(0.001)
    account = meter.account()

    assert (account.steps, account.first_step) == (5, 3)
    (data,) = [part for part in account.parts if part.letter == DATA]
    assert any("batches" in line.what for line in data.lines)
    assert meter.account() is account
    assert meter.report().steps == 12


def test_a_meter_that_was_not_asked_has_no_account() -> None:
    with pytest.raises(UsageError, match="not asked for an account"):
        StallMeter().account()
    with pytest.raises(UsageError, match="no range of steps"):
        StallMeter(account=(5, 5))
