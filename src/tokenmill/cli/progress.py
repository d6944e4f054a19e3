"""What a running build shows on stderr: a live bar on a terminal, a line now and then elsewhere.

`watch` gives back the function that the library calls with each `Progress`, from a thread of its
own. A message (a lost worker, a unit done again) is printed once, above the bar, and stays.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from tokenmill.cli.output import live_display, make_console, unguarded
from tokenmill.visible import visible
from tokenmill.words import clock, compact, count, format_size, of_budget, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TextIO

    from rich.console import Console, RenderableType

    from tokenmill.builder.progress import Progress, WorkerProgress

    OnProgress = Callable[[Progress], None]
    OnAmount = Callable[[int, int], None]

PLAIN_SECONDS = 5.0
"""Between two lines where there is no terminal."""
MANY_WORKERS = 4
"""With more than these, a worker's CPU is one block of eight heights instead of a number."""
BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@contextlib.contextmanager
def watch(*, quiet: bool = False) -> Iterator[OnProgress | None]:
    """Show progress on stderr while the block runs; None if nothing is to be shown."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with live_bar(make_console(stderr=True)) as on_progress:
            yield on_progress
    else:
        yield PlainLines(sys.stderr)


@contextlib.contextmanager
def watch_amount(
    what: str, *, shown: Callable[[int], str] = format_size, quiet: bool = False
) -> Iterator[OnAmount | None]:
    """Show how much (bytes, unless `shown` says it) is done on stderr: one line, redrawn."""
    if quiet:
        yield None
        return
    live = sys.stderr.isatty()
    next_at = time.monotonic() + (0 if live else PLAIN_SECONDS)

    def show(done: int, total: int) -> None:
        nonlocal next_at
        now = time.monotonic()
        if now >= next_at:
            next_at = now + (0.1 if live else PLAIN_SECONDS)
            line = f"{what} {share(done, total)} of {shown(total)}"
            show_line(line, live=live)

    try:
        yield show
    finally:
        if live:
            show_line("", live=True)


def show_line(line: str, *, live: bool) -> None:
    """Say it on stderr: in the place of the last one, or below it where there is no terminal."""
    unguarded(sys.stderr).write(f"\r\x1b[2K{visible(line)}" if live else f"{visible(line)}\n")
    sys.stderr.flush()


class PlainLines:
    """One line when the work starts, one every few seconds, and every message."""

    def __init__(self, stream: TextIO, *, every_seconds: float = PLAIN_SECONDS) -> None:
        self.stream = stream
        self.every_seconds = every_seconds
        self._next: float | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.message is not None:
            self._print(progress.message)
        now = time.monotonic()
        if self._next is None:
            # A short build may be over before anyone hears that it is at work.
            if progress.phase == "planning" or not progress.bytes_total:
                return
            self._print(opening_line(progress))
        elif progress.phase == "building" and now >= self._next:
            self._print(plain_line(progress))
        else:
            return
        self._next = now + self.every_seconds

    def _print(self, line: str) -> None:
        # Nobody reads any more (a closed pipe): no reason to stop the build.
        with contextlib.suppress(OSError):
            print(visible(line), file=self.stream, flush=True)


def opening_line(progress: Progress) -> str:
    """What is about to be done, in one line."""
    units = "" if progress.units_total is None else f" in {count(progress.units_total, 'unit')}"
    return f"building {format_size(progress.bytes_total)}{units}"


def plain_line(progress: Progress) -> str:
    """All that the live bar shows, in one line for a log."""
    return "  ".join(
        (
            f"[{clock(progress.seconds)}]",
            _percent(progress),
            f"units {_units(progress)}",
            f"{format_size(progress.bytes_per_second)}/s",
            f"{compact(progress.tokens_per_second)} tokens/s",
            count(progress.documents, "document"),
            f"memory {of_budget(progress.memory_bytes, progress.memory_budget_bytes)}",
            f"cpu {cpu(progress.workers, blocks=False)}",
            *([] if progress.place is None else [progress.place]),
            f"ETA {_eta(progress)}",
        )
    )


@contextlib.contextmanager
def live_bar(console: Console) -> Iterator[OnProgress]:
    """A bar with two lines of facts, redrawn in place and removed at the end."""
    with live_display(console) as live:

        def show(progress: Progress) -> None:
            if progress.message is not None:
                console.print(visible(progress.message), markup=False, soft_wrap=True)
            live.update(draw(progress, width=console.width), refresh=True)

        yield show


def draw(progress: Progress, *, width: int) -> RenderableType:
    """The bar and its facts, never wider than the terminal."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if progress.phase != "building":
        return Text(f"{progress.phase} ...", style="dim", no_wrap=True, overflow="ellipsis")
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    total = max(progress.bytes_total, 1)
    figures = "  ".join(
        (
            _percent(progress),
            f"{format_size(progress.bytes_per_second)}/s",
            f"{compact(progress.tokens_per_second)} tokens/s",
            f"ETA {_eta(progress)}",
        )
    )
    bar.add_row(ProgressBar(total=total, completed=min(progress.bytes_done, total)), figures)
    facts = "   ".join(
        (
            f"{compact(progress.documents)} documents",
            f"units {_units(progress)}",
            *([] if progress.place is None else [progress.place]),
            f"memory {of_budget(progress.memory_bytes, progress.memory_budget_bytes)}",
            f"cpu {cpu(progress.workers, blocks=True)}",
        )
    )
    # Rows that were rejected are worth a look while the build still runs.
    rejected = f"   {count(progress.rejected)} rejected" if progress.rejected else ""
    line = Text(facts, style="dim", no_wrap=True, overflow="ellipsis").append(
        rejected, style="yellow"
    )
    line.truncate(width, overflow="ellipsis")
    return Group(bar, line)


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


def _percent(progress: Progress) -> str:
    done = min(progress.bytes_done, progress.bytes_total)
    return share(done, progress.bytes_total).rjust(len("12.3%"))


def _units(progress: Progress) -> str:
    total = "?" if progress.units_total is None else count(progress.units_total)
    return f"{count(progress.units_done)}/{total}"


def _eta(progress: Progress) -> str:
    return "-:--" if progress.eta_seconds is None else clock(progress.eta_seconds)
