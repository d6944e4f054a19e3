"""Watches the steps of a loop from outside: what it waits for, where it is, what its device does.

    loaders and optimizers -> `StepWatch.asked`, `handed`, `stepped`: when steps and waits begin
    a thread, some times in a step -> where the loop's thread is (`Reader`)
    torch's profiler and its sync debug mode, on CUDA -> what the device did, which calls waited

All of that is on for a window of steps and gone after it. No other part of the program is touched
but the few methods of loaders that `follow` replaces.

    steps   1 ... 5       5 ... 10    10 ... 30    30 ... 50
            samples       nothing     all of it    nothing

Steps with nothing on tell what watching costs. The samples of the first few are for loops that end
before the window.

A sample needs the interpreter's lock, and would see the loop mostly where it lets go of it, after
the code that held it. So threads switch far more often in the window than they do otherwise, and a
sample stands for the time since the last one.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import inspect
import json
import linecache
import re
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
import types
import warnings
from collections import Counter, deque
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.stalls.account import (
    DEVICE,
    DRAIN,
    WORKERS,
    Call,
    CodePlace,
    DeviceTrace,
    DeviceWork,
    Span,
    StepAccount,
    lay_out,
    make_account,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec

FIRST_STEP, LAST_STEP = 10, 30
# A window that is longer ends after the step it is in, if it has a few: enough was seen, and what
# the profiler keeps grows.
MOST_SECONDS, FEWEST_STEPS = 10.0, 3
# Between samples: so many in a step of the window, but not too near to each other.
INTERVAL_SECONDS, MOST_INTERVAL_SECONDS, SAMPLES_A_STEP = 0.001, 0.01, 25
SWITCH_SECONDS = 0.0001
_MOST_SAMPLES = 200_000
_SKIPPED = 2  # steps after the window, while the queue of the device fills again

# -------------------------------------------------------------------------------------------------
# Where a thread is.

_TOKENIZERS = {"tokenizers", "sentencepiece", "tiktoken", "gigatoken", "tokenmill"}
_TOKENIZING = re.compile(r"tokenize(?!d)", re.IGNORECASE)
_CALLED = re.compile(r"([A-Za-z_][\w.]*)\s*\(")
_OWN, _USER, _LOADER, _TOKENIZER, _WAITING, _OTHER = range(6)
_TRIES = 3


class Reader:
    """Finds the line of the user's code that a stack is in, and what it is there for."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        self._standard = (paths["stdlib"], paths["platstdlib"])
        self._own = str(Path(__file__).parents[1])
        self._kinds: dict[str, int] = {}
        self._tries: Counter[tuple[types.CodeType, int]] = Counter()
        self._tokenizes: set[tuple[types.CodeType, int]] = set()

    def place(self, frame: types.FrameType) -> CodePlace:
        """Of the innermost line of the user's, or of what a loader does where there is none."""
        innermost: types.FrameType | None = frame
        inner: types.FrameType | None = None  # the user's frames: the innermost, and the last seen
        outer: types.FrameType | None = None
        called: types.FrameType | None = None  # by a loader
        waiting = tokenizing = is_loader = False
        at: types.FrameType | None = frame
        while at is not None:
            kind = self._kind(at.f_code.co_filename)
            if kind == _USER:
                inner, outer = inner or at, at
            elif kind == _LOADER:
                called, is_loader = outer, True
            elif inner is None:
                tokenizing = tokenizing or kind == _TOKENIZER
                waiting = waiting or kind == _WAITING
            at = at.f_back
        if is_loader and called is None:
            # Between its own frames and the loop's there is nothing of the user's.
            assert innermost is not None
            code = innermost.f_code
            if waiting:
                return CodePlace(WORKERS, 0, WORKERS)
            return CodePlace(code.co_filename, innermost.f_lineno, code.co_qualname, tokenizing)
        shown = inner or innermost
        assert shown is not None
        name = (called or shown).f_code.co_qualname
        tokenizing = tokenizing or self._is_tokenizing(shown)
        return CodePlace(shown.f_code.co_filename, shown.f_lineno, name, tokenizing)

    def _kind(self, file: str) -> int:
        found = self._kinds.get(file)
        if found is None:
            found = self._kinds[file] = self._look(file.replace("\\", "/"))
        return found

    def _look(self, file: str) -> int:
        if "/torch/utils/data/" in file or "/torchdata/" in file:
            return _LOADER
        if file.startswith(("<frozen", self._own)):
            return _TOKENIZER if f"{self._own}/engines/" in file else _OWN
        _, _, package = file.rpartition("-packages/")
        if package != file:
            top = package.partition("/")[0]
            is_tokenizer = top in _TOKENIZERS or "/tokenization" in package
            return _TOKENIZER if is_tokenizer else _OTHER
        if file.startswith(self._standard):
            return _WAITING if re.search(r"/(multiprocessing|queue|selectors)\b", file) else _OTHER
        return _USER

    def _is_tokenizing(self, frame: types.FrameType) -> bool:
        """Whether the line calls a tokenizer that has no frames of its own, as compiled ones."""
        code = frame.f_code
        key = (code, frame.f_lineno)
        if key in self._tokenizes:
            return True
        if self._tries[key] >= _TRIES:
            return False
        self._tries[key] += 1
        is_named = _TOKENIZING.search(code.co_qualname) is not None
        if is_named or any(map(_is_tokenizer, _objects(frame))):
            self._tokenizes.add(key)
            return True
        return False


def _objects(frame: types.FrameType) -> Iterator[object]:
    """What is called on the line of a frame: `a`, `a.b` and `a.b.c` of `a.b.c(...)`.

    No code of theirs is run for it: attributes are looked up, properties are not computed.
    """
    names = {**frame.f_globals, **frame.f_locals}
    for chain in _CALLED.findall(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
        first, *rest = chain.split(".")
        value = names.get(first)
        yield value
        for name in rest:
            value = inspect.getattr_static(value, name, None)
            yield value


def _is_tokenizer(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _TOKENIZERS - {"tokenmill"}
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        value = value.__self__
    for kind in type(value).__mro__:
        module = str(getattr(kind, "__module__", ""))
        if module.partition(".")[0] in _TOKENIZERS - {"tokenmill"} or "tokeniz" in module:
            return True
    return type(value).__module__.startswith("tokenmill.engines")


# -------------------------------------------------------------------------------------------------
# What the device does.

_SYNC = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype"


class DeviceWatch:
    """torch's profiler, for calls of CUDA and what the device did, and its sync debug mode."""

    def __init__(self, torch: Any, place: Callable[[], CodePlace]) -> None:
        self._torch = torch
        self._place = place
        self._opened = contextlib.ExitStack()
        self._marks: list[float] = []
        self._profiler: Any = None
        self.syncs: list[tuple[float, CodePlace]] = []
        """When a call that had waited came back, and where it is."""
        self.problem: str | None = None

    def start(self) -> float:
        """When the device had done all there was: the window begins with nothing in the queue."""
        self._listen()
        profiler = self._torch.profiler
        with self._kept("torch's profiler could not be started"), _silence():
            found = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
            found.start()
            self._profiler = found
        return self._drain()

    def stop(self) -> float:
        """When the device had done all there was."""
        end = self._drain()
        self._opened.close()
        if self._profiler is not None:
            with self._kept("torch's profiler could not be stopped"), _silence():
                self._profiler.stop()
        return end

    def _drain(self) -> float:
        self._marks.append(time.perf_counter())
        with self._kept("the device failed"):
            self._torch.cuda.synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def _kept(self, what: str) -> Generator[None, None, None]:
        """The loop goes on, whatever happens here."""
        try:
            yield
        except Exception as error:
            self.problem = f"{what}: {error}"

    def _listen(self) -> None:
        """Let calls that wait say so, unless the program has told them to fail."""
        cuda = self._torch.cuda
        mode = cuda.get_sync_debug_mode()
        if mode == 2:
            return
        self._opened.enter_context(warnings.catch_warnings())
        for message in (_SYNC, _PROTOTYPE):
            warnings.filterwarnings("always", message=message)
        show = warnings.showwarning

        def hear(message: Any, *others: Any, **named: Any) -> None:
            text = str(message)
            if text.startswith(_SYNC):
                self.syncs.append((time.perf_counter(), self._place()))
            elif not text.startswith(_PROTOTYPE):
                show(message, *others, **named)

        warnings.showwarning = hear
        cuda.set_sync_debug_mode(1)
        self._opened.callback(cuda.set_sync_debug_mode, mode)

    def trace(self) -> DeviceTrace | None:
        """What the profiler saw, by the loop's clock; None where `problem` says why."""
        if self._profiler is None:
            return None
        try:
            with tempfile.TemporaryDirectory() as folder, _silence():
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                events = json.loads(path.read_bytes())["traceEvents"]
            return read_trace(events, self._marks)
        except Exception as error:
            self.problem = f"what torch's profiler saw could not be read: {error}"
            return None


@contextlib.contextmanager
def _silence() -> Generator[None, None, None]:
    """The profiler warns of how it is used, and that is no matter of the program's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_trace(events: Sequence[Mapping[str, Any]], marks: Sequence[float]) -> DeviceTrace:
    """Of the events of a Chrome trace. `marks` are when the loop's thread began to wait for all
    that was on the device, at the window's begin and end: calls that are found in the trace, and
    tell its clock and which thread is the loop's."""
    calls: list[tuple[int, Call]] = []
    work: list[DeviceWork] = []
    for event in events:
        kind = event.get("cat")
        if event.get("ph") != "X":
            continue
        start, end = 1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"])
        named = event.get("args", {})
        number = int(named.get("correlation", 0))
        if kind in ("cuda_runtime", "cuda_driver"):
            calls.append((int(event["tid"]), Call(start, end, event["name"], number)))
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append(DeviceWork(start, end, event["name"], int(named.get("stream", 0)), number))
    drains = [each for each in calls if each[1].name == "cudaDeviceSynchronize"]
    if not drains or not work:
        raise ValueError("it has no work of the device (is CUPTI installed, and allowed?)")

    def miss(drain: tuple[int, Call]) -> float:
        """How far the end's mark is from any call, if this call is the begin's."""
        end = drain[1].start + marks[-1] - marks[0]
        return min(abs(other[1].start - end) for other in drains)

    thread, drain = min(drains, key=miss)
    shift = marks[0] - drain.start
    launching = Counter(thread for thread, call in calls if "aunch" in call.name)
    known = {each for each, count in launching.items() if count >= 0.05 * launching.total()}
    return DeviceTrace(
        calls=sorted(
            call._replace(start=call.start + shift, end=call.end + shift)
            for each, call in calls
            if each in known | {thread}
        ),
        work=sorted(each._replace(start=each.start + shift, end=each.end + shift) for each in work),
    )


# -------------------------------------------------------------------------------------------------
# The window of steps.


def _lengths(times: Sequence[float]) -> list[float]:
    return [end - start for start, end in pairwise(times)]


class StepWatch:
    """Watches the thread that makes it, for a window of its steps: `asked` and `handed` around what
    is a wait for data, `stepped` where a step ends, `finish` for the account."""

    def __init__(self, *, first: int = FIRST_STEP, last: int = LAST_STEP) -> None:
        self._first, self._last = first, last
        self._thread = threading.get_ident()
        self._reader = Reader()
        self._samples: deque[tuple[float, CodePlace]] = deque(maxlen=_MOST_SAMPLES)
        self._waits: list[tuple[float, float]] = []
        self._boundaries: list[float] = []
        self._before: list[float] = []  # boundaries of steps with nothing on
        self._after: list[float] = []
        self._begin = time.perf_counter()
        self._end = self._drained_at = 0.0
        self._count = 0
        self._source: object = None  # the optimizer that ends steps; None while batches do
        self._depth = 0
        self._asked_at = 0.0
        self._is_open = False
        self._is_over = False  # the window, and with it all that watches
        self._is_done = False  # the steps after it that are timed, too
        self._device: DeviceWatch | None = None
        self._unseen: list[str] = []
        self._spent = self._spent_before = 0.0
        self._switch_seconds = sys.getswitchinterval()
        self._interval = INTERVAL_SECONDS
        self._sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="tokenmill-stalls", daemon=True)
        self._turn_on()
        self._sampler.start()

    def _turn_on(self) -> None:
        if not self._sampling.is_set():
            sys.setswitchinterval(min(SWITCH_SECONDS, self._switch_seconds))
            self._switch_set = sys.getswitchinterval()  # it is rounded
            self._sampling.set()

    def _turn_off(self) -> None:
        if self._sampling.is_set():
            self._sampling.clear()
            if sys.getswitchinterval() == self._switch_set:
                sys.setswitchinterval(self._switch_seconds)

    def _sample(self) -> None:
        while not self._is_over:
            if not self._sampling.wait(1.0):
                continue  # and see whether it is over
            time.sleep(self._interval)
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                self._samples.append((time.perf_counter(), self._reader.place(frame)))
            del frame  # it would keep what the loop's functions hold
            self._spent = time.thread_time()

    def _is_watched(self) -> bool:
        return not self._is_done and threading.get_ident() == self._thread

    def asked(self, *, is_batch: bool = True) -> None:
        """The loop wants a batch."""
        if not self._is_watched():
            return
        if is_batch and not self._depth:
            self.stepped(None)
        self._depth += 1
        if self._depth == 1:
            self._asked_at = time.perf_counter()

    def handed(self) -> None:
        """It has its batch, or hears that there is none."""
        if self._is_watched() and self._depth:
            self._depth -= 1
            if not self._depth and not self._is_over:
                self._waits.append((self._asked_at, time.perf_counter()))

    def stepped(self, source: object) -> None:
        """A step has ended, by a call for a batch (None) or of an optimizer."""
        if not self._is_watched():
            return
        if self._is_over:
            if source is self._source:
                self._after.append(time.perf_counter())
                self._is_done = len(self._after) >= len(self._boundaries) + _SKIPPED
            return
        if source is not None and self._source is None and not self._is_open:
            # Where there is an optimizer, its steps count, whatever was handed out before.
            self._source, self._count = source, 0
            self._before.clear()
        if source is not self._source:
            return
        now = time.perf_counter()
        self._count += 1
        if self._before and not self._is_open:
            self._before.append(now)
        else:
            self._boundaries.append(now)
        if self._is_open:
            is_long = now - self._begin > MOST_SECONDS and len(self._boundaries) > FEWEST_STEPS
            if self._count >= self._last or is_long:
                self._close()
        elif self._count == self._first:
            self._open()
        elif self._count == 1:
            self._turn_on()
            self._restart(now)
        elif self._count == (self._first + 1) // 2:
            self._turn_off()
            self._before.append(now)

    def _restart(self, now: float) -> None:
        """What was before is no part of a step."""
        self._samples.clear()
        self._waits.clear()
        self._boundaries[:] = [now]
        self._spent_before = self._spent
        self._begin = now

    def _open(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._device = DeviceWatch(torch, self._here)
            self._device.start()
        self._is_open = True
        if before := _lengths(self._before):
            usual = statistics.median(before) / SAMPLES_A_STEP
            self._interval = min(max(usual, INTERVAL_SECONDS), MOST_INTERVAL_SECONDS)
        self._turn_on()
        self._restart(time.perf_counter())

    def _here(self) -> CodePlace:
        return self._reader.place(sys._current_frames()[self._thread])

    def _close(self) -> None:
        """The window is over. What the device still has to do belongs to its steps."""
        self._end = self._boundaries[-1]
        if self._device is not None:
            self._drained_at = self._end
            self._end = self._boundaries[-1] = self._device.stop()
        self._leave()
        self._after.append(time.perf_counter())

    def _leave(self) -> None:
        self._is_over = True
        self._turn_off()

    def finish(self) -> StepAccount:
        """The account of the window, or of what there was of it."""
        if not self._is_over:
            if self._device is not None:
                self._device.stop()
            has_step = len(self._boundaries) > 1
            self._end = self._boundaries[-1] if has_step else time.perf_counter()
            self._leave()
        self._is_done = True
        self._sampling.set()
        self._sampler.join()
        trace = None if self._device is None else self._device.trace()
        syncs = [] if self._device is None else self._device.syncs
        seen = [sample for sample in self._samples if self._begin <= sample[0] <= self._end]
        spans = lay_out(
            self._begin,
            self._drained_at or self._end,
            waits=self._waits,
            samples=seen,
            trace=trace,
            syncs=syncs,
        )
        if self._drained_at:
            spans.append(
                Span(self._drained_at, self._end, DEVICE, CodePlace(DRAIN, 0, DRAIN), "room")
            )
        spent = self._spent - self._spent_before
        return make_account(
            spans,
            boundaries=self._boundaries,
            first_step=self._first if self._is_open else 1,
            trace=trace,
            syncs=[place for at, place in syncs if self._begin <= at <= self._end],
            samples=[at for at, _ in seen],
            sample_seconds=spent / max(len(seen), 1),
            plain=[_lengths(self._before), _lengths(self._after[_SKIPPED:])],
            unseen=self._what_is_unseen(trace, seen),
        )

    def _what_is_unseen(
        self, trace: DeviceTrace | None, seen: Sequence[tuple[float, CodePlace]]
    ) -> list[str]:
        found = []
        torch = sys.modules.get("torch")
        uses_cuda = torch is not None and torch.cuda.is_initialized()
        if not self._count:
            found.append(
                "steps: no DataLoader handed out a batch, and no optimizer of torch made a step"
            )
        elif not self._is_open:
            found.append(
                f"steps {self._first} to {self._last}: there were {self._count} only, and steps 1 "
                f"to {len(self._boundaries)} were looked at (--steps FIRST-LAST chooses)"
            )
        if not uses_cuda:
            found.append(
                "a device: CUDA was not used. Copies to it, launches, waits for it and its idle "
                "time cannot be told here; computing counts for the line that computes"
            )
        elif trace is None:
            why = None if self._device is None else self._device.problem
            found.append(f"the device's own time: {why or 'the window of steps did not begin'}")
        if any(place.function == WORKERS for _, place in seen):
            found.append(
                "what workers do in their own processes, other than how long the loop waits"
            )
        return found


# -------------------------------------------------------------------------------------------------
# Loaders and optimizers of a program that knows nothing of this.


@contextlib.contextmanager
def follow(watch: StepWatch) -> Generator[None, None, None]:
    """Let loaders and optimizers tell the watch, as soon as the program imports them."""
    with contextlib.ExitStack() as opened:

        def replace(kind: type, name: str, make: Callable[[Any], Any]) -> None:
            original = vars(kind).get(name)
            if original is not None:
                setattr(kind, name, make(original))
                opened.callback(setattr, kind, name, original)

        def measured(method: Any, *, is_batch: bool) -> Any:
            def measure(self: Any) -> Any:
                watch.asked(is_batch=is_batch)
                try:
                    return method(self)
                finally:
                    watch.handed()

            return measure

        def iterated(method: Any) -> Any:
            def iterate(self: Any) -> Any:
                step = measured(next, is_batch=True)
                batches = method(self)
                while True:
                    try:
                        batch = step(batches)
                    except StopIteration:
                        return
                    yield batch

            return iterate

        def torch_loader(module: Any) -> None:
            replace(module.DataLoader, "__iter__", lambda made: measured(made, is_batch=False))
            iterator = module._BaseDataLoaderIter
            replace(iterator, "__next__", lambda made: measured(made, is_batch=True))

        def stateful_loader(module: Any) -> None:
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == module.__name__:
                    replace(kind, "__next__", lambda made: measured(made, is_batch=True))

        def torch_optimizer(module: Any) -> None:
            def stepped(optimizer: object, *_: object) -> None:
                watch.stepped(optimizer)

            opened.callback(module.register_optimizer_step_post_hook(stepped).remove)

        importing = _Importing(
            {
                "torch.utils.data.dataloader": torch_loader,
                "torchdata.stateful_dataloader.stateful_dataloader": stateful_loader,
                "torch.optim.optimizer": torch_optimizer,
                "tokenmill.torch": lambda module: replace(
                    module.DeviceFeeder, "__iter__", iterated
                ),
                "tokenmill.loader.loader": lambda module: replace(
                    module.Loader, "__iter__", iterated
                ),
            }
        )
        sys.meta_path.insert(0, importing)
        opened.callback(sys.meta_path.remove, importing)
        yield


class _Importing(importlib.abc.MetaPathFinder):
    """Calls a function with a module when it has been imported, or at once where it has been."""

    def __init__(self, after: Mapping[str, Callable[[Any], None]]) -> None:
        self._after = after
        for name, function in after.items():
            if name in sys.modules:
                function(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        function = self._after.get(name)
        if function is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_tell(module: types.ModuleType) -> None:
                execute(module)
                function(module)

            loader.exec_module = execute_and_tell
        return spec
