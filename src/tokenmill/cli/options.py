"""The options that more than one command takes, each described once.

Defaults stand in the command's signature. An option is here because a user needs it on the command
line; whatever only a program needs stays in the library.
"""

from __future__ import annotations

import contextlib
import enum
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


NEEDED = "Needed"
TEXT = "What is read"
SHAPE = "What a row is"
TOKENS = "What becomes a token"
SPEED = "What may be used"
MACHINES = "More than one machine"
RERUN = "Running again"
OUTPUT = "What is shown"


class SpecialTokensChoice(enum.StrEnum):
    TEXT = "text"
    PARSE = "parse"
    REJECT = "reject"


class FormatChoice(enum.StrEnum):
    TEXT = "text"
    CHAT = "chat"
    PROMPT_COMPLETION = "prompt-completion"


class TrainOnChoice(enum.StrEnum):
    ASSISTANT = "assistant"
    ALL = "all"
    LAST = "last"


class TooLongChoice(enum.StrEnum):
    SPLIT = "split"
    TRUNCATE = "truncate"
    REJECT = "reject"


class RunnerChoice(enum.StrEnum):
    LOCAL = "local"
    RAY = "ray"


class EngineChoice(enum.StrEnum):
    AUTO = "auto"
    GIGATOKEN = "gigatoken"
    TOKENIZERS = "tokenizers"
    SENTENCEPIECE = "sentencepiece"
    TIKTOKEN = "tiktoken"
    BYTES = "bytes"


Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        rich_help_panel=NEEDED,
        show_default=False,
        help="Files, folders, globs or URLs: .jsonl, .parquet, .arrow, .csv, .txt and source code, "
        "plain or as .gz, .zst, .bz2, .xz. A folder means every file below it. Or the name of a "
        "well-known corpus (see --list-corpora), if there is no such file here.",
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
Tokenizer = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        "-t",
        metavar="PATH|ID",
        show_default=False,
        rich_help_panel=NEEDED,
        help="A tokenizer.json or a folder with one, a SentencePiece .model, a tiktoken rank file, "
        "a Hugging Face hub id, or the word bytes (256 ids, needs no file).",
    ),
]
Out = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER|URL",
        show_default=False,
        rich_help_panel=NEEDED,
        help="Where the store is written: a folder, or a URL such as s3://bucket/store.",
    ),
]
TextField = Annotated[
    str,
    typer.Option(
        "--text-field",
        metavar="NAME",
        rich_help_panel=TEXT,
        help="JSON key or column that holds the text; dots reach into nested objects (data.text).",
    ),
]
Format = Annotated[
    FormatChoice,
    typer.Option(
        "--format",
        metavar="text|chat|prompt-completion",
        rich_help_panel=SHAPE,
        help="What a row is: a text, a conversation, or a prompt with its completion. The last two "
        "make a store with masks, which say what counts for the loss.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="TEXT",
        show_default=False,
        rich_help_panel=SHAPE,
        help="Text made of fields in braces, such as '{title}\\n\\n{body}'; \\n and \\t are "
        "understood, {{ and }} are braces.",
    ),
]
PromptField = Annotated[
    str,
    typer.Option("--prompt-field", metavar="NAME", rich_help_panel=SHAPE, help="The prompt."),
]
CompletionField = Annotated[
    str,
    typer.Option(
        "--completion-field",
        metavar="NAME",
        rich_help_panel=SHAPE,
        help="The completion; in a --template everything from it on counts for the loss.",
    ),
]
MessagesField = Annotated[
    str | None,
    typer.Option(
        "--messages-field",
        metavar="NAME",
        show_default="messages or conversations",
        rich_help_panel=SHAPE,
        help="The conversation: a list of messages with role and content, or from and value.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        show_default="the tokenizer's own",
        rich_help_panel=SHAPE,
        help="Jinja template that makes text of a conversation.",
    ),
]
ChatDate = Annotated[
    str | None,
    typer.Option(
        "--chat-date",
        metavar="DAY",
        show_default=False,
        rich_help_panel=SHAPE,
        help="What a chat template that writes today's date shall write, such as 2024-07-26.",
    ),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        show_default=False,
        rich_help_panel=SHAPE,
        help="More variables for the chat template, such as '{\"enable_thinking\": false}'. A "
        "field of this name in a row goes before them.",
    ),
]
TrainOn = Annotated[
    TrainOnChoice,
    typer.Option(
        "--train-on",
        metavar="assistant|all|last",
        rich_help_panel=SHAPE,
        help="What counts of a conversation: all that the assistant says, everything, or the "
        "assistant's last message.",
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        metavar="TOKENS",
        show_default="any",
        rich_help_panel=SHAPE,
        help="Most tokens of a document, end token counted.",
    ),
]
TooLong = Annotated[
    TooLongChoice,
    typer.Option(
        "--too-long",
        metavar="split|truncate|reject",
        rich_help_panel=SHAPE,
        help="A longer row becomes several documents, is cut off, or is rejected.",
    ),
]
Separator = Annotated[
    str | None,
    typer.Option(
        "--separator",
        metavar="TEXT",
        show_default="one document per text file",
        rich_help_panel=TEXT,
        help="Cut text files into documents here; \\n and \\t are understood, so '\\n\\n' cuts at "
        "blank lines.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="ROWS",
        show_default="all",
        rich_help_panel=TEXT,
        help="Use only the first rows of the input. A later run without it adds the rest.",
    ),
]
Val = Annotated[
    float,
    typer.Option(
        "--val",
        metavar="SHARE",
        rich_help_panel=TEXT,
        help="Share of the documents for the split val: 0.01 is one in a hundred. A document's "
        "split follows from its text, so it never moves.",
    ),
]
MaxRejects = Annotated[
    float,
    typer.Option(
        "--max-rejects",
        metavar="SHARE",
        rich_help_panel=TEXT,
        help="Fail if more than this share of a unit's rows cannot be used. Fewer are listed in "
        "rejects/ with file, row and reason, beyond 10,000 of a unit counted by reason.",
    ),
]
Eos = Annotated[
    str | None,
    typer.Option(
        "--eos",
        metavar="TOKEN",
        show_default="the tokenizer's own",
        rich_help_panel=TOKENS,
        help="Token behind every document.",
    ),
]
NoEos = Annotated[
    bool,
    typer.Option("--no-eos", rich_help_panel=TOKENS, help="Put no token behind a document."),
]
Bos = Annotated[
    bool,
    typer.Option(
        "--bos",
        rich_help_panel=TOKENS,
        help="Put the tokenizer's begin-of-text token in front of every document.",
    ),
]
SpecialTokens = Annotated[
    SpecialTokensChoice,
    typer.Option(
        "--special-tokens",
        metavar="text|parse|reject",
        rich_help_panel=TOKENS,
        help="What a string like <|endoftext|> inside a document becomes: ordinary characters, the "
        "special token itself, or a rejected row.",
    ),
]
Engine = Annotated[
    EngineChoice,
    typer.Option(
        "--engine",
        metavar="NAME",
        rich_help_panel=TOKENS,
        help="auto, gigatoken, tokenizers, sentencepiece, tiktoken or bytes. auto takes the "
        "fastest one whose ids equal the reference tokenizer's, and checks that while it runs.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        show_default="physical cores, as far as the memory allows",
        rich_help_panel=SPEED,
        help="Processes. Never changes a byte of the store.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        show_default="a quarter of the machine",
        rich_help_panel=SPEED,
        help="Most memory the whole build may take, such as 4GB or 1500MiB.",
    ),
]
Runner = Annotated[
    RunnerChoice,
    typer.Option(
        "--runner",
        metavar="local|ray",
        rich_help_panel=MACHINES,
        help="Where units are worked on: processes of this machine, or a Ray cluster. Never "
        "changes a byte of the store.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        show_default="a cluster on this machine",
        rich_help_panel=MACHINES,
        help="The Ray cluster to work on: HOST:PORT, or auto for the one that runs here.",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="I/N",
        show_default=False,
        rich_help_panel=MACHINES,
        help="Build one of N independent parts (1/64 to 64/64), on any machine and in any order; "
        "then run tokenmill finish.",
    ),
]
Pin = Annotated[
    bool,
    typer.Option(
        "--pin",
        rich_help_panel=SPEED,
        help="Bind each worker to a core, NUMA node by node (Linux).",
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        show_default=False,
        rich_help_panel=SPEED,
        help="Write where each worker's time went (read, parse, encode, check, write, wait) as "
        "JSON.",
    ),
]
Monitor = Annotated[
    Path | None,
    typer.Option(
        "--monitor",
        metavar="FILE",
        show_default=False,
        rich_help_panel=SPEED,
        help="Write what cores, memory and disks did while the build ran, as JSON Lines; a later "
        "run of the same build adds to it.",
    ),
]
Prune = Annotated[
    bool,
    typer.Option(
        "--prune",
        rich_help_panel=RERUN,
        help="Drop the shards of files that are no longer among the inputs.",
    ),
]
Rebuild = Annotated[
    bool,
    typer.Option(
        "--rebuild",
        rich_help_panel=RERUN,
        help="Discard what was built with another tokenizer or other options, and build anew.",
    ),
]
VerifySources = Annotated[
    bool,
    typer.Option(
        "--verify-sources",
        rich_help_panel=RERUN,
        help="Read all files of units that are complete, and build those again whose bytes are "
        "not the ones that were read then.",
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


def end_token(eos: str | None, *, no_eos: bool) -> str | bool | None:
    """What `build` takes as eos: a token, None for the tokenizer's own, False for none."""
    if no_eos and eos is not None:
        raise UsageError(
            f"--eos {eos} and --no-eos exclude each other", hint="leave one of them out"
        )
    return False if no_eos else eos


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
        for param in self.get_params(ctx):
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
