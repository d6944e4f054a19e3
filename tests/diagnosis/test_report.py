from __future__ import annotations

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

import tokenmill
from tokenmill.diagnosis.page import (
    Bar,
    Mark,
    Series,
    bar_plot,
    column_plot,
    line_plot,
    render,
    thinned,
)
from tokenmill.markup import tag

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Case

HOSTILE = "</title><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """All elements of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_a_page_has_every_plot_with_its_numbers(case: Case) -> None:
    page = case.report.read_text()
    for title in (
        "Tokens per second, each way",
        "Tokens per document",
        "Memory, each way",
        "Scaling over workers",
        "Batch size in the loop",
    ):
        assert f"<h3>{title}</h3>" in page
    plots = drawings(page)
    assert len(plots) == page.count("<figure ") == page.count("<h3>") - 2 == 5
    for plot in plots:
        assert plot.get("role") == "img"
        assert plot.get("aria-label")
    for way in case.found.ways:
        assert way.title in page
        assert html.escape(way.source) in page


def test_plots_have_few_lines_and_names_that_hold_on_a_machine_without_a_gpu(case: Case) -> None:
    page = case.report.read_text()
    for plot in drawings(page):
        lines = [each for each in plot.iter() if "line" in each.get("class", "").split()]
        assert len(lines) <= 4, plot.get("aria-label")
    assert "Memory of the GPU" not in page


def test_the_contents_lead_to_every_section(case: Case) -> None:
    page = case.report.read_text()
    (contents,) = re.findall(r"<nav aria-label=.Contents.>(.*?)</nav>", page)
    named = re.findall(r"href=.#([^\"']+)", contents)
    assert named == re.findall(r"<section id=.([^\"']+)", page)
    assert len(named) > 3


def test_nothing_in_a_page_comes_from_elsewhere(case: Case) -> None:
    tags = Tags(case.report.read_text()).found
    names = {name for name, _ in tags}
    # The list of contents leads to every part of the page.
    links = [attributes["href"] for name, attributes in tags if name == "a"]
    parts = [f"#{attributes['id']}" for name, attributes in tags if name == "section"]
    assert links == parts
    assert len(parts) >= 5
    assert not names & {"script", "img", "iframe", "object", "embed", "use", "image"}
    for name, attributes in tags:
        for key, value in attributes.items():
            assert not key.startswith("on"), (name, key)
            if key in ("href", "src"):
                assert value == "data:," or str(value).startswith("#")
            if key != "xmlns":
                assert "//" not in str(value), (name, key, value)
    [policy] = [a["content"] for n, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policy).startswith("default-src 'none'")


def test_names_of_the_user_cannot_become_markup(case: Case) -> None:
    way = dataclasses.replace(case.found.ways[0], title=HOSTILE, problem=None, note=HOSTILE)
    failed = dataclasses.replace(case.found.ways[1], problem=HOSTILE)
    found = dataclasses.replace(
        case.found,
        inputs=(HOSTILE, "bytes-\udcff-of-a-name", "bell\x07"),
        tokenizer=HOSTILE,
        ways=(way, failed, *case.found.ways[2:]),
        advice=(HOSTILE,),
        commands=(HOSTILE,),
        demands=(dataclasses.replace(case.found.demands[0], name=HOSTILE, origin=HOSTILE),),
    )
    page = render(found)
    plain = {name for name, _ in Tags(render(case.found)).found}
    tags = Tags(page)
    assert {name for name, _ in tags.found} == plain
    assert tags.text.count(HOSTILE) > 5
    assert "bytes-\\udcff-of-a-name" in tags.text
    assert "bell\\x07" in tags.text
    page.encode("utf-8")
    assert len(drawings(page)) == 5


def test_what_was_brought_along_is_drawn_without_any_input(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [
        {"step": step, "loss": 9 / step, "tokens_per_second": 5e5, "mfu": 0.4, "wait_share": 0.01,
         "wait_p50_ms": 0.1, "wait_p99_ms": 3, "memory_bytes": 4e10}
        for step in range(1, 900)
    ]  # fmt: skip
    lines.append({"step": 899, "val_loss": 1.0})
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    meter = tokenmill.StallMeter()
    for _ in meter.watch(range(30)):
        pass
    (tmp_path / "stalls.json").write_text(json.dumps(meter.report().as_json()))
    report = tmp_path / "report.html"
    found = tokenmill.diagnose(run=run, stalls=tmp_path / "stalls.json", report=report)
    assert found.ways == ()
    page = report.read_text()
    for title in (
        "Wait for data, step by step", "Tokens per second in training", "Loss",
        "Share of time waiting for data", "Memory of the training",
    ):  # fmt: skip
        assert f"<h3>{title}</h3>" in page
    assert len(drawings(page)) == 7
    # A thousand points would be a heavy page.
    assert len(page) < 400_000


@pytest.mark.parametrize("count", [1, 4])
def test_a_build_is_drawn_over_time_runs_behind_each_other(tmp_path: Path, count: int) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n' * 1000)
    timeline, report = tmp_path / "timeline.jsonl", tmp_path / "report.html"
    for number in range(count):
        tokenmill.build(
            tmp_path / "a.jsonl",
            tokenizer="bytes",
            out=tmp_path / f"store-{number}",
            monitor=timeline,
            serial=True,
        )
    tokenmill.diagnose(timeline=timeline, report=report)
    page = report.read_text()
    assert "<h3>CPU of the build</h3>" in page
    assert "<h3>Memory of the build</h3>" in page
    for line in ("its processes", "whole machine"):
        assert page.count(f"</i>{line}</li>") == 2
    assert len(drawings(page)) >= 2


@pytest.mark.parametrize(
    "plot",
    [
        bar_plot([], label="none", unit="x"),
        bar_plot([Bar(label="zero", value=0, shown="0")], label="l", unit="x"),
        bar_plot(
            [Bar(label="a", value=1e9, shown="1B"), Bar(label="b", value=2, shown="2")],
            marks=[Mark(value=3e3, label="needed"), Mark(value=1e12, label="far " * 12)],
            label="l",
            unit="x",
        ),
        line_plot([Series(name="one", points=[(3, 5)])], label="l", x_label="x", unit="y"),
        line_plot([Series(name="no", points=[])], label="l", x_label="x", unit="y"),
        line_plot(
            [Series(name="gaps", points=[(0, 1), (1, float("nan")), (2, 3), (3, float("nan"))])],
            label="l",
            x_label="x",
            unit="y",
        ),
        line_plot([Series(name="0", points=[(0, 0), (1, 0)])], label="l", x_label="x", unit="y"),
        column_plot([], label="l", unit="x", x_label="y"),
        column_plot(
            [Bar(label=str(n), value=n, shown=str(n)) for n in range(40)],
            label="l",
            unit="x",
            x_label="y",
        ),
    ],
)
def test_odd_values_still_make_a_drawing_of_finite_numbers(plot: str) -> None:
    drawing = ElementTree.fromstring(plot)
    assert "nan" not in plot
    assert "inf" not in plot
    for element in drawing.iter():
        for side in ("x", "x1", "x2", "cx"):
            if element.get(side):
                assert -1 <= float(str(element.get(side))) <= 401
        for side in ("width", "height"):
            assert float(element.get(side, "0")) >= 0


def test_thinning_keeps_what_it_is_told_to_keep() -> None:
    points = [(float(step), 1.0 if step != 777 else 50.0) for step in range(3000)]
    kept = thinned(points, max)
    assert len(kept) == 300
    assert max(value for _, value in kept) == 50
    assert thinned(points[:10], max) == points[:10]


def test_text_in_a_tag_is_escaped_and_markup_is_not() -> None:
    assert (
        tag("p", "<b>", tag("i", "&"), title='"') == '<p title="&quot;">&lt;b&gt;<i>&amp;</i></p>'
    )
