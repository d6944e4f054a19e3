"""What `plan` expects and what `verify` found, as tables on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.cli.numbers import count, duration
from tokenmill.cli.output import make_console, print_json
from tokenmill.cli.render import Row, facts, first_of, with_note
from tokenmill.config import format_size

if TYPE_CHECKING:
    from tokenmill.builder.estimate import BuildPlan
    from tokenmill.builder.verify import VerifyReport


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
    start = f"{planned.bos} before, " if planned.bos else ""
    end = f"{planned.eos} after" if planned.eos else "nothing after"
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
        console.print(
            f"{finding.file}: {finding.problem}", style="red", markup=False, soft_wrap=True
        )
    for note in report.notes:
        console.print(f"note: {note.file}: {note.problem}", markup=False, soft_wrap=True)


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
