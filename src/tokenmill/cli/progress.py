"""What a running command shows on stderr: live on a terminal, lines now and then elsewhere.

`watch` gives back the function that the library calls with each report of progress, from a thread
of its own; a `View` says how a kind of work looks. A message (a lost worker, a unit done again) is
printed once, above what is live, and stays.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.cli.output import live_display, make_console, unguarded
from tokenmill.visible import visible
from tokenmill.words import clock, compact, count, format_size, of_budget, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TextIO

    from rich.console import Console, RenderableType
    from rich.text import Text

    from tokenmill.builder.progress import Progress, WorkerProgress

PLAIN_SECONDS = 5.0
"""Between two lines where there is no terminal."""
MANY_WORKERS = 4
"""With more than these, a worker's CPU is one block of eight heights instead of a number."""
BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class View(Protocol):
    """How the progress of one kind of work looks."""

    def line(self, progress: Any, *, is_due: bool) -> str | None:
        """What to say of it in a log; `is_due` where nothing was said for a while."""

    def draw(self, progress: Any, *, width: int) -> RenderableType:
        """What a terminal shows, never wider than it."""


@contextlib.contextmanager
def watch(view: View, *, quiet: bool = False) -> Iterator[Callable[[Any], None] | None]:
    """Show progress on stderr while the block runs; None if nothing is to be shown."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with live(view, make_console(stderr=True)) as show:
            yield show
    else:
        yield PlainLines(view, sys.stderr)


@contextlib.contextmanager
def live(view: View, console: Console) -> Iterator[Callable[[Any], None]]:
    """A drawing that is redrawn in place and removed at the end."""
    with live_display(console) as display:

        def show(progress: Any) -> None:
            if progress.message is not None:
                console.print(visible(progress.message), markup=False, soft_wrap=True)
            display.update(view.draw(progress, width=console.width), refresh=True)

        yield show


class PlainLines:
    """Every message, and a line when there is something to say or every few seconds."""

    def __init__(self, view: View, stream: TextIO, *, every_seconds: float = PLAIN_SECONDS) -> None:
        self.view = view
        self.stream = stream
        self.every_seconds = every_seconds
        self._next = 0.0

    def __call__(self, progress: Any) -> None:
        now = time.monotonic()
        line = self.view.line(progress, is_due=now >= self._next)
        if line is not None:
            self._next = now + self.every_seconds
        for each in (progress.message, line):
            # Nobody reads any more (a closed pipe): no reason to stop the work.
            with contextlib.suppress(OSError):
                if each is not None:
                    print(visible(each), file=self.stream, flush=True)


@contextlib.contextmanager
def watch_line(
    said: Callable[..., str], *, each: bool = False, quiet: bool = False
) -> Iterator[Callable[..., None] | None]:
    """Show on stderr what `said` makes of a report: one line, redrawn; in a log now and then.

    With `each` no report is left out.
    """
    if quiet:
        yield None
        return
    is_live = sys.stderr.isatty()
    pause = 0.0 if each else 0.1 if is_live else PLAIN_SECONDS
    next_at = time.monotonic() + (0 if is_live else pause)

    def show(*report: Any) -> None:
        nonlocal next_at
        now = time.monotonic()
        if now >= next_at:
            next_at = now + pause
            write(visible(said(*report)))

    def write(line: str) -> None:
        # A line that is redrawn must not wrap.
        unguarded(sys.stderr).write(f"\r\x1b[2K{line[:78]}" if is_live else f"{line}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if is_live:
            write("")


def watch_amount(
    what: str, *, shown: Callable[[int], str] = format_size, quiet: bool = False
) -> contextlib.AbstractContextManager[Callable[[int, int], None] | None]:
    """Show how much (bytes, unless `shown` says it) is done on stderr."""
    return watch_line(
        lambda done, total: f"{what} {share(done, total)} of {shown(total)}", quiet=quiet
    )


def one_line(text: str, style: str = "dim") -> Text:
    """Text that is cut off where the terminal ends."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def bar_above(
    lines: Sequence[Text], *, done: float, total: float, figures: str, width: int
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


class BuildView:
    """A build: how much of the input is done, how fast, and what it takes."""

    def __init__(self) -> None:
        self._is_opened = False

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
        percent, speed, end, units, memory = self._facts(progress)
        return "  ".join(
            (
                f"[{clock(progress.seconds)}]",
                percent,
                units,
                *speed,
                count(progress.documents, "document"),
                memory,
                f"cpu {cpu(progress.workers, blocks=False)}",
                *([] if progress.place is None else [progress.place]),
                end,
            )
        )

    def draw(self, progress: Progress, *, width: int) -> RenderableType:
        if progress.phase != "building":
            return one_line(f"{progress.phase} ...")
        percent, speed, end, units, memory = self._facts(progress)
        facts = (
            f"{compact(progress.documents)} documents",
            units,
            *([] if progress.place is None else [progress.place]),
            memory,
            f"cpu {cpu(progress.workers, blocks=True)}",
        )
        # Rows that were rejected are worth a look while the build still runs.
        rejected = f"   {count(progress.rejected)} rejected" if progress.rejected else ""
        return bar_above(
            [one_line("   ".join(facts)).append(rejected, style="yellow")],
            done=progress.bytes_done,
            total=max(progress.bytes_total, 1),
            figures="  ".join((percent, *speed, end)),
            width=width,
        )

    def _facts(self, progress: Progress) -> tuple[str, tuple[str, str], str, str, str]:
        """What both have: percent, speed, end, units and memory."""
        done = min(progress.bytes_done, progress.bytes_total)
        units = "?" if progress.units_total is None else count(progress.units_total)
        return (
            share(done, progress.bytes_total).rjust(len("12.3%")),
            (
                f"{format_size(progress.bytes_per_second)}/s",
                f"{compact(progress.tokens_per_second)} tokens/s",
            ),
            eta(progress.eta_seconds),
            f"units {count(progress.units_done)}/{units}",
            f"memory {of_budget(progress.memory_bytes, progress.memory_budget_bytes)}",
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
