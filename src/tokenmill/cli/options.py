"""How a command gets its arguments and flags, its help, and its end by Ctrl-C.

A command takes the options of a class (see `tokenmill.options`), and by their names the flags that
belong to the command line alone (`CommandFlags`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tokenmill.errors import UsageError
from tokenmill.interop.base import WRITTEN
from tokenmill.options import NEEDED, OUTPUT, RERUN, flags_of, help_of, option
from tokenmill.sources.base import COMPRESSIONS, FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

_SUFFIXES = ", ".join(form.suffixes[0] for form in FORMATS.values() if form.suffixes)


def argument(kind: Any, metavar: str, words: str) -> Any:
    """What is named before the flags."""
    shown = typer.Argument(metavar=metavar, rich_help_panel=NEEDED, show_default=False, help=words)
    return Annotated[kind, shown]


INPUTS = argument(
    list[str],
    "INPUT",
    f"Files, folders, globs or URLs: {_SUFFIXES} and source code, plain or as "
    f"{', '.join(COMPRESSIONS)}. A folder means every file below it. Or the name of a well-known "
    "corpus (see --list-corpora), if there is no such file here.",
)
# Not a Path, which would make one slash of the two in a URL.
STORE = argument(str, "STORE", "The folder that a build wrote, or its URL.")
FOREIGN = argument(
    str, "PATH", "A file, a prefix (of .bin and .idx) or a folder, which means every file below it."
)


def _print_corpora(asked: bool) -> None:
    if not asked:
        return
    from tokenmill.sources.discovery import CORPORA

    for name, corpus in CORPORA.items():
        print(f"{name}\n  {corpus.files}\n  text in 'text': {corpus.holds}")
    raise typer.Exit


@dataclass
class CommandFlags:
    """Flags that are no options of a function; each command has `debug`, read in main.run."""

    dry_run: bool = option(False, RERUN)
    """Write nothing; show units, tokens, disk, memory and time as plan does."""
    link_or_copy: bool = option(False, WRITTEN)
    """As --link, and copies where the file system cannot link."""
    merge: bool = option(False, WRITTEN)
    """megatron: one .bin and .idx for each split instead of one per shard."""
    settings: list[str] | None = option(None, WRITTEN, "NAME=VALUE", flag="--set")
    """A setting that one format alone has; docs/formats.md lists them. May be given repeatedly."""
    as_json: bool = option(False, OUTPUT, flag="--json")
    """Print the result as one JSON object on stdout and nothing else there."""
    quiet: bool = option(False, OUTPUT, short="-q")
    """No progress on stderr."""
    list_corpora: bool = option(False, OUTPUT, answer=_print_corpora)
    """Print the corpora that have short names, where they are and what they hold."""
    debug: bool = option(False, OUTPUT)
    """On an error, show the full traceback."""


_ESCAPED = ("separator", "template")


def command(
    options: type,
    *,
    panels: Sequence[str] = (),
    without: str = "",
    also: Sequence[str] = (),
    **arguments: Any,
) -> Callable[[Any], Any]:
    """Give a command its arguments and the flags of a class, whose values it gets as `options`.

    Flags are listed as the class has them, or panel by panel. Those of the command line alone are
    the ones that its function takes, those in `also`, and --debug.
    """
    flags = {name: flag for name, flag in flags_of(options).items() if name not in without.split()}
    if panels:
        flags = dict(sorted(flags.items(), key=lambda each: panels.index(each[1].panel)))

    def decorate(function: Any) -> Any:
        own = [*inspect.signature(function).parameters.values()]
        made = [
            _parameter(each.name, arguments[each.name], each.default)
            for each in own
            if each.name in arguments
        ]
        declared = {each.name: each for each in dataclasses.fields(options)}
        taken = {"debug", *also, *(each.name for each in own)}
        shared = [each for each in dataclasses.fields(CommandFlags) if each.name in taken]
        for field in (*map(declared.__getitem__, flags), *shared):
            made += _parameters(field)

        @functools.wraps(function)
        def run(**values: Any) -> Any:
            asked = {name: _read(values, name, flag.off) for name, flag in flags.items()}
            for name in ("list_corpora", "debug"):
                values.pop(name, None)
            return function(options=asked, **values)

        run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in made}
        run.options = options  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


@functools.cache  # commands share fields
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
            raise UsageError(f"--{name} {value} and {off} exclude each other", hint=hint)
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


def note_shadowed(inputs: list[str], *, quiet: bool) -> None:
    """Say on stderr that a file of this folder is read where a corpus has the same name."""
    from tokenmill.sources.discovery import CORPORA, corpus_files

    for name in () if quiet else CORPORA.keys() & set(inputs):
        if corpus_files(name) == name:
            note = f"note: {name!r} is read from this folder; the corpus of that name is"
            print(f"{note} '{CORPORA[name].files}'", file=sys.stderr)


# -------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM: stop in order, then say what is safe and how to go on.

LAST = "Other options"
# A command that the shell expanded to more characters than this is not repeated in full.
LONGEST_COMMAND = 2000


class Terminated(KeyboardInterrupt):
    """SIGTERM, for a library that knows Ctrl-C: it ends its workers for both in the same way."""


def raise_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated` in the main thread."""

    def handle(_signum: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)


@contextlib.contextmanager
def stoppable(what_is_safe: str, *, resumes: bool = False) -> Iterator[None]:
    """Turn Ctrl-C or SIGTERM inside the block into a note on stderr and the exit code for it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        # A second Ctrl-C must not cut these lines off.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"stopped{' by SIGTERM' if terminated else ''}: {what_is_safe}", file=sys.stderr)
        if resumes:
            again = "to go on from there, run the same command again"
            print(f"{again}:\n  {same_command()}", file=sys.stderr)
        raise typer.Exit(143 if terminated else 130) from stop


def same_command() -> str:
    """The command line of this process, as it can be pasted into a shell again."""
    program = Path(sys.argv[0])
    start = ["python", "-m", "tokenmill"] if program.name == "__main__.py" else [program.name]
    # What comes after the '?' of an address may be a signature.
    arguments = [re.sub(r"(https?://[^?#]*[?#]).*", r"\1...", each) for each in sys.argv[1:]]
    command = shlex.join([*start, *arguments])
    if len(command) <= LONGEST_COMMAND:
        return command
    return f"{shlex.join([*start, *arguments[:2]])} ... (the same command as before)"


class GroupedCommand(TyperCommand):
    """A command whose help lists options by `rich_help_panel`, in the order they appear.

    Plain, since help without rich answers twice as fast.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        helps = help_of(CommandFlags)
        if options := getattr(self.callback, "options", None):
            helps = helps | help_of(options)
        param: Any
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            param.help = param.help or helps[param.name]
            record = param.get_help_record(ctx)
            if record is not None:
                # typer appends the Python type of an argument, which tells a reader nothing.
                record = (record[0].partition(" <")[0], record[1]) if is_argument else record
                heading = getattr(param, "rich_help_panel", None) or LAST
                groups.setdefault(heading, []).append(record)
        groups[LAST] = groups.pop(LAST)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # typer writes {STORE}, and {INPUT}... for many.
        pieces = super().collect_usage_pieces(ctx)
        return [piece.strip("{}").replace("}...", "...") for piece in pieces]
