"""Results on stdout, for people as facts and tables, for programs as one JSON object."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from functools import singledispatch
from typing import TYPE_CHECKING

from tokenmill.builder.progress import BuildResult
from tokenmill.builder.verify import VerifyReport
from tokenmill.cli.output import make_console, print_json
from tokenmill.demo import Comparison, Corpus, Fed, Finished, Heading, Rebuilt, Trained
from tokenmill.inspection import Inspection
from tokenmill.visible import visible, visible_lines
from tokenmill.words import compact, count, duration, format_size, of_budget, rate, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tokenmill.builder.estimate import BuildPlan
    from tokenmill.builder.progress import RowLengths
    from tokenmill.demo import Step
    from tokenmill.diagnosis.values import Diagnosis
    from tokenmill.inspection import DocumentView, LengthBin, Lengths, Token
    from tokenmill.interop.export import ExportResult
    from tokenmill.interop.imports import ImportResult
    from tokenmill.loader.packing import Account, LayoutReport
    from tokenmill.store.facts import Counts, SplitTotals
    from tokenmill.trainer.options import TrainResult


# -------------------------------------------------------------------------------------------------
# Results as tables on stdout: the pieces, and the summary of a build.

Row = tuple[str, str]

LABEL_COLUMNS = 12
SHORT_SECONDS = 2.0
"""Below this, a rate is mostly the opening and closing of files."""


def facts(rows: Iterable[Row]) -> None:
    """Print names and values in two columns; rows without a value are left out."""
    console = make_console()
    for name, value in rows:
        lines = [
            piece
            for line in value.split("\n")
            for piece in _wrap(visible(line), width=max(console.width - LABEL_COLUMNS, 40))
        ]
        for number, line in enumerate(lines):
            _labelled(console, "" if number else name, line)


def next_steps(*commands: str) -> None:
    """Print commands to try, unbroken, so that they can be copied."""
    console = make_console()
    for number, command in enumerate(commands):
        _labelled(console, "" if number else "next", visible(command))


def _labelled(console: Console, label: str, line: str) -> None:
    from rich.text import Text

    console.print(
        Text(label.ljust(LABEL_COLUMNS), style="bold").append(line, "not bold"), soft_wrap=True
    )


def _wrap(line: str, *, width: int) -> list[str]:
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


def grid(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: Sequence[str] = ()
) -> Table:
    """A table of numbers with names before them; columns headed `left` follow."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate((*headings, *left)):
        is_number = 0 < number < len(headings)
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def build_result(
    result: BuildResult, *, as_json: bool, standing: str = "complete and up to date"
) -> None:
    """Print what a build did and what the store holds now; `standing` is said if it did nothing."""
    if as_json:
        print_json(
            result,
            working_seconds=result.working_seconds,
            bytes_per_second=_per_second(result.built.input_bytes, result),
            tokens_per_second=_per_second(result.built.tokens, result),
        )
        return
    store = visible(result.store)
    whole = store if result.part is None else f"part {result.part} of {store}"
    if result.nothing_to_do:
        print(f"nothing to do: {whole} is {standing}")
    facts(build_rows(result))
    for warning in result.warnings:
        make_console(stderr=True).print(visible(f"warning: {warning}"), soft_wrap=True)
    store = shlex.quote(result.store)
    if result.part is not None and not result.nothing_to_do:
        next_steps(f"tokenmill finish {store}    when all parts are built")
        return
    next_steps(
        f"tokenmill inspect {store}",
        f"tokenmill verify {store}",
        f"tokenmill layout {store} --seq-len 2048",
    )


def build_rows(result: BuildResult) -> list[Row]:
    """The facts of a build, in the order of a reader's questions."""
    totals = result.totals
    rows = [
        ("store", visible(result.store)),
        ("part", "" if result.part is None else f"{result.part}; what follows is of it alone"),
        ("documents", f"{count(totals.documents)}{left_out(totals)}"),
        ("tokens", tokens_text(result)),
        ("splits", splits_text(result.splits)),
        ("counted", _counted(result)),
        ("lengths", _lengths(result)),
        ("cut off", _cuts(result)),
        ("rejects", _rejects(result)),
        ("not read", first_of(result.skipped_files)),
        ("engine", _engine(result)),
    ]
    if result.nothing_to_do:
        return rows
    if not result.units_built:
        return [*rows, ("units", _units(result)), ("time", duration(result.seconds))]
    startup = f"{duration(result.startup_seconds)} of it start-up"
    startup += f", with {count(result.workers, 'worker')}"
    stage = result.limiting_stage
    limits = "" if stage is None else f"{stage} ({stage_shares(result.stage_seconds)})"
    return [
        *rows,
        ("units", _units(result)),
        ("rate", _rate(result)),
        ("time", f"{duration(result.seconds)}, {startup}"),
        (
            "memory",
            f"{of_budget(result.peak_memory_bytes, result.memory_budget_bytes)} at the peak",
        ),
        ("limited by", limits),
    ]


def tokens_text(of: BuildResult | Inspection) -> str:
    """How many tokens there are, of which type, and how much text they hold."""
    ratio = of.bytes_per_token
    held = "" if ratio is None else f", {ratio:.2f} bytes of text per token"
    return f"{count(of.totals.tokens)} as {of.dtype}{held}"


def _per_second(number: int, result: BuildResult) -> float | None:
    return number / result.working_seconds if result.working_seconds > 0 else None


def left_out(totals: Counts) -> str:
    """' of 12 rows (1 empty, 2 rejected)'; an empty string where each row is one document."""
    parts = [
        f"{count(number)} {word}"
        for number, word in (
            (totals.empty, "empty"),
            (totals.rejected, "rejected"),
            (totals.skipped, "beyond the limit"),
        )
        if number
    ]
    if totals.split_rows:
        parts.append(f"{count(totals.split_rows)} split into {count(totals.pieces)}")
    return f" of {count(totals.rows, 'row')} ({', '.join(parts)})" if parts else ""


def splits_text(splits: Mapping[str, SplitTotals]) -> str:
    """One line for each split."""
    return "\n".join(
        f"{visible(name)}: {count(split.documents, 'document')}, {count(split.tokens, 'token')},"
        f" {count(split.shards, 'shard')}"
        for name, split in splits.items()
    )


def _counted(result: BuildResult) -> str:
    tokens = None if result.lengths is None else result.lengths.counted_tokens
    if tokens is None:
        return ""
    return f"{count(tokens)} tokens ({share(tokens, result.totals.tokens)}) count for the loss"


def _lengths(result: BuildResult) -> str:
    """Tokens per row, and what became of those that were too long."""
    lengths = result.lengths
    if lengths is None:
        return ""
    shown = percentiles(lengths)
    extent = f"{count(lengths.shortest)} to {count(lengths.longest)} tokens a row"
    lines = [f"{extent}, mean {lengths.mean:,.1f}; percentiles: {shown}"]
    if lengths.max_length is not None:
        lines.append(_too_long(lengths, lengths.max_length))
    return "\n".join(lines)


def _too_long(lengths: RowLengths, limit: int) -> str:
    if lengths.too_long == "reject":
        return f"{count(lengths.rejected_too_long, 'row')} over {count(limit)} tokens rejected"
    if lengths.too_long == "truncate" and lengths.cut_off is not None:
        return f"{count(lengths.cut_off, 'row')} over {count(limit)} tokens cut off"
    if lengths.too_long == "truncate":
        return f"{count(lengths.at_limit, 'row')} of {count(limit)} tokens: cut off, or as long"
    over = f"{count(lengths.split_rows, 'row')} over {count(limit)} tokens"
    if not lengths.split_rows:
        return over
    silent = lengths.silent_documents
    note = f", in {count(silent)} of which nothing counts" if silent else ""
    return f"{over} split into {count(lengths.pieces, 'document')}{note}"


def _cuts(result: BuildResult) -> str:
    """What other limits would take away, one line for each."""
    if result.lengths is None or not result.lengths.cuts:
        return ""
    totals = result.totals
    rows, tokens = totals.documents - totals.pieces + totals.split_rows, totals.tokens
    return "\n".join(
        f"at {count(cut.limit)} tokens: {count(cut.rows, 'row')} ({share(cut.rows, rows)}),"
        f" {count(cut.tokens, 'token')} ({share(cut.tokens, tokens)})"
        for cut in result.lengths.cuts
    )


def _rejects(result: BuildResult) -> str:
    if not result.totals.rejected:
        return ""
    where = visible(shlex.quote(f"{result.store}/rejects"))
    unlisted = result.totals.unlisted
    listed = f"all but {count(unlisted)}, which are counted" if unlisted else "each"
    return f"{count(result.totals.rejected, 'row')}; file, row and reason of {listed}: {where}"


def first_of(skipped: Sequence[tuple[str, str]]) -> str:
    """Files that were left out, with the reason, the first of them by name."""
    lines = [visible(f"{path}: {reason}") for path, reason in skipped[:3]]
    if len(skipped) > len(lines):
        lines.append(f"... and {count(len(skipped) - len(lines), 'more file')}")
    return "\n".join(lines)


def _engine(result: BuildResult) -> str:
    if result.engine == result.reference:
        return with_note(result.engine, result.engine_note)
    checked = count(result.checked_documents, "document")
    if result.checked_bytes:
        checked += f" ({count(result.checked_bytes, 'byte')} encoded again in this run)"
    verdict = f"equal to {result.reference} on the probes and on {checked} of this input"
    if result.redone_units:
        again = count(len(result.redone_units), "unit")
        verdict = (
            f"differed from {result.reference} on {count(result.mismatches)} of {checked};"
            f" {again} done again by {result.reference}"
        )
    return f"{result.engine}, {verdict}"


def with_note(engine: str, note: str | None) -> str:
    """An engine and why it is this one."""
    return f"{engine} ({note})" if note else engine


def _units(result: BuildResult) -> str:
    built, kept = result.units_built, result.units_resumed
    if not built:
        return f"{count(kept)}, all built before" if kept else "none of the input"
    return f"{count(built)} built" + (f", {count(kept)} kept from before" if kept else "")


def _rate(result: BuildResult) -> str:
    seconds = result.working_seconds
    if seconds <= 0:
        return ""
    tokens = f"{result.built.tokens / seconds:,.0f} tokens/s"
    caveat = "start-up left out" if seconds > SHORT_SECONDS else "so short a run says little"
    return f"{rate(result.built.input_bytes, seconds)}, {tokens} ({caveat})"


def stage_shares(stage_seconds: Mapping[str, float]) -> str:
    """'encode 61.0%, parse 20.1%, ...' of the workers' time, largest first.

    Writing goes on beside the others: it takes none of that time but what is waited for it.
    """
    stages = {name: seconds for name, seconds in stage_seconds.items() if name != "write"}
    total = sum(stages.values())
    largest = sorted(stages.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {share(seconds, total)}" for name, seconds in largest if seconds)
    written = stage_seconds.get("write", 0.0)
    beside = f"; writes took {duration(written)} beside them" if written else ""
    return f"{shares}{beside}"


BAR_COLUMNS = 40
SHOWN_SOURCES = 8
GROUP_OF_TEXTS = "text//"
"""How the names of groups of small text files begin: a row of them is a file."""
SHOWN_TOKENS = 2000
"""Of one document; --json gives all of them."""
EVEN, ODD = "black on light_sky_blue1", "black on light_goldenrod1"
PALE_EVEN, PALE_ODD = "grey42 on grey89", "grey42 on grey82"
"""Of tokens that do not count for the loss."""
OPEN, CLOSE = "[[", "]]"
"""Around tokens that count, where there is no colour."""
IMPORT = "import"
"""Says in the configuration of a store that its tokens came from elsewhere, and in which format."""
NEWLINE = "\u21b5"


def inspection_result(inspection: Inspection, *, as_json: bool) -> None:
    """Print the document that was asked for, or else all about the store."""
    if as_json:
        print_json(inspection, bytes_per_token=inspection.bytes_per_token)
    elif inspection.document is not None:
        document(inspection.document)
    else:
        overview(inspection)


def overview(inspection: Inspection) -> None:
    """Print everything but a document."""
    console = make_console()
    facts(store_rows(inspection))
    if inspection.lengths is not None:
        console.print(heading("\ntokens per document", of_split(inspection)))
        console.print(length_line(inspection.lengths))
        console.print(histogram(inspection.lengths.histogram, console=console))
        rest = f"{of_split(inspection)}, {counted(inspection)}"
        console.print(heading("\nmost frequent tokens", rest))
        console.print(top_tokens(inspection))
    console.print()
    store = shlex.quote(inspection.store)
    next_steps(f"tokenmill inspect {store} --doc 0", f"tokenmill verify {store}")


def heading(name: str, rest: str) -> Text:
    """A line that begins in bold."""
    from rich.text import Text

    return Text(name, style="bold").append(rest, "not bold")


def store_rows(inspection: Inspection) -> list[tuple[str, str]]:
    """The facts of a store, in the order of a reader's questions."""
    totals = inspection.totals
    reasons = [f"{count(rows)} {reason}" for reason, rows in inspection.rejects.items()]
    where = visible(shlex.quote(f"{inspection.store}/rejects"))
    listed = f"all but {count(totals.unlisted, 'row')}" if totals.unlisted else "every row"
    ids, fingerprint = f"{count(inspection.vocab_size)} ids", inspection.tokenizer_fingerprint[:12]
    return [
        ("store", visible(f"{inspection.store}, written by {inspection.created_by}")),
        ("documents", f"{count(totals.documents)}{left_out(totals)}"),
        ("tokens", tokens_text(inspection)),
        ("rows", shape_text(inspection)),
        ("mask", mask_text(inspection)),
        ("splits", splits_text(inspection.splits)),
        ("rejects", f"{', '.join(reasons)}; {listed}: {where}" if reasons else ""),
        ("sources", sources_text(inspection)),
        ("tokenizer", f"{inspection.tokenizer_kind}, {ids}, sha256 {fingerprint}..."),
        ("borders", borders_text(inspection)),
        ("specials", specials_text(inspection)),
        ("engine", engines_text(inspection)),
    ]


TRAINED_ON = {
    "assistant": "what the assistant says counts",
    "last": "the assistant's last message counts",
    "all": "everything counts",
}
LONG_ROWS = {
    "split": "longer ones are split",
    "truncate": "longer ones are cut off",
    "reject": "longer ones were rejected",
}


def shape_text(inspection: Inspection) -> str:
    """What rows were made into; an empty string where each is the text of one field."""
    config = inspection.config
    shape, template = config.get("format"), config.get("template")
    parts = []
    if shape == "chat":
        parts.append(f"chats; {TRAINED_ON[str(config['train_on'])]}")
    elif shape == "prompt-completion":
        names = template or f"{{{config['prompt_field']}}}{{{config['completion_field']}}}"
        parts.append(f"{names!r}; {config['completion_field']} counts")
    elif template is not None:
        parts.append(repr(template))
    if (limit := config.get("max_length")) is not None:
        parts.append(
            f"at most {count(int(str(limit)))} tokens, {LONG_ROWS[str(config['too_long'])]}"
        )
    return "; ".join(parts)


def mask_text(inspection: Inspection) -> str:
    """The share of tokens that count; an empty string where there are no masks."""
    mask = inspection.mask
    if mask is None:
        return ""
    counting = f"{count(mask.counted)} of {count(mask.tokens)} tokens{of_split(inspection)} count"
    text = f"{counting} for the loss ({share(mask.counted, mask.tokens)})"
    if not mask.silent:
        return text
    silent = count(mask.silent, "document has", plural="documents have")
    return f"{text}; {silent} no token that counts: nothing is learned there"


SPECIAL_TOKENS = {
    "text": "special-token strings inside documents are ordinary characters",
    "parse": "special-token strings inside documents became special tokens",
    "reject": "documents with special-token strings were rejected",
}


def specials_text(inspection: Inspection) -> str:
    if IMPORT in inspection.config:
        return "what became of special-token strings in the text is not known"
    return SPECIAL_TOKENS[inspection.special_tokens]


def sources_text(inspection: Inspection) -> str:
    groups = [one for one in inspection.sources if one.path.startswith(GROUP_OF_TEXTS)]
    sources = [one for one in inspection.sources if not one.path.startswith(GROUP_OF_TEXTS)]
    lines = [
        f"{visible(source.path)} ({format_size(source.size)}, {count(source.rows, 'row')})"
        for source in sources[:SHOWN_SOURCES]
    ]
    if len(sources) > SHOWN_SOURCES:
        lines.append(f"... and {count(len(sources) - SHOWN_SOURCES, 'more file')}")
    if groups:
        size = format_size(sum(group.size for group in groups))
        lines.append(f"{count(sum(group.rows for group in groups), 'text file')} ({size})")
    return "\n".join(lines)


def borders_text(inspection: Inspection) -> str:
    what = "row" if inspection.totals.pieces else "document"
    if inspection.config.get("too_long") == "truncate":
        what += " that was not cut off"
    parts = [
        f"{visible(border.token)} ({border.id}) at the {border.position} of every {what}"
        for border in (inspection.bos, inspection.eos)
        if border is not None
    ]
    return ", ".join(parts) or "no token between documents"


def engines_text(inspection: Inspection) -> str:
    lines = []
    for entry in inspection.engines:
        line = f"{entry.name} {entry.version}, {count(entry.units, 'unit')}"
        if IMPORT in inspection.config:
            units = count(entry.units, "unit")
            line = (
                f"imported from {inspection.config[IMPORT]} by tokenmill {entry.version}, {units}"
            )
        elif entry.name != entry.reference:
            line += (
                f"; {count(entry.checked_documents, 'document')} checked against"
                f" {entry.reference} {entry.reference_version}, {count(entry.mismatches)} differed"
            )
        if entry.redone_units:
            line += f", {count(entry.redone_units, 'unit')} done again by {entry.reference}"
        lines.append(line)
    return "\n".join(lines)


def of_split(inspection: Inspection) -> str:
    return "" if inspection.split is None else f" of {visible(inspection.split)}"


def counted(inspection: Inspection) -> str:
    tokens = count(inspection.tokens_counted)
    seen = f"{count(inspection.ids_seen)} of {count(inspection.vocab_size)} ids occur"
    split = inspection.split
    total = inspection.totals.tokens if split is None else inspection.splits[split].tokens
    if inspection.tokens_counted < total:
        return f"in a sample of {tokens} tokens ({seen} in it)"
    return f"of all {tokens} ({seen})"


def length_line(lengths: Lengths) -> str:
    return (
        f"shortest {count(lengths.shortest)}, mean {lengths.mean:,.1f},"
        f" longest {count(lengths.longest)}\npercentiles: {percentiles(lengths)}"
    )


def percentiles(lengths: Lengths | RowLengths) -> str:
    return ", ".join(f"{p}% {count(value)}" for p, value in lengths.percentiles.items())


def histogram(bins: Sequence[LengthBin], *, console: Console) -> Table:
    """One bar for each power of two."""
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    total = sum(one.documents for one in bins)
    largest = max(one.documents for one in bins)
    block = "#" if console.options.ascii_only else "\u2588"
    for one in bins:
        bar = block * -(-BAR_COLUMNS * one.documents // largest)
        low, high = count(one.low), count(one.high - 1)
        table.add_row(
            low,
            "" if low == high else f"to {high}",
            bar,
            count(one.documents),
            share(one.documents, total),
        )
    return table


def top_tokens(inspection: Inspection) -> Table:
    """Two columns of tokens, by frequency."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for justify in ("right", "left", "right", "right") * 2:
        table.add_column(justify=justify, no_wrap=True)
    cells = [
        (str(top.id), Text(repr(top.text)), compact(top.count), f"{100 * top.share:.1f}%")
        for top in inspection.top_tokens
    ]
    half = -(-len(cells) // 2)
    for number in range(half):
        right = cells[number + half] if number + half < len(cells) else ()
        table.add_row(*cells[number], *right)
    return table


def document(view: DocumentView) -> None:
    """Print a document with the borders of its tokens, its ids and its origin."""
    console = make_console()
    shown = view.tokens[:SHOWN_TOKENS]
    tokens = count(len(view.tokens), "token")
    console.print(heading(f"document {count(view.number)} of {visible(view.split)}", f": {tokens}"))
    line = "" if view.line is None else f", line {count(view.line)}"
    piece = "" if view.pieces == 1 else f", piece {view.piece + 1} of {view.pieces}"
    place = f"from {visible(view.path)}, row {count(view.row)}{line}{piece}\n"
    console.print(place, soft_wrap=True)
    coloured = console.is_terminal and not console.no_color
    if said := counting_line(view, coloured=coloured):
        console.print(said + "\n", soft_wrap=True)
    console.print(with_borders(shown, coloured=coloured), soft_wrap=True)
    console.print("\nids", style="bold")
    console.print(" ".join(str(token.id) for token in shown), soft_wrap=True)
    if len(shown) < len(view.tokens):
        rest = count(len(view.tokens) - len(shown), "more token")
        console.print(f"... and {rest}; all of them: add --json")


def counting_line(view: DocumentView, *, coloured: bool) -> str:
    """How to tell the tokens that count; an empty string where there are no masks."""
    if not view.tokens or view.tokens[0].counts is None:
        return ""
    counting = sum(token.counts is True for token in view.tokens)
    how = "the grey ones do not" if coloured else f"those in {OPEN} {CLOSE}"
    of_all = f"{count(counting)} of {count(len(view.tokens))}"
    return f"{of_all} count for the loss ({share(counting, len(view.tokens))}): {how}"


def with_borders(tokens: Sequence[Token], *, coloured: bool) -> Text:
    """The text of the tokens, on two alternating backgrounds or with | between them.

    Tokens that do not count for the loss are grey; without colour, those that do stand in [[ ]].
    """
    from rich.text import Text

    text = Text()
    inside = False
    for number, token in enumerate(tokens):
        shown = visible_lines(token.text)
        if coloured:
            shown = shown.replace("\n", f"{NEWLINE}\n")
            even, odd = (PALE_EVEN, PALE_ODD) if token.counts is False else (EVEN, ODD)
            text.append(shown, style=odd if number % 2 else even)
            continue
        opens, closes = token.counts is True and not inside, inside and not token.counts
        inside = token.counts is True
        border = "|" if number else ""
        text.append(f"{CLOSE if closes else ''}{border}{OPEN if opens else ''}{shown}")
    if inside:
        text.append(CLOSE)
    return text


# -------------------------------------------------------------------------------------------------
# What `plan` expects, what `layout` counted and what `verify` found, as tables on stdout.


def plan_result(planned: BuildPlan, *, as_json: bool) -> None:
    """Print what a build would do and take."""
    if as_json:
        print_json(planned)
    else:
        facts(plan_rows(planned))


def plan_rows(planned: BuildPlan) -> list[Row]:
    """The facts of a plan; all that comes from the sample is marked with 'about'."""
    units = planned.units_to_build
    number = "an unknown number of units" if units is None else count(units, "unit")
    done = f", {count(planned.units_complete)} are complete" if planned.units_complete else ""
    budget = f"{format_size(planned.memory_budget_bytes)} for {count(planned.workers, 'worker')}"
    largest = format_size(planned.max_document_bytes)
    start = f"{visible(planned.bos)} before, " if planned.bos else ""
    end = f"{visible(planned.eos)} after" if planned.eos else "nothing after"
    documents, bad = count(planned.sample_documents, "document"), planned.sample_rejected
    rejected = f", {count(bad, 'row')} rejected" if bad else ""
    return [
        ("input", f"{count(planned.files, 'file')}, {format_size(planned.input_bytes)}"),
        ("not read", first_of(planned.skipped_files)),
        ("to build", f"{number}, {format_size(planned.bytes_to_build)} of input{done}"),
        ("documents", f"about {count(planned.estimated_documents)}"),
        ("tokens", f"about {count(planned.estimated_tokens)} as {planned.dtype}"),
        ("disk", f"about {format_size(planned.estimated_disk_bytes)}"),
        ("time", f"about {duration(planned.estimated_seconds)} beside the start-up"),
        ("memory", f"{budget}; rows of more than {largest} are rejected"),
        ("engine", with_note(planned.engine, planned.engine_note)),
        ("borders", f"{start}{end} each document"),
        ("sample", f"{format_size(planned.sample_bytes)}, {documents}{rejected}"),
    ]


def verify_result(report: VerifyReport, *, store: str, as_json: bool) -> None:
    """Print what a verification found; every finding is one line."""
    if as_json:
        print_json(report, ok=report.ok, store=store)
        return
    console = make_console()
    facts(verify_rows(report))
    for finding in report.findings:
        console.print(visible(f"{finding.file}: {finding.problem}"), style="red", soft_wrap=True)
    for note in report.notes:
        console.print(visible(f"note: {note.file}: {note.problem}"), soft_wrap=True)


def verify_rows(report: VerifyReport) -> list[Row]:
    """The verdict and what it rests on."""
    found = count(len(report.findings), "problem")
    again = f"{count(report.documents_reencoded, 'document')} encoded again by {report.reference}"
    missing = ""
    if report.documents_unavailable:
        missing = f"; {count(report.documents_unavailable)} could not be: their source is gone"
    return [
        ("verdict", "whole and right" if report.ok else f"NOT whole: {found}"),
        ("files", f"{count(report.files)} of {format_size(report.bytes)}: checksums, indexes, ids"),
        (
            "documents",
            f"{again}, {count(report.mismatches)} differ{missing}" if report.reference else "",
        ),
    ]


def layout_result(report: LayoutReport, *, as_json: bool) -> None:
    """Print a line of numbers and a sentence for each packing."""
    if as_json:
        steps = {account.packing: report.steps(account) for account in report.accounts}
        print_json(report, steps=steps)
        return
    split = "all splits" if report.split is None else f"split {visible(report.split)}"
    held = f"{count(report.documents, 'document')}, {count(report.tokens, 'token')}"
    if report.counted is not None:
        held += f", of which {count(report.counted)} count for the loss"
    facts([("store", f"{visible(report.store)}, {split}: {held}")])
    console = make_console()
    header, *lines = layout_table(report)
    console.print(f"\n{header}", style="bold", soft_wrap=True)
    console.print("\n".join(lines), end="\n\n", soft_wrap=True)
    facts((account.packing, account.sentence) for account in report.accounts)
    facts([("best", layout_advice(report)), ("epoch", layout_epochs(report))])


def layout_table(report: LayoutReport) -> list[str]:
    """A line of names, and one of numbers for each packing; never cut off, however wide."""
    names = ("packing", "rows", "tokens used", "padded", "split documents", "dropped", "targets")
    cells = [names, *map(_numbers, report.accounts)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def _numbers(account: Account) -> tuple[str, ...]:
    return (
        account.packing,
        count(account.rows),
        count(account.used),
        share(account.padding, account.places),
        count(account.split_documents),
        count(account.dropped),
        count(account.targets),
    )


def layout_advice(report: LayoutReport) -> str:
    """What best-fit gives and takes beside concat; an empty string where one is not there."""
    by_name = {account.packing: account for account in report.accounts}
    concat, best_fit = by_name.get("concat"), by_name.get("best-fit")
    if concat is None or best_fit is None or not concat.rows:
        return ""
    whole = concat.split_documents - best_fit.split_documents
    more = best_fit.rows - concat.rows
    cost = f"for {share(more, concat.rows)} more rows" if more > 0 else "and takes no more rows"
    if whole <= 0:
        return "concat: it splits no document that best-fit would keep whole"
    return f"best-fit: it keeps {concat.documents_of(whole)} whole that concat splits, {cost}"


def layout_epochs(report: LayoutReport) -> str:
    """Steps of one epoch, packing by packing; an empty string where no batch size was given."""
    lines = []
    for account in report.accounts:
        steps = report.steps(account)
        if steps is None or report.batch_size is None:
            return ""
        last = account.rows % report.batch_size
        partial = f", the last one of {count(last, 'row')}" if last else ""
        batch = count(report.batch_size, "row")
        lines.append(f"{account.packing}: {count(steps, 'step')} of {batch}{partial}")
    return "\n".join(lines)


def export_result(result: ExportResult, *, as_json: bool) -> None:
    """Print what an export made."""
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


def train_result(result: TrainResult, *, as_json: bool) -> None:
    """The summary, once, on stdout."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(result)
        return
    facts(summary(result))


def summary(result: TrainResult) -> Iterator[tuple[str, str]]:
    """What is worth saying at the end."""
    resumed = "" if result.resumed_from is None else f", from step {count(result.resumed_from)} on"
    yield "trained", f"{count(result.steps, 'step')}{resumed}, {count(result.tokens)} tokens"
    yield "parameters", count(result.parameters)
    val = "" if result.val_loss is None else f", on val {result.val_loss:.4f}"
    yield "loss", f"{result.loss:.4f}{val}"
    if result.tokens_per_second is not None:
        mfu = "" if result.mfu is None else f", {100 * result.mfu:.1f}% of the device's peak"
        yield "speed", f"{count(round(result.tokens_per_second))} tokens/s{mfu}"
    if result.wait_p99_ms is not None:
        share = 100 * (result.wait_share or 0.0)
        yield "waiting", f"{share:.2f}% of the time for data, p99 {result.wait_p99_ms:.3f} ms"
    yield "memory", format_size(result.memory_bytes)
    yield "time", duration(result.seconds)
    yield "checkpoint", str(result.checkpoint)
    for note in result.notes:
        yield "note", note


# -------------------------------------------------------------------------------------------------
# A diagnosis: the ways as a table, then what they mean, then what to type.

STATE_COLOURS = {"fed": "green", "borderline": "yellow", "starved": "red"}


def diagnosis_result(found: Diagnosis, *, report: Path | None, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        from tokenmill.diagnosis.values import as_json as diagnosis_json

        print(json.dumps(diagnosis_json(found), indent=2))
        return
    console = make_console()
    if found.ways:
        facts(_diagnosed(found))
        console.print()
        console.print(ways_table(found))
        console.print()
        facts([("needed" if not n else "", need) for n, need in enumerate(_needs(found))])
    for line in found.advice:
        console.print()
        console.print(visible(line))
    if found.sweep:
        console.print()
        console.print(sweep_table(found))
    if found.recommendation is not None:
        console.print()
        facts([("use", "\n".join(found.recommendation.reasons))])
    console.print()
    next_steps(*found.commands)
    if report is not None:
        facts([("report", str(report))])


def _diagnosed(found: Diagnosis) -> list[Row]:
    assert found.sample is not None
    text = f"{count(found.sample.documents, 'document')}, {format_size(found.sample.text_bytes)}"
    return [
        ("text", text),
        ("tokenizer", found.tokenizer or ""),
        ("machine", found.machine.describe()),
    ]


def _needs(found: Diagnosis) -> Iterator[str]:
    for need in found.demands:
        all_of_them = f", {need.gpus} GPUs {compact(need.total)}" if need.gpus > 1 else ""
        rate = f"{compact(need.tokens_per_second)} tokens/s for a GPU{all_of_them}"
        yield f"{need.name}: {rate} ({need.origin})"
    yield found.demands[0].basis


def ways_table(found: Diagnosis) -> Table:
    """What each way reached; fits into 80 columns."""
    from rich.text import Text

    from tokenmill.diagnosis.values import STATES

    states = {each.way: each.state for each in found.verdicts} if len(found.demands) == 1 else {}
    rows: list[list[str | Text]] = []
    for way in found.ways:
        state = states.get(way.key, "")
        cells = ["failed", *[""] * 4] if way.problem is not None else way.cells()
        said = [Text(STATES.get(state, ""), STATE_COLOURS.get(state, ""))] if states else []
        rows.append([way.title, *cells, *said])
    headings = ("way", "tokens/s", "ms for 1", "for 8", "cores", "memory")
    return grid(headings, rows, left=("",) if states else ())


def sweep_table(found: Diagnosis) -> Table:
    """Every setting that was tried."""
    titles = {way.key: way.title for way in found.ways}
    rows = [
        (
            titles[point.key],
            str(point.workers),
            "" if point.key == "build" else str(point.batch),
            compact(point.tokens_per_second),
            f"{point.cpu_cores:.1f}",
            format_size(point.peak_memory_bytes),
        )
        for point in found.sweep
    ]
    return grid(("setting", "workers", "batch", "tokens/s", "cores", "memory"), rows)


# -------------------------------------------------------------------------------------------------
# The demo as a story: what happens, why, and what came of it, step by step.

STORY_TOKENS = 60


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
        console.print(f"\nthe first {STORY_TOKENS} tokens of document {step.document.number}:")
        console.print(with_borders(step.document.tokens[:STORY_TOKENS], coloured=coloured))


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
    rates = [way.text_bytes / way.seconds for way in step.ways.values()]
    rows = [
        (name, f"{rate / 1e6:,.1f}", compact(way.tokens / way.seconds), f"{rate / rates[0]:,.1f}")
        for rate, (name, way) in zip(rates, step.ways.items(), strict=True)
    ]
    console = make_console()
    console.print(grid(("way", "MB/s", "tokens/s", "times faster"), rows))
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
