"""`tokenmill build`: text files in, a store out."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.options import same_command, stoppable

KEPT_UNITS = "every unit that was finished is committed and stays"


def build(
    inputs: opt.Inputs,
    tokenizer: opt.Tokenizer,
    out: opt.Out,
    text_field: opt.TextField = "text",
    separator: opt.Separator = None,
    format: opt.Format = opt.FormatChoice.TEXT,  # noqa: A002 (the option's name)
    template: opt.Template = None,
    prompt_field: opt.PromptField = "prompt",
    completion_field: opt.CompletionField = "completion",
    messages_field: opt.MessagesField = None,
    chat_template: opt.ChatTemplate = None,
    chat_date: opt.ChatDate = None,
    chat_template_kwargs: opt.ChatTemplateKwargs = None,
    train_on: opt.TrainOn = opt.TrainOnChoice.ASSISTANT,
    max_length: opt.MaxLength = None,
    too_long: opt.TooLong = opt.TooLongChoice.SPLIT,
    limit: opt.Limit = None,
    val: opt.Val = 0.0,
    max_rejects: opt.MaxRejects = 0.01,
    eos: opt.Eos = None,
    no_eos: opt.NoEos = False,
    bos: opt.Bos = False,
    special_tokens: opt.SpecialTokens = opt.SpecialTokensChoice.TEXT,
    engine: opt.Engine = opt.EngineChoice.AUTO,
    workers: opt.Workers = None,
    memory: opt.Memory = None,
    pin: opt.Pin = False,
    runner: opt.Runner = opt.RunnerChoice.LOCAL,
    address: opt.Address = None,
    part: opt.Part = None,
    profile: opt.Profile = None,
    monitor: opt.Monitor = None,
    prune: opt.Prune = False,
    rebuild: opt.Rebuild = False,
    verify_sources: opt.VerifySources = False,
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
    from tokenmill.builder.run import BuildOptions
    from tokenmill.cli import show
    from tokenmill.cli.progress import watch

    opt.note_shadowed(inputs, quiet=quiet)
    options = BuildOptions(
        text_field=text_field,
        separator=opt.unescape(separator),
        format=str(format),
        template=opt.unescape(template, "--template"),
        prompt_field=prompt_field,
        completion_field=completion_field,
        messages_field=messages_field,
        chat_template=chat_template,
        chat_date=chat_date,
        chat_template_kwargs=chat_template_kwargs,
        train_on=str(train_on),
        max_length=max_length,
        too_long=str(too_long),
        limit=limit,
        val=val,
        max_rejects=max_rejects,
        eos=opt.end_token(eos, no_eos=no_eos),
        bos=bos,
        special_tokens=str(special_tokens),
        engine=str(engine),
        workers=workers,
        memory=memory,
        prune=prune,
        rebuild=rebuild,
        verify_sources=verify_sources,
        pin=pin,
        runner=str(runner),
        address=address,
        part=part,
    )
    if dry_run:
        with stoppable("nothing was written"):
            planned = tokenmill.plan(inputs, tokenizer=tokenizer, out=out, **options)
        show.plan_result(planned, as_json=as_json)
        return
    with stoppable(KEPT_UNITS, command=same_command()), watch(quiet=quiet) as tell:
        result = tokenmill.build(
            inputs,
            tokenizer=tokenizer,
            out=out,
            profile=profile,
            monitor=monitor,
            on_progress=tell,
            **options,
        )
    show.build_result(result, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill plan`: what a build would do and need, from a quick sample.


def plan(
    inputs: opt.Inputs,
    tokenizer: opt.Tokenizer,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            show_default=False,
            rich_help_panel=opt.NEEDED,
            help="Optional: the store that is planned for; what it holds already is taken off.",
        ),
    ] = None,
    text_field: opt.TextField = "text",
    separator: opt.Separator = None,
    format: opt.Format = opt.FormatChoice.TEXT,  # noqa: A002 (the option's name)
    template: opt.Template = None,
    prompt_field: opt.PromptField = "prompt",
    completion_field: opt.CompletionField = "completion",
    messages_field: opt.MessagesField = None,
    chat_template: opt.ChatTemplate = None,
    chat_date: opt.ChatDate = None,
    chat_template_kwargs: opt.ChatTemplateKwargs = None,
    train_on: opt.TrainOn = opt.TrainOnChoice.ASSISTANT,
    max_length: opt.MaxLength = None,
    too_long: opt.TooLong = opt.TooLongChoice.SPLIT,
    limit: opt.Limit = None,
    val: opt.Val = 0.0,
    eos: opt.Eos = None,
    no_eos: opt.NoEos = False,
    bos: opt.Bos = False,
    special_tokens: opt.SpecialTokens = opt.SpecialTokensChoice.TEXT,
    engine: opt.Engine = opt.EngineChoice.AUTO,
    workers: opt.Workers = None,
    memory: opt.Memory = None,
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
        planned = tokenmill.plan(
            inputs,
            tokenizer=tokenizer,
            out=out or "",
            text_field=text_field,
            separator=opt.unescape(separator),
            format=str(format),
            template=opt.unescape(template, "--template"),
            prompt_field=prompt_field,
            completion_field=completion_field,
            messages_field=messages_field,
            chat_template=chat_template,
            chat_date=chat_date,
            chat_template_kwargs=chat_template_kwargs,
            train_on=str(train_on),
            max_length=max_length,
            too_long=str(too_long),
            limit=limit,
            val=val,
            eos=opt.end_token(eos, no_eos=no_eos),
            bos=bos,
            special_tokens=str(special_tokens),
            engine=str(engine),
            workers=workers,
            memory=memory,
        )
    show.plan_result(planned, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill finish`: the parts of a build become a store.

STANDING = "complete; its inputs were not looked at again, which a build without --part does"


def finish(
    store: opt.StorePath,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            rich_help_panel=opt.NEEDED,
            help="The inputs of the parts; needed only where they are URLs that hold a key.",
        ),
    ] = None,
    prune: opt.Prune = False,
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
    from tokenmill.cli.progress import watch

    with (
        stoppable("the parts stay as they are", command=same_command()),
        watch(quiet=quiet) as tell,
    ):
        result = tokenmill.finish(store, inputs or (), prune=prune, on_progress=tell)
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
    from tokenmill.cli import show
    from tokenmill.inspection import inspect_store

    with stoppable("nothing was changed"):
        inspection = inspect_store(store, split=split, doc=doc)
    show.inspection_result(inspection, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill layout`: what each packing would do with a store, before anyone trains on it.

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
