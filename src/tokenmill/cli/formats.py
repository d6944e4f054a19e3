"""The options of `export`, `import` and `convert`, and how their results are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import options as opt
from tokenmill.cli.options import same_command, stoppable
from tokenmill.errors import UsageError
from tokenmill.interop.base import (
    PANELS,
    WRITTEN,
    ConvertRequest,
    ExportRequest,
    ImportRequest,
)
from tokenmill.visible import visible

if TYPE_CHECKING:
    from tokenmill.interop.export import ExportResult
    from tokenmill.interop.imports import ImportResult


LinkOrCopy = Annotated[
    bool,
    typer.Option(
        "--link-or-copy",
        rich_help_panel=WRITTEN,
        help="As --link, and copies where the file system cannot link.",
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


def written(
    options: dict[str, Any], link_or_copy: bool, settings: list[str] | None, *, merge: bool
) -> dict[str, Any]:
    """What `export` and `convert` take, of all flags."""
    if link_or_copy:
        options["link"] = "if-possible"
    options["split"] = options["split"] or None
    return {**options, **parse_settings(settings, merge=merge)}


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


@opt.command(ExportRequest, panels=PANELS)
def export(
    *,
    store: opt.StorePath,
    options: dict[str, Any],
    link_or_copy: LinkOrCopy = False,
    merge: Merge = False,
    settings: Settings = None,
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
        asked = written(options, link_or_copy, settings, merge=merge)
        result = tokenmill.export(store, on_progress=on_progress, **asked)
    export_result(result, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill import`: files of another project in, a store out.

KEPT_IMPORT = "every part that was finished is committed and stays"


@opt.command(ImportRequest, panels=PANELS)
def import_(
    *,
    path: opt.ForeignPath,
    options: dict[str, Any],
    settings: Settings = None,
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
        asked = {**options, **parse_settings(settings)}
        result = tokenmill.import_(path, on_progress=on_progress, **asked)
    import_result(result, as_json=as_json)


# -------------------------------------------------------------------------------------------------
# `tokenmill convert`: from one project's format to another's.


@opt.command(ConvertRequest, panels=PANELS)
def convert(
    *,
    path: opt.ForeignPath,
    options: dict[str, Any],
    link_or_copy: LinkOrCopy = False,
    merge: Merge = False,
    settings: Settings = None,
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
        asked = written(options, link_or_copy, settings, merge=merge)
        result = tokenmill.convert(path, on_progress=on_progress, **asked)
    export_result(result, as_json=as_json)
