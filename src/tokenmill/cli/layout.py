"""`tokenmill layout`: what each packing would do with a store, before anyone trains on it."""

import enum
from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.stopping import stoppable

ROWS = "What is laid out"


class PackingChoice(enum.StrEnum):
    CONCAT = "concat"
    BEST_FIT = "best-fit"
    PAD = "pad"


def layout(
    store: opt.StorePath,
    seq_len: Annotated[
        int,
        typer.Option(
            "--seq-len",
            metavar="TOKENS",
            show_default=False,
            rich_help_panel=opt.NEEDED,
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
            help="concat (all documents end to end, cut where a row is full), best-fit (whole "
            "documents, least padding) or pad (one document to a row). May be given repeatedly.",
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
    from tokenmill.cli import reports
    from tokenmill.cli.numbers import count
    from tokenmill.cli.progress import watch_amount

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
    reports.layout_result(report, as_json=as_json)
