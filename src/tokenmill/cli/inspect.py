"""`tokenmill inspect`: what a store holds, in numbers and in one document."""

from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.stopping import stoppable

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
    from tokenmill.cli import show
    from tokenmill.inspection import inspect_store

    with stoppable("nothing was changed"):
        inspection = inspect_store(store, split=split, doc=doc)
    show.inspection_result(inspection, as_json=as_json)
