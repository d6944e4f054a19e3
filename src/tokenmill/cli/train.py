"""`tokenmill train`: a store in, a trained model out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tokenmill.cli import options as opt
from tokenmill.cli.options import same_command, stoppable
from tokenmill.cli.output import print_json
from tokenmill.cli.progress import BLOCKS, bar_above, eta, one_line, watch
from tokenmill.trainer.options import TrainOptions
from tokenmill.words import clock, compact, count, duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

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
    with stoppable(kept), watch(TrainView(), quiet=quiet) as tell:
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

CURVE_POINTS = 400
"""Losses that are remembered for the curve; of more, every other one is dropped."""


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
        is_last = progress.step == progress.steps
        if progress.phase != "training" or progress.loss is None or not (is_due or is_last):
            return None
        return "  ".join(
            (
                f"[{clock(progress.seconds)}]",
                f"step {count(progress.step)}/{count(progress.steps)}",
                f"loss {progress.loss:.4f}",
                *figures(progress),
                eta(progress.eta_seconds),
            )
        )

    def draw(self, progress: TrainProgress, *, width: int) -> RenderableType:
        if progress.loss is None:
            return one_line(f"{progress.phase} ...")
        if progress.phase == "training":
            self._losses.append(progress.loss)
            if len(self._losses) > CURVE_POINTS:
                del self._losses[1::2]
        val = "" if progress.val_loss is None else f"   val {progress.val_loss:.4f}"
        rate = f"   lr {progress.learning_rate:.2e}   norm {progress.grad_norm:.2f}"
        words = f"loss {progress.loss:.4f}{val}{rate}"
        phase = "" if progress.phase == "training" else f"   {progress.phase} ..."
        room = max(0, min(40, width - len(words) - len(phase) - 3))
        top = one_line(words, "bold").append(f"   {curve(self._losses, room)}", style="cyan")
        where = f"step {count(progress.step)}/{count(progress.steps)}"
        return bar_above(
            [top.append(phase), one_line("   ".join(figures(progress)))],
            done=progress.step,
            total=progress.steps,
            figures=f"{where}  {eta(progress.eta_seconds)}",
            width=width,
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


def curve(values: list[float], width: int) -> str:
    """The values as blocks of eight heights, the last ones at the right."""
    if width < 8 or len(values) < 2:
        return ""
    step = max(1.0, len(values) / width)
    points = [values[int(number * step)] for number in range(min(width, len(values)))]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    return "".join(BLOCKS[1 + round(7 * (value - low) / span)] for value in points)


def show_result(result: TrainResult, *, as_json: bool) -> None:
    """The summary, once, on stdout."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(result)
        return
    from tokenmill.cli.show import facts

    facts(summary(result))


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
