"""The options that more than one command takes, each described once.

Defaults stand in the command's signature. An option is here because a user needs it on the command
line; whatever only a program needs stays in the library.
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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from tokenmill.errors import UsageError
from tokenmill.options import NEEDED, OUTPUT, RERUN, Flag, flags_of, help_of
from tokenmill.sources import COMPRESSIONS, FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType


_SUFFIXES = ", ".join(form.suffixes[0] for form in FORMATS.values() if form.suffixes)
Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        rich_help_panel=NEEDED,
        show_default=False,
        help=f"Files, folders, globs or URLs: {_SUFFIXES} and source code, "
        f"plain or as {', '.join(COMPRESSIONS)}. A folder means every file below it. Or the name "
        "of a well-known corpus (see --list-corpora), if there is no such file here.",
    ),
]
MaybeInputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT",
        rich_help_panel=NEEDED,
        show_default=False,
        help="The text of your training: any input that `tokenmill build` reads. May be left "
        "out with --run, --stalls or --timeline.",
    ),
]
StorePath = Annotated[
    str,  # not a Path, which would make one slash of the two in a URL
    typer.Argument(
        metavar="STORE",
        show_default=False,
        rich_help_panel=NEEDED,
        help="The folder that a build wrote, or its URL.",
    ),
]
ForeignPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        rich_help_panel=NEEDED,
        help="A file, a prefix (of .bin and .idx) or a folder, which means every file below it.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        rich_help_panel=RERUN,
        help="Write nothing; show units, tokens, disk, memory and time as plan does.",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        rich_help_panel=OUTPUT,
        help="Print the result as one JSON object on stdout and nothing else there.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="No progress on stderr."),
]


def _print_corpora(asked: bool) -> None:
    if not asked:
        return
    from tokenmill.corpora import CORPORA

    for name, corpus in CORPORA.items():
        print(f"{name}\n  {corpus.files}\n  text in {corpus.text_field!r}: {corpus.holds}")
    raise typer.Exit


ListCorpora = Annotated[
    bool,
    typer.Option(
        "--list-corpora",
        callback=_print_corpora,
        is_eager=True,
        rich_help_panel=OUTPUT,
        help="Print the corpora that have short names, where they lie and what they hold.",
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", rich_help_panel=OUTPUT, help="On an error, show the full traceback."),
]


_ESCAPED = ("separator", "template")


def command(
    options: type, *, panels: Sequence[str] = (), without: Sequence[str] = ()
) -> Callable[[Any], Any]:
    """Give a command the flags of a class of options; it is called with `options`, their values.

    Each flag is one field of the class (see `tokenmill.options`). Flags are listed as the class has
    them, or panel by panel.
    """
    flags = {name: flag for name, flag in flags_of(options).items() if name not in without}
    if panels:
        flags = dict(sorted(flags.items(), key=lambda each: panels.index(each[1].panel)))

    def decorate(function: Any) -> Any:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        del own["options"]
        first = [each for each in own.values() if isinstance(_declared(each), ArgumentInfo)]
        rest = [each for each in own.values() if each not in first]
        made = [each for name in flags for each in _parameters(options, name)]

        @functools.wraps(function)
        def run(**values: Any) -> Any:
            asked = {name: _read(values, name, flag) for name, flag in flags.items()}
            return function(options=asked, **values)

        signature = inspect.Signature([*first, *made, *rest])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.options = options  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        return run

    return decorate


def _declared(parameter: inspect.Parameter) -> object:
    return parameter.annotation.__metadata__[0]


def _parameters(options: type, name: str) -> list[inspect.Parameter]:
    """What the parser is told of an option; its help comes when it is asked for."""
    flag = flags_of(options)[name]
    (declared,) = (each for each in dataclasses.fields(options) if each.name == name)
    kind: Any = flag.kind or eval(str(declared.type), {"PathInput": str})
    default = declared.default
    if flag.choices:
        choices: Any = enum.StrEnum
        kind = choices(name, {each: each for each in flag.choices})
        if default is None:
            kind = kind | None
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
    )
    found = [_parameter(name, Annotated[kind, made], default)]
    if flag.off:
        off = typer.Option(flag.off, rich_help_panel=flag.panel, help=flag.off_help)
        found.append(_parameter(f"no_{name}", Annotated[bool, off], False))
    return found


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _read(values: dict[str, Any], name: str, flag: Flag) -> object:
    """Take the value of an option out of what was parsed."""
    value = values.pop(name)
    if flag.off and values.pop(f"no_{name}"):
        if value is not None:
            raise UsageError(
                f"--{name} {value} and {flag.off} exclude each other",
                hint="leave one of them out",
            )
        return False
    if name in _ESCAPED:
        return unescape(value, f"--{name}")
    return str(value) if isinstance(value, enum.Enum) else value


def unescape(separator: str | None, option: str = "--separator") -> str | None:
    """A text as a shell passes it: backslash n, t, r and backslash itself are understood."""
    if separator is None:
        return None
    plain = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    out, characters = [], iter(separator)
    for character in characters:
        if character != "\\":
            out.append(character)
            continue
        escaped = next(characters, "")
        if escaped not in plain:
            raise UsageError(
                f"{option} {separator!r} has the unknown escape \\{escaped}",
                hint="use \\n, \\t, \\r or \\\\ (for one backslash)",
            )
        out.append(plain[escaped])
    return "".join(out)


def note_shadowed(inputs: list[str], *, quiet: bool) -> None:
    """Say on stderr that a file of this folder is read where a corpus has the same name."""
    from tokenmill.corpora import CORPORA, shadowed

    for name in () if quiet else shadowed(inputs):
        print(
            f"note: {name!r} is read from this folder; the corpus of that name is "
            f"'{CORPORA[name].files}'",
            file=sys.stderr,
        )


# -------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM: stop in order, then say what is safe and how to go on.
#
# SIGTERM becomes an exception of its own kind that is also a KeyboardInterrupt, so that the
# library, which knows only KeyboardInterrupt, ends its workers for both in the same way.

LONGEST_COMMAND = 2000
"""A command that the shell expanded to more characters than this is not repeated in full."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


def raise_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated` in the main thread."""

    def handle(_signum: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)


@contextlib.contextmanager
def stoppable(what_is_safe: str, *, command: str | None = None) -> Iterator[None]:
    """Turn Ctrl-C or SIGTERM inside the block into a note on stderr and the exit code for it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        # A second Ctrl-C must not cut these lines off.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"stopped{' by SIGTERM' if terminated else ''}: {what_is_safe}", file=sys.stderr)
        if command is not None:
            print(f"to go on from there, run the same command again:\n  {command}", file=sys.stderr)
        raise typer.Exit(143 if terminated else 130) from stop


def same_command() -> str:
    """The command line of this process, as it can be pasted into a shell again."""
    program = Path(sys.argv[0])
    start = ["python", "-m", "tokenmill"] if program.name == "__main__.py" else [program.name]
    # What is behind the '?' of an address may be a signature.
    arguments = [re.sub(r"(https?://[^?#]*[?#]).*", r"\1...", each) for each in sys.argv[1:]]
    command = shlex.join([*start, *arguments])
    if len(command) <= LONGEST_COMMAND:
        return command
    return f"{shlex.join([*start, *arguments[:2]])} ... (the same command as before)"


# -------------------------------------------------------------------------------------------------
# Help with its options under headings, without rich: plain help answers twice as fast.

if TYPE_CHECKING:
    # typer carries its own copy of click since 0.2x; which one it is does not matter here.
    Context = Any
    HelpFormatter = Any

LAST = "Other options"


class GroupedCommand(TyperCommand):
    """A command whose help lists options by `rich_help_panel`, in the order they appear."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        options = getattr(self.callback, "options", None)
        helps = {} if options is None else help_of(options)
        param: Any
        for param in self.get_params(ctx):
            if param.param_type_name == "option" and not param.help:
                param.help = helps[param.name]
            record = param.get_help_record(ctx)
            if record is not None and param.param_type_name == "argument":
                # typer appends the Python type, which tells a reader nothing.
                record = (record[0].partition(" <")[0], record[1])
            if record is not None:
                heading = getattr(param, "rich_help_panel", None) or LAST
                groups.setdefault(heading, []).append(record)
        groups[LAST] = groups.pop(LAST)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        # typer writes {STORE}, and {INPUT}... for many.
        return [
            piece.strip("{}").replace("}...", "...") for piece in super().collect_usage_pieces(ctx)
        ]
