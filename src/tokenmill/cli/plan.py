"""`tokenmill plan`: what a build would do and need, from a quick sample."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.stopping import stoppable


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
    from tokenmill.cli import reports

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
    reports.plan_result(planned, as_json=as_json)
