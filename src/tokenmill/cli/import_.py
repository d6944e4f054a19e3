"""`tokenmill import`: files of another project in, a store out."""

from typing import Annotated

import typer

from tokenmill.cli import formats as fmt
from tokenmill.cli import options as opt
from tokenmill.cli.stopping import same_command, stoppable

KEPT = "every part that was finished is committed and stays"


def import_(
    path: fmt.ForeignPath,
    tokenizer: opt.Tokenizer,
    out: fmt.OutStore,
    from_: fmt.From = None,
    dtype: fmt.Dtype = None,
    split_at_eos: fmt.SplitAtEos = False,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="NAME",
            show_default="val where a file's name says so, else train",
            rich_help_panel=fmt.READ,
            help="The split that all documents go to.",
        ),
    ] = None,
    eos: fmt.EosToken = None,
    settings: fmt.Settings = None,
    workers: fmt.Threads = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Make a store of another project's token files. The same command again resumes.

    Documents are kept where the format has borders between them. Every id is checked against the
    tokenizer, and where its end-of-text stands is found and written down. Nothing that could
    execute, like a pickle, is ever loaded.

    \b
    Examples:
      tokenmill import data/wiki_text_document -t tokenizer.json -o my-store
      tokenmill import fineweb10B/ --from llmc --split-at-eos -t gpt2/ -o my-store
    """
    import tokenmill
    from tokenmill.cli.progress import watch_amount

    with (
        stoppable(KEPT, command=same_command()),
        watch_amount("importing", quiet=quiet) as on_progress,
    ):
        result = tokenmill.import_store(
            path,
            tokenizer=tokenizer,
            out=out,
            format=None if from_ is None else str(from_),
            dtype=dtype,
            split_at_eos=split_at_eos,
            split=split,
            eos=eos,
            workers=workers,
            on_progress=on_progress,
            **fmt.parse_settings(settings),
        )
    fmt.import_result(result, as_json=as_json)
