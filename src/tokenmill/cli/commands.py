"""The commands: each takes its options, calls one function of the library, shows the result."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.options import same_command, stoppable
from tokenmill.options import (
    BUILD_PANELS,
    NEEDED,
    PACKINGS,
    BuildOptions,
    DiagnoseOptions,
    FinishOptions,
    PlanOptions,
)
from tokenmill.words import listed

KEPT_UNITS = "every unit that was finished is committed and stays"


@opt.command(BuildOptions, panels=BUILD_PANELS)
def build(
    *,
    inputs: opt.Inputs,
    options: dict[str, Any],
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    list_corpora: opt.ListCorpora = False,  # noqa: ARG001 (answered before anything else)
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Turn text into a store of tokens. The same command again resumes.

    Work is cut into units; a finished unit is committed and survives any crash. New input files are
    added by the next run, and what is there already keeps its bytes.

    \b
    Examples:
      tokenmill build corpus/ -t tokenizer.json -o my-store
      tokenmill build 'data/*.jsonl.zst' -t llama/ -o my-store --val 0.01 --memory 4GB
      tokenmill build fineweb-edu --limit 1000000 -t llama/ -o s3://bucket/my-store
      tokenmill build notes.txt -t bytes -o my-store --separator '\\n\\n'
      tokenmill build chats.jsonl -t qwen/ -o my-store --format chat
      tokenmill build data/ -t llama/ -o my-store --runner ray --address auto
      tokenmill build data/ -t llama/ -o my-store --part 3/64
    """
    import tokenmill
    from tokenmill.cli import show
    from tokenmill.cli.progress import BuildView, watch

    opt.note_shadowed(inputs, quiet=quiet)
    if dry_run:
        with stoppable("nothing was written"):
            planned = tokenmill.plan(inputs, **options)
        show.plan_result(planned, as_json=as_json)
        return
    with stoppable(KEPT_UNITS, command=same_command()), watch(BuildView(), quiet=quiet) as tell:
        result = tokenmill.build(inputs, on_progress=tell, **options)
    show.build_result(result, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill plan`: what a build would do and need, from a quick sample.


@opt.command(
    PlanOptions,
    panels=BUILD_PANELS,
    without=(
        "max_rejects",
        "pin",
        "profile",
        "monitor",
        "runner",
        "address",
        "part",
        "prune",
        "rebuild",
    ),
)
def plan(
    *,
    inputs: opt.Inputs,
    options: dict[str, Any],
    as_json: opt.Json = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Say what a build would take: units, tokens, disk, memory, time. Writes nothing.

    Figures come from encoding a small sample of the input with the real tokenizer.

    \b
    Example:
      tokenmill plan data/ -t tokenizer.json
    """
    import tokenmill
    from tokenmill.cli import show

    with stoppable("nothing was written"):
        planned = tokenmill.plan(inputs, **options)
    show.plan_result(planned, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill finish`: the parts of a build become a store.

STANDING = "complete; its inputs were not looked at again, which a build without --part does"


@opt.command(FinishOptions)
def finish(
    *,
    store: opt.StorePath,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            rich_help_panel=NEEDED,
            help="The inputs of the parts; needed only where they are URLs that hold a key.",
        ),
    ] = None,
    options: dict[str, Any],
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Make a store of the parts that `build --part` built: check them, write the manifest.

    Every unit must be there; those that are not are named with the part that has them. The result
    is what one build on one machine gives, byte for byte.

    \b
    Example:
      tokenmill finish my-store
    """
    import tokenmill
    from tokenmill.cli import show
    from tokenmill.cli.progress import BuildView, watch

    with (
        stoppable("the parts stay as they are", command=same_command()),
        watch(BuildView(), quiet=quiet) as tell,
    ):
        result = tokenmill.finish(store, inputs or (), on_progress=tell, **options)
    show.build_result(result, as_json=as_json, standing=STANDING)


# -------------------------------------------------------------------------------------------------
# `tokenmill verify`: every checksum, every index, every id, and documents encoded again.


def verify(
    store: opt.StorePath,
    sample: Annotated[
        int,
        typer.Option(
            "--sample",
            metavar="N",
            min=0,
            rich_help_panel="What is checked",
            help="Documents, chosen at random, whose text is read from its source again and "
            "encoded by the reference tokenizer.",
        ),
    ] = 100,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Prove that a store is whole and right. Exits with 1 if it is not.

    Checks the checksum of every file, that every index fits its tokens, that every id is in the
    vocabulary, and that a sample of documents gives the same ids again.

    \b
    Examples:
      tokenmill verify my-store
      tokenmill verify my-store --sample 1000 --json
      tokenmill verify s3://bucket/my-store
    """
    import tokenmill
    from tokenmill.cli import show
    from tokenmill.cli.progress import watch_amount

    with stoppable("nothing was changed"), watch_amount("verifying", quiet=quiet) as on_progress:
        report = tokenmill.verify(store, sample=sample, on_progress=on_progress)
    show.verify_result(report, store=str(store), as_json=as_json)
    if not report.ok:
        raise typer.Exit(1)


# -------------------------------------------------------------------------------------------------
# `tokenmill inspect`: what a store holds, in numbers and in one document.

WHERE = "Where to look"


def inspect(
    store: opt.StorePath,
    doc: Annotated[
        int | None,
        typer.Option(
            "--doc",
            metavar="K",
            show_default=False,
            rich_help_panel=WHERE,
            help="Show document K of the split, counted from 0, with the borders of its tokens.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="NAME",
            show_default="all",
            rich_help_panel=WHERE,
            help="Look at one split: train or val.",
        ),
    ] = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Show what a store holds: lengths, tokens, policies, rejects.

    \b
    Examples:
      tokenmill inspect my-store
      tokenmill inspect my-store --doc 42
    """
    import tokenmill
    from tokenmill.cli import show

    with stoppable("nothing was changed"):
        inspection = tokenmill.inspect(store, split=split, doc=doc)
    show.inspection_result(inspection, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill layout`: what each packing would do with a store, before anyone trains on it.

ROWS = "What is laid out"

if TYPE_CHECKING:
    PackingChoice = str
else:
    PackingChoice = enum.StrEnum("PackingChoice", {name: name for name in PACKINGS})


def layout(
    store: opt.StorePath,
    seq_len: Annotated[
        int,
        typer.Option(
            "--seq-len",
            metavar="TOKENS",
            show_default=False,
            rich_help_panel=NEEDED,
            help="Inputs of a row. A row holds one token more, the label of its last input.",
        ),
    ],
    split: Annotated[
        str,
        typer.Option("--split", metavar="NAME", rich_help_panel=ROWS, help="The split to lay out."),
    ] = "train",
    packing: Annotated[
        list[PackingChoice] | None,
        typer.Option(
            "--packing",
            metavar="NAME",
            show_default="all",
            rich_help_panel=ROWS,
            help=listed([f"{name} ({what})" for name, what in PACKINGS.items()], "or")
            + ". May be given repeatedly.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="ROWS",
            show_default=False,
            rich_help_panel=ROWS,
            help="Rows of a step, those of all ranks together: shows the steps of an epoch.",
        ),
    ] = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Show what each packing makes of a store: rows, padding, split and dropped tokens.

    Every token is accounted for. best-fit is planned on the way; its plan is kept in the store's
    folder layouts/ (or in the user's cache, if that cannot be written) for the training to come.

    \b
    Examples:
      tokenmill layout my-store --seq-len 2048
      tokenmill layout my-store --seq-len 8192 --packing best-fit --batch-size 512
    """
    import tokenmill
    from tokenmill.cli import show
    from tokenmill.cli.progress import watch_amount
    from tokenmill.words import count

    def documents(number: int) -> str:
        return count(number, "document")

    with (
        stoppable("no plan was kept"),
        watch_amount("planning", shown=documents, quiet=quiet) as on_progress,
    ):
        report = tokenmill.layout(
            store,
            seq_len=seq_len,
            split=split,
            packings=packing or None,
            batch_size=batch_size,
            on_progress=on_progress,
        )
    show.layout_result(report, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill diagnose`: is a training starved, by what, and what would help.


@opt.command(DiagnoseOptions)
def diagnose(
    *,
    inputs: opt.MaybeInputs = None,
    options: dict[str, Any],
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
    from tokenmill.cli import show
    from tokenmill.cli.progress import watch_line

    def said(number: int, steps: int, what: str) -> str:
        return f"[{number}/{steps}] {what}"

    with stoppable("nothing was kept"), watch_line(said, each=True, quiet=quiet) as on_step:
        found = tokenmill.diagnose(inputs or (), on_step=on_step, **options)
    show.diagnosis_result(found, report=options["report"], as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill demo`: everything once, on what every Python installation has.


def demo(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Where the demo's store is written."),
    ] = Path("demo-store"),
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """See all of it work, in under a minute and without a download.

    Builds a store from the source files of Python's standard library, verifies it, looks inside,
    reads it as training would, and compares the speed with the usual ways on the same text.

    \b
    Example:
      tokenmill demo
    """
    from tokenmill.cli.show import tell
    from tokenmill.demo import demo_steps

    with stoppable("the demo can be started again at any time", command=same_command()):
        for step in demo_steps(out):
            tell(step)
