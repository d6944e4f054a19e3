"""The account of a window: times that are written down here, and what must be made of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.stalls.account import (
    COMPUTE,
    COPY,
    DATA,
    DEVICE,
    LAUNCH,
    PYTHON,
    TOKENIZING,
    Call,
    CodePlace,
    DeviceTrace,
    DeviceWork,
    Span,
    StepAccount,
    lay_out,
    make_account,
    play,
)
from tokenmill.stalls.watch import read_trace

COLLATE = CodePlace("/somewhere/train.py", 10, "collate")
ENCODE = CodePlace("/somewhere/train.py", 20, "main", True)
MODEL = CodePlace("/somewhere/train.py", 30, "main")
ITEM = CodePlace("/somewhere/train.py", 40, "main")
MS = 0.001


def shares(account: StepAccount) -> dict[str, float]:
    return {part.letter: round(part.seconds / account.seconds, 6) for part in account.parts}


def gains(account: StepAccount) -> dict[str, float]:
    return {each.where.split(":")[-1].split(" ")[0]: round(each.gain, 3) for each in account.advice}


# A loop of 100 ms: 20 to collate, 10 to tokenize, 10 to launch 40 ms of work, and a wait for it.
def a_window(steps: int = 4, *, is_waiting: bool = True) -> dict[str, Any]:
    """What was measured of it: by the millisecond, one sample for each."""
    waits, samples, calls, work, syncs, boundaries = [], [], [], [], [], [0.0]
    at = free = 0.0
    for number in range(steps):
        waits.append((at, at + 20 * MS))
        places = [COLLATE] * 20 + [ENCODE] * 10 + [MODEL] * 10
        samples += [(at + (index + 0.5) * MS, place) for index, place in enumerate(places)]
        for index in range(10):
            name = 10 * number + index
            start = at + (30 + index) * MS
            calls.append(Call(start, start + 5e-6, "cudaLaunchKernel", name))
            free = max(free, start) + 4 * MS
            work.append(DeviceWork(free - 4 * MS, free, "gemm", 7, name))
        at += 40 * MS
        if is_waiting:
            calls.append(Call(at, free, "cudaStreamSynchronize", -1 - number))
            while at < free - 1e-9:
                samples.append((at + 0.5 * MS, ITEM))
                at += MS
            at = free
            syncs.append((at + 2e-5, ITEM))
        boundaries.append(at)
    trace = DeviceTrace(sorted(calls), work)
    return {
        "waits": waits,
        "samples": samples,
        "trace": trace,
        "syncs": syncs,
        "boundaries": boundaries,
    }


def account_of(window: dict[str, Any], *, has_device: bool = True) -> StepAccount:
    boundaries = window.pop("boundaries")
    if not has_device:
        window["trace"] = None
        window["syncs"] = []
    spans = lay_out(boundaries[0], boundaries[-1], **window)
    return make_account(
        spans,
        boundaries=boundaries,
        first_step=10,
        trace=window["trace"],
        syncs=[place for _, place in window["syncs"]],
    )


def test_a_step_is_divided_into_what_it_is_spent_on() -> None:
    account = account_of(a_window())

    # 70 ms: the device begins when the first kernel is launched, at 30, and takes 40.
    assert account.step_seconds == pytest.approx(70 * MS)
    assert shares(account) == pytest.approx(
        {DATA: 20 / 70, TOKENIZING: 10 / 70, LAUNCH: 10 / 70, DEVICE: 30 / 70}, abs=0.01
    )
    lines = {part.letter: [line.where for line in part.lines] for part in account.parts}
    assert lines[DEVICE] == ["/somewhere/train.py:40"]
    assert lines[DATA] == ["/somewhere/train.py:10"]
    assert account.parts[-1].lines[0].calls == 4


def test_taking_out_is_replayed_and_no_share() -> None:
    account = account_of(a_window(40))

    # Without the wait the device is the limit: 40 ms, if only the host's 40 ms are hidden.
    assert account.replay_error < 0.01
    assert gains(account)["40"] == pytest.approx(30 / 70, abs=0.02)
    # What is before the launches is as good as its share: the device waits for all of it.
    assert gains(account)["10"] == pytest.approx(20 / 70, abs=0.01)
    assert gains(account)["20"] == pytest.approx(10 / 70, abs=0.01)
    assert [*gains(account)] == ["40", "10", "20"]
    # The device needs 40 of 70 ms, whatever is taken out.
    assert account.all_gain == pytest.approx(30 / 70, abs=0.02)


def test_idle_time_of_the_device_has_a_reason() -> None:
    account = account_of(a_window())

    assert account.device_busy_seconds == pytest.approx(4 * 40 * MS)
    assert account.device_idle[DATA] == pytest.approx(4 * 20 * MS)
    assert account.device_idle[TOKENIZING] == pytest.approx(4 * 10 * MS, rel=0.06)
    assert account.kernels == 40
    loop, device = account.picture
    assert loop.startswith("DDDD")
    assert loop.endswith("WWWW")
    assert device.startswith("....")
    assert device.endswith("####")


def test_without_a_device_the_host_is_all_there_is() -> None:
    account = account_of(a_window(), has_device=False)

    assert account.device_busy_seconds is None
    assert set(shares(account)) == {DATA, TOKENIZING, COMPUTE}
    assert gains(account)["10"] == pytest.approx(20 / 70, abs=0.01)


def test_a_loop_that_its_device_holds_up_has_nothing_to_take_out() -> None:
    # The host launches until the queue is full, and waits in the call that finds no room.
    calls = [Call(0.0, 5e-6, "cudaLaunchKernel", 1), Call(1 * MS, 50 * MS, "cudaLaunchKernel", 2)]
    work = [DeviceWork(0.0, 50 * MS, "gemm", 7, 1), DeviceWork(50 * MS, 100 * MS, "gemm", 7, 2)]
    trace = DeviceTrace(calls, work)
    spans = lay_out(0.0, 50 * MS, samples=[(0.5 * MS, MODEL), (20 * MS, MODEL)], trace=trace)
    account = make_account(spans, boundaries=[0.0, 50 * MS], trace=trace)

    assert shares(account) == pytest.approx({LAUNCH: 0.02, DEVICE: 0.98}, abs=0.001)
    assert account.advice == []
    assert account.parts[-1].lines[0].what == "the queue of launches was full"


def test_a_copy_that_waits_is_told_from_the_wait_before_it() -> None:
    calls, work, samples = [], [], []
    for number in range(20):
        at, name = 20 * MS * number, 3 * number
        calls += [
            Call(at + 1e-5, at + 2e-5, "cudaLaunchKernel", name),
            Call(at + 2 * MS, at + 3 * MS, "cudaMemcpyAsync", name + 1),
            Call(at + 3 * MS, at + 15 * MS, "cudaStreamSynchronize", name + 2),
        ]
        work += [
            DeviceWork(at, at + 10 * MS, "gemm", 7, name),
            DeviceWork(at + 10 * MS, at + 15 * MS, "Memcpy HtoD (Pageable -> Device)", 7, name + 1),
        ]
        samples += [(at + MS, MODEL), (at + 2.5 * MS, ITEM), (at + 8 * MS, ITEM)]
        samples += [(at + 12 * MS, ITEM), (at + 19 * MS, COLLATE)]
    trace = DeviceTrace(calls, work)
    spans = lay_out(0.0, 400 * MS, samples=samples, trace=trace)
    account = make_account(
        spans, boundaries=[20 * MS * number for number in range(21)], trace=trace
    )

    assert shares(account) == pytest.approx(
        {COPY: 5 / 20, DEVICE: 8 / 20, LAUNCH: 3 / 20, PYTHON: 4 / 20}, abs=0.01
    )
    assert account.replay_error < 0.01
    assert gains(account)["40"] == pytest.approx(5 / 20, abs=0.01)
    copy = next(each for each in account.advice if ":40" in each.where)
    assert "non_blocking=True" in copy.advice


def test_a_wait_for_an_event_is_for_what_was_before_it_alone() -> None:
    # 5 ms of Python, a kernel of 20, and a wait for the kernel of the step before.
    calls, work, samples, boundaries = [], [], [], [0.0]
    at = before = 0.0
    for number in range(30):
        samples += [(at + (index + 0.5) * MS, MODEL) for index in range(5)]
        at += 5 * MS
        calls.append(Call(at, at + 5e-6, "cudaLaunchKernel", 2 * number))
        start = max(at, before)
        work.append(DeviceWork(start, start + 20 * MS, "gemm", 7, 2 * number))
        at += 1e-5
        end = max(before, at + 5e-6)
        calls.append(Call(at, end, "cudaEventSynchronize", 2 * number + 1))
        samples.append(((at + end) / 2, ITEM))
        at, before = end, start + 20 * MS
        boundaries.append(at)
    trace = DeviceTrace(calls, work)
    spans = lay_out(0.0, before, samples=samples, trace=trace)
    account = make_account(spans, boundaries=[*boundaries[:-1], before], trace=trace)

    assert account.replay_error < 0.02
    assert account.advice == []


@pytest.mark.parametrize(("name", "length"), [("DtoD", 5e-6), ("DtoD", MS), ("DtoH", 5e-6)])
def test_copies_that_do_not_wait_are_launches(name: str, length: float) -> None:
    calls = [Call(MS, MS + length, "cudaMemcpyAsync", 1)]
    trace = DeviceTrace(calls, [DeviceWork(8 * MS, 9 * MS, f"Memcpy {name} (x -> y)", 7, 1)])
    spans = lay_out(0.0, 4 * MS, samples=[(3 * MS, MODEL)], trace=trace)

    assert {span.part for span in spans} <= {LAUNCH, PYTHON}
    assert LAUNCH in {span.part for span in spans}


def test_a_short_wait_is_where_the_call_says_that_it_came_from() -> None:
    calls = [Call(5 * MS, 5.05 * MS, "cudaStreamSynchronize", 1)]
    trace = DeviceTrace(calls, [DeviceWork(5 * MS, 5.05 * MS, "gemm", 7, 9)])
    samples = [(3 * MS, MODEL), (7 * MS, MODEL)]
    spans = lay_out(0.0, 10 * MS, samples=samples, trace=trace, syncs=[(5.06 * MS, ITEM)])

    assert [span.place for span in spans if span.part == DEVICE] == [ITEM]


def test_calls_that_wait_for_nothing_yet_are_listed() -> None:
    window = a_window()
    quiet = CodePlace("/somewhere/train.py", 50, "log")
    window["syncs"] = [*window["syncs"], (1.0, quiet), (1.0, quiet)]
    account = account_of(window)

    lines = {line.where: line for line in account.parts[-1].lines}
    assert lines["/somewhere/train.py:50"].seconds == 0
    assert lines["/somewhere/train.py:50"].calls == 2
    assert "/somewhere/train.py:50  (0.5 a step)" in account.describe()


times = st.floats(0, 1, allow_subnormal=False)
places = st.sampled_from([COLLATE, ENCODE, MODEL, ITEM])


@given(
    st.lists(st.tuples(times, times).map(sorted).map(tuple), max_size=5),
    st.lists(st.tuples(times, places), max_size=20).map(sorted),
    st.lists(st.tuples(times, times, st.sampled_from(["cudaLaunchKernel", "cudaMemcpyAsync"]))),
)
def test_spans_cover_the_window_and_percentages_add_up(
    waits: list[tuple[float, float]],
    samples: list[tuple[float, CodePlace]],
    made: list[tuple[float, float, str]],
) -> None:
    calls = [
        Call(min(each[:2]), max(each[:2]), each[2], number) for number, each in enumerate(made)
    ]
    work = [DeviceWork(call.start, call.end + 0.1, "k", 1, call.correlation) for call in calls]
    trace = DeviceTrace(sorted(calls), sorted(work))
    spans = lay_out(0.0, 1.0, waits=waits, samples=samples, trace=trace)

    assert spans[0].start == 0.0
    assert spans[-1].end == 1.0
    assert all(one.end == other.start for one, other in pairwise(spans))
    account = make_account(spans, boundaries=[0.0, 1.0], trace=trace)
    assert sum(part.seconds for part in account.parts) == pytest.approx(1.0)
    assert all(0 <= each.gain <= 1 for each in account.advice)
    shown = [
        float(line.split("%")[0].split()[-1])
        for line in account.describe().splitlines()
        if line.startswith("  ") and line[2] in "DTCLPXW" and "%" in line
    ]
    assert round(sum(shown), 1) == 100.0


def test_a_replay_of_everything_takes_as_long_as_it_took() -> None:
    window = a_window(10)
    spans = lay_out(
        0.0, window["boundaries"][-1], **{k: v for k, v in window.items() if k != "boundaries"}
    )
    whole = play(spans, window["trace"].launches())

    assert whole.seconds == pytest.approx(window["boundaries"][-1], rel=0.001)
    assert play([Span(0, 1, COMPUTE), Span(1, 3, DATA)], []).seconds == 3


def test_what_watching_took_is_left_out_and_the_device_is_not_faster_for_it() -> None:
    def watched(plain: list[list[float]], samples: float) -> StepAccount:
        window = a_window(8)
        boundaries = window.pop("boundaries")
        spans = lay_out(0.0, boundaries[-1], **window)
        return make_account(
            spans,
            boundaries=boundaries,
            trace=window["trace"],
            samples=[at for at, _ in window["samples"]],
            sample_seconds=samples,
            plain=plain,
        )

    was = watched([], 0.0)
    same = watched([[0.071] * 5, [0.070] * 5], 0.0)
    assert shares(same) == pytest.approx(shares(was), abs=0.001)
    assert same.plain_steps == 10
    assert same.plain_step_seconds == 0.070

    # A tenth of each sample's millisecond: 2 of 20, 1 of 9.5 (up to the last that saw it). What
    # is launched earlier is waited for longer.
    less = watched([], 0.1 * MS)
    parts = {part.letter: part.seconds / 8 for part in less.parts}
    assert parts[DATA] == pytest.approx(18 * MS, rel=0.01)
    assert parts[TOKENIZING] == pytest.approx(8.5 * MS, rel=0.01)
    assert parts[LAUNCH] + parts[DEVICE] == pytest.approx(40 * MS, rel=0.02)
    assert less.watched_seconds / 8 == pytest.approx(70 * MS)
    assert less.seconds == pytest.approx(sum(part.seconds for part in less.parts))
    assert "a step took 70.0 ms: 4.4% of that is left out above" in less.describe()

    # What steps take by themselves says how much it was: here as much again, and no more.
    for plain, expected in ((0.0685, 68.5), (0.0650, 65.0), (0.0500, 64.0)):
        found = watched([[plain] * 5], 0.1 * MS)
        assert found.step_seconds == pytest.approx(expected * MS, rel=0.005)
        assert found.device_busy_seconds == pytest.approx(8 * 40 * MS, rel=0.01)


def test_a_loop_that_waits_for_room_in_the_queue_still_does_without_samples() -> None:
    spans = [
        Span(0.0, 1.0, LAUNCH, MODEL),
        Span(1.0, 4.0, DEVICE, MODEL, "room"),
        Span(4.0, 5.0, LAUNCH, MODEL),
        Span(5.0, 9.0, DEVICE, MODEL, "room"),
    ]
    trace = DeviceTrace(
        [Call(0.0, 0.1, "cudaLaunchKernel", 1), Call(4.0, 4.1, "cudaLaunchKernel", 2)],
        [DeviceWork(0.0, 4.0, "gemm", 7, 1), DeviceWork(4.0, 9.0, "gemm", 7, 2)],
    )
    account = make_account(
        spans, boundaries=[0.0, 4.0, 9.0], trace=trace, samples=[0.5, 4.5], sample_seconds=0.5
    )

    assert account.seconds == pytest.approx(9.0)
    assert shares(account) == pytest.approx({LAUNCH: 1 / 9, DEVICE: 8 / 9}, abs=1e-5)
    assert account.picture_seconds == pytest.approx(5.0)


def test_a_trace_is_read_by_the_clock_of_the_loop() -> None:
    def event(kind: str, name: str, at: float, length: float, **more: Any) -> dict[str, Any]:
        named = {"correlation": more.pop("correlation", 0), **more.pop("named", {})}
        return {"ph": "X", "cat": kind, "name": name, "ts": at, "dur": length, "args": named} | more

    drain, far = "cudaDeviceSynchronize", 5e12
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name"},
        event("cuda_runtime", drain, far + 100, 50, tid=1),
        event("cuda_runtime", "cudaLaunchKernel", far + 1000, 5, tid=1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", far + 1100, 5, tid=2, correlation=2),
        event("cuda_runtime", "cudaEventQuery", far + 1150, 5, tid=3),
        event("kernel", "gemm", far + 1010, 500, correlation=1, named={"stream": 7}),
        event("kernel", "gemm", far + 1510, 500, correlation=2, named={"stream": 7}),
        event("cuda_runtime", drain, far + 5100, 50, tid=1),
        event("cuda_runtime", drain, far + 9000, 50, tid=1),  # the profiler's own
    ]
    trace = read_trace(events, [20.0, 20.005])

    names = [call.name for call in trace.calls]
    assert names == [drain, "cudaLaunchKernel", "cudaLaunchKernel", drain, drain]
    assert trace.calls[0].start == pytest.approx(20.0, abs=1e-6)
    assert trace.work[0].start == pytest.approx(20.00091, abs=1e-6)
    launches = trace.launches()
    assert [round(1e6 * (launch.at - 20)) for launch in launches] == [900, 1000]
    assert [launch.stream for launch in launches] == [7, 7]


def test_a_trace_without_work_says_what_may_be_missing() -> None:
    with pytest.raises(ValueError, match="CUPTI"):
        read_trace([], [0.0, 1.0])
