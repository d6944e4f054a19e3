"""The account of a step: what the loop and its device did, as parts that add up to the whole.

    waits, samples, calls of CUDA -> `lay_out` -> spans that cover the window
        -> `unwatched`: without what watching took -> `StepAccount`

A span is a time of the loop's thread, what it was spent on (a part) and the place in the user's
code. Waits for a loader and calls of CUDA are measured, so their spans are exact; what is between
them is divided among the lines that samples saw there.

What taking something out would save is not its share of the time: a loop that waits 50% in
`.item()` does not become twice as fast without it, since the device still needs its time. So the
window is played without it (`play`): the host goes through its spans, the device works through
what it is given, in order, and a wait lasts until the device has done all of that.

Watching makes a step longer: by samples, and by the profiler in every call of CUDA. Left in, that
would make launching look long and all else short. So it is taken out, in the same way.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.errors import UsageError
from tokenmill.visible import visible
from tokenmill.words import brief, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Interval = tuple[float, float]

SCHEMA = "tokenmill.account/1"


class CodePlace(NamedTuple):
    """Where the loop was: in code of the user's, wherever there is some."""

    file: str
    line: int
    function: str
    """In a loader: what the loader called, though the line may be in what that calls."""
    is_tokenizing: bool = False


class Span(NamedTuple):
    """A time of the loop's thread."""

    start: float
    end: float
    part: str
    place: CodePlace | None = None
    waits_for: str = ""
    """'work' that the device had done when it ended, or 'room' in its queue."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Call(NamedTuple):
    """A call of CUDA by the host."""

    start: float
    end: float
    name: str
    correlation: int


class DeviceWork(NamedTuple):
    """What the device did: a kernel, a copy, a fill."""

    start: float
    end: float
    name: str
    stream: int
    correlation: int

    @property
    def is_upload(self) -> bool:
        return "HtoD" in self.name


class Launch(NamedTuple):
    """Work as `play` needs it."""

    at: float
    """When the host launched it."""
    end: float
    stream: int
    seconds: float
    """Of the device."""


class DeviceTrace(NamedTuple):
    """A window as the profiler saw it: by the loop's clock, in the order of time."""

    calls: list[Call]
    """Of the threads that launch: the loop's own, and autograd's while the loop waits for it."""
    work: list[DeviceWork]

    def launches(self) -> list[Launch]:
        """What the device was given, in the order in which the host gave it."""
        launched = {call.correlation: call.start for call in self.calls}
        ends: dict[int, float] = {}
        found = []
        for work in self.work:
            before = ends.get(work.stream, -1.0)
            start = before if 0 <= work.start - before < _SHORT_GAP else work.start
            ends[work.stream] = work.end
            # Work of another thread, as of one that copies ahead, is ready when it is.
            at = launched.get(work.correlation, work.start)
            found.append(Launch(at, work.end, work.stream, work.end - start))
        return sorted(found)

    def launch_times(self) -> list[float]:
        given = {work.correlation for work in self.work}
        return [call.start for call in self.calls if call.correlation in given]

    def busy(self) -> list[Interval]:
        return merged((work.start, work.end) for work in self.work)


# -------------------------------------------------------------------------------------------------
# The parts. Their letters draw the picture.

DATA, TOKENIZING, COPY, LAUNCH, PYTHON, COMPUTE, DEVICE = "DTCLPXW"
PARTS = {
    DATA: "waiting for data",
    TOKENIZING: "tokenizing in the loop",
    COPY: "copying to the device",
    LAUNCH: "launching",
    PYTHON: "other Python",
    COMPUTE: "computing and Python",
    DEVICE: "waiting for the device",
}
WORKERS = "the loader's workers"
DRAIN = "the work that was left when the last of these steps had been launched"

_SLOW_CALL = 100e-6  # a launch takes some microseconds: one that takes so long waited
_SHORT_GAP = 5e-6  # between kernels that were in the queue: the device's own, and not idle time
_CALL_SECONDS = 5e-6  # that the profiler takes in a launch
_MOST_TIMES = 2.0  # so much more, or nothing at all, it may be elsewhere
_LEAST = 0.2  # of a span that is left, whatever watching took
_TRIES = 8


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, in order and without overlaps."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def within(intervals: list[Interval], start: float, end: float) -> list[Interval]:
    """The parts of merged intervals that are in a range."""
    first = max(bisect_right(intervals, (start, float("inf"))) - 1, 0)
    found = []
    for index in range(first, len(intervals)):
        if intervals[index][0] >= end:
            break
        left, right = max(intervals[index][0], start), min(intervals[index][1], end)
        if left < right:
            found.append((left, right))
    return found


def lay_out(
    begin: float,
    end: float,
    *,
    waits: Iterable[Interval] = (),
    samples: Sequence[tuple[float, CodePlace]] = (),
    trace: DeviceTrace | None = None,
    syncs: Sequence[tuple[float, CodePlace]] = (),
) -> list[Span]:
    """Spans that cover the window without a gap. `syncs` are the ends of calls that waited."""
    measured = [Span(*wait, DATA) for wait in waits]
    if trace is not None:
        measured += _call_spans(trace)
    measured.sort(key=lambda span: (span.start, span.part != DATA))
    times = [at for at, _ in samples]
    launched = [] if trace is None else trace.launch_times()
    sync_times = [at for at, _ in syncs]
    sync_lines = {place[:2] for _, place in syncs}
    spans: list[Span] = []

    def nearest(span: Span, index: int) -> CodePlace | None:
        if span.part == DATA or not samples:
            return None  # too short to be seen; the samples around it are of other code
        sync = bisect_left(sync_times, span.end - 1e-5)
        if span.part in (DEVICE, COPY) and sync < len(syncs) and sync_times[sync] < span.end + 1e-3:
            return syncs[sync][1]
        return samples[min(index, len(samples) - 1)][1]

    def divided(span: Span) -> list[Span]:
        """Among the samples that were taken in it: each stands for the time since the last."""
        first, last = bisect_left(times, span.start), bisect_right(times, span.end)
        if first == last:
            return [span._replace(place=nearest(span, first))]
        edges = [span.start, *times[first : last - 1], span.end]
        places = [place for _, place in samples[first:last]]
        return [
            span._replace(start=start, end=end, place=place)
            for (start, end), place in zip(pairwise(edges), places, strict=True)
        ]

    def host_part(span: Span) -> str:
        if span.place is not None and span.place.is_tokenizing:
            return TOKENIZING
        if trace is not None:
            has_launch = bisect_left(launched, span.start) < bisect_left(launched, span.end)
            return LAUNCH if has_launch else PYTHON
        is_sync = span.place is not None and span.place[:2] in sync_lines
        return DEVICE if is_sync else COMPUTE

    now = begin
    for span in [*measured, Span(end, end, "")]:
        start, stop = max(span.start, now), min(span.end, end)
        if start > now and now < end:
            host = divided(Span(now, min(start, end), COMPUTE))
            spans += [each._replace(part=host_part(each)) for each in host]
        if stop > start:
            spans += divided(span._replace(start=start, end=stop))
        now = max(now, start, stop)
    return spans


def _call_spans(trace: DeviceTrace) -> list[Span]:
    """Calls that waited, cut where the device began or ended to copy and to compute."""
    uploads = merged((work.start, work.end) for work in trace.work if work.is_upload)
    others = merged((work.start, work.end) for work in trace.work if not work.is_upload)
    uploading = {work.correlation for work in trace.work if work.is_upload}
    downloading = {work.correlation for work in trace.work if "DtoH" in work.name}
    found: list[Span] = []
    for call in trace.calls:
        is_upload = call.correlation in uploading
        is_sync = "Synchronize" in call.name
        # What is copied from the device to memory that is not pinned is waited for in the call.
        is_slow = call.end - call.start >= _SLOW_CALL
        is_wait = is_sync or (is_slow and call.correlation in downloading)
        if not (is_wait or is_upload or is_slow):
            continue
        edges = {call.start, call.end}
        edges.update(*within(uploads, *call[:2]), *within(others, *call[:2]))
        for start, end in pairwise(sorted(edges)):
            middle = (start + end) / 2
            if within(uploads, middle, end):
                part = COPY
            elif is_wait or within(others, middle, end):
                part = DEVICE
            else:
                part = COPY if is_upload else LAUNCH
            # In the call of a copy to the device the host is at work on it, or waits to be.
            waits = "work" if is_wait or (is_upload and part == DEVICE) else ""
            waits = "room" if part == DEVICE and not waits else waits
            found.append(Span(start, end, part, None, waits))
    return found


class Played(NamedTuple):
    """A window as it would have been; its clock begins at 0."""

    seconds: float
    spans: list[Span]
    launches: list[Launch]


def play(
    spans: Sequence[Span],
    launches: Sequence[Launch],
    *,
    without: Callable[[Span], bool] = lambda _: False,
    lengths: Sequence[float] | None = None,
    has_room: bool = True,
) -> Played:
    """The window without some of its spans, or with others' lengths. Waits last as long as they
    must; those for room in the queue are none, unless the queue stays as short as it is."""
    clock = 0.0
    free: dict[int, float] = {}  # when each stream has done what it was given
    played: list[Span] = []
    moved: list[Launch] = []
    by_end = sorted(range(len(launches)), key=lambda index: launches[index].end)
    ended = 0
    ready = 0.0  # when all is done that the device had done by now
    for index, span in enumerate(spans):
        is_out = without(span)
        is_wait = span.waits_for == "work" or (not has_room and span.waits_for == "room")
        length = span.seconds if lengths is None else lengths[index]
        pace = 0.0 if is_out or is_wait or not span.seconds else length / span.seconds
        while len(moved) < len(launches) and launches[len(moved)].at < span.end:
            launch = launches[len(moved)]
            at = clock + pace * max(launch.at - span.start, 0.0)
            end = max(free.get(launch.stream, 0.0), at) + launch.seconds
            free[launch.stream] = end
            moved.append(launch._replace(at=at, end=end))
        while ended < len(by_end) and launches[by_end[ended]].end <= span.end + _SHORT_GAP:
            if by_end[ended] < len(moved):
                ready = max(ready, moved[by_end[ended]].end)
            ended += 1
        begin = clock
        if is_wait and not is_out:
            clock = max(clock, ready)
        elif not is_out and not span.waits_for:
            clock += length
        played.append(span._replace(start=begin, end=clock))
    return Played(max([clock, *free.values()]), played, moved)


def unwatched(
    spans: Sequence[Span],
    launches: Sequence[Launch],
    *,
    samples: Sequence[float] = (),
    sample_seconds: float = 0.0,
    calls: Sequence[float] = (),
    ratio: float | None = None,
) -> Played:
    """The window without what watching took: its time for each sample, and the usual time of the
    profiler for each call of CUDA. If it is known what `ratio` of itself the window would have
    taken, the two are made smaller or larger until it takes that, within reason."""

    def counted(times: Sequence[float], find: Callable[[Sequence[float], float], int]) -> list[int]:
        return [find(times, span.end) - find(times, span.start) for span in spans]

    taken = [
        sampled * sample_seconds + called * _CALL_SECONDS
        for sampled, called in zip(  # a span ends with its sample, and begins with its call
            counted(samples, bisect_right), counted(calls, bisect_left), strict=True
        )
    ]

    def played(times: float) -> Played:
        lengths = [
            max(span.seconds - times * cost, _LEAST * span.seconds)
            for span, cost in zip(spans, taken, strict=True)
        ]
        return play(spans, launches, lengths=lengths, has_room=False)

    if ratio is None:
        return played(1.0)
    found = played(0.0)
    aim = ratio * found.seconds
    if found.seconds <= aim:
        return found
    # A loop that waits for its device is no faster whatever is taken out: least is best.
    least, most = 0.0, _MOST_TIMES
    aim = max(aim, 1.001 * played(most).seconds)
    for _ in range(_TRIES):
        middle = (least + most) / 2
        found = played(middle)
        least, most = (middle, most) if found.seconds > aim else (least, middle)
    return found


# -------------------------------------------------------------------------------------------------
# What is told: numbers for programs, a table and a picture for people.

_SHOWN_LINES = 6
_SHOWN_SHARE = 0.005
_WORTH_SHARE = 0.01
_WIDTH = 72
_BAR = 24
_FEWEST = 3  # steps that have a median


@dataclass(frozen=True, kw_only=True, slots=True)
class LineShare:
    """A place in the code and the time that is spent there."""

    where: str
    """'train.py:41', or what was waited for where that is no line of code."""
    what: str
    """The function, 'tokenizing', or nothing."""
    text: str
    """The line itself."""
    seconds: float
    calls: int | None = None
    """How often it waited for the device, where that was counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartShare:
    """One of `PARTS`."""

    letter: str
    name: str
    seconds: float
    lines: list[LineShare]
    """Most time first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Something to take out, and what that would save."""

    gain: float
    """The part of the time that a step would be shorter."""
    where: str
    text: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAccount:
    """Where the time of a loop's steps goes."""

    steps: int
    first_step: int
    seconds: float
    """Of all these steps."""
    parts: list[PartShare]
    device_busy_seconds: float | None
    """None where no device was seen."""
    device_idle: dict[str, float]
    """Seconds, by the part that the loop was in meanwhile."""
    kernels: int
    advice: list[Advice]
    all_gain: float
    """Of all advice together."""
    picture: list[str]
    """One step of usual length: the loop, and the device where there is one."""
    picture_seconds: float
    replay_error: float
    """How far the replay of the window as it was is from what it took, as a part of that."""
    watched_seconds: float
    """Of all these steps as they were: `seconds` is without what watching took."""
    plain_steps: int
    """Steps that were timed just before and after, with nothing on that watches them."""
    plain_step_seconds: float | None
    """Their median."""
    unseen: list[str]

    def as_json(self) -> dict[str, Any]:
        """For json.dumps."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> StepAccount:
        """The account that `as_json` was made from."""
        try:
            values = {field.name: members[field.name] for field in dataclasses.fields(cls)}
            values["advice"] = [Advice(**each) for each in values["advice"]]
            values["parts"] = [
                PartShare(**{**part, "lines": [LineShare(**line) for line in part["lines"]]})
                for part in values["parts"]
            ]
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"this is no account of steps as this version writes it: {error}",
                hint="write one with: python -m tokenmill.stalls --json FILE train.py",
            ) from error
        return cls(**values)

    @property
    def step_seconds(self) -> float:
        return self.seconds / max(self.steps, 1)

    def describe(self) -> str:
        """One table, one picture, and what to do, most useful first."""
        if self.seconds <= 0:
            return "\n".join(["nothing was measured", *self.unseen])
        lines = [self._title(), "", *self._table(), "", *self._draw()]
        if self.advice:
            lines += ["", *self._advise()]
        if self.unseen:
            lines += ["", "not seen here:", *(f"  - {each}" for each in self.unseen)]
        return "\n".join([*lines, "", *self._cost()])

    def _cost(self) -> list[str]:
        taken = max(self.watched_seconds - self.seconds, 0.0)
        percent = share(taken, self.watched_seconds)
        if not self.steps:
            return [f"looking at it took {percent} of that, and is left out above"]
        each = brief(self.watched_seconds / self.steps)
        lines = [f"while it was looked at, a step took {each}: {percent} of that is left out above"]
        if self.plain_step_seconds is not None:
            usual, count = brief(self.plain_step_seconds), self.plain_steps
            lines.append(f"by itself it took {usual}, the median of {count} steps before and after")
        elif self.device_busy_seconds is not None:
            lines.append("(as much as usual: there were no steps before and after to compare with)")
        return lines

    def _title(self) -> str:
        if not self.steps:
            return f"where the time of the program went: {brief(self.seconds)}, and no step seen"
        last = self.first_step + self.steps
        range_ = f"{self.first_step:,} to {last:,}"
        each = brief(self.step_seconds)
        return f"where the time of a step goes: {self.steps:,} steps ({range_}), {each} each"

    def _table(self) -> list[str]:
        rows = []
        for part, percent in zip(self.parts, _percents(self.parts), strict=True):
            bar = "#" * round(_BAR * part.seconds / self.seconds)
            time = brief(part.seconds / max(self.steps, 1))
            rows.append(
                f"  {part.letter}  {part.name:<24} {percent:5.1f}%  {time:>9}  {bar}".rstrip()
            )
            rows += [self._line(line) for line in part.lines[:_SHOWN_LINES] if self._counts(line)]
        rows.append(f"     {'all':<24} 100.0%  {brief(self.step_seconds):>9}")
        if self.device_busy_seconds is not None:
            rows += ["", *self._device_rows(self.device_busy_seconds)]
        return rows

    def _counts(self, line: LineShare) -> bool:
        return line.seconds >= _SHOWN_SHARE * self.seconds or line.calls is not None

    def _line(self, line: LineShare) -> str:
        said = f"{line.where}  {line.what}".rstrip()
        if line.calls is not None and self.steps:
            said += f"  ({line.calls / self.steps:.3g} a step)"
        text = f": {line.text}" if line.text else ""
        return f"       {100 * line.seconds / self.seconds:5.1f}%  {visible(said + text)}"[:150]

    def _device_rows(self, busy: float) -> list[str]:
        idle = sorted(self.device_idle.items(), key=lambda each: -each[1])
        rows = [f"     {'device busy':<24} {share(busy, self.seconds):>6}"]
        for letter, seconds in idle:
            if seconds >= _SHOWN_SHARE * self.seconds:
                percent = share(seconds, self.seconds)
                rows.append(f"     {'device idle':<24} {percent:>6}  while {PARTS[letter]}")
        return [*rows, f"     {'kernels':<24} {self.kernels / max(self.steps, 1):6,.0f}  a step"]

    def _draw(self) -> list[str]:
        names = ("loop", "device")
        rows = [f"  {name:<7} {row}" for name, row in zip(names, self.picture, strict=False)]
        return [f"one step of {brief(self.picture_seconds)}:", *rows]

    def _advise(self) -> list[str]:
        lines = ["what taking it out would save, most first:"]
        for number, each in enumerate(self.advice, 1):
            text = f": {each.text}" if each.text else ""
            lines.append(f"  {number}. {100 * each.gain:.0f}%  {visible(each.where + text)}"[:150])
            lines.append(f"     {each.advice}")
        if len(self.advice) > 1:
            left = brief(self.step_seconds * (1 - self.all_gain))
            lines.append(
                f"  all of these: a step would take {left} instead of {brief(self.step_seconds)}"
            )
        if self.replay_error > 0.1:
            lines.append("  (rough: the device did not work in the order that is assumed here)")
        return lines


def _percents(parts: Sequence[PartShare]) -> list[float]:
    """Shares with one digit that add up to 100.0: what rounding lost goes where it lost most."""
    total = sum(part.seconds for part in parts) or 1.0
    exact = [1000 * part.seconds / total for part in parts]
    whole = [int(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda index: whole[index] - exact[index])
    for index in order[: 1000 - sum(whole)]:
        whole[index] += 1
    return [value / 10 for value in whole]


_BUILD = "tokenize once, before you train: tokenmill build DATA --tokenizer TOKENIZER --out STORE"
_ADVICE = {
    DATA: "do it once, before you train, or give it to workers: DataLoader(..., num_workers=4)",
    COPY: "copy without waiting: DataLoader(..., pin_memory=True), .to(device, non_blocking=True)",
    LAUNCH: "launch less: torch.compile, CUDA graphs, a fused optimizer, or a larger batch",
    PYTHON: "launches nothing while the device may have nothing to do: do it less often, or before",
    DEVICE: "keep the value on the device, and read it once in many steps",
}
_WORKERS_ADVICE = "more workers, or less for each to do (with num_workers=0 their lines are seen)"


def make_account(
    spans: Sequence[Span],
    *,
    boundaries: Sequence[float] = (),
    first_step: int = 0,
    trace: DeviceTrace | None = None,
    syncs: Sequence[CodePlace] = (),
    samples: Sequence[float] = (),
    sample_seconds: float = 0.0,
    plain: Sequence[Sequence[float]] = (),
    unseen: Sequence[str] = (),
) -> StepAccount:
    """The account of a window. `boundaries` are where its steps begin, and the end of the last;
    `plain` has the seconds of steps that nothing looked at, before the window and after it."""
    watched_seconds = spans[-1].end - spans[0].start if spans else 0.0
    launches = [] if trace is None else trace.launches()
    busy = None if trace is None or not spans else trace.busy()
    # Watching makes no step shorter: if the two differ, the lesser is nearer to the truth.
    usual = min((statistics.median(each) for each in plain if len(each) >= _FEWEST), default=None)
    if spans and (sample_seconds or usual is not None):
        steps = [end - start for start, end in pairwise(boundaries)]
        ratio = None if usual is None or not steps else usual / statistics.median(steps)
        played = unwatched(
            spans,
            launches,
            samples=samples,
            sample_seconds=sample_seconds,
            calls=[] if trace is None else trace.launch_times(),
            ratio=ratio,
        )
        boundaries = _moved(boundaries, spans, played.spans)
        spans, launches = played.spans, played.launches
        if busy is not None:
            busy = merged((each.end - each.seconds, each.end) for each in launches)
    seconds = spans[-1].end - spans[0].start if spans else 0.0
    advice, all_gain, error = _advice(spans, launches, seconds)
    idle: dict[str, float] = defaultdict(float)
    busy_seconds = 0.0
    for span in spans if busy is not None else ():
        worked = sum(end - start for start, end in within(busy or [], span.start, span.end))
        busy_seconds += worked
        idle[span.part] += span.seconds - worked
    picture, picture_seconds = _picture(spans, boundaries, busy)
    return StepAccount(
        steps=max(len(boundaries) - 1, 0),
        first_step=first_step,
        seconds=seconds,
        parts=_parts(spans, syncs),
        device_busy_seconds=None if busy is None else busy_seconds,
        device_idle=dict(idle),
        kernels=0 if trace is None else sum("Mem" not in work.name[:3] for work in trace.work),
        advice=advice,
        all_gain=all_gain,
        picture=picture,
        picture_seconds=picture_seconds,
        replay_error=error,
        watched_seconds=watched_seconds,
        plain_steps=sum(len(each) for each in plain if len(each) >= _FEWEST),
        plain_step_seconds=usual,
        unseen=list(unseen),
    )


def _moved(times: Sequence[float], spans: Sequence[Span], played: Sequence[Span]) -> list[float]:
    """Where times of the window are when its spans are of other lengths."""
    starts = [span.start for span in spans]
    found = []
    for at in times:
        index = max(bisect_right(starts, at) - 1, 0)
        span, other = spans[index], played[index]
        pace = other.seconds / span.seconds if span.seconds else 0.0
        found.append(other.start + pace * min(max(at - span.start, 0.0), span.seconds))
    return found


def _group(span: Span) -> tuple[str, ...]:
    """What is one thing to a reader: a line that waits or tokenizes, else a function."""
    place = span.place
    if place is None:
        return (span.part,)
    if place.is_tokenizing or span.part in (COPY, DEVICE):
        return (span.part, place.file, str(place.line))
    return (span.part, "" if span.part == DATA else place.file, place.function)


def _parts(spans: Sequence[Span], syncs: Sequence[CodePlace]) -> list[PartShare]:
    groups: dict[str, dict[tuple[str, ...], list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        groups[span.part][_group(span)].append(span)
    calls: dict[tuple[str, int], int] = defaultdict(int)
    for place in syncs:
        calls[place[:2]] += 1
    found = []
    for letter, name in PARTS.items():
        lines = [_line(group, calls) for group in groups[letter].values()]
        if letter == DEVICE:
            # Those that cost nothing now will, when what is before them is gone.
            seen = {line.where for line in lines}
            lines += [
                _line([Span(0.0, 0.0, DEVICE, place)], calls)
                for place in dict.fromkeys(syncs)
                if where(place) not in seen
            ]
        lines.sort(key=lambda line: -line.seconds)
        seconds = sum(line.seconds for line in lines)
        if lines:
            found.append(PartShare(letter=letter, name=name, seconds=seconds, lines=lines))
    return found


def _hottest(group: Sequence[Span]) -> CodePlace | None:
    times: dict[CodePlace | None, float] = defaultdict(float)
    for span in group:
        times[span.place] += span.seconds
    return max(times, key=lambda place: times[place])


def _line(group: Sequence[Span], calls: dict[tuple[str, int], int]) -> LineShare:
    place = _hottest(group)
    seconds = sum(span.seconds for span in group)
    if place is None:
        return LineShare(where="(too short to be seen)", what="", text="", seconds=seconds)
    is_wait = group[0].part == DEVICE
    what = "tokenizing" if place.is_tokenizing else "" if is_wait else place.function
    if not place.line:
        what = ""
    elif is_wait and all(span.waits_for == "room" for span in group):
        what = "the queue of launches was full"
    return LineShare(
        where=where(place),
        what=what,
        text=linecache.getline(place.file, place.line).strip(),
        seconds=seconds,
        calls=calls.get(place[:2]) if is_wait else None,
    )


def where(place: CodePlace) -> str:
    """'train.py:41', from the folder that the program runs in."""
    if not place.line:
        return place.file
    near = os.path.relpath(place.file)
    is_near = not near.startswith("..") and Path(near).exists()
    return f"{near if is_near else place.file}:{place.line}"


def _advice(
    spans: Sequence[Span], launches: Sequence[Launch], seconds: float
) -> tuple[list[Advice], float, float]:
    """What to take out, the gain of all of it together, and how far the replay is off."""
    if not spans or seconds <= 0:
        return [], 0.0, 0.0
    uploads = {_key(span) for span in spans if span.part == COPY and span.place is not None}
    groups: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    for span in spans:
        is_known = span.part == LAUNCH or span.place is not None
        if is_known and span.part != COMPUTE and span.waits_for != "room":
            groups[_key(span)].append(span)
    whole = play(spans, launches).seconds

    def gain(keys: set[tuple[object, ...]]) -> float:
        rest = play(spans, launches, without=lambda span: _key(span) in keys).seconds
        return max(1 - rest / whole, 0.0) if whole else 0.0

    found: dict[tuple[object, ...], Advice] = {}
    for key, group in groups.items():
        place = _hottest(group)
        # A wait may hide another: what takes no time now is no reason to play.
        if sum(span.seconds for span in group) < _SHOWN_SHARE * seconds:
            continue
        part = COPY if key in uploads else group[0].part
        advice = _BUILD if place is not None and place.is_tokenizing else _ADVICE.get(part, _BUILD)
        if place is not None and place.function == WORKERS:
            advice = _WORKERS_ADVICE
        name, text = PARTS[LAUNCH], ""
        if part != LAUNCH and place is not None:
            line = _line(group, {})
            name, text = f"{line.where}  {line.what}".rstrip(), line.text
        found[key] = Advice(gain=gain({key}), where=name, text=text, advice=advice)
    found = {key: each for key, each in found.items() if each.gain >= _WORTH_SHARE}
    ordered = sorted(found.values(), key=lambda each: -each.gain)
    return ordered, gain(set(found)), abs(whole / seconds - 1)


def _key(span: Span) -> tuple[object, ...]:
    """As `_group`, but what waits for a copy at one line goes with it, and launching is one."""
    if span.part == LAUNCH or span.waits_for == "room":
        return (span.part, span.waits_for)
    if span.part in (COPY, DEVICE):
        return (DEVICE, *_group(span)[1:])
    return _group(span)


def _picture(
    spans: Sequence[Span], boundaries: Sequence[float], busy: list[Interval] | None
) -> tuple[list[str], float]:
    """A step of usual length, drawn: what each of some columns was spent on most."""
    if not spans:
        return [], 0.0
    steps = list(pairwise(boundaries)) or [(spans[0].start, spans[-1].end)]
    start, end = sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]
    column = (end - start) / _WIDTH
    loop, device = "", ""
    index = max(bisect_right(spans, (start, float("inf"))) - 1, 0)
    for number in range(_WIDTH):
        left, right = start + number * column, start + (number + 1) * column
        times: dict[str, float] = defaultdict(float)
        while index < len(spans) - 1 and spans[index].end <= left:
            index += 1
        for span in spans[index:]:
            if span.start >= right:
                break
            times[span.part] += min(span.end, right) - max(span.start, left)
        loop += max(times, key=lambda part: times[part]) if times else " "
        if busy is not None:
            worked = sum(stop - begin for begin, stop in within(busy, left, right))
            device += "#" if 2 * worked >= column else "."
    return [loop, *([device] if busy is not None else [])], end - start
