"""`tokenmill verify`: every checksum, every index, every id, and documents encoded again."""

from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.stopping import stoppable


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
    from tokenmill.cli import reports
    from tokenmill.cli.progress import watch_amount

    with stoppable("nothing was changed"), watch_amount("verifying", quiet=quiet) as on_progress:
        report = tokenmill.verify(store, sample=sample, on_progress=on_progress)
    reports.verify_result(report, store=str(store), as_json=as_json)
    if not report.ok:
        raise typer.Exit(1)
