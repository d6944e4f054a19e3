"""Results as tables on stdout: the pieces, and the summary of a build."""

from __future__ import annotations

import shlex
import textwrap
from typing import TYPE_CHECKING

from tokenmill.cli.numbers import count, duration, of_budget, rate, share
from tokenmill.cli.output import make_console, print_json
from tokenmill.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from tokenmill.builder.lengths import RowLengths
    from tokenmill.builder.progress import BuildResult
    from tokenmill.store.entries import SplitTotals
    from tokenmill.store.entries import SplitTotals as StoreSplitTotals
    from tokenmill.store.facts import Counts
    from tokenmill.store.facts import Counts as StoreCounts

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
        ("tokens", f"{count(totals.tokens)} as {result.dtype}{_ratio(result)}"),
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
    return [
        *rows,
        ("units", _units(result)),
        ("rate", _rate(result)),
        ("time", _time(result)),
        (
            "memory",
            f"{of_budget(result.peak_memory_bytes, result.memory_budget_bytes)} at the peak",
        ),
        ("limited by", _limited_by(result)),
    ]


def _ratio(result: BuildResult) -> str:
    ratio = result.bytes_per_token
    return "" if ratio is None else f", {ratio:.2f} bytes of text per token"


def _per_second(number: int, result: BuildResult) -> float | None:
    return number / result.working_seconds if result.working_seconds > 0 else None


def left_out(totals: Counts | StoreCounts) -> str:
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


def splits_text(splits: Mapping[str, SplitTotals] | Mapping[str, StoreSplitTotals]) -> str:
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
    shown = ", ".join(f"{p}% {count(value)}" for p, value in lengths.percentiles.items())
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


def _time(result: BuildResult) -> str:
    return (
        f"{duration(result.seconds)}, {duration(result.startup_seconds)} of it start-up,"
        f" with {count(result.workers, 'worker')}"
    )


def _limited_by(result: BuildResult) -> str:
    if result.limiting_stage is None:
        return ""
    return f"{result.limiting_stage} ({stage_shares(result.stage_seconds)})"


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
