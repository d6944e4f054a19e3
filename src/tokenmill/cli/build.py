"""`tokenmill build`: text files in, a store out."""

from tokenmill.cli import options as opt
from tokenmill.cli.stopping import same_command, stoppable

KEPT = "every unit that was finished is committed and stays"


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
    from tokenmill.builder.build import BuildOptions
    from tokenmill.cli import render, reports
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
        reports.plan_result(planned, as_json=as_json)
        return
    with stoppable(KEPT, command=same_command()), watch(quiet=quiet) as tell:
        result = tokenmill.build(
            inputs,
            tokenizer=tokenizer,
            out=out,
            profile=profile,
            monitor=monitor,
            on_progress=tell,
            **options,
        )
    render.build_result(result, as_json=as_json)
