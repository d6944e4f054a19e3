"""What `plan` expects, what `layout` counted and what `verify` found, as tables on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.cli.numbers import count, duration, share
from tokenmill.cli.output import make_console, print_json
from tokenmill.cli.render import Row, facts, first_of, with_note
from tokenmill.config import format_size
from tokenmill.visible import visible

if TYPE_CHECKING:
    from tokenmill.builder.estimate import BuildPlan
    from tokenmill.builder.verify import VerifyReport
    from tokenmill.loader.layouts.base import Account
    from tokenmill.loader.report import LayoutReport


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
    return [
        ("input", f"{count(planned.files, 'file')}, {format_size(planned.input_bytes)}"),
        ("not read", first_of(planned.skipped_files)),
        ("to build", f"{number}, {format_size(planned.bytes_to_build)} of input{done}"),
        ("documents", f"about {count(planned.estimated_documents)}"),
        ("tokens", f"about {count(planned.estimated_tokens)} as {planned.dtype}"),
        ("disk", f"about {format_size(planned.estimated_disk_bytes)}"),
        ("time", f"about {duration(planned.estimated_seconds)} beside the start-up"),
        ("memory", _memory(planned)),
        ("engine", with_note(planned.engine, planned.engine_note)),
        ("borders", _borders(planned)),
        ("sample", _sample(planned)),
    ]


def _memory(planned: BuildPlan) -> str:
    budget = f"{format_size(planned.memory_budget_bytes)} for {count(planned.workers, 'worker')}"
    return f"{budget}; rows of more than {format_size(planned.max_document_bytes)} are rejected"


def _borders(planned: BuildPlan) -> str:
    start = f"{visible(planned.bos)} before, " if planned.bos else ""
    end = f"{visible(planned.eos)} after" if planned.eos else "nothing after"
    return f"{start}{end} each document"


def _sample(planned: BuildPlan) -> str:
    rejected = (
        f", {count(planned.sample_rejected, 'row')} rejected" if planned.sample_rejected else ""
    )
    documents = count(planned.sample_documents, "document")
    return f"{format_size(planned.sample_bytes)}, {documents}{rejected}"


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
    facts((account.packing, layout_sentence(account)) for account in report.accounts)
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
        share(account.padding, _places(account)),
        count(account.split_documents),
        count(account.dropped),
        count(account.targets),
    )


def layout_sentence(account: Account) -> str:
    """What the numbers of a packing mean for training."""
    row = count(account.seq_len + 1, "token")
    padding = f"padding: {share(account.padding, _places(account))} of all places in rows"
    split = _documents(account.split_documents, account)
    if account.packing == "concat":
        return (
            "every token is used; split at the end of a row, to go on in the next without what"
            f" came before: {split}"
        )
    if account.packing == "best-fit":
        return f"every token is used; split, as longer than a row of {row}: {split}; {padding}"
    cut = _documents(account.cut_documents, account)
    lost = share(account.dropped, account.tokens)
    return f"{padding}; cut off after {row}: {cut}, which drops {lost} of all tokens"


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
    return f"best-fit: it keeps {_documents(whole, concat)} whole that concat splits, {cost}"


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


def _places(account: Account) -> int:
    return account.rows * (account.seq_len + 1)


def _documents(number: int, account: Account) -> str:
    return f"{count(number, 'document')} ({share(number, account.documents)})"
