"""The verb `diagnose`: time the ways, hold them against what the GPU takes, say what to do."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill._version import __version__
from tokenmill.builder.plan import usable_memory
from tokenmill.diagnosis.measure import (
    check_known,
    demands,
    eos_note,
    fix_commands,
    measure_all,
    usable_cores,
)
from tokenmill.diagnosis.values import (
    Diagnosis,
    Evidence,
    Machine,
    Verdict,
    findings,
    read_evidence,
)
from tokenmill.engines.describe import describe
from tokenmill.errors import UsageError
from tokenmill.files import shown
from tokenmill.options import DiagnoseOptions, with_options
from tokenmill.words import compact, count, format_size, listed, spoken, times

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokenmill.diagnosis.values import Demand, SampleFacts, WayResult


# -------------------------------------------------------------------------------------------------
# What the numbers mean, in plain words. Pure functions: values in, verdicts and sentences out.
#
# What a way feeds is held against what the GPUs take. With several GPUs each has a process of its
# own that does the same work, so a way that needs one core can run several times on a machine, and
# one that takes all cores cannot; scaling up to the number of cores is assumed to cost nothing.

STARVED, BORDERLINE, FED = "starved", "borderline", "fed"
LITTLE_TEXT = 1_000_000
FULL, DISTURBED = 0.9, 0.25
"""Share of the cores in use, and cores of other programs, from which on they get in the way."""
MARGIN = 1.25
"""A way that feeds less than this many times the need is called borderline: other work on the
machine, or a stretch of long documents, would make the GPU wait."""


def judge(way: WayResult, demand: Demand, *, cores: int) -> Verdict:
    """Hold a way against a demand."""
    copies = min(demand.gpus, max(1.0, cores / max(way.cpu_cores, way.workers)))
    feeds, needs = way.tokens_per_second * copies, demand.total
    state = STARVED if feeds < needs else BORDERLINE if feeds < MARGIN * needs else FED
    return Verdict(
        way=way.key,
        demand=demand.name,
        state=state,
        feeds_tokens_per_second=feeds,
        needs_tokens_per_second=needs,
        wait_share=max(0.0, 1 - feeds / needs),
        wait_share_in_turn=needs / (needs + feeds),
        times_too_slow=needs / feeds if feeds else float("inf"),
    )


def judge_all(
    ways: Sequence[WayResult], demands: Sequence[Demand], *, cores: int
) -> tuple[Verdict, ...]:
    """Every way that feeds a training and could be measured, against every demand."""
    return tuple(
        judge(way, demand, cores=cores)
        for demand in demands
        for way in ways
        if way.feeds and way.problem is None
    )


def sentence(verdict: Verdict, way: WayResult, demand: Demand) -> str:
    """One way in one sentence."""
    feeds = f"feeds {compact(verdict.feeds_tokens_per_second)} tokens/s"
    needs = compact(verdict.needs_tokens_per_second)
    if verdict.state != STARVED:
        enough = "fast enough" if verdict.state == FED else "just enough, with nothing to spare"
        about = "about " if demand.is_estimate else ""
        spare = 1 / verdict.times_too_slow
        how_much = times(spare) if verdict.state == FED else f"{spare:.2f} times"
        return f"{feeds}, {how_much} the {about}{needs} that {_who(demand)}: {enough}"
    takes = f"{_gpus(demand)} {needs}"
    wait = f"would wait at least {_percent(verdict.wait_share)} of the time"
    in_turn = (
        f", {_percent(verdict.wait_share_in_turn)} if the loop tokenizes between steps and not"
        " ahead of them"
        if way.in_loop
        else ""
    )
    slow = f"{times(verdict.times_too_slow)} too slow"
    who = "it" if demand.gpus == 1 else "they"
    return f"{feeds}; {takes}: {slow}, {who} {wait}{in_turn}"


def conclusion(demand: Demand, ways: Sequence[WayResult], verdicts: Sequence[Verdict]) -> list[str]:
    """What to do about one demand, in a few sentences."""
    mine = {verdict.way: verdict for verdict in verdicts if verdict.demand == demand.name}
    usual = [verdict for key, verdict in mine.items() if key != "loader"]
    if not usual:
        return []
    takes = f"{_gpus(demand)} {compact(demand.total)} tokens/s"
    takes = takes[:1].upper() + takes[1:]
    by_key = {way.key: way for way in ways}
    if any(verdict.state == FED for verdict in usual):
        return [*_no_need(usual, by_key, takes)]
    best = max(usual, key=lambda verdict: verdict.feeds_tokens_per_second)
    title = by_key[best.way].title
    if best.state == BORDERLINE:
        said = (
            f"{takes}, and the best of the usual ways ({title}) just keeps up, with"
            f" {1 / best.times_too_slow:.2f} times that. Other work on this machine would make the"
            " GPU wait. Tokenize once, before you train, and it is no longer close."
        )
    else:
        said = (
            f"{takes}, and no usual way feeds that from this machine. The best, {title}, is"
            f" {times(best.times_too_slow)} too slow: the GPU would wait at least"
            f" {_percent(best.wait_share)} of the time. Tokenize once, before you train."
        )
    return [said, *_loader_feeds(mine.get("loader"))]


def line_for(demand: Demand, ways: Sequence[WayResult], verdicts: Sequence[Verdict]) -> str:
    """One demand of several in one sentence: which ways are enough for it."""
    titles = {way.key: way.title for way in ways}
    mine = [verdict for verdict in verdicts if verdict.demand == demand.name]
    enough = [titles[verdict.way] for verdict in mine if verdict.state != STARVED]
    starved = [verdict for verdict in mine if verdict.state == STARVED]
    parts = [f"Model {demand.name}: {_gpus(demand)} {compact(demand.total)} tokens/s"]
    parts.append(f"enough: {listed(enough)}" if enough else "nothing here is enough")
    if starved:
        slowest = [f"{titles[v.way]} ({_percent(v.wait_share)} waiting)" for v in starved]
        parts.append(f"too slow: {listed(slowest)}")
    return "; ".join(parts) + "."


def disturbance(ways: Sequence[WayResult], *, cores: int) -> list[str]:
    """Whether other programs had so much of the machine that the rates are too low."""
    worst = max((way.other_cores for way in ways if way.problem is None), default=0.0)
    full = any(way.cpu_cores + way.other_cores > FULL * cores for way in ways)
    if worst < DISTURBED or not full:
        return []
    meanwhile = f"Other programs took up to {worst:.1f} of the {cores} cores meanwhile"
    return [f"{meanwhile}: on a quiet machine the rates are higher."]


def failures(ways: Sequence[WayResult]) -> list[str]:
    """The ways that could not be measured, with the reason."""
    return [f"{way.title} could not be measured: {way.problem}." for way in ways if way.problem]


def _no_need(
    usual: Sequence[Verdict], by_key: Mapping[str, WayResult], takes: str
) -> Iterator[str]:
    """Tokenizing in the loop is fast enough: say so, and what it costs."""
    enough = [verdict for verdict in usual if verdict.state == FED]
    # The least work that is enough.
    best = min(enough, key=lambda verdict: by_key[verdict.way].cpu_cores)
    way = by_key[best.way]
    slow = listed([by_key[verdict.way].title for verdict in usual if verdict.state == STARVED])
    but = f" (too slow: {slow})" if slow else ""
    yield (
        f"{takes}, and tokenizing while you train is fast enough for that: {way.title} feeds"
        f" {times(1 / best.times_too_slow)} as much{but}. The GPU's speed is no reason to change"
        " anything."
    )
    yield (
        f"What it costs is CPU, {way.cpu_cores:.1f} cores for as long as it runs flat out, again in"
        " every epoch and every run. Tokenizing once saves that."
    )


def _loader_feeds(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return []
    feeds = compact(verdict.feeds_tokens_per_second)
    feeds = f"From tokens on disk, tokenmill.Loader feeds {feeds}"
    if verdict.state == STARVED:
        slow = f"that too is {times(verdict.times_too_slow)} too slow"
        return [f"{feeds} tokens/s here: {slow}. More cores are needed, whatever the way."]
    return [f"{feeds} tokens/s, {times(1 / verdict.times_too_slow)} what is needed."]


def cost_of_building(build: WayResult | None, sample: SampleFacts) -> list[str]:
    """What tokenizing everything once would take on this machine."""
    if build is None or build.problem is not None or sample.text_bytes < LITTLE_TEXT:
        return []
    rate = build.text_bytes / build.seconds
    seconds = sample.estimated_text_bytes / rate + build.startup_seconds
    workers = count(build.workers, "worker")
    note = f"; {build.note}" if build.note else ""
    said = (
        f"Tokenizing the whole input once would take about {spoken(seconds)} here: tokenmill build"
        f" did {rate / 1e6:,.0f} MB of text a second with {workers}{note}."
    )
    return [said]


def little_text(sample: SampleFacts) -> list[str]:
    """Whether there was enough text for rates that mean something."""
    if sample.text_bytes >= LITTLE_TEXT:
        return []
    found = f"{count(sample.documents, 'document')}, {format_size(sample.text_bytes)}"
    return [f"There was little text to measure ({found}): take the rates as a hint, not a number."]


def seams(joined: WayResult | None) -> list[str]:
    """Whether joining documents changes their tokens."""
    if joined is None or joined.problem is not None:
        return []
    if not joined.compared_documents:
        return [f"Joining documents: {joined.note}."]
    if not joined.differing_documents:
        return []
    share = _percent(joined.differing_documents / joined.compared_documents)
    changed = f"{joined.differing_documents:,} of {joined.compared_documents:,} ({share})"
    said = (
        f"Joining documents changed the ids of {changed}: tokens merge over the border, so a model"
        " would not see the tokens that the tokenizer makes of a document by itself."
    )
    return [said]


def _gpus(demand: Demand) -> str:
    return _who(demand) + (" about" if demand.is_estimate else "")


def _who(demand: Demand) -> str:
    if demand.gpus > 1:
        return f"{demand.gpus} GPUs take"
    return "the GPU takes" if demand.is_estimate else "your GPU takes"


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.1%}"


@with_options(DiagnoseOptions)
def diagnose(options: DiagnoseOptions) -> Diagnosis:
    """Time ways to tokenize this text, and say which of them would starve a training.

    `tokens_per_second` is what one GPU takes; without it `model` and `gpu` give an estimate.
    `stalls`, `timeline` and `run` are files to be summed up and drawn beside it; with one of them
    `inputs` may be left out. `report` writes the HTML page.
    """
    check_known(options)
    page = None if options.report is None else Path(options.report)
    # Better known before a minute of measuring.
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UsageError(
            f"no report can be written to {str(page)!r}",
            hint="name a file in a folder that exists, such as --report report.html",
        )
    evidence = read_evidence(stalls=options.stalls, run=options.run, timeline=options.timeline)
    machine = Machine(
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        cpu=_cpu_name(),
        python=platform.python_version(),
        tokenmill=__version__,
    )
    found = Diagnosis(machine=machine, advice=tuple(findings(evidence)), evidence=evidence)
    if options.texts:
        found = _measured(options, found)
    elif evidence == Evidence():
        raise UsageError(
            "there is nothing to diagnose",
            hint="name text and a tokenizer: tokenmill diagnose data.jsonl --tokenizer T; "
            "or a run: tokenmill diagnose --run run/ --report report.html",
        )
    if page is not None:
        from tokenmill.diagnosis.page import write_report

        write_report(found, page)
    return found


def _measured(options: DiagnoseOptions, found: Diagnosis) -> Diagnosis:
    """With what the ways reached, and what it means."""
    if options.tokenizer is None:
        raise UsageError(
            "text alone cannot be timed: the tokenizer is missing",
            hint="name it: --tokenizer tokenizer.json",
        )
    info, cores = describe(str(options.tokenizer)), found.machine.cores
    measured = measure_all(options, info)
    ways, sample = measured["ways"], measured["sample"]
    needs = demands(options, vocab_size=info.vocab_size)
    verdicts = judge_all(ways, needs, cores=cores)
    by_key = {way.key: way for way in ways}
    if len(needs) == 1:
        said = conclusion(needs[0], ways, verdicts)
    else:
        said = [line_for(need, ways, verdicts) for need in needs]
    advice = (
        *said,
        *disturbance(ways, cores=cores),
        *little_text(sample),
        *cost_of_building(by_key.get("build"), sample),
        *seams(by_key.get("joined")),
        *failures(ways),
        *eos_note(info),
        *found.advice,
    )
    return dataclasses.replace(
        found,
        **measured,
        inputs=tuple(map(shown, options.texts)),
        tokenizer=str(options.tokenizer),
        demands=needs,
        verdicts=verdicts,
        advice=advice,
        commands=fix_commands(options, info, measured["recommendation"]),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
