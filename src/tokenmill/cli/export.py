"""`tokenmill export`: a store in, files of another project out."""

from tokenmill.cli import formats as fmt
from tokenmill.cli import options as opt
from tokenmill.cli.stopping import same_command, stoppable

KEPT = "every part that was finished stays"


def export(
    store: opt.StorePath,
    to: fmt.To,
    out: fmt.OutFolder,
    split: fmt.Splits = None,
    seq_len: fmt.SeqLen = None,
    packing: fmt.Packing = "concat",
    file_tokens: fmt.FileTokens = None,
    link: fmt.LinkFlag = False,
    link_or_copy: fmt.LinkOrCopy = False,
    merge: fmt.Merge = False,
    settings: fmt.Settings = None,
    workers: fmt.Threads = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,  # noqa: ARG001 (read at the process border, in main.run)
) -> None:
    """Write a store in another project's format. The same command again resumes.

    The format's index comes last, so an export that has one is complete.

    \b
    Examples:
      tokenmill export my-store --to megatron --out megatron/ --link
      tokenmill export my-store --to llmc --out llmc/ --file-tokens 100000000
      tokenmill export my-store --to mds --out mds/ --seq-len 2048
    """
    import tokenmill
    from tokenmill.cli.numbers import count
    from tokenmill.cli.progress import watch_amount

    with (
        stoppable(KEPT, command=same_command()),
        watch_amount("exporting", shown=lambda n: count(n, "token"), quiet=quiet) as on_progress,
    ):
        result = tokenmill.export_store(
            store,
            to=str(to),
            out=out,
            split=split or None,
            seq_len=seq_len,
            packing=packing,
            file_tokens=file_tokens,
            link=fmt.link_mode(link, link_or_copy),
            workers=workers,
            on_progress=on_progress,
            **fmt.parse_settings(settings, merge=merge),
        )
    fmt.export_result(result, as_json=as_json)
