"""The commands: each takes its options, calls one function of the library, shows the result.

What is heavy is imported when a command runs: see `cli/main.py`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import tokenmill
from tokenmill.cli import show
from tokenmill.cli.output import BuildView, LineView, TrainView, watch, watch_amount
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from tokenmill.interop.export import ExportResult

Asked = dict[str, Any]

KEPT_UNITS = "every unit that was finished is committed and stays"
WRITING = "link_or_copy merge settings as_json quiet"
KEPT_PARTS = "every part that was finished stays"
KEPT_IMPORT = "every part that was finished is committed and stays"
STANDING = "complete; its inputs were not looked at again, which a build without --part does"


def command(options: str, **how: str) -> Callable[[Any], Any]:
    """Name the class of a command's options; see `with_flags` for the rest.

    What stands for the command is what makes it, flags and all: see `main.LateCommand`.
    """

    def decorate(function: Any) -> Any:
        def late() -> Any:
            from tokenmill.cli.options import with_flags

            return with_flags(function, options, **how)

        late.__doc__ = function.__doc__
        return late

    return decorate


@command("options.BuildOptions", also="config list_corpora")
def build(
    *,
    inputs: list[str] | None = None,
    options: Asked,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
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
      tokenmill build -c build.toml
    """
    inputs = inputs or []
    note_shadowed(inputs, quiet=quiet)
    if dry_run:
        with stoppable("nothing was written"):
            planned = tokenmill.plan(inputs, **options)
        show.plan_result(planned, as_json=as_json)
        return
    with stoppable(KEPT_UNITS, resumes=True), watch(BuildView(), quiet=quiet) as tell:
        result = tokenmill.build(inputs, on_progress=tell, **options)
    show.build_result(result, as_json=as_json)


NOT_PLANNED = (
    "max_rejects allow_empty pin profile monitor runner address part prune rebuild forgotten"
)


@command("options.PlanOptions", without=NOT_PLANNED, also="config")
def plan(*, inputs: list[str] | None = None, options: Asked, as_json: bool) -> None:
    """Say what a build would take: units, tokens, disk, memory, time. Writes nothing.

    Figures come from encoding a small sample of the input with the real tokenizer.

    \b
    Example:
      tokenmill plan data/ -t tokenizer.json
    """
    with stoppable("nothing was written"):
        planned = tokenmill.plan(inputs or [], **options)
    show.plan_result(planned, as_json=as_json)


PARTS_INPUTS = "The inputs of the parts; needed only where they are URLs that hold a key."


@command("options.FinishOptions", inputs=PARTS_INPUTS)
def finish(
    *, store: str, inputs: list[str] | None = None, options: Asked, as_json: bool, quiet: bool
) -> None:
    """Make a store of the parts that `build --part` built: check them, write the manifest.

    Every unit must be there; those that are not are named with the part that has them. The result
    is what one build on one machine gives, byte for byte.

    \b
    Example:
      tokenmill finish my-store
    """
    safe = "the parts stay as they are"
    with stoppable(safe, resumes=True), watch(BuildView(), quiet=quiet) as tell:
        result = tokenmill.finish(store, inputs or (), on_progress=tell, **options)
    show.build_result(result, as_json=as_json, standing=STANDING)


@command("options.VerifyOptions")
def verify(*, store: str, options: Asked, as_json: bool, quiet: bool) -> None:
    """Prove that a store is whole and right. Exits with 1 if it is not.

    Checks the checksum of every file, that every index fits its tokens, that every id is in the
    vocabulary, and that a sample of documents gives the same ids again.

    \b
    Examples:
      tokenmill verify my-store
      tokenmill verify my-store --sample 1000 --json
      tokenmill verify s3://bucket/my-store
    """
    with stoppable("nothing was changed"), watch_amount("verifying", quiet=quiet) as tell:
        report = tokenmill.verify(store, on_progress=tell, **options)
    show.verify_result(report, store=store, as_json=as_json)
    if not report.ok:
        raise typer.Exit(1)


@command("options.PruneOptions")
def prune(*, store: str, options: Asked, as_json: bool) -> None:
    """Remove what is kept of a store from before it grew.

    A build that adds to a finished store keeps the manifest that was, so that a run goes on with
    it until its epoch ends. Runs that are within such an epoch cannot be resumed after this, and
    views that were made of the store as it was cannot be opened.

    \b
    Examples:
      tokenmill prune my-store --dry-run
      tokenmill prune my-store
    """
    with stoppable("the store itself is not touched", resumes=True):
        result = tokenmill.prune(store, **options)
    show.prune_result(result, as_json=as_json)


@command("options.InspectOptions")
def inspect(*, store: str, options: Asked, as_config: bool, as_json: bool) -> None:
    """Show what a store holds: lengths, tokens, policies, rejects.

    \b
    Examples:
      tokenmill inspect my-store
      tokenmill inspect my-store --doc 42
      tokenmill inspect my-store --by source
      tokenmill inspect my-store --config > build.toml
    """
    if as_config:
        from tokenmill.config import config_of

        print(config_of(store), end="")
        return
    with stoppable("nothing was changed"):
        inspection = tokenmill.inspect(store, **options)
    show.inspection_result(inspection, as_json=as_json)


@command("options.GrepOptions")
def grep(*, store: str, text: str, options: Asked, as_json: bool, quiet: bool) -> None:
    """Find the documents of a store that hold a text, and where. Exits with 1 if none does.

    Exact, however the text was tokenized, and on all cores. Documents are numbered in their split.

    \b
    Examples:
      tokenmill grep my-store 'an exact text'
      tokenmill grep my-store 'an exact text' --limit 0
      tokenmill grep s3://bucket/my-store 'an exact text' --json
    """
    with stoppable("nothing was changed"), watch_amount("searched", "token", quiet=quiet) as tell:
        found = tokenmill.grep(store, text, on_progress=tell, **options)
    show.grep_result(found, as_json=as_json)
    if not found.num_matches:
        raise typer.Exit(1)


SHOWN = (
    "A store or a view, or its URL; the folder of a training run; the folder of a build that is"
    " going, or its time line. May be several."
)


@command("options.ViewOptions", paths=SHOWN)
def view(*, paths: list[str], options: Asked) -> None:
    """Look at stores, runs and builds in the browser. Ctrl-C ends it.

    The page is served to this machine alone, at an address that cannot be guessed. Nothing is
    written, and nothing is loaded from the network.

    \b
    Examples:
      tokenmill view my-store
      tokenmill view my-store run-1 run-2
      tokenmill view my-store --export page.html
      tokenmill view s3://bucket/my-store --no-open --port 8000
    """
    with contextlib.suppress(KeyboardInterrupt):
        tokenmill.view(paths, on_ready=show.view_address, **options)


@command("options.TraceOptions")
def trace(*, store: str, options: Asked, as_json: bool) -> None:
    """Say where a training run has shown a document, and will: steps, ranks, places in rows.

    Nothing is logged for it: the order of rows is a function of the seed, and a saved state says
    how far the run has come.

    \b
    Examples:
      tokenmill trace my-store --doc 123 --state run
      tokenmill trace my-store --row corpus.jsonl:5 --state run/checkpoints/step-00001000
      tokenmill trace my-store --text 'an exact text' --state run --json
      tokenmill trace my-store --doc 123 --state checkpoint.pt --batch-size 16 --ranks 8
    """
    with stoppable("nothing was changed"):
        found = tokenmill.trace(store, **options)
    show.trace_result(found, as_json=as_json)


@command("options.LedgerOptions")
def ledger(*, run: str, options: Asked, page: str | None = None, as_json: bool) -> None:
    """Count the tokens that a training run has seen, by store, source file and annotation.

    Nothing is logged for it: the order of rows is a function of the seed, and a saved state says
    how far the run has come.

    \b
    Examples:
      tokenmill ledger run
      tokenmill ledger run/checkpoints/step-00001000 --by folder,lang
      tokenmill ledger run --to croissant > ledger.json
    """
    with stoppable("nothing was changed"):
        found = tokenmill.ledger(run, **options)
    show.ledger_result(found, page=page, as_json=as_json)


@command("options.LayoutOptions")
def layout(*, store: str, options: Asked, as_json: bool, quiet: bool) -> None:
    """Show what each packing makes of a store: rows, padding, split and dropped tokens.

    Every token is accounted for. best-fit is planned on the way; its plan is kept in the store's
    folder layouts/ (or in the user's cache, if that cannot be written) for the training to come.

    \b
    Examples:
      tokenmill layout my-store --seq-len 2048
      tokenmill layout my-store --seq-len 8192 --packing best-fit --batch-size 512
      tokenmill layout my-store --seq-len 32768 --ranks 64
    """
    with stoppable("no plan was kept"), watch_amount("planning", "document", quiet=quiet) as tell:
        report = tokenmill.layout(store, on_progress=tell, **options)
    show.layout_result(report, as_json=as_json)


VIEW_KEPT = "no view was written"


@command("options.SelectOptions")
def select(*, store: str, options: Asked, as_json: bool) -> None:
    """Write a view of a store: the documents of which a condition holds.

    A view is a small file beside the store, of which nothing is copied. It is named wherever a
    store is: train, layout, inspect, verify, export, and in Python.

    \b
    Examples:
      tokenmill select my-store --where "source like '%code%' and tokens < 8192" -o code.view
      tokenmill train code.view --model small
    """
    with stoppable(VIEW_KEPT):
        result = tokenmill.select(store, **options)
    show.view_result(result, as_json=as_json)


@command("options.BanOptions")
def ban(*, store: str, options: Asked, as_json: bool) -> None:
    """Write a view of a store without documents that are listed, or that hold what is listed.

    For opt-outs and decontamination. The view keeps the reason for each document that is gone.

    \b
    Examples:
      tokenmill ban my-store --ids optout.txt --key id -o kept.view
      tokenmill ban my-store --match benchmark-questions.txt -o clean.view
      tokenmill ban kept.view --ids files.txt --key source -o fewer.view
    """
    with stoppable(VIEW_KEPT):
        result = tokenmill.ban(store, **options)
    show.view_result(result, as_json=as_json)


@command("options.ForgetOptions")
def forget(*, store: str, options: Asked, as_json: bool) -> None:
    """Take documents out of a store for good: no byte of them is left in any of its files.

    For erasure requests. Shards that had one are written anew, and builds leave its row out from
    then on. The same command again, or one without a list, ends what was interrupted.

    \b
    Examples:
      tokenmill forget my-store --ids gdpr.txt --key id --dry-run
      tokenmill forget my-store --ids gdpr.txt --key id --reason 'request 2026-114'
      tokenmill forget my-store --match texts.txt
    """
    with stoppable("what was begun is ended by the same command", resumes=True):
        result = tokenmill.forget(store, **options)
    show.forget_result(result, as_json=as_json)


@command("options.DedupOptions")
def dedup(*, stores: list[str], options: Asked, as_json: bool) -> None:
    """Write views of stores in which every text is there once.

    Exact, by the hash of a text's ids. The first document in the order of the store stays, and of
    several stores the one in the store that is named first.

    \b
    Examples:
      tokenmill dedup my-store -o unique.view
      tokenmill dedup evaluation web code -o unique/
    """
    with stoppable(VIEW_KEPT):
        result = tokenmill.dedup(stores, **options)
    show.dedup_result(result, as_json=as_json)


TABLE = (
    "Parquet, CSV, JSON Lines or Arrow: a row for each document. Without one, --columns are read"
    " from the files that the store was built of."
)


@command("options.AnnotateOptions", table=TABLE)
def annotate(*, store: str, table: str | None = None, options: Asked, as_json: bool) -> None:
    """Give the documents of a store columns: a score, a language, a domain.

    Conditions of select, the lists of ban, mixtures and inspect then know them by name.

    \b
    Examples:
      tokenmill annotate my-store scores.parquet --key id
      tokenmill annotate my-store --columns lang,url
      tokenmill select my-store --where "quality > 0.5 and lang == 'en'" -o good.view
    """
    with stoppable("no column was written"):
        result = tokenmill.annotate(store, table, **options)
    show.annotate_result(result, as_json=as_json)


@command("trainer.options.TrainOptions")
def train(*, trained: list[str], options: Asked, as_json: bool, quiet: bool) -> None:
    """Train the reference model on a store, or on text that becomes one meanwhile.

    Rows are cut, packed and shuffled as they are read, and are on the device before they are asked
    for. Killed at any moment, the same command with --resume goes on with the same losses. Under
    torchrun it trains on several GPUs.

    \b
    Examples:
      tokenmill train my-store --model tiny --seq-len 256 --steps 100
      tokenmill train corpus/*.jsonl.zst -t tokenizer.json --model small -o run
      tokenmill train my-store --model small --batch-tokens 524288 --steps 1000 -o run --resume
      tokenmill train my-store --model small --steps 50 -o before --feed encode
      torchrun --nproc-per-node 8 -m tokenmill train my-store --model medium --seq-len 16384
    """
    again = same_command()
    again += "" if " --resume" in again else " --resume"
    kept = f"the steps that were made are kept in {options['out']}"
    kept += "" if options["tokenizer"] is None else ", and so are the units of its store"
    kept += f"; go on with:\n  {again}" if options["feed"] == "store" else ""
    with stoppable(kept), watch(TrainView(), quiet=quiet) as tell:
        result = tokenmill.train(trained, on_progress=tell, **options)
    show.train_result(result, as_json=as_json)


TRAINING_TEXT = (
    "The text of your training: any input that `tokenmill build` reads. May be left out with --run,"
    " --stalls or --timeline."
)


@command("options.DiagnoseOptions", inputs=TRAINING_TEXT)
def diagnose(
    *, inputs: list[str] | None = None, options: Asked, as_json: bool, quiet: bool
) -> None:
    """Time your text and tokenizer the ways people do it; say which would starve a GPU.

    Each way is a program with the calls of your tokenizer's package and runs by itself for a second
    or so: one sample at a time, in batches, joined, in a process pool, in DataLoader workers, and
    pretokenized through tokenmill. What it feeds is held against what the GPU takes.

    \b
    Examples:
      tokenmill diagnose data.jsonl -t tokenizer.json --model small
      tokenmill diagnose data/ -t llama/ --tokens-per-second 450000 --gpus 8 --report report.html
      tokenmill diagnose data.jsonl -t tokenizer.json --sweep
      tokenmill diagnose data.jsonl -t tokenizer.json --scripts ways
      tokenmill diagnose --run run/ --report report.html
    """
    view = LineView(lambda number, steps, what: f"[{number}/{steps}] {what}", each=True)
    with stoppable("nothing was kept"), watch(view, quiet=quiet) as on_step:
        found = tokenmill.diagnose(inputs or (), on_step=on_step, **options)
    show.diagnosis_result(found, report=options["report"], as_json=as_json)


@command("options.AuditOptions")
def audit(*, loader: str, options: Asked, as_json: bool) -> None:
    """Read the batches of any loader; say what makes training go wrong, with a row that shows it.

    Padding, labels that are shifted twice or not at all, tokens that never come or come twice, loss
    on prompts, ranks that read the same rows, a resume that is not exact, and more. Exits with 1 if
    anything is found.

    \b
    Examples:
      tokenmill audit my_data:train_loader --store my-store
      tokenmill audit data.py:loader --text corpus.jsonl -t tokenizer.json --labels same
      tokenmill audit my_data:train_loader --store my-store --ranks 2
    """
    with stoppable("nothing was kept"):
        report = tokenmill.audit(loader, **options)
    show.audit_result(report, as_json=as_json)
    if not report.ok:
        raise typer.Exit(1)


@command("interop.base.ExportRequest", also=WRITING)
def export(*, store: str, **asked: Any) -> None:
    """Write a store in another project's format. The same command again resumes.

    The format's index comes last, so an export that has one is complete.

    \b
    Examples:
      tokenmill export my-store --to megatron --out megatron/ --link
      tokenmill export my-store --to llmc --out llmc/ --file-tokens 100000000
      tokenmill export my-store --to mds --out mds/ --seq-len 2048
    """
    write_files("exporting", tokenmill.export, store, **asked)


def write_files(
    verb: str,
    function: Callable[..., ExportResult],
    source: str,
    *,
    options: Asked,
    settings: list[str] | None,
    as_json: bool,
    quiet: bool,
    **flags: bool,
) -> None:
    """What `export` and `convert` do."""
    with stoppable(KEPT_PARTS, resumes=True), watch_amount(verb, "token", quiet=quiet) as tell:
        asked = with_settings(options, settings, **flags)
        result = function(source, on_progress=tell, **asked)
    show.export_result(result, as_json=as_json)


def with_settings(
    options: Asked, settings: list[str] | None, *, link_or_copy: bool = False, merge: bool = False
) -> Asked:
    """The options with the 'name=value' strings among them."""
    if link_or_copy:
        options["link"] = "if-possible"
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            hint = "for example: --set merge=yes"
            raise UsageError(f"--set {text} is not of the form name=value", hint=hint)
        options[name] = value
    return {**options, "merge": True} if merge else options


@command("interop.base.ImportRequest")
def import_(
    *, path: str, options: Asked, settings: list[str] | None, as_json: bool, quiet: bool
) -> None:
    """Make a store of another project's token files. The same command again resumes.

    Documents are kept where the format has boundaries between them. Every id is checked against the
    tokenizer, and the place of its end-of-text is found and written down. Nothing that could
    execute, like a pickle, is ever loaded.

    \b
    Examples:
      tokenmill import data/wiki_text_document -t tokenizer.json -o my-store
      tokenmill import fineweb10B/ --from llmc --split-at-eos -t gpt2/ -o my-store
    """
    with stoppable(KEPT_IMPORT, resumes=True), watch_amount("importing", quiet=quiet) as tell:
        asked = with_settings(options, settings)
        result = tokenmill.import_(path, on_progress=tell, **asked)
    show.import_result(result, as_json=as_json)


@command("interop.base.ConvertRequest", also=WRITING)
def convert(*, path: str, **asked: Any) -> None:
    """Write token files of one format in another. The same command again resumes.

    Raw token files (megatron, datatrove, olmo, nanogpt, llmc) are read where they are; others
    become a store first, inside the out folder, which is removed at the end.

    \b
    Examples:
      tokenmill convert data/wiki_text_document --to mds --out mds/ --seq-len 2048
      tokenmill convert tokens/ --from datatrove --to megatron --out megatron/ --merge
    """
    write_files("converting", tokenmill.convert, path, **asked)


@command("options.DemoOptions")
def demo(*, options: Asked) -> None:
    """See all of it work, in under a minute and without a download.

    Builds a store from the source files of Python's standard library, verifies it, looks inside,
    reads it as training would, and compares the speed with the usual ways on the same text.

    \b
    Example:
      tokenmill demo
    """
    from tokenmill.demo import demo_steps

    with stoppable("the demo can be started again at any time", resumes=True):
        for step in demo_steps(Path(options["out"])):
            show.tell(step)


def note_shadowed(inputs: list[str], *, quiet: bool) -> None:
    """Say on stderr that a file of this folder is read where a corpus has the same name."""
    from tokenmill.sources.discovery import CORPORA, corpus_files

    for name in () if quiet else CORPORA.keys() & set(inputs):
        if corpus_files(name) == name:
            note = f"note: {name!r} is read from this folder; the corpus of that name is"
            print(f"{note} '{CORPORA[name].files}'", file=sys.stderr)


# -------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM: stop in order, then say what is safe and how to go on.

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
