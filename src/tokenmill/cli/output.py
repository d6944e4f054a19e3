"""Where results and progress go: JSON for programs, a console for people, what is live on stderr.

All text passes a guard on its way out (`tokenmill.visible`): names in it were chosen by others, who
made the files. Escapes that colour a line or redraw a bar are ours and written around the guard.
rich is imported when a console is made, not before: see `cli/main.py`.

`watch` gives back the function that the library calls with each report of progress, from a thread
of its own; a view says how a kind of work looks. On a terminal it is live, elsewhere lines come now
and then. A message (a lost worker, a unit done again) is printed once, above what is live, and
stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.options import unheard
from tokenmill.visible import ReaderLeftError, guarded, visible, visible_lines
from tokenmill.words import clock, compact, count, duration, format_size, of_budget, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TextIO

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live
    from rich.text import Text

    from tokenmill.builder.progress import Progress, WorkerProgress
    from tokenmill.trainer.options import TrainProgress

WIDTH_OF_A_PIPE = 100  # columns of a table that is written to a file or a pipe
PLAIN_SECONDS = 5.0  # between two lines where there is no terminal
LIVE_SECONDS = 0.1
# With more than these, a worker's CPU is one block of eight heights instead of a number.
MANY_WORKERS = 4
CURVE_POINTS = 400  # losses that are remembered for the curve; of more, every other one is dropped
BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def plain(value: object) -> object:
    """A value of the library as JSON has it: dataclasses, facts and mappings become objects."""
    if not isinstance(value, type) and hasattr(value, "__struct_fields__"):  # a fact of the store
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def print_json(value: object, **derived: object) -> None:
    """Print one JSON object on stdout: the value's fields, then what follows from them."""
    fields = plain(value)
    assert isinstance(fields, dict)
    print(json.dumps({**fields, **{name: plain(item) for name, item in derived.items()}}, indent=2))


def guard_streams() -> None:
    """Let nothing reach stdout and stderr that acts on a terminal, whoever writes it."""
    for stream in (sys.stdout, sys.stderr):
        # Else a terminal that knows ASCII alone would end the command at the first other letter.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)


def make_console(*, stderr: bool = False) -> Console:
    """A console that colours only terminals and only where NO_COLOR is not set.

    Brackets are brackets to it: rich's markup would let a name choose colours and links.
    """
    from rich.console import Console
    from rich.segment import Segment

    class GuardedConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                seen = text if control else visible_lines(text)
                yield Segment(seen, style, control)

        def on_broken_pipe(self) -> None:
            raise ReaderLeftError  # rich would exit with 1

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else WIDTH_OF_A_PIPE
    # The stream itself, for escapes of our own.
    file = getattr(stream, "unguarded", stream)
    return GuardedConsole(file=file, width=width, markup=False, highlight=False, emoji=False)


@contextlib.contextmanager
def live_display(console: Console) -> Iterator[Live]:
    """What is redrawn in place and removed at the end; lines on stderr go above it."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        # rich has put a stream of its own there, which would obey the escapes in a warning.
        sys.stderr = guarded(sys.stderr)
        yield live


# -------------------------------------------------------------------------------------------------
# Progress.


class LineView:
    """A line that `said` makes of a report. In a log a short work says nothing, unless `each` is.

    Every view has `line`, what to say in a log (`is_due` where nothing was said for a while), and
    `draw`, what a terminal shows, never wider than it.
    """

    def __init__(self, said: Callable[..., str], *, each: bool = False) -> None:
        self._said = said
        self._each = each
        self._first = time.monotonic() + PLAIN_SECONDS
        self._next = 0.0
        self._drawn: RenderableType | None = None

    def line(self, *report: Any, is_due: bool) -> str | None:
        due = is_due and time.monotonic() >= self._first
        return self._said(*report) if due or self._each else None

    def draw(self, *report: Any, width: int) -> RenderableType:
        if self._drawn is None or self._each or time.monotonic() >= self._next:
            self._next = time.monotonic() + LIVE_SECONDS
            self._drawn = drawn = one_line(visible(self._said(*report)), "")
            drawn.truncate(width, overflow="ellipsis")
        return self._drawn


@contextlib.contextmanager
def watch(view: Any, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Show progress on stderr while the block runs; nothing of it if `quiet`."""
    if quiet:
        yield unheard
    elif sys.stderr.isatty():
        with live(view, make_console(stderr=True)) as show:
            yield show
    else:
        yield PlainLines(view, sys.stderr)


@contextlib.contextmanager
def live(view: Any, console: Console) -> Iterator[Callable[..., None]]:
    """A drawing that is redrawn in place and removed at the end."""
    with live_display(console) as display:
        shown: object = None

        def show(*report: Any) -> None:
            nonlocal shown
            if (message := getattr(report[0], "message", None)) is not None:
                console.print(visible(message), markup=False, soft_wrap=True)
            drawn = view.draw(*report, width=console.width)
            if drawn is not shown:
                shown = drawn
                display.update(drawn, refresh=True)

        yield show


class PlainLines:
    """Every message, and a line when there is something to say or every few seconds."""

    def __init__(self, view: Any, stream: TextIO, *, every_seconds: float = PLAIN_SECONDS) -> None:
        self.view = view
        self.stream = stream
        self.every_seconds = every_seconds
        self._next = 0.0

    def __call__(self, *report: Any) -> None:
        now = time.monotonic()
        line = self.view.line(*report, is_due=now >= self._next)
        if line is not None:
            self._next = now + self.every_seconds
        for each in (getattr(report[0], "message", None), line):
            # Nobody reads any more (a closed pipe): no reason to stop the work.
            with contextlib.suppress(OSError):
                if each is not None:
                    print(visible(each), file=self.stream, flush=True)


class AmountView(LineView):
    """How much (bytes, unless they are called otherwise) is done: a bar, and a line in a log."""

    def __init__(self, what: str, noun: str | None = None) -> None:
        def said(done: int, total: int) -> str:
            amount = format_size(total) if noun is None else count(total, noun)
            return f"{what} {share(done, total)} of {amount}"

        super().__init__(said)

    def draw(self, *report: Any, width: int) -> RenderableType:
        if self._drawn is None or time.monotonic() >= self._next:
            self._next = time.monotonic() + LIVE_SECONDS
            done, total = report
            self._drawn = bar_above([], done, max(total, 1), self._said(*report), width=width)
        return self._drawn


def watch_amount(
    what: str, noun: str | None = None, *, quiet: bool = False
) -> contextlib.AbstractContextManager[Callable[..., None]]:
    """Show how much is done on stderr."""
    return watch(AmountView(what, noun), quiet=quiet)


def as_html(drawn: RenderableType, *, width: int) -> str:
    """What a view draws, for a notebook."""
    from rich.console import Console

    how: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
    # Else rich shows it by itself.
    console = Console(record=True, width=width, file=io.StringIO(), force_jupyter=False, **how)
    console.print(drawn)
    frame = '<pre style="margin:0;background:none;color:inherit;line-height:1.3">{code}</pre>'
    return visible_lines(console.export_html(inline_styles=True, code_format=frame))


def one_line(text: str, style: str = "dim") -> Text:
    """Text that is cut off where the terminal ends."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def bar_above(
    lines: Sequence[Text], done: float, total: float, figures: str, *, width: int
) -> RenderableType:
    """A bar with figures beside it, and lines below."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(ProgressBar(total=total, completed=min(done, total)), figures)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(bar, *lines)


def eta(seconds: float | None) -> str:
    """'ETA 3:07', 'ETA -:--' where it is not known."""
    return f"ETA {'-:--' if seconds is None else clock(seconds)}"


WAITS_FOR = {
    "planning": "planning: describing the tokenizer and cutting the input into units",
    "starting": "starting: workers load the tokenizer",
    "finishing": "finishing: writing the manifest",
}


class BuildView:
    """A build: how much of the input is done, how fast, and what it takes."""

    _is_opened = False

    def line(self, progress: Progress, *, is_due: bool) -> str | None:
        if not self._is_opened:
            # A short build may be over before anyone hears that it is at work.
            if progress.phase == "planning" or not progress.bytes_total:
                return None
            self._is_opened = True
            total = progress.units_total
            in_units = "" if total is None else f" in {count(total, 'unit')}"
            return f"building {format_size(progress.bytes_total)}{in_units}"
        if progress.phase != "building" or not is_due:
            return None
        percent, speed, end, units, memory, *place = self._facts(progress)
        used = f"cpu {cpu(progress.workers, blocks=False)}"
        documents = count(progress.documents, "document")
        at = f"[{clock(progress.seconds)}]"
        return "  ".join((at, percent, units, speed, documents, memory, used, *place, end))

    def draw(self, progress: Progress, *, width: int) -> RenderableType:
        if progress.phase != "building":
            return one_line(f"{WAITS_FOR.get(progress.phase, progress.phase)} ...")
        percent, speed, end, units, memory, *place = self._facts(progress)
        used = f"cpu {cpu(progress.workers, blocks=True)}"
        documents = f"{compact(progress.documents)} documents"
        below = one_line("   ".join((documents, units, *place, memory, used)))
        # Rows that were rejected are worth a look while the build still runs.
        if progress.rejected:
            below.append(f"   {count(progress.rejected)} rejected", style="yellow")
        done, total = progress.bytes_done, max(progress.bytes_total, 1)
        return bar_above([below], done, total, f"{percent}  {speed}  {end}", width=width)

    def _facts(self, progress: Progress) -> tuple[str, ...]:
        """What both have: percent, speed, end, units, memory, and the place if there is one."""
        done = min(progress.bytes_done, progress.bytes_total)
        units = "?" if progress.units_total is None else count(progress.units_total)
        rate = f"{format_size(progress.bytes_per_second)}/s"
        # All text may be encoded while units are still written; a total may be an estimate.
        percent = share(done, progress.bytes_total)
        is_whole = progress.units_done == progress.units_total
        percent = "99.9%" if percent == share(1, 1) and not is_whole else percent
        return (
            percent.rjust(len("12.3%")),
            f"{rate}  {compact(progress.tokens_per_second)} tokens/s",
            eta(progress.eta_seconds),
            f"units {count(progress.units_done)}/{units}",
            f"memory {of_budget(progress.memory_bytes, progress.memory_budget_bytes)}",
            *([] if progress.place is None else [progress.place]),
        )


def cpu(workers: Sequence[WorkerProgress], *, blocks: bool) -> str:
    """CPU of each worker: '98 97%', or one block per worker where there are many."""
    shares = [worker.cpu_percent for worker in workers]
    if not shares:
        return "-"
    if len(shares) <= MANY_WORKERS:
        return " ".join(f"{percent:.0f}" for percent in shares) + "%"
    mean = f"{sum(shares) / len(shares):.0f}%"
    if not blocks:
        return f"{mean} ({min(shares):.0f} to {max(shares):.0f}) of {len(shares)} workers"
    return f"{mean} " + "".join(BLOCKS[min(round(p / 12.5), 8)] for p in shares)


STORE_WAITS = {
    "waiting": "waiting for the build",
    "building": "trained; building the rest of the store",
}


class TrainView:
    """A training: its loss and its speed. In a log every evaluation and the last step are told."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._val_loss: float | None = None

    def line(self, progress: TrainProgress, *, is_due: bool) -> str | None:
        if progress.message is not None:
            return None
        if progress.val_loss != self._val_loss:
            self._val_loss = progress.val_loss
            return f"[{clock(progress.seconds)}]  evaluated: val loss {progress.val_loss:.4f}"
        where = f"step {count(progress.step)}/{count(progress.steps)}"
        if progress.phase in STORE_WAITS and is_due:
            waits = STORE_WAITS[progress.phase]
            return f"[{clock(progress.seconds)}]  {where}  {waits}: {progress.built}"
        is_last = progress.step == progress.steps
        if progress.phase != "training" or progress.loss is None or not (is_due or is_last):
            return None
        at = f"[{clock(progress.seconds)}]  {where}"
        loss = f"loss {progress.loss:.4f}"
        return "  ".join((at, loss, *figures(progress), eta(progress.eta_seconds)))

    def draw(self, progress: TrainProgress, *, width: int) -> RenderableType:
        doing = progress.phase
        if progress.phase in STORE_WAITS:
            doing = f"{STORE_WAITS[progress.phase]}: {progress.built}"
        if progress.loss is None:
            return one_line(f"{doing} ...")
        if progress.phase == "training":
            self._losses.append(progress.loss)
            if len(self._losses) > CURVE_POINTS:
                del self._losses[1::2]
        val = "" if progress.val_loss is None else f"   val {progress.val_loss:.4f}"
        rate = f"   lr {progress.learning_rate:.2e}   norm {progress.grad_norm:.2f}"
        words = f"loss {progress.loss:.4f}{val}{rate}"
        phase = "" if progress.phase == "training" else f"   {doing} ..."
        room = max(0, min(40, width - len(words) - len(phase) - 3))
        top = one_line(words, "bold").append(f"   {curve(self._losses, room)}", style="cyan")
        where = f"step {count(progress.step)}/{count(progress.steps)}"
        lines = [top.append(phase), one_line("   ".join(figures(progress)))]
        beside = f"{where}  {eta(progress.eta_seconds)}"
        return bar_above(lines, progress.step, progress.steps, beside, width=width)


def figures(progress: TrainProgress) -> list[str]:
    """Speed, waiting and memory, as far as they are known."""
    found = []
    if progress.tokens_per_second is not None:
        found.append(f"{compact(progress.tokens_per_second)} tokens/s")
    if progress.mfu is not None:
        found.append(f"MFU {100 * progress.mfu:.1f}%")
    if progress.wait_p50_ms is not None and progress.wait_p99_ms is not None:
        share = 100 * (progress.wait_share or 0.0)
        p50, p99 = progress.wait_p50_ms, progress.wait_p99_ms
        build = progress.build_wait_seconds
        of_it = f"{duration(build)} for the build, " if build else ""
        found.append(f"waited for data {share:.2f}% ({of_it}p50 {p50:.3f} ms, p99 {p99:.3f} ms)")
    if progress.memory_bytes:
        found.append(f"memory {format_size(progress.memory_bytes)}")
    if progress.phase == "training" and progress.built is not None:
        found.append(f"store {progress.built}")
    return found


def curve(values: list[float], width: int) -> str:
    """The values as blocks of eight heights, the last ones at the right."""
    if width < 8 or len(values) < 2:
        return ""
    step = max(1.0, len(values) / width)
    points = [values[int(number * step)] for number in range(min(width, len(values)))]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    return "".join(BLOCKS[1 + round(7 * (value - low) / span)] for value in points)
