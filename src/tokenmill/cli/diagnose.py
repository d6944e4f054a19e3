"""`tokenmill diagnose`: is a training starved, by what, and what would mend it."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.options import stoppable

GPU = "What the GPU takes"
CLOCK = "How it is measured"
BESIDE = "What is drawn beside it"


def diagnose(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            rich_help_panel=opt.NEEDED,
            show_default=False,
            help="The text of your training: any input that `tokenmill build` reads. May be left "
            "out with --run, --stalls or --timeline.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="PATH|ID",
            show_default=False,
            rich_help_panel=opt.NEEDED,
            help="The tokenizer of your training, as for `tokenmill build`.",
        ),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            "--tokens-per-second",
            metavar="N",
            show_default=False,
            rich_help_panel=GPU,
            help="What one GPU takes, from your own run: better than any estimate.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            show_default="each of them",
            rich_help_panel=GPU,
            help="Estimate it for a model: mini (10M parameters), small (124M), medium (850M), "
            "large (1.8B) or tiny.",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            metavar="NAME",
            rich_help_panel=GPU,
            help="The GPU of the estimate, such as H100, A100 or RTX4090.",
        ),
    ] = "H200",
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus",
            metavar="N",
            rich_help_panel=GPU,
            help="GPUs that this machine has to feed.",
        ),
    ] = 1,
    mfu: Annotated[
        float,
        typer.Option(
            "--mfu",
            metavar="SHARE",
            rich_help_panel=GPU,
            help="Share of its peak that the GPU reaches, for the estimate.",
        ),
    ] = 0.4,
    seq_len: Annotated[
        int,
        typer.Option(
            "--seq-len", metavar="TOKENS", rich_help_panel=GPU, help="Tokens of a training row."
        ),
    ] = 1024,
    text_field: opt.TextField = "text",
    separator: opt.Separator = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="S",
            rich_help_panel=CLOCK,
            help="How long each way is timed, start-up not counted.",
        ),
    ] = 1.0,
    sample_mb: Annotated[
        float,
        typer.Option(
            "--sample-mb",
            metavar="MB",
            rich_help_panel=CLOCK,
            help="How much of the text is used, taken from up to 8 of its files.",
        ),
    ] = 32.0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            show_default="the cores",
            rich_help_panel=CLOCK,
            help="Processes of the ways that have any.",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            rich_help_panel=CLOCK,
            help="Also try other worker counts and batch sizes, and recommend workers, batch and "
            "memory for this machine.",
        ),
    ] = False,
    stalls: Annotated[
        Path | None,
        typer.Option(
            "--stalls",
            metavar="FILE",
            show_default=False,
            rich_help_panel=BESIDE,
            help="A report of tokenmill.StallMeter, as JSON.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="FOLDER",
            show_default=False,
            rich_help_panel=BESIDE,
            help="A training run with its metrics.jsonl.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            show_default=False,
            rich_help_panel=BESIDE,
            help="The time line that `tokenmill build --monitor FILE` wrote.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            show_default=False,
            rich_help_panel=opt.OUTPUT,
            help="Write an HTML page with plots: one file that needs no network.",
        ),
    ] = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Time your text and tokenizer the ways people do it; say which would starve a GPU.

    Each way runs in a process of its own for a second or so: one sample at a time, in batches,
    joined, in a process pool, in DataLoader workers, and pretokenized through tokenmill. What it
    feeds is held against what the GPU takes.

    \b
    Examples:
      tokenmill diagnose data.jsonl -t tokenizer.json --model small
      tokenmill diagnose data/ -t llama/ --tokens-per-second 450000 --gpus 8 --report report.html
      tokenmill diagnose data.jsonl -t tokenizer.json --sweep
      tokenmill diagnose --run run/ --report report.html
    """
    import tokenmill
    from tokenmill.cli import verdicts

    with stoppable("nothing was kept"), verdicts.watch_steps(quiet=quiet) as on_step:
        found = tokenmill.diagnose(
            inputs or (),
            tokenizer=tokenizer,
            tokens_per_second=tokens_per_second,
            model=model,
            gpu=gpu,
            gpus=gpus,
            mfu=mfu,
            seq_len=seq_len,
            text_field=text_field,
            separator=opt.unescape(separator),
            seconds=seconds,
            sample_mb=sample_mb,
            workers=workers,
            sweep=sweep,
            stalls=stalls,
            timeline=timeline,
            run=run,
            report=report,
            on_step=on_step,
        )
    verdicts.diagnosis_result(found, report=report, as_json=as_json)
