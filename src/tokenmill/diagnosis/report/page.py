"""The page: what it says first, the order of its parts, and how it looks."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from tokenmill.config import format_size
from tokenmill.diagnosis.advice import sentence
from tokenmill.diagnosis.report import parts, runs
from tokenmill.diagnosis.report.markup import Markup, join, tag
from tokenmill.diagnosis.report.style import STYLE
from tokenmill.diagnosis.words import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tokenmill.diagnosis.values import Diagnosis

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(found: Diagnosis) -> str:
    """The whole page."""
    title = "tokenmill diagnose"
    head = join(
        (
            Markup('<meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            Markup('<meta name="color-scheme" content="light dark">'),
            Markup('<link rel="icon" href="data:,">'),
            tag("title", _title(found)),
            tag("style", Markup(STYLE)),
        )
    )
    body = tag(
        "main",
        tag("header", tag("p", title, class_="brand"), tag("h1", _title(found)), _facts(found)),
        *_sections(found),
        _footer(found),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _title(found: Diagnosis) -> str:
    if not found.ways:
        return "What the run says"
    if len(found.demands) != 1:
        return "What feeds a GPU from this machine"
    states = {verdict.state for verdict in found.verdicts if verdict.way != "loader"}
    if "fed" in states:
        return "Not starved: tokenizing while training is fast enough"
    if "borderline" in states:
        return "Close to starved: tokenizing while training just keeps up"
    return "Starved: tokenizing while training is too slow"


def _facts(found: Diagnosis) -> Markup:
    facts = []
    if (sample := found.sample) is not None:
        files = count(sample.files, "file")
        part = f"{count(sample.documents, 'document')}, {format_size(sample.text_bytes)} of text"
        facts += [
            ("Input", ", ".join(found.inputs)),
            ("Tokenizer", found.tokenizer or ""),
            ("Measured on", f"{part}, of {format_size(sample.input_bytes)} in {files}"),
        ]
    machine = found.machine
    facts.append(
        ("Machine", f"{machine.cores} cores, {format_size(machine.memory_bytes)}, {machine.cpu}")
    )
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts))


def _sections(found: Diagnosis) -> Iterator[Markup]:
    if found.advice:
        yield _section("In plain words", [tag("p", line) for line in found.advice], class_="words")
    if found.ways:
        yield from _measured(found)
    yield from _brought(found)


def _measured(found: Diagnosis) -> Iterator[Markup]:
    if found.commands:
        yield _section("What to type", [tag("pre", tag("code", line)) for line in found.commands])
    figures = [parts.throughput(found), parts.lengths(found), parts.memory(found)]
    yield _section("What was measured", [_grid([*figures, *parts.scaling(found)])])
    tables = [tag("h3", "Each way"), parts.ways_table(found)]
    if not found.sweep:
        tables.append(
            tag("p", "How it scales over workers and batch sizes: run with --sweep.", class_="says")
        )
    advised = parts.recommendation(found)
    if advised is not None:
        tables += [tag("h3", "Settings for this machine"), advised]
    yield _section("Numbers", tables)
    if found.demands:
        yield _section("What the GPU takes", [parts.needs_table(found), *_verdicts(found)])


def _verdicts(found: Diagnosis) -> list[Markup]:
    if len(found.demands) != 1:
        return []
    by_key = {way.key: way for way in found.ways}
    return [
        tag(
            "ul",
            *(
                tag(
                    "li",
                    tag("b", by_key[verdict.way].title),
                    " ",
                    sentence(verdict, by_key[verdict.way], found.demands[0]),
                    class_=verdict.state,
                )
                for verdict in found.verdicts
            ),
            class_="verdicts",
        )
    ]


def _brought(found: Diagnosis) -> Iterator[Markup]:
    evidence = found.evidence
    if evidence.stalls is not None:
        yield _section("Stall report", [_grid([runs.waits(evidence.stalls)])])
    if evidence.run is not None:
        yield _section("Training run", [_grid(runs.training(evidence.run))])
    if evidence.timeline is not None:
        yield _section("Time line of the build", [_grid(runs.build(evidence.timeline))])


def _grid(figures: Iterable[Markup | None]) -> Markup:
    return tag("div", *(each for each in figures if each is not None), class_="grid")


def _section(title: str, content: Iterable[Markup], **attributes: object) -> Markup:
    return tag("section", tag("h2", title), *content, **attributes)


def _footer(found: Diagnosis) -> Markup:
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    how = (
        "Every way ran in a fresh process, on the same documents, with the clock started when its"
        " tokenizer was loaded. Cores: CPU seconds of the process and its workers for each second."
        " Memory: the peak, with the interpreter and the sample in it. What a GPU takes is an"
        " estimate unless a rate was given. Measure your own loop with tokenmill.StallMeter."
        if found.ways
        else ""
    )
    made = f"tokenmill {found.machine.tokenmill}, Python {found.machine.python}, {now}."
    return tag("footer", tag("p", how) if how else "", tag("p", made))
