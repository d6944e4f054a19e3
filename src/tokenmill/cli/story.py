"""The demo as a story: what happens, why, and what came of it, step by step."""

from __future__ import annotations

import shlex
from functools import singledispatch
from typing import TYPE_CHECKING

from tokenmill.builder.progress import BuildResult
from tokenmill.builder.verify import VerifyReport
from tokenmill.cli.numbers import compact, count, duration
from tokenmill.cli.output import make_console
from tokenmill.cli.render import build_rows, facts, next_steps
from tokenmill.cli.reports import verify_rows
from tokenmill.cli.show import histogram, length_line, with_borders
from tokenmill.config import format_size
from tokenmill.demo import Comparison, Corpus, Fed, Finished, Heading, Rebuilt, Trained
from tokenmill.inspection import Inspection

if TYPE_CHECKING:
    from tokenmill.demo import Step

SHOWN_TOKENS = 60


@singledispatch
def tell(step: Step) -> None:
    """Print one step of the demo."""
    raise TypeError(f"no words for a step of type {type(step).__name__}")


@tell.register
def _(step: Heading) -> None:
    console = make_console()
    console.print(f"\n{step.number}. {step.title}", style="bold cyan")
    console.print(step.why, style="dim")


@tell.register
def _(step: Corpus) -> None:
    left_out = f" ({count(step.unreadable)} are not UTF-8 and stay out)" if step.unreadable else ""
    what = f"{count(step.documents, 'document')}, {format_size(step.text_bytes)} of text"
    make_console().print(f"{what}{left_out}: {step.path}", soft_wrap=True)


@tell.register
def _(step: Trained) -> None:
    what = f"{count(step.vocab_size)} tokens learned from {format_size(step.text_bytes)}"
    make_console().print(f"{what} in {duration(step.seconds)}: {step.folder}", soft_wrap=True)


@tell.register
def _(step: BuildResult) -> None:
    facts(build_rows(step))


@tell.register
def _(step: Rebuilt) -> None:
    kept = f"{count(step.result.units_resumed, 'unit')} found complete, nothing to do"
    make_console().print(f"{kept}: {duration(step.result.seconds)}")


@tell.register
def _(step: VerifyReport) -> None:
    facts(verify_rows(step))


@tell.register
def _(step: Inspection) -> None:
    console = make_console()
    if step.lengths is not None:
        console.print(f"tokens per document: {length_line(step.lengths)}")
        console.print(histogram(step.lengths.histogram, console=console))
    if step.document is not None:
        coloured = console.is_terminal and not console.no_color
        console.print(f"\nthe first {SHOWN_TOKENS} tokens of document {step.document.number}:")
        console.print(with_borders(step.document.tokens[:SHOWN_TOKENS], coloured=coloured))


@tell.register
def _(step: Fed) -> None:
    again = "exactly the rows that came next" if step.is_same else "OTHER ROWS: this is a bug"
    facts(
        [
            (
                "rows",
                f"{count(step.rows)} of {count(step.seq_len)} tokens: whole documents, packed",
            ),
            ("first batch", f"{duration(step.first_batch_seconds)} after opening, plan included"),
            ("rate", f"{compact(step.tokens_per_second)} tokens/s, shuffled, in one thread"),
            ("resumed", f"after step {count(step.steps)}, on {step.ranks} ranks: {again}"),
        ]
    )


@tell.register
def _(step: Comparison) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way")
    for heading in ("MB/s", "tokens/s", "times faster"):
        table.add_column(heading, justify="right")
    first = step.ways[0]
    for way in step.ways:
        table.add_row(
            way.name,
            f"{way.bytes_per_second / 1e6:,.1f}",
            compact(way.tokens / way.seconds),
            f"{way.bytes_per_second / first.bytes_per_second:,.1f}",
        )
    console = make_console()
    console.print(table)
    console.print(
        "tokenmill also read the JSON, checked ids against the reference and wrote the store;"
        " the others only encoded text that was in memory already. Start-up is paid once, however"
        " large the input.",
        style="dim",
    )


@tell.register
def _(step: Finished) -> None:
    store, corpus, tokenizer = (shlex.quote(p) for p in (step.store, step.corpus, step.tokenizer))
    make_console().print(f"\nDone in {duration(step.seconds)}. The store is in {store}. Try:")
    next_steps(
        f"tokenmill inspect {store}",
        f"tokenmill inspect {store} --doc 7",
        f"tokenmill layout {store} --seq-len 2048",
        f"tokenmill plan {corpus} -t {tokenizer}",
        f"tokenmill build {corpus} -t {tokenizer} -o my-store",
    )
