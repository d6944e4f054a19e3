"""The options of `export`, `import` and `convert`, and how their results are shown."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.options import same_command, stoppable
from tokenmill.errors import UsageError
from tokenmill.options import NEEDED, PACKINGS, SPEED, BuildOptions
from tokenmill.visible import visible
from tokenmill.words import listed

if TYPE_CHECKING:
    from tokenmill.interop.export import ExportResult
    from tokenmill.interop.imports import ImportResult


READ = "How files are read"
WRITTEN = "How files are written"


class FormatChoice(enum.StrEnum):
    MEGATRON = "megatron"
    DATATROVE = "datatrove"
    OLMO = "olmo"
    NANOGPT = "nanogpt"
    LLMC = "llmc"
    MDS = "mds"
    LITDATA = "litdata"
    ARROW = "arrow"
    PARQUET = "parquet"
    PT = "pt"
    NPZ = "npz"


NAMES = ", ".join(FormatChoice)

ForeignPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        rich_help_panel=NEEDED,
        help="A file, a prefix (of .bin and .idx) or a folder, which means every file below it.",
    ),
]
To = Annotated[
    FormatChoice,
    typer.Option(
        "--to",
        metavar="FORMAT",
        show_default=False,
        rich_help_panel=NEEDED,
        help=f"{NAMES}. What each keeps and loses: docs/formats.md.",
    ),
]
From = Annotated[
    FormatChoice | None,
    typer.Option(
        "--from",
        metavar="FORMAT",
        show_default="as the files say",
        rich_help_panel=READ,
        help=f"{NAMES}. Needed where the bytes do not say it.",
    ),
]
OutFolder = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        show_default=False,
        rich_help_panel=NEEDED,
        help="Where the files are written: a new or empty folder.",
    ),
]
Splits = Annotated[
    list[str] | None,
    typer.Option(
        "--split",
        metavar="NAME",
        show_default="all",
        rich_help_panel=WRITTEN,
        help="The split to write. May be given repeatedly.",
    ),
]
OutStore = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        show_default=False,
        rich_help_panel=NEEDED,
        help="Where the store is written.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        show_default="physical cores",
        rich_help_panel=SPEED,
        help="Parts that are worked on at a time, each on a thread. Never changes a byte.",
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        metavar="TOKENS",
        show_default="whole documents",
        rich_help_panel=WRITTEN,
        help="Write rows of so many tokens: mds, litdata, arrow, parquet; pt and npz need it.",
    ),
]
Packing = Annotated[
    str,
    typer.Option(
        "--packing",
        metavar="NAME",
        rich_help_panel=WRITTEN,
        help=f"How documents share rows: {listed([*PACKINGS], 'or')}, as layout shows them.",
    ),
]
FileTokens = Annotated[
    int | None,
    typer.Option(
        "--file-tokens",
        metavar="N",
        show_default="the format's own",
        rich_help_panel=WRITTEN,
        help="Tokens of one file, about, where the format leaves that open.",
    ),
]
LinkFlag = Annotated[
    bool,
    typer.Option(
        "--link",
        rich_help_panel=WRITTEN,
        help="Hard links to the store's own files instead of copies: megatron, datatrove, olmo, "
        "and nanogpt for one shard. A store's files are never written to again, so links stay "
        "as they are.",
    ),
]
LinkOrCopy = Annotated[
    bool,
    typer.Option(
        "--link-or-copy",
        rich_help_panel=WRITTEN,
        help="The same, and copies where the file system cannot link.",
    ),
]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge",
        rich_help_panel=WRITTEN,
        help="megatron: one .bin and .idx for each split instead of one per shard.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        show_default=False,
        rich_help_panel=WRITTEN,
        help="A setting that one format alone has; docs/formats.md lists them. May be given "
        "repeatedly.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        show_default="as the files say, else uint16",
        rich_help_panel=READ,
        help="Type of the ids in files that do not say it: uint16, uint32, int32, ...",
    ),
]
SplitAtEos = Annotated[
    bool,
    typer.Option(
        "--split-at-eos",
        rich_help_panel=READ,
        help="Cut documents at the end-of-text id, where the format has no borders (nanogpt, "
        "llmc). Otherwise a file is one document.",
    ),
]
EosToken = Annotated[
    str | None,
    typer.Option(
        "--eos",
        metavar="TOKEN",
        show_default="the tokenizer's own",
        rich_help_panel=READ,
        help="The end-of-text token of these files.",
    ),
]
OptionalTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        "-t",
        metavar="PATH|ID",
        show_default="unknown",
        rich_help_panel=READ,
        help="The tokenizer that made the ids; needed where its end-of-text is.",
    ),
]


def link_mode(link: bool, link_or_copy: bool) -> str | bool:
    """What the library takes as `link`."""
    return "if-possible" if link_or_copy else link


def parse_settings(given: list[str] | None, *, merge: bool = False) -> dict[str, str | int | bool]:
    """'name=value' strings as keyword arguments."""
    found: dict[str, str | int | bool] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(
                f"--set {text} is not of the form name=value", hint="for example: --set merge=yes"
            )
        found[name] = value
    return {**found, "merge": True} if merge else found


def export_result(result: ExportResult, *, as_json: bool) -> None:
    """Print what an export made."""
    from tokenmill.cli.output import print_json
    from tokenmill.cli.show import facts
    from tokenmill.words import count, duration, format_size, rate

    if as_json:
        print_json(result)
        return
    if result.nothing_to_do:
        print(f"nothing to do: {visible(result.out)} is complete")
    linked = f", {format_size(result.linked_bytes)} of it links" if result.linked_bytes else ""
    kept = f", {count(result.parts_resumed)} kept from before" if result.parts_resumed else ""
    speed = rate(result.bytes - result.linked_bytes, result.seconds)
    facts(
        [
            ("folder", result.out),
            ("format", result.format),
            ("documents", count(result.documents)),
            (
                "tokens",
                "\n".join(f"{visible(name)}: {count(n)}" for name, n in result.splits.items()),
            ),
            ("files", f"{count(result.files)}, {format_size(result.bytes)}{linked}"),
            ("parts", f"{count(result.parts)}{kept}"),
            ("time", f"{duration(result.seconds)}" + (f", {speed}" if speed else "")),
            ("notes", "\n".join(map(visible, result.notes))),
        ]
    )


def import_result(result: ImportResult, *, as_json: bool) -> None:
    """Print what an import made."""
    import shlex

    from tokenmill.cli.output import print_json
    from tokenmill.cli.show import facts, next_steps, splits_text
    from tokenmill.words import count, duration, rate

    if as_json:
        print_json(result)
        return
    if result.nothing_to_do:
        print(f"nothing to do: {visible(result.store)} is complete and up to date")
    kept = f", {count(result.parts_resumed)} kept from before" if result.parts_resumed else ""
    facts(
        [
            ("store", result.store),
            ("format", result.format),
            ("documents", count(result.documents)),
            ("tokens", f"{count(result.tokens)} as {result.dtype}"),
            ("splits", splits_text(result.splits)),
            ("eos", result.eos),
            ("parts", f"{count(result.parts)}{kept}"),
            ("time", f"{duration(result.seconds)}, {rate(result.bytes, result.seconds)}"),
            ("notes", "\n".join(map(visible, result.notes))),
        ]
    )
    store = shlex.quote(result.store)
    next_steps(f"tokenmill inspect {store}", f"tokenmill verify {store}")


# -------------------------------------------------------------------------------------------------
# `tokenmill export`: a store in, files of another project out.

KEPT_PARTS = "every part that was finished stays"


def export(
    store: opt.StorePath,
    to: To,
    out: OutFolder,
    split: Splits = None,
    seq_len: SeqLen = None,
    packing: Packing = "concat",
    file_tokens: FileTokens = None,
    link: LinkFlag = False,
    link_or_copy: LinkOrCopy = False,
    merge: Merge = False,
    settings: Settings = None,
    workers: Threads = None,
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
    from tokenmill.cli.progress import watch_amount
    from tokenmill.words import count

    with (
        stoppable(KEPT_PARTS, command=same_command()),
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
            link=link_mode(link, link_or_copy),
            workers=workers,
            on_progress=on_progress,
            **parse_settings(settings, merge=merge),
        )
    export_result(result, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill import`: files of another project in, a store out.

KEPT_IMPORT = "every part that was finished is committed and stays"


def import_(
    path: ForeignPath,
    tokenizer: Annotated[str, opt.how(BuildOptions, "tokenizer")],
    out: OutStore,
    from_: From = None,
    dtype: Dtype = None,
    split_at_eos: SplitAtEos = False,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="NAME",
            show_default="val where a file's name says so, else train",
            rich_help_panel=READ,
            help="The split that all documents go to.",
        ),
    ] = None,
    eos: EosToken = None,
    settings: Settings = None,
    workers: Threads = None,
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
        stoppable(KEPT_IMPORT, command=same_command()),
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
            **parse_settings(settings),
        )
    import_result(result, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill convert`: from one project's format to another's.


def convert(
    path: ForeignPath,
    to: To,
    out: OutFolder,
    from_: From = None,
    tokenizer: OptionalTokenizer = None,
    dtype: Dtype = None,
    split_at_eos: SplitAtEos = False,
    eos: EosToken = None,
    split: Splits = None,
    seq_len: SeqLen = None,
    packing: Packing = "concat",
    file_tokens: FileTokens = None,
    link: LinkFlag = False,
    link_or_copy: LinkOrCopy = False,
    merge: Merge = False,
    settings: Settings = None,
    workers: Threads = None,
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
    from tokenmill.cli.progress import watch_amount
    from tokenmill.words import count

    with (
        stoppable(KEPT_PARTS, command=same_command()),
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
            link=link_mode(link, link_or_copy),
            workers=workers,
            on_progress=on_progress,
            **parse_settings(settings, merge=merge),
        )
    export_result(result, as_json=as_json)
