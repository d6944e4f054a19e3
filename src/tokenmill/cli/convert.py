"""`tokenmill convert`: from one project's format to another's."""

from tokenmill.cli import formats as fmt
from tokenmill.cli import options as opt
from tokenmill.cli.stopping import same_command, stoppable

KEPT = "every part that was finished stays"


def convert(
    path: fmt.ForeignPath,
    to: fmt.To,
    out: fmt.OutFolder,
    from_: fmt.From = None,
    tokenizer: fmt.OptionalTokenizer = None,
    dtype: fmt.Dtype = None,
    split_at_eos: fmt.SplitAtEos = False,
    eos: fmt.EosToken = None,
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
    """Write token files of one format in another. The same command again resumes.

    Raw token files (megatron, datatrove, olmo, nanogpt, llmc) are read where they lie; others
    become a store first, inside the out folder, which is removed at the end.

    \b
    Examples:
      tokenmill convert data/wiki_text_document --to mds --out mds/ --seq-len 2048
      tokenmill convert tokens/ --from datatrove --to megatron --out megatron/ --merge
    """
    import tokenmill
    from tokenmill.cli.numbers import count
    from tokenmill.cli.progress import watch_amount

    with (
        stoppable(KEPT, command=same_command()),
        watch_amount("converting", shown=lambda n: count(n, "token"), quiet=quiet) as on_progress,
    ):
        result = tokenmill.convert(
            path,
            to=str(to),
            out=out,
            format=None if from_ is None else str(from_),
            tokenizer=tokenizer,
            dtype=dtype,
            split_at_eos=split_at_eos,
            eos=eos,
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
