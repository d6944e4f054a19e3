"""Entry point of the `tokenmill` command: the commands, and what any of them does on an error.

This is the process boundary: the only place that turns exceptions into `error:` and `hint:` lines
and exit codes (2 usage, 1 failure, 130 Ctrl-C, 141 a closed pipe, 143 SIGTERM). `tokenmill --help`
must answer at once, so no module of the command line imports numpy, pyarrow or rich before a
command runs.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import sys
from keyword import iskeyword
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from tokenmill._version import __version__
from tokenmill.cli import commands
from tokenmill.cli.commands import raise_on_sigterm
from tokenmill.cli.output import guard_streams
from tokenmill.engines import OWN_ENGINES, engine_names, find_kernel
from tokenmill.errors import DEBUG, TokenmillError, UsageError
from tokenmill.visible import ReaderLeftError, visible

PACKAGES = ("numpy", "pyarrow", *(name for name in engine_names() if name not in OWN_ENGINES))


def version() -> None:
    """Print the versions of tokenmill, Python and the engines.

    \b
    Example:
      tokenmill version
    """
    import platform

    # Not at the top: it takes a third of the start-up time of the command.
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    print(f"tokenmill {__version__}")
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        try:
            print(f"{package} {version_of(package)}")
        except PackageNotFoundError:
            print(f"{package} (not installed)")
    how = "compiled" if find_kernel() else "not compiled: the same ids, several times slower"
    print(f"words {__version__} ({how})")


LAST = "Other options"


class GroupedCommand(TyperCommand):
    """A command whose help lists options by `rich_help_panel`, in the order they appear.

    Plain, since help without rich answers twice as fast.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        params = self.get_params(ctx)
        helps: dict[str, str] = getattr(self.callback, "helps", dict)()
        param: Any
        for param in params:
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


class LateCommand(GroupedCommand):
    """A command that `commands.command` declared: its flags are made when they are asked for."""

    def get_params(self, ctx: Any) -> Any:
        if not self.params:
            alone = typer.Typer(add_completion=False)
            alone.command()(self.callback())  # type: ignore[misc]
            made: Any = typer.main.get_command(alone)
            self.params, self.callback = made.params, made.callback
            for param in made.params:
                spare_pydantic(param)
        return super().get_params(ctx)


def spare_pydantic(param: Any) -> None:
    """Take what is of its type already as it is; typer imports pydantic first, which is slow."""
    usual: Any = param.process_value
    kind: Any = getattr(param, "type_descriptor", None)
    optional = not (param.required or param.multiple or param.nargs != 1)

    def process(ctx: Any, value: Any) -> Any:
        are_words = bool(value) and isinstance(value, tuple) and kind.annotation == list[str]
        value = list(value) if are_words else value
        if not value and param.multiple and param.default is None:  # not given
            return None
        if not (are_words or type(value) is kind.annotation or (value is None and optional)):
            return usual(ctx, value)
        return value if param.callback is None else param.callback(ctx, param, value)

    param.process_value = usual if kind is None else process


# Base class of everything the parser raises; typer gives it no public name in all its versions.
ParserError: Any = typer.BadParameter.__mro__[2]

COMMANDS = """
build finish plan inspect view grep trace ledger layout verify
select ban dedup annotate forget
train diagnose audit export import convert prune demo
"""
# None would be given to pydantic, see `spare_pydantic`.
NO_HELP: dict[str, Any] = {"help": False}

app = typer.Typer(
    name="tokenmill",
    add_completion=False,  # our own flags below: typer's are slow, and say an escape
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "default_map": NO_HELP | dict.fromkeys(("version", *COMMANDS.split()), NO_HELP),
    },
    epilog="""Start here:

    \b
    tokenmill demo                                          see all of it work in a minute
    tokenmill build data/*.jsonl -t TOKENIZER -o my-store   build a store of your own
    tokenmill COMMAND --help                                what a command takes, and examples""",
)

for _name in COMMANDS.split():
    app.command(_name, cls=LateCommand)(getattr(commands, _name + "_" * iskeyword(_name)))
app.command("version", cls=GroupedCommand)(version)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tokenmill {__version__}")
        raise typer.Exit


def _completion() -> Any:
    """What typer's own flags call, which no type checker is told of."""
    return importlib.import_module("typer.completion")


def _install_completion(wanted: bool) -> None:
    if not wanted:
        return
    shell, path = _completion().install(prog_name="tokenmill")
    if shell == "zsh":  # where the first Tab of a shell would only load the file
        with path.open("a") as file:
            file.write(f"\n[[ $zsh_eval_context[-1] == loadautofunc ]] && {ZSH_FUNCTION}\n")
    print(f"completion for {shell} is in {path}: it works in every {shell} that starts from now on")
    raise typer.Exit


def _show_completion(context: typer.Context, param: typer.CallbackParam, wanted: bool) -> None:
    _completion().show_callback(context, param, wanted)


COMPLETE = "_TOKENMILL_COMPLETE"  # the variable by which a shell asks what Tab may mean
ZSH_FUNCTION = '_tokenmill_completion "$@"'
VERSION = typer.Option(
    "--version", help="Print the version, in one line.", callback=_print_version, is_eager=True
)
INSTALL = typer.Option(
    "--install-completion",
    help="Let Tab complete commands, flags, formats and stores in this shell: bash, zsh or fish.",
    callback=_install_completion,
    is_eager=True,
)
SHOW = typer.Option(
    "--show-completion",
    help="Print what --install-completion writes.",
    callback=_show_completion,
    is_eager=True,
)


@app.callback()
def tokenmill(
    show_version: Annotated[bool, VERSION] = False,
    install_completion: Annotated[bool, INSTALL] = False,
    show_completion: Annotated[bool, SHOW] = False,
) -> None:
    """Turn raw text into packed, checked, memory-mapped training tokens.

    Text files go in once; a store of token shards comes out that Megatron-LM can read as it is.
    The same command again resumes where the last one stopped.
    """


def main() -> NoReturn:
    """`run` in a process that is for nothing else: it ends without being taken apart.

    Forgetting every module and value one by one takes a tenth of a second after a build.
    """
    codes: list[int] = []

    def leave() -> None:
        with contextlib.suppress(OSError, ValueError):  # else the usual end says so
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for code in codes:
                os._exit(code)

    atexit.register(leave)  # the first to ask is called last, after threads and whatever else ends
    try:
        run()
    except SystemExit as end:
        codes += [end.code] if isinstance(end.code, int) else []
        raise


def run() -> NoReturn:
    """Run the command and exit with its code."""
    guard_streams()
    # Its bars move the cursor, which the guard does not let them.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    raise_on_sigterm()
    if is_debugged := "--debug" in sys.argv:
        os.environ[DEBUG] = "1"
    try:
        if COMPLETE in os.environ:
            _completion().completion_init()
        refuse_secret_arguments()
        code = app(sys.argv[1:] or ["--help"], prog_name="tokenmill", standalone_mode=False) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except ReaderLeftError:
        # Point stdout elsewhere, or the interpreter would fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        if is_debugged:
            raise
        code = report(error)
    finally:
        if is_debugged:
            del os.environ[DEBUG]
    sys.exit(code)


def refuse_secret_arguments() -> None:
    """No address with a password goes any further, whatever it is given for."""
    for argument in sys.argv[1:]:
        if ":/" in argument:
            from tokenmill.files import refuse_secrets

            refuse_secrets(re.sub(r"^(--[\w-]+=|-\w)", "", argument))


# What other people's scripts call things, without dashes, and what they are here; a flag is offered
# by the commands that have it.
FOREIGN_FLAGS = {
    "num_workers num_proc nproc n_proc num_processes processes jobs": [
        "--workers",
        "--feed-workers (with --feed workers; what is read from a store needs none)",
    ],
    "output_dir output output_path output_prefix save_dir out_dir": ["--out"],
    "input_dir input input_path data_dir data_path dataset dataset_name": [
        "files, folders and names of corpora are given without a flag: tokenmill build FOLDER"
    ],
    "batch_size per_device_train_batch_size micro_batch_size": [
        "--micro-batch",
        "there is none to choose: --memory bounds what is worked on at a time",
    ],
    "chunk_size shard_size max_shard_size": [
        "--file-tokens",
        "--seq-len",
        "a store is cut by its input; tokenmill export --file-tokens N writes files of a size",
    ],
    "config subset dataset_config config_name": [
        "--model",
        "name the files of the subset: 'hf://datasets/OWNER/NAME/SUBSET/*.parquet'",
    ],
    "pretokenized pre_tokenized tokenized": ["give the store itself: tokenmill train STORE"],
    "use_8bit_optim use_8bit_adam adam8bit optim_8bit": [
        "--optimizer adamw8bit",
        "tokenmill train has it: --optimizer adamw8bit",
    ],
    "max_seq_length max_length seq_length block_size context_length": ["--seq-len", "--max-length"],
    "tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path vocab_file": [
        "--tokenizer"
    ],
    "text_column text_key column_name json_keys text_column_name": ["--text-field"],
    "append_eod append_eos": ["every document ends in the end token, unless --no-eos is given"],
    "filter query row_filter": ["--where"],
    "learning_rate": ["--lr", "tokenmill train has it: --lr"],
    "max_steps num_steps": ["--steps", "tokenmill train has it: --steps"],
    "gradient_accumulation_steps gradient_accumulation grad_accum": [
        "--accumulate",
        "tokenmill train has it: --accumulate",
    ],
    "n_puzzles n_samples num_samples max_samples max_examples": ["--limit"],
    "mixed_precision bf16 fp16 amp": ["--precision bf16 (as it is anyway where the GPU has it)"],
    "benchmark": ["tokenmill diagnose DATA -t TOKENIZER --sweep tries workers and batches"],
    "resume_from_checkpoint": ["--resume"],
}


def flag_hint(flag: str, context: Any) -> str | None:
    """What to write instead of a flag that somebody else's script has."""
    name = flag.lstrip("-").replace("-", "_").lower()
    own = {opt for param in context.command.params for opt in param.opts} if context else set()
    for names, answers in FOREIGN_FLAGS.items():
        if name in names.split():
            for answer in answers:
                if not answer.startswith("--"):
                    return answer
                if answer.split()[0] in own:
                    return f"here it is {answer}"
    return None


def report(error: Exception) -> int:
    """Say on stderr what went wrong and what to do; return the exit code."""
    code = 1
    hint: str | None = None
    if isinstance(error, TokenmillError):
        message, hint = error.message, error.hint
        code = 2 if isinstance(error, UsageError) else 1
    elif isinstance(error, ParserError):
        message, code = error.format_message().rstrip("."), error.exit_code
        # The parser's words for an exception of its own.
        message = message[:1].lower() + message[1:].replace(": Value error, ", ": ", 1)
        context: Any = getattr(error, "ctx", None)
        hint = f"see: {context.command_path if context else 'tokenmill'} --help"
        if flag := getattr(error, "option_name", None):
            hint = flag_hint(flag, context) or hint
    elif isinstance(error, OSError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
        hint = "this is a fault of tokenmill; run the command again with --debug to see where"
    with contextlib.suppress(ReaderLeftError):
        print(f"error: {visible(message)}", file=sys.stderr)
        if hint:
            print(f"hint: {visible(hint)}", file=sys.stderr)
    return code
