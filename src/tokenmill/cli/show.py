"""Results on stdout, for people as facts and tables, for programs as one JSON object.

A result is told as rows of a label and a value; rows without a value are left out.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import textwrap
from typing import TYPE_CHECKING, Any

from tokenmill.cli.output import make_console, print_json
from tokenmill.options import CHAT_COMPLETION, CHAT_PREFERENCE, PREFERENCE
from tokenmill.visible import visible, visible_lines
from tokenmill.words import (
    compact,
    count,
    duration,
    examples,
    format_size,
    listed,
    of_budget,
    rate,
    share,
    small_share,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tokenmill.annotating import AnnotateResult
    from tokenmill.auditing.checks import AuditReport
    from tokenmill.builder.progress import BuildResult, RowLengths
    from tokenmill.builder.run import BuildPlan
    from tokenmill.builder.verify import VerifyReport
    from tokenmill.demo import Step
    from tokenmill.diagnosis.values import Diagnosis
    from tokenmill.files import PathInput
    from tokenmill.forgetting import ForgetResult
    from tokenmill.history import DocumentTrace, LedgerGroup, LedgerResult, TraceResult
    from tokenmill.inspection import (
        DocumentView,
        Inspection,
        LengthBin,
        Lengths,
        Recovery,
        Token,
    )
    from tokenmill.interop.export import ExportResult
    from tokenmill.interop.imports import ImportResult
    from tokenmill.loader.loader import Showing
    from tokenmill.loader.packing import LayoutReport
    from tokenmill.search import GrepResult
    from tokenmill.selection import DedupResult, ViewResult
    from tokenmill.store.documents import Group
    from tokenmill.store.facts import (
        BoundaryToken,
        Counts,
        ForgottenReason,
        SourceEntry,
        SplitTotals,
        UnknownFacts,
    )
    from tokenmill.store.snapshots import PruneResult
    from tokenmill.store.views import Gone
    from tokenmill.supervised.fim import FimParts
    from tokenmill.trainer.options import TrainResult

    Row = tuple[str, str]

LABEL_COLUMNS = 12
SHORT_SECONDS = 2.0  # below this, a rate is mostly the opening and closing of files


def facts(*rows: Row) -> None:
    """Print names and values in two columns; rows without a value are left out."""
    console = make_console()
    width = max(console.width - LABEL_COLUMNS, 40)
    for name, value in rows:
        lines: list[str] = []
        for line in value.split("\n"):
            lines += textwrap.wrap(
                visible(line), width, break_long_words=False, break_on_hyphens=False
            )
        _labelled(console, name, lines)


def next_steps(*commands: str) -> None:
    """Print commands to try, unbroken, so that they can be copied."""
    _labelled(make_console(), "next", map(visible, commands))


def _labelled(console: Console, label: str, lines: Iterable[str]) -> None:
    from rich.text import Text

    for line in lines:
        text = Text(label.ljust(LABEL_COLUMNS), style="bold").append(line, "not bold")
        console.print(text, soft_wrap=True)
        label = ""


def grid(justify: str, rows: Iterable[Sequence[str | Text]], *headings: str, gap: int = 2) -> Table:
    """A table, mostly of numbers; `justify` has an l or an r for each column."""
    from rich.table import Table

    table = Table.grid(padding=(0, gap))
    table.show_header, table.header_style = bool(headings), "bold"
    for side, heading in itertools.zip_longest(justify, headings, fillvalue=""):
        table.add_column(heading, justify="left" if side == "l" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


# -------------------------------------------------------------------------------------------------
# `build` and `finish`.


def build_result(
    result: BuildResult, *, as_json: bool, standing: str = "complete and up to date"
) -> None:
    """Print what a build did and what the store holds now; `standing` is said if it did nothing."""
    seconds = result.working_seconds
    if as_json:
        print_json(
            result,
            working_seconds=seconds,
            bytes_per_second=result.built.input_bytes / seconds if seconds > 0 else None,
            tokens_per_second=result.built.tokens / seconds if seconds > 0 else None,
        )
        return
    store = visible(result.store)
    whole = store if result.part is None else f"part {result.part} of {store}"
    if result.nothing_to_do:
        print(f"nothing to do: {whole} is {standing}")
    facts(*build_rows(result))
    for warning in result.warnings:
        make_console(stderr=True).print(visible(f"warning: {warning}"), soft_wrap=True)
    store = shlex.quote(result.store)
    if result.part is not None and not result.nothing_to_do:
        next_steps(f"tokenmill finish {store}    when all parts are built")
    else:
        layout = f"tokenmill layout {store} --seq-len 2048"
        next_steps(f"tokenmill inspect {store}", f"tokenmill verify {store}", layout)


def prune_result(result: PruneResult, *, as_json: bool) -> None:
    """Print what went, or would."""
    if as_json:
        print_json(result)
    elif not result.files:
        print(f"nothing to do: {visible(result.store)} has no snapshots")
    else:
        verb = "would go" if result.dry_run else "removed"
        names = ", ".join(result.snapshots) or "none; what was left of them"
        what = f"{count(result.files, 'file')}, {format_size(result.bytes)}"
        facts(("store", result.store), ("snapshots", names), (verb, what))


def build_rows(result: BuildResult) -> Iterator[Row]:
    """The facts of a build, in the order of a reader's questions."""
    totals, built, kept = result.totals, result.units_built, result.units_resumed
    yield "store", visible(result.store)
    yield "part", "" if result.part is None else f"{result.part}; what follows is of it alone"
    is_pairs = result.pairs is not None
    yield "documents", f"{count(totals.documents)}{left_out(totals, pairs=is_pairs)}"
    yield "tokens", tokens_text(result)
    yield "end token", "" if result.eos is None else end_token(result.eos)
    yield "pairs", pairs_text(result.pairs)
    yield "splits", splits_text(result.splits)
    if result.lengths is not None:
        yield from _length_rows(result.lengths, totals)
    if totals.rejected:
        where = visible(shlex.quote(f"{result.store}/rejects"))
        unlisted = totals.unlisted
        listed = f"all but {count(unlisted)}, which are counted" if unlisted else "each"
        rows = count(totals.rejected, "row")
        yield "rejects", f"{rows}; file, row and reason of {listed}: {where}"
    yield "unknown", unknown_text(totals, result.unknown)
    yield "not read", first_of(result.skipped_files)
    yield "template", version_text(result.template_version)
    yield "engine", _engine(result)
    if result.snapshot is not None:
        yield "grown", f"as it was before, for runs that go on: snapshot {result.snapshot}"
    if result.nothing_to_do:
        return
    if not built:
        yield "units", f"{count(kept)}, all built before" if kept else "none of the input"
        yield "time", duration(result.seconds)
        return
    yield "units", f"{count(built)} built" + (f", {count(kept)} kept from before" if kept else "")
    if (seconds := result.working_seconds) > 0:
        tokens = f"{result.built.tokens / seconds:,.0f} tokens/s"
        caveat = "start-up left out" if seconds > SHORT_SECONDS else "so short a run says little"
        yield "rate", f"{rate(result.built.input_bytes, seconds)}, {tokens} ({caveat})"
    startup = f"{duration(result.startup_seconds)} of it start-up"
    workers = count(result.workers, "worker")
    if idle := result.idle_workers:
        workers += f", {count(idle)} of them idle for lack of units"
    yield "time", f"{duration(result.seconds)}, {startup}, with {workers}"
    used = of_budget(result.peak_memory_bytes, result.memory_budget_bytes)
    yield "memory", f"{used} at the peak"
    if (stage := result.limiting_stage) is not None:
        yield "limited by", f"{stage} ({stage_shares(result.stage_seconds)})"


def tokens_text(of: BuildResult | Inspection) -> str:
    """How many tokens there are, of which type, and how much text they hold."""
    ratio = of.bytes_per_token
    held = "" if ratio is None else f", {ratio:.2f} bytes of text per token"
    return f"{count(of.totals.tokens)} as {of.dtype}{held}"


def unknown_text(totals: Counts | None, unknown: UnknownFacts | None) -> str:
    """How much of the text the tokenizer does not know, and what; '' where it knows everything."""
    if totals is None or unknown is None or not totals.lost_bytes:
        return ""
    became = "were left out"
    if unknown.id is not None:
        became = f"became {count(totals.unknown_ids)} {unknown.token}"
    part = small_share(totals.lost_bytes, totals.text_bytes)
    lost = count(totals.lost_characters, "character")
    most = examples(unknown.examples)
    return visible(f"{lost}, {part} of the text, {became}; most often: {most}")


def end_token(eos: BoundaryToken) -> str:
    """The token after every document."""
    return f"{visible(eos.token)} ({eos.id}) after every document"


def left_out(totals: Counts, *, pairs: bool = False) -> str:
    """' of 12 rows (1 empty, 2 rejected)'; an empty string where each row is one document."""
    kinds = {"empty": totals.empty, "rejected": totals.rejected, "beyond the limit": totals.skipped}
    parts = [f"{count(number)} {word}" for word, number in kinds.items() if number]
    if totals.filtered:
        undecided = f", {count(totals.undecided)} of them for lack of a value"
        by_condition = f"{count(totals.filtered)} left out by --where"
        parts.append(by_condition + (undecided if totals.undecided else ""))
    if totals.forgotten:
        parts.append(f"{count(totals.forgotten)} forgotten")
    if totals.split_rows and not pairs:
        parts.append(f"{count(totals.split_rows)} split into {count(totals.pieces)}")
    return f" of {count(totals.rows, 'row')} ({', '.join(parts)})" if parts else ""


def splits_text(splits: Mapping[str, SplitTotals]) -> str:
    """One line for each split."""
    return "\n".join(
        f"{visible(name)}: {count(split.documents, 'document')}, {count(split.tokens, 'token')},"
        f" {count(split.shards, 'shard')}"
        for name, split in splits.items()
    )


def _length_rows(lengths: RowLengths, totals: Counts) -> Iterator[Row]:
    """Tokens per row, what became of those that were too long, and what limits would take away."""
    if (tokens := lengths.counted_tokens) is not None:
        counted = f"{count(tokens)} tokens ({share(tokens, totals.tokens)})"
        yield "counted", f"{counted} count for the loss"
    extent = f"{count(lengths.shortest)} to {count(lengths.longest)} tokens a row"
    text = f"{extent}, mean {lengths.mean:,.1f}; percentiles: {percentiles(lengths)}"
    if (limit := lengths.max_length) is not None:
        over, split = f"over {count(limit)} tokens", lengths.split_rows
        if lengths.too_long == "reject":
            text += f"\n{count(lengths.rejected_too_long, 'row')} {over} rejected"
        elif lengths.too_long == "truncate" and lengths.cut_off is not None:
            text += f"\n{count(lengths.cut_off, 'row')} {over} cut off"
        elif lengths.too_long == "truncate":
            at_limit = f"{count(lengths.at_limit, 'row')} of {count(limit)} tokens"
            text += f"\n{at_limit}: cut off, or as long"
        else:
            text += f"\n{count(split, 'row')} {over}"
            text += f" split into {count(lengths.pieces, 'document')}" if split else ""
            if split and (silent := lengths.silent_documents):
                text += f", in {count(silent)} of which nothing counts"
    yield "lengths", text
    rows = totals.documents - totals.pieces + totals.split_rows
    cuts = [
        f"at {count(cut.limit)} tokens: {count(cut.rows, 'row')} ({share(cut.rows, rows)}),"
        f" {count(cut.tokens, 'token')} ({share(cut.tokens, totals.tokens)})"
        for cut in lengths.cuts
    ]
    yield "cut off", "\n".join(cuts)


def first_of(skipped: Sequence[tuple[str, str]]) -> str:
    """Files that were left out, with the reason, the first of them by name."""
    lines = [visible(f"{path}: {reason}") for path, reason in skipped[:3]]
    if len(skipped) > len(lines):
        lines.append(f"... and {count(len(skipped) - len(lines), 'more file')}")
    return "\n".join(lines)


def _engine(result: BuildResult) -> str:
    engine, reference = result.engine, result.reference
    if engine == reference:
        return f"{engine} ({result.engine_note})" if result.engine_note else engine
    checked = count(result.checked_documents, "document")
    if result.checked_bytes:
        checked += f" ({count(result.checked_bytes, 'byte')} encoded again in this run)"
    if not result.redone_units:
        return f"{engine}, equal to {reference} on the probes and on {checked} of this input"
    again = f"{count(len(result.redone_units), 'unit')} done again by {reference}"
    differed = f"differed from {reference} on {count(result.mismatches)} of {checked}"
    return f"{engine}, {differed}; {again}"


def stage_shares(stage_seconds: Mapping[str, float]) -> str:
    """'encode 61.0%, parse 20.1%, ...' of the workers' time, largest first.

    Writing goes on beside the others: it takes none of that time but what is waited for it.
    """
    stages = {name: seconds for name, seconds in stage_seconds.items() if name != "write"}
    total = sum(stages.values())
    largest = sorted(stages.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {share(seconds, total)}" for name, seconds in largest if seconds)
    written = stage_seconds.get("write", 0.0)
    return shares + (f"; writes took {duration(written)} beside them" if written else "")


# -------------------------------------------------------------------------------------------------
# `inspect`. What a manifest says may be new, or another program's: words that are not known are
# shown as they are.

BAR_COLUMNS = 40
SHOWN_SOURCES = 8
SHOWN_GROUPS = 40
# How the names of groups of small files begin; those of older stores, whose files are one row each.
GROUP, GROUP_OF_TEXTS = "group//", "text//"
SHOWN_TOKENS = 2000  # of one document; --json gives all of them
EVEN, ODD = "black on light_sky_blue1", "black on light_goldenrod1"
# Of tokens that do not count for the loss.
PALE_EVEN, PALE_ODD = "grey42 on grey89", "grey42 on grey82"
OPEN, CLOSE = "[[", "]]"  # around tokens that count, where there is no colour
# Says in the configuration of a store that its tokens came from elsewhere, and in which format.
IMPORT = "import"
NEWLINE = "\u21b5"
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
SPECIAL_TOKENS = {
    "text": "special-token strings inside documents are ordinary characters",
    "parse": "special-token strings inside documents became special tokens",
    "reject": "documents with special-token strings were rejected",
}


def _in_words(words: Mapping[str, str], name: str, value: object) -> str:
    return words.get(str(value)) or f"{name} {value!r}, which is not known here"


def view_address(address: str) -> None:
    """Where the page is."""
    print(f"{address}\nCtrl-C ends it", flush=True)


def inspection_result(inspection: Inspection, *, as_json: bool) -> None:
    """Print the document that was asked for, or else all about the store."""
    if as_json:
        print_json(inspection, bytes_per_token=inspection.bytes_per_token)
    elif inspection.document is not None:
        document(inspection.document)
    elif inspection.groups is not None:
        groups(inspection.groups)
    else:
        overview(inspection)


def overview(inspection: Inspection) -> None:
    """Print everything but a document."""
    console = make_console()
    facts(*store_rows(inspection))
    of = of_split(inspection)
    if inspection.lengths is not None:
        console.print(heading("\ntokens per document", of))
        console.print(length_line(inspection.lengths))
        console.print(histogram(inspection.lengths.histogram, console=console))
        tokens, split = count(inspection.tokens_counted), inspection.split
        seen = f"{count(inspection.ids_seen)} of {count(inspection.vocab_size)} ids occur"
        total = inspection.totals.tokens if split is None else inspection.splits[split].tokens
        counted = f"of all {tokens} ({seen})"
        if inspection.tokens_counted < total:
            counted = f"in a sample of {tokens} tokens ({seen} in it)"
        console.print(heading("\nmost frequent tokens", f"{of}, {counted}"))
        console.print(top_tokens(inspection))
    console.print()
    store = shlex.quote(inspection.store)
    next_steps(f"tokenmill inspect {store} --doc 0", f"tokenmill verify {store}")


def groups(found: Sequence[Group]) -> None:
    """Print what each group has; of many, those with most tokens."""
    from rich.text import Text

    rows: list[tuple[str | Text, ...]] = [
        (count(each.documents), count(each.tokens), f"{each.share:.2%}", Text(visible(each.name)))
        for each in found[:SHOWN_GROUPS]
    ]
    if others := found[SHOWN_GROUPS:]:
        documents, tokens = (sum(getattr(g, n) for g in others) for n in ("documents", "tokens"))
        rest = f"{sum(each.share for each in others):.2%}"
        rows.append((count(documents), count(tokens), rest, f"{count(len(others))} others"))
    make_console().print(grid("rrrl", rows, "documents", "tokens", "share", ""), soft_wrap=True)


def heading(name: str, rest: str) -> Text:
    """A line that begins in bold."""
    from rich.text import Text

    return Text(name, style="bold").append(rest, "not bold")


def of_split(inspection: Inspection) -> str:
    return "" if inspection.split is None else f" of {visible(inspection.split)}"


def store_rows(inspection: Inspection) -> Iterator[Row]:
    """The facts of a store, in the order of a reader's questions."""
    totals, config, mask = inspection.totals, inspection.config, inspection.mask
    yield "store", visible(f"{inspection.store}, written by {inspection.created_by}")
    if (view := inspection.view) is not None:
        lines = [
            f"of {view.store}, {count(view.documents, 'document')}, {count(view.tokens)} tokens"
        ]
        yield "view", "\n".join(lines)
        yield "gone", "\n".join(map(_gone_text, view.gone))
    is_pairs = config.get("format") in (PREFERENCE, CHAT_PREFERENCE)
    yield "documents", f"{count(totals.documents)}{left_out(totals, pairs=is_pairs)}"
    yield "pairs", pairs_text(totals.documents // 2 if is_pairs else None)
    yield "tokens", tokens_text(inspection)
    yield "rows", shape_text(config)
    yield "where", visible(str(config.get("where") or ""))
    if mask is not None:
        counting = f"{count(mask.counted)} of {count(mask.tokens)} tokens{of_split(inspection)}"
        text = f"{counting} count for the loss ({share(mask.counted, mask.tokens)})"
        if mask.silent:
            silent = count(mask.silent, "document has", plural="documents have")
            text += f"; {silent} no token that counts: nothing is learned there"
        yield "mask", text
    if (fim := inspection.fim) is not None:
        held = f"{count(fim.reordered)} of {count(fim.documents, 'document')}{of_split(inspection)}"
        part = share(fim.reordered, fim.documents)
        yield "fim", f"{held} ({part}) reordered, with tokens of {fim.style}'s style"
    by_name = "\nby the names of files and folders" if config.get("split_by_name") else ""
    yield "splits", splits_text(inspection.splits) + by_name
    if reasons := [f"{count(rows)} {reason}" for reason, rows in inspection.rejects.items()]:
        where = visible(shlex.quote(f"{inspection.store}/rejects"))
        listed = f"all but {count(totals.unlisted, 'row')}" if totals.unlisted else "every row"
        yield "rejects", f"{', '.join(reasons)}; {listed}: {where}"
    yield "unknown", unknown_text(totals, inspection.unknown)
    yield "read back", recovery_text(inspection.recovery)
    yield "sources", sources_text(inspection)
    ids, fingerprint = f"{count(inspection.vocab_size)} ids", inspection.tokenizer_fingerprint[:12]
    yield "columns", visible(", ".join(inspection.columns))
    yield "tokenizer", f"{inspection.tokenizer_kind}, {ids}, sha256 {fingerprint}..."
    what = "row" if totals.pieces else "document"
    if config.get("too_long") == "truncate":
        what += " that was not cut off"
    boundaries = [
        f"{visible(each.token)} ({each.id}) at the {each.position} of every {what}"
        for each in (inspection.bos, inspection.eos)
        if each is not None
    ]
    yield "boundaries", ", ".join(boundaries) or "no token between documents"
    if IMPORT in config:
        yield "specials", "what became of special-token strings in the text is not known"
    else:
        yield "specials", _in_words(SPECIAL_TOKENS, "special_tokens", inspection.special_tokens)
    yield "engine", engines_text(inspection)
    yield "forgotten", "\n".join(_gone_text(each) for each in inspection.forgotten)
    yield (
        "snapshots",
        "\n".join(
            f"{each.name}: {count(each.documents, 'document')}, {count(each.tokens)} tokens"
            for each in inspection.snapshots
        ),
    )


def pairs_text(pairs: int | None) -> str:
    """How many pairs there are; empty where documents are no pairs."""
    return (
        ""
        if pairs is None
        else f"{count(pairs)}: a chosen and a rejected answer, each with the prompt"
    )


def version_text(version: object) -> str:
    """How a chat template is used that rewrites what was said; empty where none does."""
    if not isinstance(version, str):
        return ""
    kind, _, name = version.partition(":")
    if kind != "training":
        return "as it is; it may write earlier answers in another way, such as without reasoning"
    if name == "nemotron-3":
        return f"the {name} training version: its own text, all that the assistant writes counts"
    return f"the {name} training version: earlier answers keep their reasoning, all of it counts"


def shape_text(config: Mapping[str, object]) -> str:
    """What rows were made into; an empty string where each is the text of one field."""
    shape, template = config.get("format"), config.get("template")
    parts = []
    if shape == "chat":
        parts.append(f"chats; {_in_words(TRAINED_ON, 'train_on', config.get('train_on'))}")
        parts.append(version_text(config.get("template_version")))
    elif shape in (PREFERENCE, CHAT_PREFERENCE):
        kind = "texts" if shape == PREFERENCE else "lists of messages"
        names = config["chosen_field"], config["rejected_field"]
        parts.append(f"pairs of two documents, {names[0]} and {names[1]}, from {kind}")
    elif shape == CHAT_COMPLETION:
        parts.append(f"prompts and completions of messages; {config['completion_field']} counts")
    elif shape == "prompt-completion":
        prompt, completion = config.get("prompt_field"), config.get("completion_field")
        parts.append(f"{template or f'{{{prompt}}}{{{completion}}}'!r}; {completion} counts")
    elif template is not None:
        parts.append(repr(template))
    if "fim" in config:
        shares = f"{config['fim']:.0%} of documents reordered", f"{config['fim_spm']:.0%} of them"
        parts.append(f"{shares[0]} for fill-in-the-middle, {shares[1]} as suffix, prefix, middle")
    if (limit := config.get("max_length")) is not None:
        most = count(limit) if isinstance(limit, int) else repr(limit)
        parts.append(
            f"at most {most} tokens, {_in_words(LONG_ROWS, 'too_long', config.get('too_long'))}"
        )
    return "; ".join(filter(None, parts))


def sources_text(inspection: Inspection) -> str:
    texts = [one for one in inspection.sources if one.path.startswith(GROUP_OF_TEXTS)]
    groups = [one for one in inspection.sources if one.path.startswith(GROUP)]
    kinds = GROUP, GROUP_OF_TEXTS
    sources = [one for one in inspection.sources if not one.path.startswith(kinds)]
    lines = [
        f"{visible(source.path)} ({format_size(source.size)}, {count(source.rows, 'row')}"
        f"{_lost_text([source])})"
        for source in sources[:SHOWN_SOURCES]
    ]
    if len(sources) > SHOWN_SOURCES:
        lines.append(f"... and {count(len(sources) - SHOWN_SOURCES, 'more file')}")
    if groups:
        size, rows = format_size(sum(one.size for one in groups)), sum(one.rows for one in groups)
        lines.append(
            f"{count(len(groups), 'group')} of small files ({size}, {count(rows, 'row')}"
            f"{_lost_text(groups)})"
        )
    if texts:
        size, rows = format_size(sum(one.size for one in texts)), sum(one.rows for one in texts)
        lines.append(f"{count(rows, 'text file')} ({size})")
    return "\n".join(lines)


def recovery_text(recovery: Recovery | None) -> str:
    """Whether documents can be had back from their ids, and what is lost where they cannot."""
    if recovery is None:
        return ""
    compared = count(recovery.documents, "document")
    if recovery.same == recovery.documents:
        return f"{compared} compared with the source: decoded, each is its text"
    other = recovery.documents - recovery.same
    text = f"{count(other)} of {compared} compared with the source cannot be had back"
    text += f" ({share(other, recovery.documents)}): " + ", ".join(
        f"{what} lost in {count(number)}" for what, number in recovery.lost.items()
    )
    if (first := recovery.example) is not None:
        text += f"\n{first.source!r} became {first.decoded!r} (row {first.row} of {first.path})"
    return "\n".join(map(visible, text.split("\n")))


def _lost_text(sources: Sequence[SourceEntry]) -> str:
    lost, text = (sum(getattr(one, n) for one in sources) for n in ("lost_bytes", "text_bytes"))
    return f", {small_share(lost, text)} of the text unknown" if lost else ""


def engines_text(inspection: Inspection) -> str:
    lines = []
    for entry in inspection.engines:
        units = count(entry.units, "unit")
        line = f"{entry.name} {entry.version}, {units}"
        if (origin := inspection.config.get(IMPORT)) is not None:
            line = f"imported from {origin} by tokenmill {entry.version}, {units}"
        elif entry.name != entry.reference:
            checked = count(entry.checked_documents, "document")
            against = f"{entry.reference} {entry.reference_version}"
            line += f"; {checked} checked against {against}, {count(entry.mismatches)} differed"
        if entry.redone_units:
            line += f", {count(entry.redone_units, 'unit')} done again by {entry.reference}"
        lines.append(line)
    return "\n".join(lines)


def length_line(lengths: Lengths) -> str:
    extent = f"shortest {count(lengths.shortest)}, mean {lengths.mean:,.1f}"
    return f"{extent}, longest {count(lengths.longest)}\npercentiles: {percentiles(lengths)}"


def percentiles(lengths: Lengths | RowLengths) -> str:
    return ", ".join(f"{p}% {count(value)}" for p, value in lengths.percentiles.items())


def histogram(bins: Sequence[LengthBin], *, console: Console) -> Table:
    """One bar for each power of two."""
    total, largest = sum(one.documents for one in bins), max(one.documents for one in bins)
    block = "#" if console.options.ascii_only else "\u2588"
    rows = []
    for one in bins:
        bar = block * -(-BAR_COLUMNS * one.documents // largest)
        low, high = count(one.low), count(one.high - 1)
        documents = (count(one.documents), share(one.documents, total))
        rows.append((low, "" if low == high else f"to {high}", bar, *documents))
    return grid("rllrr", rows, gap=1)


def top_tokens(inspection: Inspection) -> Table:
    """Two columns of tokens, by frequency."""
    from rich.text import Text

    cells: list[tuple[str | Text, ...]] = [
        (str(top.id), Text(repr(top.text)), compact(top.count), f"{100 * top.share:.1f}%")
        for top in inspection.top_tokens
    ]
    half = -(-len(cells) // 2)
    right = [*cells[half:], *[()] * half]
    rows = [(*one, *other) for one, other in zip(cells[:half], right, strict=False)]
    return grid("rlrr" * 2, rows)


def document(view: DocumentView) -> None:
    """Print a document with the boundaries of its tokens, its ids and its origin."""
    console = make_console()
    coloured = console.is_terminal and not console.no_color
    all_tokens, shown = len(view.tokens), view.tokens[:SHOWN_TOKENS]
    tokens = count(all_tokens, "token")
    console.print(heading(f"document {count(view.number)} of {visible(view.split)}", f": {tokens}"))
    line = "" if view.line is None else f", line {count(view.line)}"
    piece = "" if view.pieces == 1 else f", piece {view.piece + 1} of {view.pieces}"
    if view.answer is not None:
        piece = f", with its {view.answer} answer"
    place = f"from {visible(view.path)}, row {count(view.row)}{line}{piece}\n"
    console.print(place, soft_wrap=True)
    if shown and shown[0].counts is not None:
        counting = sum(token.counts is True for token in view.tokens)
        how = "the grey ones do not" if coloured else f"those in {OPEN} {CLOSE}"
        said = f"{count(counting)} of {count(all_tokens)} count for the loss"
        console.print(f"{said} ({share(counting, all_tokens)}): {how}\n", soft_wrap=True)
    if view.fim is not None:
        console.print(f"{fim_text(view.fim)}\n", soft_wrap=True)
    console.print(with_boundaries(shown, coloured=coloured), soft_wrap=True)
    console.print("\nids", style="bold")
    console.print(" ".join(str(token.id) for token in shown), soft_wrap=True)
    if len(shown) < all_tokens:
        rest = count(all_tokens - len(shown), "more token")
        console.print(f"... and {rest}; all of them: add --json")


def fim_text(parts: FimParts) -> str:
    """How a document was reordered: its parts in their order, as tokens, and where it was cut."""
    spans = parts.spans
    said = [f"{name} tokens {count(a)} to {count(b)}" for name, (a, b) in parts.tokens.items()]
    text = f"reordered for fill-in-the-middle: {', '.join(said)}"
    if spans is None:
        return f"{text}; where its text was cut cannot be told"
    cut = f"cut at characters {count(spans.start)} and {count(spans.end)}"
    return f"{text}; {spans.order}, {cut} of {count(parts.num_characters)}"


def with_boundaries(tokens: Sequence[Token], *, coloured: bool) -> Text:
    """The text of the tokens, on two alternating backgrounds or with | between them.

    Tokens that do not count for the loss are grey; without colour, those that do are in [[ ]].
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
        cut = "|" if number else ""
        text.append(f"{CLOSE if closes else ''}{cut}{OPEN if opens else ''}{shown}")
    if inside:
        text.append(CLOSE)
    return text


# -------------------------------------------------------------------------------------------------
# `grep`.


def grep_result(found: GrepResult, *, as_json: bool) -> None:
    """Print where a text was found."""
    if as_json:
        print_json(found)
        return
    console = make_console()
    from rich.text import Text

    for match in found.matches:
        last = match.token + match.tokens - 1
        tokens = f"token {match.token:,}" + (f" to {last:,}" if match.tokens > 1 else "")
        where = f"{visible(match.source.path)}:{match.source.row}"
        console.print(
            f"document {match.document} of {match.split}, {tokens}, {where}", soft_wrap=True
        )
        around = Text(f"    {visible(match.before)}")
        around.append(visible(found.text), style="bold red").append(visible(match.after))
        console.print(around, soft_wrap=True)
    if found.matches:
        print()
    facts(*grep_rows(found))


def grep_rows(found: GrepResult) -> Iterator[Row]:
    of = "" if found.split is None else f" of the split {found.split!r}"
    where = f"{count(found.num_documents)} of {count(found.documents, 'document')}{of}"
    yield "found", f"{count(found.num_matches, 'match', plural='matches')} in {where}"
    if found.matches and len(found.matches) < found.num_matches:
        first = f"the first {count(len(found.matches))}"
        yield "shown", f"{first}; more with --limit {found.num_matches}"
    if found.written is not None:
        yield "note", f"the tokenizer writes this text as {found.written!r}: look for that"
    speed = f", {found.tokens / found.seconds:,.0f} tokens/s" if found.seconds > 0 else ""
    yield "time", f"{duration(found.seconds)}{speed}"
    if found.decoded_by is not None:
        yield "decoded", f"all of it, by {found.decoded_by}: ids of this tokenizer are no bytes"


# -------------------------------------------------------------------------------------------------
# `trace`.


def trace_result(found: TraceResult, *, as_json: bool) -> None:
    """Print where documents were shown, and will be."""
    if as_json:
        print_json(found)
        return
    console = make_console()
    at = f"before step {_step(found, found.step)}"
    for each in found.documents:
        of = f" of {each.name!r}" if each.name else ""
        where = f"{visible(each.source.path)}:{each.source.row}"
        title = f"document {each.document}{of}, {count(each.tokens, 'token')}, {where}"
        console.print(heading(title, ""), soft_wrap=True)
        times = count(each.num_shown, "time")
        less = f", the last {len(each.shown)}" if len(each.shown) < each.num_shown else ""
        print(f"shown {times} {at}{less}" if each.num_shown else f"never shown {at}")
        _showings(found, each, each.shown)
        print("to come" if each.coming else "and never will be")
        _showings(found, each, each.coming)
    if found.num_documents > len(found.documents):
        print(f"and {count(found.num_documents - len(found.documents), 'document')} more")


def ledger_result(found: LedgerResult, *, page: str | None, as_json: bool) -> None:
    """Print what a run has seen."""
    if page is not None or as_json:
        from tokenmill.history import ledger_croissant, ledger_markdown

        if page == "markdown":
            print(ledger_markdown(found), end="")
        elif page == "croissant":
            print(json.dumps(ledger_croissant(found), indent=1))
        else:
            print_json(found)
        return
    padding = found.places - found.seen
    facts(
        ("run", f"{found.run}, before step {_step(found, found.step)}"),
        ("seen", f"{count(found.seen, 'token')} in {count(found.rows, 'row')}"),
        ("padding", share(padding, found.places) if padding else ""),
    )
    console = make_console()
    headings = ("documents", "tokens", "seen", "share", "epochs")
    for source in found.sources:
        of = f"{source.name}: " if source.name else ""
        where = f"{source.store}, split {source.split}" if source.split else source.store
        console.print(heading(visible(f"{of}{where}"), ""), soft_wrap=True)
        whole = [_ledger_row(source, found.seen, "all")]
        console.print(grid("rrrrrl", whole, *headings, ""))
        for column, groups in source.by.items():
            rows = [_ledger_row(each, found.seen, each.name) for each in groups[:MOST_GROUPS]]
            console.print(grid("rrrrrl", rows, *headings, visible(column)))
            if len(groups) > MOST_GROUPS:
                print(f"and {count(len(groups) - MOST_GROUPS, 'group')} more: --json has them all")


MOST_GROUPS = 40  # of a column, in a ledger that is shown


def _ledger_row(each: LedgerGroup, seen: int, name: str) -> tuple[str, ...]:
    numbers = f"{each.documents:,}", f"{each.tokens:,}", f"{each.seen:,}"
    return *numbers, share(each.seen, seen), f"{each.epochs:.2f}", visible(name)


def _step(found: TraceResult | LedgerResult, step: int) -> str:
    """A step as the run counts it: from 1 in `tokenmill train`, with its micro-batch."""
    if found.micro_batches is None:
        return f"{step:,}"
    number, part = divmod(step, found.micro_batches)
    more = f" micro-batch {part + 1}" if found.micro_batches > 1 else ""
    return f"{number + 1:,}{more}"


def _showings(found: TraceResult, of: DocumentTrace, shown: Sequence[Showing]) -> None:
    if not shown:
        return
    rows = []
    for each in shown:
        last = each.first_token + each.tokens - 1
        is_whole = each.tokens == of.tokens
        row = "not known" if each.step is None else _step(found, each.step)
        place = ("-", "-") if each.rank is None else (f"{each.rank}", f"{each.place}")
        tokens = "all" if is_whole else f"{each.first_token:,} to {last:,}"
        ends = f"{each.at:,} to {each.at + each.tokens - 1:,}"
        rows.append((row, *place, ends, tokens, f"{each.epoch}"))
    headings = ("step", "rank", "row", "places in it", "tokens", "epoch")
    make_console().print(grid("rrrrrr", rows, *headings))


# -------------------------------------------------------------------------------------------------
# `plan`, `verify`, `layout`, `export`, `import`, `convert` and `train`.


def plan_result(planned: BuildPlan, *, as_json: bool) -> None:
    """Print what a build would do and take; all that comes from the sample is 'about'."""
    if as_json:
        print_json(planned)
        return
    facts(*plan_rows(planned))
    _apart(make_console(), grid("rrr", plan_cells(planned), *PLAN_HEADINGS))


PLAN_HEADINGS = ("workers", "time, about", "memory needed, about")


def plan_cells(planned: BuildPlan) -> list[Sequence[str]]:
    """What other numbers of workers would take."""
    return [
        (str(each.workers), duration(each.estimated_seconds), format_size(needed))
        for each in planned.by_workers
        if (needed := each.estimated_memory_bytes)
    ]


def plan_rows(planned: BuildPlan) -> list[Row]:
    """What a build would do and take; all that comes from the sample is 'about'."""
    units, done = planned.units_to_build, planned.units_complete
    number = "an unknown number of units" if units is None else count(units, "unit")
    to_build = f"{number}, {format_size(planned.bytes_to_build)} uncompressed"
    budget = f"{format_size(planned.memory_budget_bytes)} for {count(planned.workers, 'worker')}"
    largest = format_size(planned.max_document_bytes)
    start = f"{visible(planned.bos)} before, " if planned.bos else ""
    end = f"{visible(planned.eos)} after" if planned.eos else "nothing after"
    note = f" ({planned.engine_note})" if planned.engine_note else ""
    documents, bad = count(planned.sample_documents, "document"), planned.sample_rejected
    rejected = f", {count(bad, 'row')} rejected" if bad else ""
    return [
        ("input", f"{count(planned.files, 'file')}, {format_size(planned.input_bytes)}"),
        ("not read", first_of(planned.skipped_files)),
        ("to build", to_build + (f", {count(done)} are complete" if done else "")),
        ("documents", f"about {count(planned.estimated_documents)}"),
        ("tokens", f"about {count(planned.estimated_tokens)} as {planned.dtype}"),
        ("disk", f"about {format_size(planned.estimated_disk_bytes)}"),
        ("time", f"about {duration(planned.estimated_seconds)} beside the start-up"),
        ("memory", f"at most {budget}; rows of more than {largest} are rejected"),
        ("engine", f"{planned.engine}{note}"),
        ("boundaries", f"{start}{end} each document"),
        ("sample", f"{format_size(planned.sample_bytes)}, {documents}{rejected}"),
        ("unknown", _planned_unknown(planned)),
    ]


def _planned_unknown(planned: BuildPlan) -> str:
    unknown, lost = planned.unknown, planned.sample_lost_bytes
    if unknown is None:
        return ""
    became = "is left out" if unknown.id is None else f"becomes {unknown.token}"
    text = f"{small_share(lost, planned.sample_text_bytes)} of the sample's text {became}"
    if lost > planned.max_unknown * planned.sample_text_bytes:
        text += f", and a build refuses more than {small_share(planned.max_unknown, 1)}"
        text += " (--max-unknown)"
    return visible(f"{text}; most often: {examples(unknown.examples)}")


def verify_result(report: VerifyReport, *, store: str, as_json: bool) -> None:
    """Print what a verification found; every finding is one line."""
    if as_json:
        print_json(report, ok=report.ok, store=store)
        return
    console = make_console()
    facts(*verify_rows(report))
    for finding in report.findings:
        console.print(visible(f"{finding.file}: {finding.problem}"), style="red", soft_wrap=True)
    for note in report.notes:
        console.print(visible(f"note: {note.file}: {note.problem}"), soft_wrap=True)


def verify_rows(report: VerifyReport) -> Iterator[Row]:
    """The verdict and what it rests on."""
    found = count(len(report.findings), "problem")
    totals, right = report.totals, "whole and right"
    if totals is not None and totals.is_much_unknown:
        part = small_share(totals.lost_bytes, totals.text_bytes)
        right = f"whole, but {part} of the text is unknown to the tokenizer"
    yield "verdict", right if report.ok else f"NOT whole: {found}"
    files = f"{count(report.files)} of {format_size(report.bytes)}"
    yield "files", f"{files}: checksums, indexes, ids"
    if report.reference:
        again = f"{count(report.documents_reencoded, 'document')} encoded again"
        text = f"{again} by {report.reference}, {count(report.mismatches)} differ"
        if report.documents_unavailable:
            text += f"; {count(report.documents_unavailable)} could not be: their source is gone"
        yield "documents", text
    yield "unknown", unknown_text(report.totals, report.unknown)


def audit_result(report: AuditReport, *, as_json: bool) -> None:
    """Print what was read, each finding with the row that shows it, and what could not be known."""
    if as_json:
        print_json(report, ok=report.ok)
        return
    found = count(len(report.findings), "problem") if report.findings else "nothing found"
    read = f"{count(report.rows, 'row')} in {count(report.batches, 'batch', plural='batches')}"
    if report.ranks > 1:
        read += f" of {report.ranks} ranks"
    read += ", a whole epoch" if report.epoch_is_whole else ", not a whole epoch"
    tokens = (
        f"{count(report.places - report.padding)}, and {count(report.padding)} places of padding"
    )
    kinds = {"next": "the next token", "same": "the token itself", None: "neither"}
    if "labels: the batches have none" in report.unchecked:
        kinds[None] = "none"
    facts(("verdict", found), ("read", read), ("tokens", tokens), ("labels", kinds[report.labels]))
    console = make_console()
    for finding in report.findings:
        console.print()
        console.print(visible(f"{finding.kind}: {finding.problem}"), style="red", soft_wrap=True)
        rows = (("  see", finding.example), ("  do", finding.hint))
        facts(*(row for row in rows if row[1]))
    if report.remarks or report.unchecked:
        console.print()
    for text in report.remarks:
        console.print(visible(f"note: {text}"), soft_wrap=True)
    for text in report.unchecked:
        console.print(visible(f"not checked: {text}"), soft_wrap=True)


def view_result(result: ViewResult, *, as_json: bool) -> None:
    """Print what is in a view, and why other documents are not."""
    if as_json:
        print_json(result)
        return
    facts(*view_rows(result))
    next_steps(f"tokenmill inspect {shlex.quote(result.out)}")


def view_rows(result: ViewResult) -> Iterator[Row]:
    """What is in a view, and why other documents are not."""
    yield "view", f"{result.out} of {result.store}, {format_size(result.bytes)}"
    yield "documents", _of_all(result.documents, result.of_documents)
    yield "tokens", _of_all(result.tokens, result.of_tokens)
    for each in result.gone:
        yield "gone", _gone_text(each)
    if result.undecided:
        missing = f"of {count(result.undecided, 'document')} a value is missing that it asks for"
        yield "undecided", f"{missing}: they are gone too"
    if result.unknown:
        yield "passed over", _unknown_text(result.unknown)


def forget_result(result: ForgetResult, *, as_json: bool) -> None:
    """Print what was taken out of a store, or would be, and where it may still be."""
    if as_json:
        print_json(result)
        return
    if not result.documents:
        unknown = f": {_unknown_text(result.unknown)}" if result.unknown else ""
        print(f"nothing to do: {visible(result.store)} has none of these documents{unknown}")
        return
    would, verb = ("would be ", "would go") if result.dry_run else ("", "forgotten")
    anew = [count(result.units, "unit"), *(f"the column {name}" for name in result.annotations)]
    removed = [f"the snapshot {name}" for name in result.snapshots]
    removed += [f"the column {name}, of another state or damaged" for name in result.stale]
    rows = [
        ("store", result.store),
        ("resumed", "an earlier run had been interrupted" if result.resumed else ""),
        (verb, _of_all(result.documents, result.of_documents)),
        ("tokens", _of_all(result.tokens, result.of_tokens)),
        *(("reason", _gone_text(each)) for each in result.reasons),
        ("anew", f"{would}written: {listed(anew)}"),
        ("removed", f"{would}removed: {listed(removed)}" if removed else ""),
    ]
    if result.unknown:
        rows.append(("passed over", _unknown_text(result.unknown)))
    if result.linked:
        names = f"{count(len(result.linked), 'file')} ({result.linked[0]}, ...)"
        linked = f"{names} have other names outside the store, where they are as they were"
        rows.append(("linked", f"{linked}: remove exports that were made with --link"))
    rows.append(("not reached", "the sources, exports, copies and backups: see docs/forgetting.md"))
    facts(*rows)
    next_steps(f"tokenmill verify {shlex.quote(result.store)}")


def _unknown_text(lines: int) -> str:
    return f"{count(lines, 'line')} of the list, which no document has"


def _gone_text(gone: Gone | ForgottenReason) -> str:
    documents = f"{count(gone.documents, 'document')}, {count(gone.tokens, 'token')}"
    return f"{documents}: {gone.reason}"


def dedup_result(result: DedupResult, *, as_json: bool) -> None:
    """Print what is left of each store."""
    if as_json:
        print_json(result)
        return
    for view in result.views:
        view_result(view, as_json=False)
    if len(result.views) > 1:
        documents = _of_all(result.documents, result.of_documents)
        tokens = _of_all(result.tokens, result.of_tokens)
        facts(("in all", f"{documents} documents, {tokens} tokens"))


def annotate_result(result: AnnotateResult, *, as_json: bool) -> None:
    """Print which columns documents have now."""
    if as_json:
        print_json(result)
        return
    facts(*annotate_rows(result))
    names = [column.name for column in result.columns if column.type != "number"]
    store = shlex.quote(result.store)
    if names:
        next_steps(f"tokenmill inspect {store} --by {shlex.quote(names[0])}")
    else:
        where = shlex.quote(f'"{result.columns[0].name}" > 0.5')
        next_steps(f"tokenmill select {store} --where {where} -o some.view")


def annotate_rows(result: AnnotateResult) -> Iterator[Row]:
    """Which columns documents have now."""
    yield "documents", count(result.documents)
    for column in result.columns:
        values = f", {count(column.values, 'different value')}" if column.values else ""
        missing = f", none for {count(column.missing, 'document')}" if column.missing else ""
        yield column.name, f"{column.type}{values}{missing}"
    if result.unused_rows:
        unused = f"{count(result.unused_rows, 'row')} of {result.table}"
        yield "unused", f"{unused}: no document has the key"


def _of_all(number: int, whole: int) -> str:
    return f"{count(number)} of {count(whole)} ({share(number, whole)})"


def layout_result(report: LayoutReport, *, as_json: bool) -> None:
    """Print a line of numbers and a sentence for each packing."""
    if as_json:
        steps = {account.packing: report.steps(account) for account in report.accounts}
        sizes = {account.packing: account.array_bytes for account in report.accounts}
        print_json(report, steps=steps, array_bytes=sizes)
        return
    facts(layout_store(report))
    # Not a table of rich, which would cut off what is wider than the terminal.
    header, *lines = in_columns([LAYOUT_HEADINGS, *layout_cells(report)])
    console = make_console()
    console.print(f"\n{header}", style="bold", soft_wrap=True)
    console.print("\n".join(lines), end="\n\n", soft_wrap=True)
    facts(*((account.packing, account.sentence) for account in report.accounts))
    facts(*layout_rows(report))


LAYOUT_HEADINGS = (
    "packing",
    "rows",
    "tokens used",
    "padded",
    "split documents",
    "dropped",
    "targets",
)


def layout_store(report: LayoutReport) -> Row:
    """What was laid out."""
    split = "all splits" if report.split is None else f"split {visible(report.split)}"
    text = f"{count(report.documents, 'document')}, {count(report.tokens, 'token')}"
    if report.counted is not None:
        text += f", of which {count(report.counted)} count for the loss"
    return "store", f"{visible(report.store)}, {split}: {text}"


def layout_cells(report: LayoutReport) -> list[Sequence[str]]:
    """A line of numbers for each packing."""
    cells: list[Sequence[str]] = []
    for account in report.accounts:
        held = count(account.rows), count(account.used), share(account.padding, account.places)
        rest = count(account.split_documents), count(account.dropped), count(account.targets)
        cells.append((account.packing, *held, *rest))
    return cells


def in_columns(cells: Sequence[Sequence[str]], *, names: int = 1) -> Iterator[str]:
    """Lines of a table, its first columns at the left and the others at the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(
            cell.rjust(width) if place >= names else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )


def layout_rows(report: LayoutReport) -> Iterator[Row]:
    """What the numbers come to: which is best, steps, ranks, arrays."""
    from tokenmill.loader.packing import ROW_BYTES

    epochs = []
    for account in report.accounts:
        if (number := report.steps(account)) is not None and report.batch_size is not None:
            last = account.rows % report.batch_size
            partial = f", the last one of {count(last, 'row')}" if last else ""
            batch = count(report.batch_size, "row")
            epochs.append(f"{account.packing}: {count(number, 'step')} of {batch}{partial}")
    arrays = [
        f"{account.packing}: {count(account.rows)} x {count(account.seq_len)} x {ROW_BYTES} bytes,"
        f" {format_size(account.array_bytes)}"
        for account in report.accounts
    ]
    as_arrays = "as input and target (int32) and mask of fixed length, as an export to npz has them"
    loads = [
        f"{load.packing}: the slowest of {count(load.ranks, 'rank')} takes {load.as_drawn:.3f} of"
        f' the mean, {load.balanced:.3f} with balance="attention"'
        for load in report.loads
    ]
    if report.loads:
        load = report.loads[0]
        loads.append(
            f"{count(load.rows, 'row')} of each in an update, attention within documents; mean of"
            f" {count(load.updates, 'update')}"
        )
    yield "best", layout_advice(report)
    yield "epoch", "\n".join(epochs)
    yield "ranks", "\n".join(loads)
    yield "arrays", "\n".join((*arrays, as_arrays))


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


def export_result(result: ExportResult, *, as_json: bool) -> None:
    """Print what an export made."""
    if as_json:
        print_json(result)
        return
    if result.nothing_to_do:
        print(f"nothing to do: {visible(result.out)} is complete")
    facts(*export_rows(result))


def export_rows(result: ExportResult) -> Iterator[Row]:
    """What an export made."""
    linked = f", {format_size(result.linked_bytes)} of it links" if result.linked_bytes else ""
    speed = rate(result.bytes - result.linked_bytes, result.seconds)
    tokens = [f"{visible(name)}: {count(number)}" for name, number in result.splits.items()]
    yield "folder", result.out
    yield "format", result.format
    yield "documents", count(result.documents)
    yield "tokens", "\n".join(tokens)
    yield "files", f"{count(result.files)}, {format_size(result.bytes)}{linked}"
    yield from _part_rows(result, speed)


def import_result(result: ImportResult, *, as_json: bool) -> None:
    """Print what an import made."""
    if as_json:
        print_json(result)
        return
    if result.nothing_to_do:
        print(f"nothing to do: {visible(result.store)} is complete and up to date")
    facts(*import_rows(result))
    store = shlex.quote(result.store)
    next_steps(f"tokenmill inspect {store}", f"tokenmill verify {store}")


def import_rows(result: ImportResult) -> Iterator[Row]:
    """What an import made."""
    yield "store", result.store
    yield "format", result.format
    yield "documents", count(result.documents)
    yield "tokens", f"{count(result.tokens)} as {result.dtype}"
    yield "splits", splits_text(result.splits)
    yield "eos", result.eos
    yield from _part_rows(result, rate(result.bytes, result.seconds))


def _part_rows(result: ExportResult | ImportResult, speed: str) -> Iterator[Row]:
    kept = f", {count(result.parts_resumed)} kept from before" if result.parts_resumed else ""
    yield "parts", f"{count(result.parts)}{kept}"
    yield "time", duration(result.seconds) + (f", {speed}" if speed else "")
    yield "notes", "\n".join(map(visible, result.notes))


def train_result(result: TrainResult, *, as_json: bool) -> None:
    """The summary, once: under torchrun every rank runs the command, and the first one prints."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(result)
    else:
        facts(*train_rows(result))


def train_rows(result: TrainResult) -> Iterator[Row]:
    resumed = "" if result.resumed_from is None else f", from step {count(result.resumed_from)} on"
    yield "trained", f"{count(result.steps, 'step')}{resumed}, {count(result.tokens)} tokens"
    yield "parameters", count(result.parameters)
    val = "" if result.val_loss is None else f", on val {result.val_loss:.4f}"
    yield "loss", f"{result.loss:.4f}{val}"
    if result.tokens_per_second is not None:
        mfu = "" if result.mfu is None else f", {100 * result.mfu:.1f}% of the device's peak"
        yield "speed", f"{count(round(result.tokens_per_second))} tokens/s{mfu}"
    if result.wait_p99_ms is not None:
        waited = 100 * (result.wait_share or 0.0)
        build = result.build_wait_seconds
        of_it = f", {duration(build)} of it for the build" if build else ""
        p99 = f"p99 {result.wait_p99_ms:.3f} ms"
        yield "waiting", f"{waited:.2f}% of the time for data{of_it}, {p99}"
    yield "memory", format_size(result.memory_bytes)
    yield "time", duration(result.seconds)
    yield "checkpoint", str(result.checkpoint)
    if result.store is not None:
        yield "store", result.store
    for note in result.notes:
        yield "note", note


# -------------------------------------------------------------------------------------------------
# `diagnose`: the ways as a table, then what they mean, then what to type.

SWEPT_CELLS = ("tokens/s", "documents/s", "cores", "memory")
STATE_COLOURS = {"fed": "green", "borderline": "yellow", "starved": "red"}


def diagnosis_result(found: Diagnosis, *, report: PathInput | None, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        from tokenmill.diagnosis.values import as_json as diagnosis_json

        print(json.dumps(diagnosis_json(found), indent=2))
        return
    console = make_console()
    if found.sample is not None:
        text = count(found.sample.documents, "document")
        text += f", {format_size(found.sample.text_bytes)}"
        machine = found.machine.describe()
        facts(("text", text), ("tokenizer", found.tokenizer or ""), ("machine", machine))
        _apart(console, ways_table(found))
        _apart(console, calls_table(found))
        console.print()
        for number, need in enumerate(found.demands):
            total = f", {need.gpus} GPUs {compact(need.total)}" if need.gpus > 1 else ""
            rate = f"{compact(need.tokens_per_second)} tokens/s for a GPU{total}"
            facts(("" if number else "needed", f"{need.name}: {rate} ({need.origin})"))
        facts(("", found.demands[0].basis))
    for line in found.advice:
        _apart(console, visible(line))
    if found.sweep:
        _apart(console, sweep_table(found))
    if found.recommendation is not None:
        console.print()
        facts(("use", "\n".join(found.recommendation.reasons)))
    console.print()
    next_steps(*found.commands)
    facts(("report", "" if report is None else str(report)))


def _apart(console: Console, shown: Any) -> None:
    console.print()
    console.print(shown)


def ways_table(found: Diagnosis) -> Table:
    """What each way reached; fits into 80 columns."""
    from rich.text import Text

    states = {each.way: each.state for each in found.verdicts} if len(found.demands) == 1 else {}
    rows: list[Sequence[str | Text]] = [
        [*cells[:-1], Text(cells[-1], STATE_COLOURS.get(states.get(way.key, ""), ""))]
        for way, cells in zip(found.ways, ways_cells(found), strict=True)
    ]
    return grid("lrrrrrl", rows, *WAYS_HEADINGS)


WAYS_HEADINGS = ("way", "tokens/s", "documents/s", "ms for 1", "cores", "memory")


def ways_cells(found: Diagnosis) -> Iterator[list[str]]:
    """What each way reached, and what that means for the training."""
    from tokenmill.diagnosis.values import OTHER_IDS, STATES

    states = {each.way: each.state for each in found.verdicts} if len(found.demands) == 1 else {}
    for way in found.ways:
        cells = way.cells()
        shown = ["-" if way.problem is not None else cells[name] for name in WAYS_HEADINGS[1:]]
        word = OTHER_IDS if way.changes_ids else STATES.get(states.get(way.key, ""), "")
        yield [way.title, *shown, word]


def calls_table(found: Diagnosis) -> Table:
    """The line of each program that was timed."""
    rows = [(way.title, visible(way.call)) for way in found.ways if way.call]
    return grid("ll", rows, "this is what was timed", "whole programs: --scripts FOLDER, --report")


def sweep_table(found: Diagnosis) -> Table:
    """Every setting that was tried."""
    titles = {way.key: way.title for way in found.ways}
    rows = []
    for point in found.sweep:
        cells = point.cells()
        batch = "" if point.key == "build" else str(point.batch)
        shown = [cells[name] for name in SWEPT_CELLS]
        rows.append((titles[point.key], str(point.workers), batch, *shown))
    return grid("lrrrrrr", rows, "setting", "workers", "batch", *SWEPT_CELLS)


# -------------------------------------------------------------------------------------------------
# `demo`, as a story: what happens, why, and what came of it, step by step.

STORY_TOKENS = 60


def tell(step: Step) -> None:
    """Print one step of the demo."""
    from tokenmill.builder.progress import BuildResult
    from tokenmill.builder.verify import VerifyReport
    from tokenmill.demo import Comparison, Finished, Heading
    from tokenmill.inspection import Inspection

    console = make_console()
    match step:
        case Heading():
            console.print(f"\n{step.number}. {step.title}", style="bold cyan")
            console.print(step.why, style="dim")
        case str():
            console.print(step, soft_wrap=True)
        case BuildResult():
            facts(*build_rows(step))
        case VerifyReport():
            facts(*verify_rows(step))
        case Inspection():
            if step.lengths is not None:
                console.print(f"tokens per document: {length_line(step.lengths)}")
                console.print(histogram(step.lengths.histogram, console=console))
            if step.document is not None:
                coloured = console.is_terminal and not console.no_color
                number, first = step.document.number, step.document.tokens[:STORY_TOKENS]
                console.print(f"\nthe first {STORY_TOKENS} tokens of document {number}:")
                console.print(with_boundaries(first, coloured=coloured))
        case Comparison():
            rows, base = [], 0.0
            for name, way in step.ways.items():
                speed = way.text_bytes / way.seconds
                base = base or speed
                tokens = compact(way.tokens / way.seconds)
                rows.append((name, f"{speed / 1e6:,.1f}", tokens, f"{speed / base:,.1f}"))
            console.print(grid("lrrr", rows, "way", "MB/s", "tokens/s", "times faster"))
            console.print(
                "tokenmill also read the JSON, checked ids against the reference and wrote the"
                " store; the others only encoded text that was in memory already. Start-up is paid"
                " once, however large the input.",
                style="dim",
            )
        case Finished():
            console.print(step.text)
            next_steps(*step.commands)
        case _:
            facts(*step)
