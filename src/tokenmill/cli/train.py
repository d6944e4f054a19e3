"""`tokenmill train`: a store in, a trained model out."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tokenmill.cli import options as opt
from tokenmill.cli.options import same_command, stoppable
from tokenmill.cli.output import live_display, make_console, print_json
from tokenmill.cli.progress import PLAIN_SECONDS
from tokenmill.trainer.options import TrainOptions
from tokenmill.visible import visible
from tokenmill.words import clock, compact, count, duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from rich.console import Console, RenderableType

    from tokenmill.trainer.options import TrainProgress, TrainResult


@opt.command(TrainOptions)
def train(
    *,
    store: opt.StorePath,
    options: dict[str, Any],
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Train the reference model on a store.

    Rows are cut, packed and shuffled as they are read, and are on the device before they are asked
    for. Killed at any moment, the same command with --resume goes on with the same losses. Under
    torchrun it trains on several GPUs.

    \b
    Examples:
      tokenmill train my-store --model tiny --seq-len 256 --steps 200
      tokenmill train my-store --model small --batch-tokens 524288 --steps 1000 -o run --resume
      torchrun --nproc-per-node 8 -m tokenmill train my-store --model medium --seq-len 16384
    """
    import tokenmill

    kept = f"the steps that were made are kept in {options['out']}; {how_to_go_on()}"
    with stoppable(kept), watch_training(quiet=quiet) as tell:
        result = tokenmill.train(store, on_progress=tell, **options)
    show_result(result, as_json=as_json)


def how_to_go_on() -> str:
    """The command that resumes this one."""
    command = same_command()
    return f"go on with:\n  {command if ' --resume' in command else command + ' --resume'}"


# -------------------------------------------------------------------------------------------------
# What a training run shows: a live panel on a terminal, lines elsewhere, a summary at the end.
#
# Under torchrun every rank runs the command; the library tells its progress to the first one
# alone, and only that one prints the summary.

if TYPE_CHECKING:
    OnProgress = Callable[[TrainProgress], None]

BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
CURVE_POINTS = 400
"""Losses that are remembered for the curve; of more, every other one is dropped."""


@contextlib.contextmanager
def watch_training(*, quiet: bool = False) -> Iterator[OnProgress | None]:
    """Show a run on stderr while the block runs; None if nothing is to be shown."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with live_panel(make_console(stderr=True)) as on_progress:
            yield on_progress
    else:
        yield TrainLines(sys.stderr)


class TrainLines:
    """Every message and every evaluation, and a line of numbers every few seconds."""

    def __init__(self, stream: TextIO, *, every_seconds: float = PLAIN_SECONDS) -> None:
        self.stream = stream
        self.every_seconds = every_seconds
        self._next = 0.0
        self._val_loss: float | None = None

    def __call__(self, progress: TrainProgress) -> None:
        if progress.message is not None:
            self._print(progress.message)
        elif progress.val_loss != self._val_loss:
            self._val_loss = progress.val_loss
            self._print(f"[{clock(progress.seconds)}]  evaluated: val loss {progress.val_loss:.4f}")
        elif progress.phase == "training" and progress.loss is not None:
            now = time.monotonic()
            is_last = progress.step == progress.steps
            if now >= self._next or is_last:
                self._print(plain_line(progress))
                self._next = now + self.every_seconds

    def _print(self, line: str) -> None:
        # Nobody reads any more (a closed pipe): no reason to stop the run.
        with contextlib.suppress(OSError):
            print(visible(line), file=self.stream, flush=True)


def plain_line(progress: TrainProgress) -> str:
    """All that the live panel shows, in one line for a log."""
    return "  ".join(
        (
            f"[{clock(progress.seconds)}]",
            f"step {count(progress.step)}/{count(progress.steps)}",
            f"loss {progress.loss:.4f}",
            *figures(progress),
            f"ETA {_eta(progress)}",
        )
    )


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
        found.append(f"waited for data {share:.2f}% (p50 {p50:.3f} ms, p99 {p99:.3f} ms)")
    if progress.memory_bytes:
        found.append(f"memory {format_size(progress.memory_bytes)}")
    return found


@contextlib.contextmanager
def live_panel(console: Console) -> Iterator[OnProgress]:
    """A bar, a curve and two lines of facts, redrawn in place and removed at the end."""
    losses: list[float] = []
    with live_display(console) as live:

        def show(progress: TrainProgress) -> None:
            if progress.message is not None:
                console.print(visible(progress.message), markup=False, soft_wrap=True)
            if progress.phase == "training" and progress.loss is not None:
                losses.append(progress.loss)
                if len(losses) > CURVE_POINTS:
                    del losses[1::2]
            live.update(draw(progress, losses, width=console.width), refresh=True)

        yield show


def draw(progress: TrainProgress, losses: list[float], *, width: int) -> RenderableType:
    """The panel, never wider than the terminal."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    if progress.loss is None:
        return line(f"{progress.phase} ...", "dim")
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    where = f"step {count(progress.step)}/{count(progress.steps)}  ETA {_eta(progress)}"
    bar.add_row(ProgressBar(total=progress.steps, completed=progress.step), where)
    val = "" if progress.val_loss is None else f"   val {progress.val_loss:.4f}"
    rate = f"   lr {progress.learning_rate:.2e}   norm {progress.grad_norm:.2f}"
    words = f"loss {progress.loss:.4f}{val}{rate}"
    phase = "" if progress.phase == "training" else f"   {progress.phase} ..."
    room = max(0, min(40, width - len(words) - len(phase) - 3))
    top = line(words, "bold").append(f"   {curve(losses, room)}", style="cyan").append(phase)
    top.truncate(width, overflow="ellipsis")
    facts = line("   ".join(figures(progress)), "dim")
    facts.truncate(width, overflow="ellipsis")
    return Group(bar, top, facts)


def curve(values: list[float], width: int) -> str:
    """The values as blocks of eight heights, the last ones at the right."""
    if width < 8 or len(values) < 2:
        return ""
    step = max(1.0, len(values) / width)
    points = [values[int(number * step)] for number in range(min(width, len(values)))]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    return "".join(BLOCKS[1 + round(7 * (value - low) / span)] for value in points)


def _eta(progress: TrainProgress) -> str:
    return "-:--" if progress.eta_seconds is None else clock(progress.eta_seconds)


def show_result(result: TrainResult, *, as_json: bool) -> None:
    """The summary, once, on stdout."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(result)
        return
    for name, value in summary(result):
        print(f"{name:<12}{visible(value)}")


def summary(result: TrainResult) -> Iterator[tuple[str, str]]:
    """What is worth saying at the end."""
    resumed = "" if result.resumed_from is None else f", from step {count(result.resumed_from)} on"
    yield "trained", f"{count(result.steps, 'step')}{resumed}, {count(result.tokens)} tokens"
    yield "parameters", count(result.parameters)
    val = "" if result.val_loss is None else f", on val {result.val_loss:.4f}"
    yield "loss", f"{result.loss:.4f}{val}"
    if result.tokens_per_second is not None:
        mfu = "" if result.mfu is None else f", {100 * result.mfu:.1f}% of the device's peak"
        yield "speed", f"{count(round(result.tokens_per_second))} tokens/s{mfu}"
    if result.wait_p99_ms is not None:
        share = 100 * (result.wait_share or 0.0)
        yield "waiting", f"{share:.2f}% of the time for data, p99 {result.wait_p99_ms:.3f} ms"
    yield "memory", format_size(result.memory_bytes)
    yield "time", duration(result.seconds)
    yield "checkpoint", str(result.checkpoint)
    for note in result.notes:
        yield "note", note
