"""How a command gets its arguments and flags.

A command takes the options of a class (see `tokenmill.options`), and by their names the flags that
belong to the command line alone (`CommandFlags`). Imported for the one command that is run: making
all classes of options takes as long as Python takes to start.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tokenmill.errors import UsageError
from tokenmill.options import NEEDED, OUTPUT, RERUN, WRITTEN, flags_of, help_of, option
from tokenmill.sources.base import COMPRESSIONS, FORMATS

_SUFFIXES = ", ".join(form.suffixes[0] for form in FORMATS.values() if form.suffixes)
_INPUTS = (
    f"Files, folders, globs or URLs: {_SUFFIXES} and source code, plain or as "
    f"{', '.join(COMPRESSIONS)}. A folder means every file below it. Or the name of a well-known "
    "corpus (see --list-corpora), if there is no such file here."
)
_TRAINED = (
    "The store, or view of one, that is trained on; or, with --tokenizer, text: any input that"
    " `tokenmill build` reads."
)
_FILES = "A file, a prefix (of .bin and .idx) or a folder, which means every file below it."
_LOADER = (
    "A function that gives your loader, such as my_data:train_loader or data.py:loader. It is told"
    " of `rank`, `world_size`, `epoch` and `skip` (batches used before) what it takes."
)
# What is named before the flags, by the name of the parameter: how it is shown, and its help.
ARGUMENTS = {
    "inputs": ("INPUT", _INPUTS),
    "store": (
        "STORE",
        "The folder that a build wrote, or its URL; or a view of it, which is a file.",
    ),
    "trained": ("STORE|INPUT", _TRAINED),
    "stores": ("STORE...", "Folders that builds wrote, or views of them; what comes first stays."),
    "table": ("TABLE", ""),
    "path": ("PATH", _FILES),
    "paths": ("PATH", ""),
    "loader": ("MODULE:FUNCTION", _LOADER),
    "run": (
        "RUN",
        (
            "The folder of a run or of one of its checkpoints, or a file that a loader's state was"
            " saved to: JSON, or what torch.save wrote."
        ),
    ),
    "text": ("TEXT", "What to look for, exactly as it stands in a document."),
}


# Below the folder that is typed: how deep stores are looked for, and among how many entries.
TAB_DEPTH, TAB_ENTRIES = 2, 2000


def complete_store(incomplete: str) -> list[str]:
    """Stores, and views called .view, whose paths begin like this; nothing where there is none.

    A shell that is told nothing completes files. So it is where a name would have to be quoted:
    shells take what they are told as it is, and zsh evaluates it.
    """
    from tokenmill.files import STORE_MARKS

    found, seen, folders = [], 0, [(incomplete[: incomplete.rfind("/") + 1], TAB_DEPTH)]
    for folder, depth in folders:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            for entry in entries:
                if (seen := seen + 1) > TAB_ENTRIES:
                    return []
                path = folder + entry.name
                if not path.startswith(incomplete):
                    continue
                if not entry.is_dir():
                    is_store = path.endswith(".view")
                else:
                    is_store = any(os.path.lexists(f"{path}/{each}") for each in STORE_MARKS)
                    if not is_store and depth > 0 and not entry.name.startswith("."):
                        folders.append((f"{path}/", depth - 1))
                found += [path] * is_store
    return sorted(found) if all(path == shlex.quote(path) for path in found) else []


def _print_corpora(asked: bool) -> None:
    if not asked:
        return
    from tokenmill.sources.discovery import CORPORA

    for name, corpus in CORPORA.items():
        print(f"{name}\n  {corpus.files}\n  text in 'text': {corpus.holds}")
    raise typer.Exit


def _take_config(context: typer.Context, path: str) -> None:
    """Read the file first, so that what it has need not be given."""
    if not path:
        return
    from tokenmill.config import read_config

    context.meta[CONFIG] = found = read_config(path)
    needed: Any = {name: found[name] for name in ("tokenizer", "out") if name in found}
    context.default_map = {**(context.default_map or {}), **needed}


CONFIG = "tokenmill.config"


@dataclass
class CommandFlags:
    """Flags that are no options of a function; each command has `debug`, read in main.run."""

    config: str = option("", NEEDED, "FILE", short="-c", shown=False, answer=_take_config)
    """A file with options, as TOML: by the names that they have in Python, and `inputs`. What is
    given here too goes before it. Paths in it start at the current folder, not at the file."""
    as_config: bool = option(False, OUTPUT, flag="--config")
    """Print a file of options, for `tokenmill build -c FILE`, which makes the same store."""

    dry_run: bool = option(False, RERUN)
    """Write nothing; show units, tokens, disk, memory and time as plan does."""
    link_or_copy: bool = option(False, WRITTEN)
    """As --link, and copies where the file system cannot link."""
    merge: bool = option(False, WRITTEN)
    """megatron: one .bin and .idx for each split instead of one per shard."""
    settings: list[str] | None = option(None, WRITTEN, "NAME=VALUE", flag="--set")
    """A setting that one format alone has; docs/formats.md lists them. May be given repeatedly."""
    page: str | None = option(None, OUTPUT, flag="--to", choices=("markdown", "croissant"))
    """Print it as a page in Markdown, or as a Croissant description."""
    as_json: bool = option(False, OUTPUT, flag="--json")
    """Print the result as one JSON object on stdout and nothing else there."""
    quiet: bool = option(False, OUTPUT, short="-q")
    """No progress on stderr."""
    list_corpora: bool = option(False, OUTPUT, answer=_print_corpora)
    """Print the corpora that have short names, where they are and what they hold."""
    debug: bool = option(False, OUTPUT)
    """On an error, show the full traceback."""


_ESCAPED = ("separator", "template")


def with_flags(function: Any, home: str, *, without: str = "", also: str = "", **words: str) -> Any:
    """A command with its arguments and the flags of a class, whose values it gets as `options`.

    Flags are listed as the class has them, or panel by panel. Those of the command line alone are
    the ones that its function takes, those in `also`, and --debug. `words` are the help of an
    argument that is not what it is for other commands.
    """
    module, _, name = home.rpartition(".")
    options: type = getattr(importlib.import_module(f"tokenmill.{module}"), name)
    flags = {name: flag for name, flag in flags_of(options).items() if name not in without.split()}
    if panels := getattr(options, "PANELS", ()):
        flags = dict(sorted(flags.items(), key=lambda each: panels.index(each[1].panel)))
    own = inspect.signature(function).parameters
    made, named = [], {}
    for name in filter(ARGUMENTS.__contains__, own):
        metavar, usual = ARGUMENTS[name]
        named[name] = words.get(name, usual)
        shown = typer.Argument(
            metavar=metavar,
            rich_help_panel=NEEDED,
            show_default=False,
            autocompletion=complete_store if metavar.startswith("STORE") else None,
        )
        made.append(
            _parameter(name, Annotated[eval(own[name].annotation), shown], own[name].default)
        )
    declared = {each.name: each for each in dataclasses.fields(options)}
    taken = {"debug", *also.split(), *own}
    shared = [each for each in dataclasses.fields(CommandFlags) if each.name in taken]
    for field in (*map(declared.__getitem__, flags), *shared):
        made += _parameters(field)
    if "config" in taken:
        made.append(_parameter("parsed", typer.Context, inspect.Parameter.empty))

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        context = values.pop("parsed", None)
        asked = {name: _read(values, name, flag.off) for name, flag in flags.items()}
        for name in ("list_corpora", "debug", "config"):
            values.pop(name, None)
        if context is not None:
            found = dict(context.meta.get(CONFIG, {}))
            inputs = found.pop("inputs", None)
            values["inputs"] = values["inputs"] or ([inputs] if isinstance(inputs, str) else inputs)
            asked |= {each: found[each] for each in found if not _is_given(context, each)}
            if not values["inputs"]:
                hint = f"see: {context.command_path} --help"
                raise UsageError("missing argument 'INPUT'", hint=hint)
        return function(options=asked, **values)

    run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in made}
    run.helps = lambda: help_of(CommandFlags) | help_of(options) | named  # type: ignore[attr-defined]
    return run


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option, or the flag that says no to it, is on the command line."""
    sources: Any = map(context.get_parameter_source, (name, f"no_{name}"))
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _parameters(declared: dataclasses.Field[Any]) -> tuple[inspect.Parameter, ...]:
    """What the parser is told of an option; its help comes when it is asked for."""
    name, flag = declared.name, declared.metadata["flag"]
    kind: Any = flag.kind or eval(str(declared.type), {"PathInput": str, "Sequence": list})
    default = declared.default
    if flag.choices:
        choices: Any = enum.StrEnum
        kind = choices(name, {each: each for each in flag.choices})
        if default is None:
            kind = list[kind] | None if "Sequence" in str(declared.type) else kind | None
        elif default is not dataclasses.MISSING:
            default = kind(default)
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    names = [flag.flag or f"--{name.replace('_', '-')}", *([flag.short] if flag.short else [])]
    made = typer.Option(
        *names,
        metavar=flag.metavar or "|".join(flag.choices) or None,
        show_default=default is not inspect.Parameter.empty and flag.shown,
        rich_help_panel=flag.panel,
        min=flag.least,
        callback=flag.answer,
        autocompletion=complete_store if flag.metavar == "STORE" else None,
        is_eager=flag.answer is not None,
    )
    on = _parameter(name, Annotated[kind, made], default)
    if not flag.off:
        return (on,)
    off = typer.Option(flag.off, rich_help_panel=flag.panel, help=flag.off_help)
    return on, _parameter(f"no_{name}", Annotated[bool, off], False)


def _read(values: dict[str, Any], name: str, off: str | None) -> object:
    """Take the value of an option out of what was parsed."""
    value = values.pop(name)
    if off and values.pop(f"no_{name}"):
        if value is not None:
            hint = "leave one of them out"
            given = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise UsageError(f"{given} and {off} exclude each other", hint=hint)
        return False
    if name in _ESCAPED:
        return unescape(value, f"--{name}")
    if isinstance(value, list):
        return [*map(str, value)] or None
    return str(value) if isinstance(value, enum.Enum) else value


def unescape(separator: str | None, option: str = "--separator") -> str | None:
    """A text as a shell passes it: backslash n, t, r and backslash itself are understood."""
    plain = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

    def meant(found: re.Match[str]) -> str:
        if found[1] not in plain:
            hint = "use \\n, \\t, \\r or \\\\ (for one backslash)"
            raise UsageError(f"{option} {separator!r} has the unknown escape {found[0]}", hint=hint)
        return plain[found[1]]

    return None if separator is None else re.sub(r"\\(.?)", meant, separator, flags=re.DOTALL)
